"""How fast is attention over cell lists, against what memory can deliver and against torch?

    python -m benchmarks.attention [--threads N] [--quick] [--busy]

One decode step of S sequences over random cells, 9 query heads and 3 key/value heads of 64, in milliseconds a layer. Every layer has keys
and values of its own, so that they come from memory and not from a processor's cache. Sides take turns; medians.

    read rate   the best this run can show: a compiled sum over 256 MB with prefetch, or torch's, on the same threads
    padded      torch's scaled_dot_product_attention on contiguous keys and values [S, G, L, D], one call for all sequences
    unshared    32 sequences of the same length that share nothing
    8 buffers   8 calls, each with a buffer of one sequence, instead of one call
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange
from torch import Tensor

from benchmarks.report import Result, Side, begin, in_turns, options, report, timed
from onekv.attention import Score, View
from onekv.attention.cpu import attend
from onekv.core import vectors
from onekv.storage import KVStore, LayerSpec

HEADS: Final = 9
GROUPS: Final = 3
WIDTH: Final = 64
SCORE: Final = Score(WIDTH**-0.5)


@njit(parallel=True, fastmath=True)
def _sum(data, chunks):  # type: ignore[no-untyped-def]
    size = data.size // chunks
    total = np.zeros(chunks, np.float32)
    for c in prange(chunks):
        part = np.float32(0)
        for line in range(c * size, (c + 1) * size, 16):
            vectors.prefetch(vectors.pointer(data, min(line + 1024, data.size - 16)), 64)  # type: ignore[call-arg]
            for i in range(16):
                part += data[line + i]
        total[c] = part
    return total


def read_rate(megabytes: int, threads: int, turns: int) -> float:
    """Bytes a second."""
    data = np.ones(megabytes << 18, np.float32)
    tensor = torch.from_numpy(data)
    took = in_turns({"ours": lambda: timed(lambda: _sum(data, threads)), "torch": lambda: timed(tensor.sum)}, turns)
    return data.nbytes / min(took.values())


class Stored:
    """L layers of S sequences of n tokens in random cells, and as torch would have them."""

    def __init__(self, layers: int, sequences: int, tokens: int, dtype: str, shared: int = 0) -> None:
        rng = np.random.default_rng(0)
        own = tokens - shared
        cells = shared + sequences * own
        self.store = KVStore([LayerSpec(GROUPS, WIDTH)] * layers, cells, dtype)
        self.layers = range(layers)
        every = torch.arange(cells)
        for layer in self.layers:
            self.store.write(layer, every, torch.randn(cells, GROUPS, WIDTH), torch.randn(cells, GROUPS, WIDTH))
        order = rng.permutation(cells).astype(np.int32)
        column = np.concatenate([np.broadcast_to(order[:shared], (sequences, shared)), order[shared:].reshape(sequences, own)], axis=1)
        self.column = np.ascontiguousarray(column)
        self.q = torch.randn(sequences, HEADS, WIDTH)

    @property
    def layer_nbytes(self) -> int:
        return self.store.cell_nbytes([0]) * self.store.raw_keys(0).shape[0]

    def view(self, rows: Listing[int] | None = None) -> View:
        """What a decode step sees: all of every row."""
        chosen = np.arange(len(self.column)) if rows is None else np.array(rows)
        sequences, tokens = len(chosen), self.column.shape[1]
        positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), self.column.shape)
        first, last = np.zeros(sequences, np.int64), np.full(sequences, tokens)
        group: Any = None  # only the dense mask asks it
        return View(
            group, True, chosen, np.full(sequences, tokens - 1, np.int32), first, last, self.column, np.ascontiguousarray(positions)
        )

    def ours(self) -> Side:
        view = self.view()

        def step() -> None:
            view._made.clear()  # every step plans anew
            for layer in self.layers:
                attend(self.store, layer, view, self.q, SCORE)

        return lambda: timed(step)

    def padded(self) -> Side:
        """torch on the same numbers, already gathered: the gather is not counted."""
        made: list[tuple[Tensor, Tensor]] = []
        cells = torch.from_numpy(self.column.ravel().astype(np.int64))
        for layer in self.layers:
            shape = (*self.column.shape, GROUPS, WIDTH)
            k, v = (part.index_select(0, cells).view(shape).transpose(1, 2).contiguous() for part in self.parts(layer))
            made.append((k, v))
        q = self.q.view(len(self.column), GROUPS, HEADS // GROUPS, WIDTH).to(made[0][0].dtype)

        def step() -> None:
            for k, v in made:
                F.scaled_dot_product_attention(q, k, v, scale=SCORE.scale)

        return lambda: timed(step)

    def parts(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.store.keys(layer), self.store.values(layer)


def main(argv: Listing[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = options(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args(argv)
    conditions = begin(given)
    torch.set_num_threads(given.threads)
    turns, layers, scale = (3, 2, 8) if conditions.quick else (15, 12, 1)
    results: list[Result] = []

    rate = read_rate(4 if conditions.quick else 256, given.threads, turns)
    results.append(Result("read rate", rate / 1e9, "GB/s"))

    for sequences, tokens in ((32, 512), (8, 4096)):
        name, count = f"{sequences} x {tokens}", tokens // scale
        stored = {dtype: Stored(layers, sequences, count, dtype) for dtype in ("float32", "bfloat16", "q8_0")}
        sides = {dtype: one.ours() for dtype, one in stored.items()} | {"padded": stored["float32"].padded()}
        took = in_turns(sides, turns)
        results += [Result(f"{name}: {side}", seconds / layers * 1e3, "ms a layer") for side, seconds in took.items()]
        reached = stored["float32"].layer_nbytes * layers / took["float32"] / rate
        results += [
            Result(f"{name}: float32, of the read rate", reached, "x", ">= 0.85"),
            Result(f"{name}: bfloat16 / float32", took["bfloat16"] / took["float32"], "x", "<= 0.65"),
            Result(f"{name}: q8_0 / float32", took["q8_0"] / took["float32"], "x", "<= 0.45"),
            Result(f"{name}: float32 / padded", took["float32"] / took["padded"], "x", "<= 1.0"),
        ]
        del stored, sides

    shared, own = 2048 // scale, 64
    pair = {side: Stored(layers, 32, shared + own, "float32", prefix) for side, prefix in (("shared", shared), ("unshared", 0))}
    took = in_turns({side: one.ours() for side, one in pair.items()}, turns)
    results += [Result(f"32 with 2,048 in common: {side}", seconds / layers * 1e3, "ms a layer") for side, seconds in took.items()]
    results.append(Result("32 with 2,048 in common: shared / unshared", took["shared"] / took["unshared"], "x", "<= 0.2"))
    del pair

    one = Stored(layers, 8, 4096 // scale, "float32")
    views = [one.view([row]) for row in range(8)]

    def apart() -> None:
        for row, view in enumerate(views):
            view._made.clear()
            for layer in one.layers:
                attend(one.store, layer, view, one.q[row : row + 1], SCORE)

    took = in_turns({"one": one.ours(), "8 buffers": lambda: timed(apart)}, turns)
    results.append(Result("8 x 4,096: 8 buffers / one buffer", took["8 buffers"] / took["one"], "x", ">= 0.95"))

    prefill = Stored(layers, 1, 512 // scale, "float32")
    n = prefill.column.shape[1]
    view = prefill.view()
    rows = View(
        view.group,
        True,
        np.zeros(n, np.int64),
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int64),
        np.arange(1, n + 1),
        view.column,
        view.row_positions,
    )
    q = torch.randn(n, HEADS, WIDTH)
    cells = torch.from_numpy(prefill.column[0].astype(np.int64))

    def ours() -> None:
        rows._made.clear()
        for layer in prefill.layers:
            attend(prefill.store, layer, rows, q, SCORE)

    def theirs() -> None:
        for layer in prefill.layers:
            k, v = (part.index_select(0, cells).transpose(0, 1)[None] for part in prefill.parts(layer))
            F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True, scale=SCORE.scale, enable_gqa=True)

    took = in_turns({"ours": lambda: timed(ours), "gather and torch": lambda: timed(theirs)}, turns)
    results += [Result(f"512 rows of one sequence: {side}", seconds / layers * 1e3, "ms a layer") for side, seconds in took.items()]
    report("attention", results, conditions)


if __name__ == "__main__":
    main()
