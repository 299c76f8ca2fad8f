"""The application: routes, and nothing that a route could leave to another file.

The engine has a thread of its own; here is the event loop, and one thread beside it that encodes prompts, so that status routes answer
whatever goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from onekv.engine.engine import Engine
from onekv.engine.request import Done, Failed, Request as EngineRequest, Stream
from onekv.engine.session import Session
from onekv.errors import EngineClosed, RequestTooLarge
from onekv.server import prompts
from onekv.server.doors import Doors, JsonRoute
from onekv.server.errors import ApiError, api_error, install
from onekv.server.metrics import Metrics
from onekv.server.saved import SavedSessions
from onekv.server.schema import (
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    Edit,
    EmbeddingRequest,
    ErrorBody,
    NewSession,
    Place,
    Rewind,
    TokenizeRequest,
)
from onekv.server.sessions import Kept, SessionStore
from onekv.server.stream import (
    Answer,
    ChatAnswer,
    ClientGone,
    CompletionAnswer,
    Echo,
    EventStream,
    Heard,
    Listeners,
    as_json,
    token_name,
    unless_gone,
    whole,
)

_T = TypeVar("_T")
_STATIC: Final = Path(__file__).parent / "static"
Explain = Annotated[bool, Query(description="Say what of the prompt was cached, and why no more.")]


def create_app(
    engine: Engine,
    name: str,
    *,
    api_key: str | None = None,
    max_body: int = 32 << 20,
    sessions_dir: Path | None = None,
    is_local: bool = False,
) -> FastAPI:
    """The server of one engine, which stays the caller's to close, after the server.

    Args:
        name:     what the model is called; requests for another are refused
        api_key:  what clients must send as their Bearer token; /health and the page itself are open
        max_body: most bytes of a request's body
        sessions_dir: where sessions are saved; None: they are not
        is_local: answer only requests for "localhost" and the like, so that no page elsewhere can lend its name to this machine
    Raises:
        ConfigError: the directory cannot be used.
    """
    saved = None if sessions_dir is None else SavedSessions(sessions_dir, engine.cache.config.fingerprint)
    api = Api(engine, name, SessionStore(engine, saved))
    app = FastAPI(
        title="onekv", docs_url=None, redoc_url=None, lifespan=api.lifespan, redirect_slashes=False, responses={"4XX": {"model": ErrorBody}}
    )
    app.router.route_class = JsonRoute
    app.state.api = api
    app.add_middleware(Doors, key=api_key, max_body=max_body, is_local=is_local)
    install(app)
    completed: dict[str, Any] = {"responses": {200: {"model": Completion}}}
    one, created = "/v1/sessions/{session_id}", {"status_code": 201}
    for method, path, route, described in (
        ("POST", "/v1/completions", api.completions, completed),
        ("POST", "/v1/chat/completions", api.chat, completed),
        ("POST", "/v1/embeddings", api.embeddings, {}),
        ("GET", "/v1/models", api.models, {}),
        ("GET", "/v1/models/{model:path}", api.model, {}),
        ("GET", "/v1/cells", api.cells, {}),
        ("GET", "/v1/sessions", api.list_sessions, {}),
        ("POST", "/v1/sessions", api.new_session, created),
        ("GET", one, api.session, {}),
        ("DELETE", one, api.delete_session, {}),
        ("POST", f"{one}/fork", api.fork_session, created),
        ("POST", f"{one}/rewind", api.rewind_session, {}),
        ("POST", f"{one}/edit", api.edit_session, {}),
        ("POST", f"{one}/save", api.save_session, {}),
        ("POST", f"{one}/restore", api.restore_session, {}),
        ("POST", "/tokenize", api.tokenize, {}),
        ("POST", "/detokenize", api.detokenize, {}),
        ("GET", "/health", api.health, {}),
        ("GET", "/metrics", api.metrics_text, {"response_class": PlainTextResponse}),
        ("GET", "/", api.page, {"response_class": HTMLResponse}),
    ):
        app.add_api_route(path, route, methods=[method], response_model=None, **described)
    if _STATIC.is_dir():
        app.mount("/static", StaticFiles(directory=_STATIC))
    return app


class Api:
    """The routes of one server."""

    def __init__(self, engine: Engine, name: str, sessions: SessionStore) -> None:
        self.engine = engine
        self.name = name
        self.sessions = sessions
        self.metrics = Metrics(engine, name)
        self.listeners = Listeners(self.metrics.observe)
        self._encoding = ThreadPoolExecutor(1, "onekv-encode")
        self._created = int(time.time())
        self._names: dict[int, str] = {}  # texts of tokens, as /v1/cells shows them
        self._is_stopping = False
        self._hurries = False

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """From the first request to the last."""
        yield
        await self.sessions.close()
        self._encoding.shutdown()

    async def stop(self, limit: float) -> None:
        """Take nothing new, let what runs finish within `limit` seconds, or until `hurry`, and tell the rest."""
        self._is_stopping = True
        end = time.monotonic() + limit
        while len(self.listeners) and time.monotonic() < end and not self._hurries:
            await asyncio.sleep(0.02)
        self.listeners.tell(EngineClosed("the server is stopping; the answer is not complete"))

    def hurry(self) -> None:
        """What still runs is told now."""
        self._hurries = True

    # --- answers ----------------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request, body: CompletionRequest, explain: Explain = False) -> Response:
        """Continue one or several prompts, or a session's text."""
        self._check(body.model)
        text = self.engine.model.text
        settings: dict[str, Any] = {"logprobs": body.logprobs is not None, "explain": explain, "usage": body.wants_usage}
        if body.session is not None:
            kept, answer = self.sessions.get(body.session), CompletionAnswer(self.name, text, **settings)

            async def ask(session: Session) -> EngineRequest:
                [asked] = await self._encode(prompts.completion_requests, self.engine, body, explain, session.tokens, session)
                return asked

            events = self._in_session(request, kept, "text", ask, "prompt", lambda: self.sessions.append(kept, "text", (), None))
            return await self._answer(answer, events, stream=bool(body.stream))
        asked = await self._encode(prompts.completion_requests, self.engine, body, explain)
        echoes = [
            Echo(given if isinstance(given, str) else text.decode(given), one.prompt)
            for given, one in zip(body.prompts if body.echo else (), asked, strict=bool(body.echo))
        ]
        answer = CompletionAnswer(self.name, text, prompts=len(asked), n=body.n, echoes=echoes, **settings)
        events = self.listeners.events(request, await self._submit(asked, "prompt"))
        return await self._answer(answer, events, stream=bool(body.stream))

    async def chat(self, request: Request, body: ChatRequest, explain: Explain = False) -> Response:
        """Answer a conversation, or what is new of a session's."""
        self._check(body.model)
        answer = ChatAnswer(
            self.name,
            self.engine.model.text,
            n=body.n,
            logprobs=bool(body.logprobs),
            explain=explain,
            usage=body.wants_usage,
            calls="forced" if prompts.is_forced(body) else "parse" if body.uses_tools else None,
        )
        if body.session is not None:
            kept = self.sessions.get(body.session)

            async def ask(session: Session) -> EngineRequest:
                return await self._encode(prompts.chat_request, self.engine, body, explain, kept.turns, session.tokens, session)

            def end() -> None:
                if answer.is_complete:
                    new = [*prompts.turns(body.messages, kept.turns), answer.turn]
                    self.sessions.append(kept, "chat", new, prompts.tools_of(body))

            events = self._in_session(request, kept, "chat", ask, "messages", end)
        else:
            asked = await self._encode(prompts.chat_request, self.engine, body, explain)
            events = self.listeners.events(request, await self._submit([asked], "messages"))
        return await self._answer(answer, events, stream=bool(body.stream))

    async def _in_session(
        self,
        request: Request,
        kept: Kept,
        kind: Literal["chat", "text"],
        ask: Callable[[Session], Awaitable[EngineRequest]],
        param: str,
        end: Callable[[], None],
    ) -> AsyncGenerator[Heard]:
        """The events of a request that goes on in a session, when it is its turn; `end` is called when the answer is there."""
        await unless_gone(request, kept.lock.acquire())
        try:
            asked = await ask(await self.sessions.use(kept, kind))
            async with contextlib.aclosing(self.listeners.events(request, await self._submit([asked], param))) as events:
                async for heard in events:
                    if isinstance(heard[1], Done):
                        end()
                    yield heard
        finally:
            kept.lock.release()

    async def _answer(self, answer: Answer, events: AsyncGenerator[Heard], *, stream: bool) -> Response:
        """Answer whole or as a stream. Until the first event an error has a status of its own."""
        try:
            if not stream:
                return _json(as_json(await whole(answer, events)))
            first = await anext(events)
            if isinstance(first[1], Failed):
                await events.aclose()
                raise api_error(first[1].error) from first[1].error
            return EventStream(answer, first, events)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it

    async def _submit(self, asked: Sequence[EngineRequest], param: str) -> list[Stream]:
        """All or none."""
        for one in asked:
            await self.sessions.bring(one)
        if self._is_stopping:
            raise EngineClosed("the server is stopping; it takes nothing new")
        streams: list[Stream] = []
        try:
            for one in asked:
                streams.append(self.engine.submit(one))
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, RequestTooLarge):
                told = api_error(error)
                told.param = param
                raise told from error
            raise
        return streams

    async def _encode(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._encoding, partial(work, *args))

    def _check(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise ApiError(404, f"there is no model {model!r} here, only {self.name!r}", param="model", code="model_not_found")

    # --- sessions ---------------------------------------------------------------------------------------------------------------

    async def list_sessions(self) -> Response:
        """All sessions, those on disk included."""
        return JSONResponse({"object": "list", "data": await self.sessions.listed()})

    async def new_session(self, body: NewSession | None = None) -> Response:
        """An empty session."""
        body = body or NewSession()
        kept = await self.sessions.create(body.name, body.cache_salt)
        return JSONResponse(await self.sessions.describe(kept), 201)

    async def session(self, session_id: str) -> Response:
        """One session, with its messages."""
        return JSONResponse(await self.sessions.describe(self.sessions.get(session_id)))

    async def fork_session(self, session_id: str, body: Place | None = None) -> Response:
        """A new session with the beginning of this one."""
        made = await self.sessions.fork(self.sessions.get(session_id), body or Place())
        return JSONResponse(await self.sessions.describe(made), 201)

    async def rewind_session(self, session_id: str, body: Rewind) -> Response:
        """Take back its end."""
        kept = self.sessions.get(session_id)
        await self.sessions.rewind(kept, body)
        return JSONResponse(await self.sessions.describe(kept))

    async def edit_session(self, session_id: str, body: Edit) -> Response:
        """Remove something from its middle."""
        kept = self.sessions.get(session_id)
        await self.sessions.edit(kept, body)
        return JSONResponse(await self.sessions.describe(kept))

    async def save_session(self, session_id: str) -> Response:
        """Write it to disk."""
        kept = self.sessions.get(session_id)
        await self.sessions.save(kept)
        return JSONResponse(await self.sessions.describe(kept))

    async def restore_session(self, session_id: str) -> Response:
        """Read it from disk."""
        kept = self.sessions.get(session_id)
        await self.sessions.restore(kept)
        return JSONResponse(await self.sessions.describe(kept))

    async def delete_session(self, session_id: str) -> Response:
        """Remove it from memory and disk."""
        await self.sessions.delete(self.sessions.get(session_id))
        return JSONResponse({"id": session_id, "object": "session", "deleted": True})

    # --- what is here -----------------------------------------------------------------------------------------------------------

    async def embeddings(self, body: EmbeddingRequest) -> Response:
        """Always refused: a model that was trained to continue text was not trained to place texts near their like, and a mean of its
        hidden states would look like an answer."""
        self._check(body.model)
        raise ApiError(400, f"{self.name} continues text; it was not trained to embed it", param="model", code="model_not_supported")

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "onekv", "max_model_len": self.engine.limit}

    async def models(self) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        """The one model, by its name."""
        self._check(model)
        return JSONResponse(self._model())

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation, and the text of each."""
        self._check(body.model)
        text = self.engine.model.text
        ids = await self._encode(prompts.tokenized, text, body)
        names = [token_name(text, i) for i in ids]
        return JSONResponse({"tokens": ids, "token_strs": names, "count": len(ids), "max_model_len": self.engine.limit})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        self._check(body.model)
        return JSONResponse({"prompt": await self._encode(partial(self.engine.model.text.decode, special=True), body.tokens)})

    async def cells(self, group: Annotated[int, Query(ge=0, description="Which group of layers.")] = 0) -> Response:
        """Every used cell as [index, position, [owners], token id, text], and who the owners are."""
        count = len(self.engine.cache.cells.groups)
        if group >= count:
            raise ApiError(400, f"group: there are {count} groups of layers, from 0 on", param="group", code="invalid_value")
        seen = await asyncio.to_thread(self.engine.cells, group)
        for owner in seen["owners"].values():
            owner.update(self.sessions.owner(owner["name"]))
        return JSONResponse({**seen, "cells": [[*cell, self._name(cell[3])] for cell in seen["cells"]]})

    def _name(self, token_id: int) -> str:
        if token_id not in self._names:
            self._names[token_id] = token_name(self.engine.model.text, token_id) if token_id >= 0 else ""
        return self._names[token_id]

    async def health(self) -> Response:
        """Whether it works, and how much there is to do."""
        stats = self.engine.stats()
        counts = ("running", "waiting", "sessions", "num_cells", "used_cells", "free_cells", "evictable_cells")
        status = "stopping" if self._is_stopping else "ok"
        fields = {"status": status, "model": self.name, **{name: getattr(stats, name) for name in counts}}
        return JSONResponse(fields, 503 if self._is_stopping else 200)

    async def metrics_text(self) -> Response:
        """For Prometheus."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def page(self) -> Response:
        """The page."""
        index = _STATIC / "index.html"
        if not index.is_file():
            raise ApiError(404, "this installation has no page", code="not_found")
        return FileResponse(index)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
