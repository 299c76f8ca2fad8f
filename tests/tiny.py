"""Toy caches whose numbers can be worked out by hand, and the notation of the specification.

    MEAN oracle   every query is 0, so all scores are equal and an output is the plain mean of the visible values; a value is a token id
    ROPE oracle   head_dim 2 and frequency 1, so the key stored for position p is (cos p, sin p)

One toy layer is both. Notation (spec 0.3, 9):

    rows    "0:0..2 + 1:4 (4,{0,1})"   sequence 0 at positions 0, 1, 2; sequence 1 at 4; one row of both at 4. Token ids are the positions
    cells   "0{0} . 1{0,1}~-3"         position, owners, pending shift of every cell by index; `.` is an empty one
    masks   "x-x"                      one string a row, one character a cell: `x` visible
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onekv import Batch, KVCache, LayerSpec, Rope, Step, Ubatch, Window
from onekv.core.cells import Cells

# Marks of tests that compare an accelerator with the CPU. ONEKV_TEST_DEVICE=cpu runs them without one, to test the tests.
GPU = os.environ.get("ONEKV_TEST_DEVICE", "cuda")
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU == "cuda" and not torch.cuda.is_available(), reason="no CUDA device (ONEKV_TEST_DEVICE names another)"),
]


def on_gpu(test: Any) -> Any:
    """Marks one test."""
    for mark in ON_GPU:
        test = mark(test)
    return test


class Row(NamedTuple):
    """One row of a batch."""

    token: int
    position: int
    seqs: tuple[int, ...]


Rows = str | Sequence[Row] | Batch


# --- rows and batches ---------------------------------------------------------------------------------------------------------------


def rows_of(text: str) -> list[Row]:
    """Rows in the notation above.

    >>> rows_of("0:3..4 + (5,{0,1})")
    [Row(token=3, position=3, seqs=(0,)), Row(token=4, position=4, seqs=(0,)), Row(token=5, position=5, seqs=(0, 1))]
    """
    rows: list[Row] = []
    for item in text.replace("+", " ").split():
        span = re.fullmatch(r"(\d+):(-?\d+)(?:\.\.(-?\d+))?", item)
        single = re.fullmatch(r"\((-?\d+),\{([-\d,]*)\}\)", item)
        if span:
            seq, first, last = int(span[1]), int(span[2]), int(span[3] or span[2])
            rows += [Row(max(p, 0), p, (seq,)) for p in range(first, last + 1)]
        elif single:
            p = int(single[1])
            rows.append(Row(max(p, 0), p, tuple(int(s) for s in single[2].split(",") if s)))
        else:
            raise ValueError(f"{item!r} is not a row")
    return rows


def T(tokens: Iterable[int], seq: int, start: int) -> list[Row]:
    """Tokens of one sequence at start, start + 1, ... (the `T` of cases.md)."""
    return [Row(token, start + i, (seq,)) for i, token in enumerate(tokens)]


def batch_of(rows: Rows, *, embeddings: bool = False, positions: bool = True, outputs: Any = "all") -> Batch:
    """A batch of these rows. embeddings: each token id becomes a vector of one number. positions=False leaves them to the cache."""
    if isinstance(rows, Batch):
        return rows
    rows = rows_of(rows) if isinstance(rows, str) else rows
    tokens = [row.token for row in rows]
    return Batch(
        **({"embeddings": np.array(tokens, np.float32)[:, None]} if embeddings else {"tokens": tokens}),
        seqs=[row.seqs[0] if len(row.seqs) == 1 else row.seqs for row in rows],
        positions=[row.position for row in rows] if positions else None,
        outputs=outputs,
    )


def ubatch_of(rows: Sequence[Row]) -> Ubatch:
    """A ubatch made by hand, unchecked."""
    n = len(rows)
    return Ubatch(
        tokens=np.array([row.token for row in rows], np.int64),
        embeddings=None,
        positions=np.array([row.position for row in rows], np.int32),
        outputs=np.ones(n, np.bool_),
        rows=np.arange(n),
        ids=np.array([s for row in rows for s in row.seqs], np.int64),
        offsets=np.cumsum([0, *(len(row.seqs) for row in rows)]),
        num_sets=n,
    )


# --- caches -------------------------------------------------------------------------------------------------------------------------


def toy_layer(window: Window | None = None, source: int | None = None) -> LayerSpec:
    """One key/value head; keys of two numbers, values of one."""
    return LayerSpec(num_kv_heads=1, head_dim=2, value_dim=1, window=window or Window.full(), source=source, rope=Rope((1.0,)))


def toy(num_cells: int = 8, *windows: Window, max_seqs: int = 16, **settings: Any) -> KVCache:
    """A cache with one toy layer for every window, or one full layer."""
    return KVCache([toy_layer(w) for w in windows or (Window.full(),)], num_cells, max_seqs=max_seqs, **settings)


def toy_cells(num_cells: int = 8, *windows: Window, max_seqs: int = 16) -> Cells:
    """Bookkeeping alone, one group of `num_cells` cells for every window."""
    windows = windows or (Window.full(),)
    return Cells(windows, [num_cells] * len(windows), max_seqs)


def toy_keys(positions: Iterable[int]) -> torch.Tensor:
    """Keys of the ROPE oracle, [T, 1, 2]."""
    angle = torch.tensor(list(positions), dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], dim=1)[:, None].float()


def toy_values(tokens: Iterable[float]) -> torch.Tensor:
    """Values of the MEAN oracle, [T, 1, 1]."""
    return torch.tensor(list(tokens), dtype=torch.float32)[:, None, None]


def toy_kv(ubatch: Ubatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What a toy layer stores for the rows of a ubatch."""
    tokens = ubatch.tokens if ubatch.tokens is not None else ubatch.embeddings[:, 0]
    return toy_keys(ubatch.queries.tolist()), toy_values(tokens.tolist())


def turned(vectors: torch.Tensor, positions: Sequence[int], rope: Rope | None) -> torch.Tensor:
    """Vectors [n, H, D] as a model would rotate them at these positions, float64. The slow twin of `onekv.rope.rotate`."""
    out = vectors.double().clone()
    pairs = len(rope.inv_freq) if rope else 0
    for j in range(pairs):
        a, b = (j, j + pairs) if rope.layout == "half" else (2 * j, 2 * j + 1)
        a, b = a + rope.offset, b + rope.offset
        angle = torch.tensor(positions, dtype=torch.float64)[:, None] * rope.inv_freq[j]
        one, two = out[..., a].clone(), out[..., b].clone()
        out[..., a], out[..., b] = one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()
    return out


@dataclass
class Fed:
    """What happened in one layer while a batch was evaluated.

    slots, masks: per ubatch; outputs: per row of the batch.
    """

    slots: list[list[int]] = field(default_factory=list)
    masks: list[list[str]] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)


def feed_layers(cache: KVCache, rows: Rows, *, score: Mapping[str, Any] | None = None, **plan: Any) -> list[Fed]:
    """Evaluate a batch in a toy cache and say what happened in every layer. `score` goes to attend, the rest to plan.

    Raises:
        BatchError, CacheFull: the batch is malformed (INVALID in cases.md), or does not fit (NO_SLOT).
    """
    batch = batch_of(rows)
    fed = [Fed(outputs=[float("nan")] * len(batch)) for _ in cache.layers]
    for step in cache.plan(batch, **plan):
        with step:
            own = toy_kv(step.ubatch)
            q = torch.zeros(len(step.ubatch), 1, 2)
            for i, layer in enumerate(cache.layers):
                k, v = own if layer.source is None else (None, None)
                out = step.attend(i, q, k, v, scale=1.0, **(score or {}))
                fed[i].slots.append(step.slots(i).tolist())
                fed[i].masks.append(mask_text(step, i))
                for row, value in zip(step.ubatch.rows.tolist(), out.flatten().tolist(), strict=True):
                    fed[i].outputs[row] = value
    return fed


def feed(cache: KVCache, rows: Rows, layer: int = 0, **options: Any) -> Fed:
    """`feed_layers`, of one layer."""
    return feed_layers(cache, rows, **options)[layer]


def decode(cache: KVCache, rows: Rows, layer: int = 0, **options: Any) -> list[float]:
    """Outputs of a batch, one per row: means of the visible token ids."""
    return feed_layers(cache, rows, **options)[layer].outputs


# --- cells in text ------------------------------------------------------------------------------------------------------------------


def cells_of(cache: KVCache | Cells) -> Cells:
    """The bookkeeping of a cache."""
    return cache.cells if isinstance(cache, KVCache) else cache


def cells_text(cache: KVCache | Cells, group: int = 0) -> str:
    """All cells of a group in the notation of the specification, whatever their number."""
    cells = cells_of(cache)
    items = ["."] * cells.groups[group].num_cells
    snapshot: Any = cells.snapshot(group)
    for cell, position, owners, shift in snapshot["cells"]:
        items[cell] = f"{position}{{{','.join(map(str, owners))}}}" + (f"~{shift}" if shift else "")
    return " ".join(items)


def head_of(cache: KVCache | Cells, group: int = 0) -> int:
    """Where the next search starts."""
    return cells_of(cache).groups[group].head


def load_cells(cache: KVCache | Cells, text: str, head: int = 0) -> None:
    """Put a cache into the state written in `text`: the same cells in every group. What it held is dropped.

    Token ids are the positions. In a KVCache the keys and values are those of the two oracles, pending shifts not yet applied to the keys.
    """
    cells = cells_of(cache)
    cells.clear()
    rows: list[tuple[Row, int, int]] = []
    for cell, item in enumerate(text.split()):
        if item == ".":
            continue
        parts = re.fullmatch(r"(\d+)\{([\d,]+)\}(?:~(-?\d+))?", item)
        if not parts:
            raise ValueError(f"{item!r} is not a cell")
        position, seqs = int(parts[1]), tuple(int(s) for s in parts[2].split(","))
        rows.append((Row(position, position, seqs), cell, int(parts[3] or 0)))
    rows.sort(key=lambda row: row[0].position)
    slots = np.array([cell for _, cell, _ in rows], np.int64)
    if rows:
        cells.commit(ubatch_of([row for row, _, _ in rows]), [slots] * len(cells.groups))
    for group in cells.groups:
        group.head = head
        group.shift[slots] = [shift for _, _, shift in rows]
        group.has_shift = bool(group.shift.any())
        group.has_shift = any(shift for _, _, shift in rows)
    if isinstance(cache, KVCache):
        k = toy_keys(row.position - shift for row, _, shift in rows)
        v = toy_values(row.token for row, _, _ in rows)
        for layer in cache.store.physical:
            cache.store.store(layer, torch.from_numpy(slots), k, v)


def mask_text(step: Step, layer: int = 0, n_kv: int | None = None) -> list[str]:
    """The mask of an open step, one string a row, up to the last used cell (or `n_kv` cells). Nothing beyond may be visible."""
    mask = step.mask(layer)
    position = step.plan.cache.cells.groups[step.plan.cache._layer_group[layer]].position
    width = n_kv or int(np.flatnonzero(position >= 0)[-1]) + 1
    assert not mask[:, width:].any()
    return ["".join("x" if seen else "-" for seen in row[:width]) for row in mask]


def state_of(cache: KVCache | Cells) -> dict[str, Any]:
    """All bookkeeping as plain values: two states are equal iff nothing has changed. Unused room in the tables does not count."""
    cells = cells_of(cache)
    return {
        "rows": {s: [cells.positions(s).tolist(), cells.tokens(s).tolist()] for s in cells.present()},
        "groups": [
            {
                "cells": cells_text(cells, g),
                "columns": {s: cells.column(g, s).tolist() for s in cells.present()},
                "used": group.used.tobytes(),
                "counts": group.counts.tolist(),
                "lost": group.lost[cells.row_lengths > 0].tolist(),
            }
            for g, group in enumerate(cells.groups)
        ],
    }


def kv_of(cache: KVCache, seqs: Iterable[int]) -> list[torch.Tensor]:
    """Keys and values of some sequences in every layer, to be compared by `same_kv`."""
    return [part(i, s) for s in seqs for i in range(len(cache.layers)) for part in (cache.keys, cache.values)]


def same_kv(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """True iff equal to the bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- devices ----------------------------------------------------------------------------------------------------------------------


class OneDevice(TorchDispatchMode):
    """Fails where one operation is given tensors of two devices, unless it copies from one to the other; counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {t.device.type for t in tensors}
        if func.overloadpacket not in (torch.ops.aten.copy_, torch.ops.aten._to_copy):
            assert len(places) <= 1, f"{func} was given tensors on {sorted(places)}"
            self.counted.update(places)
        return func(*args, **(kwargs or {}))
