"""The engine on real families: packed, windowed, hybrid; answers equal those of stock transformers' loop on the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from families import tiny_model
from onekv import Engine, Model, cache_for
from onekv.engine.engine import window_cells
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


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize(("width", "n", "penalty", "count"), [(3, 3, 1.0, 10), (4, 1, 0.0, 7), (2, 2, 2.0, 1), (5, 4, 1.0, 25)])
def test_beams_equal_those_of_stock_transformers(name: str, width: int, n: int, penalty: float, count: int) -> None:
    stock, model = tiny_model(name), Model(tiny_model(name), byte_text().tokenizer)
    end = 7  # an id these random models do say
    model.text.eos_ids = frozenset([end])
    prompts = [[5, 9, 11, 30], [12, 13] * 9]
    with Engine(model, cache_for(model, 512, max_seqs=32), max_running=8, max_batch_tokens=16) as engine:
        others = [engine.stream([40 + i] * 9, max_tokens=20, ignore_eos=True) for i in range(2)]
        streams = [engine.stream(p, beams=width, n=n, length_penalty=penalty, max_tokens=count) for p in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            ids = torch.tensor([prompt])
            found = stock.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=n,
                max_new_tokens=count,
                length_penalty=penalty,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=0,
            )
            expected = []
            for row in found[:, len(prompt) :].tolist():
                expected.append(row[: row.index(end) + 1] if end in row else row)
            assert [choice.token_ids for choice in stream.result().choices] == expected
        for stream in others:
            stream.result()
        engine.call(engine.cache.check)
        assert engine.stats().evictable_cells == engine.stats().used_cells


def test_windowed_layers_get_a_window_for_every_answer_and_every_point() -> None:
    gemma, llama = Model(tiny_model("gemma3"), byte_text().tokenizer), Model(tiny_model("llama"), byte_text().tokenizer)
    widest = max(spec.window.size for spec in gemma.layers if not spec.window.is_full)
    assert window_cells(gemma, 10**6, max_running=3, max_batch_tokens=24) == 2 * 3 * widest + 24
    assert window_cells(gemma, 10) == 10
    assert window_cells(llama, 10) is None
    few = window_cells(gemma, 400, max_running=3, max_batch_tokens=24)
    with Engine(gemma, cache_for(gemma, 400, window_cells=few), max_running=3, max_batch_tokens=24) as engine:
        streams = [engine.stream([i] * 90, max_tokens=20, ignore_eos=True) for i in range(6)]
        assert [len(stream.result().choices[0].token_ids) for stream in streams] == [20] * 6
        assert engine.stats().preemptions == 0
