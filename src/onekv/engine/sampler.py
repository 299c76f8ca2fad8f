"""Choosing the next token of one sequence from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onekv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token; above, logits are divided by it and one token is drawn
        seed:        makes draws repeatable; None: a fresh seed
    """

    temperature: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in [0, 2**63), got {self.seed!r}")


class Sampler:
    """Draws the tokens of one sequence; holds its random state.

    >>> Sampler(Sampling())(torch.tensor([0.0, 2.0, 1.0]))
    1
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token id, from logits [V]."""
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        weights = torch.softmax(logits.float().cpu() / self.sampling.temperature, dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._random))
