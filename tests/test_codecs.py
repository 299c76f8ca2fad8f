"""Quantised heads: every byte against a scalar twin written from llama.cpp's definition and against the gguf package, and the rotation."""

import math
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from onekv import ConfigError
from onekv.codecs import Codec, codecs_of, converted, hadamard

QUANTISED = ["q8_0", "q4_0"]
FLOATS = ["float32", "float16", "bfloat16"]
WIDTHS = [1, 8, 31, 32, 33, 64, 80, 128]
TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}


def f32(x: float) -> np.float32:
    return np.float32(x)


def roundf(x: np.float32) -> int:
    """C's roundf: halves away from zero."""
    magnitude = math.floor(abs(float(x)) + 0.5)  # exact in double precision
    return -magnitude if x < 0 else magnitude


def inverse_of(d: np.float32) -> np.float32:
    """ggml's `d ? 1.0f/d : 0.0f`; 0 also where that overflows, after which C leaves the conversion to an integer undefined."""
    with np.errstate(over="ignore"):
        inverse = f32(0) if d == 0 else f32(f32(1) / d)
    return inverse if np.isfinite(inverse) else f32(0)


def block_q8_0(x: list[float]) -> tuple[bytes, np.float16]:
    """ggml's quantize_row_q8_0_ref for one block: quants and scale."""
    amax = f32(0)
    for v in x:
        amax = max(amax, abs(f32(v)))
    d = f32(amax / f32(127))
    inverse = inverse_of(d)
    return bytes(roundf(f32(f32(v) * inverse)) & 255 for v in x), np.float16(d)


def block_q4_0(x: list[float]) -> tuple[bytes, np.float16]:
    """ggml's quantize_row_q4_0_ref for one block: packed nibbles and scale."""
    amax, top = f32(0), f32(0)
    for v in x:
        if amax < abs(f32(v)):
            amax, top = abs(f32(v)), f32(v)
    d = f32(top / f32(-8))
    inverse = inverse_of(d)
    nibbles = [min(15, int(f32(f32(f32(v) * inverse) + f32(8.5)))) for v in x]
    return bytes(nibbles[j] | nibbles[j + 16] << 4 for j in range(16)), np.float16(d)


TWINS: dict[str, Callable[[list[float]], tuple[bytes, np.float16]]] = {"q8_0": block_q8_0, "q4_0": block_q4_0}


def encoded_by_hand(x: torch.Tensor, name: str) -> bytes:
    """One head [D]: the quants of all blocks, then all scales."""
    padded = x.tolist() + [0.0] * (-x.numel() % 32)
    blocks = [TWINS[name](padded[i : i + 32]) for i in range(0, len(padded), 32)]
    return b"".join(quants for quants, _ in blocks) + b"".join(scale.tobytes() for _, scale in blocks)


def decoded_by_hand(stored: bytes, name: str, dim: int) -> list[float]:
    """The numbers of one stored head, in double precision."""
    blocks = len(stored) // (34 if name == "q8_0" else 18)
    scales = np.frombuffer(stored[-2 * blocks :], "<f2").astype(float).tolist()
    numbers: list[float] = []
    for b, scale in enumerate(scales):
        if name == "q8_0":
            quants = np.frombuffer(stored[32 * b : 32 * b + 32], np.int8).tolist()
        else:
            packed = stored[16 * b : 16 * b + 16]
            quants = [(byte & 15) - 8 for byte in packed] + [(byte >> 4) - 8 for byte in packed]
        numbers += [scale * q for q in quants]
    return numbers[:dim]


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


INPUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "random": lambda dim: some(40, 3, dim),
    "random, small and large": lambda dim: some(40, 3, dim) * torch.logspace(-9, 4, 40)[:, None, None],
    "zeros": lambda dim: torch.zeros(2, 1, dim),
    "minus zeros": lambda dim: -torch.zeros(2, 1, dim),
    "constants": lambda dim: torch.tensor([1.0, -1.0, 0.1, -3.3, 1e-6])[:, None, None].expand(5, 2, dim),
    "signs alone": lambda dim: some(20, 2, dim).sign(),  # the first of equal magnitudes gives the scale its sign
    "halves": lambda dim: torch.cat([torch.full((1, 1, 1), 127.0), torch.arange(dim - 1).float().expand(1, 1, -1) - 60.5], dim=-1),
    "one outlier": lambda dim: some(20, 2, dim) * torch.cat([torch.tensor([1000.0]), torch.ones(dim - 1)]),
    "scales too small for float16": lambda dim: some(20, 2, dim) * 1e-9,
    "scales that are subnormal in float16": lambda dim: some(20, 2, dim) * 1e-5,
    "denormal numbers": lambda dim: some(20, 2, dim) * 1e-36,
}


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_byte_and_every_number_is_that_of_the_scalar_twin(kind: str, name: str, dim: int) -> None:
    codec, x = Codec(name), INPUTS[kind](dim)
    stored = codec.encode(x)
    assert torch.equal(codec._encode(x), stored)  # the slow twin
    assert (stored.shape, stored.dtype) == ((*x.shape[:2], (34 if name == "q8_0" else 18) * math.ceil(dim / 32)), torch.uint8)
    assert codec.width(dim) == stored.shape[-1]
    decoded = codec.decode(stored, dim)
    assert (decoded.shape, decoded.dtype) == (x.shape, torch.float32)
    for head, line, numbers in zip(x.flatten(0, 1), stored.flatten(0, 1), decoded.flatten(0, 1), strict=True):
        assert bytes(line.tolist()) == encoded_by_hand(head, name)
        assert numbers.tolist() == decoded_by_hand(bytes(line.tolist()), name, dim)  # products of 11 and 7 bits are exact


@given(numbers=st.lists(st.floats(-6e4, 6e4, width=32), min_size=1, max_size=70))
@settings(max_examples=300)
@pytest.mark.parametrize("name", QUANTISED)
def test_any_finite_numbers_are_stored_as_the_scalar_twin_stores_them(name: str, numbers: list[float]) -> None:
    codec, x = Codec(name), torch.tensor(numbers)
    assert bytes(codec.encode(x).tolist()) == bytes(codec._encode(x).tolist()) == encoded_by_hand(x, name)


@pytest.mark.parametrize("name", QUANTISED)
def test_numbers_whose_scale_has_no_finite_inverse_are_zeros(name: str) -> None:
    x = torch.tensor([[1e-38, -1e-40, 0.0, 1e-45] * 10])
    decoded = Codec(name).decode(Codec(name).encode(x), 40)
    assert not decoded.any()


@pytest.mark.parametrize("name", QUANTISED)
def test_quants_and_scales_are_those_of_the_gguf_package(name: str) -> None:
    x = torch.cat([some(500, 64), some(100, 64).sign(), some(100, 64).round() / 2, torch.zeros(4, 64), some(100, 64) * 1e-5])
    theirs = gguf.quants.quantize(x.numpy(), TYPES[name]).reshape(len(x), 2, -1)  # each block: scale, then quants
    mine = Codec(name).encode(x).numpy()
    assert np.array_equal(mine[:, :-4], theirs[:, :, 2:].reshape(len(x), -1))
    assert np.array_equal(mine[:, -4:], theirs[:, :, :2].reshape(len(x), -1))
    assert np.array_equal(Codec(name).decode(torch.from_numpy(mine), 64), gguf.quants.dequantize(theirs.reshape(len(x), -1), TYPES[name]))


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_compiled_heads_are_torchs_to_the_bit(dtype: torch.dtype, name: str, dim: int) -> None:
    x = some(100, 3, dim).to(dtype)
    for codec in (Codec(name), Codec(name, True)):
        for heads in (x, x[:0], x[0], x.transpose(0, 1), x.requires_grad_()):
            assert torch.equal(codec.encode(heads), codec._encode(heads))


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_stored_of_a_head_depends_on_that_head_alone(name: str, rotated: bool) -> None:
    codec, x = Codec(name, rotated), some(300, 5, 128)
    stored = codec.encode(x)
    for rows in (1, 2, 7, 64):
        assert torch.equal(codec.encode(x[:rows]), stored[:rows])
    assert torch.equal(codec.encode(x[::3, 1:4].double()), stored[::3, 1:4])
    assert torch.equal(codec.encode(x.transpose(0, 1)).transpose(0, 1), stored)


@pytest.mark.parametrize("codec", [Codec("float16"), *(Codec(name, rotated) for name in QUANTISED for rotated in (False, True))], ids=str)
def test_no_heads_are_no_heads(codec: Codec) -> None:
    stored = codec.encode(torch.zeros(0, 2, 40))
    assert stored.shape == (0, 2, codec.width(40))
    assert codec.decode(stored, 40).shape == (0, 2, 40)


@pytest.mark.parametrize(("name", "bound"), [("q8_0", 0.5 / 127), ("q4_0", 1 / 8)])
def test_no_number_is_farther_from_what_was_stored_than_its_blocks_largest_allows(name: str, bound: float) -> None:
    """Half a step of the integers, a whole one at q4_0's positive end; and the float16 scale's half unit in 2048."""
    x = some(500, 2, 96)
    error = (Codec(name).decode(Codec(name).encode(x), 96) - x).abs().view(500, 2, 3, 32)
    largest = x.view(500, 2, 3, 32).abs().amax(-1, keepdim=True)
    assert (error <= largest * (bound + 2**-11)).all()
    assert (error.amax(-1, keepdim=True) > largest * bound / 4).float().mean() > 0.9  # the bound is no idle one


# --- numbers that cannot be stored ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38, -1e38])
@pytest.mark.parametrize("name", QUANTISED)
def test_what_cannot_be_stored_reads_as_nan_and_spoils_only_its_block(name: str, bad: float, rotated: bool) -> None:
    codec, x = Codec(name, rotated), some(3, 2, 96)
    clean = codec.decode(codec.encode(x), 96)
    x[1, 1, 40] = bad
    stored = codec.encode(x)
    assert torch.equal(stored, codec._encode(x))
    found = codec.decode(stored, 96)
    assert found[1, 1, 32:64].isnan().all()
    others = torch.ones(3, 2, 96, dtype=torch.bool)
    others[1, 1, 32:64] = False
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize(("name", "steps"), [("q8_0", 127), ("q4_0", 8)])
@pytest.mark.parametrize("sign", [1, -1])
def test_magnitudes_up_to_the_largest_float16_scale_are_stored(name: str, steps: int, sign: int) -> None:
    for largest, fits in ((65504.0 * steps, True), (65519.0 * steps, True), (65520.0 * steps, False)):
        x = torch.tensor([sign * largest] + [0.0] * 31)
        found = Codec(name).decode(Codec(name).encode(x), 32)
        assert found.isnan().all() if not fits else found.tolist() == [sign * 65504.0 * steps] + [0.0] * 31


# --- the rotation ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "size"), [(1, 1), (2, 2), (7, 1), (8, 8), (32, 32), (80, 16), (96, 32), (128, 128), (192, 64)])
def test_the_rotation_is_that_of_the_signs_of_common_bits(dim: int, size: int) -> None:
    """Entry (i, j) of the matrix is (-1) to the number of bits that i and j share."""
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim):
        for j in range(dim):
            if i // size == j // size:
                matrix[i, j] = (-1) ** ((i % size) & (j % size)).bit_count() / math.sqrt(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    x = some(20, 3, dim)
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix, atol=1e-6, rtol=1e-6)


@given(dim=st.integers(1, 140), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_the_rotation_is_its_own_inverse_and_keeps_every_product(dim: int, seed: int) -> None:
    x, y = some(6, 2, dim, seed=seed), some(6, 2, dim, seed=seed + 1)
    torch.testing.assert_close(hadamard(hadamard(x)), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((hadamard(x) * hadamard(y)).sum(-1), (x * y).sum(-1), atol=1e-4, rtol=1e-5)


def test_the_rotation_works_inside_and_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        hadamard(torch.ones(1, 1, 4096 // 16 * 3))  # a size no other test uses
    x = torch.ones(1, 1, 4096 // 16 * 3, requires_grad=True)
    hadamard(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", QUANTISED)
def test_a_rotated_head_is_the_stored_rotation(name: str) -> None:
    x = some(30, 2, 80)
    stored = Codec(name, True).encode(x)
    assert torch.equal(stored, Codec(name).encode(hadamard(x)))
    assert torch.equal(Codec(name, True).decode(stored, 80, unrotate=False), Codec(name).decode(stored, 80))
    assert torch.equal(Codec(name, True).decode(stored, 80), hadamard(Codec(name).decode(stored, 80)))


def test_the_rotation_makes_outliers_cheap() -> None:
    """What it is for: with one large number in a head, four bits keep little of the others unless it is spread."""
    x = some(200, 2, 64)
    x[..., 5] *= 50
    errors = [(Codec("q4_0", rotated).decode(Codec("q4_0", rotated).encode(x), 64) - x).norm() for rotated in (False, True)]
    assert errors[1] < 0.6 * errors[0]


# --- names ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [*FLOATS, *QUANTISED])
@pytest.mark.parametrize("to", [*FLOATS, *QUANTISED])
def test_conversion_goes_through_float32_and_leaves_equal_codecs_alone(origin: str, to: str) -> None:
    x = some(9, 2, 40)
    stored = Codec(origin).encode(x)
    again = converted(stored, Codec(origin), Codec(to), 40)
    assert again is stored if origin == to else torch.equal(again, Codec(to).encode(Codec(origin).decode(stored, 40)))
    assert again.dtype == Codec(to).dtype


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("float32", None, None), ("float32", False, "float32", False)),
        (("q8_0", None, None), ("q8_0", False, "q8_0", False)),
        (("q4_0", None, None), ("q4_0", True, "q4_0", True)),
        (("q8_0", "q4_0", None), ("q8_0", False, "q4_0", True)),
        (("bfloat16", "q4_0", None), ("bfloat16", False, "q4_0", True)),
        (("q8_0", "q4_0", True), ("q8_0", True, "q4_0", True)),
        (("q8_0", "q4_0", False), ("q8_0", False, "q4_0", False)),
        (("float16", None, False), ("float16", False, "float16", False)),
    ],
)
def test_the_rotation_is_on_for_four_bits_unless_told(arguments: Any, expected: Any) -> None:
    k, v = codecs_of(*arguments)
    assert (k.name, k.hadamard, v.name, v.hadamard) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("q5_0", None, None), "k_dtype must be one of float32, float16, bfloat16, q8_0, q4_0; got 'q5_0'"),
        (("q8_0", "int8", None), "v_dtype must be one of float32, float16, bfloat16, q8_0, q4_0; got 'int8'"),
        (("float32", None, True), "k_dtype is float32"),
        (("q8_0", "float16", True), "v_dtype is float16"),
    ],
)
def test_codecs_that_cannot_work_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codecs_of(*arguments)


@pytest.mark.parametrize("arguments", [("q9",), (None,), (["q8_0"],), ("float32", True), ("q8_0", 1), ("q8_0", None)])
def test_a_codec_is_checked_when_it_is_made(arguments: Any) -> None:
    with pytest.raises(ConfigError):
        Codec(*arguments)
