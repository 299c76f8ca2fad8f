"""What the original's memory contexts and status codes are for, in our form: plans, errors, sizes; and the lines for debugging."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onekv import ConfigError, KVCache, LayerSpec, Window
from onekv.config import MAX_SEQS
from tiny import batch_of, cells_text, feed, feed_layers, head_of, kv_of, same_kv, state_of, toy, toy_kv, toy_layer


def test_spec_C02_the_worst_step_is_a_number_and_reserves_nothing() -> None:
    wide = LayerSpec(num_kv_heads=2, head_dim=8, value_dim=4, window=Window.sliding(4))
    cache = KVCache([toy_layer(), wide], 100, window_cells=40, max_seqs=4)
    before = state_of(cache)
    full, windowed = 100 * (4 * 1 * 3), 40 * (4 * 2 * 12)
    assert cache.max_step_nbytes(1) == windowed + 40
    assert cache.max_step_nbytes(64) == full + 64 * 100  # the layer that needs most is another one
    assert state_of(cache) == before


def test_spec_C02_the_worst_step_counts_the_decoding_of_quantised_cells() -> None:
    cache = KVCache([LayerSpec(2, 40, value_dim=64)], 100, k_dtype="q8_0", v_dtype="q4_0")
    k, v = 4 * 64 + 2 * (34 + 4), 4 * 64 + 2 * (18 + 4) + 64  # two blocks each: numbers, stored bytes, float32 scales, nibbles apart
    assert cache.max_step_nbytes(8) == 100 * 2 * (k + v) + 8 * 100


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("backed", [False, True], ids=["empty", "after others"])
def test_spec_C07_a_failed_step_leaves_no_sequence_a_row_it_did_not_compute(error: type[BaseException], backed: bool) -> None:
    cache = toy(8)
    if backed:
        feed(cache, "2:0..1")
    before, kv = state_of(cache), kv_of(cache, [2])
    (step,) = cache.plan(batch_of("(0,{0,1}) (1,{0,1}) (2,{0})"))
    with pytest.raises(error), step:
        raise error
    assert state_of(cache) == before
    assert same_kv(kv_of(cache, [2]), kv)
    assert cache.cells.present() == [2] * backed


def test_spec_C06_the_second_of_two_steps_fails_and_the_first_stays() -> None:
    cache = toy(32)
    feed(cache, "0:0..7")
    one, two = cache.plan(batch_of("0:8..13"), max_ubatch=4)
    with one:
        one.store(0, *toy_kv(one.ubatch))
    with pytest.raises(ZeroDivisionError), two:
        raise ZeroDivisionError
    assert cells_text(cache).split()[:13] == [*(f"{p}{{0}}" for p in range(12)), "."]
    assert head_of(cache) == 12


@pytest.mark.parametrize("num_cells", [1, 33, 100, 256, 257])
@pytest.mark.parametrize("v_layout", ["rows", "transposed"])
def test_spec_C10_a_buffer_has_the_size_that_was_asked_for(num_cells: int, v_layout: Any) -> None:
    for backend in ("sdpa", "reference"):
        cache = toy(num_cells, v_layout=v_layout, backend=backend)
        assert cache.num_cells == num_cells
        assert cache.nbytes == num_cells * 3 * 4
    feed_layers(cache, f"0:0..{num_cells - 1}", max_ubatch=100)
    assert cache.num_free == 0


@pytest.mark.parametrize("max_seqs", [0, -1, MAX_SEQS + 1, 1.0, None])
def test_spec_C10_the_number_of_sequences_has_limits(max_seqs: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_seqs must be an integer from 1 to {MAX_SEQS}"):
        toy(8, max_seqs=max_seqs)
    feed(toy(2, max_seqs=MAX_SEQS), f"{MAX_SEQS - 1}:0")


# --- debug lines ------------------------------------------------------------------------------------------------------------------------


def test_every_search_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    cache = toy(8, Window.full(), Window.sliding(4), window_cells=4)
    with caplog.at_level(logging.DEBUG, "onekv.placement"):
        feed(cache, "0:0..2")
    assert caplog.messages == [
        "Window.full(): 3 rows from head 0, 0 of 8 cells used: [0, 1, 2]",
        "Window.sliding(4): 3 rows from head 0, 0 of 4 cells used: [0, 1, 2]",
    ]


RUN = """
import sys
sys.path.insert(0, "tests")
from tiny import feed, toy
feed(toy(4), "0:0..2")
"""


@pytest.mark.parametrize(("level", "lines", "drawn"), [("1", 1, False), ("2", 3, True)])
def test_onekv_debug_logs_searches_and_then_draws_the_cells(level: str, lines: int, drawn: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**os.environ, "ONEKV_DEBUG": level},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = done.stderr.splitlines()
    assert len(told) == lines
    assert ("Window.full(): 3 rows from head 0, 0 of 4 cells used: [0, 1, 2]" in told) == (lines > 0)
    assert ("0{0} 1{0} 2{0} ." in told) == drawn


def test_a_float16_cache_says_half_the_bytes() -> None:
    cache = toy(8, k_dtype="float16")
    assert cache.nbytes == 8 * 3 * 2
    feed(cache, "0:0..1")
    assert cache.store.keys(0).dtype == torch.float16
