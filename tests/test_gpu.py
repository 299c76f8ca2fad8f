"""A cache on an accelerator does what a cache on the CPU does, and what one wrote the other reads."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onekv import Batch, Buckets, KVCache, LayerSpec, OneKVError, Rope, Window
from tiny import GPU, ON_GPU, state_of

pytestmark = ON_GPU

HEADS = 4
LAYERS = [
    LayerSpec(2, 8, value_dim=4, rope=Rope((1.0, 0.1, 0.01))),
    LayerSpec(2, 8, window=Window.sliding(5), rope=Rope((1.0, 0.3), layout="interleaved", offset=2)),
    LayerSpec(2, 8, value_dim=4, source=0),
    LayerSpec(1, 16, rope=Rope((0.5,), part="value", offset=4)),
]
TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-2}


def both(num_cells: int = 96, **settings: Any) -> list[KVCache]:
    """The same cache on the accelerator and on the CPU."""
    return [KVCache(LAYERS, num_cells, max_seqs=16, device=device, **settings) for device in (GPU, "cpu")]


def feed(cache: KVCache, seqs: list[int], seed: int, device: str = "cpu", **score: Any) -> torch.Tensor:
    """Random queries, keys and values of one row for each entry of `seqs`, through every layer; all outputs, flat, on the CPU."""
    rng, outs = torch.Generator().manual_seed(seed), []
    for step in cache.plan(Batch([seq + 1 for seq in seqs], seqs=seqs, outputs="all"), max_ubatch=7):
        with step:
            rows = len(step.ubatch)
            for i, spec in enumerate(cache.layers):
                q, k, v = (
                    torch.randn(rows, heads, width, generator=rng).to(device)
                    for heads, width in ((HEADS, spec.head_dim), (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.v_dim))
                )
                out = step.attend(i, q, *((k, v) if spec.source is None else ()), scale=0.3, **score)
                assert out.device == q.device
                outs.append(out.flatten().cpu())
    return torch.cat(outs)


def history(cache: KVCache, device: str = "cpu", **score: Any) -> torch.Tensor:
    """Prompts, forks, and decoding of sequences of several lengths."""
    outs = [feed(cache, [0] * 9 + [1] * 4 + [2] * 13, 1, device, **score)]
    cache.seq_cp(0, 3)
    cache.seq_cp(2, 4, -1, 10)
    cache.seq_rm(1, 3)
    for at in range(4):
        outs.append(feed(cache, [3, 0, 1, 2, 4], 2 + at, device, **score))
    outs.append(feed(cache, [0, 1, 1, 4, 4, 4, 3], 9, device, **score))
    return torch.cat(outs)


def same_cells(one: KVCache, other: KVCache) -> bool:
    return state_of(one) == state_of(other)


def close_kv(one: KVCache, other: KVCache, seqs: list[int], tolerance: float) -> bool:
    pairs = [
        (read(one)(i, s).cpu(), read(other)(i, s).cpu())
        for s in seqs
        for i in range(len(LAYERS))
        for read in (lambda c: c.keys, lambda c: c.values)
    ]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def scores() -> dict[str, dict[str, Any]]:
    rng = torch.Generator().manual_seed(5)
    return {
        "plain": {},
        "softcap and sinks": {"softcap": 2.0, "sinks": torch.randn(HEADS, generator=rng)},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
        "buckets": {"bias": Buckets(torch.randn(8, HEADS, generator=rng), max_distance=16)},
    }


@pytest.mark.parametrize("score", scores())
@pytest.mark.parametrize("k_dtype", TOLERANCE)
@pytest.mark.parametrize("v_layout", ["rows", "transposed"])
def test_store_and_attend_in_every_dtype_are_those_of_the_cpu(k_dtype: str, v_layout: str, score: str) -> None:
    there, here = both(k_dtype=k_dtype, v_layout=v_layout)
    found, expected = history(there, GPU, **scores()[score]), history(here, **scores()[score])
    assert torch.allclose(found, expected, rtol=TOLERANCE[k_dtype], atol=TOLERANCE[k_dtype])
    assert same_cells(there, here)
    assert close_kv(there, here, [0, 1, 2, 3, 4], 0.0)  # what is stored is equal to the bit
    there.check()


def test_queries_on_the_cpu_are_answered_there() -> None:
    there, here = both()
    assert torch.allclose(history(there, "cpu"), history(here), atol=1e-4)


def test_the_reference_runs_there_too() -> None:
    there, here = both(backend="reference")
    assert torch.allclose(history(there, GPU), history(here), atol=1e-5)


CHANGES: dict[str, Callable[[KVCache], object]] = {
    "add": lambda c: c.seq_add(0, 3, -1, 7),
    "divide": lambda c: c.seq_div(2, 4, 12, 2),
    "close a gap": lambda c: (c.seq_rm(4, 3, 5), c.seq_add(4, 5, -1, -2)),
    "compact": lambda c: (c.seq_rm(1), c.compact()),
    "reorder": lambda c: c.reorder([0, 1, 2], [2, 0, 0]),
    "fork and drop": lambda c: (c.seq_cp(1, 7), c.seq_rm(1), c.seq_keep(7)),
    "clear": lambda c: c.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_moves_cells_and_positions_does_the_same(change: str) -> None:
    there, here = both(160)
    for cache in (there, here):
        history(cache)
        CHANGES[change](cache)
        cache.update()
        cache.check()
    assert same_cells(there, here)
    assert close_kv(there, here, list(range(8)), 1e-5)
    if change != "clear":
        seqs = [s for s in range(8) if here.seq_pos_max(s) >= 0 and here.can_continue_at(s, here.seq_pos_max(s) + 1)]
        assert seqs
        assert torch.allclose(feed(there, seqs, 20, GPU), feed(here, seqs, 20), atol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("k_dtype", TOLERANCE)
def test_what_is_saved_on_one_device_loads_on_the_other(k_dtype: str, whole: bool, tmp_path: Path) -> None:
    for source, target in (both(k_dtype=k_dtype), both(k_dtype=k_dtype)[::-1]):
        history(source)
        file = io.BytesIO()
        source.save(file, None if whole else 2)
        source.save(tmp_path / "state", None if whole else 2)
        file.seek(0)
        assert target.load(file, None if whole else 2) == target.load(tmp_path / "state", None if whole else 2)
        assert target.keys(0, 2).device.type == target.config.device
        seqs = [0, 1, 2, 3, 4] if whole else [2]
        assert np.array_equal(source.cells.positions(2), target.cells.positions(2))
        assert close_kv(source, target, [s for s in seqs if s != 2] if whole else [], 0.0)
        tolerance = {"rtol": TOLERANCE[k_dtype], "atol": TOLERANCE[k_dtype]}
        assert torch.allclose(feed(source, [2], 30), feed(target, [2], 30), **tolerance)


def test_a_failed_step_is_undone_there() -> None:
    there, _ = both()
    history(there)
    before = state_of(there)
    (step,) = there.plan(Batch([1, 2], seqs=[0, 1]))
    with pytest.raises(OneKVError, match=r"before layers \[1, 3\] were stored"), step:
        step.store(0, torch.ones(2, 2, 8, device=GPU), torch.ones(2, 2, 4, device=GPU))
    assert state_of(there) == before
    there.check()
