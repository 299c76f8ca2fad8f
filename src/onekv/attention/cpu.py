"""Compiled loops over cell lists: cells are read in place, and what sequences share is read once for all of them.

Owns the conversions around `onekv.core.kernels` and the choice of its settings. T5's learned bias, which needs a table look-up for every
score, goes to `sdpa`.
"""

from __future__ import annotations

from typing import Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onekv.attention import Score, View, sdpa
from onekv.codecs import Codec, hadamard
from onekv.core import kernels
from onekv.core.spans import Spans, plan_spans
from onekv.core.vectors import LANES
from onekv.errors import ConfigError
from onekv.storage import KVStore

# Numba starts its threads at the first use, and where it shares an OpenMP runtime with torch that changes how many torch uses.
_chosen_by_user = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_chosen_by_user)

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


def _memory(stored: Tensor, codec: Codec) -> NDArray[np.generic]:
    array: NDArray[np.generic] = stored.view(_FORMS[codec.name]).numpy()
    return array


def _floats(tensor: Tensor | None) -> NDArray[np.float32]:
    return _NO_FLOATS if tensor is None else tensor.detach().float().contiguous().numpy()


def attend(store: KVStore, layer: int, view: View, q: Tensor, score: Score) -> Tensor:
    """See `onekv.attention.Attend`. Cost: O(entries the rows see); those that sequences share are read once."""
    if score.bias is not None:
        if view.fixed:
            raise ConfigError("a deterministic cache has no attention with a learned position bias (T5)")
        return sdpa.attend(store, layer, view, q, score)
    keys, values = _memory(store.raw_keys(layer), store.k_codec), _memory(store.raw_values(layer), store.v_codec)
    heads, groups, v_dim = q.shape[1], keys.shape[1], store.layers[layer].v_dim
    by_row = q.shape[2] % ROW_WIDTH == 0 and v_dim % ROW_WIDTH == 0 and values.flags.c_contiguous
    queries = q.detach().to(torch.float32)
    if store.k_codec.hadamard:
        queries = hadamard(queries)
    workers = min(torch.get_num_threads(), _MOST_WORKERS)

    def plan(view: View) -> Spans:
        return plan_spans(
            view.seqs,
            view.first,
            view.last,
            view.column,
            groups=groups,
            lanes=heads // groups,
            workers=workers,
            fixed=view.fixed,
            by_row=by_row,
        )

    spans = view.once(f"spans {heads} {groups} {by_row}", plan)
    if numba.get_num_threads() != workers:
        numba.set_num_threads(workers)
    parts = spans.parts.size
    total = np.empty((parts, heads, v_dim), np.float32)
    top, mass = np.empty((parts, heads), np.float32), np.empty((parts, heads), np.float32)
    given = (queries.contiguous().numpy(), keys, values, view.column, view.row_positions, view.queries)
    how = (np.float32(score.scale), np.float32(score.softcap or 0.0), _floats(score.alibi_slopes), total, top, mass)
    if spans.rows.size:
        widths = (0,) * (q.shape[2] // LANES), (0,) * (v_dim // LANES)
        kernels.rows(*given, spans.items, spans.queries, spans.rows, spans.row_shares, *how, *widths)
    if spans.groups.size:
        kernels.groups(*given, view.first, view.last, spans.items, spans.queries, spans.groups, spans.group_shares, *how)
    out = torch.empty(q.shape[0], heads, v_dim, dtype=torch.float32)
    kernels.merge(total, top, mass, spans.parts, spans.offsets, _floats(score.sinks), out.numpy())
    if store.v_codec.hadamard:
        out = hadamard(out)
    return out.to(q.dtype)
