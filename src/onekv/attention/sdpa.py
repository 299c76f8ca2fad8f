"""Gather each sequence's own range and let torch attend. Any device; never looks at another sequence's cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from onekv.attention import Score, View
from onekv.codecs import hadamard
from onekv.storage import KVStore


@dataclass(frozen=True, eq=False)
class Run:
    """The rows of one sequence in a step, and the entries any of them sees.

    Attributes:
        rows:    [t] indices into the step
        cells:   [n] cells of the entries
        mask:    [t, n] which entry each row sees; None if every row sees all
        keys:    [n] position of each entry
        queries: [t] position of each row
    """

    rows: Tensor
    cells: Tensor
    mask: Tensor | None
    keys: NDArray[np.int32]
    queries: NDArray[np.int32]

    @cached_property
    def distance(self) -> NDArray[np.int64]:
        """Position of each entry minus that of each row, [t, n]."""
        return self.keys.astype(np.int64) - self.queries[:, None]


@dataclass(frozen=True, eq=False)
class Entries:
    """The cells that any row of a step sees, each once: what a layer is handed that computes keys and values from stored ones.

    Attributes:
        cells: [N] ascending
        seen:  [T, N] which of them each row sees
        rows:  per sequence, its rows
    """

    cells: Tensor
    seen: NDArray[np.bool_]
    rows: list[NDArray[np.int64]]

    @cached_property
    def mask(self) -> Tensor:
        """`seen` as a tensor on the device of the cells."""
        return torch.from_numpy(self.seen).to(self.cells.device)

    @cached_property
    def runs(self) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Per sequence: its rows [t], which of the N any of them sees [n] (None: all), and which each sees [t, n] (None: all)."""
        runs, device = [], self.cells.device
        for rows in self.rows:
            used = np.flatnonzero(self.seen[rows].any(axis=0))
            mask = self.seen[np.ix_(rows, used)]
            runs.append(
                (
                    torch.from_numpy(rows).to(device),
                    None if used.size == self.seen.shape[1] else torch.from_numpy(used).to(device),
                    None if mask.all() else torch.from_numpy(mask).to(device),
                )
            )
        return runs


def runs_of(view: View, device: torch.device) -> list[Run]:
    """Group the rows of a step by sequence."""
    return [
        Run(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(view.column[span].astype(np.int64)).to(device),
            None if mask.all() else torch.from_numpy(mask).to(device),
            view.row_positions[span],
            view.queries[rows],
        )
        for rows, span, mask in _by_sequence(view)
    ]


def entries_of(view: View, device: torch.device) -> Entries:
    """The union of what the rows of a step see. Cost: O(T x N), as its mask."""
    parts = []
    for rows, span, mask in _by_sequence(view):
        used = mask.any(axis=0)
        parts.append((rows, view.column[span][used], mask[:, used]))
    cells = np.unique(np.concatenate([column for _, column, _ in parts])).astype(np.int64)
    seen = np.zeros((view.seqs.size, cells.size), np.bool_)
    for rows, column, mask in parts:
        seen[np.ix_(rows, np.searchsorted(cells, column))] = mask
    return Entries(torch.from_numpy(cells).to(device), seen, [rows for rows, _, _ in parts])


def _by_sequence(view: View) -> Iterator[tuple[NDArray[np.int64], tuple[np.int64, slice], NDArray[np.bool_]]]:
    """Per sequence: its rows [t], where in the tables the entries lie that any of them sees [n], and which each sees [t, n]."""
    order = np.argsort(view.seqs, kind="stable")
    cuts = np.flatnonzero(np.diff(view.seqs[order])) + 1
    for rows in np.split(order, cuts):
        first, last = view.first[rows], view.last[rows]
        low, high = first.min(), last.max()
        entries = np.arange(low, high)
        yield rows, (view.seqs[rows[0]], slice(low, high)), (entries >= first[:, None]) & (entries < last[:, None])


def attend(store: KVStore, layer: int, view: View, q: Tensor, score: Score) -> Tensor:
    """See `onekv.attention.Attend`. Cost: O(entries the rows see), one gather and one attention call a sequence."""
    out = torch.empty(q.shape[0], q.shape[1], store.layers[layer].v_dim, dtype=torch.float32, device=store.device)
    queries = q.to(store.device, torch.float32)
    if store.k_codec.hadamard:  # one transform of the queries instead of one of every key
        queries = hadamard(queries)
    for run in view.once("runs", lambda v: runs_of(v, store.device)):
        k, v = store.gather(layer, run.cells, unrotate=False)
        mine = queries[run.rows]
        bias = score.added(run.distance, store.device) if score.has_bias else None  # [H, t, n]
        out[run.rows] = attend_to(mine, k, v, run.mask, bias, score)
    if store.v_codec.hadamard:
        out = hadamard(out)
    return out.to(q.device, q.dtype)


def attend_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, score: Score) -> Tensor:
    """Attend to given keys and values, all of one float dtype and device.

    Shapes:
        q [t, H, D], k [n, G, D], v [n, G, Dv], mask [t, n] bool (None: every row sees all), bias [H, t, n] -> [t, H, Dv]
    """
    if score.softcap is None and score.sinks is None:
        return _scaled(q, k, v, mask, bias, score.scale)
    return _explicit(q, k, v, mask, bias, score)


def attend_to_entries(q: Tensor, k: Tensor, v: Tensor, entries: Entries, score: Score) -> Tensor:
    """Attend to keys and values made of a step's entries; in float32, and of one sequence to nothing of another.

    Shapes:
        q [T, H, D], k [N, G, D], v [N, G, Dv], on one device -> [T, H, Dv] of q's dtype
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    for rows, index, mask in entries.runs:
        keys, values = (k, v) if index is None else (k[index], v[index])
        out[rows] = attend_to(q[rows].float(), keys.float(), values.float(), mask, None, score).to(q.dtype)
    return out


def _scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    """[t, H, D], [n, G, D], [n, G, Dv] -> [t, H, Dv] by torch's scaled dot product attention."""
    rows, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if rows == 1 and bias is None and mask is None:
        # One query: the heads of a group become the rows of one product, and k is not repeated.
        packed = q.reshape(1, groups, heads // groups, -1)
        return F.scaled_dot_product_attention(packed, k, v, scale=scale).reshape(1, heads, -1)
    if bias is not None:
        bias = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        attn_mask: Tensor | None = bias[None]
    else:
        attn_mask = mask
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=attn_mask, scale=scale, enable_gqa=heads != groups)
    return out[0].transpose(0, 1)


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, score: Score) -> Tensor:
    """The same where torch has no call: score caps and sinks."""
    rows, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    grouped = q.reshape(rows, groups, heads // groups, -1)
    logits = torch.einsum("tgrd,ngd->grtn", grouped, k).reshape(heads, rows, -1) * score.scale
    if score.softcap is not None:
        logits = score.softcap * torch.tanh(logits / score.softcap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if score.sinks is not None:
        sink = score.sinks.to(logits).reshape(-1, 1, 1).expand(-1, rows, 1)
        logits = torch.cat([logits, sink], dim=2)
    weights = torch.softmax(logits, dim=2)[..., : k.shape[0]]
    mixed = torch.einsum("grtn,ngd->tgrd", weights.view(groups, heads // groups, rows, -1), v)
    return mixed.reshape(rows, heads, -1)
