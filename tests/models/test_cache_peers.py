"""What transformers' own cache tests ask of a cache that appends and crops, asked of ours and written anew.

docs/conformance.md lists their tests, each with ours or with the reason why there is none; most of ours are in test_hf_cache.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import onekv
from onekv.models.hf_cache import SequenceCache

Tiny = Callable[..., PreTrainedModel]
Tokens = Callable[..., list[list[int]]]
Inputs = dict[str, torch.Tensor]

NEW = 12


def attached(model: PreTrainedModel, rows: int = 1, num_cells: int = 600, **settings: Any) -> SequenceCache:
    """An empty cache of some rows, and the model attached to it."""
    kv = onekv.cache_for(model, num_cells, **settings)
    return onekv.as_cache(kv, [kv.sequence() for _ in range(rows)])


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """Without an end token, so that every test generates its full length."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def left_padded(prompts: list[list[int]], width: int) -> Inputs:
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.int64), torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, inputs: Inputs, cache: Any = None, **how: Any) -> Any:
    torch.manual_seed(0)
    given = {} if cache is None else {"cache": cache}
    return model.generate(**inputs, **given, **{"max_new_tokens": NEW, "do_sample": False, **how})


def feed(model: PreTrainedModel, cache: Any, tokens: list[list[int]]) -> torch.Tensor:
    """One forward of new tokens without padding; logits [B, T, V]."""
    with torch.no_grad():
        return model(torch.tensor(tokens), cache=cache).logits


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() < 2e-5 * max(1.0, float(other.abs().max())))


def layers_of(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [B, G, T, D] of every layer, copied."""
    return [(layer[0].clone(), layer[1].clone()) for layer in cache]


# --- appending ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj"])
def test_appending_leaves_what_was_there_and_each_layer_grows_by_itself(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    ours, stock = attached(model, rows=2), DynamicCache()
    before = None
    for tokens in ([[5, 6], [7, 8]], [[9], [10]], [[11, 12, 13], [14, 15, 16]]):
        for cache in (ours, stock):
            feed(model, cache, tokens)
        after = layers_of(ours)
        for mine, theirs in zip(after, layers_of(stock), strict=True):
            assert is_close(mine[0], theirs[0])
            assert is_close(mine[1], theirs[1])
        if before is not None:
            width = before[0][0].shape[2]
            for old, new in zip(before, after, strict=True):
                assert torch.equal(old[0], new[0][:, :, :width])
                assert torch.equal(old[1], new[1][:, :, :width])
        before = after
    assert ours.get_seq_length() == stock.get_seq_length() == 6
    assert not torch.equal(after[0][0], after[1][0])


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["one each", "grouped", "one for all"])
def test_the_shape_is_that_of_the_key_heads_and_of_what_was_fed(num_kv_heads: int, tiny: Tiny) -> None:
    model = tiny("llama", num_key_value_heads=num_kv_heads)
    cache = attached(model, rows=3)
    feed(model, cache, [[5, 6, 7, 8, 9]] * 3)
    assert len(cache) == model.config.num_hidden_layers
    for keys, values in cache:
        assert keys.shape == values.shape == (3, num_kv_heads, 5, 8)


def test_generating_takes_no_more_memory(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("llama"))
    cache = attached(model, num_cells=40)
    size, place = cache.kv.nbytes, cache.kv.store.keys(0).data_ptr()
    generate(model, left_padded(tokens_of((9,)), 9), cache)
    assert cache.kv.nbytes == size
    assert cache.kv.num_used == 9 + NEW - 1
    assert cache.kv.store.keys(0).data_ptr() == place


# --- windows ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "sizes"), [("gemma2", {"window_cells": 8}), ("mistral_sliding", {"num_cells": 8})])
def test_a_prompt_longer_than_the_window_then_one_token_then_two_sees_what_stock_sees(
    family: str, sizes: dict[str, int], tiny: Tiny
) -> None:
    model = tiny(family, sliding_window=2)
    ours, stock = attached(model, **sizes), DynamicCache(config=model.config)
    for tokens in ([[5, 6, 7]], [[8]], [[9, 10]], [[11]], [[12, 13, 14, 15]], [[16]]):
        assert is_close(feed(model, ours, tokens), feed(model, stock, tokens))
    assert ours.get_seq_length() == stock.get_seq_length() == 12
    ours.kv.check()


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 9], ids=["below", "as long", "above", "twice"])
def test_a_prompt_below_at_and_above_the_window_gives_the_tokens_of_stock(prompt_len: int, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("gemma2", sliding_window=4))
    inputs = left_padded(tokens_of((prompt_len,)), prompt_len)
    assert torch.equal(generate(model, inputs, attached(model)), generate(model, inputs))


# --- generate -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gptj", "phi3", "smollm3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_batch_gives_the_tokens_of_no_cache_at_all(family: str, attention: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny(family))
    model.set_attn_implementation(attention)
    inputs = left_padded(tokens_of((4, 11)), 11)
    expected = generate(model, inputs, use_cache=False)
    out = generate(model, inputs, cache := attached(model, rows=2), return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out.cache is cache
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("more", [1, 5, 32])
def test_more_padding_on_the_left_changes_nothing_and_takes_no_cells(more: int, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("llama"))
    prompts = tokens_of((6, 3))
    expected = generate(model, left_padded(prompts, 6))[:, 6:]
    cache = attached(model, rows=2)
    assert torch.equal(generate(model, left_padded(prompts, 6 + more), cache)[:, 6 + more :], expected)
    assert cache.kv.num_used == 6 + 3 + 2 * (NEW - 1)
    assert cache.get_seq_length() == 6 + more + NEW - 1


def test_beams_change_places_and_end_as_in_stock(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("llama"))
    inputs = left_padded(tokens_of((5, 8)), 8)
    how = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    expected = generate(model, inputs, **how)
    out = generate(model, inputs, attached(model, rows=2), **how)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.beam_indices, expected.beam_indices)
    assert is_close(out.sequences_scores, expected.sequences_scores)
    assert any(len(set(beams) - {-1}) > 1 for beams in out.beam_indices.tolist())  # or nothing was reordered


def test_a_long_sampled_answer_has_the_scores_of_stock(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("qwen3"))
    inputs = left_padded(tokens_of((10,)), 10)
    how = {"do_sample": True, "max_new_tokens": 60, "return_dict_in_generate": True, "output_scores": True}
    expected = generate(model, inputs, **how)
    out = generate(model, inputs, attached(model), **how)
    assert torch.equal(out.sequences, expected.sequences)
    assert len(out.scores) == 60
    for mine, theirs in zip(out.scores, expected.scores, strict=True):
        finite = theirs.isfinite()
        assert torch.equal(mine.isfinite(), finite)
        assert is_close(mine[finite], theirs[finite])


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_going_on_from_a_returned_cache_is_generating_in_one_go(how: dict[str, Any], family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny(family))
    inputs = left_padded(tokens_of((7, 7)), 7)
    first = generate(model, inputs, attached(model, rows=2), max_new_tokens=5, return_dict_in_generate=True)
    assert first.cache.get_seq_length() == 7 + 5 - 1
    more = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    second = generate(model, more, first.cache, max_new_tokens=6, **how)
    assert torch.equal(second, generate(model, more, max_new_tokens=6, **how))
    if not how:
        assert torch.equal(second, generate(model, inputs, max_new_tokens=11))
    assert first.cache.reused == (11,) * first.cache.batch_size


def test_a_prompt_is_evaluated_once_and_continued_from_copies(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("llama"))
    prefix, one, two = tokens_of((6, 4, 3))
    cache = attached(model)
    feed(model, cache, [prefix])
    before = layers_of(cache)
    for end in (one, two):
        twin = copy.deepcopy(cache)
        inputs = {"input_ids": torch.tensor([prefix + end])}
        assert torch.equal(generate(model, inputs, twin), generate(model, inputs))
        assert twin.reused == (6,)
    for old, new in zip(before, layers_of(cache), strict=True):
        assert torch.equal(old[0], new[0])
        assert torch.equal(old[1], new[1])


# --- rows ---------------------------------------------------------------------------------------------------------------------------


def test_any_choice_of_rows_is_that_of_stock(tiny: Tiny) -> None:
    model = tiny("llama")
    generator = torch.Generator().manual_seed(3)
    ours, stock = attached(model, rows=4), DynamicCache()
    for cache in (ours, stock):
        feed(model, cache, [[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]])
    for step in range(6):
        beams = torch.randint(0, 4, (4,), generator=generator)
        new = torch.randint(3, 90, (4, 1), generator=generator).tolist()
        for cache in (ours, stock):
            cache.reorder_cache(beams)
            if step == 3:
                cache.crop(-2)
        assert is_close(feed(model, ours, new), feed(model, stock, new))
    for mine, theirs in zip(layers_of(ours), layers_of(stock), strict=True):
        assert is_close(mine[0], theirs[0])
        assert is_close(mine[1], theirs[1])
    ours.kv.check()
