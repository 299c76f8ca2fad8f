"""transformers' own `generate` on our cells: the same tokens, and then what its caches cannot do.

    python examples/hf_generate.py

Greedy, beam and assisted generation for SmolLM2, with and without our cache. Then one long conversation is branched: a fork of our cache
against a deep copy of transformers' DynamicCache, in time and in bytes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import DynamicCache

import onekv

PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "Water boils at"]
T = TypeVar("T")


def main() -> None:
    """Compare and print."""
    loaded = onekv.load_model("smollm2")
    model: Any = loaded.transformers_model
    tokenizer = loaded.text.tokenizer
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    kv = onekv.cache_for(model, num_cells=4096)  # also attaches the model

    batch = dict(tokenizer(PROMPTS, return_tensors="pt", padding=True))
    single = dict(tokenizer(["one two three four, one two three four, one two"], return_tensors="pt"))
    ways: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("greedy, batch of 3", batch, {}),
        ("4 beams, batch of 3", batch, {"num_beams": 4}),
        ("assisted by prompt lookup", single, {"prompt_lookup_num_tokens": 4}),
    ]
    for name, inputs, how in ways:
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id, **how}
        stock, stock_s = timed(partial(model.generate, **inputs, **settings))
        cache = onekv.as_cache(kv, [kv.sequence() for _ in inputs["input_ids"]])
        ours, ours_s = timed(partial(model.generate, **inputs, **settings, cache=cache))
        verdict = "the same tokens" if torch.equal(ours, stock) else "OTHER TOKENS"
        print(f"{name:>26}: {verdict}; stock {stock_s:.2f} s, ours {ours_s:.2f} s, {kv.num_used} cells used")
        cache.reset()

    long = torch.tensor([loaded.text.encode(" ".join(PROMPTS) * 40)[:200]])
    cache, dynamic = onekv.as_cache(kv, [kv.sequence()]), DynamicCache()
    with torch.no_grad():
        for one in (cache, dynamic):
            model(long, cache=one)
    used = kv.num_used
    _twin, fork_s = timed(partial(copy.deepcopy, cache))
    _copied, copy_s = timed(partial(copy.deepcopy, dynamic))
    nbytes = sum(keys.nbytes + values.nbytes for keys, values, *_ in dynamic)
    print(f"a branch after {long.shape[1]} tokens: fork {fork_s * 1e6:.0f} us and {kv.num_used - used} new cells; ", end="")
    print(f"deepcopy of DynamicCache {copy_s * 1e6:.0f} us and {nbytes / 1e6:.1f} MB")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result, and how long it took in seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
