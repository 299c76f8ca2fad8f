"""Window: which stored positions a query may see, as data.

Owns the rules of visibility and nothing else. Every rule makes the visible entries of a position-ordered row one contiguous range:

    full           everything up to the query
    sliding(n)     the query and the n - 1 positions before it
    chunked(n)     the query's chunk [p // n * n, p]
    symmetric(n)   n // 2 positions on either side (the far side only when attention is not causal)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onekv.errors import ConfigError

FULL: Final = 0
SLIDING: Final = 1
CHUNKED: Final = 2
SYMMETRIC: Final = 3
_NAMES: Final = ("full", "sliding", "chunked", "symmetric")


@dataclass(frozen=True, slots=True)
class Window:
    """One layer's rule of visibility. Built by the four class methods.

    >>> Window.sliding(4)
    Window.sliding(4)
    >>> Window.sliding(4).visible(np.arange(8), 6)
    array([False, False, False,  True,  True,  True,  True, False])
    """

    kind: int
    size: int

    def __post_init__(self) -> None:
        if self.kind not in (FULL, SLIDING, CHUNKED, SYMMETRIC):
            raise ConfigError(f"unknown window kind {self.kind!r}; use Window.full(), .sliding(n), .chunked(n) or .symmetric(n)")
        if self.kind == FULL and self.size != 0:
            raise ConfigError(f"a full window has no size, got {self.size!r}; use Window.full()")
        if self.kind != FULL and (isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size < 2**31):
            raise ConfigError(f"a {_NAMES[self.kind]} window needs a size of at least 1 position, got {self.size!r}")

    @classmethod
    def full(cls) -> Window:
        """No window: every earlier position is visible."""
        return cls(FULL, 0)

    @classmethod
    def sliding(cls, n: int) -> Window:
        """A query at p sees the n positions p - n + 1 .. p."""
        return cls(SLIDING, n)

    @classmethod
    def chunked(cls, n: int) -> Window:
        """A query at p sees positions p // n * n .. p."""
        return cls(CHUNKED, n)

    @classmethod
    def symmetric(cls, n: int) -> Window:
        """A query at p sees positions within n // 2 of p."""
        return cls(SYMMETRIC, n)

    @property
    def is_full(self) -> bool:
        """True iff nothing is ever hidden by distance, so no cell ever expires."""
        return self.kind == FULL

    def visible(self, key_positions: NDArray[np.integer], query: int, causal: bool = True) -> NDArray[np.bool_]:
        """Which of the key positions a query at position `query` may see. The plain definition; the ranges of `loops` are its fast twin."""
        key = np.asarray(key_positions, np.int64)
        if self.kind == SLIDING:
            seen = query - key < self.size
        elif self.kind == CHUNKED:
            seen = key >= query // self.size * self.size
        elif self.kind == SYMMETRIC:
            seen = np.abs(query - key) <= self.size // 2
        else:
            seen = np.ones(key.shape, np.bool_)
        return seen & (key <= query) if causal else seen

    def __repr__(self) -> str:
        return f"Window.{_NAMES[self.kind]}({'' if self.is_full else self.size})"


def bucket_of(distance: NDArray[np.integer], num_buckets: int, max_distance: int, bidirectional: bool) -> NDArray[np.int64]:
    """T5's bucket of a relative position, same shape.

    Args:
        distance: key position minus query position
    Source: spec 4.11. The logarithm is taken in float32, as the models were trained with.
    """
    relative = np.asarray(distance, np.int64)
    if bidirectional:
        num_buckets //= 2
        offset = np.where(relative > 0, num_buckets, 0)
        steps = np.abs(relative)
    else:
        offset = np.zeros_like(relative)
        steps = np.maximum(-relative, 0)
    exact = num_buckets // 2
    ratio = np.maximum(steps, exact).astype(np.float32) / np.float32(exact)
    scale = np.float32(np.log(max_distance / exact))
    far = exact + (np.log(ratio) / scale * np.float32(num_buckets - exact)).astype(np.int64)
    return offset + np.where(steps < exact, steps, np.minimum(far, num_buckets - 1))
