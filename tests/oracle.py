"""The twin of `Cells`: every sequence a plain list of entries. No cells, no slots, no tables; deliberately naive.

An entry is a fed row. It has a number of its own, so two sequences share a cell iff they hold the same number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onekv.core.cells import Cells
from onekv.core.window import CHUNKED, SLIDING, SYMMETRIC, Window
from tiny import Row


class Entry(NamedTuple):
    position: int
    number: int
    token: int


class Clash(Exception):
    """The destination holds another entry at a copied position."""


def sees(window: Window, key: int, query: int, causal: bool = True) -> bool:
    """Spec 4.3 and 4.10, for one key and one query."""
    if causal and key > query:
        return False
    if window.kind == SLIDING:
        return query - key < window.size
    if window.kind == CHUNKED:
        return key >= query // window.size * window.size
    if window.kind == SYMMETRIC:
        return abs(query - key) <= window.size // 2
    return True


class Oracle:
    """What a cache with these windows must hold."""

    def __init__(self, windows: Sequence[Window] = (Window.full(),)) -> None:
        self.windows = windows
        self.rows: dict[int, list[Entry]] = {}
        # (group, sequence, entry) of what a window has hidden from the next query at some time: its cell may be gone.
        self.hidden: set[tuple[int, int, int]] = set()
        self._numbers = itertools.count()

    # --- what is there ------------------------------------------------------------------------------------------------------------

    def row(self, seq: int) -> list[Entry]:
        return self.rows.get(seq, [])

    def pos_max(self, seq: int) -> int:
        return max((e.position for e in self.row(seq)), default=-1)

    def num_used(self) -> int:
        return len({e.number for row in self.rows.values() for e in row})

    def visible(self, seq: int, query: int, window: Window, causal: bool = True) -> list[int]:
        """Token ids a query sees."""
        return [e.token for e in self.row(seq) if sees(window, e.position, query, causal)]

    def may_have_lost(self, seq: int, query: int) -> bool:
        """True iff an entry a query sees was hidden before, so that it may be gone."""
        return any(
            (g, seq, e.number) in self.hidden and sees(window, e.position, query)
            for g, window in enumerate(self.windows)
            for e in self.row(seq)
        )

    # --- changes --------------------------------------------------------------------------------------------------------------------

    def hide(self, rows: Iterable[Row]) -> None:
        """Mark what the windows hide from the next query of every sequence when these rows are placed."""
        rows = list(rows)
        for seq, entries in self.rows.items():
            following = min([self.pos_max(seq) + 1, *(row.position for row in rows if seq in row.seqs)])
            for g, window in enumerate(self.windows):
                self.hidden |= {(g, seq, e.number) for e in entries if not sees(window, e.position, following)}

    def feed(self, rows: Iterable[Row]) -> None:
        """Append the rows of one ubatch."""
        rows = list(rows)
        self.hide(rows)
        for row in rows:
            entry = Entry(row.position, next(self._numbers), row.token)
            for seq in dict.fromkeys(row.seqs):
                self.rows.setdefault(seq, []).append(entry)
        self._drop_empty()

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        first, end = max(p0, 0), 2**31 if p1 < 0 else p1
        for s in list(self.rows) if seq == -1 else [seq]:
            self.rows[s] = [e for e in self.row(s) if not first <= e.position < end]
        self._drop_empty()

    def seq_keep(self, seq: int) -> None:
        self.rows = {seq: self.row(seq)}
        self._drop_empty()

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        first, end = max(p0, 0), 2**31 if p1 < 0 else p1
        given = [e for e in self.row(src) if first <= e.position < end]
        if src == dst or not given:
            return
        positions, numbers = {e.position for e in given}, {e.number for e in given}
        if any(e.position in positions and e.number not in numbers for e in self.row(dst)):
            raise Clash
        held = {e.number for e in self.row(dst)}
        fresh = [e for e in given if e.number not in held]
        self.rows[dst] = sorted([*self.row(dst), *fresh], key=lambda e: e.position)
        self.hidden |= {(g, dst, e.number) for g in range(len(self.windows)) for e in fresh if (g, src, e.number) in self.hidden}
        self._drop_empty()

    def clear(self) -> None:
        self.rows = {}
        self._drop_empty()

    def _drop_empty(self) -> None:
        self.rows = {s: row for s, row in self.rows.items() if row}
        alive = {(s, e.number) for s, row in self.rows.items() for e in row}
        self.hidden = {mark for mark in self.hidden if mark[1:] in alive}

    # --- checks (spec 3.3) ------------------------------------------------------------------------------------------------------------

    def refusal(
        self, rows: Sequence[Row], max_seqs: int, *, vocab_size: int = 2**31, tokens: bool = True, multi: bool = False
    ) -> str | None:
        """Why a batch is refused: the number of the rule in spec 3.3, or None. `multi`: M-RoPE."""
        if any(not 0 <= row.token < vocab_size for row in rows) and tokens:
            return "V2"
        for row in rows:
            if not row.seqs:
                return "V5"
            if any(not 0 <= s < max_seqs for s in row.seqs):
                return "V4"
        if any(row.position < 0 for row in rows):
            return "V8"
        for s in sorted({s for row in rows for s in row.seqs}):
            mine = [row.position for row in rows if s in row.seqs]
            stored, first = self.pos_max(s), min(mine)
            if stored >= 0 and not (first == stored + 1 or (not tokens and first == stored) or (multi and first > stored)):
                return "V9"
            if not multi and max(mine) - first + 1 > len(set(mine)):
                return "V12"
        for row in rows:
            if any([e.number for e in self.row(s)] != [e.number for e in self.row(row.seqs[0])] for s in row.seqs):
                return "V14"
        current: dict[int, set[int]] = {}
        newest: dict[int, int] = {}
        for row in rows:
            for s in row.seqs:
                if not set(row.seqs) <= current.get(s, set(row.seqs)):
                    return "V15"
                if set(row.seqs) != current.get(s, set(row.seqs)) and newest[s] >= row.position:
                    return "V15b"
            for s in row.seqs:
                current[s], newest[s] = set(row.seqs), row.position
        newest = {}
        for row in rows:
            for s in dict.fromkeys(row.seqs):
                if newest.get(s, -1) > row.position:
                    return "V16"
                if newest.get(s, -1) == row.position and tokens and not multi:
                    return "V17"
                newest[s] = row.position
        return None

    def positions(self, rows: Sequence[Row]) -> list[int]:
        """Positions of rows that have none (spec 3.4)."""
        following: dict[int, int] = {}
        made = []
        for row in rows:
            made.append(following.get(row.seqs[0], self.pos_max(row.seqs[0]) + 1))
            following |= dict.fromkeys(row.seqs, made[-1] + 1)
        return made

    # --- comparison -------------------------------------------------------------------------------------------------------------------

    def compare(self, cells: Cells) -> None:
        """Assert that cells hold what they must: the same rows, the same sharing, and everything no window ever hid."""
        cells.check()
        assert cells.present() == sorted(self.rows)
        for seq, row in self.rows.items():
            assert cells.positions(seq).tolist() == [e.position for e in row]
            assert cells.tokens(seq).tolist() == [e.token for e in row]
            assert cells.seq_pos_max(seq) == self.pos_max(seq)
        for g, group in enumerate(cells.groups):
            cell_of: dict[int, int] = {}
            for seq, row in self.rows.items():
                for entry, cell in zip(row, cells.column(g, seq).tolist(), strict=True):
                    if cell < 0:
                        assert (g, seq, entry.number) in self.hidden, f"group {g}: sequence {seq} lost position {entry.position}"
                    else:
                        assert cell_of.setdefault(entry.number, cell) == cell
            assert len(set(cell_of.values())) == len(cell_of) == group.num_used
