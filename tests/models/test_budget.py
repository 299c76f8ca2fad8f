"""Planned bytes are those of a cache that is really built, and planned cells are enough for the sequences they were planned for."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from families import tiny_model
from onekv import Batch, CacheFull, ConfigError, KVCache, LayerSpec, Window
from onekv.config import MAX_SEQS
from onekv.models import Model, cache_for
from onekv.models.budget import Budget, machine_memory
from onekv.models.skeleton import Skeleton
from test_skeleton import seen

FULL, SLIDING = LayerSpec(2, 8), LayerSpec(2, 8, window=Window.sliding(7))


def of(*layers: LayerSpec, weights: int = 1000, limit: int = 256) -> Skeleton:
    return Skeleton("Toy", layers, weights, limit)


def smollm2_config() -> Any:
    return AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )


@pytest.mark.parametrize("dtypes", [("float32", None), ("bfloat16", None), ("float16", "float32"), ("q8_0", None), ("q4_0", "q8_0")])
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "gemma3n", "gemma4", "mistral_sliding", "deepseek_v3"])
def test_planned_bytes_are_those_of_a_built_cache(name: str, dtypes: tuple[str, str | None]) -> None:
    model = seen(smollm2_config() if name == "smollm2" else tiny_model(name).config)
    k_dtype, v_dtype = dtypes
    budget = Budget(model, 100, 3, max_ubatch=16, k_dtype=k_dtype, v_dtype=v_dtype)
    cache = KVCache(model.layers, budget.num_cells, window_cells=budget.window_cells, k_dtype=k_dtype, v_dtype=v_dtype)
    assert budget.kv_nbytes == cache.nbytes == sum(kind.nbytes for kind in budget.kinds)
    assert budget.nbytes == cache.nbytes + model.weights_nbytes
    stats: Any = cache.stats()
    for g, group in enumerate(stats["groups"]):
        mine = [kind for kind in budget.kinds if kind.group == g]
        assert {kind.num_cells for kind in mine} == {group["cells"]}
        assert sum(kind.nbytes for kind in mine) == group["nbytes"]


@pytest.mark.parametrize(
    ("dtypes", "sources", "window", "nbytes"),
    [
        (("float16", None), {}, None, 1_048_576),
        (("q8_0", None), {}, None, 557_056),
        (("q4_0", "float16"), {}, None, 671_744),
        (("float16", None), {2: 0, 3: 1}, None, 524_288),
        (("float16", None), {}, Window.sliding(96), 720_896),
    ],
    ids=["f16", "q8_0", "q4_0-f16", "shared", "hybrid"],
)
def test_case_S17_bytes_are_those_of_the_arrays(
    dtypes: tuple[str, str | None], sources: dict[int, int], window: Window | None, nbytes: int
) -> None:
    """4 layers, 256 cells, hidden size 1024, 16 query heads, 2 key/value heads of 128."""
    layers = [LayerSpec(2, 128, source=sources.get(i), window=(window if i >= 2 and window else Window.full())) for i in range(4)]
    k_dtype, v_dtype = dtypes
    budget = Budget(of(*layers), 256, 1, max_ubatch=1, k_dtype=k_dtype, v_dtype=v_dtype)
    cache = KVCache(layers, 256, window_cells=96 if window else None, max_seqs=4, k_dtype=k_dtype, v_dtype=v_dtype)
    stored = [tensor for i in cache.store.physical for tensor in (cache.store.raw_keys(i), cache.store.raw_values(i))]
    stats: Any = cache.stats()
    assert cache.nbytes == sum(tensor.nbytes for tensor in stored) == sum(group["nbytes"] for group in stats["groups"]) == nbytes
    assert len(stored) == 2 * (2 if sources else 4)
    if window is None:
        assert budget.kv_nbytes == nbytes


def test_case_S17_a_saved_sequence_is_as_large_as_its_tokens() -> None:
    layers = [LayerSpec(2, 128)] * 4
    sizes = {}
    for num_cells in (64, 1024):
        cache = KVCache(layers, num_cells, max_seqs=4, k_dtype="float16")
        for seq, count in enumerate((10, 40)):
            for step in cache.plan(Batch(list(range(count)), seqs=seq)):
                with step:
                    for layer in range(4):
                        rows = torch.zeros(count, 2, 128)
                        step.attend(layer, rows, rows, rows, scale=1.0)
            file = io.BytesIO()
            cache.save(file, seq)
            sizes[num_cells, count] = len(file.getvalue())
    assert sizes[64, 10] == sizes[1024, 10]
    assert 30 * 4096 <= sizes[64, 40] - sizes[64, 10] < 30 * 4096 + 2000  # 4096 bytes a token


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_recurrent_states_are_counted_with_the_earlier_ones_that_are_kept(name: str) -> None:
    budget = Budget(seen(tiny_model(name).config), 30, 2)
    model = Model(tiny_model(name))
    cache = cache_for(model, 60)
    for _ in range(6):
        model.extend(cache, [0, 1], [[5, 6, 7], [8, 9, 10]])
    assert budget.states_nbytes == cache.states.nbytes > 0
    assert budget.kv_nbytes == cache.nbytes - cache.states.nbytes
    assert budget.nbytes == budget.model.weights_nbytes + budget.kv_nbytes + budget.states_nbytes
    assert budget.max_sequences(budget.nbytes) == 2


def test_the_numbers_of_a_model_with_shared_layers_and_windows_by_hand() -> None:
    """gemma3n, tiny: 2 heads of 8 floats; layers 2 and 3 read 0 and 1. The window of 7 needs 3 * 7 + 16 cells."""
    budget = Budget(seen(tiny_model("gemma3n").config), 100, 3, max_ubatch=16)
    full, sliding = budget.kinds
    assert (full.window, full.num_layers, full.num_owning, full.cell_nbytes, full.num_cells) == (Window.full(), 2, 1, 2 * 2 * 8 * 4, 300)
    assert (sliding.window, sliding.num_layers, sliding.num_owning, sliding.num_cells) == (Window.sliding(7), 2, 1, 37)
    assert (budget.num_cells, budget.window_cells) == (300, 37)
    assert budget.kv_nbytes == 128 * 337


def test_a_window_never_needs_more_than_the_sequences_hold() -> None:
    assert Budget(of(FULL, SLIDING), 10, 2).window_cells == 20
    assert (Budget(of(SLIDING), 10, 2).num_cells, Budget(of(SLIDING), 10, 2).window_cells) == (20, None)
    assert Budget(of(SLIDING), 200, 2, max_ubatch=16).num_cells == 30


def test_two_windows_share_one_number_and_the_first_is_no_smaller() -> None:
    budget = Budget(of(SLIDING, LayerSpec(2, 8, window=Window.sliding(20))), 100, 1, max_ubatch=4)
    assert (budget.num_cells, budget.window_cells) == (24, 24)
    KVCache(budget.model.layers, 24, window_cells=24)


@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "llama4", "mistral_sliding"])
def test_planned_cells_hold_the_sequences_and_hardly_fewer_do(name: str, tokens_of: Any) -> None:
    """Three sequences: the prompts in one batch, then row by row up to their last token."""
    model = Model(tiny_model(name))
    budget = Budget(Skeleton(name, model.layers, 0, model.max_positions), 40, 3, max_ubatch=8)

    def run(num_cells: int, window_cells: int | None) -> None:
        cache = cache_for(model, num_cells, window_cells=window_cells, max_seqs=4)
        rows = tokens_of((40, 40, 40))
        model.extend(cache, [0, 1, 2], [row[:25] for row in rows], max_ubatch=8)
        for at in range(25, 40):
            model.extend(cache, [0, 1, 2], [[row[at]] for row in rows], max_ubatch=8)
        cache.check()

    run(budget.num_cells, budget.window_cells)
    with pytest.raises(CacheFull):
        run(budget.num_cells - 13, budget.window_cells and budget.window_cells - 13)


def test_the_largest_that_fits_fits_and_one_more_does_not() -> None:
    model = of(FULL, SLIDING)
    budget = Budget(model, 50, 3, max_ubatch=4)
    for memory in (0, 1000, budget.nbytes - 1, budget.nbytes, 60_000, 10**9):
        context, sequences = budget.max_context(memory), budget.max_sequences(memory)
        if context:
            assert Budget(model, context, 3, max_ubatch=4).nbytes <= memory
        if context < model.max_positions:
            assert Budget(model, context + 1, 3, max_ubatch=4).nbytes > memory
        if sequences:
            assert Budget(model, 50, sequences, max_ubatch=4).nbytes <= memory
        if sequences < MAX_SEQS:
            assert Budget(model, 50, sequences + 1, max_ubatch=4).nbytes > memory
    assert (budget.max_context(budget.nbytes), budget.max_sequences(budget.nbytes)) == (50, 3)
    assert (budget.max_context(budget.nbytes - 1), budget.max_sequences(budget.nbytes - 1)) == (49, 2)
    assert (budget.max_context(10**9), budget.max_sequences(0)) == (256, 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"context": 0}, "context must be a positive integer, got 0"),
        ({"sequences": -2}, "sequences must be a positive integer, got -2"),
        ({"max_ubatch": True}, "max_ubatch must be a positive integer, got True"),
        ({"context": 257}, "context 257 is too large: Toy takes 256 positions"),
        ({"sequences": 4097}, "sequences 4097 is too large"),
        ({"k_dtype": "int3"}, "k_dtype must be one of .* got 'int3'"),
        ({"v_dtype": "int3"}, "v_dtype must be one of .* got 'int3'"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Budget(of(FULL), **{"context": 10, "sequences": 2, **settings})


def test_more_cells_than_a_cache_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="4000000000 cells"):
        Budget(of(FULL, limit=10**7), 10**6, 4000)
    assert Budget(of(FULL, limit=10**7), 10**6, 2).max_sequences(10**15) == 2147


def test_the_memory_of_this_machine_is_a_plausible_number() -> None:
    assert 10**8 < machine_memory() < 10**15
