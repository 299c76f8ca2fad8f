"""Cells and rows: who owns which cell, at which position. The only writer of the bookkeeping.

Two views of one fact, kept equal and compared by `check()`:

    cells   per layer group: position, pending shift, owners of every cell, and where the next search starts
    rows    per sequence: its entries ordered by position, and beside them, per layer group, the cell of every entry

A position whose cell a window has given up stays in the row and holds -1 in that group's column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onekv.core import loops
from onekv.core.batch import Ubatch
from onekv.core.window import Window
from onekv.errors import BatchError, OneKVError

Int32 = NDArray[np.int32]
Slots = NDArray[np.int64]
Rule = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # old positions to new ones

_NO_ROWS = (np.empty(0, np.int32), np.empty(0, np.int64), np.zeros(1, np.int64))
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
        self.axes: Int32 | None = None  # [2, C] y and x of M-RoPE positions, once there are any
        self.has_shift = False  # True from a change of positions until the keys were rotated

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

    @property
    def state(self) -> tuple[Int32, Int32, NDArray[np.uint64], NDArray[np.uint8], NDArray[np.int64]]:
        """position, shift, owners, used and counts, as the compiled loops take them."""
        return self.position, self.shift, self.owners, self.used, self.counts

    def owners_of(self, cell: int) -> list[int]:
        """Sequences that own a cell, ascending."""
        return _bits(self.owners[cell])

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
    had_axes: bool
    tails: list[tuple[int, int, list[Int32]]] = field(default_factory=list)  # sequence, first entry, what its tables held from there
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
        self.row_axes: Int32 | None = None  # [2, S, E] y and x, once a position had them
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
        start = min(int(group.lost[seq, 0]) for group in self.groups)
        return int(self.row_positions[seq, start]) if start < self.row_lengths[seq] else -1

    def axes(self, seq: int) -> Int32:
        """All components (t, y, x) of a sequence's positions, [3, n]. A copy."""
        n = self.row_lengths[seq]
        t = self.row_positions[seq, :n]
        if self.row_axes is None:
            return np.stack([t, t, t])
        return np.stack([t, self.row_axes[0, seq, :n], self.row_axes[1, seq, :n]])

    def next_position(self, seq: int) -> int:
        """Position of the token after the last: one above every component of every position."""
        return int(self.axes(seq).max(initial=-1)) + 1 if self.row_axes is not None else self.seq_pos_max(seq) + 1

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

    def last_continuable(self, seq: int, position: int) -> int:
        """Largest position up to the given one for which `can_continue_at` is true; 0 if there is none above.

        Cost: O(entries of a window) for each gap in the cells.
        """
        seqs, first, last = np.array([seq]), np.empty(1, np.int64), np.empty(1, np.int64)
        while position > 0 and not self.can_continue_at(seq, position):
            nearest = position
            for group in self.groups:
                loops.visible_ranges(*group.rule, True, self.row_positions, self.row_lengths, seqs, np.array([position]), first, last)
                entries = np.arange(first[0], last[0])
                lost = (group.column[seq, entries] < 0) | (entries < group.lost[seq, 0])
                if lost.any():
                    # Not before it stands before the whole gap does a query see none of it.
                    end = int(np.flatnonzero(lost)[-1])
                    held = np.flatnonzero(~lost[:end])
                    start = int(held[-1]) + 1 if held.size else 0
                    nearest = min(nearest, int(self.row_positions[seq, entries[start]]) - 1)
            position = nearest
        return max(position, 0)

    def count_owned(self, group: int, seqs: Sequence[int]) -> int:
        """Different cells that sequences own in a group. Cost: O(cells + entries)."""
        flags = np.zeros(self.groups[group].num_cells + 1, np.bool_)  # the last one stands for -1
        for s in seqs:
            flags[self.column(group, s)] = True
        return int(np.count_nonzero(flags[:-1]))

    def count_sole(self, group: int, seq: int, start: int = 0) -> int:
        """Cells of the entries from `start` on that no other sequence owns: what removing them would free. Cost: O(entries)."""
        cells = self.column(group, seq)[start:]
        words = self.groups[group].owners[cells[cells >= 0]].copy()
        words[:, seq >> 6] &= ~(np.uint64(1) << np.uint64(seq & 63))
        return int(np.count_nonzero(~words.any(axis=1)))

    def owns_same_cells(self, one: int, other: int) -> bool:
        """True iff two sequences have equal rows."""
        n = self.row_lengths[one]
        tables = (table for table, counts in zip(self._tables(), self._identity(), strict=True) if counts)
        return bool(n == self.row_lengths[other]) and all(np.array_equal(t[one, :n], t[other, :n]) for t in tables)

    def next_queries(self, ubatch: Ubatch | None = None) -> NDArray[np.int64]:
        """Smallest position at which each sequence can be queried next, the given rows included, [S]."""
        following = np.empty(self.max_seqs, np.int64)
        rows = _NO_ROWS if ubatch is None else (ubatch.queries, ubatch.ids, ubatch.offsets)
        loops.next_queries(self.row_positions, self.row_lengths, *rows, following)
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
            group.has_shift = False
        self.row_lengths[:] = 0
        self._forget_axes()
        self.epoch += 1

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove a sequence (-1: every sequence) from the positions [p0, p1). Negative p0: from the start; negative p1: to the end.

        Cells left without an owner become empty; a group's head moves back to the first of them.
        Cost: O(entries of the sequence).
        """
        for s in self.present() if seq == -1 else [self.check_seq(seq)]:
            self.cut(s, *self.span(s, p0, p1))

    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        self.check_seq(seq)
        for s in self.present():
            if s != seq:
                self.cut(s, 0, self.length(s))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` own the cells of `src` at positions [p0, p1) too. Copies entries, no K/V; what `dst` owns stays.

        Raises:
            BatchError: `dst` holds another cell at a copied position.
        Cost: O(entries of both sequences).
        """
        self.check_seq(src)
        self.check_seq(dst)
        start, stop = self.span(src, p0, p1)
        if src == dst or start >= stop:
            return
        entries = [table[src, start:stop].copy() for table in self._tables()]
        here, there = self.span(dst, int(entries[0][0]), int(entries[0][-1]) + 1)
        if here < there:
            fresh = self._unknown(dst, here, there, entries)
            entries = [column[fresh] for column in entries]
        self._insert(dst, entries)

    def _unknown(self, dst: int, start: int, stop: int, entries: list[Int32]) -> NDArray[np.bool_]:
        """Which entries are not among those of dst[start:stop]; an entry there with other cells at one of the positions is an error."""
        told = self._identity()
        held = _as_records([table[dst, start:stop] for table, counts in zip(self._tables(), told, strict=True) if counts])
        given = _as_records([column for column, counts in zip(entries, told, strict=True) if counts])
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

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions [p0, p1) of a sequence: to their cells, so to every owner of these. Entries pushed below 0 leave
        all their owners. Keys are rotated later, by what `shift` has gathered. A group's head goes to the first freed cell, else to 0.

        Raises:
            BatchError: a position would exceed the largest.
        Cost: O(entries of the sequences that own a moved cell).
        """
        self.check_seq(seq)
        if delta == 0 or is_empty_span(p0, p1):
            return
        freed = self._reposition(seq, *self.span(seq, p0, p1), lambda positions: positions + delta)
        for group, first in zip(self.groups, freed, strict=True):
            group.head = max(first, 0)
        self.epoch += 1

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide the positions [p0, p1) of a sequence by `divisor`, rounding down; as `seq_add` otherwise, and heads stay.

        Raises:
            BatchError: a divisor below 1.
        """
        self.check_seq(seq)
        if divisor < 1:
            raise BatchError(f"positions can be divided by 1 or more, got {divisor}", seq=seq, given=divisor)
        if divisor == 1 or is_empty_span(p0, p1):
            return
        self._reposition(seq, *self.span(seq, p0, p1), lambda positions: positions // divisor)

    def _reposition(self, seq: int, start: int, stop: int, rule: Rule) -> list[int]:
        """Give the entries [start, stop) of a row new positions, with their cells and every other owner of these.

        Returns the first freed cell of each group, -1 where there is none.
        """
        freed = [-1] * len(self.groups)
        if start >= stop:
            return freed
        self.ruled(seq, start, stop, rule)
        moving: dict[int, NDArray[np.bool_]] = {seq: np.zeros(self.length(seq), np.bool_)}
        moving[seq][start:stop] = True
        for g, group in enumerate(self.groups):
            cells = self.column(g, seq)[start:stop]
            cells = cells[cells >= 0]
            others = _bits(np.bitwise_or.reduce(group.owners[cells], axis=0)) if cells.size else []
            if others not in ([], [seq]):
                flags = np.zeros(group.num_cells + 1, np.bool_)  # the last one stands for -1
                flags[cells] = True
                for s in others:
                    hit = flags[self.column(g, s)]
                    moving[s] = moving[s] | hit if s in moving else hit
            old = group.position[cells].astype(np.int64)
            new = rule(old)
            group.position[cells] = new
            group.shift[cells] += (new - old).astype(np.int32)
            group.has_shift |= cells.size > 0
            gone = cells[new < 0]
            if gone.size:
                group.owners[gone] = 0
                group.position[gone] = 0  # so that sweep takes them for used
                freed[g] = int(loops.sweep(gone, *group.state))
        for s, mask in moving.items():
            self._move_entries(s, mask, rule)
        return freed

    def ruled(self, seq: int, start: int, stop: int, rule: Rule) -> NDArray[np.int64]:
        """The positions that `rule` gives the entries [start, stop) of a row; negative ones are to be dropped.

        Raises:
            BatchError: one exceeds the largest.
        """
        positions = rule(self.row_positions[seq, start:stop].astype(np.int64))
        if positions.max(initial=-1) > loops.FARTHEST:
            raise BatchError(f"position {positions.max()} would exceed the largest, {loops.FARTHEST}", seq=seq, given=int(positions.max()))
        return positions

    def _move_entries(self, seq: int, mask: NDArray[np.bool_], rule: Rule) -> None:
        """Apply `rule` to some positions of a row, drop what falls below 0, and restore the order."""
        positions = self.positions(seq).astype(np.int64)
        positions[mask] = rule(positions[mask])
        if positions[0] >= 0 and (positions[1:] >= positions[:-1]).all():
            self.row_positions[seq, : positions.size] = positions
            self._rows_changed(seq)
            return
        kept = np.flatnonzero(positions >= 0)
        order = kept[np.argsort(positions[kept], kind="stable")]
        for table in self._tables():
            table[seq, : order.size] = table[seq, order]
        self.row_positions[seq, : order.size] = positions[order]
        self.row_lengths[seq] = order.size
        self._rows_changed(seq)

    def shared_entries(self, group: int, seq: int, start: int, stop: int) -> NDArray[np.int64]:
        """Entries of a row in [start, stop) whose cell in this group has other owners too."""
        found: NDArray[np.int64] = loops.shared(self.column(group, seq)[start:stop], seq, self.groups[group].owners)
        return start + found

    def detach(self, group: int, seq: int, entries: NDArray[np.int64], copies: Slots) -> None:
        """Put copies in the place of a sequence's shared cells; the copied cells lose it as owner. The caller copies keys and values.

        A copied cell without another owner becomes empty: taking expired cells for the copies may have cost it the others.
        """
        g = self.groups[group]
        cells = g.column[seq, entries]
        g.position[copies], g.shift[copies] = g.position[cells], g.shift[cells]
        g.used[copies] = 1
        g.counts[loops.USED] += copies.size
        loops.claim(copies, seq, g.owners)
        loops.disown(cells, seq, g.owners)
        self._note_freed(g, loops.sweep(cells, *g.state))
        g.column[seq, entries] = copies
        self.epoch += 1

    def reclaim(self, group: int, slots: Slots) -> None:
        """Empty the expired cells among `slots`, as a commit of new rows there would."""
        g = self.groups[group]
        loops.reclaim(slots, *g.state, self.row_positions, self.row_lengths, g.column, g.lost)
        self.epoch += 1

    def reset_shift(self, group: int) -> None:
        """Forget pending shifts: the keys have been rotated."""
        self.groups[group].shift[:] = 0
        self.groups[group].has_shift = False

    def reorder(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        """One simultaneous permutation: seqs[i] becomes what sources[i] was. Copies rows, no keys or values.

        Raises:
            BatchError: lengths differ, an id is out of range, or a destination is named twice.
        """
        if len(seqs) != len(sources) or len(set(seqs)) != len(seqs):
            raise BatchError(f"reorder needs as many sources as sequences, and no sequence twice; got {list(seqs)} and {list(sources)}")
        for s in (*seqs, *sources):
            self.check_seq(s)
        rows = [[table[source, : self.row_lengths[source]].copy() for table in self._tables()] for source in sources]
        before = [[self.column(g, s).copy() for s in seqs] for g in range(len(self.groups))]
        for group, columns in zip(self.groups, before, strict=True):
            for s, cells in zip(seqs, columns, strict=True):
                loops.disown(cells, s, group.owners)
        for s, entries in zip(seqs, rows, strict=True):
            self.row_lengths[s] = 0
            self._rows_changed(s)
            self._insert(s, entries)
        for group, columns in zip(self.groups, before, strict=True):
            for cells in columns:
                self._note_freed(group, loops.sweep(cells, *group.state))

    def packing_moves(self, group: int) -> tuple[Slots, Slots]:
        """Sources and destinations that bring all used cells of a group to its front: cells behind the first num_used go into the holes."""
        used = self.groups[group].position >= 0
        count = self.groups[group].num_used
        return count + np.flatnonzero(used[count:]), np.flatnonzero(~used[:count])

    def move(self, group: int, sources: Slots, destinations: Slots) -> None:
        """Move used cells to empty ones, in the rows of all owners too. The caller moves keys and values. The head goes to 0."""
        g = self.groups[group]
        for table in (g.position, g.shift, g.owners, g.used):
            table[destinations] = table[sources]
        g.position[sources], g.shift[sources], g.owners[sources], g.used[sources] = -1, 0, 0, 0
        if g.axes is not None:
            g.axes[:, destinations] = g.axes[:, sources]
        target = np.arange(-1, g.num_cells, dtype=np.int32)  # one place ahead, so that -1 stays -1
        target[sources + 1] = destinations
        for s in self.present():
            g.column[s, : self.row_lengths[s]] = target[self.column(group, s) + 1]
        g.head = 0
        self.epoch += 1

    def restore(self, seq: int, positions: Int32, tokens: Int32, columns: Sequence[Int32], axes: Int32 | None = None) -> None:
        """Make a row of entries whose cells (one column per group, -1 lost) are empty, or hold the same position for another sequence.

        Args:
            positions: ascending, [n]
            axes:      y and x of the positions, [2, n]; None: both equal the position
        """
        if axes is not None:
            self._use_axes()
        for group, column in zip(self.groups, columns, strict=True):
            held = column >= 0
            cells = column[held]
            fresh = np.count_nonzero(group.position[cells] < 0)
            group.position[cells] = positions[held]
            group.used[cells] = 1
            group.counts[loops.USED] += fresh
            if group.axes is not None:
                group.axes[:, cells] = positions[held] if axes is None else axes[:, held]
            if cells.size:
                group.head = int(cells[-1]) + 1
        entries = [positions, tokens, *columns]
        if self.row_axes is not None:
            entries += [positions, positions] if axes is None else [axes[0], axes[1]]
        self._insert(seq, entries)

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
        self._reserve(int((self.row_lengths + np.bincount(ubatch.ids, minlength=self.max_seqs)).max()))
        done = Committed(slots, [group.head for group in self.groups], self.row_lengths.copy(), self.row_axes is not None)
        if ubatch.positions.ndim == 2:
            self._use_axes()
        rows = (ubatch.queries, ubatch.ids, ubatch.offsets)
        self.epoch += 1
        try:
            for group, chosen in zip(self.groups, slots, strict=True):
                held = (self.row_positions, self.row_lengths, group.column, group.lost)
                loops.commit_group(chosen, *rows, *group.state, *held, done.progress)
            if self.row_axes is not None:
                self._commit_axes(ubatch, slots, done)
            tokens = ubatch.tokens if ubatch.tokens is not None else np.empty(0, np.int64)
            loops.append_rows(ubatch.queries, tokens, *rows[1:], self.row_positions, self.row_tokens, self.row_lengths)
            for seq, start, _ in done.tails:
                self._sort(seq, start)
        except BaseException:
            self.undo(done)
            raise
        return done

    def _commit_axes(self, ubatch: Ubatch, slots: Sequence[Slots], done: Committed) -> None:
        """Write y and x of the new cells and entries. Entries of one t are ordered by (y, x), so old ones may have to make room: what the
        rows hold from there on is kept for `undo`."""
        axes = ubatch.positions[1:3] if ubatch.positions.ndim == 2 else np.stack([ubatch.queries] * 2)
        for group, chosen in zip(self.groups, slots, strict=True):
            if group.axes is not None:
                group.axes[:, chosen] = axes
        members = np.repeat(np.arange(len(ubatch)), np.diff(ubatch.offsets))
        for seq in np.unique(ubatch.ids).tolist():
            rows = members[ubatch.ids == seq]
            length = self.length(seq)
            if self.row_axes is not None:
                self.row_axes[:, seq, length : length + rows.size] = axes[:, rows]
            start = int(np.searchsorted(self.positions(seq), ubatch.queries[rows].min()))
            done.tails.append((seq, start, [table[seq, start:length].copy() for table in self._tables()]))

    def _sort(self, seq: int, start: int) -> None:
        """Bring the entries of a row from `start` on into the order of their positions (t, y, x); equal ones keep theirs."""
        stop = self.length(seq)
        keys = self.axes(seq)[:, start:] if self.row_axes is not None else self.positions(seq)[None, start:]
        order = start + np.lexsort(keys[::-1])
        if not np.array_equal(order, np.arange(start, stop)):
            for table in self._tables():
                table[seq, start:stop] = table[seq, order]

    def undo(self, done: Committed) -> None:
        """Take back the latest `commit`: its rows leave all their sequences. Cells it took from a window's past stay lost."""
        self.row_lengths[:] = done.lengths
        for seq, start, held in done.tails:
            for table, column in zip(self._tables(), held, strict=True):
                table[seq, start : start + column.size] = column
        while done.progress[0]:
            g = int(done.progress[0]) - 1
            group = self.groups[g]
            loops.uncommit_group(done.slots[g], group.position, group.owners, group.used, group.counts, done.heads[g], done.progress)
        if not done.had_axes:
            self._forget_axes()
        self.epoch += 1

    def clone(self) -> Cells:
        """An independent copy, to try a plan on. Cost: O(cells + entries)."""
        twin = Cells.__new__(Cells)
        twin.max_seqs, twin.epoch = self.max_seqs, self.epoch
        twin.row_lengths = self.row_lengths.copy()
        twin.row_positions, twin.row_tokens = self._copy_rows(self.row_positions), self._copy_rows(self.row_tokens)
        twin.row_axes = None if self.row_axes is None else np.stack([self._copy_rows(axis) for axis in self.row_axes])
        twin.groups = tuple(Group.__new__(Group) for _ in self.groups)
        for theirs, mine in zip(twin.groups, self.groups, strict=True):
            theirs.window, theirs.num_cells, theirs.has_shift = mine.window, mine.num_cells, mine.has_shift
            theirs.axes = None if mine.axes is None else mine.axes.copy()
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
        if self.row_axes is not None:
            yield from self.row_axes

    def _identity(self) -> list[bool]:
        """Which tables tell whether two entries are the same one. A window may have lost it for one owner and not for another, so the
        cells of windowed groups count only where there is no full group."""
        full = [group.window.is_full for group in self.groups]
        columns = full if any(full) else [True] * len(full)
        return [True, True, *columns, *([] if self.row_axes is None else [True, True])]

    def _use_axes(self) -> None:
        """Keep y and x of every position from now on; those there are have none of their own, so both equal t."""
        if self.row_axes is None:
            self.row_axes = np.stack([self.row_positions, self.row_positions])
            for group in self.groups:
                group.axes = np.stack([group.position, group.position])

    def _forget_axes(self) -> None:
        self.row_axes = None
        for group in self.groups:
            group.axes = None

    def span(self, seq: int, p0: int, p1: int) -> tuple[int, int]:
        """Entries of a row with a position in [p0, p1); negative bounds are open."""
        positions = self.positions(seq)
        start = 0 if p0 < 0 else int(np.searchsorted(positions, p0))
        stop = positions.size if p1 < 0 else int(np.searchsorted(positions, p1))
        return start, max(start, stop)

    def cut(self, seq: int, start: int, stop: int) -> None:
        """Remove entries [start, stop) from a row."""
        if start >= stop:
            return
        for group in self.groups:
            cells = group.column[seq, start:stop]
            loops.disown(cells, seq, group.owners)
            self._note_freed(group, loops.sweep(cells, *group.state))
        length = self.length(seq)
        for table in self._tables():
            table[seq, start : length - (stop - start)] = table[seq, stop:length]
        self.row_lengths[seq] -= stop - start
        self._rows_changed(seq)

    @staticmethod
    def _note_freed(group: Group, first: int) -> None:
        """The head moves back to a freed cell before it."""
        if 0 <= first < group.head:
            group.head = int(first)

    def _insert(self, seq: int, entries: list[Int32]) -> None:
        """Merge entries (one array per table, ascending positions) into a row; after equal positions. The cells gain the owner."""
        count, length = entries[0].size, self.length(seq)
        if not count:
            return
        self._reserve(length + count)
        for group, cells in zip(self.groups, entries[2:], strict=False):
            loops.claim(cells, seq, group.owners)
        for table, column in zip(self._tables(), entries, strict=True):
            table[seq, length : length + count] = column
        self.row_lengths[seq] += count
        if length and entries[0][0] <= self.row_positions[seq, length - 1]:
            self._sort(seq, 0)
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
        if self.row_axes is not None:
            self.row_axes = np.stack([self._copy_rows(axis, capacity) for axis in self.row_axes])
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
            if self.positions(s)[0] < 0 or not np.array_equal(np.lexsort(self.axes(s)[::-1]), np.arange(self.length(s))):
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
            if group.axes is not None and not np.array_equal(group.axes[:, cells], self.axes(s)[1:, held]):
                yield f"group {g}, sequence {s}: y or x of row and cells differ"
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
        if not group.has_shift and group.shift.any():
            yield f"group {g}: a pending shift that nobody announced"
        if (group.shift[empty] != 0).any() or (group.owners[empty] != 0).any():
            yield f"group {g}: an empty cell with an owner or a shift"
        if (group.owners[~empty] == 0).all(axis=1).any():
            yield f"group {g}: a used cell without an owner"
        if not 0 <= group.head <= group.num_cells:
            yield f"group {g}: head {group.head} is outside the buffer"


def is_empty_span(p0: int, p1: int) -> bool:
    """True iff two bounds, open when negative, name the same position."""
    return p1 >= 0 and max(p0, 0) == p1


def _bits(words: NDArray[np.uint64]) -> list[int]:
    """Indices of the set bits, ascending."""
    return [int(s) for s in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


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
