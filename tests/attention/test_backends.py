"""Every backend of the folder against `reference` on random batches, and `reference` against arithmetic on plain lists."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from onekv import Batch, Buckets, ConfigError, KVCache, LayerSpec, Step, Window
from onekv.attention import Score, backend, backends, sdpa
from onekv.attention.reference import attend as reference
from onekv.attention.sdpa import attend_to_entries
from onekv.storage import KVStore
from oracle import sees
from tiny import GPU, OneDevice, Row, batch_of, on_gpu, ubatch_of

FAST = [name for name in backends() if name != "reference"]
HEADS = 4

# Options of a history (see `open_step`) and of the score. One line a feature, and everything together.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head each": {"groups": 4},
    "one key head": {"groups": 1},
    "wide values": {"value_dim": 24},
    "narrow values": {"value_dim": 3},
    "transposed values": {"v_layout": "transposed"},
    "not causal": {"causal": False},
    "sliding": {"window": Window.sliding(3)},
    "chunked": {"window": Window.chunked(4)},
    "symmetric": {"window": Window.symmetric(4)},
    "symmetric, not causal": {"window": Window.symmetric(4), "causal": False},
    "chunked, not causal": {"window": Window.chunked(3), "causal": False},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "alibi, not causal": {"alibi": True, "causal": False},
    "alibi, sliding": {"alibi": True, "window": Window.sliding(5)},
    "buckets": {"buckets": True},
    "buckets, not causal": {"buckets": True, "causal": False},
    "softcap and sinks": {"softcap": 2.0, "sinks": True, "window": Window.sliding(4)},
    "everything": {"softcap": 2.0, "sinks": True, "alibi": True, "buckets": True, "groups": 1, "value_dim": 5, "window": Window.sliding(6)},
    "everything, not causal": {"softcap": 2.0, "sinks": True, "alibi": True, "buckets": True, "causal": False, "v_layout": "transposed"},
    "bfloat16 cells": {"k_dtype": "bfloat16"},
    "float16 cells": {"k_dtype": "float16", "v_layout": "transposed"},
    "mixed cells": {"k_dtype": "bfloat16", "v_dtype": "float16", "sinks": True},
    "q8_0 cells": {"k_dtype": "q8_0"},
    "q8_0 cells, rotated": {"k_dtype": "q8_0", "hadamard": True, "sinks": True, "softcap": 2.0},
    "q4_0 cells": {"k_dtype": "q4_0", "window": Window.sliding(5)},
    "q4_0 cells, not rotated": {"k_dtype": "q4_0", "hadamard": False, "alibi": True},
    "q8_0 keys, q4_0 values": {"k_dtype": "q8_0", "v_dtype": "q4_0", "value_dim": 40},
    "q4_0 keys, float16 values": {"k_dtype": "q4_0", "v_dtype": "float16", "v_layout": "transposed"},
    "float32 keys, q8_0 values": {"k_dtype": "float32", "v_dtype": "q8_0", "groups": 1, "value_dim": 33, "buckets": True},
    "one head each of q4_0": {"k_dtype": "q4_0", "groups": 4, "causal": False},
    "bfloat16 queries": {"q_dtype": torch.bfloat16},
    "float16 queries": {"q_dtype": torch.float16, "k_dtype": "float16"},
    "float64 queries": {"q_dtype": torch.float64, "alibi": True},
}
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def score_of(softcap: float | None = None, sinks: bool = False, alibi: bool = False, buckets: bool = False, **_: Any) -> Score:
    rng = torch.Generator().manual_seed(9)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0]) if alibi else None
    table = Buckets(torch.randn(8, HEADS, generator=rng), max_distance=16, bidirectional=True) if buckets else None
    return Score(0.35, softcap, torch.randn(HEADS, generator=rng) if sinks else None, slopes, table)


@contextlib.contextmanager
def open_step(
    seed: int,
    *,
    window: Window | None = None,
    causal: bool = True,
    groups: int = 2,
    value_dim: int = 8,
    q_dtype: torch.dtype = torch.float32,
    k_dtype: str = "float32",
    v_dtype: str | None = None,
    v_layout: Any = "rows",
    hadamard: bool | None = None,
    device: str = "cpu",
    **_: Any,
) -> Iterator[tuple[Step, torch.Tensor]]:
    """An open step and its queries after a random history: sequences in shuffled cells, forks, holes, interleaved and shared rows.

    Everything the rows may not see is NaN or infinite: unused cells, and the cells of sequences that no row belongs to.
    """
    rng = np.random.default_rng(seed)
    layer = LayerSpec(groups, 8, value_dim=value_dim, window=window or Window.full())
    cache = KVCache([layer], 96, max_seqs=8, k_dtype=k_dtype, v_dtype=v_dtype, v_layout=v_layout, hadamard=hadamard, device=device)
    cells, torch_rng = cache.cells, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch_rng)

    for s in range(5):
        rows = [Row(0, int(rng.integers(0, 4)) + i, (s,)) for i in range(1)]
        rows += [Row(0, rows[0].position + i, (s,)) for i in range(1, int(rng.integers(1, 12)))]
        slots = rng.permutation(np.flatnonzero(cells.groups[0].position < 0))[: len(rows)]
        cells.commit(ubatch_of(rows), [slots])
        cache.store.store(0, torch.from_numpy(slots).to(device), random(len(rows), groups, 8), random(len(rows), groups, value_dim))
    cache.seq_cp(0, 5, -1, cells.seq_pos_max(0) - int(rng.integers(0, 3)))
    cache.seq_cp(1, 6)
    for s in (0, 2):
        hole = int(rng.integers(0, cells.seq_pos_max(s) + 1))
        cache.seq_rm(s, hole, min(hole + 2, cells.seq_pos_max(s)))
    seqs = [s for s in rng.permutation([0, 1, 2, 3, 5, 7]).tolist()[:4] if s != 1]
    sets = [(s,) for s in seqs for _ in range(int(rng.integers(1, 5)))] + [(1, 6)] * int(rng.integers(0, 3))
    order = [sets[i] for i in rng.permutation(len(sets))]
    seen: dict[int, int] = {}
    batch_rows = []
    for members in order:
        position = seen.get(members[0], cells.seq_pos_max(members[0]) + 1)
        batch_rows.append(Row(0, position, members))
        seen |= dict.fromkeys(members, position + 1)
    (step,) = cache.plan(batch_of(batch_rows), causal=causal)
    with step:
        n = len(batch_rows)
        step.store(0, random(n, groups, 8), random(n, groups, value_dim))
        mine = np.zeros(96, np.bool_)
        for members in sets:
            mine |= cells.groups[0].owned_by(members[0])
        others = torch.from_numpy(np.flatnonzero(~mine)).to(device)
        garbage = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(others.numel()) % 3][:, None, None]
        for codec, memory in ((cache.store.k_codec, cache.store.raw_keys(0)), (cache.store.v_codec, cache.store.raw_values(0))):
            memory[others] = 255 if codec.is_quantised else garbage.to(device, codec.dtype)  # bytes of ones are scales that are NaN
        yield step, random(n, HEADS, 8).to(device, q_dtype)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", FAST)
def test_backends_agree_with_the_reference(name: str, feature: str) -> None:
    options, attend = FEATURES[feature], backend(name)
    score = score_of(**options)
    for seed in range(8):
        with open_step(seed, **options) as (step, q):
            view, store = step._views[0], step.plan.cache.store
            expected, found = reference(store, 0, view, q, score), attend(store, 0, view, q, score)
            assert (found.dtype, found.shape, found.device) == (q.dtype, (len(step.ubatch), HEADS, options.get("value_dim", 8)), q.device)
            assert torch.isfinite(expected).all()
            tolerance = TOLERANCE[q.dtype]
            assert torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance), (seed, step.plan.cache.draw())


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if "q8_0" in feature or "q4_0" in feature])
@pytest.mark.parametrize("name", ["reference", *FAST])
def test_attention_over_quantised_cells_is_attention_over_their_decoded_numbers(name: str, feature: str) -> None:
    options, attend = FEATURES[feature], backend(name)
    score = score_of(**options)
    for seed in range(4):
        with open_step(seed, **options) as (step, q):
            view, cache = step._views[0], step.plan.cache
            cells = torch.from_numpy(np.flatnonzero(np.logical_or.reduce(step.mask(0))))
            plain = KVStore(cache.layers, cache.num_cells)
            k, v = cache.store.gather(0, cells)
            assert k.isfinite().all()
            assert v.isfinite().all()
            plain.write(0, cells, k, v)
            expected = reference(plain, 0, dataclasses.replace(view, _made={}), q, score)
            torch.testing.assert_close(attend(cache.store, 0, view, q, score), expected, atol=1e-5, rtol=1e-5)


# --- the padded form ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_the_padded_form_agrees_with_the_reference_on_any_device(feature: str) -> None:
    options = FEATURES[feature]
    score = score_of(**options)
    alone = 0
    for seed in range(8):
        with open_step(seed, **options) as (step, q):
            view, store = step._views[0], step.plan.cache.store
            expected, found = reference(store, 0, view, q, score), sdpa.attend_in_form(store, 0, view, q, score, padded=True)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.allclose(found.double(), expected.double(), rtol=TOLERANCE[q.dtype], atol=TOLERANCE[q.dtype])
            alone += sum(part.rows.numel() for part in sdpa.padded_of(view, store.device))
    assert alone >= 4


@contextlib.contextmanager
def decoding(
    lengths: list[int], *, window: Window | None = None, num_cells: int | None = None, forks: int = 0, device: str = "cpu", seed: int = 0
) -> Iterator[tuple[Step, torch.Tensor]]:
    """One row for each of several sequences of given lengths, and two for one more, in shuffled cells; `forks` share the first's cells.

    Cells that no row may see hold NaN.
    """
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    count = len(lengths) + forks
    cells = num_cells or sum(lengths) + count + 16
    cache = KVCache([LayerSpec(2, 8, value_dim=4, window=window or Window.full())], cells, max_seqs=count + 1, device=device)
    for s, length in enumerate(lengths):
        slots = rng.permutation(np.flatnonzero(cache.cells.groups[0].position < 0))[:length]
        cache.cells.commit(ubatch_of([Row(0, p, (s,)) for p in range(length)]), [slots])
    for s in range(len(lengths), count):
        cache.seq_cp(0, s)
    last = [*range(count), count, count]
    (step,) = cache.plan(Batch(np.zeros(len(last), np.int64), seqs=rng.permutation(last)))
    with step:
        shape = (cells, 2, 8)
        cache.store.keys(0).copy_(torch.randn(shape, generator=torch_rng))
        cache.store.values(0).copy_(torch.randn(shape, generator=torch_rng)[..., :4])
        hidden = torch.from_numpy(~step.mask(0).any(axis=0)).to(device)
        cache.store.keys(0)[hidden], cache.store.values(0)[hidden] = math.nan, math.nan
        step._stored.add(0)
        yield step, torch.randn(len(last), HEADS, 8, generator=torch_rng).to(device)


LENGTHS = [[1, 2, 3, 4, 5, 6], [40, 3, 39, 17, 1, 80, 9, 33], [5] * 6, [64]]


@pytest.mark.parametrize("window", [Window.full(), Window.sliding(7), Window.chunked(8)], ids=repr)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_decoding_sequences_of_any_lengths_agrees_in_both_forms(lengths: list[int], window: Window) -> None:
    with decoding(lengths, window=window) as (step, q):
        view, store, score = step._views[0], step.plan.cache.store, score_of()
        expected = reference(store, 0, view, q, score)
        assert torch.isfinite(expected).all()
        for padded in (True, False):
            found = sdpa.attend_in_form(store, 0, view, q, score, padded=padded)
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        parts = sdpa.padded_of(view, store.device)
        assert sorted(row for part in parts for row in part.rows.tolist()) == np.flatnonzero(view.seqs < len(lengths)).tolist()
        for part in parts:
            seen = (view.last - view.first)[part.rows.numpy()]
            assert part.cells.numel() == seen.max() * seen.size < 2 * seen.sum()
            assert part.cells.numel() <= max(store.keys(0).shape[0], seen.max())
            assert (part.mask is None) == (seen.min() == seen.max())
            assert part.mask is None or np.array_equal(part.mask.sum(dim=1), seen)


def test_rows_of_like_length_take_one_gather_and_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding([20, 17, 19, 18, 16]) as (step, q):
        view, store = step._views[0], step.plan.cache.store
        gathered, gather = [], store.gather
        monkeypatch.setattr(store, "gather", lambda layer, cells, **how: gathered.append(cells.numel()) or gather(layer, cells, **how))
        sdpa.attend_in_form(store, 0, view, q, score_of(), padded=True)
        assert gathered == [5 * 21, 2]  # and the sequence with two rows
        gathered.clear()
        sdpa.attend(store, 0, view, q, score_of())  # on a cpu each by itself
        assert sorted(gathered) == [2, 17, 18, 19, 20, 21]


def test_forks_do_not_gather_more_than_the_buffer_at_a_time() -> None:
    """Twelve sequences of 41 share 40 cells of 64: all at once would be eight times the buffer."""
    with decoding([40], num_cells=64, forks=11) as (step, q):
        view, store = step._views[0], step.plan.cache.store
        parts = sdpa.padded_of(view, store.device)
        assert [part.cells.numel() for part in parts] == [41] * 12
        found = sdpa.attend_in_form(store, 0, view, q, score_of(), padded=True)
        assert torch.allclose(found, reference(store, 0, view, q, score_of()), atol=1e-5)


def test_a_padded_row_that_sees_its_padding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    with decoding([5, 8]) as (step, q):
        view, store = step._views[0], step.plan.cache.store
        parts = [dataclasses.replace(part, mask=None) for part in sdpa.padded_of(view, store.device)]
        monkeypatch.setattr(sdpa, "padded_of", lambda *_: parts)
        wrong = sdpa.attend_in_form(store, 0, view, q, score_of(), padded=True)
        assert (wrong - reference(store, 0, view, q, score_of())).abs().max() > 0.02


@pytest.mark.parametrize("feature", FEATURES)
def test_every_tensor_of_attention_is_on_the_store_s_device(feature: str) -> None:
    """Shown without an accelerator: the meta device stands for one. It computes shapes only, and gives out no numbers."""
    score = score_of(**FEATURES[feature])
    for seed, place in enumerate(("cpu", "meta", "meta")):  # of what a model may keep beside its queries
        sinks, slopes = (None if part is None else part.to(place) for part in (score.sinks, score.alibi_slopes))
        bias = score.bias and dataclasses.replace(score.bias, table=score.bias.table.to(place))
        parts = {"softcap": score.softcap, "sinks": sinks, "alibi_slopes": slopes, "bias": bias}
        with open_step(seed, **FEATURES[feature], device="meta") as (step, q), OneDevice() as seen:
            k, v = (torch.ones(len(q), step.plan.cache.layers[0].num_kv_heads, width) for width in (8, step.plan.cache.layers[0].v_dim))
            for found in (step.attend(0, q, scale=0.3, **parts), step.attend(0, q, k, v, scale=0.3, **parts)):
                assert (found.device.type, found.dtype, found.shape) == ("meta", q.dtype, (*q.shape[:2], v.shape[2]))
            assert seen.counted["meta"] > 10


def test_other_devices_than_a_cpu_take_the_padded_form(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(sdpa, "attend_in_form", lambda *_, padded: taken.append(padded))
    for device in ("cpu", "meta"):
        with decoding([3, 4], device=device) as (step, q):
            sdpa.attend(step.plan.cache.store, 0, step._views[0], q, score_of())
    assert taken == [False, True]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("padded", [False, True])
@on_gpu
def test_attention_on_an_accelerator_agrees_with_the_reference_on_the_cpu(feature: str, padded: bool) -> None:
    options = FEATURES[feature]
    score = score_of(**options)
    for seed in range(4):
        with open_step(seed, **options) as (step, q):
            expected = reference(step.plan.cache.store, 0, step._views[0], q, score)
        with open_step(seed, **options, device=GPU) as (step, q):
            found = sdpa.attend_in_form(step.plan.cache.store, 0, step._views[0], q, score, padded=padded)
        assert found.device.type == GPU
        tolerance = max(TOLERANCE[q.dtype], 1e-4)
        assert torch.allclose(found.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_the_histories_hold_what_they_should() -> None:
    """Or the comparison above proves little."""
    found = dict.fromkeys(("forks", "holes", "interleaved", "shared", "shuffled", "single", "hidden"), 0)
    for seed in range(8):
        with open_step(seed, window=Window.sliding(3)) as (step, _):
            cells, ubatch = step.plan.cache.cells, step.ubatch
            firsts = ubatch.first_ids.tolist()
            found["forks"] += any(len(cells.groups[0].owners_of(c)) > 1 for s in firsts for c in cells.column(0, s).tolist())
            found["holes"] += any((np.diff(cells.positions(s)) > 1).any() for s in firsts)
            found["interleaved"] += sorted(firsts) != firsts
            found["shared"] += any(len(seqs) > 1 for seqs in ubatch.seqs)
            found["shuffled"] += any((np.diff(cells.column(0, s)) < 0).any() for s in firsts)
            found["single"] += any(firsts.count(s) == 1 for s in firsts)
            found["hidden"] += bool((step._views[0].first > 0).any())
    assert min(found.values()) >= 2, found


CHANGES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": None},
    "sinks": {"sinks": None},
    "alibi": {"alibi_slopes": None},
    "buckets": {"bias": None},
    "plain": {"scale": 0.7},
}


@pytest.mark.parametrize("feature", CHANGES)
@pytest.mark.parametrize("name", ["reference", *FAST])
def test_a_score_that_ignores_a_part_is_seen(name: str, feature: str) -> None:
    """Negative control: each part changes the answer by far more than the tolerance."""
    score = score_of(**FEATURES[feature])
    with open_step(0, **FEATURES[feature]) as (step, q):
        view, store = step._views[0], step.plan.cache.store
        right = reference(store, 0, view, q, score)
        wrong = backend(name)(store, 0, view, q, dataclasses.replace(score, **CHANGES[feature]))
        assert (right - wrong).abs().max() > 0.02


@pytest.mark.parametrize("name", FAST)
def test_a_range_that_is_too_long_or_too_short_is_seen(name: str) -> None:
    """Negative control: one entry more or less is far outside the tolerance."""
    with open_step(1, window=Window.sliding(3)) as (step, q):
        view, store, score = step._views[0], step.plan.cache.store, score_of()
        right = reference(store, 0, view, q, score)
        for first in (np.zeros_like(view.first), np.minimum(view.first + 1, view.last - 1), np.maximum(view.first - 1, 0)):
            wrong = backend(name)(store, 0, dataclasses.replace(view, first=first, _made={}), q, score)
            assert (right - wrong).abs().max() > 0.05


@pytest.mark.parametrize("feature", ["plain", "not causal", "sliding", "chunked", "symmetric"])
def test_the_union_of_what_rows_see_is_that_of_the_dense_mask(feature: str) -> None:
    hidden = 0
    for seed in range(8):
        with open_step(seed, **FEATURES[feature]) as (step, _):
            dense, found = step.mask(0), step._entries(0)
            seen = np.flatnonzero(dense.any(axis=0))
            assert found.cells.tolist() == seen.tolist()
            assert np.array_equal(found.mask.numpy(), dense[:, seen])
            hidden += not dense[:, seen].all()
            k, v = step._gather(0)
            assert torch.equal(k, step.plan.cache.store.keys(0)[seen])
            assert torch.equal(v, step.plan.cache.store.values(0)[seen])
            assert step._entries(0) is found
    assert hidden >= 4


@pytest.mark.parametrize("feature", ["plain", "softcap", "sinks", "softcap and sinks", "one key head", "wide values"])
def test_attention_to_the_gathered_union_is_attention_to_the_cells(feature: str) -> None:
    options = FEATURES[feature]
    for seed in range(4):
        with open_step(seed, **options) as (step, q):
            expected = reference(step.plan.cache.store, 0, step._views[0], q, score_of(**options))
            found = attend_to_entries(q, *step._gather(0), step._entries(0), score_of(**options))
            assert torch.allclose(found, expected, atol=1e-5)


def test_rows_of_one_sequence_take_nothing_from_gathered_entries_of_another() -> None:
    """Not even what no weight removes: zero times infinity."""
    with open_step(3) as (step, q):
        entries, (k, v) = step._entries(0), step._gather(0)
        right = attend_to_entries(q, k, v, entries, score_of())
        mine = entries.rows[0]
        others = ~entries.seen[mine].any(axis=0)
        assert others.any()
        k[others], v[others] = math.nan, math.inf
        assert torch.equal(attend_to_entries(q, k, v, entries, score_of())[mine], right[mine])


def by_hand(
    query: list[float], keys: list[list[float]], values: list[list[float]], distances: list[int], head: int, score: Score
) -> list[float]:
    """One query, one head, in plain Python. distances: key position minus query position."""
    logits = []
    for key, distance in zip(keys, distances, strict=True):
        logit = score.scale * sum(a * b for a, b in zip(query, key, strict=True))
        if score.softcap is not None:
            logit = score.softcap * math.tanh(logit / score.softcap)
        if score.alibi_slopes is not None:
            logit -= float(score.alibi_slopes[head]) * abs(distance)
        if score.bias is not None:
            logit += float(score.bias.bias(np.array([distance]))[head, 0])
        logits.append(logit)
    weights = [math.exp(logit) for logit in logits]
    total = sum(weights) + (math.exp(float(score.sinks[head])) if score.sinks is not None else 0.0)
    return [sum(w * v[d] for w, v in zip(weights, values, strict=True)) / total for d in range(len(values[0]))]


@pytest.mark.parametrize("feature", ["plain", "softcap", "sinks", "alibi", "buckets", "everything", "everything, not causal", "chunked"])
def test_the_reference_agrees_with_arithmetic_on_plain_lists(feature: str) -> None:
    options = FEATURES[feature]
    score, groups = score_of(**options), options.get("groups", 2)
    with open_step(2, **options) as (step, q):
        cache, view = step.plan.cache, step._views[0]
        out = reference(cache.store, 0, view, q, score)
        for i, (seq, query) in enumerate(zip(step.ubatch.first_ids.tolist(), step.ubatch.positions.tolist(), strict=True)):
            positions = cache.cells.positions(seq).tolist()
            seen = [j for j, p in enumerate(positions) if sees(options.get("window", Window.full()), p, query, options.get("causal", True))]
            keys, values = cache.keys(0, seq)[seen], cache.values(0, seq)[seen]
            for head in range(HEADS):
                group = head * groups // HEADS
                distances = [positions[j] - query for j in seen]
                expected = by_hand(q[i, head].tolist(), keys[:, group].tolist(), values[:, group].tolist(), distances, head, score)
                assert out[i, head].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_memory_order_of_what_is_passed_does_not_matter(name: str) -> None:
    cache = KVCache([LayerSpec(2, 8, value_dim=4)], 8, backend=name)
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, 3, width, generator=rng).transpose(0, 1) for heads, width in ((4, 8), (2, 8), (2, 4)))
    assert not q.is_contiguous()
    outs = []
    for change in (torch.Tensor.contiguous, lambda t: t):
        (step,) = cache.plan(Batch([1, 2, 3], seqs=[0, 0, 1]))
        with step:
            outs.append(step.attend(0, change(q), change(k), change(v), scale=0.3))
        cache.clear()
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("name", FAST)
def test_positions_with_axes_hide_what_comes_later_in_row_major_order(name: str) -> None:
    """Text at 0..2, an image of 2 x 3 patches at t = 3, text again; a second sequence beside it. Spec 4.10."""
    cache = KVCache([LayerSpec(2, 8)], 32, max_seqs=4)
    rng = torch.Generator().manual_seed(4)
    image = [[3] * 6, [3 + y for y in (0, 0, 0, 1, 1, 1)], [3 + x for x in (0, 1, 2, 0, 1, 2)], [0] * 6]
    text = [[0, 1, 2]] * 4
    more = [[6, 7]] * 4
    widths = []
    for positions in (text, image, more):
        columns = np.array(positions)
        both = np.concatenate([columns, columns[:, :2]], axis=1)
        seqs = [0] * columns.shape[1] + [1] * 2
        batch = Batch(embeddings=np.zeros((both.shape[1], 1), np.float32), seqs=seqs, positions=both)
        for step in cache.plan(batch, max_ubatch=4):
            with step:
                n = len(step.ubatch)
                q, k, v = (torch.randn(n, heads, 8, generator=rng) for heads in (4, 2, 2))
                step.store(0, k, v)
                view = step._views[0]
                expected = reference(cache.store, 0, view, q, Score(0.35))
                assert torch.allclose(backend(name)(cache.store, 0, view, q, Score(0.35)), expected, atol=1e-5)
                mine = step.ubatch.first_ids == 0
                widths += step.mask(0)[mine].sum(axis=1).tolist()
    assert widths == list(range(1, 12))


# --- the folder -------------------------------------------------------------------------------------------------------------------------


def test_every_file_of_the_folder_is_a_backend() -> None:
    assert {"reference", "sdpa"} <= set(backends())
    for name in backends():
        assert callable(backend(name))
    assert backend("auto") in [backend(name) for name in FAST]
    with pytest.raises(ConfigError, match=r"backend must be auto or one of .*reference.*got 'none'"):
        backend("none")


@pytest.mark.parametrize(("shape", "bidirectional"), [((8,), False), ((1, 4), False), ((3, 4), True), ((8, 4, 1), False)])
def test_bucket_tables_that_cannot_work_are_refused(shape: tuple[int, ...], bidirectional: bool) -> None:
    with pytest.raises(ConfigError, match=r"Buckets.table must be \[buckets, heads\]"):
        Buckets(torch.zeros(shape), bidirectional=bidirectional)


def test_a_view_computes_shared_parts_once() -> None:
    with open_step(0) as (step, _):
        view, calls = step._views[0], []
        for _ in range(3):
            assert view.once("something", lambda v: calls.append(v) or len(calls)) == 1
