"""A session: a conversation that stays between requests, by name of an object instead of by its tokens.

Its cells may be taken back while nothing runs on it, as a cached prefix may; its token ids stay, and the next request evaluates again what
is gone. Everything that touches cells runs on the engine's thread; the methods wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from onekv import files
from onekv.cache import Sequence
from onekv.core.prefix import Key, common_prefix
from onekv.errors import BatchError, ConfigError, SessionBusy, StateError

if TYPE_CHECKING:
    from onekv.engine.engine import Engine

_T = TypeVar("_T")


class Session:
    """Made by `Engine.session`. Every method may be called from any thread.

    Attributes:
        name:   for people
        tokens: the ids it stands for: prompts and answers; the last one of an answer was not evaluated yet
        key:    as in `Request`
        edited_at: the first position whose keys and values are approximate, because tokens before it were removed by a shift; None: all
            are as if computed
    """

    def __init__(self, engine: Engine, key: Key = (), name: str = "session") -> None:
        self.name = name
        self.key = key
        self.tokens: list[int] = []
        self.edited_at: int | None = None
        self.used = 0  # when, by the engine's clock
        self.seq: Sequence | None = None  # its cells, while no request has them
        self.requests = 0  # that run on it, or wait to
        self._engine = engine

    @property
    def exact(self) -> bool:
        """Whether all its keys and values are those that evaluating its tokens would give."""
        return self.edited_at is None

    @property
    def busy(self) -> bool:
        """Whether a request runs on it, or waits to."""
        return self.requests > 0

    @property
    def is_known(self) -> bool:
        """Whether the engine keeps it: False once it was freed."""
        return self in self._engine.scheduler.sessions

    @property
    def num_cells(self) -> int:
        """How many of its tokens are in the buffer."""
        seq = self.seq
        try:
            return 0 if seq is None else len(seq)
        except BatchError:  # given up just now, by the engine's thread
            return 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of these cells, shared or not."""
        return self.num_cells * self._engine.cell_nbytes

    def fork(self, pos: int | None = None) -> Session:
        """A new session with the same tokens, or with those before `pos`. Shares the cells.

        Raises:
            BatchError: no such position.
            SessionBusy: a request runs on this one.
        """

        def fork() -> Session:
            stop = len(self.tokens) if pos is None else self._position("pos", pos)
            twin = self._engine.scheduler.new_session(self._engine, self.key)
            twin.tokens = self.tokens[:stop]
            twin.edited_at = self.edited_at if self.edited_at is not None and self.edited_at < stop else None
            if self.seq is not None:
                twin.seq = self._engine.scheduler.fork(self.seq, min(stop, len(self.seq)))
            return twin

        return self._do(fork)

    def truncate(self, pos: int) -> None:
        """Take back everything from a position on.

        Raises:
            BatchError: no such position.
            SessionBusy: a request runs on it.
        """
        self._do(lambda: self._cut(self.tokens[: self._position("pos", pos)], pos))

    def remove(self, p0: int, p1: int, mode: Literal["shift", "exact"] = "shift") -> None:
        """Take the positions [p0, p1) out of the middle.

        mode="shift" moves what follows down: instant, and approximate by nature, because what follows has seen what is gone.
        mode="exact" drops the cells of what follows; the next request evaluates these tokens again.

        Raises:
            BatchError: no such positions.
            ShiftError, WindowLost, CacheFull: "shift", and as `Sequence.remove` says.
            SessionBusy: a request runs on it.
            Nothing has changed in any of these cases.
        """
        if mode not in ("shift", "exact"):
            raise ConfigError(f'mode must be "shift" or "exact", got {mode!r}')

        def remove() -> None:
            first, last = self._position("p0", p0), self._position("p1", p1)
            if first > last:
                raise BatchError(f"positions [{p0}, {p1}) end before they begin", given=p1)
            kept = self.tokens[:first] + self.tokens[last:]
            if first == last:
                return
            if mode == "exact" or self.seq is None or len(self.seq) <= last:
                self._cut(kept, first)
                return
            seq = self.seq
            self.seq = None  # so that it does not give way to itself
            try:
                self._engine.scheduler.with_room(lambda: seq.remove(first, last, "shift"))
            finally:
                self.seq = seq
            self.tokens = kept
            self.edited_at = first if self.edited_at is None else min(self.edited_at, first)

        self._do(remove)

    def save(self, path: files.Target) -> int:
        """Write its cells to a file, as `KVCache.save`; the engine waits for a copy, and not for the disk. Returns how many tokens have
        cells and are in it.

        Raises:
            StateError: the file cannot be written.
            SessionBusy: a request runs on it.
        """

        def copied() -> files.State:
            cache, seq = self._engine.cache, self.seq
            if seq is not None:
                return cache.copied(seq)
            with self._engine.scheduler.new_sequence() as empty:
                return cache.copied(empty)

        state = self._do(copied)
        files.save(path, state)
        return int(state.rows[0].positions.size)

    def load(self, path: files.Target, edited_at: int | None = None) -> int:
        """Become what a file holds; the engine does not wait for the disk. Returns how many tokens.

        Args:
            edited_at: of the session that was saved; a file does not hold it
        Raises:
            StateError: as `KVCache.load`, or the file's positions are not 0, 1, 2 .., or it was not fed as tokens.
            CacheFull: not enough cells, though all that can be given up was.
            SessionBusy: a request runs on the session.
            The session is as before in any of these cases.
        """
        self._do(lambda: None)  # refused, if it is to be, before the disk is asked
        state = files.load(path)
        for row in state.rows:
            if not np.array_equal(row.positions, np.arange(row.positions.size)) or (row.tokens < 0).any():
                raise StateError("a session's file holds tokens at positions 0, 1, 2 ..; this one does not")

        def put() -> int:
            scheduler = self._engine.scheduler
            seq = scheduler.new_sequence()
            try:
                count = scheduler.with_room(lambda: self._engine.cache.put(state, seq))
            except BaseException:
                seq.free()
                raise
            self._drop()
            self.seq, self.tokens, self.edited_at = seq, seq.tokens.tolist(), edited_at
            return count

        return self._do(put)

    def free(self) -> None:
        """Give up its cells and tokens. Freeing twice does nothing.

        Raises:
            SessionBusy: a request runs on it.
        """

        def free() -> None:
            self._drop()
            self.tokens = []
            self._engine.scheduler.sessions.discard(self)

        if self.is_known:
            self._do(free)

    # --- on the engine's thread -------------------------------------------------------------------------------------------------

    def lend(self) -> Sequence | None:
        """Hand the cells to a request."""
        seq, self.seq = self.seq, None
        return seq

    def take_back(self, seq: Sequence | None, tokens: list[int] | None, edited_at: int | None) -> None:
        """Receive the cells of a request (None: it had none), and its tokens; None: it did not come to an end, so that the tokens are
        those from before, and of the cells those that are theirs."""
        if seq is not None:
            self._drop()
            self.seq = seq
        if tokens is not None:
            self.tokens, self.edited_at = tokens, edited_at
        elif self.seq is None:
            self.edited_at = None
        else:
            stop = common_prefix(np.asarray(self.tokens, np.int64), self.seq.tokens)
            if seq is not None and edited_at is not None and edited_at != self.edited_at:
                stop = min(stop, edited_at)  # beyond, equal tokens have seen others
            self._cut(self.tokens, stop)

    def evict(self) -> None:
        """Give up the cells."""
        self._drop()
        self.edited_at = None  # what is evaluated again is exact

    def _drop(self) -> None:
        if self.seq is not None:
            self.seq.free()
            self.seq = None

    def _cut(self, tokens: list[int], stop: int) -> None:
        """Stand for `tokens`, of which the first `stop` may have cells."""
        self.tokens = tokens
        if self.seq is not None and len(self.seq) > stop:
            self._engine.scheduler.truncate(self.seq, stop)
        if self.edited_at is not None and self.edited_at >= stop:
            self.edited_at = None

    def _position(self, name: str, pos: int) -> int:
        if isinstance(pos, bool) or not isinstance(pos, int) or not 0 <= pos <= len(self.tokens):
            raise BatchError(f"{name} must be a position from 0 to {len(self.tokens)}, the session's length; got {pos!r}")
        return pos

    def _do(self, action: Callable[[], _T]) -> _T:
        def checked() -> _T:
            if not self.is_known:
                raise BatchError("this session was freed")
            if self.busy:
                raise SessionBusy("a request runs on this session; wait for its end, or cancel it")
            return action()

        return self._engine.call(checked)
