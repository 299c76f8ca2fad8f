"""Where the rows of a batch go: the search for cells (spec 4.4) and the plan of a whole batch (spec 4.5).

Reads the cells and changes nothing; a plan of several ubatches is tried on a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onekv.core import loops
from onekv.core.batch import Ubatch
from onekv.core.cells import Cells, Group, Slots
from onekv.errors import CacheFull, OneKVError

Placement = Literal["scattered", "contiguous"]

_log = logging.getLogger("onekv.placement")
_NOT_ASKED = np.empty(0, np.int64)


def find_slots(group: Group, count: int, following: NDArray[np.int64], placement: Placement) -> Slots | None:
    """Cells for `count` rows in one group, or None if they do not fit. Changes nothing.

    From the head, wrapping: empty cells first; then, if short, cells hidden from the next query of every owner (`following`, [S]).
    Contiguous: a run of neighbours, of empty cells if there is one, else of either kind.
    Cost: O(cells) at worst; a decode step near the head of a buffer with room finds its cells at once.
    """
    slots = np.empty(count, np.int64)
    head = 0 if group.head > group.num_used + 2 * count else group.head
    if count < 1 or count > group.num_cells:
        found = 0
    elif placement == "scattered":
        found = loops.find_empty(group.used, group.num_cells, head, count, slots)
        if found < count and not group.window.is_full:
            found = loops.find_expired(*group.rule, group.position, group.owners, following, head, count, found, slots)
    else:
        kinds = (False,) if group.window.is_full else (False, True)
        search = (*group.rule, group.position, group.owners, following)
        found = count * any(loops.find_run(*search, take_expired, head, count, slots) for take_expired in kinds)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "%r: %d rows from head %d, %d of %d cells used: %s",
            group.window,
            count,
            head,
            group.num_used,
            group.num_cells,
            slots.tolist() if found == count else "no slot",
        )
    return slots if found == count > 0 else None


def plan_slots(cells: Cells, ubatches: Sequence[Ubatch], placement: Placement) -> list[list[Slots]]:
    """Slots for every ubatch of a batch, in every group: [ubatch][group]. All of them are found, or none is taken.

    Raises:
        CacheFull: a ubatch does not fit; carries the rows of the whole batch and the cells that could have been used.
        OneKVError: nothing to place, or a change of positions is pending: a new row would take over the shift of the cell it gets (D-21).
    Cost: as `find_slots`; several ubatches also cost one copy of the bookkeeping.
    Source: spec 4.5, D-1.
    """
    if not ubatches:
        raise OneKVError("nothing to place: the batch was cut into no ubatch")
    if any(group.has_shift for group in cells.groups):
        raise OneKVError("a change of positions is pending; apply it before placing rows")
    trial = cells if len(ubatches) == 1 else cells.clone()
    chosen: list[list[Slots]] = []
    # Only a window lets cells expire, so only then does it matter who is queried where.
    expire = not all(group.window.is_full for group in cells.groups)
    laters = _later_queries(ubatches, cells.max_seqs) if expire else [_NOT_ASKED] * len(ubatches)
    for ubatch, later in zip(ubatches, laters, strict=True):
        following = np.minimum(trial.next_queries(ubatch), later) if expire else later
        slots = []
        for g, group in enumerate(trial.groups):
            found = find_slots(group, len(ubatch), following, placement)
            if found is None:
                needed = sum(len(piece) for piece in ubatches)
                raise not_enough(cells, g, needed, cells.next_queries(ubatches[0]), "rows", placement)
            slots.append(found)
        chosen.append(slots)
        if trial is not cells:
            trial.commit(ubatch, slots)
    return chosen


def _later_queries(ubatches: Sequence[Ubatch], max_seqs: int) -> list[NDArray[np.int64]]:
    """For every ubatch, the smallest position of each sequence in the ubatches after it, [S]. It may repeat the sequence's last one."""
    later = [np.full(max_seqs, loops.FARTHEST, np.int64)]
    for ubatch in reversed(ubatches[1:]):
        later.append(later[-1].copy())
        np.minimum.at(later[-1], ubatch.ids, np.repeat(ubatch.queries, np.diff(ubatch.offsets)))
    return later[::-1]


def not_enough(cells: Cells, g: int, needed: int, following: NDArray[np.int64], what: str, placement: Placement = "scattered") -> CacheFull:
    """The error that says how many cells a group lacks."""
    group = cells.groups[g]
    free = group.num_cells - group.num_used
    expired = loops.count_expired(*group.rule, group.position, group.owners, following)
    message = f"{needed} {what} do not fit: {free} of {group.num_cells} cells are free"
    if expired:
        message += f" and {expired} reusable"
    if len(cells.groups) > 1 or not group.window.is_full:
        message += f" in group {g} ({group.window!r})"
    if placement == "contiguous":
        message += ", in no run that is long enough"
    return CacheFull(message + "; remove a sequence, or make the buffer larger", needed=needed, free=free + expired, group=g)
