"""The hot loops of the bookkeeping, compiled by Numba and cached on disk.

Plain functions over arrays. They own no state and check no arguments: `Cells`, `batch` and `placement` do.

Arrays, everywhere by these names (S sequences, C cells of a group, E entries a row can hold, T rows of a ubatch):

    row_positions [S, E] int32   position of every entry of a sequence's row, ascending
    row_lengths   [S]    int32   entries in use
    column        [S, E] int32   cell of every entry in one layer group, -1 where a window has given it up
    lost          [S, 2] int32   of a column: entries before lost[s, 0] are all -1; none at or after lost[s, 1] is
    position      [C]    int32   position of a cell, -1 if empty
    owners        [C, W] uint64  bit set of the sequences that own a cell
    used          [C']   uint8   1 if a cell is used; C' is C rounded up to 8, the padding is 1
    ids, offsets                 sequence ids of row i of a batch are ids[offsets[i]:offsets[i + 1]]
"""

from __future__ import annotations

import numpy as np
from numba import njit

from onekv.core.window import CHUNKED, FULL, SLIDING, SYMMETRIC

FULL_BYTES = np.uint64(0x0101010101010101)
FARTHEST = 2**31 - 1  # the largest position

HEAD, USED = 0, 1  # of a group's `counts`: where the next search starts, cells in use

# What the batch checks found.
OK, BAD_TOKEN, NO_SEQ, BAD_SEQ, NEGATIVE, TOO_FAR, GAP, HOLE, COUPLED, NOT_NESTED, NARROWED, DECREASING, REPEATED = range(13)


@njit(cache=True)
def bounds(kind, size, query, causal):
    """Smallest and largest key position a query may see."""
    low, high = np.int64(0), np.int64(FARTHEST)
    if kind == SLIDING:
        low = query - size + 1
    elif kind == CHUNKED:
        low = query // size * size
    elif kind == SYMMETRIC:
        low = query - size // 2
        high = query + size // 2
    if causal:
        high = query
    return low, high


@njit(cache=True)
def lower_bound(row, length, value):
    """Index of the first entry of a sorted row that is >= value."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if row[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def visible_ranges(kind, size, causal, row_positions, row_lengths, seqs, queries, first, last):
    """Write for every query the range [first, last) of its sequence's row that it may see."""
    for i in range(seqs.size):
        s = seqs[i]
        low, high = bounds(kind, size, np.int64(queries[i]), causal)
        first[i] = lower_bound(row_positions[s], row_lengths[s], low)
        last[i] = lower_bound(row_positions[s], row_lengths[s], high + 1)


@njit(cache=True)
def visible_ranges_axes(kind, size, causal, row_positions, row_axes, row_lengths, seqs, queries, first, last):
    """The same where positions have three components (t, y, x), queries [3, T]: among entries of the query's own t, a causal query
    sees those up to its (y, x) in row-major order. Spec 4.10."""
    visible_ranges(kind, size, causal, row_positions, row_lengths, seqs, queries[0], first, last)
    if not causal:
        return
    for i in range(seqs.size):
        s = seqs[i]
        low, high = max(lower_bound(row_positions[s], row_lengths[s], queries[0, i]), first[i]), last[i]
        while low < high:
            middle = (low + high) // 2
            y, x = row_axes[0, s, middle], row_axes[1, s, middle]
            if y < queries[1, i] or (y == queries[1, i] and x <= queries[2, i]):
                low = middle + 1
            else:
                high = middle
        last[i] = low


@njit(cache=True)
def has_lost(column, first, last, lost):
    """True iff an entry of column[first:last] holds -1."""
    for j in range(max(first, 0), min(last, lost[1])):
        if j < lost[0] or column[j] < 0:
            return True
    return False


@njit(cache=True)
def count_lost(column, length, lost):
    """Recompute `lost` of one column from its entries."""
    lost[0], lost[1] = 0, 0
    while lost[0] < length and column[lost[0]] < 0:
        lost[0] += 1
    for j in range(length - 1, lost[0] - 1, -1):
        if column[j] < 0:
            lost[1] = j + 1
            break
    lost[1] = max(lost[0], lost[1])


# --- search ---------------------------------------------------------------------------------------------------------------------


@njit(cache=True)
def is_expired(cell, kind, size, position, owners, next_query):
    """True iff the cell is used and hidden by distance from the next query of every owner."""
    p = np.int64(position[cell])
    if p < 0 or kind == FULL:
        return False
    for w in range(owners.shape[1]):
        bits = owners[cell, w]
        s = w * 64
        while bits:
            if bits & np.uint64(1):
                low, _ = bounds(kind, size, np.int64(next_query[s]), True)
                if p >= low:
                    return False
            bits >>= np.uint64(1)
            s += 1
    return True


@njit(cache=True)
def find_empty(used, num_cells, head, wanted, slots):
    """Write the first `wanted` empty cells in search order (from head, wrapping) into slots; return how many were found."""
    words = used.view(np.uint64)
    found = 0
    for turn in range(2):
        cell = head if turn == 0 else 0
        stop = num_cells if turn == 0 else head
        while cell < stop and found < wanted:
            if cell % 8 == 0 and words[cell // 8] == FULL_BYTES:
                cell += 8
                continue
            if used[cell] == 0:
                slots[found] = cell
                found += 1
            cell += 1
    return found


@njit(cache=True)
def find_expired(kind, size, position, owners, next_query, head, wanted, found, slots):
    """Go on filling slots[found:wanted] with expired cells in search order; return how many there are now."""
    n = position.size
    for k in range(n):
        if found == wanted:
            break
        cell = head + k
        if cell >= n:
            cell -= n
        if is_expired(cell, kind, size, position, owners, next_query):
            slots[found] = cell
            found += 1
    return found


@njit(cache=True)
def find_run(kind, size, position, owners, next_query, take_expired, head, wanted, slots):
    """Find a run of `wanted` <= C neighbouring cells, empty or (if take_expired) expired. The reference's search, spec 4.4."""
    n = position.size
    tested = 0
    while True:
        if head + wanted > n:
            tested += n - head
            head = 0
            continue
        found = 0
        while found < wanted:
            cell = head
            head += 1
            tested += 1
            if position[cell] >= 0 and not (take_expired and is_expired(cell, kind, size, position, owners, next_query)):
                break
            slots[found] = cell
            found += 1
        if found == wanted:
            return True
        if tested >= n:
            return False


@njit(cache=True)
def count_expired(kind, size, position, owners, next_query):
    """Number of used cells that could be reused."""
    total = 0
    for cell in range(position.size):
        if is_expired(cell, kind, size, position, owners, next_query):
            total += 1
    return total


# --- changes --------------------------------------------------------------------------------------------------------------------


@njit(cache=True)
def shared(cells, seq, owners):
    """Indices of the cells that have other owners than `seq`."""
    found, count = np.empty(cells.size, np.int64), 0
    for i in range(cells.size):
        others = np.uint64(0)
        if cells[i] >= 0:
            for w in range(owners.shape[1]):
                others |= owners[cells[i], w] & ~(np.uint64(w == seq >> 6) << np.uint64(seq & 63))
        found[count] = i
        count += others != 0
    return found[:count]


@njit(cache=True)
def disown(cells, seq, owners):
    """Take `seq` from the owners of the given cells (-1 entries are skipped). Cells left without an owner wait for `sweep`."""
    word, bit = seq >> 6, np.uint64(1) << np.uint64(seq & 63)
    for j in range(cells.size):
        if cells[j] >= 0:
            owners[cells[j], word] &= ~bit


@njit(cache=True)
def sweep(cells, position, shift, owners, used, counts):
    """Empty those of the given cells (-1 entries are skipped) that nobody owns. Returns the smallest of them, -1 if there is none."""
    first = np.int64(-1)
    for j in range(cells.size):
        cell = cells[j]
        if cell < 0 or position[cell] < 0:
            continue
        for w in range(owners.shape[1]):
            if owners[cell, w]:
                break
        else:
            position[cell] = -1
            shift[cell] = 0
            used[cell] = 0
            counts[USED] -= 1
            if first < 0 or cell < first:
                first = cell
    return first


@njit(cache=True)
def claim(cells, seq, owners):
    """Add `seq` to the owners of the given cells (-1 entries are skipped)."""
    word, bit = seq >> 6, np.uint64(1) << np.uint64(seq & 63)
    for j in range(cells.size):
        if cells[j] >= 0:
            owners[cells[j], word] |= bit


@njit(cache=True)
def bad_slot(slots, kind, size, position, owners, next_query):
    """Index of the first slot that is out of range, repeated, or neither empty nor expired; -1 if all are good."""
    seen = set()
    for i in range(slots.size):
        cell = slots[i]
        if cell < 0 or cell >= position.size or cell in seen:
            return i
        seen.add(cell)
        if position[cell] >= 0 and not is_expired(cell, kind, size, position, owners, next_query):
            return i
    return -1


@njit(cache=True)
def reclaim(slots, position, shift, owners, used, counts, row_positions, row_lengths, column, lost):
    """Empty the used cells among slots, and cut each former owner's column at and below the largest position it lost.

    Spec 4.7, steps 2 and 3.
    """
    highest = np.full(row_lengths.size, -1, np.int64)
    any_lost = False
    for i in range(slots.size):
        cell = slots[i]
        if position[cell] < 0:
            continue
        any_lost = True
        for w in range(owners.shape[1]):
            bits = owners[cell, w]
            s = w * 64
            while bits:
                if bits & np.uint64(1):
                    highest[s] = max(highest[s], np.int64(position[cell]))
                bits >>= np.uint64(1)
                s += 1
            owners[cell, w] = 0
    if not any_lost:
        return
    sweep(slots, position, shift, owners, used, counts)
    for s in range(row_lengths.size):
        if highest[s] < 0:
            continue
        end = lower_bound(row_positions[s], row_lengths[s], highest[s] + 1)
        start = lost[s, 0]
        if end > start:
            disown(column[s, start:end], s, owners)
            sweep(column[s, start:end], position, shift, owners, used, counts)
            column[s, start:end] = -1
            while end < row_lengths[s] and column[s, end] < 0:
                end += 1
            lost[s, 0] = end
            lost[s, 1] = max(lost[s, 1], end)


@njit(cache=True)
def commit_group(slots, queries, ids, offsets, position, shift, owners, used, counts, row_positions, row_lengths, column, lost, progress):
    """Give every row of a ubatch its cell and append the cell to the column of each of the row's sequences.

    The entries become part of the rows when `append_rows` raises the lengths. One compiled call, so that an interrupt finds it done
    or not begun; `progress` says which.
    """
    reclaim(slots, position, shift, owners, used, counts, row_positions, row_lengths, column, lost)
    added = np.zeros(row_lengths.size, np.int32)
    for i in range(slots.size):
        cell = slots[i]
        position[cell] = queries[i]
        used[cell] = 1
        for j in range(offsets[i], offsets[i + 1]):
            s = ids[j]
            owners[cell, s >> 6] |= np.uint64(1) << np.uint64(s & 63)
            column[s, row_lengths[s] + added[s]] = cell
            added[s] += 1
    counts[HEAD] = slots[-1] + 1
    counts[USED] += slots.size
    progress[0] += 1


@njit(cache=True)
def append_rows(queries, tokens, ids, offsets, row_positions, row_tokens, row_lengths):
    """Append a ubatch's positions and token ids (none: -1) to the rows of its sequences."""
    for i in range(queries.size):
        for j in range(offsets[i], offsets[i + 1]):
            s = ids[j]
            n = row_lengths[s]
            row_positions[s, n] = queries[i]
            row_tokens[s, n] = tokens[i] if tokens.size else -1
            row_lengths[s] = n + 1


@njit(cache=True)
def uncommit_group(slots, position, owners, used, counts, head, progress):
    """Empty the cells that `commit_group` filled, and put the head back."""
    for i in range(slots.size):
        position[slots[i]] = -1
        owners[slots[i]] = 0
        used[slots[i]] = 0
    counts[HEAD] = head
    counts[USED] -= slots.size
    progress[0] -= 1


@njit(cache=True)
def next_queries(row_positions, row_lengths, queries, ids, offsets, following):
    """Smallest position at which each sequence can be queried next: after its last entry, or where the given rows begin."""
    for s in range(row_lengths.size):
        n = row_lengths[s]
        following[s] = np.int64(row_positions[s, n - 1]) + 1 if n else FARTHEST
    for i in range(queries.size):
        for j in range(offsets[i], offsets[i + 1]):
            following[ids[j]] = min(following[ids[j]], np.int64(queries[i]))


# --- batches --------------------------------------------------------------------------------------------------------------------


@njit(cache=True)
def fill_positions(ids, offsets, row_positions, row_lengths, following, positions):
    """Each row continues its first sequence; every sequence of the row then goes on after it. Spec 3.4.

    following: [S] next position of every sequence, -1 where it is one above the last entry.
    """
    for i in range(offsets.size - 1):
        s = ids[offsets[i]]
        if following[s] < 0:
            n = row_lengths[s]
            following[s] = np.int64(row_positions[s, n - 1]) + 1 if n else 0
        positions[i] = following[s]
        for j in range(offsets[i], offsets[i + 1]):
            following[ids[j]] = positions[i] + 1


@njit(cache=True)
def check_ids(tokens, vocab_size, ids, offsets, max_seqs, error):
    """Token ids, then sequence ids. Writes [row, seq, stored, given] of the first fault into error; returns what it is."""
    for i in range(tokens.size):
        if tokens[i] < 0 or tokens[i] >= vocab_size:
            error[0], error[3] = i, tokens[i]
            return BAD_TOKEN
    for i in range(offsets.size - 1):
        if offsets[i] == offsets[i + 1]:
            error[0] = i
            return NO_SEQ
        for j in range(offsets[i], offsets[i + 1]):
            if ids[j] < 0 or ids[j] >= max_seqs:
                error[0], error[1], error[3] = i, ids[j], ids[j]
                return BAD_SEQ
    return OK


@njit(cache=True)
def check_positions(positions, ids, offsets, row_positions, row_lengths, is_tokens, is_multi, error):
    """Signs; then, by ascending sequence id, continuity with the cache and holes inside the batch.

    is_multi: positions have several components, of which these are the first: they may jump forward. Spec 3.3, V8 to V12.
    """
    max_seqs = row_lengths.size
    n = offsets.size - 1
    for i in range(n):
        if positions[i] < 0:
            error[0], error[1], error[3] = i, ids[offsets[i]], positions[i]
            return NEGATIVE
        if positions[i] > FARTHEST:
            error[0], error[1], error[3] = i, ids[offsets[i]], positions[i]
            return TOO_FAR
    start = np.full(max_seqs, -1, np.int64)  # row with the smallest position
    newest = np.full(max_seqs, -1, np.int64)
    rising = np.ones(max_seqs, np.bool_)
    holes = np.zeros(max_seqs, np.bool_)
    low, high = max_seqs, -1
    for i in range(n):
        for j in range(offsets[i], offsets[i + 1]):
            s = ids[j]
            low, high = min(low, s), max(high, s)
            p = positions[i]
            if start[s] < 0 or p < positions[start[s]]:
                start[s] = i
            if newest[s] >= 0:
                if p < newest[s]:
                    rising[s] = False
                elif p > newest[s] + 1:
                    holes[s] = True
            newest[s] = p
    for s in range(low, high + 1):
        if start[s] < 0:
            continue
        given = positions[start[s]]
        if row_lengths[s]:
            stored = np.int64(row_positions[s, row_lengths[s] - 1])
            follows = given == stored + 1 or (is_multi and given > stored) or (not is_tokens and given == stored)
            if not follows:
                error[0], error[1], error[2], error[3] = start[s], s, stored, given
                return GAP
        if is_multi:
            continue
        missing, row = np.int64(-1), np.int64(-1)
        if rising[s] and holes[s]:
            missing, row = rising_hole(positions, ids, offsets, s)
        elif not rising[s]:
            missing, row = any_hole(positions, ids, offsets, s)
        if missing >= 0:
            error[0], error[1], error[2], error[3] = row, s, missing, positions[row]
            return HOLE
    return OK


@njit(cache=True)
def check_order(positions, ids, offsets, max_seqs, may_repeat, error):
    """A sequence's positions must not fall along the batch, nor repeat unless they may. Spec 3.3, V16 and V17."""
    newest = np.full(max_seqs, -1, np.int64)
    for i in range(offsets.size - 1):
        for j in range(offsets[i], offsets[i + 1]):
            s = ids[j]
            if newest[s] > positions[i]:
                error[0], error[1], error[2], error[3] = i, s, newest[s], positions[i]
                return DECREASING
            if newest[s] == positions[i] and not may_repeat:
                error[0], error[1], error[2], error[3] = i, s, newest[s], positions[i]
                return REPEATED
            newest[s] = positions[i]
    return OK


@njit(cache=True)
def rising_hole(positions, ids, offsets, seq):
    """First position missing between the ascending rows of a sequence, and the row after it."""
    before = np.int64(-1)
    for i in range(offsets.size - 1):
        for j in range(offsets[i], offsets[i + 1]):
            if ids[j] == seq:
                if before >= 0 and positions[i] > before + 1:
                    return before + 1, np.int64(i)
                before = positions[i]
    return np.int64(-1), np.int64(-1)


@njit(cache=True)
def any_hole(positions, ids, offsets, seq):
    """The same for rows in any order; the row is the first that lies beyond the hole."""
    mine = [np.int64(0) for _ in range(0)]
    for i in range(offsets.size - 1):
        for j in range(offsets[i], offsets[i + 1]):
            if ids[j] == seq:
                mine.append(positions[i])
    mine.sort()
    for k in range(1, len(mine)):
        if mine[k] > mine[k - 1] + 1:
            for i in range(offsets.size - 1):
                for j in range(offsets[i], offsets[i + 1]):
                    if ids[j] == seq and positions[i] >= mine[k]:
                        return mine[k - 1] + 1, np.int64(i)
    return np.int64(-1), np.int64(-1)


@njit(cache=True)
def check_nesting(positions, sets, ids, offsets, max_seqs, error):
    """A row's set of sequences may only narrow along the batch, and only at a larger position. Spec 3.3, V15 and 4.10."""
    words = sets.shape[1]
    current = np.full((max_seqs, words), np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64)
    newest = np.full(max_seqs, -1, np.int64)
    for i in range(offsets.size - 1):
        for j in range(offsets[i], offsets[i + 1]):
            s = ids[j]
            narrows = False
            for w in range(words):
                if sets[i, w] & ~current[s, w]:
                    error[0], error[1], error[3] = i, s, positions[i]
                    return NOT_NESTED
                narrows |= sets[i, w] != current[s, w]
            if narrows and newest[s] >= positions[i]:
                error[0], error[1], error[2], error[3] = i, s, newest[s], positions[i]
                return NARROWED
            newest[s] = positions[i]
        for j in range(offsets[i], offsets[i + 1]):
            current[ids[j]] = sets[i]
    return OK


@njit(cache=True)
def row_sets(ids, offsets, words):
    """Bit set of the sequences of every row, [T, words] uint64."""
    sets = np.zeros((offsets.size - 1, words), np.uint64)
    for i in range(offsets.size - 1):
        for j in range(offsets[i], offsets[i + 1]):
            sets[i, ids[j] >> 6] |= np.uint64(1) << np.uint64(ids[j] & 63)
    return sets


@njit(cache=True)
def split_equal(sets, firsts, max_rows, consecutive):
    """Cut a batch so that every ubatch has the same number of rows of each of its sequence sets. Spec 3.5, D-12.

    consecutive: the first ids of the sets of one ubatch must follow each other without a gap.
    Returns the row order and the end of every ubatch in it.
    """
    n, words = sets.shape
    done = np.zeros(n, np.bool_)
    order = np.empty(n, np.int64)
    ends = [0 for _ in range(0)]
    filled = 0
    while filled < n:
        heads = [0 for _ in range(0)]  # an unused row of every collected set
        taken = np.zeros(words, np.uint64)
        for i in range(n):
            if len(heads) == max_rows:
                break
            if done[i] or (consecutive and len(heads) and firsts[i] != firsts[heads[-1]] + 1):
                continue
            overlaps = False
            for w in range(words):
                overlaps |= (taken[w] & sets[i, w]) != 0
            if not overlaps:
                heads.append(i)
                taken |= sets[i]
        rounds = [[0 for _ in range(0)] for _ in heads]
        while True:
            following = [0 for _ in range(0)]
            for k in range(len(heads)):
                i = rounds[k][-1] + 1 if len(rounds[k]) else 0  # consecutive: the set may have rows before heads[k]
                while i < n and (done[i] or not np.array_equal(sets[i], sets[heads[k]])):
                    i += 1
                following.append(i)
            if max(following) >= n:
                break
            for k in range(len(heads)):
                rounds[k].append(following[k])
            if (len(rounds[0]) + 1) * len(heads) > max_rows:
                break
        for k in range(len(heads)):
            for i in rounds[k]:
                order[filled] = i
                done[i] = True
                filled += 1
        ends.append(filled)
    return order, np.array(ends)


@njit(cache=True)
def split_sequence(sets, max_rows):
    """Cut a batch so that along each ubatch every row's set is within the set of the row before it. Spec 3.5."""
    n, words = sets.shape
    done = np.zeros(n, np.bool_)
    order = np.empty(n, np.int64)
    ends = [0 for _ in range(0)]
    filled = 0
    while filled < n:
        before, rows = -1, 0
        for i in range(n):
            if rows == max_rows:
                break
            if done[i]:
                continue
            within = True
            if before >= 0:
                for w in range(words):
                    within &= (sets[i, w] & ~sets[before, w]) == 0
            if within:
                order[filled] = i
                done[i] = True
                filled += 1
                rows += 1
                before = i
        ends.append(filled)
    return order, np.array(ends)
