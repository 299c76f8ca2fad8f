"""Engine: one thread that owns a model and its cache, and works on everybody's requests in one batch after the other.

Owns the order of events of a step and what happens when one fails. Who gets rows and cells is the scheduler's.

    submit (any thread) > inbox > Scheduler.next_batch > KVCache.plan > Model.forward > Sampler > Output > Stream (any thread)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence as Listing
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from onekv.cache import ContextShift, KVCache
from onekv.config import check_least
from onekv.core.batch import Batch
from onekv.core.prefix import Difference, Key, checked_key
from onekv.engine.beams import Beams
from onekv.engine.draft import PromptLookup
from onekv.engine.guide import Guides
from onekv.engine.output import Output, Piece
from onekv.engine.request import Delta, Done, Failed, Finished, FinishReason, PromptLogprobs, Request, Result, Started, Stream
from onekv.engine.sampler import Sampler, Sampling, token_logprobs
from onekv.engine.scheduler import Job, Run, Scheduler, Share
from onekv.engine.session import Session
from onekv.errors import BatchError, CacheFull, ConfigError, EngineClosed, OneKVError, QueueFull, RequestTooLarge, ShiftError
from onekv.models import Model

_T = TypeVar("_T")
_log = logging.getLogger("onekv.engine")
_SAMPLING = frozenset(f.name for f in fields(Sampling))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine is doing, and what it has done since it began. As of the end of the last step.

    Attributes:
        running, waiting: answers
        num_cells, used_cells, free_cells: of the full group, or the only one
        evictable_cells: used ones that only cached prefixes and idle sessions own
        cell_nbytes:     bytes of one cell over all layers
        finished:        requests by how they ended: "stop", "length" or "cancelled" (of their last answer), "failed"
        prompt_tokens, cached_tokens: of requests that began; the second is what was not evaluated
        step_seconds:    time spent in steps
        preemptions, evictions, evicted_cells: of answers that had to wait; of cached prefixes and idle sessions, and their cells
        prefix_queries, prefix_hits: requests that began, and those of which a beginning was held
        drafted_tokens, accepted_tokens: guesses, and those that were right
    """

    running: int = 0
    waiting: int = 0
    sessions: int = 0
    num_cells: int = 0
    used_cells: int = 0
    free_cells: int = 0
    evictable_cells: int = 0
    cell_nbytes: int = 0
    requests: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    preemptions: int = 0
    evictions: int = 0
    evicted_cells: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Engine:
    """Many requests, one buffer.

    A request that fails, is too large or is cancelled changes no other's tokens. What does not fit at the moment waits; what can never fit
    is refused when it is submitted.

    Args:
        model:   its thread must be the only one that uses it from now on
        cache:   made by `cache_for(model, ...)`; the same holds for it
        max_running: most answers worked on at a time
        max_batch_tokens: most rows of a step; a long prompt is evaluated in parts of at most that, beside everybody's next tokens
        max_waiting: most answers in the queue
        preempt: what an answer does that has to wait for cells: "recompute" or "spill" (to a temporary file)
        context_shift: let the oldest tokens give way at the limit, for requests that do not say so themselves; None: the answer ends
        speculate: most tokens to guess per step and answer, from what it has said before; 0: none. The same tokens either way

    Raises:
        ConfigError: a setting that cannot work.

    A context manager; or call `close`.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        max_running: int = 32,
        max_batch_tokens: int = 512,
        max_waiting: int = 1024,
        preempt: Literal["recompute", "spill"] = "recompute",
        context_shift: ContextShift | None = None,
        speculate: int = 0,
    ) -> None:
        if not isinstance(cache, KVCache):
            raise ConfigError(f"cache must be a KVCache, got {cache!r}")
        for name, value, least in (
            ("max_running", max_running, 1),
            ("max_waiting", max_waiting, 1),
            ("speculate", speculate, 0),
        ):
            check_least(name, value, least)
        check_least("max_batch_tokens", max_batch_tokens, max_running + 1)
        if preempt not in ("recompute", "spill"):
            raise ConfigError(f'preempt must be "recompute" or "spill", got {preempt!r}')
        if cache.config.max_seqs <= max_running:
            raise ConfigError(f"max_running={max_running} answers need a cache with more than max_seqs={cache.config.max_seqs} sequences")
        if speculate and cache.states:
            raise ConfigError("speculate=0 is needed for recurrent layers: they cannot take back a guess")
        self.model = model
        self.cache = cache
        self.max_waiting = max_waiting
        self.context_shift = self._checked_shift(context_shift)
        full = cache.cells.groups[0].window.is_full
        self.limit: int = min(cache.num_cells, model.max_positions) if full else model.max_positions
        self.cell_nbytes = sum(cache.store.cell_nbytes([i]) for i in cache.store.physical)
        self.scheduler = Scheduler(cache, self.limit, max_running, max_batch_tokens, preempt, speculate)
        self._counts = self.scheduler.counts
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: dict[Stream, Job] = {}
        self._queued = 0  # answers of requests that have not started
        self._alone: deque[Job] = deque()  # to be tried one by one, after a step failed with several
        self._arrivals = 0
        self._finished: Counter[str] = Counter()
        self._step_seconds = 0.0
        self._stats = self._new_stats()
        self._lock = threading.Lock()
        self._closing: float | None = None  # when what still runs is to fail
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="onekv-engine", daemon=True)
        self._thread.start()

    @cached_property
    def guides(self) -> Guides:
        """Grammars for this model's answers."""
        return Guides(self.model.text, self.model.vocab_size)

    # --- any thread -------------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Stream:
        """Queue a request. Its stream has events as soon as there are any.

        Raises:
            RequestTooLarge: it could never fit: prompt and `max_tokens`, or prompt and one token, exceed `limit`.
            BatchError: a token id beyond the vocabulary.
            ConfigError: more answers than can run, a context shift this model cannot do, or a session that was freed or is not this
                engine's.
            QueueFull: too many are waiting.
            EngineClosed: the engine ends.
            Nothing was queued in any of these cases.
        """
        if not isinstance(request, Request):
            raise ConfigError(f"submit takes a Request, got {request!r}")
        self._check(request)
        with self._lock:
            if self._closing is not None:
                raise EngineClosed("the engine is closing; it takes no more requests")
            if self._queued + request.n > self.max_waiting:
                raise QueueFull(f"{self._queued} answers wait, the most is {self.max_waiting}; try again later")
            self._queued += request.n
            stream = Stream(request, lambda stream: self._inbox.put(lambda: self._cancel(stream)))
            submitted = time.monotonic()
            if request.session is not None:
                request.session.requests += 1
            self._inbox.put(lambda: self._enqueue(request, stream, submitted))
        return stream

    def _check(self, request: Request) -> None:
        count, limit, answers = len(request.prompt), self.limit, max(request.n, request.beams)
        for token in (*request.prompt, *request.stop_ids, *dict(request.sampling.logit_bias)):
            if token >= self.model.vocab_size:
                raise BatchError(f"token id {token} is not in [0, {self.model.vocab_size})", given=token)
        if answers > self.scheduler.max_running:
            raise ConfigError(f"n={answers} answers at a time are more than the {self.scheduler.max_running} that can run")
        if request.logprobs is not None and request.logprobs > self.model.vocab_size:
            raise ConfigError(f"logprobs={request.logprobs} is more than the {self.model.vocab_size} tokens there are")
        self._check_session(request.session)
        self._checked_shift(request.context_shift)
        shift = self._shift_of(request)
        wanted = 1 if request.max_tokens is None or shift is not None else request.max_tokens
        if count + wanted > limit:
            raise RequestTooLarge(
                f"a prompt of {count} tokens and {wanted} to generate need {count + wanted}; the limit is {limit}, the smaller of "
                f"buffer ({self.cache.num_cells} cells) and model ({self.model.max_positions} positions)",
                needed=count + wanted,
                limit=limit,
            )
        beams = count + request.beams * min(request.max_tokens or limit, limit - count)
        if request.beams and beams > self.cache.num_cells:
            raise RequestTooLarge(
                f"a prompt of {count} tokens and {request.beams} beams may need {beams} cells at a time, the buffer has "
                f"{self.cache.num_cells}; set max_tokens, or less of it",
                needed=beams,
                limit=self.cache.num_cells,
            )

    def _check_session(self, session: Session | None) -> None:
        if session is not None and session not in self.scheduler.sessions:
            raise ConfigError("the request's session was freed, or belongs to another engine")

    def _checked_shift(self, shift: ContextShift | None) -> ContextShift | None:
        if shift is not None and not isinstance(shift, ContextShift):
            raise ConfigError(f"context_shift must be a ContextShift, got {shift!r}")
        if shift is not None and (not self.cache.can_shift or self.cache.states):
            reason = self.cache.no_shift or "recurrent states cannot follow"
            raise ConfigError(f"context_shift is not possible with this model: {reason}")
        return shift

    def _shift_of(self, request: Request) -> ContextShift | None:
        """What gives way when this request is at the limit."""
        return request.context_shift or self.context_shift

    def request(self, prompt: str | Listing[int] | Listing[Mapping[str, Any]], **options: Any) -> Request:
        """A request from a raw text, token ids, or messages for the chat template; options are fields of `Request` and `Sampling`.

        Raises:
            ConfigError: an option of neither.
        """
        unknown = options.keys() - _SAMPLING - {f.name for f in fields(Request)}
        if unknown:
            raise ConfigError(f"unknown options: {', '.join(sorted(unknown))}")
        if isinstance(prompt, str):
            ids = self.model.text.encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self.model.text.chat([m for m in prompt if isinstance(m, Mapping)])
        else:
            ids = [t for t in prompt if not isinstance(t, Mapping)]
        sampling = options.pop("sampling", Sampling())
        sampling = replace(sampling, **{name: options.pop(name) for name in _SAMPLING & options.keys()})
        return Request(prompt=tuple(ids), sampling=sampling, **options)

    def generate(self, prompt: str | Listing[int] | Listing[Mapping[str, Any]], **options: Any) -> Result:
        """Wait for the whole answer. Takes what `request` takes; raises what it, `submit` and the request's own failure raise."""
        return self.stream(prompt, **options).result()

    def stream(self, prompt: str | Listing[int] | Listing[Mapping[str, Any]], **options: Any) -> Stream:
        """The answer as it is made. Takes what `request` takes."""
        return self.submit(self.request(prompt, **options))

    def session(self, key: Key = ()) -> Session:
        """A conversation that stays between requests."""
        checked_key(key)
        return self.call(lambda: self.scheduler.new_session(self, key))

    def stats(self) -> EngineStats:
        """Counts as of the last step. Never waits."""
        return self._stats

    def explain(self, tokens: Listing[int], key: Key = ()) -> Difference:
        """Where a prompt and what is held part: cached prefixes, sessions, running answers. Changes nothing. Waits for a step."""
        return self.call(lambda: self.scheduler.explain(key, np.array(tokens, np.int64)))

    def cells(self, group: int = 0) -> dict[str, Any]:
        """Every used cell of a group, for a picture: {"num_cells", "head", "cells": [[index, position, [owners], token id], ...],
        "owners": {sequence id: {"kind": "request" | "session" | "prefix", "name", "evictable"}}}. Waits for the end of a step."""
        return self.call(lambda: self._cells(group))

    def call(self, action: Callable[[], _T]) -> _T:
        """Run something on the engine's thread, between two steps, and wait for what it returns or raises.

        Raises:
            EngineClosed: the engine has ended.
        """
        if threading.current_thread() is self._thread:
            return action()
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:  # handed to the caller, whatever it is
                future.set_exception(error)

        with self._lock:
            if self._is_over:
                raise EngineClosed("the engine has ended")
            self._inbox.put(run)
        return future.result()

    def close(self, timeout: float | None = 0.0) -> None:
        """Take nothing new, finish what runs or waits within `timeout` seconds (None: however long), fail the rest with `EngineClosed`, and
        give back all cells. Of several calls the earliest end counts. Waits for it, but for a listener's call, which the engine's thread
        itself makes."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._closing = end if self._closing is None else min(self._closing, end)
            self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- the engine's thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                self._read_inbox(wait=not self.scheduler.has_work and self._closing is None)
                with self._lock:  # so that what was submitted before the end is seen before the end
                    is_idle = not self.scheduler.has_work and self._inbox.empty()
                    if self._closing is not None and (is_idle or time.monotonic() >= self._closing):
                        break
                start = time.monotonic()
                if self.scheduler.has_work:
                    self._try_step()
                    self._step_seconds += time.monotonic() - start
                    self._counts["steps"] += 1
                self._stats = self._new_stats()
        finally:  # however it ended, nobody waits for ever
            with self._lock:
                self._closing = self._closing or 0.0
                self._is_over = True
            self._read_inbox(wait=False)
            for job in list(self._jobs.values()):
                self._fail(job, EngineClosed("the engine was closed before this request was finished"))
            self.scheduler.close()
            self._stats = self._new_stats()

    def _try_step(self) -> None:
        try:
            self._step()
        except BaseException as error:  # a fault of the engine's own: nobody waits for ever, and the next requests find it working
            _log.exception("a step failed outside of the model")
            for job in list(self._jobs.values()):
                self._fail(job, error)

    def _read_inbox(self, wait: bool) -> None:
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except Empty:
            return

    def _enqueue(self, request: Request, stream: Stream, submitted: float) -> None:
        self._arrivals += 1
        self._counts["requests"] += 1
        job = Job(request, stream, self._arrivals, submitted)
        self._jobs[stream] = job
        try:
            run = self._new_run(job, 0, list(request.prompt))
            run.splits = request.beams or request.n
            if self.scheduler.by_points:
                run.points = sorted({p for p in request.points if 0 < p < len(request.prompt)})
            job.live = 1
            self._check_session(request.session)  # it may have been freed since
            self.scheduler.submit(run)
        except BaseException as error:
            self._fail(job, error)

    def _new_run(self, job: Job, index: int, tokens: list[int]) -> Run:
        request = job.request
        guide = None if request.guide is None else request.guide.fork()
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + index) % 2**63)
        run = Run(job, index, tokens, Sampler(sampling, request.prompt, guide), Output(self.model.text, request.stop, request.special))
        job.runs.append(run)
        return run

    def _cancel(self, stream: Stream) -> None:
        job = self._jobs.get(stream)
        if job is None:
            return
        try:
            if job.request.beams:
                self._end_search(job, "cancelled")
                return
            for run in list(job.runs):
                if run.reason is None:
                    run.reason = "cancelled"
                    self._end(run)
        except BaseException as error:
            _log.error("a request failed while it was cancelled", exc_info=error)
            self._fail(job, error)

    # --- a step -----------------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One batch: choose its rows, evaluate them, choose tokens."""
        shares = self._shares()
        if not shares:
            # Whoever runs waits for one of its own beams, which waits for cells.
            if not self.scheduler.preempt():
                oldest = min([*self.scheduler.running, *self.scheduler.waiting], key=lambda run: run.age, default=None)
                if oldest is not None:
                    self._fail(oldest.job, OneKVError("requests wait and none can go on"))
            return
        starts = [share.run.computed for share in shares]
        for share in shares:
            self._note_started(share.run)
        try:
            logits = self._evaluate(shares)
        except CacheFull as error:
            self._make_room(shares, error)
        except BaseException as error:
            self._settle(shares, starts)
            self._isolate(shares, error)
        else:
            self.scheduler.note_fitted()
            for share in shares:
                self._receive(share, logits[share.run])
            for job in {share.run.job: None for share in shares if share.run.job.search is not None}:
                self._search(job, [logits[run] for run in job.runs if run in logits])

    def _shares(self) -> list[Share]:
        shares = self.scheduler.next_batch()
        while due := [s.run for s in shares if s.run.pending == 1 and len(s.run.tokens) >= self.limit]:
            self._shift(due[0])
            shares = self.scheduler.next_batch()
        while self._alone:
            job = self._alone.popleft()
            alone = [share for share in shares if share.run.job is job]
            if alone:
                return alone
        return shares

    def _evaluate(self, shares: list[Share]) -> dict[Run, Tensor]:
        """Logits of the wanted rows of each share, in order.

        Whatever is raised, answers may have cells of some of the rows.
        """
        tokens: list[int] = []
        seqs: list[int] = []
        outputs: list[bool] = []
        owners: list[Run] = []
        for share in shares:
            run = share.run
            at = run.computed
            rows = [*run.tokens[at : at + share.count], *share.draft]
            wants_all = run.job.request.prompt_logprobs and at < len(run.job.request.prompt)
            is_last = at + share.count == len(run.tokens)
            tokens += rows
            seqs += [self._seq_id(run)] * len(rows)
            outputs += [wants_all] * (share.count - 1) + [wants_all or is_last] + [True] * len(share.draft)
            owners += [run] * len(rows)
        plan = self.cache.plan(Batch(tokens, seqs=seqs, outputs=np.array(outputs)), max_ubatch=self.scheduler.max_batch_tokens)
        places: dict[Run, list[tuple[int, Tensor]]] = {share.run: [] for share in shares}
        for step in plan:
            with step:
                logits = self.model.forward(step)
            for row, one in zip(step.ubatch.rows[step.ubatch.outputs].tolist(), logits, strict=True):
                places[owners[row]].append((row, one))
        return {run: _stacked(rows) for run, rows in places.items()}

    @staticmethod
    def _seq_id(run: Run) -> int:
        if run.seq is None:
            raise OneKVError("an answer without cells was given rows")
        return run.seq.id

    def _make_room(self, shares: list[Share], error: CacheFull) -> None:
        """After a batch did not fit: give something up, so that the next one may."""
        if self.scheduler.evict(error) or self.scheduler.halve_rows(shares) or self.scheduler.preempt():
            return
        self._fail(shares[0].run.job, error)  # it is the last one, and everything else is given up

    def _isolate(self, shares: list[Share], error: BaseException) -> None:
        """After a step failed: whoever makes it fail alone fails; the others go on."""
        jobs = {share.run.job: None for share in shares}
        guilty = getattr(error, "seq", None) if isinstance(error, BatchError) else None
        named = [s.run.job for s in shares if s.run.seq is not None and s.run.seq.id == guilty] if guilty is not None else []
        if len(jobs) == 1 or named:
            if not isinstance(error, OneKVError):
                _log.error("a request failed", exc_info=error)
            self._fail(named[0] if named else next(iter(jobs)), error)
            return
        self._alone.extend(jobs)

    def _settle(self, shares: list[Share], starts: list[int]) -> None:
        """After a batch that was not finished: nobody has cells of rows whose logits are lost."""
        for share, start in zip(shares, starts, strict=True):
            if share.run.seq is not None:
                self.scheduler.truncate(share.run.seq, start)

    def _shift(self, run: Run) -> None:
        """An answer is as long as it can be: let its oldest tokens give way, or end it."""
        shift, seq = self._shift_of(run.job.request), run.seq
        if shift is None or seq is None:
            return
        keep = min(shift.n_keep, len(seq) - 1)
        try:
            gone = self.scheduler.with_room(lambda: shift.make_room(seq))
        except (CacheFull, ShiftError, BatchError) as error:
            # What another answer shares cannot move; the youngest gives way, and be it this one.
            if not isinstance(error, CacheFull) or not self.scheduler.preempt():
                self._fail(run.job, error)
            return
        self.scheduler.note_room()
        del run.tokens[keep : keep + gone]
        run.edited_at = keep if run.edited_at is None else min(run.edited_at, keep)
        run.points.clear()
        run.lookup = PromptLookup()

    # --- tokens -----------------------------------------------------------------------------------------------------------------

    def _note_started(self, run: Run) -> None:
        job = run.job
        if job.started is not None:
            return
        job.started = time.monotonic()
        with self._lock:
            self._queued -= job.request.n
        cached = job.cached_tokens or 0
        self._counts["prompt_tokens"] += len(job.request.prompt)
        self._counts["cached_tokens"] += cached
        job.stream._put(Started(len(job.request.prompt), cached, job.explanation))

    def _receive(self, share: Share, logits: Tensor) -> None:
        """Take the logits of a share's wanted rows."""
        run = share.run
        if run.reason is not None or run.job.ended:
            return
        try:
            self.scheduler.note_point(run)
            if run.job.request.prompt_logprobs:
                logits = self._note_prompt(share, logits)
            if not logits.shape[0] or run.job.search is not None:
                return
            if run.job.request.beams:
                self._begin_search(run, logits)
            elif run.splits > 1:
                self._split(run)
                for twin in run.job.runs:
                    self._choose(twin, logits, ())
            else:
                self._choose(run, logits, share.draft)
        except BaseException as error:  # a foreign library's panic is no Exception
            _log.error("a request failed while its tokens were chosen", exc_info=error)
            self._fail(run.job, error)

    def _note_prompt(self, share: Share, logits: Tensor) -> Tensor:
        """Keep what the prompt's rows say of its next tokens; returns the rows that belong to the answer."""
        run, job = share.run, share.run.job
        prompt, width = job.request.prompt, job.request.logprobs or 0
        end = run.computed - len(share.draft)
        start = end - share.count
        inside = max(0, min(end, len(prompt) - 1) - start)
        for i in range(inside):
            job.prompt_logprobs[start + i + 1] = token_logprobs(logits[i], prompt[start + i + 1], width)
        if not job.prompt_told and end >= len(prompt) - 1:
            job.prompt_told = True
            job.stream._put(PromptLogprobs((None, *(job.prompt_logprobs[i] for i in range(1, len(prompt))))))
        # Of what was generated before this answer had to wait, only the last row is wanted.
        return logits[logits.shape[0] - 1 - len(share.draft) :] if end == len(run.tokens) else logits[:0]

    def _split(self, run: Run) -> None:
        """The prompt is evaluated: begin the other answers, in the same cells."""
        job, count, run.splits = run.job, run.splits, 1
        for index in range(1, count):
            twin = self._new_run(job, index, list(run.tokens))
            if run.seq is not None:
                twin.seq = self.scheduler.fork(run.seq, len(run.seq))
            self.scheduler.running.append(twin)
            job.live += 1

    def _begin_search(self, run: Run, logits: Tensor) -> None:
        """The prompt is evaluated: begin the beams, in the same cells."""
        job = run.job
        self._split(run)
        job.first_token = time.monotonic()
        job.search = Beams(job.request.beams, () if job.request.ignore_eos else self.model.text.eos_ids, job.request.length_penalty)
        self._advance(job, logits)

    def _search(self, job: Job, logits: list[Tensor]) -> None:
        """Let the beams of a search become what is likeliest, if all of them have been evaluated."""
        if job.ended or len(logits) < len(job.runs) or not all(rows.shape[0] for rows in logits):
            return
        try:
            self._advance(job, torch.cat(logits))
        except BaseException as error:
            _log.error("a request failed while its beams were chosen", exc_info=error)
            self._fail(job, error)

    def _advance(self, job: Job, logits: Tensor) -> None:
        search, runs, start = job.search, job.runs, len(job.request.prompt)
        if search is None:
            return
        steps = search.choose(logits, [run.tokens[start:] for run in runs])
        seqs = [run.seq for run in runs]
        self.cache.reorder(seqs, [seqs[step.source] for step in steps])
        tokens = [[*runs[step.source].tokens, step.token] for step in steps]
        for run, its in zip(runs, tokens, strict=True):
            run.tokens, run.made = its, len(its) - start
        self._counts["generated_tokens"] += len(runs)
        length = runs[0].made
        at_end = length == job.request.max_tokens or len(runs[0].tokens) >= self.limit
        if at_end:
            search.close([its[start:] for its in tokens])
        if at_end or search.is_over(length):
            self._end_search(job, "length" if at_end else "stop")

    def _end_search(self, job: Job, reason: FinishReason) -> None:
        """Give out the best answers, and give back the cells of all beams."""
        for run in job.runs:
            run.reason = reason
            self.scheduler.end(run)
        found = job.search.ended[: job.request.n] if job.search is not None and reason != "cancelled" else []
        eos = self.model.text.eos_ids
        for index, (_, tokens) in enumerate(found):
            text = self.model.text.decode(tokens, special=job.request.special)
            job.stream._put(Delta(index, text, tuple(tokens)))
            job.completion_tokens += len(tokens)
            job.stream._put(Finished(index, "stop" if tokens[-1] in eos else "length", len(tokens)))
        for index in range(len(found), job.request.n):
            job.stream._put(Finished(index, reason, 0))
        self._complete(job, reason)

    def _choose(self, run: Run, logits: Tensor, draft: tuple[int, ...]) -> None:
        """Choose the next token, and go on as long as it is what was guessed."""
        request = run.job.request
        if request.max_tokens == 0:
            run.reason = "length"
        for i in range(logits.shape[0]):
            if run.reason is not None:
                break
            token = run.sampler(logits[i])
            self._take(run, token, logits[i])
            self._counts["accepted_tokens"] += i < len(draft) and token == draft[i]
            if i == len(draft) or token != draft[i]:
                break
        self._counts["drafted_tokens"] += len(draft)
        if run.seq is not None and run.computed >= len(run.tokens) and run.made:
            self.scheduler.truncate(run.seq, len(run.tokens) - 1)
        if run.reason is not None:
            self._end(run)

    def _take(self, run: Run, token: int, logits: Tensor) -> None:
        """One token of an answer: its text goes out, and it may be the last."""
        job, request = run.job, run.job.request
        if job.first_token is None:
            job.first_token = time.monotonic()
        run.tokens.append(token)
        run.made += 1
        job.completion_tokens += 1
        self._counts["generated_tokens"] += 1
        told = None if request.logprobs is None else token_logprobs(logits, token, request.logprobs)
        is_end = token in request.stop_ids or (token in self.model.text.eos_ids and not request.ignore_eos)
        piece = run.output.finish(token, told) if is_end else run.output.push(token, told)
        self._give(run, piece)
        if is_end or piece.stopped or (run.sampler.guide is not None and run.sampler.guide.is_finished):
            run.reason = "stop"
        elif run.made == request.max_tokens or (len(run.tokens) >= self.limit and not self._shift_of(request)):
            run.reason = "length"

    @staticmethod
    def _give(run: Run, piece: Piece) -> None:
        if piece.text or piece.token_ids:
            run.job.stream._put(Delta(run.index, piece.text, piece.token_ids, piece.logprobs))

    # --- ends -------------------------------------------------------------------------------------------------------------------

    def _end(self, run: Run) -> None:
        """An answer has its reason: its last text goes out, its cells are given back."""
        job = run.job
        self._give(run, run.output.finish())
        self.scheduler.end(run)
        if run.reason is not None:
            for index in range(run.index, run.index + run.splits):  # those that were to begin with it, too
                job.stream._put(Finished(index, run.reason, run.made))
        job.live -= 1
        if job.live == 0:
            self._complete(job, str(run.reason))

    def _complete(self, job: Job, reason: str) -> None:
        """All answers of a request have ended."""
        self._finished[reason] += 1
        now = time.monotonic()
        first = None if job.first_token is None else job.first_token - job.submitted
        queued = (job.started or now) - job.submitted
        usage = Done(len(job.request.prompt), job.cached_tokens or 0, job.completion_tokens, queued, first, now - job.submitted)
        self._forget(job, usage)

    def _fail(self, job: Job, error: BaseException) -> None:
        """End a request with an error; its cells are not trusted any more."""
        if job.ended:
            return
        for run in job.runs:
            if run.reason is None or run.seq is not None:
                try:
                    self.scheduler.discard(run)
                except Exception as fault:  # its end has to be told all the same
                    _log.error("cells of a failed request could not be given back", exc_info=fault)
        self._finished["failed"] += 1
        self._forget(job, Failed(error))

    def _forget(self, job: Job, last: Done | Failed) -> None:
        job.ended = True
        with self._lock:
            if job.request.session is not None:
                job.request.session.requests -= 1
            if job.started is None:
                self._queued -= job.request.n
        del self._jobs[job.stream]
        self._stats = self._new_stats()  # so that whoever sees the end finds it counted
        job.stream._put(last)

    # --- what others see --------------------------------------------------------------------------------------------------------

    def _new_stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.cache
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            sessions=len(scheduler.sessions),
            num_cells=cache.num_cells,
            used_cells=cache.num_used,
            free_cells=cache.num_free,
            evictable_cells=cache.num_used - scheduler.count_owned(0),
            cell_nbytes=self.cell_nbytes,
            finished=dict(self._finished),
            step_seconds=self._step_seconds,
            **self._counts,
        )

    def _cells(self, group: int) -> dict[str, Any]:
        cells, scheduler = self.cache.cells, self.scheduler
        if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < len(cells.groups):
            raise ConfigError(f"group must be an integer in [0, {len(cells.groups)}), got {group!r}")
        found: dict[str, Any] = cells.snapshot(group)
        tokens = np.full(cells.groups[group].num_cells + 1, -1, np.int64)  # the last one stands for -1
        for number in cells.present():
            tokens[cells.column(group, number)] = cells.tokens(number)
        owners: dict[int, dict[str, Any]] = {}
        for seq in scheduler.tree.holders():
            owners[seq.id] = {"kind": "prefix", "name": "cached prefix", "evictable": True}
        for session in scheduler.sessions:
            if session.seq is not None:
                owners[session.seq.id] = {"kind": "session", "name": session.name, "evictable": True}
        for run in scheduler.running:
            if run.seq is not None:
                its = run.job.request.session
                name = f"request {run.job.arrival}" if its is None else its.name
                owners[run.seq.id] = {"kind": "request" if its is None else "session", "name": name, "evictable": False}
        listed = [[index, position, owned, int(tokens[index])] for index, position, owned, _ in found["cells"]]
        return {"num_cells": cells.groups[group].num_cells, "head": found["head"], "cells": listed, "owners": owners}


def window_cells(model: Model, num_cells: int, *, max_running: int = 32, max_batch_tokens: int = 512) -> int | None:
    """How many cells the windowed layers of an engine's cache need beside full ones: `window_cells` of `cache_for`; None where the model's
    layers are all of one kind.

    A window for each running answer and as many for places that shall stay restorable, and the rows of one step (spec 5.5); never more
    than `num_cells`.
    """
    windows = {spec.window for spec in model.layers if spec.has_cells}
    if len(windows) < 2:
        return None
    widest = max(window.size for window in windows if not window.is_full)
    return min(num_cells, 2 * widest * max_running + max_batch_tokens)


def _stacked(rows: list[tuple[int, Tensor]]) -> Tensor:
    """Logits in the order of their rows, [n, V]; [0, 0] if there are none."""
    ordered = [one for _, one in sorted(rows, key=lambda pair: pair[0])]
    return torch.stack(ordered) if ordered else torch.empty(0, 0)
