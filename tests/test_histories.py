"""Random histories of everything a cache can do, against plain lists.

After every operation: the rows, the sharing and what is lost are those of the dict model, `check` holds, and every cell holds the key and
value of its token at its position. So no operation on one sequence ever changes another. Every output is compared with attention over the
model's own list.
"""

import copy
import io
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from onekv import BatchError, CacheFull, KVCache, LayerSpec, Rope, Sequence as Handle, ShiftError, Window, WindowLost
from oracle import Clash, Entry, Oracle, sees
from tiny import Row, batch_of, state_of, turned

NUM_SEQS, NUM_TOKENS, HEADS, WIDTH = 4, 50, 2, 6
RNG = torch.Generator().manual_seed(11)
Q, K, V = (torch.randn(NUM_TOKENS, heads, WIDTH, generator=RNG) for heads in (HEADS, 1, 1))
ROPES = (Rope((1.0, 0.2)), Rope((0.5,), layout="interleaved", offset=1), None)


class Model(Oracle):
    """The dict model, with shifts, reorder and files."""

    def shifted(self, seq: int, p0: int, p1: int, change: Callable[[int], int], moves_all: bool) -> None:
        """Give the entries of a sequence in [p0, p1) new positions: its own copies of them, or the entries themselves for every owner."""
        changes = {e.number: change(e.position) for e in self.row(seq) if max(p0, 0) <= e.position < (2**31 if p1 < 0 else p1)}
        fresh = {} if moves_all else {n: next(self._numbers) for n, p in changes.items() if self.is_shared(seq, n, p)}
        for s in self.rows if moves_all else [seq]:
            row = [Entry(changes.get(e.number, e.position), fresh.get(e.number, e.number), e.token) for e in self.row(s)]
            self.rows[s] = sorted((e for e in row if e.position >= 0), key=lambda e: e.position)
        self.hidden |= {(g, s, fresh[n]) for g, s, n in self.hidden if s == seq and n in fresh}
        self._drop_empty()

    def is_shared(self, seq: int, number: int, new: int | None = None) -> bool:
        """Whether another sequence has an entry too, whose position is about to change."""
        old = next(e.position for e in self.row(seq) if e.number == number)
        return old != new and any(e.number == number for s, row in self.rows.items() if s != seq for e in row)

    def reorder(self, seqs: list[int], sources: list[int]) -> None:
        rows = {s: list(self.row(source)) for s, source in zip(seqs, sources, strict=True)}
        marks = {(g, s, n) for s, source in zip(seqs, sources, strict=True) for g, owner, n in self.hidden if owner == source}
        self.hidden = {mark for mark in self.hidden if mark[1] not in seqs} | marks
        self.rows |= rows
        self._drop_empty()

    def load(self, saved: list[Entry], marks: set[tuple[int, int]], dst: int) -> None:
        """A saved row in place of a sequence; marks: (group, index) of what had been hidden when it was saved."""
        row = [Entry(e.position, next(self._numbers), e.token) for e in saved]
        self.hidden = {mark for mark in self.hidden if mark[1] != dst} | {(g, dst, row[i].number) for g, i in marks}
        self.rows[dst] = row
        self._drop_empty()

    def marks(self, seq: int) -> set[tuple[int, int]]:
        """What of a row a file of this sequence may lack: (group, index)."""
        row, following = self.row(seq), self.pos_max(seq) + 1
        return {
            (g, i)
            for g, window in enumerate(self.windows)
            for i, e in enumerate(row)
            if not sees(window, e.position, following) or (g, seq, e.number) in self.hidden
        }


spans = st.tuples(st.integers(-1, 12), st.integers(-1, 16))
seq_ids = st.integers(0, NUM_SEQS - 1)


class History(RuleBasedStateMachine):
    windows: ClassVar[tuple[Window, ...]] = (Window.full(),)
    num_cells: ClassVar[int] = 12
    settings_: ClassVar[dict[str, Any]] = {}

    @initialize()
    def start(self) -> None:
        self.cache = self.made()
        self.model = Model(tuple(group.window for group in self.cache.cells.groups))
        self.tokens = 0

    def made(self, **changed: Any) -> KVCache:
        specs = [LayerSpec(1, WIDTH, window=w, rope=rope) for w in self.windows for rope in ROPES]
        options: dict[str, Any] = {"num_cells": self.num_cells, "max_seqs": NUM_SEQS, **self.settings_, **changed}
        return KVCache(specs, **options)

    # --- what must hold after every operation -----------------------------------------------------------------------------------------

    @invariant()
    def rows_and_sharing_are_the_models(self) -> None:
        if hasattr(self, "cache"):
            self.model.compare(self.cache.cells)
            self.compare_content(self.cache)

    def compare_content(self, cache: KVCache) -> None:
        """Every cell holds its token's key as of its position less the pending shift, and its token's value."""
        for i in cache.store.physical:
            g = cache._layer_group[i]
            group = cache.cells.groups[g]
            tokens = np.zeros(group.num_cells, np.int64)
            for s in cache.cells.present():
                column = cache.cells.column(g, s)
                tokens[column[column >= 0]] = cache.cells.tokens(s)[column >= 0]
            used = np.flatnonzero(group.position >= 0)
            stored = (group.position - group.shift)[used].tolist()
            expected = turned(K[tokens[used]], stored, cache.layers[i].rope)
            torch.testing.assert_close(cache.store.keys(i)[used].double(), expected, atol=1e-4, rtol=0)
            assert torch.equal(cache.store.values(i)[used], V[tokens[used]])

    @invariant()
    def what_can_go_on_is_what_lost_nothing_visible(self) -> None:
        if hasattr(self, "cache"):
            for s in self.model.rows:
                for query in {0, self.model.pos_max(s), self.model.pos_max(s) + 1}:
                    assert self.cache.can_continue_at(s, query) == (not self.lacks(s, query))
                    possible = [p for p in range(1, query + 1) if not self.lacks(s, p)]
                    assert self.cache.last_continuable(s, query) == max(possible, default=0)

    @invariant()
    def cells_are_counted_by_their_owners(self) -> None:
        if hasattr(self, "cache"):
            cells, present = self.cache.cells, self.cache.cells.present()
            for g, group in enumerate(cells.groups):
                assert cells.count_owned(g, present) == group.num_used
                for s in present:
                    half = cells.length(s) // 2
                    held = [c for c in cells.column(g, s)[half:].tolist() if c >= 0]
                    assert cells.count_sole(g, s, half) == sum(group.owners_of(c) == [s] for c in held)

    def lacks(self, seq: int, query: int) -> bool:
        cells = self.cache.cells
        return any(
            cell < 0 and sees(group.window, position, query)
            for g, group in enumerate(cells.groups)
            for cell, position in zip(cells.column(g, seq).tolist(), cells.positions(seq).tolist(), strict=True)
        )

    def refused(self, error: type[Exception], call: Callable[[], Any]) -> Any:
        """A call that may be refused by one error, and then changes nothing. True iff it was."""
        before = self.settled()
        try:
            call()
        except error as raised:
            found = raised
        else:
            return False
        assert self.settled() == before
        assert not isinstance(found, CacheFull) or self.cache.config.placement == "contiguous" or found.free < found.needed
        return True

    def settled(self) -> str:
        """The bookkeeping without pending shifts: a refused plan or load may have applied them."""
        return re.sub(r"~-?\d+", "", repr(state_of(self.cache)))

    # --- evaluating -------------------------------------------------------------------------------------------------------------------

    def rows(self, lengths: list[int], couple: bool) -> list[Row]:
        """Rows that continue some sequences, taking turns; one row of two sequences in front if they own the same."""
        following = {s: self.model.pos_max(s) + 1 for s in range(NUM_SEQS)}
        rows = []
        pairs = [(a, b) for a in range(NUM_SEQS) for b in range(a) if self.model.row(a) == self.model.row(b)]
        if couple and pairs:
            rows.append(self.row(following[pairs[0][0]], pairs[0]))
            following |= dict.fromkeys(pairs[0], rows[0].position + 1)
        for turn in range(max(lengths)):
            for s, length in enumerate(lengths):
                if turn < length:
                    rows.append(self.row(following[s] + turn, (s,)))
        return rows

    def row(self, position: int, seqs: tuple[int, ...]) -> Row:
        self.tokens += 1
        return Row(self.tokens % NUM_TOKENS, position, seqs)

    @rule(
        lengths=st.lists(st.integers(0, 3), min_size=NUM_SEQS, max_size=NUM_SEQS).filter(any),
        couple=st.booleans(),
        max_ubatch=st.integers(1, 6),
        fail_at=st.integers(0, 12),
    )
    def feed(self, lengths: list[int], couple: bool, max_ubatch: int, fail_at: int) -> None:
        rows = self.rows(lengths, couple)
        firsts = {s: min(row.position for row in rows if s in row.seqs) for row in rows for s in row.seqs}
        if any(self.lacks(s, p) for s, p in firsts.items()):
            assert self.refused(WindowLost, lambda: self.cache.plan(batch_of(rows), max_ubatch=max_ubatch))
            return
        if self.refused(CacheFull, lambda: self.cache.plan(batch_of(rows), max_ubatch=max_ubatch)):
            return
        for n, step in enumerate(self.cache.plan(batch_of(rows), max_ubatch=max_ubatch)):
            placed = [rows[i] for i in step.ubatch.rows.tolist()]
            if n == fail_at - 9:
                self.model.hide(placed)
                with pytest.raises(ZeroDivisionError), step:
                    raise ZeroDivisionError
                return
            self.model.feed(placed)
            with step:
                outputs = [self.attend(step, i, placed) for i in range(len(self.cache.layers))]
            for i, out in enumerate(outputs):
                torch.testing.assert_close(out.double(), self.expected(i, placed), atol=1e-4, rtol=0)

    def attend(self, step: Any, layer: int, rows: list[Row]) -> torch.Tensor:
        tokens, positions, rope = [r.token for r in rows], [r.position for r in rows], self.cache.layers[layer].rope
        q, k = (turned(table[tokens], positions, rope).float() for table in (Q, K))
        out: torch.Tensor = step.attend(layer, q, k, V[tokens], scale=0.5)
        return out

    def expected(self, layer: int, rows: list[Row]) -> torch.Tensor:
        spec, outputs = self.cache.layers[layer], []
        for row in rows:
            seen = [e for e in self.model.row(row.seqs[0]) if sees(spec.window, e.position, row.position)]
            tokens, positions = [e.token for e in seen], [e.position for e in seen]
            q = turned(Q[[row.token]], [row.position], spec.rope)[0]
            k = turned(K[tokens], positions, spec.rope)[:, 0]
            outputs.append(torch.softmax(0.5 * q @ k.T, dim=1) @ V[tokens][:, 0].double())
        return torch.stack(outputs)

    # --- operations -------------------------------------------------------------------------------------------------------------------

    @rule(seq=st.integers(-1, NUM_SEQS - 1), span=spans)
    def seq_rm(self, seq: int, span: tuple[int, int]) -> None:
        self.cache.seq_rm(seq, *span)
        self.model.seq_rm(seq, *span)

    @rule(src=seq_ids, dst=seq_ids, span=spans)
    def seq_cp(self, src: int, dst: int, span: tuple[int, int]) -> None:
        before = copy.deepcopy(self.model)
        try:
            self.model.seq_cp(src, dst, *span)
        except Clash:
            assert self.refused(BatchError, lambda: self.cache.seq_cp(src, dst, *span))
            return
        if self.refused(BatchError, lambda: self.cache.seq_cp(src, dst, *span)):
            # The same entry, but a window has given up its cell for one of the two; without a full group nothing else names it.
            assert not any(group.window.is_full for group in self.cache.cells.groups)
            self.model = before

    @rule(src=seq_ids, dst=seq_ids)
    def fork(self, src: int, dst: int) -> None:
        if src != dst:
            for side in (self.cache, self.model):
                side.seq_rm(dst)
                side.seq_cp(src, dst)

    @rule(seq=seq_ids)
    @precondition(lambda self: self.tokens % 5 == 0)
    def seq_keep(self, seq: int) -> None:
        self.cache.seq_keep(seq)
        self.model.seq_keep(seq)

    def shift(self, seq: int, p0: int, p1: int, change: Callable[[int], int], call: Callable[[], Any]) -> None:
        mode = self.cache.config.shared_shift
        inside = [e for e in self.model.row(seq) if max(p0, 0) <= e.position < (2**31 if p1 < 0 else p1)]
        if mode == "error" and any(self.model.is_shared(seq, e.number, change(e.position)) for e in inside):
            assert self.refused(ShiftError, call)
        elif not self.refused(CacheFull, call):
            self.model.shifted(seq, p0, p1, change, mode == "move")

    @rule(seq=seq_ids, span=spans, delta=st.integers(-9, 9))
    def seq_add(self, seq: int, span: tuple[int, int], delta: int) -> None:
        self.shift(seq, *span, lambda p: p + delta, lambda: self.cache.seq_add(seq, *span, delta))

    @rule(seq=seq_ids, span=spans, d=st.integers(1, 4))
    def seq_div(self, seq: int, span: tuple[int, int], d: int) -> None:
        self.shift(seq, *span, lambda p: p // d, lambda: self.cache.seq_div(seq, *span, d))

    @rule(seq=seq_ids, p0=st.integers(0, 8), length=st.integers(1, 4))
    def remove(self, seq: int, p0: int, length: int) -> None:
        handle = Handle(self.cache, seq)
        row, stop = self.model.row(seq), p0 + length
        inside = [e for e in row if p0 <= e.position < stop]
        tail = [e for e in row if e.position >= stop]
        mode = self.cache.config.shared_shift

        if not inside:
            handle.remove(p0, stop)
            return
        kept = [Entry(e.position - length * (e in tail), e.number, e.token) for e in row if e not in inside]
        lost = self.lost_numbers(seq)
        following = max((e.position for e in kept), default=-1) + 1
        if any(e.number in lost[g] and sees(w, e.position, following) for g, w in enumerate(self.model.windows) for e in kept):
            assert self.refused(WindowLost, lambda: handle.remove(p0, stop))
        elif mode == "error" and any(self.model.is_shared(seq, e.number, -1) for e in tail):
            assert self.refused(ShiftError, lambda: handle.remove(p0, stop))
        elif not self.refused(CacheFull, lambda: handle.remove(p0, stop)):
            self.model.seq_rm(seq, p0, stop)
            self.model.shifted(seq, stop, -1, lambda p: p - length, mode == "move")

    def lost_numbers(self, seq: int) -> list[set[int]]:
        """Per group the entries of a sequence without a cell."""
        columns = [self.cache.cells.column(g, seq).tolist() for g in range(len(self.model.windows))]
        return [{e.number for e, cell in zip(self.model.row(seq), column, strict=True) if cell < 0} for column in columns]

    @rule(seqs=st.permutations(range(NUM_SEQS)), sources=st.lists(seq_ids, min_size=1, max_size=NUM_SEQS))
    def reorder(self, seqs: list[int], sources: list[int]) -> None:
        seqs = seqs[: len(sources)]
        self.cache.reorder(seqs, sources)
        self.model.reorder(seqs, sources)

    @rule()
    def compact(self) -> None:
        self.cache.compact()
        for group in self.cache.cells.groups:
            assert (group.position >= 0).tolist() == [i < group.num_used for i in range(group.num_cells)]
        assert self.cache.compact() == 0

    @rule()
    def update(self) -> None:
        self.cache.update()
        assert not self.cache.needs_update

    # --- files --------------------------------------------------------------------------------------------------------------------------

    @rule(src=seq_ids, dst=seq_ids, drop=st.booleans())
    def save_and_load_one(self, src: int, dst: int, drop: bool) -> None:
        file = io.BytesIO()
        saved, marks = list(self.model.row(src)), self.model.marks(src)
        could_go_on = self.cache.can_continue_at(src, self.model.pos_max(src) + 1)
        assert self.cache.save(file, src) == len(saved)
        if drop:
            self.cache.seq_rm(src)
            self.model.seq_rm(src)
        file.seek(0)
        if not self.refused(CacheFull, lambda: self.cache.load(file, dst)):
            # Taking expired cells of others hides nothing that was not hidden before.
            self.model.hide([])
            self.model.load(saved, marks, dst)
            assert self.cache.can_continue_at(dst, self.model.pos_max(dst) + 1) == could_go_on

    @rule(layout=st.sampled_from(["rows", "transposed"]), placement=st.sampled_from(["scattered", "contiguous"]), extra=st.integers(0, 9))
    def save_and_load_all(self, layout: Any, placement: Any, extra: int) -> None:
        file = io.BytesIO()
        self.cache.save(file)
        file.seek(0)
        other = self.made(num_cells=self.num_cells + extra, v_layout=layout, placement=placement) if extra else self.cache
        if any(mine.num_used > its.num_cells for mine, its in zip(self.cache.cells.groups, other.cells.groups, strict=True)):
            with pytest.raises(CacheFull, match="the file holds"):
                other.load(file)
            return
        self.cache = other
        self.cache.load(file)


FULL, THREE = Window.full(), Window.sliding(3)
HISTORIES: dict[str, tuple[tuple[Window, ...], int, dict[str, Any]]] = {
    "copy, full": ((FULL,), 12, {}),
    "copy, full and sliding": ((FULL, THREE), 14, {"window_cells": 7}),
    "copy, sliding": ((THREE,), 8, {}),
    "copy, three groups, contiguous": ((FULL, Window.chunked(4), Window.symmetric(4)), 16, {"window_cells": 10, "placement": "contiguous"}),
    "move, full": ((FULL,), 12, {"shared_shift": "move"}),
    "move, full and sliding": ((FULL, THREE), 14, {"shared_shift": "move", "window_cells": 7, "v_layout": "transposed"}),
    "error, full and chunked": ((FULL, Window.chunked(3)), 14, {"shared_shift": "error", "window_cells": 8}),
}


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_random_histories_equal_plain_lists(name: str, examples: int) -> None:
    windows, num_cells, options = HISTORIES[name]
    machine = type("History", (History,), {"windows": windows, "num_cells": num_cells, "settings_": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30))
