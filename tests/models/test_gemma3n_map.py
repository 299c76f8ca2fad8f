"""Gemma3n's layer reuse, read from running models of both real depths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from onekv import Window
from onekv.models import Model, cache_for

Tiny = Callable[..., PreTrainedModel]


@pytest.mark.parametrize(("depth", "shared"), [(30, 10), (35, 15)])
def test_spec_M07_the_map_of_gemma3n_is_read_from_the_model(depth: int, shared: int, tiny: Tiny) -> None:
    kinds = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(depth)]
    model = Model(
        tiny(
            "gemma3n",
            num_hidden_layers=depth,
            num_kv_shared_layers=shared,
            layer_types=kinds,
            activation_sparsity_pattern=[0.0] * depth,
            intermediate_size=[8] * depth,
        )
    )
    # The first 20 layers own memory; later full layers read 19, later windowed ones 18.
    sources = [None if i < 20 else 19 if i % 5 == 4 else 18 for i in range(depth)]
    assert [layer.source for layer in model.layers] == sources
    cache = cache_for(model, 32, window_cells=16)
    physical = {str(group["window"]): group["layers"] for group in cache.stats()["groups"]}
    assert physical[repr(Window.full())] == [4, 9, 14, 19]
    assert physical[repr(Window.sliding(7))] == [i for i in range(20) if i % 5 != 4]
    model.extend(cache, [0, 1], [[5, 6, 7], [8, 9]])
    cache.check()
