"""Sessions on disk: whole at any moment, found by their tokens, nobody else's files touched."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from onekv.core.prefix import common_prefix
from onekv.errors import ConfigError, StateError
from onekv.server.saved import Saved, SavedSessions

A, B = "sess_" + "a" * 32, "sess_" + "b" * 32


def saved(session_id: str = A, tokens: list[int] | None = None, **fields: Any) -> Saved:
    made = Saved(
        id=session_id,
        name="a name",
        created=5,
        salt=None,
        tokens=np.array([1, 2, 3] if tokens is None else tokens, np.int64),
        edited_at=None,
        conversation={"turns": [{"role": "user", "content": "é"}]},
    )
    return replace(made, **fields)


def writes(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("sess_"))


def test_what_is_put_is_there_after_reopening(tmp_path: Path) -> None:
    store = SavedSessions(tmp_path / "new" / "place", "m")
    made = store.put(saved(salt="s", edited_at=2), writes("hello"))
    assert (made.nbytes, store.path(made).read_text()) == (5, "hello")
    store.close()
    store = SavedSessions(tmp_path / "new" / "place", "m")
    [again] = store
    assert {**vars(again), "tokens": again.tokens.tolist()} == {**vars(made), "tokens": [1, 2, 3]}
    store.remove(A)
    store.remove(A)
    assert list(store) == files_of(tmp_path / "new" / "place") == []
    store.close()


def test_a_write_that_fails_leaves_what_was_saved(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise StateError("the disk is full")

    store = SavedSessions(tmp_path, "m")
    made = store.put(saved(), writes("old"))
    with pytest.raises(StateError, match="disk is full"):
        store.put(saved(tokens=[9]), fails)
    with pytest.raises(StateError, match="no session's id"):
        store.put(saved("../evil"), writes("x"))
    assert store.get(A) == made
    assert files_of(tmp_path) == [made.file]
    store.close()


def test_index_and_files_are_made_to_agree_when_opened(tmp_path: Path) -> None:
    store = SavedSessions(tmp_path, "m")
    kept, lost = store.put(saved(), writes("kept")), store.put(saved(B), writes("lost"))
    store.close()
    (tmp_path / lost.file).unlink()
    orphan, scratch = tmp_path / f"{B}.00000000.safetensors", tmp_path / f".{B}.00000000.safetensors.1234.part"
    foreign = tmp_path / "notes.txt"
    for path in (orphan, scratch, foreign):
        path.write_text("x")
    store = SavedSessions(tmp_path, "m")
    assert [one.id for one in store] == [A]
    assert not orphan.exists()
    assert not scratch.exists()
    assert foreign.exists()
    assert store.path(kept).read_text() == "kept"
    store.close()


def test_case_S01_a_symbolic_link_is_neither_read_nor_followed_nor_removed(tmp_path: Path) -> None:
    outside, directory = tmp_path / "outside.txt", tmp_path / "sessions"
    outside.write_text("theirs")
    store = SavedSessions(directory, "m")
    made = store.put(saved(), writes("mine"))
    store.close()
    (directory / made.file).unlink()
    (directory / made.file).symlink_to(outside)
    link = directory / f"{B}.00000000.safetensors"
    link.symlink_to(tmp_path / "nowhere")
    store = SavedSessions(directory, "m")
    [listed] = store
    with pytest.raises(StateError, match="not a plain file"):
        store.path(listed)
    store.put(saved(tokens=[4]), writes("new"))  # writes a file of a new name, and takes the link away
    assert outside.read_text() == "theirs"
    assert link.is_symlink()
    store.close()
    (directory / "index.sqlite").unlink()
    (directory / "index.sqlite").symlink_to(outside)
    with pytest.raises(ConfigError, match="symbolic link"):
        SavedSessions(directory, "m")
    assert outside.read_text() == "theirs"
    through = tmp_path / "through"
    through.symlink_to(directory)
    (directory / "index.sqlite").unlink()
    SavedSessions(through, "m").close()  # the directory itself may be one


def test_sessions_of_another_model_stay_as_they_are(tmp_path: Path) -> None:
    store = SavedSessions(tmp_path, "one")
    made = store.put(saved(), writes("x"))
    store.close()
    store = SavedSessions(tmp_path, "other")
    assert list(store) == []
    assert store.find([1, 2, 3], None) is None
    store.close()
    assert files_of(tmp_path) == [made.file]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = SavedSessions(tmp_path, "m")
    with pytest.raises(ConfigError, match=r"another server keeps its sessions in .*--sessions-dir .*--no-save"):
        SavedSessions(tmp_path, "m")
    store.close()
    SavedSessions(tmp_path, "m").close()


@pytest.mark.parametrize("damage", ["text", "version", "file", "columns"])
def test_an_index_that_cannot_be_believed_is_refused_and_kept(tmp_path: Path, damage: str) -> None:
    store = SavedSessions(tmp_path, "m")
    made = store.put(saved(), writes("x"))
    store.close()
    index = tmp_path / "index.sqlite"
    if damage == "text":
        index.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    else:
        with sqlite3.connect(index) as connection:
            statements = {
                "version": "PRAGMA user_version = 9",
                "file": "UPDATE sessions SET file = '../../etc/passwd'",
                "columns": "UPDATE sessions SET conversation = '{'",
            }
            connection.execute(statements[damage])
        connection.close()
    before = index.read_bytes()
    with pytest.raises(ConfigError):
        SavedSessions(tmp_path, "m")
    assert index.read_bytes() == before
    assert (tmp_path / made.file).exists()


def test_the_longest_common_beginning_is_found(tmp_path: Path) -> None:
    store = SavedSessions(tmp_path, "m")
    ids = ["sess_" + c * 32 for c in "cdef"]
    for session_id, tokens, fields in (
        (ids[0], [1, 2, 3, 4], {}),
        (ids[1], [1, 2, 3, 4, 5, 6], {}),
        (ids[2], [1, 2, 3, 4, 5, 6, 7], {"salt": "s"}),
        (ids[3], [1, 2, 3, 4, 5, 6, 7], {"edited_at": 3}),
    ):
        store.put(saved(session_id, tokens, **fields), writes("x"))

    def found(tokens: list[int], salt: str | None = None) -> tuple[str, int] | None:
        match = store.find(tokens, salt)
        return None if match is None else (match[0].id, match[1])

    assert found([1, 2, 3, 4, 5, 6, 7, 8]) == (ids[1], 6)
    assert found([1, 2, 9]) in [(ids[0], 2), (ids[1], 2)]
    assert found([1, 2, 3, 4, 5, 6, 7], "s") == (ids[2], 7)
    assert found([9]) is None
    assert found([]) is None
    assert found([1, 2], "other") is None
    store.close()


def test_few_of_thousands_of_long_sessions_are_compared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5000 sessions of 4000 tokens that begin alike."""
    compare = Mock(side_effect=common_prefix)
    monkeypatch.setattr("onekv.server.saved.common_prefix", compare)
    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 30_000, 4000)
    store = SavedSessions(tmp_path, "m")
    for same in (0, 16, 3000):
        for i in range(5000):
            tokens = np.concatenate([wanted[:same], rng.integers(0, 30_000, 4000 - same)])
            store._all[f"{i}"] = replace(saved(), tokens=tokens)
        store._all["best"] = replace(saved(B), tokens=np.concatenate([wanted[:3500], [0]]))
        compare.reset_mock()
        found = store.find(wanted, None)
        assert compare.call_count <= 5
        assert found is not None
        assert (found[0].id, found[1]) == (B, 3500)
    store._all.clear()
    store.close()


_SAVING = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from onekv.server.saved import Saved, SavedSessions

directory = Path(sys.argv[1])
for attempt in range(12):
    child = os.fork()
    if not child:
        store = SavedSessions(directory, "m")
        first = int(max([one.created for one in store], default=0)) + 1
        for i in range(first, 10**6):
            fields = {"name": str(i), "created": i, "salt": None, "edited_at": None, "conversation": {"i": i}}
            one = Saved(id="sess_" + "a" * 32, tokens=np.full(9, i), **fields)
            store.put(one, lambda path: path.write_text(str(i) * 20000))
    time.sleep(0.05 + 0.0037 * attempt)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = SavedSessions(directory, "m")
    for one in store:
        i = one.conversation["i"]
        whole = store.path(one).read_text() == str(i) * 20000 and one.tokens.tolist() == [i] * 9 and one.name == str(i)
        print(i, whole, [name for name in os.listdir(directory) if "index" not in name] == [one.file])
    store.close()
"""


def test_a_process_that_is_killed_while_it_saves_leaves_the_old_or_the_new_session(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _SAVING, str(tmp_path)], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) >= 10
    assert len({number for number, _, _ in lines}) >= 10
    assert {(whole, tidy) for _, whole, tidy in lines} == {("True", "True")}
