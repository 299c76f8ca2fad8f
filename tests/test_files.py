"""Files: what must survive (spec 9.7, cases E), and that nothing in a file, however made, can do harm."""

import errno
import hashlib
import io
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import onekv.files
from onekv import BatchError, CacheFull, ConfigError, KVCache, LayerSpec, Rope, StateError, Window
from onekv.files import VERSION
from tiny import T, batch_of, cells_text, decode, feed, feed_layers, head_of, kv_of, load_cells, same_kv, state_of, toy, toy_keys, toy_layer

FULL, THREE = Window.full(), Window.sliding(3)
Description = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def saved(cache: KVCache, seq: Any = None) -> bytes:
    file = io.BytesIO()
    cache.save(file, seq)
    return file.getvalue()


def load(cache: KVCache, data: bytes, seq: Any = None) -> int:
    return cache.load(io.BytesIO(data), seq)


def contents(data: bytes) -> tuple[Description, Tensors]:
    """What a file says and holds."""
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    return json.loads(metadata["onekv"]), safetensors.torch.load(data)


def assert_same_contents(one: bytes, other: bytes) -> None:
    """Everything but the order in which the header names things, which safetensors leaves open."""
    (description, tensors), (expected, held) = contents(one), contents(other)
    assert (len(one), description, sorted(tensors)) == (len(other), expected, sorted(held))
    assert all(tensors[name].dtype == held[name].dtype and torch.equal(tensors[name], held[name]) for name in held)


def signed(data: bytes) -> bytes:
    """The same bytes with the digest they should have."""
    at = data.index(b'"sha256":"') + 10
    clean = data[:at] + b"0" * 64 + data[at + 64 :]
    return data[:at] + hashlib.sha256(clean).hexdigest().encode() + data[at + 64 :]


def made(description: Any, tensors: Tensors) -> bytes:
    """A file that says and holds anything, with a correct digest."""
    text = description if isinstance(description, str) else json.dumps(description)
    return signed(safetensors.torch.save(tensors, {"onekv": text, "sha256": "0" * 64}))


def raw(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header at all, with a correct digest if it has a place for one."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    data = struct.pack("<Q", len(text) if length is None else length) + text + body
    return signed(data) if b'"sha256":"' in data else data


def assert_refused(cache: KVCache, data: bytes, seq: Any = None, error: type[Exception] = StateError) -> str:
    """Loading raises and changes neither bookkeeping nor keys and values. The message."""
    before, kv = state_of(cache), kv_of(cache, cache.cells.present())
    with pytest.raises(error) as raised:
        load(cache, data, seq)
    assert state_of(cache) == before
    assert same_kv(kv_of(cache, cache.cells.present()), kv)
    return str(raised.value)


# --- scenarios of spec 9.7 ------------------------------------------------------------------------------------------------------------


def small(**settings: Any) -> KVCache:
    """The small cache of spec 9.7: two layers, rows of eight numbers."""
    cache = KVCache([LayerSpec(1, 8)] * 2, settings.pop("num_cells", 8), max_seqs=settings.pop("max_seqs", 4), **settings)
    load_cells(cache.cells, "0{0,2} 1{0} 0{1} 2{0}" + " ." * 4)
    rng = torch.Generator().manual_seed(1)
    for layer in (0, 1):
        cache.store.store(layer, torch.arange(4), torch.randn(4, 1, 8, generator=rng), torch.randn(4, 1, 8, generator=rng))
    return cache


def empty_small(**settings: Any) -> KVCache:
    cache = small(**settings)
    cache.clear()
    return cache


def test_spec_P01_a_whole_file_holds_every_cell_once_and_every_row() -> None:
    files = [saved(small(v_layout=layout)) for layout in ("rows", "transposed")]
    assert_same_contents(files[0], files[1])  # a file knows no V layout
    description, tensors = contents(files[0])
    assert (description["version"], description["whole"], description["sequences"]) == (VERSION, True, [0, 1, 2])
    assert [tuple(tensors[f"layers.{i}.{part}"].shape) for i in (0, 1) for part in "kv"] == [(4, 1, 8)] * 4
    rows = {s: [tensors[f"seqs.{s}.{name}"].tolist() for name in ("positions", "tokens", "cells.0")] for s in (0, 1, 2)}
    assert rows == {0: [[0, 1, 2], [0, 1, 2], [0, 1, 3]], 1: [[0], [0], [2]], 2: [[0], [0], [0]]}


def test_spec_P02_a_sequence_is_saved_without_the_other_owners_of_its_cells() -> None:
    cache = small()
    file = io.BytesIO()
    assert cache.save(file, 0) == 3
    description, tensors = contents(file.getvalue())
    assert (description["whole"], description["sequences"]) == (False, [0])
    assert tensors["layers.1.k"].shape[0] == 3
    assert torch.equal(tensors["layers.1.k"], cache.keys(1, 0))


def test_spec_P03_nothing_can_be_saved_and_loaded() -> None:
    cache, empty = small(), empty_small()
    files = io.BytesIO(), io.BytesIO()
    assert (cache.save(files[0], 3), empty.save(files[1])) == (0, 0)
    assert load(empty, files[0].getvalue(), 2) == 0
    assert load(cache, files[1].getvalue()) == 0
    assert cache.num_used == 0


def test_spec_P04_a_whole_file_restores_cells_owners_and_data() -> None:
    cache, other = small(), small()
    feed_like_noise(other)
    assert load(other, saved(cache)) == 4
    assert (cells_text(other), head_of(other)) == ("0{0,2} 1{0} 0{1} 2{0} . . . .", 0)
    assert same_kv(kv_of(other, [0, 1, 2]), kv_of(cache, [0, 1, 2]))
    assert not other.store.keys(0)[4:].any()


def feed_like_noise(cache: KVCache) -> None:
    """Nonzero bytes in every cell."""
    for layer in cache.store.physical:
        cache.store.keys(layer)[:] = 7
        cache.store.values(layer)[:] = 7


def test_spec_P05_cells_keep_their_order_and_lose_their_gaps() -> None:
    cache, other = toy(8), toy(8)
    load_cells(cache, ". 4{1} . . 3{0} . . .")
    load(other, saved(cache))
    assert cells_text(other) == "4{1} 3{0} . . . . . ."
    other.check()


RESTORES = {
    "P06": ("scattered", ". 1{1} 0{2} . . . . .", 3, "0{3} 1{1} 0{2} 1{3} 2{3} . . .", 5),
    "P06-contiguous": ("contiguous", ". 1{1} 0{2} . . . . .", 3, ". 1{1} 0{2} 0{3} 1{3} 2{3} . .", 6),
    "P07": ("scattered", ". . 0{2} 1{2} 0{3} . . .", 1, "0{1} 1{1} 0{2} 1{2} 0{3} 2{1} . .", 6),
    "P07-contiguous": ("contiguous", ". . 0{2} 1{2} 0{3} . . .", 1, ". . 0{2} 1{2} 0{3} 0{1} 1{1} 2{1}", 8),
}


@pytest.mark.parametrize(("placement", "before", "seq", "after", "head"), RESTORES.values(), ids=[f"spec_{name}" for name in RESTORES])
def test_a_sequence_is_loaded_into_the_free_cells(placement: Any, before: str, seq: int, after: str, head: int) -> None:
    origin, cache = small(), small(placement=placement)
    load_cells(cache.cells, before)
    others = kv_of(cache, [1, 2])
    assert load(cache, saved(origin, 0), seq) == 3
    assert (cells_text(cache), head_of(cache)) == (after, head)
    assert same_kv(kv_of(cache, [seq]), kv_of(origin, [0]))
    assert same_kv(kv_of(cache, [1, 2]), others) or seq == 1


def test_spec_P08_a_sequence_that_does_not_fit_leaves_the_others() -> None:
    cache = empty_small(num_cells=8)
    load_cells(cache.cells, "0{1} 1{1} 2{1} 3{1} 4{1} 5{1} . .")
    assert_refused(cache, saved(small(), 0), 2, CacheFull)


@pytest.mark.parametrize(("settings", "error"), [({"max_seqs": 3}, None), ({"max_seqs": 2}, StateError), ({"num_cells": 3}, CacheFull)])
def test_spec_P09_a_whole_file_fits_or_changes_nothing(settings: Any, error: Any) -> None:
    cache = KVCache([LayerSpec(1, 8)] * 2, settings.get("num_cells", 8), max_seqs=settings.get("max_seqs", 4), v_layout="transposed")
    load_cells(cache.cells, "0{1} 1{1} 2{0}")
    if error:
        assert_refused(cache, saved(small()), None, error)
    else:
        load(cache, saved(small()))
        assert same_kv(kv_of(cache, [0, 1, 2]), kv_of(small(), [0, 1, 2]))  # whatever the V layout


def test_spec_P10_a_file_of_one_kind_is_not_read_as_the_other() -> None:
    cache = small()
    assert "holds a whole cache" in assert_refused(cache, saved(small()), 1)
    assert "holds one sequence" in assert_refused(cache, saved(small(), 0))


def test_spec_P11_a_file_cut_at_100_bytes_is_refused() -> None:
    cache = small()
    for seq in (None, 1):
        assert "cut" in assert_refused(cache, saved(small(), seq)[:100], seq)


@pytest.mark.parametrize("held", ["", "5{1} 6{1} 7{1}"])
def test_spec_P12_an_empty_sequence_empties_its_destination(held: str) -> None:
    cache = empty_small()
    load_cells(cache.cells, held)
    assert load(cache, saved(small(), 3), 1) == 0
    assert cache.cells.present() == []
    assert cache.num_used == 0


def test_spec_P13_an_empty_whole_file_empties_the_cache() -> None:
    cache = small()
    load(cache, saved(empty_small()))
    assert cells_text(cache) == ". . . . . . . ."


def test_case_E13_loading_a_blank_cache_is_a_fresh_start_each_time() -> None:
    cache = toy(12)
    blank = saved(cache)
    rounds = []
    for turn in range(5):
        decode(cache, T([10 + turn, *range(5)], 1, 0))
        cache.seq_add(1, 3, -1, 2)  # left pending
        assert load(cache, blank) == 0
        assert (cache.num_used, cells_text(cache)) == (0, " ".join("." * 12))
        cache.check()
        rounds.append(decode(cache, T([1, 2, 3], 0, 0)))
    assert rounds == [[1.0, 1.5, 2.0]] * 5


def test_spec_P14_an_id_that_cannot_be_saved_cannot_be_used() -> None:
    cache = small()
    with pytest.raises(BatchError):
        cache.plan(batch_of("4:0"))
    with pytest.raises(BatchError):
        cache.save(io.BytesIO(), 4)
    description, tensors = contents(saved(cache))
    description["sequences"] = [0, 1, 9]
    tensors = {name.replace("seqs.2.", "seqs.9."): tensor for name, tensor in tensors.items()}
    assert "sequence 9" in assert_refused(cache, made(description, tensors))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("window_cells", [None, 6])
def test_spec_P15_a_loaded_sequence_goes_on_as_if_nothing_had_happened(whole: bool, window_cells: int | None) -> None:
    cache = toy(16, FULL, THREE, window_cells=window_cells)
    for p in range(9):
        feed(cache, T([100 - p * p], 0, p))
    other = toy(14, FULL, THREE, window_cells=window_cells)
    assert load(other, saved(cache, None if whole else 0), None if whole else 0) == 9
    for p in range(9, 14):
        rows = T([p], 0, p)
        assert [fed.outputs for fed in feed_layers(other, rows)] == [fed.outputs for fed in feed_layers(cache, rows)]
    other.check()


def test_spec_S63_pending_shifts_are_applied_before_saving() -> None:
    for seq in (None, 0):
        cache, other = toy(8), toy(8)
        feed(cache, "0:0..3")
        cache.seq_add(0, 0, -1, 2)
        load(other, saved(cache, seq), seq)
        assert not other.needs_update
        torch.testing.assert_close(other.keys(0, 0), toy_keys(range(2, 6)), atol=1e-5, rtol=0)


# --- cases E --------------------------------------------------------------------------------------------------------------------------


def alternating() -> KVCache:
    """Case A01: sequence 0 (ids 10 to 13) and sequence 1 (20 to 23) take turns."""
    cache = toy(8)
    for p in range(4):
        decode(cache, [*T([10 + p], 0, p), *T([20 + p], 1, p)])
    return cache


def test_case_E01_a_sequence_is_loaded_into_scattered_cells() -> None:
    cache = alternating()
    file = saved(cache, 1)
    cache.seq_rm(1)
    zero = kv_of(cache, [0])
    assert load(cache, file, 3) == 4
    assert cache.cells.column(0, 3).tolist() == [1, 3, 5, 7]
    assert cache.num_used == 8
    assert same_kv(kv_of(cache, [0]), zero)
    cache.seq_rm(0, 3, -1)
    assert decode(cache, T([24], 3, 4)) == [22.0]
    assert cache.num_used == 8


def test_case_E02_loading_replaces_the_destination_and_nothing_else() -> None:
    cache = toy(16)
    decode(cache, T([1, 2, 3], 0, 0))
    decode(cache, T([7, 8, 9, 9, 9], 1, 0))
    cache.seq_cp(0, 2)
    decode(cache, T([50], 2, 3))
    others = kv_of(cache, [0, 2])
    assert load(cache, saved(cache, 0), 1) == 3
    assert cache.cells.positions(1).tolist() == [0, 1, 2]
    assert cache.num_used == 7
    assert same_kv(kv_of(cache, [0, 2]), others)
    assert decode(cache, T([4], 1, 3)) == [2.5]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("num_cells", "fits"), [(8, False), (10, True), (64, True)])
def test_case_E03_another_buffer_size_fits_or_says_what_is_needed(num_cells: int, fits: bool, whole: bool) -> None:
    origin = toy(16)
    decode(origin, T(range(10), 0, 0))
    cache = toy(num_cells)
    if not fits:
        decode(cache, T([1, 2, 3], 1, 0))
        assert "10 cells" in assert_refused(cache, saved(origin, None if whole else 0), None if whole else 0, CacheFull)
        with pytest.raises(CacheFull) as full:
            load(cache, saved(origin, 0), 0)
        assert (full.value.needed, full.value.free) == (10, 5)
        assert decode(cache, T([4], 1, 3)) == [2.5]
    else:
        assert load(cache, saved(origin, None if whole else 0), None if whole else 0) == 10
        assert same_kv(kv_of(cache, [0]), kv_of(origin, [0]))


def test_a_sequence_can_be_loaded_over_itself_in_a_full_buffer() -> None:
    cache = toy(4)
    feed(cache, "0:0..3")
    file, before = saved(cache, 0), kv_of(cache, [0])
    cache.seq_rm(0, 2, -1)
    feed(cache, T([9, 9], 0, 2))
    assert load(cache, file, 0) == 4
    assert same_kv(kv_of(cache, [0]), before)
    cache.check()


GEOMETRY: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 8, "rope": Rope((1.0, 0.5))}
FOREIGN: dict[str, tuple[list[LayerSpec], dict[str, Any], str]] = {
    "three layers": ([LayerSpec(**GEOMETRY)] * 3, {}, "2 layers, the cache 3"),
    "one layer": ([LayerSpec(**GEOMETRY)], {}, "2 layers, the cache 1"),
    "one head": ([LayerSpec(**{**GEOMETRY, "num_kv_heads": 1})] * 2, {}, "num_kv_heads=1"),
    "the same bytes in other heads": ([LayerSpec(4, 4, rope=GEOMETRY["rope"])] * 2, {}, "head_dim=4"),
    "narrower values": ([LayerSpec(**GEOMETRY, value_dim=4)] * 2, {}, "value_dim=4"),
    "a window": ([LayerSpec(**GEOMETRY, window=Window.sliding(4))] * 2, {}, "sliding"),
    "a reading layer": ([LayerSpec(**GEOMETRY), LayerSpec(**GEOMETRY, source=0)], {}, "source=0"),
    "no rope": ([LayerSpec(2, 8)] * 2, {}, "rope=None"),
    "other frequencies": ([LayerSpec(2, 8, rope=Rope((1.0, 0.25)))] * 2, {}, "0.25"),
    "another rope layout": ([LayerSpec(2, 8, rope=Rope((1.0, 0.5), layout="interleaved"))] * 2, {}, "interleaved"),
    "another model": ([LayerSpec(**GEOMETRY)] * 2, {"fingerprint": "b"}, "of model 'a', the cache of 'b'"),
    "a smaller vocabulary": ([LayerSpec(**GEOMETRY)] * 2, {"fingerprint": "a", "vocab_size": 3}, "token id 3"),
}


def geometric(layers: list[LayerSpec] | None = None, **settings: Any) -> KVCache:
    """Two layers of GEOMETRY, four random tokens of sequence 0."""
    cache = KVCache(layers or [LayerSpec(**GEOMETRY)] * 2, **{"num_cells": 8, "max_seqs": 4, "fingerprint": "a", **settings})
    load_cells(cache.cells, "0{0} . 1{0} 2{0} . 3{0} . .")
    rng = torch.Generator().manual_seed(3)
    for i in cache.store.physical:
        spec = cache.layers[i]
        k, v = (torch.randn(4, spec.num_kv_heads, width, generator=rng) for width in (spec.head_dim, spec.v_dim))
        cache.store.store(i, torch.tensor([0, 2, 3, 5]), k, v)
    return cache


@pytest.mark.parametrize(("layers", "settings", "message"), FOREIGN.values(), ids=list(FOREIGN))
def test_case_E04_files_of_another_geometry_or_model_are_refused_by_name(
    layers: list[LayerSpec], settings: dict[str, Any], message: str
) -> None:
    cache = geometric(layers, **settings)
    for seq in (None, 0):
        assert message in assert_refused(cache, saved(geometric(k_dtype="float16"), seq), seq)


def test_case_E04_files_of_another_version_are_refused_by_name() -> None:
    description, tensors = contents(saved(geometric()))
    description["version"] = VERSION + 1
    assert f"format version {VERSION + 1}" in assert_refused(geometric(), made(description, tensors))


DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("origin", DTYPES)
def test_case_E04_dtypes_convert_through_float32_and_equal_ones_keep_every_bit(origin: str, to: str) -> None:
    for v_origin, v_to in [(origin, to), ("float32", to)]:
        cache, other = geometric(k_dtype=origin, v_dtype=v_origin), geometric(k_dtype=to, v_dtype=v_to)
        other.clear()
        load(other, saved(cache, 0), 0)
        for i in (0, 1):
            assert torch.equal(other.keys(i, 0), cache.keys(i, 0).to(getattr(torch, to)).float())
            assert torch.equal(other.values(i, 0), cache.values(i, 0).to(getattr(torch, v_to)).float())
        if (origin, v_origin) == (to, v_to):
            assert_same_contents(saved(other, 0), saved(cache, 0))


CODECS: list[dict[str, Any]] = [
    {"k_dtype": "float32"},
    {"k_dtype": "bfloat16", "v_dtype": "float16"},
    {"k_dtype": "q8_0"},
    {"k_dtype": "q8_0", "hadamard": True},
    {"k_dtype": "q4_0"},
    {"k_dtype": "q4_0", "hadamard": False},
    {"k_dtype": "q8_0", "v_dtype": "q4_0"},
    {"k_dtype": "float32", "v_dtype": "q8_0"},
]
WIDE = [LayerSpec(2, 64, value_dim=40, rope=Rope((1.0, 0.5))), LayerSpec(1, 32)]


def id_of(kinds: dict[str, Any]) -> str:
    return " ".join(map(str, kinds.values()))


@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "one"])
@pytest.mark.parametrize("to", CODECS, ids=id_of)
@pytest.mark.parametrize("origin", CODECS, ids=id_of)
def test_case_E04_quantised_cells_convert_through_float32_and_equal_ones_keep_every_byte(
    origin: dict[str, Any], to: dict[str, Any], seq: int | None
) -> None:
    cache, other = geometric(WIDE, **origin), geometric(WIDE, **to)
    assert same_codecs(cache, other) == (origin == to)
    for store in (cache.store, other.store):
        assert (store.raw_keys(0).shape[2], store.raw_values(0).shape[2]) == (store.k_codec.width(64), store.v_codec.width(40))
    rng = torch.Generator().manual_seed(6)
    for i, parts in enumerate(((cache.store.raw_keys(0), cache.store.raw_values(0)), (cache.store.raw_keys(1), cache.store.raw_values(1)))):
        for memory, dim in zip(parts, (WIDE[i].head_dim, WIDE[i].v_dim), strict=True):
            if memory.dtype == torch.uint8:  # integers that quantising anew would not give: not every block has its largest
                integers = memory[..., : -2 * -(-dim // 32)]
                integers[:] = torch.randint(0, 256, integers.shape, generator=rng, dtype=torch.uint8)
    other.clear()
    assert load(other, saved(cache, seq), seq) == 4
    mine, theirs = (c.cells.column(0, 0).astype(np.int64) for c in (other, cache))
    for i in (0, 1):
        numbers, dims = cache.store.gather(i, torch.from_numpy(theirs)), (WIDE[i].head_dim, WIDE[i].v_dim)
        for part, codec, memory, old, number, dim in zip(
            ("k", "v"),
            (other.store.k_codec, other.store.v_codec),
            (other.store.raw_keys(i), other.store.raw_values(i)),
            ((cache.store.k_codec, cache.store.raw_keys(i)), (cache.store.v_codec, cache.store.raw_values(i))),
            numbers,
            dims,
            strict=True,
        ):
            expected = old[1][theirs] if codec == old[0] else codec.encode(number)
            assert torch.equal(memory[mine], expected), part
            assert torch.equal(other.store.gather(i, torch.from_numpy(mine))["kv".index(part)], codec.decode(expected, dim))
    if same_codecs(cache, other):
        assert_same_contents(saved(other, seq), saved(cache, seq))


def same_codecs(one: KVCache, other: KVCache) -> bool:
    return (one.store.k_codec, one.store.v_codec) == (other.store.k_codec, other.store.v_codec)


def test_a_file_says_how_its_cells_are_stored() -> None:
    description, tensors = contents(saved(geometric(WIDE, k_dtype="q8_0", v_dtype="q4_0"), 0))
    assert description["keys"] == {"name": "q8_0", "hadamard": False}
    assert description["values"] == {"name": "q4_0", "hadamard": True}
    assert (tensors["layers.0.k"].dtype, list(tensors["layers.0.k"].shape)) == (torch.uint8, [4, 2, 68])
    assert (tensors["layers.0.v"].dtype, list(tensors["layers.0.v"].shape)) == (torch.uint8, [4, 2, 36])


SETTINGS = list(itertools.product(["scattered", "contiguous"], ["rows", "transposed"], [16, 40]))


@pytest.mark.parametrize("seq", [None, 0, 1], ids=["whole", "shared", "own"])
@pytest.mark.parametrize("windows", [(FULL,), (THREE,), (FULL, THREE, Window.chunked(4))], ids=["full", "sliding", "three groups"])
def test_files_fit_any_placement_layout_size_and_fragmentation(windows: tuple[Window, ...], seq: int | None) -> None:
    rng = np.random.default_rng(4)
    for (placement, layout, num_cells), (to_placement, to_layout, to_cells) in itertools.product(SETTINGS, SETTINGS[::-1]):
        cache = toy(num_cells, *windows, placement=placement, v_layout=layout)
        feed(cache, T(rng.integers(0, 99, 5).tolist(), 0, 0))
        cache.seq_cp(0, 1, 0, 3)
        feed(cache, [*T([4], 1, 3), *T([5], 0, 5)])
        other = toy(to_cells, *windows, placement=to_placement, v_layout=to_layout)
        target = None if seq is None else 7
        if seq is not None:
            feed(other, " ".join(f"2:{p} 3:{p}" for p in range(3)))
            other.seq_rm(2)
        assert load(other, saved(cache, seq), target) == (7 if seq is None else cache.cells.length(seq))
        other.check()
        for s in (0, 1) if seq is None else (seq,):
            to = s if target is None else target
            assert other.cells.tokens(to).tolist() == cache.cells.tokens(s).tolist()
            rows = cache.seq_pos_max(s) + 1
            assert [f.outputs for f in feed_layers(other, T([50], to, rows))] == [f.outputs for f in feed_layers(cache, T([50], s, rows))]
            if seq is None:
                assert same_kv(kv_of(other, [s]), kv_of(cache, [s]))


def test_a_saved_sequence_keeps_of_a_window_what_the_next_query_sees() -> None:
    cache = toy(16, FULL, THREE, Window.chunked(4))
    feed(cache, "0:0..9")
    _, tensors = contents(saved(cache, 0))
    assert [tensors[f"layers.{i}.k"].shape[0] for i in range(3)] == [10, 2, 2]
    other = toy(16, FULL, THREE, Window.chunked(4))
    load(other, saved(cache, 0), 1)
    assert [group.num_used for group in other.cells.groups] == [10, 2, 2]
    assert other.can_continue_at(1, 10)
    assert not other.can_continue_at(1, 9)


def test_a_loaded_sequence_may_take_expired_cells_of_others() -> None:
    cache = toy(6, THREE)
    feed(cache, "0:0..5")
    origin = toy(6, THREE)
    feed(origin, "0:0..1")
    load(cache, saved(origin, 0), 1)
    cache.check()
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (2, 5)
    assert decode(cache, T([6], 0, 6)) == [5.0]


def test_case_E07_an_empty_sequence_makes_the_round_trip() -> None:
    with toy(8).sequence() as seq:
        file = io.BytesIO()
        assert seq.save(file) == 0
    cache = toy(8)
    assert load(cache, file.getvalue(), 0) == 0
    decode(cache, T([1, 2, 3, 4, 5], 0, 0))
    assert "too short: 0 bytes" in assert_refused(cache, b"", 0)
    assert load(cache, file.getvalue(), 0) == 0
    assert cache.seq_pos_max(0) == -1
    assert decode(cache, T([1, 2], 0, 0)) == [1.0, 1.5]


def test_case_E10_the_token_list_is_exactly_what_the_cells_hold() -> None:
    prompt, cache = [3, 1, 4, 1, 5], toy(8)
    decode(cache, T(prompt[:4], 0, 0))
    other = toy(8)
    assert load(other, saved(cache, 0), 0) == 4
    assert other.cells.tokens(0).tolist() == prompt[:4]
    assert other.seq_pos_max(0) == 3
    assert decode(other, T(prompt[4:], 0, 4)) == pytest.approx([2.8])
    with other.sequence() as seq:
        other.seq_cp(0, seq)
        seq.truncate(4)
        assert decode(other, T(prompt[4:], seq.id, 4)) == pytest.approx([2.8])


def test_case_E14_a_sequence_that_owns_little_alone_is_saved_whole() -> None:
    cache = toy(8)
    decode(cache, T([1, 2, 3], 0, 0))
    cache.seq_cp(0, 1)
    decode(cache, [*T([10], 0, 3), *T([20], 1, 3)])
    file = saved(cache, 1)
    cache.clear()
    assert load(cache, file, 5) == 4
    assert decode(cache, T([4], 5, 4)) == [6.0]
    assert cache.cells.present() == [5]


def test_case_G08_a_reused_cell_shows_only_its_new_owner() -> None:
    cache = toy(8)
    decode(cache, T([1, 2, 3, 4, 5, 6], 0, 0))
    cache.seq_cp(0, 1, 0, 2)
    cache.seq_rm(0)
    decode(cache, T([50, 51, 52, 53], 2, 0))
    assert decode(cache, T([3], 1, 2)) == [2.0]
    assert contents(saved(cache, 1))[1]["layers.0.v"].flatten().tolist() == [1, 2, 3]
    assert cache.keys(0, 1).shape[0] == 3


def test_shared_cells_stay_shared_through_a_whole_file() -> None:
    cache, other = toy(8), toy(8)
    feed(cache, "0:0..3")
    cache.seq_cp(0, 5)
    load(other, saved(cache))
    assert other.num_used == 4
    assert other.stats()["groups"][0]["shared"] == 4


def test_embeddings_are_saved_without_token_ids() -> None:
    cache, other = toy(8), toy(8)
    decode(cache, batch_of(T([3, 4], 0, 0), embeddings=True))
    load(other, saved(cache, 0), 0)
    assert other.cells.tokens(0).tolist() == [-1, -1]
    assert decode(other, T([5], 0, 2)) == [4.0]


def test_a_reading_layer_is_not_in_the_file() -> None:
    layers = [toy_layer(), toy_layer(source=0)]
    cache, other = (KVCache(layers, 8, max_seqs=4) for _ in range(2))
    feed_layers(cache, "0:0..3")
    assert "layers.1.k" not in contents(saved(cache))[1]
    load(other, saved(cache))
    assert feed_layers(other, "0:4") == feed_layers(cache, "0:4")


# --- damage ---------------------------------------------------------------------------------------------------------------------------


def tiny_file() -> tuple[KVCache, bytes]:
    cache = toy(4, max_seqs=2)
    feed(cache, "0:0..1")
    return cache, saved(cache, 0)


def test_every_truncation_is_refused_and_changes_nothing() -> None:
    cache, data = tiny_file()
    before = state_of(cache)
    start = time.perf_counter()
    for n in range(len(data)):
        with pytest.raises(StateError):
            load(cache, data[:n], 1)
    assert state_of(cache) == before
    assert time.perf_counter() - start < 0.02 * len(data)


def test_every_flipped_bit_is_refused_and_changes_nothing() -> None:
    cache, data = tiny_file()
    before = state_of(cache)
    for at in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(StateError):
                onekv.files.load(io.BytesIO(broken))
        with pytest.raises(StateError):
            load(cache, bytes(broken), 1)
    assert state_of(cache) == before
    load(cache, data, 1)


def test_every_inserted_or_appended_byte_is_refused() -> None:
    cache, data = tiny_file()
    for at in range(0, len(data) + 1, 7):
        with pytest.raises(StateError):
            load(cache, data[:at] + b"0" + data[at:], 1)


# --- files made to harm, with a correct digest ----------------------------------------------------------------------------------------


def victim() -> KVCache:
    """Two groups, shared cells, lost cells: everything a file can speak of."""
    cache = toy(12, FULL, THREE, window_cells=6, max_seqs=4)
    for rows in ("(0,{0,1}) (1,{0,1})", "0:2..4 1:2", "0:5"):
        feed(cache, rows, max_ubatch=2)
    assert (cache.cells.column(1, 0) == -1).any()
    return cache


def put(name: str, at: Any, value: float) -> Callable[[Description, Tensors], None]:
    def change(_: Description, tensors: Tensors) -> None:
        tensors[name][at] = value

    return change


def swap(name: str, convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Description, Tensors], None]:
    def change(_: Description, tensors: Tensors) -> None:
        tensors[name] = convert(tensors[name]).contiguous()

    return change


def say(*path_and_value: Any) -> Callable[[Description, Tensors], None]:
    *path, last, value = path_and_value

    def change(description: Description, _: Tensors) -> None:
        inner: Any = description
        for step in path:
            inner = inner[step]
        inner[last] = value

    return change


def drop(*path: Any) -> Callable[[Description, Tensors], None]:
    def change(description: Description, _: Tensors) -> None:
        inner: Any = description
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]

    return change


def both(*changes: Callable[[Description, Tensors], None]) -> Callable[[Description, Tensors], None]:
    def change(description: Description, tensors: Tensors) -> None:
        for one in changes:
            one(description, tensors)

    return change


def add_axes(*shapes: tuple[int, ...], value: int = 0, dtype: torch.dtype = torch.int32) -> Callable[[Description, Tensors], None]:
    def change(_: Description, tensors: Tensors) -> None:
        for s, shape in enumerate(shapes):
            tensors[f"seqs.{s}.axes"] = torch.full(shape, value, dtype=dtype)

    return change


def rename_sequence(description: Description, tensors: Tensors) -> None:
    description["sequences"] = [0, 9999]
    for name in [name for name in tensors if name.startswith("seqs.1.")]:
        tensors[name.replace("seqs.1.", "seqs.9999.")] = tensors.pop(name)


SHAPES = {
    "one more cell": lambda t: torch.cat([t, t[:1]]),
    "one cell fewer": lambda t: t[1:],
    "no head": lambda t: t[:, :0],
    "two heads": lambda t: t.repeat(1, 2, 1),
    "wider": lambda t: t.repeat(1, 1, 2),
    "flat": lambda t: t.flatten(),
    "one number": lambda t: t.flatten()[0],
    "int32": lambda t: t.int(),
    "float64": lambda t: t.double(),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "bool": lambda t: t.bool(),
}
ROW_SHAPES = {
    "longer": lambda t: torch.cat([t, t[-1:]]),
    "shorter": lambda t: t[:-1],
    "empty": lambda t: t[:0],
    "two axes": lambda t: t[None],
    "one number": lambda t: t[0],
    "int64": lambda t: t.long(),
    "float32": lambda t: t.float(),
    "int8": lambda t: t.to(torch.int8),
}
HARM: dict[str, Callable[[Description, Tensors], None]] = {
    **{f"layers.0.k {name}": swap("layers.0.k", convert) for name, convert in SHAPES.items()},
    **{f"layers.1.v {name}": swap("layers.1.v", convert) for name, convert in SHAPES.items()},
    **{
        f"{tensor} {name}": swap(f"seqs.0.{tensor}", convert)
        for tensor in ("positions", "tokens", "cells.0", "cells.1")
        for name, convert in ROW_SHAPES.items()
    },
    "position negative": put("seqs.0.positions", 0, -5),
    "position smallest": put("seqs.0.positions", 0, -(2**31)),
    "positions fall": put("seqs.0.positions", 3, 1),
    "positions repeat out of place": put("seqs.0.positions", slice(0, 3), 9),
    "token below -1": put("seqs.0.tokens", 1, -2),
    "two tokens in a cell": put("seqs.0.tokens", 1, 7),
    "cell out of range": put("seqs.0.cells.0", 2, 10**6),
    "cell below -1": put("seqs.0.cells.0", 2, -2),
    "cell below -1 in a window": put("seqs.0.cells.1", 0, -2),
    "cell twice in a row": put("seqs.0.cells.0", 2, 0),
    "cell lost without a window": both(put("seqs.0.cells.0", 0, -1), put("seqs.1.cells.0", 0, -1)),
    "cell at two positions": put("seqs.1.cells.0", 2, 4),
    "cell of nobody": put("seqs.1.cells.1", slice(None), -1),
    "axes for one owner only": add_axes((2, 6)),
    "axes of two kinds in one cell": both(add_axes((2, 6), (2, 3)), put("seqs.0.axes", (0, 0), 3)),
    "axes negative": add_axes((2, 6), (2, 3), value=-1),
    "axes of wrong shape": add_axes((3, 6), (3, 3)),
    "axes of wrong length": add_axes((2, 5), (2, 3)),
    "axes of wrong dtype": add_axes((2, 6), (2, 3), dtype=torch.int64),
    "axes out of order": both(add_axes((2, 6), (2, 3)), put("seqs.0.positions", slice(0, 2), 1), put("seqs.0.axes", (0, 0), 3)),
    "tensor nobody asked for": lambda _, tensors: tensors.update(extra=torch.zeros(1)),
    "keys of a layer that is not there": lambda _, tensors: tensors.update({"layers.2.k": torch.zeros(1)}),
    "a row nobody names": lambda _, tensors: tensors.update({"seqs.3.positions": torch.zeros(0, dtype=torch.int32)}),
    **{f"no field {name}": drop(name) for name in ("whole", "fingerprint", "layers", "keys", "values", "sequences", "version")},
    **{
        f"{name} = {value!r}": say(name, value)
        for name, values in {
            "version": [0, VERSION + 1, "1", None, [1], {}, 10**30],
            "whole": [None, 1, "true", False],
            "fingerprint": [None, 3, ["a"], "other"],
            "layers": [None, {}, [], "ab", 2**20, [None], [[]], [{}], [1, 2]],
            "sequences": [
                None,
                {},
                {"0": 1, "1": 2},
                2,
                "01",
                [0],
                [0, 1, 2],
                [0, 0],
                [0, -1],
                [0, True],
                [0, 1.0],
                ["0", "1"],
                [0, None],
                [[0], 1],
            ],
            "more": [1],
        }.items()
        for value in values
    },
    "a sequence id too large": rename_sequence,
    "100000 sequences": say("sequences", [*range(10**5)]),
    "a layer fewer": lambda d, _: d["layers"].pop(),
    "a layer more": lambda d, _: d["layers"].append(d["layers"][0]),
    "10000 layers": lambda d, _: d.update(layers=d["layers"][:1] * 10_000),
    **{
        f"layer field {name} = {str(value)[:20]}": say("layers", 0, name, value)
        for name, values in {
            "num_kv_heads": [0, -1, "1", 2, 1.0, True, 2**31, 10**30, None],
            "head_dim": [0, 4, None, 2**40, [2]],
            "value_dim": [0, 2, "1"],
            "source": [0, 1, -1, "0", True, 1.5],
            "window": [None, 3, {}, {"kind": 9, "size": 1}, {"kind": 1, "size": 0}, {"kind": [1], "size": 1}, {"kind": 1, "size": 1e99}],
            "rope": [{}, 1, [], "rope", {"inv_freq": []}, {"inv_freq": None}, {"inv_freq": [[1.0]]}, {"inv_freq": [1.0], "offset": -1}],
            "more": [1],
        }.items()
        for value in values
    },
    **{
        f"rope field {name} = {str(value)[:20]}": say("layers", 0, "rope", name, value)
        for name, values in {
            "inv_freq": [[10**400], [float("nan")], [float("inf")], ["x"], ["1"], [2.0], [1.0, 1.0], "1"],
            "layout": ["other", None, ["half"], 1],
            "offset": ["0", 1, None, 2**70],
            "part": ["queries", None, "value"],
            "more": [1],
        }.items()
        for value in values
    },
    **{f"no layer field {name}": drop("layers", 0, name) for name in ("num_kv_heads", "head_dim", "window", "rope")},
}


@pytest.mark.parametrize("name", HARM)
def test_case_E06_a_file_that_contradicts_itself_is_refused_at_once(name: str) -> None:
    cache = victim()
    description, tensors = contents(saved(cache))
    load(cache, made(description, tensors))  # unchanged, it loads
    HARM[name](description, tensors)
    assert_quickly_refused(cache, made(description, tensors))


def assert_quickly_refused(cache: KVCache, data: bytes, seq: int | None = None) -> None:
    before, kv = state_of(cache), kv_of(cache, cache.cells.present())
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(StateError):
        load(cache, data, seq)
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1 + len(data) / 2**18
    assert peak < 20 * len(data) + 10 * 2**20
    assert state_of(cache) == before
    assert same_kv(kv_of(cache, cache.cells.present()), kv)


CODEC_FIELDS = {
    "none": None,
    "a name": "q8_0",
    "a list": ["q8_0", False],
    "no name": {"hadamard": False},
    "an unknown name": {"name": "q5_0", "hadamard": False},
    "a name that is no text": {"name": ["q8_0"], "hadamard": False},
    "another name": {"name": "float32", "hadamard": False},
    "another block": {"name": "q4_0", "hadamard": False},
    "rotated floats": {"name": "float32", "hadamard": True},
    "a rotation that is a number": {"name": "q8_0", "hadamard": 1},
    "no rotation": {"name": "q8_0", "hadamard": None},
    "more": {"name": "q8_0", "hadamard": False, "blocks": 32},
}
QUANTISED_SHAPES = {
    "one byte more": lambda t: torch.cat([t, t[..., :1]], dim=-1),
    "one byte fewer": lambda t: t[..., :-1],
    "a block more": lambda t: t.repeat(1, 1, 2),
    "no byte": lambda t: t[..., :0],
    "the numbers themselves": lambda t: torch.zeros(*t.shape[:2], 64),
    "int8": lambda t: t.view(torch.int8),
    "a byte as float32": lambda t: t.float(),
    "one cell fewer": lambda t: t[1:],
    "one head": lambda t: t[:, :1],
}


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("said", CODEC_FIELDS.values(), ids=list(CODEC_FIELDS))
def test_case_E06_a_file_that_misnames_its_cells_is_refused(said: Any, part: str) -> None:
    cache = geometric(WIDE, k_dtype="q8_0")
    description, tensors = contents(saved(cache, 0))
    description[part] = said
    assert_quickly_refused(cache, made(description, tensors), 1)
    del description[part]
    assert_quickly_refused(cache, made(description, tensors), 1)


@pytest.mark.parametrize("tensor", ["layers.0.k", "layers.0.v"])
@pytest.mark.parametrize("convert", QUANTISED_SHAPES.values(), ids=list(QUANTISED_SHAPES))
@pytest.mark.parametrize("to", [{"k_dtype": "q8_0"}, {"k_dtype": "float32"}], ids=id_of)
def test_case_E06_quantised_cells_of_a_wrong_size_are_refused(to: dict[str, Any], convert: Any, tensor: str) -> None:
    cache = geometric(WIDE, **to)
    description, tensors = contents(saved(geometric(WIDE, k_dtype="q8_0"), 0))
    load(cache, made(description, tensors), 1)
    tensors[tensor] = convert(tensors[tensor]).contiguous()
    assert_quickly_refused(cache, made(description, tensors), 1)


@pytest.mark.parametrize(
    "name", [f"{part}.{name}" for part in ("layers.0", "layers.1") for name in "kv"] + ["seqs.1.tokens", "seqs.0.cells.1"]
)
def test_case_E06_a_file_without_one_of_its_tensors_is_refused(name: str) -> None:
    cache = victim()
    description, tensors = contents(saved(cache))
    del tensors[name]
    assert_quickly_refused(cache, made(description, tensors))


@pytest.mark.parametrize(("sequences", "whole"), [([0, 1], False), ([], False), ([1], False)])
def test_case_E06_a_file_of_one_sequence_holds_that_one(sequences: list[int], whole: bool) -> None:
    cache = victim()
    description, tensors = contents(saved(cache, 0))
    description |= {"sequences": sequences, "whole": whole}
    assert_quickly_refused(cache, made(description, tensors), 2)


ONE_CELL = {
    "one cell for two entries": ([0, 0], [5, 5], [0, 0]),
    "an entry without a cell and without a window": ([0, 1], [5, 5], [-1, 0]),
}


@pytest.mark.parametrize(("positions", "tokens", "cells"), ONE_CELL.values(), ids=list(ONE_CELL))
def test_case_E06_two_entries_need_two_cells(positions: list[int], tokens: list[int], cells: list[int]) -> None:
    cache = toy(4, max_seqs=2)
    feed(cache, T([5], 0, 0))
    description, tensors = contents(saved(cache, 0))
    row = {"positions": positions, "tokens": tokens, "cells.0": cells}
    tensors |= {f"seqs.0.{name}": torch.tensor(values, dtype=torch.int32) for name, values in row.items()}
    assert_quickly_refused(cache, made(description, tensors), 1)


def tensor_header(**changed: Any) -> dict[str, Any]:
    """The header of a file whose one tensor is described as told."""
    description, _ = contents(tiny_file()[1])
    tensor = {"dtype": "F32", "shape": [2, 1, 2], "data_offsets": [0, 16], **changed}
    return {"__metadata__": {"onekv": json.dumps(description), "sha256": "0" * 64}, "layers.0.k": tensor}


METADATA = tensor_header()["__metadata__"]
HEADERS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "eight zeros": b"\0" * 8,
    "header of no length": raw(b""),
    "header length 2^63": raw(b"{}", length=2**63),
    "header length 2^64 - 1": raw(b"{}", length=2**64 - 1),
    "header length one too many": raw(tensor_header(), bytes(15), length=len(json.dumps(tensor_header(), separators=(",", ":"))) + 17),
    "header not JSON": raw(b'{"sha256":"' + b"0" * 64 + b'"'),
    "header a list": raw(["sha256", {"sha256": "0" * 64}]),
    "header not UTF-8": raw(b'{"sha256":"' + b"0" * 64 + b'","\xff":1}'),
    "header nested deeply": raw(b'{"sha256":"' + b"0" * 64 + b'","a":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
    "number of 10000 digits": raw(b'{"sha256":"' + b"0" * 64 + b'","a":' + b"9" * 10**4 + b"}"),
    "no metadata": raw({"sha256": "0" * 64}),
    "metadata not an object": raw({"__metadata__": [{"sha256": "0" * 64}]}),
    "metadata without our own": raw({"__metadata__": {"sha256": "0" * 64}}),
    "our metadata not text": raw({"__metadata__": {**METADATA, "onekv": {"version": 1}}}),
    "our metadata not JSON": raw({"__metadata__": {**METADATA, "onekv": "{"}}),
    "our metadata a list": raw({"__metadata__": {**METADATA, "onekv": "[1]"}}),
    "our metadata nested deeply": raw({"__metadata__": {**METADATA, "onekv": "[" * 10**5}}),
    "two digests": raw(json.dumps({"__metadata__": METADATA}, separators=(",", ":")).encode()[:-2] + b',"sha256":"' + b"0" * 64 + b'"}}'),
    "digest cut": raw(b'{"sha256":"00"}'),
    "no tensors": raw({"__metadata__": METADATA}),
    "shape of 2^31 cells": raw(tensor_header(shape=[2**31 - 1, 1, 2]), bytes(16)),
    "shape that overflows": raw(tensor_header(shape=[2**62, 2**62, 2**62]), bytes(16)),
    "shape negative": raw(tensor_header(shape=[-1, 1, 2]), bytes(16)),
    "shape not numbers": raw(tensor_header(shape=["2", 1, 2]), bytes(16)),
    "offsets beyond the end": raw(tensor_header(data_offsets=[0, 2**40]), bytes(16)),
    "offsets reversed": raw(tensor_header(data_offsets=[16, 0]), bytes(16)),
    "offsets negative": raw(tensor_header(data_offsets=[-16, 0]), bytes(16)),
    "bytes nobody describes": raw(tensor_header(), bytes(32)),
    "dtype unknown": raw(tensor_header(dtype="Q8"), bytes(16)),
    "dtype of other size": raw(tensor_header(dtype="F64"), bytes(16)),
    "another safetensors file": safetensors.torch.save({"weight": torch.zeros(4)}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_case_E06_a_file_with_an_absurd_header_is_refused_at_once(name: str, tmp_path: Path) -> None:
    cache = toy(4, max_seqs=2)
    feed(cache, "0:0..1")
    assert_quickly_refused(cache, HEADERS[name], 0)
    (tmp_path / "file").write_bytes(HEADERS[name])
    with pytest.raises(StateError):
        cache.load(tmp_path / "file", 0)


def test_nothing_but_numbers_of_cells_reaches_the_cache_from_a_file() -> None:
    """NaN keys are what was stored, not damage: they load, and only their own sequence reads them."""
    cache = toy(8)
    feed(cache, "0:0..1")
    description, tensors = contents(saved(cache, 0))
    tensors["layers.0.k"][:] = float("nan")
    load(cache, made(description, tensors), 1)
    assert decode(cache, T([2], 0, 2)) == [1.0]


# --- writing --------------------------------------------------------------------------------------------------------------------------


def fails(error: BaseException) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def half_written(tensors: Any, path: Any, metadata: Any) -> None:
    Path(path).write_bytes(safetensors.torch.save(tensors, metadata)[:100])
    raise OSError(errno.ENOSPC, "No space left on device")


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")
BROKEN_WRITES: dict[str, tuple[str, Any]] = {
    "nothing can be created": ("os.open", fails(PermissionError(errno.EACCES, "Permission denied"))),
    "the disk fills": ("safetensors.torch.save_file", half_written),
    "the writer fails": ("safetensors.torch.save_file", fails(safetensors.SafetensorError("I/O error"))),
    "the disk cannot be synced": ("os.fsync", fails(FULL_DISK)),
    "the file cannot be renamed": ("os.replace", fails(FULL_DISK)),
    "an interrupt while writing": ("safetensors.torch.save_file", fails(KeyboardInterrupt())),
    "an interrupt while syncing": ("os.fsync", fails(KeyboardInterrupt())),
}


@pytest.mark.parametrize(("name", "broken"), BROKEN_WRITES.values(), ids=list(BROKEN_WRITES))
@pytest.mark.parametrize("had_file", [True, False])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    name: str, broken: Any, had_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, path = toy(8), tmp_path / "chat.kv"
    feed(cache, "0:0..2")
    if had_file:
        cache.save(path, 0)
    old = path.read_bytes() if had_file else None
    feed(cache, "0:3..5")
    before = state_of(cache)
    monkeypatch.setattr(name, broken)
    with pytest.raises((StateError, KeyboardInterrupt)) as raised:
        cache.save(path, 0)
    assert ("interrupt" in raised.typename.lower()) or re.search("cannot write .*what was there is unchanged", str(raised.value))
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["chat.kv"] * had_file
    assert (path.read_bytes() if had_file else None) == old
    assert state_of(cache) == before
    assert cache.save(path, 0) == 6


@pytest.mark.parametrize("where", ["missing/chat.kv", "file/chat.kv", "directory"])
def test_a_path_that_cannot_be_written_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    cache = toy(4)
    with pytest.raises(StateError, match="cannot write"):
        cache.save(tmp_path / where)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["directory", "file"]


def test_a_file_object_that_fails_is_a_state_error() -> None:
    class Broken(io.BytesIO):
        def write(self, _: Any) -> int:
            raise FULL_DISK

        def read(self, _: int = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    cache = toy(4)
    with pytest.raises(StateError, match="No space left"):
        cache.save(Broken())
    with pytest.raises(StateError, match="Input/output error"):
        cache.load(Broken())


@pytest.mark.parametrize("where", ["missing", "directory", "file/inside"])
def test_a_path_that_cannot_be_read_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    cache = toy(4)
    feed(cache, "0:0..1")
    before = state_of(cache)
    for seq in (None, 0):
        with pytest.raises(StateError, match="cannot read"):
            cache.load(tmp_path / where, seq)
    assert state_of(cache) == before


def test_a_file_is_whole_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, events = toy(8), []
    feed(cache, "0:0..3")
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda fd: (events.append(f"sync {os.fstat(fd).st_size > 100}"), fsync(fd)))

    def renamed(source: Any, target: Any) -> None:
        onekv.files.load(source)
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr("os.replace", renamed)
    cache.save(tmp_path / "chat.kv")
    assert events[:2] == ["sync True", "rename"]
    assert events[2].startswith("sync")  # the directory


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
import safetensors.torch
from tiny import feed, toy

path, where = sys.argv[1:]
cache = toy(64)
feed(cache, "0:0..9")
cache.save(path, 0)
feed(cache, "0:10..40")
write = safetensors.torch.save_file

def kill(*arguments):
    if where == "half written":
        write(*arguments)
        os.truncate(arguments[1], 700)
    os.kill(os.getpid(), signal.SIGKILL)

target = {"half written": (safetensors.torch, "save_file"), "not synced": (os, "fsync"), "not renamed": (os, "replace")}[where]
setattr(*target, kill)
cache.save(path, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["half written", "not synced", "not renamed"])
def test_a_killed_save_leaves_the_old_file_whole(where: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), where], cwd=Path(__file__).parent.parent, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    cache = toy(64)
    assert cache.load(path, 0) == 10
    assert cache.cells.tokens(0).tolist() == list(range(10))


def test_progress_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onekv.files, "_CHUNK", 64)
    cache, told = toy(64), []
    feed(cache, "0:0..40")
    for call in (cache.save, cache.load):
        told.clear()
        call(tmp_path / "chat.kv", 0, progress=lambda done, total: told.append((done, total)))
        size = (tmp_path / "chat.kv").stat().st_size
        assert len(told) > 5
        assert told == sorted(told)
        assert {total for _, total in told} == {size}
        assert told[-1] == (size, size)


def test_files_and_file_objects_hold_the_same(tmp_path: Path) -> None:
    cache = toy(8)
    feed(cache, "0:0..3")
    for seq in (None, 0):
        cache.save(str(tmp_path / "chat.kv"), seq)
        assert_same_contents((tmp_path / "chat.kv").read_bytes(), saved(cache, seq))


def test_a_cache_can_be_saved_and_loaded_by_handle(tmp_path: Path) -> None:
    cache = toy(8)
    with cache.sequence() as one, cache.sequence() as two:
        feed(cache, batch_of(T([1, 2], one.id, 0)))
        assert one.save(tmp_path / "chat.kv") == 2
        assert cache.load(tmp_path / "chat.kv", two) == 2
        assert two.tokens.tolist() == [1, 2]


@pytest.mark.parametrize("seq", [None, 0])
def test_memory_that_runs_out_while_converting_changes_nothing(seq: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = toy(8, k_dtype="bfloat16")
    feed(cache, "0:0..3")
    data, load_state = saved(cache, seq), onekv.files.load

    def starved(*arguments: Any) -> Any:
        state = load_state(*arguments)
        state.values[0] = Starved()
        return state

    monkeypatch.setattr(onekv.files, "load", starved)
    assert_refused(cache, data, seq, MemoryError)


class Starved:
    def to(self, *_: Any) -> torch.Tensor:
        raise MemoryError


def test_an_unknown_v_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="v_layout"):
        toy(4, v_layout="columns")


def test_a_saved_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    small().save(tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_state_that_did_not_fit_is_put_again_as_it_was_read() -> None:
    """Converted from another dtype each time, not from what the first attempt had made of it."""
    source = toy(8, k_dtype="float16", v_dtype="float16")
    decode(source, "0:0..5")
    state = source.copied(0)
    other = toy(8)
    decode(other, "1:0..3")
    with pytest.raises(CacheFull):
        other.put(state, 0)
    other.seq_rm(1)
    assert other.put(state, 0) == 6
    assert same_kv(kv_of(other, [0]), kv_of(source, [0]))
