"""What do smaller cells cost in quality? The demo model reads a text with every way to store cells, and is compared with float32 cells.

    python -m benchmarks.quality

For every way, over all tokens of benchmarks/data/quality.txt:

    bytes       of one cell, in percent of float16
    KL          mean Kullback-Leibler divergence of the next-token distribution from that of float32 cells, in millionths of a nat
    agreement   tokens whose likeliest successor is that of float32 cells, in percent
    perplexity  of the text

Nothing is timed. The weights are float32, so that cells alone differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.report import Result, report
from onekv.core.batch import Batch
from onekv.models import Model, cache_for, load_model

TEXT: Final = Path(__file__).parent / "data" / "quality.txt"
ROWS: Final = 128  # in a forward; the logits of that many are alive at once


@dataclass
class Way:
    """A way to store cells, and what was measured of it so far: sums over tokens, in nats."""

    settings: dict[str, Any]
    goals: dict[str, str] = field(default_factory=dict)
    cell_nbytes: int = 0
    divergence: float = 0.0
    agreed: int = 0
    surprise: float = 0.0

    @property
    def name(self) -> str:
        """Such as "q8_0/q4_0 hadamard": keys, values."""
        k, v, rotated = (self.settings.get(name) for name in ("k_dtype", "v_dtype", "hadamard"))
        parts = f"{k}/{v or k}"
        return parts if rotated is None or k not in ("q8_0", "q4_0") else f"{parts} {'hadamard' if rotated else 'plain'}"


WAYS: Final = [
    Way({"k_dtype": "float32"}),
    Way({"k_dtype": "float16"}),
    Way({"k_dtype": "bfloat16"}),
    Way({"k_dtype": "q8_0", "hadamard": False}, {"bytes": "<= 55", "KL": "<= 1000"}),
    Way({"k_dtype": "q8_0", "hadamard": True}, {"bytes": "<= 55", "KL": "<= 1000"}),
    Way({"k_dtype": "q8_0", "v_dtype": "q4_0"}),  # rotates the values alone
    Way({"k_dtype": "q8_0", "v_dtype": "q4_0", "hadamard": False}),
    Way({"k_dtype": "q4_0", "hadamard": False}, {"bytes": "<= 30"}),
    Way({"k_dtype": "q4_0", "hadamard": True}, {"bytes": "<= 30"}),
]


def logits_of(model: Model, tokens: list[int], way: Way) -> Iterator[Tensor]:
    """Logits after every token, [rows, V] of one forward after the other."""
    cache = cache_for(model, len(tokens), max_seqs=1, **way.settings)
    way.cell_nbytes = cache.store.cell_nbytes()
    for step in cache.plan(Batch(tokens, outputs="all"), max_ubatch=ROWS):
        with step:
            logits = model.forward(step)
        yield logits


def measure(model: Model, tokens: list[int], ways: list[Way]) -> None:
    """Read the text in all ways at once; the first one is what the others are compared with."""
    runs = [logits_of(model, tokens, way) for way in ways]
    done = 0
    for blocks in zip(*runs, strict=True):
        following = torch.tensor(tokens[done + 1 : done + 1 + len(blocks[0])])
        done += len(blocks[0])
        truth = blocks[0].double().log_softmax(dim=-1)
        for way, logits in zip(ways, blocks, strict=True):
            mine = logits.double().log_softmax(dim=-1)
            way.divergence += float((truth.exp() * (truth - mine)).sum())
            way.agreed += int((mine.argmax(dim=-1) == truth.argmax(dim=-1)).sum())
            way.surprise -= float(mine[torch.arange(len(following)), following].sum())
        print(f"\r{done} of {len(tokens)} tokens", end="", flush=True)
    print()


def main() -> None:
    """Print the table and the JSON line."""
    model = load_model("smollm2", weights="float32")
    tokens = model.text.encode(TEXT.read_text(encoding="utf-8"))
    measure(model, tokens, WAYS)
    half = next(way.cell_nbytes for way in WAYS if way.settings == {"k_dtype": "float16"})
    results = []
    for way in WAYS:
        figures = [
            ("bytes", 100 * way.cell_nbytes / half, "% of float16"),
            ("KL", 1e6 * way.divergence / len(tokens), "1e-6 nat"),
            ("agreement", 100 * way.agreed / len(tokens), "%"),
            ("perplexity", float(torch.tensor(way.surprise / (len(tokens) - 1)).exp()), ""),
        ]
        results += [Result(f"{way.name}: {what}", value, unit, way.goals.get(what)) for what, value, unit in figures]
    report("quality", results)


if __name__ == "__main__":
    main()
