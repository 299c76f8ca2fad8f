"""Whole jobs on real weights: windows beyond their reach, and a conversation that goes on in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from onekv import Sequence
from onekv.cache import KVCache
from onekv.models import Model, cache_for, gguf, load_model
from onekv.models.pull import NAMED_MODELS

STEPS = 24


def text_of(model: Model, count: int) -> list[int]:
    """The first `count` tokens of a long plain text."""
    lines = (f"On day {day} the keeper counted {day * 7 % 31} ships, wrote their names down, and lit the lamp." for day in range(1, 60))
    return model.text.encode("\n".join(lines))[:count]


def greedy(model: Model, cache: KVCache, seq: Sequence, token: int, count: int) -> list[int]:
    """`count` tokens that follow `token`."""
    made = [token]
    for _ in range(count):
        made.append(int(model.extend(cache, [seq], [made[-1:]])[0].argmax()))
    return made[1:]


# What a second process does: another buffer size, fragmented, and on from where the first one stopped.
RESUME = """
import json, sys
import torch
torch.set_num_threads(1)
from onekv.models import cache_for, load_model
sys.path.insert(0, sys.argv[3])
from test_real_models import greedy
model = load_model("smollm2", weights="float32")
cache = cache_for(model, 700, max_seqs=8)
filler = cache.sequence()
others = [cache.sequence(), cache.sequence()]
for _ in range(3):
    model.extend(cache, others, [list(range(50, 80)), list(range(90, 120))])
others[0].free()
seq = cache.sequence()
loaded = cache.load(sys.argv[1], seq)
cells = cache.cells.column(0, seq.id)
print(json.dumps([loaded, bool((cells[1:] - cells[:-1] != 1).any()), greedy(model, cache, seq, int(sys.argv[2]), 24)]))
"""


@pytest.mark.demo_model
def test_a_saved_conversation_goes_on_in_a_new_process_as_if_nothing_had_happened(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(demo_path.parent.parent))
    model = load_model("smollm2", weights="float32")
    cache = cache_for(model, 512, max_seqs=2)
    tokens = text_of(model, 301)
    seq = cache.sequence()
    model.extend(cache, [seq], [tokens[:-1]])
    file = tmp_path / "conversation.safetensors"
    assert seq.save(file) == 300
    uninterrupted = greedy(model, cache, seq, tokens[-1], STEPS)
    command = [sys.executable, "-c", RESUME, str(file), str(tokens[-1]), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [300, True, uninterrupted]


@pytest.mark.slow
def test_gemma_beyond_its_window_with_interleaved_forks_equals_stock_transformers() -> None:
    """700 shared tokens, a window of 512; two forks that go on in turns, in a window group too small to hold everything."""
    path = NAMED_MODELS["gemma3-270m"].path
    if not path.is_file():
        pytest.skip("no Gemma; run `onekv pull gemma3-270m --accept-license`")
    model = load_model("gemma3-270m", weights="float32")
    assert sorted({str(layer.window) for layer in model.layers}) == ["Window.full()", "Window.sliding(512)"]
    cache = cache_for(model, 1024, window_cells=512 + 96, max_seqs=4)
    prefix = text_of(model, 700)
    assert len(prefix) == 700
    endings = [model.text.encode(s)[1:] for s in (" That night the lamp went out, and", " The next ship was called the Swan, and")]
    first = cache.sequence()
    for start in range(0, 700, 64):
        model.extend(cache, [first], [prefix[start : start + 64]])
    forks = [first, first.fork()]
    got: list[list[torch.Tensor]] = [[], []]
    for i in range(max(map(len, endings))):
        turn = [f for f in range(2) if i < len(endings[f])]
        for f, row in zip(turn, model.extend(cache, [forks[f] for f in turn], [[endings[f][i]] for f in turn]), strict=True):
            got[f].append(row)
    cache.check()
    stock = AutoModelForCausalLM.from_pretrained(gguf.converted(path), dtype=torch.float32)
    for f, ending in enumerate(endings):
        with torch.inference_mode():
            expected = stock(torch.tensor([prefix + ending])).logits[0, len(prefix) :]
        assert (torch.stack(got[f]) - expected).abs().max() < 1e-3
        assert torch.stack(got[f]).argmax(-1).tolist() == expected.argmax(-1).tolist()
