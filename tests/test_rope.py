"""Rotation of stored keys: which dims turn, by which angle, in which layer."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from onekv import KVCache, LayerSpec, Rope, Window
from onekv.rope import rotate
from tiny import load_cells

COS, SIN = math.cos(1), math.sin(1)


@pytest.mark.parametrize(
    ("rope", "vector", "expected"),
    [
        pytest.param(Rope((1.0,)), [1, 0, 5, 6], [COS, SIN, 5, 6], id="half, two of four dims"),
        pytest.param(Rope((1.0,), layout="interleaved"), [1, 0, 5, 6], [COS, SIN, 5, 6], id="interleaved, two of four dims"),
        pytest.param(Rope((1.0, 0.5)), [1, 0, 0, 1], [COS, -math.sin(0.5), SIN, math.cos(0.5)], id="half, dims 0,2 and 1,3"),
        pytest.param(
            Rope((1.0, 0.5), layout="interleaved"),
            [1, 0, 0, 1],
            [COS, SIN, -math.sin(0.5), math.cos(0.5)],
            id="interleaved neighbours",
        ),
        pytest.param(Rope((1.0,), offset=2), [5, 6, 1, 0], [5, 6, COS, SIN], id="from an offset on"),
    ],
)
def test_case_F05_exactly_the_rotary_dims_turn(rope: Rope, vector: list[float], expected: list[float]) -> None:
    key = torch.tensor([[vector]], dtype=torch.float32)
    torch.testing.assert_close(rotate(key, torch.tensor([1]), rope).flatten(), torch.tensor(expected, dtype=torch.float32))
    assert key.flatten().tolist() == vector  # the argument is left alone


def test_case_F05_every_layer_turns_by_its_own_frequencies() -> None:
    layers = [
        LayerSpec(1, 2, 1, rope=Rope((1.0,))),
        LayerSpec(1, 2, 1, window=Window.sliding(4), rope=Rope((0.01,))),
        LayerSpec(1, 2, 1, window=Window.sliding(4)),
    ]
    cache = KVCache(layers, 4, max_seqs=2)
    load_cells(cache, "0{0} 1{0} . .")
    for layer in range(3):
        cache.store.store(layer, torch.tensor([0, 1]), torch.tensor([[[1.0, 0.0]]] * 2), torch.zeros(2, 1, 1))
    cache.seq_add(0, 1, -1, 2)
    assert cache.update()
    for layer, angle in enumerate([2, 0.02, 0]):
        torch.testing.assert_close(cache.keys(layer, 0)[:, 0], torch.tensor([[1, 0], [math.cos(angle), math.sin(angle)]]))


@given(
    pairs=st.integers(1, 4),
    offset=st.integers(0, 3),
    layout=st.sampled_from(["half", "interleaved"]),
    changes=st.tuples(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_rotations_compose_keep_lengths_and_leave_the_other_dims(
    pairs: int, offset: int, layout: str, changes: tuple[int, int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    rope = Rope(tuple(torch.rand(pairs, generator=rng).tolist()), layout, offset)
    vectors = torch.randn(3, 2, 12, generator=rng)
    one, two = (torch.full((3,), change) for change in changes)
    turned = rotate(rotate(vectors, one, rope), two, rope)
    torch.testing.assert_close(turned, rotate(vectors, one + two, rope), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned.norm(dim=-1), vectors.norm(dim=-1))
    outside = [*range(offset), *range(offset + 2 * pairs, 12)]
    assert torch.equal(turned[..., outside], vectors[..., outside])
    if changes[0]:
        assert not torch.equal(rotate(vectors, one, rope), vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_rotated_in_float32(dtype: torch.dtype) -> None:
    vectors = torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    turned = rotate(vectors, torch.arange(5), Rope((1.0, 0.3)))
    assert turned.dtype == torch.float32
    assert torch.equal(turned, rotate(vectors.float(), torch.arange(5), Rope((1.0, 0.3))))


def test_every_vector_turns_by_its_own_change() -> None:
    vectors = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(2))
    changes, rope = torch.tensor([0, -7, 3, 10**6]), Rope((1.0, 0.1, 0.01))
    together = rotate(vectors, changes, rope)
    for i in range(4):
        assert torch.equal(together[i : i + 1], rotate(vectors[i : i + 1], changes[i : i + 1], rope))
    assert torch.equal(together[0], vectors[0])
