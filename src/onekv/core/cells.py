"""Cells and rows: who owns which cell, at which position. The only writer of the bookkeeping.

Two views of one fact, kept equal and compared by `check()`:

    cells   per layer group: position, pending shift, owners of every cell, and where the next search starts
    rows    per sequence: its entries ordered by position, and beside them, per layer group, the cell of every entry

A position whose cell a window has given up stays in the row and holds -1 in that group's column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onekv.core import loops
from onekv.core.batch import Ubatch
from onekv.core.window import Window
from onekv.errors import BatchError, OneKVError

Int32 = NDArray[np.int32]
Slots = NDArray[np.int64]

_FIRST_CAPACITY = 64  # entries a row can hold before the tables grow
_DRAW_IN_FULL = 64  # cells; larger groups are drawn as one character a cell


class Group:
    """The cells of the layers that share one window: which are used, by whom, at which position."""

    def __init__(self, window: Window, num_cells: int, max_seqs: int, capacity: int) -> None:
        self.window = window
        self.num_cells = num_cells
        self.position = np.full(num_cells, -1, np.int32)
        self.shift = np.zeros(num_cells, np.int32)
        self.owners = np.zeros((num_cells, (max_seqs + 63) // 64), np.uint64)
        self.used = np.ones((num_cells + 7) // 8 * 8, np.uint8)
        self.used[:num_cells] = 0
        self.counts = np.zeros(2, np.int64)
        self.column = np.empty((max_seqs, capacity), np.int32)
        self.lost = np.zeros((max_seqs, 2), np.int32)

    @property
    def head(self) -> int:
        """Cell where the next search starts; may equal num_cells."""
        return int(self.counts[loops.HEAD])

    @head.setter
    def head(self, cell: int) -> None:
        self.counts[loops.HEAD] = cell

    @property
    def num_used(self) -> int:
        """Cells that hold a token, reusable ones included."""
        return int(self.counts[loops.USED])

    @property
    def rule(self) -> tuple[int, int]:
        """The window as the two numbers the compiled loops take."""
        return self.window.kind, self.window.size

    def owners_of(self, cell: int) -> list[int]:
        """Sequences that own a cell, ascending."""
        bits = np.unpackbits(self.owners[cell].view(np.uint8), bitorder="little")
        return [int(s) for s in np.flatnonzero(bits)]

    def owned_by(self, seq: int) -> NDArray[np.bool_]:
        """Which cells a sequence owns, [C]. One pass over the cells: for tests and the dense mask."""
        owned: NDArray[np.bool_] = (self.owners[:, seq >> 6] >> np.uint64(seq & 63)) & np.uint64(1) != 0
        return owned


@dataclass
class Committed:
    """What `commit` did, so that `undo` can take it back."""

    slots: Sequence[Slots]
    heads: list[int]
    lengths: Int32
    progress: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))


class Cells:
    """All bookkeeping of one cache.

    Args:
        windows:   one per layer group
        num_cells: cells of each group
        max_seqs:  sequence ids are in [0, max_seqs)

    Every operation checks first and changes afterwards; `epoch` grows with every change.
    """

    def __init__(self, windows: Sequence[Window], num_cells: Sequence[int], max_seqs: int) -> None:
        self.max_seqs = max_seqs
        self.groups = tuple(Group(w, n, max_seqs, _FIRST_CAPACITY) for w, n in zip(windows, num_cells, strict=True))
        self.row_positions = np.empty((max_seqs, _FIRST_CAPACITY), np.int32)
        self.row_tokens = np.empty((max_seqs, _FIRST_CAPACITY), np.int32)
        self.row_lengths = np.zeros(max_seqs, np.int32)
        self.epoch = 0

    # --- what is there ----------------------------------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """Entries of a sequence's row."""
        return int(self.row_lengths[seq])

    def positions(self, seq: int) -> Int32:
        """Positions of a sequence, ascending. A view."""
        return self.row_positions[seq, : self.row_lengths[seq]]

    def tokens(self, seq: int) -> Int32:
        """Token ids of a sequence in position order, -1 where an embedding was fed. A view."""
        return self.row_tokens[seq, : self.row_lengths[seq]]

    def column(self, group: int, seq: int) -> Int32:
        """Cells of a sequence in position order, -1 where the window has given them up. A view."""
        return self.groups[group].column[seq, : self.row_lengths[seq]]

    def present(self) -> list[int]:
        """Sequences with at least one entry, ascending."""
        return [int(s) for s in np.flatnonzero(self.row_lengths)]

    def seq_pos_max(self, seq: int) -> int:
        """Largest position of a sequence, -1 if it has none."""
        n = self.row_lengths[seq]
        return int(self.row_positions[seq, n - 1]) if n else -1

    def seq_pos_min(self, seq: int) -> int:
        """Smallest position of a sequence for which at least one group still holds a cell, -1 if there is none."""
        start = min(int(self._first_held(group, seq)) for group in self.groups)
        return int(self.row_positions[seq, start]) if start < self.row_lengths[seq] else -1

    def _first_held(self, group: Group, seq: int) -> int:
        return int(group.lost[seq, 0])

    def can_continue_at(self, seq: int, position: int, causal: bool = True) -> bool:
        """True iff no entry that a query at `position` may see has lost its cell."""
        seqs, queries = np.array([seq]), np.array([position])
        first, last = np.empty(1, np.int64), np.empty(1, np.int64)
        for group in self.groups:
            if group.lost[seq, 1]:
                loops.visible_ranges(*group.rule, causal, self.row_positions, self.row_lengths, seqs, queries, first, last)
                if loops.has_lost(group.column[seq], first[0], last[0], group.lost[seq]):
                    return False
        return True

    def owns_same_cells(self, one: int, other: int) -> bool:
        """True iff two sequences have equal rows."""
        n = self.row_lengths[one]
        return bool(n == self.row_lengths[other]) and all(np.array_equal(t[one, :n], t[other, :n]) for t in self._tables())

    def next_queries(self, ubatch: Ubatch) -> NDArray[np.int64]:
        """Smallest position at which each sequence can be queried next, the given rows included, [S]."""
        following = np.empty(self.max_seqs, np.int64)
        loops.next_queries(self.row_positions, self.row_lengths, ubatch.queries, ubatch.ids, ubatch.offsets, following)
        return following

    # --- sequence operations (spec 2.4) -----------------------------------------------------------------------------------------

    def check_seq(self, seq: int) -> int:
        """The id itself, if it is in range.

        Raises:
            BatchError: it is not.
        """
        if not 0 <= seq < self.max_seqs:
            raise BatchError(f"sequence id {seq} is not in [0, {self.max_seqs})", seq=seq, given=seq)
        return seq

    def clear(self) -> None:
        """Empty every cell and every row."""
        for group in self.groups:
            group.position[:] = -1
            group.shift[:] = 0
            group.owners[:] = 0
            group.used[: group.num_cells] = 0
            group.counts[:] = 0
            group.lost[:] = 0
        self.row_lengths[:] = 0
        self.epoch += 1

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove a sequence (-1: every sequence) from the positions [p0, p1). Negative p0: from the start; negative p1: to the end.

        Cells left without an owner become empty; a group's head moves back to the first of them.
        Cost: O(entries of the sequence).
        """
        for s in self.present() if seq == -1 else [self.check_seq(seq)]:
            self._cut(s, *self._span(s, p0, p1))

    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        self.check_seq(seq)
        for s in self.present():
            if s != seq:
                self._cut(s, 0, self.length(s))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` own the cells of `src` at positions [p0, p1) too. Copies entries, no K/V; what `dst` owns stays.

        Raises:
            BatchError: `dst` holds another cell at a copied position.
        Cost: O(entries of both sequences).
        """
        self.check_seq(src)
        self.check_seq(dst)
        start, stop = self._span(src, p0, p1)
        if src == dst or start >= stop:
            return
        entries = [table[src, start:stop].copy() for table in self._tables()]
        here, there = self._span(dst, int(entries[0][0]), int(entries[0][-1]) + 1)
        if here < there:
            fresh = self._unknown(dst, here, there, entries)
            entries = [column[fresh] for column in entries]
        self._insert(dst, entries)

    def _unknown(self, dst: int, start: int, stop: int, entries: list[Int32]) -> NDArray[np.bool_]:
        """Which entries are not among those of dst[start:stop]; an entry there with other cells at one of the positions is an error."""
        held = _as_records([table[dst, start:stop] for table in self._tables()])
        given = _as_records(entries)
        others = self.row_positions[dst, start:stop][~np.isin(held, given)]
        clash = others[np.isin(others, entries[0])]
        if clash.size:
            raise BatchError(
                f"sequence {dst} already holds another cell at position {clash[0]}; remove it first, or copy another range",
                seq=dst,
                stored=int(clash[0]),
                given=int(clash[0]),
            )
        return ~np.isin(given, held)

    # --- placing rows (spec 4.7) ------------------------------------------------------------------------------------------------

    def commit(self, ubatch: Ubatch, slots: Sequence[Slots]) -> Committed:
        """Give every row of a ubatch its cells (one slot list per group) and append it to its sequences.

        Expired cells among the slots are taken from their owners, with everything those own below them (spec 4.7).

        Raises:
            OneKVError: a slot is out of range, repeated, or neither empty nor expired; nothing has changed.
        Cost: O(rows), plus the entries that expired.
        """
        following = self.next_queries(ubatch)
        for g, (group, chosen) in enumerate(zip(self.groups, slots, strict=True)):
            at = loops.bad_slot(chosen, *group.rule, group.position, group.owners, following) if len(chosen) == len(ubatch) else 0
            if at >= 0:
                raise OneKVError(f"group {g}: slot {chosen.tolist()} does not fit {len(ubatch)} rows: entry {at} cannot be used")
        longest = np.bincount(ubatch.ids, minlength=self.max_seqs)
        self._reserve(int((self.row_lengths + longest).max()))
        done = Committed(slots, [group.head for group in self.groups], self.row_lengths.copy())
        rows = (ubatch.queries, ubatch.ids, ubatch.offsets)
        self.epoch += 1
        try:
            for group, chosen in zip(self.groups, slots, strict=True):
                loops.commit_group(
                    chosen,
                    *rows,
                    group.position,
                    group.shift,
                    group.owners,
                    group.used,
                    group.counts,
                    self.row_positions,
                    self.row_lengths,
                    group.column,
                    group.lost,
                    done.progress,
                )
            tokens = ubatch.tokens if ubatch.tokens is not None else np.empty(0, np.int64)
            loops.append_rows(ubatch.queries, tokens, *rows[1:], self.row_positions, self.row_tokens, self.row_lengths)
        except BaseException:
            self.undo(done)
            raise
        return done

    def undo(self, done: Committed) -> None:
        """Take back the latest `commit`: its rows leave all their sequences. Cells it took from a window's past stay lost."""
        self.row_lengths[:] = done.lengths
        while done.progress[0]:
            g = int(done.progress[0]) - 1
            group = self.groups[g]
            loops.uncommit_group(done.slots[g], group.position, group.owners, group.used, group.counts, done.heads[g], done.progress)
        self.epoch += 1

    def clone(self) -> Cells:
        """An independent copy, to try a plan on. Cost: O(cells + entries)."""
        twin = Cells.__new__(Cells)
        twin.max_seqs, twin.epoch = self.max_seqs, self.epoch
        twin.row_lengths = self.row_lengths.copy()
        twin.row_positions, twin.row_tokens = self._copy_rows(self.row_positions), self._copy_rows(self.row_tokens)
        twin.groups = tuple(Group.__new__(Group) for _ in self.groups)
        for theirs, mine in zip(twin.groups, self.groups, strict=True):
            theirs.window, theirs.num_cells = mine.window, mine.num_cells
            for name in ("position", "shift", "owners", "used", "counts", "lost"):
                setattr(theirs, name, getattr(mine, name).copy())
            theirs.column = self._copy_rows(mine.column)
        return twin

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[Int32]:
        """Everything a row consists of, positions first."""
        yield self.row_positions
        yield self.row_tokens
        for group in self.groups:
            yield group.column

    def _span(self, seq: int, p0: int, p1: int) -> tuple[int, int]:
        """Entries of a row with a position in [p0, p1); negative bounds are open."""
        positions = self.positions(seq)
        start = 0 if p0 < 0 else int(np.searchsorted(positions, p0))
        stop = positions.size if p1 < 0 else int(np.searchsorted(positions, p1))
        return start, max(start, stop)

    def _cut(self, seq: int, start: int, stop: int) -> None:
        """Remove entries [start, stop) from a row."""
        if start >= stop:
            return
        for group in self.groups:
            freed, first = loops.release(group.column[seq, start:stop], seq, group.position, group.shift, group.owners, group.used)
            group.counts[loops.USED] -= freed
            if 0 <= first < group.head:
                group.head = first
        length = self.length(seq)
        for table in self._tables():
            table[seq, start : length - (stop - start)] = table[seq, stop:length]
        self.row_lengths[seq] -= stop - start
        self._rows_changed(seq)

    def _insert(self, seq: int, entries: list[Int32]) -> None:
        """Merge entries (one array per table, ascending positions) into a row; after equal positions. The cells gain the owner."""
        count, length = entries[0].size, self.length(seq)
        if not count:
            return
        self._reserve(length + count)
        for group, cells in zip(self.groups, entries[2:], strict=True):
            loops.claim(cells, seq, group.owners)
        for table, column in zip(self._tables(), entries, strict=True):
            table[seq, length : length + count] = column
        self.row_lengths[seq] += count
        if length and entries[0][0] < self.row_positions[seq, length - 1]:
            order = np.argsort(self.positions(seq), kind="stable")
            for table in self._tables():
                table[seq, : length + count] = table[seq, order]
        self._rows_changed(seq)

    def _rows_changed(self, seq: int) -> None:
        for group in self.groups:
            if not group.window.is_full:
                loops.count_lost(group.column[seq], self.row_lengths[seq], group.lost[seq])
        self.epoch += 1

    def _reserve(self, length: int) -> None:
        """Make room for rows of `length` entries. Grows by doubling."""
        capacity = self.row_positions.shape[1]
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        self.row_positions = self._copy_rows(self.row_positions, capacity)
        self.row_tokens = self._copy_rows(self.row_tokens, capacity)
        for group in self.groups:
            group.column = self._copy_rows(group.column, capacity)

    def _copy_rows(self, table: Int32, capacity: int | None = None) -> Int32:
        """A copy of what the rows use of a table; the rest is not touched and takes no memory."""
        fresh = np.empty((self.max_seqs, capacity or table.shape[1]), np.int32)
        for s in self.present():
            fresh[s, : self.row_lengths[s]] = table[s, : self.row_lengths[s]]
        return fresh

    # --- inspection -------------------------------------------------------------------------------------------------------------

    def snapshot(self, group: int = 0) -> dict[str, object]:
        """{"cells": [[index, position, [owners], shift], ...] of the used cells by index, "head": int, "used": int}."""
        g = self.groups[group]
        used = np.flatnonzero(g.position >= 0).tolist()
        cells = [[i, int(g.position[i]), g.owners_of(i), int(g.shift[i])] for i in used]
        return {"cells": cells, "head": g.head, "used": g.num_used}

    def draw(self) -> str:
        """One block per group. Up to 64 cells: `.` empty, `5{0,1}` position and owners, `~-3` a pending shift.
        More: one character a cell, `.` empty, `0`-`9`, `a`-`z` the owner (`?` beyond 35), `#` shared; empty lines are left out."""
        blocks = []
        for g, group in enumerate(self.groups):
            title = f"group {g} {group.window!r}: {group.num_used} of {group.num_cells} cells used, head {group.head}"
            blocks.append(title + "\n" + (_draw_cells(group) if group.num_cells <= _DRAW_IN_FULL else _draw_map(group)))
        return "\n".join(blocks)

    def check(self) -> None:
        """Compare cells and rows (spec 2.2). Cost: O(cells + entries).

        Raises:
            OneKVError: an invariant is broken; says which, and draws the cells.
        """
        faults = [fault for g in range(len(self.groups)) for fault in self._group_faults(g)]
        for s in self.present():
            if self.positions(s)[0] < 0 or (np.diff(self.positions(s)) < 0).any():
                faults.append(f"sequence {s}: positions are negative or not ascending")
            if (self.tokens(s) < -1).any():
                faults.append(f"sequence {s}: a token id below -1")
        if faults:
            raise OneKVError("broken bookkeeping: " + "; ".join(faults) + "\n" + self.draw())

    def _group_faults(self, g: int) -> Iterator[str]:
        group = self.groups[g]
        owners = np.zeros_like(group.owners)
        for s in self.present():
            column = self.column(g, s)
            held = column >= 0
            cells = column[held]
            if cells.size and (cells.max() >= group.num_cells or np.unique(cells).size != cells.size):
                yield f"group {g}, sequence {s}: a cell out of range or twice in the row"
                return
            if not np.array_equal(group.position[cells], self.positions(s)[held]):
                yield f"group {g}, sequence {s}: positions of row and cells differ"
            if group.window.is_full and not held.all():
                yield f"group {g}, sequence {s}: an entry without a cell, though nothing expires"
            lost = np.zeros(2, np.int32)
            loops.count_lost(group.column[s], self.row_lengths[s], lost)
            if lost[0] < group.lost[s, 0] or lost[1] > group.lost[s, 1]:
                yield f"group {g}, sequence {s}: lost entries {lost.tolist()} are not within {group.lost[s].tolist()}"
            loops.claim(cells, s, owners)
        empty = group.position < 0
        used = group.used[: group.num_cells] != 0
        if not np.array_equal(owners, group.owners):
            yield f"group {g}: owners of cells {np.flatnonzero((owners != group.owners).any(1)).tolist()} differ from the rows"
        if not np.array_equal(used, ~empty) or not group.used[group.num_cells :].all():
            yield f"group {g}: the map of used cells is wrong"
        if group.num_used != int(used.sum()):
            yield f"group {g}: counts {group.num_used} used cells, there are {int(used.sum())}"
        if (group.shift[empty] != 0).any() or (group.owners[empty] != 0).any():
            yield f"group {g}: an empty cell with an owner or a shift"
        if (group.owners[~empty] == 0).all(axis=1).any():
            yield f"group {g}: a used cell without an owner"
        if not 0 <= group.head <= group.num_cells:
            yield f"group {g}: head {group.head} is outside the buffer"


def _as_records(columns: list[Int32]) -> NDArray[np.void]:
    """Entries as one comparable record each, [n]."""
    stacked = np.ascontiguousarray(np.stack(columns, axis=1))
    return stacked.view(np.dtype((np.void, stacked.dtype.itemsize * stacked.shape[1]))).reshape(-1)


def _draw_cells(group: Group) -> str:
    items = []
    for i in range(group.num_cells):
        if group.position[i] < 0:
            items.append(".")
            continue
        owners = ",".join(map(str, group.owners_of(i)))
        items.append(f"{group.position[i]}{{{owners}}}" + (f"~{group.shift[i]}" if group.shift[i] else ""))
    return " ".join(items)


def _draw_map(group: Group, width: int = 64) -> str:
    """One character a cell, `width` cells a line with the index of its first; lines without a used cell are left out."""
    lines = []
    for start in range(0, group.num_cells, width):
        stop = min(start + width, group.num_cells)
        if (group.position[start:stop] >= 0).any():
            lines.append(f"{start:>8} " + "".join(_letter(group, cell) for cell in range(start, stop)))
    return "\n".join(lines)


def _letter(group: Group, cell: int) -> str:
    if group.position[cell] < 0:
        return "."
    owners = group.owners_of(cell)
    if len(owners) > 1:
        return "#"
    return "0123456789abcdefghijklmnopqrstuvwxyz"[owners[0]] if owners[0] < 36 else "?"
