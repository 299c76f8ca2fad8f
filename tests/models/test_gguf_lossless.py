"""Every architecture that GGUF files are read of: a random model, written as llama.cpp's converter writes it, comes back as it was."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from onekv.errors import ConfigError, UnsupportedModel
from onekv.models import load_model

PROMPT = torch.tensor([[5, 9, 60, 33, 12, 12, 71, 40, 8, 25, 90, 14, 3, 77, 6, 41]])
Tiny = Callable[..., PreTrainedModel]
Write = Callable[..., Path]
Written = tuple[dict[str, Any], dict[str, Any]]  # keys and tensors

pytestmark = pytest.mark.usefixtures("own_home")


# --- what llama.cpp's converter writes for one family only ---------------------------------------------------------------------------


def converter_writes(config: Any) -> Written:
    """Keys and tensors beside those every family has."""
    arch = {"gemma3_text": "gemma3", "mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys, tensors = scaling_of(config, rope, head_dim)
    keys["vocab_size"] = config.vocab_size if arch in ("llama", "smollm3") else None
    if arch in ("llama", "smollm3", "phi3"):
        keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if arch == "phi3":
        keys["attention.sliding_window"] = config.sliding_window or 0
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if arch.startswith("gemma"):
        keys["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        keys["attn_logit_softcapping"] = config.attn_logit_softcapping
        keys["final_logit_softcapping"] = config.final_logit_softcapping
        keys["rope.freq_base"] = None
    return {f"{arch}.{key}": value for key, value in keys.items()}, tensors


def scaling_of(config: Any, rope: dict[str, Any], head_dim: int) -> Written:
    """Rotary scaling: keys, or tensors of divisors."""
    kind = rope["rope_type"]
    keys: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{name}": rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
    if kind == "llama3":
        return keys, {"rope_freqs.weight": llama3_divisors(rope, head_dim)}
    if kind == "longrope":
        scale, original = config.max_position_embeddings / config.original_max_position_embeddings, config.original_max_position_embeddings
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        return keys, {f"rope_factors_{size}.weight": np.array(rope[f"{size}_factor"]) for size in ("long", "short")}
    return keys, {}


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> Any:
    """float32, one per rotary pair: 1 for short waves, the factor for long ones, and what lies between."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


# --- models --------------------------------------------------------------------------------------------------------------------------

THETA: dict[str, Any] = {"rope_theta": 500.0}
LINEAR = {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 4.0}}
YARN = {"rope_parameters": {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
YARN_BETAS = {"rope_parameters": {**YARN["rope_parameters"], "beta_fast": 20.0, "beta_slow": 2.0}}
# Waves of 6 to 3000 positions: some on either side of the bounds, several between them.
LLAMA3 = {
    "head_dim": 32,
    "rope_parameters": {
        **THETA,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 200,
    },
}


def longrope(original: int, pairs: int = 4, share: float = 1.0) -> dict[str, Any]:
    rope = {
        **THETA,
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 4 for i in range(pairs)],
        "long_factor": [1.5 + i for i in range(pairs)],
        "original_max_position_embeddings": original,
        "partial_rotary_factor": share,
    }
    return {"rope_parameters": rope, "original_max_position_embeddings": original, "sliding_window": None}


def gemma3_rope(**full: Any) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    return {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 2000.0, **full}, "sliding_attention": sliding}}


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}
SIX = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 8, "sliding_window": 7}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", UNTIED),
    "llama tied": ("llama", TIED),
    "llama linear": ("llama", LINEAR),
    "llama yarn": ("llama", YARN),
    "llama yarn with betas": ("llama", YARN_BETAS),
    "llama with Llama 3's scaling": ("llama", LLAMA3),
    "llama with wide heads": ("llama", {"head_dim": 16}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-3}),
    "qwen2 tied, yarn": ("qwen2", {**TIED, **YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 linear": ("qwen3", LINEAR),
    "gemma2": ("gemma2", CAPS),
    "gemma3": ("gemma3", {**SIX, **gemma3_rope()}),
    "gemma3 linear": ("gemma3", {**SIX, **gemma3_rope(rope_type="linear", factor=8.0)}),
    "phi3": ("phi3", {"sliding_window": None, "rope_parameters": {**THETA, "rope_type": "default"}}),
    "phi3 windowed, tied": ("phi3", TIED),
    "phi3 longrope, short": ("phi3", longrope(128)),
    "phi3 longrope, long": ("phi3", longrope(8)),
    "phi3 longrope, half rotated": ("phi3", longrope(8, pairs=2, share=0.5)),
    "smollm3": ("smollm3", {**THETA, **UNTIED}),
    "smollm3 tied, yarn": ("smollm3", {**YARN, **TIED}),
    "smollm3 with biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "smollm3 with Llama 3's scaling": ("smollm3", LLAMA3),
}
# Not of the computation; or stated by a file and worked out by transformers from other fields.
_NOT_COMPARED = {"_name_or_path", "architectures", "dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
_OF_LLAMA_ONLY = {"model_type", "attention_bias", "mlp_bias", "pretraining_tp", "sliding_window"}


def compared(config: Any) -> dict[str, Any]:
    fields = {k: v for k, v in config.to_dict().items() if k not in _NOT_COMPARED}
    rope = dict(fields["rope_parameters"])
    if rope.get("rope_type") == "longrope":
        rope.pop("factor", None)
        rope.pop("attention_factor", None)
    if rope.get("rope_type") == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope}
    return {**fields, "rope_parameters": rope}


def assert_same(value: Any, expected: Any, name: str) -> None:
    """Equal; numbers to float32's accuracy, which is what a file keeps."""
    if isinstance(expected, dict):
        assert set(value) == set(expected), name
        for key in expected:
            assert_same(value[key], expected[key], f"{name}.{key}")
    elif isinstance(expected[0] if isinstance(expected, list) and expected else expected, float):
        assert value == pytest.approx(expected, rel=1e-6), name
    else:
        assert value == expected, name


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits[0]


def loaded(path: Path) -> PreTrainedModel:
    return load_model(path).transformers_model


def with_random_vectors(model: PreTrainedModel) -> PreTrainedModel:
    """Norms and biases start at 1 and 0, where a wrong offset or permutation could hide."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += torch.empty_like(weight).normal_(0, 0.2, generator=generator)
    return model


@pytest.mark.parametrize("case", CASES)
def test_config_and_logits_come_back_as_they_were(case: str, tiny: Tiny, make_gguf: Write) -> None:
    family, changes = CASES[case]
    original = with_random_vectors(tiny(family, **changes))
    copy = loaded(make_gguf(original, *converter_writes(original.config)))
    assert torch.allclose(logits(copy), logits(original), atol=1e-5)
    mine, theirs = compared(copy.config), compared(original.config)
    if family == "mistral":  # the file says "llama" for both, which compute the same without a window
        mine, theirs = ({k: v for k, v in fields.items() if k not in _OF_LLAMA_ONLY} for fields in (mine, theirs))
    assert_same(mine, theirs, "config")


@pytest.mark.parametrize("case", [name for name, (_, changes) in CASES.items() if changes.keys() & {"rope_parameters", *CAPS}])
def test_each_of_those_settings_changes_the_logits_so_that_its_loss_would_show(case: str, tiny: Tiny) -> None:
    family, changes = CASES[case]
    lost = {k: v for k, v in changes.items() if k not in ("rope_parameters", *CAPS)}
    assert not torch.allclose(logits(tiny(family, **changes)), logits(tiny(family, **lost)), atol=1e-2)


# --- what a file may say and the converter does not write ----------------------------------------------------------------------------


def test_a_llama_file_with_a_window_is_a_mistral_model(tiny: Tiny, make_gguf: Write) -> None:
    original = tiny("mistral_sliding")
    copy = loaded(make_gguf(original, {"llama.attention.sliding_window": 7}))
    assert (copy.config.model_type, copy.config.sliding_window) == ("mistral", 7)
    assert torch.allclose(logits(copy), logits(original), atol=1e-5)
    assert not torch.allclose(logits(loaded(make_gguf(original))), logits(original), atol=1e-2)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_windowed_layers_are_followed_where_the_file_marks_them(family: str, tiny: Tiny, make_gguf: Write) -> None:
    marks = [False, True, True, False]
    kinds = ["sliding_attention" if mark else "full_attention" for mark in marks]
    original = tiny(family, use_sliding_window=True, sliding_window=7, layer_types=kinds)
    said = {f"{family}.attention.sliding_window": 7, f"{family}.attention.sliding_window_pattern": marks}
    copy = loaded(make_gguf(original, said))
    assert torch.allclose(logits(copy), logits(original), atol=1e-5)
    assert copy.config.layer_types == kinds


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_a_window_of_unmarked_layers_is_refused_unless_the_context_fits_in_it(family: str, tiny: Tiny, make_gguf: Write) -> None:
    original, key = tiny(family, use_sliding_window=False), f"{family}.attention.sliding_window"
    with pytest.raises(UnsupportedModel, match=f"{key} = 7"):
        loaded(make_gguf(original, {key: 7}))
    assert torch.allclose(logits(loaded(make_gguf(original, {key: 256}))), logits(original), atol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "windowed"),
    [(2, "101010"), (3, "110110"), (1, "000000"), ([True, False, False, True, True, False], "100110"), ([1, 0, 0, 0, 0, 0], "100000")],
)
def test_the_pattern_of_windows_is_followed(pattern: Any, windowed: str, tiny: Tiny, make_gguf: Write) -> None:
    kinds = ["sliding_attention" if mark == "1" else "full_attention" for mark in windowed]
    original = tiny("gemma3", **{**SIX, **gemma3_rope(), "layer_types": kinds})
    keys, tensors = converter_writes(original.config)
    copy = loaded(make_gguf(original, {**keys, "gemma3.attention.sliding_window_pattern": pattern}, tensors))
    assert copy.config.layer_types == kinds
    assert torch.allclose(logits(copy), logits(original), atol=1e-5)


def test_both_rotary_bases_of_gemma3_and_its_softcaps_are_followed(tiny: Tiny, make_gguf: Write) -> None:
    changes = {**SIX, **gemma3_rope(), "final_logit_softcapping": 1.5, "attn_logit_softcapping": 3.0}
    changes["rope_parameters"]["sliding_attention"]["rope_theta"] = 77.0
    original = tiny("gemma3", **changes)
    keys, tensors = converter_writes(original.config)
    said = {"rope.freq_base_swa": 77.0, "final_logit_softcapping": 1.5, "attn_logit_softcapping": 3.0}
    copy = loaded(make_gguf(original, {**keys, **{f"gemma3.{k}": v for k, v in said.items()}}, tensors))
    assert torch.allclose(logits(copy), logits(original), atol=1e-5)


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("family", ["qwen2", "smollm3", "llama", "mistral", "qwen3"])
def test_a_head_width_that_is_not_hidden_size_over_heads_is_followed(width: int, family: str, tiny: Tiny, make_gguf: Write) -> None:
    original = tiny(family, head_dim=width)
    arch = {"mistral": "llama"}.get(family, family)
    copy = loaded(make_gguf(original, {f"{arch}.attention.key_length": width, f"{arch}.attention.value_length": width}))
    assert copy.config.head_dim == width
    assert torch.allclose(logits(copy), logits(original), atol=1e-5)


def test_divisors_that_no_formula_gives_are_followed_as_they_are(tiny: Tiny, make_gguf: Write) -> None:
    divisors = [1.0, 3.0, 2.0, 5.0]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": divisors, "long_factor": divisors}
    scaled = tiny("llama", rope_parameters={**rope, "original_max_position_embeddings": 256, "attention_factor": 1.0})
    copy = loaded(make_gguf(tiny("llama"), None, {"rope_freqs.weight": np.array(divisors)}))
    assert torch.allclose(logits(copy), logits(scaled), atol=1e-5)
    assert not torch.allclose(logits(copy), logits(tiny("llama")), atol=1e-2)


@pytest.mark.parametrize(("theta", "dims", "factor"), [(500_000.0, 128, 8.0), (500_000.0, 64, 32.0)])
def test_the_divisors_of_published_llama_3_files_give_their_settings_back(theta: float, dims: int, factor: float) -> None:
    from onekv.models.gguf import _llama3

    rope = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    divisors = llama3_divisors({**rope, "rope_theta": theta}, dims)
    assert _llama3([float(d) for d in divisors], theta) == {"rope_type": "llama3", **rope}
    divisors[-1] *= 1.001
    assert _llama3([float(d) for d in divisors], theta) is None


def test_yarns_attention_factor_multiplies_the_usual_one(tiny: Tiny, make_gguf: Write) -> None:
    rope = {**YARN["rope_parameters"], "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1)}
    original = tiny("llama", rope_parameters=rope)
    keys, tensors = converter_writes(original.config)
    copy = loaded(make_gguf(original, {**keys, "llama.rope.scaling.attn_factor": 0.5}, tensors))
    assert torch.allclose(logits(copy), logits(original), atol=1e-5)


def test_phi3_files_from_before_windows_were_stated_have_the_4k_models_window(tiny: Tiny, make_gguf: Write) -> None:
    sizes = {"num_hidden_layers": 32, "max_position_embeddings": 4096, "sliding_window": None, "hidden_size": 8, "intermediate_size": 8}
    copy = loaded(make_gguf(tiny("phi3", **sizes, num_attention_heads=2)))
    assert copy.config.sliding_window == 2047


@pytest.mark.parametrize(
    ("family", "said", "tensors", "named"),
    [
        ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, ["rope_freqs"], "rope_freqs.weight"),
        ("llama", {"llama.rope.scaling.attn_factor": 0.5}, [], "rope.scaling.attn_factor = 0.5"),
        ("llama", {"llama.rope.scaling.attn_factor": 0.5}, ["rope_freqs"], "rope.scaling.attn_factor = 0.5"),
        ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, [], "yarn_ext_factor = 0.5"),
        ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_attn_factor": 0.5}, [], "yarn_attn_factor = 0.5"),
        ("llama", {}, ["rope_factors_long"], "rope_factors_short.weight"),
        ("llama", {"llama.rope.scaling.type": "dynamic"}, [], "rope.scaling.type = 'dynamic'"),
        ("llama", {"llama.attention.temperature_length": 8192}, [], "attention.temperature_length = 8192"),
        ("phi3", {"phi3.rope.scaling.type": "yarn", "phi3.rope.scaling.factor": 4.0}, [], "rope.scaling.type = 'yarn'"),
        ("phi3", {}, ["rope_freqs"], "rope_freqs.weight"),
        ("phi3", {"phi3.rope.scaling.factor": 4.0}, ["rope_factors_long", "rope_factors_short"], "rope.scaling.factor = 4.0"),
        ("qwen2", {}, ["rope_freqs"], "rope_freqs.weight"),
        ("qwen2", {"qwen2.attention.sliding_window_pattern": [True]}, [], "sliding_window_pattern"),
        ("smollm3", {"smollm3.rope.dimension_count": 4}, [], "rope.dimension_count = 4"),
        ("gemma2", {"gemma2.attention.sliding_window": 7, "gemma2.attention.scale": 0.3}, [], "attention.scale = 0.3"),
        ("gemma2", {"gemma2.attention.sliding_window": 7}, ["rope_freqs"], "rope_freqs.weight"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(
    family: str, said: dict[str, Any], tensors: list[str], named: str, tiny: Tiny, make_gguf: Write
) -> None:
    given = {f"{name}.weight": np.array([1.0, 2.0, 3.0, 4.0]) for name in tensors}
    with pytest.raises(UnsupportedModel, match=re.escape(named)):
        loaded(make_gguf(tiny(family), said, given))


def test_divisors_of_another_length_and_missing_keys_are_damage(tiny: Tiny, make_gguf: Write) -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight has 3 values.*asks for 4"):
        loaded(make_gguf(tiny("llama"), None, {"rope_freqs.weight": np.ones(3)}))
    with pytest.raises(ConfigError, match=r"no llama\.block_count"):
        loaded(make_gguf(tiny("llama"), {"llama.block_count": None}))


def test_a_tensor_of_the_right_size_and_another_shape_is_damage(tiny: Tiny, make_gguf: Write) -> None:
    turned = np.zeros((32, 97), np.float32)
    with pytest.raises(ConfigError, match=r"token_embd\.weight is \[97, 32\], and the metadata asks for \[32, 97\]"):
        loaded(make_gguf(tiny("llama"), None, {"token_embd.weight": turned}))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "phi3", "smollm3"])
def test_the_tokenizer_and_the_end_tokens_do_not_depend_on_the_architecture(family: str, tiny: Tiny, make_gguf: Write) -> None:
    said = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    llama = load_model(make_gguf(tiny("llama"), said)).text
    text = load_model(make_gguf(tiny(family, sliding_window=None), said)).text
    assert text.encode("a b 12") == llama.encode("a b 12")
    assert text.encode("a")[0] == 0
    assert text.chat([{"role": "user", "content": "hi"}]) == llama.chat([{"role": "user", "content": "hi"}])
    assert text.eos_ids == llama.eos_ids == {2, 7}
