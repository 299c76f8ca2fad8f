"""Shifts: scenarios of spec 9.2 and 9.4, the three answers to shared cells, pending and interrupted updates."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import onekv.cache
import onekv.rope
from onekv import BatchError, CacheFull, KVCache, LayerSpec, OneKVError, Rope, ShiftError, Window
from onekv.core.batch import split
from onekv.core.placement import plan_slots
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
    toy_layer,
    turned,
)

START = "0{0} 1{0,1} 2{0,1} 3{0,1} 4{0} . . ."
Operations = list[tuple[Any, ...]]

MOVES: dict[str, tuple[Operations, str, int]] = {
    "S31": ([("seq_add", 0, 2, -1, 10)], "0{0} 1{0,1} 12{0,1}~10 13{0,1}~10 14{0}~10 . . .", 0),
    "S32": ([("seq_add", 0, -1, -1, -2)], ". . 0{0,1}~-2 1{0,1}~-2 2{0}~-2 . . .", 0),
    "S33": ([("seq_add", 1, -1, -1, -3)], "0{0} . . 0{0,1}~-3 4{0} . . .", 1),
    "S34-empty-range": ([("seq_add", 0, 3, 3, 7)], START, 5),
    "S34-zero": ([("seq_add", 0, -1, -1, 0)], START, 5),
    "S35-crossed": ([("seq_add", 0, 3, 2, 5)], START, 0),
    "S35-absent": ([("seq_add", 9, -1, -1, 5)], START, 0),
    "S36": ([("seq_add", 0, 2, -1, 3), ("seq_add", 0, 5, -1, -1)], "0{0} 1{0,1} 4{0,1}~2 5{0,1}~2 6{0}~2 . . .", 0),
    "S37": ([("seq_div", 0, -1, -1, 2)], "0{0} 0{0,1}~-1 1{0,1}~-1 1{0,1}~-2 2{0}~-2 . . .", 5),
    "S38": ([("seq_div", 0, 2, -1, 3)], "0{0} 1{0,1} 0{0,1}~-2 1{0,1}~-2 1{0}~-3 . . .", 5),
    "S38-one": ([("seq_div", 0, -1, -1, 1)], START, 5),
    "S39": ([("seq_add", 0, -1, -1, -100)], ". . . . . . . .", 0),
    "S40": ([("seq_rm", 0, 0, 2), ("seq_add", 0, 2, -1, -2)], ". 1{1} 0{0,1}~-2 1{0,1}~-2 2{0}~-2 . . .", 0),
}
COPIES: dict[str, tuple[Operations, str]] = {
    "S31": (MOVES["S31"][0], "0{0} 1{0,1} 2{1} 3{1} 14{0}~10 12{0}~10 13{0}~10 ."),
    "S32": (MOVES["S32"][0], ". 1{1} 2{1} 3{1} 2{0}~-2 0{0}~-2 1{0}~-2 ."),
    "S37": (MOVES["S37"][0], "0{0} 1{1} 2{1} 3{1} 2{0}~-2 0{0}~-1 1{0}~-1 1{0}~-2"),
    "S39": (MOVES["S39"][0], ". 1{1} 2{1} 3{1} . . . ."),
    "S40": (MOVES["S40"][0], "0{0}~-2 1{1} 2{1} 3{1} 2{0}~-2 1{0}~-2 . ."),
}


def start(shared_shift: Any) -> KVCache:
    cache = toy(8, shared_shift=shared_shift)
    load_cells(cache, START, head=5)
    return cache


def run(cache: KVCache, operations: Operations) -> None:
    for name, *arguments in operations:
        getattr(cache, name)(*arguments)
        cache.check()


def assert_keys_follow_positions(cache: KVCache, layer: int = 0) -> None:
    """ROPE oracle: whatever was shifted, the key of position p is the one that would have been stored there."""
    group = cache._layer_group[layer]
    for seq in cache.cells.present():
        held = cache.cells.column(group, seq) >= 0
        torch.testing.assert_close(cache.keys(layer, seq), toy_keys(cache.cells.positions(seq)[held].tolist()), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("operations", "cells", "head"), MOVES.values(), ids=[f"spec_{name}" for name in MOVES])
def test_a_shift_moves_cells_for_all_their_owners_when_told_to(operations: Operations, cells: str, head: int) -> None:
    cache = start("move")
    run(cache, operations)
    assert (cells_text(cache), head_of(cache)) == (cells, head)
    cache.update()
    assert "~" not in cells_text(cache)
    assert_keys_follow_positions(cache)


@pytest.mark.parametrize(("operations", "cells"), COPIES.values(), ids=[f"spec_{name}-copy" for name in COPIES])
def test_a_shift_copies_shared_cells_first_by_default(operations: Operations, cells: str) -> None:
    cache = start("copy")
    others = kv_of(cache, [1])
    run(cache, operations)
    assert cells_text(cache) == cells
    assert same_kv(kv_of(cache, [1]), others)
    assert_keys_follow_positions(cache)


def test_spec_S31_moving_reports_the_new_position_of_every_owner() -> None:
    cache = start("move")
    run(cache, MOVES["S31"][0])
    assert (cache.seq_pos_min(1), cache.seq_pos_max(1)) == (1, 13)


def test_spec_S39_freeing_every_shifted_cell_leaves_an_update_with_nothing_to_rotate() -> None:
    cache = start("move")
    run(cache, MOVES["S39"][0])
    assert cache.needs_update
    assert not cache.update()
    assert not cache.needs_update


def test_spec_S42_a_context_shift_makes_room_and_the_next_rows_see_the_kept_ones() -> None:
    cache = toy(8)
    feed(cache, "0:0..7")
    cache.seq_rm(0, 2, 5)
    assert head_of(cache) == 2
    cache.seq_add(0, 5, -1, -3)
    cache.update()
    fed = feed(cache, "0:5..7")
    assert fed.slots == [[2, 3, 4]]
    assert fed.masks == [["xxx--xxx", "xxxx-xxx", "xxxxxxxx"]]
    assert cells_text(cache) == "0{0} 1{0} 5{0} 6{0} 7{0} 2{0} 3{0} 4{0}"
    with pytest.raises(CacheFull):
        feed(cache, "0:8")


# --- shared cells -------------------------------------------------------------------------------------------------------------------


def shared_pair(shared_shift: Any) -> KVCache:
    """Case A12 up to the shift: two sequences on the same four cells, one of which has left sequence 0."""
    cache = toy(8, shared_shift=shared_shift)
    decode(cache, T([1, 2, 3, 4], 0, 0))
    cache.seq_cp(0, 1)
    cache.seq_rm(0, 1, 2)
    return cache


@pytest.mark.parametrize(("setting", "zero", "one", "used"), [("copy", [0, 1, 2], [0, 1, 2, 3], 6), ("move", [0, 1, 2], [0, 1, 1, 2], 4)])
def test_case_A12_shifting_shared_cells_is_reported_truthfully(setting: str, zero: list[int], one: list[int], used: int) -> None:
    cache = shared_pair(setting)
    cache.seq_add(0, 2, -1, -1)
    cache.check()
    assert [cache.cells.positions(s).tolist() for s in (0, 1)] == [zero, one]
    assert cache.num_used == used
    assert_keys_follow_positions(cache)


@pytest.mark.parametrize("operation", [("seq_add", 0, 2, -1, -1), ("seq_div", 0, 0, -1, 2)], ids=lambda operation: operation[0])
def test_case_A12_shifting_shared_cells_can_be_refused(operation: tuple[Any, ...]) -> None:
    cache = shared_pair("error")
    before = state_of(cache)
    with pytest.raises(ShiftError, match="shares cells from position 2 on"):
        run(cache, [operation])
    assert state_of(cache) == before
    cache.seq_rm(1)
    run(cache, [operation])
    assert_keys_follow_positions(cache)


def test_a_refused_shift_concerns_only_shared_cells_that_would_move() -> None:
    cache = toy(8, shared_shift="error")
    feed(cache, "0:0..3")
    cache.seq_cp(0, 1, 0, 2)
    cache.seq_div(0, 0, 1, 2)  # position 0 is shared and stays 0
    cache.seq_add(0, 2, -1, 4)
    assert cache.cells.positions(0).tolist() == [0, 1, 6, 7]


def test_copies_that_do_not_fit_change_nothing() -> None:
    cache = toy(6)
    feed(cache, "0:0..3")
    cache.seq_cp(0, 1)
    before, kv = state_of(cache), kv_of(cache, [0, 1])
    with pytest.raises(CacheFull, match="3 copies of shared cells do not fit: 2 of 6 cells are free") as full:
        cache.seq_add(0, 1, -1, 5)
    assert (full.value.needed, full.value.free, full.value.group) == (3, 2, 0)
    assert state_of(cache) == before
    assert same_kv(kv_of(cache, [0, 1]), kv)


def test_entries_pushed_below_zero_need_no_copy() -> None:
    cache = toy(4)
    feed(cache, "0:0..3")
    cache.seq_cp(0, 1)
    cache.seq_add(0, 0, -1, -4)
    assert cells_text(cache) == "0{1} 1{1} 2{1} 3{1}"


def test_cells_copied_in_one_group_may_be_unshared_in_another() -> None:
    cache = toy(16, Window.full(), Window.sliding(2), window_cells=6)
    feed(cache, "0:0..3")
    cache.seq_cp(0, 1)
    feed(cache, "1:4..9", max_ubatch=1)  # the window of sequence 1 has moved on; its cells were needed, those of sequence 0 still are
    assert [cache.cells.shared_entries(g, 0, 0, 4).tolist() for g in (0, 1)] == [[0, 1, 2, 3], []]
    before = kv_of(cache, [1])
    cache.seq_add(0, 2, -1, 10)
    cache.check()
    assert [cache.cells.shared_entries(g, 0, 0, 4).tolist() for g in (0, 1)] == [[0, 1], []]
    assert cells_text(cache).endswith("12{0}~10 13{0}~10 . . . .")
    assert same_kv(kv_of(cache, [1]), before)
    for layer in (0, 1):
        assert_keys_follow_positions(cache, layer)


def test_copies_in_expired_cells_of_the_other_owner_leave_no_cell_without_owner() -> None:
    """Taking expired cells purges what their owner had below them, here its share of the very cells that are copied."""
    cache = toy(6, Window.sliding(2))
    feed(cache, "0:0..1")
    cache.seq_cp(0, 1)
    feed(cache, "1:2..5")
    cache.seq_add(0, -1, -1, 5)
    cache.check()
    assert cells_text(cache) == ". . 5{0}~5 6{0}~5 4{1} 5{1}"
    assert_keys_follow_positions(cache)


def test_a_copy_takes_the_pending_shift_of_the_cell_along() -> None:
    cache = toy(8)
    feed(cache, "0:0..2")
    cache.seq_add(0, -1, -1, 4)
    cache.seq_cp(0, 1)
    cache.seq_add(0, -1, -1, 3)
    assert cells_text(cache) == "4{1}~4 5{1}~4 6{1}~4 7{0}~7 8{0}~7 9{0}~7 . ."
    assert_keys_follow_positions(cache)


@pytest.mark.parametrize("operation", [("seq_add", 0, 0, -1, 2**31 - 3), ("seq_div", 0, 0, -1, 0), ("seq_div", 0, 0, -1, -2)], ids=str)
def test_impossible_shifts_are_refused_and_change_nothing(operation: tuple[Any, ...]) -> None:
    cache = toy(8)
    feed(cache, "0:0..4")
    cache.seq_cp(0, 1)
    before = state_of(cache)
    with pytest.raises(BatchError):
        run(cache, [operation])
    assert state_of(cache) == before


@pytest.mark.parametrize("value", [1.0, "2", None, True])
def test_shift_arguments_must_be_integers(value: Any) -> None:
    cache = toy(8)
    for call in (lambda: cache.seq_add(0, 0, -1, value), lambda: cache.seq_div(0, 0, -1, value), lambda: cache.seq_add(0, value, -1, 1)):
        with pytest.raises(BatchError, match="must be an integer"):
            call()


# --- positions and keys -------------------------------------------------------------------------------------------------------------


def test_case_A09_chunks_are_kept_in_shifted_coordinates() -> None:
    cache = toy(16)
    old, new = [ord(c) for c in "abcdefghj"], [ord(c) for c in "abefhj"]
    decode(cache, T(old, 0, 0))
    with cache.sequence() as seq:
        cache.seq_cp(0, seq)
        cache.seq_rm(0)
        for place, token in enumerate(new):
            while seq.tokens[place] != token:
                seq.remove(place, place + 1)
        assert seq.tokens.tolist() == new
        assert seq.positions.tolist() == list(range(6))
        assert cache.num_used == 6
        assert_keys_follow_positions(cache)


def test_case_A10_two_shifts_before_an_update_add_up() -> None:
    cache = toy(8)
    feed(cache, "0:0..7")
    for _ in range(2):
        cache.seq_rm(0, 0, 2)
        cache.seq_add(0, 2, -1, -2)
    assert cache.cells.tokens(0).tolist()[2] == 6
    torch.testing.assert_close(cache.keys(0, 0)[2, 0], torch.tensor([-0.4161, 0.9093]), atol=1e-4, rtol=0)


def test_case_A10_a_shift_without_a_removal_rotates_every_key() -> None:
    cache = toy(8)
    feed(cache, "0:0..7")
    cache.seq_add(0, 0, -1, 3)
    assert cache.update()
    torch.testing.assert_close(cache.keys(0, 0), toy_keys(range(3, 11)), atol=1e-5, rtol=0)


def test_case_A13_division_keeps_cells_and_rotates_by_the_difference() -> None:
    cache = toy(8)
    feed(cache, "0:0..7")
    cache.seq_div(0, 0, 8, 1)
    assert not cache.needs_update
    cache.seq_div(0, 0, 8, 2)
    assert cache.cells.positions(0).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (cache.num_used, cache.seq_pos_max(0)) == (8, 3)
    torch.testing.assert_close(cache.keys(0, 0)[7], toy_keys([3])[0], atol=1e-5, rtol=0)
    cache.seq_rm(0, 3, -1)
    assert (cache.num_used, cache.seq_pos_max(0)) == (6, 2)


@pytest.mark.parametrize("d", [0, -2])
def test_case_A13_divisors_below_one_are_refused(d: int) -> None:
    cache = toy(8)
    feed(cache, "0:0..7")
    before = state_of(cache)
    with pytest.raises(BatchError, match="divided by 1 or more"):
        cache.seq_div(0, 0, 8, d)
    assert state_of(cache) == before


ROPES = {
    "half": Rope((1.0, 0.25, 0.01)),
    "interleaved": Rope((1.0, 0.25, 0.01), layout="interleaved"),
    "offset": Rope((0.7, 0.1), offset=4),
    "value": Rope((0.7, 0.1), part="value"),
    "none": None,
}


def rotated(vectors: torch.Tensor, positions: Sequence[int], rope: Rope | None, part: str) -> torch.Tensor:
    """What a layer stores at these positions."""
    return turned(vectors, positions, rope if rope and rope.part == part else None).float()


def roped_cache(**settings: Any) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    """One layer of every kind of rope, twelve tokens of random keys and values at positions 0 to 5 of sequences 0 and 1."""
    layers = [LayerSpec(2, 8, rope=rope) for rope in ROPES.values()]
    cache = KVCache(layers, 32, max_seqs=4, **settings)
    load_cells(cache.cells, " ".join(f"{p}{{{s}}}" for s in (0, 1) for p in range(6)))
    rng = torch.Generator().manual_seed(5)
    k, v = torch.randn(12, 2, 8, generator=rng), torch.randn(12, 2, 8, generator=rng)
    positions = [*range(6)] * 2
    for i, layer in enumerate(layers):
        cache.store.store(i, torch.arange(12), rotated(k, positions, layer.rope, "key"), rotated(v, positions, layer.rope, "value"))
    return cache, k, v


@pytest.mark.parametrize(
    ("operation", "positions"),
    [pytest.param(("seq_add", 0, -1, -1, 3), range(3, 9), id="add"), pytest.param(("seq_div", 0, -1, -1, 2), [0, 0, 1, 1, 2, 2], id="div")],
)
def test_spec_S61_shifted_keys_equal_keys_computed_at_the_new_positions(operation: tuple[Any, ...], positions: Any) -> None:
    cache, k, v = roped_cache()
    others = kv_of(cache, [1])
    run(cache, [operation])
    assert cache.update()
    assert not cache.cells.groups[0].shift.any()
    for i, layer in enumerate(cache.layers):
        torch.testing.assert_close(cache.keys(i, 0), rotated(k[:6], list(positions), layer.rope, "key"), atol=1e-5, rtol=0)
        torch.testing.assert_close(cache.values(i, 0), rotated(v[:6], list(positions), layer.rope, "value"), atol=1e-5, rtol=0)
    assert same_kv(kv_of(cache, [1]), others)


def test_spec_S62_shifts_never_change_the_length_of_a_key() -> None:
    """YaRN stores keys longer than 1; the original multiplied by that factor again at every shift."""
    cache, _, _ = roped_cache()
    norms = [cache.keys(i, 0).norm(dim=-1) for i in range(len(cache.layers))]
    for _ in range(20):
        cache.seq_add(0, -1, -1, 2)
        cache.update()
    for i, norm in enumerate(norms):
        torch.testing.assert_close(cache.keys(i, 0).norm(dim=-1), norm, rtol=1e-5, atol=0)


@given(deltas=st.lists(st.integers(1, 9999), min_size=1, max_size=4), first=st.integers(0, 5), flush=st.booleans())
@settings(max_examples=40)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1), ("q8_0", 0.2)])
def test_a_shift_and_its_inverse_are_the_identity(dtype: str, tolerance: float, deltas: list[int], first: int, flush: bool) -> None:
    cache, _, _ = roped_cache(k_dtype=dtype)
    before = kv_of(cache, [0, 1])
    for delta in [*deltas, -sum(deltas)]:
        cache.seq_add(0, int(cache.cells.positions(0)[first]), -1, delta)
        if flush:
            cache.update()
    assert cache.cells.positions(0).tolist() == list(range(6))
    after = kv_of(cache, [0, 1])
    assert flush or same_kv(after, before)  # opposite changes that were never applied rotate nothing
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


# --- quantised cells ----------------------------------------------------------------------------------------------------------------

QUANTISED = [
    {"k_dtype": "q8_0"},
    {"k_dtype": "q8_0", "hadamard": True},
    {"k_dtype": "q4_0"},
    {"k_dtype": "q4_0", "hadamard": False},
    {"k_dtype": "q8_0", "v_dtype": "q4_0"},
    {"k_dtype": "float32", "v_dtype": "q8_0"},
]
quantised = pytest.mark.parametrize("kinds", QUANTISED, ids=lambda kinds: " ".join(map(str, kinds.values())))


def bytes_of(cache: KVCache, cells: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Memory of all layers at some cells, all by default."""
    chosen = slice(None) if cells is None else list(cells)
    parts = (cache.store.raw_keys, cache.store.raw_values)
    return [part(i)[chosen].clone() for i in cache.store.physical for part in parts]


def packed_cache(**settings: Any) -> tuple[KVCache, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Layers of several widths and ropes, random tokens at positions 20 to 25 of sequences 0 and 1; what each layer was given."""
    layers = [
        LayerSpec(2, 64, rope=Rope([10 ** (-i / 8) for i in range(32)])),
        LayerSpec(1, 80, value_dim=40, rope=Rope((1.0, 0.3, 0.01), layout="interleaved", offset=20)),
        LayerSpec(1, 32, value_dim=64, rope=Rope((0.7, 0.1), part="value")),
        LayerSpec(3, 24),
    ]
    cache = KVCache(layers, 32, max_seqs=4, **settings)
    load_cells(cache.cells, " ".join(f"{p}{{{s}}}" for s in (0, 1) for p in range(20, 26)))
    rng, given = torch.Generator().manual_seed(8), []
    for i, layer in enumerate(layers):
        given.append(tuple(torch.randn(12, layer.num_kv_heads, dim, generator=rng) for dim in (layer.head_dim, layer.v_dim)))
        cache.store.store(i, torch.arange(12), *given[-1])
    return cache, given


@quantised
def test_case_F01_changes_that_wait_are_one_rounding_of_one_rotation(kinds: dict[str, Any]) -> None:
    once, many, before = packed_cache(**kinds)[0], packed_cache(**kinds)[0], packed_cache(**kinds)[0]
    once.seq_add(0, 22, -1, 7)
    for _ in range(7):
        many.seq_add(0, 22, -1, 1)
    assert once.update()
    assert many.update()
    assert same_kv(bytes_of(once), bytes_of(many))
    still = [0, 1, *range(6, 32)]  # the cells that did not move: two of sequence 0, all of sequence 1, the empty ones
    assert same_kv(bytes_of(once, still), bytes_of(before, still))
    moved, change = torch.arange(2, 6), torch.full((4,), 7)
    for i, layer in enumerate(once.layers):
        parts = ("key", once.store.k_codec, once.store.raw_keys(i)), ("value", once.store.v_codec, once.store.raw_values(i))
        old = before.store.raw_keys(i)[moved], before.store.raw_values(i)[moved]
        for (part, codec, memory), stored, decoded in zip(parts, old, before.store.gather(i, moved), strict=True):
            turns = layer.rope is not None and layer.rope.part == part
            assert torch.equal(memory[moved], codec.encode(onekv.rope.rotate(decoded, change, layer.rope)) if turns else stored)
            assert torch.equal(memory[moved], stored) != turns


@pytest.mark.parametrize(("name", "largest", "cosine"), [("q8_0", 0.06, 0.999), ("q4_0", 0.8, 0.97)])
def test_case_F01_a_shifted_quantised_key_is_near_the_float32_one(name: str, largest: float, cosine: float) -> None:
    cache, given = packed_cache(k_dtype=name)
    exact = onekv.rope.rotate(given[0][0][:6], torch.full((6,), -7), cache.layers[0].rope)
    cache.seq_add(0, 0, -1, -7)
    keys = cache.keys(0, 0)
    assert (keys - exact).abs().max() <= largest
    assert torch.cosine_similarity(keys, exact, dim=-1).min() >= cosine


@quantised
def test_changes_that_cancel_leave_quantised_cells_as_they_are(kinds: dict[str, Any]) -> None:
    cache = packed_cache(**kinds)[0]
    before = bytes_of(cache)
    cache.seq_add(0, 0, -1, 900)
    cache.seq_add(0, 0, -1, -900)
    cache.seq_div(0, 0, -1, 1)
    assert not cache.update()
    assert same_kv(bytes_of(cache), before)


@quantised
def test_copies_of_shared_quantised_cells_and_moves_keep_every_byte(kinds: dict[str, Any]) -> None:
    cache = packed_cache(**kinds)[0]
    before = bytes_of(cache)
    cache.seq_cp(0, 2)
    cache.reorder([0, 1], [1, 0])
    assert same_kv(bytes_of(cache), before)
    cache.seq_add(2, 23, -1, 4)  # three cells of sequence 1 are copied, and their copies wait for a rotation
    columns = [cache.cells.column(0, seq).tolist() for seq in (1, 2)]
    assert [a == b for a, b in zip(*columns, strict=True)] == [True] * 3 + [False] * 3
    assert same_kv(bytes_of(cache, columns[1]), bytes_of(cache, columns[0]))
    assert same_kv(bytes_of(cache, columns[1]), [part[:6] for part in before])
    cache.update()
    assert same_kv(bytes_of(cache, columns[0]), [part[:6] for part in before])
    cache.seq_rm(1)
    rows = {seq: bytes_of(cache, cache.cells.column(0, seq).tolist()) for seq in (0, 2)}
    assert cache.compact() > 0
    for seq, held in rows.items():
        assert same_kv(bytes_of(cache, cache.cells.column(0, seq).tolist()), held)


# --- caches that cannot shift -------------------------------------------------------------------------------------------------------


def test_case_F02_without_rope_a_shift_moves_positions_and_leaves_every_byte() -> None:
    cache = KVCache([LayerSpec(1, 2, value_dim=1)], 8)
    feed(cache, "0:3..6")
    before = kv_of(cache, [0])
    cache.seq_add(0, 0, -1, -3)
    assert cache.can_shift
    assert not cache.update()
    assert cache.cells.positions(0).tolist() == [0, 1, 2, 3]
    assert same_kv(kv_of(cache, [0]), before)


@pytest.mark.parametrize("operation", [("seq_add", 0, 0, -1, 1), ("seq_div", 0, 0, -1, 2)], ids=lambda operation: operation[0])
def test_case_F02_a_cache_that_cannot_shift_says_why(operation: tuple[Any, ...]) -> None:
    cache = toy(8, no_shift="positions are learned")
    feed(cache, "0:0..3")
    before = state_of(cache)
    assert not cache.can_shift
    with pytest.raises(ShiftError, match="positions are learned"):
        run(cache, [operation])
    assert state_of(cache) == before


# --- pending and interrupted updates ------------------------------------------------------------------------------------------------


def test_spec_C03_an_update_has_work_iff_positions_have_changed() -> None:
    cache = toy(8)
    feed(cache, "0:0..3")
    assert not cache.needs_update
    assert not cache.update()
    cache.seq_add(0, 0, -1, 1)
    assert cache.needs_update
    cache.seq_rm(0)
    assert cache.needs_update  # every shifted cell is free, the flag stays
    assert not cache.update()
    assert not cache.needs_update


def test_spec_C04_an_update_may_have_work_in_one_group_only() -> None:
    cache = toy(120, Window.full(), Window.sliding(4), window_cells=64)
    feed(cache, "0:0..119", max_ubatch=1)
    assert cache.cells.groups[1].lost[0, 0] == 56
    cache.seq_add(0, 0, 10, 200)
    assert [group.has_shift for group in cache.cells.groups] == [True, False]
    assert cache.update()
    assert not cache.needs_update
    for layer in (0, 1):
        assert_keys_follow_positions(cache, layer)


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda cache: feed(cache, "0:6"), id="plan"),
        pytest.param(lambda cache: cache.compact(), id="compact"),
        pytest.param(lambda cache: cache.keys(0, 0), id="keys"),
        pytest.param(lambda cache: cache.save(io.BytesIO()), id="save"),
    ],
)
def test_pending_shifts_are_applied_before_anything_needs_the_keys(act: Callable[[KVCache], Any]) -> None:
    cache = toy(8)
    feed(cache, "0:0..3")
    cache.seq_add(0, 0, -1, 2)
    act(cache)
    assert not cache.needs_update
    assert_keys_follow_positions(cache)


def test_placement_refuses_pending_shifts() -> None:
    cells = toy_cells(8)
    load_cells(cells, "0{0} 3{0}~2 . .")
    batch = batch_of("1:0")
    with pytest.raises(OneKVError, match="a change of positions is pending"):
        plan_slots(cells, split(batch, batch.checked(cells, None), "simple", 8, cells.max_seqs), "scattered")


class Interrupted:
    """Replaces `rotate`: counts the calls of every layer, and raises at the k-th call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.calls, self.at, self.rotate = 0, at, onekv.cache.rotate
        monkeypatch.setattr(onekv.cache, "rotate", self)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.rotate(*arguments)


def three_layers() -> KVCache:
    cache = KVCache([toy_layer(), toy_layer(Window.sliding(8)), toy_layer()], 16, max_seqs=4)
    feed_layers(cache, "0:0..3 1:0..3")
    cache.seq_add(0, 1, -1, 5)
    return cache


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_update_goes_on_where_it_stopped(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = three_layers()
    rotation = Interrupted(monkeypatch, at)
    with pytest.raises(KeyboardInterrupt):
        cache.update()
    assert cache.needs_update
    assert cache.update()
    assert rotation.calls == 4  # every layer once, and the one that was interrupted again
    for layer in range(3):
        assert_keys_follow_positions(cache, layer)


AFTER_INTERRUPT = {
    "shift on": lambda cache: cache.seq_add(0, 0, -1, 3),
    "divide": lambda cache: cache.seq_div(0, 0, -1, 2),
    "feed": lambda cache: feed_layers(cache, "0:9"),
    "share": lambda cache: (cache.seq_rm(1), cache.seq_cp(0, 1), cache.seq_add(0, 0, -1, 1)),
    "clear": lambda cache: (cache.clear(), feed_layers(cache, "0:0..3"), cache.seq_add(0, 0, -1, 2)),
    "free the shifted": lambda cache: (cache.seq_rm(0), cache.update(), cache.seq_add(1, 0, -1, 2)),
    "compact": lambda cache: (cache.seq_rm(0, 0, 1), cache.compact()),
    "reorder": lambda cache: (cache.reorder([0, 1], [1, 0]), cache.seq_add(0, 0, -1, 2)),
}


@pytest.mark.parametrize("act", AFTER_INTERRUPT.values(), ids=list(AFTER_INTERRUPT))
@pytest.mark.parametrize("at", [1, 2, 3])
def test_whatever_follows_an_interrupted_update_no_key_turns_twice_or_never(at: int, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = three_layers()
    Interrupted(monkeypatch, at)
    with pytest.raises(KeyboardInterrupt):
        cache.update()
    act(cache)
    cache.update()
    cache.check()
    for layer in range(3):
        assert_keys_follow_positions(cache, layer)


def test_large_changes_rotate_as_exactly_as_small_ones() -> None:
    cache = toy(4)
    feed(cache, "0:0")
    for delta in (1_000_000, 999_999, -1_999_998):
        cache.seq_add(0, 0, -1, delta)
        cache.update()
    torch.testing.assert_close(cache.keys(0, 0), toy_keys([1]), atol=1e-5, rtol=0)
    assert np.array_equal(cache.cells.positions(0), [1])
