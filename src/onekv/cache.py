"""KVCache: cells, stores and an attention backend behind one object. Sequence, Plan and Step are its handles.

Owns the order of events: what may happen while a step is open, what is undone when it fails. The bookkeeping itself is `core.cells`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence as Listing
from dataclasses import dataclass, replace
from functools import wraps
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onekv import files
from onekv.attention import Buckets, Score, View, backend as find_backend
from onekv.attention.reference import dense_mask
from onekv.attention.sdpa import Entries, entries_of
from onekv.codecs import converted
from onekv.config import CacheConfig, check_least
from onekv.core import loops
from onekv.core.batch import Batch, Ubatch, as_seq_id, columns, split as cut
from onekv.core.cells import Cells, Committed, Rule, Slots, is_empty_span
from onekv.core.placement import find_slots, not_enough, plan_slots
from onekv.errors import BatchError, CacheFull, ConfigError, OneKVError, ShiftError, StateError, StateLost, WindowLost
from onekv.rope import rotate
from onekv.storage import KVStore, LayerSpec, StateBank, layer_groups

_Method = TypeVar("_Method", bound=Callable[..., Any])
SeqLike = Any  # an int or a Sequence
_cell_log = logging.getLogger("onekv.cells")
_NO_SLOTS: Slots = np.empty(0, np.int64)


def _exclusive(method: _Method) -> _Method:
    """One thread at a time: entering while another thread is inside raises."""

    @wraps(method)
    def guarded(self: KVCache, *args: Any, **kwargs: Any) -> Any:
        if not self._entered.acquire(blocking=False):
            raise OneKVError(f"KVCache.{method.__name__} was called while another thread is inside the cache; one thread owns it")
        try:
            return method(self, *args, **kwargs)
        finally:
            self._entered.release()

    return cast(_Method, guarded)


def _changes_cells(method: _Method) -> _Method:
    """As `_exclusive`, and refused while a step is open."""

    @wraps(method)
    def guarded(self: KVCache, *args: Any, **kwargs: Any) -> Any:
        if self._open_step is not None:
            raise OneKVError(f"KVCache.{method.__name__} cannot run while a step is open; leave the `with step:` block first")
        return method(self, *args, **kwargs)

    return _exclusive(cast(_Method, guarded))


class KVCache:
    """One fixed buffer of token cells, shared by any number of sequences.

    Args:
        layers:        one spec per model layer. Layers with equal windows form a group with cells of its own
        num_cells:     cells of the full-attention group (or of the only group)
        deterministic: a sequence's results do not depend, to the bit, on what else is in the batch or the buffer, on the ubatch's size,
                       or on whether its prefix was computed or shared. Slower; only on a cpu
        The others are described at `CacheConfig`.

    Raises:
        ConfigError: a setting that cannot work.

    >>> cache = KVCache([LayerSpec(num_kv_heads=1, head_dim=2)], num_cells=8)
    >>> for step in cache.plan(Batch([5, 7, 9])):
    ...     with step:
    ...         k = torch.tensor([[[1.0, 0.0]]] * 3)
    ...         out = step.attend(0, q=k, k=k, v=k, scale=1.0)
    >>> with cache.sequence() as fork:
    ...     cache.seq_cp(0, fork)
    ...     _ = cache.seq_rm(0, 2)
    ...     print(cache.draw())
    group 0 Window.full(): 3 of 8 cells used, head 3
    0{0,1} 1{0,1} 2{1} . . . . .
    """

    def __init__(
        self,
        layers: Listing[LayerSpec],
        num_cells: int,
        *,
        max_seqs: int = 256,
        window_cells: int | None = None,
        k_dtype: str = "float32",
        v_dtype: str | None = None,
        hadamard: bool | None = None,
        device: str = "cpu",
        placement: Literal["scattered", "contiguous"] = "scattered",
        v_layout: Literal["rows", "transposed"] = "rows",
        backend: str = "auto",
        shared_shift: Literal["copy", "move", "error"] = "copy",
        vocab_size: int | None = None,
        fingerprint: str = "",
        no_shift: str | None = None,
        checkpoints: int = 4,
        row_by_row: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.config = CacheConfig(
            num_cells=num_cells,
            max_seqs=max_seqs,
            window_cells=window_cells,
            k_dtype=k_dtype,
            v_dtype=v_dtype,
            hadamard=hadamard,
            device=device,
            placement=placement,
            v_layout=v_layout,
            backend=backend,
            shared_shift=shared_shift,
            vocab_size=vocab_size,
            fingerprint=fingerprint,
            no_shift=no_shift,
            checkpoints=checkpoints,
            row_by_row=row_by_row,
        )
        self.layers = tuple(layers)
        windows, self._layer_group = layer_groups(self.layers)
        if window_cells is not None and len(windows) == 1:
            raise ConfigError("window_cells sizes a second group of layers, but all layers share one window; num_cells is its size")
        sizes = [num_cells if i == 0 else (window_cells or num_cells) for i in range(len(windows))]
        self.cells = Cells(windows, sizes, max_seqs)
        cells = [sizes[g] for g in self._layer_group]
        self.store = KVStore(self.layers, cells, k_dtype, v_dtype, self.config.device, self.config.v_layout, hadamard)
        self.states = StateBank(self.layers, checkpoints, self.config.device)
        if deterministic and self.states.shapes:
            raise ConfigError("deterministic=True cannot be kept with recurrent layers: their states depend on how a sequence is cut")
        self._attend = find_backend(backend, self.config.device, deterministic)
        self._fixed = deterministic
        self._entered = threading.RLock()
        self._open_step: Step | None = None
        self._handles: dict[int, Sequence] = {}
        self._turned: set[int] = set()  # layers an interrupted update has already rotated

    # --- sequences --------------------------------------------------------------------------------------------------------------

    @_changes_cells
    def sequence(self) -> Sequence:
        """A handle with an id that has no cells and no other handle.

        Raises:
            OneKVError: every id is taken.
        """
        for seq in range(self.config.max_seqs):
            if seq not in self._handles and self.cells.length(seq) == 0:
                self._handles[seq] = Sequence(self, seq)
                return self._handles[seq]
        raise OneKVError(f"all {self.config.max_seqs} sequence ids are in use; free a sequence, or build the cache with more max_seqs")

    def _seq(self, seq: SeqLike, every: bool = False) -> int:
        """The id of an int or a handle of this cache; -1 is allowed where it means every sequence."""
        if isinstance(seq, Sequence) and seq.cache is not self:
            raise BatchError(f"{seq!r} belongs to another cache")
        number = as_seq_id(seq)
        return number if every and number == -1 else self.cells.check_seq(number)

    @_changes_cells
    def clear(self, data: bool = True) -> None:
        """Empty all cells of all sequences; data=True also zeroes the keys and values."""
        self.cells.clear()
        self.states.clear()
        self._turned.clear()
        if data:
            self.store.zero()

    @_changes_cells
    def seq_rm(self, seq: SeqLike, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions [p0, p1) of a sequence, or of every sequence (-1). Negative p0: from the start; negative p1: to the end.

        Always succeeds where all layers attend. On windowed layers ask `can_continue_at` before feeding the sequence again. With
        recurrent layers a sequence can lose everything, or a tail back to a position whose state is kept; else False, and nothing changes.
        Cost: O(entries of the sequence); frees cells, moves no data.
        Source: spec 2.4, 5.6.
        """
        number, (p0, p1) = self._seq(seq, every=True), _span(p0, p1)
        chosen = self.cells.present() if number == -1 else [number]
        if not all(self._can_remove(s, p0, p1) for s in chosen):
            return False
        for s in chosen:
            self._remove(s, p0, p1)
        return True

    def _can_remove(self, seq: int, p0: int, p1: int) -> bool:
        """Whether the states can follow when a sequence loses the positions [p0, p1)."""
        if not self.states:
            return True
        start, stop = self.cells.span(seq, p0, p1)
        return start == stop or (stop == self.cells.length(seq) and self.states.has(seq, start))

    def _remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        self.cells.seq_rm(seq, p0, p1)
        self.states.truncate(seq, self.cells.length(seq))

    @_changes_cells
    def seq_cp(self, src: SeqLike, dst: SeqLike, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the cells of `src` at positions [p0, p1). Copies a few bytes per entry and no keys or values.

        Cells `dst` already owns are skipped. With recurrent layers `dst` gets the state too, and becomes what `src` was at some moment.

        Raises:
            BatchError: `dst` holds another cell at a copied position.
            StateLost: recurrent layers, and `dst` would not be a beginning of `src`, or one whose state is not kept.
            Nothing has changed in either case.
        """
        source, target, (p0, p1) = self._seq(src), self._seq(dst), _span(p0, p1)
        stop = self._copied_state(source, target, *self.cells.span(source, p0, p1)) if self.states else 0
        self.cells.seq_cp(source, target, p0, p1)
        if stop:
            self.states.copy(source, target, stop)

    def _copied_state(self, src: int, dst: int, start: int, stop: int) -> int:
        """Which state of `src`, as rows seen, `dst` takes over with the rows [start, stop); 0 if it gets no row."""
        held = self.cells.length(dst)
        if src == dst or start >= stop:
            return 0
        shared = min(held, stop)
        columns = [(self.cells.column(g, src)[:shared], self.cells.column(g, dst)[:shared]) for g in range(len(self.cells.groups))]
        if held < start or not all(np.array_equal(*pair) for pair in columns):
            raise StateLost(f"recurrent states cannot follow: sequence {dst} would not be a beginning of sequence {src} after this copy")
        if held >= stop:
            return 0
        if not self.states.has(src, stop):
            raise self._lost(src, int(self.cells.positions(src)[stop]))
        return stop

    @_changes_cells
    def seq_keep(self, seq: SeqLike) -> None:
        """Remove every other sequence."""
        kept = self._seq(seq)
        for s in self.cells.present():
            if s != kept:
                self._remove(s)

    def seq_pos_min(self, seq: SeqLike) -> int:
        """Smallest position of a sequence that still has a cell, -1 if it has none."""
        return self.cells.seq_pos_min(self._seq(seq))

    def seq_pos_max(self, seq: SeqLike) -> int:
        """Largest position of a sequence, -1 if it is empty."""
        return self.cells.seq_pos_max(self._seq(seq))

    def can_continue_at(self, seq: SeqLike, pos: int) -> bool:
        """True iff everything a query of this sequence at position `pos` may see is still there.

        False only where a window has given up cells, or where a recurrent layer's state is not kept: then remove the tail back to a
        position for which it is true.
        """
        number, pos = self._seq(seq), _integer("pos", pos)
        if self.states and not self.states.has(number, self.cells.span(number, pos, -1)[0]):
            return False
        return self.cells.can_continue_at(number, pos)

    def last_continuable(self, seq: SeqLike, pos: int) -> int:
        """The largest position up to `pos`, and not beyond the end, for which `can_continue_at` is true; 0 if there is no other."""
        number, pos = self._seq(seq), _integer("pos", pos)
        pos = min(pos, self.cells.next_position(number))
        while pos > 0 and not self.can_continue_at(number, pos):
            pos = self.cells.last_continuable(number, pos)
            if self.states and pos > 0:
                positions = self.cells.positions(number)
                kept = [int(positions[count - 1]) + 1 for count in self.states.kept(number)]
                pos = max((p for p in kept if p <= pos), default=0)
        return max(pos, 0)

    def _lost(self, seq: int, pos: int) -> StateLost:
        """The error for a sequence whose state at a position is not kept."""
        positions, counts = self.cells.positions(seq), self.states.kept(seq)
        kept = [int(positions[count - 1]) + 1 for count in counts]
        before = max((p for p in kept if p < pos), default=int(positions[0]) if positions.size else 0)
        return StateLost(
            f"recurrent states of sequence {seq} are kept for positions {kept}, not for {pos}; remove the tail from {before} on and feed "
            "again from there, or fork where you may want to go back",
            seq=seq,
            stored=before,
            given=pos,
        )

    def _check_continues(self, seq: int, pos: int) -> None:
        if not self.cells.can_continue_at(seq, pos):
            raise WindowLost(
                f"sequence {seq} cannot continue at position {pos}: its window has given up cells there; feed it from an earlier one",
                seq=seq,
                stored=self.cells.seq_pos_max(seq),
                given=pos,
            )
        if not self.can_continue_at(seq, pos):
            raise self._lost(seq, pos)

    # --- shifting positions -----------------------------------------------------------------------------------------------------

    @property
    def no_shift(self) -> str | None:
        """Why positions of this cache cannot shift; None if they can."""
        if self.cells.row_axes is not None:
            return "its positions have several axes (M-RoPE)"
        return self.config.no_shift

    @property
    def can_shift(self) -> bool:
        """True iff stored keys can be moved to other positions."""
        return self.no_shift is None

    @_changes_cells
    def seq_add(self, seq: SeqLike, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions [p0, p1) of a sequence. Entries pushed below 0 leave it. Keys are rotated at the next `update`.

        Cells with other owners are first copied (`shared_shift="copy"`), moved for all owners ("move") or refused ("error").

        Raises:
            ShiftError: this cache cannot shift, or "error" and a cell is shared; or, with recurrent layers, a token would be dropped or
                change its place, or "move" and a cell is shared.
            CacheFull: the copies do not fit.
            BatchError: a position would exceed the largest.
            Nothing has changed in any of these cases.
        Cost: O(entries of the sequence), and the copies.
        Source: spec 2.4, D-20.
        """
        number, (p0, p1), step = self._seq(seq), _span(p0, p1), _integer("delta", delta)
        if step and not is_empty_span(p0, p1):
            self._prepare_shift(number, p0, p1, lambda positions: positions + step)
            self.cells.seq_add(number, p0, p1, step)

    @_changes_cells
    def seq_div(self, seq: SeqLike, p0: int, p1: int, d: int) -> None:
        """Divide the positions [p0, p1) of a sequence by `d`, rounding down; otherwise as `seq_add`.

        Raises:
            BatchError: `d` is below 1.
        """
        number, (p0, p1), divisor = self._seq(seq), _span(p0, p1), _integer("d", d)
        if divisor > 1 and not is_empty_span(p0, p1):
            self._prepare_shift(number, p0, p1, lambda positions: positions // divisor)
        self.cells.seq_div(number, p0, p1, divisor)

    def _prepare_shift(self, seq: int, p0: int, p1: int, rule: Rule) -> None:
        """Check a shift, and give the sequence its own copies of the shared cells that would move."""
        if self.no_shift is not None:
            raise ShiftError(f"positions of this cache cannot shift: {self.no_shift}")
        if self._turned:
            self.update()
        start, stop = self.cells.span(seq, p0, p1)
        new = self.cells.ruled(seq, start, stop, rule)
        if self.states:
            after = self.cells.positions(seq).astype(np.int64)
            after[start:stop] = new
            if (new < 0).any() or (np.diff(after) < 0).any():
                raise ShiftError(f"recurrent states of sequence {seq} cannot follow: this shift would drop tokens or change their order")
        changes = new != self.cells.positions(seq)[start:stop]
        shared = [self.cells.shared_entries(g, seq, start, stop) for g in range(len(self.cells.groups))]
        shared = [entries[changes[entries - start]] for entries in shared]
        if self.states and self.config.shared_shift == "move" and any(entries.size for entries in shared):
            raise ShiftError("with recurrent layers a shift cannot move shared cells for all owners; use shared_shift='copy'")
        if self.config.shared_shift == "move" or not any(entries.size for entries in shared):
            return
        if self.config.shared_shift == "error":
            at = min(int(self.cells.positions(seq)[entries].min()) for entries in shared if entries.size)
            raise ShiftError(
                f"sequence {seq} shares cells from position {at} on, and shared_shift is 'error'; remove the other owners first"
            )
        kept = [entries[new[entries - start] >= 0] for entries in shared]
        following = self.cells.next_queries()
        following[seq] = 0  # so that none of its own cells counts as expired
        slots = [
            find_slots(group, entries.size, following, "scattered") if entries.size else _NO_SLOTS
            for group, entries in zip(self.cells.groups, kept, strict=True)
        ]
        for g, (found, entries) in enumerate(zip(slots, kept, strict=True)):
            if found is None:
                raise not_enough(self.cells, g, entries.size, following, "copies of shared cells")
        for g, (found, entries) in enumerate(zip(slots, kept, strict=True)):
            if found is not None and entries.size:
                self.cells.reclaim(g, found)
                self._copy_data(g, self.cells.column(g, seq)[entries], found)
                self.cells.detach(g, seq, entries, found)
        self.cells.cut(seq, start, start + int((new < 0).sum()))

    def _copy_data(self, group: int, sources: NDArray[np.integer], destinations: NDArray[np.integer]) -> None:
        self.store.copy(self._physical(group), self._index(sources), self._index(destinations))

    def _physical(self, group: int) -> list[int]:
        """The owning layers of a group."""
        return [i for i in self.store.physical if self._layer_group[i] == group]

    def _index(self, cells: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(cells.astype(np.int64)).to(self.store.device)

    @_changes_cells
    def _remove_and_close(self, seq: int, p0: int, p1: int) -> None:
        """Remove [p0, p1) and shift what follows down; all checks and copies come first."""
        if self.no_shift is not None:
            raise ShiftError(f"positions of this cache cannot shift: {self.no_shift}")
        start, stop = self.cells.span(seq, p0, p1)
        if start == stop:
            return
        if not self._can_remove(seq, p0, p1):
            raise self._lost(seq, int(self.cells.positions(seq)[start]))
        positions = self.cells.positions(seq)
        low, high = max(p0, 0), p1 if p1 >= 0 else int(positions[-1]) + 1
        kept = np.concatenate([np.arange(start), np.arange(stop, positions.size)])
        moved: NDArray[np.int64] = positions[kept].astype(np.int64) - np.where(kept >= stop, high - low, 0)
        for group in self.cells.groups:
            seen = group.window.visible(moved, int(moved.max(initial=-1)) + 1)
            if (group.column[seq, kept][seen] < 0).any():
                raise WindowLost(
                    f"without positions [{low}, {high}) sequence {seq} would see cells that its window has given up; use mode='exact'",
                    seq=seq,
                )
        has_tail = stop < positions.size
        if has_tail:
            self._prepare_shift(seq, high, -1, lambda old: old - (high - low))
        self._remove(seq, low, high)
        if has_tail:
            self.cells.seq_add(seq, high, -1, low - high)

    @property
    def needs_update(self) -> bool:
        """True iff position changes wait for `update`. `plan`, `save`, `keys` and `compact` apply them by themselves."""
        return any(group.has_shift for group in self.cells.groups)

    @_changes_cells
    def update(self) -> bool:
        """Apply pending position changes: rotate the keys of the changed cells, in the layers that have RoPE. True iff a key was rotated.

        Quantised keys are decoded, turned by all that has gathered and encoded again: one rounding, however many changes wait.
        If it fails or is interrupted, the changes stay pending and the next call goes on.
        Cost: O(changed cells x layers).
        Source: spec 4.12, D-2 to D-4.
        """
        rotated = False
        for g, group in enumerate(self.cells.groups):
            if not group.has_shift:
                continue
            cells = np.flatnonzero(group.shift)
            index, change = self._index(cells), torch.from_numpy(group.shift[cells])
            layers = [i for i in self._physical(g) if cells.size and self.layers[i].rope is not None]
            for i in layers:
                if i not in self._turned:
                    self._rotate(i, index, change)
                    self._turned.add(i)
            self.cells.reset_shift(g)
            self._turned.difference_update(self._physical(g))
            rotated |= bool(layers)
        return rotated

    def _rotate(self, layer: int, index: Tensor, change: Tensor) -> None:
        rope = self.layers[layer].rope
        if rope is not None and rope.part == "key":
            self.store.write(layer, index, k=rotate(self.store.gather_keys(layer, index), change, rope))
        elif rope is not None:
            self.store.write(layer, index, v=rotate(self.store.gather_values(layer, index), change, rope))

    # --- moving cells -----------------------------------------------------------------------------------------------------------

    @_changes_cells
    def compact(self) -> int:
        """Move the used cells of every group to its front. Returns how many moved; a second call moves none.

        Nothing needs it: cells may lie anywhere. It makes room for `placement="contiguous"` and puts a buffer in reading order.
        Cost: O(cells), and one copy of what moves.
        """
        self.update()
        moved = 0
        for g in range(len(self.cells.groups)):
            sources, destinations = self.cells.packing_moves(g)
            if sources.size:
                self._copy_data(g, sources, destinations)
                self.cells.move(g, sources, destinations)
                moved += sources.size
        return moved

    @_changes_cells
    def reorder(self, seqs: Listing[SeqLike], sources: Listing[SeqLike]) -> None:
        """One simultaneous permutation: seqs[i] becomes what sources[i] was (beam search). Copies rows, no keys, values or states.

        Raises:
            BatchError: lengths differ, or a sequence is named twice among `seqs`.
        """
        numbers, origins = [self._seq(s) for s in seqs], [self._seq(s) for s in sources]
        self.cells.reorder(numbers, origins)
        self.states.reorder(numbers, origins)

    # --- files ------------------------------------------------------------------------------------------------------------------

    @_changes_cells
    def save(self, path: files.Target, seq: SeqLike | None = None, *, progress: files.Progress | None = None) -> int:
        """Write one sequence, or the whole cache (None), to a path or a binary file. Returns how many tokens were saved.

        A sequence is saved with what the next query may see: cells that a window hides from it are left out. A whole cache is saved as it
        is. Of recurrent states, those where the sequences stand. A path gets the whole file or stays as it was.

        Args:
            progress: called with (bytes done, bytes in all)
        Raises:
            StateError: the file cannot be written.
        Cost: a copy of the saved keys and values in memory.
        """
        state = self.copied(seq)
        files.save(path, state, progress)
        return state.num_cells(0) if state.whole else state.rows[0].positions.size

    @_changes_cells
    def copied(self, seq: SeqLike | None = None) -> files.State:
        """A copy of what `save` writes, so that another thread may write it (`files.save`) while the cache goes on."""
        self.update()
        cells = self.cells
        number = None if seq is None else self._seq(seq)
        rows, chosen = [], []
        for s in cells.present() if number is None else [number]:
            axes = cells.axes(s)[1:].copy() if cells.row_axes is not None else None
            columns = [cells.column(g, s).copy() for g in range(len(cells.groups))]
            if number is not None:
                for group, column in zip(cells.groups, columns, strict=True):
                    column[~group.window.visible(cells.positions(s), cells.seq_pos_max(s) + 1)] = -1
            states = {i: [t[0] for t in self.states.gather(i, [s])] for i in self.states.shapes if cells.length(s)}
            rows.append(files.SavedRow(s, cells.positions(s).copy(), cells.tokens(s).copy(), columns, axes, states))
        for g, group in enumerate(cells.groups):
            held = group.position >= 0 if number is None else rows[0].columns[g] >= 0
            kept = np.flatnonzero(held) if number is None else rows[0].columns[g][held].astype(np.int64)
            place = np.full(group.num_cells + 1, -1, np.int32)  # the last one stands for -1
            place[kept] = np.arange(kept.size)
            for row in rows:
                row.columns[g][:] = place[row.columns[g]]
            chosen.append(self._index(kept))
        state = files.State(self.layers, self.config.fingerprint, number is None, rows, self.store.k_codec, self.store.v_codec)
        for i in self.store.physical:
            index = chosen[self._layer_group[i]]
            state.keys[i], state.values[i] = self.store.raw_keys(i)[index], self.store.raw_values(i)[index]
        return state

    @_changes_cells
    def load(self, path: files.Target, seq: SeqLike | None = None, *, progress: files.Progress | None = None) -> int:
        """Read a file of `save` in place of a sequence, or of the whole cache (None). Returns how many tokens were loaded.

        The destination is replaced; other sequences stay. Cells, buffer size, placement, V layout, dtypes and Hadamard rotation may differ
        (converted through float32; kept to the bit where they are equal); layers, windows, rope and fingerprint may not.

        Raises:
            StateError: damaged, foreign, or of the other kind (whole or one sequence).
            CacheFull: not enough cells.
            Nothing has changed in either case.
        """
        return self.put(files.load(path, progress), seq)

    @_changes_cells
    def put(self, state: files.State, seq: SeqLike | None = None) -> int:
        """What `load` does with a file once it is read (`files.load`, by any thread), and raises."""
        self.update()
        number = None if seq is None else self._seq(seq)
        for difference in files.differences(state, self.layers, self.config.fingerprint):
            raise StateError(f"this file does not belong to this cache: {difference}")
        if state.whole != (number is None):
            kind = "a whole cache; load it without a sequence" if state.whole else "one sequence; say which sequence to load it as"
            raise StateError(f"the file holds {kind}")
        for row in state.rows:
            if number is None and row.seq >= self.config.max_seqs:
                raise StateError(f"the file holds sequence {row.seq}; ids of this cache are in [0, {self.config.max_seqs})")
            if self.config.vocab_size is not None and row.tokens.max(initial=-1) >= self.config.vocab_size:
                raise StateError(f"the file holds token id {row.tokens.max()}; the vocabulary has {self.config.vocab_size}")
        store, keys, values = self.store, {}, {}
        for i in store.physical:  # converted before the first change, because memory may run out
            spec = self.layers[i]
            keys[i] = converted(state.keys[i].to(store.device), state.k_codec, store.k_codec, spec.head_dim)
            values[i] = converted(state.values[i].to(store.device), state.v_codec, store.v_codec, spec.v_dim)
        state = replace(state, k_codec=store.k_codec, v_codec=store.v_codec, keys=keys, values=values)
        held = [{i: self.states.owned(tensors) for i, tensors in row.states.items()} for row in state.rows]
        count = self._load_whole(state) if number is None else self._load_sequence(state, number)
        for row, states in zip(state.rows, held, strict=True):
            self.states.put(row.seq if number is None else number, row.positions.size, states)
        return count

    def _load_whole(self, state: files.State) -> int:
        counts = [state.num_cells(g) for g in range(len(self.cells.groups))]
        for g, (count, group) in enumerate(zip(counts, self.cells.groups, strict=True)):
            if count > group.num_cells:
                raise CacheFull(
                    f"the file holds {count} cells, group {g} has {group.num_cells}", needed=count, free=group.num_cells, group=g
                )
        self.cells.clear()
        self.states.clear()
        self.store.zero()
        self._write_data(state, [np.arange(count) for count in counts])
        for row in state.rows:
            self.cells.restore(row.seq, row.positions, row.tokens, row.columns, row.axes)
        for group in self.cells.groups:
            group.head = 0
        return counts[0]

    def _load_sequence(self, state: files.State, seq: int) -> int:
        row, cells = state.rows[0], self.cells
        slots = self._slots_for(cells, state)
        if slots is None:
            # Only the destination's own cells make room: they are given up first.
            trial = cells.clone()
            trial.seq_rm(seq)
            slots = self._slots_for(trial, state)
            if slots is None:
                g = next(g for g in range(len(cells.groups)) if self._slots_for(trial, state, g) is None)
                raise not_enough(trial, g, state.num_cells(g), trial.next_queries(), "cells of the saved sequence")
            self._remove(seq)
        for g, found in enumerate(slots):
            cells.reclaim(g, found)
        self._write_data(state, slots)
        self._remove(seq)
        columns = [np.append(found, -1)[column].astype(np.int32) for found, column in zip(slots, row.columns, strict=True)]
        cells.restore(seq, row.positions, row.tokens, columns, row.axes)
        return row.positions.size

    def _slots_for(self, cells: Cells, state: files.State, only: int | None = None) -> list[Slots] | None:
        """Cells for a saved sequence in every group (or only one), None if they do not fit."""
        following, slots = cells.next_queries(), []
        for g, group in enumerate(cells.groups):
            count = state.num_cells(g) if only in (None, g) else 0
            found = find_slots(group, count, following, self.config.placement) if count else _NO_SLOTS
            if found is None:
                return None
            slots.append(found)
        return slots

    def _write_data(self, state: files.State, slots: Listing[NDArray[np.integer]]) -> None:
        for i in self.store.physical:
            index = self._index(slots[self._layer_group[i]])
            self.store.write_raw(i, index, state.keys[i], state.values[i])

    # --- evaluating -------------------------------------------------------------------------------------------------------------

    @_changes_cells
    def plan(
        self,
        batch: Batch,
        *,
        max_ubatch: int = 512,
        split: Literal["auto", "simple", "equal", "sequence"] = "auto",
        causal: bool = True,
    ) -> Plan:
        """Find cells for every row of a batch, without taking any.

        Applies pending shifts, fills missing positions, checks everything, cuts the batch into ubatches of at most `max_ubatch` rows and
        searches. The plan is good until the cells change; dropping it costs nothing.

        Args:
            split:  how to cut; "auto" cuts in order, and into equal parts if that does not fit a windowed group. Recurrent layers need
                    equal parts
            causal: False lets rows see later positions; needs one ubatch, and no recurrent layer

        Raises:
            BatchError: names row, sequence, stored and given position.
            WindowLost: a row would see positions whose cells a window has given up.
            CacheFull: not enough cells; carries needed and free. The cells are as before.
        Cost: O(rows) in a buffer with room.
        Source: spec 3, 4.4, 4.5, 5.4.
        """
        if not isinstance(batch, Batch):
            raise BatchError(f"plan takes a Batch, got {type(batch).__name__}")
        if isinstance(max_ubatch, bool) or not isinstance(max_ubatch, int) or max_ubatch < 1:
            raise ConfigError(f"max_ubatch must be a positive integer, got {max_ubatch!r}")
        if split not in ("auto", "simple", "equal", "sequence"):
            raise ConfigError(f"split must be auto, simple, equal or sequence; got {split!r}")
        if self.states and (split not in ("auto", "equal") or not causal):
            raise ConfigError(f'recurrent layers need split="equal" (or "auto") and causal=True, got split={split!r} and causal={causal}')
        for handle in batch.handles:
            self._seq(handle)
        positions = batch.checked(self.cells, self.config.vocab_size)
        self._check_windows(batch, positions, causal)
        if not causal and len(batch) > max_ubatch:
            raise BatchError(f"causal=False needs the whole batch in one ubatch; {len(batch)} rows exceed max_ubatch={max_ubatch}")
        self.update()
        windowed = any(not group.window.is_full for group in self.cells.groups)
        ways: tuple[Literal["simple", "equal", "sequence"], ...]
        ways = (split,) if split != "auto" else ("simple", "equal") if windowed and causal else ("simple",)
        ways = ("equal",) if self.states else ways
        for way in ways:
            ubatches = cut(batch, positions, way, max_ubatch, self.config.max_seqs)
            if self.states and self.config.row_by_row:
                ubatches = self._row_by_row(batch, positions, ubatches)
            if not causal and len(ubatches) > 1:
                raise BatchError(f"causal=False needs the whole batch in one ubatch; split={way!r} makes {len(ubatches)} of it")
            try:
                slots = plan_slots(self.cells, ubatches, self.config.placement)
            except CacheFull:
                if way == ways[-1]:
                    raise
            else:
                break
        return Plan(self, ubatches, slots, causal)

    def _row_by_row(self, batch: Batch, positions: NDArray[np.int64], ubatches: list[Ubatch]) -> list[Ubatch]:
        """Cut every ubatch in which a sequence goes on into one row of each sequence at a time."""
        started, pieces = set(self.cells.present()), []
        for ubatch in ubatches:
            ids = ubatch.ids.tolist()
            pieces += [ubatch] if started.isdisjoint(ids) else columns(batch, positions, ubatch)
            started.update(ids)
        return pieces

    def _check_windows(self, batch: Batch, positions: NDArray[np.int64], causal: bool) -> None:
        if all(group.window.is_full for group in self.cells.groups):
            return
        queries = positions[0] if positions.ndim == 2 else positions
        seqs, firsts = np.unique(batch.ids, return_index=True)
        rows = np.searchsorted(batch.offsets, firsts, side="right") - 1  # each sequence's first row
        for seq, row in zip(seqs.tolist(), rows.tolist(), strict=True):
            if not self.cells.can_continue_at(seq, int(queries[row]), causal):
                raise WindowLost(
                    f"row {row}: sequence {seq} cannot continue at position {queries[row]}: its window has given up cells there. "
                    "Remove the tail back to a position for which can_continue_at is true, and feed from there again",
                    row=row,
                    seq=seq,
                    stored=self.cells.seq_pos_max(seq),
                    given=int(queries[row]),
                )

    # --- inspection -------------------------------------------------------------------------------------------------------------

    @property
    def num_cells(self) -> int:
        """Cells of the full group, or of the only one."""
        return self.cells.groups[0].num_cells

    @property
    def num_used(self) -> int:
        """Cells in use there; reusable window cells count as used."""
        return self.cells.groups[0].num_used

    @property
    def num_free(self) -> int:
        """Cells not in use there."""
        return self.num_cells - self.num_used

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, used or not, and of the recurrent states kept at this moment."""
        return self.store.nbytes + self.states.nbytes

    def max_step_nbytes(self, max_ubatch: int) -> int:
        """Most bytes the attention of one layer may allocate in a step of `max_ubatch` rows: one sequence fills a group, and every row
        sees all of it. Nothing is reserved ahead; this is the number to leave free. Scores with a cap, sinks or a bias take another
        4 bytes for each head, row and cell. What a model itself makes of stored keys (latent attention) comes on top."""
        worst = 0
        for i in self.store.physical:
            spec, cells = self.layers[i], self.cells.groups[self._layer_group[i]].num_cells
            head = self.store.k_codec.decoding_nbytes(spec.head_dim) + self.store.v_codec.decoding_nbytes(spec.v_dim)
            worst = max(worst, cells * spec.num_kv_heads * head + max_ubatch * cells)
        return worst

    @_exclusive
    def keys(self, layer: int, seq: SeqLike) -> Tensor:
        """Stored keys of a sequence in one layer, float32 [n, G, D] in position order; positions without a cell are left out.

        For tests and inspection. Pending shifts are applied first.
        """
        return self._read(layer, seq, 0)

    @_exclusive
    def values(self, layer: int, seq: SeqLike) -> Tensor:
        """Stored values of a sequence in one layer, float32 [n, G, Dv] in position order; positions without a cell are left out."""
        return self._read(layer, seq, 1)

    def _read(self, layer: int, seq: SeqLike, part: int) -> Tensor:
        if self._open_step is None:
            self.update()
        column = self.cells.column(self._group(layer), self._seq(seq))
        held = torch.from_numpy(column[column >= 0].astype(np.int64)).to(self.store.device)
        return self.store.gather(layer, held)[part]

    def _layer(self, layer: int) -> int:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(self.layers):
            raise ConfigError(f"layer must be an integer in [0, {len(self.layers)}), got {layer!r}")
        return layer

    def _group(self, layer: int) -> int:
        """The group whose cells a layer attends over."""
        group = self._layer_group[self._layer(layer)]
        if group < 0:
            raise ConfigError(f"layer {layer} keeps recurrent states and has no cells")
        return group

    @_exclusive
    def snapshot(self, layer: int = 0) -> dict[str, object]:
        """The cells of a layer's group: {"cells": [[index, position, [owners], shift], ...] of used cells, "head": int, "used": int}.

        For a layer without cells, those of the first group.
        """
        return self.cells.snapshot(max(self._layer_group[self._layer(layer)], 0))

    @_exclusive
    def stats(self) -> dict[str, Any]:
        """Counts and bytes, whole and per group. Shared cells are those with several owners; saved bytes are what copies would take."""
        groups: list[dict[str, Any]] = []
        for g, group in enumerate(self.cells.groups):
            physical = self._physical(g)
            owners = np.unpackbits(group.owners.view(np.uint8), axis=1).sum(axis=1)
            cell_nbytes = self.store.cell_nbytes(physical)
            groups.append(
                {
                    "window": repr(group.window),
                    "layers": physical,
                    "cells": group.num_cells,
                    "used": group.num_used,
                    "free": group.num_cells - group.num_used,
                    "shared": int((owners > 1).sum()),
                    "head": group.head,
                    "nbytes": cell_nbytes * group.num_cells,
                    "nbytes_saved": cell_nbytes * int(owners.sum() - group.num_used),
                }
            )
        return {
            "sequences": {s: self.cells.length(s) for s in self.cells.present()},
            "nbytes": self.nbytes,
            "nbytes_saved": sum(g["nbytes_saved"] for g in groups),
            "groups": groups,
        }

    @_exclusive
    def check(self) -> None:
        """Compare cells, rows and recurrent states.

        Raises:
            OneKVError: an invariant is broken; the message draws the cells.
        """
        self.cells.check()
        for seq in range(self.config.max_seqs) if self.states else ():
            length, kept = self.cells.length(seq), self.states.kept(seq)
            if kept[-1:] != [length][: length > 0]:
                raise OneKVError(f"sequence {seq} has {length} rows, its recurrent states have seen {kept}\n{self.draw()}")

    @_exclusive
    def draw(self) -> str:
        """The cells as text, one block per group; see `Cells.draw`."""
        return self.cells.draw()

    def __repr__(self) -> str:
        return f"KVCache({len(self.layers)} layers, {self.num_used} of {self.num_cells} cells used, {len(self.cells.present())} sequences)"


class Sequence:
    """One conversation in a cache. Made by `KVCache.sequence()` and `fork`; accepted wherever a sequence id is.

    As a context manager it frees its cells at the end of the block.
    """

    def __init__(self, cache: KVCache, seq: int) -> None:
        self.cache = cache
        self._id: int | None = seq

    @property
    def id(self) -> int:
        """The sequence id.

        Raises:
            BatchError: the sequence was freed.
        """
        if self._id is None:
            raise BatchError("this sequence was freed")
        return self._id

    @property
    def is_freed(self) -> bool:
        """Whether it has given back its id."""
        return self._id is None

    def __index__(self) -> int:
        return self.id

    def __len__(self) -> int:
        return self.cache.cells.length(self.id)

    def __bool__(self) -> bool:
        return True  # an empty sequence is still a sequence

    @property
    def positions(self) -> NDArray[np.int32]:
        """Positions, ascending [n]. A copy."""
        return self.cache.cells.positions(self.id).copy()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids in position order [n]; -1 where an embedding was fed. A copy."""
        return self.cache.cells.tokens(self.id).copy()

    def fork(self) -> Sequence:
        """A new sequence that shares all cells of this one. Cost: a few bytes per token, no keys or values."""
        return self._fork(-1)

    def fork_at(self, pos: int) -> Sequence:
        """A new sequence that shares the cells of all positions below `pos` and can continue there.

        Raises:
            WindowLost: a window has given up cells that a query at `pos` would see.
            StateLost: the state of a recurrent layer at `pos` is not kept.
        """
        self._check_continues(pos)
        return self._fork(pos)

    def _fork(self, stop: int) -> Sequence:
        twin = self.cache.sequence()
        if stop != 0:
            self.cache.seq_cp(self.id, twin.id, 0, stop)
        return twin

    def truncate(self, pos: int) -> None:
        """Remove all positions from `pos` on.

        Raises:
            WindowLost: a window has given up cells that a query at `pos` would see.
            StateLost: the state of a recurrent layer at `pos` is not kept.
            Nothing has changed in either case.
        """
        self._check_continues(pos)
        self.cache.seq_rm(self.id, pos, -1)

    def remove(self, p0: int, p1: int, mode: Literal["shift", "exact"] = "shift") -> NDArray[np.int32]:
        """Take the positions [p0, p1) out of the middle, and close the gap.

        mode="shift" keeps what follows and moves it down: instant, and approximate by nature, because the kept tokens have seen what is
        gone. mode="exact" drops what follows too and returns its token ids, to be fed again from p0 on.

        Returns:
            token ids to feed again, [n]; empty for "shift"
        Raises:
            ShiftError: "shift", and this cache cannot.
            CacheFull: "shift", and copies of shared cells do not fit.
            WindowLost: the sequence could not go on afterwards, because a window has given up cells it would see.
            StateLost: a recurrent layer's state cannot follow: "shift", and something follows; or its state at p0 is not kept.
            BatchError: "exact", and what follows was not fed as tokens.
            Nothing has changed in any of these cases.
        """
        p0, p1 = _span(p0, p1)
        if mode == "shift":
            self.cache._remove_and_close(self.id, p0, p1)
            return np.empty(0, np.int32)
        if mode != "exact":
            raise ConfigError(f'mode must be "shift" or "exact", got {mode!r}')
        cells = self.cache.cells
        start, stop = cells.span(self.id, p0, p1)
        tail = cells.tokens(self.id)[stop:].copy()
        if (tail < 0).any():
            raise BatchError(f"sequence {self.id} was fed embeddings after position {p1}; their token ids are not known", seq=self.id)
        if start < stop:
            self.truncate(int(cells.positions(self.id)[start]))
            return tail
        return np.empty(0, np.int32)

    def save(self, path: files.Target) -> int:
        """Write this sequence to a file; see `KVCache.save`. Returns the number of tokens."""
        return self.cache.save(path, self.id)

    def _check_continues(self, pos: int) -> None:
        if isinstance(pos, bool) or not isinstance(pos, int | np.integer) or pos < 0:
            raise BatchError(f"a position must be a non-negative integer, got {pos!r}", seq=self.id)
        self.cache._check_continues(self.id, int(pos))

    def free(self) -> None:
        """Remove the sequence from all its cells and give back its id. Freeing twice does nothing."""
        if self._id is not None:
            self.cache.seq_rm(self._id)
            del self.cache._handles[self._id]
            self._id = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.free()

    def __repr__(self) -> str:
        return "Sequence(freed)" if self._id is None else f"Sequence(id={self._id}, {len(self)} tokens)"


@dataclass(frozen=True, slots=True)
class ContextShift:
    """What gives way when a conversation reaches its limit: some tokens after the first few are removed, the rest moves down.

    Attributes:
        n_keep:    leading tokens that always stay (attention sinks, a system prompt)
        n_discard: tokens to remove at a time; None: half of the others

    However it is set, at least one token goes: n_keep leaves one to remove, n_discard removes one.
    """

    n_keep: int = 0
    n_discard: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("n_keep", self.n_keep), ("n_discard", self.n_discard)):
            if value is not None or name == "n_keep":
                check_least(name, value, 0)

    def make_room(self, seq: Sequence) -> int:
        """Remove tokens from a sequence, as `Sequence.remove(mode="shift")` does. Returns how many; 0 only if it was empty."""
        length = len(seq)
        if length == 0:
            return 0
        keep = min(self.n_keep, length - 1)
        count = (length - keep) // 2 if self.n_discard is None else self.n_discard
        count = min(max(count, 1), length - keep)
        positions = seq.positions
        first = int(positions[keep])
        # Tokens at one position, as a division leaves them, go together.
        stop = max(int(positions[keep + count]), first + 1) if keep + count < length else -1
        seq.remove(first, stop)
        return length - len(seq)


class Plan:
    """The steps of one batch, in order. Made by `KVCache.plan`; dropping it costs nothing."""

    def __init__(self, cache: KVCache, ubatches: list[Ubatch], slots: list[list[Slots]], causal: bool) -> None:
        self.cache = cache
        self.causal = causal
        self.epoch = cache.cells.epoch
        self.position = 0  # of the step that may be entered next
        self.fault: str | None = None
        self.advanced: set[int] = set()  # sequences whose recurrent states earlier steps have moved on
        self.steps = [Step(self, i, ubatch, chosen) for i, (ubatch, chosen) in enumerate(zip(ubatches, slots, strict=True))]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class Step:
    """One ubatch of a plan. Entering commits its cells; an exception in the body takes them back.

    The body stores keys and values of every owning layer and attends:

        for step in cache.plan(batch):
            with step:
                out = step.attend(layer, q, k, v, scale=...)

    Attributes:
        ubatch: the rows
    """

    def __init__(self, plan: Plan, index: int, ubatch: Ubatch, slots: list[Slots]) -> None:
        self.plan = plan
        self.index = index
        self.ubatch = ubatch
        self._slots = slots
        self._done: Committed | None = None
        self._stored: set[int] = set()
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._views: list[View] = []
        self._targets: list[Tensor] = []

    def __enter__(self) -> Self:
        self._enter(self.plan.cache)
        return self

    def _enter(self, cache: KVCache) -> None:
        plan = self.plan
        if cache._open_step is not None:
            raise OneKVError("another step is open; leave its `with` block first")
        if plan.fault is not None:
            raise OneKVError(f"this plan ended: {plan.fault}; plan the remaining rows anew")
        if self.index != plan.position:
            raise OneKVError(f"step {self.index} was entered where step {plan.position} is next; steps are entered once, in order")
        if plan.epoch != cache.cells.epoch:
            raise OneKVError("the cells have changed since this plan was made; plan the batch again")
        self._commit(cache)

    def _commit(self, cache: KVCache) -> None:
        if not cache._entered.acquire(blocking=False):
            raise OneKVError("a step was entered while another thread is inside the cache; one thread owns it")
        try:
            self._done = cache.cells.commit(self.ubatch, self._slots)
            if _cell_log.isEnabledFor(logging.DEBUG):
                _cell_log.debug("%s", cache.cells.draw())
            try:
                self._views = [self._view(cache, g) for g in range(len(cache.cells.groups))]
                self._targets = [torch.from_numpy(slots).to(cache.store.device) for slots in self._slots]
                cache._open_step = self
            except BaseException:
                self._undo("entering a step failed")
                raise
        finally:
            cache._entered.release()

    def _view(self, cache: KVCache, g: int) -> View:
        cells, group, ubatch = cache.cells, cache.cells.groups[g], self.ubatch
        first, last = np.empty(len(ubatch), np.int64), np.empty(len(ubatch), np.int64)
        seqs = ubatch.first_ids
        rows = (cells.row_positions, cells.row_lengths)
        if cells.row_axes is not None:
            queries = ubatch.positions[:3] if ubatch.positions.ndim == 2 else np.stack([ubatch.positions] * 3)
            axes = (cells.row_positions, cells.row_axes, cells.row_lengths, seqs, queries)
            loops.visible_ranges_axes(*group.rule, self.plan.causal, *axes, first, last)
        else:
            loops.visible_ranges(*group.rule, self.plan.causal, *rows, seqs, ubatch.queries, first, last)
        return View(group, self.plan.causal, seqs, ubatch.positions, first, last, group.column, cells.row_positions, cache._fixed)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        cache = self.plan.cache
        missing = [i for i in cache.store.physical if i not in self._stored]
        missing += [i for i in cache.states.shapes if i not in self._states]
        if kind is not None or missing:
            self._undo(f"step {self.index} was undone")
        else:
            before = cache.states.mark()
            try:
                self._advance(cache)
            except BaseException:
                cache.states.back_to(before)
                self._undo(f"step {self.index} was undone")
                raise
            self._close()
        if kind is None and missing:
            raise OneKVError(f"the step was left before layers {missing} were stored; it was undone")

    def _advance(self, cache: KVCache) -> None:
        if cache.states:
            sets = self._sets()
            counts = [cache.cells.length(members[0]) for members in sets]
            cache.states.advance(sets, counts, self._states, replace=self.plan.advanced)
            self.plan.advanced.update(*sets)

    def _sets(self) -> list[tuple[int, ...]]:
        """The sequences of each set, in the order of the rows."""
        return list(self.ubatch.seqs[:: len(self.ubatch) // self.ubatch.num_sets])

    def _undo(self, fault: str) -> None:
        if self._done is not None:
            self.plan.cache.cells.undo(self._done)
        self.plan.fault = fault
        self._close()

    def _close(self) -> None:
        self.plan.cache._open_step = None
        self.plan.position = self.index + 1
        self.plan.epoch = self.plan.cache.cells.epoch
        self._done, self._views, self._targets, self._states = None, [], [], {}

    # --- inside the block -------------------------------------------------------------------------------------------------------

    def _group(self, layer: int) -> int:
        return self._open_cache()._group(layer)

    def _open_cache(self) -> KVCache:
        if self.plan.cache._open_step is not self:
            raise OneKVError("this step is not open; use it inside its `with` block")
        return self.plan.cache

    def slots(self, layer: int) -> Slots:
        """Cell of every row in this layer, int64 [n]. Known before the step is entered."""
        cache = self.plan.cache
        return self._slots[cache._group(layer)].copy()

    def mask(self, layer: int) -> NDArray[np.bool_]:
        """Which cell every row sees, [T, C]: dense and slow, for tests."""
        return dense_mask(self._views[self._group(layer)])

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys [T, G, D] and values [T, G, Dv] of this step's rows, any float dtype.

        Raises:
            ConfigError: a wrong shape or dtype, or a layer that reads another's cells.
            OneKVError: the step is not open.
        """
        group = self._group(layer)
        self.plan.cache.store.store(layer, self._targets[group], k, v)
        self._stored.add(layer)

    def read_states(self, layer: int) -> list[Tensor]:
        """Recurrent states of a layer before this step's rows: float32 [S, ...] for each shape of its spec, for the `ubatch.num_sets`
        sequence sets in the order of the rows; zeros where a sequence begins. A copy.

        Raises:
            ConfigError: the layer is not recurrent.
            OneKVError: the step is not open.
        """
        cache = self._open_cache()
        if layer not in cache.states.shapes:
            raise ConfigError(f"layer {layer!r} is not recurrent; the recurrent ones are {[*cache.states.shapes]}")
        return cache.states.gather(layer, [members[0] for members in self._sets()])

    def store_states(self, layer: int, states: Listing[Tensor]) -> None:
        """Hand over the states after this step's rows, shaped as `read_states` gives them. They are copied when the step ends without an
        exception; do not change them before.

        Raises:
            ConfigError: a wrong shape or dtype, or the layer is not recurrent.
            OneKVError: the step is not open.
        """
        self._states[layer] = self._open_cache().states.checked(layer, states, self.ubatch.num_sets)

    def _entries(self, layer: int) -> Entries:
        """The cells any row sees in this layer, and which each sees. Made once for the layers of a group.

        Raises:
            ConfigError: the cache is deterministic: what torch makes of gathered entries depends on how many there are.
        """
        if self.plan.cache._fixed:
            raise ConfigError("deterministic=True cannot be kept for a model that attends to gathered entries (latent or own attention)")
        return self._views[self._group(layer)].once("entries", lambda view: entries_of(view, self.plan.cache.store.device))

    def _gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [N, G, D] and values [N, G, Dv] of those cells, float32."""
        return self.plan.cache.store.gather(layer, self._entries(layer).cells)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        bias: Buckets | None = None,
    ) -> Tensor:
        """Attend from this step's rows to what they may see. k and v, if given, are stored first; attention reads the cells.

        Shapes:
            q [T, H, D], k [T, G, D], v [T, G, Dv], sinks and alibi_slopes [H] -> [T, H, Dv] of q's dtype and device
        Raises:
            OneKVError: the step is not open, or nothing was stored for this layer (or its source) in this step.
            ConfigError: a wrong shape or dtype.
        Cost: by backend; never more than the entries the rows see, whatever else is in the buffer.
        """
        group = self._group(layer)
        cache = self.plan.cache
        if (k is None) != (v is None):
            raise ConfigError("attend takes both k and v, or neither")
        spec, rows = cache.layers[layer], len(self.ubatch)
        if q.ndim != 3 or q.shape[0] != rows or q.shape[2] != spec.head_dim or not q.shape[1] or q.shape[1] % spec.num_kv_heads:
            expected = f"[{rows}, a multiple of {spec.num_kv_heads}, {spec.head_dim}]"
            raise ConfigError(f"layer {layer}: q has shape {tuple(q.shape)}, expected [T, H, D] = {expected}")
        if not q.is_floating_point():
            raise ConfigError(f"layer {layer}: q must be a float tensor, got {q.dtype}")
        learned = None if bias is None else bias.table[0]
        for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes), ("a row of bias.table", learned)):
            if per_head is not None and tuple(per_head.shape) != (q.shape[1],):
                raise ConfigError(f"layer {layer}: {name} has shape {tuple(per_head.shape)}, expected [H] = [{q.shape[1]}]")
        if k is not None and v is not None:
            self.store(layer, k, v)
        elif cache.store.owner[layer] not in self._stored:
            raise OneKVError(f"layer {layer} attends before layer {cache.store.owner[layer]} was stored in this step")
        score = Score(scale, softcap, sinks, alibi_slopes, bias)
        return cache._attend(cache.store, layer, self._views[group], q, score)


def _span(p0: int, p1: int) -> tuple[int, int]:
    """Both bounds of a range of positions as ints."""
    return _integer("p0", p0), _integer("p1", p1)


def _integer(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise BatchError(f"{name} must be an integer, got {value!r}")
    return int(value)
