"""Recorded histories of the C++ original, replayed operation by operation.

Before each operation the recorded state is loaded, so that one difference does not hide the next. Shifts move all owners of a cell, as the
original's do. What the original does otherwise by policy is compared with our own rule, written out plainly here.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onekv import Batch, BatchError, CacheFull, Window
from onekv.attention import View
from onekv.attention.reference import dense_mask
from onekv.core import loops
from onekv.core.batch import Ubatch, split
from onekv.core.cells import Cells
from onekv.core.placement import plan_slots

with gzip.open(Path(__file__).parent.parent / "data" / "cache.jsonl.gz", "rt") as lines:
    HISTORIES = [json.loads(line) for line in lines]
EMPTY: dict[str, Any] = {"cells": [], "head": 0, "has_shift": False}


def kinds() -> dict[str, list[dict[str, Any]]]:
    """Histories by window and placement."""
    found: dict[str, list[dict[str, Any]]] = {}
    for history in HISTORIES:
        found.setdefault(f"{history['window']['kind']}-{history['mode']}", []).append(history)
    return found


def load(cells: Cells, state: dict[str, Any]) -> None:
    """Put the recorded cells in place."""
    cells.clear()
    entries: dict[int, list[tuple[int, int]]] = {}
    for cell, position, seqs, _ in state["cells"]:
        for s in seqs:
            entries.setdefault(s, []).append((position, cell))
    for s, row in entries.items():
        row.sort()
        positions, column = np.array(row, np.int32).T
        cells.restore(s, positions, positions, [column])
    group = cells.groups[0]
    for cell, _, _, shift in state["cells"]:
        group.shift[cell] = shift or 0
    group.head, group.has_shift = state["head"], state["has_shift"]


def compare(cells: Cells, op: dict[str, Any]) -> None:
    """The state after an operation is the recorded one."""
    snapshot: Any = cells.snapshot()
    recorded = [[c, p, s, None if shift is None else shift] for c, p, s, shift in op["cells"]]
    mine = [[c, p, s, None if r[3] is None else shift] for (c, p, s, shift), r in zip(snapshot["cells"], recorded, strict=False)]
    assert mine == recorded
    assert len(snapshot["cells"]) == len(recorded)
    assert (snapshot["head"], snapshot["used"]) == (op["head"], op["used"])
    assert cells.groups[0].has_shift == op["has_shift"]
    for s in range(cells.max_seqs):
        assert cells.seq_pos_min(s) == op["pos_min"].get(str(s), -1)
        # The original forgets a sequence with its last cell; our row remembers where it was.
        assert cells.seq_pos_max(s) == op["pos_max"].get(str(s), -1) or (cells.column(0, s) < 0).all()


def repeats(rows: list[Any]) -> bool:
    """Whether a sequence gets one position twice; token rows may not, embeddings may."""
    pairs = [(p, s) for p, seqs in rows for s in seqs]
    return len(set(pairs)) < len(pairs)


def feed(cells: Cells, history: dict[str, Any], op: dict[str, Any]) -> tuple[str, list[list[int]], list[list[str]]]:
    """Status, slots and masks of a batch."""
    rows = op["rows"]
    as_embeddings = op["status"] != "rejected" and repeats(rows)
    content: Any = {"embeddings": np.zeros((len(rows), 1))} if as_embeddings else {"tokens": [0] * len(rows)}
    batch = Batch(**content, seqs=[list(ids) for _, ids in rows], positions=[p for p, _ in rows])
    try:
        positions = batch.checked(cells, None)
    except BatchError:
        return "rejected", [], []
    if cells.groups[0].has_shift:
        cells.reset_shift(0)
    ubatches = split(batch, positions, "simple", history["max_ubatch"], cells.max_seqs)
    before = cells.groups[0].position.copy(), cells.groups[0].head
    try:
        plan = plan_slots(cells, ubatches, history["mode"])
    except CacheFull:
        return "full", [], []
    finally:
        assert (before[0] == cells.groups[0].position).all()
        assert before[1] == cells.groups[0].head
    if op.get("policy"):
        compare_with_our_rule(cells, ubatches[0], plan[0][0].tolist(), history)
    masks = []
    for ubatch, slots in zip(ubatches, plan, strict=True):
        cells.commit(ubatch, slots)
        masks.append(masks_of(cells, ubatch))
    return "ok", [slots[0].tolist() for slots in plan], masks


def masks_of(cells: Cells, ubatch: Ubatch) -> list[str]:
    """Masks up to the last used cell; the dense one and the ranges must agree."""
    group, n = cells.groups[0], len(ubatch)
    first, last = np.empty(n, np.int64), np.empty(n, np.int64)
    seqs = ubatch.first_ids
    loops.visible_ranges(*group.rule, True, cells.row_positions, cells.row_lengths, seqs, ubatch.queries, first, last)
    mask = dense_mask(View(group, True, seqs, ubatch.positions, first, last, group.column, cells.row_positions))
    for i, s in enumerate(seqs):
        assert sorted(group.column[s, first[i] : last[i]].tolist()) == np.flatnonzero(mask[i]).tolist()
    width = int(np.flatnonzero(group.position >= 0)[-1]) + 1
    return ["".join("x" if seen else "-" for seen in row[:width]) for row in mask]


def compare_with_our_rule(cells: Cells, ubatch: Ubatch, slots: list[int], history: dict[str, Any]) -> None:
    """Empty cells from the head on; then cells hidden from the next query of all their owners. Contiguous: a run, empty if possible."""
    group, n = cells.groups[0], len(ubatch)
    head = 0 if group.head > group.num_used + 2 * n else group.head
    order = [(head + i) % group.num_cells for i in range(group.num_cells)]
    empty = [c for c in order if group.position[c] < 0]
    hidden = [c for c in order if group.position[c] >= 0 and is_hidden(cells, c)]
    if history["mode"] == "scattered":
        assert slots == (empty + hidden)[:n]
        return
    usable = set(empty) | set(hidden)
    runs = [start for start in range(group.num_cells - n + 1) if set(range(start, start + n)) <= usable]
    assert slots[0] in runs
    assert slots == list(range(slots[0], slots[0] + n))
    if any(set(range(start, start + n)) <= set(empty) for start in runs):
        assert set(slots) <= set(empty)


def is_hidden(cells: Cells, cell: int) -> bool:
    """Whether no owner's next query sees a cell."""
    group = cells.groups[0]
    position = group.position[[cell]]
    return not any(group.window.visible(position, cells.seq_pos_max(s) + 1)[0] for s in group.owners_of(cell))


def clashes(cells: Cells, op: dict[str, Any]) -> bool:
    """Whether a copy would give the destination two different cells at one position, which we refuse."""
    start, stop = cells.span(op["src"], op["p0"], op["p1"])
    source = set(zip(cells.positions(op["src"])[start:stop].tolist(), cells.column(0, op["src"])[start:stop].tolist(), strict=True))
    held = set(zip(cells.positions(op["dst"]).tolist(), cells.column(0, op["dst"]).tolist(), strict=True))
    return bool({p for p, _ in held - source} & {p for p, _ in source})


def replay(history: dict[str, Any]) -> dict[str, int]:
    """Replay one history; how many operations of each sort there were."""
    window = history["window"]
    rule = Window.full() if window["kind"] == "full" else getattr(Window, window["kind"])(window["n"])
    cells = Cells([rule], [history["cells"]], history["max_seqs"])
    is_equal = False
    before, counts = EMPTY, {"ops": 0, "policy": 0, "refused copies": 0, "masks": 0}
    for op in history["ops"]:
        # Full layers: an equal state needs no loading, unless a recorded shift is unknown. Windowed rows also hold what was lost.
        if not (rule.is_full and is_equal) or before.get("shift"):
            load(cells, before)
        before, is_equal = op, False
        counts["ops"] += 1
        name = op["op"]
        if name == "feed":
            status, slots, masks = feed(cells, history, op)
            cells.check()
            if op.get("policy"):
                counts["policy"] += 1
                continue
            assert status == op["status"]
            assert slots == op.get("slots", [])
            if "masks" in op:
                assert masks == op["masks"]
                counts["masks"] += 1
        elif name == "seq_cp" and clashes(cells, op):
            counts["refused copies"] += 1
            with pytest.raises(BatchError, match="already holds another cell"):
                cells.seq_cp(op["src"], op["dst"], op["p0"], op["p1"])
            continue
        else:
            apply(cells, op)
        cells.check()
        compare(cells, op)
        is_equal = True
    return counts


def apply(cells: Cells, op: dict[str, Any]) -> None:
    """An operation on sequences."""
    match op["op"]:
        case "clear":
            cells.clear()
        case "seq_keep":
            cells.seq_keep(op["seq"])
        case "seq_rm":
            cells.seq_rm(op["seq"], op["p0"], op["p1"])
        case "seq_cp":
            cells.seq_cp(op["src"], op["dst"], op["p0"], op["p1"])
        case "seq_add":
            cells.seq_add(op["seq"], op["p0"], op["p1"], op["delta"])
        case "seq_div":
            cells.seq_div(op["seq"], op["p0"], op["p1"], op["d"])
        case other:
            raise ValueError(other)


@pytest.mark.parametrize("kind", kinds())
def test_recorded_histories_replay_exactly(kind: str) -> None:
    totals: dict[str, int] = {}
    for history in kinds()[kind]:
        try:
            counts = replay(history)
        except BaseException:
            print(f"history {history['id']}")
            raise
        for name, count in counts.items():
            totals[name] = totals.get(name, 0) + count
    assert totals["masks"] > 100
    assert ("full" in kind) == (totals["policy"] == 0)


def test_the_traces_are_whole() -> None:
    assert len(HISTORIES) == 750
    assert sum(len(history["ops"]) for history in HISTORIES) == 26737
