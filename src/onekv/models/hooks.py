"""The hooks: how an unmodified transformers model stores and attends through cells.

Owns what is registered with transformers under the name "onekv": one attention function and one mask function, and the cache object a
forward is given. They meet in a `Pass`, which lives for one forward and hands every layer's keys, values and queries to a `Sink`.
Nothing here knows which sequences exist or where cells are, and nothing here remembers a forward after it has ended.

Two kinds of models need to see stored keys and values, and get those that any row of the forward sees ("gathered"), N of them. Layers that
store one thing and attend to another (latent attention expands what was stored) attend through the attention function, to what they made
of the N. Models that attend by code of their own are handed a real mask [S, 1, T, N] by the mask function.

    model(input_ids, cache=pass.cache)
      ├─ mask function     reads which window a layer type has, returns a marker that stands for it
      └─ each layer
          ├─ cache.update  hands k, v to the sink, returns them unchanged, or gathered
          └─ attention     checks that q's layer was given the k and v of a known layer, and a known marker; the sink attends

Recurrent layers find transformers' own `LinearAttentionLayer` in that cache, with the states of the batch's sequences. Their rows cannot be
packed: the tokens are [S, T], T of each of S sequences.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Literal, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from onekv.attention import Score
from onekv.core.window import Window
from onekv.errors import OneKVError, UnsupportedModel
from onekv.models.rotary import Pin, pinned

NAME: Final = "onekv"
_FAR: Final = 1 << 30  # a position beyond every window; rules are evaluated there, nothing of that size is built
# Keywords that carry nothing attention depends on: positions reached q and k already, the window is read from the mask rule.
_NEUTRAL: Final = frozenset({"position_ids", "cache_position", "use_cache", "sliding_window"})

MaskRule = Callable[..., Tensor]

_running: ContextVar[Pass | None] = ContextVar("onekv_pass", default=None)


class Sink(Protocol):
    """Where the layers' tensors go."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take k [T, G, D] and v [T, G, Dv] of one layer. Returns what the layer goes on with instead, [N, G, D] and [N, G, Dv]; None:
        with the same."""
        ...

    def attend(self, layer: int, origin: int, window: Window, q: Tensor, score: Score) -> Tensor:
        """Attend with q [T, H, D] to what layer `origin` stored, under `window`. Returns [T, H, Dv]."""
        ...

    def attend_to(self, layer: int, window: Window, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        """Attend with q [T, H, D] to k [N, G, D] and v [N, G, Dv], which the layer made of the N that `store` returned. -> [T, H, Dv]."""
        ...

    def visible(self, window: Window) -> Tensor:
        """Which of the N that `store` returns each row sees under `window`, [T, N] bool. For models that attend by themselves."""
        ...


class Pass:
    """One forward of one model.

    Args:
        model: the model's name, for messages
        sink:  where keys, values and queries go
        masks: the windows this model has shown so far
        positions: [T] int64, of the rows of this forward
        shared: layers whose keys and values later layers read; None: unknown, keep all
        num_seqs: S, rows come sequence by sequence, T of each; 1 where rows of any sequences are packed
        recurrent: per recurrent layer, the number of convolutions whose states it keeps
        states: per recurrent layer, its state tensors [S, ...]; none where all sequences begin
        attends_itself: the model attends by its own code, and is handed a mask it can use
    """

    def __init__(
        self,
        model: str,
        sink: Sink,
        masks: MaskRules,
        positions: Tensor,
        shared: Collection[int] | None,
        num_seqs: int,
        recurrent: Mapping[int, int],
        states: Mapping[int, RecurrentState],
        attends_itself: bool,
    ) -> None:
        self.model = model
        self.sink = sink
        self.masks = masks
        self.positions = positions
        self.attends_itself = attends_itself
        self.num_seqs = num_seqs
        self.cache = _StepCache(self, recurrent, states)
        self._shared = shared
        self._latest = -1
        self._returned: dict[int, tuple[Tensor, Tensor]] = {}
        self._stored: set[int] = set()
        self._is_gathered = False  # what the latest layer to store goes on with

    @property
    def states(self) -> dict[int, RecurrentState]:
        """What recurrent layers hold: after the forward, the states after its rows. Layers that keep none are left out."""
        held = {i: RecurrentState.of(layer) for i, layer in self.cache.linear.items()}
        return {i: state for i, state in held.items() if state.tensors}

    def mask(self, rule: MaskRule, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A marker that stands for the rule's window; for a model that attends itself what it adds to its scores, [S, 1, T, N]."""
        if not self.attends_itself:
            return self.masks.marker(rule, device)
        window = self.masks.window(rule, device)
        if isinstance(window, str):
            raise UnsupportedModel(f"{self.model}: {window}")
        seen = self.sink.visible(window).to(device)
        added = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
        return added.view(self.num_seqs, 1, -1, seen.shape[1])

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """k [S, G, T, D], v [S, G, T, Dv]. Returns what the layer goes on with."""
        if k.ndim != 4 or k.shape[0] != self.num_seqs or v.shape[:3] != k.shape[:3]:
            raise UnsupportedModel(
                f"{self.model}, layer {layer}: keys {tuple(k.shape)} and values {tuple(v.shape)} are not [{self.num_seqs}, G, T, D]"
            )
        if layer in self._stored:
            raise UnsupportedModel(
                f"{self.model}, layer {layer}: stores keys twice in one forward (attention to an encoder, or layers in a loop)"
            )
        self._stored.add(layer)
        if self._shared is not None and self._latest not in self._shared:
            self._returned.pop(self._latest, None)
        self._latest = layer
        gathered = self.sink.store(layer, _as_rows(k), _as_rows(v))
        self._is_gathered = gathered is not None
        if gathered is not None:
            k, v = (part.transpose(0, 1).to(given).expand(self.num_seqs, -1, -1, -1) for part, given in zip(gathered, (k, v), strict=True))
        self._returned[layer] = (k, v)
        return k, v

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [S, H, T, D] -> [S, T, H, Dv]."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModel(f"{self.model}: {type(module).__name__} attends without a layer_idx")
        origin = self._origin(layer, k, v)
        if origin is None and (layer != self._latest or k.shape[2] != self._returned[layer][0].shape[2] or v.shape[2] != k.shape[2]):
            raise UnsupportedModel(
                f"{self.model}, layer {layer}: attention was handed keys or values that no layer stored "
                f"(k {tuple(k.shape)}, v {tuple(v.shape)}), as in an encoder"
            )
        window = self.masks.window_of(mask, self.model, layer)
        score = Score(q.shape[-1] ** -0.5 if scale is None else scale, softcap, sinks)
        rows = _as_rows(q)
        if origin is not None:
            out = self.sink.attend(layer, origin, window, rows, score)  # [S * T, H, Dv]
        else:
            # What is gathered is the same for every sequence; the probe checks that a layer makes the same of it.
            made_k, made_v = (_as_rows(part[:1] if self._is_gathered else part) for part in (k, v))
            out = self.sink.attend_to(layer, window, rows, made_k, made_v, score)
        return out.reshape(self.num_seqs, -1, *out.shape[1:])

    def _origin(self, layer: int, k: Tensor, v: Tensor) -> int | None:
        """The layer whose update returned these very tensors; the layer itself where that is so."""
        candidates = [layer] if layer in self._returned else []
        for i in [*candidates, *self._returned]:
            stored_k, stored_v = self._returned[i]
            if _is_same(k, stored_k) and _is_same(v, stored_v):
                return i
        return None


def _as_rows(heads: Tensor) -> Tensor:
    """[S, H, T, D] -> [S * T, H, D]"""
    return heads.transpose(1, 2).flatten(0, 1)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride())


class MaskRules:
    """The windows of one model, read from the mask functions transformers builds for it.

    The model is handed a marker, one element large, and passes it on to the layers the mask is for.
    """

    def __init__(self) -> None:
        self._markers: dict[tuple[Window | str, torch.device], Tensor] = {}
        self._windows: dict[int, Window | str] = {}  # by the marker's address; a str says why there is none
        self._known: dict[Hashable, Window | str] = {}

    def window(self, rule: MaskRule, device: torch.device) -> Window | str:
        """This rule's window; a str says why there is none."""
        key = _signature(rule)
        window = self._known.get(key) if key is not None else None
        if window is None:
            window = recognise(rule, device) or f"the mask rule {getattr(rule, '__qualname__', rule)!r} is no known window"
            if key is not None:
                self._known[key] = window
        return window

    def marker(self, rule: MaskRule, device: torch.device) -> Tensor:
        """The marker [1, 1, 1, 1] of this rule's window."""
        window = self.window(rule, device)
        marker = self._markers.get((window, device))
        if marker is None:
            marker = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
            self._markers[window, device] = marker
            self._windows[marker.data_ptr()] = window
        return marker

    def window_of(self, mask: Tensor | None, model: str, layer: int) -> Window:
        """The window of the marker a layer was handed.

        Raises:
            UnsupportedModel: no mask, a mask of another making, or a rule that is no known window.
        """
        if mask is None:
            raise UnsupportedModel(f"{model}, layer {layer}: attention was handed no mask, so its window is unknown")
        window = self._windows.get(mask.data_ptr())
        if window is None:
            raise UnsupportedModel(
                f"{model}, layer {layer}: attention was handed a mask the model made or changed itself, so what it sees is unknown"
            )
        if isinstance(window, str):
            raise UnsupportedModel(f"{model}, layer {layer}: {window}")
        return window


def recognise(rule: MaskRule, device: torch.device | str = "cpu") -> Window | None:
    """The window whose visibility equals the rule's, judged on positions near 0, around the window's edges, and far out. None: no window.

    Args:
        rule: transformers' mask function: (batch, head, query position, key position) -> bool, broadcasting
    Cost: some milliseconds; no mask of the context's size is built.
    """

    def sees(queries: Any, keys: Any) -> Any:
        q, k = torch.as_tensor(queries, device=device), torch.as_tensor(keys, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return np.broadcast_to(rule(zero, zero, q, k).cpu().numpy(), np.broadcast_shapes(tuple(q.shape), tuple(k.shape)))

    try:
        if not sees(_FAR, _FAR):
            return None
        # The earliest key a far query sees, and the latest query that sees this key, fix the size of every kind of window.
        first = _boundary(lambda k: bool(sees(_FAR, k)), 0, _FAR)
        reach = _boundary(lambda q: not sees(q, first), _FAR, 2 * _FAR) - first
        candidates = [Window.full()] if first == 0 else [Window.sliding(reach), Window.chunked(reach)]
        points = _test_points(0 if first == 0 else reach)
        seen = sees(points[:, None], points[None, :])
    except (IndexError, RuntimeError, TypeError, AttributeError):
        # A rule over something else than positions (padding, blocks of a prompt) indexes tensors that end before these positions.
        return None
    for window in candidates:
        if all(np.array_equal(seen[i], window.visible(points, int(q))) for i, q in enumerate(points)):
            return window
    return None


def _boundary(is_past: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number in [low, high] that is past a boundary, `high` if none below it is."""
    while low < high:
        middle = (low + high) // 2
        if is_past(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _test_points(size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions that tell windows of nearly equal size and different kind apart."""
    near = np.arange(24)
    edges = (np.arange(1, 4)[:, None] * size + np.arange(-2, 3)[None, :]).ravel()
    spread = np.random.default_rng(0).integers(0, max(5 * size, 4096), 40)
    far = _FAR + np.arange(-3, 4)
    points = np.concatenate([near, edges, spread, far, far - size])
    return np.unique(points[points >= 0]).astype(np.int64)


def _signature(rule: Any) -> Hashable | None:
    """Equal for mask functions that decide alike: the code and, recursively, what it closes over. None: cannot be told."""
    if not isinstance(rule, FunctionType):
        return None
    parts: list[Hashable] = [rule.__code__]
    for cell in rule.__closure__ or ():
        value = cell.cell_contents
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int | float | str | None):
                parts.append(one)
            elif isinstance(one, Tensor) and one.numel() == 1:
                parts.append(one.item())
            else:
                inner = _signature(one)
                if inner is None:
                    return None
                parts.append(inner)
    return tuple(parts)


class _StepCache(Cache):
    """The cache object of one forward. `update` passes on to the `Pass`; holds nothing but the states of recurrent layers."""

    def __init__(self, running: Pass, recurrent: Mapping[int, int], states: Mapping[int, RecurrentState]) -> None:
        linear = {i: LinearAttentionLayer(count) for i, count in recurrent.items()}
        super().__init__(layers=[linear.get(i) or cast(Any, DummyLayer)() for i in range(max(linear, default=-1) + 1)])
        self._running = running
        self.linear = linear
        for i, state in states.items():
            state.put_into(linear[i])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._running.update(key_states, value_states, layer_idx)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise UnsupportedModel(
            f"{self._running.model}, layer {layer_idx} chooses the keys it attends to by an index of its own (sparse attention), "
            "which cells do not hold"
        )

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """0 to the model. A layer that asks for itself wants its rows' positions, as arange(T) plus this: llama4's temperature."""
        if layer_idx is None:
            return 0
        positions = self._running.positions
        return positions - torch.arange(positions.shape[0], device=positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The states of one recurrent layer, as transformers keeps them.

    Attributes:
        parts:   where each tensor belongs: "conv" or "recurrent", and its number there
        tensors: [S, ...] each, in the dtype the model keeps them in
    """

    parts: tuple[tuple[Literal["conv", "recurrent"], int], ...]
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: LinearAttentionLayer) -> Self:
        """What a layer holds after a forward; no parts if the model does not use it."""
        kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
        held = {(kind, i): tensor for kind, states in kinds.items() for i, tensor in states.items() if tensor is not None}
        return cls(tuple(held), tuple(held.values()))  # type: ignore[arg-type]

    def put_into(self, layer: LinearAttentionLayer) -> None:
        """Let a fresh layer go on from here. The model may change the tensors in place."""
        for (kind, i), tensor in zip(self.parts, self.tensors, strict=True):
            if kind == "conv":
                layer.conv_states[i], layer.is_conv_states_initialized[i] = tensor, True
                layer.conv_kernel_size[i] = tensor.shape[-1]
            else:
                layer.recurrent_states[i], layer.is_recurrent_states_initialized[i] = tensor, True
            layer.has_previous_state[i] = True

    def filled(self, tensors: Sequence[Tensor]) -> RecurrentState:
        """The same parts with other tensors, in the dtypes and on the device of these."""
        return RecurrentState(self.parts, tuple(new.to(old.device, old.dtype) for new, old in zip(tensors, self.tensors, strict=True)))


class Hooked:
    """A transformers model that can be run through a `Pass`. Between runs it attends as it did before.

    Args:
        model: any causal language model; its weights and code are not touched
    Raises:
        UnsupportedModel: its forward takes no cache.

    Attributes:
        pins: rotary frequencies that hold during a run
        recurrent: layers that may keep recurrent states, by transformers' types of layers, and how many convolutions each has
        gathers: layers that go on with stored keys and values; found by the probe
        attends_itself: the model attends by its own code; found by the probe
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.pins: list[Pin] = []
        self.gathers: frozenset[int] = frozenset()
        self.attends_itself = False
        self.model = model
        self.name = type(model).__name__
        self.masks = MaskRules()
        self.accepts = frozenset(inspect.signature(model.forward).parameters)
        if "cache" not in self.accepts:
            raise UnsupportedModel(f"{self.name}.forward takes no cache")
        configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if isinstance(c, PreTrainedConfig)}
        self._configs = list(configs.values())
        config = model.config.get_text_config(decoder=True)
        kinds = [DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object) for kind in getattr(config, "layer_types", None) or ()]
        count = getattr(config, "number_of_conv_states", 1)
        self.recurrent = {i: count for i, kind in enumerate(kinds) if issubclass(kind, LinearAttentionCacheLayerMixin)}

    def begin(
        self,
        sink: Sink,
        positions: Tensor,
        shared: Collection[int] | None,
        num_seqs: int = 1,
        states: Mapping[int, RecurrentState] | None = None,
    ) -> Pass:
        """A pass of this model; arguments as for `Pass`."""
        return Pass(self.name, sink, self.masks, positions, shared, num_seqs, self.recurrent, states or {}, self.attends_itself)

    def run(self, running: Pass, *, tokens: Tensor | None = None, embeddings: Tensor | None = None, keep: Tensor) -> Tensor:
        """One forward over rows without padding: packed, or T rows of each of S sequences.

        Shapes:
            tokens [S * T] int64, or embeddings [S * T, E]; keep [n] int64, the rows whose logits are wanted -> logits [n, V] in the
            model's dtype
        """
        count = running.num_seqs
        inputs: dict[str, Any] = {"input_ids": tokens.view(count, -1)} if tokens is not None else {}
        if embeddings is not None:
            inputs["inputs_embeds"] = embeddings.view(count, -1, embeddings.shape[-1])
        # transformers keeps the same columns of all sequences.
        width = running.positions.shape[0] // count
        row, column = keep // width, keep % width
        columns, place = (keep, keep) if count == 1 else torch.unique(column, return_inverse=True)
        given = {"position_ids": running.positions.view(count, -1), "logits_to_keep": columns, "use_cache": True}
        inputs |= {name: value for name, value in given.items() if name in self.accepts}
        with torch.inference_mode(), self._attending(running) as cache:
            logits: Tensor = self.model(**inputs, cache=cache).logits  # [S, columns, V]
            if "logits_to_keep" not in self.accepts:
                return logits[row, column]
            return logits[0] if count == 1 else logits[row, place]

    @contextlib.contextmanager
    def _attending(self, running: Pass) -> Iterator[Cache]:
        previous = [(config, config._attn_implementation_internal) for config in self._configs]
        token = _running.set(running)
        try:
            for config in self._configs:
                config._attn_implementation_internal = NAME
            with pinned(self.pins):
                yield running.cache
        finally:
            for config, was in previous:
                config._attn_implementation_internal = was
            _running.reset(token)


def _current() -> Pass:
    running = _running.get()
    if running is None:
        raise OneKVError(f'the attention implementation "{NAME}" works only inside Model.forward; call that instead of the model')
    return running


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Every keyword is known here, or the model is refused: a swallowed one gives wrong answers."""
    running = _current()
    unknown = [name for name, value in others.items() if name not in _NEUTRAL and value is not None and value is not False]
    if unknown:
        raise UnsupportedModel(f"{running.model}: attention was handed {', '.join(sorted(unknown))}, which onekv does not know")
    if dropout:
        raise UnsupportedModel(f"{running.model} is in training mode (attention dropout {dropout}); call model.eval()")
    if is_causal is False:
        raise UnsupportedModel(f"{running.model}: attention that is not causal is not served yet")
    sinks = s_aux if sinks is None else sinks
    return running.attend(module, query, key, value, attention_mask, scale=scaling, softcap=softcap or None, sinks=sinks), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskRule | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> Tensor:
    """transformers' mask interface. Builds no mask where the attention function above is used; see `MaskRules`."""
    running = _current()
    if mask_function is None:
        raise UnsupportedModel(f"{running.model} asks for a mask without a rule")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedModel(f"{running.model} masks out rows of its own input")
    return running.mask(mask_function, torch.device(device), dtype)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
