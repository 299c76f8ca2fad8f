"""Beam search: of several answers to one prompt the likeliest stay, whoever they continue. Owns scores, and neither cells nor a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """What a beam becomes: what beam `source` was, and one token more."""

    source: int
    token: int


@dataclass
class Beams:
    """The search of one request, as transformers' `generate(num_beams=width)` does it.

    Attributes:
        width:          answers kept at a time
        length_penalty: an ended answer's score is its log-probability divided by its length to this power; above 0 favours long ones
        scores:         log-probability of each beam; one until the first step
        ended:          (score, tokens) of answers that have ended, best first, at most `width`
    """

    width: int
    eos_ids: Collection[int]
    length_penalty: float = 1.0
    scores: list[float] = field(default_factory=lambda: [0.0])
    ended: list[tuple[float, list[int]]] = field(default_factory=list)

    def choose(self, logits: Tensor, answers: Listing[list[int]]) -> list[Step]:
        """The next token of each beam, in the order of their scores; notes which answers end.

        Args:
            logits:  [number of scores, V]
            answers: what each beam has said so far
        """
        totals = torch.log_softmax(logits.float(), dim=-1) + torch.tensor(self.scores)[:, None]
        # Each end token may be among the likeliest after every beam.
        best = totals.flatten().topk(min((1 + max(1, len(self.eos_ids))) * self.width, totals.numel()))
        steps, scores = [], []
        for rank, (score, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            source, token = divmod(place, logits.shape[1])
            if token not in self.eos_ids:
                steps.append(Step(source, token))
                scores.append(score)
            elif rank < self.width:
                self._end(score, [*answers[source], token])
            if len(steps) == self.width:
                break
        self.scores = scores
        return steps

    def is_over(self, length: int) -> bool:
        """Whether no beam of `length` tokens can become better than the ended answers, as long as it only gets less likely."""
        if len(self.ended) < self.width:
            return False
        worst, _ = self.ended[-1]
        return worst >= self._score(self.scores[0], length)

    def close(self, answers: Listing[list[int]]) -> None:
        """There is no room for more tokens: all beams end as they are."""
        for score, tokens in zip(self.scores, answers, strict=True):
            self._end(score, tokens)

    def _score(self, total: float, length: int) -> float:
        return total / float(max(length, 1) ** self.length_penalty)

    def _end(self, total: float, tokens: list[int]) -> None:
        self.ended = sorted([*self.ended, (self._score(total, len(tokens)), tokens)], key=lambda one: -one[0])[: self.width]
