"""Models with recurrent layers beside attention: what happens to a sequence's states is what transformers alone would compute.

That interleaved sequences equal each alone is in test_families.py, with all other families.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridAttention
from transformers.models.lfm2 import modeling_lfm2

from families import tiny_model
from onekv import Batch, ConfigError, KVCache, StateLost, UnsupportedModel, as_cache, cache_for
from onekv.models import Model, load_model
from packed import alone

TOLERANCE = 1e-5
KINDS = ["lfm2", "qwen3_next", "jamba", "falcon_h1", "bailing_hybrid"]  # one of each way to keep states; the last gathers entries, too
Tokens = Callable[..., list[list[int]]]


class Boom(Exception):
    """Raised inside a step."""


@once
def stock_of(name: str) -> PreTrainedModel:
    return tiny_model(name)


@once
def model_of(name: str) -> Model:
    return Model(tiny_model(name))


def cells_for(name: str, num_cells: int = 128, **settings: Any) -> tuple[Model, KVCache]:
    return model_of(name), cache_for(model_of(name), num_cells, max_seqs=8, **settings)


def is_close(name: str, logits: torch.Tensor, tokens: list[int]) -> bool:
    """Whether these are the logits of the last token, by transformers alone."""
    expected = alone(stock_of(name), tokens)[-1]
    return bool((logits - expected).abs().max() < TOLERANCE * expected.abs().max())


def everything(cache: KVCache, seq: int) -> list[torch.Tensor]:
    """Keys, values and states of a sequence."""
    cells = [read(i, seq) for i, layer in enumerate(cache.layers) if layer.has_cells for read in (cache.keys, cache.values)]
    return cells + [state for i in cache.states.shapes for state in cache.states.gather(i, [seq])]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_cut_into_ubatches_equals_one_go(name: str, tokens_of: Tokens) -> None:
    long, short = tokens_of((31, 12))
    for max_ubatch in (512, 7, 2):
        model, cache = cells_for(name)
        got = model.extend(cache, [3, 1], [long, short], max_ubatch=max_ubatch)
        assert is_close(name, got[0], long)
        assert is_close(name, got[1], short)
        cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_fork_and_its_origin_go_on_as_if_each_were_alone(name: str, tokens_of: Tokens) -> None:
    prefix, one, other = tokens_of((20, 6, 3))
    model, cache = cells_for(name)
    chat = cache.sequence()
    model.extend(cache, [chat], [prefix])
    with chat.fork() as twin:
        used = cache.num_used
        assert used == len(prefix)
        assert is_close(name, model.extend(cache, [twin], [other])[0], prefix + other)
        got = model.extend(cache, [twin, chat], [[5], one])
        assert is_close(name, got[0], [*prefix, *other, 5])
        assert is_close(name, got[1], prefix + one)
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_going_back_to_a_kept_state_equals_never_having_gone_on(name: str, tokens_of: Tokens) -> None:
    prefix, lost, kept = tokens_of((20, 9, 5))
    model, cache = cells_for(name)
    chat = cache.sequence()
    model.extend(cache, [chat], [prefix], max_ubatch=6)
    before = everything(cache, chat.id)
    model.extend(cache, [chat], [lost], max_ubatch=4)
    assert not same(everything(cache, chat.id), before)
    with chat.fork_at(len(prefix)) as twin:
        assert same(everything(cache, twin.id), before)
    chat.truncate(len(prefix))
    assert same(everything(cache, chat.id), before)
    assert is_close(name, model.extend(cache, [chat], [kept])[0], prefix + kept)
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_refusal_changes_nothing_and_says_where_to_feed_again_from(name: str, tokens_of: Tokens) -> None:
    (tokens,) = tokens_of((20,))
    model, cache = cells_for(name)
    chat = cache.sequence()
    model.extend(cache, [chat], [tokens[:12]])
    model.extend(cache, [chat], [tokens[12:]])
    before = everything(cache, chat.id)
    assert not cache.seq_rm(chat, 3, 6)
    assert not cache.seq_rm(chat, 15, -1)
    with pytest.raises(StateLost, match="remove the tail from 12 on") as caught:
        chat.truncate(15)
    assert same(everything(cache, chat.id), before)
    start = caught.value.stored
    assert start == 12
    chat.truncate(start)
    assert is_close(name, model.extend(cache, [chat], [tokens[start:15]])[0], tokens[:15])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_saved_sequence_goes_on_in_another_cache_with_the_same_logits(name: str, whole: bool, tokens_of: Tokens) -> None:
    (tokens,) = tokens_of((20,))
    model, cache = cells_for(name)
    model.extend(cache, [2, 1], [tokens[:17], [5, 6]])
    file = io.BytesIO()
    cache.save(file, None if whole else 2)
    expected = model.extend(cache, [2], [tokens[17:]])
    file.seek(0)
    _, other = cells_for(name, 48, placement="contiguous")
    target = 2 if whole else 5
    other.load(file, None if whole else target)
    assert torch.equal(model.extend(other, [target], [tokens[17:]]), expected)
    assert is_close(name, expected[0], tokens)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "bailing_hybrid"])
def test_quantised_cells_beside_states_are_saved_to_the_byte_and_convert(name: str, whole: bool, tokens_of: Tokens) -> None:
    (tokens,) = tokens_of((20,))
    model, cache = cells_for(name, k_dtype="q8_0")
    model.extend(cache, [2], [tokens[:17]])
    file = io.BytesIO()
    cache.save(file, None if whole else 2)
    before = everything(cache, 2)
    raw = {
        i: [part(i)[cache.cells.column(0, 2)].clone() for part in (cache.store.raw_keys, cache.store.raw_values)]
        for i in cache.store.physical
    }
    got = model.extend(cache, [2], [tokens[17:]])[0]
    expected = alone(stock_of(name), tokens)[-1]
    assert TOLERANCE < (got - expected).abs().max() / expected.abs().max() < 0.05
    target = 2 if whole else 5
    for dtype in ("q8_0", "float32"):
        file.seek(0)
        _, other = cells_for(name, 48, placement="contiguous", k_dtype=dtype)
        other.load(file, None if whole else target)
        other.check()
        assert same(everything(other, target), before)
        if dtype == "q8_0":
            column = other.cells.column(0, target)
            assert all(same(raw[i], [other.store.raw_keys(i)[column], other.store.raw_values(i)[column]]) for i in raw)
            assert torch.equal(model.extend(other, [target], [tokens[17:]])[0], got)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_undone_by_an_exception_leaves_keys_and_states_as_before(name: str, tokens_of: Tokens) -> None:
    prefix, rest = tokens_of((11, 6))
    model, cache = cells_for(name)
    model.extend(cache, [0], [prefix])
    before = everything(cache, 0)
    (step, *_) = cache.plan(Batch(rest, seqs=0))
    with pytest.raises(Boom), step:  # noqa: PT012
        model.forward(step)
        raise Boom
    assert same(everything(cache, 0), before)
    broken, calls = tiny_model(name), []

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise Boom

    other = Model(broken)
    assert other.row_by_row == model.row_by_row
    broken.model.register_forward_pre_hook(fails)
    with pytest.raises(Boom):
        other.extend(cache, [0], [rest * 3], max_ubatch=4)
    assert len(calls) == 5
    assert same(everything(cache, 0), before)
    assert is_close(name, model.extend(cache, [0], [rest])[0], prefix + rest)
    cache.check()


@pytest.mark.parametrize("name", KINDS)
def test_these_tests_would_see_states_that_were_swapped(name: str, tokens_of: Tokens) -> None:
    one, other = tokens_of((20, 20))
    model, cache = cells_for(name)
    model.extend(cache, [0, 1], [one[:-1], other[:-1]])
    cache.states.reorder([0, 1], [1, 0])
    got = model.extend(cache, [0, 1], [one[-1:], other[-1:]])
    expected = alone(stock_of(name), one)[-1]
    assert (got[0] - expected).abs().max() > 1000 * TOLERANCE * expected.abs().max()
    assert not is_close(name, got[1], other)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1", "bailing_hybrid"])
def test_a_shift_of_a_whole_sequence_is_exact(name: str, tokens_of: Tokens) -> None:
    (tokens,) = tokens_of((20,))
    model, cache = cells_for(name)
    model.extend(cache, [0], [tokens[:-1]])
    cache.seq_add(0, 0, -1, 30)
    with torch.inference_mode():
        expected = stock_of(name)(torch.tensor([tokens]), position_ids=30 + torch.arange(20)[None]).logits[0, -1]
    assert (model.extend(cache, [0], [tokens[-1:]])[0] - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_bfloat16_states_are_kept_without_loss(tokens_of: Tokens) -> None:
    stock = tiny_model("lfm2").bfloat16()
    model, (tokens,) = Model(tiny_model("lfm2").bfloat16()), tokens_of((20,))
    cache = cache_for(model, 64, k_dtype="bfloat16")
    got = model.extend(cache, [0], [tokens], max_ubatch=5)[0]
    expected = alone(stock, tokens)[-1]
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(t.dtype == torch.float32 and torch.equal(t, t.bfloat16().float()) for i in (0, 2) for t in cache.states.gather(i, [0]))


def test_embeddings_in_place_of_tokens_give_the_same_states(tokens_of: Tokens) -> None:
    one, other = tokens_of((9, 6))
    model, cache = cells_for("lfm2")
    expected = model.extend(cache, [0, 1], [one, other], max_ubatch=4)
    vectors = stock_of("lfm2").get_input_embeddings()(torch.tensor(one + other)).detach().numpy()
    outputs = [i in (8, 14) for i in range(15)]
    for step in cache.plan(Batch(embeddings=vectors, seqs=[2] * 9 + [3] * 6, outputs=outputs), max_ubatch=4):
        with step:
            for row, logits in zip(step.ubatch.rows[step.ubatch.outputs], model.forward(step), strict=True):
                assert torch.allclose(logits, expected[int(row > 8)], atol=1e-6)
    for mine, theirs in ((2, 0), (3, 1)):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(everything(cache, mine), everything(cache, theirs), strict=True))


# --- Jamba: one row at a time -----------------------------------------------------------------------------------------------------------


def test_a_model_that_goes_on_one_row_at_a_time_is_found_and_planned_for(tokens_of: Tokens) -> None:
    """transformers' Mamba scan begins from zeros, so a second chunk of several tokens would forget the first."""
    assert [model_of(name).row_by_row for name in KINDS] == [False, False, True, False, False]
    weak = tiny_model("jamba")
    for weight in weak.parameters():
        weight.data.mul_(0.1 if weight.ndim > 1 else 1.0)
    assert Model(weak).row_by_row  # found in the states, even where logits hardly show it
    stock, (tokens,) = stock_of("jamba"), tokens_of((12,))
    with torch.inference_mode():
        past = stock(torch.tensor([tokens[:6]]), use_cache=True).cache
        forgot = stock(torch.tensor([tokens[6:]]), cache=past).logits[0, -1]
    assert not is_close("jamba", forgot, tokens)
    model, cache = cells_for("jamba")
    assert [len(step.ubatch) for step in cache.plan(Batch(tokens), max_ubatch=6)] == [6, 1, 1, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match="row_by_row=True"):
        model.extend(KVCache(model.layers, 32), [0], [tokens])


def test_a_model_that_does_not_go_on_from_its_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from onekv.models.hooks import RecurrentState

    monkeypatch.setattr(RecurrentState, "put_into", lambda self, layer: None)
    with pytest.raises(UnsupportedModel, match="Lfm2ForCausalLM: its recurrent layers do not go on from the states they leave"):
        cache_for(tiny_model("lfm2"), 8)


def test_recurrent_layers_beside_attention_by_code_of_the_models_own_equal_each_sequence_alone(
    tokens_of: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No family has both; lfm2 is given attention that goes by a mask. All sequences of a forward are handed the same entries."""
    prompts = tokens_of((20, 17, 9))
    expected = [alone(stock_of("lfm2"), prompt)[-1] for prompt in prompts]

    class OwnCode:
        @staticmethod
        def get_interface(name: str, eager: Any) -> Any:
            return eager

    monkeypatch.setattr(modeling_lfm2, "ALL_ATTENTION_FUNCTIONS", OwnCode)
    model = Model(tiny_model("lfm2"))
    cache = cache_for(model, 64, max_seqs=4)
    assert (model.packing, model._hooked.attends_itself, model._hooked.gathers) == ("equal", True, frozenset({1, 3}))
    assert model.layers == model_of("lfm2").layers
    for row, logits in zip(model.extend(cache, [2, 0, 1], prompts, max_ubatch=11), expected, strict=True):
        assert (row - logits).abs().max() < TOLERANCE * logits.abs().max()


def test_gathered_entries_that_a_layer_treats_otherwise_for_each_sequence_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, expand = BailingHybridAttention.forward, BailingHybridAttention.expand_kv

    def seeing(self: Any, hidden_states: torch.Tensor, *args: Any, **how: Any) -> Any:
        self.seen = hidden_states.mean(dim=(1, 2))[:, None, None, None]
        return forward(self, hidden_states, *args, **how)

    def mixed(self: Any, *latent: torch.Tensor) -> Any:
        k, v = expand(self, *latent)
        return k, v + self.seen

    monkeypatch.setattr(BailingHybridAttention, "forward", seeing)
    monkeypatch.setattr(BailingHybridAttention, "expand_kv", mixed)
    with pytest.raises(UnsupportedModel, match="BailingHybridForCausalLM: a row depends on the other rows"):
        cache_for(tiny_model("bailing_hybrid"), num_cells=8)


@pytest.mark.parametrize("name", KINDS)
def test_packed_weights_serve_recurrent_layers_and_deterministic_rows_are_refused(name: str, tokens_of: Tokens, tmp_path: Path) -> None:
    stock_of(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, weights="float32")
    prompts = tokens_of((20, 17))
    got = model.extend(cache_for(model, 64, max_seqs=4), [0, 1], prompts, max_ubatch=11)
    assert all(is_close(name, row, prompt) for row, prompt in zip(got, prompts, strict=True))
    with pytest.raises(UnsupportedModel, match="deterministic=True cannot be kept by recurrent layers"):
        load_model(tmp_path, deterministic=True)


# --- transformers' generate -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_generate_with_padding_gives_the_same_tokens_greedy_and_by_beams(name: str) -> None:
    theirs, stock = tiny_model(name), stock_of(name)
    cells = cache_for(theirs, 256, max_seqs=16)
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    for settings in ({"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 2}):
        settings |= {"do_sample": False, "max_new_tokens": 8, "attention_mask": mask}
        expected = stock.generate(ids, **settings)
        batch = as_cache(cells, [0, 1])
        assert torch.equal(theirs.generate(ids, cache=batch, **settings), expected)
        batch.reset()
        cells.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_second_turn_reuses_the_first_and_another_branch_what_is_kept(name: str) -> None:
    theirs, stock = tiny_model(name), stock_of(name)
    cells = cache_for(theirs, 256, max_seqs=16, checkpoints=2)
    batch = as_cache(cells, [0])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    prompt = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    first = theirs.generate(prompt, cache=batch, **settings)
    longer = torch.cat([first, torch.tensor([[7, 8, 9]])], dim=1)
    assert torch.equal(theirs.generate(longer, cache=batch, **settings), stock.generate(longer, **settings))
    assert batch.reused == (13,)
    shorter = first[:, :11]
    assert torch.equal(theirs.generate(shorter, cache=batch, **settings), stock.generate(shorter, **settings))
    assert batch.reused == (0,)
    assert batch.is_linear == [not layer.has_cells for layer in cells.layers]
    with pytest.raises(StateLost, match="recurrent states of sequence 0 are kept for positions"):
        batch.crop(4)


def test_assisted_decoding_is_refused_by_transformers_because_states_cannot_be_cropped() -> None:
    theirs = tiny_model("lfm2")
    batch = as_cache(cache_for(theirs, 128), [0])
    assert not batch.is_croppable
    with pytest.raises(ValueError, match="Assisted decoding requires a cache that can be cropped"):
        theirs.generate(torch.tensor([[5, 6, 7]]), cache=batch, prompt_lookup_num_tokens=3, max_new_tokens=5, do_sample=False)
