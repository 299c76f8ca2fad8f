"""Heads to blocks of 32 small integers, compiled by Numba and cached on disk: the loops behind `onekv.codecs` for heads in host memory.

Slow twin: the torch code there, which serves other devices. Both give the same bytes.

    x       [R, D] float32   heads; D numbers, in blocks of 32 of which the last is padded with zeros
    size             int     heads are first transformed by Walsh-Hadamard in blocks of this power of two; 1: they are not
    stored  [R, N] uint8     receives the integers, in its first bytes
    scales  [R, B] float32   receives the scale of every block; NaN where float16 cannot hold it
"""

from __future__ import annotations

import numpy as np
from numba import njit

OVERFLOW = np.float32(65520)  # from here on float16 rounds to infinity


@njit(cache=True)
def load(x, size, sums, head):
    """head = x, transformed. Sums are taken in float64, where those of float32 numbers of like size are exact in any order."""
    dim = len(x)
    if size == 1:
        head[:dim] = x
        return
    sums[:] = x
    step = 1
    while step < size:
        for start in range(0, dim, 2 * step):
            for i in range(start, start + step):
                one, two = sums[i], sums[i + step]
                sums[i], sums[i + step] = one + two, one - two
        step *= 2
    factor = size**-0.5
    for i in range(dim):
        head[i] = sums[i] * factor


@njit(cache=True, error_model="numpy")
def inverse_of(scale):
    """1 / scale, 0 where that is infinite: float16 takes such a scale for 0."""
    inverse = np.float32(1) / scale
    return inverse if np.isfinite(inverse) else np.float32(0)


@njit(cache=True)
def storable(scale):
    """The scale as it is written; what float16 cannot hold is NaN."""
    return scale if abs(scale) < OVERFLOW else np.float32(np.nan)


@njit(cache=True)
def encode_q8_0(x, size, stored, scales):
    """See `onekv.codecs`."""
    rows, dim = x.shape
    blocks = scales.shape[1]
    sums, head = np.empty(dim, np.float64), np.zeros(32 * blocks, np.float32)
    for r in range(rows):
        load(x[r], size, sums, head)
        for b in range(blocks):
            largest, is_finite = np.float32(0), True
            for i in range(32 * b, 32 * b + 32):
                is_finite &= np.isfinite(head[i])
                largest = max(largest, abs(head[i]))
            scale = np.float32(largest / np.float32(127))
            inverse = inverse_of(scale)
            for i in range(32 * b, 32 * b + 32):
                scaled = np.float64(np.float32(head[i] * inverse)) if is_finite else 0.0
                whole = np.int8(np.floor(abs(scaled) + 0.5))  # C's roundf: halves away from zero
                stored[r, i] = np.uint8(-whole if scaled < 0 else whole)
            scales[r, b] = storable(scale) if is_finite else np.float32(np.nan)


@njit(cache=True)
def encode_q4_0(x, size, stored, scales):
    """See `onekv.codecs`."""
    rows, dim = x.shape
    blocks = scales.shape[1]
    sums, head = np.empty(dim, np.float64), np.zeros(32 * blocks, np.float32)
    nibbles = np.empty(32, np.uint8)
    for r in range(rows):
        load(x[r], size, sums, head)
        for b in range(blocks):
            largest, top, is_finite = np.float32(0), np.float32(0), True
            for i in range(32 * b, 32 * b + 32):
                is_finite &= np.isfinite(head[i])
                if largest < abs(head[i]):
                    largest, top = abs(head[i]), head[i]
            scale = np.float32(top / np.float32(-8))
            inverse = inverse_of(scale)
            for i in range(32):
                scaled = np.float32(head[32 * b + i] * inverse) if is_finite else np.float32(0)
                nibbles[i] = np.uint8(min(np.float32(15), np.float32(scaled + np.float32(8.5))))
            for i in range(16):
                stored[r, 16 * b + i] = nibbles[i] | nibbles[16 + i] << np.uint8(4)
            scales[r, b] = storable(scale) if is_finite else np.float32(np.nan)
