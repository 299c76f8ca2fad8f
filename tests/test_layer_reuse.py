"""Layers that read another layer's cells: the map of a real family, and that such a layer owns nothing and changes nothing."""

import io
from typing import Any

import pytest
import torch

from onekv import ConfigError, KVCache, LayerSpec, OneKVError, Window
from tiny import T, batch_of, feed_layers, toy_keys, toy_layer, toy_values

SLIDING = Window.sliding(4)


def gemma3n(num_layers: int) -> list[LayerSpec]:
    """Every fifth layer is full; from the 20th on, layers read the last owner of their own kind."""

    def spec(i: int) -> LayerSpec:
        is_full = i % 5 == 4
        source = None if i < 20 else 19 if is_full else 18
        return toy_layer(Window.full() if is_full else SLIDING, source)

    return [spec(i) for i in range(num_layers)]


@pytest.mark.parametrize("num_layers", [30, 35])
def test_spec_M07_gemma3n_keeps_twenty_layers_in_two_groups(num_layers: int) -> None:
    cache = KVCache(gemma3n(num_layers), 8, max_seqs=4)
    groups = [group["layers"] for group in cache.stats()["groups"]]
    assert groups == [[4, 9, 14, 19], [*range(4), *range(5, 9), *range(10, 14), *range(15, 19)]]
    assert cache.store.physical == list(range(20))
    full = [i for i in range(20, num_layers) if i % 5 == 4]
    assert full == [24, 29, 34][: len(full)]
    assert {cache.store.owner[i] for i in full} == {19}
    assert {cache.store.owner[i] for i in range(20, num_layers) if i not in full} == {18}
    assert cache.nbytes == 20 * 8 * 3 * 4  # cells of three floats


def test_spec_M07_writing_to_a_reading_layer_is_refused() -> None:
    cache = KVCache(gemma3n(30), 8, max_seqs=4)
    (step,) = cache.plan(batch_of("0:0"))
    with pytest.raises(ConfigError, match="layer 20 reads the cells of layer 18 and never writes"), step:
        step.store(20, toy_keys([0]), toy_values([0]))
    assert cache.num_used == 0


FOUR = [toy_layer(), toy_layer(SLIDING), toy_layer(source=0), toy_layer(SLIDING, source=1)]
PIECES = {
    "three, then one": [T([1, 2, 3], 0, 0), T([4], 0, 3)],
    "four at once": [T([1, 2, 3, 4], 0, 0)],
    "one by one": [T([p + 1], 0, p) for p in range(4)],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=list(PIECES))
def test_case_G03_reading_layers_see_their_source_including_the_current_rows(pieces: list[Any]) -> None:
    cache = KVCache(FOUR, 8, max_seqs=4)
    outputs: list[list[float]] = [[], [], [], []]
    for piece in pieces:
        for layer, fed in enumerate(feed_layers(cache, piece)):
            outputs[layer] += fed.outputs
    assert outputs == [[1.0, 1.5, 2.0, 2.5]] * 4
    for reader, source in ((2, 0), (3, 1)):
        assert torch.equal(cache.keys(reader, 0), cache.keys(source, 0))
        assert torch.equal(cache.values(reader, 0), cache.values(source, 0))


def test_case_G03_memory_files_and_steps_count_physical_layers_once() -> None:
    cache, owners = KVCache(FOUR, 8, max_seqs=4), KVCache(FOUR[:2], 8, max_seqs=4)
    assert cache.nbytes == owners.nbytes
    assert [group["layers"] for group in cache.stats()["groups"]] == [[0], [1]]
    sizes = []
    for one in (cache, owners):
        feed_layers(one, "0:0..3")
        file = io.BytesIO()
        one.save(file)
        sizes.append(file.getvalue().count(b"data_offsets"))
    assert sizes[0] == sizes[1]
    (step,) = cache.plan(batch_of("0:4"))
    with step:  # storing the owners is enough for the step to stand
        for layer in (0, 1):
            step.store(layer, toy_keys([4]), toy_values([4]))
    assert cache.seq_pos_max(0) == 4


def test_a_shift_and_a_compaction_move_the_keys_of_an_owner_once() -> None:
    cache = KVCache(FOUR, 8, max_seqs=4)
    feed_layers(cache, "1:0 0:0..3")
    cache.seq_rm(1)
    cache.seq_add(0, 0, -1, 5)
    assert cache.compact() == 2  # one cell in each group
    for layer in range(4):
        torch.testing.assert_close(cache.keys(layer, 0), toy_keys(range(5, 9)), atol=1e-5, rtol=0)


def test_a_reading_layer_attends_only_after_its_source_was_stored() -> None:
    cache = KVCache(FOUR, 8, max_seqs=4)
    (step,) = cache.plan(batch_of("0:0"))
    with pytest.raises(OneKVError, match="layer 2 attends before layer 0 was stored"), step:
        step.attend(2, torch.zeros(1, 1, 2), scale=1.0)


def test_a_chain_of_sources_leads_to_the_owner() -> None:
    cache = KVCache([toy_layer(), toy_layer(source=0), toy_layer(source=1)], 8, max_seqs=4)
    assert cache.store.owner == [0, 0, 0]
    assert [fed.outputs for fed in feed_layers(cache, T([1, 2], 0, 0))] == [[1.0, 1.5]] * 3
