"""Settings of a cache: frozen, checked when built, never changed after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from onekv.errors import ConfigError

MAX_SEQS: Final = 4096
_CHOICES: Final = {
    "placement": ("scattered", "contiguous"),
    "v_layout": ("rows", "transposed"),
    "shared_shift": ("copy", "move", "error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What `KVCache` was built with.

    Attributes:
        num_cells:     cells of the full-attention layers, or of the only group of layers
        max_seqs:      sequence ids are in [0, max_seqs)
        window_cells:  cells of the other groups; None: num_cells, and no position is ever given up for lack of space
        k_dtype, v_dtype: how keys and values are stored: "float32", "float16", "bfloat16", "q8_0" or "q4_0"; v_dtype None: as the keys
        hadamard:      rotate heads before they are quantised, so that outliers spread; None: where they are q4_0
        device:        torch device of the cells
        placement:     "scattered": any free cells; "contiguous": a run of neighbours
        v_layout:      "rows" or "transposed": memory order of values; quantised values have rows only
        backend:       attention backend, by file name in onekv/attention, or "auto"
        shared_shift:  what a shift does to cells with other owners: "copy" them first, "move" all owners, or "error"
        vocab_size:    token ids are in [0, vocab_size); None: not checked
        fingerprint:   identity of the model whose K/V these are; files of another are refused
        no_shift:      why positions of this cache may not shift; None: they may
        checkpoints:   recurrent layers: how many earlier states of a sequence are kept. A tail can be removed back to these: the end of
                       the batch before the last, and the ends of those batches that would take longest to evaluate again
        row_by_row:    recurrent layers: a sequence that has a state takes one row a step (Jamba's cannot take more)
    """

    num_cells: int
    max_seqs: int = 256
    window_cells: int | None = None
    k_dtype: str = "float32"
    v_dtype: str | None = None
    hadamard: bool | None = None
    device: str = "cpu"
    placement: Literal["scattered", "contiguous"] = "scattered"
    v_layout: Literal["rows", "transposed"] = "rows"
    backend: str = "auto"
    shared_shift: Literal["copy", "move", "error"] = "copy"
    vocab_size: int | None = None
    fingerprint: str = ""
    no_shift: str | None = None
    checkpoints: int = 4
    row_by_row: bool = False

    def __post_init__(self) -> None:
        _check_count("num_cells", self.num_cells, 2**31 - 1)
        _check_count("max_seqs", self.max_seqs, MAX_SEQS)
        if self.window_cells is not None:
            _check_count("window_cells", self.window_cells, self.num_cells)
        _check_count("checkpoints", self.checkpoints, 2**31 - 1)
        if self.vocab_size is not None:
            _check_count("vocab_size", self.vocab_size, 2**31 - 1)
        if self.hadamard is not None and not isinstance(self.hadamard, bool):
            raise ConfigError(f"hadamard must be None, True or False; got {self.hadamard!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")


def check_least(name: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least `least`.

    Raises:
        ConfigError: names it, and what came.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} must be an integer from 1 to {most}, got {value!r}")
