"""Text to token ids and back: the tokenizer, its chat template, the ids that end an answer, and streaming.

Knows nothing of weights, cells or sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import jinja2
from transformers import PreTrainedTokenizerBase

from onekv.errors import BatchError, ConfigError

_REPLACED: Final = "\ufffd"


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


class TextStream:
    """Gives out text as soon as its characters are complete.

    Each id is decoded together with those of the piece before it, because a tokenizer may write a token differently at the start of a text.
    Cost: O(tokens of two pieces) a token.
    """

    def __init__(self, text: Text, special: bool) -> None:
        self._text = text
        self._special = special
        self._ids: list[int] = []  # of the last piece given out, then those of the next
        self._given = 0  # how many of them are given out

    def push(self, token_id: int) -> str:
        """The text this token completes; "" while a character is incomplete.

        Raises:
            BatchError: a negative id.
        """
        self._ids.append(token_id)
        piece = self._piece()
        if not piece or piece.endswith(_REPLACED):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return piece

    def flush(self) -> str:
        """What an incomplete character at the end leaves: U+FFFD or "". The stream then begins a new text."""
        piece = self._piece()
        self._ids, self._given = [], 0
        return piece

    def _piece(self) -> str:
        whole = self._text.decode(self._ids, special=self._special)
        return whole[len(self._text.decode(self._ids[: self._given], special=self._special)) :]
