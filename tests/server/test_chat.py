"""/v1/chat/completions: messages, tools, formats, and that a stream adds up to the whole answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from scripted import Answer, Scripted, says
from serving import NAME, Served, coin, serving

PATH = "/v1/chat/completions"
ASK = {"role": "user", "content": "Hi"}

# Hermes' and Qwen's way of writing calls, on the tokens of the scripted model.
TOOL_TEMPLATE = (
    "{% if tools %}<start>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<end>\n{% endif %}"
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Answers "Hello 😸!" to everything."""
    with serving(Scripted(says("Hello 😸!")), cells=2048) as it:
        yield it


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    """Says a word, and calls a tool."""
    model = Scripted(_after_opening("Let me see. " + CALL), template=TOOL_TEMPLATE)
    with serving(model, cells=4096) as it:
        yield it


def _after_opening(text: str) -> Answer:
    """The text, after the last opening of an answer."""
    opening = list(b"assistant\n")

    def answer(tokens: list[int]) -> int:
        starts = [i for i in range(len(tokens)) if tokens[i : i + len(opening)] == opening]
        said = len(tokens) - starts[-1] - len(opening)
        script = [*text.encode(), 256]
        return script[min(said, len(script) - 1)]

    return answer


def added_up(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice make, and its log-probabilities and reason."""
    deltas = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    calls = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert deltas[0]["delta"]["role"] == "assistant"
    assert all("role" not in one["delta"] for one in deltas[1:])
    assert [one["finish_reason"] for one in deltas[:-1]] == [None] * (len(deltas) - 1)
    return {
        "content": "".join(one["delta"].get("content") or "" for one in deltas),
        "calls": [call["function"] for call in calls],
        "logprobs": [entry for one in deltas if one["logprobs"] for entry in one["logprobs"]["content"]],
        "finish_reason": deltas[-1]["finish_reason"],
    }


def test_an_answer_has_openais_shape(served: Served) -> None:
    body = served.ok(PATH, {"model": NAME, "messages": [ASK], "temperature": 0})
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert (body["object"], body["id"][:9]) == ("chat.completion", "chatcmpl-")
    message = {"role": "assistant", "content": "Hello 😸!", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_openais_own_client_reads_whole_answers_and_streams(served: Served) -> None:
    client = served.openai
    whole = client.chat.completions.create(model=NAME, messages=[ASK], temperature=0)  # type: ignore[list-item]
    assert whole.choices[0].message.content == "Hello 😸!"
    stream = client.chat.completions.create(model=NAME, messages=[ASK], temperature=0, stream=True)  # type: ignore[list-item]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello 😸!"
    with client.chat.completions.stream(model=NAME, messages=[ASK], temperature=0) as events:  # type: ignore[list-item]
        assert events.get_final_completion().choices[0].message.content == "Hello 😸!"


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": "o 😸"}, {"max_tokens": 8}, {"max_completion_tokens": 7}])
def test_a_stream_adds_up_to_the_whole_answer(served: Served, options: dict[str, Any]) -> None:
    body = {"messages": [ASK], "temperature": 0, "logprobs": True, "top_logprobs": 2, **options}
    whole = served.ok(PATH, body)
    chunks = served.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        streamed = added_up(chunks, choice["index"])
        assert streamed["content"] == choice["message"]["content"]
        assert streamed["logprobs"] == choice["logprobs"]["content"]
        assert streamed["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    count = sum(len(choice["logprobs"]["content"]) for choice in whole["choices"])
    assert count == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_case_S12_chat_logprobs(temperature: int) -> None:
    with serving(Scripted(coin)) as served:
        body = {"messages": [ASK], "max_tokens": 4, "logprobs": True, "temperature": temperature, "seed": 2}
        for top in (None, 0, 2):
            entries = served.ok(PATH, {**body, "top_logprobs": top})["choices"][0]["logprobs"]["content"]
            assert len(entries) == 4
            for entry in entries:
                likely = {0: math.log(0.25), 1: math.log(0.75)}
                assert entry["logprob"] == pytest.approx(likely[entry["bytes"][0]], abs=1e-6)
                assert [one["bytes"] for one in entry["top_logprobs"]] == ([[1], [0]] if top else [])
            assert added_up(served.stream(PATH, {**body, "top_logprobs": top}))["logprobs"] == entries


def test_a_token_that_is_half_a_character_is_named_by_its_bytes(served: Served) -> None:
    body = {"messages": [ASK], "temperature": 0, "logprobs": True}
    entries = served.ok(PATH, body)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "Hello 😸!<end>".encode()
    assert [entry["token"] for entry in entries][6:10] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\xb8"]


def test_messages_are_written_by_the_template(served: Served) -> None:
    def prompt_of(*messages: dict[str, Any]) -> str:
        return served.ok("/detokenize", {"tokens": served.ok("/tokenize", {"messages": messages})["tokens"]})["prompt"]

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt_of({"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}) == (
        "<start>system\nbe kind<end>\n<start>user\none\ntwo<end>\n<start>assistant\n"
    )
    assert prompt_of(ASK, {"role": "assistant", "content": "yes"}, ASK).count("<start>") == 4


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [ASK, "hi"]}, "messages.1", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a", "name": "ann"}]}, "messages.0.name", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x", "unknown_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages.0.content.0.type",
            "unsupported_parameter",
        ),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
        ({"logprobs": 3}, "logprobs", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": []}, "tools", "invalid_value"),
        ({"tools": [TOOL]}, "tools", "unsupported_parameter"),
        ({"tools": [{"type": "code"}]}, "tools.0.type", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema", "invalid_value"),
        ({"functions": []}, "functions", "unsupported_parameter"),
        ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"audio": {"voice": "a"}}, "audio", "unsupported_parameter"),
        ({"prediction": {}}, "prediction", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
        ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ({"moderation": {}}, "moderation", "unsupported_parameter"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter"),
        ({"prompt_cache_key": "a"}, "prompt_cache_key", "unsupported_parameter"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "unsupported_parameter"),
        ({"safety_identifier": "a"}, "safety_identifier", "unsupported_parameter"),
        ({"user": "a"}, "user", "unsupported_parameter"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "unsupported_parameter"),
        ({"prompt": "a"}, "prompt", "unknown_parameter"),
        ({"echo": True}, "echo", "unknown_parameter"),
    ],
)
def test_what_cannot_be_had_is_a_400_that_names_it(served: Served, fields: dict[str, Any], param: str, code: str) -> None:
    error = served.refused(PATH, {"messages": [ASK], **fields})
    assert (error["param"], error["code"]) == (param, code)


def test_every_field_of_openais_client_is_known_here() -> None:
    """None is an unknown field: it works, or it is refused with the reason."""
    from openai.types.chat import completion_create_params as chat
    from openai.types.completion_create_params import CompletionCreateParamsBase

    from onekv.server.schema import ChatRequest, CompletionRequest

    assert set(chat.CompletionCreateParamsBase.__annotations__) - set(ChatRequest.model_fields) - {"stream"} == set()
    assert set(CompletionCreateParamsBase.__annotations__) - set(CompletionRequest.model_fields) == set()


def test_neutral_values_of_fields_that_are_not_supported_may_be_sent(served: Served) -> None:
    neutral = {"service_tier": "auto", "store": False, "modalities": ["text"], "parallel_tool_calls": True, "metadata": None, "user": None}
    formats = {"response_format": {"type": "text"}, "tool_choice": "none", "tools": None, "logprobs": False}
    assert served.ok(PATH, {"messages": [ASK], "max_tokens": 1, **neutral, **formats})["choices"]


def test_a_model_without_a_template_refuses_chats_and_a_template_may_refuse_messages() -> None:
    with serving(Scripted(template=None)) as served:
        error = served.refused(PATH, {"messages": [ASK]})
        assert (error["param"], "no chat template" in error["message"]) == ("messages", True)
        assert served.ok("/v1/completions", {"prompt": "a", "max_tokens": 1})["choices"]
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('users come first') }}{% endif %}x"
    with serving(Scripted(template=strict)) as served:
        error = served.refused(PATH, {"messages": [{"role": "system", "content": "a"}, ASK]})
        assert (error["param"], "users come first" in error["message"]) == ("messages", True)


# --- tools ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [None, "auto"])
def test_calls_are_found_in_the_text_in_both_modes(calling: Served, choice: str | None) -> None:
    body = {"messages": [ASK], "tools": [TOOL], "tool_choice": choice, "temperature": 0}
    [answer] = calling.ok(PATH, body)["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", "Let me see.")
    [call] = answer["message"]["tool_calls"]
    assert list(call) == ["id", "type", "function"]
    assert (call["type"], call["function"]["name"], json.loads(call["function"]["arguments"])) == ("function", "weather", {"city": "Rome"})
    streamed = added_up(calling.stream(PATH, body))
    assert (streamed["content"], streamed["calls"], streamed["finish_reason"]) == ("Let me see.", [call["function"]], "tool_calls")


def test_tools_that_may_not_be_called_are_not_shown(calling: Served) -> None:
    body = {"messages": [ASK], "tools": [TOOL], "tool_choice": "none", "temperature": 0}
    whole = calling.ok(PATH, body)
    assert whole["choices"][0]["message"]["content"] == "Let me see. " + CALL
    assert whole["usage"]["prompt_tokens"] == calling.ok(PATH, {"messages": [ASK], "temperature": 0})["usage"]["prompt_tokens"]


def test_openais_own_client_reads_calls_from_a_stream(calling: Served) -> None:
    stream = calling.openai.chat.completions.stream(model=NAME, messages=[ASK], tools=[TOOL], temperature=0)  # type: ignore[list-item]
    with stream as events:
        message = events.get_final_completion().choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_a_call_whatever_the_model_would_say(calling: Served, choice: Any) -> None:
    pytest.importorskip("llguidance")
    body = {"messages": [ASK], "tools": [TOOL], "tool_choice": choice, "temperature": 0, "max_tokens": 300}
    whole = calling.ok(PATH, body)
    [answer] = whole["choices"]
    assert answer["message"]["content"] is None
    [call] = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert list(json.loads(call["function"]["arguments"])) == ["city"]
    assert answer["finish_reason"] == "tool_calls"
    assert added_up(calling.stream(PATH, body))["calls"] == [call["function"]]


def test_answers_of_tools_go_to_the_template(calling: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    body = {"messages": [ASK, said, told], "tools": [TOOL], "max_tokens": 1}
    assert calling.ok(PATH, body)["choices"]
    tokens = calling.ok("/tokenize", {"messages": body["messages"], "tools": [TOOL]})["tokens"]
    prompt = calling.ok("/detokenize", {"tokens": tokens})["prompt"]
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    assert "<start>tool\nsunny<end>" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [ASK, {"role": "tool", "tool_call_id": "call_9", "content": "x"}]}, "messages.1.tool_call_id"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "messages": [
                    ASK,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "not json"}}],
                    },
                ]
            },
            "messages.1.tool_calls.0.function.arguments",
        ),
    ],
)
def test_tools_that_do_not_fit_together_are_refused(calling: Served, fields: dict[str, Any], param: str) -> None:
    assert calling.refused(PATH, {"messages": [ASK], "tools": [TOOL], **fields})["param"] == param


# --- formats --------------------------------------------------------------------------------------------------------------------


def test_json_answers_keep_to_their_schema() -> None:
    pytest.importorskip("llguidance")
    with serving(Scripted(says('{"color": "red", "more": 1} and so on')), cells=2048) as served:
        schema = {
            "type": "object",
            "properties": {"color": {"enum": ["red", "blue"]}},
            "required": ["color"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": schema, "strict": True}}
        body = {"messages": [ASK], "temperature": 0, "max_tokens": 200, "response_format": form}
        whole = served.ok(PATH, body)["choices"][0]
        assert json.loads(whole["message"]["content"]) == {"color": "red"}
        assert whole["finish_reason"] == "stop"
        assert added_up(served.stream(PATH, body))["content"] == whole["message"]["content"]
        anything = served.ok(PATH, {**body, "response_format": {"type": "json_object"}, "n": 2})["choices"]
        assert [json.loads(one["message"]["content"]) for one in anything] == [{"color": "red", "more": 1}] * 2


def test_a_schema_that_cannot_be_followed_is_refused() -> None:
    pytest.importorskip("llguidance")
    with serving() as served:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "colour"}}}
        error = served.refused(PATH, {"messages": [ASK], "response_format": form})
        assert error["param"] == "response_format.json_schema.schema"
