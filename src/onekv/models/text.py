"""Text to token ids and back: the tokenizer, its chat template, the ids that end an answer, and streaming.

Knows nothing of weights, cells or sampling.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import jinja2
from transformers import PreTrainedTokenizerBase

from onekv.errors import BatchError, ConfigError

_REPLACED: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile("<0x([0-9a-fA-F]{2})>")
_MAX_UTF8: Final = 4  # bytes of the longest character


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET: Final = _byte_alphabet()


class Text:
    """A model's tokenizer.

    Args:
        tokenizer: any transformers tokenizer
        eos_ids:   ids that end an answer, besides the tokenizer's own end token
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self.eos_ids: frozenset[int] = frozenset([*eos_ids, *([] if own is None else [own])])

    @property
    def vocab_size(self) -> int:
        """Number of token ids the tokenizer knows; the model may have more rows."""
        return len(self.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return self.tokenizer.chat_template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a raw prompt, without the chat template.

        Args:
            special: with the special tokens that the tokenizer adds to a raw text by itself, as at its start
        """
        return list(self.tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation, by the model's own template.

        Args:
            messages: dicts with "role" and "content"; those of the assistant may have "tool_calls", with arguments as a dict or as JSON
            tools:    functions the model may call, as {"type": "function", "function": {"name", "description", "parameters"}}
            add_generation_prompt: end with what opens the model's answer
        Raises:
            ConfigError: the model has no chat template, or the template refuses these messages or knows no tools.
        """
        return list(self._templated(messages, tools, add_generation_prompt, tokenize=True))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of which `chat` gives the token ids."""
        return str(self._templated(messages, tools, add_generation_prompt, tokenize=False))

    def _templated(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        if not self.has_chat_template:
            raise ConfigError("this model has no chat template; use a raw prompt")
        given: list[Any] | None = [dict(tool) for tool in tools] if tools else None
        if given and "tools" not in str(self.tokenizer.get_chat_template(tools=given)):
            raise ConfigError("this model's chat template knows no tools; send none, or use a model trained to call them")
        try:
            return self.tokenizer.apply_chat_template(
                [_with_parsed_arguments(message) for message in messages],
                tools=given,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                return_dict=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD; ids beyond the vocabulary have no text.

        Args:
            special: show special tokens, such as the end token
        Raises:
            BatchError: a negative id.
        """
        listed = [int(i) for i in ids]
        if min(listed, default=0) < 0:
            raise BatchError(f"a token id must not be negative, got {min(listed)}", given=min(listed))
        return str(self.tokenizer.decode(listed, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def stream(self, *, special: bool = False) -> TextStream:
        """A detokenizer to be fed one id at a time."""
        return TextStream(self, special)

    def token_bytes(self, token_id: int, *, special: bool = True) -> bytes:
        """The bytes one token adds to a text, a space before its word included; none of an id beyond the vocabulary.

        Args:
            special: of special tokens, too
        """
        token = self._token(token_id)
        if token is None or (not special and token_id in self.special_ids):
            return b""
        of_bytes = self._bytes_of(token)
        if of_bytes is not None:
            return of_bytes
        # After another token, because some tokenizers leave out the space of the first.
        return self.decode([*self._anchor, token_id], special=special)[len(self.decode(self._anchor)) :].encode()

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a", special=False)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text, such as the end token."""
        return frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def _decoders(self) -> tuple[str, ...] | None:
        """Kinds of the tokenizer's decoders, in order; None: it is none of the tokenizers library, and what it decodes by is not known."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        if backend.decoder is None:
            return ()
        state = json.loads(backend.decoder.__getstate__())
        return tuple(stage["type"] for stage in (state["decoders"] if state["type"] == "Sequence" else [state]))

    def _token(self, token_id: int) -> str | None:
        """How the vocabulary writes a token; None: there is no such token."""
        token: Any = self.tokenizer.convert_ids_to_tokens(token_id)
        return token if isinstance(token, str) else None

    def _bytes_of(self, token: str) -> bytes | None:
        """The bytes a token stands for wherever it is; None: its text depends on its neighbours, or is not made of bytes."""
        if self._is_byte_level:
            mapped = [_BYTE_ALPHABET.get(character, -1) for character in token]
            return token.encode() if -1 in mapped else bytes(mapped)
        if self._decoders and "ByteFallback" in self._decoders:
            match = _BYTE_TOKEN.fullmatch(token)
            return None if match is None else bytes([int(match[1], 16)])
        return None

    @property
    def _is_byte_level(self) -> bool:
        return self._decoders == ("ByteLevel",)


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as templates expect them: parsed, where they came as the text of a JSON object."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None
            function = {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else dict(message)


class TextStream:
    """Gives out text as soon as its characters are complete, and bytes that are no UTF-8 as U+FFFD as soon as that is certain.

    A token that stands for bytes is read as such. Any other is decoded together with the tokens before it, because a tokenizer may write
    it differently at the start of a text.
    Cost: O(tokens of two characters) a token.
    """

    def __init__(self, text: Text, special: bool) -> None:
        self._text = text
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: list[int] = []  # given out, enough that what follows is not decoded as a start
        self._broken = False  # whether `_before` ends with bytes that are no character, which would spoil the decoding of bytes after it
        self._held: list[int] = []  # of an incomplete character

    @property
    def is_incomplete(self) -> bool:
        """Whether a character has begun and waits for its last bytes."""
        return bool(self._held)

    def push(self, token_id: int) -> str:
        """The text this token completes; "" while a character is incomplete.

        Raises:
            BatchError: a negative id.
        """
        if token_id < 0:
            raise BatchError(f"a token id must not be negative, got {token_id}", given=token_id)
        if self._text._decoders is None:
            return self._push_text(token_id)
        token = self._text._token(token_id)
        if token is None or (not self._special and token_id in self._text.special_ids):
            return ""
        of_bytes = self._text._bytes_of(token)
        if of_bytes is None:
            return self._push_text(token_id)
        out = self._utf8.decode(of_bytes)
        num_incomplete = len(self._utf8.getstate()[0])
        if self._text._is_byte_level:  # what is decoded never depends on what came before
            self._held = [token_id] if num_incomplete else []
            return out
        self._held.append(token_id)
        if not out:
            return out
        if _REPLACED in out or self._broken:
            cut = len(self._held) - num_incomplete
            self._before, self._held, self._broken = self._held[:cut], self._held[cut:], _REPLACED in out
        else:
            out = self._after(self._before, self._held)
            self._before, self._held = self._held, []
        return out

    def flush(self) -> str:
        """What an incomplete character at the end leaves: U+FFFD or "". The stream then begins a new text."""
        out = self._utf8.decode(b"", True)
        if self._held and not out:
            out = self._after(self._before, self._held)
        self._utf8.reset()
        self._before, self._held, self._broken = [], [], False
        return out

    def _push_text(self, token_id: int) -> str:
        lost = self._utf8.decode(b"", True)
        if lost:
            self._before, self._held = self._before + self._held, []
        self._held.append(token_id)
        piece = self._after(self._before, self._held)
        # Of a tokenizer that does not say how it decodes, a character may be missing its last bytes.
        if self._text._decoders is None and piece.endswith(_REPLACED) and len(self._held) < _MAX_UTF8:
            return lost
        self._before = self._held if piece else self._before + self._held
        self._held, self._broken = [], False
        return lost + piece

    def _after(self, before: list[int], ids: list[int]) -> str:
        whole = self._text.decode([*before, *ids], special=self._special)
        return whole[len(self._text.decode(before, special=self._special)) :]
