"""Which cells are read for which queries, and by which worker: the plan of one attention over cell lists.

Sequences that share leading cells share the reading of them. Shared stretches are found from the rows themselves, nested forks included,
and end at multiples of BLOCK entries, so that a block of a row is the same block whoever else reads it. One layer group and step has one
plan; its layers share it.

    rows      0: [a b c d e]   1: [a b c f]   2: [a b g]     with blocks of one entry
    stretches [a b] for 0, 1, 2    [c] for 0, 1    [d e] for 0    [f] for 1    [g] for 2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

BLOCK = 128  # entries whose scores are exponentiated together
CHUNK_LANES = 256  # query heads of one key head that an item attends for at most
SHARED_LANES = 8  # fewer query heads are faster one row at a time


@dataclass(frozen=True, eq=False)
class Spans:
    """The items of one attention: each reads one stretch of one row for some queries and leaves a partial result for each of them.

    Attributes:
        items:   [n, 6] int64: sequence whose column is read, first and last entry, first and last of `queries`, first partial result
        queries: [m] int64, rows of the step
        rows:    [w, 2] int64: items of one query that is attended by itself, all heads at once; worker by worker
        row_shares: [workers + 1] int64, where each worker's part of `rows` starts
        groups, group_shares: the same for the other items, one key head each: item and head
        parts, offsets: the partial results of row t are parts[offsets[t]:offsets[t + 1]], left to right
    """

    items: NDArray[np.int64]
    queries: NDArray[np.int64]
    rows: NDArray[np.int64]
    row_shares: NDArray[np.int64]
    groups: NDArray[np.int64]
    group_shares: NDArray[np.int64]
    parts: NDArray[np.int64]
    offsets: NDArray[np.int64]


def plan_spans(
    seqs: NDArray[np.int64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    column: NDArray[np.int32],
    *,
    groups: int,
    lanes: int,
    workers: int,
    fixed: bool,
    by_row: bool,
) -> Spans:
    """Plan the reading of column[seqs[t], first[t]:last[t]] for every row t.

    Args:
        groups:  G
        lanes:   query heads of a key head
        workers: threads to share the work
        fixed:   blocks are merged one by one from the row's start, so that results do not depend on who shares or who works
        by_row:  a few queries may be attended one row at a time
    Cost: O(T log T + entries that are shared)
    """
    alone_below = 0 if fixed or not by_row else SHARED_LANES
    order = np.argsort(seqs, kind="stable")
    items, queries, parts, offsets = _plan(order, seqs, first, last, column, lanes, workers, fixed, alone_below)
    rows_work, rows_cost, groups_work, groups_cost = _work(items, groups, lanes, alone_below)
    rows_shares = _share_out(rows_work, rows_cost, workers)
    groups_shares = _share_out(groups_work, groups_cost, workers)
    return Spans(items, queries, *rows_shares, *groups_shares, parts, offsets)


def _share_out(work: NDArray[np.int64], cost: NDArray[np.int64], workers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The work worker by worker, and where each one's part starts: the longest first, each to the worker that has least."""
    if workers == 1 or not cost.size:
        return work, np.array([0] + [cost.size] * workers, np.int64)
    worker, shares = _chosen(np.argsort(-cost, kind="stable"), cost, workers)
    return work[np.argsort(worker, kind="stable")], shares


@njit(cache=True)
def _common(column, one, other, start, stop):
    """Entries from `start` on at which two rows have the same cells, a multiple of BLOCK."""
    at = start
    while at + BLOCK <= stop:
        differ = 0
        for i in range(at, at + BLOCK):
            differ |= column[one, i] ^ column[other, i]
        if differ:
            break
        at += BLOCK
    return at - start


@njit(cache=True)
def _stretches(members, ends, counts, column, least, out):
    """Write the stretches [first member, last member, start, stop] and return how many; `members` is permuted so that each is a range.

    A stretch comes before those that continue it. `least`: queries a shared stretch needs.
    """
    n = members.size
    todo = np.zeros((2 * n + 2, 3), np.int64)
    todo[0, 1] = n
    depth, made = 1, 0
    while depth:
        depth -= 1
        low, high, start = todo[depth, 0], todo[depth, 1], todo[depth, 2]
        while low < high:
            # The rows that go on like the first move to the front.
            one, shared, stop = members[low], low + 1, np.int64(-1)
            queries = counts[one]
            for i in range(low + 1, high):
                other = members[i]
                common = _common(column, one, other, start, min(ends[one], ends[other]))
                if common:
                    members[i] = members[shared]
                    members[shared] = other
                    queries += counts[other]
                    stop = common if stop < 0 else min(stop, common)
                    shared += 1
            if stop > 0 and queries >= least:
                out[made, 0], out[made, 1], out[made, 2], out[made, 3] = low, shared, start, start + stop
                made += 1
                if shared < high:
                    todo[depth, 0], todo[depth, 1], todo[depth, 2] = shared, high, start
                    depth += 1
                high, start = shared, start + stop
            else:
                for i in range(low, shared):
                    out[made, 0], out[made, 1], out[made, 2], out[made, 3] = i, i + 1, start, ends[members[i]]
                    made += 1
                low = shared
    return made


@njit(cache=True)
def _plan(order, seqs, first, last, column, lanes, workers, fixed, alone_below):
    rows = seqs.size
    # Sequences of the step, and where each one's rows lie in `order`.
    members, starts = np.empty(rows, np.int64), np.empty(rows + 1, np.int64)
    num_members = 0
    for i in range(rows):
        if i == 0 or seqs[order[i]] != seqs[order[i - 1]]:
            members[num_members], starts[num_members] = seqs[order[i]], i
            num_members += 1
    starts[num_members] = rows
    highest = members[num_members - 1] + 1
    ends, counts, at = np.zeros(highest, np.int64), np.zeros(highest, np.int64), np.zeros(highest, np.int64)
    for m in range(num_members):
        at[members[m]], counts[members[m]] = starts[m], starts[m + 1] - starts[m]
        for i in range(starts[m], starts[m + 1]):
            ends[members[m]] = max(ends[members[m]], last[order[i]])
    stretches = np.empty((3 * num_members + 3, 4), np.int64)
    least = 1 if fixed else -(-alone_below // lanes)
    num_stretches = _stretches(members[:num_members], ends, counts, column, least, stretches)

    none = np.empty((0, 6), np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    how = (lanes, workers, fixed, alone_below)
    num_items, num_queries, num_parts = _items(order, members, at, counts, first, last, stretches[:num_stretches], how, none, False)
    items, queries, part_rows = np.empty((num_items, 6), np.int64), np.empty(num_queries, np.int64), np.empty(num_parts, np.int64)
    _items(order, members, at, counts, first, last, stretches[:num_stretches], how, (items, queries, part_rows), True)

    # Partial results by row; they were made left to right.
    offsets = np.zeros(rows + 1, np.int64)
    for t in part_rows:
        offsets[t + 1] += 1
    for t in range(rows):
        offsets[t + 1] += offsets[t]
    following, parts = offsets.copy(), np.empty(num_parts, np.int64)
    for i in range(num_parts):
        parts[following[part_rows[i]]] = i
        following[part_rows[i]] += 1

    return items, queries, parts, offsets


@njit(cache=True)
def _items(order, members, at, counts, first, last, stretches, how, out, write):
    """Cut stretches into items. Returns the numbers of items, queries and partial results; with `write` also writes them."""
    lanes, workers, fixed, alone_below = how
    items, queries, part_rows = out
    chunk = max(1, CHUNK_LANES // lanes)
    alone = 0
    for i in range(stretches.shape[0]):
        rows = 0
        for m in range(stretches[i, 0], stretches[i, 1]):
            rows += counts[members[m]]
        alone += rows if rows * lanes < alone_below else 0
    pieces = workers if alone < 2 * workers else 1  # too few for an even share each
    num_items, num_queries, num_parts = 0, 0, 0
    mine = np.empty(order.size, np.int64)
    for i in range(stretches.shape[0]):
        start, stop = stretches[i, 2], stretches[i, 3]
        size = 0
        for m in range(stretches[i, 0], stretches[i, 1]):
            for j in range(at[members[m]], at[members[m]] + counts[members[m]]):
                mine[size] = order[j]
                size += 1
        is_alone = size * lanes < alone_below
        for a in range(0, size, 1 if is_alone else chunk):
            b = a + 1 if is_alone else min(a + chunk, size)
            left, right = stop, start
            for j in range(a, b):
                left, right = min(left, first[mine[j]]), max(right, last[mine[j]])
            left, right = max(left, start), min(right, stop)
            if left >= right:
                continue
            length = right
            if fixed and start > 0:
                length = np.int64(BLOCK)  # what does not start at the row's start is merged block by block
            elif is_alone and pieces > 1:
                length = max(-(-(right - left) // (pieces * BLOCK)), 1) * BLOCK
            if write:
                for j in range(a, b):
                    queries[num_queries + j - a] = mine[j]
            while left < right:
                end = min(right, left // BLOCK * BLOCK + length)
                if write:
                    item = items[num_items]
                    item[0], item[1], item[2] = members[stretches[i, 0]], left, end
                    item[3], item[4], item[5] = num_queries, num_queries + b - a, num_parts
                    for j in range(a, b):
                        part_rows[num_parts + j - a] = mine[j]
                num_items += 1
                num_parts += b - a
                left = end
            num_queries += b - a
    return num_items, num_queries, num_parts


@njit(cache=True)
def _work(items, groups, lanes, alone_below):
    """What workers do, and what it costs: [n, 2] item and 0 for items of one query, [n, 2] item and key head for the others."""
    alone = np.zeros(items.shape[0], np.bool_)
    num_alone = 0
    for i in range(items.shape[0]):
        alone[i] = items[i, 4] - items[i, 3] == 1 and lanes < alone_below
        num_alone += alone[i]
    num_grouped = (items.shape[0] - num_alone) * groups
    rows_work, rows_cost = np.empty((num_alone, 2), np.int64), np.empty(num_alone, np.int64)
    groups_work, groups_cost = np.empty((num_grouped, 2), np.int64), np.empty(num_grouped, np.int64)
    r, n = 0, 0
    for i in range(items.shape[0]):
        length, width = items[i, 2] - items[i, 1], (items[i, 4] - items[i, 3]) * lanes
        if alone[i]:
            rows_work[r, 0], rows_work[r, 1], rows_cost[r] = i, 0, length
            r += 1
        else:
            for g in range(groups):
                groups_work[n, 0], groups_work[n, 1], groups_cost[n] = i, g, length * (8 + width)
                n += 1
    return rows_work, rows_cost, groups_work, groups_cost


@njit(cache=True)
def _chosen(ranking, cost, workers):
    """A worker for each piece of work, and the shares."""
    load, worker = np.zeros(workers, np.int64), np.empty(cost.size, np.int64)
    shares = np.zeros(workers + 1, np.int64)
    for i in ranking:
        least = 0
        for w in range(1, workers):
            if load[w] < load[least]:
                least = w
        worker[i] = least
        load[least] += cost[i]
        shares[least + 1] += 1
    for w in range(workers):
        shares[w + 1] += shares[w]
    return worker, shares
