"""What does the bookkeeping of one decode step cost, from the batch to the view attention reads?

    python -m benchmarks.bookkeeping [--quick] [--busy]

Each row fills a buffer with sequences whose cells are interleaved, then times steps of one token per sequence, in microseconds:

    validate   build the Batch, check it, fill its positions
    plan       the rest of `KVCache.plan`: cut and search
    commit     `Cells.commit`: cells and rows
    view       the ranges every row sees
    total      the same through the public calls: Batch(), KVCache.plan, entering and leaving the step

The goal is 150 us for 32 sequences, whatever the buffer's size. The C++ original takes 255, 994, 1,651 and 7,178 us at these sizes, nearly
all of it for its mask; its total is the goal of the other two.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Listing

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Result, begin, options, report
from onekv.cache import KVCache
from onekv.core.batch import Batch, split
from onekv.core.cells import Cells
from onekv.core.loops import visible_ranges
from onekv.core.placement import plan_slots
from onekv.storage import LayerSpec

# cells, sequences, tokens each, goal in microseconds
SIZES = [(8_192, 8, 1_000, 255), (32_768, 8, 4_000, 994), (32_768, 32, 1_000, 150), (131_072, 32, 4_000, 150)]
PARTS = ("validate", "plan", "commit", "view")
STEPS, WARM_UP = 60, 20

Tokens = NDArray[np.int64]


def fill(cache: KVCache, sequences: int, tokens: int) -> None:
    """Store `tokens` entries of every sequence, one token of each in turn."""
    cells = cache.cells
    for start in range(0, tokens, 100):
        count = min(100, tokens - start)
        seqs = list(range(sequences)) * count
        timed_parts(cells, np.zeros(len(seqs), np.int64), seqs)


def timed_step(cache: KVCache, tokens: Tokens, seqs: list[int]) -> float:
    """One step through the public calls, with nothing stored; microseconds."""
    start = time.perf_counter()
    for step in cache.plan(Batch(tokens, seqs=seqs, outputs="all")):
        with step:
            step._stored.add(0)
    return (time.perf_counter() - start) * 1e6


def timed_parts(cells: Cells, tokens: Tokens, seqs: list[int]) -> list[float]:
    """One step in pieces; microseconds of each."""
    marks = [time.perf_counter()]
    batch = Batch(tokens, seqs=seqs, outputs="all")
    positions = batch.checked(cells, 50_000)
    marks.append(time.perf_counter())
    ubatches = split(batch, positions, "simple", len(seqs), cells.max_seqs)
    slots = plan_slots(cells, ubatches, "scattered")
    marks.append(time.perf_counter())
    cells.commit(ubatches[0], slots[0])
    marks.append(time.perf_counter())
    group, ubatch = cells.groups[0], ubatches[0]
    first, last = np.empty(len(ubatch), np.int64), np.empty(len(ubatch), np.int64)
    visible_ranges(*group.rule, True, cells.row_positions, cells.row_lengths, ubatch.first_ids, ubatch.queries, first, last)
    marks.append(time.perf_counter())
    return [(b - a) * 1e6 for a, b in itertools.pairwise(marks)]


def main(argv: Listing[str] | None = None) -> None:
    """Print the table and the JSON line."""
    conditions = begin(options(__doc__).parse_args(argv))
    results = []
    for num_cells, sequences, tokens, original in SIZES[: 1 if conditions.quick else None]:
        cache = KVCache([LayerSpec(num_kv_heads=1, head_dim=1)], num_cells, vocab_size=50_000)
        room = num_cells // sequences - 2 * STEPS  # so that the timed steps fit
        fill(cache, sequences, min(tokens, room))
        seqs, token_ids = list(range(sequences)), np.zeros(sequences, np.int64)
        parts = np.array([timed_parts(cache.cells, token_ids, seqs) for _ in range(STEPS)])[WARM_UP:]
        totals = np.array([timed_step(cache, token_ids, seqs) for _ in range(STEPS)])[WARM_UP:]
        cache.check()
        name = f"{num_cells} cells, {sequences} x {tokens}"
        results += [Result(f"{name}: {part}", float(np.median(parts[:, i])), "us") for i, part in enumerate(PARTS)]
        results.append(Result(f"{name}: total", float(np.median(totals)), "us", f"<= {original}"))
    report("bookkeeping", results, conditions)


if __name__ == "__main__":
    main()
