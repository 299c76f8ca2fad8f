"""Sessions on disk: one file of keys and values each, and an index of what they are. Knows no HTTP and no engine.

A save writes a file of a new name, then names it in the index, then removes the old file; so a crash at any moment leaves the old one or
the new one, whole, and what is in neither is removed when the directory is opened again.

    index.sqlite                            what each session is: name, tokens, messages, and its file
    sess_<32 hex>.<8 hex>.safetensors       its keys and values, as `Session.save` writes them
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onekv.core.prefix import common_prefix
from onekv.errors import ConfigError, StateError

_log = logging.getLogger("onekv.server")
_VERSION: Final = 1
_ID: Final = re.compile(r"sess_[0-9a-f]{32}")
_FILE: Final = re.compile(r"(sess_[0-9a-f]{32})\.[0-9a-f]{8}\.safetensors")
_SCRATCH: Final = re.compile(r"\.sess_[0-9a-f]{32}\..*\.part")
_TABLE: Final = """CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, name TEXT NOT NULL, created REAL NOT NULL, salt TEXT,
    tokens BLOB NOT NULL, edited_at INTEGER, conversation TEXT NOT NULL, file TEXT NOT NULL, nbytes INTEGER NOT NULL)"""
_FIELDS: Final = "id, name, created, salt, tokens, edited_at, conversation, file, nbytes"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One session as it is on disk.

    Attributes:
        tokens:       [n] int64, those without a cell included
        edited_at:    as in `Session`
        conversation: messages and tools, or whatever else its owner needs; JSON
        file:         name in the directory
        nbytes:       of the file
    """

    id: str
    name: str
    created: float
    salt: str | None
    tokens: NDArray[np.int64]
    edited_at: int | None
    conversation: dict[str, Any]
    file: str = ""
    nbytes: int = 0


class SavedSessions:
    """The sessions of one model in a directory; those of other models stay as they are. One process at a time; calls must not overlap.

    Args:
        directory:   made if it is not there
        fingerprint: of the model
    Raises:
        ConfigError: the directory cannot be used, another process uses it, or its index is damaged or of another version.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        index = directory / "index.sqlite"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if index.is_symlink():
                raise ConfigError(f"{index} is a symbolic link; the index must be a file of its own")
            self._index = sqlite3.connect(index, isolation_level=None, check_same_thread=False, timeout=0.5)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot keep sessions in {directory}: {error}") from error
        try:
            self._all = self._open()
        except BaseException as error:
            self._index.close()
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise ConfigError(
                    f"another server keeps its sessions in {directory}; stop that one, or start this one with another --sessions-dir "
                    "or with --no-save"
                ) from error
            if isinstance(error, sqlite3.Error | OSError | ValueError | TypeError) and not isinstance(error, ConfigError):
                raise ConfigError(f"cannot keep sessions in {directory}: {error}") from error
            raise

    def _open(self) -> dict[str, Saved]:
        """Read the index, and make it agree with the files. Nothing is changed before all of it was read."""
        self._index.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._index.execute("BEGIN EXCLUSIVE")  # the lock is kept until close: one process at a time
        (version,) = self._index.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise ConfigError(f"the index of {self._directory} has version {version}; this onekv reads version {_VERSION}")
        self._index.execute(_TABLE)
        if not version:
            self._index.execute(f"PRAGMA user_version = {_VERSION}")
        rows = self._index.execute(f"SELECT fingerprint, {_FIELDS} FROM sessions").fetchall()
        read = [(fingerprint, _row(row)) for fingerprint, *row in rows]
        there = self._tidy({one.file for _, one in read})
        for _, one in read:
            if one.file not in there:
                _log.warning("%s is gone; its session is, too", self._directory / one.file)
                self._index.execute("DELETE FROM sessions WHERE id = ?", (one.id,))
        self._index.execute("COMMIT")
        return {one.id: one for fingerprint, one in read if fingerprint == self._fingerprint and one.file in there}

    def _tidy(self, named: set[str]) -> set[str]:
        """Remove our files that the index does not name; returns the names of all others."""
        there = set()
        for path in self._directory.iterdir():
            is_ours = _FILE.fullmatch(path.name) or _SCRATCH.fullmatch(path.name)
            if is_ours and path.name not in named and stat.S_ISREG(path.lstat().st_mode):
                _log.warning("%s was not saved to its end, or is no longer named; removed", path)
                path.unlink()
            else:
                there.add(path.name)
        return there

    def close(self) -> None:
        """Let another process have the directory."""
        self._index.close()

    def __iter__(self) -> Iterator[Saved]:
        return iter(list(self._all.values()))

    def get(self, session_id: str) -> Saved | None:
        """What is on disk of a session."""
        return self._all.get(session_id)

    def path(self, saved: Saved) -> Path:
        """Where its file is.

        Raises:
            StateError: there is no such file, or it is not a plain file.
        """
        path = self._directory / saved.file
        try:
            is_plain = stat.S_ISREG(path.lstat().st_mode)
        except OSError as error:
            raise StateError(f"cannot read the file of {saved.id}: {error.strerror}") from error
        if not is_plain:
            raise StateError(f"the file of {saved.id} is not a plain file, and is not read")
        return path

    def put(self, saved: Saved, write: Callable[[Path], object]) -> Saved:
        """Save a session, in place of what was saved of it. `write` is given the path of a new file.

        Raises:
            StateError: it cannot be written; what was saved before is unchanged.
        """
        if not _ID.fullmatch(saved.id):
            raise StateError(f"{saved.id!r} is no session's id")
        before = self._all.get(saved.id)
        path = self._directory / f"{saved.id}.{secrets.token_hex(4)}.safetensors"
        try:
            write(path)
            made = Saved(**{**vars(saved), "file": path.name, "nbytes": path.stat().st_size})
            self._index.execute(
                f"INSERT OR REPLACE INTO sessions ({_FIELDS}, fingerprint) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    made.id,
                    made.name,
                    made.created,
                    made.salt,
                    made.tokens.astype("<i4").tobytes(),
                    made.edited_at,
                    json.dumps(made.conversation),
                    made.file,
                    made.nbytes,
                    self._fingerprint,
                ),
            )
        except BaseException as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if isinstance(error, sqlite3.Error | OSError):
                raise StateError(f"cannot save {saved.id}: {error}; what was saved before is unchanged") from error
            raise
        self._all[made.id] = made
        if before is not None:
            self._unlink(before.file)
        return made

    def remove(self, session_id: str) -> None:
        """Forget a session, file and all. One that is not there is no error.

        Raises:
            StateError: the index cannot be written; nothing has changed.
        """
        saved = self._all.get(session_id)
        if saved is None:
            return
        try:
            self._index.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
        except sqlite3.Error as error:
            raise StateError(f"cannot remove {session_id}: {error}") from error
        del self._all[session_id]
        self._unlink(saved.file)

    def _unlink(self, file: str) -> None:
        try:
            (self._directory / file).unlink(missing_ok=True)
        except OSError as error:  # it is named nowhere, so the next start removes it
            _log.warning("cannot remove %s: %s", self._directory / file, error)

    def find(self, tokens: Sequence[int] | NDArray[np.int64], salt: str | None) -> tuple[Saved, int] | None:
        """The session with the longest beginning in common with a prompt, and how long that is; None: no beginning. Those whose keys and
        values are approximate are not offered.

        Cost: one token of each session, and a comparison with each that has the token the best so far does not go on with.
        """
        wanted = np.asarray(tokens, np.int64)
        best: Saved | None = None
        longest = 0
        for saved in self._all.values():
            if longest == wanted.size:
                break
            if (
                saved.tokens.size <= longest
                or saved.tokens[longest] != wanted[longest]
                or saved.salt != salt
                or saved.edited_at is not None
            ):
                continue
            length = common_prefix(saved.tokens, wanted)
            if length > longest:
                best, longest = saved, length
        return None if best is None else (best, longest)


def _row(row: Sequence[Any]) -> Saved:
    session_id, name, created, salt, tokens, edited_at, conversation, file, nbytes = row
    match = _FILE.fullmatch(file)
    if match is None or match[1] != session_id:
        raise ConfigError(f"the index names the file {file!r} for {session_id!r}; it was not written by this program")
    return Saved(
        id=session_id,
        name=name,
        created=created,
        salt=salt,
        tokens=np.frombuffer(tokens, "<i4").astype(np.int64),
        edited_at=edited_at,
        conversation=json.loads(conversation),
        file=file,
        nbytes=nbytes,
    )
