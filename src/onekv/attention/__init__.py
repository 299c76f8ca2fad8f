"""Attention over cells, one backend a file.

A backend is a module of this package with one function, `attend`, of the signature of `Attend` below. Its file name is its name.
Backends know stores and ranges; they do not know the cache.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onekv.core.cells import Group
from onekv.core.window import bucket_of
from onekv.errors import ConfigError
from onekv.storage import KVStore

_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class Buckets:
    """T5's learned bias, evaluated from the positions of query and key.

    Attributes:
        table:         [B, H] bias of every bucket
        max_distance:  distance from which all keys share the last bucket
        bidirectional: half the buckets are for keys after the query
    """

    table: Tensor
    max_distance: int = 128
    bidirectional: bool = False

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or self.table.shape[0] < (4 if self.bidirectional else 2):
            raise ConfigError(f"Buckets.table must be [buckets, heads], got shape {tuple(self.table.shape)}")

    def bias(self, distance: NDArray[np.integer]) -> Tensor:
        """Bias [H, *distance.shape] for key position minus query position."""
        bucket = bucket_of(distance, self.table.shape[0], self.max_distance, self.bidirectional)
        return self.table[torch.from_numpy(bucket)].movedim(-1, 0)


@dataclass(frozen=True)
class Score:
    """How a query and a key make a score, beyond their product.

    Attributes:
        scale:        factor of the product
        softcap:      scores become softcap * tanh(score / softcap)
        sinks:        [H] one more logit per head that takes weight and gives no value
        alibi_slopes: [H] minus slope times distance is added
        bias:         T5's bias, added
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Buckets | None = None

    @property
    def is_plain(self) -> bool:
        """True iff the score is the scaled product."""
        return self.softcap is None and self.sinks is None and not self.has_bias

    @property
    def has_bias(self) -> bool:
        """True iff something is added to the score."""
        return self.alibi_slopes is not None or self.bias is not None

    def added(self, distance: NDArray[np.integer], device: torch.device) -> Tensor:
        """What is added to the scores, [H, *distance.shape] float32, for key position minus query position."""
        total: Tensor | None = None
        if self.alibi_slopes is not None:
            steps = torch.from_numpy(-np.abs(distance).astype(np.float32)).to(device)
            total = self.alibi_slopes.to(device, torch.float32).reshape(-1, *[1] * steps.ndim) * steps
        if self.bias is not None:
            learned = self.bias.bias(distance).to(device, torch.float32)
            total = learned if total is None else total + learned
        if total is None:
            raise ConfigError("this score adds nothing")
        return total


@dataclass(frozen=True, eq=False)
class View:
    """What the rows of one step may see in one layer group.

    Attributes:
        group:         the cells (the dense mask reads them; ranges do not)
        causal:        a query sees no later position
        seqs:          [T] int64, the sequence whose row each query sees
        positions:     [T] int32, position of each query; [4, T] where positions have axes
        first, last:   [T] int64, visible entries of the row: [first, last)
        column:        [S, E] int32, cell of every entry
        row_positions: [S, E] int32, position of every entry
        fixed:         a row's result may not depend, to the bit, on the other rows, on who shares its cells or on where they lie
    """

    group: Group
    causal: bool
    seqs: NDArray[np.int64]
    positions: NDArray[np.int32]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    column: NDArray[np.int32]
    row_positions: NDArray[np.int32]
    fixed: bool = False
    _made: dict[str, object] = field(default_factory=dict)

    @property
    def queries(self) -> NDArray[np.int32]:
        """[T] what windows and biases are measured from: the position, or its first component."""
        return self.positions[0] if self.positions.ndim == 2 else self.positions

    def once(self, name: str, make: Callable[[View], _Made]) -> _Made:
        """`make(view)`, computed at the first call and shared by the layers of the group."""
        if name not in self._made:
            self._made[name] = make(self)
        return self._made[name]  # type: ignore[return-value]


class Attend(Protocol):
    """Attend from the rows of a step to the cells they see, in one layer.

    Shapes:
        q:       [T, H, D] any float dtype
        returns: [T, H, Dv] of q's dtype and device; accumulated in float32
    """

    def __call__(self, store: KVStore, layer: int, view: View, q: Tensor, score: Score) -> Tensor: ...


def backends() -> list[str]:
    """Names of all backends: the modules of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def backend(name: str, device: str | torch.device = "cpu", fixed: bool = False) -> Attend:
    """The `attend` of a backend; "auto" is the fastest on this device.

    Args:
        fixed: rows may not depend on each other to the bit; only "cpu" can
    Raises:
        ConfigError: no such backend, or it cannot serve the device or the demand.
    """
    on_cpu = torch.device(device).type == "cpu"
    chosen = ("cpu" if on_cpu else "sdpa") if name == "auto" else name
    if chosen not in backends():
        raise ConfigError(f"backend must be auto or one of {', '.join(backends())}; got {name!r}")
    if chosen == "cpu" and not on_cpu:
        raise ConfigError(f"the cpu backend cannot attend on {device}; use sdpa")
    if fixed and chosen != "cpu":
        raise ConfigError(f"deterministic=True needs the cpu backend on a cpu; got backend {name!r} on {device}")
    attend: Attend = importlib.import_module(f"{__name__}.{chosen}").attend
    return attend
