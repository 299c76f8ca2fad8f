"""Attention over cell lists, compiled by Numba: the loops behind `onekv.attention.cpu`.

Two loops do the same sum. `_row` takes one query and reads its cells in place, all heads of a cell at once: bound by memory. `_group` takes
many queries of one key head and copies each block of cells once for all of them: bound by arithmetic. Both leave partial results, which
`merge` joins by their log-sum-exp.

Stored forms are told apart by the array's dtype:

    float32 [C, G, D]   uint16 [C, G, D] bfloat16   int16 [C, G, D] float16   int8 [C, G, 34 n] q8_0   uint8 [C, G, 18 n] q4_0

In `_group` the queries are the lanes of every vector, so that a query's result is the same to the bit whatever stands beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from onekv.core import vectors
from onekv.core.spans import BLOCK
from onekv.core.vectors import LANES, TILE_LANES, TILE_ROWS

NOTHING = np.float32(-1e30)  # the score of a cell that is not seen
AHEAD = 16  # cells asked for before they are read
_PADDED = -(-BLOCK // TILE_ROWS) * TILE_ROWS


SPILL = 32  # floats behind a decoded head that may be overwritten


def decode(out: Any, at: int, stored: Any, cell: int, head: int, width: int) -> None:
    """out[at:at + width] = one head of one cell as float32; up to SPILL floats behind it may change."""
    raise NotImplementedError("compiled code only")


@overload(decode, inline="always")
def _decode(out, at, stored, cell, head, width):
    if stored.dtype in (types.uint16, types.int16) and stored.layout == "C":
        return _from_16_bits_in_rows
    return _DECODERS[stored.dtype]


def _from_float32(out, at, stored, cell, head, width):
    for i in range(width):
        out[at + i] = stored[cell, head, i]


def _from_16_bits(out, at, stored, cell, head, width):
    for i in range(width):
        out[at + i] = vectors.from_16(stored[cell, head, i])


def _from_16_bits_in_rows(out, at, stored, cell, head, width):
    start = (np.int64(cell) * stored.shape[1] + head) * width
    for i in range(0, width - 15, 16):
        vectors.widen_16(vectors.pointer(stored, start + i), vectors.pointer(out, at + i))
    for i in range(width // 16 * 16, width):
        out[at + i] = vectors.from_16(stored[cell, head, i])


def _from_q8_0(out, at, stored, cell, head, width):
    blocks = -(-width // 32)
    start = (np.int64(cell) * stored.shape[1] + head) * stored.shape[2]
    for block in range(blocks):
        scale = vectors.pointer(stored, start + 32 * blocks + 2 * block)
        vectors.widen_8(vectors.pointer(stored, start + 32 * block), scale, vectors.pointer(out, at + 32 * block))


def _from_q4_0(out, at, stored, cell, head, width):
    blocks = -(-width // 32)
    start = (np.int64(cell) * stored.shape[1] + head) * stored.shape[2]
    for block in range(blocks):
        scale = vectors.pointer(stored, start + 16 * blocks + 2 * block)
        vectors.widen_4(vectors.pointer(stored, start + 16 * block), scale, vectors.pointer(out, at + 32 * block))


_DECODERS = {
    types.float32: _from_float32,
    types.uint16: _from_16_bits,
    types.int16: _from_16_bits,
    types.int8: _from_q8_0,
    types.uint8: _from_q4_0,
}


def stage(stored: Any, copied: Any, offsets: Any, cells: Any, start: int, count: int, head: int, width: int) -> Any:
    """Make one head of cells[start:start + count] readable as float32: offsets[:LANES], from the result, say where."""
    raise NotImplementedError("compiled code only")


@overload(stage)
def _stage(stored, copied, offsets, cells, start, count, head, width):
    if stored.dtype == types.float32:

        def in_place(stored, copied, offsets, cells, start, count, head, width):
            for x in range(LANES):
                offsets[x] = (np.int64(cells[start + min(x, count - 1)]) * stored.shape[1] + head) * width
            return vectors.pointer(stored, 0)

        return in_place

    def decoded(stored, copied, offsets, cells, start, count, head, width):
        for x in range(LANES):
            offsets[x] = x * width
        for x in range(count):
            decode(copied, x * width, stored, cells[start + x], head, width)
        return vectors.pointer(copied, 0)

    return decoded


@njit(inline="always")
def _ask(stored, cell):
    """Prefetch all heads of a cell."""
    count = stored.shape[1] * stored.shape[2]
    vectors.prefetch(vectors.pointer(stored, np.int64(cell) * count), count * stored.itemsize)


@njit(fastmath=True, error_model="numpy")
def _row(q, keys, values, cells, distance, left, right, scale, softcap, slopes, part, total, top, mass, k_width, v_width):
    """One query [H, D] over cells[left:right], all heads."""
    heads, groups = q.shape[0], keys.shape[1]
    lanes = heads // groups
    width, v_dim = len(k_width) * LANES, len(v_width) * LANES
    query = np.empty(heads * width, np.float32)
    for h in range(heads):
        for i in range(width):
            query[h * width + i] = q[h, i] * scale
    score = np.empty((heads, BLOCK), np.float32)
    offsets = np.empty(LANES, np.int64)
    copied = np.zeros(LANES * max(width, v_dim) + SPILL, np.float32)
    for h in range(heads):
        top[part, h], mass[part, h] = NOTHING, np.float32(0)
        for i in range(v_dim):
            total[part, h, i] = np.float32(0)
    for block in range(left, right, BLOCK):
        n = min(np.int64(BLOCK), right - block)
        for x in range(0, n, LANES):
            m = min(np.int64(LANES), n - x)
            for j in range(block + x + AHEAD, min(block + x + AHEAD + LANES, block + n)):
                _ask(keys, cells[j])
            for j in range(block + x, block + x + m):
                _ask(values, cells[j])
            for g in range(groups):
                base = stage(keys, copied, offsets, cells, block + x, m, g, width)
                for h in range(g * lanes, g * lanes + lanes):
                    vectors.dots(
                        vectors.pointer(query, h * width), base, vectors.pointer(offsets, 0), vectors.pointer(score, h * BLOCK + x), k_width
                    )
        for h in range(heads):
            if softcap > 0:
                for x in range(n):
                    score[h, x] = softcap * vectors.tanh(score[h, x] / softcap)
            if slopes.size:
                for x in range(n):
                    score[h, x] -= slopes[h] * np.float32(abs(distance[block + x]))
            highest = top[part, h]
            for x in range(n):
                highest = max(highest, score[h, x])
            if highest > top[part, h]:
                shrunk = vectors.exp(top[part, h] - highest)
                top[part, h] = highest
                mass[part, h] *= shrunk
                for i in range(v_dim):
                    total[part, h, i] *= shrunk
            added = np.float32(0)
            for x in range(n):
                weight = vectors.exp(score[h, x] - highest)
                score[h, x] = weight
                added += weight
            mass[part, h] += added
        for x in range(0, n, LANES):
            m = min(np.int64(LANES), n - x)
            for j in range(block + n + x, min(block + n + x + m, right)):
                if x < AHEAD + LANES:
                    _ask(keys, cells[j])
            for g in range(groups):
                base = stage(values, copied, offsets, cells, block + x, m, g, v_dim)
                for h in range(g * lanes, g * lanes + lanes):
                    vectors.mix(
                        vectors.pointer(total, (part * heads + h) * v_dim),
                        vectors.pointer(score, h * BLOCK + x),
                        base,
                        vectors.pointer(offsets, 0),
                        m,
                        v_width,
                    )


@njit(error_model="numpy", fastmath={"contract"})
def _join(top, mass, total, lane, highest, added, out, width):
    """Join a block's maximum, mass and sums into those of the blocks left of it, for TILE_LANES lanes from `lane` on."""
    for i in range(TILE_LANES):
        before = top[lane + i]
        joined = max(before, highest[i])
        kept, weight = vectors.exp(before - joined), vectors.exp(highest[i] - joined)
        top[lane + i], highest[i] = joined, kept
        mass[lane + i] = mass[lane + i] * kept + added[i] * weight
        added[i] = weight
    for e in range(width):
        for i in range(TILE_LANES):
            total[e, lane + i] = total[e, lane + i] * highest[i] + out[e, i] * added[i]


@njit(error_model="numpy", fastmath={"contract"})
def _group(q, keys, values, cells, positions, queries, asked, first, last, left, right, g, scale, softcap, slopes, part, total, top, mass):
    """Queries asked[:] of key head g over cells[left:right]; each sees its own [first, last)."""
    groups = keys.shape[1]
    lanes = q.shape[1] // groups
    width, v_dim = q.shape[2], total.shape[2]
    n = asked.size * lanes
    padded = -(-n // TILE_LANES) * TILE_LANES
    v_padded = -(-v_dim // TILE_ROWS) * TILE_ROWS
    query = np.zeros((width, padded), np.float32)
    low, high = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
    at, slope = np.zeros(padded, np.int64), np.zeros(padded, np.float32)
    for i in range(n):
        t, h = asked[i // lanes], g * lanes + i % lanes
        low[i], high[i], at[i] = first[t], last[t], queries[t]
        if slopes.size:
            slope[i] = slopes[h]
        for e in range(width):
            query[e, i] = q[t, h, e] * scale
    highest_all, mass_all = np.full(padded, NOTHING, np.float32), np.zeros(padded, np.float32)
    total_all = np.zeros((v_dim, padded), np.float32)
    k, v = np.zeros(_PADDED * width + SPILL, np.float32), np.zeros(BLOCK * v_padded + SPILL, np.float32)
    score, out = np.empty((_PADDED, TILE_LANES), np.float32), np.empty((v_padded, TILE_LANES), np.float32)
    highest, added = np.empty(TILE_LANES, np.float32), np.empty(TILE_LANES, np.float32)
    for block in range(left // BLOCK * BLOCK, right, BLOCK):
        begin, end = max(block, left), min(block + BLOCK, right)
        count = end - begin
        for x in range(count):
            cell = cells[begin + x]
            if cell >= 0:
                decode(k, x * width, keys, cell, g, width)
                decode(v, x * v_padded, values, cell, g, v_dim)
            else:
                k[x * width : (x + 1) * width] = np.float32(0)
                v[x * v_padded : (x + 1) * v_padded] = np.float32(0)
        for lane in range(0, padded, TILE_LANES):
            seen, whole = False, True
            for i in range(lane, lane + TILE_LANES):
                seen |= low[i] < end and high[i] > begin
                whole &= low[i] <= begin and high[i] >= end
            if not seen:
                continue
            for x in range(0, count, TILE_ROWS):
                vectors.tile(
                    vectors.pointer(k, x * width),
                    width,
                    1,
                    vectors.pointer(query, lane),
                    padded,
                    width,
                    vectors.pointer(score, x * TILE_LANES),
                    TILE_LANES,
                )
            if softcap > 0:
                for x in range(count):
                    for i in range(TILE_LANES):
                        score[x, i] = softcap * vectors.tanh(score[x, i] / softcap)
            if slopes.size:
                for x in range(count):
                    for i in range(TILE_LANES):
                        score[x, i] -= slope[lane + i] * np.float32(abs(positions[begin + x] - at[lane + i]))
            if not whole:
                for x in range(count):
                    for i in range(TILE_LANES):
                        if begin + x < low[lane + i] or begin + x >= high[lane + i]:
                            score[x, i] = NOTHING
            for i in range(TILE_LANES):
                highest[i], added[i] = NOTHING, np.float32(0)
            for x in range(count):
                for i in range(TILE_LANES):
                    highest[i] = max(highest[i], score[x, i])
            for x in range(count):
                for i in range(TILE_LANES):
                    weight = vectors.exp(score[x, i] - highest[i])
                    if score[x, i] <= NOTHING:
                        weight = np.float32(0)
                    score[x, i] = weight
                    added[i] += weight
            for e in range(0, v_dim, TILE_ROWS):
                vectors.tile(
                    vectors.pointer(v, e),
                    1,
                    v_padded,
                    vectors.pointer(score, 0),
                    TILE_LANES,
                    count,
                    vectors.pointer(out, e * TILE_LANES),
                    TILE_LANES,
                )
            _join(highest_all, mass_all, total_all, lane, highest, added, out, v_dim)
    for i in range(n):
        slot, h = part + i // lanes, g * lanes + i % lanes
        top[slot, h], mass[slot, h] = highest_all[i], mass_all[i]
        for e in range(v_dim):
            total[slot, h, e] = total_all[e, i]


@njit(parallel=True, cache=True, error_model="numpy")
def rows(
    q, keys, values, column, row_positions, queries, items, asked, work, shares, scale, softcap, slopes, total, top, mass, k_width, v_width
):
    """The items of one query each. Writes partial results [parts, H, Dv], their largest scores and masses [parts, H]."""
    for worker in prange(shares.size - 1):
        for i in range(shares[worker], shares[worker + 1]):
            seq, left, right, a, _, part = items[work[i, 0]]
            t = asked[a]
            distance = row_positions[seq, :0] if slopes.size == 0 else row_positions[seq, :right] - queries[t]
            _row(q[t], keys, values, column[seq], distance, left, right, scale, softcap, slopes, part, total, top, mass, k_width, v_width)


@njit(parallel=True, cache=True, error_model="numpy")
def groups(
    q, keys, values, column, row_positions, queries, first, last, items, asked, work, shares, scale, softcap, slopes, total, top, mass
):
    """The items of many queries; otherwise as `rows`."""
    for worker in prange(shares.size - 1):
        for i in range(shares[worker], shares[worker + 1]):
            seq, left, right, a, b, part = items[work[i, 0]]
            _group(
                q, keys, values, column[seq], row_positions[seq], queries, asked[a:b], first, last,
                left, right, work[i, 1], scale, softcap, slopes, part, total, top, mass,
            )  # fmt: skip


@njit(cache=True, error_model="numpy", fastmath={"contract"})
def merge(total, top, mass, parts, offsets, sinks, out):
    """out [T, H, Dv] from each row's partial results, joined left to right; a sink takes weight and gives no value."""
    width = total.shape[2]
    joined = np.empty(width, np.float32)
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            highest, weight = NOTHING, np.float32(0)
            joined[:] = np.float32(0)
            for i in range(offsets[t], offsets[t + 1]):
                p = parts[i]
                both = max(highest, top[p, h])
                kept, new = vectors.exp(highest - both), vectors.exp(top[p, h] - both)
                highest, weight = both, weight * kept + mass[p, h] * new
                for e in range(width):
                    joined[e] = joined[e] * kept + total[p, h, e] * new
            if sinks.size:
                both = max(highest, sinks[h])
                kept = vectors.exp(highest - both)
                weight = weight * kept + vectors.exp(sinks[h] - both)
                for e in range(width):
                    joined[e] *= kept
            for e in range(width):
                out[t, h, e] = joined[e] / weight
