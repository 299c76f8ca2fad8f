"""Recurrent states beside cells: a toy layer whose state is exact, and a dict model of what every sequence must hold.

The toy state of a sequence is (how many tokens it has seen, 31 * what it was + token modulo a prime), so two sequences with different
tokens, or the same in another order, differ.
"""

from __future__ import annotations

import io
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from onekv import (
    Batch,
    BatchError,
    ConfigError,
    KVCache,
    LayerSpec,
    OneKVError,
    Plan,
    ShiftError,
    StateError,
    StateLost,
    Step,
    Window,
    files,
)
from onekv.storage import StateBank
from tiny import kv_of, same_kv, state_of, toy_kv, toy_layer

RECURRENT = LayerSpec(0, 0, states=((2,),))


class Boom(Exception):
    """Raised inside a step."""


def hybrid(num_cells: int = 64, **settings: Any) -> KVCache:
    return KVCache([RECURRENT, toy_layer()], num_cells, **{"max_seqs": 8, **settings})


def folded(tokens: Listing[int]) -> list[float]:
    value = 0
    for token in tokens:
        value = (31 * value + token) % 9973
    return [float(len(tokens)), float(value)]


def run(step: Step) -> None:
    """Evaluate an open step."""
    (before,) = step.read_states(0)  # [S, 2]
    after = []
    for (count, value), tokens in zip(before.tolist(), step.ubatch.tokens.reshape(step.ubatch.num_sets, -1).tolist(), strict=True):
        for token in tokens:
            count, value = count + 1, (31 * value + token) % 9973
        after.append([count, value])
    step.store_states(0, [torch.tensor(after)])
    step.store(1, *toy_kv(step.ubatch))


def feed(cache: KVCache, seqs: Any, tokens: Listing[int], **settings: Any) -> Plan:
    plan = cache.plan(Batch(tokens, seqs=seqs), **settings)
    for step in plan:
        with step:
            run(step)
    return plan


def states_of(cache: KVCache, seq: int) -> list[float]:
    (state,) = cache.states.gather(0, [seq])
    return state[0].tolist()


def everything(cache: KVCache) -> Any:
    seqs = cache.cells.present()
    return state_of(cache), [(s, cache.states.kept(s), states_of(cache, s)) for s in seqs]


# --- against a dict model ---------------------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """What a sequence must hold: its rows as (identity of the cell, token), and after how many rows its states are kept."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def tokens(self) -> list[int]:
        return [token for _, token in self.rows]


class Model:
    """The same operations on plain lists."""

    def __init__(self, checkpoints: int) -> None:
        self.checkpoints = checkpoints
        self.seqs: dict[int, Held] = {s: Held() for s in range(8)}
        self.next_row = 0

    def step(self, step: Step, advanced: set[int]) -> None:
        ids = [self.next_row + i for i in range(len(step.ubatch))]
        self.next_row += len(step.ubatch)
        for seqs, row, token in zip(step.ubatch.seqs, ids, step.ubatch.tokens.tolist(), strict=True):
            for s in seqs:
                self.seqs[s].rows = [*self.seqs[s].rows, (row, token)]
        for s in {s for seqs in step.ubatch.seqs for s in seqs}:
            held = self.seqs[s]
            *earlier, latest = held.kept if held.kept and s not in advanced else [*held.kept[:-1], None]
            if len(earlier) >= self.checkpoints and latest is not None:
                gaps = np.diff([0, *earlier])
                del earlier[int(np.flatnonzero(gaps == gaps.min())[0])]
            held.kept = [*earlier, *([] if latest is None else [latest]), len(held.rows)]
            advanced.add(s)

    def remove(self, s: int, p0: int, p1: int) -> bool:
        held = self.seqs[s]
        gone = [i for i in range(len(held.rows)) if (p0 < 0 or i >= p0) and (p1 < 0 or i < p1)]
        if gone and (gone[-1] != len(held.rows) - 1 or (gone[0] != 0 and gone[0] not in held.kept)):
            return False
        if gone:
            self.seqs[s] = Held(held.rows[: gone[0]], [n for n in held.kept if n <= gone[0]])
        return True

    def copy(self, src: int, dst: int, p0: int, p1: int) -> bool:
        source, target = self.seqs[src], self.seqs[dst]
        start, stop = max(p0, 0), len(source.rows) if p1 < 0 else min(p1, len(source.rows))
        if src == dst or start >= stop:
            return True
        shared = min(len(target.rows), stop)
        if len(target.rows) < start or target.rows[:shared] != source.rows[:shared]:
            return False
        if len(target.rows) < stop:
            if stop not in source.kept:
                return False
            self.seqs[dst] = Held(source.rows[:stop], [n for n in source.kept if n <= stop])
        return True


@pytest.mark.parametrize("row_by_row", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_operations_leave_every_sequence_with_the_state_of_its_tokens(seed: int, row_by_row: bool) -> None:
    rng = np.random.default_rng(seed)
    checkpoints = int(rng.integers(1, 5))
    cache, model = hybrid(96, checkpoints=checkpoints, row_by_row=row_by_row), Model(checkpoints)
    done = {True: 0, False: 0}
    for _ in range(120):
        src, dst = (int(s) for s in rng.integers(0, 8, 2))
        p0, p1 = (int(p) for p in rng.integers(-1, 16, 2))
        match rng.choice(
            ["feed", "remove", "copy", "reorder", "keep", "load", "whole", "clear"], p=[0.4, 0.2, 0.2, 0.08, 0.02, 0.06, 0.03, 0.01]
        ):
            case "feed":
                seqs = rng.choice(8, int(rng.integers(1, 4)), replace=False).tolist()
                rows = rng.permutation(np.repeat(seqs, rng.integers(1, 6, len(seqs))))
                if rows.size > cache.num_free:
                    continue
                plan, advanced = cache.plan(Batch(rng.integers(0, 99, rows.size), seqs=rows), max_ubatch=int(rng.integers(1, 8))), set()
                fails = int(rng.integers(0, 3 * len(plan)))
                for step in plan:
                    try:
                        with step:
                            run(step)
                            if step.index == fails:
                                raise Boom
                    except Boom:
                        break
                    model.step(step, advanced)
            case "remove":
                allowed = model.remove(src, p0, p1)
                assert cache.seq_rm(src, p0, p1) == allowed
                done[allowed] += 1
            case "copy":
                allowed = model.copy(src, dst, p0, p1)
                if allowed:
                    cache.seq_cp(src, dst, p0, p1)
                else:
                    with pytest.raises(StateLost):
                        cache.seq_cp(src, dst, p0, p1)
                done[allowed] += 1
            case "reorder":
                seqs, sources = rng.choice(8, 3, replace=False).tolist(), rng.integers(0, 8, 3).tolist()
                cache.reorder(seqs, sources)
                model.seqs |= dict(zip(seqs, [replace(model.seqs[s]) for s in sources], strict=True))
            case "keep":
                cache.seq_keep(src)
                model.seqs = {s: held if s == src else Held() for s, held in model.seqs.items()}
            case "load":
                file, rows = io.BytesIO(), model.seqs[src].rows
                cache.save(file, src)
                file.seek(0)
                if len(rows) > cache.num_free:
                    continue
                cache.load(file, dst)
                fresh = [(model.next_row + i, token) for i, (_, token) in enumerate(rows)]
                model.next_row += len(rows)
                model.seqs[dst] = Held(fresh, [len(rows)] if rows else [])
            case "whole":
                file = io.BytesIO()
                cache.save(file)
                file.seek(0)
                cache.load(file)
                for held in model.seqs.values():
                    held.kept = held.kept[-1:]
            case "clear":
                cache.clear()
                model.seqs = {s: Held() for s in range(8)}
        cache.check()
        for s, held in model.seqs.items():
            assert cache.cells.tokens(s).tolist() == held.tokens()
            assert cache.states.kept(s) == held.kept
            assert states_of(cache, s) == folded(held.tokens())
            assert [cache.can_continue_at(s, p) for p in range(len(held.rows) + 1)] == [
                p == 0 or p in held.kept for p in range(len(held.rows) + 1)
            ]
            half = len(held.rows) // 2
            assert cache.last_continuable(s, half) == max((p for p in held.kept if p <= half), default=0)
            assert cache.last_continuable(s, 10**6) == len(held.rows)
    assert done[True] > 2
    assert done[False] > 2


def test_swapped_states_are_seen_by_that_comparison() -> None:
    cache = hybrid()
    feed(cache, 0, [5, 7])
    feed(cache, 1, [7, 5])
    cache.states.reorder([0, 1], [1, 0])
    assert states_of(cache, 0) != folded([5, 7])
    cache.check()  # the counts agree, so only the states tell


def test_check_sees_a_state_that_has_seen_another_number_of_rows() -> None:
    cache = hybrid()
    feed(cache, 0, [5, 7])
    cache.check()
    cache.states.clear()
    with pytest.raises(OneKVError, match=r"sequence 0 has 2 rows, its recurrent states have seen \[\]"):
        cache.check()


# --- the bank ---------------------------------------------------------------------------------------------------------------------------


def test_a_state_that_sequences_share_is_kept_once_and_forks_cost_no_memory() -> None:
    cache = hybrid(checkpoints=2)
    feed(cache, 0, [1, 2, 3])
    assert cache.states.nbytes == 8
    before = cache.nbytes
    with cache.sequence() as twin:
        cache.seq_cp(0, twin)
        assert cache.nbytes == before
        feed(cache, twin, [4])
        assert cache.states.nbytes == 16
        assert states_of(cache, 0) == folded([1, 2, 3])
        assert states_of(cache, twin.id) == folded([1, 2, 3, 4])
    assert cache.states.nbytes == 8
    cache.clear()
    assert cache.states.nbytes == 0


def test_of_many_states_the_latest_stays_and_those_that_are_costly_to_compute_again() -> None:
    cache = hybrid(checkpoints=3)
    kept = []
    for count in (20, 1, 1, 9, 1, 1, 1):
        feed(cache, 0, [5] * count)
        kept.append(cache.states.kept(0))
    assert kept[:5] == [[20], [20, 21], [20, 21, 22], [20, 21, 22, 31], [20, 22, 31, 32]]
    assert kept[5:] == [[20, 31, 32, 33], [20, 31, 33, 34]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_state_comes_back_as_it_was_given_whatever_its_dtype(dtype: torch.dtype) -> None:
    bank = StateBank([RECURRENT], checkpoints=1)
    assert bank.has(5, 0)
    assert not bank.has(5, 1)
    given = torch.randn(2, 2).to(dtype)
    bank.advance([(3,), (5,)], [1, 1], {0: bank.checked(0, [given], 2)})
    (back,) = bank.gather(0, [5, 3, 4])
    assert back.dtype == torch.float32
    assert torch.equal(back[:2].to(dtype), given.flip(0))
    assert not back[2].any()
    back.fill_(9)
    given.fill_(8)
    assert not (bank.gather(0, [5, 3])[0] >= 8).any()


def test_a_model_without_recurrent_layers_keeps_nothing() -> None:
    cache = KVCache([toy_layer()], 8)
    assert not cache.states
    for step in cache.plan(Batch([1, 2, 3])):
        with step:
            step.store(0, *toy_kv(step.ubatch))
    cache.seq_cp(0, 1, 1, 2)
    assert cache.seq_rm(0, 1, 2)
    assert cache.states.kept(0) == []
    assert cache.can_continue_at(0, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_kv_heads": 0, "head_dim": 0},
        {"num_kv_heads": 0, "head_dim": 4, "states": ((2,),)},
        {"num_kv_heads": 0, "head_dim": 0, "source": 0, "states": ((2,),)},
        {"num_kv_heads": 0, "head_dim": 0, "value_dim": 2, "states": ((2,),)},
        {"num_kv_heads": 1, "head_dim": 2, "states": ((0,),)},
        {"num_kv_heads": 1, "head_dim": 2, "states": ((2.5,),)},
    ],
)
def test_a_layer_keeps_cells_or_states_or_both(wrong: dict[str, Any]) -> None:
    assert not LayerSpec(0, 0, states=[[2, 3]]).has_cells  # type: ignore[arg-type]
    assert LayerSpec(1, 2, states=((2, 3),)).has_cells
    with pytest.raises(ConfigError, match="LayerSpec"):
        LayerSpec(**wrong)


def test_a_cache_needs_a_layer_with_cells_and_none_reads_a_layer_without() -> None:
    with pytest.raises(ConfigError, match="at least one layer that attends"):
        KVCache([RECURRENT], 8)
    with pytest.raises(ConfigError, match="layer 1 reads layer 0, which has no cells"):
        KVCache([RECURRENT, replace(toy_layer(), source=0)], 8)


def test_a_layer_without_cells_has_no_keys_slots_or_attention() -> None:
    cache = hybrid()
    (step,) = cache.plan(Batch([1, 2]))
    for ask in (lambda: cache.keys(0, 0), lambda: cache.values(0, 0), lambda: step.slots(0)):
        with pytest.raises(ConfigError, match="layer 0 keeps recurrent states and has no cells"):
            ask()
    with step:
        for ask in (
            lambda: step.mask(0),
            lambda: step.store(0, *toy_kv(step.ubatch)),
            lambda: step.attend(0, torch.zeros(2, 1, 2), scale=1.0),
        ):
            with pytest.raises(ConfigError, match="no cells"):
                ask()
        run(step)
    assert cache.snapshot() == cache.snapshot(1)
    assert [group["layers"] for group in cache.stats()["groups"]] == [[1]]


# --- steps ------------------------------------------------------------------------------------------------------------------------------


def test_a_step_left_before_its_states_were_stored_is_undone() -> None:
    cache = hybrid()
    feed(cache, 0, [1, 2])
    before = everything(cache)
    (step,) = cache.plan(Batch([3]))
    with pytest.raises(OneKVError, match=r"before layers \[0\] were stored"), step:
        step.store(1, *toy_kv(step.ubatch))
    assert everything(cache) == before


def test_an_exception_leaves_the_states_as_before_and_earlier_steps_stay() -> None:
    cache = hybrid()
    feed(cache, 0, [1, 2])
    first, second, _ = cache.plan(Batch([3, 4, 5]), max_ubatch=1)
    with first:
        run(first)
    before = everything(cache)
    with pytest.raises(Boom), second:  # noqa: PT012
        run(second)
        raise Boom
    assert everything(cache) == before
    assert cache.states.kept(0) == [2, 3]
    assert cache.seq_rm(0, 2, -1)  # what the batch began with
    assert states_of(cache, 0) == folded([1, 2])


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_while_states_are_kept_undoes_the_step(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = hybrid()
    feed(cache, 0, [1, 2])
    before = everything(cache)
    (step,) = cache.plan(Batch([3]))

    advance = cache.states.advance

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if late:
            advance(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), step:  # noqa: PT012
        run(step)
        patch.setattr(cache.states, "advance", interrupted)
    assert everything(cache) == before
    feed(cache, 0, [3])
    assert states_of(cache, 0) == folded([1, 2, 3])


def test_states_of_a_wrong_kind_are_refused() -> None:
    cache = hybrid()
    (step,) = cache.plan(Batch([1, 2], seqs=[0, 1]))
    with pytest.raises(OneKVError, match="not open"):
        step.read_states(0)
    with step:
        for states in ([], [torch.zeros(1, 2)], [torch.zeros(2, 3)], [torch.zeros(2, 2, dtype=torch.int64)], [torch.zeros(2, 2)] * 2):
            with pytest.raises(ConfigError, match=r"layer 0: states are .* expected float tensors \[\[2, 2\]\]"):
                step.store_states(0, states)
        with pytest.raises(ConfigError, match=r"layer 1: .*not recurrent"):
            step.store_states(1, [torch.zeros(2, 2)])
        with pytest.raises(ConfigError, match=r"layer 1 is not recurrent; the recurrent ones are \[0\]"):
            step.read_states(1)
        run(step)


def test_rows_shared_by_sequences_give_all_of_them_the_state() -> None:
    cache = hybrid()
    plan = feed(cache, [[0, 1], [1, 0], [2], [2], [0], [1]], [5, 6, 9, 4, 7, 8])
    assert plan.steps[0].ubatch.seqs == ((0, 1), (1, 0), (2,), (2,))
    assert [states_of(cache, s) for s in range(3)] == [folded([5, 6, 7]), folded([5, 6, 8]), folded([9, 4])]
    cache.check()


def test_plans_are_cut_into_equal_parts_and_other_cuts_are_refused() -> None:
    cache = hybrid()
    plan = feed(cache, [0, 0, 0, 0, 1, 1], range(6), max_ubatch=4)
    assert [step.ubatch.seqs for step in plan] == [((0,), (0,), (1,), (1,)), ((0,), (0,))]
    for wrong in ({"split": "simple"}, {"split": "sequence"}, {"causal": False}):
        with pytest.raises(ConfigError, match='recurrent layers need split="equal"'):
            cache.plan(Batch([1]), **wrong)


def test_row_by_row_a_sequence_that_has_a_state_takes_one_row_a_step() -> None:
    cache = hybrid(row_by_row=True)
    plan = feed(cache, [0, 0, 0, 1, 1, 1, 0, 0], range(8))
    assert [step.ubatch.seqs for step in plan] == [((0,),) * 3 + ((1,),) * 3, ((0,),), ((0,),)]
    plan = feed(cache, [0, 0, 2, 2, 3], range(5), max_ubatch=4)
    assert [step.ubatch.seqs for step in plan] == [((0,), (2,), (3,)), ((0,), (2,))]
    assert [states_of(cache, s) for s in range(4)] == [folded([0, 1, 2, 6, 7, 0, 1]), folded([3, 4, 5]), folded([2, 3]), folded([4])]


# --- what is refused --------------------------------------------------------------------------------------------------------------------


def test_removing_what_the_state_has_seen_is_refused_and_changes_nothing() -> None:
    cache = hybrid(checkpoints=1)
    chat = cache.sequence()
    for tokens in ([1, 2, 3], [4, 5], [6]):
        feed(cache, chat, tokens)
    feed(cache, 1, [9, 9])
    before = everything(cache)
    assert not cache.seq_rm(chat, 0, 2)
    assert not cache.seq_rm(chat, 2, 4)
    assert not cache.seq_rm(chat, 3, -1)  # kept once, given up for a later one
    assert not cache.seq_rm(-1, 1, 2)  # sequence 1 alone could
    for refused in (lambda: chat.truncate(4), lambda: chat.fork_at(3), lambda: chat.remove(1, 3), lambda: chat.remove(1, 3, mode="exact")):
        with pytest.raises(StateLost, match=r"kept for positions \[5, 6\]") as caught:
            refused()
        assert isinstance(caught.value, BatchError)
        assert caught.value.stored == 0
    with pytest.raises(StateLost, match="would not be a beginning"):
        cache.seq_cp(1, chat)
    assert everything(cache) == before
    assert len(chat.remove(5, -1)) == 0
    assert chat.tokens.tolist() == [1, 2, 3, 4, 5]
    with chat.fork_at(5) as twin:
        assert states_of(cache, twin.id) == folded([1, 2, 3, 4, 5])
    assert cache.seq_rm(-1)
    assert cache.num_used == 0


def test_positions_move_if_no_token_is_dropped_or_changes_its_place() -> None:
    cache = hybrid()
    feed(cache, 0, [1, 2, 3, 4])
    cache.seq_cp(0, 1)
    before = everything(cache)
    for refused in (lambda: cache.seq_add(0, 0, -1, -1), lambda: cache.seq_add(0, 2, -1, -2), lambda: cache.seq_add(0, 0, 2, 5)):
        with pytest.raises(ShiftError, match="drop tokens or change their order"):
            refused()
        assert everything(cache) == before
    cache.seq_add(0, 0, -1, 10)
    cache.seq_div(0, 0, -1, 2)
    assert cache.cells.positions(0).tolist() == [5, 5, 6, 6]
    feed(cache, 0, [5])
    assert states_of(cache, 0) == folded([1, 2, 3, 4, 5])
    cache.check()


def test_a_shift_that_would_move_another_sequences_rows_is_refused() -> None:
    cache = hybrid(shared_shift="move")
    feed(cache, 0, [1, 2, 3, 4])
    cache.seq_add(0, 0, -1, 1)
    cache.seq_cp(0, 1)
    with pytest.raises(ShiftError, match="cannot move shared cells for all owners"):
        cache.seq_add(0, 0, -1, 1)


@pytest.mark.parametrize(("checkpoints", "kept"), [(1, [4, 5]), (4, [1, 2, 3, 4, 5])])
def test_a_window_and_a_state_must_both_allow_a_position(checkpoints: int, kept: list[int]) -> None:
    cache = KVCache([RECURRENT, toy_layer(), toy_layer(Window.sliding(2))], 16, window_cells=3, checkpoints=checkpoints)
    chat = cache.sequence()

    def feed_one(token: int) -> None:
        for step in cache.plan(Batch([token], seqs=chat)):
            with step:
                run(step)
                step.store(2, *toy_kv(step.ubatch))

    for token in range(5):
        feed_one(token)
    assert cache.states.kept(chat.id) == kept
    assert [p for p in range(6) if cache.cells.can_continue_at(chat.id, p)] == [3, 4, 5]
    assert [p for p in range(6) if cache.can_continue_at(chat, p)] == [p for p in kept if p >= 3]


# --- files ------------------------------------------------------------------------------------------------------------------------------


def saved(cache: KVCache, seq: int | None = None) -> io.BytesIO:
    file = io.BytesIO()
    cache.save(file, seq)
    file.seek(0)
    return file


@pytest.mark.parametrize("whole", [True, False])
def test_files_hold_the_states_to_the_bit(whole: bool) -> None:
    cache, other = hybrid(), hybrid(16, placement="contiguous")
    for step in cache.plan(Batch([1, 2, 3, 4], seqs=[0, 0, 1, 1])):
        with step:
            step.store(1, *toy_kv(step.ubatch))
            step.store_states(0, [torch.tensor([[1 / 3, 1e-38], [float("inf"), -0.0]])])
    other.load(saved(cache, None if whole else 1), None if whole else 1)
    for seq in (0, 1) if whole else (1,):
        assert torch.equal(other.states.gather(0, [seq])[0].view(torch.int32), cache.states.gather(0, [seq])[0].view(torch.int32))
        assert same_kv(kv_of_attending(other, seq), kv_of_attending(cache, seq))
    other.check()


def kv_of_attending(cache: KVCache, seq: int) -> list[torch.Tensor]:
    return [cache.keys(1, seq), cache.values(1, seq)]


def test_an_empty_sequence_is_saved_without_states() -> None:
    cache = hybrid()
    feed(cache, 1, [5])
    cache.load(saved(cache, 0), 1)
    assert cache.states.kept(1) == []
    cache.check()


def test_a_file_of_other_states_is_refused_and_changes_nothing() -> None:
    cache = hybrid()
    feed(cache, 0, [5, 6])
    file = saved(cache, 0)
    other = KVCache([LayerSpec(0, 0, states=((3,),)), toy_layer()], 8)
    for target in (other, KVCache([toy_layer(), toy_layer()], 8)):
        with pytest.raises(StateError, match="does not belong to this cache: layer 0"):
            target.load(io.BytesIO(file.getvalue()), 0)
        assert target.num_used == 0
    state = files.load(io.BytesIO(file.getvalue()))
    for states in ({}, {0: [torch.zeros(3)]}, {0: [torch.zeros(2, dtype=torch.float16)]}, {0: [torch.zeros(2), torch.zeros(2)]}):
        bad = io.BytesIO()
        files.save(bad, replace(state, rows=[replace(state.rows[0], states=states)]))
        bad.seek(0)
        before = everything(cache)
        with pytest.raises(StateError):
            cache.load(bad, 0)
        assert everything(cache) == before


def test_files_of_models_without_states_that_older_versions_wrote_still_load(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache([toy_layer()], 8)
    for step in cache.plan(Batch([1, 2])):
        with step:
            step.store(0, *toy_kv(step.ubatch))
    describe = files._describe

    def without(state: files.State) -> dict[str, Any]:
        described = describe(state)
        for layer in described["layers"]:
            del layer["states"]
        return described

    monkeypatch.setattr(files, "_describe", without)
    file, before = saved(cache, 0), kv_of(cache, [0])
    cache.clear()
    assert cache.load(file, 0) == 2
    assert same_kv(kv_of(cache, [0]), before)
