"""How the numbers of a cell are stored: as floats, or as blocks of 32 small integers with a float16 scale.

Owns the mathematics and the bytes of one head; which cells they belong to is the store's business. One head of width D takes, as uint8,
with B = ceil(D / 32) blocks of which the last is padded with zeros:

    q8_0   34 * B bytes   int8 quants [32 * B], then little-endian float16 scales [B];  value = quant * scale
    q4_0   18 * B bytes   packed [16 * B], then little-endian float16 scales [B];       value = (nibble - 8) * scale
                          byte j of a block holds its element j in the low nibble and element 16 + j in the high one

Quants and scales are those of llama.cpp (`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`) to the bit; there a block's scale lies before
its quants. A block with a number that is not finite, or too large for a float16 scale (magnitudes from 65520 * 127 in q8_0, 65520 * 8 in
q4_0), gets the scale NaN: all its values read as NaN, and no overflow passes for a number. In a rotated head such a number spoils all it is
rotated with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onekv.core import quants
from onekv.errors import ConfigError

BLOCK: Final = 32
DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK_NBYTES: Final = {"q8_0": 34, "q4_0": 18}


@dataclass(frozen=True, slots=True)
class Codec:
    """How one part, keys or values, is stored.

    Attributes:
        name:     "float32", "float16", "bfloat16", "q8_0" or "q4_0"
        hadamard: heads are rotated by `hadamard` before they are quantised, which spreads outliers over the head

    >>> codec = Codec("q8_0")
    >>> stored = codec.encode(torch.tensor([[[0.0, 1.0, -127.0]]]))
    >>> stored.shape, codec.decode(stored, 3)
    (torch.Size([1, 1, 34]), tensor([[[   0.,    1., -127.]]]))
    """

    name: str
    hadamard: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name, "Codec.name")
        if not isinstance(self.hadamard, bool):
            raise ConfigError(f"Codec.hadamard must be True or False, got {self.hadamard!r}")
        if self.hadamard and not self.is_quantised:
            raise ConfigError(f"hadamard=True rotates quantised cells; {self.name} cells are not quantised")

    def __str__(self) -> str:
        return f"{self.name} hadamard" if self.hadamard else self.name

    @property
    def is_quantised(self) -> bool:
        """True iff a head is stored as blocks of integers."""
        return self.name in BLOCK_NBYTES

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the memory: uint8 where it holds blocks."""
        return DTYPES.get(self.name, torch.uint8)

    def width(self, dim: int) -> int:
        """Elements of `dtype` that a head of `dim` numbers takes."""
        return BLOCK_NBYTES[self.name] * -(-dim // BLOCK) if self.is_quantised else dim

    def decoding_nbytes(self, dim: int) -> int:
        """Most bytes alive while one gathered head is decoded: the float32 numbers and, where it is quantised, what they are made from."""
        if not self.is_quantised:
            return 4 * dim
        padded = BLOCK * -(-dim // BLOCK)
        return 4 * padded + self.width(dim) + 4 * padded // BLOCK + (padded if self.name == "q4_0" else 0)

    def encode(self, x: Tensor) -> Tensor:
        """Numbers [..., D] of any float dtype as they are stored, [..., width(D)] of `dtype`.

        The bytes of a head depend on that head alone.
        """
        if not self.is_quantised:
            return x.to(self.dtype)
        return self._encode_compiled(x.detach()) if x.device.type == "cpu" else self._encode(x)

    def _encode_compiled(self, x: Tensor) -> Tensor:
        """`encode` in host memory. Slow twin: `_encode`, which is a score of calls into torch, too many for one token."""
        dim = x.shape[-1]
        heads = x.float().reshape(-1, dim).contiguous().numpy()
        stored = np.empty((len(heads), self.width(dim)), np.uint8)
        scales = np.empty((len(heads), -(-dim // BLOCK)), np.float32)
        _COMPILED[self.name](heads, _power_of_two(dim) if self.hadamard else 1, stored, scales)
        stored[:, -2 * scales.shape[1] :] = scales.astype("<f2").view(np.uint8)
        return torch.from_numpy(stored).view(*x.shape[:-1], stored.shape[1])

    def _encode(self, x: Tensor) -> Tensor:
        """`encode` on any device."""
        x = hadamard(x.float()) if self.hadamard else x.float()
        blocks = _cut(F.pad(x, (0, -x.shape[-1] % BLOCK)), BLOCK)  # [..., B, 32]
        integers, scales = _ENCODE[self.name](blocks)
        stored = scales.half()
        stored = torch.where(stored.isfinite(), stored, torch.nan)
        return torch.cat([integers.flatten(-2), stored.flatten(-2).contiguous().view(torch.uint8)], dim=-1)

    def decode(self, stored: Tensor, dim: int, unrotate: bool = True) -> Tensor:
        """Stored heads [..., width(dim)] as float32 [..., dim].

        unrotate=False leaves heads rotated that `hadamard` has rotated: their products with rotated queries are the same.
        """
        if not self.is_quantised:
            return stored.float()
        nbytes = BLOCK_NBYTES[self.name]
        blocks = stored.shape[-1] // nbytes
        scales = stored[..., -2 * blocks :].contiguous().view(torch.float16).float()
        numbers = _DECODE[self.name](_cut(stored[..., : -2 * blocks], nbytes - 2))
        x = numbers.mul_(scales[..., None]).flatten(-2)[..., :dim]
        return hadamard(x) if self.hadamard and unrotate else x


def codecs_of(k_dtype: str, v_dtype: str | None, hadamard: bool | None) -> tuple[Codec, Codec]:
    """How keys and values are stored: by the names of their dtypes (v_dtype None: as the keys).

    Args:
        hadamard: None rotates q4_0 and nothing else
    Raises:
        ConfigError: an unknown name, or hadamard=True with a part that is not quantised.
    """
    made = []
    for what, name in (("k_dtype", k_dtype), ("v_dtype", k_dtype if v_dtype is None else v_dtype)):
        _check_name(name, what)
        if hadamard and name in DTYPES:
            raise ConfigError(f"hadamard=True rotates quantised keys and values, but {what} is {name}; use q8_0 or q4_0, or hadamard=None")
        made.append(Codec(name, name == "q4_0" if hadamard is None else hadamard))
    return made[0], made[1]


def converted(stored: Tensor, origin: Codec, to: Codec, dim: int) -> Tensor:
    """Heads of `dim` numbers stored by one codec as another stores them: through float32, and bit for bit where the two are equal."""
    return stored if origin == to else to.encode(origin.decode(stored, dim))


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or name not in (*DTYPES, *BLOCK_NBYTES):
        raise ConfigError(f"{what} must be one of {', '.join((*DTYPES, *BLOCK_NBYTES))}; got {name!r}")


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of heads, in blocks of the largest power of two that divides their width.

    Its own inverse. Products of two transformed heads are those of the heads.

    Shapes: [..., D] float -> float32 [..., D]
    Cost: a matrix product. Sums are taken in float64, so that what else is transformed at the same time does not show in a head's float32.

    >>> hadamard(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    size = _power_of_two(x.shape[-1])
    mixed = torch.matmul(_cut(x.double(), size), _walsh(size, x.device))
    return mixed.mul_(size**-0.5).flatten(-2).float()


def _power_of_two(dim: int) -> int:
    """The largest that divides `dim`."""
    return dim & -dim


def _cut(x: Tensor, size: int) -> Tensor:
    """[..., N] as [..., N / size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


@lru_cache(maxsize=32)
def _walsh(size: int, device: torch.device) -> Tensor:
    """The matrix of signs, float64 [size, size]."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used outside it
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device=device)
        matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
        while matrix.shape[0] < size:
            matrix = torch.kron(matrix, pair)
        return matrix


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales, by the inverse as llama.cpp does it. Not a number, or an infinite inverse (float16 takes such scales for 0): 0."""
    inverse = scales.reciprocal()
    return (x * torch.where(inverse.isfinite(), inverse, 0.0)).nan_to_num_(nan=0.0)


def _encode_q8_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., B, 32] -> integers [..., B, 32] uint8, scales [..., B, 1]."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    scaled = _scaled(x, scales)
    whole = scaled.trunc()
    rounded = whole + (2 * (scaled - whole)).trunc()  # C's roundf: halves away from zero
    return rounded.to(torch.int8).view(torch.uint8), scales


def _decode_q8_0(integers: Tensor) -> Tensor:
    return integers.view(torch.int8).float()


def _encode_q4_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., B, 32] -> packed [..., B, 16] uint8, scales [..., B, 1]."""
    top = x.gather(-1, x.abs().argmax(-1, keepdim=True)) + 0.0  # so that -0.0 counts as 0.0, as there
    scales = top / -8
    nibbles = (_scaled(x, scales) + 8.5).clamp_(0, 15).to(torch.uint8)
    return nibbles[..., :16] | nibbles[..., 16:] << 4, scales


def _decode_q4_0(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], dim=-1).float().sub_(8)


_ENCODE: Final[dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {"q8_0": _encode_q8_0, "q4_0": _encode_q4_0}
_COMPILED: Final[dict[str, Callable[..., None]]] = {"q8_0": quants.encode_q8_0, "q4_0": quants.encode_q4_0}
_DECODE: Final[dict[str, Callable[[Tensor], Tensor]]] = {"q8_0": _decode_q8_0, "q4_0": _decode_q4_0}
