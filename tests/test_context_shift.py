"""Taking tokens out of the middle: `Sequence.remove` in both modes, and `ContextShift` at the limit of a conversation."""

from typing import Any

import numpy as np
import pytest
import torch

from onekv import BatchError, CacheFull, ConfigError, ContextShift, KVCache, Sequence, ShiftError, Window, WindowLost
from tiny import T, batch_of, decode, feed, feed_layers, kv_of, same_kv, state_of, toy, toy_keys

FULL, FOUR = Window.full(), Window.sliding(4)


def conversation(cache: KVCache, tokens: list[int]) -> Sequence:
    seq = cache.sequence()
    if tokens:
        decode(cache, T(tokens, seq.id, 0))
    return seq


def assert_whole(seq: Sequence) -> None:
    """Positions without a gap, keys at their positions, values of their tokens."""
    seq.cache.check()
    assert seq.positions.tolist() == list(range(len(seq)))
    torch.testing.assert_close(seq.cache.keys(0, seq), toy_keys(range(len(seq))), atol=1e-4, rtol=0)
    assert seq.cache.values(0, seq).flatten().tolist() == seq.tokens.tolist()


# --- Sequence.remove --------------------------------------------------------------------------------------------------------------------

RANGES = {
    "the middle": (2, 5, [0, 1, 5, 6, 7]),
    "the start": (0, 3, [3, 4, 5, 6, 7]),
    "the start, open": (-1, 3, [3, 4, 5, 6, 7]),
    "the end": (5, 8, [0, 1, 2, 3, 4]),
    "the end, open": (5, -1, [0, 1, 2, 3, 4]),
    "past the end": (5, 99, [0, 1, 2, 3, 4]),
    "all": (-1, -1, []),
    "nothing": (3, 3, list(range(8))),
    "a crossed range": (5, 2, list(range(8))),
    "beyond": (8, 12, list(range(8))),
}


@pytest.mark.parametrize(("p0", "p1", "left"), RANGES.values(), ids=list(RANGES))
def test_shift_closes_the_gap_and_exact_hands_back_what_followed(p0: int, p1: int, left: list[int]) -> None:
    cache = toy(40)
    shifted, exact = conversation(cache, list(range(8))), conversation(cache, list(range(8)))
    assert shifted.remove(p0, p1).size == 0
    again = exact.remove(p0, p1, mode="exact").tolist()
    if again:
        decode(cache, T(again, exact.id, len(exact)))
    for seq in (shifted, exact):
        assert seq.tokens.tolist() == left
        assert_whole(seq)


def test_exact_leaves_what_a_conversation_without_the_range_would_hold() -> None:
    """What follows the gap is computed anew; "shift" keeps what had seen it. Told apart by a value made from what its row saw."""

    def say(seq: Sequence, tokens: list[int]) -> None:
        for token in tokens:
            (step,) = seq.cache.plan(batch_of(T([token], seq.id, len(seq))))
            with step:
                seen = float(seq.tokens.sum())
                step.store(0, toy_keys([len(seq) - 1]), torch.tensor([[[seen]]]))

    cache = toy(40)
    exact, shifted, fresh = (cache.sequence() for _ in range(3))
    for seq in (exact, shifted):
        say(seq, [1, 2, 3, 4, 5])
    say(exact, exact.remove(1, 3, mode="exact").tolist())
    shifted.remove(1, 3)
    say(fresh, [1, 4, 5])
    assert torch.equal(cache.values(0, exact), cache.values(0, fresh))
    assert not torch.equal(cache.values(0, shifted), cache.values(0, fresh))


def test_removing_from_a_fork_leaves_the_other_as_it_was() -> None:
    cache = toy(40)
    one = conversation(cache, list(range(8)))
    other = one.fork()
    before = kv_of(cache, [other.id])
    one.remove(2, 5)
    assert_whole(one)
    assert same_kv(kv_of(cache, [other.id]), before)
    assert cache.num_used == 11  # two still shared, six of the other's, three copies


REFUSED: dict[str, tuple[dict[str, Any], str, type[Exception], str]] = {
    "no shift": ({"no_shift": "positions are learned"}, "shift", ShiftError, "positions are learned"),
    "shared cells": ({"shared_shift": "error"}, "shift", ShiftError, "shares cells from position 5 on"),
    "no room for copies": ({"num_cells": 10}, "shift", CacheFull, "3 copies of shared cells do not fit"),
    "unknown tokens": ({}, "exact", BatchError, "embeddings after position 5"),
    "another mode": ({}, "both", ConfigError, 'mode must be "shift" or "exact"'),
}


@pytest.mark.parametrize(("settings", "mode", "error", "message"), REFUSED.values(), ids=list(REFUSED))
def test_a_refused_removal_changes_nothing(settings: dict[str, Any], mode: Any, error: type[Exception], message: str) -> None:
    cache = toy(settings.pop("num_cells", 40), **settings)
    seq = cache.sequence()
    decode(cache, batch_of(T(range(8), seq.id, 0), embeddings=error is BatchError))
    seq.fork()
    before, kv = state_of(cache), kv_of(cache, [0, 1])
    with pytest.raises(error, match=message):
        seq.remove(2, 5, mode=mode)
    assert state_of(cache) == before
    assert same_kv(kv_of(cache, [0, 1]), kv)


@pytest.mark.parametrize("mode", ["shift", "exact"])
def test_a_removal_after_which_a_window_would_see_lost_cells_is_refused(mode: Any) -> None:
    cache = toy(16, FULL, FOUR, window_cells=6)
    seq = cache.sequence()
    for p in range(10):
        feed(cache, T([p], seq.id, p))
    before = state_of(cache)
    with pytest.raises(WindowLost):
        seq.remove(4, 9, mode=mode)  # leaves one of the last tokens, and the window reaches into positions below 4
    assert state_of(cache) == before
    if mode == "shift":
        seq.remove(2, 5)  # leaves five of them
        assert [fed.outputs for fed in feed_layers(cache, T([100], seq.id, 7))] == [
            [pytest.approx((0 + 1 + 5 + 6 + 7 + 8 + 9 + 100) / 8)],
            [pytest.approx((7 + 8 + 9 + 100) / 4)],
        ]


def test_the_end_can_be_removed_exactly_where_positions_cannot_shift() -> None:
    cache = toy(16, no_shift="positions are learned")
    seq = conversation(cache, list(range(8)))
    assert seq.remove(5, -1, mode="exact").size == 0
    assert seq.remove(2, 4, mode="exact").tolist() == [4]
    assert seq.tokens.tolist() == [0, 1]


# --- ContextShift -----------------------------------------------------------------------------------------------------------------------


def generate(cache: KVCache, seq: Sequence, count: int, limit: int, policy: ContextShift) -> int:
    """Feed `count` tokens one by one, making room at the limit. How often there was none."""
    shifts = 0
    for token in range(count):
        if len(seq) == limit:
            assert policy.make_room(seq) == limit - len(seq) >= 1
            shifts += 1
        decode(cache, T([1000 + token], seq.id, len(seq)))
        assert len(seq) == cache.seq_pos_max(seq) + 1 <= limit
    return shifts


@pytest.mark.parametrize("n_keep", [0, 10, 15, 16, 100])
@pytest.mark.parametrize("n_discard", [None, 0, 1, 5, 100])
def test_case_F03_every_shift_makes_progress_whatever_is_asked(n_keep: int, n_discard: int | None) -> None:
    cache = toy(16)
    seq = conversation(cache, list(range(10)))
    shifts = generate(cache, seq, 200, 16, ContextShift(n_keep, n_discard))
    assert 1 <= shifts <= 200
    kept = min(n_keep, 10)
    assert seq.tokens[:kept].tolist() == list(range(kept))
    assert seq.tokens[-1] == 1199
    assert_whole(seq)


SENSELESS: list[dict[str, Any]] = [{"n_keep": value} for value in (-1, 1.5, True, None)] + [{"n_discard": value} for value in (-1, "all")]


@pytest.mark.parametrize("setting", SENSELESS)
def test_case_F03_counts_that_make_no_sense_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be an integer of at least 0"):
        ContextShift(**setting)


@pytest.mark.parametrize("shared", [False, True])
def test_case_F04_cells_and_tokens_move_together(shared: bool) -> None:
    cache = toy(40)
    seq = conversation(cache, list(range(8)))
    fork = seq.fork() if shared else None
    assert generate(cache, seq, 40, 16, ContextShift(n_keep=0, n_discard=8)) == 4
    assert len(seq) == 16
    assert seq.tokens.tolist() == [1000 + i for i in range(24, 40)]
    assert_whole(seq)
    if fork is not None:
        assert fork.tokens.tolist() == list(range(8))
        assert_whole(fork)


def test_case_D15_sinks_and_recent_tokens_stay_at_the_positions_of_a_short_conversation() -> None:
    cache = toy(6)
    seq, policy = cache.sequence(), ContextShift(n_keep=2, n_discard=1)
    for token in range(100):
        if len(seq) == 6:
            policy.make_room(seq)
        decode(cache, T([token], seq.id, len(seq)))
        assert_whole(seq)
        if token == 7:
            assert seq.tokens.tolist() == [0, 1, 4, 5, 6, 7]
            torch.testing.assert_close(cache.keys(0, seq)[[2, 4, 5]], toy_keys([2, 4, 5]), atol=1e-5, rtol=0)
    assert seq.tokens.tolist() == [0, 1, 96, 97, 98, 99]
    assert seq.positions.max() == 5


@pytest.mark.parametrize(
    ("policy", "length", "left"),
    [
        (ContextShift(), 0, []),
        (ContextShift(), 1, []),
        (ContextShift(), 7, [3, 4, 5, 6]),
        (ContextShift(n_keep=2), 8, [0, 1, 5, 6, 7]),
        (ContextShift(n_keep=99), 4, [0, 1, 2]),
        (ContextShift(n_keep=1, n_discard=99), 4, [0]),
        (ContextShift(n_discard=0), 3, [1, 2]),
    ],
    ids=str,
)
def test_a_context_shift_keeps_the_first_and_removes_the_next(policy: ContextShift, length: int, left: list[int]) -> None:
    seq = conversation(toy(16), list(range(length)))
    assert policy.make_room(seq) == length - len(left)
    assert seq.tokens.tolist() == left
    assert_whole(seq)


@pytest.mark.parametrize("n_discard", [1, 2, 3, 4, 7])
def test_tokens_at_one_position_go_together_so_that_there_is_progress(n_discard: int) -> None:
    cache = toy(16)
    seq = conversation(cache, list(range(8)))
    cache.seq_div(seq, 0, -1, 4)
    assert seq.positions.tolist() == [0] * 4 + [1] * 4
    removed = ContextShift(n_discard=n_discard).make_room(seq)
    assert removed == 8 - len(seq) == 4
    cache.check()


@pytest.mark.parametrize("settings", [{"no_shift": "positions are learned"}, {"shared_shift": "error"}])
def test_case_F02_a_conversation_that_cannot_shift_keeps_all_it_has(settings: dict[str, Any]) -> None:
    cache = toy(16, **settings)
    seq = conversation(cache, list(range(8)))
    seq.fork()
    before = state_of(cache)
    with pytest.raises(ShiftError):
        ContextShift().make_room(seq)
    assert state_of(cache) == before


def test_a_windowed_conversation_goes_on_for_ever_in_bounded_room() -> None:
    cache = toy(16, FULL, FOUR, window_cells=8)
    seq, policy = cache.sequence(), ContextShift(n_keep=1, n_discard=6)
    for token in range(100):
        if len(seq) == 16:
            assert policy.make_room(seq) == 6
        full, windowed = feed_layers(cache, T([token], seq.id, len(seq)))
        recent = seq.tokens[-min(len(seq), 4) :]
        assert windowed.outputs == pytest.approx([np.mean(recent)])
        assert full.outputs == pytest.approx([np.mean(seq.tokens)])
        cache.check()
