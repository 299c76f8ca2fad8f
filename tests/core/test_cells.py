"""Cells and rows: the scenarios of spec 9.2, what `check` finds, and Cells against the dict oracle."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from onekv import BatchError, KVCache, OneKVError, Window
from onekv.core import loops
from onekv.core.cells import Cells
from oracle import Clash, Oracle
from tiny import Row, cells_text, feed, head_of, load_cells, rows_of, state_of, toy, toy_cells, ubatch_of

# --- scenarios (spec 9.2) -------------------------------------------------------------------------------------------------------------

START = "0{0} 1{0,1} 2{0,1} 3{0,1} 4{0} . . ."

OPERATIONS: dict[str, tuple[list[tuple[Any, ...]], str, int]] = {
    "S20": ([("seq_rm", 0, 1, 3)], "0{0} 1{1} 2{1} 3{0,1} 4{0} . . .", 5),
    "S21": ([("seq_rm", 0, -1, -1)], ". 1{1} 2{1} 3{1} . . . .", 0),
    "S22": ([("seq_rm", 0, 3, -5)], "0{0} 1{0,1} 2{0,1} 3{1} . . . .", 4),
    "S23": ([("seq_rm", 0, -7, 2)], ". 1{1} 2{0,1} 3{0,1} 4{0} . . .", 0),
    "S24": ([("seq_rm", 0, 3, 3), ("seq_rm", 0, 4, 2), ("seq_rm", 0, 0, 0), ("seq_rm", 7, -1, -1)], START, 5),
    "S25": ([("seq_rm", -1, 2, 4)], "0{0} 1{0,1} . . 4{0} . . .", 2),
    "S26": ([("seq_rm", -1, -1, -1)], ". . . . . . . .", 0),
    "S28": ([("seq_keep", 1)], ". 1{1} 2{1} 3{1} . . . .", 0),
    "S28-absent": ([("seq_keep", 5)], ". . . . . . . .", 0),
    "S29": ([("seq_cp", 0, 2, 1, 4)], "0{0} 1{0,1,2} 2{0,1,2} 3{0,1,2} 4{0} . . .", 5),
    "S29-again": ([("seq_cp", 0, 2, 1, 4)] * 2, "0{0} 1{0,1,2} 2{0,1,2} 3{0,1,2} 4{0} . . .", 5),
    "S30": ([("seq_cp", 1, 2, 2, -1)], "0{0} 1{0,1} 2{0,1,2} 3{0,1,2} 4{0} . . .", 5),
    "S30-itself": ([("seq_cp", 0, 0)], START, 5),
}


def apply(cache: KVCache | Cells, operations: list[tuple[Any, ...]]) -> None:
    for name, *arguments in operations:
        result = getattr(cache, name)(*arguments)
        if name == "seq_rm" and isinstance(cache, KVCache):
            assert result is True


@pytest.mark.parametrize("make", [toy, toy_cells], ids=["cache", "cells"])
@pytest.mark.parametrize(("operations", "cells", "head"), OPERATIONS.values(), ids=[f"spec_{name}" for name in OPERATIONS])
def test_sequence_operations_change_exactly_the_named_cells(
    make: Callable[[int], KVCache | Cells], operations: list[tuple[Any, ...]], cells: str, head: int
) -> None:
    cache = make(8)
    load_cells(cache, START, head=5)
    apply(cache, operations)
    assert cells_text(cache) == cells
    assert head_of(cache) == head
    cache.check()


def test_spec_S20_a_hole_in_the_middle_leaves_both_ends() -> None:
    cache = toy(8)
    load_cells(cache, START, head=5)
    cache.seq_rm(0, 1, 3)
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0), cache.num_used) == (0, 4, 5)


def test_spec_S25_removing_a_range_of_every_sequence_takes_shared_cells_from_all_owners() -> None:
    cache = toy(8)
    load_cells(cache, START, head=5)
    cache.seq_rm(-1, 2, 4)
    assert (cache.seq_pos_min(1), cache.seq_pos_max(1), cache.num_used) == (1, 1, 3)


def test_spec_S27_the_head_moves_back_but_never_forward() -> None:
    cache = toy(8)
    load_cells(cache, START, head=2)
    cache.seq_rm(0, 4, -1)
    assert cells_text(cache) == "0{0} 1{0,1} 2{0,1} 3{0,1} . . . ."
    assert head_of(cache) == 2


def test_spec_S29_a_partial_copy_starts_where_its_range_does() -> None:
    cache = toy(8)
    load_cells(cache, START, head=5)
    cache.seq_cp(0, 2, 1, 4)
    assert (cache.seq_pos_min(2), cache.seq_pos_max(2)) == (1, 3)


@pytest.mark.parametrize(
    "call",
    [("seq_rm", 64), ("seq_rm", -2), ("seq_cp", 64, 0), ("seq_cp", 0, 64), ("seq_cp", -1, 0), ("seq_keep", 64), ("seq_keep", -1)],
    ids=lambda call: f"{call[0]}{call[1:]}",
)
@pytest.mark.parametrize("make", [toy, toy_cells], ids=["cache", "cells"])
def test_spec_S41_ids_out_of_range_are_refused_and_nothing_changes(make: Callable[[int], KVCache | Cells], call: tuple[Any, ...]) -> None:
    cache = make(8)
    load_cells(cache, START, head=5)
    before = state_of(cache)
    with pytest.raises(ValueError, match=r"is not in \[0, 16\)"):
        apply(cache, [call])
    assert state_of(cache) == before


def test_spec_S43_a_fork_diverges_and_outlives_its_origin() -> None:
    cache = toy(8)
    feed(cache, "0:0..2")
    cache.seq_cp(0, 1)
    fed = feed(cache, "(3,{0}) (3,{1})")
    assert fed.slots == [[3, 4]]
    assert fed.masks == [["xxxx-", "xxx-x"]]
    cache.seq_rm(0)
    assert head_of(cache) == 3
    fed = feed(cache, "1:4")
    assert (fed.slots, fed.masks) == ([[3]], [["xxxxx"]])
    assert cells_text(cache) == "0{1} 1{1} 2{1} 4{1} 3{1} . . ."


def test_spec_S44_a_partial_fork_sees_only_what_it_copied() -> None:
    cache = toy(8)
    feed(cache, "0:0..3")
    cache.seq_cp(0, 1, 0, 2)
    fed = feed(cache, "1:2")
    assert (fed.slots, fed.masks) == ([[4]], [["xx--x"]])
    with pytest.raises(BatchError, match="up to 2, so the next is 3; got 4") as refused:
        feed(cache, "1:4")
    assert (refused.value.row, refused.value.seq, refused.value.stored, refused.value.given) == (0, 1, 2, 4)


def test_spec_S45_the_head_follows_the_first_freed_cell() -> None:
    cache = toy(4)
    feed(cache, "(0,{0,1}) (1,{0,1})")
    cache.seq_rm(0, 1, -1)
    assert (cells_text(cache), head_of(cache)) == ("0{0,1} 1{1} . .", 2)
    cache.seq_rm(1, 1, -1)
    assert (cells_text(cache), head_of(cache)) == ("0{0,1} . . .", 1)


def test_spec_S46_repeated_positions_are_counted_one_by_one() -> None:
    """One of two equal positions is emptied by `cut`: no public operation tells them apart."""
    cells = toy_cells(4)
    load_cells(cells, "3{0} 3{0} 5{0} .")
    cells.seq_rm(0, 5, -1)
    assert (cells.seq_pos_min(0), cells.seq_pos_max(0)) == (3, 3)
    cells.cut(0, 0, 1)
    assert cells_text(cells) == ". 3{0} . ."
    assert (cells.seq_pos_min(0), cells.seq_pos_max(0)) == (3, 3)
    cells.seq_rm(0, 3, 4)
    assert (cells.seq_pos_min(0), cells.seq_pos_max(0)) == (-1, -1)
    cells.check()


# --- rows ---------------------------------------------------------------------------------------------------------------------------


def test_a_copy_into_a_sequence_that_holds_another_cell_there_is_refused_and_nothing_changes() -> None:
    cells = toy_cells(8)
    load_cells(cells, "0{0} 1{0} 2{0} 1{1} . . . .")
    before = state_of(cells)
    with pytest.raises(BatchError, match="another cell at position 1") as refused:
        cells.seq_cp(0, 1)
    assert (refused.value.seq, refused.value.stored) == (1, 1)
    assert state_of(cells) == before


def test_copies_fill_the_gaps_of_a_sequence_in_position_order() -> None:
    cells = toy_cells(8)
    load_cells(cells, "0{0} 1{0,1} 2{0} 3{0} 4{0,1} 5{0} . .")
    cells.seq_cp(0, 1, 1, 4)
    assert cells.positions(1).tolist() == [1, 2, 3, 4]
    assert cells.column(0, 1).tolist() == [1, 2, 3, 4]
    cells.seq_cp(0, 1)
    assert cells.positions(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert cells.owns_same_cells(0, 1)


def test_copies_keep_repeated_positions_apart() -> None:
    cells = toy_cells(8)
    load_cells(cells, "3{0} 3{0} 3{0,1} 4{0} . . . .")
    cells.seq_cp(0, 1)
    assert sorted(cells.column(0, 1).tolist()) == [0, 1, 2, 3]
    cells.check()


def test_a_copy_skips_shared_cells_although_a_window_took_them_from_one_owner_only() -> None:
    """The full group tells that they are the same entries."""
    cells = toy_cells(8, Window.full(), Window.sliding(2))
    load_cells(cells, "0{0,1} 1{0,1} 2{0} 3{0} 4{0} . . .")
    cells.commit(ubatch_of(rows_of("0:5")), [np.array([5]), np.array([2])])
    assert [cells_text(cells, g) for g in (0, 1)] == ["0{0,1} 1{0,1} 2{0} 3{0} 4{0} 5{0} . .", "0{1} 1{1} 5{0} 3{0} 4{0} . . ."]
    before = state_of(cells)
    cells.seq_cp(0, 1, 0, 2)
    cells.seq_cp(1, 0)
    assert state_of(cells) == before
    cells.seq_rm(0, 2, -1)
    assert cells.owns_same_cells(0, 1)
    assert [cells.can_continue_at(s, 2) for s in (0, 1)] == [False, True]


def test_the_smallest_position_is_one_that_still_has_a_cell_when_a_window_takes_what_lies_before_a_lost_span() -> None:
    cells = toy_cells(10, Window.sliding(3))
    load_cells(cells, "0{0} 1{0} 2{0} 3{0} 4{0} 5{0} 6{0} 7{0} 0{1} 1{1}")
    cells.commit(ubatch_of(rows_of("0:8..10")), [np.array([0, 1, 4])])
    assert cells.seq_pos_min(0) == 5
    cells.seq_cp(0, 1, 2, -1)
    assert cells.column(0, 1).tolist() == [8, 9, -1, -1, -1, 5, 6, 7, 0, 1, 4]
    cells.commit(ubatch_of(rows_of("1:11")), [np.array([9])])
    assert cells.seq_pos_min(1) == 5
    cells.check()


def test_rows_grow_past_their_first_capacity_and_keep_their_entries() -> None:
    cells = toy_cells(400)
    for start, stop in ((0, 63), (63, 65), (65, 300)):
        cells.commit(ubatch_of([Row(p + 7, p, (2,)) for p in range(start, stop)]), [np.arange(start, stop)])
    cells.seq_cp(2, 5)
    for seq in (2, 5):
        assert cells.positions(seq).tolist() == list(range(300))
        assert cells.tokens(seq).tolist() == list(range(7, 307))
        assert cells.column(0, seq).tolist() == list(range(300))
    cells.check()


def test_a_clone_is_independent() -> None:
    cells = toy_cells(8, Window.full(), Window.sliding(2))
    load_cells(cells, START, head=5)
    before = state_of(cells)
    twin = cells.clone()
    assert state_of(twin) == before
    twin.seq_rm(0)
    twin.commit(ubatch_of(rows_of("3:0..2")), [np.array([5, 6, 7])] * 2)
    assert state_of(cells) == before
    cells.clear()
    assert twin.positions(1).tolist() == [1, 2, 3]
    twin.check()


def test_every_change_and_nothing_else_moves_the_epoch() -> None:
    cells = toy_cells(8)
    load_cells(cells, START)
    epochs = [cells.epoch]
    done = cells.commit(ubatch_of(rows_of("3:0")), [np.array([5])])
    epochs.append(cells.epoch)
    cells.undo(done)
    epochs.append(cells.epoch)
    for name, *arguments in (("seq_cp", 0, 2), ("seq_rm", 2), ("seq_keep", 0), ("clear",)):
        getattr(cells, name)(*arguments)
        epochs.append(cells.epoch)
    assert (np.diff(epochs) > 0).all()
    for name, *arguments in (("seq_rm", 9), ("seq_cp", 9, 1), ("check",), ("draw",), ("snapshot",), ("clone",)):
        getattr(cells, name)(*arguments)
        assert cells.epoch == epochs[-1]


# --- commit and undo ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slots",
    [[5], [5, 6, 7], [5, 8], [-1, 5], [5, 5], [4, 5], [0, 5]],
    ids=["short", "long", "past the end", "negative", "repeated", "used", "shared"],
)
def test_a_slot_that_cannot_be_used_is_refused_before_anything_changes(slots: list[int]) -> None:
    """D-24."""
    cells = toy_cells(8)
    load_cells(cells, "0{0,1} 1{0,1} 2{0,1} 3{0,1} 4{0} . . .", head=5)
    before, epoch = state_of(cells), cells.epoch
    with pytest.raises(OneKVError, match="does not fit 2 rows"):
        cells.commit(ubatch_of(rows_of("2:0..1")), [np.array(slots)])
    assert (state_of(cells), cells.epoch) == (before, epoch)


def test_a_bad_slot_in_the_second_group_leaves_the_first_untouched() -> None:
    cells = toy_cells(4, Window.full(), Window.sliding(2))
    before = state_of(cells)
    with pytest.raises(OneKVError, match="group 1"):
        cells.commit(ubatch_of(rows_of("0:0")), [np.array([0]), np.array([4])])
    assert state_of(cells) == before


def test_undo_restores_rows_owners_and_head() -> None:
    cells = toy_cells(8)
    load_cells(cells, START, head=6)
    before = state_of(cells)
    done = cells.commit(ubatch_of(rows_of("(5,{0}) (4,{1}) (0,{2,3})")), [np.array([7, 5, 6])])
    assert cells_text(cells) == "0{0} 1{0,1} 2{0,1} 3{0,1} 4{0} 4{1} 0{2,3} 5{0}"
    assert head_of(cells) == 7
    cells.check()
    cells.undo(done)
    assert state_of(cells) == before
    cells.check()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_commit_that_is_interrupted_between_its_loops_takes_itself_back(
    monkeypatch: pytest.MonkeyPatch, at: int, error: type[BaseException]
) -> None:
    """at: before the first group, before the second, before the rows are appended."""
    cells = toy_cells(8, Window.full(), Window.sliding(3))
    load_cells(cells, START, head=5)
    before = state_of(cells)
    real, calls = {name: getattr(loops, name) for name in ("commit_group", "append_rows")}, []

    def interrupted(name: str) -> Callable[..., Any]:
        def loop(*arguments: Any) -> Any:
            calls.append(name)
            if len(calls) == at + 1:
                raise error
            return real[name](*arguments)

        return loop

    for name in real:
        monkeypatch.setattr(loops, name, interrupted(name))
    with pytest.raises(error):
        cells.commit(ubatch_of(rows_of("(5,{0}) (0,{2,3})")), [np.array([5, 6])] * 2)
    assert calls[-1] == ("append_rows" if at == 2 else "commit_group")
    assert state_of(cells) == before
    cells.check()


# --- check and draw ---------------------------------------------------------------------------------------------------------------------


def damage(cells: Cells, what: str) -> None:
    group = cells.groups[0]
    if what == "position":
        group.position[1] = 7
    elif what == "owner lost":
        group.owners[1] = 1
    elif what == "owner gained":
        group.owners[4, 0] |= np.uint64(4)
    elif what == "owner of an empty cell":
        group.owners[6, 0] = 1
    elif what == "shift of an empty cell":
        group.shift[6] = 1
    elif what == "used cell without owner":
        group.position[6], group.used[6] = 3, 1
        group.counts[loops.USED] += 1
    elif what == "map of used cells":
        group.used[2] = 0
    elif what == "padding of the map":
        group.used[-1] = 0
    elif what == "count of used cells":
        group.counts[loops.USED] += 1
    elif what == "head":
        group.head = 10
    elif what == "cell twice in a row":
        group.column[0, 1] = 0
    elif what == "cell past the end":
        group.column[0, 1] = 99
    elif what == "hole in a full group":
        group.column[0, 1] = -1
    elif what == "order":
        cells.row_positions[0, :2] = 1, 0
    elif what == "token":
        cells.row_tokens[0, 1] = -2
    elif what == "length":
        cells.row_lengths[1] -= 1
    else:
        assert what == "lost entries"
        cells.groups[1].lost[0] = 1, 1


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("position", "positions of row and cells differ"),
        ("owner lost", r"owners of cells \[1\] differ"),
        ("owner gained", r"owners of cells \[4\] differ"),
        ("owner of an empty cell", "empty cell with an owner"),
        ("shift of an empty cell", "an owner or a shift"),
        ("used cell without owner", "used cell without an owner"),
        ("map of used cells", "map of used cells is wrong"),
        ("padding of the map", "map of used cells is wrong"),
        ("count of used cells", "counts 6 used cells, there are 5"),
        ("head", "head 10 is outside"),
        ("cell twice in a row", "out of range or twice"),
        ("cell past the end", "out of range or twice"),
        ("hole in a full group", "an entry without a cell"),
        ("order", "not ascending"),
        ("token", "below -1"),
        ("length", "owners of cells"),
        ("lost entries", "lost entries"),
    ],
    ids=lambda value: value if " " not in value else None,
)
def test_check_finds_every_broken_invariant_and_draws_the_cells(what: str, message: str) -> None:
    cells = toy_cells(9, Window.full(), Window.sliding(4))
    load_cells(cells, START + " .", head=5)
    cells.check()
    damage(cells, what)
    with pytest.raises(OneKVError, match=message) as found:
        cells.check()
    assert "group 0 Window.full()" in str(found.value)


def test_draw_writes_cells_in_the_notation_of_the_specification() -> None:
    cells = toy_cells(6, Window.full(), Window.sliding(2))
    load_cells(cells, "1{0} . 2{0,1}~3 0{1}~-1 . .", head=2)
    line = "1{0} . 2{0,1}~3 0{1}~-1 . ."
    assert cells.draw() == (
        f"group 0 Window.full(): 3 of 6 cells used, head 2\n{line}\ngroup 1 Window.sliding(2): 3 of 6 cells used, head 2\n{line}"
    )


def test_draw_of_many_cells_takes_one_character_a_cell_and_leaves_out_empty_lines() -> None:
    cells = toy_cells(200, max_seqs=40)
    rows = rows_of("(0,{0}) (0,{1,2}) (0,{11}) (0,{39}) (1,{0})")
    cells.commit(ubatch_of(rows), [np.array([0, 1, 3, 63, 130])])
    assert cells.draw().splitlines() == [
        "group 0 Window.full(): 5 of 200 cells used, head 131",
        "       0 0#.b" + "." * 59 + "?",
        "     128 ..0" + "." * 61,
    ]


def test_a_snapshot_lists_used_cells_by_index() -> None:
    cells = toy_cells(8)
    load_cells(cells, ". 1{0} . 2{0,1}~3 0{1} . . .", head=2)
    assert cells.snapshot() == {"cells": [[1, 1, [0], 0], [3, 2, [0, 1], 3], [4, 0, [1], 0]], "head": 2, "used": 3}


def test_owners_beyond_one_word_are_kept_apart() -> None:
    cells = toy_cells(4, max_seqs=200)
    cells.commit(ubatch_of(rows_of("(0,{3,63,64,130,199}) (0,{131})")), [np.array([2, 0])])
    assert cells.groups[0].owners_of(2) == [3, 63, 64, 130, 199]
    for seq in (63, 130, 3, 199):
        cells.seq_rm(seq)
    assert cells_text(cells) == "0{131} . 0{64} ."
    assert cells.groups[0].owned_by(64).tolist() == [False, False, True, False]
    cells.check()


# --- Cells against the oracle -------------------------------------------------------------------------------------------------------------

SEQ = st.integers(0, 4)
BOUND = st.integers(-2, 12)
WINDOWS = st.sampled_from(
    [
        (Window.full(),),
        (Window.full(), Window.sliding(3)),
        (Window.sliding(2),),
        (Window.chunked(3),),
        (Window.full(), Window.symmetric(4), Window.chunked(2)),
    ]
)


class CellsMachine(RuleBasedStateMachine):
    """Random operations on Cells itself, slots chosen at random among the usable ones."""

    @initialize(windows=WINDOWS, num_cells=st.integers(6, 24))
    def start(self, windows: tuple[Window, ...], num_cells: int) -> None:
        self.cells = toy_cells(num_cells, *windows, max_seqs=5)
        self.oracle = Oracle(windows)
        self.latest: Any = None

    def usable(self, g: int, rows: list[Row]) -> list[int]:
        """Cells that are empty, or hidden from the next query of all their owners: spec 4.4 with D2, from the plain rule."""
        group, following = self.cells.groups[g], self.cells.next_queries(ubatch_of(rows))
        seen = group.window.visible
        return [
            c
            for c in range(group.num_cells)
            if group.position[c] < 0 or not any(seen(group.position[[c]], int(following[s])).any() for s in group.owners_of(c))
        ]

    @rule(data=st.data(), lengths=st.dictionaries(SEQ, st.integers(1, 4), min_size=1, max_size=3), shared=st.booleans())
    def commit(self, data: st.DataObject, lengths: dict[int, int], shared: bool) -> None:
        if shared and len(lengths) > 1:
            seqs = tuple(lengths)
            start = max(self.oracle.pos_max(s) for s in seqs) + 1
            rows = [Row(data.draw(st.integers(0, 99)), start + i, seqs) for i in range(min(lengths.values()))]
        else:
            rows = [
                Row(data.draw(st.integers(0, 99)), self.oracle.pos_max(s) + 1 + i, (s,))
                for i in range(max(lengths.values()))
                for s, n in lengths.items()
                if i < n
            ]
        usable = [self.usable(g, rows) for g in range(len(self.cells.groups))]
        if min(map(len, usable)) < len(rows):
            return
        slots = [np.array(data.draw(st.permutations(cells))[: len(rows)], np.int64) for cells in usable]
        before, heads = state_of(self.cells), [g.head for g in self.cells.groups]
        reuses = any((g.position[s] >= 0).any() for g, s in zip(self.cells.groups, slots, strict=True))
        done = self.cells.commit(ubatch_of(rows), slots)
        self.oracle.feed(rows)
        assert [g.head for g in self.cells.groups] == [int(s[-1]) + 1 for s in slots]
        self.latest = (done, rows, None if reuses else before, heads)

    @precondition(lambda self: self.latest is not None)
    @rule()
    def undo(self) -> None:
        done, rows, before, heads = self.latest
        self.cells.undo(done)
        for s in {s for row in rows for s in row.seqs}:
            count = sum(s in row.seqs for row in rows)
            self.oracle.rows[s] = self.oracle.rows[s][:-count]
        self.oracle._drop_empty()
        assert [g.head for g in self.cells.groups] == heads
        assert before is None or state_of(self.cells) == before
        self.latest = None

    @rule(seq=st.one_of(SEQ, st.just(-1)), p0=BOUND, p1=BOUND)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.cells.seq_rm(seq, p0, p1)
        self.oracle.seq_rm(seq, p0, p1)
        self.latest = None

    @rule(src=SEQ, dst=SEQ, p0=BOUND, p1=BOUND)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        before, rows = state_of(self.cells), dict(self.oracle.rows)
        try:
            self.oracle.seq_cp(src, dst, p0, p1)
        except Clash:
            with pytest.raises(BatchError, match="another cell"):
                self.cells.seq_cp(src, dst, p0, p1)
            assert state_of(self.cells) == before
        else:
            try:
                self.cells.seq_cp(src, dst, p0, p1)
            except BatchError:
                # Without a full group, an entry that a window took from one owner only cannot be told from another one.
                assert not self.oracle.windows[0].is_full
                assert any(mark[1] in (src, dst) for mark in self.oracle.hidden)
                self.oracle.rows = rows
                self.oracle._drop_empty()
                assert state_of(self.cells) == before
            self.latest = None

    @rule(seq=SEQ)
    def seq_keep(self, seq: int) -> None:
        self.cells.seq_keep(seq)
        self.oracle.seq_keep(seq)
        self.latest = None

    @rule()
    def clear(self) -> None:
        self.cells.clear()
        self.oracle.clear()
        self.latest = None

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "cells"):
            self.oracle.compare(self.cells)

    @invariant()
    def first_and_last_held_positions_are_those_of_the_cells(self) -> None:
        for s in range(5) if hasattr(self, "cells") else ():
            held = [g.position[g.owned_by(s)] for g in self.cells.groups]
            assert self.cells.seq_pos_min(s) == min((int(p.min()) for p in held if p.size), default=-1)

    @invariant()
    def continuity_is_that_of_the_plain_rule(self) -> None:
        for s in self.cells.present() if hasattr(self, "cells") else ():
            for query in (self.oracle.pos_max(s) + 1, self.oracle.pos_max(s) - 1):
                whole = all(
                    (self.cells.column(g, s)[group.window.visible(self.cells.positions(s), query)] >= 0).all()
                    for g, group in enumerate(self.cells.groups)
                )
                assert self.cells.can_continue_at(s, query) == whole


TestCells = CellsMachine.TestCase
TestCells.settings = settings(max_examples=80, stateful_step_count=30)


def test_the_oracle_tells_a_wrong_cache_from_a_right_one() -> None:
    cells, oracle = toy_cells(8), Oracle()
    for rows in ("0:0..2", "(3,{0}) (0,{1})"):
        cells.commit(ubatch_of(rows_of(rows)), [np.arange(8)[cells.groups[0].position < 0][: len(rows_of(rows))]])
        oracle.feed(rows_of(rows))
    oracle.compare(cells)
    wrong = cells.clone()
    wrong.seq_rm(0, 3, 4)
    with pytest.raises(AssertionError):
        oracle.compare(wrong)
    wrong = cells.clone()
    wrong.seq_cp(0, 2)
    with pytest.raises(AssertionError):
        oracle.compare(wrong)
