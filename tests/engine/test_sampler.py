"""Choosing tokens."""

from __future__ import annotations

import math

import pytest
import torch

from onekv import ConfigError
from onekv.engine.sampler import Sampler, Sampling

LOGITS = torch.tensor([0.0, math.log(3.0), -float("inf")])


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert [Sampler(Sampling())(LOGITS) for _ in range(5)] == [1] * 5


def test_draws_follow_the_softmax_of_logits_over_temperature() -> None:
    sampler = Sampler(Sampling(temperature=0.5, seed=3))
    draws = torch.tensor([sampler(LOGITS) for _ in range(4000)])
    assert (draws == 1).float().mean() == pytest.approx(9 / 10, abs=0.02)  # 3 ** (1 / 0.5) against 1
    assert not (draws == 2).any()


def test_a_seed_repeats_its_draws_and_another_does_not() -> None:
    draws = {seed: [one(LOGITS) for one in [Sampler(Sampling(1.0, seed))] for _ in range(64)] for seed in (1, 2)}
    again = Sampler(Sampling(1.0, 1))
    assert [again(LOGITS) for _ in range(64)] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"seed": -1}, {"seed": 2**63}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]
