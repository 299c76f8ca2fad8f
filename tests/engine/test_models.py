"""The engine on real families: packed, windowed, hybrid; answers equal those of stock transformers' loop on the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from families import tiny_model
from onekv import Engine, Model, cache_for
from scripted import byte_text

PROMPTS = [[5 + i % 7 for i in range(40)], [5 + i % 7 for i in range(40)] + [9, 9], [11, 12, 13], [30] * 25]


def greedy(stock: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """By whole forwards without a cache."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(stock(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "gpt2", "deepseek_v3"])
def test_requests_at_once_equal_stock_transformers(name: str) -> None:
    stock, model = tiny_model(name), Model(tiny_model(name), byte_text().tokenizer)
    cache = cache_for(model, 160, max_seqs=32)
    with Engine(model, cache, max_running=3, max_batch_tokens=24) as engine:
        for turn in range(2):
            streams = [engine.stream(prompt, max_tokens=12, ignore_eos=True, points=[20, 40]) for prompt in PROMPTS]
            for prompt, stream in zip(PROMPTS, streams, strict=True):
                result = stream.result()
                assert result.choices[0].token_ids == greedy(stock, prompt, 12)
                if turn and len(prompt) >= 40:
                    assert result.usage.cached_tokens >= 20
        engine.call(cache.check)
