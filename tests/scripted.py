"""A model that answers what a function says, on a real cache and a real tokenizer: for exact texts, log-probabilities and schedules.

Its one layer is that of the MEAN oracle (tests/tiny.py), and every row's attention is compared with the mean of the ids it must see: a cell
that holds or shows the wrong token is an error, not a slightly different text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from onekv import KVCache, Step, Window
from onekv.engine.engine import Engine
from onekv.engine.request import Result
from onekv.models.text import Text
from tiny import toy, toy_kv

END, START = 256, 257
VOCAB = 258

TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)

Answer = Callable[[list[int]], "int | torch.Tensor"]  # all tokens of a row -> the next one, or logits [VOCAB]


def byte_text(template: str | None = TEMPLATE) -> Text:
    """Token id = byte; 256 ends, 257 starts."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    vocab = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<start>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<start>")
    fast.chat_template = template
    return Text(fast)


def mixed(tokens: list[int]) -> int:
    """A letter that depends on every token and its place."""
    return 97 + sum((i + 1) * t for i, t in enumerate(tokens)) % 26


def says(*texts: str | bytes | Sequence[int], after: int | None = None) -> Answer:
    """After a prompt of `after` tokens (None: up to the last newline) these texts, then the end."""
    script = [t for text in texts for t in (text.encode() if isinstance(text, str) else text)] + [END]

    def answer(tokens: list[int]) -> int:
        begun = after if after is not None else len(tokens) - tokens[::-1].index(10) if 10 in tokens else 0
        return script[min(len(tokens) - begun, len(script) - 1)]

    return answer


class Scripted:
    """What the engine needs of a model.

    Args:
        answer: the next token, or logits, from all tokens of a row
        delay:  seconds a forward takes
        broken: says of the tokens of a row whether evaluating it shall fail
    """

    def __init__(
        self,
        answer: Answer = mixed,
        *,
        window: Window | None = None,
        template: str | None = TEMPLATE,
        max_positions: int = 2**20,
        delay: float = 0.0,
        broken: Callable[[list[int]], bool] = lambda tokens: False,
    ) -> None:
        self.answer = answer
        self.window = window
        self.text = byte_text(template)
        self.vocab_size = VOCAB
        self.max_positions = max_positions
        self.delay = delay
        self.broken = broken
        self.batches: list[dict[int, int]] = []  # rows of each sequence, a forward each
        self.may_go = threading.Event()  # cleared: the next forward waits
        self.may_go.set()

    def cache(self, num_cells: int, **settings: Any) -> KVCache:
        """A cache for it."""
        windows = [self.window] if self.window is not None else []
        return toy(num_cells, *windows, **{"max_seqs": 64, "vocab_size": VOCAB, **settings})

    def forward(self, step: Step) -> torch.Tensor:
        self.may_go.wait()
        time.sleep(self.delay)
        ubatch, cells = step.ubatch, step.plan.cache.cells
        q = torch.zeros(len(ubatch), 1, 2)
        means = step.attend(0, q, *toy_kv(ubatch), scale=1.0)[:, 0, 0].tolist()
        counts: dict[int, int] = {}
        logits = []
        for row, (seq, position, wanted) in enumerate(zip(ubatch.first_ids.tolist(), ubatch.queries.tolist(), ubatch.outputs, strict=True)):
            counts[seq] = counts.get(seq, 0) + 1
            tokens = cells.tokens(seq)[: position + 1].tolist()
            seen = tokens
            if self.window is not None:
                seen = [t for t, visible in zip(tokens, self.window.visible(np.arange(position + 1), position), strict=True) if visible]
            assert abs(means[row] - sum(seen) / len(seen)) < 1e-3, f"row {row} of sequence {seq} sees the wrong cells: {tokens}"
            if self.broken(tokens):
                raise RuntimeError("this row breaks the model")
            if wanted:
                said = self.answer(tokens)
                # So far above all others that it is drawn at any temperature.
                sure = torch.nn.functional.one_hot(torch.tensor(said), VOCAB) * 100.0 if isinstance(said, int) else said
                logits.append(sure)
        self.batches.append(counts)
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)


def alone(model: Scripted, prompt: Sequence[int], count: int) -> list[int]:
    """What it answers to a prompt, greedily, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        said = model.answer(tokens)
        token = int(said.argmax()) if isinstance(said, torch.Tensor) else said
        tokens.append(token)
        if token == END:
            break
    return tokens[len(prompt) :]


def engine_of(model: Scripted, cells: int = 64, **settings: Any) -> Engine:
    """Small steps, so that prompts are cut."""
    cache = model.cache(cells, **settings.pop("cache", {}))
    return Engine(model, cache, **{"max_running": 4, "max_batch_tokens": 8, **settings})  # type: ignore[arg-type]


def ids(result: Result, index: int = 0) -> list[int]:
    return result.choices[index].token_ids


def settled(engine: Engine) -> None:
    """Nothing runs, every cell belongs to a cached prefix or a session, and the books agree."""
    engine.call(engine.cache.check)
    engine.call(engine.scheduler.tree.check)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.evictable_cells == stats.used_cells
    assert stats.used_cells + stats.free_cells == stats.num_cells
    assert not engine._jobs
    assert engine._queued == 0
