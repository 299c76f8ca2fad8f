"""The products of a model with its weights: packed once at load for torch's own kernels, one kernel whatever the row count on request.

Owns how a projection's weight is kept and multiplied. `pack` replaces the linear layers of a loaded model, one after the other, and frees
each weight when it is packed; nothing here knows layers, sequences or cells. Every private operator of torch is behind one function below
`--- torch's private operators`, tried once at load, with `torch.nn.functional.linear` where it is missing or refuses.

    kind      few rows                                   many rows                            bytes a weight
    float32   oneDNN, packed                             the same                             4
    bfloat16  oneDNN, packed; activations bfloat16       the same                             2
    int4      groups of 32 weights with scale and zero   another copy, packed as bfloat16     0.625, and 2 for the copy

Without bfloat16 instructions "bfloat16" multiplies the rounded weights in float32, 4 bytes each, and "int4" keeps no copy: the groups serve
any number of rows, at half the speed of float32 for many.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, Protocol, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onekv.errors import ConfigError, OneKVError

Kind = Literal["float32", "bfloat16", "int4"]
KINDS: Final[tuple[str, ...]] = ("auto", *get_args(Kind))

GROUP: Final = 32  # weights that share a scale: llama.cpp's block, so that its blocks map without a second rounding
FEW_ROWS: Final = 6  # measured on Zen 4: the int4 pack is faster than packed bfloat16 up to 6 to 8 rows; it unpacks a weight for every row
_FIXED_ROWS: Final = 16
_EDGE: Final = 32
_ROW_COUNTS: Final = (1, 2, 3, 5, 8, 13, 16, 17, 33, 100)
_MOST_ROWS: Final = 200

_log = logging.getLogger("onekv.weights")
_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning(message)


# --- which kernel -------------------------------------------------------------------------------------------------------------------


def resolve(weights: str, device: torch.device) -> Kind:
    """The kind of weights that a name stands for on this machine.

    Raises:
        ConfigError: no such kind, or one that the device does not have.
    """
    if weights not in KINDS:
        raise ConfigError(f"weights must be one of {', '.join(KINDS)}, got {weights!r}")
    if weights == "auto":
        return "bfloat16" if device.type == "cpu" and has_bfloat16() else "float32"
    if weights == "int4" and device.type != "cpu":
        raise ConfigError(f'weights="int4" runs on cpu only, the device is {device}; use "bfloat16" there')
    return cast(Kind, weights)


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself (AVX512_BF16 or AMX)."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def dtype_of(kind: Kind) -> torch.dtype:
    """What the rest of the model is loaded as: embeddings, norms, and activations between layers."""
    return torch.float32 if kind == "float32" else torch.bfloat16


# --- weights in groups --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Groups:
    """A weight [N, K] as small integers in groups of 32 that share a scale and a zero: weight = (q - 8) * scale + zero.

    Attributes:
        q:     [N, copies * K] uint8, 0 to 15
        scale: [N, copies * K / 32] float32, exact in bfloat16
        zero:  the same
        copies: 1, or 2 where a weight of 8 bits is the sum of a high and a low integer, laid side by side: the row is multiplied twice
    """

    q: Tensor
    scale: Tensor
    zero: Tensor
    copies: int = 1

    @property
    def weight(self) -> Tensor:
        """[N, K] float32."""
        rows = self.q.shape[0]
        values = (self.q.view(rows, -1, GROUP).float() - 8) * self.scale[..., None] + self.zero[..., None]
        return values.view(rows, self.copies, -1).sum(1)

    def twice(self) -> Groups:
        """The same weight with two copies, the low one zero."""
        if self.copies == 2:
            return self
        none = torch.zeros_like(self.scale)
        low = torch.full_like(self.q, 8)
        return Groups(torch.cat((self.q, low), 1), torch.cat((self.scale, none), 1), torch.cat((self.zero, none), 1), 2)


def join(parts: Sequence[Groups]) -> Groups:
    """Weights of equal K, one below the other."""
    copies = max(part.copies for part in parts)
    level = [part if part.copies == copies else part.twice() for part in parts]
    q, scale, zero = (torch.cat([getattr(part, name) for part in level]) for name in ("q", "scale", "zero"))
    return Groups(q, scale, zero, copies)


def _exact(values: Tensor) -> Tensor:
    """Rounded to what bfloat16 holds; float32."""
    return values.float().to(torch.bfloat16).float()


def four_bits(weight: Tensor) -> Groups:
    """Round a weight [N, K] to 16 levels between the least and the greatest of each group; K a multiple of 32."""
    grouped = weight.float().view(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = _exact((high - low) / 15)
    zero = _exact(low + 8 * scale)
    steps = (grouped - zero[..., None]) / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    q = (steps.round() + 8).clamp(0, 15).to(torch.uint8)
    return Groups(q.view(weight.shape), scale, zero)


def eight_bits(weight: Tensor) -> Groups:
    """Round a weight [N, K] to 255 levels around 0 in each group; K a multiple of 32."""
    grouped = weight.float().view(weight.shape[0], -1, GROUP)
    scale = _exact(grouped.abs().amax(-1) / 127)
    steps = (grouped / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round().clamp(-128, 127)
    return bytes_in_groups(steps.view(weight.shape), scale)


def bytes_in_groups(values: Tensor, scale: Tensor) -> Groups:
    """values [N, K], integers from -128 to 127, times scale [N, K / 32], as a high and a low integer of 4 bits."""
    unsigned = (values.to(torch.int16) + 128).to(torch.uint8)
    q = torch.cat((unsigned >> 4, unsigned & 15), 1)
    scale = _exact(scale)
    return Groups(q, torch.cat((scale * 16, scale), 1), torch.cat((torch.zeros_like(scale), scale * 8), 1), 2)


def nibbles(q: Tensor, scale: Tensor, zero: Tensor) -> Groups:
    """q [N, K] of 0 to 15 with a scale and a zero [N, K / 32] each, rounded to bfloat16."""
    return Groups(q.to(torch.uint8), _exact(scale), _exact(zero))


# --- products -----------------------------------------------------------------------------------------------------------------------


class Product(Protocol):
    """x [M, K] -> x @ weight.T + bias [M, N].

    Attributes:
        dtype:  of x and of the result
        nbytes: of the weight as it is kept
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class Plain:
    """torch.nn.functional.linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._weight = weight.detach().to(dtype)
        self._bias = None if bias is None else bias.detach().to(dtype)
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class OneDNN:
    """oneDNN's product, the weight in the order its kernel reads.

    Raises:
        RuntimeError, AttributeError, NotImplementedError: this torch or this processor does not have it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._packed = _pack_onednn(weight.to(dtype))
        self._bias = None if bias is None else bias.detach().to(dtype)
        self.nbytes = weight.numel() * dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        return _multiply_onednn(x, self._packed, self._bias)


class Int4:
    """torch's product with weights of 4 bits.

    Raises:
        RuntimeError, AttributeError, NotImplementedError: this torch does not have it, or not for this shape.
    """

    dtype = torch.bfloat16  # float32 rows take a scalar path, 30 times slower

    def __init__(self, groups: Groups, bias: Tensor | None) -> None:
        self._copies = groups.copies
        self._packed = _pack_int4(groups.q)
        self._scales = torch.stack((groups.scale, groups.zero), -1).transpose(0, 1).contiguous().to(self.dtype)  # [K / 32, N, 2]
        self._bias = None if bias is None else bias.detach().to(self.dtype)
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = _multiply_int4(torch.cat((x, x), 1) if self._copies == 2 else x, self._packed, self._scales)
        return out if self._bias is None else out.add_(self._bias)


class ByRows:
    """One product for few rows, another one for many."""

    def __init__(self, few: Product, many: Product) -> None:
        self.dtype = few.dtype
        self._few = few
        self._many = many
        self.nbytes = few.nbytes + many.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if x.shape[0] <= FEW_ROWS else self._many(x)


class FixedRows:
    """A product that is always given the same number of rows, the last ones zero: then its kernel cannot depend on how many there are."""

    def __init__(self, inner: Product) -> None:
        self.dtype = inner.dtype
        self.nbytes = inner.nbytes
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -count % _FIXED_ROWS))
        return torch.cat([self._inner(block) for block in torch.split(padded, _FIXED_ROWS)])[:count]


def floating(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """The fastest product with weights of this dtype that the processor has."""
    if weight.device.type != "cpu":
        return Plain(weight, bias, dtype)
    # Without bfloat16 instructions torch's own product is 10 times slower than float32's, so the rounded weights are multiplied in float32.
    tries = [dtype] if dtype == torch.float32 else [dtype, torch.float32]
    for multiplied in tries:
        rounded = weight.to(dtype)
        try:
            product = OneDNN(rounded, bias, multiplied)
            _check_product(product, _edges(rounded), bias, rounded.shape[1])
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            _say_once(f"torch's oneDNN product in {_named(multiplied)} is not used: {_first_line(error)}")
            continue
        if multiplied != dtype:
            _say_once(f"weights are rounded to {_named(dtype)} and multiplied in {_named(multiplied)}, 4 bytes each")
        return product
    return Plain(weight, bias, dtype)


def grouped(groups: Groups, bias: Tensor | None) -> Product | None:
    """The product with weights of 4 bits; None where torch has none for this shape."""
    if _wrong_shape(groups.q):
        return None
    ends = Groups(_edges(groups.q), _edges(groups.scale), _edges(groups.zero), groups.copies)
    try:
        product = Int4(groups, bias)
        _check_product(product, ends.weight, bias, groups.q.shape[1] // groups.copies)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        _say_once(f"torch's int4 product is not used: {_first_line(error)}")
        return None
    return product


def _wrong_shape(weight: Tensor) -> bool:
    return bool(weight.shape[1] % GROUP or weight.shape[0] % 16)


def _edges(rows: Tensor) -> Tensor:
    """The first and the last rows of a weight, enough to tell that a kernel multiplies it."""
    return rows if rows.shape[0] <= 2 * _EDGE else torch.cat((rows[:_EDGE], rows[-_EDGE:]))


def _check_product(product: Product, weight: Tensor, bias: Tensor | None, width: int) -> None:
    """Raises RuntimeError if a kernel gives something else than torch.nn.functional.linear with the edges of its weight."""
    x = torch.linspace(-1, 1, width).cos()[None].to(product.dtype)
    expected = F.linear(x.float(), weight.float(), None if bias is None else _edges(bias).float())
    got = _edges(product(x)[0])[None].float()
    error = (got - expected).abs().max()
    limit = 1e-4 if product.dtype == torch.float32 else 2e-2
    if not error <= limit * (1 + expected.abs().max()):
        raise RuntimeError(f"it differs from torch.nn.functional.linear by {error:.1e} for {width} inputs")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- rows that do not depend on each other ------------------------------------------------------------------------------------------


def independent(product: Product, width: int) -> Product:
    """A product whose rows have the same bits whatever rows come with them: this one, or this one in blocks of a fixed size.

    Raises:
        ConfigError: neither is.
    """
    for candidate in (product, FixedRows(product)):
        if rows_agree(candidate, width):
            return candidate
        _say_once(f"rows of torch's {type(product).__name__} product depend on their number; they are multiplied {_FIXED_ROWS} at a time")
    raise ConfigError("deterministic=True cannot be kept on this processor: torch's products depend on the other rows")


def rows_agree(product: Product, width: int) -> bool:
    """Whether rows of a product with K = width are equal, to the bit, in every number and order tried."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_MOST_ROWS, width, generator=generator).to(product.dtype)
    whole = product(x)
    if not torch.equal(product(x.flip(0)), whole.flip(0)):
        return False
    return all(torch.equal(product(x[-count:]), whole[-count:]) for count in _ROW_COUNTS)


# --- modules ------------------------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A linear layer whose weight is packed. It takes rows of any float dtype and answers in theirs; it cannot be trained or saved.

    Attributes:
        product: the product, of all layers where several share one
        weight:  a stand-in with the shape and dtype, and no data
    """

    def __init__(self, product: Product, shape: tuple[int, int], part: Part | None = None) -> None:
        super().__init__()
        self.product = product
        self.part = part
        self.out_features, self.in_features = shape
        self.weight = torch.empty(shape, dtype=product.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        out = _rows(self.product, x) if self.part is None else self.part.of(x)
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OneKVError("packed weights cannot be saved; save the model this one was loaded from")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {type(self.product).__name__}"


def _rows(product: Product, x: Tensor) -> Tensor:
    """[..., K] of any float dtype -> [rows, N]."""
    return product(x.reshape(-1, x.shape[-1]).to(product.dtype))


class Shared:
    """A product of several layers that are called one after the other with the same rows, computed at the first call."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.next: Part | None = None
        self.x: Tensor | None = None
        self.out: Tensor | None = None


class Part:
    """One layer's columns of a shared product."""

    def __init__(self, shared: Shared, columns: slice) -> None:
        self.shared = shared
        self.columns = columns
        self.follower: Part | None = None

    def of(self, x: Tensor) -> Tensor:
        """[..., K] -> [rows, N]."""
        shared = self.shared
        if shared.out is not None and shared.next is self and shared.x is x:
            out = shared.out
        else:
            out = _rows(shared.product, x)
        # Kept only for the layer that is called next, so that rows changed in place later are not mistaken for these.
        shared.next = self.follower
        shared.x, shared.out = (None, None) if self.follower is None else (x, out)
        return out[:, self.columns]


@dataclass(frozen=True)
class Join:
    """Linear layers of one module that take the same rows, to be multiplied as one: q, k and v, or gate and up."""

    parent: nn.Module
    names: tuple[str, ...]


# A layer's name and weight -> the groups the weight was stored in, or None.
Blocks = Callable[[str, Tensor], Groups | None]


def pack(
    model: Any,
    kind: Kind,
    *,
    joins: Iterable[Join] = (),
    blocks: Blocks | None = None,
    deterministic: bool = False,
) -> int:
    """Replace every `torch.nn.Linear` of a model by a packed one, and free its weight. Tied embeddings keep theirs.

    With kind "int4" the output layer is kept in 8 bits: its rounding reaches the logits undamped (Kullback-Leibler divergence of
    SmolLM2-135M's next token, 4 bits 4e-2, 8 bits 1e-3). A layer whose K is no multiple of 32, or N no multiple of 16, is kept in
    bfloat16. A layer whose weight other code reads stays as it is.

    Args:
        joins:  layers to multiply as one
        blocks: weights that come in groups already; others are rounded
        deterministic: rows of a product do not depend, to the bit, on the other rows or on their number
    Returns:
        bytes of all packed weights.
    Cost: every weight is read a few times; memory for one more of the largest.
    """
    head = model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    maker = _Maker(kind, deterministic, blocks, head)
    for one in joins:
        maker.replace(one.parent, one.names, names)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not _reads_weight(type(parent), name):
                maker.replace(parent, (name,), names)
    return maker.nbytes


def _reads_weight(parent: Any, child: str) -> bool:
    """Whether a module's code takes a linear layer's weight or bias itself, as Jamba's does: such a layer stays as it is."""
    try:
        source = inspect.getsource(parent)
    except (OSError, TypeError):
        return False
    return re.search(rf"self\.{child}\.(weight|bias)\b", source) is not None


def packed_nbytes(weight: Tensor, kind: Kind, is_head: bool) -> int:
    """Bytes that `pack` keeps a weight [N, K] in, on a processor that has its kernels. Reads no numbers."""
    if kind != "int4" or _wrong_shape(weight):
        return weight.numel() * (4 if kind == "float32" else 2)
    integers = weight.numel() * (2 if is_head else 1)
    scales = 2 * 2 * integers // GROUP  # a scale and a zero in bfloat16
    return integers // 2 + scales + (2 * weight.numel() if has_bfloat16() else 0)


class _Maker:
    """Builds packed layers one after the other."""

    def __init__(self, kind: Kind, deterministic: bool, blocks: Blocks | None, head: Any) -> None:
        self.nbytes = 0
        self._kind = kind
        self._deterministic = deterministic
        self._blocks = blocks
        self._head = head
        self._made: dict[int, Packed] = {}
        self._is_fixed: dict[tuple[type, torch.Size], bool] = {}

    def replace(self, parent: nn.Module, children: tuple[str, ...], names: Mapping[int, str]) -> None:
        linears = [cast(nn.Linear, getattr(parent, child)) for child in children]
        if len(linears) == 1 and id(linears[0]) in self._made:
            setattr(parent, children[0], self._made[id(linears[0])])
            return
        with torch.no_grad():
            product = self._product(linears, [names[id(linear)] for linear in linears])
        self.nbytes += product.nbytes
        shared, start, before = Shared(product), 0, None
        for child, linear in zip(children, linears, strict=True):
            end = start + linear.out_features
            part = None if len(linears) == 1 else Part(shared, slice(start, end))
            if before is not None:
                before.follower = part
            packed = Packed(product, (linear.out_features, linear.in_features), part)
            packed.training = linear.training
            setattr(parent, child, packed)
            self._made[id(linear)] = packed
            start, before = end, part

    def _product(self, linears: Sequence[nn.Linear], names: Sequence[str]) -> Product:
        parts: list[Tensor] = [linear.weight for linear in linears]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        has_bias = any(linear.bias is not None for linear in linears)
        filled: list[Tensor] = [linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        bias = torch.cat(filled) if has_bias else None
        product: Product | None = None
        if self._kind == "int4" and not _wrong_shape(weight):
            product = grouped(join([self._groups(linear, name) for linear, name in zip(linears, names, strict=True)]), bias)
            if product is not None and not self._deterministic and has_bfloat16():
                product = ByRows(product, floating(weight, bias, torch.bfloat16))
        if product is None:
            product = floating(weight, bias, torch.float32 if self._kind == "float32" else torch.bfloat16)
        return self._independent(product, weight) if self._deterministic else product

    def _independent(self, product: Product, weight: Tensor) -> Product:
        """Judged once for every kind and shape: a kernel is chosen by them."""
        key = (type(product), weight.shape)
        if key not in self._is_fixed:
            self._is_fixed[key] = isinstance(independent(product, weight.shape[1]), FixedRows)
        return FixedRows(product) if self._is_fixed[key] else product

    def _groups(self, linear: nn.Linear, name: str) -> Groups:
        groups = None if self._blocks is None else self._blocks(name, linear.weight)
        if groups is not None:
            return groups
        return eight_bits(linear.weight) if linear is self._head else four_bits(linear.weight)


# --- torch's private operators ------------------------------------------------------------------------------------------------------


def _pack_onednn(weight: Tensor) -> Tensor:
    # 8: the number of rows to choose the order for; any number can be multiplied.
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8))


@functools.cache
def _onednn() -> Callable[..., Tensor]:
    """Looked up once: finding the operator and its overload takes longer than a small product's arithmetic."""
    return cast(Callable[..., Tensor], torch.ops.mkldnn._linear_pointwise.default)


def _multiply_onednn(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn()(x, packed, bias, "none", [], "")


def _pack_int4(q: Tensor) -> Tensor:
    return torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1)


def _multiply_int4(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)
