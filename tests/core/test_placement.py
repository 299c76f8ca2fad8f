"""Where rows go: the scenarios of spec 9.1, the search against plain Python, and that a plan changes nothing."""

from typing import Any, Literal

import numpy as np
import pytest

from onekv import CacheFull, OneKVError, Window
from onekv.core.batch import split
from onekv.core.cells import Cells, Group
from onekv.core.placement import find_slots, plan_slots
from oracle import sees
from tiny import Row, batch_of, cells_text, feed, head_of, load_cells, rows_of, state_of, toy, toy_cells, toy_kv, ubatch_of

Placement = Literal["scattered", "contiguous"]
PLACEMENTS: list[Placement] = ["scattered", "contiguous"]


def search(cells: Cells, count: int, placement: Placement = "scattered") -> list[int] | None:
    """Slots for rows of a sequence that is not there yet, in the first group."""
    found = find_slots(cells.groups[0], count, cells.next_queries(), placement)
    return None if found is None else found.tolist()


# --- scenarios (spec 9.1) -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_spec_S01_a_first_prompt_fills_the_buffer_from_its_start(placement: Placement) -> None:
    cache = toy(8, placement=placement)
    fed = feed(cache, "0:0..3")
    assert (fed.slots, head_of(cache)) == ([[0, 1, 2, 3]], 4)
    assert fed.masks == [["x---", "xx--", "xxx-", "xxxx"]]
    fed = feed(cache, "0:4")
    assert (fed.slots, fed.masks) == ([[4]], [["xxxxx"]])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_spec_S02_rows_of_two_sequences_see_only_their_own(placement: Placement) -> None:
    cache = toy(8, placement=placement)
    fed = feed(cache, "(0,{0}) (0,{1}) (1,{0}) (1,{1})")
    assert fed.slots == [[0, 1, 2, 3]]
    assert fed.masks == [["x---", "-x--", "x-x-", "-x-x"]]
    assert cells_text(cache) == "0{0} 0{1} 1{0} 1{1} . . . ."


S03 = ("0:0..2 + 1:0..1 + 2:0", "3:0..3", 3, [3, 4, 6, 7], 8)
S04 = ("0:0 1:0 0:1 1:1 0:2 1:2 0:3 1:3", "2:0..1", 1, [1, 3], 4)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("first", "second", "freed", "slots", "head"), [S03, S04], ids=["spec_S03", "spec_S04"])
def test_a_fragmented_buffer_takes_scattered_rows_and_no_run(
    first: str, second: str, freed: int, slots: list[int], head: int, placement: Placement
) -> None:
    cache = toy(8, placement=placement)
    feed(cache, first)
    cache.seq_rm(1)
    assert (head_of(cache), cache.num_used) == (freed, 4)
    if placement == "scattered":
        fed = feed(cache, second)
        assert (fed.slots, head_of(cache)) == ([slots], head)
    else:
        before = state_of(cache)
        with pytest.raises(CacheFull, match="no run that is long enough"):
            feed(cache, second)
        assert state_of(cache) == before


@pytest.mark.parametrize(
    ("placement", "slots", "head", "cells"),
    [
        ("scattered", [6, 7, 0], 1, "2{1} . . 3{0} 4{0} 5{0} 0{1} 1{1}"),
        ("contiguous", [0, 1, 2], 3, "0{1} 1{1} 2{1} 3{0} 4{0} 5{0} . ."),
    ],
)
def test_spec_S05_the_search_wraps_past_the_end(placement: Placement, slots: list[int], head: int, cells: str) -> None:
    cache = toy(8, placement=placement)
    feed(cache, "0:0..5")
    cache.seq_rm(0, 0, 3)
    assert head_of(cache) == 0
    cache.cells.groups[0].head = 6
    assert feed(cache, "1:0..2").slots == [slots]
    assert (head_of(cache), cells_text(cache)) == (head, cells)


def test_spec_S06_a_run_may_cross_the_old_head() -> None:
    cache = toy(8, placement="contiguous")
    load_cells(cache, ". 1{0} 0{1} . . . . 5{1}", head=5)
    assert feed(cache, "2:0..2").slots == [[3, 4, 5]]
    assert head_of(cache) == 6


FIND: dict[str, tuple[str, list[tuple[int, int, Placement, list[int] | None]]]] = {
    "S07": (
        "0{0} . . . . . . 1{0} . . . . . . . .",
        [
            (3, 1, "scattered", [3]),
            (4, 1, "scattered", [4]),
            (5, 1, "scattered", [1]),
            (6, 1, "scattered", [1]),
            (5, 2, "scattered", [5, 6]),
            (6, 2, "scattered", [6, 8]),
            (7, 2, "scattered", [1, 2]),
        ],
    ),
    "S08": ("0{0} . . 1{0}", [(4, 2, "scattered", [1, 2]), (4, 2, "contiguous", [1, 2]), (4, 3, "scattered", None)]),
    "S09": (
        ". . 0{0} 1{0} 2{0} . . .",
        [
            (3, 3, "contiguous", [5, 6, 7]),
            (3, 2, "contiguous", [5, 6]),
            (6, 3, "contiguous", [5, 6, 7]),
            (6, 3, "scattered", [6, 7, 0]),
            (6, 5, "scattered", [6, 7, 0, 1, 5]),
            (6, 6, "scattered", None),
        ],
    ),
    "S10": (". . . .", [(0, 0, "scattered", None), (0, 0, "contiguous", None)]),
    "S11": ("0{0} 1{0} 2{0} 3{0}", [(4, 1, "scattered", None), (4, 1, "contiguous", None)]),
    "S11-larger": (". . . .", [(0, 5, "scattered", None), (0, 5, "contiguous", None)]),
}


@pytest.mark.parametrize(("cells", "searches"), FIND.values(), ids=[f"spec_{name}" for name in FIND])
def test_a_search_finds_exactly_these_cells(cells: str, searches: list[tuple[int, int, Placement, list[int] | None]]) -> None:
    bookkeeping = toy_cells(len(cells.split()))
    for head, count, placement, slots in searches:
        load_cells(bookkeeping, cells, head=head)
        before = state_of(bookkeeping)
        assert search(bookkeeping, count, placement) == slots, (head, count, placement)
        assert state_of(bookkeeping) == before


@pytest.mark.parametrize(("used", "rows", "free"), [("0:0..3", "0:4", 0), (None, "0:0..4", 4)], ids=["one more", "more than there are"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_spec_S11_a_full_buffer_says_what_was_needed_and_free(placement: Placement, used: str | None, rows: str, free: int) -> None:
    cache = toy(4, placement=placement)
    if used:
        feed(cache, used)
    before = state_of(cache)
    with pytest.raises(CacheFull) as full:
        feed(cache, rows)
    assert (full.value.needed, full.value.free, full.value.group) == (len(rows_of(rows)), free, 0)
    assert f"{len(rows_of(rows))} rows do not fit: {free} of 4 cells are free" in str(full.value)
    assert state_of(cache) == before


def test_spec_S12_a_plan_of_three_parts_places_each_after_the_one_before() -> None:
    cache = toy(8)
    load_cells(cache, "0{0} . 1{0} . 2{0} . . .", head=1)
    before = state_of(cache)
    plan = cache.plan(batch_of("1:0..4"), max_ubatch=2)
    assert state_of(cache) == before
    assert [step.slots(0).tolist() for step in plan] == [[1, 3], [5, 6], [7]]
    heads = []
    for step in plan:
        with step:
            step.store(0, *toy_kv(step.ubatch))
        heads.append(head_of(cache))
    assert heads == [4, 7, 8]
    assert cells_text(cache) == "0{0} 0{1} 1{0} 1{1} 2{0} 2{1} 3{1} 4{1}"


def test_spec_S13_a_failed_batch_leaves_cells_and_head() -> None:
    cache = toy(8)
    feed(cache, "0:0..3")
    feed(cache, "1:0..1")
    before = state_of(cache)
    with pytest.raises(CacheFull):
        feed(cache, "2:0..2")
    assert state_of(cache) == before
    assert head_of(cache) == 6
    assert feed(cache, "2:0..1").slots == [[6, 7]]


# --- the search against plain Python ----------------------------------------------------------------------------------------------------


def plain_search(group: Group, count: int, following: list[int], placement: Placement) -> list[int] | None:
    """Spec 4.4 with D2: a pass over empty cells, then one that takes expired cells too."""
    n = group.num_cells

    def expired(cell: int) -> bool:
        return all(not sees(group.window, int(group.position[cell]), following[s]) for s in group.owners_of(cell))

    empty = [group.position[c] < 0 for c in range(n)]
    either = [empty[c] or expired(c) for c in range(n)]
    head = 0 if group.head > group.num_used + 2 * count else group.head
    if not 0 < count <= n:
        return None
    if placement == "scattered":
        order = [(head + k) % n for k in range(n)]
        picked = ([c for c in order if empty[c]] + [c for c in order if either[c] and not empty[c]])[:count]
        return picked if len(picked) == count else None
    for usable in (empty, either):
        h, tested = head, 0
        while True:
            if h + count > n:
                tested, h = tested + n - h, 0
                continue
            picked = []
            while len(picked) < count:
                h, tested = h + 1, tested + 1
                if not usable[h - 1]:
                    break
                picked.append(h - 1)
            if len(picked) == count:
                return picked
            if tested >= n:
                break
    return None


WINDOWS = [Window.full(), Window.sliding(1), Window.sliding(3), Window.chunked(2), Window.chunked(3), Window.symmetric(3)]


def random_cells(rng: np.random.Generator, windows: tuple[Window, ...], most: int = 40) -> Cells:
    """A few sequences, forks and holes, cells in random places. A full group beside windowed ones has more room."""
    size = int(rng.integers(1, most))
    cells = Cells(windows, [size + 20 * (window.is_full and len(windows) > 1) for window in windows], 6)
    for s in range(4):
        left = size - cells.groups[-1].num_used
        count = int(rng.integers(0, max(1, min(left, 9)) + 1))
        if 0 < count <= left:
            start = int(rng.integers(0, 5))
            places = np.flatnonzero(cells.groups[-1].position < 0)
            rows = [Row(int(rng.integers(0, 99)), start + i, (s,)) for i in range(count)]
            cells.commit(ubatch_of(rows), [rng.permutation(places)[:count]] * len(windows))
    if rng.random() < 0.6:
        cells.seq_cp(0, 4, -1, int(rng.integers(-1, 6)))
    if rng.random() < 0.4:
        cells.seq_rm(int(rng.integers(0, 5)), *sorted(rng.integers(0, 8, 2).tolist()))
    for group in cells.groups:
        group.head = int(rng.integers(0, group.num_cells + 1))
    return cells


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_search_agrees_with_plain_python(window: Window, placement: Placement) -> None:
    rng = np.random.default_rng(3)
    found = failed = reused = 0
    for _ in range(400):
        cells = random_cells(rng, (window,))
        group, following = cells.groups[0], cells.next_queries()
        count = 1 + int(rng.integers(0, group.num_cells + 1) * rng.random())
        slots = search(cells, count, placement)
        assert slots == plain_search(group, count, following.tolist(), placement), (cells.draw(), count)
        if slots is None:
            failed += 1
        else:
            found += 1
            reused += bool((group.position[slots] >= 0).any())
    assert found > 50
    assert failed > 10 or window.size == 1  # where every cell can be reused, everything fits
    assert (reused > 5) == (not window.is_full)


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
def test_scattered_rows_fit_iff_there_are_as_many_usable_cells(window: Window) -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        cells = random_cells(rng, (window,))
        group, following = cells.groups[0], cells.next_queries()
        usable = sum(
            all(not sees(window, int(group.position[c]), int(following[s])) for s in group.owners_of(c)) for c in range(group.num_cells)
        )
        assert search(cells, usable + 1) is None
        if usable:
            slots = search(cells, usable)
            assert slots is not None
            assert len(set(slots)) == usable


def test_a_full_buffer_of_many_cells_is_searched_word_by_word_without_missing_one() -> None:
    for size in (7, 8, 9, 63, 64, 65, 257):
        cells = toy_cells(size)
        load_cells(cells, " ".join(f"{p}{{0}}" for p in range(size)), head=size // 2)
        assert search(cells, 1) is None
        for hole in range(size):
            cells.seq_rm(0, hole, hole + 1)
            cells.groups[0].head = size // 2
            assert search(cells, 1) == [hole]
            cells.commit(ubatch_of([Row(0, hole, (1,))]), [np.array([hole])])
            cells.seq_rm(1)
            assert search(cells, 1) == [hole]
            load_cells(cells, " ".join(f"{p}{{0}}" for p in range(size)), head=size // 2)


# --- plans (spec 4.5, D-1) ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "windows",
    [(Window.full(),), (Window.sliding(2),), (Window.full(), Window.sliding(3)), (Window.full(), Window.chunked(2), Window.symmetric(4))],
    ids=str,
)
def test_a_plan_changes_nothing_whether_it_succeeds_or_fails(windows: tuple[Window, ...], placement: Placement) -> None:
    rng = np.random.default_rng(5)
    outcomes = {True: 0, False: 0}
    parts = reuses = 0
    for _ in range(300):
        cells = random_cells(rng, windows)
        seqs = rng.permutation(6)[: int(rng.integers(1, 4))].tolist()
        rows = [Row(1, cells.seq_pos_max(s) + 1 + i, (s,)) for i in range(int(rng.integers(1, 7))) for s in seqs]
        ubatches = split(batch_of(rows), np.array([row.position for row in rows]), "simple", int(rng.integers(1, 9)), 6)
        before, epoch, arrays = state_of(cells), cells.epoch, raw(cells)
        try:
            slots = plan_slots(cells, ubatches, placement)
            outcomes[True] += 1
        except CacheFull:
            slots = []
            outcomes[False] += 1
        assert (state_of(cells), cells.epoch) == (before, epoch)
        assert raw(cells) == arrays
        parts += len(slots) > 1
        for ubatch, chosen in zip(ubatches, slots, strict=False):
            reuses += any((g.position[s] >= 0).any() for g, s in zip(cells.groups, chosen, strict=True))
            cells.commit(ubatch, chosen)
            cells.check()
    assert min(outcomes.values()) > 30
    assert parts > 20
    assert (reuses > 10) == any(not window.is_full for window in windows)


def raw(cells: Cells) -> list[bytes]:
    """The bytes of every array of every group."""
    return [v.tobytes() for group in cells.groups for v in vars(group).values() if isinstance(v, np.ndarray) and v is not group.column]


def test_nothing_to_place_is_an_error_and_not_a_success() -> None:
    with pytest.raises(OneKVError, match="nothing to place"):
        plan_slots(toy_cells(), [], "scattered")


def test_a_batch_is_placed_in_all_groups_or_in_none() -> None:
    """The windowed group is the short one; its index and numbers are in the error."""
    cells = Cells((Window.full(), Window.sliding(4)), [16, 5], 4)
    ubatches = split(batch_of("0:0..6"), np.arange(7), "simple", 16, 4)
    before = state_of(cells)
    with pytest.raises(CacheFull, match=r"in group 1 \(Window.sliding\(4\)\)") as full:
        plan_slots(cells, ubatches, "scattered")
    assert (full.value.needed, full.value.free, full.value.group) == (7, 5, 1)
    assert state_of(cells) == before


def test_cache_full_counts_reusable_cells_as_free() -> None:
    cells = toy_cells(6, Window.sliding(2))
    load_cells(cells, "0{0} 1{0} 2{0} 3{0} 4{0} .", head=5)
    ubatches = split(batch_of("0:5..10"), np.arange(5, 11), "simple", 16, 16)
    with pytest.raises(CacheFull, match="1 of 6 cells are free and 4 reusable") as full:
        plan_slots(cells, ubatches, "scattered")
    assert full.value.free == 5


def test_cells_that_a_later_part_still_sees_are_not_reused() -> None:
    """An embedding may repeat its sequence's last position, so that what is hidden from the position after it is not hidden yet."""
    cache = toy(4, Window.sliding(2))
    load_cells(cache, "0{0} 1{0} 2{0} 3{0}", head=2)
    fed = feed(cache, batch_of("1:0..1 + 0:3", embeddings=True), max_ubatch=2)
    assert fed.slots == [[0, 1], [0]]
    assert fed.masks[1] == ["x-xx"]
    assert fed.outputs[2] == pytest.approx((2 + 3 + 3) / 3)


# --- what a step sees (spec 9.10, 3) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=repr)
def test_ranges_and_the_dense_mask_agree_with_a_list_per_sequence(window: Window, causal: bool) -> None:
    """Three definitions of visibility: rows and ranges, cells and owners, plain lists."""
    rng = np.random.default_rng(6)
    steps = 0
    for _ in range(60):
        cache = toy(40, window, max_seqs=6)
        load_from(cache, random_cells(rng, (window,)))
        seqs = rng.permutation(6)[: int(rng.integers(1, 4))].tolist()
        rows = [Row(1, cache.seq_pos_max(s) + 1 + i, (s,)) for i in range(int(rng.integers(1, 5))) for s in seqs]
        try:
            plan = cache.plan(batch_of(rows), max_ubatch=4 if causal else 99, causal=causal)
        except CacheFull:
            continue
        for step in plan:
            with step:
                step.store(0, *toy_kv(step.ubatch))
                mask, view = step.mask(0), step._views[0]
                for i, row in enumerate(step.ubatch.rows.tolist()):
                    seq, query = rows[row].seqs[0], rows[row].position
                    column, positions = cache.cells.column(0, seq), cache.cells.positions(seq)
                    expected = [c for c, p in zip(column.tolist(), positions.tolist(), strict=True) if sees(window, p, query, causal)]
                    assert column[view.first[i] : view.last[i]].tolist() == expected
                    assert np.flatnonzero(mask[i]).tolist() == sorted(expected)
                    assert mask[i, step.slots(0)[i]]
            steps += 1
    assert steps > 40


def load_from(cache: Any, cells: Cells) -> None:
    """Take over the content of other bookkeeping, cell by cell."""
    text = cells_text(cells)
    load_cells(cache, text + " ." * (cache.num_cells - len(text.split())), head=head_of(cells))
