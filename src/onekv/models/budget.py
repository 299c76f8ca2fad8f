"""How many bytes a model and its cells take for so many sequences of so many tokens, and how much of that fits.

Owns the arithmetic; what one cell takes is asked of the store, so that there is one place that knows how keys and values are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import psutil

from onekv.config import MAX_SEQS, CacheConfig
from onekv.core.window import Window
from onekv.errors import ConfigError
from onekv.models.skeleton import Skeleton
from onekv.storage import KVStore, layer_groups

MAX_CELLS: Final = 2**31 - 1
_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class KindBudget:
    """The layers of one group that have equal heads.

    Attributes:
        group:         index of the group, as in `KVCache`
        window:        the group's
        num_kv_heads, head_dim, value_dim: G, D and Dv
        num_layers:    how many of the model's layers
        num_owning:    how many of them have memory of their own; the others read theirs
        cell_nbytes:   bytes of one cell over these layers
        num_cells:     cells of the group
    """

    group: int
    window: Window
    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_layers: int
    num_owning: int
    cell_nbytes: int
    num_cells: int

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of these layers."""
        return self.cell_nbytes * self.num_cells


@dataclass(frozen=True)
class Budget:
    """What a model and a cache for `sequences` sequences of `context` tokens take, none of which share a cell.

    A group with a window of W needs W cells a sequence and those of one ubatch, whatever the context (spec 5.5). Not counted: what a
    forward allocates for a moment (activations, logits, `KVCache.max_step_nbytes`), the rows that say who owns which cell, and Python.

    Args:
        model:      its layers and weights
        context:    tokens a sequence holds, prompt and answer
        sequences:  sequences at a time
        max_ubatch: most rows of one forward
        k_dtype, v_dtype: as for `KVCache`
    Raises:
        ConfigError: a number below 1 or beyond what the model or a cache takes, or an unknown dtype.
    """

    model: Skeleton
    context: int
    sequences: int
    max_ubatch: int = 512
    k_dtype: str = "float32"
    v_dtype: str | None = None

    def __post_init__(self) -> None:
        limits = {"context": self.model.max_positions, "sequences": MAX_SEQS, "max_ubatch": MAX_CELLS}
        for name, most in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
            if value > most:
                owner = f"{self.model.name} takes {most} positions" if name == "context" else f"the most is {most}"
                raise ConfigError(f"{name} {value} is too large: {owner}")
        _ = self._store  # refuses an unknown dtype
        if self.num_cells > MAX_CELLS:
            raise ConfigError(f"{self.sequences} sequences of {self.context} tokens need {self.num_cells} cells; the most is {MAX_CELLS}")

    def _needed(self, window: Window, context: int, sequences: int) -> int:
        """Cells that a group needs. Source: spec 5.5."""
        whole = context * sequences
        return whole if window.is_full else min(whole, window.size * sequences + self.max_ubatch)

    def _sizes(self, context: int, sequences: int) -> list[int]:
        """Cells of every group, as `KVCache` takes them: one number for the first, one for all others."""
        first, *others = (self._needed(window, context, sequences) for window in self._groups[0])
        most = max(others, default=0)
        return [max(first, most), *(most for _ in others)]

    @cached_property
    def _groups(self) -> tuple[list[Window], list[int]]:
        return layer_groups(self.model.layers)

    @cached_property
    def _store(self) -> KVStore:
        """One cell of every layer, without memory."""
        return KVStore(self.model.layers, 1, self.k_dtype, self.v_dtype, device="meta")

    @property
    def num_cells(self) -> int:
        """`num_cells` of the cache."""
        return self._sizes(self.context, self.sequences)[0]

    @property
    def window_cells(self) -> int | None:
        """`window_cells` of the cache; None where it has one group."""
        return next(iter(self._sizes(self.context, self.sequences)[1:]), None)

    @cached_property
    def kinds(self) -> tuple[KindBudget, ...]:
        """By group, and in it by kind of heads."""
        windows, group_of = self._groups
        sizes = self._sizes(self.context, self.sequences)
        members: dict[tuple[int, int, int, int], list[int]] = {}
        for i, spec in enumerate(self.model.layers):
            if group_of[i] < 0:
                continue  # recurrent: no cells
            members.setdefault((group_of[i], spec.num_kv_heads, spec.head_dim, spec.v_dim), []).append(i)
        found = []
        for (group, heads, k_dim, v_dim), layers in sorted(members.items()):
            owning = [i for i in layers if self._store.owner[i] == i]
            nbytes = self._store.cell_nbytes(owning)
            found.append(KindBudget(group, windows[group], heads, k_dim, v_dim, len(layers), len(owning), nbytes, sizes[group]))
        return tuple(found)

    @property
    def kv_nbytes(self) -> int:
        """Bytes of all cells: what `KVCache.nbytes` will be."""
        return self._kv_nbytes(self.context, self.sequences)

    @property
    def states_nbytes(self) -> int:
        """Most bytes of recurrent states: every sequence's, and as many earlier ones as a cache keeps; 0 without recurrent layers."""
        return self._states_nbytes(self.sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, cells and recurrent states."""
        return self.model.weights_nbytes + self.kv_nbytes + self.states_nbytes

    def _kv_nbytes(self, context: int, sequences: int) -> int:
        sizes = self._sizes(context, sequences)
        return sum(kind.cell_nbytes * sizes[kind.group] for kind in self.kinds)

    def _states_nbytes(self, sequences: int) -> int:
        numbers = sum(math.prod(shape) for spec in self.model.layers for shape in spec.states)
        return 4 * numbers * sequences * (1 + CacheConfig(num_cells=1).checkpoints)

    def max_context(self, memory: int) -> int:
        """Most tokens a sequence, of as many sequences, so that all fits into `memory` bytes; 0 if nothing does."""
        return self._largest(memory, self.model.max_positions, lambda n: (n, self.sequences))

    def max_sequences(self, memory: int) -> int:
        """Most sequences of as many tokens so that all fits into `memory` bytes; 0 if not one does."""
        return self._largest(memory, MAX_SEQS, lambda n: (self.context, n))

    def _largest(self, memory: int, most: int, of: Callable[[int], tuple[int, int]]) -> int:
        room = memory - self.model.weights_nbytes
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            context, sequences = of(middle)
            if (
                self._kv_nbytes(context, sequences) + self._states_nbytes(sequences) <= room
                and self._sizes(context, sequences)[0] <= MAX_CELLS
            ):
                low = middle
            else:
                high = middle - 1
        return low


def machine_memory() -> int:
    """Bytes this process may use: the machine's memory, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total
