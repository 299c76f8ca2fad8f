"""How keys turn with position: read from the running model, and exact when used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from onekv import Batch, ShiftError
from onekv.models import Model, cache_for, load_model
from onekv.models.rotary import NoRotation, rope_of
from onekv.rope import rotate
from onekv.storage import Rope

Tiny = Callable[..., PreTrainedModel]

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# family, changes to its config, per layer the layout and rotated pairs (None: not rotated, or another layer's keys)
ROPES = [
    ("llama", {}, [("half", 4)] * 4),
    ("llama", {"rope_parameters": YARN}, [("half", 4)] * 4),
    ("llama", {"rope_parameters": LLAMA3}, [("half", 4)] * 4),
    ("qwen3", {}, [("half", 4)] * 4),
    ("mistral_sliding", {}, [("half", 4)] * 4),
    ("gpt_neox", {}, [("half", 1)] * 4),
    ("gemma3n", {}, [("half", 4), ("half", 4), None, None]),
    ("gpt_oss", {}, [("half", 4)] * 4),
    ("llama4", {}, [("interleaved", 4)] * 3 + [None]),
]


@pytest.mark.parametrize(("family", "changes", "expected"), ROPES)
def test_layout_and_width_are_read_from_the_running_model(family: str, changes: dict, expected: list, tiny: Tiny) -> None:
    model = Model(tiny(family, **changes))
    found = [None if layer.rope is None else (layer.rope.layout, len(layer.rope.inv_freq)) for layer in model.layers]
    assert found == expected
    assert model.no_shift is None


@pytest.mark.parametrize(("family", "changes", "_"), ROPES)
def test_a_shifted_sequence_equals_one_that_was_fed_at_the_new_positions(family: str, changes: dict, _: list, tiny: Tiny) -> None:
    """Layer 0's keys depend on token and position alone, so a shift must give exactly what feeding there gives. Where all layers
    rotate, relative positions are all that counts, so the logits of the next token agree too."""
    model = Model(tiny(family, **changes))
    cache = cache_for(model, 64, max_seqs=4)
    tokens = list(range(10, 22))
    model.extend(cache, [0], [tokens])
    cache.seq_add(0, 0, -1, 40)
    positions = list(range(40, 40 + len(tokens)))
    for step in cache.plan(_batch(tokens, 1, positions)):
        with step:
            model.forward(step)
    assert cache.update() is False  # plan has applied it
    for layer in [0] if family == "llama4" else range(len(model.layers)):
        shifted, fed = cache.keys(layer, 0), cache.keys(layer, 1)
        assert torch.allclose(shifted, fed, atol=1e-5), layer
        assert torch.equal(cache.values(0, 0), cache.values(0, 1))
    one, other = model.extend(cache, [0, 1], [[5], [5]])
    if family != "llama4":
        assert torch.allclose(one, other, atol=1e-4)


def _batch(tokens: list[int], seq: int, positions: list[int]) -> Batch:

    return Batch(tokens, seqs=seq, positions=positions)


def test_layers_of_different_windows_turn_with_their_own_frequencies(tiny: Tiny) -> None:
    layers = Model(tiny("gemma3n")).layers
    sliding, full = layers[0].rope, layers[1].rope
    assert sliding is not None
    assert full is not None
    assert (sliding.inv_freq[1], full.inv_freq[1]) == (pytest.approx(10_000**-0.25), pytest.approx(1_000_000**-0.25))


def test_learned_positions_cannot_shift_and_the_reason_is_told(tiny: Tiny) -> None:
    model = Model(tiny("gpt2"))
    assert "layer 0 stores keys and values that depend on position" in str(model.no_shift)
    cache = cache_for(model, 32)
    model.extend(cache, [0], [[3, 4, 5]])
    before = cache.draw()
    assert not cache.can_shift
    with pytest.raises(ShiftError, match="GPT2LMHeadModel"):
        cache.seq_add(0, 0, -1, 2)
    assert cache.draw() == before


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("part", ["key", "value"])
def test_every_form_of_rotation_is_told_apart(layout: str, offset: int, part: str) -> None:
    rope = Rope((1.0, 0.3), layout, offset, part)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    still, first = torch.randn(2, 1, 2, 6, generator=generator)
    positions = [3, 8, 21]
    turned = rotate(first.expand(3, -1, -1), torch.tensor(positions) - 3, rope)
    still = still.expand(3, -1, -1)
    keys, values = (turned, still) if part == "key" else (still, turned)
    assert rope_of(0, keys, values, positions, [(0.5, 0.2), rope.inv_freq], torch.float32) == rope
    assert rope_of(0, still, still, positions, [rope.inv_freq], torch.float32) is None
    with pytest.raises(NoRotation, match="layer 7"):
        rope_of(7, turned, turned, positions, [rope.inv_freq], torch.float32)
    with pytest.raises(NoRotation):
        rope_of(0, keys * 1.001 ** torch.arange(3)[:, None, None], values, positions, [rope.inv_freq], torch.float32)


@pytest.mark.demo_model
def test_the_demo_models_shifted_keys_equal_keys_computed_at_the_new_positions(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens 10 to 30 of 100 are removed and the rest moves down by 20. Layer 0, whose keys depend on token and position only."""
    monkeypatch.setenv("ONEKV_HOME", str(demo_path.parent.parent))
    model = load_model("smollm2", weights="float32")
    cache = cache_for(model, 256, max_seqs=4)
    tokens = torch.randint(100, 40_000, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    edited, direct = cache.sequence(), cache.sequence()
    model.extend(cache, [edited], [tokens])
    unshifted = cache.keys(0, edited)[30:].clone()
    edited.remove(10, 30, mode="shift")
    model.extend(cache, [direct], [tokens[:10] + tokens[30:]])
    assert (cache.keys(0, edited) - cache.keys(0, direct)).abs().max() < 1e-4
    assert (unshifted - cache.keys(0, direct)[10:]).abs().max() > 1  # the check can fail
