"""Positions of several axes (M-RoPE): order of rows, what a query sees, what comes next, and that y and x are never lost."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onekv import Batch, BatchError, KVCache, OneKVError, ShiftError, Window
from tiny import T, batch_of, cells_text, decode, feed, kv_of, same_kv, state_of, toy

Place = tuple[int, int, int]  # t, y, x


def image(start: int, height: int, width: int) -> list[Place]:
    """Places of an image in row-major order: one t, y and x counted from it."""
    return [(start, start + y, start + x) for y in range(height) for x in range(width)]


def batch_at(places: list[Place], seq: Any = 0, ids: list[int] | None = None) -> Batch:
    """Embeddings of one number each (by default 100, 101, ...) at these places."""
    numbers = ids or [*range(100, 100 + len(places))]
    positions = [[*axis] for axis in zip(*places, strict=True)]
    return Batch(embeddings=np.array(numbers, np.float32)[:, None], seqs=seq, positions=[*positions, [0] * len(places)], outputs="all")


def text(cache: KVCache, tokens: list[int], seqs: Any) -> list[list[int]]:
    """Feed text without positions; the (t, y, x) it was given."""
    steps = list(cache.plan(Batch(tokens, seqs=seqs)))
    places = [step.ubatch.positions for step in steps]
    feed(cache, Batch(tokens, seqs=seqs))
    return [[p] * 3 if np.ndim(p) == 0 else [int(c) for c in p[:3]] for place in places for p in place.T]


def with_image() -> KVCache:
    """Two tokens, an image of 2 x 2, one token."""
    cache = toy(24)
    text(cache, [1, 2], 0)
    feed(cache, batch_at(image(2, 2, 2)))
    assert text(cache, [3], 0) == [[4, 4, 4]]
    return cache


def test_case_G07_every_sequence_goes_on_by_its_own_positions() -> None:
    cache = with_image()
    text(cache, [10, 11, 12, 13, 14, 15, 16], 1)
    rounds = [text(cache, [5, 6], [0, 1]) for _ in range(3)]
    assert [[places[0] for places in both] for both in rounds] == [[5, 7], [6, 8], [7, 9]]
    cache.check()


def test_text_after_an_image_goes_on_above_all_its_axes() -> None:
    cache = toy(24)
    feed(cache, batch_at(image(0, 1, 6)))
    assert text(cache, [1, 2], 0) == [[6, 6, 6], [7, 7, 7]]


@pytest.mark.parametrize(("position", "accepted"), [(2, False), (3, True), (4, True), (9, True)])
def test_text_with_positions_may_jump_over_an_image_but_not_go_back(position: int, accepted: bool) -> None:
    cache = toy(24)
    text(cache, [1, 2], 0)
    feed(cache, batch_at(image(2, 2, 2)))
    if accepted:
        decode(cache, T([3], 0, position))
        assert cache.cells.axes(0)[:, -1].tolist() == [position] * 3
    else:
        with pytest.raises(BatchError):
            decode(cache, T([3], 0, position))
    cache.check()


def test_rows_are_ordered_by_t_then_y_then_x_whatever_order_they_come_in() -> None:
    places = image(2, 2, 3)
    shuffled = [places[i] for i in (4, 0, 5, 2, 1, 3)]
    cache = toy(24)
    text(cache, [1, 2], 0)
    for part in (shuffled[:3], shuffled[3:]):
        feed(cache, batch_at(part))
    cache.check()
    assert cache.cells.axes(0).T.tolist() == [[0, 0, 0], [1, 1, 1], *map(list, places)]
    assert cache.cells.positions(0).tolist() == [0, 1, 2, 2, 2, 2, 2, 2]


def test_within_one_t_a_query_sees_what_is_not_after_it_in_reading_order() -> None:
    cache = toy(8)
    fed = feed(cache, batch_at(image(0, 2, 2)))
    assert (fed.masks, fed.outputs) == ([["x---", "xx--", "xxx-", "xxxx"]], [100, 100.5, 101, 101.5])
    fed = feed(cache, batch_at([(0, 0, 0)], ids=[200]))
    assert (fed.masks, fed.outputs) == ([["x---x"]], [150])  # equal places see each other
    cache.clear()
    assert feed(cache, batch_at(image(0, 2, 2)), causal=False).masks == [["xxxx"] * 4]


def test_windows_are_measured_along_t() -> None:
    cache = toy(24, Window.sliding(2))
    text(cache, [1, 2], 0)
    feed(cache, batch_at(image(2, 2, 2)))
    assert feed(cache, batch_at([(3, 3, 3)])).masks == [["--xxxxx"]]
    assert feed(cache, batch_at([(9, 9, 9)])).masks == [["-------x"]]


def test_one_position_stands_for_three_equal_axes() -> None:
    """Text at the t of an image does not see what lies to its right or below."""
    cache = toy(8)
    feed(cache, batch_at([(2, 2, 2), (2, 2, 3), (2, 3, 2)]))
    plain = Batch(embeddings=np.ones((1, 1), np.float32), positions=[2], outputs="all")
    fed = feed(cache, plain)
    assert (fed.masks, fed.outputs) == ([["x--x"]], [(100 + 1) / 2])
    assert cache.cells.axes(0)[:, 1].tolist() == [2, 2, 2]
    cache.check()


# --- what keeps, moves or forgets axes ------------------------------------------------------------------------------------------------


def test_forks_truncations_reorder_and_compact_keep_axes() -> None:
    cache = with_image()
    expected = cache.cells.axes(0)
    cache.seq_cp(0, 1)
    cache.seq_cp(0, 2, 0, 3)
    assert np.array_equal(cache.cells.axes(1), expected)
    assert np.array_equal(cache.cells.axes(2), expected[:, :6])
    cache.seq_rm(0, 0, 2)
    assert cache.compact() == 0  # sequence 1 still owns those cells
    cache.seq_rm(1, 0, 2)
    cache.seq_rm(2, 0, 2)
    assert cache.compact() == 2
    cache.reorder([0, 1], [2, 0])
    cache.check()
    assert np.array_equal(cache.cells.axes(0), expected[:, 2:6])
    assert np.array_equal(cache.cells.axes(1), expected[:, 2:])


def test_equal_positions_at_other_places_are_other_entries() -> None:
    cache = toy(24)
    feed(cache, batch_at(image(0, 1, 2), 0))
    feed(cache, batch_at(image(0, 2, 1), 1))
    with pytest.raises(BatchError, match="already holds another cell"):
        cache.seq_cp(0, 1)
    with pytest.raises(BatchError, match="do not own the same cells"):
        cache.plan(Batch([1], seqs=[[0, 1]]))


@pytest.mark.parametrize("whole", [True, False])
def test_case_E09_axes_and_owners_survive_a_file(whole: bool) -> None:
    cache = with_image()
    cache.seq_cp(0, 1)
    text(cache, [7], 1)
    text(cache, [8, 9], 2)
    file = io.BytesIO()
    cache.save(file, None if whole else 1)
    file.seek(0)
    other = toy(24, v_layout="transposed")
    other.load(file, None if whole else 5)
    other.check()
    for s in (0, 1, 2) if whole else (1,):
        to = s if whole else 5
        assert np.array_equal(other.cells.axes(to), cache.cells.axes(s))
        assert other.cells.tokens(to).tolist() == cache.cells.tokens(s).tolist()
        assert same_kv(kv_of(other, [to]), kv_of(cache, [s]))
        assert text(other, [30], to) == text(cache, [30], s)
    assert whole == (cells_text(other).count("{0,1}") == 7)


def test_case_E09_a_text_sequence_is_loaded_beside_an_image_and_the_other_way_round() -> None:
    plain, pictured = toy(24), with_image()
    text(plain, [1, 2, 3], 0)
    for origin, cache in ((plain, with_image()), (pictured, toy(24))):
        file = io.BytesIO()
        origin.save(file, 0)
        file.seek(0)
        cache.load(file, 3)
        cache.check()
        assert np.array_equal(cache.cells.axes(3), origin.cells.axes(0))


def test_case_F02_positions_of_several_axes_do_not_shift() -> None:
    cache = with_image()
    before = state_of(cache)
    assert not cache.can_shift
    with cache.sequence() as seq:
        cache.seq_cp(0, seq)
        for call in (lambda: cache.seq_add(0, 0, -1, 1), lambda: cache.seq_div(0, 0, -1, 2), lambda: seq.remove(0, 1)):
            with pytest.raises(ShiftError, match="several axes"):
                call()
        assert seq.remove(3, 5, mode="exact").tolist() == []
        assert seq.positions.tolist() == [0, 1, 2, 2, 2, 2]
    assert state_of(cache) == before


def test_an_undone_image_leaves_no_axes() -> None:
    cache = toy(24)
    text(cache, [1, 2], 0)
    before = state_of(cache)
    for _ in range(2):
        (step,) = cache.plan(batch_at(image(2, 2, 2)))
        with pytest.raises(KeyboardInterrupt), step:
            raise KeyboardInterrupt
        assert state_of(cache) == before
        assert cache.cells.row_axes is None
        assert cache.can_shift


def test_an_undone_image_after_another_puts_the_rows_back_in_order() -> None:
    cache = toy(24)
    feed(cache, batch_at(image(0, 2, 2)))
    before, axes = state_of(cache), cache.cells.axes(0)
    (step,) = cache.plan(batch_at([(0, 0, 1), (0, 0, 0)]))  # goes between the entries there are
    with pytest.raises(OneKVError, match="before layers"), step:
        assert cache.cells.length(0) == 6
    cache.check()
    assert state_of(cache) == before
    assert np.array_equal(cache.cells.axes(0), axes)


def test_clear_forgets_that_there_were_axes() -> None:
    cache = with_image()
    cache.clear()
    assert cache.can_shift
    feed(cache, batch_of("0:0..2"))
    cache.seq_add(0, 0, -1, 1)
    cache.check()


MOVES = st.sampled_from(["text", "image", "fork", "cut"])


@given(
    moves=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["text", "image", "fork", "cut"]), st.integers(1, 3)), min_size=5, max_size=14
    ),
    window=st.sampled_from([Window.full(), Window.sliding(4), Window.chunked(3)]),
    backend=st.sampled_from(["sdpa", "reference"]),
)
@settings(max_examples=30)
def test_images_and_text_in_any_order_are_seen_as_plain_lists_would(
    moves: list[tuple[int, str, int]], window: Window, backend: str
) -> None:
    cache = toy(128, window, backend=backend, max_seqs=4)
    rows: dict[int, list[tuple[Place, int]]] = {0: [], 1: [], 2: []}
    number = 0
    for seq, move, size in moves:
        following = max((max(place) for place, _ in rows[seq]), default=-1) + 1
        if move == "fork":
            other = (seq + 1) % 3
            cache.seq_rm(other)
            cache.seq_cp(seq, other)
            rows[other] = [*rows[seq]]
        elif move == "cut":
            cache.seq_rm(seq, following - size, -1)
            rows[seq] = [entry for entry in rows[seq] if entry[0][0] < following - size]
        else:
            places = image(following, size, 2) if move == "image" else [(following + i,) * 3 for i in range(size)]
            places = places[::-1] if number % 2 and move == "image" else places
            new = [(place, number + i) for i, place in enumerate(places)]
            number += len(new)
            rows[seq] = sorted([*rows[seq], *new])
            outputs = decode(cache, batch_at(places, seq, [n for _, n in new]))
            expected = [np.mean([n for key, n in rows[seq] if seen(key, place, window)]) for place, _ in new]
            assert outputs == pytest.approx(expected)
        cache.check()
        assert cache.cells.axes(seq).T.tolist() == [list(place) for place, _ in rows[seq]]


def seen(key: Place, query: Place, window: Window) -> bool:
    return key <= query and bool(window.visible(np.array([key[0]]), query[0])[0])
