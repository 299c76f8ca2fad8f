"""What is asked of the engine, and what it answers: a request, its events, its stream.

A request is data. A stream may be read from any thread; the engine's thread writes it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

from onekv.cache import ContextShift
from onekv.config import check_least
from onekv.core.prefix import Difference, Key, checked_key
from onekv.engine.guide import Guide
from onekv.engine.sampler import Sampling, TokenLogprobs
from onekv.engine.session import Session
from onekv.errors import BatchError, ConfigError

FinishReason = Literal["stop", "length", "cancelled"]
_log = logging.getLogger("onekv.engine")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how its answers are made. Checked when built, as far as it can be without a model.

    Attributes:
        prompt:      token ids, at least one
        sampling:    how tokens are chosen; choice i of n draws with seed + i
        max_tokens:  most tokens of an answer, the end token included; None: as many as fit. 0 only with `prompt_logprobs`
        stop:        texts that end an answer; they are not part of it
        stop_ids:    token ids that end an answer, besides the model's own; they are not part of its text
        ignore_eos:  go on after the model's end tokens
        n:           answers; they share the cells of the prompt
        beams:       0, or how many answers a beam search keeps; the n best are given, whole and at the end. Takes no sampling, stop texts,
                     log-probabilities, guide, session or context shift
        length_penalty: of a beam search: an answer's log-probability is divided by its length to this power
        logprobs:    for each token of an answer its log-probability and those of so many likeliest ones; None: none
        prompt_logprobs: the same for the prompt's tokens, which are then all evaluated
        guide:       allows only some tokens, by a grammar
        key:         what else changes keys and values, each part with a tag, such as (("salt", "x"),); shared only between equal keys
        points:      lengths of beginnings of the prompt that shall stay restorable where windows or recurrent states make that a matter of
                     choice: the end of the system prompt, of each turn
        context_shift: at the limit the oldest tokens give way, instead of the answer ending; None: as the engine does
        session:     goes on in this session, and leaves it with prompt and answer
        special:     write special tokens, too, into the text
        explain:     say where the prompt and what was held part
    Raises:
        ConfigError, BatchError: names the field.
    """

    prompt: tuple[int, ...]
    _: KW_ONLY
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    beams: int = 0
    length_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    guide: Guide | None = None
    key: Key = ()
    points: tuple[int, ...] = ()
    context_shift: ContextShift | None = None
    session: Session | None = None
    special: bool = False
    explain: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt", "stop", "stop_ids", "points"):
            listed = getattr(self, name)
            if isinstance(listed, str) or not isinstance(listed, Iterable):
                raise (BatchError if name == "prompt" else ConfigError)(f"{name} must be a list, got {listed!r}")
            object.__setattr__(self, name, tuple(listed))
        if not self.prompt:
            raise BatchError("a prompt needs at least one token, got none")
        for token in (*self.prompt, *self.stop_ids):
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise BatchError(f"a token id must be a non-negative integer, got {token!r}")
        for name, value, kind in (
            ("sampling", self.sampling, Sampling),
            ("guide", self.guide, Guide),
            ("context_shift", self.context_shift, ContextShift),
            ("session", self.session, Session),
        ):
            if not isinstance(value, kind) and (value is not None or name == "sampling"):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")
        limits: tuple[tuple[str, Any, int], ...] = (
            ("max_tokens", self.max_tokens, 0 if self.prompt_logprobs else 1),
            ("n", self.n, 1),
            ("beams", self.beams, 0),
            ("logprobs", self.logprobs, 0),
        )
        for name, value, least in limits:
            if value is None and name in ("max_tokens", "logprobs"):
                continue
            check_least(name, value, least)
        for point in self.points:
            if isinstance(point, bool) or not isinstance(point, int):
                raise ConfigError(f"points are lengths of the prompt's beginnings, integers; got {point!r}")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not math.isfinite(penalty):
            raise ConfigError(f"length_penalty must be a finite number, got {penalty!r}")
        checked_key(self.key)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop takes non-empty strings, got {text!r}")
        if self.beams:
            self._check_beams()
        if self.session is not None and self.n != 1:
            raise ConfigError(f"a session goes on with one answer, n is {self.n}")
        if self.session is not None and self.session.key != self.key:
            raise ConfigError(f"the session was made for key {self.session.key}, the request has {self.key}")

    def _check_beams(self) -> None:
        if self.n > self.beams:
            raise ConfigError(f"a search with beams={self.beams} gives at most as many answers, n is {self.n}")
        plain = Sampling(temperature=0.0, seed=self.sampling.seed)
        for name, value in (
            ("sampling", None if self.sampling == plain else self.sampling),
            ("stop", self.stop or None),
            ("logprobs", self.logprobs),
            ("prompt_logprobs", self.prompt_logprobs or None),
            ("guide", self.guide),
            ("session", self.session),
            ("context_shift", self.context_shift),
        ):
            if value is not None:
                raise ConfigError(f"a beam search takes no {name}, got {value!r}")


# --- events ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt begins to be evaluated.

    Attributes:
        prompt_tokens: its length
        cached_tokens: how many of them were not evaluated, because their cells were there; always less than all
        explanation:   where prompt and held tokens part, if that was asked for
    """

    prompt_tokens: int
    cached_tokens: int
    explanation: Difference | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """One entry for each token of the prompt; None for the first, which nothing precedes."""

    entries: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """More of an answer: text, and the tokens whose text is complete with it. `logprobs` has one entry a token, if they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer has ended."""

    index: int
    reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request that did not fail. Seconds are counted from `submit`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queued_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that failed."""

    error: BaseException


Event = Started | PromptLogprobs | Delta | Finished | Done | Failed


@dataclass(slots=True)
class Choice:
    """One answer, whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass(slots=True)
class Result:
    """All answers of a request.

    Attributes:
        usage: the counts and times
    """

    choices: list[Choice]
    usage: Done
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    explanation: Difference | None = None

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first answer."""
        return self.choices[0].token_ids


class Stream:
    """The events of one request, in order; the last one is a `Done` or a `Failed`. Iterate it, or take `result()`, or `listen`."""

    def __init__(self, request: Request, cancel: Callable[[Stream], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._lock = threading.RLock()  # a listener may ask for another one
        self._listener: Callable[[Event], None] | None = None

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Done | Failed):
                return

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Hand every event, those that are there included, to a function instead. It is called on the engine's thread; it must not wait.
        If it raises there, it is not called again, and the request is cancelled."""
        with self._lock:
            while not self._events.empty():
                callback(self._events.get())
            self._listener = callback

    def cancel(self) -> None:
        """Give up the answers that are not complete; they end with reason "cancelled". From any thread, at any time, more than once."""
        self._cancel(self)

    def result(self) -> Result:
        """Wait for the end.

        Raises:
            what the request failed with.
        """
        choices = [Choice() for _ in range(self.request.n)]
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        explanation = None
        for event in self:
            match event:
                case Started():
                    explanation = event.explanation
                case PromptLogprobs():
                    prompt_logprobs = event.entries
                case Delta():
                    choice = choices[event.index]
                    choice.text += event.text
                    choice.token_ids += event.token_ids
                    choice.logprobs += event.logprobs
                case Finished():
                    choices[event.index].reason = event.reason
                case Done():
                    return Result(choices, event, prompt_logprobs, explanation)
                case Failed():
                    raise event.error
        raise AssertionError("unreachable")  # the loop ends with Done or Failed

    def _put(self, event: Event) -> None:
        with self._lock:
            if self._listener is None:
                self._events.put(event)
                return
            try:
                self._listener(event)
            except BaseException as error:  # whatever a listener does, the engine's thread goes on
                _log.error("a listener failed; its request is cancelled", exc_info=error)
                self._listener = None
                self.cancel()
