"""Windows: the definition, the compiled ranges against it, and T5's buckets."""

from typing import Any

import numpy as np
import pytest

from onekv import ConfigError, Window
from onekv.core import loops
from onekv.core.window import bucket_of
from oracle import sees
from tiny import feed, toy


@pytest.mark.parametrize("make", [Window.sliding, Window.chunked, Window.symmetric])
@pytest.mark.parametrize("size", [0, -1, 2**31, 1.5, True, None, "4"])
def test_a_window_needs_a_size_of_at_least_one(make: Any, size: Any) -> None:
    with pytest.raises(ConfigError, match="needs a size"):
        make(size)


def test_windows_are_compared_by_rule_and_size() -> None:
    assert Window.sliding(4) == Window.sliding(4)
    assert len({Window.full(), Window.sliding(4), Window.chunked(4), Window.symmetric(4), Window.sliding(5)}) == 5
    assert [repr(w) for w in (Window.full(), Window.sliding(4), Window.chunked(2), Window.symmetric(6))] == [
        "Window.full()",
        "Window.sliding(4)",
        "Window.chunked(2)",
        "Window.symmetric(6)",
    ]
    with pytest.raises(ConfigError, match="unknown window kind"):
        Window(4, 1)


def test_a_full_window_has_no_size() -> None:
    with pytest.raises(ConfigError, match="a full window has no size, got 5"):
        Window(0, 5)


VISIBLE = {
    # spec M02, M03, M04: one row per query 0, 1, ..., not causal unless said
    "M02": (Window.sliding(2), False, "xxxxx xxxxx -xxxx --xxx ---xx"),
    "M03": (Window.chunked(2), False, "xxxxx xxxxx --xxx --xxx ----x"),
    "M04": (Window.symmetric(4), False, "xxx---- xxxx--- xxxxx-- -xxxxx- --xxxxx ---xxxx ----xxx"),
    "M04-causal": (Window.symmetric(4), True, "x------ xx----- xxx---- -xxx--- --xxx-- ---xxx- ----xxx"),
    "full": (Window.full(), True, "x-- xx- xxx"),
    "sliding": (Window.sliding(1), True, "x-- -x- --x"),
}


@pytest.mark.parametrize(("window", "causal", "rows"), VISIBLE.values(), ids=[f"spec_{name}" for name in VISIBLE])
def test_a_query_sees_exactly_these_positions(window: Window, causal: bool, rows: str) -> None:
    keys = np.arange(len(rows.split()))
    for query, row in enumerate(rows.split()):
        assert "".join("x" if seen else "-" for seen in window.visible(keys, query, causal)) == row
    cache = toy(len(keys), window)
    assert feed(cache, f"0:0..{len(keys) - 1}", causal=causal).masks == [rows.split()]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked", "symmetric"])
def test_ranges_agree_with_the_definition_on_random_rows(kind: str, causal: bool) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        size = int(rng.integers(1, 12))
        window = Window.full() if kind == "full" else getattr(Window, kind)(size)
        lengths = rng.integers(0, 20, 3).astype(np.int32)
        rows = np.sort(rng.integers(0, 25, (3, 20)).astype(np.int32))  # holes and repeats
        seqs, queries = rng.integers(0, 3, 8), rng.integers(0, 30, 8).astype(np.int32)
        first, last = np.empty(8, np.int64), np.empty(8, np.int64)
        loops.visible_ranges(window.kind, window.size, causal, rows, lengths, seqs, queries, first, last)
        for i in range(8):
            keys = rows[seqs[i], : lengths[seqs[i]]]
            assert 0 <= first[i] <= max(first[i], last[i]) <= keys.size
            seen = window.visible(keys, int(queries[i]), causal)
            assert np.flatnonzero(seen).tolist() == list(range(first[i], last[i]))
            assert seen.tolist() == [sees(window, int(key), int(queries[i]), causal) for key in keys]


def test_ranges_reach_the_largest_position() -> None:
    top = 2**31 - 1
    rows = np.array([[0, top - 2, top - 1, top]], np.int32)
    for window, start in ((Window.full(), 0), (Window.sliding(2), 2), (Window.chunked(2), 2), (Window.symmetric(2), 2)):
        first, last = np.empty(1, np.int64), np.empty(1, np.int64)
        lengths, seqs, queries = np.array([4], np.int32), np.array([0]), np.array([top], np.int32)
        loops.visible_ranges(window.kind, window.size, False, rows, lengths, seqs, queries, first, last)
        assert (first[0], last[0]) == (start, 4)


# First distance of every bucket from the first that is not its own distance (spec 4.11; D = 128).
BUCKETS = {
    "32 causal": (
        32,
        False,
        {**{i: i for i in range(17)}, 17: 19, 18: 21, 19: 24, 20: 27, 21: 31, 22: 35, 23: 40, 24: 46, 25: 52, 26: 59, 27: 67, 28: 77}
        | {29: 87, 30: 99, 31: 113},
    ),
    "8 causal": (8, False, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 10, 6: 23, 7: 54}),
    "32 bidirectional": (32, True, {**{i: i for i in range(9)}, 9: 12, 10: 16, 11: 23, 12: 32, 13: 46, 14: 64, 15: 91}),
}


@pytest.mark.parametrize(("count", "bidirectional", "first"), BUCKETS.values(), ids=list(BUCKETS))
def test_spec_M10_buckets_begin_at_the_recorded_distances(count: int, bidirectional: bool, first: dict[int, int]) -> None:
    steps = np.arange(0, 400)
    buckets = bucket_of(-steps, count, 128, bidirectional)
    assert {int(b): int(steps[buckets == b][0]) for b in np.unique(buckets)} == first
    assert (np.diff(buckets) >= 0).all()
    future = bucket_of(steps[1:], count, 128, bidirectional)
    if bidirectional:
        assert future.tolist() == (buckets[1:] + count // 2).tolist()
        assert future[0] == 17
    else:
        assert not future.any()


def test_buckets_keep_the_shape_of_the_distances() -> None:
    distance = np.arange(6).reshape(2, 3) - 5
    assert bucket_of(distance, 8, 128, False).tolist() == [[4, 4, 3], [2, 1, 0]]
