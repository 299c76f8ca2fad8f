"""Every family of the table: packed rows equal each sequence alone, and the probe finds what the table says. One line a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.falcon import modeling_falcon

import report
from families import FAMILIES, REFUSED, SERVED, settle, tiny_model
from onekv import Batch, ShiftError, Step, UnsupportedModel, Window
from onekv.models import Model, cache_for, hooks, probe
from packed import alone, attending, scatter_free_cells, together

TOLERANCE = 1e-5


def difference(name: str, tokens_of: Any) -> float:
    """The largest difference between logits packed and alone, relative to the largest logit: three sequences that share a prefix, their
    rows interleaved, in cells that lie apart."""
    stock, model = tiny_model(name), Model(tiny_model(name))
    if FAMILIES[name].is_pinned:
        settle(stock)
    cache = cache_for(model, num_cells=192, max_seqs=8)
    scatter_free_cells(model, cache, seq=7)
    prompts = tokens_of((31, 26, 17), shared=9)
    worst = 0.0
    for prompt, got in zip(prompts, together(model, cache, prompts, shared=9), strict=True):
        expected = alone(stock, prompt)
        assert expected.abs().max() > 0.1
        worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("name", SERVED)
def test_interleaved_sequences_sharing_a_prefix_equal_each_alone(
    name: str, tokens_of: Any, record_property: Callable[[str, object], None]
) -> None:
    worst = difference(name, tokens_of)
    record_property("family", f"{name}: within {worst:.1e} of stock transformers")
    assert worst < TOLERANCE


@pytest.mark.parametrize("name", SERVED)
def test_windows_sharing_and_shift_are_found_as_the_table_says(name: str) -> None:
    """The first layer's keys depend on its tokens and its position alone, so moving them must give exactly what feeding there gives."""
    family, model = FAMILIES[name], Model(tiny_model(name))
    assert tuple(layer.window if layer.has_cells else None for layer in model.layers) == family.windows
    assert tuple(i for i, layer in enumerate(model.layers) if layer.states) == family.recurrent
    assert model.packing == ("equal" if family.recurrent else "packed")
    assert tuple(layer.source for layer in model.layers) == family.sources
    assert model._hooked.gathers == frozenset(i for i, layer in enumerate(model.layers) if family.is_gathered and layer.has_cells)
    cache = cache_for(model, 64, max_seqs=4)
    tokens = list(range(10, 22))
    model.extend(cache, [0], [tokens])
    first = attending(cache)
    rope = model.layers[first].rope
    turned, kept = (cache.values, cache.keys) if rope is not None and rope.part == "value" else (cache.keys, cache.values)
    before = turned(first, 0).clone()
    if family.no_shift is not None:
        with pytest.raises(ShiftError, match=family.no_shift):
            cache.seq_add(0, 0, -1, 40)
        return
    cache.seq_add(0, 0, -1, 40)
    for step in cache.plan(Batch(tokens, seqs=1, positions=range(40, 40 + len(tokens)))):
        with step:
            model.forward(step)
    assert torch.allclose(turned(first, 0), turned(first, 1), atol=1e-5)
    assert torch.allclose(kept(first, 0), kept(first, 1), atol=1e-5)
    if rope is not None or not family.recurrent:
        assert not torch.allclose(before[-len(turned(first, 0)) :], turned(first, 1), atol=1e-2)


@pytest.mark.parametrize(("name", "layout"), [("deepseek_v2", "interleaved"), ("deepseek_v3", "half"), ("deepseek_v3_yarn", "half")])
def test_the_rotated_part_of_a_latent_is_found_where_values_go(name: str, layout: str) -> None:
    for layer in Model(tiny_model(name)).layers:
        assert (layer.num_kv_heads, layer.head_dim, layer.value_dim) == (1, 16, 8)
        assert layer.rope is not None
        assert (layer.rope.part, layer.rope.layout, layer.rope.offset, len(layer.rope.inv_freq)) == ("value", layout, 0, 4)


@pytest.mark.parametrize("name", ["falcon", "deepseek_v3", "dots3_note"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gathered_family_is_probed_and_runs_in_half_precision(name: str, dtype: torch.dtype, tokens_of: Any) -> None:
    model = Model(tiny_model(name).to(dtype))
    cache = cache_for(model, 64, max_seqs=4, k_dtype=str(dtype).removeprefix("torch."))
    prompts = tokens_of((20, 17), shared=9)
    got = model.extend(cache, [0, 1], prompts, max_ubatch=11)
    for prompt, row in zip(prompts, got, strict=True):
        expected = alone(tiny_model(name), prompt)[-1]
        assert (row - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_served_exactly_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=str(FAMILIES[name].refused)):
        cache_for(tiny_model(name), num_cells=8)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=48)),
            "T5ForConditionalGeneration: attention was handed position_bias",
        ),
        (
            lambda: BartForConditionalGeneration(
                BartConfig(
                    vocab_size=97,
                    d_model=32,
                    encoder_layers=2,
                    decoder_layers=2,
                    encoder_attention_heads=4,
                    decoder_attention_heads=4,
                    encoder_ffn_dim=48,
                    decoder_ffn_dim=48,
                )
            ),
            "BartForConditionalGeneration, layer 0: .*keys or values that no layer stored",
        ),
    ],
    ids=["t5", "bart"],
)
def test_a_decoder_beside_an_encoder_is_refused_by_name(build: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        cache_for(build(), num_cells=8)


# --- gathered families -----------------------------------------------------------------------------------------------------------------


def slides(*ways: Any) -> Any:
    """transformers' maker of masks for falcon, replaced by others; the model uses the last."""

    def build(**how: Any) -> Any:
        how.pop("allow_is_causal_skip", None)
        return [way(**how) for way in ways][-1]

    return build


def test_a_window_holds_in_a_model_that_attends_by_its_own_code(tokens_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family has one; falcon is given one."""
    monkeypatch.setattr(modeling_falcon, "create_causal_mask", slides(create_sliding_window_causal_mask))
    monkeypatch.setitem(FAMILIES, "falcon", replace(FAMILIES["falcon"], config={**FAMILIES["falcon"].config, "sliding_window": 7}))
    assert {layer.window for layer in Model(tiny_model("falcon")).layers} == {Window.sliding(7)}
    assert difference("falcon", tokens_of) < TOLERANCE
    monkeypatch.setattr(hooks, "recognise", lambda rule, device: Window.full())
    assert difference("falcon", tokens_of) > 1000 * TOLERANCE


def test_own_attention_under_several_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_falcon, "create_causal_mask", slides(create_causal_mask, create_sliding_window_causal_mask))
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM attends by code of its own, with 2 kinds of masks"):
        cache_for(tiny_model("falcon", sliding_window=7), num_cells=8)


@pytest.mark.parametrize("part", ["beside", "order"])
def test_entries_that_a_layer_does_not_use_one_by_one_are_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expand = DeepseekV3Attention.expand_kv

    def mixed(self: Any, latent: torch.Tensor, rotated: torch.Tensor) -> Any:
        k, v = expand(self, latent, rotated)
        return k, v + (v.mean(dim=2, keepdim=True) if part == "beside" else torch.arange(v.shape[2])[:, None])

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", mixed)
    with pytest.raises(UnsupportedModel, match="DeepseekV3ForCausalLM: a row depends on the other rows"):
        cache_for(tiny_model("deepseek_v3"), num_cells=8)


def test_own_attention_that_ignores_its_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_falcon, "create_causal_mask", lambda **how: torch.zeros(1, 1, 1, 1))
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM attends by code of its own, which goes by the order"):
        cache_for(tiny_model("falcon"), num_cells=8)


@pytest.mark.parametrize("name", ["falcon", "xglm", "deepseek_v2", "dots3_note"])
def test_removing_from_the_middle_and_saving_work_on_gathered_families(name: str, tokens_of: Any, tmp_path: Path) -> None:
    """What remains is moved, saved and read into other cells; the next logits are the same."""
    model = Model(tiny_model(name))
    cache, other = (cache_for(model, 64, max_seqs=4) for _ in range(2))
    seq = cache.sequence()
    model.extend(cache, [seq], tokens_of((30,)))
    if model.no_shift is None:
        seq.remove(4, 9)
        assert len(seq) == 25
    seq.save(tmp_path / "saved")
    model.extend(other, [1], tokens_of((7,), seed=3))
    other.load(tmp_path / "saved", 0)
    one, two = (model.extend(into, [0], [[5, 6, 7]]) for into in (cache, other))
    assert torch.allclose(one, two, atol=1e-5 * float(one.abs().max()))


# --- pinned frequencies ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_a_long_sequence_beside_short_ones_equals_transformers_unpinned(name: str, tokens_of: Any) -> None:
    """From a length above the original context on, transformers' own choice is the pinned one."""
    stock, model = tiny_model(name), Model(tiny_model(name))
    long, *short = tokens_of((90, 20, 9))
    got = model.extend(cache_for(model, 192, max_seqs=4), [0, 1, 2], [long, *short], max_ubatch=16)
    expected = alone(stock, long)[-1]
    assert (got[0] - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_without_pins_the_probe_sees_that_one_sequence_changes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "pins_of", lambda model, context: [])
    with pytest.raises(UnsupportedModel, match="a row depends on the other rows"):
        cache_for(tiny_model("phi3_longrope"), num_cells=8)


def test_short_sequences_can_tell_pinned_frequencies_from_transformers_own(tokens_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "phi3_longrope", replace(FAMILIES["phi3_longrope"], is_pinned=False))
    assert difference("phi3_longrope", tokens_of) > 1000 * TOLERANCE


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
@pytest.mark.parametrize("fails", [False, True])
def test_pins_leave_the_users_model_as_it_was(name: str, fails: bool, tokens_of: Any) -> None:
    theirs = tiny_model(name)
    rotary, (prompt,) = theirs.model.rotary_emb, tokens_of((9,))
    before, frequencies, kind = alone(theirs, prompt), rotary.inv_freq.clone(), rotary.rope_type
    model = Model(theirs)
    cache = cache_for(model, 128)
    if fails:
        handle = theirs.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.extend(cache, [0], tokens_of((90,)))
        handle.remove()
    else:
        model.extend(cache, [0], tokens_of((90,)))
    assert rotary.rope_type == kind
    assert torch.equal(rotary.inv_freq, frequencies)
    assert "inv_freq" in dict(rotary.named_buffers())
    assert torch.equal(alone(theirs, prompt), before)


def test_frequencies_that_follow_the_batch_in_a_way_of_their_own_are_refused() -> None:
    model = tiny_model("llama_dynamic")

    class Own(type(model.model.rotary_emb)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return super().forward(x, position_ids)

    model.model.rotary_emb.__class__ = Own
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM: model\.rotary_emb .*'dynamic'"):
        cache_for(model, num_cells=8)


# --- controls: what these tests would say if a part were missing ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral_sliding", "llama4", "dots3_note"])
def test_a_window_that_is_ignored_would_be_seen(name: str, tokens_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "recognise", lambda rule, device: Window.full())
    assert difference(name, tokens_of) > 1000 * TOLERANCE


@pytest.mark.parametrize(
    "name", ["falcon", "falcon_new", "xglm", "deepseek_v2", "deepseek_v3", "dots3_note", "diffllama", "bailing_hybrid"]
)
def test_gathered_entries_of_other_sequences_and_later_rows_would_be_seen(
    name: str, tokens_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = Step._entries

    def all_visible(self: Step, layer: int) -> Any:
        found = entries(self, layer)
        return replace(found, seen=np.ones_like(found.seen))

    monkeypatch.setattr(Step, "_entries", all_visible)
    assert difference(name, tokens_of) > 1000 * TOLERANCE


def test_sinks_that_are_ignored_would_be_seen(tokens_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Step.attend

    def without_sinks(*args: Any, sinks: Any, **kwargs: Any) -> torch.Tensor:
        assert sinks is not None
        return attend(*args, **kwargs)

    monkeypatch.setattr(Step, "attend", without_sinks)
    assert difference("gpt_oss", tokens_of) > 1000 * TOLERANCE


def test_a_soft_cap_that_is_ignored_would_be_seen(tokens_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Step.attend

    def without_cap(*args: Any, softcap: Any, **kwargs: Any) -> torch.Tensor:
        assert softcap is not None
        return attend(*args, **kwargs)

    monkeypatch.setattr(Step, "attend", without_cap)
    assert difference("gemma2", tokens_of) > TOLERANCE


# --- the page -------------------------------------------------------------------------------------------------------------------------


def test_the_page_of_models_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == report.page(), "run: python tests/models/report.py"
