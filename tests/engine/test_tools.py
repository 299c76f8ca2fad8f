"""Tool calls in text that comes piece by piece, and in chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from onekv import ConfigError
from onekv.engine.tools import ToolCall, ToolParser, forced_call_schema, supports_tools
from onekv.models.text import Text

Scripted = Callable[[Sequence[bytes]], tuple[Text, list[int]]]
# As Qwen 2.5 writes it, without its default system prompt.
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each call, return a json object within <tool_call></tool_call> tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "clock"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("weather", '{"city": "Rome"}')


def parsed(pieces: Sequence[str], inside: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """All content and all calls of an answer that comes in these pieces."""
    parser = ToolParser(inside)
    given = [*map(parser.push, pieces), parser.finish()]
    return "".join(content for content, _ in given), [(call.name, call.arguments) for _, calls in given for call in calls]


# --- parsing ------------------------------------------------------------------------------------------------------------------------

ANSWERS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("plain text < and <tool", "plain text < and <tool", []),
    (" a \n\n b \n", " a \n\n b \n", []),
    (CALL, "", [ROME]),
    (f"Let me see.\n\n{CALL}\n{CALL}\n", "Let me see.", [ROME, ROME]),
    (f"{CALL}\nDone.\n", "\nDone.\n", [ROME]),
    ('<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
    ('<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>', "", [("say", '{"text": "</tool_call>"}')]),
    ('<tool_call>{"name": "say", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("say", '{"a": 1}')]),
    ('<tool_call>{"name": "say", "arguments": {"a": "é\\ud83d"}}</tool_call>', "", [("say", '{"a": "\\u00e9\\ud83d"}')]),
    # Ended early, by the length limit or by the end token.
    (CALL.removesuffix("l>"), "", [ROME]),
    (CALL.removesuffix("\n</tool_call>"), "", [ROME]),
    ('x <tool_call>\n{"name": "weather", "arg', 'x <tool_call>\n{"name": "weather", "arg', []),
    ("x \n<tool_ca", "x \n<tool_ca", []),
    # No calls, though they look like some.
    ("Use the <tool_call> tag, \nplease", "Use the <tool_call> tag, \nplease", []),
    (f' <tool_call>{{"name": 1}}</tool_call> {CALL}', ' <tool_call>{"name": 1}</tool_call>', [ROME]),
    (f"a <tool_call>{{nothing}}</tool_call>\n{CALL}", "a <tool_call>{nothing}</tool_call>", [ROME]),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', []),
    ('<tool_call>{"name": "f"} and</tool_call>', '<tool_call>{"name": "f"} and</tool_call>', []),
    ("<tool_call>{" + '"a":{' * 9 + "</tool_call>", "<tool_call>{" + '"a":{' * 9 + "</tool_call>", []),
]


@pytest.mark.parametrize(("answer", "content", "calls"), ANSWERS)
def test_an_answer_is_its_content_and_its_calls_whole_or_a_character_at_a_time(
    answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed([answer]) == (content, calls)
    assert parsed(list(answer)) == (content, calls)


@settings(deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_content_and_calls(data: st.DataObject) -> None:
    answer = "".join(
        data.draw(st.lists(st.sampled_from([a for a, _, _ in ANSWERS] + ["<tool_call>", "</tool_call>", " ", '"']), max_size=4))
    )
    cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=12))), len(answer)]
    assert parsed([answer[i:j] for i, j in pairwise(cuts)]) == parsed([answer])


def test_text_that_begins_no_call_is_not_held_back() -> None:
    parser = ToolParser()
    assert parser.push("a <b") == ("a <b", [])
    assert parser.push("c <tool") == ("c", [])
    assert parser.push("box>") == (" <toolbox>", [])
    assert parser.push("<tool_call> is") == ("<tool_call> is", [])


def test_a_call_is_given_out_with_its_closing_tag() -> None:
    parser = ToolParser()
    assert parser.push(CALL[:-1]) == ("", [])
    content, [call] = parser.push(CALL[-1])
    assert (content, call.name, call.arguments) == ("", *ROME)
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)
    assert ToolCall("f", "{}").id != ToolCall("f", "{}").id


def test_a_parser_may_begin_inside_a_call() -> None:
    body = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert parsed(list(body), inside=True) == ("", [ROME])
    assert parsed([body + "</tool_call>\n" + CALL], inside=True) == ("", [ROME, ROME])
    assert parsed([body[:-1]], inside=True) == (body[:-1], [])
    assert parsed(["no"], inside=True) == ("no", [])


def test_deep_json_is_content_and_no_recursion_error() -> None:
    deep = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 200_000 + "</tool_call>"
    assert parsed([deep]) == (deep, [])


# --- templates ----------------------------------------------------------------------------------------------------------------------


def text_with(scripted: Scripted, template: str | None) -> Text:
    text, _ = scripted([])
    text.tokenizer.chat_template = template
    return text


def test_a_template_that_writes_calls_between_tags_supports_tools(scripted: Scripted) -> None:
    assert supports_tools(text_with(scripted, QWEN))
    assert not supports_tools(text_with(scripted, None))
    assert not supports_tools(text_with(scripted, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    as_xml = QWEN.replace('{"name": "\' }}', "<function=' }}")
    assert as_xml != QWEN
    assert not supports_tools(text_with(scripted, as_xml))
    assert not supports_tools(text_with(scripted, "{{ raise_exception('no') }}{{ tools }}"))


def test_tools_reach_the_template_and_calls_come_back_the_same(scripted: Scripted) -> None:
    text = text_with(scripted, QWEN)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rendered = text.chat_text(messages, tools=TOOLS)
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n{json.dumps(TOOLS[1])}\n</tools>" in rendered
    assert rendered.endswith(f"<|im_start|>assistant\n\n{CALL}<|im_end|>\n<|im_start|>assistant\n")
    assert call["function"]["arguments"] == '{"city": "Rome"}'  # type: ignore[index]
    assert "tools" not in text.chat_text(messages)


def test_tools_for_a_template_that_knows_none_are_refused(scripted: Scripted) -> None:
    text = text_with(scripted, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match="knows no tools"):
        text.chat([{"role": "user", "content": "a"}], tools=TOOLS)
    assert text.chat([{"role": "user", "content": "a"}], tools=[]) == text.chat([{"role": "user", "content": "a"}])


def test_messages_that_a_template_stumbles_over_are_a_config_error(scripted: Scripted) -> None:
    text = text_with(scripted, "{% for m in messages %}{{ m.content + 'x' }}{% endfor %}")
    with pytest.raises(ConfigError, match="refuses"):
        text.chat([{"role": "user", "content": None}])


# --- forced calls -------------------------------------------------------------------------------------------------------------------


def test_a_forced_call_is_of_the_named_function() -> None:
    assert forced_call_schema(TOOLS, "weather") == {
        "type": "object",
        "properties": {"name": {"const": "weather"}, "arguments": {"$ref": "#/$defs/0"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "$defs": {"0": WEATHER["parameters"]},
    }


def test_a_required_call_is_of_any_function_and_one_without_parameters_takes_none() -> None:
    schema = forced_call_schema(TOOLS)
    assert [one["properties"]["name"]["const"] for one in schema["anyOf"]] == ["weather", "clock"]
    assert schema["$defs"]["1"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_references_inside_parameters_go_to_where_they_are_now() -> None:
    tree = {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "items": [{"$ref": "#"}, {"$ref": "https://x/#"}]}
    schema = forced_call_schema([{"type": "function", "function": {"name": "f", "parameters": tree}}])
    assert schema["$defs"]["0"]["$defs"]["node"]["properties"]["next"] == {"$ref": "#/$defs/0/$defs/node"}
    assert schema["$defs"]["0"]["items"] == [{"$ref": "#/$defs/0"}, {"$ref": "https://x/#"}]
    assert tree["items"] == [{"$ref": "#"}, {"$ref": "https://x/#"}]


@pytest.mark.parametrize(
    ("tools", "name", "match"),
    [
        (TOOLS, "sing", "no tool 'sing'; the tools are: weather, clock"),
        ([], None, "at least one"),
        ([{"type": "function"}], None, "must be"),
    ],
)
def test_a_call_that_no_tool_can_take_is_refused(tools: list[dict[str, Any]], name: str | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        forced_call_schema(tools, name)
