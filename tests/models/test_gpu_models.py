"""Models on an accelerator: probed, run and generated from as on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from families import tiny_model
from onekv import LayerSpec
from onekv.engine.bench import measure
from onekv.engine.engine import Engine
from onekv.models import Model, as_cache, cache_for, load_model
from onekv.models.pull import NAMED_MODELS
from tiny import GPU, ON_GPU

pytestmark = ON_GPU

# Full and sliding windows, layers that share, caps, sinks, latents, a model with attention of its own, experts, pinned frequencies.
NAMES = ["llama", "gemma2", "gemma3", "gemma3n", "gpt_oss", "gptj", "mixtral", "llama4", "deepseek_v3", "falcon", "phi3_longrope"]
TOLERANCE = 2e-3


def geometry(layers: tuple[LayerSpec, ...]) -> list[tuple[Any, ...]]:
    ropes = [spec.rope and (spec.rope.layout, spec.rope.offset, spec.rope.part, len(spec.rope.inv_freq)) for spec in layers]
    return [
        (spec.num_kv_heads, spec.head_dim, spec.v_dim, spec.window, spec.source, rope) for spec, rope in zip(layers, ropes, strict=True)
    ]


def tiny_there(name: str) -> PreTrainedModel:
    """A tiny model on the accelerator. Its experts run one by one: transformers' faster ways ask for dtypes and processors."""
    model = tiny_model(name).to(GPU)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_layers_are_those_of_the_cpu(name: str, tokens_of: Any) -> None:
    """Prompts of several lengths, a fork, then decoding of all of them together."""
    here = Model(tiny_model(name))
    there = Model(tiny_there(name))
    assert geometry(there.layers) == geometry(here.layers)
    assert (there.no_shift is None, there.fingerprint) == (here.no_shift is None, here.fingerprint)
    caches = [cache_for(model, 256, max_seqs=8) for model in (there, here)]
    assert caches[0].config.device.startswith(GPU)
    prompts, pairs = tokens_of((31, 26, 17, 3), shared=3), []
    for at in range(6):
        tokens = prompts if at == 0 else [[5 + at + s] for s in range(4 if at < 3 else 5)]
        if at == 3:
            for cache in caches:
                cache.seq_cp(1, 4)
        seqs = list(range(len(tokens)))
        pairs.append([model.extend(cache, seqs, tokens, max_ubatch=24).cpu() for model, cache in zip((there, here), caches, strict=True)])
    for found, expected in pairs:
        assert expected.abs().max() > 0.1
        assert (found - expected).abs().max() / expected.abs().max() < TOLERANCE


def test_keys_that_were_shifted_there_go_on_here(tokens_of: Any) -> None:
    there, here = Model(tiny_model("llama").to(GPU)), Model(tiny_model("llama"))
    caches = [cache_for(model, 64, max_seqs=2) for model in (there, here)]
    found = []
    for model, cache in zip((there, here), caches, strict=True):
        chat = cache.sequence()
        model.extend(cache, [chat], tokens_of((20,)))
        chat.remove(4, 9)
        found.append(model.extend(cache, [chat], [[7, 8]]).cpu())
    assert (found[0] - found[1]).abs().max() < TOLERANCE * found[1].abs().max()
    assert torch.allclose(caches[0].keys(0, 0).cpu(), caches[1].keys(0, 0), atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_there_is_transformers_own(name: str, options: dict[str, Any]) -> None:
    stock = tiny_model(name).to(GPU)
    model = copy.deepcopy(stock)
    cache = cache_for(model, 512, max_seqs=16)
    inputs = {"input_ids": torch.tensor([[0, 0, 5, 9, 11], [4, 8, 15, 16, 23]], device=GPU)}
    inputs["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1], [1] * 5], device=GPU)
    settings = {"do_sample": False, **options, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(3)
    expected = stock.generate(**inputs, **settings)
    torch.manual_seed(3)
    found = model.generate(**inputs, **settings, cache=as_cache(cache, [0, 1]))
    assert found.device.type == torch.device(GPU).type
    assert torch.equal(found, expected)


def test_half_precision_models_run_there(tokens_of: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = Model(tiny_model("llama").to(GPU, dtype))
        cache = cache_for(model, 64, max_seqs=4, k_dtype=str(dtype).removeprefix("torch."))
        logits = model.extend(cache, [0, 1], tokens_of((9, 6)))
        expected = Model(tiny_model("llama"))
        right = expected.extend(cache_for(expected, 64, max_seqs=4), [0, 1], tokens_of((9, 6)))
        assert (logits.device.type, logits.dtype) == (torch.device(GPU).type, torch.float32)
        assert (logits.cpu() - right).abs().max() < 0.1 * right.abs().max()


@pytest.mark.demo_model
@pytest.mark.skipif(not NAMED_MODELS["smollm2"].path.is_file(), reason="no demo model here; `make setup` fetches it")
def test_the_demo_model_decodes_the_same_tokens() -> None:
    prompts = ["The capital of France is", "Two plus two is", "Water boils at a temperature of", "Once upon a time"]
    answers = []
    for device in (GPU, "cpu"):
        model = load_model("smollm2", weights="float32", device=device)
        cache = cache_for(model, 256, max_seqs=4)
        with Engine(model, cache, max_running=3) as engine:
            answers.append([stream.result().token_ids for stream in [engine.stream(text, max_tokens=12) for text in prompts]])
        if device == GPU:
            speed = measure(model, 2, 16, 4, k_dtype="bfloat16")
            assert speed.decode_tokens_per_s > 0
            assert model.text.decode(answers[0][0]).startswith(" Paris")
    assert answers[0] == answers[1]
