"""What a model does with keys and values, found by watching it rather than by reading its config.

Owns the probe: two rows are run through the hooks, with attention that returns zeros, and every layer's tensors are looked at. Heads and
widths, layers that read another layer's keys, each layer's window, recurrent states and how keys turn with position come from there, so no
family needs code of its own. Which layers go on with stored keys and values (see `hooks`) is found too, and that they use each entry by
itself, so that entries may come in any order. Touches no cache and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from onekv.attention import Score
from onekv.core.window import Window
from onekv.errors import OneKVError, UnsupportedModel
from onekv.models.hooks import Hooked, RecurrentState, Sink
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
    is_made: bool = False  # to keys and values the layer made of what was stored


class _Watcher:
    """A sink that remembers what came and answers with zeros. A model that attends by itself sees nothing but each row's own entry.

    Args:
        order: the rows of which a layer is handed the entries, where it goes on with them; None: all, as they are
    """

    def __init__(self, num_rows: int, order: Sequence[int] | None) -> None:
        self.order = order
        self.num_rows = num_rows
        self.stored: dict[int, tuple[int, int, int]] = {}  # layer -> G, D, Dv
        self.attended: list[_Attended] = []
        self.windows: set[Window] = set()
        self.last_row: list[Tensor] = []  # q, k and v of the second row, call by call; what a layer made of its entry, wherever it lies
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> k and v of all rows
        self.states: Mapping[int, RecurrentState] = {}  # layer -> states after the rows
        self.logits = torch.empty(0)  # of the last row, [1, V]
        self.error: Exception | None = None

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        self.kept[layer] = (k, v)
        self.stored[layer] = (k.shape[1], k.shape[2], v.shape[2])
        self.last_row += [k[-1].float(), v[-1].float()]
        return None if self.order is None else (k[[*self.order]], v[[*self.order]])

    def attend(self, layer: int, origin: int, window: Window, q: Tensor, score: Score) -> Tensor:
        self.attended.append(_Attended(layer, origin, window, q.shape[1]))
        self.last_row.append(q[-1].float())
        return q.new_zeros(*q.shape[:2], self.stored[origin][2])

    def attend_to(self, layer: int, window: Window, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        self.attended.append(_Attended(layer, layer, window, q.shape[1], is_made=True))
        last = [i for i, row in enumerate(self._entries) if row == self.num_rows - 1]
        self.last_row += [q[-1].float(), k[last].float(), v[last].float()]
        return q.new_zeros(*q.shape[:2], v.shape[2])

    def visible(self, window: Window) -> Tensor:
        self.windows.add(window)
        return torch.tensor([[entry == row for entry in self._entries] for row in range(self.num_rows)])

    @property
    def _entries(self) -> Sequence[int]:
        return range(self.num_rows) if self.order is None else self.order


class _Given:
    """A sink that hands a model made-up entries, of which three rows see some. Values are large, so that attention to another one shows.

    Args:
        order: which entry lies where
    """

    visible_to: Final = ((0, 3), (2, 7), (0, 9))  # [first, last) of each row; entries from 9 on are seen by none

    def __init__(self, model: str, order: Sequence[int]) -> None:
        self.model = model
        self.order = torch.tensor(order)

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(layer)
        keys, values = (size * torch.randn(12, *part.shape[1:], generator=made)[self.order].to(part) for size, part in ((1, k), (10, v)))
        return keys, values

    def attend(self, layer: int, origin: int, window: Window, q: Tensor, score: Score) -> Tensor:
        raise self._mixed(layer)

    def attend_to(self, layer: int, window: Window, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        raise self._mixed(layer)

    def _mixed(self, layer: int) -> UnsupportedModel:
        return UnsupportedModel(f"{self.model} attends by code of its own before layer {layer}, and not there; one mask cannot serve both")

    def visible(self, window: Window) -> Tensor:
        first, last = torch.tensor(self.visible_to).T[:, :, None]
        seen: Tensor = (self.order >= first) & (self.order < last)
        return seen


def read_layers(hooked: Hooked, vocab_size: int, max_positions: int) -> tuple[LayerSpec, ...]:
    """One spec per layer of the model.

    Raises:
        UnsupportedModel: names the model and what about it cannot be served exactly.
    Cost: two forwards of two rows; two more of three rows for a model that attends by its own code.
    """
    hooked.pins, hooked.gathers, hooked.attends_itself = pins_of(hooked.model, max_positions), frozenset(), False
    farthest = max_positions - 1
    near, far = sorted((min(3, farthest), min(5, farthest)))
    # The second row is the same both times. Only attention, which answers zeros here, may carry anything over from the first.
    one = _look(hooked, [0, 1 % vocab_size], [far, near])
    if one.stored and not one.attended:
        hooked.attends_itself = True
        _check_own_attention(hooked, vocab_size, [far, near, farthest])
        one = _watch(hooked, [0, 1 % vocab_size], [far, near])
    _check_ran(hooked, one)
    specs = _specs(hooked, one)
    if "position_ids" not in hooked.accepts:
        raise UnsupportedModel(f"{hooked.name}.forward takes no position_ids, so rows cannot be told their positions")
    hooked.gathers = frozenset(one.stored) if hooked.attends_itself else frozenset(call.layer for call in one.attended if call.is_made)
    # What a layer makes of the second row's entry must not depend on what lies beside it.
    other = _watch(hooked, [2 % vocab_size, 1 % vocab_size], [farthest, near], order=[1, 0, 1] if hooked.gathers else None)
    tolerance = 1e-4 if hooked.model.dtype == torch.float32 else 3e-2
    for a, b in zip(one.last_row, other.last_row, strict=True):
        if not torch.allclose(a.expand_as(b), b, rtol=tolerance, atol=tolerance, equal_nan=True):
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
    Cost: five forwards of six rows or fewer; eight where a state takes one row at a time. None without recurrent layers.
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
    order: Sequence[int] | None = None,
    num_seqs: int | None = None,
    states: Mapping[int, RecurrentState] | None = None,
) -> _Watcher:
    """Run some rows; arguments as for `_Watcher` and `_run`."""
    if order is None and (hooked.gathers or hooked.attends_itself):
        order = range(len(tokens))
    watcher = _look(hooked, tokens, positions, order, num_seqs, states)
    _check_ran(hooked, watcher)
    return watcher


def _check_ran(hooked: Hooked, watcher: _Watcher) -> None:
    if watcher.error is not None:
        error = watcher.error
        raise UnsupportedModel(f"{hooked.name} does not run through the cache hooks: {type(error).__name__}: {error}") from error


def _look(
    hooked: Hooked,
    tokens: list[int],
    positions: list[int],
    order: Sequence[int] | None = None,
    num_seqs: int | None = None,
    states: Mapping[int, RecurrentState] | None = None,
) -> _Watcher:
    """As `_watch`, and what stopped the model is in `error`."""
    watcher = _Watcher(len(tokens), order)
    try:
        watcher.logits, watcher.states = _run(hooked, watcher, tokens, positions, 1, num_seqs, states)
    except (OneKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        watcher.error = error
    return watcher


def _run(
    hooked: Hooked,
    sink: Sink,
    tokens: list[int],
    positions: list[int],
    keep: int,
    num_seqs: int | None = None,
    states: Mapping[int, RecurrentState] | None = None,
) -> tuple[Tensor, dict[int, RecurrentState]]:
    """Logits [keep, V] of the last rows, float32, and the recurrent states after all.

    Args:
        num_seqs: how many sequences the rows are cut into; None: all are packed, or each is one where a layer is recurrent
        states:   recurrent states before the rows
    """
    device = hooked.model.device
    num_seqs = num_seqs or (len(tokens) if hooked.recurrent else 1)
    running = hooked.begin(sink, torch.tensor(positions, device=device), None, num_seqs, states)
    rows = torch.arange(len(tokens) - keep, len(tokens), device=device)
    return hooked.run(running, tokens=torch.tensor(tokens, device=device), keep=rows).float(), running.states


def _check_own_attention(hooked: Hooked, vocab_size: int, positions: list[int]) -> None:
    """A model that attends by its own code is right about every entry by the mask alone: the same entries in another order, with others
    between them that no row sees, give the same.

    Raises:
        UnsupportedModel: they do not.
    """
    tokens = [i % vocab_size for i in range(len(positions))]
    reason = (
        f"{hooked.name} attends by code of its own, which goes by the order in which keys lie (ALiBi, or a causal rule of its own); "
        "keys in cells lie in any order"
    )
    try:
        one, other = (
            _run(hooked, _Given(hooked.name, order), tokens, positions, keep=len(tokens))[0]
            for order in ([*range(9)], [4, 10, 0, 8, 2, 11, 6, 1, 9, 5, 7, 3])
        )
    except (OneKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(reason) from error
    tolerance = 1e-3 if hooked.model.dtype == torch.float32 else 1e-1
    if not bool((one - other).abs().max() <= tolerance * one.abs().max()):
        raise UnsupportedModel(reason)


def _specs(hooked: Hooked, seen: _Watcher) -> tuple[LayerSpec, ...]:
    num_layers = hooked.model.config.get_text_config(decoder=True).num_hidden_layers
    calls = seen.attended
    if hooked.attends_itself:
        if len(seen.windows) != 1:
            raise UnsupportedModel(f"{hooked.name} attends by code of its own, with {len(seen.windows)} kinds of masks; one can be served")
        (window,) = seen.windows
        calls = [_Attended(layer, layer, window, num_heads=groups) for layer, (groups, _, _) in seen.stored.items()]
    by_layer = {call.layer: call for call in calls}
    if any(by_layer[call.layer] != call for call in calls) or max(by_layer, default=0) >= num_layers:
        raise UnsupportedModel(f"{hooked.name}: a layer attends in several ways, or is not one of the {num_layers} its config names")
    states = {i: tuple(tuple(t.shape[1:]) for t in state.tensors) for i, state in seen.states.items()}
    if states and not by_layer:
        raise UnsupportedModel(f"{hooked.name}: all its layers are recurrent; positions live in cells, so at least one layer must attend")
    if never := [layer for layer in range(num_layers) if layer not in by_layer and layer not in states]:
        raise UnsupportedModel(f"{hooked.name}: layers {never} neither attend to stored keys nor keep recurrent states in the cache")
    specs: list[LayerSpec] = []
    for layer in range(num_layers):
        if layer not in by_layer:
            specs.append(LayerSpec(0, 0, states=states[layer]))
            continue
        call = by_layer[layer]
        groups, width, value_width = seen.stored[call.origin]
        if call.num_heads % groups:
            raise UnsupportedModel(f"{hooked.name}, layer {layer}: {call.num_heads} query heads over {groups} key heads")
        specs.append(
            LayerSpec(
                num_kv_heads=groups,
                head_dim=width,
                value_dim=None if value_width == width else value_width,
                window=call.window,
                source=None if call.origin == layer else call.origin,
                states=states.get(layer, ()),
            )
        )
    idle = sorted(set(seen.stored) - {call.origin for call in calls})
    if idle:
        raise UnsupportedModel(f"{hooked.name}: layers {idle} store keys that no layer reads")
    return tuple(specs)
