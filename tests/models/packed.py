"""Sequences of one model packed into one buffer, and each alone through stock transformers: the two sides of every equality test."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from onekv import Batch, KVCache
from onekv.models import Model

Logits = dict[int, list[torch.Tensor]]


def alone(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits of every token, by transformers alone. [T, V]"""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def scatter_free_cells(model: Model, cache: KVCache, seq: int) -> None:
    """Fill the buffer with two sequences, one row of the first to seven of the other, and remove the other: free cells lie apart."""
    for _ in range(cache.num_cells // 8):
        for step in cache.plan(Batch(np.full(8, 5), seqs=[seq, *[seq - 1] * 7])):
            with step:
                model.forward(step)
    assert cache.num_free < 8
    cache.seq_rm(seq - 1)


def attending(cache: KVCache) -> int:
    """The first layer that has cells."""
    return next(i for i, layer in enumerate(cache.layers) if layer.has_cells)


def feed(model: Model, cache: KVCache, rows: list[tuple[int, int]], into: Logits) -> None:
    """Evaluate rows (sequence, token) in ubatches of 5, all logits wanted; at least one ubatch is cut and its cells lie apart."""
    plan = cache.plan(Batch([t for _, t in rows], seqs=[s for s, _ in rows], outputs="all"), max_ubatch=5)
    assert len(plan) > 1
    assert (np.diff(np.concatenate([step.slots(attending(cache)) for step in plan])) != 1).any()
    for step in plan:
        with step:
            logits = model.forward(step)
        assert logits.dtype == torch.float32
        for row, values in zip(step.ubatch.rows, logits, strict=True):
            into.setdefault(rows[row][0], []).append(values)


def interleaved(rests: dict[int, list[int]]) -> list[tuple[int, int]]:
    """Rows of several sequences in random order; each sequence's own tokens stay in order."""
    order = np.random.default_rng(0).permutation([s for s, rest in rests.items() for _ in rest])
    rest = {s: iter(tokens) for s, tokens in rests.items()}
    return [(int(s), next(rest[s])) for s in order]


def together(model: Model, cache: KVCache, prompts: list[list[int]], shared: int) -> list[torch.Tensor]:
    """Logits of every token of every prompt, from one buffer: the shared prefix once, the rest interleaved. [T, V] each."""
    logits: Logits = {}
    feed(model, cache, [(0, t) for t in prompts[0][:shared]], logits)
    for seq in range(1, len(prompts)):
        cache.seq_cp(0, seq)
        logits[seq] = list(logits[0])
    feed(model, cache, interleaved({s: p[shared:] for s, p in enumerate(prompts)}), logits)
    cache.check()
    return [torch.stack(logits[s]) for s in range(len(prompts))]
