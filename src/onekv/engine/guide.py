"""Answers that must be JSON: which tokens may come next, by llguidance. Knows nothing of how the next token is chosen among those.

llguidance comes with `pip install 'onekv[guidance]'` and is loaded at the first use.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from onekv.errors import BatchError, ConfigError, OneKVError
from onekv.models.text import Text

# Without a bound, a model may write white space for ever.
_OPTIONS: Final[Any] = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{1,32}"}


class Guides:
    """Makes guides for one model; any thread may ask.

    Args:
        text:       the model's tokenizer
        vocab_size: how many logits the model gives
    """

    def __init__(self, text: Text, vocab_size: int) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def json_schema(self, schema: Mapping[str, Any]) -> Guide:
        """A guide to JSON of this schema. Properties come in the schema's order.

        Raises:
            ConfigError: llguidance is not installed, or cannot follow this schema, with its reason.
        Cost: the first call reads the vocabulary (about a second for 100 thousand tokens); then milliseconds a schema.
        """
        if not isinstance(schema, Mapping):
            raise ConfigError(f"a JSON schema must be an object, got {schema!r}")
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError("JSON output needs llguidance: pip install 'onekv[guidance]'") from error
        with self._lock:
            tokenizer = self._tokenizer
        try:  # as text, which llguidance reads to a limited depth; a deep dict would overflow its stack
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)), overrides=_OPTIONS)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"this JSON schema cannot be followed: {error}") from error
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()  # finds schemas that nothing fits
        if matcher.is_error():
            raise ConfigError(f"this JSON schema cannot be followed: {_reason(matcher)}")
        return Guide(matcher, self._text.eos_ids)

    def json_object(self) -> Guide:
        """A guide to any JSON object. Raises and costs what `json_schema` does."""
        return self.json_schema({"type": "object"})

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(self._text, self._vocab_size)))


class _Vocabulary:
    """What llguidance asks of a tokenizer.

    Its end token is none of the model's, but an id after the last: `Guide` decides about the model's own, of which there may be many.
    """

    def __init__(self, text: Text, vocab_size: int) -> None:
        self._text = text
        size = max(vocab_size, text.vocab_size)
        self.tokens = [*map(text.token_bytes, range(size)), b"</s>"]
        self.special_token_ids = [*text.special_ids, size]
        self.eos_token_id = size
        self.bos_token_id = None
        special = frozenset(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Token ids of what must come next, in the middle of a text."""
        ids = list(self._text.tokenizer(text, add_special_tokens=False)["input_ids"])
        raw = text.encode()
        # Some tokenizers begin every text with a space, which would not be what must come.
        return ids if b"".join(self.tokens[i] for i in ids) == raw else self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        ids: list[int] = []
        while raw:
            length = next((n for n in range(min(len(raw), self._longest), 0, -1) if raw[:n] in self._ids), 0)
            if not length:  # a character that the vocabulary cannot write
                return ids
            ids.append(self._ids[raw[:length]])
            raw = raw[length:]
        return ids


class Guide:
    """What one answer may still become. Made by `Guides`."""

    def __init__(self, matcher: Any, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._ended = False

    @property
    def is_finished(self) -> bool:
        """Whether the JSON is complete and nothing more can follow but an end token."""
        return self._ended or bool(self._matcher.is_stopped())

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of logits [V] in which tokens that may not come next are -inf. End tokens may come once the JSON is complete.

        Raises:
            OneKVError: llguidance gave up, such as on a text too complex for its limits; says why.
        """
        allowed = np.zeros(len(logits), np.bool_)
        if not self._ended:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), count=None, bitorder="little")
            if self._matcher.is_error():
                raise OneKVError(f"the answer cannot be held to its JSON schema: {_reason(self._matcher)}")
            count = min(len(bits), len(allowed))
            allowed[:count] = bits[:count]
        allowed[[i for i in self._end_ids if i < len(allowed)]] = self._is_complete
        return logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), -math.inf)

    def accept(self, token_id: int) -> None:
        """Note that the answer goes on with this token.

        Raises:
            BatchError: it may not come here. The guide cannot be used any more.
        """
        if token_id in self._end_ids and self._is_complete:
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token_id):
            reason = "the answer is over" if self._ended else _reason(self._matcher)
            raise BatchError(f"token {token_id} may not come here: {reason}", given=token_id)

    def fork(self) -> Guide:
        """A guide in the same state, which goes on by itself."""
        other = Guide(self._matcher.deep_copy(), self._end_ids)
        other._ended = self._ended
        return other

    @property
    def _is_complete(self) -> bool:
        return self._ended or bool(self._matcher.is_accepting())


def _reason(matcher: Any) -> str:
    """Why llguidance gave up, without its internal state."""
    return str(matcher.get_error()).partition("<state>")[0].strip()
