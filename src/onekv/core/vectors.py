"""Vector instructions for compiled loops: what Numba's own loops do not become.

Owns a handful of Numba intrinsics over pointers to float32. LLVM lowers a vector type to what the processor has, so that only
the widths below follow the processor. Pointers carry no bounds: callers do.
"""

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_HAS_512: Final = bool(llvm.get_host_cpu_features().get("avx512f", False))

LANES: Final = 16 if _HAS_512 else 8  # floats of one register
TILE_ROWS: Final = 8 if _HAS_512 else 6  # of `tile`, so that its accumulators stay in registers
TILE_LANES: Final = 32 if _HAS_512 else 16
_MAX_SUMS: Final = 8  # accumulators of `mix`
_CACHE_LINE: Final = 64

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _vector(width: int) -> ir.VectorType:
    return ir.VectorType(_F32, width)


def _at(builder: Any, pointer: Any, offset: Any) -> Any:
    """The address `offset` floats further; an int or an IR value."""
    return builder.gep(pointer, [ir.Constant(_I64, offset) if isinstance(offset, int) else offset])


def _load(builder: Any, pointer: Any, width: int) -> Any:
    return builder.load(builder.bitcast(pointer, _vector(width).as_pointer()), align=4)


def _save(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _spread(builder: Any, scalar: Any, width: int) -> Any:
    """A scalar in every lane."""
    kind = _vector(width)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, width), [0] * width))


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = x.type
    name = f"llvm.fma.v{kind.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name), [x, y, z])


def _floats(width: Any) -> int:
    """The number of floats a tuple's type stands for, known when compiling: LANES for each element."""
    return int(width.count) * LANES


@intrinsic
def pointer(context, array, index):
    """Address of element `index` of a C-contiguous array, counted flat."""

    def code(context, builder, signature, args):
        made = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.gep(made.data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), code


@intrinsic
def prefetch(context, start, nbytes):
    """Ask for `nbytes` bytes from an address on, one line at a time."""

    def code(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        first = builder.bitcast(args[0], _I8.as_pointer())
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), args[1], ir.Constant(_I64, _CACHE_LINE), _I64) as (offset, _):
            builder.call(ask, [builder.gep(first, [offset]), ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(start, types.int64), code


def _tree() -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """Shuffles that add LANES vectors up to one: for every level which lanes of a pair are added, and at last where each sum is."""
    levels, owners, block = [], [[i] * LANES for i in range(LANES)], 1
    while len(owners) > 1:
        low, high = [], []
        for j in range(0, LANES, 2 * block):
            low += [*range(j, j + block), *range(LANES + j, LANES + j + block)]
            high += [*range(j + block, j + 2 * block), *range(LANES + j + block, LANES + j + 2 * block)]
        levels.append((low, high))
        owners = [[(owners[i] + owners[i + 1])[lane] for lane in low] for i in range(0, len(owners), 2)]
        block *= 2
    return levels, [owners[0].index(i) for i in range(LANES)]


_LEVELS, _SUMS_AT = _tree()


def _shuffle(builder: Any, one: Any, other: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_I32, LANES), lanes))


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """LANES vectors -> one vector of their sums, in order."""
    for low, high in _LEVELS:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(_shuffle(builder, x, y, low), _shuffle(builder, x, y, high)) for x, y in pairs]
    return _shuffle(builder, vectors[0], vectors[0], _SUMS_AT)


@intrinsic
def dots(context, query, keys, offsets, out, width):
    """out[x] = query . keys[offsets[x]:], for LANES offsets.

    Args:
        query, keys, out: addresses of float32
        offsets: address of int64, in floats
        width:   a tuple with one element for every LANES floats of a vector
    """
    floats = _floats(width)

    def code(context, builder, signature, args):
        query, keys, offsets, out, _ = args
        starts = [_at(builder, keys, builder.load(_at(builder, offsets, x))) for x in range(LANES)]
        totals: list[Any] = [None] * LANES
        for i in range(0, floats, LANES):
            q = _load(builder, _at(builder, query, i), LANES)
            for x, start in enumerate(starts):
                k = _load(builder, _at(builder, start, i), LANES)
                totals[x] = builder.fmul(q, k) if totals[x] is None else _fma(builder, q, k, totals[x])
        _save(builder, _sums(builder, totals), out)
        return context.get_dummy_value()

    return types.void(query, keys, offsets, out, width), code


@intrinsic
def mix(context, total, weights, values, offsets, count, width):
    """total += weights[x] * values[offsets[x]:] for x in [0, count).

    Args:
        total, weights, values: addresses of float32
        offsets: address of int64, in floats
        width:   a tuple with one element for every LANES floats of a vector
    """
    floats = _floats(width)

    def code(context, builder, signature, args):
        total, weights, values, offsets, count, _ = args
        span = LANES * _MAX_SUMS
        for begin in range(0, floats, span):
            places = range(begin, min(begin + span, floats), LANES)
            sums = [cgutils.alloca_once(builder, _vector(LANES)) for _ in places]
            for place, at in zip(sums, places, strict=True):
                builder.store(_load(builder, _at(builder, total, at), LANES), place)
            with cgutils.for_range(builder, count) as loop:
                weight = _spread(builder, builder.load(_at(builder, weights, loop.index)), LANES)
                start = _at(builder, values, builder.load(_at(builder, offsets, loop.index)))
                for place, at in zip(sums, places, strict=True):
                    value = _load(builder, _at(builder, start, at), LANES)
                    builder.store(_fma(builder, weight, value, builder.load(place)), place)
            for place, at in zip(sums, places, strict=True):
                _save(builder, builder.load(place), _at(builder, total, at))
        return context.get_dummy_value()

    return types.void(total, weights, values, offsets, types.int64, width), code


@intrinsic
def tile(context, a, row_stride, step_stride, b, b_stride, steps, out, out_stride):
    """out[i, :] = sum over k of a[i, k] * b[k, :], for TILE_ROWS rows and TILE_LANES lanes, k ascending.

    Element [i, k] of a is at i * row_stride + k * step_stride. Every lane is the same sequence of operations whatever the others hold.
    """

    def code(context, builder, signature, args):
        a, row_stride, step_stride, b, b_stride, steps, out, out_stride = args
        lanes = range(0, TILE_LANES, LANES)
        sums = [[cgutils.alloca_once(builder, _vector(LANES)) for _ in lanes] for _ in range(TILE_ROWS)]
        zero = ir.Constant(_vector(LANES), [0.0] * LANES)
        for row in sums:
            for place in row:
                builder.store(zero, place)
        with cgutils.for_range(builder, steps) as loop:
            at_b = _at(builder, b, builder.mul(loop.index, b_stride))
            right = [_load(builder, _at(builder, at_b, lane), LANES) for lane in lanes]
            at_a = _at(builder, a, builder.mul(loop.index, step_stride))
            for i, row in enumerate(sums):
                left = builder.load(_at(builder, at_a, builder.mul(row_stride, ir.Constant(_I64, i))))
                spread = _spread(builder, left, LANES)
                for place, value in zip(row, right, strict=True):
                    builder.store(_fma(builder, spread, value, builder.load(place)), place)
        for i, row in enumerate(sums):
            at_out = _at(builder, out, builder.mul(out_stride, ir.Constant(_I64, i)))
            for place, lane in zip(row, lanes, strict=True):
                _save(builder, builder.load(place), _at(builder, at_out, lane))
        return context.get_dummy_value()

    size = types.int64
    return types.void(a, size, size, b, size, size, out, size), code


def _from_16(builder: Any, bits: Any, is_bfloat: bool) -> Any:
    """A vector of 16-bit floats as float32."""
    count = bits.type.count
    if not is_bfloat:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), count)), _vector(count))
    kind = ir.VectorType(_I32, count)
    return builder.bitcast(builder.shl(builder.zext(bits, kind), ir.Constant(kind, [16] * count)), _vector(count))


@intrinsic
def from_16(context, bits):
    """The float32 of a bfloat16 given as uint16, or of a float16 given as int16."""
    is_bfloat = bits == types.uint16

    def code(context, builder, signature, args):
        zero = ir.Constant(_I32, 0)
        one = builder.insert_element(ir.Constant(ir.VectorType(ir.IntType(16), 1), ir.Undefined), args[0], zero)
        return builder.extract_element(_from_16(builder, one, is_bfloat), zero)

    return types.float32(bits), code


@intrinsic
def widen_16(context, stored, out):
    """out[:16] = 16 numbers as `from_16` reads them. Both are addresses."""
    is_bfloat = stored.dtype == types.uint16

    def code(context, builder, signature, args):
        stored, out = args
        bits = builder.load(builder.bitcast(stored, ir.VectorType(ir.IntType(16), 16).as_pointer()), align=2)
        _save(builder, _from_16(builder, bits, is_bfloat), out)
        return context.get_dummy_value()

    return types.void(stored, out), code


def _half(builder: Any, start: Any) -> Any:
    """The float16 at an address of bytes, as float32."""
    place = builder.bitcast(start, ir.HalfType().as_pointer())
    return builder.fpext(builder.load(place, align=2), _F32)


def _bytes(builder: Any, start: Any, count: int) -> Any:
    return builder.load(builder.bitcast(start, ir.VectorType(_I8, count).as_pointer()), align=1)


def _scaled(builder: Any, integers: Any, scale: Any) -> Any:
    """A vector of int32 as float32, times a scalar."""
    width = integers.type.count
    return builder.fmul(builder.sitofp(integers, _vector(width)), _spread(builder, scale, width))


@intrinsic
def widen_8(context, quants, scale, out):
    """out[:32] = 32 int8 times the float16 at `scale`. All three are addresses; the first two of bytes."""

    def code(context, builder, signature, args):
        quants, scale, out = args
        wide = builder.sext(_bytes(builder, quants, 32), ir.VectorType(_I32, 32))
        _save(builder, _scaled(builder, wide, _half(builder, scale)), out)
        return context.get_dummy_value()

    return types.void(quants, scale, out), code


@intrinsic
def widen_4(context, quants, scale, out):
    """out[:32] = (nibble - 8) times the float16 at `scale`, low nibbles of 16 bytes first. Addresses as for `widen_8`."""

    def code(context, builder, signature, args):
        quants, scale, out = args
        packed, factor = _bytes(builder, quants, 16), _half(builder, scale)
        kind = ir.VectorType(_I8, 16)
        halves = builder.and_(packed, ir.Constant(kind, [15] * 16)), builder.lshr(packed, ir.Constant(kind, [4] * 16))
        for i, half in enumerate(halves):
            wide = builder.sub(builder.zext(half, ir.VectorType(_I32, 16)), ir.Constant(ir.VectorType(_I32, 16), [8] * 16))
            _save(builder, _scaled(builder, wide, factor), _at(builder, out, 16 * i))
        return context.get_dummy_value()

    return types.void(quants, scale, out), code


@njit(inline="always")
def exp(x):
    """e ** x for x <= 0, within 2 units in the last place; 0 below -87. A polynomial, so that loops over it become vectors.

    Source: the range reduction and coefficients of Cephes' expf.
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    f = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    return (p * f * f + f + np.float32(1)) * np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(inline="always")
def tanh(x):
    """Hyperbolic tangent, within a few units in the last place, as a loop can be made vectors of.

    Source: the rational approximation of Eigen's generic_fast_tanh_float.
    """
    x = min(max(x, np.float32(-7.90531110763549805)), np.float32(7.90531110763549805))
    s = x * x
    p = np.float32(-2.76076847742355e-16)
    p = p * s + np.float32(2.00018790482477e-13)
    p = p * s + np.float32(-8.60467152213735e-11)
    p = p * s + np.float32(5.12229709037114e-08)
    p = p * s + np.float32(1.48572235717979e-05)
    p = p * s + np.float32(6.37261928875436e-04)
    p = p * s + np.float32(4.89352455891786e-03)
    q = np.float32(1.19825839466702e-06)
    q = q * s + np.float32(1.18534705686654e-04)
    q = q * s + np.float32(2.26843463243900e-03)
    q = q * s + np.float32(4.89352518554385e-03)
    return x * p / q
