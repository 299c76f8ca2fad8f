"""How a model turns its keys with position, found by evaluating one token at two positions.

Owns the comparison, not the forward: it is given what every layer stored for the same token at several positions, and names the rotation
that relates them, or says that none does. Owns too the pins: frequencies that must not follow the length of a batch, fixed for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onekv.errors import UnsupportedModel
from onekv.rope import rotate
from onekv.storage import Rope

_TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_USUAL_THETA: Final = 10_000.0
_BATCH_DEPENDENT: Final = ("dynamic", "longrope")


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


def frequencies_of(model: nn.Module, config: Any, widths: Iterable[int]) -> list[tuple[float, ...]]:
    """Rotary frequencies the model could be using: its `inv_freq` buffers, and the usual ones for models that keep none.

    Args:
        widths: of the heads that were stored; a config need not name them, and some have several
    """
    found = [tuple(buffer.double().tolist()) for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.ndim == 1]
    theta = getattr(config, "rope_theta", None) or _USUAL_THETA
    for turned in (getattr(config, "rotary_dim", None), *widths):
        if isinstance(turned, int) and turned > 1:
            found.append(tuple(float(theta) ** (-2 * i / turned) for i in range(turned // 2)))
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Pin:
    """Frequencies of one kind of layer in one rotary module, fixed for a context size.

    Attributes:
        module:   the rotary module
        kind:     the kind of layer; None where the module serves one kind only
        inv_freq: [rotary pairs]
    """

    module: nn.Module
    kind: str | None
    inv_freq: Tensor

    @property
    def name(self) -> str:
        """The buffer that holds the module's frequencies."""
        return "inv_freq" if self.kind is None else f"{self.kind}_inv_freq"


def pins_of(model: nn.Module, context: int) -> list[Pin]:
    """Pins for every rotary module whose frequencies follow the largest position of a forward.

    Without them one sequence would change another's keys, and a key's rotation would depend on when it was computed. They are those
    transformers uses for a sequence of `context` tokens.

    Raises:
        UnsupportedModel: frequencies that follow the batch in a way of the module's own.
    """
    pins = []
    for name, module in model.named_modules():
        types = getattr(module, "rope_type", None)
        for kind, rope_type in types.items() if isinstance(types, dict) else ((None, types),):
            if rope_type not in _BATCH_DEPENDENT:
                continue
            # Only transformers' own decorator looks at rope_type at every forward, so only there can it be switched off.
            if not hasattr(type(module).forward, "__wrapped__"):
                raise UnsupportedModel(
                    f"{type(model).__name__}: {name} scales its rotary frequencies by the largest position in the batch "
                    f"(rope_type {rope_type!r}), so that one sequence would change another's keys"
                )
            named = {} if kind is None else {"layer_type": kind}
            inv_freq, _ = ROPE_INIT_FUNCTIONS[rope_type](module.config, None, seq_len=context, **named)
            pins.append(Pin(module, kind, inv_freq))
    return pins


@contextlib.contextmanager
def pinned(pins: Iterable[Pin]) -> Iterator[None]:
    """Within the block the modules use the pinned frequencies; afterwards they are as before."""
    with contextlib.ExitStack() as undo:
        for pin in pins:
            module: Any = pin.module
            buffer, rope_type = getattr(module, pin.name), module.rope_type
            undo.callback(setattr, module, pin.name, buffer)
            undo.callback(setattr, module, "rope_type", rope_type)
            setattr(module, pin.name, pin.inv_freq.to(buffer))
            module.rope_type = "default" if pin.kind is None else {**rope_type, pin.kind: "default"}
        yield
