"""The lean forward against transformers' own, and who does not get it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from onekv import Batch, KVCache, as_cache
from onekv.errors import UnsupportedModel
from onekv.models import Model, cache_for, fused, hf, load_model
from onekv.models.linears import Packed
from packed import alone, scatter_free_cells, together

Tiny = Callable[..., PreTrainedModel]
Tokens = Callable[..., list[list[int]]]

ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
# Each rotary type that changes the frequencies, the scale of cosine and sine, or both.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {**ROPE, "rope_type": "yarn", "factor": 4.0},
    "yarn with its own factor": {**ROPE, "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        **ROPE,
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "mistral", "mistral_sliding", "qwen2", "qwen2_half_sliding", "qwen3", "smollm3", "gemma3")},
    **{f"llama, {name}": ("llama", {"rope_parameters": rope}) for name, rope in SCALINGS.items()},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one head for all": ("llama", {"num_key_value_heads": 1}),
    "llama, a head for each": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": SCALINGS["yarn"]}),
    "gemma3, capped logits": ("gemma3", {"final_logit_softcapping": 3.0}),
}


def lean(model: PreTrainedModel, kind: Any = "float32") -> Model:
    """The model with packed weights, as `load_model` makes it; its small random parts away from their neutral start."""
    loaded = Model(model)
    loaded._pack(kind, None, False)
    return loaded


def vivid(model: PreTrainedModel) -> PreTrainedModel:
    """Norms and biases that are not what they start as."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += torch.empty_like(weight).normal_(0, 0.2, generator=generator)
    return model


def same_frequencies(stock: PreTrainedModel, model: Model) -> PreTrainedModel:
    """The stock model with the frequencies that onekv pins, where transformers would change them with the input's length."""
    for pin in model._hooked.pins:
        rotary: Any = stock.model.rotary_emb
        setattr(rotary, pin.name, pin.inv_freq)
        rotary.rope_type = "default"
    return stock


@pytest.mark.parametrize("case", CASES)
def test_the_lean_forward_equals_transformers_for_interleaved_sequences(case: str, tiny: Tiny, tokens_of: Tokens) -> None:
    family, changes = CASES[case]
    model = lean(vivid(tiny(family, **changes)))
    assert model._fused is not None
    prompts = tokens_of((23, 30, 12), shared=9)
    cache = cache_for(model, num_cells=96, max_seqs=8)
    scatter_free_cells(model, cache, seq=7)
    stock = same_frequencies(vivid(tiny(family, **changes)), model)
    for prompt, got in zip(prompts, together(model, cache, prompts, shared=9), strict=True):
        assert (got - alone(stock, prompt)).abs().max() < 1e-5


def test_far_positions_and_a_growing_table_give_the_same_angles(tiny: Tiny, tokens_of: Tokens) -> None:
    model, stock = lean(vivid(tiny("llama"))), vivid(tiny("llama"))
    cache = cache_for(model, num_cells=256, max_seqs=4)
    (prompt,) = tokens_of((200,))
    model.extend(cache, [0], [prompt[:10]])  # the table ends at 64
    expected = alone(stock, prompt)
    for sequence, start in ((0, 10), (1, 0)):
        got = model.extend(cache, [sequence], [prompt[start:]]) if sequence == 0 else None
        if got is not None:
            assert (got[0] - expected[-1]).abs().max() < 1e-5
    cache.clear()
    (step,) = cache.plan(Batch(prompt[:3], positions=[100, 101, 102], outputs="all"))
    with step:
        got = model.forward(step)
    with torch.inference_mode():
        shifted = stock(torch.tensor([prompt[:3]]), position_ids=torch.tensor([[100, 101, 102]])).logits[0]
    assert (got - shifted).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_in_bfloat16_it_is_no_farther_from_float32_than_transformers(family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    (prompt,) = tokens_of((24,))
    expected, stock = alone(tiny(family), prompt), alone(tiny(family).bfloat16(), prompt)
    model = lean(tiny(family).bfloat16(), "bfloat16")
    (step,) = cache_for(model, num_cells=32).plan(Batch(prompt, outputs="all"))
    with step:
        got = model.forward(step)
    assert (got - expected).abs().mean() < 1.1 * (stock - expected).abs().mean()
    assert (got - expected).abs().max() > 1e-4


def test_logits_come_for_the_wanted_rows_only(tiny: Tiny) -> None:
    model, stock = lean(tiny("llama")), tiny("llama")
    cache = cache_for(model, num_cells=16)
    (step,) = cache.plan(Batch([5, 6, 7, 8], outputs=[True, False, True, False]))
    with step:
        logits = model.forward(step)
    assert (logits - alone(stock, [5, 6, 7, 8])[[0, 2]]).abs().max() < 1e-5
    (step,) = cache.plan(Batch([9, 10], seqs=1, outputs=[False, False]))
    with step:
        assert model.forward(step).shape == (0, model.vocab_size)
    assert cache.num_used == 6


def test_embeddings_of_the_caller_are_read_and_not_changed(tiny: Tiny) -> None:
    model, stock = lean(tiny("llama")), tiny("llama")
    vectors = stock.get_input_embeddings().weight.detach()[[5, 6, 7]].clone()
    before = vectors.clone()
    (step,) = cache_for(model, num_cells=8).plan(Batch(embeddings=vectors, outputs="all"))
    with step:
        logits = model.forward(step)
    assert (logits - alone(stock, [5, 6, 7])).abs().max() < 1e-5
    assert torch.equal(vectors, before)


def test_every_layer_attends_once_or_the_step_is_refused(tiny: Tiny) -> None:
    model = lean(tiny("llama"))
    cache = cache_for(model, num_cells=8)
    assert model._fused is not None
    del model._fused._layers[2]
    (step,) = cache.plan(Batch([5]))
    with pytest.raises(UnsupportedModel, match=r"layers \[2\] did not attend"), step:
        model.forward(step)
    assert cache.num_used == 0


# --- who gets it --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma", "gemma2", "olmo2", "mixtral", "phi3", "ministral", "granite", "gpt2"])
def test_other_families_run_through_transformers_own_code(family: str, tiny: Tiny, tokens_of: Tokens) -> None:
    model, stock = lean(tiny(family)), tiny(family)
    assert model._fused is None
    (prompt,) = tokens_of((9,))
    assert (model.extend(cache_for(model, 16), [0], [prompt])[0] - alone(stock, prompt)[-1]).abs().max() < 1e-5


class OwnLayer(nn.Linear):
    """A linear layer that does something more."""


def changed_class(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.__class__ = OwnLayer


def changed_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = nn.RMSNorm(32)


def hooked(model: Any) -> None:
    model.model.layers[1].self_attn.register_forward_hook(lambda module, inputs, output: None)


def hooked_before(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, inputs: None)


def own_forward(model: Any) -> None:
    layer = model.model.layers[0]
    layer.forward = layer.forward


@pytest.mark.parametrize("change", [changed_class, changed_norm, hooked, hooked_before, own_forward])
def test_a_model_somebody_changed_runs_through_transformers_own_code(change: Callable[[Any], None], tiny: Tiny) -> None:
    model = tiny("llama")
    assert fused.serves(model)
    change(model)
    assert not fused.serves(model)


def test_a_model_of_the_users_own_stays_stock(tiny: Tiny) -> None:
    stock = tiny("llama")
    model = Model(stock)
    model.extend(cache_for(model, 8), [0], [[5, 6]])
    assert model._fused is None
    assert not any(isinstance(module, Packed) for module in stock.modules())


def test_layers_of_a_joined_product_answer_alone_together_and_in_any_order(tiny: Tiny) -> None:
    model, stock = tiny("llama", attention_bias=True), tiny("llama", attention_bias=True)
    lean(model)
    mine, theirs = model.model.layers[1].self_attn, stock.model.layers[1].self_attn
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 32, generator=generator)
    for names in (["q_proj", "k_proj", "v_proj"], ["v_proj", "k_proj"], ["q_proj", "v_proj"], ["k_proj", "q_proj", "q_proj"]):
        for name in names:
            assert (getattr(mine, name)(x) - getattr(theirs, name)(x)).abs().max() < 1e-5
    mine.q_proj(x)
    x += 1.0  # after all three were asked, or not: the next pass begins with q
    assert (mine.q_proj(x) - theirs.q_proj(x)).abs().max() < 1e-5
    mine.k_proj(x), mine.v_proj(x)
    assert mine.v_proj.part.shared.out is None


def test_generate_on_cells_uses_the_loaded_models_forward(tiny: Tiny, tmp_path: Any, tokens_of: Tokens) -> None:
    stock: Any = tiny("llama")
    stock.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, weights="float32")
    model: Any = loaded.transformers_model
    kv: KVCache = cache_for(model, num_cells=64)
    assert kv.config.fingerprint == Model(stock).fingerprint
    prompt = torch.tensor(tokens_of((9,)))
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    got = model.generate(prompt, cache=as_cache(kv, [kv.sequence()]), **settings)
    assert torch.equal(got, stock.generate(prompt, **settings))
    assert torch.equal(got, model.generate(prompt, **settings))  # by itself, without cells
    assert hf.loaded_as(model) is loaded
    del loaded, kv
    model.__dict__.pop("_onekv", None)
    gc.collect()
    assert hf.loaded_as(model) is None
