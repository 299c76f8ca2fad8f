"""Windows: scenarios of spec 9.3 and 9.6, reuse of expired cells, two groups of layers, and what a sequence can no longer do."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onekv import CacheFull, ConfigError, KVCache, Window, WindowLost
from onekv.core.placement import find_slots
from tiny import T, batch_of, cells_text, decode, feed, feed_layers, head_of, kv_of, load_cells, same_kv, state_of, toy, toy_layer

FULL, TWO, THREE, FOUR = Window.full(), Window.sliding(2), Window.sliding(3), Window.sliding(4)


@dataclass
class Fed:
    """A batch, and what must come of it. None: not looked at."""

    rows: str
    slots: list[list[int]] | None = None
    masks: list[list[str]] | None = None
    max_ubatch: int = 64
    cells: str | None = None
    spans: dict[int, tuple[int, int]] | None = None  # sequence: smallest and largest position


@dataclass
class Scenario:
    window: Window
    num_cells: int
    feeds: list[Fed]
    cells: str = ""
    head: int = 0
    causal: bool = True


SCENARIOS = {
    "S50": Scenario(
        FOUR,
        8,
        [
            Fed("0:0..5"),
            Fed("0:6", [[6]], [["---xxxx"]]),
            Fed("0:7", [[7]]),
            Fed("0:8", [[0]], [["x----xxx"]], spans={0: (1, 8)}),
            Fed("0:9..12", [[1], [2], [3], [4]], max_ubatch=1),
            Fed("0:13", [[5]], [["--xxxx--"]], cells="8{0} 9{0} 10{0} 11{0} 12{0} 13{0} 6{0} 7{0}", spans={0: (6, 13)}),
        ],
    ),
    "S51": Scenario(
        FOUR,
        8,
        [
            Fed("0:0..3", [[0, 1, 2, 3]]),
            Fed("0:4..7", [[4, 5, 6, 7]], [["-xxxx---", "--xxxx--", "---xxxx-", "----xxxx"]]),
            Fed("0:8..11", [[0, 1, 2, 3]], spans={0: (4, 11)}),
            Fed("0:12..15", [[4, 5, 6, 7]]),
        ],
    ),
    "S52": Scenario(
        THREE,
        8,
        [Fed("0:0..5"), Fed("1:0..2", [[6, 7, 0]], spans={0: (1, 5)}), Fed("1:3..4", [[1, 2]], spans={0: (3, 5), 1: (0, 4)})],
    ),
    "S53": Scenario(
        TWO,
        8,
        [Fed("3:0", [[3]], cells="3{0} . . 0{3} 4{0} 0{1,2} 1{1,2} 2{1,2}")],
        cells="3{0} 0{0} 1{0} 2{0} 4{0} 0{1,2} 1{1,2} 2{1,2}",
        head=3,
    ),
    "S54": Scenario(
        THREE,
        6,
        [Fed("1:0", [[2]], cells=". . 0{1} 5{0} 4{0} 3{0}", spans={0: (3, 5)})],
        cells="0{0} 1{0} 2{0} 5{0} 4{0} 3{0}",
        head=2,
    ),
    "S55-shared": Scenario(TWO, 4, [Fed("(4,{0,1})", [[0]], [["x--x"]])], cells="0{0,1} 1{0,1} 2{0,1} 3{0,1}"),
    "S56": Scenario(
        TWO,
        10,
        [
            Fed(
                "(4,{0}) (4,{1}) (5,{0}) (5,{1})",
                [[8, 9, 0, 1]],
                [["---x----x-", "-------x-x", "x-------x-", "-x-------x"]],
                spans={0: (2, 5), 1: (0, 5)},
            )
        ],
        cells="0{0} 1{0} 2{0} 3{0} 0{1} 1{1} 2{1} 3{1} . .",
        head=8,
    ),
    "S57": Scenario(
        Window.chunked(4),
        8,
        [
            Fed("0:0..7", masks=[["x-------", "xx------", "xxx-----", "xxxx----", "----x---", "----xx--", "----xxx-", "----xxxx"]]),
            Fed("0:8", [[0]], [["x-------"]]),
            Fed("0:9..11", [[1, 2, 3]]),
        ],
    ),
    "S59": Scenario(Window.sliding(1), 3, [Fed("0:0..2", masks=[["x--", "-x-", "--x"]]), Fed("0:3", [[0]], [["x--"]])]),
    "S60": Scenario(
        TWO,
        8,
        [
            Fed("0:0..4"),
            Fed("0:5..8", [[5, 6], [7, 0]], [["----xx-", "-----xx"], ["------xx", "x------x"]], max_ubatch=2),
        ],
    ),
    "M02": Scenario(TWO, 8, [Fed("0:0..4", masks=[["xxxxx", "xxxxx", "-xxxx", "--xxx", "---xx"]])], causal=False),
    "M03": Scenario(Window.chunked(2), 8, [Fed("0:0..4", masks=[["xxxxx", "xxxxx", "--xxx", "--xxx", "----x"]])], causal=False),
    "M04": Scenario(
        Window.symmetric(4),
        8,
        [Fed("0:0..6", masks=[["xxx----", "xxxx---", "xxxxx--", "-xxxxx-", "--xxxxx", "---xxxx", "----xxx"]])],
        causal=False,
    ),
    "M04-causal": Scenario(
        Window.symmetric(4), 8, [Fed("0:0..6", masks=[["x------", "xx-----", "xxx----", "-xxx---", "--xxx--", "---xxx-", "----xxx"]])]
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=[f"spec_{name}" for name in SCENARIOS])
def test_windowed_layers_place_see_and_forget_as_written(scenario: Scenario) -> None:
    cache = toy(scenario.num_cells, scenario.window)
    load_cells(cache, scenario.cells, scenario.head)
    for expected in scenario.feeds:
        fed = feed(cache, expected.rows, max_ubatch=expected.max_ubatch, causal=scenario.causal)
        cache.check()
        assert expected.slots in (None, fed.slots)
        assert expected.masks in (None, fed.masks)
        assert expected.cells in (None, cells_text(cache))
        for seq, span in (expected.spans or {}).items():
            assert (cache.seq_pos_min(seq), cache.seq_pos_max(seq)) == span


def test_spec_S53_the_head_goes_behind_the_last_slot_whatever_was_purged() -> None:
    cache = toy(8, TWO)
    load_cells(cache, SCENARIOS["S53"].cells, head=3)
    feed(cache, "3:0")
    assert (head_of(cache), cache.num_used) == (4, 6)


def test_spec_S55_a_cell_with_one_owner_left_expires_for_it_alone() -> None:
    cache = toy(4, TWO)
    load_cells(cache, "0{0,1} 1{0,1} 2{0,1} 3{0,1}")
    cache.seq_rm(1)
    assert feed(cache, "0:4").slots == [[0]]


SEARCHES = {
    "S56": (TWO, SCENARIOS["S56"].cells, 8, {2: [8, 9], 4: [8, 9, 0, 1], 8: [8, 9, 0, 1, 2, 4, 5, 6], 9: None}),
    "S58": (Window.chunked(4), "4{0} 5{0} 6{0} . . .", 3, {4: None}),
    "S58-next-chunk": (Window.chunked(4), "4{0} 5{0} 6{0} 7{0} . .", 4, {6: [4, 5, 0, 1, 2, 3]}),
}


@pytest.mark.parametrize(("window", "cells", "head", "found"), SEARCHES.values(), ids=[f"spec_{name}" for name in SEARCHES])
def test_the_search_takes_empty_cells_then_expired_ones(window: Window, cells: str, head: int, found: dict[int, list[int] | None]) -> None:
    cache = toy(len(cells.split()), window)
    load_cells(cache, cells, head)
    for count, expected in found.items():
        slots = find_slots(cache.cells.groups[0], count, cache.cells.next_queries(), "scattered")
        assert (None if slots is None else slots.tolist()) == expected


def test_spec_S_D1_a_plan_changes_nothing_and_later_parts_cost_earlier_ones_no_cell() -> None:
    cache = toy(5, THREE)
    feed(cache, "(0,{8}) (0,{9}) (0,{0}) (1,{0}) (2,{0})")
    cache.seq_rm(9)
    feed(cache, "0:3")
    cache.seq_rm(8)
    feed(cache, "0:4")
    assert (cells_text(cache), head_of(cache)) == ("4{0} 3{0} 0{0} 1{0} 2{0}", 1)
    before = state_of(cache)
    with pytest.raises(CacheFull):
        feed(cache, "0:5..8", max_ubatch=4)
    assert state_of(cache) == before
    cache.plan(batch_of("0:5..8"), max_ubatch=3)
    assert state_of(cache) == before
    fed = feed(cache, "0:5..8", max_ubatch=3)
    assert fed.slots == [[2, 3, 4], [0]]
    assert fed.masks == [["xxx--", "x-xx-", "--xxx"], ["x--xx"]]
    assert cells_text(cache) == "8{0} . 5{0} 6{0} 7{0}"


def test_spec_S_D1b_shared_cells_expire_too_when_no_owner_sees_them() -> None:
    cache = toy(8, TWO)
    load_cells(cache, SCENARIOS["S53"].cells, head=3)
    rows = " ".join(f"({p},{{3,4}})" for p in range(6))
    before = state_of(cache)
    plan = cache.plan(batch_of(rows), max_ubatch=3)
    assert [step.slots(0).tolist() for step in plan] == [[3, 5, 6], [1, 2, 0]]
    assert state_of(cache) == before


def test_spec_S_D18_a_rollback_beyond_the_window_is_seen_and_refused() -> None:
    cache = toy(128, FULL, FOUR, window_cells=64)
    feed(cache, "0:0..119", max_ubatch=32)
    assert cache.seq_rm(0, 40, -1)
    assert (cache.cells.column(1, 0) == -1).all()
    assert cache.seq_pos_max(0) == 39
    assert not cache.can_continue_at(0, 40)
    before = state_of(cache)
    with pytest.raises(WindowLost, match="sequence 0 cannot continue at position 40") as lost:
        feed(cache, "0:40")
    assert (lost.value.row, lost.value.seq, lost.value.stored, lost.value.given) == (0, 0, 39, 40)
    assert state_of(cache) == before
    cache.seq_rm(0)
    feed(cache, "0:0..40", max_ubatch=32)


# --- width of a window ----------------------------------------------------------------------------------------------------------------

PIECES = {"token by token": 1, "as one prefill": 64, "in chunks of 3": 3}


@pytest.mark.parametrize("max_ubatch", PIECES.values(), ids=list(PIECES))
def test_case_D01_a_window_has_the_same_width_however_the_rows_are_cut(max_ubatch: int) -> None:
    outputs = decode(toy(16, FOUR), T(range(11), 0, 0), max_ubatch=max_ubatch)
    assert [outputs[p] for p in (2, 3, 4, 10)] == [1.0, 1.5, 2.5, 8.5]


def test_case_D03_chunks_past_the_window_stay_right_in_bounded_room() -> None:
    cache = toy(6, FOUR)  # the window and a chunk, less one
    decode(cache, T(range(4), 0, 0))
    assert decode(cache, T([4, 5, 6], 0, 4)) == [2.5, 3.5, 4.5]
    for start in range(7, 67, 3):
        assert decode(cache, T(range(start, start + 3), 0, start)) == [start - 1.5, start - 0.5, start + 0.5]
        cache.check()


def test_case_D04_the_smallest_position_of_a_batch_decides_what_may_be_overwritten() -> None:
    cache = toy(6, FOUR)
    decode(cache, T(range(4), 0, 0))
    before = state_of(cache)
    with pytest.raises(CacheFull) as full:
        decode(cache, T([4, 5, 6, 7], 0, 4))
    assert (full.value.needed, full.value.free) == (4, 3)
    assert state_of(cache) == before
    assert decode(cache, T([4, 5, 6], 0, 4)) == [2.5, 3.5, 4.5]
    assert sorted(cache.cells.groups[0].position.tolist()) == [1, 2, 3, 4, 5, 6]


def test_case_D04_four_rows_fit_in_two_parts() -> None:
    cache = toy(6, FOUR)
    decode(cache, T(range(4), 0, 0))
    assert decode(cache, T([4, 5, 6, 7], 0, 4), max_ubatch=2) == [2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_case_I28_a_long_text_in_chunks_of_any_size_that_fits(size: int) -> None:
    """300 tokens, window 4, 6 cells: chunks of 1, 2 and 3 give the same outputs; one of 5 is refused as it is, and fits in parts."""
    cache, outputs = toy(6, FOUR), []
    for start in range(0, 300, size):
        rows = T([p % 97 for p in range(start, min(start + size, 300))], 0, start)
        if size == 5 and start:
            with pytest.raises(CacheFull):
                decode(cache, rows)
        outputs += decode(cache, rows, max_ubatch=3)
        cache.check()
    seen = [[q % 97 for q in range(max(0, p - 3), p + 1)] for p in range(300)]
    assert outputs == pytest.approx([sum(s) / len(s) for s in seen])


def test_case_B08_a_window_of_one_needs_one_cell() -> None:
    cache = toy(1, Window.sliding(1))
    assert [decode(cache, T([token], 0, p)) for p, token in enumerate([5, 6, 7])] == [[5.0], [6.0], [7.0]]
    assert cache.num_used == 1


def test_case_B08_a_sink_and_a_recent_window_are_a_hole_between() -> None:
    cache = toy(8)
    for p, token in enumerate([10, 20, 30, 40]):
        cache.seq_rm(0, 1, p - 1)
        output = decode(cache, T([token], 0, p))
    assert output == pytest.approx([(10 + 30 + 40) / 3])


@pytest.mark.parametrize("max_ubatch", [1, 64])
def test_case_D10_a_chunk_begins_anew_at_its_boundary(max_ubatch: int) -> None:
    cache = toy(9, Window.chunked(4))
    outputs = decode(cache, T(range(9), 0, 0), max_ubatch=max_ubatch)
    assert [outputs[p] for p in (3, 4, 5, 7, 8)] == [1.5, 4.0, 4.5, 5.5, 8.0]


def test_case_D10_only_the_chunks_before_the_current_one_are_given_up() -> None:
    cache = toy(4, Window.chunked(4))
    for p in range(12):
        assert decode(cache, T([p], 0, p)) == [np.arange(p // 4 * 4, p + 1).mean()]
        assert sorted(q for q in cache.cells.groups[0].position.tolist() if q >= p // 4 * 4) == list(range(p // 4 * 4, p + 1))


# --- going back ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_cells", [6, None])
def test_case_D06_going_back_below_the_window_needs_the_cells_or_a_new_start(window_cells: int | None) -> None:
    cache = toy(16, FULL, FOUR, window_cells=window_cells)
    for p in range(10):
        feed(cache, T([p], 0, p))
    with cache.sequence() as seq:
        cache.seq_cp(0, seq)
        cache.seq_rm(0)
        fits = window_cells is None
        assert cache.can_continue_at(seq, 5) == fits
        before = state_of(cache)
        if fits:
            seq.truncate(5)
        else:
            for call in (seq.truncate, seq.fork_at):
                with pytest.raises(WindowLost, match="cannot continue at position 5"):
                    call(5)
            assert state_of(cache) == before
            cache.seq_rm(seq)
            decode(cache, T(range(5), seq.id, 0))
        assert decode(cache, T([5], seq.id, 5), layer=1) == [3.5]


def test_case_D07_short_rollbacks_are_allowed_as_far_as_cells_are_left() -> None:
    def rolled(to: int) -> KVCache:
        cache = toy(6, FOUR)
        for p in range(10):
            decode(cache, T([p], 0, p))
        assert sorted(cache.cells.groups[0].position.tolist()) == [4, 5, 6, 7, 8, 9]
        assert cache.can_continue_at(0, to) == (to >= 7)
        cache.seq_rm(0, to, -1)
        return cache

    assert decode(rolled(9), T([50], 0, 9)) == [17.75]
    assert decode(rolled(7), T([50], 0, 7)) == [(4 + 5 + 6 + 50) / 4]
    with pytest.raises(WindowLost):
        decode(rolled(6), T([50], 0, 6))


def test_case_D09_every_layer_uses_its_own_rule() -> None:
    cache = KVCache([toy_layer(w) for w in (FULL, FOUR, FULL, FOUR)], 16)
    assert [fed.outputs[-1] for fed in feed_layers(cache, T(range(10), 0, 0))] == [4.5, 7.5, 4.5, 7.5]
    assert [group.window for group in cache.cells.groups] == [FULL, FOUR]


@pytest.mark.parametrize("window_cells", [6, None])
def test_case_D11_a_context_shift_moves_every_group(window_cells: int | None) -> None:
    cache = toy(16, FULL, FOUR, window_cells=window_cells)
    feed(cache, T(range(8), 0, 0), max_ubatch=1)
    cache.seq_rm(0, 2, 5)
    cache.seq_add(0, 5, -1, -3)
    assert cache.cells.positions(0).tolist() == [0, 1, 2, 3, 4]
    assert cache.cells.tokens(0).tolist() == [0, 1, 5, 6, 7]
    full, windowed = feed_layers(cache, T([100], 0, 5))
    assert full.outputs == pytest.approx([119 / 6])
    assert windowed.outputs == [29.5]


# --- whose cells are reused -----------------------------------------------------------------------------------------------------------


def test_expired_cells_of_a_silent_sequence_are_reused() -> None:
    cache = toy(6, TWO)
    feed(cache, "0:0..3")
    fed = feed(cache, "1:0..4")
    assert fed.slots == [[4, 5, 0, 1, 2]]
    cache.check()
    assert cache.seq_pos_min(0) == 3
    assert decode(cache, T([9], 0, 4)) == [6.0]  # positions 3 and 4: what its window needs was kept


def test_cells_all_of_whose_owners_have_moved_on_are_reused() -> None:
    cache = toy(4, TWO)
    feed(cache, "(0,{0,1}) (1,{0,1})")
    feed(cache, "0:2..3")
    with pytest.raises(CacheFull) as full:
        feed(cache, "2:0..2")
    assert full.value.free == 2  # position 0, which neither owner sees, and position 2; sequence 1 still sees position 1
    feed(cache, "1:2")
    assert feed(cache, "2:0..1").slots == [[1, 2]]
    assert cells_text(cache) == "2{1} 0{2} 1{2} 3{0}"


def test_a_cell_is_kept_as_long_as_one_owner_may_see_it() -> None:
    cache = toy(4, TWO)
    feed(cache, "(0,{0,1}) (1,{0,1})")
    feed(cache, "0:2..3")
    assert decode(cache, T([7], 1, 2)) == [(1 + 7) / 2]  # cell 0 was taken, not cell 1


# --- two groups -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "short"), [((6, None), 0), ((16, 6), 1)], ids=["full group short", "window group short"])
@pytest.mark.parametrize("max_ubatch", [8, 2])
def test_a_batch_that_one_group_cannot_hold_is_placed_in_none(sizes: tuple[int, int | None], short: int, max_ubatch: int) -> None:
    cache = toy(sizes[0], FULL, THREE, window_cells=sizes[1])
    feed(cache, "0:0..2 1:0..1")
    before, kv = state_of(cache), kv_of(cache, [0, 1])
    with pytest.raises(CacheFull) as full:
        feed(cache, "2:0..4" if short == 0 else "2:0..1 3:0..1 4:0..1", max_ubatch=max_ubatch)
    assert full.value.group == short
    assert full.value.free < full.value.needed
    assert state_of(cache) == before
    assert same_kv(kv_of(cache, [0, 1]), kv)


def test_spec_M09_what_does_not_fit_in_order_may_fit_in_equal_parts() -> None:
    cache = toy(16, FULL, TWO, window_cells=8)
    feed(cache, "2:0 0:0..2")
    full, windowed = feed_layers(cache, "0:3..8 1:0", max_ubatch=7)
    assert full.slots == [[4, 5], [6, 7, 8, 9, 10]]
    assert windowed.slots == [[4, 5], [6, 7, 1, 2, 3]]
    assert windowed.masks[1] == ["----x-x-", "------xx", "-x-----x", "-xx-----", "--xx----"]
    assert [cache.cells.groups[g].lost[0, 0] for g in (0, 1)] == [0, 3]
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (0, 8)


def test_spec_M09_a_split_that_was_asked_for_is_not_changed() -> None:
    cache = toy(16, FULL, TWO, window_cells=8)
    feed(cache, "2:0 0:0..2")
    with pytest.raises(CacheFull):
        feed(cache, "0:3..8 1:0", max_ubatch=7, split="simple")


SIZES = {
    "every position is kept by default": ((256, None), (256, 256)),
    "the size asked for": ((256, 64), (256, 64)),
    "not rounded": ((100, 33), (100, 33)),
    "at most the full group's": ((64, 64), (64, 64)),
}


@pytest.mark.parametrize(("asked", "made"), SIZES.values(), ids=list(SIZES))
def test_spec_M08_window_cells_are_what_was_asked_for(asked: tuple[int, int | None], made: tuple[int, int]) -> None:
    cache = toy(asked[0], FULL, Window.sliding(16), window_cells=asked[1])
    assert tuple(group.num_cells for group in cache.cells.groups) == made
    assert cache.can_shift  # whatever the sizes
    assert cache.num_cells == made[0]


@pytest.mark.parametrize(("windows", "window_cells"), [((FULL, FOUR), 17), ((FULL, FOUR), 0), ((FULL,), 8), ((FOUR,), 8)], ids=str)
def test_spec_M08_window_cells_that_make_no_sense_are_refused(windows: tuple[Window, ...], window_cells: int) -> None:
    with pytest.raises(ConfigError, match="window_cells"):
        toy(16, *windows, window_cells=window_cells)


@given(
    kind=st.sampled_from(["sliding", "chunked", "symmetric"]),
    size=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    causal=st.booleans(),
)
@settings(max_examples=60)
def test_spec_M06_every_row_sees_at_least_itself(kind: str, size: int, lengths: list[int], causal: bool) -> None:
    cache = toy(12, getattr(Window, kind)(size), max_seqs=3)
    for i, length in enumerate(lengths):
        seq = i % 2
        start = cache.seq_pos_max(seq) + 1
        try:
            fed = feed(cache, T(range(start, start + length), seq, start), causal=causal)
        except CacheFull:
            return
        for slots, masks in zip(fed.slots, fed.masks, strict=True):
            assert all(mask[slot] == "x" for slot, mask in zip(slots, masks, strict=True))
        cache.check()


def test_a_window_wider_than_all_positions_never_gives_up_a_cell() -> None:
    cache = toy(8, Window.sliding(2**31 - 1))
    feed(cache, "0:0..7")
    for rows in ("0:8", "1:0"):
        with pytest.raises(CacheFull):
            feed(cache, rows)


def plain_window(ids: list[int], window: Window, p: int) -> Any:
    return np.mean([ids[q] for q in np.flatnonzero(window.visible(np.arange(p + 1), p))])


@pytest.mark.parametrize(
    "window", [Window.sliding(1), Window.sliding(5), Window.chunked(3), Window.chunked(1), Window.symmetric(6)], ids=repr
)
@pytest.mark.parametrize("num_cells", [12, 40])
def test_long_runs_in_little_room_give_the_outputs_of_plain_lists(window: Window, num_cells: int) -> None:
    rng = np.random.default_rng(1)
    cache = toy(num_cells, window, max_seqs=2)
    ids: dict[int, list[int]] = {0: [], 1: []}
    for turn in range(60):
        seq, length = turn % 2, int(rng.integers(1, 4))
        new = rng.integers(0, 1000, length).tolist()
        start = len(ids[seq])
        ids[seq] += new
        outputs = decode(cache, T(new, seq, start), max_ubatch=int(rng.integers(1, 4)))
        assert outputs == pytest.approx([plain_window(ids[seq], window, p) for p in range(start, start + length)])
        cache.check()
    assert cache.num_used <= num_cells < sum(map(len, ids.values()))
