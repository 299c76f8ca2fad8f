"""The decoding loop, on a scripted model: the next token is a function of the sequence's last one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onekv import Batch, CacheFull, ConfigError, KVCache
from onekv.engine.decode import Running, decode
from onekv.engine.sampler import Sampler, Sampling
from tiny import toy, toy_kv

END = 9


class Scripted:
    """Answers every token t with t + 1; runs its rows through a real toy cache."""

    text = SimpleNamespace(eos_ids=frozenset([END]))

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def extend(self, cache: KVCache, seqs: list[Any], tokens: list[list[int]], *, max_ubatch: int) -> torch.Tensor:
        self.batches.append([len(new) for new in tokens])
        flat = [(seq, token) for seq, new in zip(seqs, tokens, strict=True) for token in new]
        for step in cache.plan(Batch([t for _, t in flat], seqs=[s for s, _ in flat]), max_ubatch=max_ubatch):
            with step:
                step.store(0, *toy_kv(step.ubatch))
        return torch.nn.functional.one_hot(torch.tensor([new[-1] + 1 for new in tokens]), 16).float()


def running(cache: KVCache, prompts: list[list[int]], max_tokens: int) -> list[Running]:
    return [Running(cache.sequence(), prompt, Sampler(Sampling()), max_tokens) for prompt in prompts]


def run(model: Scripted, cache: KVCache, each: list[Running], **options: Any) -> list[tuple[int, int]]:
    return [(one.seq.id, token) for one, token in decode(model, cache, each, **options)]  # type: ignore[arg-type]


def test_sequences_go_on_together_until_each_has_ended() -> None:
    cache, model = toy(32), Scripted()
    each = running(cache, [[1, 2, 3], [6, 7], [0]], max_tokens=4)
    assert run(model, cache, each) == [(0, 4), (1, 8), (2, 1), (0, 5), (1, 9), (2, 2), (0, 6), (2, 3), (0, 7), (2, 4)]
    assert [(one.token_ids, one.finish_reason) for one in each] == [
        ([4, 5, 6, 7], "length"),
        ([8, 9], "stop"),
        ([1, 2, 3, 4], "length"),
    ]
    assert model.batches == [[3, 2, 1], [1, 1, 1], [1, 1], [1, 1]]
    # The last token of each was never evaluated.
    assert [one.seq.tokens.tolist() for one in each] == [[1, 2, 3, 4, 5, 6], [6, 7, 8], [0, 1, 2, 3]]


def test_a_long_prompt_is_evaluated_in_pieces() -> None:
    cache, model = toy(32), Scripted()
    assert run(model, cache, running(cache, [[3] * 11], 1), max_ubatch=4) == [(0, 4)]
    assert cache.num_used == 11


def test_a_prompt_needs_a_token() -> None:
    cache = toy(8)
    with pytest.raises(ConfigError, match="at least one"):
        run(Scripted(), cache, running(cache, [[]], 1))


def test_a_full_buffer_stops_the_loop_and_keeps_what_was_made() -> None:
    cache = toy(4)
    each = running(cache, [[1, 2, 3]], 9)
    with pytest.raises(CacheFull, match="1 rows do not fit"):
        run(Scripted(), cache, each)
    assert each[0].token_ids == [4, 5]
    assert each[0].finish_reason is None
    cache.check()
