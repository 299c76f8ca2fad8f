"""Tool calls as Hermes and Qwen models write them, read from text as it comes: a JSON object of name and arguments between two tags."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from onekv.errors import ConfigError
from onekv.models.text import Text

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_WRITTEN: Final = re.compile(rf"{OPEN}\s*(\{{.*?\}})\s*{CLOSE}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function.

    Attributes:
        name:      the function
        arguments: the text of a JSON object
        id:        "call_" and 24 hexadecimal digits
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


def supports_tools(text: Text) -> bool:
    """Whether the model's chat template takes tools and writes calls the way `ToolParser` reads them. Cost: one use of the template."""
    if not text.has_chat_template:
        return False
    probe = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "probe", "arguments": {}}}]},
    ]
    try:
        rendered = text.chat_text(messages, tools=[{"type": "function", "function": probe}], add_generation_prompt=False)
    except ConfigError:
        return False
    return any((call := _parse(body)) is not None and call.name == "probe" for body in _WRITTEN.findall(rendered))


def forced_call_schema(tools: Sequence[Mapping[str, Any]], name: str | None = None) -> dict[str, Any]:
    """The JSON schema of one call: of the function `name`, or of any of the tools.

    An answer held to it begins after `OPEN` and a line break in the prompt; `ToolParser(inside=True)` reads it.

    Args:
        tools: functions, as {"type": "function", "function": {"name", "parameters"}}; one without "parameters" takes none
    Raises:
        ConfigError: no tool, none of this name, or one without a name or with parameters that are no schema.
    """
    functions = [_function(tool) for tool in tools]
    chosen = [f for f in functions if name is None or f["name"] == name]
    if not chosen:
        known = ", ".join(f["name"] for f in functions) or "none"
        raise ConfigError("a call needs at least one tool" if name is None else f"there is no tool {name!r}; the tools are: {known}")
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for i, function in enumerate(chosen):
        parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        try:
            definitions[str(i)] = _moved(parameters, f"#/$defs/{i}")
        except RecursionError as error:
            raise ConfigError(f"the parameters of tool {function['name']!r} are nested too deep") from error
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{i}"}}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"], "additionalProperties": False})
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f'a tool must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, got {tool!r}')
    if not isinstance(function.get("parameters", {}), (Mapping, type(None))):
        raise ConfigError(f"parameters of tool {function['name']!r} must be a JSON schema, got {function['parameters']!r}")
    return function


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to its own parts go to where it is now."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, to) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            moved["$ref"] = to + reference[1:]
        return moved
    return [_moved(part, to) for part in schema] if isinstance(schema, list) else schema


class ToolParser:
    """Takes an answer's text as it comes, and gives out its content and its calls.

    What cannot be read as a call is content, tags and all. White space is held back until it is clear whether a call follows; beside calls
    it is left out. An answer that ends inside a call has made it if its JSON is complete.

    Args:
        inside: the prompt ends with `OPEN`, so the answer begins inside a call

    >>> parser = ToolParser()
    >>> parser.push('Let me see. <tool_call>{"name": "clock", "argum')
    ('Let me see.', [])
    >>> content, [call] = parser.push('ents": {}}</tool_call>')
    >>> content, call.name, call.arguments
    ('', 'clock', '{}')
    """

    def __init__(self, inside: bool = False) -> None:
        self._text = ""  # not given out, nor understood
        self._before = ""  # what was read before the call we are in: white space and tag
        self._inside = inside
        self._searched = 0  # how much of the call has no closing tag that ends it
        self._follows_call = False  # whether no content came since the last call

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take the next text; (content, calls) that are certain with it."""
        self._text += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._read_call(content, calls) if self._inside else self._read_content(content):
            pass
        return "".join(content), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The end of the answer: (content, calls) of what is left."""
        before, left, inside = self._before, self._text, self._inside
        self._before, self._text, self._inside = "", "", False
        if inside:
            call = _parse(left, cut_short=True)
            return (before + left, []) if call is None else ("", [call])
        return ("" if self._follows_call and not left.strip() else left), []

    def _read_content(self, content: list[str]) -> bool:
        """Give out what is content for certain; whether a call begins."""
        at = self._text.find(OPEN)
        if at < 0:
            at = next(i for i in range(max(0, len(self._text) - len(OPEN)), len(self._text) + 1) if OPEN.startswith(self._text[i:]))
            self._take(len(self._text[:at].rstrip()), content)
            return False
        self._take(len(self._text[:at].rstrip()), content)
        end = self._text.index(OPEN) + len(OPEN)
        self._before, self._text = self._text[:end], self._text[end:]
        self._inside, self._searched = True, 0
        return True

    def _take(self, count: int, content: list[str]) -> None:
        if count:
            content.append(self._text[:count])
            self._text = self._text[count:]
            self._follows_call = False

    def _read_call(self, content: list[str], calls: list[ToolCall]) -> bool:
        """Read the call to its end; False: it has none yet."""
        start = self._text.lstrip()[:1]
        if start and start != "{":
            self._leave(content)
            return True
        at = self._text.find(CLOSE, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._text) - len(CLOSE) + 1)
            return False
        body, end = self._text[:at], at + len(CLOSE)
        call = _parse(body)
        if call is not None:
            calls.append(call)
            self._text, self._before, self._inside, self._follows_call = self._text[end:], "", False, True
        elif _is_inside_string(body):
            self._searched = end
        else:
            self._leave(content, end)
        return True

    def _leave(self, content: list[str], end: int = 0) -> None:
        """What was read of this call, up to `end`, is content."""
        content.append(self._before + self._text[:end])
        self._text, self._before, self._inside, self._follows_call = self._text[end:], "", False, False


def _parse(body: str, cut_short: bool = False) -> ToolCall | None:
    """The call that a text is; None: it is none. `cut_short`: part of the closing tag may follow it."""
    body = body.strip()
    try:
        value, end = _JSON.raw_decode(body)
    except (ValueError, RecursionError):
        return None
    left = body[end:].strip()
    if left and not (cut_short and CLOSE.startswith(left)):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object's text
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    if not _is_unicode(value["name"]):
        return None
    return ToolCall(value["name"], written if _is_unicode(written) else json.dumps(arguments))


def _is_inside_string(body: str) -> bool:
    """Whether a text that is no JSON ends inside one of its strings."""
    try:
        _JSON.decode(body.strip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON: Final = json.JSONDecoder(parse_constant=_no_constant)


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which cannot be sent."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
