"""Text to token ids and back: the tokenizer, its chat template, the ids that end an answer, and streaming.

Owns the reading of a tokenizer as bytes per token, so that text can be given out as soon as its bytes are complete. Knows nothing of
weights, cells or sampling.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import jinja2
from transformers import PreTrainedTokenizerBase

from onekv.errors import BatchError, ConfigError

_REPLACED: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


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
        self._pieces = _Pieces(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of token ids the tokenizer knows; the model may have more rows."""
        return len(self.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return self.tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens the tokenizer adds to raw text by itself, and no chat template."""
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, by the model's own template.

        Args:
            messages: dicts with "role" and "content"
            add_generation_prompt: end with what opens the model's answer
        Raises:
            ConfigError: the model has no chat template, or the template refuses these messages.
        """
        if not self.has_chat_template:
            raise ConfigError("this model has no chat template; use a raw prompt")
        try:
            ids: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return list(ids)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD.

        Equal to the tokenizer's own `decode` on valid text. Where a SentencePiece tokenizer would spoil a whole run of byte tokens for one
        invalid byte, only that byte is replaced.

        Args:
            special: show special tokens, such as the end token
        """
        stream = self.stream(special=special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, special: bool = False) -> TextStream:
        """A detokenizer to be fed one id at a time."""
        return self._pieces.stream(special)


class TextStream:
    """Gives out text as soon as its bytes are complete; the joined pieces equal `Text.decode` of all ids.

    Cost: O(1) a token for byte-level and SentencePiece tokenizers.
    """

    def __init__(self, bytes_of: Callable[[int, bool], bytes | None]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True

    def push(self, token_id: int) -> str:
        """The text this token completes; "" while a character is incomplete.

        Raises:
            BatchError: a negative id.
        """
        raw = self._bytes_of(_checked(token_id), self._is_first)
        if raw is None:
            return ""
        self._is_first = False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What an incomplete character at the end leaves: U+FFFD or "". The stream is then as new, in the middle of a text."""
        return self._decoder.decode(b"", final=True)


class _WholeTextStream(TextStream):
    """For decoders that cannot be read as bytes per token: decodes everything again at every token. Cost: O(tokens so far) a token."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = ""

    def push(self, token_id: int) -> str:
        self._ids.append(_checked(token_id))
        text = self._decode(self._ids)
        if text.endswith(_REPLACED) or not text.startswith(self._given):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        self._given = text
        return new


def _checked(token_id: int) -> int:
    if token_id < 0:
        raise BatchError(f"token id {token_id} is negative", given=token_id)
    return token_id


class _Pieces:
    """What each token id contributes to the text, as bytes, by the tokenizer's own decoder.

    Decoders that are read: ByteLevel; SentencePiece's Replace, ByteFallback, Fuse and Strip; Metaspace. With others a stream decodes the
    whole text again and again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._cache: dict[int, bytes | None] = {}
        self._spell = _spelling(tokenizer)

    def stream(self, special: bool) -> TextStream:
        if self._spell is None:
            return _WholeTextStream(
                lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))
            )
        return TextStream(self._shown if special else self._plain)

    def _plain(self, token_id: int, is_first: bool) -> bytes | None:
        return None if token_id in self._special else self._shown(token_id, is_first)

    def _shown(self, token_id: int, is_first: bool) -> bytes | None:
        """None where a token has no part in the text at all."""
        if not is_first and token_id in self._cache:
            return self._cache[token_id]
        token: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        raw = None if token is None or self._spell is None else self._spell(token, is_first)
        if not is_first:
            self._cache[token_id] = raw
        return raw


Spell = Callable[[str, bool], bytes]


def _spelling(tokenizer: PreTrainedTokenizerBase) -> Spell | None:
    """token, whether it opens the text -> its bytes; None if this decoder is none we can read."""
    if not tokenizer.is_fast:
        return None
    decoder = tokenizer.backend_tokenizer.decoder
    stages = [] if decoder is None else _stages(json.loads(decoder.__getstate__()))
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds == ["Metaspace"]:
        return _sentencepiece(stages[0]["replacement"], False, opening=stages[0]["prepend_scheme"] != "never")
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and kinds[0] == "Replace":
        strips = [stage for stage in stages if stage["type"] == "Strip"]
        spaces = [stage["pattern"].get("String") for stage in stages if stage["type"] == "Replace" and stage["content"] == " "]
        plain = len(spaces) == kinds.count("Replace") == 1 and spaces[0] is not None
        if plain and all(s["content"] == " " and s["start"] <= 1 and s["stop"] == 0 for s in strips) and len(strips) <= 1:
            return _sentencepiece(spaces[0], "ByteFallback" in kinds, strip=any(s["start"] for s in strips))
    return None


def _stages(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder and those it is a sequence of, in order."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for inner in decoder["decoders"] for stage in _stages(inner)]


def _byte_alphabet() -> dict[str, int]:
    """The character GPT-2's byte-level alphabet writes for each byte: printable bytes stand for themselves, the others follow at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def _byte_level(token: str, is_first: bool) -> bytes:
    """An added token with a character outside the alphabet is written as it is."""
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:
        return token.encode()


def _sentencepiece(space: str, byte_fallback: bool, *, strip: bool = False, opening: bool = False) -> Spell:
    """How SentencePiece vocabularies are written.

    Args:
        space:         the character that stands for a space
        byte_fallback: tokens such as <0x0A> are bytes
        strip:         one space at the start of the text is dropped
        opening:       all spaces of the first token are dropped (Metaspace)
    """

    def spell(token: str, is_first: bool) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if byte is not None:
            raw = bytes([int(byte[1], 16)])
        else:
            raw = token.replace(space, "" if is_first and opening else " ").encode()
        return raw.removeprefix(b" ") if is_first and strip else raw

    return spell
