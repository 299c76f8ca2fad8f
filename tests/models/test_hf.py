"""Unmodified transformers models on one buffer of cells: every row equals its sequence alone; what cannot be exact is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from onekv import Batch, BatchError, CacheFull, ConfigError, KVCache, LayerSpec, OneKVError, UnsupportedModel, Window
from onekv.models import Model, cache_for, gguf, hooks, load_model
from packed import alone, scatter_free_cells, together

Tiny = Callable[..., PreTrainedModel]
Tokens = Callable[..., list[list[int]]]

SLIDING, FULL = Window.sliding(7), Window.full()


def test_greedy_generation_equals_transformers_own(tiny: Tiny, tokens_of: Tokens) -> None:
    stock, model = tiny("llama"), Model(tiny("llama"))
    cache = cache_for(model, num_cells=128, max_seqs=4)
    prompts = tokens_of((11, 4, 7))
    logits = model.extend(cache, [2, 0, 3], prompts, max_ubatch=5)
    answers: list[list[int]] = [[], [], []]
    for _ in range(12):
        for answer, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
            answer.append(token)
        logits = model.extend(cache, [2, 0, 3], [[a[-1]] for a in answers])
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = stock.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert answer == whole[0, len(prompt) :].tolist()


def test_extend_takes_handles_and_answers_in_the_order_asked(tiny: Tiny, tokens_of: Tokens) -> None:
    stock, model = tiny("llama"), Model(tiny("llama"))
    cache = cache_for(model, num_cells=64, max_seqs=4)
    one, two = cache.sequence(), cache.sequence()
    prompts = tokens_of((7, 3))
    got = model.extend(cache, [two, one], prompts)
    assert [len(two), len(one)] == [7, 3]
    for row, prompt in zip(got, prompts, strict=True):
        assert (row - alone(stock, prompt)[-1]).abs().max() < 1e-5
    row = got[0]
    row /= 2  # a sampler may change it in place


def test_a_failed_extend_leaves_every_sequence_as_long_as_before(tiny: Tiny, tokens_of: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tiny("llama"))
    cache = cache_for(model, num_cells=32, max_seqs=4)
    model.extend(cache, [0], tokens_of((4,)))
    before = cache.snapshot()["cells"]
    with pytest.raises(CacheFull):
        model.extend(cache, [0, 1], tokens_of((20, 20)))
    calls = []

    def fail(step: Any) -> torch.Tensor:
        calls.append(step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return Model.forward(model, step)

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(KeyboardInterrupt):
        model.extend(cache, [0, 1], tokens_of((8, 8)), max_ubatch=5)
    assert len(calls) == 3
    assert cache.snapshot()["cells"] == before
    cache.check()


@pytest.mark.parametrize(("seqs", "tokens"), [([0], [[1], [2]]), ([0, 1], [[1], []]), ([0, 0], [[1], [2]])])
def test_extend_refuses_lists_that_do_not_match(seqs: list[int], tokens: list[list[int]], tiny: Tiny) -> None:
    model = Model(tiny("llama"))
    cache = cache_for(model, num_cells=8)
    with pytest.raises(BatchError):
        model.extend(cache, seqs, tokens)
    assert cache.num_used == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_without_outputs_gives_no_logits_and_stores_its_rows(family: str, tiny: Tiny) -> None:
    model = Model(tiny(family))
    cache = cache_for(model, num_cells=8)
    (step,) = cache.plan(Batch([5, 6, 7], outputs=[False] * 3))
    with step:
        logits = model.forward(step)
    assert logits.shape == (0, model.vocab_size)
    assert cache.num_used == 3


def test_logits_come_for_the_wanted_rows_in_the_order_of_the_step(tiny: Tiny) -> None:
    stock, model = tiny("llama"), Model(tiny("llama"))
    cache = cache_for(model, num_cells=8)
    (step,) = cache.plan(Batch([5, 6, 7, 8], outputs=[True, False, True, False]))
    with step:
        logits = model.forward(step)
    assert (logits - alone(stock, [5, 6, 7, 8])[[0, 2]]).abs().max() < 1e-5


@pytest.mark.parametrize("as_numpy", [True, False])
def test_embeddings_in_place_of_tokens_give_the_same_logits(as_numpy: bool, tiny: Tiny) -> None:
    stock, model = tiny("llama"), Model(tiny("llama"))
    cache = cache_for(model, num_cells=8)
    vectors = stock.get_input_embeddings().weight.detach()[[5, 6, 7]]
    (step,) = cache.plan(Batch(embeddings=vectors.numpy() if as_numpy else vectors, outputs="all"))
    with step:
        logits = model.forward(step)
    assert (logits - alone(stock, [5, 6, 7])).abs().max() < 1e-5


def test_a_bfloat16_model_runs_and_answers_in_float32(tiny: Tiny, tokens_of: Tokens) -> None:
    stock, model = tiny("llama"), Model(tiny("llama").bfloat16())
    (prompt,) = tokens_of((9,))
    got = model.extend(cache_for(model, num_cells=16, k_dtype="bfloat16"), [0], [prompt])[0]
    assert got.dtype == torch.float32
    assert (got - alone(stock, prompt)[-1]).abs().max() < 0.1


@pytest.mark.parametrize(("k_dtype", "v_dtype", "nearest"), [("q8_0", None, 0.02), ("q8_0", "q4_0", 0.2), ("q4_0", None, 0.3)])
def test_a_model_reads_quantised_cells(k_dtype: str, v_dtype: str | None, nearest: float, tiny: Tiny, tokens_of: Tokens) -> None:
    stock, model = tiny("llama"), Model(tiny("llama"))
    (prompt,) = tokens_of((30,))
    cache = cache_for(model, num_cells=32, k_dtype=k_dtype, v_dtype=v_dtype)
    model.extend(cache, [0], [prompt[:20]])
    got = model.extend(cache, [0], [prompt[20:]])[0]
    expected = alone(stock, prompt)[-1]
    assert 0 < (got - expected).abs().max() / expected.abs().max() < nearest


# --- the model stays the user's -----------------------------------------------------------------------------------------------------


def test_the_models_own_attention_weights_and_config_are_untouched(tiny: Tiny, tokens_of: Tokens) -> None:
    model = tiny("llama")
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict())
    (prompt,) = tokens_of((9,))
    expected = alone(model, prompt)
    wrapped = Model(model)
    wrapped.extend(cache_for(wrapped, num_cells=16), [0], [prompt])
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(alone(model, prompt), expected)
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 3])
def test_an_exception_in_any_layer_undoes_the_step_and_gives_the_model_back(
    error: type[BaseException], layer: int, tiny: Tiny, tokens_of: Tokens
) -> None:
    hf_model = tiny("llama")
    model = Model(hf_model)
    cache = cache_for(model, num_cells=16)

    def fail(*_: Any) -> None:
        raise error

    handle = hf_model.model.layers[layer].mlp.register_forward_hook(fail)
    with pytest.raises(error):
        model.extend(cache, [0], tokens_of((5,)))
    handle.remove()
    assert cache.num_used == 0
    assert hf_model.config._attn_implementation == "sdpa"
    with pytest.raises(OneKVError, match=r"only inside Model\.forward"):
        hooks._current()
    model.extend(cache, [0], tokens_of((5,)))


def test_our_attention_outside_of_a_forward_is_a_clear_error(tiny: Tiny) -> None:
    model = tiny("llama")
    model.set_attn_implementation("onekv")
    with pytest.raises(OneKVError, match=r"only inside Model\.forward"):
        alone(model, [5, 6])


def test_a_training_model_is_put_into_evaluation_and_refused_with_dropout(tiny: Tiny) -> None:
    hf_model = tiny("llama", attention_dropout=0.1).train()
    model = Model(hf_model)
    assert not hf_model.training
    cache = cache_for(model, num_cells=8)
    hf_model.train()
    with pytest.raises(UnsupportedModel, match="training mode"):
        model.extend(cache, [0], [[5]])


# --- refused by name ----------------------------------------------------------------------------------------------------------------


def test_an_unknown_keyword_of_attention_is_refused_and_named(tiny: Tiny) -> None:
    model = tiny("llama")
    cache_for(model, num_cells=8)
    for value, refused in ((None, False), (False, False), (torch.ones(1), True)):
        handle = model.model.layers[2].self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, value=value: (args, {**kwargs, "position_bias": value}), with_kwargs=True
        )
        if refused:
            with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM: .*position_bias"):
                cache_for(model, num_cells=8)
        else:
            cache_for(model, num_cells=8)
        handle.remove()


def test_a_layer_that_stops_attending_after_the_probe_is_found_out(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = tiny("llama")
    model = Model(hf_model)
    cache = cache_for(model, num_cells=8)
    layer = hf_model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, cache, **_: (hidden_states, None))
    with pytest.raises(UnsupportedModel, match=r"layers \[1\] did not attend"):
        model.extend(cache, [0], [[5]])
    assert cache.num_used == 0


def test_a_window_that_changes_after_the_probe_is_found_out(tiny: Tiny) -> None:
    hf_model = tiny("mistral_sliding")
    model = Model(hf_model)
    cache = cache_for(model, num_cells=8)
    hf_model.config.sliding_window = 3
    with pytest.raises(UnsupportedModel, match=r"Window\.sliding\(3\), and did otherwise"):
        model.extend(cache, [0], [[5]])


def test_rows_that_mix_outside_of_attention_are_found_by_the_probe(tiny: Tiny) -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))
    with pytest.raises(UnsupportedModel, match="by more than attention"):
        cache_for(model, num_cells=8)


def test_a_cache_of_other_layers_is_refused_with_the_first_difference(tiny: Tiny) -> None:
    model = Model(tiny("mistral_sliding"))
    for layers, reason in (
        ([LayerSpec(2, 8)] * 3, "3 layers, the model 4"),
        ([LayerSpec(2, 8, window=SLIDING)] * 3 + [LayerSpec(2, 8)], r"layer 3 .*Window\.full"),
    ):
        with pytest.raises(ConfigError, match=reason):
            model.extend(KVCache(layers, num_cells=8), [0], [[5]])
    by_hand = KVCache([LayerSpec(2, 8, 8, window=SLIDING)] * 4, num_cells=8)
    assert model.extend(by_hand, [0], [[5]]).shape == (1, model.vocab_size)


def test_positions_beyond_the_models_context_are_refused_with_the_numbers(tiny: Tiny) -> None:
    model = Model(tiny("gpt2", n_positions=8))
    assert model.max_positions == 8
    cache = cache_for(model, num_cells=16)
    model.extend(cache, [0], [[5] * 8])
    with pytest.raises(BatchError, match="position 8, beyond the model's context of 8") as caught:
        model.extend(cache, [0], [[5]])
    assert caught.value.given == 8
    assert cache.num_used == 8


def test_positions_of_several_components_are_refused(tiny: Tiny) -> None:
    model = Model(tiny("llama"))
    cache = cache_for(model, num_cells=8)
    (step,) = cache.plan(Batch([5, 6], positions=[[0, 1]] * 4))
    with pytest.raises(BatchError, match="4 components"), step:
        model.forward(step)


def test_only_causal_language_models_of_transformers_are_taken(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="Linear"):
        Model(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="no language model head"):
        Model(tiny("llama").model)


# --- masks --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 512, 4095, 4096, 131072, 10_000_019])
def test_windows_of_every_size_are_recognised_from_transformers_own_rules(size: int) -> None:
    from transformers import masking_utils as stock

    assert hooks.recognise(stock.causal_mask_function) == FULL
    assert hooks.recognise(stock.sliding_window_causal_mask_function(size)) == Window.sliding(size)
    chunked = hooks.recognise(stock.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64)))
    assert chunked == (Window.sliding(1) if size == 1 else Window.chunked(size))


def test_rules_that_are_no_window_are_not_recognised() -> None:
    from transformers import masking_utils as stock

    causal, sliding = stock.causal_mask_function, stock.sliding_window_causal_mask_function(7)
    rules = [
        stock.bidirectional_mask_function,
        stock.sliding_window_bidirectional_mask_function(7),
        stock.and_masks(causal, lambda b, h, q, k: k % 2 == 0),
        stock.or_masks(sliding, lambda b, h, q, k: k < 4),
        stock.and_masks(causal, stock.padding_mask_function(torch.ones(1, 8, dtype=torch.bool))),
        stock.or_masks(causal, stock.blockwise_overlay(torch.zeros(1, 8, dtype=torch.int64))),
        stock.and_masks(causal, lambda b, h, q, k: k != q),
    ]
    assert [hooks.recognise(rule) for rule in rules] == [None] * len(rules)


def test_equal_rules_are_recognised_once_and_unequal_ones_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils as stock

    seen = []
    recognise = hooks.recognise
    monkeypatch.setattr(hooks, "recognise", lambda rule, device: seen.append(rule) or recognise(rule, device))
    masks, cpu = hooks.MaskRules(), torch.device("cpu")
    for _ in range(3):
        for rule in (
            stock.causal_mask_function,
            stock.sliding_window_causal_mask_function(4),
            stock.sliding_window_causal_mask_function(5),
            stock.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        ):
            marker = masks.marker(rule, cpu)
            assert masks.window_of(marker[:, :, :, :1], "a model", 0) == recognise(rule)
    assert len(seen) == 4


# --- identity, loading --------------------------------------------------------------------------------------------------------------


def test_a_fingerprint_tells_models_apart_but_not_the_dtype_they_were_loaded_in(tiny: Tiny) -> None:
    one = Model(tiny("llama").bfloat16().float()).fingerprint
    assert Model(tiny("llama").bfloat16()).fingerprint == one
    assert Model(tiny("llama", rms_norm_eps=1e-3)).fingerprint != one
    other = tiny("llama")
    other.model.layers[2].mlp.up_proj.weight.data.mul_(1.5)
    assert Model(other).fingerprint != one
    assert cache_for(other, num_cells=4).config.fingerprint == Model(other).fingerprint


def test_what_cache_for_reads_from_the_model_can_be_said_otherwise(tiny: Tiny) -> None:
    cache = cache_for(tiny("llama"), 16, max_seqs=3, k_dtype="bfloat16", fingerprint="mine", vocab_size=50)
    assert (cache.config.num_cells, cache.config.max_seqs, cache.config.k_dtype) == (16, 3, "bfloat16")
    assert (cache.config.fingerprint, cache.config.vocab_size) == ("mine", 50)
    with pytest.raises(BatchError):
        cache.plan(Batch([60]))
    with pytest.raises(TypeError):
        cache_for(tiny("llama"), 16, no_such_setting=1)


def test_a_directory_loads_with_and_without_a_tokenizer(tiny: Tiny, tokenizer_named: Any, tmp_path: Path) -> None:
    hf_model = tiny("llama")
    hf_model.save_pretrained(tmp_path)
    bare = load_model(tmp_path, weights="float32")
    assert torch.allclose(alone(bare.transformers_model, [5, 6]), alone(hf_model, [5, 6]), rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="no tokenizer"):
        _ = bare.text
    tokenizer_named("byte level").save_pretrained(tmp_path)
    hf_model.generation_config.eos_token_id = [2, 11]
    hf_model.generation_config.save_pretrained(tmp_path)
    text = load_model(str(tmp_path), weights="float32").text
    assert text.decode(text.encode("he 👋")) == "he 👋"
    assert text.eos_ids == {1, 2, 11}


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("smollm2", {}, "onekv pull smollm2"),
        ("/nowhere/model.gguf", {}, "no file /nowhere/model.gguf"),
        ("./nowhere", {}, "there is no nowhere"),
        ("smollm2", {"weights": "int3"}, "auto, float32, bfloat16, int4, got 'int3'"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_model(name, **settings)
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_no_model_and_a_hub_that_fails_are_config_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(tmp_path)

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route to the hub\nand a page of advice")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", offline)
    with pytest.raises(ConfigError, match=r"cannot load someone/something: no route to the hub$"):
        load_model("someone/something")


# --- the demo model -----------------------------------------------------------------------------------------------------------------


@pytest.mark.demo_model
def test_the_demo_model_interleaved_and_chunked_equals_each_alone(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(demo_path.parent.parent))
    model = load_model("smollm2", weights="float32")
    stock = AutoModelForCausalLM.from_pretrained(gguf.converted(demo_path), dtype=torch.float32)
    system = "You are a helpful assistant who answers in one short sentence. "
    prefix = model.text.encode(system)
    prompts = [prefix + model.text.encode(q) for q in ("The capital of France is", "Two plus two makes", "The sky looks blue because of")]
    cache = cache_for(model, num_cells=160, max_seqs=8)
    scatter_free_cells(model, cache, seq=7)
    last = []
    for prompt, got in zip(prompts, together(model, cache, prompts, shared=len(prefix)), strict=True):
        expected = alone(stock, prompt)
        assert (got - expected).abs().max() < 1e-3
        last.append(int(got[-1].argmax()))
    answers = [[token] for token in last]
    for _ in range(7):
        logits = model.extend(cache, [0, 1, 2], [[answer[-1]] for answer in answers])
        for answer, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
            answer.append(token)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = stock.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        assert answer[: len(expected)] == expected  # transformers stops at an end token
