"""GGUF files written by the gguf package: what comes out equals the model that went in, or the file is refused by the key's name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from onekv.errors import ConfigError, UnsupportedModel
from onekv.models import gguf, load_model
from onekv.models.pull import home

PROMPT = torch.tensor([[5, 9, 60, 33, 12, 12, 71, 40, 8, 25, 90, 14]])
Tiny = Callable[..., PreTrainedModel]
Write = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("own_home")


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits[0]


def loaded(path: Path) -> PreTrainedModel:
    return load_model(path, weights="float32").transformers_model


def converted(path: Path) -> PreTrainedModel:
    """What a file was converted to, as transformers loads it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(gguf.converted(path), dtype=torch.float32)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_half_sliding", "gemma2"])
def test_a_file_loads_and_equals_the_model_it_was_made_of(family: str, tiny: Tiny, make_gguf: Write) -> None:
    changes: dict[str, Any] = {"use_sliding_window": False} if family.startswith("qwen2") else {}
    original = tiny(family, **changes)
    metadata = {}
    if family == "gemma2":
        metadata = {
            "gemma2.attention.sliding_window": 7,
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 30.0,
        }
    assert torch.allclose(logits(loaded(make_gguf(original, metadata))), logits(original), atol=1e-5)


def test_weights_equal_what_transformers_reads_from_the_file_to_the_bit(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"))
    stock = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = converted(path)
    weights = dict(stock.named_parameters())
    assert {n for n, _ in ours.named_parameters()} == set(weights)
    assert all(torch.equal(w, weights[n]) for n, w in ours.named_parameters())
    assert torch.equal(logits(ours), logits(stock))


def test_tokenizer_template_and_end_tokens_come_from_the_file(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"), {"tokenizer.ggml.eot_token_id": 7})
    text = load_model(path).text
    stock = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert text.encode("a b a") == stock("a b a")["input_ids"]
    assert text.decode(text.chat([{"role": "user", "content": "hi"}])) == "user:hi;"
    assert text.eos_ids == {2, 7}


def test_a_file_is_converted_once_and_again_after_it_changed(tiny: Tiny, make_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tiny("llama"))
    first = gguf.converted(path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted twice"))
        assert gguf.converted(path) == first
        copy = path.with_name("copy.gguf")
        copy.write_bytes(path.read_bytes())
        assert gguf.converted(copy) == first
    changed = tiny("llama")
    changed.lm_head.weight.data[0, 0] += 1
    make_gguf(changed)
    assert gguf.converted(path) != first
    assert sorted(p.name[0] for p in (home() / "converted").iterdir() if p.name.startswith(".")) == []


def test_the_digest_of_an_old_file_is_remembered_and_a_fresh_one_is_read_again(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"))
    notes = home() / "converted" / "digests"
    gguf._digest(path)
    assert not notes.exists()
    os.utime(path, (1, 1))
    digest = gguf._digest(path)
    (note,) = notes.iterdir()
    assert note.read_text() == digest
    note.write_text("f" * 64)
    assert gguf._digest(path) == "f" * 64
    note.write_text("damaged")
    assert gguf._digest(path) == digest


def test_a_conversion_of_another_version_is_made_again(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"))
    target = gguf.converted(path)
    (target / "onekv.json").write_text('{"format": 0}')
    (target / "left over").touch()
    assert gguf.converted(path) == target
    assert not (target / "left over").exists()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_is_followed(metadata: dict[str, Any], expected: dict[str, Any], tiny: Tiny, make_gguf: Write) -> None:
    scaled = tiny("llama", rope_parameters={"rope_theta": 10000.0, **expected})
    plain = tiny("llama")
    got = logits(loaded(make_gguf(plain, metadata)))
    assert torch.allclose(got, logits(scaled), atol=1e-5)
    if expected["rope_type"] != "default":
        assert not torch.allclose(got, logits(plain), atol=1e-2)


def test_what_transformers_does_not_read_is_followed_where_the_config_can(tiny: Tiny, make_gguf: Write) -> None:
    original = tiny(
        "gemma2", query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=1.5, rope_parameters={"rope_theta": 500.0}
    )
    said = {
        "gemma2.attention.scale": 0.25,
        "gemma2.attn_logit_softcapping": 2.0,
        "gemma2.final_logit_softcapping": 1.5,
        "gemma2.attention.sliding_window": 7,
    }
    assert torch.allclose(logits(loaded(make_gguf(original, said))), logits(original), atol=1e-5)


def test_a_key_that_is_not_there_means_what_llama_cpp_takes_it_for(tiny: Tiny, make_gguf: Write) -> None:
    # A million is what Gemma 3's config would take for the base; no window is what the file would mean, and cannot be followed.
    with pytest.raises(UnsupportedModel, match=r"sliding_window.*not stated"):
        loaded(make_gguf(tiny_gemma3(tiny)))
    path = make_gguf(tiny_gemma3(tiny), {"gemma3.attention.sliding_window": 7, "gemma3.rope.freq_base": None})
    config = loaded(path).config
    assert config.rope_parameters["full_attention"]["rope_theta"] == 10000.0
    assert config.query_pre_attn_scalar == pytest.approx(8)


def tiny_gemma3(tiny: Tiny) -> PreTrainedModel:
    config = tiny("gemma2").config.to_dict()
    from transformers import Gemma3TextConfig

    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return AutoModelForCausalLM.from_config(
        Gemma3TextConfig(**{k: config[k] for k in keys}, max_position_embeddings=256, sliding_window=7, query_pre_attn_scalar=8)
    ).eval()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "longrope"),
        ("llama.attention.scale", 0.5),
        ("llama.attention.temperature_length", 8192),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.attention.value_length", 16),
        ("llama.rope.dimension_count", 4),
        ("llama.expert_count", 8),
        ("llama.logit_scale", 0.0625),
        ("llama.attention.causal", False),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.feed_forward_length", [48, 40, 48, 48]),
        ("llama.a_key_of_tomorrow", 1),
        ("clip.has_vision_encoder", True),
        ("split.count", 2),
        ("general.type", "adapter"),
        ("tokenizer.ggml.pre", "of tomorrow"),
        ("tokenizer.ggml.normalizer.lowercase", True),
        ("tokenizer.ggml.add_sep_token", True),
    ],
)
def test_what_cannot_be_followed_is_refused_by_key_and_value(key: str, value: Any, tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"), {key: value})
    with pytest.raises(UnsupportedModel, match=rf"{re.escape(key)} = .?{re.escape(str(value))}"):
        loaded(path)
    assert not list((home() / "converted").glob("[!d]*"))


def test_yarn_details_without_a_word_in_transformers_are_refused(tiny: Tiny, make_gguf: Write) -> None:
    said = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.yarn_log_multiplier": 0.1}
    with pytest.raises(UnsupportedModel, match="yarn_log_multiplier"):
        loaded(make_gguf(tiny("llama"), said))


@pytest.mark.parametrize("name", ["rope_factors.weight", "blk.0.attn_q.bias", "blk.1.attn_q_norm.weight"])
def test_a_tensor_that_would_be_dropped_is_refused_by_name(name: str, tiny: Tiny, make_gguf: Write) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(name)):
        loaded(make_gguf(tiny("llama"), None, {name: np.ones(4)}))


def test_a_file_without_one_of_the_weights_is_refused(tiny: Tiny, make_gguf: Write) -> None:
    with pytest.raises(UnsupportedModel, match=r"layers\.2\.mlp\.up_proj"):
        loaded(make_gguf(tiny("llama"), None, {"blk.2.ffn_up.weight": None}))


def test_an_architecture_without_rules_is_refused_by_name(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"))
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0rwkv7", 1))
    with pytest.raises(UnsupportedModel, match="rwkv7"):
        loaded(path)


def test_metadata_and_tensors_that_disagree_are_refused_by_tensor(tiny: Tiny, make_gguf: Write) -> None:
    with pytest.raises(ConfigError, match=r"token_embd\.weight is \[32, 97\].*\[32, 98\]"):
        loaded(make_gguf(tiny("llama"), {"llama.vocab_size": 98}))


@pytest.mark.parametrize("add", [True, False])
def test_the_begin_token_is_added_to_raw_text_when_the_file_says_so(add: bool, tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"), {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": add})
    assert (load_model(path).text.encode("a")[0] == 0) == add


def test_smollm_cuts_digits_apart_before_anything_else(tiny: Tiny, make_gguf: Write) -> None:
    text = load_model(make_gguf(tiny("llama"), {"tokenizer.ggml.pre": "smollm"})).text
    words = [word for word, _ in text.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")]
    assert words == ["a", "ĠĠĠ", "1", "2"]


def test_a_damaged_file_is_a_config_error_wherever_it_is_cut(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama"))
    whole = path.read_bytes()
    for size in (0, 3, 11, 40, 900, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            loaded(path)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ConfigError):
        loaded(path)
    assert not list((home() / "converted").glob("[!d]*"))


@pytest.mark.slow
@pytest.mark.demo_model
def test_the_demo_model_equals_what_transformers_reads_from_the_file(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(demo_path.parent.parent))
    stock = AutoModelForCausalLM.from_pretrained(demo_path.parent, gguf_file=demo_path.name, dtype=torch.float32)
    weights = dict(stock.named_parameters())
    assert all(torch.equal(w, weights[n]) for n, w in converted(demo_path).named_parameters())
