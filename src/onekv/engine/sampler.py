"""Choosing the next token of one sequence from its logits, and how likely the choice was. Knows nothing of cells or text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from onekv.errors import ConfigError, OneKVError

if TYPE_CHECKING:
    from onekv.engine.guide import Guide

# (name, least, most, whether the least itself is allowed)
_RANGES: Final = (
    ("temperature", 0.0, math.inf, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("repetition_penalty", 0.0, math.inf, False),
    ("frequency_penalty", -2.0, 2.0, True),
    ("presence_penalty", -2.0, 2.0, True),
)
_MAX_BIAS: Final = 100.0
_NUCLEUS: Final = 256  # candidates looked at before the whole vocabulary is sorted for top_p


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a sequence's tokens are chosen.

    Logits are changed in this order: bias, penalties, temperature, min_p, top_k, top_p.

    Attributes:
        temperature: 0 takes the likeliest token; above, logits are divided by it and one token is drawn
        top_k:       draw among this many likeliest tokens; 0: among all
        top_p:       draw among the fewest likeliest tokens that together have at least this probability
        min_p:       draw among tokens with at least this part of the likeliest one's probability
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied
        frequency_penalty:  taken off a token's logit for each time the output has it, in [-2, 2]
        presence_penalty:   taken off the logits of all tokens that the output has, in [-2, 2]
        logit_bias:  token id to what is added to its logit, in [-100, 100]
        seed:        makes draws repeatable; None: a fresh seed
    Raises:
        ConfigError: a value that cannot work; names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, least, most, closed in _RANGES:
            value = getattr(self, name)
            if not _is_number(value) or not (least < value <= most or (closed and value == least)):
                wanted = f"at least {least:g}" if closed else f"more than {least:g}"
                wanted += "" if most == math.inf else f" and at most {most:g}"
                raise ConfigError(f"{name} must be a finite number of {wanted}, got {value!r}")
        if not _is_id(self.top_k):
            raise ConfigError(f"top_k must be an integer of at least 0 (0: all tokens), got {self.top_k!r}")
        if self.seed is not None and not (_is_id(self.seed) and self.seed < 2**63):
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")
        bias = dict(self.logit_bias)
        for token, value in bias.items():
            if not _is_id(token) or not _is_number(value) or abs(value) > _MAX_BIAS:
                raise ConfigError(f"logit_bias must take token ids to numbers in [-100, 100], got {token!r}: {value!r}")
        object.__setattr__(self, "logit_bias", bias)

    def check_ids(self, vocab_size: int) -> None:
        """Raise ConfigError if logit_bias names a token that a model of this vocabulary does not have."""
        worst = max(self.logit_bias, default=-1)
        if worst >= vocab_size:
            raise ConfigError(f"logit_bias has token id {worst}; ids of this model are below {vocab_size}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Sampler:
    """Chooses the tokens of one sequence; holds its random state and what it has chosen so far.

    Args:
        sampling: how
        prompt:   token ids before the first choice; only repetition_penalty looks at them
        guide:    what the answer must look like; from then on this sampler's own

    Cost: an argmax where nothing but temperature 0 is asked for; else a few passes over V. A full sort only for top_p without top_k, and
    then only when the likeliest tokens do not reach it.

    >>> Sampler(Sampling())(torch.tensor([0.0, 2.0, 1.0]))
    1
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = (), guide: Guide | None = None) -> None:
        self.sampling = sampling
        self.guide = guide
        self._counts_output = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self._repeats = sampling.repetition_penalty != 1
        self._prompt = torch.tensor(prompt, dtype=torch.int64) if self._repeats else torch.empty(0, dtype=torch.int64)
        self._counts: Tensor | None = None  # [V] times each token was chosen; made with the first logits
        self._seen: Tensor | None = None  # [V] whether prompt or output has it
        self._bias: tuple[Tensor, Tensor] | None = None
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """Choose the next token and remember it.

        Args:
            logits: [V], any float dtype; not changed
        Raises:
            ConfigError: logit_bias names a token beyond V.
            OneKVError: no token is left to choose.
        """
        scores = self._scores(logits)
        token = int(scores.argmax()) if self.sampling.temperature == 0 else self._draw(scores.float() / self.sampling.temperature)
        if self.guide is not None:
            if scores[token] == -math.inf:
                raise OneKVError("no token is left to choose: the guide allows none that the logits allow")
            self.guide.accept(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True
        return token

    def probabilities(self, logits: Tensor) -> Tensor:
        """What the next token is drawn by: probabilities [V], float64; at temperature 0 one of them is 1. Chooses and remembers nothing."""
        scores = self._scores(logits)
        full = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
        if self.sampling.temperature == 0:
            full[scores.argmax()] = 1
            return full
        weights, ids = self._candidates(scores.float() / self.sampling.temperature)
        weights = weights / weights.sum()
        return weights if ids is None else full.index_copy(0, ids, weights)

    def _scores(self, logits: Tensor) -> Tensor:
        """Logits [V] after bias, penalties and guide; the very same tensor where there are none."""
        sampling = self.sampling
        scores = logits
        if sampling.logit_bias:
            if self._bias is None:
                sampling.check_ids(len(logits))
                ids, values = zip(*sampling.logit_bias.items(), strict=True)
                self._bias = torch.tensor(ids, device=logits.device), torch.tensor(values, dtype=torch.float32, device=logits.device)
            scores = scores.float().index_add(0, *self._bias)
        if self._repeats:
            if self._seen is None:
                self._seen = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
                self._seen[self._prompt.to(logits.device)] = True
            scores = scores.float()
            by = sampling.repetition_penalty
            scores = torch.where(self._seen, torch.where(scores > 0, scores / by, scores * by), scores)
        if self._counts_output:
            if self._counts is None:
                self._counts = torch.zeros(len(logits), device=logits.device)
            scores = scores.float() - sampling.frequency_penalty * self._counts - sampling.presence_penalty * (self._counts > 0)
        return scores if self.guide is None else self.guide.apply(scores)

    def _draw(self, scores: Tensor) -> int:
        """One token at random from scores [V], which are logits over temperature."""
        weights, ids = self._candidates(scores)
        sums = weights.cumsum(-1)
        if not sums[-1] > 0:
            raise OneKVError("no token is left to choose: the logits are all -inf, or some are not numbers")
        at = torch.rand((), generator=self._random, dtype=torch.float64).to(sums.device) * sums[-1]
        index = torch.searchsorted(sums, at, right=True)
        return int(index if ids is None else ids[index])

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights to draw by, not normalised, and the ids they are of; None: every id, in order."""
        sampling = self.sampling
        if sampling.min_p > 0:
            scores = scores.masked_fill(scores < scores.max() + math.log(sampling.min_p), -math.inf)
        ids: Tensor | None = None
        if 0 < sampling.top_k < len(scores):
            scores, ids = scores.topk(sampling.top_k)
        weights = torch.softmax(scores, -1, dtype=torch.float64)
        if sampling.top_p < 1:
            if ids is None:
                weights, ids = _likeliest(weights, sampling.top_p)
            weights = weights.masked_fill(weights.cumsum(-1) - weights >= sampling.top_p, 0)
        return weights, ids


def _likeliest(weights: Tensor, total: float) -> tuple[Tensor, Tensor]:
    """Probabilities and ids, likeliest first, that together have at least `total`, and some more."""
    if len(weights) > _NUCLEUS:
        some, ids = weights.topk(_NUCLEUS)
        if some.sum() >= total:
            return some, ids
    return weights.sort(descending=True)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one token was.

    Attributes:
        token_id: the token
        logprob:  natural logarithm of its probability
        top:      the likeliest tokens with theirs, likeliest first
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """The log-probability of a token and of the `top` likeliest, by the model's own logits: before bias, penalties and temperature.

    Args:
        logits: [V], any float dtype
    Raises:
        ConfigError: token_id is not in [0, V), or top not in [0, V].

    >>> token_logprobs(torch.tensor([0.0, 3.0]).log(), 1, top=1)
    TokenLogprobs(token_id=1, logprob=0.0, top=((1, 0.0),))
    """
    if not 0 <= token_id < len(logits):
        raise ConfigError(f"token_id must be in [0, {len(logits)}), got {token_id}")
    if not 0 <= top <= len(logits):
        raise ConfigError(f"top must be in [0, {len(logits)}], got {top}")
    logits = logits.float()
    total = logits.logsumexp(-1)
    values, ids = logits.topk(top)
    return TokenLogprobs(token_id, float(logits[token_id] - total), tuple(zip(ids.tolist(), (values - total).tolist(), strict=True)))
