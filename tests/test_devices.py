"""No operation mixes devices, shown without an accelerator: the meta device stands for one, which computes shapes and gives no numbers.

`test_gpu` and `models/test_gpu_models` compare numbers where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from families import tiny_model
from onekv import Batch, KVCache, LayerSpec, Rope, Window
from onekv.models import Model, cache_for
from tiny import OneDevice, state_of

LAYERS = [
    LayerSpec(2, 8, value_dim=4, rope=Rope((1.0, 0.1))),
    LayerSpec(2, 8, window=Window.sliding(5), rope=Rope((1.0,), "interleaved", part="value")),
]
CHANGES: dict[str, Callable[[KVCache], object]] = {
    "shift": lambda c: (c.seq_add(0, 2, -1, 3), c.update()),
    "shift of shared cells": lambda c: (c.seq_cp(0, 3), c.seq_add(3, 2, -1, 3), c.update()),
    "divide": lambda c: (c.seq_div(0, 2, -1, 2), c.update()),
    "compact": lambda c: (c.seq_rm(0), c.compact()),
    "reorder": lambda c: c.reorder([0, 1], [1, 0]),
    "clear": lambda c: c.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_operation_of_a_cache_mixes_devices(change: str) -> None:
    caches = [KVCache(LAYERS, 32, max_seqs=4, device=device) for device in ("meta", "cpu")]
    for cache in caches:
        with OneDevice() as seen:
            for step in cache.plan(Batch([1] * 9, seqs=[0] * 6 + [1] * 3)):
                with step:
                    for i, spec in enumerate(LAYERS):  # queries, keys and values come from the CPU
                        step.store(i, torch.ones(9, 2, 8), torch.ones(9, 2, spec.v_dim))
            CHANGES[change](cache)
        assert seen.counted[cache.config.device] >= 4
        assert cache.keys(0, 1).device.type == cache.config.device
    assert state_of(caches[0]) == state_of(caches[1])


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "phi", "falcon", "deepseek_v3", "llama_dynamic"])
def test_no_operation_of_a_forward_mixes_devices(name: str) -> None:
    """A model that was probed on the CPU, because a probe reads numbers; then it moves. Models of one window only: a window is known by the
    address of its mask, and everything on the meta device has the same one."""
    model = Model(tiny_model(name))
    model.extend(cache_for(model, 16), [0], [[1, 2]])
    fingerprint = model.fingerprint
    model.transformers_model.set_experts_implementation("batched_mm")
    model.transformers_model.to("meta")
    cache = cache_for(model, 64, max_seqs=4)
    assert (cache.config.device, cache.config.fingerprint) == ("meta", fingerprint)
    with OneDevice() as seen:
        for tokens in ([[1, 2, 3], [4], [5, 6]], [[1], [4], [5]]):
            logits = model.extend(cache, [0, 1, 2], tokens)
            assert (logits.device.type, logits.shape) == ("meta", (3, model.vocab_size))
    assert seen.counted["meta"] > 20 * max(seen.counted["cpu"], 1)


def test_a_mixture_is_seen() -> None:
    """Negative control: a mask left on the CPU."""
    with OneDevice(), pytest.raises(AssertionError, match=r"cpu.*meta"):
        torch.ones(2, 2, device="meta").masked_fill(torch.ones(2, 2, dtype=torch.bool), 0.0)
