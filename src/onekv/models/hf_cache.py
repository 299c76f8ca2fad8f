"""A transformers Cache over cells, and models attached to it: `model.generate(..., cache=as_cache(kv, seqs))`.

Owns the translation between transformers' padded rectangle of tokens and rows of a batch, nothing else: cells belong to the `KVCache`,
the forward to `Model`. Padding and token ids never reach `Cache.update`, so an attached model's `forward` reads them first:

    forward(input_ids [B, T], attention_mask, position_ids, cache=ours)
      ├─ padding is left out; a token whose position already holds the same id is left out
      ├─ where an id differs, the sequence is cut
      ├─ plan, and per step: Model.forward, packed [1, n]; if one raises, the new rows are taken back
      └─ logits go back to their places in [B, T, V]
"""

from __future__ import annotations

import inspect
import io
import types
import weakref
from collections.abc import Callable, Iterator, Sequence as Listing
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from onekv.cache import KVCache, Plan, SeqLike, Sequence
from onekv.core.batch import Batch
from onekv.errors import BatchError, ConfigError, OneKVError
from onekv.models.hf import Model, loaded_as
from onekv.storage import LayerSpec

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_PART: Final = "onekv_part"  # how `prepare_inputs_for_generation` tells `forward` what it left out
_METHODS: Final = ("forward", "prepare_inputs_for_generation")
_ATTACHED: Final = "_onekv"
_CACHE_NAMES: Final = ("cache", "past_key_values")
_READ: Final = frozenset({"input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache", "return_dict", _PART})

# Sequences of collected caches that could not be freed at once because a step was open.
_left: weakref.WeakKeyDictionary[KVCache, list[Sequence]] = weakref.WeakKeyDictionary()


# --- the cache ----------------------------------------------------------------------------------------------------------------------


class SequenceCache(Cache):
    """A batch of sequences of a `KVCache` as a transformers cache. Made by `as_cache`.

    Row i of a batch is one sequence. Its length in transformers' sense counts columns of the padded rectangle; cells hold no padding.
    When the sequences are changed from elsewhere, the shorter ones count as padded on the left.

    Attributes:
        kv:     the cells
        reused: per row, tokens of the last prompt that were there already and were not evaluated again
    """

    def __init__(self, kv: KVCache, rows: Listing[int], owned: Listing[Sequence] = ()) -> None:
        super().__init__(layers=[])
        self.kv = kv
        self.reused: tuple[int, ...] = (0,) * len(rows)
        self._rows = list(rows)
        self._owned = list(owned)
        self._layout: Bools = np.zeros((len(rows), 0), np.bool_)
        weakref.finalize(self, _free, kv, self._owned).atexit = False

    @property
    def seqs(self) -> tuple[int, ...]:
        """The sequence id of every row."""
        return tuple(self._rows)

    @property
    def layout(self) -> Bools:
        """Which columns of which rows hold tokens, [B, columns]; the others are padding."""
        lengths = np.array([self.kv.cells.length(seq) for seq in self._rows])
        if not np.array_equal(self._layout.sum(axis=1), lengths):
            self._layout = np.arange(lengths.max())[None, :] >= (lengths.max() - lengths)[:, None]
        return self._layout

    # What transformers asks before it builds inputs and masks.

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Never called by an attached model.

        Raises:
            OneKVError: always; keys and values alone do not say which tokens they belong to.
        """
        raise OneKVError(
            "this model is not attached to the cells; build them with onekv.cache_for(model, ...), given the transformers model"
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included: an int that later updates do not change. 0 for a layer the model does not have."""
        return int(self.layout.shape[1]) if layer_idx < len(self) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns after a forward of `query_length` columns, and the first of them. An attached model builds no mask."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Cells of the buffer, which all sequences share."""
        return self.kv.num_cells

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._rows)

    @property
    def is_compileable(self) -> bool:
        """False: a step finds its cells on the host."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True: memory is taken when the `KVCache` is built."""
        return True

    @property
    def is_croppable(self) -> bool:
        """True unless a layer is recurrent. `crop` raises where a window has given up cells, or where a recurrent state is not kept."""
        return not self.kv.states

    @property
    def is_sliding(self) -> list[bool]:
        """Per layer."""
        return [not spec.window.is_full for spec in self.kv.layers]

    @property
    def is_linear(self) -> list[bool]:
        """Per layer: whether it is recurrent and keeps no keys and values."""
        return [not spec.has_cells for spec in self.kv.layers]

    @property
    def is_dummy(self) -> list[bool]:
        """Per layer: whether it reads another layer's keys and values."""
        return [spec.source is not None for spec in self.kv.layers]

    def activate_past_recording(self) -> None:
        """Nothing to do: cells outside of a window stay until their space is needed."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """True for every layer; see `activate_past_recording`."""
        return True

    def __len__(self) -> int:
        return len(self.kv.layers)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Per layer that has cells, keys [B, G, columns, D] and values [B, G, columns, Dv], float32; zeros at padding and where a window
        gave up cells.

        Cost: a copy of everything.
        """
        layout, owner = self.layout, self.kv.store.owner
        for layer in (i for i, spec in enumerate(self.kv.layers) if spec.has_cells):
            group = self.kv._layer_group[owner[layer]]
            parts: list[Tensor] = []
            for read in (self.kv.keys, self.kv.values):
                rows = []
                for real, seq in zip(layout, self._rows, strict=True):
                    stored = read(owner[layer], seq)  # [n, G, D]
                    held = np.flatnonzero(real)[self.kv.cells.column(group, seq) >= 0]
                    full = stored.new_zeros(len(real), *stored.shape[1:])
                    full[torch.from_numpy(held).to(stored.device)] = stored
                    rows.append(full.transpose(0, 1))
                parts.append(torch.stack(rows))
            yield parts[0], parts[1]

    def __repr__(self) -> str:
        return f"SequenceCache(seqs={self._rows}, {self.get_seq_length()} columns, {self.kv!r})"

    # Rows as a whole.

    def reset(self) -> None:
        """Empty every row's sequence."""
        for seq in self._rows:
            self.kv.seq_rm(seq)
        self._layout = self._layout[:, :0]
        self.reused = (0,) * len(self._rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns of all rows. -n removes n, at most all; 0 removes none; n keeps the first n, as before transformers 5.

        Raises:
            WindowLost, StateLost: a row could not go on there; nothing has changed in any row.
        """
        layout = self.layout
        width = layout.shape[1]
        kept = min(tokens_to_remove, width) if tokens_to_remove > 0 else max(width + tokens_to_remove, 0)
        cuts = [self._position_after(row, int(layout[row, :kept].sum())) for row in range(len(self._rows))]
        for seq, cut in zip(self._rows, cuts, strict=True):
            self.kv._check_continues(seq, cut)
        for seq, cut in zip(self._rows, cuts, strict=True):
            self.kv.seq_rm(seq, cut, -1)
        self._layout = layout[:, :kept]

    def _position_after(self, row: int, count: int) -> int:
        """The position that follows the first `count` entries of a row."""
        return int(self.kv.cells.positions(self._rows[row])[count - 1]) + 1 if count else 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was. Copies no keys or values."""
        chosen = _chosen(beam_idx, len(self._rows))
        layout = self.layout
        self.kv.reorder(self._rows, [self._rows[i] for i in chosen])
        self._layout = layout[chosen]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, next to each other. The copies share its cells, and are freed with this object.

        Raises:
            OneKVError: not enough sequence ids; nothing has changed.
        """
        self._take(np.repeat(np.arange(len(self._rows)), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows of these indices (or of this mask), in this order; a row named again is a copy that shares its cells.

        Rows left out are freed if this object made them; sequences handed to `as_cache` stay as they are.
        """
        self._take(_chosen(indices, len(self._rows)))

    def _take(self, chosen: Ints) -> None:
        layout, rows, copies = self.layout[chosen], [], []
        try:
            for i in chosen.tolist():
                seq = self._rows[i]
                if seq in rows:
                    copies.append(_fork(self.kv, seq))
                    seq = copies[-1].id
                rows.append(seq)
        except BaseException:
            _free(self.kv, copies)
            raise
        dropped = [handle for handle in self._owned if handle.id not in rows]
        self._owned[:] = [handle for handle in self._owned if handle.id in rows] + copies
        _free(self.kv, dropped)
        self._rows, self._layout = rows, layout
        self.reused = tuple(self.reused[i] for i in chosen.tolist())

    # Copies.

    def fork(self) -> SequenceCache:
        """The same batch as new sequences that share all cells; freed when the copy is collected. `copy.deepcopy` does this."""
        copies: list[Sequence] = []
        try:
            for seq in self._rows:
                copies.append(_fork(self.kv, seq))
        except BaseException:
            _free(self.kv, copies)
            raise
        twin = SequenceCache(self.kv, [handle.id for handle in copies], copies)
        twin._layout, twin.reused = self.layout.copy(), self.reused
        return twin

    def __copy__(self) -> SequenceCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceCache:
        return self.fork()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle: every row as a saved sequence, to be loaded into cells of its own."""
        saved = []
        for seq in self._rows:
            file = io.BytesIO()
            self.kv.save(file, seq)
            saved.append(file.getvalue())
        owned = np.concatenate([self.kv.cells.column(0, seq) for seq in self._rows])
        # Rows that share cells no longer do, so they need more of them.
        more = owned.size - np.unique(owned).size
        config = asdict(self.kv.config)
        for name in ("num_cells", "window_cells"):
            if config[name] is not None:
                config[name] += more
        return _unpickle, (self.kv.layers, config, saved, self.layout, self.reused)


def _unpickle(
    layers: tuple[LayerSpec, ...], config: dict[str, Any], saved: list[bytes], layout: Bools, reused: tuple[int, ...]
) -> SequenceCache:
    kv = KVCache(layers, **config)
    handles = [kv.sequence() for _ in saved]
    for handle, data in zip(handles, saved, strict=True):
        kv.load(io.BytesIO(data), handle)
    cache = SequenceCache(kv, [handle.id for handle in handles], handles)
    cache._layout, cache.reused = layout, reused
    return cache


def _chosen(indices: Any, count: int) -> Ints:
    """Row numbers from a tensor of numbers or of bools."""
    listed = indices.detach().cpu().numpy() if isinstance(indices, Tensor) else np.asarray(indices)
    return np.asarray(np.arange(count)[np.atleast_1d(listed)], np.int64)


def _fork(kv: KVCache, seq: int) -> Sequence:
    _free_left(kv)
    twin = kv.sequence()
    kv.seq_cp(seq, twin)
    return twin


def _free(kv: KVCache, handles: list[Sequence]) -> None:
    """Free sequences now, or when the open step has ended: a cache may be collected at any moment."""
    if kv._open_step is not None:
        _left.setdefault(kv, []).extend(handles)
        return
    for handle in handles:
        handle.free()


def _free_left(kv: KVCache) -> None:
    _free(kv, _left.pop(kv, []))


def as_cache(kv: KVCache, seqs: Listing[SeqLike] | SeqLike) -> SequenceCache:
    """A transformers cache for a batch, one sequence per row, for `model(..., cache=...)` and `model.generate(..., cache=...)`.

    Args:
        kv:   built by `cache_for(model, ...)` from the transformers model, which attaches it
        seqs: sequence ids or Sequences, no two equal; they may hold tokens already. Beams and `num_return_sequences` add sequences of
            their own, which share cells and are freed with the returned object
    Raises:
        BatchError: no sequence, one named twice, or one of another cache.
    """
    listed = list(seqs) if isinstance(seqs, list | tuple | range) else [seqs]
    rows = [kv._seq(seq) for seq in listed]
    if not rows or len(set(rows)) != len(rows):
        raise BatchError(f"as_cache takes one sequence per row, no two equal; got {listed}")
    for seq in rows:
        # A plain id that is still empty must not be handed out as free.
        kv._handles.setdefault(seq, Sequence(kv, seq))
    return SequenceCache(kv, rows)


# --- the model ----------------------------------------------------------------------------------------------------------------------


class _Attachment:
    """What an attached model carries. A copy of the model carries none of its own, and makes it at its first use."""

    def __init__(self, model: Model | None = None) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        return _Attachment()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Attachment, ()


def _model_of(inner: PreTrainedModel) -> Model | None:
    """The Model an attached model runs through; None if it is not attached."""
    attachment = inner.__dict__.get(_ATTACHED)
    if attachment is None:
        return None
    if attachment.model is None:
        attachment.model = Model(inner)
    return cast(Model, attachment.model)


def cache_for(model: Model | PreTrainedModel, num_cells: int, **settings: Any) -> KVCache:
    """A cache with the layers, windows and sharing of a model.

    A transformers model is also attached: its `forward` and `generate` then take caches of `as_cache`, and run as before with any other
    cache or none. `detach` undoes it.

    Args:
        model:     a Model or a transformers model; the latter is put into evaluation mode
        num_cells: as for `KVCache`
        settings:  anything else `KVCache` takes; device, vocab_size, deterministic and fingerprint come from the model unless given here
    Raises:
        UnsupportedModel: names the part of the model that cannot be served exactly.
        ConfigError: a setting that cannot work.
        The model is not attached in either case.
    Cost: three forwards of two or three rows, unless a Model was probed before.
    """
    # Packed weights cannot have changed; others, and code, may have: probed anew.
    mine = model if isinstance(model, Model) else loaded_as(model) or Model(model)
    known: dict[str, Any] = {"device": str(mine.device), "vocab_size": mine.vocab_size, "no_shift": mine.no_shift}
    known |= {"row_by_row": mine.row_by_row, "deterministic": mine.deterministic}
    if "fingerprint" not in settings:
        known["fingerprint"] = mine.fingerprint
    kv = KVCache(mine.layers, num_cells, **(known | settings))
    if not isinstance(model, Model):
        if _ATTACHED not in model.__dict__:
            for name, wrapped in zip(_METHODS, (_forward_of(type(model)), _prepare_of(type(model))), strict=True):
                # Methods, not closures over the model: a deep copy gets its own.
                model.__dict__[name] = types.MethodType(wrapped, model)
        model.__dict__[_ATTACHED] = _Attachment(mine)
    return kv


def detach(model: PreTrainedModel) -> None:
    """Undo what `cache_for` did to a transformers model. Does nothing to one that is not attached."""
    if model.__dict__.pop(_ATTACHED, None) is not None:
        for name in _METHODS:
            del model.__dict__[name]


def _our_cache(kwargs: dict[str, Any]) -> SequenceCache | None:
    return next((kwargs[name] for name in _CACHE_NAMES if isinstance(kwargs.get(name), SequenceCache)), None)


def _forward_of(kind: Any) -> Callable[..., Any]:
    stock = kind.forward
    names = [name for name in inspect.signature(stock).parameters if name != "self"]

    @wraps(stock)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        cache, model = _our_cache(given), _model_of(self)
        if cache is None or model is None:
            return stock(self, *args, **kwargs)
        return _Call(model, cache, given).run()

    return forward


def _prepare_of(kind: Any) -> Callable[..., Any]:
    stock = kind.prepare_inputs_for_generation

    @wraps(stock)
    def prepare(self: PreTrainedModel, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any) -> Any:
        cache = _our_cache(kwargs)

        def inputs_of(length: int | None) -> Any:
            inputs = stock(self, input_ids, next_sequence_length=length, **kwargs)
            if cache is not None and _our_cache(inputs) is not cache:
                # Phi-3 drops the cache where it changes its rotary frequencies. `Model` pins them, so the keys stay good.
                inputs = GenerationMixin.prepare_inputs_for_generation(
                    cast(Any, self), cast(Any, input_ids), next_sequence_length=length, **kwargs
                )
            return inputs

        # Without a length to cut to, these may be new tokens only; `forward` reads that from the mask.
        if cache is None or next_sequence_length is None or kwargs.get("inputs_embeds") is not None:
            return inputs_of(next_sequence_length)
        # transformers cuts at the cache's length, whatever the tokens are; this cuts where they first differ.
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        width = input_ids.shape[1]
        # The mask and the positions cover all columns; the ids may be the last of them only.
        left_out = max(0 if given is None else given.shape[-1] - width for given in (mask, positions))
        ids = _Rectangle(cache, input_ids, mask, None if positions is None else positions[..., -width:], left_out)
        start = min(ids.first_new_column(), width - max(next_sequence_length, 1))
        inputs = inputs_of(width - start)
        inputs[_PART] = _Part(left_out + start, bool(kwargs.get("is_first_iteration")))
        return inputs

    return prepare


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of all tokens that `generate` hands to `forward`: the column of its first, and whether a prompt begins."""

    start: int
    is_prompt: bool


# --- from padded rectangles to rows and back ----------------------------------------------------------------------------------------


class _Rectangle:
    """Token ids [B, T] as transformers hands them over, read as rows of a batch.

    Args:
        mask:  [B, W], W columns up to the last of these; None: no padding
        start: the column the ids start in; None: found from the mask and the positions
    Attributes:
        layout: [B, start + T] bool, which columns hold tokens
        tokens, positions, columns: per row of the batch, of its tokens among these columns
    """

    def __init__(self, cache: SequenceCache, ids: Tensor, mask: Tensor | None, positions: Tensor | None, start: int | None) -> None:
        self.cache = cache
        listed = _two_axes("input_ids", ids)
        count, width = listed.shape
        if count != len(cache._rows):
            if count % len(cache._rows):
                raise BatchError(f"the cache has {len(cache._rows)} rows, the input {count}; select or repeat rows of the cache first")
            cache.batch_repeat_interleave(count // len(cache._rows))
        self.count, self.width = count, width
        given = None if positions is None else np.broadcast_to(_two_axes("position_ids", positions), listed.shape)
        before = cache.layout
        real = None if mask is None else _two_axes("attention_mask", mask) != 0
        self.start = self._find_start(before, real, given) if start is None else start
        if real is None:
            real = np.ones((count, self.start + width), np.bool_)
            kept = min(self.start, before.shape[1])
            real[:, :kept] = before[:, :kept]
        if real.shape != (count, self.start + width):
            raise BatchError(
                f"attention_mask is {list(real.shape)}; with {width} new columns after {before.shape[1]} it must be "
                f"[{count}, {before.shape[1] + width}], or [{count}, {width}] with all tokens from the start"
            )
        self.layout = real
        self.tokens: list[Ints] = []
        self.positions: list[Ints] = []
        self.columns: list[Ints] = []
        for row, seq in enumerate(cache._rows):
            columns = np.flatnonzero(real[row, self.start :])
            if given is not None:
                found = given[row, columns]
            else:
                first = int(real[row, : self.start].sum()) if self.start < before.shape[1] else cache.kv.seq_pos_max(seq) + 1
                found = first + np.arange(columns.size)
            self.tokens.append(listed[row, columns].astype(np.int64))
            self.positions.append(found.astype(np.int64))
            self.columns.append(columns)

    def _find_start(self, before: Bools, real: Bools | None, given: NDArray[Any] | None) -> int:
        seen = int(before.shape[1])
        if real is not None:
            return 0 if real.shape[1] == self.width else seen
        if given is None:
            return seen
        # Without padding, how far the positions lie before the next ones says how many columns are given again.
        ahead = min(int(given[row, 0]) - self.cache.kv.seq_pos_max(seq) - 1 for row, seq in enumerate(self.cache._rows))
        return min(max(seen + ahead, 0), seen)

    def stored(self, row: int) -> int:
        """How many of a row's first tokens the cells hold already, at the same positions."""
        cells, seq = self.cache.kv.cells, self.cache._rows[row]
        positions, tokens = cells.positions(seq), cells.tokens(seq)
        wanted = self.positions[row]
        if not positions.size or not wanted.size:
            return 0
        at = np.minimum(np.searchsorted(positions, wanted), positions.size - 1)
        same = (positions[at] == wanted) & (tokens[at] == self.tokens[row])
        return int(np.flatnonzero(np.append(~same, True))[0])

    def first_new_column(self) -> int:
        """The first column in which some row must be evaluated; the last token always is."""
        first: int = self.width - 1
        for row, columns in enumerate(self.columns):
            if columns.size:
                first = min(first, int(columns[self.resumed(row, min(self.stored(row), columns.size - 1))]))
        return first

    def resumed(self, row: int, first: int) -> int:
        """The last of a row's tokens up to `first` from which the sequence can go on."""
        seq = self.cache._rows[row]
        while first > 0 and not self.cache.kv.can_continue_at(seq, int(self.positions[row][first])):
            first -= 1
        return first


def _two_axes(name: str, tensor: Tensor) -> NDArray[Any]:
    if tensor.ndim != 2:
        raise ConfigError(
            f"{name} must be [B, T], got {list(tensor.shape)}; prepared masks and positions of several components are not read"
        )
    return np.asarray(tensor.detach().cpu().numpy())


class _Call:
    """One call of an attached model's `forward` with our cache."""

    def __init__(self, model: Model, cache: SequenceCache, given: dict[str, Any]) -> None:
        self.model = model
        self.cache = cache
        _free_left(cache.kv)
        unknown = [n for n, value in given.items() if n not in _READ and n not in _CACHE_NAMES and value is not None and value is not False]
        if unknown:
            raise ConfigError(f"a model attached to onekv's cells does not serve {', '.join(sorted(unknown))}; call it without our cache")
        ids = given.get("input_ids")
        if ids is None:
            raise ConfigError("a model attached to onekv's cells needs input_ids")
        part = given.get(_PART)
        self.is_prompt = ids.shape[1] > 1 if part is None else part.is_prompt
        start = None if part is None else part.start
        self.rectangle = _Rectangle(cache, ids, given.get("attention_mask"), given.get("position_ids"), start)
        kept = _kept_columns(given.get("logits_to_keep", 0), ids.shape[1])
        self.asks_all = kept.size == ids.shape[1]
        self.wanted, self.places = np.unique(kept, return_inverse=True)
        self.as_tuple = given.get("return_dict") is False

    def run(self) -> Any:
        """The model's output: logits [B, kept columns, V] in the model's dtype, zeros at padding, NaN at tokens not evaluated again.

        Raises:
            BatchError, WindowLost, StateLost, CacheFull: from the cells; and what `Model.forward` raises. No new token is then left in
            any row; what was cut off because it differs is gone.
        """
        cache, kv, box = self.cache, self.cache.kv, self.rectangle
        first = [self._first_new(row) for row in range(box.count)]
        self._cut(first)
        lengths = [kv.cells.length(seq) for seq in cache._rows]
        if self.is_prompt:
            cache.reused = tuple(lengths)
        columns = [listed[n:] for listed, n in zip(box.columns, first, strict=True)]
        counts = [listed.size for listed in columns]
        batch = Batch(
            np.concatenate([tokens[n:] for tokens, n in zip(box.tokens, first, strict=True)]),
            seqs=np.repeat(cache._rows, counts),
            positions=np.concatenate([positions[n:] for positions, n in zip(box.positions, first, strict=True)]),
            outputs=np.isin(np.concatenate(columns), self.wanted),
        )
        rows, places = np.repeat(np.arange(box.count), counts), np.searchsorted(self.wanted, np.concatenate(columns))
        try:
            logits = self._evaluate(kv.plan(batch), first, rows, places)
        except BaseException:
            for seq, length in zip(cache._rows, lengths, strict=True):
                stored = kv.cells.positions(seq)
                if stored.size > length:
                    kv.seq_rm(seq, int(stored[length]), -1)
            raise
        cache._layout = box.layout
        return (logits, cache) if self.as_tuple else CausalLMOutputWithPast(logits=logits, cache=cache)

    def _cut(self, first: list[int]) -> None:
        """Cut every sequence at its first token to be evaluated, if all can go on there."""
        kv, box = self.cache.kv, self.rectangle
        cuts = [
            (seq, int(box.positions[i][n])) for i, (seq, n) in enumerate(zip(self.cache._rows, first, strict=True)) if box.tokens[i].size
        ]
        for seq, cut in cuts:
            kv._check_continues(seq, cut)
        for seq, cut in cuts:
            kv.seq_rm(seq, cut, -1)

    def _evaluate(self, plan: Plan, first: list[int], rows: Ints, places: Ints) -> Tensor:
        """Logits [B, kept columns, V]. `rows` and `places` say where each row of the batch belongs."""
        logits: Tensor | None = None
        for step in plan:
            with step:
                found = self.model.forward(step)
            if logits is None:
                logits = self._blank(first, found)
            asked = step.ubatch.rows[step.ubatch.outputs]
            logits[torch.from_numpy(rows[asked]), torch.from_numpy(places[asked])] = found.to(logits.dtype)
        if logits is None:
            raise OneKVError("a plan without steps")
        return logits if self.asks_all else logits[:, torch.from_numpy(self.places)]

    def _first_new(self, row: int) -> int:
        """Which of a row's tokens is the first to be evaluated: the last one, one whose logits were asked for, or one that differs."""
        box = self.rectangle
        columns = box.columns[row]
        if not columns.size:
            return 0
        asked = columns.size - 1 if self.asks_all else int(np.searchsorted(columns, self.wanted.min(initial=box.width)))
        return box.resumed(row, min(box.stored(row), asked, columns.size - 1))

    def _blank(self, first: list[int], like: Tensor) -> Tensor:
        box = self.rectangle
        logits = like.new_zeros(box.count, self.wanted.size, like.shape[-1], dtype=self.model.transformers_model.dtype)  # [B, K, V]
        for row, (columns, n) in enumerate(zip(box.columns, first, strict=True)):
            logits[row, torch.from_numpy(np.isin(self.wanted, columns[:n]))] = torch.nan
        return logits


def _kept_columns(keep: Any, width: int) -> Ints:
    """Columns whose logits are wanted, as transformers reads `logits_to_keep`."""
    if isinstance(keep, Tensor):
        return np.asarray(np.arange(width)[keep.detach().cpu().numpy()], np.int64)
    return np.arange(width)[-keep:] if keep else np.arange(width)
