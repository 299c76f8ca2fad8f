"""The plan of an attention over cell lists: every entry a row sees is read once for it, in order, and shared entries once for all."""

import numpy as np
import pytest
from numpy.typing import NDArray

from onekv.core.spans import BLOCK, Spans, plan_spans


def column_of(rows: list[list[int]]) -> NDArray[np.int32]:
    column = np.full((len(rows), max(len(row) for row in rows) + 3), -7, np.int32)
    for s, row in enumerate(rows):
        column[s, : len(row)] = row
    return column


def read_by(spans: Spans, column: NDArray[np.int32], row: int) -> list[int]:
    """Cells read for a row of the step, item by item in the order its partial results are joined."""
    cells: list[int] = []
    for part in spans.parts[spans.offsets[row] : spans.offsets[row + 1]]:
        (item,) = [i for i in spans.items if i[5] <= part < i[5] + i[4] - i[3]]
        assert spans.queries[item[3] + part - item[5]] == row
        cells += column[item[0], item[1] : item[2]].tolist()
    return cells


def entries_read(spans: Spans) -> int:
    return int((spans.items[:, 2] - spans.items[:, 1]).sum())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_visible_entry_is_read_once_and_in_order(seed: int, fixed: bool) -> None:
    rng = np.random.default_rng(seed)
    following = iter(rng.permutation(100_000).tolist())
    rows: list[list[int]] = []
    for _ in range(int(rng.integers(1, 9))):
        # A fork of an earlier row at any length, or a row of its own; then entries of its own, or none.
        parent = rows[int(rng.integers(len(rows)))] if rows and rng.random() < 0.8 else []
        kept = len(parent) if rng.random() < 0.4 else int(rng.integers(len(parent) + 1))
        rows.append(parent[:kept] + [next(following) for _ in range(int(rng.integers(1, 3 * BLOCK)))])
    column = column_of(rows)
    seqs = rng.permutation(np.repeat(np.arange(len(rows)), rng.integers(0, 5, len(rows))))
    if not seqs.size:
        seqs = np.array([0])
    last = np.array([rng.integers(1, len(rows[s]) + 1) for s in seqs])
    first = np.array([rng.integers(0, stop) if rng.random() < 0.5 else 0 for stop in last])
    groups, workers = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    spans = plan_spans(
        seqs, first, last, column, groups=groups, lanes=int(rng.integers(1, 12)), workers=workers, fixed=fixed, by_row=bool(seed % 3)
    )

    for t, s in enumerate(seqs):
        # An item covers what any of its queries sees, so other entries of the row may be read too, never another row's.
        cells = read_by(spans, column, t)
        read = [rows[s].index(cell) for cell in cells]
        assert read == sorted(set(read))
        assert set(range(first[t], last[t])) <= set(read)
    for work, shares, heads in ((spans.rows, spans.row_shares, 1), (spans.groups, spans.group_shares, groups)):
        assert shares.tolist() == sorted(shares)
        assert (shares[0], shares[-1], len(shares)) == (0, len(work), workers + 1)
        assert len({tuple(unit) for unit in work.tolist()}) == len(work)
        assert len(work) == heads * len({unit[0] for unit in work.tolist()})
    assert {*spans.rows[:, 0].tolist(), *spans.groups[:, 0].tolist()} == set(range(len(spans.items)))
    assert all(spans.items[i, 4] - spans.items[i, 3] == 1 for i in spans.rows[:, 0])


def test_shared_leading_cells_are_read_once_for_nested_forks() -> None:
    root, branch = list(range(2 * BLOCK)), list(range(5000, 5000 + BLOCK))
    own = [[9000 + 100 * s + i for i in range(20)] for s in range(5)]
    rows = [root + branch + own[0], root + branch + own[1], root + own[2], root + own[3], own[4]]
    ends = np.array([len(row) for row in rows])
    spans = plan_spans(np.arange(5), np.zeros(5, np.int64), ends, column_of(rows), groups=2, lanes=4, workers=2, fixed=False, by_row=True)
    assert entries_read(spans) == 2 * BLOCK + BLOCK + 5 * 20
    for t, row in enumerate(rows):
        assert read_by(spans, column_of(rows), t) == row


def test_rows_that_differ_within_a_block_share_only_whole_blocks() -> None:
    rows = [[*range(BLOCK + 50), 7000], [*range(BLOCK + 50), 7001]]
    spans = plan_spans(
        np.arange(2), np.zeros(2, np.int64), np.full(2, BLOCK + 51), column_of(rows), groups=1, lanes=8, workers=1, fixed=False, by_row=True
    )
    assert entries_read(spans) == BLOCK + 2 * 51


def test_a_lone_long_row_is_cut_for_the_workers() -> None:
    rows = [list(range(1000))]
    spans = plan_spans(
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.array([1000]),
        column_of(rows),
        groups=3,
        lanes=3,
        workers=2,
        fixed=False,
        by_row=True,
    )
    assert spans.items[:, 1:3].tolist() == [[0, 512], [512, 1000]]
    assert spans.row_shares.tolist() == [0, 1, 2]


def test_fixed_items_are_single_blocks_unless_they_start_their_row() -> None:
    shared = list(range(2 * BLOCK))
    rows = [shared + list(range(9000, 9300)), [*shared, 8000]]
    ends = np.array([len(row) for row in rows])
    spans = plan_spans(np.arange(2), np.zeros(2, np.int64), ends, column_of(rows), groups=1, lanes=1, workers=2, fixed=True, by_row=True)
    mine = [item[1:3].tolist() for item in spans.items if item[0] == 0]
    assert mine == [[0, 256], [256, 384], [384, 512], [512, 556]]
    assert not spans.rows.size
