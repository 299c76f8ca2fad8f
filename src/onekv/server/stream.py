"""From engine events to answers: the bridge from the engine's thread to the event loop, whole answers, and chunks of streams.

A stream and a whole answer are made by the same code: a whole answer is what its chunks add up to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from onekv.core.prefix import Difference
from onekv.engine.request import Delta, Done, Event, Failed, Finished, PromptLogprobs, Started, Stream
from onekv.engine.sampler import TokenLogprobs
from onekv.engine.tools import ToolCall, ToolParser
from onekv.errors import EngineClosed
from onekv.models import Text
from onekv.server.errors import api_error
from onekv.server.schema import (
    CalledFunction,
    ChatChoice,
    ChatLogprobs,
    ChosenProbability,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    MadeCall,
    PromptDetails,
    ReplyMessage,
    TokenProbability,
    Usage,
)

_T = TypeVar("_T")
Heard = tuple[int, Event]  # which of a request's streams, and what it said


class ClientGone(Exception):
    """The client has closed its connection; nobody waits for the answer."""


class Listeners:
    """The requests that are being answered, so that they can be told when the server stops.

    Args:
        observe: is shown every event
    """

    def __init__(self, observe: Callable[[Event], None]) -> None:
        self._observe = observe
        self._queues: set[asyncio.Queue[Heard | Exception]] = set()

    def __len__(self) -> int:
        return len(self._queues)

    def tell(self, error: EngineClosed) -> None:
        """End every answer with this error."""
        for queue in self._queues:
            queue.put_nowait(error)

    async def events(self, request: Request, streams: Sequence[Stream]) -> AsyncGenerator[Heard]:
        """The events of a request's streams, each until its last one. Whatever ends this ends the streams.

        Raises:
            ClientGone: the connection was closed, wherever the request was: queued, evaluating its prompt, or decoding.
            EngineClosed: the server stops.
            Both after the last event, so that a session's owner knows whether the answer was complete before it was given up.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Heard | Exception] = asyncio.Queue()
        self._queues.add(queue)
        watch = asyncio.create_task(_gone(request, queue))
        try:
            for i, stream in enumerate(streams):
                stream.listen(_hear(loop, queue, i))
            left, given_up = len(streams), None
            while left:
                heard = await queue.get()
                if isinstance(heard, Exception):
                    given_up = given_up or heard
                    for stream in streams:
                        stream.cancel()
                    continue
                if given_up is None:
                    self._observe(heard[1])
                left -= isinstance(heard[1], Done | Failed)
                yield heard
            if given_up is not None:
                raise given_up
        finally:
            watch.cancel()
            self._queues.discard(queue)
            for stream in streams:
                stream.cancel()  # changes nothing where it has ended


def _hear(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Heard | Exception], i: int) -> Callable[[Event], None]:
    def hear(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped, and the client with it
            loop.call_soon_threadsafe(queue.put_nowait, (i, event))

    return hear


async def _gone(request: Request, queue: asyncio.Queue[Heard | Exception]) -> None:
    await _is_gone(request)
    queue.put_nowait(ClientGone())


async def _is_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, waiting: Coroutine[Any, Any, _T]) -> _T:
    """Wait for something as long as the client does.

    Raises:
        ClientGone: it does not any more.
    """
    work, watch = asyncio.create_task(waiting), asyncio.create_task(_is_gone(request))
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        watch.cancel()


# --- answers --------------------------------------------------------------------------------------------------------------------

Object = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


class _Noted(NamedTuple):
    """A token, what is known of its probability (nothing of a prompt's first), and where its text starts."""

    token_id: int
    entry: TokenLogprobs | None
    start: int


@dataclass
class _Choice:
    """What is known of one choice."""

    text: str = ""
    logprobs: list[_Noted] = field(default_factory=list)
    offset: int = 0  # characters so far, by tokens
    reason: FinishReason | None = None
    tools: ToolParser | None = None
    calls: list[ToolCall] = field(default_factory=list)


class Answer(ABC):
    """The answers to one request: n choices of each of its prompts.

    Args:
        model: name in the answer
        text:  the model's tokens
        n:     choices a prompt
        logprobs: whether each token's log-probabilities are given
        explain: whether it is said what of the prompt was cached, and why no more
        usage: whether a stream ends with its usage
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[Object]
    chunk_object: ClassVar[Object]

    def __init__(self, model: str, text: Text, *, prompts: int = 1, n: int = 1, logprobs: bool = False, explain: bool, usage: bool) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._model = model
        self._text = text
        self._n = n
        self._logprobs = logprobs
        self._explain = explain
        self._usage = usage
        self._created = int(time.time())
        self._choices = [_Choice() for _ in range(prompts * n)]
        self._done: list[Done] = []
        self._explanations: list[dict[str, Any] | None] = [None] * prompts

    def hear(self, heard: Heard) -> Iterator[Completion]:
        """Note an event; yields what a stream says of it.

        Raises:
            ApiError: the request failed.
        """
        i, event = heard
        match event:
            case Started():
                self._explanations[i] = None if event.explanation is None else explained(event.explanation, self._text)
                yield from self._open(i)
            case PromptLogprobs():
                yield from self._prompt(i, event)
            case Delta():
                yield from self._delta(self._n * i + event.index, event)
            case Finished():
                yield from self._finish(self._n * i + event.index, event)
            case Failed():
                raise api_error(event.error) from event.error
            case Done():
                self._done.append(event)
                if len(self._done) == len(self._explanations) and (self._usage or self._explain):
                    yield self._completion(self.chunk_object, [], **self._closing(usage=self._usage))

    def whole(self) -> Completion:
        """The answer, when everything is heard."""
        choices: Any = [self._whole_choice(i, one) for i, one in enumerate(self._choices)]
        return self._completion(self.whole_object, choices, **self._closing(usage=True))

    def chunk(self, choice: CompletionChoice | ChatChoice) -> Completion:
        """A chunk of a stream. Where usage comes at the end, it is null before."""
        choices: Any = [choice]
        return self._completion(self.chunk_object, choices, **({"usage": None} if self._usage else {}))

    def _completion(self, kind: Object, choices: list[CompletionChoice] | list[ChatChoice], **fields: Any) -> Completion:
        return Completion(id=self.id, object=kind, created=self._created, model=self._model, choices=choices, **fields)

    def _closing(self, *, usage: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"usage": self.usage} if usage else {}
        if self._explain:
            explained = [one for one in self._explanations if one is not None]
            fields["explain"] = explained if len(self._explanations) > 1 else explained[0]
        return fields

    @property
    def is_complete(self) -> bool:
        """Whether every choice has come to its own end."""
        return all(one.reason not in (None, "cancelled") for one in self._choices)

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices."""
        prompt, made, cached = (sum(getattr(one, f"{name}_tokens") for one in self._done) for name in ("prompt", "completion", "cached"))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=made,
            total_tokens=prompt + made,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )

    def _note(self, choice: _Choice, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[_Noted]:
        """Keep the log-probabilities of tokens, each with where its text starts in the choice's."""
        noted = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            start, choice.offset = _advance(choice.offset, self._text.token_bytes(token_id, special=False))
            noted.append(_Noted(token_id, entry, start))
        choice.logprobs += noted
        return noted

    @abstractmethod
    def _open(self, i: int) -> Iterator[Completion]: ...

    def _prompt(self, i: int, event: PromptLogprobs) -> Iterator[Completion]:
        return iter(())

    @abstractmethod
    def _delta(self, at: int, event: Delta) -> Iterator[Completion]: ...

    @abstractmethod
    def _finish(self, at: int, event: Finished) -> Iterator[Completion]: ...

    @abstractmethod
    def _whole_choice(self, at: int, choice: _Choice) -> CompletionChoice | ChatChoice: ...


def _advance(offset: int, data: bytes) -> tuple[int, int]:
    """Where a token's text starts, and where the next character begins. A token that goes on with a character starts where that does."""
    starts_inside = bool(data) and data[0] & 0xC0 == 0x80
    return max(0, offset - starts_inside), offset + sum(byte & 0xC0 != 0x80 for byte in data)


def explained(difference: Difference, text: Text) -> dict[str, Any]:
    """Why no more of a prompt was there already, for a reader."""
    return {
        "matched": difference.matched,
        "total": difference.total,
        "where": difference.reason,
        "position": difference.matched,
        "cached_text": text.decode([i for i in difference.held if i >= 0], special=True),
        "given_text": text.decode([i for i in difference.given if i >= 0], special=True),
    }


def token_name(text: Text, token_id: int) -> str:
    """A token's text; where it is no whole characters, its bytes, so that no two tokens have one name."""
    data = text.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


class Echo(NamedTuple):
    """A prompt to be given back before its continuation."""

    text: str
    ids: Sequence[int]


class CompletionAnswer(Answer):
    """/v1/completions.

    Args:
        echoes: the prompts, where they are to be given back
    """

    prefix = "cmpl-"
    whole_object: ClassVar[Object] = "text_completion"
    chunk_object: ClassVar[Object] = "text_completion"

    def __init__(self, *args: Any, echoes: Sequence[Echo] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._echoes = echoes

    def _open(self, i: int) -> Iterator[Completion]:
        if self._echoes and not self._logprobs:
            yield from self._echo(i)

    def _prompt(self, i: int, event: PromptLogprobs) -> Iterator[Completion]:
        if self._echoes:
            yield from self._echo(i, event)

    def _echo(self, i: int, event: PromptLogprobs | None = None) -> Iterator[Completion]:
        for at in range(self._n * i, self._n * (i + 1)):
            text, ids = self._echoes[i]
            yield self._piece(at, text, ids, event.entries) if event else self._piece(at, text)

    def _delta(self, at: int, event: Delta) -> Iterator[Completion]:
        if event.text or self._logprobs:
            yield self._piece(at, event.text, event.token_ids if self._logprobs else (), event.logprobs)

    def _finish(self, at: int, event: Finished) -> Iterator[Completion]:
        self._choices[at].reason = event.reason
        yield self._piece(at, "")

    def _piece(self, at: int, text: str, ids: Sequence[int] = (), entries: Sequence[TokenLogprobs | None] = ()) -> Completion:
        choice = self._choices[at]
        choice.text += text
        logprobs = self._table(self._note(choice, ids, entries)) if self._logprobs else None
        return self.chunk(CompletionChoice(index=at, text=text, logprobs=logprobs, finish_reason=choice.reason))

    def _whole_choice(self, at: int, choice: _Choice) -> CompletionChoice:
        logprobs = self._table(choice.logprobs) if self._logprobs else None
        return CompletionChoice(index=at, text=choice.text, logprobs=logprobs, finish_reason=choice.reason)

    def _table(self, noted: Sequence[_Noted]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[token_name(self._text, one.token_id) for one in noted],
            token_logprobs=[None if one.entry is None else _finite(one.entry.logprob) for one in noted],
            top_logprobs=[None if one.entry is None else self._likeliest(one.entry) for one in noted],
            text_offset=[one.start for one in noted],
        )

    def _likeliest(self, entry: TokenLogprobs) -> dict[str, float]:
        return {token_name(self._text, i): _finite(logprob) for i, logprob in (*entry.top, (entry.token_id, entry.logprob))}


class ChatAnswer(Answer):
    """/v1/chat/completions.

    Args:
        calls:  "parse": calls are found in the text; "forced": the prompt has opened one; None: text is text
    """

    prefix = "chatcmpl-"
    whole_object: ClassVar[Object] = "chat.completion"
    chunk_object: ClassVar[Object] = "chat.completion.chunk"

    def __init__(self, *args: Any, calls: Literal["parse", "forced"] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for choice in self._choices:
            choice.tools = ToolParser(inside=calls == "forced") if calls else None

    @property
    def turn(self) -> dict[str, Any]:
        """The first answer, as the template takes it when the conversation goes on."""
        choice = self._choices[0]
        calls = [_made(call).model_dump(exclude_unset=True) for call in choice.calls]
        return {"role": "assistant", "content": choice.text, **({"tool_calls": calls} if calls else {})}

    def _open(self, i: int) -> Iterator[Completion]:
        for at in range(self._n * i, self._n * (i + 1)):
            yield self._piece(at, ReplyMessage(role="assistant", content="", refusal=None))

    def _delta(self, at: int, event: Delta) -> Iterator[Completion]:
        choice = self._choices[at]
        content, calls = choice.tools.push(event.text) if choice.tools else (event.text, [])
        yield from self._pieces(at, content, calls, event.token_ids if self._logprobs else (), event.logprobs)

    def _finish(self, at: int, event: Finished) -> Iterator[Completion]:
        choice = self._choices[at]
        if choice.tools:
            yield from self._pieces(at, *choice.tools.finish())
        choice.reason = "tool_calls" if choice.calls and event.reason == "stop" else event.reason
        yield self._piece(at, ReplyMessage())

    def _pieces(
        self,
        at: int,
        content: str,
        calls: Sequence[ToolCall],
        ids: Sequence[int] = (),
        entries: Sequence[TokenLogprobs] = (),
    ) -> Iterator[Completion]:
        choice = self._choices[at]
        if content or ids:
            choice.text += content
            yield self._piece(at, ReplyMessage(content=content), ids, entries)
        for call in calls:
            yield self._piece(at, ReplyMessage(tool_calls=[_made(call, index=len(choice.calls))]))
            choice.calls.append(call)

    def _piece(self, at: int, delta: ReplyMessage, ids: Sequence[int] = (), entries: Sequence[TokenLogprobs] = ()) -> Completion:
        choice = self._choices[at]
        logprobs = self._content(self._note(choice, ids, entries)) if ids else None
        return self.chunk(ChatChoice(index=at, delta=delta, logprobs=logprobs, finish_reason=choice.reason))

    def _whole_choice(self, at: int, choice: _Choice) -> ChatChoice:
        calls: dict[str, Any] = {"tool_calls": [_made(call) for call in choice.calls]} if choice.calls else {}
        content = None if choice.calls and not choice.text else choice.text
        return ChatChoice(
            index=at,
            message=ReplyMessage(role="assistant", content=content, refusal=None, **calls),
            logprobs=self._content(choice.logprobs) if self._logprobs else None,
            finish_reason=choice.reason,
        )

    def _content(self, noted: Sequence[_Noted]) -> ChatLogprobs:
        entries = [one.entry for one in noted if one.entry is not None]
        return ChatLogprobs(content=[self._chosen(entry) for entry in entries], refusal=None)

    def _chosen(self, entry: TokenLogprobs) -> ChosenProbability:
        likeliest = [TokenProbability(**self._named(*one)) for one in entry.top]
        return ChosenProbability(**self._named(entry.token_id, entry.logprob), top_logprobs=likeliest)

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = list(self._text.token_bytes(token_id))
        return {"token": token_name(self._text, token_id), "logprob": _finite(logprob), "bytes": data}


def _made(call: ToolCall, **index: int) -> MadeCall:
    return MadeCall(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments), **index)


# --- the wire -------------------------------------------------------------------------------------------------------------------


async def whole(answer: Answer, events: AsyncGenerator[Heard]) -> Completion:
    """Listen to the end.

    Raises:
        ApiError: the request failed.
        ClientGone, EngineClosed: as `Listeners.events` says.
    """
    async with contextlib.aclosing(events):
        async for heard in events:
            for _ in answer.hear(heard):
                pass
    return answer.whole()


class EventStream(Response):
    """Server-sent events: every chunk, then [DONE]; or an event "error" where the request fails.

    Starlette's own streaming response also listens for the client's going away, which `Listeners.events` does from the start.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, first: Heard, events: AsyncGenerator[Heard]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with contextlib.suppress(ClientGone, OSError):
                async for text in self._lines():
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncIterator[str]:
        try:
            for chunk in self._answer.hear(self._first):
                yield f"data: {as_json(chunk)}\n\n"
            async for heard in self._events:
                for chunk in self._answer.hear(heard):
                    yield f"data: {as_json(chunk)}\n\n"
        except (ClientGone, OSError):
            raise
        except Exception as error:  # whatever it was, this client is told, and the server goes on
            yield f"event: error\ndata: {json.dumps(api_error(error).body)}\n\n"
            return
        yield "data: [DONE]\n\n"


def as_json(model: BaseModel) -> str:
    """What was set, and nothing else: a null that belongs there was set."""
    return model.model_dump_json(exclude_unset=True)
