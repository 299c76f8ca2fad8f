"""How fast a model evaluates prompts and decodes here: the measurement behind `onekv bench`, made of the calls a user's program makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil

from onekv.config import MAX_SEQS
from onekv.errors import ConfigError, RequestTooLarge
from onekv.models import Model, cache_for

_UBATCH = 512


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement.

    Attributes:
        sequences: how many ran at a time
        context:   tokens of each prompt
        new_tokens: tokens decoded by each
        prefill_s, decode_s: seconds that all prompts took, and all decoding
        kv_nbytes: bytes of the buffer
    """

    sequences: int
    context: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    kv_nbytes: int

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of all prompts, per second."""
        return self.sequences * self.context / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of all sequences, per second."""
        return self.sequences * self.new_tokens / self.decode_s


def num_tokens(sequences: int, context: int, new_tokens: int) -> int:
    """How many tokens `measure` reports."""
    return sequences * (context + new_tokens)


def measure(
    model: Model,
    sequences: int,
    context: int,
    new_tokens: int,
    *,
    k_dtype: str = "float32",
    v_dtype: str | None = None,
    advance: Callable[[int], object] = lambda tokens: None,
) -> Speed:
    """Time random prompts that share nothing, and greedy decoding after them in one batch a token. End tokens end nothing.

    Args:
        advance: called with the number of tokens done since the last call
    Raises:
        ConfigError: a number below 1, too many sequences, or an unknown dtype.
        RequestTooLarge: prompt and answer exceed the model's context.
    """
    for name, value in (("sequences", sequences), ("context", context), ("new_tokens", new_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")
    if sequences > MAX_SEQS:
        raise ConfigError(f"sequences {sequences} is too large: the most is {MAX_SEQS}")
    length = context + new_tokens
    if length > model.max_positions:
        raise RequestTooLarge(
            f"{context} tokens and {new_tokens} new ones exceed the model's context of {model.max_positions}",
            needed=length,
            limit=model.max_positions,
        )
    cache = cache_for(model, sequences * length, max_seqs=sequences, k_dtype=k_dtype, v_dtype=v_dtype)
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (sequences, context)).tolist()
    seqs = [cache.sequence() for _ in prompts]
    together = max(1, _UBATCH // context)  # prompts a batch, so that a forward is full
    chosen: list[int] = []
    start = time.perf_counter()
    for first in range(0, sequences, together):
        part = slice(first, first + together)
        chosen += model.extend(cache, seqs[part], prompts[part], max_ubatch=_UBATCH).argmax(-1).tolist()
        advance(len(seqs[part]) * context)
    middle = time.perf_counter()
    for _ in range(new_tokens):
        chosen = model.extend(cache, seqs, [[token] for token in chosen], max_ubatch=max(_UBATCH, sequences)).argmax(-1).tolist()
        advance(sequences)
    return Speed(sequences, context, new_tokens, middle - start, time.perf_counter() - middle, cache.nbytes)


def other_load(seconds: float = 0.5) -> float:
    """Cores that other processes keep busy, looked at for some time."""
    return float(psutil.cpu_percent(seconds)) / 100 * (psutil.cpu_count() or 1)
