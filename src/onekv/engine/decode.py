"""The loop: several sequences of one cache, each fed what it has not seen yet, all in one batch, until each has ended.

No prefill or decode phase: a row catches up with its tokens, and gets a new one when it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Listing
from dataclasses import dataclass, field
from typing import Literal

from onekv.cache import KVCache, Sequence
from onekv.engine.sampler import Sampler
from onekv.errors import ConfigError
from onekv.models import Model

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Running:
    """One sequence being decoded.

    Attributes:
        seq:       where its cells are
        pending:   token ids not evaluated yet; never empty when decoding starts
        sampler:   chooses its tokens
        max_tokens: most tokens to generate
        token_ids: what was generated, the end token included
        finish_reason: None while it runs
    """

    seq: Sequence
    pending: list[int]
    sampler: Sampler
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def decode(model: Model, cache: KVCache, running: Listing[Running], *, max_ubatch: int = 512) -> Iterator[tuple[Running, int]]:
    """Yield (sequence, token id) as tokens are made, until every sequence has ended. An ended one keeps its cells.

    The last token of a sequence is not evaluated, so it has no cell.

    Raises:
        ConfigError: a sequence with nothing to evaluate.
        CacheFull: the cells do not hold the next step; what was made so far stays.
    """
    for one in running:
        if not one.pending:
            raise ConfigError(f"{one.seq!r} has no token to evaluate; a prompt needs at least one")
    while active := [one for one in running if one.finish_reason is None]:
        logits = model.extend(cache, [one.seq for one in active], [one.pending for one in active], max_ubatch=max_ubatch)
        for one, row in zip(active, logits, strict=True):
            token = one.sampler(row)
            one.token_ids.append(token)
            one.pending = [token]
            if token in model.text.eos_ids:
                one.finish_reason = "stop"
            elif len(one.token_ids) == one.max_tokens:
                one.finish_reason = "length"
            yield one, token
