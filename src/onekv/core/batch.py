"""Batch: the rows a caller wants evaluated; Ubatch: a piece of them that is evaluated at once.

Owns the checks of spec section 3, the fields it generates, and the three ways to cut. Reads the cells, changes nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onekv.core import loops
from onekv.errors import BatchError

Ints = NDArray[np.int64]
Split = Literal["simple", "equal", "sequence"]
_SECTIONS: Final = 4  # components of a multi-axis (M-RoPE) position


class Rows(Protocol):
    """What the checks read of the cells."""

    max_seqs: int
    row_positions: NDArray[np.int32]
    row_axes: NDArray[np.int32] | None
    row_lengths: NDArray[np.int32]

    def next_position(self, seq: int) -> int: ...

    def owns_same_cells(self, one: int, other: int) -> bool: ...


def as_seq_id(value: Any) -> int:
    """An id from an int or from anything with `__index__` (a `Sequence`).

    Raises:
        BatchError: another type, a bool included.
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise BatchError(f"a sequence id must be an int or a Sequence, got {value!r} of type {type(value).__name__}")


class Batch:
    """Rows to evaluate, in order. Checked for shape here, against the cache by `plan`.

    Args:
        tokens:     [T] token ids, or
        embeddings: [T, E] float vectors in their place
        seqs:       per row one id, or a list, tuple or set of ids (the row is shared; order is kept, repeats are dropped); one id or
                    Sequence for all rows; None: sequence 0
        positions:  [T]; or [4, T] (t, y, x and one spare) for M-RoPE; None: each row continues its first sequence
        outputs:    which rows' logits are wanted: None (the last row), "all", or [T] bools

    Raises:
        BatchError: empty, both or neither of tokens and embeddings, wrong lengths or types, a row without a sequence.
    """

    __slots__ = ("embeddings", "handles", "ids", "offsets", "outputs", "positions", "tokens")

    tokens: Ints | None
    embeddings: Any
    ids: Ints
    offsets: Ints
    positions: Ints | None  # [T] or [4, T]
    outputs: NDArray[np.bool_]
    handles: tuple[Any, ...]  # what came as a sequence and was not an int

    def __init__(
        self,
        tokens: ArrayLike | None = None,
        embeddings: Any = None,
        *,
        seqs: Any = None,
        positions: ArrayLike | None = None,
        outputs: ArrayLike | Literal["all"] | None = None,
    ) -> None:
        if (tokens is None) == (embeddings is None):
            raise BatchError("a batch holds either tokens or embeddings; " + ("got neither" if tokens is None else "got both"))
        self.tokens = None
        self.embeddings = None
        if tokens is not None:
            self.tokens = _integers(tokens, "tokens")
            if self.tokens.ndim != 1:
                raise BatchError(f"tokens must have one dimension [T], got shape {self.tokens.shape}")
            count = self.tokens.size
        else:
            shape = tuple(getattr(embeddings, "shape", ()))
            if len(shape) != 2:
                raise BatchError(f"embeddings must be an array of shape [T, E], got {shape or type(embeddings).__name__}")
            self.embeddings = embeddings
            count = shape[0]
        if count == 0:
            raise BatchError("the batch is empty; a batch needs at least one row")
        self._read_seqs(seqs, count)
        self.positions = None
        if positions is not None:
            self.positions = _integers(positions, "positions")
            if self.positions.shape not in ((count,), (_SECTIONS, count)):
                raise BatchError(f"positions must have shape [{count}] or [{_SECTIONS}, {count}], got {list(self.positions.shape)}")
        self._read_outputs(outputs, count)

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __repr__(self) -> str:
        kind = "tokens" if self.tokens is not None else "embeddings"
        return f"Batch({len(self)} {kind}, sequences {sorted(set(self.ids.tolist()))})"

    def _read_seqs(self, seqs: Any, count: int) -> None:
        self.handles = ()
        if isinstance(seqs, str):
            raise BatchError(f"seqs must be ids, got the string {seqs!r}")
        if seqs is None or not _is_listing(seqs):
            one = 0 if seqs is None else as_seq_id(seqs)
            if seqs is not None and not isinstance(seqs, int | np.integer):
                self.handles = (seqs,)
            self.ids = _clip_ids([one]).repeat(count)
            self.offsets = np.arange(count + 1)
            return
        rows = seqs.tolist() if isinstance(seqs, np.ndarray) else list(seqs)
        if len(rows) != count:
            raise BatchError(f"seqs has {len(rows)} entries for {count} rows")
        if all(type(row) is int for row in rows):
            self.ids = _clip_ids(rows)
            self.offsets = np.arange(count + 1)
            return
        handles: list[Any] = []
        ids: list[int] = []
        offsets = [0]
        for i, row in enumerate(rows):
            members = list(row) if _is_listing(row) else [row]
            try:
                ids.extend(dict.fromkeys(as_seq_id(m) for m in members))
            except BatchError as error:
                raise BatchError(f"row {i}: {error}", row=i) from None
            handles.extend(m for m in members if not isinstance(m, int | np.integer))
            if len(ids) == offsets[-1]:
                raise BatchError(f"row {i} names no sequence; every row needs at least one", row=i)
            offsets.append(len(ids))
        self.ids, self.offsets, self.handles = _clip_ids(ids), np.array(offsets), tuple(handles)

    def _read_outputs(self, outputs: Any, count: int) -> None:
        if outputs is None:
            self.outputs = np.zeros(count, np.bool_)
            self.outputs[-1] = True
        elif isinstance(outputs, str):
            if outputs != "all":
                raise BatchError(f'outputs must be None, "all" or {count} bools, got {outputs!r}')
            self.outputs = np.ones(count, np.bool_)
        else:
            flags = np.asarray(outputs)
            if flags.shape != (count,) or not (flags.dtype == np.bool_ or np.isin(flags, (0, 1)).all()):
                raise BatchError(f'outputs must be None, "all" or {count} bools, got {outputs!r}')
            self.outputs = flags.astype(np.bool_)

    def checked(self, rows: Rows, vocab_size: int | None) -> Ints:
        """Check against what the cells hold, in the order of spec 3.2, and return the positions ([T] or [4, T]).

        Raises:
            BatchError: names row, sequence, stored and given position.
        Cost: O(rows of the batch); for rows of several sequences also the length of those sequences.
        """
        error = np.full(4, -1, np.int64)
        tokens = self.tokens if self.tokens is not None else np.empty(0, np.int64)
        limit = loops.FARTHEST + 1 if vocab_size is None else vocab_size
        self._raise(loops.check_ids(tokens, limit, self.ids, self.offsets, rows.max_seqs, error), error, rows, limit)
        positions = self.positions if self.positions is not None else self._filled(rows)
        is_multi = positions.ndim == 2
        first = positions[0] if is_multi else positions
        held = (rows.row_positions, rows.row_lengths)
        is_tokens = self.tokens is not None
        if is_multi and (positions.min() < 0 or positions.max() > loops.FARTHEST):
            row = int(np.flatnonzero((positions < 0).any(0) | (positions > loops.FARTHEST).any(0))[0])
            raise BatchError(f"row {row} has position {positions[:, row].tolist()}; components lie in [0, {loops.FARTHEST}]", row=row)
        may_jump = is_multi or rows.row_axes is not None  # text after an image goes on above the image's y and x
        self._raise(loops.check_positions(first, self.ids, self.offsets, *held, is_tokens, may_jump, error), error, rows, limit)
        is_shared = self.ids.size > len(self)
        if is_shared:
            self._check_coupling(rows)
            found = loops.check_nesting(first, self.sets(rows.max_seqs), self.ids, self.offsets, rows.max_seqs, error)
            self._raise(found, error, rows, limit)
        may_repeat = not is_tokens or is_multi
        self._raise(loops.check_order(first, self.ids, self.offsets, rows.max_seqs, may_repeat, error), error, rows, limit)
        return positions

    def _filled(self, rows: Rows) -> Ints:
        """Positions that continue the sequences. Where positions have axes, text goes on above all of them, with equal components."""
        positions = np.empty(len(self), np.int64)
        if rows.row_axes is None:
            following = np.full(rows.max_seqs, -1, np.int64)
        else:
            following = np.array([rows.next_position(s) for s in range(rows.max_seqs)])
        loops.fill_positions(self.ids, self.offsets, rows.row_positions, rows.row_lengths, following, positions)
        return positions if rows.row_axes is None else np.stack([positions] * _SECTIONS)

    def _check_coupling(self, rows: Rows) -> None:
        """Sequences of one row must own exactly the same cells, or the row's sequences would see different pasts. V14, D-23."""
        known: set[tuple[int, int]] = set()
        for i in np.flatnonzero(np.diff(self.offsets) > 1).tolist():
            first, *others = self.ids[self.offsets[i] : self.offsets[i + 1]].tolist()
            for other in others:
                if (first, other) not in known and not rows.owns_same_cells(first, other):
                    raise BatchError(
                        f"row {i} joins sequences {first} and {other}, which do not own the same cells; "
                        "fork one from the other, or give each its own row",
                        row=i,
                        seq=other,
                    )
                known.add((first, other))

    def sets(self, max_seqs: int) -> NDArray[np.uint64]:
        """Bit set of every row's sequences, [T, words]."""
        sets: NDArray[np.uint64] = loops.row_sets(self.ids, self.offsets, (max_seqs + 63) // 64)
        return sets

    def _raise(self, found: int, error: Ints, rows: Rows, vocab_size: int) -> None:
        if found == loops.OK:
            return
        row, seq, stored, given = error.tolist()
        at = f"row {row}, sequence {seq}:"
        message = {
            loops.BAD_TOKEN: f"row {row}: token id {given} is not in [0, {vocab_size})",
            loops.NO_SEQ: f"row {row} names no sequence; every row needs at least one",
            loops.BAD_SEQ: f"row {row}: sequence id {given} is not in [0, {rows.max_seqs})",
            loops.NEGATIVE: f"{at} position {given} is negative",
            loops.TOO_FAR: f"{at} position {given} is above the largest, {loops.FARTHEST}",
            loops.GAP: f"{at} the cache holds positions up to {stored}, so the next is {stored + 1}; got {given}",
            loops.HOLE: f"{at} position {given} leaves a hole at {stored}; positions of a sequence must follow each other",
            loops.NOT_NESTED: f"{at} the row is shared with a sequence that an earlier row of {seq} was not; a shared row may only be "
            "followed by rows of the same sequences or fewer",
            loops.NARROWED: f"{at} position {given} was already given to more sequences; fewer may follow only at a larger position",
            loops.DECREASING: f"{at} position {given} comes after {stored}; positions must not fall along the batch",
            loops.REPEATED: f"{at} position {given} is given twice",
        }[found]
        where = (None if seq < 0 else seq, None if stored < 0 else stored)
        raise BatchError(message, row=row, seq=where[0], stored=where[1], given=given)


@dataclass(frozen=True, eq=False)
class Ubatch:
    """Rows that are evaluated together. All arrays are NumPy; n is its number of rows.

    Attributes:
        tokens:     int64 [n], or None
        embeddings: [n, E], or None
        positions:  int32 [n]; M-RoPE [4, n]
        outputs:    bool [n], rows whose logits are wanted
        rows:       int64 [n], each row's index in the batch
        ids, offsets: sequence ids of row i are ids[offsets[i]:offsets[i + 1]]
        num_sets:   sequence sets when cut into equal parts (n / num_sets rows each), else n
    """

    tokens: Ints | None
    embeddings: Any
    positions: NDArray[np.int32]
    outputs: NDArray[np.bool_]
    rows: Ints
    ids: Ints
    offsets: Ints
    num_sets: int

    def __len__(self) -> int:
        return self.rows.size

    @cached_property
    def seqs(self) -> tuple[tuple[int, ...], ...]:
        """Sequence ids of every row, in the order given."""
        ids, offsets = self.ids.tolist(), self.offsets.tolist()
        return tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(offsets))

    @cached_property
    def queries(self) -> NDArray[np.int32]:
        """The position every window rule looks at, [n]: the position itself, or its first component."""
        return self.positions[0] if self.positions.ndim == 2 else self.positions

    @cached_property
    def first_ids(self) -> Ints:
        """First sequence of every row, [n]: the one whose row the query sees."""
        return self.ids[self.offsets[:-1]]


def split(batch: Batch, positions: Ints, how: Split, max_rows: int, max_seqs: int, *, consecutive: bool = False) -> list[Ubatch]:
    """Cut a checked batch into ubatches of at most `max_rows` rows.

        simple:   rows in order
        equal:    the same number of rows of every sequence set, set by set
        sequence: along a ubatch every row's sequences are among those of the row before

    Raises:
        BatchError: `consecutive` (equal only: the sets' first ids follow each other) and the batch has rows of several sequences.
    Cost: simple O(rows); the others O(rows x ubatches).
    """
    count = len(batch)
    if how == "simple":
        if count <= max_rows:
            return [_whole(batch, positions)]
        order, ends = np.arange(count), [*range(max_rows, count, max_rows), count]
        return [_take(batch, positions, order[a:b], b - a) for a, b in itertools.pairwise([0, *ends])]
    if consecutive and batch.ids.size > count:
        raise BatchError("a batch with rows of several sequences cannot be cut into parts of consecutive sequences")
    sets = batch.sets(max_seqs)
    if how == "equal":
        order, cuts = loops.split_equal(sets, batch.ids[batch.offsets[:-1]], max_rows, consecutive)
    else:
        order, cuts = loops.split_sequence(sets, max_rows)
    ends = cuts.tolist()
    pieces = [order[a:b] for a, b in itertools.pairwise([0, *ends])]
    return [_take(batch, positions, piece, len(np.unique(sets[piece], axis=0)) if how == "equal" else 1) for piece in pieces]


def columns(batch: Batch, positions: Ints, ubatch: Ubatch) -> list[Ubatch]:
    """A ubatch of equal parts cut further, into one row of every sequence set at a time."""
    return [_take(batch, positions, rows, ubatch.num_sets) for rows in ubatch.rows.reshape(ubatch.num_sets, -1).T]


def _whole(batch: Batch, positions: Ints) -> Ubatch:
    count = len(batch)
    rows = np.arange(count)
    return Ubatch(batch.tokens, batch.embeddings, positions.astype(np.int32), batch.outputs, rows, batch.ids, batch.offsets, num_sets=count)


def _take(batch: Batch, positions: Ints, rows: Ints, num_sets: int) -> Ubatch:
    counts = np.diff(batch.offsets)[rows]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    picks = np.repeat(batch.offsets[rows] - offsets[:-1], counts) + np.arange(offsets[-1])
    return Ubatch(
        None if batch.tokens is None else batch.tokens[rows],
        None if batch.embeddings is None else batch.embeddings[rows],
        positions[..., rows].astype(np.int32),
        batch.outputs[rows],
        rows,
        batch.ids[picks],
        offsets,
        num_sets,
    )


def _is_listing(value: Any) -> bool:
    """True iff a value is several ids; arrays and tensors have `__index__` too, whatever their shape."""
    return isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def _integers(values: Any, name: str) -> Ints:
    """An int64 copy of integer input; floats, bools and strings are refused, not rounded."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise BatchError(f"{name} must be integers, got {array.dtype}")
    if array.dtype.kind == "u" and array.max() > np.uint64(2**63 - 1):
        raise BatchError(f"{name} holds {array.max()}, which is too large")
    return array.astype(np.int64)


def _clip_ids(ids: Sequence[int]) -> Ints:
    """Ids as int64; what does not fit becomes -1, which the check refuses with its row."""
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        return np.array([i if -(2**63) <= i < 2**63 else -1 for i in ids], np.int64)
