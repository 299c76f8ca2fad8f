"""Biases by distance (ALiBi, T5): from the positions of query and key, never from cells or row counts."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from onekv import Buckets, KVCache
from onekv.attention import backends
from onekv.core.window import bucket_of
from tiny import T, batch_of, load_cells, toy, toy_kv

EVERY_BACKEND = pytest.mark.parametrize("backend", backends())


def attend(cache: KVCache, rows: Any, heads: int = 1, causal: bool = True, **score: Any) -> torch.Tensor:
    """Evaluate a batch in a toy cache with all products 0; [T, H]."""
    out = []
    for step in cache.plan(batch_of(rows), causal=causal):
        with step:
            k, v = toy_kv(step.ubatch)
            out.append(step.attend(0, torch.zeros(len(step.ubatch), heads, 2), k, v, scale=1.0, **score)[..., 0])
    return torch.cat(out)


def mean(values: list[float], biases: list[float]) -> float:
    weights = [math.exp(bias) for bias in biases]
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


ALIBI = [
    pytest.param(True, [[-2, -1, None, 0, None], [-3, -2, None, -1, 0]], id="causal"),
    pytest.param(False, [[-2, -1, None, 0, -1], [-3, -2, None, -1, 0]], id="not causal"),
]


@EVERY_BACKEND
@pytest.mark.parametrize(("causal", "expected"), ALIBI)
def test_spec_M01_the_bias_is_minus_the_distance_of_each_visible_cell(backend: str, causal: bool, expected: list[list[int | None]]) -> None:
    """One hot value per cell and a slope of 1 read the weights back, and so the biases."""
    cache = toy(6, backend=backend)
    for rows in ("0:0..1 1:0", "0:2..3"):
        (step,) = cache.plan(batch_of(rows), causal=causal)
        with step:
            n = len(step.ubatch)
            hot = [torch.full((n, 1, 1), float(cell)) for cell in range(5)]
            slots = step.slots(0)
            k = torch.zeros(n, 1, 2)
            step.store(0, k, hot[0])
            weights = []
            for cell in range(5):
                cache.store.values(0)[:5] = torch.tensor([float(cell == i) for i in range(5)])[:, None, None]
                weights.append(step.attend(0, torch.zeros(n, 1, 2), scale=1.0, alibi_slopes=torch.ones(1)).flatten())
    assert slots.tolist() == [3, 4]
    for row, biases in enumerate(expected):
        seen = [cell for cell, bias in enumerate(biases) if bias is not None]
        read = [math.log(weights[cell][row]) - math.log(weights[3 + row][row]) for cell in seen]
        assert read == pytest.approx([biases[cell] for cell in seen], abs=1e-5)
        assert all(weights[cell][row] == 0 for cell in range(5) if cell not in seen)


SLOPES = {2: [0.0625, 0.00390625], 3: [0.0625, 0.00390625, 0.25]}


@EVERY_BACKEND
@pytest.mark.parametrize("heads", SLOPES)
@pytest.mark.parametrize("moved", [0, 7])
def test_case_G01_a_single_row_is_biased_by_positions_in_shuffled_cells(backend: str, heads: int, moved: int) -> None:
    cache = toy(8, backend=backend)
    load_cells(cache, "3{0} 0{0} 2{0} 1{0} . . . .")
    cache.seq_rm(0, 3, -1)
    if moved:
        cache.seq_add(0, 0, -1, moved)
    slopes = torch.tensor(SLOPES[heads])
    out = attend(cache, T([3], 0, 3 + moved), heads, alibi_slopes=slopes)[0].tolist()
    assert out == pytest.approx([mean([0, 1, 2, 3], [-3 * s, -2 * s, -s, 0]) for s in SLOPES[heads]], abs=1e-6)
    assert out[0] == pytest.approx(1.57804, abs=1e-5)


@EVERY_BACKEND
def test_case_G01_a_prefill_and_single_rows_agree(backend: str) -> None:
    slopes = torch.tensor(SLOPES[2])
    once, steps = toy(8, backend=backend), toy(8, backend=backend)
    prefill = attend(once, T(range(6), 0, 0), 2, alibi_slopes=slopes)
    singles = torch.cat([attend(steps, T([p], 0, p), 2, alibi_slopes=slopes) for p in range(6)])
    torch.testing.assert_close(singles, prefill, atol=1e-6, rtol=0)
    assert not torch.allclose(prefill[:, 0], prefill[:, 1])


def bucketed(buckets: int, **options: Any) -> Buckets:
    """Bias of a bucket: its own number, on a scale that shows."""
    return Buckets(torch.arange(buckets, dtype=torch.float32)[:, None] / 8, **options)


@EVERY_BACKEND
def test_case_G02_one_row_behind_a_long_cache_gets_the_buckets_of_its_distances(backend: str) -> None:
    cache = toy(32, backend=backend)
    attend(cache, T(range(20), 0, 0))
    table = bucketed(32)
    (out,) = attend(cache, T([20], 0, 20), bias=table).flatten().tolist()
    known = {d: d for d in range(17)} | {17: 16, 18: 16, 19: 17, 20: 17}
    assert out == pytest.approx(mean([*range(21)], [known[20 - p] / 8 for p in range(21)]), abs=1e-5)
    assert out != pytest.approx(10)  # as with one bucket for all


ONE_WAY = {0: 0, 1: 1, 15: 15, 16: 16, 18: 16, 19: 17, 20: 17, 127: 31, 500: 31}
TWO_WAY = {-200: 15, -8: 8, -7: 7, -3: 3, 0: 0, 3: 19, 7: 23, 8: 24, 200: 31}


def test_case_G02_distances_fall_into_the_models_buckets() -> None:
    assert bucket_of(-np.array([*ONE_WAY]), 32, 128, False).tolist() == [*ONE_WAY.values()]
    assert bucket_of(np.array([*TWO_WAY]), 32, 128, True).tolist() == [*TWO_WAY.values()]


@EVERY_BACKEND
def test_case_G02_an_encoder_tells_before_from_after(backend: str) -> None:
    cache = toy(8, backend=backend)
    table = bucketed(32, bidirectional=True)
    out = attend(cache, T(range(5), 0, 0), causal=False, bias=table).flatten().tolist()
    for query in range(5):
        biases = [(query - p if p <= query else 16 + p - query) / 8 for p in range(5)]
        assert out[query] == pytest.approx(mean([*range(5)], biases), abs=1e-5)


@EVERY_BACKEND
def test_biases_follow_a_shift_and_a_compaction_by_position(backend: str) -> None:
    """Cells move, positions count."""
    cache = toy(16, backend=backend)
    attend(cache, [*T(range(4), 0, 0), *T([9], 1, 0), *T(range(4, 8), 0, 4)])
    cache.seq_rm(1)
    cache.seq_rm(0, 1, 4)
    cache.seq_add(0, 4, -1, -3)
    cache.compact()
    slope = 0.3
    (out,) = attend(cache, T([50], 0, 5), alibi_slopes=torch.tensor([slope])).flatten().tolist()
    assert out == pytest.approx(mean([0, 4, 5, 6, 7, 50], [-slope * d for d in (5, 4, 3, 2, 1, 0)]), abs=1e-5)
