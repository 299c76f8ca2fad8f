"""Whether a row of a model depends on the rows that come with it, to the bit. Used where deterministic=True was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from onekv.attention import Score
from onekv.core.window import Window
from onekv.errors import UnsupportedModel
from onekv.models.hooks import Sink

_ROWS: Final = 40
_COUNTS: Final = (1, 2, 7, 16, 33)
_FARTHEST: Final = 4096  # far enough; tables of angles are built up to the farthest position

# sink, tokens [T], positions [T], keep [n] -> logits [n, V]
Evaluate = Callable[[Sink, Tensor, Tensor, Tensor], Tensor]


class AloneSink:
    """Attention of which every row is a function of its own query only, exact in any order: each row sees a cut of its own query.

    Attributes:
        stored: everything that came, layer by layer: k, v, q
    """

    def __init__(self) -> None:
        self._widths: dict[int, int] = {}
        self.stored: list[Tensor] = []

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._widths[layer] = v.shape[2]
        self.stored += [k, v]

    def attend(self, layer: int, origin: int, window: Window, q: Tensor, score: Score) -> Tensor:
        self.stored.append(q)
        width = self._widths[origin]
        return q.repeat(1, 1, -(-width // q.shape[2]))[..., :width]

    def attend_to(self, layer: int, window: Window, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        raise UnsupportedModel("deterministic=True cannot be kept by a model that makes keys of other rows' entries (latent attention)")

    def visible(self, window: Window) -> Tensor:
        raise UnsupportedModel("deterministic=True cannot be kept by a model that attends by code of its own")


def dependence(evaluate: Evaluate, num_tokens: int, max_positions: int, rows: int = _ROWS, counts: tuple[int, ...] = _COUNTS) -> str | None:
    """What differs, if anything, between rows evaluated all together and random ones of them alone. None: nothing does.

    Cost: a forward of `rows` rows, and one for each of `counts`.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(num_tokens, (rows,), generator=generator)
    positions = torch.randint(min(max_positions, _FARTHEST), (rows,), generator=generator)
    whole = AloneSink()
    of_whole = evaluate(whole, tokens, positions, torch.arange(rows))
    for count in counts:
        chosen = torch.randperm(rows, generator=generator)[:count]
        some = AloneSink()
        logits = evaluate(some, tokens[chosen], positions[chosen], torch.arange(count))
        for i, (one, all_rows) in enumerate(zip(some.stored, whole.stored, strict=True)):
            if not torch.equal(one, all_rows[chosen]):
                return f"{('keys', 'values', 'queries')[i % 3]} of layer {i // 3} with {count} rows and with {rows}"
        if not torch.equal(logits, of_whole[chosen]):
            return f"logits with {count} rows and with {rows}"
    return None
