"""deterministic=True: a conversation's logits are the same to the bit whatever else happens, over random schedules of a whole model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from families import tiny_model
from onekv import ConfigError, KVCache, UnsupportedModel, cache_for, load_model
from onekv.models import Model

VOCAB = 96


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads that the compiled kernels read in place, and windows in gemma3."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    config = (
        LlamaConfig(**shape)
        if request.param == "llama"
        else Gemma3TextConfig(**shape, sliding_window=150, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16)
    )
    directory = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def texts(rng: np.random.Generator) -> list[list[int]]:
    """Conversations with leading text in common, longer than a block of attention, and one with none."""
    root, branch = rng.integers(VOCAB, size=200).tolist(), rng.integers(VOCAB, size=90).tolist()
    ends = [rng.integers(VOCAB, size=int(n)).tolist() for n in rng.integers(20, 60, 5)]
    return [root + ends[0], root + branch + ends[1], root + branch + ends[2], root[:130] + ends[3], ends[4]]


def alone(model: Model, text: list[int], wanted: int, k_dtype: str = "float32") -> torch.Tensor:
    """Logits of the last `wanted` tokens [n, V], fed one at a time after the rest in one go, in a buffer of its own."""
    cache = cache_for(model, len(text), k_dtype=k_dtype)
    model.extend(cache, [0], [text[:-wanted]], max_ubatch=1024)
    return torch.cat([model.extend(cache, [0], [[token]]) for token in text[-wanted:]])


def schedule(model: Model, all_texts: list[list[int]], wanted: int, rng: np.random.Generator, cache: KVCache) -> list[torch.Tensor]:
    """The same logits from one buffer: prefixes forked where another conversation has them, everything else fed in random pieces."""
    starts = dict.fromkeys(range(len(all_texts)), 0)
    found: dict[int, list[torch.Tensor]] = {s: [] for s in starts}
    waiting = rng.permutation(len(all_texts)).tolist()
    running: list[int] = []
    forks = 0
    while waiting or any(starts[s] < len(all_texts[s]) for s in running):
        if waiting and (not running or rng.random() < 0.4):
            s = waiting.pop()
            common = max((shared(all_texts[s], all_texts[other][: starts[other]]) for other in running), default=0)
            for other in running:
                if common and shared(all_texts[s], all_texts[other][: starts[other]]) == common and cache.can_continue_at(other, common):
                    starts[s] = min(common, len(all_texts[s]) - wanted)
                    cache.seq_cp(other, s, 0, starts[s])
                    if not cache.can_continue_at(s, starts[s]):
                        cache.seq_rm(s)
                        starts[s] = 0
                    forks += starts[s] > 0
                    break
            running.append(s)
        mates = [s for s in running if starts[s] < len(all_texts[s]) and rng.random() < 0.7]
        if not mates:
            continue
        pieces = []
        for s in mates:
            left = len(all_texts[s]) - wanted - starts[s]
            size = min(left, int(rng.integers(1, 120))) if left > 0 else 1
            pieces.append(all_texts[s][starts[s] : starts[s] + size])
            starts[s] += size
        logits = model.extend(cache, mates, pieces, max_ubatch=int(rng.integers(7, 200)))
        for s, row in zip(mates, logits, strict=True):
            if starts[s] > len(all_texts[s]) - wanted:
                found[s].append(row)
        cache.check()
    assert forks > 0, "no prefix was shared, so the test proved less than it says"
    return [torch.stack(found[s]) for s in range(len(all_texts))]


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("weights", ["float32", "int4"])
@pytest.mark.parametrize("k_dtype", ["float32", "bfloat16", "q8_0"])
def test_logits_are_equal_to_the_bit_over_random_schedules(saved: Path, weights: str, k_dtype: str) -> None:
    if weights == "int4" and k_dtype != "float32":
        pytest.skip("one kind of cells is enough for the other kind of weights")
    model = load_model(saved, weights=weights, deterministic=True)
    wanted = 4
    for seed in range(3):
        rng = np.random.default_rng(seed)
        all_texts = texts(rng)
        cache = cache_for(model, 1300, k_dtype=k_dtype, max_seqs=8)
        together = schedule(model, all_texts, wanted, rng, cache)
        for text, logits in zip(all_texts, together, strict=True):
            expected = alone(model, text, wanted, k_dtype)
            assert torch.equal(logits, expected), (seed, (logits - expected).abs().max())


def test_a_model_that_attends_to_gathered_entries_is_refused(tmp_path: Path) -> None:
    model = Model(tiny_model("deepseek_v3"))
    cache = cache_for(model, 16, deterministic=True)
    with pytest.raises(ConfigError, match="gathered entries"):
        model.extend(cache, [0], [[5, 6]])
    assert cache.num_used == 0
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="latent attention"):
        load_model(tmp_path, deterministic=True)


def test_without_determinism_schedules_do_change_bits(saved: Path) -> None:
    """The control: the same schedules, and some logit differs in its last bits."""
    model = load_model(saved, weights="float32")
    rng = np.random.default_rng(0)
    all_texts = texts(rng)
    together = schedule(model, all_texts, 4, rng, cache_for(model, 1300, max_seqs=8))
    expected = [alone(model, text, 4) for text in all_texts]
    assert not all(torch.equal(one, other) for one, other in zip(together, expected, strict=True))
    for one, other in zip(together, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
