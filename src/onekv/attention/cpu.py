"""Compiled loops over cell lists: cells are read in place, and what sequences share is read once for all of them.

Owns the conversions around `onekv.core.kernels` and the choice of its settings. T5's learned bias, which needs a table look-up for every
score, goes to `sdpa`.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onekv.attention import Score, View, sdpa
from onekv.codecs import hadamard
from onekv.core import kernels
from onekv.core.spans import plan_spans
from onekv.core.vectors import LANES
from onekv.errors import ConfigError
from onekv.storage import KVStore

# Numba starts its threads at the first use, and where it shares an OpenMP runtime with torch that changes how many torch uses.
_chosen_by_user = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_chosen_by_user)

Array = NDArray[Any]

ROW_WIDTH: Final = 16  # head widths must be multiples of it for one query to read its cells in place
_MOST_WORKERS: Final[int] = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when numba is imported
_NO_FLOATS: Final = np.empty(0, np.float32)
# The dtype by which the kernels know how a part is stored.
_FORMS: Final = {
    "float32": torch.float32,
    "bfloat16": torch.uint16,
    "float16": torch.int16,
    "q8_0": torch.int8,
    "q4_0": torch.uint8,
}


# The memory of each store's layers, as arrays. It never moves, and making an array takes as long as a small attention.
_arrays: WeakKeyDictionary[KVStore, dict[int, tuple[Array, Array]]] = WeakKeyDictionary()


def _memory(store: KVStore, layer: int) -> tuple[Array, Array]:
    """Keys and values of the layer that `layer` reads."""
    layers = _arrays.setdefault(store, {})
    if layer not in layers:
        parts = (store.raw_keys(layer), store.k_codec), (store.raw_values(layer), store.v_codec)
        keys, values = (stored.view(_FORMS[codec.name]).numpy() for stored, codec in parts)
        layers[layer] = keys, values
    return layers[layer]


def _floats(tensor: Tensor | None) -> NDArray[np.float32]:
    return _NO_FLOATS if tensor is None else tensor.detach().to("cpu", torch.float32).contiguous().numpy()


class _Reading:
    """What the layers of one group with equal heads share in a step: the plan, and room for partial results.

    Shapes:
        total [parts, H, Dv], top and mass [parts, H]
    """

    def __init__(self, view: View, heads: int, groups: int, width: int, v_dim: int, by_row: bool) -> None:
        self.workers = min(torch.get_num_threads(), _MOST_WORKERS)
        self.spans = plan_spans(
            view.seqs,
            view.first,
            view.last,
            view.column,
            groups=groups,
            lanes=heads // groups,
            workers=self.workers,
            fixed=view.fixed,
            by_row=by_row,
        )
        self.cells = view.column, view.row_positions, np.ascontiguousarray(view.queries)
        parts = self.spans.parts.size
        self.total = np.empty((parts, heads, v_dim), np.float32)
        self.top, self.mass = np.empty((parts, heads), np.float32), np.empty((parts, heads), np.float32)
        self.widths = (0,) * (width // LANES), (0,) * (v_dim // LANES)


def attend(store: KVStore, layer: int, view: View, q: Tensor, score: Score) -> Tensor:
    """See `onekv.attention.Attend`. Cost: O(entries the rows see); those that sequences share are read once."""
    if score.bias is not None:
        if view.fixed:
            raise ConfigError("a deterministic cache has no attention with a learned position bias (T5)")
        return sdpa.attend(store, layer, view, q, score)
    keys, values = _memory(store, layer)
    rows, heads, width = q.shape
    v_dim = store.layers[layer].v_dim
    shape = heads, keys.shape[1], width, v_dim
    by_row = width % ROW_WIDTH == 0 and v_dim % ROW_WIDTH == 0 and values.flags.c_contiguous
    reading = view.once(shape, lambda view: _Reading(view, *shape, by_row))
    if numba.get_num_threads() != reading.workers:
        numba.set_num_threads(reading.workers)

    queries = q.detach() if q.requires_grad else q
    if q.dtype != torch.float32 or q.device.type != "cpu":
        queries = queries.to("cpu", torch.float32)
    if store.k_codec.hadamard:
        queries = hadamard(queries)
    given = queries.contiguous().numpy(), keys, values, *reading.cells
    partial = reading.total, reading.top, reading.mass
    how = np.float32(score.scale), np.float32(score.softcap or 0.0), _floats(score.alibi_slopes), *partial
    spans = reading.spans
    if spans.rows.size:
        kernels.rows(*given, spans.items, spans.queries, spans.rows, spans.row_shares, *how, *reading.widths)
    if spans.groups.size:
        kernels.groups(*given, view.first, view.last, spans.items, spans.queries, spans.groups, spans.group_shares, *how)
    out = torch.empty(rows, heads, v_dim, dtype=torch.float32)
    kernels.merge(*partial, spans.parts, spans.offsets, _floats(score.sinks), out.numpy())
    if store.v_codec.hadamard:
        out = hadamard(out)
    return out.to(q.device, q.dtype)
