"""KVStore and the specs of layers: what is refused, what is written, and that the memory order of values changes nothing."""

from typing import Any

import pytest
import torch

from onekv import ConfigError, KVCache, LayerSpec, Rope, Window
from onekv.codecs import codecs_of
from onekv.storage import KVStore, layer_groups, owning_layers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = ["rows", "transposed"]


def store_of(*layers: LayerSpec, **options: Any) -> KVStore:
    return KVStore(layers or [LayerSpec(2, 4, value_dim=3)], 8, **options)


def some(rows: int, width: int, heads: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, heads, width, generator=torch.Generator().manual_seed(rows + width)).to(dtype)


@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize(("k_dtype", "v_dtype"), [("float32", None), ("float16", "bfloat16"), ("bfloat16", "float32")])
def test_memory_starts_at_zero_and_has_the_documented_shapes(v_layout: Any, k_dtype: str, v_dtype: str | None) -> None:
    store = store_of(LayerSpec(2, 4, value_dim=3), LayerSpec(1, 6), k_dtype=k_dtype, v_dtype=v_dtype, v_layout=v_layout)
    k, v = DTYPES[k_dtype], DTYPES[v_dtype or k_dtype]
    assert [(t.shape, t.dtype) for t in (store.keys(0), store.values(0))] == [((8, 2, 4), k), ((8, 2, 3), v)]
    assert [(t.shape, t.dtype) for t in (store.keys(1), store.values(1))] == [((8, 1, 6), k), ((8, 1, 6), v)]
    assert not any(t.any() for i in range(2) for t in (store.keys(i), store.values(i)))
    assert store.nbytes == 8 * (14 * k.itemsize + 12 * v.itemsize)
    assert store.cell_nbytes([1]) == 6 * k.itemsize + 6 * v.itemsize
    assert store.cell_nbytes() == store.nbytes // 8


@pytest.mark.parametrize("passed", [torch.float64, *DTYPES.values()])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("v_layout", LAYOUTS)
def test_rows_go_to_their_cells_and_nowhere_else(passed: torch.dtype, stored: str, v_layout: Any) -> None:
    store = store_of(k_dtype=stored, v_layout=v_layout)
    k, v = some(3, 4, dtype=passed), some(3, 3, dtype=passed)
    store.store(0, torch.tensor([5, 2, 7]), k, v)
    for memory, rows in ((store.keys(0), k), (store.values(0), v)):
        assert torch.equal(memory[[5, 2, 7]], rows.to(DTYPES[stored]))
        assert not memory[[0, 1, 3, 4, 6]].any()
    keys, values = store.gather(0, torch.tensor([7, 5]))
    assert (keys.dtype, values.dtype) == (torch.float32, torch.float32)
    assert torch.equal(keys, k[[2, 0]].to(DTYPES[stored]).float())
    assert torch.equal(values, v[[2, 0]].to(DTYPES[stored]).float())
    keys.fill_(9)
    assert not (store.keys(0) == 9).any()
    store.zero()
    assert not store.keys(0).any()
    assert not store.values(0).any()


QUANTISED = [("q8_0", None), ("q4_0", None), ("q8_0", "q4_0"), ("q4_0", "bfloat16"), ("float32", "q8_0")]


@pytest.mark.parametrize("rotated", [None, False, True])
@pytest.mark.parametrize(("k_dtype", "v_dtype"), QUANTISED)
def test_quantised_rows_are_the_bytes_of_their_codecs_in_their_cells(k_dtype: str, v_dtype: str | None, rotated: bool | None) -> None:
    if rotated and "float" in f"{k_dtype} {v_dtype}":
        with pytest.raises(ConfigError, match=r"hadamard=True rotates quantised keys and values, but ._dtype is b?float"):
            store_of(k_dtype=k_dtype, v_dtype=v_dtype, hadamard=rotated)
        return
    layer = LayerSpec(2, 40, value_dim=64)
    store = store_of(layer, LayerSpec(2, 40, value_dim=64, source=0), k_dtype=k_dtype, v_dtype=v_dtype, hadamard=rotated)
    assert (store.k_codec, store.v_codec) == codecs_of(k_dtype, v_dtype, rotated)
    k, v = some(3, 40), some(3, 64)
    store.store(0, torch.tensor([5, 2, 7]), k, v)
    for layer_idx in (0, 1):
        for memory, codec, rows in ((store.raw_keys(layer_idx), store.k_codec, k), (store.raw_values(layer_idx), store.v_codec, v)):
            assert (memory.shape, memory.dtype) == ((8, 2, codec.width(rows.shape[2])), codec.dtype)
            assert memory.is_contiguous()
            assert torch.equal(memory[[5, 2, 7]], codec.encode(rows))
            assert not memory[[0, 1, 3, 4, 6]].any()
        cells = torch.tensor([7, 5, 0])
        for unrotate in (True, False):
            found = store.gather(layer_idx, cells, unrotate)
            memories = (store.raw_keys(layer_idx), store.k_codec, 40), (store.raw_values(layer_idx), store.v_codec, 64)
            for part, (memory, codec, dim) in zip(found, memories, strict=True):
                assert (part.shape, part.dtype) == ((3, 2, dim), torch.float32)
                assert torch.equal(part, codec.decode(memory[cells], dim, unrotate))
        assert torch.equal(store.gather_keys(layer_idx, cells), store.gather(layer_idx, cells)[0])
        assert torch.equal(store.gather_values(layer_idx, cells), store.gather(layer_idx, cells)[1])
    assert store.nbytes == store.raw_keys(0).nbytes + store.raw_values(0).nbytes == 8 * store.cell_nbytes()
    store.zero()
    assert not any(part.any() for part in store.gather(0, torch.arange(8)))


@pytest.mark.parametrize("part", ["keys", "values"])
def test_quantised_cells_are_not_passed_off_as_numbers(part: str) -> None:
    store = store_of(k_dtype="q8_0" if part == "keys" else "float32", v_dtype="q4_0" if part == "values" else "float32")
    with pytest.raises(ConfigError, match=f"{part} stored as q._0 are bytes; raw_{part} gives their memory, gather their numbers"):
        getattr(store, part)(0)
    getattr(store, "keys" if part == "values" else "values")(0)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 576])
def test_quantised_cells_take_a_third_to_a_half_of_float16(head_dim: int) -> None:
    sizes = {}
    for name in ("float16", "q8_0", "q4_0"):
        cache = KVCache([LayerSpec(4, head_dim), LayerSpec(4, head_dim, window=Window.sliding(4))], 10, k_dtype=name, window_cells=5)
        sizes[name] = cache.store.cell_nbytes()
        groups = cache.stats()["groups"]
        assert cache.nbytes == cache.stats()["nbytes"] == sum(group["nbytes"] for group in groups) == 15 * sizes[name] // 2
    padded = -(-head_dim // 32) * 32 / head_dim  # 80 takes three blocks of 32
    assert sizes["q8_0"] <= 0.55 * padded * sizes["float16"]
    assert sizes["q4_0"] <= 0.30 * padded * sizes["float16"]


def test_copies_and_raw_writes_keep_every_byte() -> None:
    store = store_of(LayerSpec(2, 32), k_dtype="q8_0", v_dtype="q4_0")
    store.store(0, torch.arange(3), some(3, 32), some(3, 32))
    k, v = store.raw_keys(0)[:3].clone(), store.raw_values(0)[:3].clone()
    store.copy([0], torch.tensor([0, 1, 2]), torch.tensor([7, 5, 3]))
    assert torch.equal(store.raw_keys(0)[[7, 5, 3]], k)
    assert torch.equal(store.raw_values(0)[[7, 5, 3]], v)
    store.write_raw(0, torch.tensor([4]), k=k[2:])
    store.write_raw(0, torch.tensor([6]), v=v[2:])
    assert torch.equal(store.raw_keys(0)[[4, 6]], torch.cat([k[2:], torch.zeros_like(k[:1])]))
    assert torch.equal(store.raw_values(0)[[4, 6]], torch.cat([torch.zeros_like(v[:1]), v[2:]]))


def test_spec_M11_transposed_values_differ_in_memory_order_alone() -> None:
    plain, across = store_of(), store_of(v_layout="transposed")
    k, v = some(2, 4), some(2, 3)
    for store in (plain, across):
        store.store(0, torch.tensor([5, 2]), k, v)
    assert torch.equal(plain.values(0), across.values(0))
    assert plain.values(0).stride() == (6, 3, 1)
    flat = torch.as_strided(across.values(0), (48,), (1,))
    for dim in range(6):
        assert (flat[dim * 8 + 5], flat[dim * 8 + 2]) == (v[0].flatten()[dim], v[1].flatten()[dim])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": some(2, 4)}, r"k has shape \(2, 2, 4\), expected \[T, G, D\] = \[3, 2, 4\]"),
        ({"k": some(3, 3)}, "k has shape"),
        ({"k": some(3, 4, heads=1)}, "k has shape"),
        ({"k": some(3, 4)[:, :, :, None]}, "k has shape"),
        ({"v": some(3, 4)}, r"v has shape \(3, 2, 4\), expected \[T, G, D\] = \[3, 2, 3\]"),
        ({"v": some(1, 3)}, "v has shape"),
        ({"k": torch.zeros(3, 2, 4, dtype=torch.int32)}, "k must be a float tensor, got torch.int32"),
        ({"v": torch.zeros(3, 2, 3, dtype=torch.bool)}, "v must be a float tensor"),
        ({"v": torch.zeros(3, 2, 3, dtype=torch.complex64)}, "v must be a float tensor"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    store = store_of()
    with pytest.raises(ConfigError, match=message):
        store.store(**{"layer": 0, "slots": torch.tensor([5, 2, 7]), "k": some(3, 4), "v": some(3, 3)} | change)
    assert not store.keys(0).any()
    assert not store.values(0).any()


def test_reading_layers_show_their_source_and_never_write() -> None:
    store = store_of(LayerSpec(2, 4), LayerSpec(1, 4), LayerSpec(2, 4, source=0), LayerSpec(2, 4, source=2))
    assert (store.owner, store.physical) == ([0, 1, 0, 0], [0, 1])
    for layer in (2, 3):
        with pytest.raises(ConfigError, match=f"layer {layer} reads the cells of layer 0 and never writes"):
            store.store(layer, torch.tensor([0]), some(1, 4), some(1, 4))
    store.store(0, torch.tensor([3]), some(1, 4), some(1, 4))
    for layer in (2, 3):
        assert store.keys(layer).data_ptr() == store.keys(0).data_ptr()
        assert torch.equal(store.values(layer)[3], some(1, 4)[0])
    assert store.nbytes == 8 * (16 + 8) * 4


def test_each_layer_may_have_its_own_number_of_cells() -> None:
    store = KVStore([LayerSpec(1, 2), LayerSpec(1, 2)], [8, 3])
    assert (store.keys(0).shape[0], store.values(1).shape[0]) == (8, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_dtype": "float64"}, "k_dtype must be one of"),
        ({"k_dtype": torch.float32}, "k_dtype must be one of"),
        ({"v_dtype": "int8"}, "v_dtype must be one of"),
        ({"v_dtype": []}, "v_dtype must be one of"),
        ({"v_layout": "columns"}, "v_layout"),
        ({"k_dtype": "q5_0"}, "k_dtype must be one of float32, float16, bfloat16, q8_0, q4_0; got 'q5_0'"),
        ({"v_dtype": "q8_0", "v_layout": "transposed"}, 'q8_0 values are blocks of 32 dims of one cell; use v_layout="rows"'),
        ({"k_dtype": "q4_0", "v_layout": "transposed"}, "q4_0 values are blocks"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        store_of(**options)


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "value_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "4"])
def test_widths_and_heads_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"LayerSpec.{name} must be a positive integer"):
        LayerSpec(**{"num_kv_heads": 2, "head_dim": 4, name: value})


@pytest.mark.parametrize("value", [None, 512, "sliding", Window])
def test_a_layers_window_is_a_window(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"LayerSpec\.window must be a Window"):
        LayerSpec(2, 4, window=value)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (LayerSpec(2, 4, source=1), "the source must be an earlier layer"),
        (LayerSpec(2, 4, source=-1), "the source must be an earlier layer"),
        (LayerSpec(2, 4, source=True), "the source must be an earlier layer"),
        (LayerSpec(1, 4, source=0), "its heads differ"),
        (LayerSpec(2, 8, source=0), "its heads differ"),
        (LayerSpec(2, 4, value_dim=5, source=0), "its heads differ"),
        (LayerSpec(2, 4, window=Window.sliding(4), source=0), "its window differs"),
    ],
)
def test_a_source_is_an_earlier_layer_of_the_same_geometry(second: LayerSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        owning_layers([LayerSpec(2, 4), second])


def test_layers_of_equal_windows_make_a_group_and_the_full_one_comes_first() -> None:
    windows = [Window.sliding(4), Window.full(), Window.sliding(4), Window.chunked(4), Window.full()]
    assert layer_groups([LayerSpec(1, 2, window=w) for w in windows]) == (
        [Window.full(), Window.sliding(4), Window.chunked(4)],
        [1, 0, 1, 2, 0],
    )
    with pytest.raises(ConfigError, match="at least one layer"):
        layer_groups([])


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"inv_freq": ()}, "at least one frequency"),
        ({"inv_freq": (1.0,), "layout": "pairs"}, "layout"),
        ({"inv_freq": (1.0,), "part": "both"}, "part"),
        ({"inv_freq": (1.0,), "offset": -1}, "offset"),
        ({"inv_freq": (1.0, 0.5, 0.1)}, r"rotates dims \[0, 6\), but the key head has 4"),
        ({"inv_freq": (1.0, 0.5), "offset": 1}, r"rotates dims \[1, 5\), but the key head has 4"),
        ({"inv_freq": (1.0, 0.5), "part": "value"}, r"rotates dims \[0, 4\), but the value head has 3"),
    ],
)
def test_a_rotation_must_fit_its_head(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerSpec(1, 4, value_dim=3, rope=Rope(**rope))


def test_frequencies_may_come_as_a_tensor() -> None:
    assert Rope(torch.tensor([1.0, 0.5])).inv_freq == (1.0, 0.5)  # type: ignore[arg-type]
    assert LayerSpec(1, 4, rope=Rope((1.0, 0.5))) == LayerSpec(1, 4, rope=Rope([1, 0.5]))  # type: ignore[arg-type]
