"""What do operations on a sequence cost, and on what does their cost depend?

    python -m benchmarks.sequence_ops [--quick] [--busy]

Bookkeeping alone: cells without keys. Microseconds, medians. The goals of the three operations are the figures of the C++ original on a
buffer of 32,768 cells that holds 32 sequences of 1,000 tokens; then the same in 131,072 cells with 128 of them, as a
multiple. A fork is compared with transformers' way to get one, `deepcopy` of a DynamicCache, at 8,192 tokens of the demo model's shape.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence as Listing
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.report import Result, begin, in_turns, options, report, timed
from onekv import Batch, KVCache, LayerSpec

LAYERS: Final = 30
GROUPS: Final = 3
WIDTH: Final = 64


def filled(cells: int, sequences: int, tokens: int) -> KVCache:
    """Sequences whose cells lie between each other's: they were fed in turns."""
    cache = KVCache([LayerSpec(1, 1)], cells, max_seqs=sequences + 2)
    turn = 100
    for start in range(0, tokens, turn):
        count = min(turn, tokens - start)
        rows = np.repeat(np.arange(sequences), count)
        for step in cache.plan(Batch(np.zeros(rows.size, np.int64), seqs=rows), max_ubatch=rows.size):
            with step:
                step.store(0, torch.zeros(rows.size, 1, 1), torch.zeros(rows.size, 1, 1))
    return cache


def remove(cache: KVCache, _: int) -> float:
    """100 tokens from the middle of a copy, which is made and dropped outside of the time."""
    twin = cache.config.max_seqs - 1
    cache.seq_cp(0, twin)
    took = timed(lambda: cache.seq_rm(twin, 400, 500))
    cache.seq_rm(twin)
    return took


def copied(cache: KVCache, _: int) -> float:
    """A whole sequence to an empty one."""
    twin = cache.config.max_seqs - 1
    took = timed(lambda: cache.seq_cp(0, twin))
    cache.seq_rm(twin)
    return took


def shift(cache: KVCache, turn: int) -> float:
    """The second half of a sequence that shares no cells, to and fro."""
    return timed(lambda: cache.seq_add(0, 500, -1, -7 if turn % 2 else 7))


OPERATIONS: Final[dict[str, tuple[Callable[[KVCache, int], float], str]]] = {
    "seq_rm of 100 tokens": (remove, "<= 35"),
    "seq_cp of a sequence": (copied, "<= 63"),
    "seq_add to a sequence": (shift, "<= 89"),
}


def main(argv: Listing[str] | None = None) -> None:
    """Print the table and the JSON line."""
    given = options(__doc__).parse_args(argv)
    conditions = begin(given)
    times, sequences = (5, 4) if conditions.quick else (200, 32)
    results: list[Result] = []
    tokens = 1000
    small, large = filled(1024 * sequences, sequences, tokens), filled(4096 * sequences, 4 * sequences, tokens)
    for name, (operation, goal) in OPERATIONS.items():
        seconds = [float(np.median([operation(cache, turn) for turn in range(times)])) for cache in (small, large)]
        results.append(Result(f"{name}, of 1,000 in {small.num_cells} cells", seconds[0] * 1e6, "us", goal))
        results.append(Result(f"{name}: in a buffer of {large.num_cells}", seconds[1] / seconds[0], "x", "<= 1.5"))
    del small, large

    length = 512 if conditions.quick else 8192
    cache = KVCache([LayerSpec(GROUPS, WIDTH)] * LAYERS, length + 8)
    rows = torch.randn(length, GROUPS, WIDTH)
    for step in cache.plan(Batch(np.zeros(length, np.int64)), max_ubatch=length):
        with step:
            for layer in range(LAYERS):
                step.store(layer, rows, rows)
    dynamic: Any = DynamicCache()
    for layer in range(LAYERS):
        dynamic.update(rows.transpose(0, 1)[None], rows.transpose(0, 1)[None], layer)
    used = cache.num_used

    def fork() -> float:
        start = time.perf_counter()
        cache.seq_cp(0, 1)
        took = time.perf_counter() - start
        if cache.num_used != used:
            raise RuntimeError("a fork took cells")
        cache.seq_rm(1)
        return took

    took = in_turns({"fork": fork, "deepcopy": lambda: timed(lambda: copy.deepcopy(dynamic))}, 3 if conditions.quick else 15)
    results += [
        Result(f"fork of {length} tokens", took["fork"] * 1e6, "us", "<= 1000"),
        Result(f"deepcopy of {length} tokens / fork", took["deepcopy"] / took["fork"], "x", ">= 100"),
    ]
    report("sequence_ops", results, conditions)


if __name__ == "__main__":
    main()
