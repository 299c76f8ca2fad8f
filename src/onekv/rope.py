"""Turns stored keys to another position: a pure rotation by the change, in float32.

Owns the mathematics only; which cells and by how much is the cache's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onekv.storage import Rope


def rotate(vectors: Tensor, change: Tensor, rope: Rope) -> Tensor:
    """Vectors stored at some position, as they would be at that position plus `change`.

    Rotation by a difference needs no magnitude correction (YaRN's factor stays in the stored vector) and leaves norms as they are.

    Shapes:
        vectors: [n, G, D], any float dtype
        change:  [n], integer positions
        returns: float32 [n, G, D]
    Cost: O(n G D). Angles are taken in float64, so that a large change is as exact as a small one.
    Source: spec 4.12, D-2, D-3.

    >>> key = torch.tensor([[[1.0, 0.0]]])
    >>> rotate(key, torch.tensor([3]), Rope((1.0,))).flatten()
    tensor([-0.9900,  0.1411])
    """
    pairs = len(rope.inv_freq)
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float64, device=vectors.device)
    angle = change.to(vectors.device, torch.float64)[:, None] * frequencies
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]  # [n, 1, pairs]
    out = vectors.to(torch.float32, copy=True)
    turned = out[..., rope.offset : rope.offset + 2 * pairs]
    if rope.layout == "half":
        one, two = turned[..., :pairs], turned[..., pairs:]
    else:
        one, two = turned[..., 0::2], turned[..., 1::2]
    first = one * cos - two * sin
    two.copy_(one * sin + two * cos)
    one.copy_(first)
    return out
