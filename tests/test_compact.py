"""Moving cells and rows: compact, reorder, and that outputs do not depend on where cells lie."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from onekv import BatchError, CacheFull, KVCache, LayerSpec, OneKVError, Window
from oracle import Oracle
from tiny import (
    T,
    batch_of,
    cells_text,
    decode,
    feed,
    feed_layers,
    head_of,
    kv_of,
    load_cells,
    same_kv,
    state_of,
    toy,
    toy_cells,
    toy_keys,
    toy_values,
)

FULL, THREE = Window.full(), Window.sliding(3)


def assert_packed(cache: KVCache) -> None:
    for group in cache.cells.groups:
        assert (group.position >= 0).tolist() == [i < group.num_used for i in range(group.num_cells)]
    cache.check()


HOLES = {
    "a hole in the middle": "0{0} . . 1{0} 2{0} 3{0} . .",
    "holes of one": "0{0} . 1{0} . 2{0} 3{0} 4{0}",
    "all at the end": ". . . 0{0} 1{0}",
    "two sequences": ". 0{0} . 0{1} . 1{0} . 1{1}",
    "every second": "0{0} . 1{0} . 2{0} . 3{0} . 4{0}",
    "shared and shifted": ". 0{0,1} . 5{0}~3 . 1{0,1}~-2 . 7{1}~7",
    "none": "0{0} 1{0} . .",
    "full": "0{0} 1{1}",
    "empty": ". . .",
}


@pytest.mark.parametrize("cells", HOLES.values(), ids=list(HOLES))
@pytest.mark.parametrize("v_layout", ["rows", "transposed"])
def test_compact_fills_every_hole_in_one_call_and_changes_no_content(cells: str, v_layout: Any) -> None:
    cache = toy(len(cells.split()), v_layout=v_layout)
    load_cells(cache, cells, head=1)
    used = cache.num_used
    outside = sum(item != "." for item in cells.split()[used:])
    cache.update()
    before = kv_of(cache, [0, 1])
    load_cells(cache, cells, head=1)
    assert cache.compact() == outside
    assert_packed(cache)
    assert cache.num_used == used
    assert same_kv(kv_of(cache, [0, 1]), before)
    assert cache.compact() == 0


def test_case_C04_shared_cells_and_a_pending_shift_move_with_their_keys() -> None:
    cache = toy(8)
    for p in range(4):
        decode(cache, [*T([10 + p], 0, p), *T([20 + p], 1, p)])
    cache.seq_cp(0, 2, 0, 2)
    cache.seq_rm(1)
    cache.seq_add(0, 2, -1, 1)
    assert cache.compact() == 2
    assert_packed(cache)
    assert cache.num_used == 4
    assert cache.cells.positions(0).tolist() == [0, 1, 3, 4]
    torch.testing.assert_close(cache.keys(0, 0), toy_keys([0, 1, 3, 4]), atol=1e-6, rtol=0)
    torch.testing.assert_close(cache.keys(0, 2), toy_keys([0, 1]), atol=1e-6, rtol=0)
    after = state_of(cache)
    assert cache.compact() == 0
    assert state_of(cache) == after
    assert decode(cache, T([50], 0, 5)) == pytest.approx([(10 + 11 + 12 + 13 + 50) / 5])
    assert decode(cache, T([50], 2, 2)) == pytest.approx([(10 + 11 + 50) / 3])


def alternating(num_cells: int, **settings: Any) -> KVCache:
    """Sequences 0 and 1 take turns over the whole buffer; 1 is gone."""
    cache = toy(num_cells, **settings)
    for p in range(0, num_cells // 2, 16):
        stop = min(p + 16, num_cells // 2)
        feed(cache, " ".join(f"0:{q} 1:{q}" for q in range(p, stop)))
    cache.seq_rm(1)
    return cache


def test_case_C05_scattered_rows_need_no_compaction() -> None:
    cache = alternating(256)
    assert feed(cache, T([7] * 128, 2, 0)).slots == [list(range(1, 256, 2))]


def test_case_C05_contiguous_rows_fit_after_one_compaction() -> None:
    cache = alternating(256, placement="contiguous")
    before = kv_of(cache, [0])
    with pytest.raises(CacheFull, match="in no run that is long enough"):
        feed(cache, T([7] * 128, 2, 0))
    assert cache.compact() == 64
    assert feed(cache, T([7] * 128, 2, 0)).slots == [list(range(128, 256))]
    assert same_kv(kv_of(cache, [0]), before)


def test_spec_S71_a_batch_that_does_not_fit_moves_nothing() -> None:
    cache = toy(32)
    feed(cache, "0:0..15 1:0..15")
    for p in (1, 4, 9, 12):
        cache.seq_rm(0, p, p + 1)
        cache.seq_rm(1, p, p + 1)
    before, kv = state_of(cache), kv_of(cache, [0, 1])
    assert cache.num_used == 24
    with pytest.raises(CacheFull) as full:
        feed(cache, "2:0..8")
    assert (full.value.needed, full.value.free) == (9, 8)
    assert state_of(cache) == before
    assert same_kv(kv_of(cache, [0, 1]), kv)


def test_compact_moves_windowed_cells_too_and_keeps_what_is_lost_lost() -> None:
    cache = toy(16, FULL, THREE, window_cells=6)
    feed(cache, "1:0..1 0:0..8", max_ubatch=2)
    cache.seq_rm(1)
    lost = (cache.cells.column(1, 0) < 0).tolist()
    assert any(lost)
    twin = copy.deepcopy(cache.cells)
    assert cache.compact() > 0
    assert_packed(cache)
    assert (cache.cells.column(1, 0) < 0).tolist() == lost
    assert [cache.can_continue_at(0, p) for p in range(10)] == [twin.can_continue_at(0, p) for p in range(10)]
    assert [fed.outputs for fed in feed_layers(cache, T([9], 0, 9))] == [[4.5], [8.0]]


def test_cells_that_move_take_their_pending_shift_along() -> None:
    cells = toy_cells(6)
    load_cells(cells, ". 3{0}~2 . 5{0,1}~-1 7{1} .")
    cells.move(0, *cells.packing_moves(0))
    cells.check()
    assert sorted(cells_text(cells).split()) == [".", ".", ".", "3{0}~2", "5{0,1}~-1", "7{1}"]


def test_a_plan_made_before_a_compaction_is_stale() -> None:
    cache = toy(8)
    load_cells(cache, ". 0{0} . .")
    (step,) = cache.plan(batch_of("0:1"))
    cache.compact()
    with pytest.raises(OneKVError, match="the cells have changed"), step:
        pass


# --- outputs do not depend on where cells lie -------------------------------------------------------------------------------------------


def noisy(num_cells: int, **settings: Any) -> KVCache:
    return KVCache([LayerSpec(2, 8, value_dim=4)], num_cells, max_seqs=8, **settings)


def feed_noise(cache: KVCache, seq: int, start: int, count: int) -> torch.Tensor:
    """Real vectors, fixed by sequence and position; the outputs."""
    out = []
    for step in cache.plan(batch_of(T(range(count), seq, start)), max_ubatch=3):
        with step:
            rng = torch.Generator().manual_seed(1000 * seq + int(step.ubatch.positions[0]))
            n = len(step.ubatch)
            q, k, v = (torch.randn(n, heads, width, generator=rng) for heads, width in ((4, 8), (2, 8), (2, 4)))
            out.append(step.attend(0, q, k, v, scale=0.35))
    return torch.cat(out)


@pytest.mark.parametrize("v_layout", ["rows", "transposed"])
@pytest.mark.parametrize("compacted", [True, False])
def test_spec_M12_a_fragmented_buffer_gives_the_outputs_of_a_fresh_one(v_layout: Any, compacted: bool) -> None:
    rng = np.random.default_rng(7)
    for _ in range(5):
        cache, fresh = noisy(64, v_layout=v_layout), noisy(24)
        for turn in range(6):
            for seq in (0, 1, 2):
                feed_noise(cache, seq, cache.seq_pos_max(seq) + 1, 3)
            cache.seq_rm(1, int(rng.integers(0, 3 * turn + 1)), -1)
            feed_noise(fresh, 0, 3 * turn, 3)
        cache.seq_rm(2)
        if compacted:
            assert cache.compact() > 0
        else:
            assert (np.diff(cache.cells.column(0, 0)) != 1).any()
        assert same_kv(kv_of(cache, [0]), kv_of(fresh, [0]))
        torch.testing.assert_close(feed_noise(cache, 0, 18, 3), feed_noise(fresh, 0, 18, 3), atol=1e-5, rtol=0)


def test_spec_M11_transposed_values_give_the_same_outputs() -> None:
    plain, transposed = (noisy(16, v_layout=layout) for layout in ("rows", "transposed"))
    for cache in (plain, transposed):
        feed_noise(cache, 1, 0, 3)
        feed_noise(cache, 0, 0, 6)
        cache.seq_rm(1)
        feed_noise(cache, 0, 6, 3)
    torch.testing.assert_close(feed_noise(transposed, 0, 9, 3), feed_noise(plain, 0, 9, 3), atol=1e-6, rtol=0)


# --- reorder ----------------------------------------------------------------------------------------------------------------------------


def three_beams(*windows: Window, **settings: Any) -> KVCache:
    """A shared prompt of two tokens and three beams of different lengths."""
    cache = toy(16, *windows, max_seqs=8, **settings)
    feed(cache, "0:0..1")
    for seq in (1, 2):
        cache.seq_cp(0, seq)
    feed(cache, [*T([10, 11], 0, 2), *T([20], 1, 2), *T([30, 31, 32], 2, 2)])
    return cache


ORDERS = {
    "swap": ([0, 1], [1, 0]),
    "rotate": ([0, 1, 2], [1, 2, 0]),
    "identity": ([0, 1, 2], [0, 1, 2]),
    "one survives": ([0, 1, 2], [2, 2, 2]),
    "duplicates": ([0, 1, 2], [1, 1, 0]),
    "from outside": ([0, 1], [2, 2]),
    "to new ids": ([5, 6], [0, 1]),
    "from an empty one": ([0, 1], [7, 0]),
    "all from an empty one": ([0, 1, 2], [7, 7, 7]),
    "none": ([], []),
}


@pytest.mark.parametrize(("seqs", "sources"), ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("windows", [(FULL,), (THREE,), (FULL, Window.sliding(2))], ids=["full", "sliding", "both"])
def test_reorder_is_one_simultaneous_permutation(windows: tuple[Window, ...], seqs: list[int], sources: list[int]) -> None:
    cache = three_beams(*windows)
    rows = {s: (cache.cells.positions(s).tolist(), cache.cells.tokens(s).tolist(), cache.cells.column(0, s).tolist()) for s in range(8)}
    data = cache.store.keys(0).clone()
    cache.reorder(seqs, sources)
    cache.check()
    expected = rows | {s: rows[source] for s, source in zip(seqs, sources, strict=True)}
    for s in range(8):
        assert (cache.cells.positions(s).tolist(), cache.cells.tokens(s).tolist(), cache.cells.column(0, s).tolist()) == expected[s]
    assert cache.num_used == len({cell for _, _, column in expected.values() for cell in column})
    assert torch.equal(cache.store.keys(0), data)


@pytest.mark.parametrize(("seqs", "sources"), [([0, 0], [1, 2]), ([0, 1], [1]), ([0], [8]), ([8], [0]), ([-1], [0]), ([0], [-1])])
def test_reorder_refuses_what_is_no_permutation_and_changes_nothing(seqs: list[int], sources: list[int]) -> None:
    cache = three_beams(FULL)
    before = state_of(cache)
    with pytest.raises(BatchError):
        cache.reorder(seqs, sources)
    assert state_of(cache) == before


def test_a_sequence_emptied_by_reorder_starts_anew_without_its_lost_cells() -> None:
    cache = toy(4, Window.sliding(2), max_seqs=8)
    feed(cache, "0:0..5", max_ubatch=1)
    assert cache.seq_pos_min(0) > 0
    (step,) = cache.plan(batch_of("0:6"))
    cache.reorder([0], [7])
    with pytest.raises(OneKVError, match="the cells have changed"), step:
        pass
    assert decode(cache, T([3, 5], 0, 0)) == [3.0, 4.0]
    cache.check()
    assert cache.seq_pos_min(0) == 0


@given(
    orders=st.lists(
        st.tuples(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=6
    )
)
@settings(max_examples=40)
def test_beams_that_are_reordered_again_and_again_equal_lists(orders: list[tuple[list[int], list[int], bool]]) -> None:
    cache, model = toy(64, max_seqs=5), Oracle()
    for seq in range(4):
        feed(cache, rows := T([seq], seq, 0))
        model.feed(rows)
    for turn, (seqs, sources, compact) in enumerate(orders):
        seqs = seqs[: len(sources)]
        cache.reorder(seqs, sources)
        model.rows |= {s: list(row) for s, row in zip(seqs, [model.row(source) for source in sources], strict=True)}
        model.rows = {s: row for s, row in model.rows.items() if row}
        for seq in range(4):
            rows = T([10 * turn + seq], seq, model.pos_max(seq) + 1)
            outputs = decode(cache, rows)
            model.feed(rows)
            assert outputs == pytest.approx([np.mean(model.visible(seq, rows[0].position, FULL))])
        if compact:
            cache.compact()
        model.compare(cache.cells)


def test_the_values_that_move_are_those_that_were_stored() -> None:
    cache = toy(6)
    load_cells(cache, ". . 4{0} . 9{1} .")
    assert cache.compact() == 2
    assert cells_text(cache) == "4{0} 9{1} . . . ."
    assert head_of(cache) == 0
    assert torch.equal(cache.values(0, 0), toy_values([4]))
    assert torch.equal(cache.values(0, 1), toy_values([9]))
