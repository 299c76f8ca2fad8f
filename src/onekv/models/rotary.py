"""How a model turns its keys with position, found by evaluating one token at two positions.

Owns the comparison, not the forward: it is given what every layer stored for the same token at several positions, and names the rotation
that relates them, or says that none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from onekv.errors import UnsupportedModel
from onekv.rope import rotate
from onekv.storage import Rope

_TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_USUAL_THETA: Final = 10_000.0


class NoRotation(UnsupportedModel):
    """A layer whose stored keys at two positions are related by no rotation."""


def rope_of(
    layer: int,
    keys: Tensor,
    values: Tensor,
    positions: Sequence[int],
    frequencies: Sequence[tuple[float, ...]],
    dtype: torch.dtype,
) -> Rope | None:
    """The rotation that relates what a layer stored for one token at several positions; None if position changes nothing.

    Shapes:
        keys, values: [n, G, D] and [n, G, Dv], one row for each of the n positions
        frequencies:  candidates, [rotary pairs] each
    Raises:
        NoRotation: they differ, and by no rotation with one of the frequencies.
    """
    changed = [part for part in _parts() if not _is_close({"key": keys, "value": values}[part], None, positions, dtype)]
    if not changed:
        return None
    if len(changed) == 1:
        part = changed[0]
        stored = keys if part == "key" else values
        for rope in _candidates(part, stored.shape[-1], frequencies):
            if _is_close(stored, rope, positions, dtype):
                return rope
    raise NoRotation(
        f"layer {layer} stores {' and '.join(f'{part}s' for part in changed)} that depend on position, not by a rotation onekv knows"
    )


def _parts() -> tuple[Literal["key"], Literal["value"]]:
    return "key", "value"


def _candidates(part: Literal["key", "value"], width: int, frequencies: Sequence[tuple[float, ...]]) -> Iterator[Rope]:
    layouts: tuple[Literal["half"], Literal["interleaved"]] = ("half", "interleaved")
    for inv_freq in frequencies:
        turned = 2 * len(inv_freq)
        if turned > width:
            continue
        for layout in layouts:
            for offset in dict.fromkeys((0, width - turned)):
                yield Rope(inv_freq, layout, offset, part)


def _is_close(stored: Tensor, rope: Rope | None, positions: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether turning the first row to every other position gives what was stored there. None: no turn."""
    change = torch.tensor([p - positions[0] for p in positions], device=stored.device)
    first = stored[:1].expand_as(stored)
    expected = first.float() if rope is None else rotate(first, change, rope)
    error = (expected - stored.float()).flatten(1).norm(dim=1)
    return bool((error <= _TOLERANCE.get(dtype, 3e-2) * stored.float().flatten(1).norm(dim=1) + 1e-30).all())


def frequencies_of(model: nn.Module, config: Any) -> list[tuple[float, ...]]:
    """Rotary frequencies the model could be using: its `inv_freq` buffers, and the usual ones for models that keep none."""
    found = [tuple(buffer.double().tolist()) for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.ndim == 1]
    theta = getattr(config, "rope_theta", None) or _USUAL_THETA
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    for turned in (getattr(config, "rotary_dim", None), width):
        if isinstance(turned, int) and turned > 1:
            found.append(tuple(float(theta) ** (-2 * i / turned) for i in range(turned // 2)))
    return list(dict.fromkeys(found))
