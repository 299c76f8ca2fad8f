"""The oracle: a dense mask over all cells, one query at a time, in float64. Slow and plain; every other backend is compared with it.

The mask is made from the cells' own positions and owners, not from rows, so that it shares nothing with the ranges.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onekv.attention import Score, View
from onekv.storage import KVStore


def dense_mask(view: View) -> NDArray[np.bool_]:
    """Which cell every query sees, [T, C]. Spec 4.10. Cost: O(T x C)."""
    group = view.group
    rows = []
    for i, (seq, query) in enumerate(zip(view.seqs.tolist(), view.queries.tolist(), strict=True)):
        seen = group.owned_by(seq) & (group.position >= 0) & group.window.visible(group.position, query, view.causal)
        if group.axes is not None and view.causal:
            # Among the cells of the query's own t, those after it in row-major order are hidden.
            y, x = view.positions[1:3, i] if view.positions.ndim == 2 else (query, query)
            after = (group.axes[0] > y) | ((group.axes[0] == y) & (group.axes[1] > x))
            seen &= ~((group.position == query) & after)
        rows.append(seen)
    return np.array(rows)


def attend(store: KVStore, layer: int, view: View, q: Tensor, score: Score) -> Tensor:
    """See `onekv.attention.Attend`. Cost: O(T x C)."""
    mask = view.once("dense_mask", dense_mask)
    heads, groups = q.shape[1], store.layers[layer].num_kv_heads
    out = []
    for i in range(q.shape[0]):
        cells = np.flatnonzero(mask[i])
        index = torch.from_numpy(cells).to(store.device)
        k, v = (part.double().repeat_interleave(heads // groups, dim=1) for part in store.gather(layer, index))  # [n, H, D], [n, H, Dv]
        logits = torch.einsum("hd,nhd->hn", q[i].double(), k) * score.scale
        if score.softcap is not None:
            logits = score.softcap * torch.tanh(logits / score.softcap)
        if score.has_bias:
            logits = logits + score.added(view.group.position[cells].astype(np.int64) - int(view.queries[i]), store.device)
        if score.sinks is not None:
            logits = torch.cat([logits, score.sinks.to(logits)[:, None]], dim=1)
        weights = torch.softmax(logits, dim=1)[:, : len(cells)]
        out.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(out).to(q.dtype)
