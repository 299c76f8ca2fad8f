"""A model seen through its config alone: the same layers and bytes as the loaded model, and no memory for weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from families import SERVED, tiny_model
from onekv import ConfigError, LayerSpec, UnsupportedModel
from onekv.models import Model, linears, load_model
from onekv.models.skeleton import Skeleton, skeleton, skeleton_of


def seen(config: Any) -> Skeleton:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="batched_mm")
    return skeleton_of(model)


def geometry(layers: tuple[LayerSpec, ...]) -> list[tuple[Any, ...]]:
    return [(spec.num_kv_heads, spec.head_dim, spec.v_dim, spec.window, spec.source) for spec in layers]


@pytest.mark.parametrize("name", SERVED)
def test_the_layers_of_every_family_are_those_of_the_loaded_model(name: str) -> None:
    loaded = tiny_model(name)
    found = seen(loaded.config)
    assert geometry(found.layers) == geometry(Model(loaded).layers)
    assert found.max_positions == Model(loaded).max_positions
    assert found.weights_nbytes == sum(t.nbytes for t in {id(t): t for t in (*loaded.parameters(), *loaded.buffers())}.values())


def test_a_model_is_planned_that_no_memory_here_would_hold() -> None:
    """Llama 3 8B, 32 GB in float32: the published number of weights, and two heads of 128 floats for each of 8 groups and 32 layers."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    found = seen(config)
    buffers = 2 * 64 * 4  # rotary frequencies, kept twice
    assert found.weights_nbytes == 8_030_261_248 * 4 + buffers
    assert geometry(found.layers) == geometry((LayerSpec(8, 128),) * 32)


def test_a_directory_needs_no_weights(tmp_path: Path, tiny: Callable[..., PreTrainedModel]) -> None:
    loaded = tiny("gemma3")
    loaded.config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert geometry(skeleton(str(tmp_path)).layers) == geometry(Model(loaded).layers)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_gguf_is_not_converted(name: str, own_home: Path, tiny: Callable[..., PreTrainedModel], make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(tiny(name))
    found = skeleton(str(path))
    assert not own_home.exists()
    assert geometry(found.layers) == geometry(load_model(path).layers)


@pytest.mark.parametrize("name", ["no/such.gguf", "/no/such/directory", "gemma3-270m"])
def test_an_unknown_model_is_refused(name: str, own_home: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        skeleton(name)


def test_what_cannot_be_served_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="DeepseekV32ForCausalLM"):
        seen(tiny_model("deepseek_v32").config)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="int3"):
        skeleton("smollm2", weights="int3")


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=tmp_path.name):
        skeleton(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nothing_like_it"}')
    with pytest.raises(ConfigError, match="nothing_like_it"):
        skeleton(str(tmp_path))


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_planned_weights_are_as_many_bytes_as_packed_ones(tied: bool, weights: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    model = tiny_model("llama", **sizes, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    if weights == "bfloat16" and not linears.has_bfloat16():
        pytest.skip("without bfloat16 instructions the rounded weights are kept in float32")
    assert skeleton(str(tmp_path), weights=weights).weights_nbytes == load_model(tmp_path, weights=weights).nbytes
