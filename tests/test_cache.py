"""KVCache: cases on cells and sharing, the rules of use, undo at every point of a run, and the cache against the dict oracle."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onekv import (
    Batch,
    BatchError,
    Buckets,
    CacheFull,
    ConfigError,
    KVCache,
    LayerSpec,
    OneKVError,
    Plan,
    Sequence,
    Step,
    Window,
    WindowLost,
)
from oracle import Clash, Oracle
from tiny import (
    Row,
    T,
    batch_of,
    cells_text,
    decode,
    feed,
    feed_layers,
    head_of,
    kv_of,
    load_cells,
    mask_text,
    rows_of,
    same_kv,
    state_of,
    toy,
    toy_kv,
    toy_layer,
)

FULL = Window.full()


def run(plan: Plan) -> None:
    """Evaluate a plan in a toy cache."""
    for step in plan:
        with step:
            store_all(step)


def store_all(step: Step) -> None:
    """What a step needs before it may be left."""
    for layer in step.plan.cache.store.physical:
        step.store(layer, *toy_kv(step.ubatch))


def unchanged(cache: KVCache, error: type[Exception], rows: Any, **options: Any) -> Any:
    """The error of a batch that must be refused and change nothing."""
    before = state_of(cache)
    with pytest.raises(error) as caught:
        feed(cache, rows, **options)
    assert state_of(cache) == before
    return caught.value


# --- cases: allocation, removal, positions (cases.md A) -------------------------------------------------------------------------------


def alternating(**options: Any) -> KVCache:
    """Four tokens of sequence 0 and four of sequence 1 in turn: all eight cells."""
    cache = toy(8, **options)
    for i in range(4):
        decode(cache, [*T([10 + i], 0, i), *T([20 + i], 1, i)])
    return cache


def test_case_A01_scattered_free_cells_take_a_batch() -> None:
    cache = alternating()
    cache.seq_rm(1, -1, -1)
    assert cache.num_used == 4
    assert decode(cache, T([100, 101, 102, 103], 2, 0))[-1] == 101.5
    assert (cache.num_used, cache.num_free) == (8, 0)
    assert cells_text(cache) == "0{0} 0{2} 1{0} 1{2} 2{0} 2{2} 3{0} 3{2}"


@pytest.mark.parametrize("placement", ["scattered", "contiguous"])
def test_case_A02_the_search_wraps_past_the_end(placement: str) -> None:
    cache = toy(8, placement=placement)
    decode(cache, T(range(6), 0, 0))
    cache.cells.groups[0].head = 6  # the mark stays where the last write ended
    cache.seq_rm(0, 0, 3)
    assert decode(cache, T([6, 7, 8], 0, 6))[-1] == pytest.approx(5.5)
    assert cache.num_used == 6
    assert decode(cache, T([9, 10], 0, 9))[-1] == pytest.approx(6.5)
    assert cache.num_used == 8


def test_case_A03_a_batch_larger_than_the_buffer_names_both_numbers() -> None:
    cache = toy(4)
    full = unchanged(cache, CacheFull, T(range(5), 0, 0))
    assert (full.needed, full.free, cache.num_used) == (5, 4, 0)
    decode(cache, T(range(4), 0, 0))
    assert cache.num_used == 4
    full = unchanged(cache, CacheFull, T([9], 0, 4))
    assert (full.needed, full.free, cache.num_used) == (1, 0, 4)
    size, tries = 8, 0
    while size:  # a caller that halves on failure ends
        with pytest.raises(CacheFull):
            decode(cache, T(range(size), 1, 0))
        size, tries = size // 2, tries + 1
    assert tries == 4


def test_case_A05_clear_resets_every_counter() -> None:
    cache = toy(4)
    decode(cache, T(range(4), 0, 0))
    cache.clear()
    assert (cache.num_used, cache.num_free, head_of(cache)) == (0, 4, 0)
    assert [(cache.seq_pos_min(s), cache.seq_pos_max(s)) for s in range(16)] == [(-1, -1)] * 16
    assert cache.update() is False
    decode(cache, T(range(4), 3, 0))
    assert cache.seq_pos_max(3) == 3


@pytest.mark.parametrize("data", [True, False])
def test_clear_zeroes_keys_and_values_if_asked(data: bool) -> None:
    cache = toy(4)
    decode(cache, T([5, 7], 0, 0))
    cache.clear(data=data)
    assert cache.num_used == 0
    assert cache.store.values(0).flatten().tolist() == ([0, 0, 0, 0] if data else [5, 7, 0, 0])


def test_case_A06_removal_is_by_position_and_not_by_cell() -> None:
    cache = toy(8)
    decode(cache, T([1, 2, 3], 1, 0))
    decode(cache, T([4, 5, 6, 7], 0, 0))
    cache.seq_rm(0, 2, -1)
    assert cells_text(cache) == "0{1} 1{1} 2{1} 0{0} 1{0} . . ."
    assert cache.num_used == 5


def test_case_A07_minus_one_removes_from_every_sequence() -> None:
    cache = toy(8)
    decode(cache, T(range(4), 0, 0))
    decode(cache, T(range(3), 1, 0))
    assert cache.seq_rm(-1, 2, 2) is True
    assert cache.num_used == 7
    assert cache.seq_rm(-1, 2, -1) is True
    assert (cells_text(cache), cache.num_used) == ("0{0} 1{0} . . 0{1} 1{1} . .", 4)
    cache.seq_cp(0, 2)
    assert cache.seq_rm(-1, 1, 2) is True
    assert cells_text(cache) == "0{0,2} . . . 0{1} . . ."
    assert cache.seq_rm(-1, -1, -1) is True
    assert cache.num_used == 0


def test_case_A14_cells_far_behind_are_seen_however_few_are_used() -> None:
    cache = toy(64)
    decode(cache, T(range(40), 0, 0))
    cache.seq_rm(0, 0, 38)
    cache.cells.groups[0].head = 40
    assert decode(cache, T([40], 0, 40)) == [39.0]
    assert cache.num_used == 3


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("slope", [None, 0.0, 0.5])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_case_A15_garbage_in_unused_cells_does_not_leak(garbage: float, slope: float | None, backend: str) -> None:
    cache = toy(8, backend=backend)
    cache.store.keys(0).fill_(garbage)
    cache.store.values(0).fill_(garbage)
    score = {} if slope is None else {"alibi_slopes": torch.tensor([slope])}
    near = 1 / (1 + math.exp(-(slope or 0)))  # weight of the query's own cell
    for _ in range(2):  # the second time in cells that were freed and poisoned again
        assert decode(cache, T([5], 0, 0), score=score) == [5.0]
        assert decode(cache, T([7], 0, 1), score=score) == pytest.approx([5 * (1 - near) + 7 * near], abs=1e-6)
        cache.seq_rm(0)
        cache.store.keys(0).fill_(garbage)
        cache.store.values(0).fill_(garbage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_case_A17_no_score_beats_the_mask(dtype: torch.dtype, backend: str) -> None:
    """The visible key scores about -60000, those of another sequence and behind the window 0."""
    cache = KVCache([LayerSpec(1, 1, window=Window.sliding(1))], 4, k_dtype=str(dtype).removeprefix("torch."), backend=backend)
    ones = torch.ones(1, 1, 1, dtype=dtype)
    for position, seq, k, v, expected in ((0, 0, 0.0, 9.0, 9.0), (0, 1, 0.0, 11.0, 11.0), (1, 0, 60000.0, 7.0, 7.0)):
        for step in cache.plan(Batch([0], seqs=seq, positions=[position])):
            with step:
                assert step.attend(0, -ones, k * ones, v * ones, scale=1.0).item() == expected


def test_case_A18_holes_are_legal_and_the_next_position_follows_the_largest() -> None:
    cache = toy(8)
    decode(cache, T(range(8), 0, 0))
    cache.seq_rm(0, 2, 5)
    assert cells_text(cache) == "0{0} 1{0} . . . 5{0} 6{0} 7{0}"
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0), cache.num_used) == (0, 7, 5)
    for wrong in (5, 2, 10, 7):
        unchanged(cache, BatchError, T([8], 0, wrong))
    assert decode(cache, T([8], 0, 8)) == [4.5]


def random_layer(rng: torch.Generator, ubatch: Any) -> list[torch.Tensor]:
    """q [T, 4, 8], k and v [T, 2, 8] that depend on token and position alone."""
    made = []
    for heads in (4, 2, 2):
        table = torch.randn(64, heads, 8, generator=rng)
        made.append(table[torch.from_numpy(ubatch.tokens)] + 0.1 * torch.from_numpy(ubatch.positions).float()[:, None, None])
    return made


def attend_random(cache: KVCache, rows: list[Row], **plan: Any) -> torch.Tensor:
    """Outputs of a batch through one random layer, [T, 4, 8] in batch order."""
    out = torch.empty(len(rows), 4, 8)
    for step in cache.plan(batch_of(rows), **plan):
        with step:
            q, k, v = random_layer(torch.Generator().manual_seed(5), step.ubatch)
            out[torch.from_numpy(step.ubatch.rows)] = step.attend(0, q, k, v, scale=0.35)
    return out


def test_case_A19_outputs_do_not_depend_on_the_layout() -> None:
    first, second = T([3, 1, 4, 1, 5], 0, 0), T([9, 2, 6], 1, 0)
    mixed = [first[0], second[0], first[1], second[1], first[2], second[2], *first[3:]]
    outputs = []
    for parts in ([first, second], [second, first], [mixed], [first[:2], second, first[2:]]):
        cache = KVCache([LayerSpec(2, 8)], 16)
        cache.cells.groups[0].head = len(outputs) * 3
        for part in parts:
            attend_random(cache, part)
        outputs.append(attend_random(cache, T([7], 0, 5)))
        assert outputs[-1].abs().max() > 0.1
    for other in outputs[1:]:
        assert torch.allclose(outputs[0], other, rtol=0, atol=1e-6)
        assert outputs[0].argmax() == other.argmax()


def test_spec_M13_a_batch_of_five_equals_five_batches_of_one() -> None:
    whole, single = (KVCache([LayerSpec(2, 8)], 16) for _ in range(2))
    together = attend_random(whole, T([3, 1, 4, 1, 5], 0, 0))
    apart = torch.cat([attend_random(single, T([token], 0, i)) for i, token in enumerate([3, 1, 4, 1, 5])])
    assert torch.allclose(together, apart, rtol=0, atol=1e-5)
    chunked = attend_random(KVCache([LayerSpec(2, 8)], 16), T([3, 1, 4, 1, 5], 0, 0), max_ubatch=2)
    assert torch.allclose(together, chunked, rtol=0, atol=1e-5)


def test_case_B08_i_a_single_token_sees_its_own_sequence_only() -> None:
    cache = toy(8)
    decode(cache, [*T([1, 2, 3], 0, 0), *T([100], 1, 0)])
    assert decode(cache, T([4], 0, 3)) == [2.5]


def test_case_B08_iii_one_cell_takes_one_token() -> None:
    cache = toy(1)
    assert decode(cache, T([5], 0, 0)) == [5.0]
    full = unchanged(cache, CacheFull, T([6], 0, 1))
    assert (full.needed, full.free) == (1, 0)


# --- cases: sharing (cases.md C) --------------------------------------------------------------------------------------------------------


def forked() -> KVCache:
    """Ids 1, 2, 3 shared by 0 and 1, then 10 for 0 and 20 for 1."""
    cache = toy(8)
    decode(cache, T([1, 2, 3], 0, 0))
    cache.seq_cp(0, 1, -1, -1)
    assert cache.num_used == 3
    assert decode(cache, [*T([10], 0, 3), *T([20], 1, 3)]) == [4.0, 6.5]
    assert cache.num_used == 5
    return cache


def test_case_C01_copies_diverge_and_outlive_each_other() -> None:
    cache = forked()
    cache.seq_rm(0, -1, -1)
    assert cache.num_used == 4
    assert decode(cache, T([4], 1, 4)) == [6.0]
    assert cache.num_used == 5


def test_case_C02_a_fork_takes_the_place_of_what_was_there() -> None:
    cache = toy(8)
    zero, one = cache.sequence(), cache.sequence()
    decode(cache, T([1, 2, 3], zero.id, 0))
    decode(cache, T([7, 8, 9], one.id, 0))
    one.free()
    one = zero.fork_at(2)
    assert one.id == 1
    assert decode(cache, T([6], one.id, 2)) == [3.0]
    assert cache.num_used == 4


def test_case_C02_a_raw_copy_onto_other_cells_is_refused() -> None:
    cache = toy(8)
    decode(cache, T([1, 2, 3], 0, 0))
    decode(cache, T([7, 8, 9], 1, 0))
    before = state_of(cache)
    with pytest.raises(ValueError, match="already holds another cell at position 0"):
        cache.seq_cp(0, 1, 0, 2)
    cache.seq_cp(0, 0, -1, -1)
    cache.seq_cp(5, 1, -1, -1)
    assert state_of(cache) == before


def test_case_C03_keep_leaves_shared_cells_to_the_one_kept() -> None:
    cache = forked()
    cache.seq_keep(1)
    assert (cache.num_used, cache.seq_pos_max(0), cache.seq_pos_min(1), cache.seq_pos_max(1)) == (4, -1, 0, 3)
    assert cells_text(cache) == "0{1} 1{1} 2{1} . 3{1} . . ."
    assert decode(cache, T([5], 0, 0)) == [5.0]


# --- scenarios: contexts and decode (spec 9.8), in our own form (D15) -----------------------------------------------------------------


def test_spec_C05_return_codes_are_exceptions() -> None:
    cache = toy(32, vocab_size=100)
    feed(cache, "0:0..2")
    unchanged(cache, BatchError, "0:4")
    full = unchanged(cache, CacheFull, "1:0..29")
    assert (full.needed, full.free) == (30, 29)
    feed(cache, "1:0..28")
    assert cache.num_free == 0
    unchanged(cache, BatchError, T([100], 0, 3))
    unchanged(cache, CacheFull, "0:3")


@pytest.mark.parametrize("split", ["simple", "equal", "sequence"])
def test_spec_C08_rows_and_outputs_of_the_ubatches_make_the_output_table(split: Any) -> None:
    cache = toy(8)
    batch = Batch([5, 6, 7, 8], seqs=[0, 1, 1, 0], outputs=[1, 0, 1, 1])
    plan = cache.plan(batch, max_ubatch=2, split=split)
    order = np.concatenate([step.ubatch.rows[step.ubatch.outputs] for step in plan])
    table = np.full(4, -1)
    table[np.sort(order)] = np.arange(order.size)
    assert sorted(order.tolist()) == [0, 2, 3]
    assert table.tolist() == [0, -1, 1, 2]
    assert [step.ubatch.outputs.dtype for step in plan] == [np.bool_] * len(plan)


def enter(step: Step) -> None:
    with step:
        store_all(step)


def test_spec_C09_a_step_is_entered_once_in_order_and_before_anything_changes() -> None:
    cache = toy(8)
    plan = cache.plan(batch_of("0:0..3"), max_ubatch=2)
    first, second = plan
    with pytest.raises(OneKVError, match="step 1 was entered where step 0 is next"):
        enter(second)
    enter(first)
    with pytest.raises(OneKVError, match="step 0 was entered where step 1 is next"):
        enter(first)
    cache.seq_cp(0, 5)
    with pytest.raises(OneKVError, match="changed since this plan"):
        enter(second)
    assert cells_text(cache) == "0{0,5} 1{0,5} . . . . . ."


# --- rules of use (DESIGN 6), one test each ---------------------------------------------------------------------------------------------


def test_rule_plan_is_eager_and_changes_no_cell() -> None:
    cache = toy(8)
    feed(cache, "0:0..1")
    before, epoch = state_of(cache), cache.cells.epoch
    plan = cache.plan(Batch([7, 8, 9], seqs=[0, 0, 3]), max_ubatch=2)
    assert [step.ubatch.positions.tolist() for step in plan] == [[2, 3], [0]]
    assert [step.slots(0).tolist() for step in plan] == [[2, 3], [4]]
    with pytest.raises(BatchError):
        cache.plan(Batch([7], seqs=0, positions=[9]))
    with pytest.raises(CacheFull):
        cache.plan(Batch(range(7), seqs=1))
    assert (state_of(cache), cache.cells.epoch) == (before, epoch)


def test_rule_an_empty_batch_is_a_batch_error() -> None:
    with pytest.raises(BatchError, match="empty"):
        toy().plan(Batch([]))


def test_rule_a_sequence_without_cells_may_start_anywhere() -> None:
    cache = toy(8)
    feed(cache, "3:100..101")
    assert (cache.seq_pos_min(3), cache.seq_pos_max(3)) == (100, 101)
    cache.seq_rm(3)
    feed(cache, "3:7")
    assert cache.seq_pos_max(3) == 7


def test_rule_attention_without_causality_needs_one_ubatch() -> None:
    cache = toy(8)
    unchanged(cache, BatchError, "0:0..3", causal=False, max_ubatch=3)
    assert feed(cache, "0:0..2", causal=False, max_ubatch=3).masks == [["xxx", "xxx", "xxx"]]


@pytest.mark.parametrize("split", ["equal", "sequence"])
def test_rule_attention_without_causality_needs_one_ubatch_however_the_batch_is_cut(split: Any) -> None:
    cache = toy(8)
    unchanged(cache, BatchError, "0:0..2 + 1:0", causal=False, split=split)
    assert feed(cache, "0:0..2", causal=False, split=split).masks == [["xxx"] * 3]


def test_rule_automatic_cuts_stay_whole_without_causality() -> None:
    """What does not fit in one part is full, not cut."""
    cache = KVCache([toy_layer(), toy_layer(Window.sliding(1))], 32, max_seqs=4, window_cells=3)
    unchanged(cache, CacheFull, "0:0..2 + 1:0", causal=False)
    assert feed(cache, "0:0..2 + 1:0", layer=1).slots == [[0, 1], [2, 0]]


def after_an_undone_step(cache: KVCache) -> None:
    plan = cache.plan(batch_of("0:0..3"), max_ubatch=2)
    with pytest.raises(ZeroDivisionError), plan.steps[0]:
        raise ZeroDivisionError
    enter(plan.steps[1])


def after_its_own_undo(cache: KVCache) -> None:
    (step,) = cache.plan(batch_of("0:0..1"))
    with pytest.raises(ZeroDivisionError), step:
        raise ZeroDivisionError
    enter(step)


def twice(cache: KVCache) -> None:
    (step,) = cache.plan(batch_of("0:0..1"))
    enter(step)
    enter(step)


def while_it_is_open(cache: KVCache) -> None:
    (step,) = cache.plan(batch_of("0:0..1"))
    with step:
        store_all(step)
        enter(step)


def skipped(cache: KVCache) -> None:
    enter(cache.plan(batch_of("0:0..3"), max_ubatch=2).steps[1])


def after_another_plan(cache: KVCache) -> None:
    plan = cache.plan(batch_of("0:0..1"))
    run(cache.plan(batch_of("1:0")))
    enter(plan.steps[0])


def between_two_steps(cache: KVCache) -> None:
    plan = cache.plan(batch_of("0:0..3"), max_ubatch=2)
    enter(plan.steps[0])
    cache.seq_rm(0, 1, -1)
    enter(plan.steps[1])


def after_another_plan_was_undone(cache: KVCache) -> None:
    plan = cache.plan(batch_of("0:0..1"))
    with pytest.raises(ZeroDivisionError), cache.plan(batch_of("1:0")).steps[0]:
        raise ZeroDivisionError
    enter(plan.steps[0])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (twice, "entered once"),
        (skipped, "entered once, in order"),
        (after_another_plan, "changed since"),
        (between_two_steps, "changed since"),
        (after_another_plan_was_undone, "changed since"),
        (after_an_undone_step, "this plan ended: step 0 was undone"),
        (after_its_own_undo, "this plan ended: step 0 was undone"),
        (while_it_is_open, "another step is open"),
    ],
)
def test_rule_steps_are_entered_once_in_order_on_unchanged_cells(use: Callable[[KVCache], None], message: str) -> None:
    cache = toy(8)
    with pytest.raises(OneKVError, match=message):
        use(cache)
    cache.check()
    feed(cache, "7:0")  # and the cache goes on


def test_rule_a_dropped_plan_costs_nothing() -> None:
    cache = toy(8)
    cache.plan(batch_of("0:0..7"))
    second = cache.plan(batch_of("1:0..7"))
    run(second)
    assert cache.seq_pos_max(1) == 7


CHANGES: dict[str, Callable[[KVCache], Any]] = {
    "clear": lambda cache: cache.clear(),
    "seq_rm": lambda cache: cache.seq_rm(0),
    "seq_cp": lambda cache: cache.seq_cp(0, 2),
    "seq_keep": lambda cache: cache.seq_keep(0),
    "seq_add": lambda cache: cache.seq_add(0, 0, -1, 3),
    "seq_div": lambda cache: cache.seq_div(0, 0, -1, 2),
    "update": lambda cache: cache.update(),
    "compact": lambda cache: cache.compact(),
    "reorder": lambda cache: cache.reorder([0, 1], [1, 0]),
    "save": lambda cache: cache.save("nowhere"),
    "load": lambda cache: cache.load("nowhere"),
    "sequence": lambda cache: cache.sequence(),
    "plan": lambda cache: cache.plan(batch_of("3:0")),
    "step": lambda cache: enter(cache.plan(batch_of("3:0")).steps[0]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rule_nothing_else_changes_cells_while_a_step_is_open(name: str) -> None:
    cache = toy(8)
    feed(cache, "0:0..1")
    (step,) = cache.plan(batch_of("1:0"))
    with step:
        store_all(step)
        before = state_of(cache)
        with pytest.raises(OneKVError, match=r"while a step is open|another step is open"):
            CHANGES[name](cache)
        assert state_of(cache) == before
        assert (cache.num_used, cache.seq_pos_max(1), len(cache.draw())) == (3, 0, len(cache.draw()))
    assert cells_text(cache) == "0{0} 1{0} 0{1} . . . . ."


def test_rule_a_step_left_before_every_layer_was_stored_is_undone() -> None:
    cache = KVCache([toy_layer(), toy_layer(source=0), toy_layer(), toy_layer(Window.sliding(3))], 8)
    feed(cache, "0:0")
    before = state_of(cache)
    (step,) = cache.plan(batch_of("0:1..2"))
    with pytest.raises(OneKVError, match=r"before layers \[2, 3\] were stored; it was undone"), step:
        step.store(0, *toy_kv(step.ubatch))
    assert state_of(cache) == before
    (step,) = cache.plan(batch_of("0:1..2"))
    with step:  # the layer that reads another's does not count
        store_all(step)
    assert cache.seq_pos_max(0) == 2


def fail(step: Step, error: type[BaseException]) -> None:
    """Stop a step when all is stored."""
    store_all(step)
    assert step.plan.cache.seq_pos_max(0) == step.ubatch.positions.max()
    raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_rule_undo_takes_the_rows_from_all_their_sequences(error: type[BaseException]) -> None:
    """spec C07 too: the reference cleans up for the first id only."""
    cache = toy(8)
    feed(cache, "5:0..1")
    before = state_of(cache)
    (step,) = cache.plan(batch_of("(0,{0,1}) (1,{0,1}) (2,{0}) (2,{5})"))
    with pytest.raises(error), step:
        fail(step, error)
    assert state_of(cache) == before


def test_spec_C06_earlier_steps_of_a_failed_batch_stay() -> None:
    cache = toy(16)
    feed(cache, "0:0..7")
    first, second = cache.plan(batch_of("0:8..13"), max_ubatch=4)
    enter(first)
    with pytest.raises(RuntimeError), second:
        raise RuntimeError
    assert (cache.seq_pos_max(0), cache.num_used, head_of(cache)) == (11, 12, 12)


def test_rule_window_cells_that_an_undone_step_overwrote_stay_lost() -> None:
    """They were outside every owner's window, so nothing that can be asked next misses them."""
    cache = toy(4, Window.sliding(2))
    feed(cache, "0:0..3")
    (step,) = cache.plan(batch_of("0:4"))
    assert step.slots(0).tolist() == [0]
    with pytest.raises(RuntimeError), step:
        fail(step, RuntimeError)
    assert cells_text(cache) == ". 1{0} 2{0} 3{0}"
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (1, 3)
    assert [cache.can_continue_at(0, p) for p in range(5)] == [False, False, True, True, True]
    assert decode(cache, T([4], 0, 4)) == [3.5]
    cache.check()


@pytest.mark.parametrize("passed", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rule_attention_reads_what_the_cells_hold(passed: torch.dtype, stored: str, backend: str) -> None:
    cache = KVCache([LayerSpec(1, 1)], 4, k_dtype=stored, backend=backend)
    third = torch.full((1, 1, 1), 1 / 3, dtype=passed)
    (step,) = cache.plan(Batch([0]))
    with step:
        out = step.attend(0, torch.zeros(1, 1, 1, dtype=torch.float64), third, third, scale=1.0)
    assert out.dtype == torch.float64
    expected = third.to(getattr(torch, stored)).double()
    assert out.item() == expected.item()
    assert cache.keys(0, 0).item() == cache.values(0, 0).item() == expected.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rule_attention_accumulates_in_float32_and_answers_in_the_dtype_of_q(dtype: torch.dtype, backend: str) -> None:
    """The mean of 0 .. 511: summed in half precision it would be far off."""
    cache = KVCache([LayerSpec(1, 1)], 512, k_dtype="float16", backend=backend)
    (step,) = cache.plan(Batch([0] * 512))
    with step:
        values = torch.arange(512, dtype=torch.float32)[:, None, None]
        out = step.attend(0, torch.zeros(512, 1, 1, dtype=dtype), values, values, scale=1.0)
    assert out.dtype == dtype
    assert out[-1].item() == torch.tensor(255.5).to(dtype).item()
    assert out[300].item() == pytest.approx(150.0, rel=1e-6)


def test_rule_k_and_v_come_first_and_come_together() -> None:
    cache = KVCache([toy_layer(), toy_layer(source=0), toy_layer()], 4)
    (step,) = cache.plan(batch_of("0:0..1"))
    q, (k, v) = torch.zeros(2, 1, 2), toy_kv(step.ubatch)
    with pytest.raises(OneKVError, match="not open"):
        step.attend(0, q, k, v, scale=1.0)
    with pytest.raises(OneKVError, match="not open"):
        step.store(0, k, v)
    with step:
        for layer, owner in ((0, 0), (1, 0), (2, 2)):
            with pytest.raises(OneKVError, match=f"layer {layer} attends before layer {owner} was stored"):
                step.attend(layer, q, scale=1.0)
        for half in ((k, None), (None, v)):
            with pytest.raises(ConfigError, match="both k and v, or neither"):
                step.attend(0, q, *half, scale=1.0)
        with pytest.raises(ConfigError, match="reads the cells of layer 0 and never writes"):
            step.attend(1, q, k, v, scale=1.0)
        first = step.attend(0, q, k, v, scale=1.0)
        assert torch.equal(step.attend(0, q, scale=1.0), first)
        assert torch.equal(step.attend(1, q, scale=1.0), first)
        step.store(2, k, v + 1)
        assert torch.equal(step.attend(2, q, scale=1.0), first + 1)
    with pytest.raises(OneKVError, match="not open"):
        step.attend(0, q, scale=1.0)


def test_rule_what_was_stored_in_an_earlier_step_does_not_count() -> None:
    cache = toy(8)
    first, second = cache.plan(batch_of("0:0..1"), max_ubatch=1)
    enter(first)
    with pytest.raises(OneKVError, match="before layer 0 was stored"), second:
        second.attend(0, torch.zeros(1, 1, 2), scale=1.0)


def test_rule_repeated_positions_are_refused_for_tokens_and_taken_for_embeddings_and_axes() -> None:
    cache = toy(8)
    twice = [Row(4, 0, (0,)), Row(6, 0, (0,))]
    unchanged(cache, BatchError, twice)
    assert feed(cache, batch_of(twice, embeddings=True)).outputs == [5.0, 5.0]
    assert feed(cache, batch_of([Row(8, 0, (0,))], embeddings=True)).outputs == [6.0]
    unchanged(cache, BatchError, [Row(8, 0, (0,))])
    # With axes: the same t twice, at (y, x) = (0, 0) and (0, 1).
    axes = np.array([[0, 0], [0, 0], [0, 1], [0, 0]])
    fed = feed(cache, Batch(embeddings=np.array([[4.0], [6.0]], np.float32), seqs=1, positions=axes))
    assert fed.outputs[-1] == 5.0


def test_rule_seq_cp_adds_and_skips_what_is_already_owned() -> None:
    cache = toy(8)
    feed(cache, "0:0..3")
    cache.seq_cp(0, 1, 0, 2)
    cache.seq_cp(0, 1, 1, 3)
    cache.seq_cp(0, 1, 0, 3)
    assert cells_text(cache) == "0{0,1} 1{0,1} 2{0,1} 3{0} . . . ."
    feed(cache, "1:3")
    before = state_of(cache)
    with pytest.raises(ValueError, match="another cell at position 3"):
        cache.seq_cp(0, 1)
    assert state_of(cache) == before


def test_rule_counts_are_those_of_the_full_group_and_reclaimable_cells_count_as_used() -> None:
    cache = KVCache([toy_layer(Window.sliding(2)), toy_layer(), toy_layer(source=0, window=Window.sliding(2))], 16, window_cells=6)
    feed(cache, "0:0..4")
    cache.seq_cp(0, 1, 0, 3)
    assert (cache.num_cells, cache.num_used, cache.num_free) == (16, 5, 11)
    stats = cache.stats()
    cell = (2 + 1) * 4
    assert [{k: g[k] for k in ("window", "layers", "cells", "used", "free", "shared", "head")} for g in stats["groups"]] == [
        {"window": "Window.full()", "layers": [1], "cells": 16, "used": 5, "free": 11, "shared": 3, "head": 5},
        {"window": "Window.sliding(2)", "layers": [0], "cells": 6, "used": 5, "free": 1, "shared": 3, "head": 5},
    ]
    assert [(g["nbytes"], g["nbytes_saved"]) for g in stats["groups"]] == [(16 * cell, 3 * cell), (6 * cell, 3 * cell)]
    assert stats["sequences"] == {0: 5, 1: 3}
    assert (stats["nbytes"], stats["nbytes_saved"], cache.nbytes) == (22 * cell, 6 * cell, 22 * cell)
    snapshots = [cache.snapshot(layer) for layer in range(3)]
    assert snapshots[0] == snapshots[1] == snapshots[2]
    feed(cache, "0:5..6")
    assert [cache.snapshot(layer)["used"] for layer in range(3)] == [6, 7, 6]


def test_rule_check_draws_what_is_broken() -> None:
    cache = toy(4)
    feed(cache, "0:0..1")
    cache.check()
    cache.cells.groups[0].owners[1, 0] = 2
    with pytest.raises(OneKVError, match="broken bookkeeping") as broken:
        cache.check()
    assert cache.draw() in str(broken.value)


@pytest.mark.parametrize("seq", [16, -2, 1.0, "0", None, True, [0], np.float32(1), 2**80], ids=repr)
@pytest.mark.parametrize("name", ["seq_rm", "seq_keep", "seq_pos_min", "seq_pos_max", "seq_cp", "keys", "can_continue_at", "plan"])
def test_rule_bad_sequence_ids_are_batch_errors(name: str, seq: Any) -> None:
    cache = toy(4)
    feed(cache, "0:0")
    before = state_of(cache)
    calls: dict[str, Callable[[], Any]] = {
        "seq_cp": lambda: cache.seq_cp(0, seq),
        "keys": lambda: cache.keys(0, seq),
        "can_continue_at": lambda: cache.can_continue_at(seq, 1),
        "plan": lambda: cache.plan(Batch([1], seqs=[[seq]])),
    }
    with pytest.raises(BatchError):
        calls.get(name, lambda: getattr(cache, name)(seq))()
    assert state_of(cache) == before


def test_rule_ids_may_be_numpy_integers_and_handles() -> None:
    cache = toy(8)
    feed(cache, "0:0..1")
    handle = cache.sequence()
    cache.seq_cp(np.int64(0), handle)
    feed(cache, Batch([9, 9], seqs=[handle, [np.uint8(0)]]))
    assert cells_text(cache) == f"0{{0,{handle.id}}} 1{{0,{handle.id}}} 2{{{handle.id}}} 2{{0}} . . . ."


@pytest.mark.parametrize("bound", [1.0, "0", None, True, np.float64(1)], ids=repr)
def test_position_bounds_must_be_integers(bound: Any) -> None:
    cache = toy(4)
    feed(cache, "0:0")
    for call in (lambda: cache.seq_rm(0, bound, -1), lambda: cache.seq_rm(0, 0, bound), lambda: cache.seq_cp(0, 1, bound)):
        with pytest.raises(BatchError, match="must be an integer"):
            call()
    assert cells_text(cache) == "0{0} . . ."


def test_rule_a_second_thread_is_refused_while_a_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = toy(8)
    feed(cache, "0:0..1")
    plan = cache.plan(batch_of("1:0"))
    inside, leave = threading.Event(), threading.Event()
    real = cache.cells.seq_rm

    def slow(*arguments: Any) -> None:
        inside.set()
        assert leave.wait(10)
        real(*arguments)

    monkeypatch.setattr(cache.cells, "seq_rm", slow)
    owner = threading.Thread(target=cache.seq_rm, args=(0, 1))
    owner.start()
    try:
        assert inside.wait(10)
        for call in (cache.clear, cache.check, cache.draw, cache.snapshot, cache.stats, cache.sequence, lambda: enter(plan.steps[0])):
            with pytest.raises(OneKVError, match="one thread owns it"):
                call()
    finally:
        leave.set()
        owner.join()
    assert cells_text(cache) == "0{0} . . . . . . ."
    cache.clear()  # and afterwards it may come in


# --- settings and arguments ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"num_cells": 0}, "num_cells"),
        ({"num_cells": 2.0}, "num_cells"),
        ({"num_cells": True}, "num_cells"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"max_seqs": 5000}, "max_seqs"),
        ({"window_cells": 4}, "all layers share one window"),
        ({"window_cells": 9}, "window_cells"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"placement": "any"}, "placement"),
        ({"v_layout": "columns"}, "v_layout"),
        ({"shared_shift": "none"}, "shared_shift"),
        ({"backend": "fast"}, "backend must be auto or one of"),
        ({"backend": "__init__"}, "backend must be auto or one of"),
        ({"k_dtype": "int8"}, "k_dtype"),
        ({"hadamard": 1, "k_dtype": "q8_0"}, "hadamard must be None, True or False; got 1"),
        ({"hadamard": "yes"}, "hadamard must be None, True or False; got 'yes'"),
        ({"hadamard": True}, "hadamard=True rotates quantised keys and values, but k_dtype is float32"),
        ({"k_dtype": "q8_0", "v_layout": "transposed"}, "q8_0 values are blocks"),
        ({"v_dtype": "double"}, "v_dtype"),
        ({"layers": []}, "at least one layer"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCache(**{"layers": [toy_layer()], "num_cells": 8, **settings_})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_ubatch": 0}, ConfigError),
        ({"max_ubatch": True}, ConfigError),
        ({"max_ubatch": 2.0}, ConfigError),
        ({"split": "half"}, ConfigError),
    ],
)
def test_plan_refuses_options_that_cannot_work(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        toy().plan(Batch([1]), **options)


def test_plan_takes_a_batch_and_nothing_else() -> None:
    with pytest.raises(BatchError, match="takes a Batch, got list"):
        toy().plan([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 1, 2)}, "q has shape"),
        ({"q": torch.zeros(2, 2)}, "q has shape"),
        ({"q": torch.zeros(2, 3, 2)}, "q has shape"),
        ({"q": torch.zeros(2, 2, 3)}, "q has shape"),
        ({"q": torch.zeros(2, 0, 2)}, "q has shape"),
        ({"q": torch.zeros(2, 2, 2, dtype=torch.int32)}, "q must be a float tensor"),
        ({"k": torch.zeros(1, 2, 2)}, "k has shape"),
        ({"k": torch.zeros(2, 1, 2)}, "k has shape"),
        ({"v": torch.zeros(2, 2, 2)}, "v has shape"),
        ({"v": torch.zeros(2, 2, 1, dtype=torch.int64)}, "v must be a float tensor"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"alibi_slopes": torch.zeros(2, 1)}, "alibi_slopes has shape"),
        ({"layer": 1}, "layer must be an integer"),
        ({"layer": -1}, "layer must be an integer"),
        ({"layer": True}, "layer must be an integer"),
    ],
)
def test_attend_refuses_wrong_shapes_before_it_stores(change: dict[str, Any], message: str) -> None:
    cache = KVCache([LayerSpec(2, 2, value_dim=1)], 4)
    (step,) = cache.plan(batch_of("0:0..1"))
    given = {"layer": 0, "q": torch.zeros(2, 2, 2), "k": torch.ones(2, 2, 2), "v": torch.ones(2, 2, 1), "scale": 1.0} | change
    with pytest.raises(ConfigError, match=message), step:
        step.attend(**given)
    assert not cache.store.keys(0).any()
    assert cache.num_used == 0


@pytest.mark.parametrize("shape", [(8,), (8, 4, 1), (8, 3), (8, 1)])
def test_attend_refuses_buckets_that_do_not_fit_the_heads(shape: tuple[int, ...]) -> None:
    cache = KVCache([LayerSpec(2, 2)], 4)
    (step,) = cache.plan(batch_of("0:0..1"))
    q, k = torch.zeros(2, 4, 2), torch.zeros(2, 2, 2)
    with pytest.raises(ConfigError), step:
        step.attend(0, q, k, k, scale=1.0, bias=Buckets(torch.zeros(shape)))


def test_keys_and_values_come_in_position_order_and_are_copies() -> None:
    cache = toy(8)
    load_cells(cache, "2{0} . 0{0,1} 1{0} . . 0{2} .")
    assert cache.values(0, 0).flatten().tolist() == [0, 1, 2]
    assert cache.values(0, 1).shape == (1, 1, 1)
    assert cache.values(0, 9).shape == (0, 1, 1)
    for position, key in enumerate(cache.keys(0, 0)[:, 0].tolist()):
        assert key == pytest.approx([math.cos(position), math.sin(position)], abs=1e-6)
    cache.keys(0, 0).fill_(7)
    assert cache.keys(0, 0).max() <= 1


def test_keys_that_require_a_gradient_leave_no_graph_in_the_cache() -> None:
    cache = toy(8)
    (step,) = cache.plan(batch_of("0:0..1"))
    with step:
        q, k = torch.zeros(2, 1, 2, requires_grad=True), torch.ones(2, 1, 2, requires_grad=True)
        step.attend(0, q, k, torch.ones(2, 1, 1, requires_grad=True), scale=1.0)
    assert not cache.store.keys(0).requires_grad
    assert not cache.store.values(0).requires_grad


# --- Sequence -------------------------------------------------------------------------------------------------------------------


def test_a_sequence_forks_truncates_and_frees() -> None:
    cache = toy(8)
    with cache.sequence() as one:
        decode(cache, Batch([4, 5, 6], seqs=one))
        assert (len(one), one.positions.tolist(), one.tokens.tolist()) == (3, [0, 1, 2], [4, 5, 6])
        fork, early = one.fork(), one.fork_at(2)
        assert sorted({one.id, fork.id, early.id}) == [0, 1, 2]
        assert (fork.tokens.tolist(), early.tokens.tolist(), cache.num_used) == ([4, 5, 6], [4, 5], 3)
        assert decode(cache, Batch([10], seqs=early)) == pytest.approx([(4 + 5 + 10) / 3])
        fork.truncate(1)
        assert fork.tokens.tolist() == [4]
        assert one.tokens.tolist() == [4, 5, 6]
        assert len(one.fork_at(0)) == 0
    assert cells_text(cache) == "0{1,2} 1{2} . 2{2} . . . ."
    fork.free()
    fork.free()
    early.free()
    assert cache.num_used == 0
    assert cache.sequence().id == 0


def test_a_handle_keeps_its_id_while_it_is_empty() -> None:
    cache = toy(8, max_seqs=3)
    handles = [cache.sequence() for _ in range(3)]
    assert [h.id for h in handles] == [0, 1, 2]
    assert all(handles)
    with pytest.raises(OneKVError, match="all 3 sequence ids are in use"):
        cache.sequence()
    handles[1].free()
    feed(cache, "1:0")  # a raw id with cells is not handed out
    with pytest.raises(OneKVError, match="are in use"):
        cache.sequence()
    cache.seq_rm(1)
    assert cache.sequence().id == 1


def uses(handle: Sequence, cache: KVCache) -> Iterator[Callable[[], Any]]:
    yield lambda: handle.id
    yield lambda: len(handle)
    yield lambda: cache.seq_rm(handle)
    yield lambda: Batch([1], seqs=handle)
    yield lambda: Batch([1], seqs=[[handle]])
    yield handle.fork
    yield lambda: handle.truncate(0)


def test_a_freed_handle_is_refused_everywhere() -> None:
    cache = toy(8)
    handle = cache.sequence()
    stale = Batch([1], seqs=handle)
    handle.free()
    for use in uses(handle, cache):
        with pytest.raises(BatchError, match="was freed"):
            use()
    with pytest.raises(BatchError, match="was freed"):
        cache.plan(stale)
    assert repr(handle) == "Sequence(freed)"


def test_a_handle_of_another_cache_is_refused() -> None:
    cache, other = toy(8), toy(8)
    handle = other.sequence()
    for call in (lambda: cache.seq_rm(handle), lambda: cache.seq_cp(0, handle), lambda: cache.plan(Batch([1], seqs=[handle]))):
        with pytest.raises(BatchError, match="another cache"):
            call()


@pytest.mark.parametrize("position", [-1, 1.5, "0", None, True])
def test_fork_at_and_truncate_take_positions(position: Any) -> None:
    cache = toy(8)
    handle = cache.sequence()
    decode(cache, Batch([4, 5], seqs=handle))
    for call in (handle.fork_at, handle.truncate):
        with pytest.raises(BatchError, match="non-negative integer"):
            call(position)
    assert cells_text(cache) == "0{0} 1{0} . . . . . ."


def test_fork_at_and_truncate_ask_the_window_first() -> None:
    cache = toy(4, Window.sliding(2))
    handle = cache.sequence()
    decode(cache, Batch(range(6), seqs=handle), max_ubatch=1)
    before = state_of(cache)
    assert [cache.can_continue_at(handle, p) for p in range(7)] == [False] * 3 + [True] * 4
    for call in (handle.fork_at, handle.truncate):
        with pytest.raises(WindowLost) as lost:
            call(2)
        assert (lost.value.seq, lost.value.given) == (handle.id, 2)
    assert state_of(cache) == before
    assert handle.fork_at(4).positions.tolist() == [0, 1, 2, 3]
    cache.seq_rm(handle, 2)
    with pytest.raises(WindowLost, match="row 0: sequence 0 cannot continue at position 2"):
        decode(cache, Batch([9], seqs=handle))


# --- layers ------------------------------------------------------------------------------------------------------------------------------


def test_each_layer_uses_its_own_window_and_reading_layers_their_source() -> None:
    """case_D09, and spec 4.2 in small."""
    layers = [toy_layer(), toy_layer(Window.sliding(4)), toy_layer(source=0), toy_layer(Window.sliding(4), source=1)]
    cache = KVCache([*layers, toy_layer(source=2)], 16)
    fed = feed_layers(cache, T(range(10), 0, 0))
    assert [layer.outputs[-1] for layer in fed] == [4.5, 7.5, 4.5, 7.5, 4.5]
    assert cache.store.physical == [0, 1]
    assert cache.nbytes == 2 * 16 * 3 * 4


def test_masks_are_dense_and_as_wide_as_the_buffer() -> None:
    cache = toy(8)
    (step,) = cache.plan(batch_of("0:0..1"))
    with step:
        store_all(step)
        mask = step.mask(0)
        assert (mask.dtype, mask.shape) == (np.bool_, (2, 8))
        assert mask_text(step, n_kv=8) == ["x-------", "xx------"]
    with pytest.raises(OneKVError, match="not open"):
        step.mask(0)


@pytest.mark.parametrize("v_layout", ["rows", "transposed"])
@pytest.mark.parametrize("placement", ["scattered", "contiguous"])
def test_a_long_history_gives_the_means_of_what_each_sequence_holds(placement: str, v_layout: str) -> None:
    cache = toy(64, placement=placement, v_layout=v_layout)
    for i in range(10):
        assert decode(cache, [*T([i], 0, i), *T([100 + i], 1, i)]) == pytest.approx([i / 2, 100 + i / 2])
    cache.seq_rm(0, 3, 6)
    cache.seq_cp(1, 2, 0, 5)
    assert decode(cache, [*T([50], 0, 10), *T([7], 2, 5)]) == pytest.approx([(0 + 1 + 2 + 6 + 7 + 8 + 9 + 50) / 8, (510 + 7) / 6])


# --- undo at every point of a run -------------------------------------------------------------------------------------------------------


LAYERS = [toy_layer(), toy_layer(Window.sliding(4)), toy_layer(source=0), toy_layer()]
POINTS = ["before", "stored", "attended"]
HISTORY = ["0:0..3 + 1:0..2", "(0,{3,4}) (1,{3,4})"]
RUN = "(4,{0}) (2,{3,4}) (5,{0}) (3,{1}) (3,{3}) (3,{4}) (6,{0}) (4,{1})"


class Stop(Exception):
    """Raised on purpose."""


class Interrupted(KeyboardInterrupt):
    """As Ctrl-C."""


def prepared() -> KVCache:
    cache = KVCache(LAYERS, 24, max_seqs=6)
    for rows in HISTORY:
        feed(cache, rows)
    cache.seq_cp(1, 5)
    return cache


def evaluate(cache: KVCache, stop: tuple[int, int, str] | None, error: type[BaseException]) -> list[float]:
    """Outputs of RUN in steps of three rows; raises `error` at the step, layer and point named by `stop`."""
    outputs = []
    for number, step in enumerate(cache.plan(batch_of(RUN), max_ubatch=3)):
        if stop and number == stop[0]:
            cache.before = (state_of(cache), kv_of(cache, range(6)))  # type: ignore[attr-defined]
        with step:
            q = torch.zeros(len(step.ubatch), 1, 2)
            for layer, spec in enumerate(LAYERS):
                for point in POINTS:
                    if (number, layer, point) == stop:
                        raise error
                    if point == "before" and spec.source is None:
                        step.store(layer, *toy_kv(step.ubatch))
                    elif point == "stored":
                        outputs += step.attend(layer, q, scale=1.0).flatten().tolist()
    return outputs


@pytest.mark.parametrize("error", [Stop, Interrupted])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("number", range(3))
def test_a_run_that_stops_anywhere_leaves_no_trace_of_its_step(number: int, layer: int, point: str, error: type[BaseException]) -> None:
    whole = prepared()
    expected = evaluate(whole, None, error)
    cache: Any = prepared()
    with pytest.raises(error):
        evaluate(cache, (number, layer, point), error)
    state, bytes_before = cache.before
    assert state_of(cache) == state
    assert same_kv(kv_of(cache, range(6)), bytes_before)
    cache.check()
    # The rows of that step and the rest can be fed again, and nothing is different.
    rows = rows_of(RUN)[3 * number :]
    again = [feed_layers(cache, part) for part in (rows[i : i + 3] for i in range(0, len(rows), 3))]
    outputs = [value for part in again for layer_ in part for value in layer_.outputs]
    assert outputs == expected[3 * number * len(LAYERS) :]
    assert state_of(cache) == state_of(whole)


@pytest.mark.parametrize("error", [Stop, Interrupted])
def test_a_step_that_fails_while_it_is_entered_is_undone(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    cache = prepared()
    before = state_of(cache)

    def broken(*_: Any) -> None:
        raise error

    plan = cache.plan(batch_of(RUN))
    monkeypatch.setattr(Step, "_view", broken)
    with pytest.raises(error):
        enter(plan.steps[0])
    assert state_of(cache) == before
    monkeypatch.undo()
    with pytest.raises(OneKVError, match="this plan ended"):
        enter(plan.steps[0])
    feed(cache, RUN)
    cache.check()


# --- the cache against the oracle ---------------------------------------------------------------------------------------------------------

SEQ = st.integers(0, 4)
BOUND = st.integers(-2, 14)
SETS = st.sampled_from([(0,), (1,), (2,), (3,), (4,), (0, 1), (1, 0), (2, 3, 4), (0, 4)])


class CacheMachine(RuleBasedStateMachine):
    """Random operations through KVCache; outputs are means, so what every row sees is compared too."""

    @initialize(
        windows=st.sampled_from([(FULL,), (FULL, Window.sliding(3)), (Window.sliding(4),), (FULL, Window.chunked(3), Window.symmetric(4))]),
        num_cells=st.integers(8, 24),
        placement=st.sampled_from(["scattered", "contiguous"]),
    )
    def start(self, windows: tuple[Window, ...], num_cells: int, placement: str) -> None:
        self.cache = toy(num_cells, *windows, max_seqs=5, placement=placement)
        self.oracle = Oracle([group.window for group in self.cache.cells.groups])
        self.is_scattered = placement == "scattered"

    @rule(
        sets=st.lists(SETS, min_size=1, max_size=8),
        shift=st.sampled_from([0] * 9 + [1, -1]),
        max_ubatch=st.integers(1, 8),
        split=st.sampled_from(["auto", "simple", "equal", "sequence"]),
        fails=st.sampled_from([False, False, False, True]),
        data=st.data(),
    )
    def feed(self, sets: list[tuple[int, ...]], shift: int, max_ubatch: int, split: str, fails: bool, data: st.DataObject) -> None:
        rows = [Row(data.draw(st.integers(0, 50)), 0, seqs) for seqs in sets]
        rows = [row._replace(position=p + shift) for row, p in zip(rows, self.oracle.positions(rows), strict=True)]
        refusal = self.oracle.refusal(rows, 5)
        before, bytes_before = state_of(self.cache), kv_of(self.cache, range(5))
        plan: Plan | OneKVError
        try:
            plan = self.cache.plan(batch_of(rows, positions=shift != 0), max_ubatch=max_ubatch, split=split)
        except OneKVError as error:
            plan = error
        assert state_of(self.cache) == before
        assert same_kv(kv_of(self.cache, range(5)), bytes_before)
        if isinstance(plan, WindowLost):
            assert self.oracle.may_have_lost(plan.seq, plan.given)
        elif isinstance(plan, CacheFull):
            assert refusal is None
            assert plan.needed == len(rows)
            if self.is_scattered:
                assert min(group.num_cells - group.num_used for group in self.cache.cells.groups) < len(rows)
        elif isinstance(plan, BatchError):
            # Without a full group, an entry that a window took from one owner only cannot be told from another one.
            assert refusal is not None or (self.oracle.hidden and not self.oracle.windows[0].is_full)
        else:
            assert refusal is None
            self.evaluate(plan, rows, data.draw(st.integers(0, len(plan) - 1)) if fails else None)

    def evaluate(self, plan: Plan, rows: list[Row], stop: int | None) -> None:
        for number, step in enumerate(plan):
            mine = [rows[i]._replace(position=p) for i, p in zip(step.ubatch.rows, step.ubatch.positions.tolist(), strict=True)]
            if number == stop:
                with pytest.raises(Stop), step:
                    raise Stop
                self.oracle.hide(mine)
                return
            with step:
                self.oracle.feed(mine)
                q = torch.zeros(len(mine), 1, 2)
                for layer, spec in enumerate(self.cache.layers):
                    out = step.attend(layer, q, *toy_kv(step.ubatch), scale=1.0).flatten().tolist()
                    for row, value in zip(mine, out, strict=True):
                        seen = self.oracle.visible(row.seqs[0], row.position, spec.window)
                        assert value == pytest.approx(sum(seen) / len(seen), abs=1e-4)

    @rule(seq=st.one_of(SEQ, st.just(-1)), p0=BOUND, p1=BOUND)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        assert self.cache.seq_rm(seq, p0, p1)
        self.oracle.seq_rm(seq, p0, p1)

    @rule(src=SEQ, dst=SEQ, p0=st.sampled_from([-1, 0, 1, 3]), p1=BOUND)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        before, rows = state_of(self.cache), dict(self.oracle.rows)
        try:
            self.cache.seq_cp(src, dst, p0, p1)
        except BatchError:
            assert state_of(self.cache) == before
            if self.oracle.windows[0].is_full or not self.oracle.hidden:
                with pytest.raises(Clash):
                    self.oracle.seq_cp(src, dst, p0, p1)
            self.oracle.rows = rows
        else:
            self.oracle.seq_cp(src, dst, p0, p1)

    @rule(seq=SEQ)
    def seq_keep(self, seq: int) -> None:
        self.cache.seq_keep(seq)
        self.oracle.seq_keep(seq)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.oracle.clear()

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "cache"):
            self.oracle.compare(self.cache.cells)
            assert self.cache.num_used + self.cache.num_free == self.cache.num_cells
            if self.oracle.windows[0].is_full:
                assert self.cache.num_used == self.oracle.num_used()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=25)


def test_case_S05_threads_that_meet_in_a_cache_are_refused_and_break_nothing() -> None:
    cache = toy(64, max_seqs=16)
    for seq in range(8):
        decode(cache, T([seq] * 4, seq, 0))
    refused: list[str] = []

    def hammer(seq: int) -> None:
        for _ in range(200):
            for action in (
                lambda: cache.seq_cp(seq, seq + 8, 0, 4),
                lambda: cache.seq_rm(seq + 8, 0, -1),
                lambda: cache.stats(),
            ):
                try:
                    action()
                except OneKVError as error:
                    refused.append(str(error))

    threads = [threading.Thread(target=hammer, args=(seq,)) for seq in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("one thread owns it" in message for message in refused)
    for seq in range(8, 16):
        cache.seq_rm(seq, 0, -1)
    cache.check()
    assert cache.num_used == 32
    assert [decode(cache, T([seq], seq, 4)) for seq in range(8)] == [[float(seq)] for seq in range(8)]
