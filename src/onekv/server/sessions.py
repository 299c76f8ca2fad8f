"""Sessions by name of an id: conversations that stay between requests, in the buffer, without their cells, or on disk.

The messages of a session and the tokens of its engine session are two views of one thing; the tokens are the truth. Everything here runs
on the event loop, but for what waits for the engine or the disk, which has a thread of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeVar

import numpy as np

from onekv.engine.engine import Engine
from onekv.engine.request import Request
from onekv.engine.session import Session
from onekv.errors import CacheFull, OneKVError, SessionBusy, StateError
from onekv.server import prompts
from onekv.server.errors import ApiError
from onekv.server.saved import Saved, SavedSessions
from onekv.server.schema import Edit, Place, Rewind

_T = TypeVar("_T")
_log = logging.getLogger("onekv.server")
_MOST: Final = 4096  # sessions at a time
_WORTH_READING: Final = 32  # tokens: fewer are evaluated in the time a file is read


@dataclass(eq=False)
class Kept:
    """One session.

    Attributes:
        session: its tokens and cells; None: it is on disk only
        kind:    what it has been used for; one session is either a chat or a text
        turns, tools: the conversation, as the template takes it
        lock:    held by the request that runs on it; others wait their turn
    """

    id: str
    name: str
    created: float
    salt: str | None
    session: Session | None
    kind: Literal["chat", "text"] | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_gone: bool = False

    @property
    def conversation(self) -> dict[str, Any]:
        """What is saved of it besides its tokens."""
        return {"kind": self.kind, "turns": list(self.turns), "tools": self.tools}

    def converse(self, conversation: dict[str, Any]) -> None:
        """Take over what was saved."""
        self.kind, self.turns, self.tools = conversation["kind"], list(conversation["turns"]), conversation["tools"]


class SessionStore:
    """All sessions of one server.

    Args:
        saved: the directory they are saved in; None: they are not
    """

    def __init__(self, engine: Engine, saved: SavedSessions | None) -> None:
        self._engine = engine
        self._saved = saved
        self._numbers = itertools.count(1)
        self._waiting = ThreadPoolExecutor(1, "onekv-sessions")  # for engine and disk
        self._all: dict[str, Kept] = {}
        for one in saved or ():
            kept = Kept(one.id, one.name, one.created, one.salt, None)
            kept.converse(one.conversation)
            self._all[one.id] = kept

    async def close(self) -> None:
        """Save what has changed, and let the directory go."""
        if self._saved is not None:
            for kept in list(self._all.values()):
                if kept.session is not None and not self._is_saved(kept):
                    try:
                        await self._wait(self._save, kept)
                    except OneKVError as error:
                        _log.error("%s could not be saved: %s", kept.id, error)
            await self._wait(self._saved.close)
        self._waiting.shutdown()

    async def _wait(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._waiting, partial(work, *args))

    # --- what there is ----------------------------------------------------------------------------------------------------------

    def get(self, session_id: str) -> Kept:
        """A session by its id.

        Raises:
            ApiError: there is none.
        """
        kept = self._all.get(session_id)
        if kept is None:
            raise ApiError(404, f"there is no session {session_id!r}", param="session", code="session_not_found")
        return kept

    def owner(self, session_id: str) -> dict[str, Any]:
        """What a map of cells says of an owner that is a session."""
        kept = self._all.get(session_id)
        return {} if kept is None else {"session": kept.id, "name": kept.name}

    async def listed(self) -> list[dict[str, Any]]:
        """All, the oldest first."""
        ordered = sorted(self._all.values(), key=lambda kept: kept.created)
        return await self._wait(lambda: [self._described(kept) for kept in ordered])

    async def describe(self, kept: Kept) -> dict[str, Any]:
        """One, with its messages and where their tokens are."""
        return await self._wait(lambda: {**self._described(kept), "messages": self._messages(kept)})

    def _described(self, kept: Kept) -> dict[str, Any]:
        session, on_disk = kept.session, self._on_disk(kept)
        tokens = len(self._tokens(kept))
        cells = 0 if session is None else session.num_cells
        state = "saved" if session is None else "evicted" if tokens > 1 and not cells else "loaded"
        return {
            "id": kept.id,
            "object": "session",
            "name": kept.name,
            "created": int(kept.created),
            "tokens": tokens,
            "cells": cells,
            "bytes": session.nbytes if session is not None else 0 if on_disk is None else on_disk.nbytes,
            "exact": session.exact if session is not None else on_disk is None or on_disk.edited_at is None,
            "state": state,
            "saved": self._is_saved(kept),
            "busy": kept.lock.locked(),
        }

    def _messages(self, kept: Kept) -> list[dict[str, Any]]:
        ends = self._ends(kept)
        starts = [0, *ends][: len(ends)]
        return [
            {"index": i, **turn, "start": start if None not in (start, end) else None, "end": end if None not in (start, end) else None}
            for i, (turn, start, end) in enumerate(zip(kept.turns, starts, ends, strict=True))
        ]

    def _ends(self, kept: Kept) -> list[int | None]:
        return prompts.spans(self._engine.model.text, kept.turns, kept.tools, self._tokens(kept)) if kept.turns else []

    def _tokens(self, kept: Kept) -> Sequence[int]:
        if kept.session is not None:
            return kept.session.tokens
        on_disk = self._on_disk(kept)
        return [] if on_disk is None else on_disk.tokens.tolist()

    def _on_disk(self, kept: Kept) -> Saved | None:
        return None if self._saved is None else self._saved.get(kept.id)

    def _is_saved(self, kept: Kept) -> bool:
        """Whether the disk has it as it is now."""
        on_disk = self._on_disk(kept)
        if on_disk is None or kept.session is None:
            return on_disk is not None
        same = np.array_equal(on_disk.tokens, kept.session.tokens) and on_disk.conversation == kept.conversation
        return same and on_disk.edited_at == kept.session.edited_at

    # --- operations -------------------------------------------------------------------------------------------------------------

    async def create(self, name: str | None, salt: str | None) -> Kept:
        """A new session, empty."""
        self._check_room()
        return self._add(await self._wait(self._engine.session, prompts.key_of(salt)), name, salt)

    def _check_room(self) -> None:
        if len(self._all) >= _MOST:
            raise ApiError(429, f"there are {_MOST} sessions, the most that are kept; delete one", code="too_many_sessions")

    def _add(self, session: Session, name: str | None, salt: str | None) -> Kept:
        kept = Kept(f"sess_{secrets.token_hex(16)}", name or f"session {next(self._numbers)}", int(time.time()), salt, session)
        session.name = kept.id  # names may repeat
        self._all[kept.id] = kept
        return kept

    async def fork(self, kept: Kept, place: Place) -> Kept:
        """A new session that has the beginning of another; shares its cells."""
        self._check_room()
        async with self._idle(kept):
            session = await self._wait(self._in_memory, kept)
            count, position = await self._wait(self._place, kept, place.message, place.position)
            twin = await self._wait(session.fork, position)
            made = self._add(twin, place.name, kept.salt)
            made.converse({**kept.conversation, "turns": kept.turns[:count]})
            return made

    async def rewind(self, kept: Kept, to: Rewind) -> None:
        """Take back the last messages, or everything from a position on."""
        async with self._idle(kept):
            session = await self._wait(self._in_memory, kept)
            if to.messages is not None:
                if to.messages > len(kept.turns):
                    raise _invalid("messages", f"the session has {len(kept.turns)}")
                message = len(kept.turns) - to.messages - 1
                count, position = await self._wait(self._place, kept, message, None)
            else:
                count, position = await self._wait(self._place, kept, None, to.position)
            await self._wait(session.truncate, position)
            del kept.turns[count:]

    def _place(self, kept: Kept, message: int | None, position: int | None) -> tuple[int, int]:
        """How many messages are kept, and how many tokens, when everything after a message or a position goes. Where a message has no
        clean end, the tokens end with the last one before it that has; what is missing is evaluated again."""
        length, ends = len(self._tokens(kept)), self._ends(kept)
        if message is not None:
            if message >= len(ends):
                raise _invalid("message", f"the session has {len(ends)}")
            return message + 1, max((end for end in ends[: message + 1] if end is not None), default=0)
        if position is None:
            return len(ends), length
        if position > length:
            raise _invalid("position", f"the session has {length} tokens")
        return sum(end is not None and end <= position for end in ends), position

    async def edit(self, kept: Kept, edit: Edit) -> None:
        """Remove a message, or positions that are whole messages, from the middle."""
        async with self._idle(kept):
            session = await self._wait(self._in_memory, kept)
            first, last, start, end = await self._wait(self._span, kept, edit)
            await self._wait(session.remove, start, end, edit.mode)
            del kept.turns[first:last]

    def _span(self, kept: Kept, edit: Edit) -> tuple[int, int, int, int]:
        """Which messages go, and which tokens."""
        ends = self._ends(kept)
        starts = [0, *ends][: len(ends)]
        if edit.message is not None:
            if edit.message >= len(ends):
                raise _invalid("message", f"the session has {len(ends)}")
            start, end = starts[edit.message], ends[edit.message]
            if start is None or end is None:
                raise _invalid("message", "the template gives this message no tokens of its own; rewind, and say it again")
            return edit.message, edit.message + 1, start, end
        start, end, length = edit.start or 0, edit.end or 0, len(self._tokens(kept))
        if not start < end <= length:
            raise _invalid("end", f"must be from {start + 1} to {length}, the session's length")
        if not kept.turns:
            return 0, 0, start, end
        if start not in starts or end not in ends:
            raise _invalid("start", "the positions must be those of whole messages")
        return starts.index(start), ends.index(end) + 1, start, end

    async def save(self, kept: Kept) -> None:
        """Write it to the directory.

        Raises:
            ApiError: there is no directory, or it cannot be written.
        """
        if self._saved is None:
            raise ApiError(400, "this server saves no sessions; start it without --no-save", code="not_saved")
        async with self._idle(kept):
            if kept.session is None:
                return  # it is there, and nowhere else
            try:
                await self._wait(self._save, kept)
            except StateError as error:
                raise ApiError(500, str(error), code="save_failed") from error

    def _save(self, kept: Kept) -> None:
        if self._saved is None or kept.session is None:
            return
        session = kept.session
        self._saved.put(
            Saved(
                id=kept.id,
                name=kept.name,
                created=kept.created,
                salt=kept.salt,
                tokens=np.array(session.tokens, np.int64),
                edited_at=session.edited_at,
                conversation=kept.conversation,
            ),
            session.save,
        )

    async def restore(self, kept: Kept) -> None:
        """Become what is on disk.

        Raises:
            ApiError: it was never saved.
            StateError: the file is damaged, or gone. CacheFull: there is no room. The session is as before.
        """
        async with self._idle(kept):
            if self._on_disk(kept) is None:
                raise ApiError(404, f"{kept.id} was not saved", code="not_saved")
            await self._wait(self._load, kept)

    def _load(self, kept: Kept) -> Session:
        on_disk = self._on_disk(kept)
        if self._saved is None or on_disk is None:
            raise StateError(f"{kept.id} was not saved")
        path = self._saved.path(on_disk)
        session = kept.session or self._engine.session(prompts.key_of(kept.salt))
        try:
            count = session.load(path, on_disk.edited_at)
        except BaseException:
            if kept.session is None:
                session.free()
            raise
        if session.tokens != on_disk.tokens[:count].tolist():
            session.truncate(0)
        session.name = kept.id
        session.tokens = on_disk.tokens.tolist()  # with those that had no cell
        kept.session = session
        kept.converse(on_disk.conversation)
        return session

    def _in_memory(self, kept: Kept) -> Session:
        """Its engine session, from disk if it is there only, or if its cells are."""
        if kept.session is None:
            return self._load(kept)
        if self._can_read_cells(kept):
            try:
                return self._load(kept)
            except (StateError, CacheFull) as error:  # its tokens are here, and are evaluated again
                _log.warning("%s is evaluated again: %s", kept.id, error)
        return kept.session

    def _can_read_cells(self, kept: Kept) -> bool:
        return kept.session is not None and kept.session.num_cells == 0 and len(kept.session.tokens) > 1 and self._is_saved(kept)

    async def delete(self, kept: Kept) -> None:
        """Remove it from memory and disk."""
        async with self._idle(kept):
            if kept.session is not None:
                await self._wait(kept.session.free)
            if self._saved is not None:
                await self._wait(self._saved.remove, kept.id)
            kept.is_gone = True
            del self._all[kept.id]

    @asynccontextmanager
    async def _idle(self, kept: Kept) -> Any:
        """Hold a session for an operation.

        Raises:
            SessionBusy: a request or another operation has it.
        """
        if kept.lock.locked():
            raise SessionBusy(f"a request runs on {kept.id}; wait for its end, or cancel it")
        async with kept.lock:
            yield

    # --- requests ---------------------------------------------------------------------------------------------------------------

    async def use(self, kept: Kept, kind: Literal["chat", "text"]) -> Session:
        """The engine session for a request that holds its lock.

        Raises:
            ApiError: it was deleted meanwhile, or is of the other kind.
        """
        if kept.is_gone:
            raise ApiError(404, f"there is no session {kept.id!r}", param="session", code="session_not_found")
        if kept.kind not in (None, kind):
            other = "/v1/chat/completions" if kept.kind == "chat" else "/v1/completions"
            raise _invalid("session", f"this one goes on with {other}")
        return await self._wait(self._in_memory, kept)

    def append(self, kept: Kept, kind: Literal["chat", "text"], new: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        """Note what a complete answer has added to the conversation."""
        kept.kind = kind
        kept.turns += new
        kept.tools = tools

    async def bring(self, request: Request) -> None:
        """Read a saved session whose beginning is also this prompt's, where more of it is on disk than in the buffer."""
        if self._saved is not None and request.session is None and not request.prompt_logprobs:
            await self._wait(self._bring, request)

    def _bring(self, request: Request) -> None:
        if self._saved is None:
            return
        found = self._saved.find(request.prompt[:-1], dict(request.key).get("salt"))
        if found is None or found[1] < _WORTH_READING:
            return
        kept, length = self._all.get(found[0].id), found[1]
        if kept is None or kept.lock.locked() or (kept.session is not None and not self._can_read_cells(kept)):
            return
        if length - self._engine.explain(request.prompt, request.key).matched < _WORTH_READING:
            return
        try:
            self._load(kept)
        except OneKVError as error:  # the request is answered without it
            _log.warning("%s was of use and could not be read: %s", kept.id, error)


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
