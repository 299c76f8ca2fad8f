"""Choosing tokens, and how likely they were."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from onekv import ConfigError, OneKVError
from onekv.engine.sampler import Sampler, Sampling, TokenLogprobs, token_logprobs

LOGITS = torch.tensor([0.0, math.log(3.0), -float("inf")])


def log(*weights: float) -> torch.Tensor:
    """Logits whose softmax is in the ratio of these weights."""
    return torch.tensor(weights).log()


def drawn(logits: torch.Tensor, n: int = 400, **fields: Any) -> set[int]:
    """The ids that n draws, each the first of its sampler, have come to."""
    return {Sampler(Sampling(**{"temperature": 1.0, "seed": seed, **fields}))(logits) for seed in range(n)}


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert [Sampler(Sampling())(LOGITS) for _ in range(5)] == [1] * 5


def test_draws_follow_the_softmax_of_logits_over_temperature() -> None:
    sampler = Sampler(Sampling(temperature=0.5, seed=3))
    draws = torch.tensor([sampler(LOGITS) for _ in range(4000)])
    assert (draws == 1).float().mean() == pytest.approx(9 / 10, abs=0.02)  # 3 ** (1 / 0.5) against 1
    assert not (draws == 2).any()


def test_a_seed_repeats_its_draws_and_another_does_not() -> None:
    draws = {seed: [one(LOGITS) for one in [Sampler(Sampling(temperature=1.0, seed=seed))] for _ in range(64)] for seed in (1, 2)}
    again = Sampler(Sampling(temperature=1.0, seed=1))
    assert [again(LOGITS) for _ in range(64)] == draws[1] != draws[2]


def test_top_k_keeps_the_likeliest() -> None:
    assert drawn(log(4, 1, 3, 2), top_k=1) == {0}
    assert drawn(log(4, 1, 3, 2), top_k=3) == {0, 2, 3}
    assert drawn(log(4, 1, 3, 2), top_k=9) == {0, 1, 2, 3}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert drawn(log(5, 1, 3, 1), top_p=0.01) == {0}
    assert drawn(log(5, 1, 3, 1), top_p=0.5) == {0}
    assert drawn(log(5, 1, 3, 1), top_p=0.51) == {0, 2}
    assert drawn(log(5, 1, 3, 1), top_p=1.0) == {0, 1, 2, 3}


def test_top_p_may_need_more_tokens_than_are_looked_at_first() -> None:
    probable = Sampler(Sampling(temperature=1.0, top_p=0.8995)).probabilities(torch.zeros(1000))
    assert (probable > 0).sum() == 900


def test_top_p_is_of_what_top_k_leaves() -> None:
    assert drawn(log(4, 3, 2, 1), top_k=2, top_p=0.6) == {0, 1}  # 4/7 < 0.6
    assert drawn(log(4, 3, 2, 1), top_k=2, top_p=0.5) == {0}


def test_min_p_is_a_part_of_the_likeliest_ones_probability() -> None:
    assert drawn(log(8, 4, 2, 1), min_p=0.24) == {0, 1, 2}
    assert drawn(log(8, 4, 2, 1), min_p=1.0) == {0}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), prompt=[0, 2, 0])
    assert sampler(torch.tensor([4.0, 2.5, 3.0])) == 1  # 2, 2.5, 1.5
    assert sampler(torch.tensor([4.0, 2.5, 3.0])) == 0  # 2, 1.25, 1.5
    assert sampler(torch.tensor([-1.0, -0.7, -0.9])) == 1  # -2, -1.4, -1.8
    assert Sampler(Sampling(repetition_penalty=0.5), prompt=[2])(torch.tensor([4.0, 2.5, 3.0])) == 2


def test_frequency_and_presence_penalties_look_at_the_output_only() -> None:
    for fields, expected in (
        ({"frequency_penalty": 1.0}, [0, 0, 1, 0]),  # 3, 2, 1 | 1.9, 0.9
        ({"presence_penalty": 2.0}, [0, 1, 0, 0]),  # 3 | 1, 1.9 | 1, -0.1
        ({"presence_penalty": -1.0}, [0, 0, 0, 0]),
    ):
        sampler = Sampler(Sampling(**fields), prompt=[0, 0, 0, 0])
        assert [sampler(torch.tensor([3.0, 1.9, -9.0])) for _ in range(4)] == expected


def test_logit_bias_is_added_for_greedy_choices_and_for_draws() -> None:
    assert Sampler(Sampling(logit_bias={0: 1.2}))(LOGITS) == 0
    assert Sampler(Sampling(logit_bias={1: -100}))(LOGITS) == 0
    assert drawn(log(1, 1), logit_bias={0: -100.0}) == {1}
    assert Sampler(Sampling(logit_bias={2: 100}))(LOGITS) == 1  # what cannot come stays so


def test_logit_bias_of_an_unknown_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="logit_bias has token id 3"):
        Sampler(Sampling(logit_bias={3: 1.0}))(LOGITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_not_changed(dtype: torch.dtype) -> None:
    logits = torch.tensor([3.0, 1.0, 2.0], dtype=dtype)
    guide: Any = SimpleNamespace(apply=lambda scores: scores.clone(), accept=lambda token: None)
    fields: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 2, "top_p": 0.9, "min_p": 0.1}]
    for more in fields:
        sampler = Sampler(
            Sampling(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={1: 2.0}, **more), [2], guide
        )
        for _ in range(3):
            sampler(logits)
    assert logits.tolist() == [3.0, 1.0, 2.0]


def test_a_guide_is_followed_and_told_of_each_choice() -> None:
    told: list[int] = []

    def only(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda scores: scores.masked_fill(torch.arange(3) != token, -math.inf)

    guide: Any = SimpleNamespace(apply=only(0), accept=told.append)
    assert Sampler(Sampling(logit_bias={1: 50.0}, frequency_penalty=2.0), guide=guide)(LOGITS) == 0
    assert Sampler(Sampling(temperature=2.0), guide=guide)(LOGITS) == 0
    assert told == [0, 0]
    guide.apply = only(2)
    for temperature in (0.0, 1.0):
        with pytest.raises(OneKVError, match="no token is left"):
            Sampler(Sampling(temperature=temperature), guide=guide)(LOGITS)
    assert told == [0, 0]


def test_logits_that_are_no_numbers_are_an_error_and_no_token() -> None:
    with pytest.raises(OneKVError, match="no token is left"):
        Sampler(Sampling(temperature=1.0))(torch.full((4,), math.nan))


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": value} for value in (-0.1, math.nan, math.inf, True, "1")),
        *({"top_k": value} for value in (-1, 1.5, True)),
        *({"top_p": value} for value in (0.0, 1.1, math.nan)),
        *({"min_p": value} for value in (-0.1, 1.1)),
        *({"repetition_penalty": value} for value in (0.0, -1.0, math.inf)),
        *({name: value} for name in ("frequency_penalty", "presence_penalty") for value in (-2.1, 2.1, math.nan)),
        *({"logit_bias": value} for value in ({-1: 0.0}, {0: 100.5}, {0: math.nan}, {"0": 1.0}, {0: None})),
        *({"seed": value} for value in (-1, 2**63, 0.5)),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Sampling(**settings)


def test_settings_can_be_compared_hashed_and_do_not_follow_the_callers_bias() -> None:
    bias = {1: 2.0}
    one = Sampling(logit_bias=bias)
    bias[1] = 3.0
    assert one == Sampling(logit_bias={1: 2.0})
    assert hash(one) == hash(Sampling(logit_bias={1: 2.0}))
    assert one != Sampling()


# --- the slow twin ------------------------------------------------------------------------------------------------------------------


def plain_probabilities(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """The distribution a token is drawn from, in plain Python."""
    counts = Counter(output)
    scores = {}
    for i, x in enumerate(logits):
        x += sampling.logit_bias.get(i, 0.0)
        if i in prompt or i in counts:
            x = x / sampling.repetition_penalty if x > 0 else x * sampling.repetition_penalty
        x -= sampling.frequency_penalty * counts[i] + sampling.presence_penalty * (counts[i] > 0)
        scores[i] = x / sampling.temperature
    best = max(scores.values())
    weights = {i: math.exp(x - best) for i, x in scores.items()}
    weights = {i: w for i, w in weights.items() if w >= sampling.min_p}
    order = sorted(weights, key=lambda i: -weights[i])[: sampling.top_k or None]
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if reached >= sampling.top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_probabilities_are_those_of_a_plain_twin(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([2, 7, 300]))
    # Binary fractions, so that no value lies on the other side of a threshold for being float32 here and float64 there.
    logits = (torch.randn(size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))) * 3 * 2**18).round() / 2**18
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([0, 0, 1, 3, 1000])),
        top_p=data.draw(st.sampled_from([1.0, 0.3, 0.77, 0.9999])),
        min_p=data.draw(st.sampled_from([0.0, 0.0, 0.03, 0.5])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 2.0, 0.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.75, -0.5])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.25])),
        logit_bias=data.draw(st.sampled_from([{}, {0: 2.0, 1: -3.5}])),
        seed=data.draw(st.integers(0, 10**6)),
    )
    prompt = data.draw(st.lists(st.integers(0, size - 1), max_size=4))
    sampler = Sampler(sampling, prompt)
    output: list[int] = []
    for _ in range(4):
        weights = torch.tensor(plain_probabilities(logits.tolist(), sampling, prompt, output), dtype=torch.float64)
        assert torch.allclose(sampler.probabilities(logits), weights, rtol=1e-4, atol=1e-9)
        output.append(sampler(logits))
        assert weights[output[-1]] > 0


def test_draws_are_as_frequent_as_probable() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(5)) * 2
    for fields in ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5}):
        sampling = Sampling(**{"temperature": 1.0, "seed": 7, **fields})  # type: ignore[arg-type]
        sampler, n = Sampler(sampling), 2000
        counts = torch.zeros(500)
        for _ in range(n):
            counts[sampler(logits)] += 1
        weights = torch.tensor(plain_probabilities(logits.tolist(), sampling, [], []))
        assert not counts[weights == 0].any()
        assert torch.allclose(counts / n, weights, atol=4 * math.sqrt(0.25 / n))


def test_looking_at_probabilities_changes_no_draw() -> None:
    one, other = (Sampler(Sampling(temperature=1.0, frequency_penalty=1.0, seed=3)) for _ in range(2))
    logits = torch.zeros(20)
    for _ in range(10):
        other.probabilities(logits)
        assert one(logits) == other(logits)
    assert Sampler(Sampling()).probabilities(LOGITS).tolist() == [0.0, 1.0, 0.0]


# --- log-probabilities --------------------------------------------------------------------------------------------------------------


def test_log_probabilities_are_of_the_raw_logits_likeliest_first() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    expected = logits.double().log_softmax(-1)
    entry = token_logprobs(logits, 3, top=5)
    assert entry.token_id == 3
    assert entry.logprob == pytest.approx(float(expected[3]), abs=1e-5)
    assert [i for i, _ in entry.top] == expected.argsort(descending=True)[:5].tolist()
    assert [value for _, value in entry.top] == pytest.approx(expected.sort(descending=True).values[:5].tolist(), abs=1e-5)
    assert token_logprobs(logits, 3, top=0) == TokenLogprobs(3, entry.logprob, ())


def test_log_probabilities_of_impossible_tokens_are_minus_infinity() -> None:
    assert token_logprobs(LOGITS, 2, top=3).logprob == -math.inf


@pytest.mark.parametrize(("token", "top", "match"), [(3, 1, "token_id"), (-1, 1, "token_id"), (0, 4, "top"), (0, -1, "top")])
def test_log_probabilities_out_of_range_are_refused(token: int, top: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        token_logprobs(LOGITS, token, top)
