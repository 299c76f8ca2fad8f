"""What only the compiled backend does: reading in place, sharing, cutting rows for workers, and results fixed to the bit."""

from typing import Any

import numpy as np
import pytest
import torch

from onekv import Batch, Buckets, ConfigError, KVCache, LayerSpec, Window
from onekv.attention import Score, backend
from onekv.attention.cpu import attend as cpu
from onekv.attention.reference import attend as reference
from onekv.core import vectors
from onekv.core.spans import BLOCK

GROUPS, HEADS, WIDTH = 2, 6, 16


def fed(cache: KVCache, seq: int, tokens: list[int], max_ubatch: int = 512) -> None:
    """Keys and values that depend on the token and its position alone, as a model's would on its prefix."""
    start = cache.seq_pos_max(seq) + 1
    for step in cache.plan(Batch(tokens, seqs=seq, outputs=[False] * len(tokens)), max_ubatch=max_ubatch):
        with step:
            step.store(0, *made(np.asarray(step.ubatch.tokens), np.asarray(step.ubatch.positions)))
    assert cache.seq_pos_max(seq) == start + len(tokens) - 1


def made(tokens: Any, positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
        rows.append(torch.randn(2, GROUPS, WIDTH, generator=torch.Generator().manual_seed(7919 * token + position)))
    both = torch.stack(rows)
    return both[:, 0], both[:, 1]


def queries_of(seq: int, positions: list[int]) -> torch.Tensor:
    return torch.stack([torch.randn(HEADS, WIDTH, generator=torch.Generator().manual_seed(31 * seq + p)) for p in positions])


def family(cache: KVCache, order: list[int], lengths: dict[int, int]) -> None:
    """Five conversations: 1 and 2 fork 0 after 300 tokens, 3 forks 2 after 400, 4 shares nothing."""
    rng = np.random.default_rng(0)
    text = {s: rng.integers(1, 50, 700).tolist() for s in range(5)}
    fed(cache, 0, text[0][:300])
    for s in (1, 2):
        cache.seq_cp(0, s)
    fed(cache, 2, text[2][: 400 - 300])
    cache.seq_cp(2, 3)
    for s in order:
        have = cache.seq_pos_max(s) + 1
        if lengths[s] > have:
            fed(cache, s, text[s][have : lengths[s]])


LENGTHS = {0: 301, 1: 600, 2: 431, 3: 520, 4: 90}


@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16",), ("float16", "float32"), ("q8_0",), ("q8_0", "q4_0")], ids=str)
@pytest.mark.parametrize("window", [Window.full(), Window.sliding(200)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_shared_and_long_rows_agree_with_the_reference(dtypes: tuple[str, ...], window: Window, threads: int) -> None:
    cache = KVCache([LayerSpec(GROUPS, WIDTH, window=window)], 2500, k_dtype=dtypes[0], v_dtype=dtypes[-1])
    family(cache, [4, 3, 0, 1, 2], LENGTHS)
    rows = [0, 1, 1, 2, 3, 3, 3, 3, 3, 4]
    scores = [Score(0.3), Score(0.3, softcap=2.0, sinks=torch.linspace(-1, 1, HEADS), alibi_slopes=torch.linspace(0, 0.1, HEADS))]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in cache.plan(Batch([5] * len(rows), seqs=rows)):
            with step:
                step.store(0, *made(np.asarray(step.ubatch.tokens), np.asarray(step.ubatch.positions)))
                q = torch.cat([queries_of(s, [i]) for i, s in enumerate(rows)])
                for score in scores:
                    expected = reference(cache.store, 0, step._views[0], q, score)
                    torch.testing.assert_close(cpu(cache.store, 0, step._views[0], q, score), expected, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_one_long_row_cut_for_two_workers_agrees_with_the_reference() -> None:
    cache = KVCache([LayerSpec(GROUPS, WIDTH)], 800)
    fed(cache, 0, list(range(1, 700)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for step in cache.plan(Batch([5])):
            with step:
                step.store(0, *made(np.array([5]), np.array([699])))
                q = queries_of(0, [0])
                expected = reference(cache.store, 0, step._views[0], q, Score(0.3))
                torch.testing.assert_close(cpu(cache.store, 0, step._views[0], q, Score(0.3)), expected, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def answers(cache: KVCache, rows: list[int], threads: int = 1, asks: int | None = None) -> dict[tuple[int, int], torch.Tensor]:
    """Attention of one more token (or several) of each sequence, by sequence and position; the tokens are removed again.

    asks: whose queries to use, and name in the answer, where all rows are of one sequence; None: its own.
    """
    found = {}
    torch.set_num_threads(threads)
    for step in cache.plan(Batch([5] * len(rows), seqs=rows, outputs="all")):
        with step:
            tokens, positions = np.asarray(step.ubatch.tokens), np.asarray(step.ubatch.positions)
            seqs = [ids[0] if asks is None else asks for ids in step.ubatch.seqs]
            k, v = made(tokens, positions)
            q = torch.cat([queries_of(s, [p]) for s, p in zip(seqs, positions.tolist(), strict=True)])
            out = step.attend(0, q, k, v, scale=0.3, sinks=torch.linspace(-1, 1, HEADS))
            found |= {(s, p): row for s, p, row in zip(seqs, positions.tolist(), out, strict=True)}
    for s in set(rows):
        cache.seq_rm(s, cache.seq_pos_max(s) + 1 - rows.count(s), -1)
    torch.set_num_threads(1)
    return found


@pytest.mark.parametrize("window", [Window.full(), Window.sliding(200)], ids=str)
@pytest.mark.parametrize("k_dtype", ["float32", "bfloat16"])
def test_a_deterministic_cache_gives_the_same_bits_whatever_else_is_there(window: Window, k_dtype: str) -> None:
    """Alone or with others, computed or shared, in whatever cells, one row or several in a step, with one thread or two."""
    spec = LayerSpec(GROUPS, WIDTH, window=window)
    together = KVCache([spec], 2500, deterministic=True, k_dtype=k_dtype)
    family(together, [4, 3, 0, 1, 2], LENGTHS)
    expected: dict[tuple[int, int], torch.Tensor] = {}
    for s, length in LENGTHS.items():
        alone = KVCache([spec], 700, deterministic=True, k_dtype=k_dtype)
        # The same tokens at the same positions, in a buffer of its own; nothing shared, so the keys are computed anew.
        fed(alone, 0, together.cells.tokens(s).tolist(), max_ubatch=37)
        assert alone.seq_pos_max(0) == length - 1
        expected |= answers(alone, [0, 0, 0], asks=s)
    batches = [[0, 1, 2, 3, 4], [3, 3, 3, 2], [1], [4, 0, 0, 1, 1, 1, 2, 2, 3], [2, 1]]
    checked = 0
    for rows in batches:
        for threads in (1, 2):
            for key, row in answers(together, rows, threads).items():
                assert torch.equal(row, expected[key]), (rows, threads, key)
                checked += 1
    assert checked == 2 * sum(len(rows) for rows in batches)


def test_without_determinism_sharing_does_change_bits() -> None:
    """The control of the test above: if this fails, that one proves nothing."""
    cache = KVCache([LayerSpec(GROUPS, WIDTH)], 2500)
    family(cache, [4, 3, 0, 1, 2], LENGTHS)
    together, alone = answers(cache, [0, 1, 2, 3, 4]), answers(cache, [3])
    assert not torch.equal(together[3, LENGTHS[3]], alone[3, LENGTHS[3]])
    torch.testing.assert_close(together[3, LENGTHS[3]], alone[3, LENGTHS[3]], rtol=1e-5, atol=1e-5)


def test_deterministic_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"deterministic=True needs the cpu backend.*sdpa"):
        KVCache([LayerSpec(1, 16)], 8, deterministic=True, backend="sdpa")
    with pytest.raises(ConfigError, match="recurrent"):
        KVCache([LayerSpec(1, 16), LayerSpec(0, 0, states=((4,),))], 8, deterministic=True)
    with pytest.raises(ConfigError, match="cpu backend cannot attend on cuda"):
        backend("cpu", "cuda")
    cache = KVCache([LayerSpec(1, 16)], 8, deterministic=True)
    buckets = Buckets(torch.zeros(8, 1))
    (step,) = cache.plan(Batch([1]))
    one = torch.zeros(1, 1, 16)
    with step, pytest.raises(ConfigError, match="learned position bias"):
        step.attend(0, one, one, one, scale=1.0, bias=buckets)


def test_auto_is_the_compiled_backend_on_a_cpu_and_torch_elsewhere() -> None:
    assert backend("auto", "cpu") is cpu
    assert backend("auto", "cuda").__module__ == "onekv.attention.sdpa"


def test_exp_and_tanh_are_within_a_few_units_in_the_last_place() -> None:
    x = -np.geomspace(1e-6, 87, 4001).astype(np.float32)
    assert vectors.exp(np.float32(0)) == 1
    assert vectors.exp(np.float32(-1e30)) < 1e-37
    for name, exact, points in (("exp", np.exp, x), ("tanh", np.tanh, np.concatenate([x, -x]))):
        found = np.array([getattr(vectors, name)(value) for value in points])
        error = np.abs(found / exact(points.astype(np.float64)) - 1)
        assert error.max() < 5e-7, (name, points[error.argmax()])


def test_a_lone_row_reads_only_its_own_cells() -> None:
    """Everything else in the buffer is NaN."""
    cache = KVCache([LayerSpec(GROUPS, WIDTH)], 3 * BLOCK)
    cache.store.write(0, torch.arange(3 * BLOCK), torch.full((3 * BLOCK, GROUPS, WIDTH), float("nan")))
    fed(cache, 0, list(range(1, 150)))
    assert torch.isfinite(torch.stack(list(answers(cache, [0]).values()))).all()
