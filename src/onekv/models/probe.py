"""What a model does with keys and values, found by watching it rather than by reading its config.

Owns the probe: two rows are run through the hooks, with attention that returns zeros, and every layer's tensors are looked at. Heads and
widths, layers that read another layer's keys, each layer's window, recurrent states and how keys turn with position come from there, so no
family needs code of its own. Touches no cache and no weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from onekv.core.window import Window
from onekv.errors import OneKVError, UnsupportedModel
from onekv.models.hooks import Hooked, RecurrentState
from onekv.models.rotary import NoRotation, frequencies_of, pinned, pins_of, rope_of
from onekv.storage import LayerSpec

_ROPE_POSITIONS: Final = (3, 8, 21)


@dataclass(frozen=True, slots=True)
class _Attended:
    """One call of the attention function."""

    layer: int
    origin: int
    window: Window
    num_heads: int


class _Watcher:
    """A sink that remembers what came and answers with zeros."""

    def __init__(self) -> None:
        self.stored: dict[int, tuple[int, int, int]] = {}  # layer -> G, D, Dv
        self.attended: list[_Attended] = []
        self.last_row: list[Tensor] = []  # q, k and v of the second row, call by call
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> k and v of all rows
        self.states: dict[int, RecurrentState] = {}  # layer -> states after the rows
        self.logits = torch.empty(0)  # of the last row, [1, V]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kept[layer] = (k, v)
        self.stored[layer] = (k.shape[1], k.shape[2], v.shape[2])
        self.last_row += [k[-1].float(), v[-1].float()]

    def attend(
        self, layer: int, origin: int, window: Window, q: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        self.attended.append(_Attended(layer, origin, window, q.shape[1]))
        self.last_row.append(q[-1].float())
        return q.new_zeros(*q.shape[:2], self.stored[origin][2])


def read_layers(hooked: Hooked, vocab_size: int, max_positions: int) -> tuple[LayerSpec, ...]:
    """One spec per layer of the model.

    Raises:
        UnsupportedModel: names the model and what about it cannot be served exactly.
    Cost: two forwards of two rows.
    """
    hooked.pins = pins_of(hooked.model, max_positions)
    farthest = max_positions - 1
    near, far = sorted((min(3, farthest), min(5, farthest)))
    # The second row is the same both times. Only attention, which answers zeros here, may carry anything over from the first.
    one = _watch(hooked, [0, 1 % vocab_size], [far, near])
    other = _watch(hooked, [2 % vocab_size, 1 % vocab_size], [farthest, near])
    specs = _specs(hooked, one)
    if "position_ids" not in hooked.accepts:
        raise UnsupportedModel(f"{hooked.name}.forward takes no position_ids")
    tolerance = 1e-4 if hooked.model.dtype == torch.float32 else 3e-2
    for a, b in zip(one.last_row, other.last_row, strict=True):
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise UnsupportedModel(
                f"{hooked.name}: a row depends on the other rows of its batch by more than attention, so sequences cannot be packed"
            )
    return specs


def read_ropes(hooked: Hooked, layers: Sequence[LayerSpec], max_positions: int) -> tuple[tuple[LayerSpec, ...], str | None]:
    """The layers with their ropes, and why stored keys cannot be moved to other positions; None if they can.

    One token is evaluated at several positions, with attention that returns zeros, so that position is all that differs between the rows.
    Cost: one forward of three rows.
    """
    positions = [p for p in _ROPE_POSITIONS if p < max_positions]
    if len(positions) < 2:
        return tuple(layers), f"its context of {max_positions} positions is too short to see how keys turn"
    seen = _watch(hooked, [1] * len(positions), positions)
    widths = {width for layer in layers if layer.has_cells for width in (layer.head_dim, layer.v_dim)}
    with pinned(hooked.pins):
        frequencies = frequencies_of(hooked.model, hooked.model.config.get_text_config(decoder=True), widths)
    turned = []
    for i, layer in enumerate(layers):
        if layer.source is not None or not layer.has_cells:
            turned.append(layer)
            continue
        try:
            turned.append(replace(layer, rope=rope_of(i, *seen.kept[i], positions, frequencies, hooked.model.dtype)))
        except NoRotation as error:
            return tuple(layers), f"{hooked.name}: {error}"
    return tuple(turned), None


def read_states(hooked: Hooked, vocab_size: int, max_positions: int) -> tuple[dict[int, RecurrentState], bool]:
    """A state of every recurrent layer, and whether a sequence that has one can take only one row at a time.

    Three rows are evaluated at once, and again with the state handed over after the first: the last logits and states must agree. A state
    of zeros must be as good as none, and another sequence beside it must change nothing.

    Raises:
        UnsupportedModel: names the model and what differs.
    Cost: four forwards of three rows or fewer; six where a state takes one row at a time. None without recurrent layers.
    """
    if not hooked.recurrent:
        return {}, False
    tokens, positions = [1 % vocab_size, 2 % vocab_size, 3 % vocab_size], [min(p, max_positions - 1) for p in range(3)]
    tolerance = 1e-4 if hooked.model.dtype == torch.float32 else 3e-2

    def outcome(seen: _Watcher) -> list[Tensor]:
        return [seen.logits, *(tensor[-1:].float() for state in seen.states.values() for tensor in state.tensors)]

    def agrees(seen: _Watcher) -> bool:
        pairs = zip(outcome(seen), outcome(whole), strict=True)
        return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max())) for a, b in pairs)

    whole = _watch(hooked, tokens, positions, num_seqs=1)
    if idle := sorted(set(hooked.recurrent) - set(whole.states)):
        raise UnsupportedModel(f"{hooked.name}: layers {idle} are recurrent, but keep no states in the cache")
    zeros = {i: state.filled([torch.zeros_like(t) for t in state.tensors]) for i, state in whole.states.items()}
    if not agrees(_watch(hooked, tokens, positions, num_seqs=1, states=zeros)):
        raise UnsupportedModel(f"{hooked.name}: recurrent states of zeros are not what a sequence begins with")
    if not agrees(_watch(hooked, tokens[::-1] + tokens, positions * 2, num_seqs=2)):
        raise UnsupportedModel(f"{hooked.name}: a sequence depends on the others of its batch")
    for size in (2, 1):
        states = _watch(hooked, tokens[:1], positions[:1], num_seqs=1).states
        for start in range(1, 3, size):
            rows = slice(start, start + size)
            seen = _watch(hooked, tokens[rows], positions[rows], num_seqs=1, states=states)
            states = seen.states
        if agrees(seen):
            return zeros, size == 1
    raise UnsupportedModel(f"{hooked.name}: its recurrent layers do not go on from the states they leave")


def _watch(
    hooked: Hooked,
    tokens: list[int],
    positions: list[int],
    num_seqs: int | None = None,
    states: dict[int, RecurrentState] | None = None,
) -> _Watcher:
    """Run some rows: packed, or each a sequence of its own where a layer is recurrent, or as many sequences as given."""
    watcher = _Watcher()
    device = hooked.model.device
    num_seqs = num_seqs or (len(tokens) if hooked.recurrent else 1)
    running = hooked.begin(watcher, torch.tensor(positions, device=device), None, num_seqs, states)
    try:
        last = torch.tensor([len(tokens) - 1], device=device)
        watcher.logits = hooked.run(running, tokens=torch.tensor(tokens, device=device), keep=last).float()
    except (OneKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(f"{hooked.name} does not run through the cache hooks: {type(error).__name__}: {error}") from error
    held = {i: RecurrentState.of(layer) for i, layer in running.cache.linear.items()}
    watcher.states = {i: state for i, state in held.items() if state.tensors}
    return watcher


def _specs(hooked: Hooked, seen: _Watcher) -> tuple[LayerSpec, ...]:
    num_layers = hooked.model.config.get_text_config(decoder=True).num_hidden_layers
    counts = Counter(call.layer for call in seen.attended)
    states = {i: tuple(tuple(t.shape[1:]) for t in state.tensors) for i, state in seen.states.items()}
    if states and not counts:
        raise UnsupportedModel(f"{hooked.name}: all its layers are recurrent; positions live in cells, so at least one layer must attend")
    silent = set(states) - set(counts)
    if counts != Counter(set(range(num_layers)) - silent):
        wrong = [i for i in sorted({*range(num_layers), *counts} - silent) if counts[i] != 1]
        raise UnsupportedModel(
            f"{hooked.name}: {len(seen.attended)} calls of the attention hook for {num_layers} layers, where one each is expected; "
            f"not once in layers {wrong}"
        )
    specs = {i: LayerSpec(0, 0, states=states[i]) for i in silent}
    for call in sorted(seen.attended, key=lambda c: c.layer):
        groups, width, value_width = seen.stored[call.origin]
        if call.num_heads % groups:
            raise UnsupportedModel(f"{hooked.name}, layer {call.layer}: {call.num_heads} query heads over {groups} key heads")
        specs[call.layer] = LayerSpec(
            num_kv_heads=groups,
            head_dim=width,
            value_dim=None if value_width == width else value_width,
            window=call.window,
            source=None if call.origin == call.layer else call.origin,
            states=states.get(call.layer, ()),
        )
    idle = sorted(set(seen.stored) - {call.origin for call in seen.attended})
    if idle:
        raise UnsupportedModel(f"{hooked.name}: layers {idle} store keys that no layer reads")
    return tuple(specs[i] for i in range(num_layers))
