"""transformers' own `generate` and `forward` over our cells: what comes out is what stock transformers gives, whatever is done between."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import onekv
from families import settle
from onekv import BatchError, CacheFull, ConfigError, KVCache, OneKVError, WindowLost
from onekv.models import Model
from onekv.models.hf_cache import SequenceCache

Tiny = Callable[..., PreTrainedModel]
Tokens = Callable[..., list[list[int]]]
Inputs = dict[str, torch.Tensor]

FAMILIES = ["llama", "qwen3", "mistral_sliding", "gemma2", "gemma3n", "gpt2", "falcon", "xglm", "deepseek_v2", "dots3_note"]
NEW = 16


def attached(model: PreTrainedModel, rows: int = 1, num_cells: int = 600, **settings: Any) -> SequenceCache:
    """An empty cache of some rows on cells of its own, and the model attached."""
    kv = onekv.cache_for(model, num_cells, **settings)
    return onekv.as_cache(kv, [kv.sequence() for _ in range(rows)])


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """Generation that no end token cuts short, so that every test runs its full length."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def padded(prompts: list[list[int]], side: str = "left", pad: int = 0) -> Inputs:
    """Prompts as a rectangle with a mask."""
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), pad), torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place] = torch.tensor(prompt)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, inputs: Inputs, cache: Any = None, **how: Any) -> Any:
    """`generate` from a fixed seed, greedy unless told otherwise."""
    torch.manual_seed(0)
    given = {} if cache is None else {"cache": cache}
    return model.generate(**inputs, **given, **{"max_new_tokens": NEW, "do_sample": False, **how})


def feed(model: PreTrainedModel, cache: Any, tokens: list[int] | list[list[int]], **how: Any) -> torch.Tensor:
    """One forward of new tokens without padding; logits [B, T, V]."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        return model(ids if ids.ndim == 2 else ids[None], cache=cache, **how).logits


def alone(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of a whole sequence, by stock transformers without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() < 2e-5 * max(1.0, float(other.abs().max())))


def stored(cache: SequenceCache) -> list[list[int]]:
    """Token ids of every row."""
    return [cache.kv.cells.tokens(seq).tolist() for seq in cache.seqs]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Per forward and row, the positions it saw in layer 0."""
    seen: list[list[list[int]]] = []
    stock = Model.forward

    def forward(self: Model, step: Any) -> torch.Tensor:
        positions = step.plan.cache.cells.groups[0].position
        seen.append([sorted(positions[row].tolist()) for row in step.mask(0)])
        return stock(self, step)

    monkeypatch.setattr(Model, "forward", forward)
    return seen


# --- generate -----------------------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "several beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_tokens_of_stock_transformers_for_a_padded_batch(family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny(family))
    inputs = padded(tokens_of((5, 12, 9)))
    expected = {name: generate(model, inputs, **how) for name, how in WAYS.items()}
    for name, how in WAYS.items():
        cache = attached(model, rows=3)
        assert torch.equal(generate(model, inputs, cache, **how), expected[name]), name
        cache.kv.check()
        assert cache.get_seq_length() == 12 + NEW - 1
        assert cache.reused == (0,) * cache.batch_size
    assert len({tuple(map(tuple, ids.tolist())) for ids in expected.values()}) == len(WAYS)


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding_gives_the_tokens_of_greedy_decoding(family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = endless(tiny(family)), endless(tiny(family))
    generator = torch.Generator().manual_seed(5)
    for weight in draft.parameters():
        weight.data += 0.004 * torch.randn(weight.shape, generator=generator)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])}
    expected = generate(model, inputs, max_new_tokens=40)
    crops: list[int] = []
    crop = SequenceCache.crop
    monkeypatch.setattr(SequenceCache, "crop", lambda self, n: crops.append(n) or crop(self, n))
    for how in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        cache = attached(model)
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=40, **how), expected)
        assert stored(cache) == [expected[0, :-1].tolist()]
    assert len(crops) < 79  # some drafts were accepted
    assert min(crops) < 0  # and some were not


def test_sampled_assisted_decoding_draws_what_stock_draws(tiny: Tiny) -> None:
    model = endless(tiny("llama"))
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5]])}
    expected = generate(model, inputs, do_sample=True, prompt_lookup_num_tokens=3)
    assert torch.equal(generate(model, inputs, attached(model), do_sample=True, prompt_lookup_num_tokens=3), expected)


class Collected(BaseStreamer):
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


def test_streaming_and_detailed_output_are_as_without_our_cache(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("qwen3"))
    inputs = padded(tokens_of((8,)))
    streams = Collected(), Collected()
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = generate(model, inputs, streamer=streams[0], **details)
    cache = attached(model)
    got = generate(model, inputs, cache, streamer=streams[1], **details)
    assert torch.equal(got.sequences, expected.sequences)
    assert got.cache is cache
    for name in ("scores", "logits"):
        assert all(is_close(a, b) for a, b in zip(got[name], expected[name], strict=True))
    assert streams[0].given == streams[1].given
    assert len(streams[1].given) == NEW + 2


def test_an_end_token_stops_rows_as_in_stock(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("llama"))
    inputs = padded(tokens_of((5, 9)))
    free = generate(model, inputs)
    end = int(free[0, 9 + 3])
    expected = generate(model, inputs, eos_token_id=end)
    assert (expected[0, 9 + 4 :] == 0).all()
    assert torch.equal(generate(model, inputs, attached(model, rows=2), eos_token_id=end), expected)


def test_a_prompt_fed_in_chunks_gives_the_same_tokens(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("mistral_sliding"))
    inputs = padded(tokens_of((13, 21)))
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, attached(model, rows=2), prefill_chunk_size=6), expected)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "dots3_note"])
@pytest.mark.parametrize("length", [4, 20])
def test_beams_fit_a_window_group_that_is_barely_large_enough(length: int, family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny(family))
    inputs = padded(tokens_of((length,)))
    expected = generate(model, inputs, num_beams=3, max_new_tokens=30)
    smallest = _smallest_fit(model, inputs)
    cache = attached(model, window_cells=smallest)
    assert torch.equal(generate(model, inputs, cache, num_beams=3, max_new_tokens=30), expected)
    # Three windows of 7 that share no cell, or the prompt of all beams in one step.
    assert smallest <= max(3 * 7, 3 * length)
    cache.kv.check()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "dots3_note"])
@pytest.mark.parametrize("length", [4, 20])
def test_beams_in_a_window_group_one_cell_too_small_stop_with_whole_rows(length: int, family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny(family))
    inputs = padded(tokens_of((length,)))
    smallest = _smallest_fit(model, inputs)
    cache = attached(model, window_cells=smallest - 1)
    with pytest.raises(CacheFull) as caught:
        generate(model, inputs, cache, num_beams=3, max_new_tokens=30)
    assert caught.value.group == 1
    assert caught.value.free == caught.value.needed - 1
    cache.kv.check()
    rows = stored(cache)
    if length == 20:  # the prompt did not fit
        assert rows == [[], [], []]
        return
    assert cache.get_seq_length() > length + 2  # some beams had fitted
    assert all(row[:length] == inputs["input_ids"][0].tolist() for row in rows)
    assert {len(row) for row in rows} == {cache.get_seq_length()}
    # Every row by itself goes on where it is.
    for row in range(3):
        twin = copy.deepcopy(cache)
        twin.batch_select_indices(torch.tensor([row]))
        assert is_close(feed(model, twin, [5])[0], alone(model, [*rows[row], 5])[-1:])
        del twin
        gc.collect()


def _smallest_fit(model: PreTrainedModel, inputs: Inputs) -> int:
    """The smallest window group in which three beams run; one of fewer cells is too small."""
    low, high = 8, 80
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(model, inputs, middle) else (middle + 1, high)
    return low


def _fits(model: PreTrainedModel, inputs: Inputs, window_cells: int) -> bool:
    try:
        generate(model, inputs, attached(model, window_cells=window_cells), num_beams=3, max_new_tokens=30)
    except CacheFull:
        return False
    return True


@pytest.mark.parametrize("length", [10, 63, 64, 65, 66, 90])
def test_generate_goes_on_where_frequencies_change_and_keeps_them(length: int, tiny: Tiny, tokens_of: Tokens) -> None:
    """Phi-3 with LongRoPE, original context 64: transformers drops its cache there and takes other frequencies; ours are those of long
    sequences from the start."""
    model, twin, stock, settled = (endless(tiny("phi3_longrope")) for _ in range(4))
    prompts = tokens_of((length, length - 7))
    inputs = padded(prompts)
    cache = attached(model, rows=2)
    got = generate(model, inputs, cache, max_new_tokens=60)
    assert [len(row) for row in stored(cache)] == [length + 59, length - 7 + 59]
    cache.kv.check()
    mine = Model(twin)
    kv = onekv.cache_for(mine, 600, max_seqs=4)
    new = [*prompts]
    for step in range(60):
        logits = mine.extend(kv, [0, 1], new)
        chosen = logits.argmax(dim=1).tolist()
        assert got[:, length + step].tolist() == chosen
        new = [[token] for token in chosen]
    if length > 64:
        assert torch.equal(got[:1], generate(stock, padded(prompts[:1]), max_new_tokens=60))
    settle(settled)
    assert torch.equal(got, generate(settled, inputs, max_new_tokens=60))


def test_stock_frequencies_of_short_sequences_would_be_seen(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("phi3_longrope"))
    inputs = padded(tokens_of((20,)))
    expected = generate(model, inputs, max_new_tokens=60)
    assert not torch.equal(generate(model, inputs, attached(model), max_new_tokens=60), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "xglm", "deepseek_v3"])
def test_a_second_turn_reuses_what_is_there_and_says_how_much(family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny(family))
    prompts, more = tokens_of((5, 12, 9)), tokens_of((7, 3, 4), seed=2)
    cache = attached(model, rows=3)
    answers = generate(model, padded(prompts), cache)[:, 12:].tolist()
    history = [p + a for p, a in zip(prompts, answers, strict=True)]
    second = padded([h + m for h, m in zip(history, more, strict=True)])
    expected = generate(model, second)
    assert torch.equal(generate(model, second, cache), expected)
    assert cache.reused == tuple(len(h) - 1 for h in history)  # the last token of an answer was never evaluated
    # A third turn that rewrites the past of one row only.
    history[1][6] += 1 if history[1][6] < 90 else -1
    third = padded([h + m for h, m in zip(history, more, strict=True)])
    assert torch.equal(generate(model, third, cache), generate(model, third))
    assert cache.reused == (len(history[0]) + 6, 6, len(history[2]) + 3)
    cache.kv.check()


def test_new_tokens_alone_continue_a_padded_batch_as_in_stock(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("llama"))
    prompts, more = tokens_of((5, 9)), tokens_of((4, 4), seed=2)
    first = padded(prompts)
    caches = attached(model, rows=2), DynamicCache()
    for cache in caches:
        generate(model, first, cache, max_new_tokens=6)
    mask = torch.cat([first["attention_mask"], torch.ones(2, 5 + 4, dtype=torch.int64)], dim=1)
    inputs = {"input_ids": torch.tensor(more), "attention_mask": mask}
    got, expected = (generate(model, inputs, cache) for cache in caches)
    assert torch.equal(got, expected)
    assert caches[0].reused == (5 + 5, 9 + 5)


def test_one_shared_prompt_is_continued_by_every_row_of_a_larger_batch(tiny: Tiny, tokens_of: Tokens) -> None:
    model = endless(tiny("llama"))
    prompts = tokens_of((12, 14, 16), shared=10)
    cache = attached(model)
    feed(model, cache, prompts[0][:10])
    inputs = padded(prompts)
    assert torch.equal(generate(model, inputs, cache, max_new_tokens=4), generate(model, inputs, max_new_tokens=4))
    assert cache.reused == (10, 10, 10)
    assert cache.kv.num_used == 10 + (2 + 4 + 6) + 3 * 3


# --- forward ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [0, 1, 4, torch.tensor([3, -1, 0])], ids=["all", "last", "four", "some"])
def test_logits_come_back_in_the_shape_the_caller_asked_for(side: str, keep: Any, tiny: Tiny, tokens_of: Tokens) -> None:
    model = tiny("llama")
    inputs = padded(tokens_of((5, 9, 7)), side)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs, position_ids=(real.cumsum(1) - 1).clamp(min=0), logits_to_keep=keep).logits
        got = model(**inputs, logits_to_keep=keep, cache=attached(model, rows=3)).logits
    at = real[:, keep] if isinstance(keep, torch.Tensor) else real[:, -keep:]
    assert got.shape == expected.shape
    assert is_close(got[at], expected[at])
    assert (got[~at] == 0).all()
    assert at.any()


@pytest.mark.parametrize("family", ["llama", "falcon", "xglm", "deepseek_v3"])
def test_visible_padding_would_change_the_result(family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model = tiny(family)
    inputs = padded(tokens_of((5, 9)), pad=4)
    with torch.no_grad():
        expected = model(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits[:, -1]
        got = model(**inputs, cache=attached(model, rows=2)).logits[:, -1]
        unmasked = model(inputs["input_ids"], cache=attached(model, rows=2)).logits[:, -1]
    assert is_close(got, expected)
    assert is_close(unmasked[1], expected[1])
    assert (unmasked[0] - expected[0]).abs().max() > 1e-2


def test_right_padding_in_the_middle_of_a_conversation_holds_no_cells(tiny: Tiny, tokens_of: Tokens) -> None:
    model = tiny("llama")
    prompts, more = tokens_of((5, 9)), tokens_of((6, 2), seed=2)
    cache = attached(model, rows=2)
    one, two = padded(prompts, "right"), padded(more, "right")
    mask = torch.cat([one["attention_mask"], two["attention_mask"]], dim=1)
    with torch.no_grad():
        model(**one, cache=cache)
        got = model(two["input_ids"], attention_mask=mask, cache=cache).logits
    assert np.array_equal(cache.layout, mask.bool().numpy())
    assert cache.kv.num_used == 5 + 9 + 6 + 2
    for row, (prompt, new) in enumerate(zip(prompts, more, strict=True)):
        assert is_close(got[row, : len(new)], alone(model, prompt + new)[-len(new) :])
    cache.crop(-5)
    assert stored(cache) == [prompts[0] + more[0][:1], prompts[1] + more[1][:1]]


def test_the_old_keyword_and_plain_tuples_work_too(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        logits, returned = model(ids, past_key_values=cache, return_dict=False)
    assert returned is cache
    assert is_close(logits[0], alone(model, [5, 6, 7]))


def test_tokens_whose_logits_were_not_asked_for_are_not_evaluated_again(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model)
    feed(model, cache, [5, 6, 7, 8])
    whole = {"attention_mask": torch.ones(1, 6, dtype=torch.int64)}
    got = feed(model, cache, [5, 6, 7, 9, 10, 11], **whole)[0]
    expected = alone(model, [5, 6, 7, 9, 10, 11])
    assert got[:3].isnan().all()
    assert is_close(got[3:], expected[3:])
    assert (cache.reused, stored(cache)) == ((3,), [[5, 6, 7, 9, 10, 11]])
    again = feed(model, cache, [5, 6, 7, 9, 10, 11], **whole, logits_to_keep=5)[0]
    assert is_close(again, expected[1:])
    assert cache.reused == (1,)


def test_a_sequence_changed_from_elsewhere_goes_on_as_it_is_now(tiny: Tiny) -> None:
    model = tiny("llama")
    kv = onekv.cache_for(model, 64)
    seq = kv.sequence()
    cache = onekv.as_cache(kv, seq)
    feed(model, cache, [5, 6, 7, 8])
    seq.truncate(2)
    assert cache.get_seq_length() == 2
    assert is_close(feed(model, cache, [9])[0], alone(model, [5, 6, 9])[-1:])


def test_a_forward_that_fails_takes_back_its_rows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    cache = attached(model, rows=3, num_cells=1000)
    feed(model, cache, [[5, 6], [7, 8], [9, 10]])
    calls = 0
    stock = model.model.layers[2].mlp.forward

    def breaks(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("broken")
        return stock(hidden)

    monkeypatch.setattr(model.model.layers[2].mlp, "forward", breaks)
    with pytest.raises(RuntimeError, match="broken"):
        feed(model, cache, [[9] * 200] * 3, logits_to_keep=1)  # two steps, the second of which fails
    monkeypatch.undo()
    assert stored(cache) == [[5, 6], [7, 8], [9, 10]]
    assert is_close(feed(model, cache, [[9]] * 3)[1, 0], alone(model, [7, 8, 9])[-1])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"labels": torch.tensor([[5]])}, "labels"),
        ({"inputs_embeds": torch.zeros(1, 1, 32)}, "inputs_embeds"),
        ({"attention_mask": torch.ones(1, 1, 1, 1)}, "attention_mask must be"),
        ({"position_ids": torch.zeros(3, 1, 1)}, "position_ids must be"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], reason: str, tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model)
    with pytest.raises(ConfigError, match=reason):
        model(**{"input_ids": torch.tensor([[5]]), **given}, cache=cache)
    assert cache.kv.num_used == 0


def test_rows_that_do_not_fit_the_batch_are_refused(tiny: Tiny) -> None:
    model = tiny("llama")
    kv = onekv.cache_for(model, 64)
    with pytest.raises(BatchError, match="2 rows, the input 3"):
        feed(model, onekv.as_cache(kv, [0, 1]), [[5]] * 3)
    for seqs in ([], [1, 1]):
        with pytest.raises(BatchError, match="no two equal"):
            onekv.as_cache(kv, seqs)


# --- attaching ----------------------------------------------------------------------------------------------------------------------


def test_an_attached_model_without_our_cache_is_the_stock_model(tiny: Tiny) -> None:
    model, stock = endless(tiny("gemma2")), endless(tiny("gemma2"))
    before = set(model.__dict__)
    attached(model)
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    for cache in (None, "dynamic"):
        logits = [feed(m, DynamicCache(config=m.config) if cache else None, list(range(3, 20))) for m in (model, stock)]
        assert torch.equal(*logits)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    assert torch.equal(generate(model, inputs, num_beams=2), generate(stock, inputs, num_beams=2))
    onekv.detach(model)
    onekv.detach(model)
    assert set(model.__dict__) == before
    assert model.forward.__func__ is stock.forward.__func__


def test_our_cache_without_an_attached_model_says_what_to_do(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model)
    onekv.detach(model)
    with pytest.raises(OneKVError, match=r"cache_for\(model"):
        feed(model, cache, [5])


def test_a_copy_of_an_attached_model_uses_its_own_weights(tiny: Tiny) -> None:
    model = tiny("mistral_sliding")
    cache = attached(model, rows=2)
    twin = copy.deepcopy(model)
    twin.lm_head.weight.data *= 2
    onekv.detach(model)
    tokens = list(range(5, 25))
    assert is_close(feed(twin, cache, [tokens, tokens])[0], alone(twin, tokens))
    assert is_close(alone(twin, tokens), 2 * alone(model, tokens))


def test_an_attached_model_is_collected_like_any_other(tiny: Tiny) -> None:
    import weakref

    model = tiny("llama")
    cache = attached(model)
    feed(model, cache, [5])
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


# --- the cache object ---------------------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_fork_that_gives_back_its_cells(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model, rows=2)
    feed(model, cache, [[5, 6, 7], [8, 9, 10]])
    kv = cache.kv
    twin = copy.deepcopy({"cache": cache})["cache"]
    assert kv.num_used == 6
    feed(model, twin, [[11], [12]])
    assert (kv.num_used, cache.get_seq_length(), twin.get_seq_length()) == (8, 3, 4)
    assert is_close(feed(model, cache, [[13], [13]])[1, 0], alone(model, [8, 9, 10, 13])[-1])
    ids = twin.seqs
    del twin
    gc.collect()
    assert kv.num_used == 8
    assert kv.sequence().id in ids
    kv.check()


def test_a_copy_collected_during_a_step_is_freed_after_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    cache = attached(model)
    feed(model, cache, [5, 6])
    copies = [copy.deepcopy(cache)]
    feed(model, copies[0], [7])
    stock = Model.forward

    def forward(self: Model, step: Any) -> torch.Tensor:
        copies.clear()
        gc.collect()
        return stock(self, step)

    monkeypatch.setattr(Model, "forward", forward)
    feed(model, cache, [8])
    feed(model, cache, [9])
    assert cache.kv.num_used == 4
    cache.kv.check()


def test_a_pickled_cache_goes_on_in_cells_of_its_own(tiny: Tiny) -> None:
    model = tiny("gemma2")
    cache = attached(model, rows=2, num_cells=24)
    prompts = [list(range(3, 13)), list(range(20, 30))]
    feed(model, cache, prompts)
    cache.batch_repeat_interleave(2)  # four rows that share 20 cells
    other = pickle.loads(pickle.dumps(cache))
    assert other.kv is not cache.kv
    assert stored(other) == stored(cache)
    assert is_close(feed(model, other, [[9]] * 4)[2, 0], alone(model, [*prompts[1], 9])[-1])
    other.kv.check()


def test_rows_are_permuted_repeated_and_chosen_as_in_stock_without_copying(tiny: Tiny) -> None:
    model = tiny("llama")
    ours, stock = attached(model, rows=3), DynamicCache()
    for cache in (ours, stock):
        feed(model, cache, [[5, 6, 7], [8, 9, 10], [11, 12, 13]])
        used = ours.kv.num_used
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 0, 3, 2, 1]))
        cache.batch_select_indices(torch.tensor([0, 2, 3, 3]))
    assert used == 9
    assert ours.kv.num_used == 9
    assert is_close(feed(model, ours, [[20], [21], [22], [23]]), feed(model, stock, [[20], [21], [22], [23]]))
    for mine, theirs in zip(ours, stock, strict=True):
        assert is_close(mine[0], theirs[0])
        assert is_close(mine[1], theirs[1])
    ours.batch_select_indices(torch.tensor([False, True, False, False]))
    assert ours.batch_size == 1
    ours.kv.check()


def test_padding_goes_with_its_row_and_dropped_copies_give_back_their_cells(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model, rows=2)
    with torch.no_grad():
        model(**padded([[5, 6, 7], [8]], "right"), cache=cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
    expected = [[True, False, False], [True] * 3] * 2
    assert cache.layout.tolist() == copy.deepcopy(cache).layout.tolist() == expected
    gc.collect()
    feed(model, cache, [[20], [21], [22], [23]])
    assert cache.kv.num_used == 4 + 4
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert stored(cache) == [[8, 20], [8, 22]]
    assert cache.kv.num_used == 3
    cache.kv.check()


# --- cases from public bug reports --------------------------------------------------------------------------------------------------


def test_case_D02_a_window_drops_its_first_token_at_the_right_step(tiny: Tiny, visible: list[Any]) -> None:
    model = tiny("mistral_sliding", sliding_window=8)
    cache = attached(model)
    feed(model, cache, list(range(3, 9)))
    del visible[:]
    for token in range(9, 13):
        feed(model, cache, [token])
    assert visible == [[[*range(7)]], [[*range(8)]], [[*range(1, 9)]], [[*range(2, 10)]]]


def test_case_D13_advertised_sizes_hold_everything_a_query_sees(tiny: Tiny, visible: list[Any]) -> None:
    model = tiny("mistral_sliding", sliding_window=4)
    for before, new, expected in ((6, 1, (4, 3)), (6, 3, (6, 3)), (2, 1, (3, 0)), (9, 1, (4, 3))):
        cache = attached(model)
        for token in range(before):
            feed(model, cache, [token + 3])
        if before == 9:
            cache.crop(-3)
        assert cache.get_mask_sizes(new) == (cache.get_seq_length() + new, 0)
        del visible[:]
        feed(model, cache, [*range(20, 20 + new)])
        seen = sorted({p for row in visible[0] for p in row})
        assert (len(seen), seen[0]) == expected
        assert cache.get_mask_sizes(0) == (seen[-1] + 1, 0)


def test_case_G05_a_mask_of_another_length_is_refused(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model)
    feed(model, cache, [5, 6, 7, 8, 9, 10])
    for length in (10, 6):
        with pytest.raises(BatchError, match=rf"\[1, {length}\].*must be \[1, 7\]"):
            feed(model, cache, [11], attention_mask=torch.ones(1, length))
        assert cache.get_seq_length() == 6
    got = feed(model, cache, [11], attention_mask=torch.ones(1, 7))
    assert is_close(got[0], alone(model, [5, 6, 7, 8, 9, 10, 11])[-1:])


def test_case_G06_a_length_is_a_snapshot(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model, rows=2)
    with torch.no_grad():
        model(**padded([[5, 6, 7, 8, 9], [5, 6]]), cache=cache)
    length, layout = cache.get_seq_length(), cache.layout
    keys = next(iter(cache))[0].clone()
    held = next(iter(cache))[0]
    feed(model, cache, [[5, 6, 7]] * 2)
    assert (length, layout.sum(axis=1).tolist()) == (5, [5, 2])
    assert cache.get_seq_length() == 8
    assert torch.equal(held, keys)


def test_case_H01_crop_takes_negative_and_oversized_counts(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model)
    tokens = [5, 6, 7, 8, 9, 10]
    feed(model, cache, tokens)
    keys = cache.kv.keys(1, cache.seqs[0])
    for count, length in ((4, 4), (-1, 5), (10, 6), (-10, 0), (0, 6)):
        twin = copy.deepcopy(cache)
        twin.crop(count)
        assert twin.get_seq_length() == length
        for layer in range(4):
            assert cache.kv.keys(layer, twin.seqs[0]).shape[0] == length
        assert torch.equal(cache.kv.keys(1, twin.seqs[0]), keys[:length])
        got = feed(model, twin, [20])
        assert cache.kv.seq_pos_max(twin.seqs[0]) == length
        assert is_close(got[0], alone(model, [*tokens[:length], 20])[-1:])


def test_case_H02_crop_past_what_a_window_holds_changes_no_layer(tiny: Tiny) -> None:
    model = tiny("gemma2", sliding_window=4)
    cache = attached(model, rows=2, window_cells=12)
    tokens = [*range(3, 13)]
    for token in tokens:
        feed(model, cache, [[token]] * 2)
    twin = copy.deepcopy(cache)
    twin.crop(9)
    assert is_close(feed(model, twin, [[50]] * 2)[0, 0], alone(model, [*tokens[:9], 50])[-1])
    del twin
    before = [[p.clone() for p in layer] for layer in cache]
    with pytest.raises(WindowLost, match="continue at position 3"):
        cache.crop(3)
    assert cache.get_seq_length() == 10
    assert all(torch.equal(a, b) for one, two in zip(before, cache, strict=True) for a, b in zip(one, two, strict=True))


def test_case_H03_reset_empties(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model)
    feed(model, cache, [5, 6, 7, 8, 9, 10])
    cache.reset()
    assert (cache.get_seq_length(), cache.kv.num_used) == (0, 0)
    assert is_close(feed(model, cache, [8, 9, 10])[0], alone(model, [8, 9, 10]))
    keys = next(iter(cache))[0]
    assert keys.shape[2] == 3
    assert (keys.abs().sum(dim=(0, 1, 3)) > 0).all()


def test_case_H04_length_is_counted_and_an_int(tiny: Tiny) -> None:
    for family in ("llama", "mistral_sliding"):
        model = tiny(family, sliding_window=3) if family == "mistral_sliding" else tiny(family)
        model.get_input_embeddings().weight.data[7] = 0
        cache = attached(model)
        feed(model, cache, [5, 7, 8, 9])
        assert (cache.kv.keys(0, cache.seqs[0])[1] == 0).all()
        lengths = [cache.get_seq_length(0), cache.get_seq_length(), cache.get_seq_length(99)]
        assert lengths == [4, 4, 0]
        assert {type(n) for n in lengths} == {int}


def test_case_H05_a_full_buffer_raises_and_changes_nothing(tiny: Tiny) -> None:
    model = tiny("llama")
    cache = attached(model, num_cells=8)
    tokens = [4, 8, 5, 6, 7, 9, 10]
    for token in tokens:
        got = feed(model, cache, [token])
    assert is_close(got[0], alone(model, tokens)[-1:])
    keys = cache.kv.keys(3, cache.seqs[0])
    with pytest.raises(CacheFull):
        feed(model, cache, [11, 12, 13])
    assert cache.get_seq_length() == 7
    assert torch.equal(cache.kv.keys(3, cache.seqs[0]), keys)
    feed(model, cache, [11])
    with pytest.raises(CacheFull):
        feed(model, cache, [12])
    assert (cache.get_seq_length(), cache.get_max_length()) == (8, 8)
    assert stored(cache) == [[*tokens, 11]]


def test_case_H06_layers_are_counted_and_iterated(tiny: Tiny) -> None:
    model = tiny("gpt2")
    cache, stock = attached(model), DynamicCache()
    assert len(cache) == 3
    assert [keys.shape for keys, _ in cache] == [(1, 4, 0, 8)] * 3
    for one in (cache, stock):
        feed(model, one, [5, 6, 7])
    assert len(cache) == len(list(cache)) == 3
    for mine, theirs in zip(cache, stock, strict=True):
        assert is_close(mine[0], theirs[0])
        assert is_close(mine[1], theirs[1])


def test_case_H07_batch_operations_reach_keys_and_values(tiny: Tiny) -> None:
    model = endless(tiny("llama"))
    ours, stock = attached(model, rows=3), DynamicCache()
    for cache in (ours, stock):
        feed(model, cache, [[5] * 5, [6] * 5, [7] * 5])
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        cache.reorder_cache(torch.tensor([1, 0, 2]))
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
        cache.crop(-2)
    assert stored(ours) == [[7, 7, 7]] * 2
    for mine, theirs in zip(ours, stock, strict=True):
        assert is_close(mine[0], theirs[0])
        assert is_close(mine[1], theirs[1])
    config = GenerationConfig(num_beams=2, max_new_tokens=5, pad_token_id=0)
    before = config.to_dict()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    answers = [model.generate(**inputs, generation_config=config, cache=attached(model)) for _ in range(2)]
    assert torch.equal(*answers)
    assert config.to_dict() == before


def test_case_H08_the_object_passed_is_the_one_used(tiny: Tiny) -> None:
    model = endless(tiny("llama"))
    prefix = [5, 6, 7, 8]
    cache = attached(model)
    feed(model, cache, prefix)
    x, y = ({"input_ids": torch.tensor([[*prefix, *end]])} for end in ([9, 10], [11, 12, 13]))
    first, second = generate(model, x, copy.deepcopy(cache)), generate(model, y, copy.deepcopy(cache))
    assert cache.get_seq_length() == 4
    assert torch.equal(first, generate(model, x))
    assert torch.equal(second, generate(model, y))
    pickled = pickle.loads(pickle.dumps(cache))
    assert torch.equal(generate(model, x, cache), first)
    assert torch.equal(generate(model, x, pickled), first)
    assert cache.get_seq_length() == 4 + 2 + NEW - 1


def test_case_H09_everything_already_cached(tiny: Tiny) -> None:
    model = endless(tiny("llama"))
    tokens = [5, 6, 7, 8, 9]
    for prompt, reused in ((tokens, 4), (tokens[:4], 3), ([*tokens[:4], 10], 4)):
        cache = attached(model)
        feed(model, cache, tokens)
        inputs = {"input_ids": torch.tensor([prompt])}
        assert torch.equal(generate(model, inputs, cache), generate(model, inputs))
        assert cache.reused == (reused,)


@pytest.mark.parametrize("accepted", range(5))
def test_case_H10_lengths_after_a_round_of_assisted_decoding(accepted: int, tiny: Tiny) -> None:
    model = tiny("gemma2")
    past, drafts, rest = [*range(3, 13)], [30, 31, 32, 33], [40]
    target, draft = attached(model), attached(model)
    for cache in (target, draft):
        feed(model, cache, past)
    got = feed(model, target, [13, *drafts])
    assert is_close(got[0], alone(model, [*past, 13, *drafts])[-5:])
    feed(model, draft, [13, *drafts[:3]])
    target.crop(-(4 - accepted))
    draft.crop(-max(3 - accepted, 0))
    assert target.get_seq_length() == 11 + accepted
    assert draft.get_seq_length() == min(11 + accepted, 14)
    kept = [*past, 13, *drafts[:accepted]]
    assert is_close(feed(model, target, rest)[0], alone(model, kept + rest)[-1:])
    behind = kept[draft.get_seq_length() :] + rest
    assert len(behind) == (2 if accepted == 4 else 1)
    assert is_close(feed(model, draft, behind)[0], alone(model, kept + rest)[-len(behind) :])


def test_a_cache_is_told_apart_from_others_in_its_name(tiny: Tiny) -> None:
    kv: KVCache = attached(tiny("llama")).kv
    assert repr(onekv.as_cache(kv, [3, 5])).startswith("SequenceCache(seqs=[3, 5], 0 columns, KVCache(")
    assert kv.sequence().id not in (3, 5)
