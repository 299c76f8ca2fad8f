"""From a request's body to the engine's requests: prompts to token ids, messages through the model's template, fields to settings.

Runs beside the event loop, because a long prompt takes long to encode.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from onekv.core.prefix import Key
from onekv.engine.engine import Engine
from onekv.engine.guide import Guide
from onekv.engine.request import Request
from onekv.engine.sampler import Sampling
from onekv.engine.session import Session
from onekv.engine.tools import OPEN, forced_call_schema, supports_tools
from onekv.errors import ConfigError
from onekv.models import Text
from onekv.server.errors import ApiError
from onekv.server.schema import (
    ChatRequest,
    CompletionRequest,
    Content,
    Generation,
    JsonFormat,
    Message,
    NamedTool,
    Reply,
    SchemaFormat,
    TokenizeRequest,
    Tool,
    ToolResult,
)

Turn = Mapping[str, Any]  # a message as templates take it


def completion_requests(
    engine: Engine, body: CompletionRequest, explain: bool, held: Sequence[int] = (), session: Session | None = None
) -> list[Request]:
    """One request a prompt.

    Args:
        held:    token ids that the prompt follows
        session: whose they are
    Raises:
        ApiError: a prompt without tokens, or a field that this model does not allow.
    """
    requests = []
    for i, prompt in enumerate(body.prompts):
        ids = engine.model.text.encode(prompt, special=not held) if isinstance(prompt, str) else prompt
        param = "prompt" if len(body.prompts) == 1 else f"prompt.{i}"
        _check_ids(engine, ids, param)
        requests.append(
            Request(
                prompt=(*held, *ids),
                logprobs=body.logprobs,
                prompt_logprobs=bool(body.echo) and body.logprobs is not None,
                explain=explain,
                **_common(engine, body, session),
            )
        )
    return requests


def chat_request(
    engine: Engine, body: ChatRequest, explain: bool, before: Sequence[Turn] = (), held: Sequence[int] = (), session: Session | None = None
) -> Request:
    """The request of a conversation.

    Args:
        before: turns that the messages follow
        held:   their token ids
        session: whose they are
    Raises:
        ApiError: the model's template takes no such messages, tools or format; names the field.
    """
    messages, tools = [*before, *turns(body.messages, before)], tools_of(body)
    if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        _check_tools(engine.model.text, "tools" if tools else "messages")
    ids = continued(engine.model.text, held, messages, tools, opened=OPEN + "\n" if is_forced(body) else "")
    return Request(
        prompt=tuple(ids),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guide=guide_of(engine, body),
        points=tuple(ends(engine.model.text, messages, tools, ids)) if engine.scheduler.by_points else (),
        explain=explain,
        **_common(engine, body, session),
    )


def _common(engine: Engine, body: Generation, session: Session | None = None) -> dict[str, Any]:
    """What both kinds of request share."""
    most = engine.scheduler.max_running
    if body.n > most:
        raise ApiError(400, f"n: {body.n} answers at a time are more than the {most} that can run", param="n", code="invalid_value")
    bias = {int(i): value for i, value in (body.logit_bias or {}).items()}
    _check_ids(engine, bias, "logit_bias")
    _check_ids(engine, body.stop_token_ids or (), "stop_token_ids")
    chosen: dict[str, Any] = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_k": None if body.top_k is None else max(body.top_k, 0),  # vLLM's clients send -1 for all
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "seed": body.seed,
    }
    return {
        "sampling": Sampling(logit_bias=bias, **{name: value for name, value in chosen.items() if value is not None}),
        "max_tokens": body.limit,
        "stop": body.stops,
        "stop_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "n": body.n,
        "key": key_of(body.cache_salt) if session is None else session.key,
        "session": session,
    }


def key_of(salt: str | None) -> Key:
    """What else changes keys and values, as the engine is told."""
    return () if salt is None else (("salt", salt),)


def _check_ids(engine: Engine, ids: Sequence[int] | Mapping[int, float], param: str) -> None:
    size = engine.model.vocab_size
    for token_id in ids:
        if not 0 <= token_id < size:
            raise ApiError(400, f"{param}: token id {token_id} is not in [0, {size})", param=param, code="invalid_value")
    if param.startswith("prompt") and not ids:
        raise ApiError(400, f"{param}: the prompt has no tokens", param=param, code="invalid_value")


# --- conversations --------------------------------------------------------------------------------------------------------------


def turns(messages: Sequence[Message], before: Sequence[Turn] = ()) -> list[dict[str, Any]]:
    """The messages as templates take them: text, and "system" for the developer.

    Args:
        before: turns that they follow
    Raises:
        ApiError: an answer of a tool that was not called, or arguments that are no JSON object.
    """
    made: list[dict[str, Any]] = []
    called = {call["id"] for turn in before for call in turn.get("tool_calls", ())}
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": _text(message.content)}
        if isinstance(message, Reply) and message.tool_calls:
            turn["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            for j, call in enumerate(message.tool_calls):
                param = f"messages.{i}.tool_calls.{j}.function.arguments"
                _check_object(call.function.arguments, param)
                called.add(call.id)
        if isinstance(message, ToolResult):
            if message.tool_call_id not in called:
                param = f"messages.{i}.tool_call_id"
                raise ApiError(400, f"{param}: no call {message.tool_call_id!r} comes before", param=param, code="invalid_value")
            turn["tool_call_id"] = message.tool_call_id
        made.append(turn)
    return made


def _text(content: Content | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _check_object(text: str, param: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ApiError(400, f"{param}: not the text of a JSON object", param=param, code="invalid_value")


def tools_of(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools the model is shown."""
    return [_tool(tool) for tool in body.tools] if body.tools and body.uses_tools else None


def _tool(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def is_forced(body: ChatRequest) -> bool:
    """Whether the answer must be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _check_tools(text: Text, param: str) -> None:
    if not supports_tools(text):
        raise ApiError(400, f"{param}: this model's chat template knows no tools", param=param, code="unsupported_parameter")


def rendered(
    text: Text, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: the template refuses it.
    """
    return text.encode(_written(text, messages, tools, add_generation_prompt), special=False)


def _written(text: Text, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool = True) -> str:
    """A conversation as the template writes it; a refusal is an ApiError."""
    try:
        return text.chat_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except ConfigError as error:
        raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from error


def guide_of(engine: Engine, body: ChatRequest) -> Guide | None:
    """What the answer's format and a forced call allow.

    Raises:
        ApiError: a schema that cannot be followed.
    """
    param = "response_format"
    try:
        if is_forced(body):
            param = "tools"
            name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
            return engine.guides.json_schema(forced_call_schema(tools_of(body) or [], name))
        if isinstance(body.response_format, SchemaFormat):
            param = "response_format.json_schema.schema"
            return engine.guides.json_schema(body.response_format.json_schema.json_schema)
        return engine.guides.json_object() if isinstance(body.response_format, JsonFormat) else None
    except ConfigError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from error


# --- where turns end ------------------------------------------------------------------------------------------------------------


def ends(text: Text, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, ids: Sequence[int]) -> list[int]:
    """Where messages end in the prompt's ids, without those that have no clean end."""
    return [end for end in spans(text, messages, tools, ids) if end]


def spans(text: Text, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, ids: Sequence[int]) -> list[int | None]:
    """How many of the ids the first 1, 2 .. messages take; None where the template writes them otherwise when more follow, or no token
    ends with them. Of a last message, the ids may lack what is written after its end token.

    Cost: one use of the template a message, and the bytes of all tokens.
    """
    pieces = [text.token_bytes(i) for i in ids]
    held, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
    found: list[int | None] = []
    for count in range(1, len(messages) + 1):
        try:
            part = text.chat_text(messages[:count], tools=tools, add_generation_prompt=False)
        except ConfigError:  # such as a system prompt alone, which some templates refuse
            found.append(None)
            continue
        found.append(_tokens_of(text, part, held, ends, ids, is_last=count == len(messages)))
    return found


def _tokens_of(text: Text, part: str, held: bytes, ends: list[int], ids: Sequence[int], *, is_last: bool) -> int | None:
    data = part.encode()
    if held.startswith(data):
        at = bisect_left(ends, len(data))
        return at + 1 if ends[at : at + 1] == [len(data)] else None
    if is_last and held and data.startswith(held):
        return len(ids)
    encoded = text.encode(part, special=False)  # a tokenizer that writes the start of a text otherwise
    return len(encoded) if encoded and list(ids[: len(encoded)]) == encoded else None


def continued(
    text: Text, held: Sequence[int], messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, opened: str = ""
) -> list[int]:
    """Token ids of a conversation of which some are there already: these, as they were made, and what follows them. Where the template
    writes what is there otherwise now, all are made again.

    Raises:
        ApiError: the template refuses it.
    """
    whole = _written(text, messages, tools) + opened
    if held:
        ids = [*held, *text.encode(whole[len(text.decode(held, special=True)) :], special=False)]
        if text.decode(ids, special=True) == whole:
            return ids
    return text.encode(whole, special=False)


def tokenized(text: Text, body: TokenizeRequest) -> list[int]:
    """Ids of a text or a conversation.

    Raises:
        ApiError: the template refuses it.
    """
    if body.messages is None:
        return text.encode(body.prompt or "")
    messages = turns(body.messages)
    tools = [_tool(tool) for tool in body.tools] if body.tools else None
    if tools:
        _check_tools(text, "tools")
    return rendered(text, messages, tools, add_generation_prompt=body.add_generation_prompt)
