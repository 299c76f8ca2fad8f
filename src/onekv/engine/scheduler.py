"""Who gets which rows of the next batch, and whose cells give way when they run out. Owns queue, running answers, prefix tree, sessions.

No phases: an answer catches up with its tokens, and the one that has gets a new token. Everything here runs on the engine's thread.

When cells run out: cached prefixes go first, least recently used, ends of branches before what they share; then the cells of idle sessions;
then the youngest answer waits again (its tokens stay, its cells become a cached prefix, or a file). An older one never pays for a younger.
"""

from __future__ import annotations

import logging
import tempfile
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from onekv.cache import KVCache, Sequence
from onekv.core.prefix import Difference, Key, PrefixTree, common_prefix, difference
from onekv.engine.beams import Beams
from onekv.engine.draft import PromptLookup
from onekv.engine.output import Output
from onekv.engine.request import FinishReason, Request, Stream
from onekv.engine.sampler import Sampler, TokenLogprobs
from onekv.engine.session import Session
from onekv.errors import CacheFull, OneKVError, StateError

if TYPE_CHECKING:
    from onekv.engine.engine import Engine

_T = TypeVar("_T")
_log = logging.getLogger("onekv.engine")
_WORTH_WAITING: Final = 16  # tokens in common with a prompt that is being evaluated: fewer are evaluated twice rather than waited for


@dataclass(eq=False)
class Job:
    """A request and its answers."""

    request: Request
    stream: Stream
    arrival: int
    submitted: float = field(default_factory=time.monotonic)
    prompt: NDArray[np.int64] = field(init=False)
    runs: list[Run] = field(default_factory=list)
    live: int = 0  # answers that have not ended
    cached_tokens: int | None = None  # None: never started
    started: float | None = None
    first_token: float | None = None
    completion_tokens: int = 0
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position
    search: Beams | None = None
    explanation: Difference | None = None  # where its prompt and what was held parted
    prompt_told: bool = False  # whether they were given out
    ended: bool = False

    def __post_init__(self) -> None:
        self.prompt = np.array(self.request.prompt, np.int64)


@dataclass(eq=False)
class Run:
    """One answer of a request being made.

    Attributes:
        tokens:    prompt and answer, as far as it is known; the cells hold a beginning of it
        made:      tokens of the answer
        seq:       its cells; None while it waits
        spilled:   the file its cells are in while it waits, if they could not be had again by evaluating
        edited_at: as in `Session`
        splits:    answers that are to begin where the prompt ends, this one included
        coming:    who evaluates a beginning of its tokens, and how many of them, while it waits for that
    """

    job: Job
    index: int
    tokens: list[int]
    sampler: Sampler
    output: Output
    splits: int = 1
    coming: tuple[Run, int] | None = None
    made: int = 0
    seq: Sequence | None = None
    spilled: Path | None = None
    edited_at: int | None = None
    points: list[int] = field(default_factory=list)  # ascending
    lookup: PromptLookup = field(default_factory=PromptLookup)
    reason: FinishReason | None = None

    @property
    def computed(self) -> int:
        """Tokens that have cells."""
        return 0 if self.seq is None else len(self.seq)

    @property
    def pending(self) -> int:
        """Tokens to evaluate before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def is_coming(self) -> bool:
        """Whether the other answer it waits for still evaluates what both begin with."""
        if self.coming is None:
            return False
        other, length = self.coming
        return other.seq is not None and other.made == 0 and other.computed < length

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the older first."""
        return self.job.arrival, self.index


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of a batch: the next `count` tokens of an answer, and guesses of what follows them."""

    run: Run
    count: int
    draft: tuple[int, ...] = ()


class Scheduler:
    """Args:
    cache:            whose cells are shared out
    limit:            most tokens of one answer, prompt included
    max_running:      most answers at a time
    max_batch_tokens: most rows of a batch
    preempt:          "recompute": a preempted answer evaluates its tokens again, as far as its cells were taken; "spill": its cells go
                      to a file and come back
    speculate:        most tokens to guess at a time; 0: none
    """

    def __init__(
        self, cache: KVCache, limit: int, max_running: int, max_batch_tokens: int, preempt: Literal["recompute", "spill"], speculate: int
    ) -> None:
        self.cache = cache
        self.limit = limit
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.preempt_by = preempt
        self.speculate = speculate
        self.by_points = bool(cache.states) or any(not group.window.is_full for group in cache.cells.groups)
        self.tree: PrefixTree[Sequence] = PrefixTree(self.by_points)
        self.sessions: set[Session] = set()
        self.waiting: list[Run] = []  # the older first
        self.running: list[Run] = []  # in the order they were admitted
        self.counts: Counter[str] = Counter()  # what has happened since the engine began, by the names of `EngineStats`
        self._clock = 0
        self._max_rows = max_batch_tokens  # fewer for a while, after that many did not fit at once
        self._spills = tempfile.TemporaryDirectory(prefix="onekv-", ignore_cleanup_errors=True)
        self._num_spilled = 0
        self._refused: Run | None = None  # who did not fit, and will not before somebody has left

    # --- the next batch ---------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether an answer runs or waits."""
        return bool(self.running or self.waiting)

    def next_batch(self) -> list[Share]:
        """Admit who fits, and share out the rows: one to each answer that is up to date, the rest evenly to those that are not."""
        shares = self._shared_out()
        if not shares and self._refused is not None:  # whoever runs waits for one that does not: a beam for the others
            self._refused = None
            shares = self._shared_out()
        return shares

    def _shared_out(self) -> list[Share]:
        self._admit()
        shares = {run: Share(run, 1) for run in self.running if run.pending == 1 and self._in_step(run)}
        left = max(self._max_rows - len(shares), 0)
        behind = sorted((run for run in self.running if run.pending > 1), key=lambda run: run.pending)
        for i, run in enumerate(behind):
            # The last token of a beam, and of an answer that has to shift first, comes by itself.
            most = run.pending - (run.job.search is not None or len(run.tokens) >= self.limit)
            count = min(most, max(-(-left // (len(behind) - i)), 1))
            count = min([count, *(point - run.computed for point in run.points if point > run.computed)])
            shares[run] = Share(run, count)
            left = max(left - count, 0)
        if self.speculate:
            left = min(left, self.cache.num_free - sum(share.count for share in shares.values()))
            for run, share in list(shares.items()):
                if run.pending == 1 and run.splits == 1 and run.job.search is None and left > 0:
                    draft = self._draft(run, min(left, self.speculate))
                    shares[run] = Share(run, share.count, draft)
                    left -= len(draft)
        return [shares[run] for run in self.running if run in shares]

    def _in_step(self, run: Run) -> bool:
        """Whether nothing keeps an answer from its next token: the beams of a search go on together."""
        return run.job.search is None or all(r.pending == 1 and r in self.running for r in run.job.runs)

    def halve_rows(self, shares: list[Share]) -> bool:
        """After the rows of a batch did not fit at once: fewer, for the next ones. False: it was one for each answer."""
        rows = sum(share.count + len(share.draft) for share in shares)
        self._max_rows = max(rows // 2, 1)
        return rows > len(shares)

    def note_fitted(self) -> None:
        """A batch fitted: the next one may have more rows again."""
        self._max_rows = min(2 * self._max_rows, self.max_batch_tokens)

    def _draft(self, run: Run, most: int) -> tuple[int, ...]:
        room = self.limit - len(run.tokens)
        if run.job.request.max_tokens is not None:
            room = min(room, run.job.request.max_tokens - run.made)
        return tuple(run.lookup.draft(run.tokens, min(most, room - 1)))

    # --- admission --------------------------------------------------------------------------------------------------------------

    def submit(self, run: Run) -> None:
        """Put an answer into the queue, by its age."""
        insort(self.waiting, run, key=lambda r: r.age)

    def _admit(self) -> None:
        if not self.running:
            self._refused = None
        taken = {run.job.request.session for run in self.running} - {None}
        room = self.max_running - sum(run.splits for run in self.running)
        for run in list(self.waiting):
            if run.splits > room or run is self._refused:
                return
            session = run.job.request.session
            if session in taken:
                continue
            if not run.is_coming and not self._start(run):
                self._refused = run
                return
            room -= run.splits if run.seq is not None else 0
            taken |= {session} - {None}

    def note_room(self) -> None:
        """Cells have become free: whoever they were not enough for may be looked at again."""
        self._refused = None

    def _start(self, run: Run) -> bool:
        """Give an answer the cells that are there for it and let it run; False: it has to wait for cells. One that waits for what another
        evaluates stays in the queue, and does not hold up those behind it."""
        session = run.job.request.session
        if run.spilled is not None and ((self.running and not self._fits(run)) or not self._read_spilled(run)):
            return False
        if run.seq is None:
            length, source, run.coming = self._match(run)
            if run.coming is not None:
                return True
            if run.job.request.explain and run.job.explanation is None:
                run.job.explanation = self.explain(run.job.request.key, run.job.prompt, session)
            self._attach(run, length, source)
            if self.running and not self._fits(run):
                if session is None:
                    self.release(run, keep=True)
                else:
                    session.seq, session.edited_at, run.seq = run.seq, run.edited_at, None
                return False
        self.waiting.remove(run)
        self.running.append(run)
        if run.job.cached_tokens is None:
            run.job.cached_tokens = run.computed
            self.counts["prefix_queries"] += 1
            self.counts["prefix_hits"] += run.computed > 0
        return True

    def explain(self, key: Key, prompt: NDArray[np.int64], session: Session | None = None) -> Difference:
        """Where a prompt parts from whatever holds most of it: a cached prefix, a session, a running answer. Of `session`, whose prompt
        it is, what was shifted counts too."""
        told = self.tree.explain(key, prompt)
        held = [(s.seq, None if s is session else s.edited_at) for s in self.sessions if s.key == key]
        held += [(run.seq, run.edited_at) for run in self.running if run.job.request.key == key]
        for seq, edited_at in held:
            tokens = seq.tokens if seq is not None else prompt[:0]
            common = common_prefix(tokens[:edited_at], prompt)
            if common > told.matched:
                told = difference(prompt, common, tokens[common:])
        return told

    def _match(self, run: Run) -> tuple[int, Sequence | None, tuple[Run, int] | None]:
        """The longest beginning of an answer's tokens that can be gone on from, whose cells it is, and which other answer, that begins
        alike, will come further, and how far."""
        request = run.job.request
        session = request.session
        if request.prompt_logprobs and not run.job.prompt_told:
            return 0, None, None  # the logits of all its tokens are wanted
        wanted = np.array(run.tokens[:-1], np.int64)
        if session is not None and session.edited_at is not None and session.seq is not None:
            # What was shifted is what the session is asked to go on with; nobody else has it.
            return self._usable(session.seq, common_prefix(session.seq.tokens, wanted)), session.seq, None
        found = self.tree.match(request.key, wanted, self._usable)
        length, source = found.length, found.holder
        for idle in self.sessions:
            if idle.seq is not None and idle.key == request.key:
                usable = self._common(idle.seq, idle.edited_at, wanted, length - (idle is session))
                if usable > length or (usable == length and idle is session):
                    length, source = usable, idle.seq
        coming: tuple[Run, int] | None = None
        for other in self.running:
            if other.job.request.key != request.key or other.seq is None:
                continue
            usable = self._common(other.seq, other.edited_at, wanted, length)
            if usable > length:
                length, source = usable, other.seq
            if other.made or other.edited_at is not None:
                continue
            common = common_prefix(other.job.prompt, wanted)
            if common > other.computed and common >= _WORTH_WAITING and (coming is None or common > coming[1]):
                coming = other, common
                if self.by_points and common not in other.points:
                    insort(other.points, common)
        return length, source, coming if coming is not None and coming[1] > length else None

    def _common(self, seq: Sequence, edited_at: int | None, wanted: NDArray[np.int64], least: int) -> int:
        """How many wanted tokens can be gone on from in somebody's cells: those from before an edit. 0 where they are not more than
        `least`, which in most cases shows at one token."""
        tokens = self.cache.cells.tokens(seq.id)
        if 0 <= least < wanted.size and (least >= tokens.size or tokens[least] != wanted[least]):
            return 0
        common = common_prefix(tokens, wanted)
        return self._usable(seq, common if edited_at is None else min(common, edited_at))

    def _usable(self, seq: Sequence, length: int) -> int:
        return self.cache.last_continuable(seq, length)

    def _attach(self, run: Run, length: int, source: Sequence | None) -> None:
        session = run.job.request.session
        if session is not None and session.seq is not None:
            if source is session.seq:
                run.seq, run.edited_at = session.lend(), session.edited_at
                self.truncate(source, length)
                if run.edited_at is not None and run.edited_at >= length:
                    run.edited_at = None
                return
            session.evict()
        run.edited_at = None
        run.seq = self.new_sequence() if source is None else self.fork(source, length)

    def _fits(self, run: Run) -> bool:
        """Whether all who run, and this one, can catch up with their tokens and get one more each."""
        if not self.cache.cells.groups[0].window.is_full:
            return True  # a window's cells are taken over as it moves on; what does not fit is seen when the batch is planned
        return self.count_owned(0, run) + sum(r.pending + r.splits for r in (*self.running, run)) <= self.cache.num_cells

    def count_owned(self, group: int, *others: Run) -> int:
        """Cells of a group that answers own: those that run, and others. Cost: O(cells + entries)."""
        return self.cache.cells.count_owned(group, [run.seq.id for run in (*self.running, *others) if run.seq is not None])

    # --- cells ------------------------------------------------------------------------------------------------------------------

    def new_sequence(self) -> Sequence:
        """A free sequence id, if need be that of a cached prefix or of an idle session.

        Raises:
            OneKVError: every id is in use by running answers.
        """
        while True:
            try:
                return self.cache.sequence()
            except OneKVError:
                if not self._give_up_one():
                    raise

    def fork(self, seq: Sequence, length: int) -> Sequence:
        """A sequence that shares the first cells of another, as many as can be gone on from."""
        twin = self.new_sequence()
        length = 0 if seq.is_freed else self._usable(seq, length)  # it may have been given up for its id
        if length:
            self.cache.seq_cp(seq, twin, 0, length)
        return twin

    def truncate(self, seq: Sequence, length: int) -> None:
        """Cut to the first tokens, or to fewer where it could not go on after these."""
        self.cache.seq_rm(seq, self._usable(seq, length), -1)

    def with_room(self, action: Callable[[], _T]) -> _T:
        """Do something that needs cells, and give up cached prefixes and idle sessions as long as it does not fit.

        Raises:
            CacheFull: what is left is in use.
        """
        while True:
            try:
                return action()
            except CacheFull as error:
                # What has to move may be shared: whoever shares it gives way, though that frees no cell.
                if not self.evict(error) and not self._give_up_one():
                    raise

    def evict(self, error: CacheFull) -> bool:
        """Give up cells for what did not fit. False: there are none to give up."""
        number, given_up = error.group, False
        group = self.cache.cells.groups[number]
        most = group.num_used - max(error.needed - error.free, 1)
        while group.num_used > most and self._give_up(number, group.num_used - most):
            given_up = True
        return given_up

    def _give_up(self, group: int, wanted: int) -> bool:
        """Give up one branch of cached prefixes, or one idle session. False: all cells of the group are owned by answers that run."""
        cells, before = self.cache.cells, self.cache.num_free

        def gain(seq: Sequence, keep: int) -> int:
            return cells.count_sole(group, seq.id, keep)

        evicted = self.tree.evict(wanted, gain)
        if evicted is None:
            session = next((s for s in self._idle() if s.seq is not None and gain(s.seq, 0)), None)
            if session is None:
                # What is left is shared: among those who are idle, too?
                return self.count_owned(group) < cells.groups[group].num_used and self._give_up_one()
            session.evict()
        elif evicted.keep:
            self.cache.seq_rm(evicted.holder, evicted.keep, -1)
        else:
            evicted.holder.free()
        self._note_given_up(before)
        return True

    def _give_up_one(self) -> bool:
        """Give up a whole cached prefix, or an idle session, whoever else owns its cells. False: there is none."""
        before = self.cache.num_free
        holder, idle = self.tree.evict_holder(), self._idle()
        if holder is not None:
            holder.free()
        elif idle:
            idle[0].evict()
        else:
            return False
        self._note_given_up(before)
        return True

    def _idle(self) -> list[Session]:
        """Sessions with cells that no request has, the one used least recently first."""
        return sorted((s for s in self.sessions if s.seq is not None), key=lambda s: s.used)

    def _note_given_up(self, free_before: int) -> None:
        self.counts["evictions"] += 1
        self.counts["evicted_cells"] += self.cache.num_free - free_before

    def preempt(self) -> bool:
        """Let the youngest answer wait, if there is another; of a beam search all beams, which cannot go on without one of them. It is not
        looked at again before somebody else has left."""
        youngest = max(self.running, key=lambda r: r.age, default=None)
        runs = [r for r in self.running if youngest is not None and (r is youngest or (r.job is youngest.job and r.job.search is not None))]
        if len(runs) == len(self.running):
            return False
        for run in runs:
            self.running.remove(run)
            self.counts["preemptions"] += 1
            self._set_aside(run)
            self.submit(run)
        self._refused = min(runs, key=lambda r: r.age)
        return True

    def _set_aside(self, run: Run) -> None:
        """Take an answer's cells, in a way that it can have them again."""
        if run.seq is not None and len(run.seq) and (run.edited_at is not None or self.preempt_by == "spill"):
            self._num_spilled += 1
            path = Path(self._spills.name) / f"{self._num_spilled}.safetensors"
            try:
                self.cache.save(path, run.seq)
            except (OneKVError, OSError) as error:
                _log.warning("an answer that waits will be evaluated again: %s", error)
            else:
                run.spilled = path
        self.release(run, keep=run.spilled is None)
        if run.spilled is None:
            run.edited_at = None  # what is evaluated again is exact

    def _read_spilled(self, run: Run) -> bool:
        """Read back the cells of an answer, or forget them where the file is lost; False: they do not fit."""
        path, seq = run.spilled, self.new_sequence()
        if path is None:
            raise StateError("no file to read")
        try:
            self.with_room(lambda: self.cache.load(path, seq))
            run.seq = seq
        except CacheFull:
            seq.free()
            return False
        except (OneKVError, OSError) as error:
            _log.warning("an answer that waited is evaluated again: %s", error)
            seq.free()
            run.edited_at = None
        self._forget_spilled(run)
        return True

    def _forget_spilled(self, run: Run) -> None:
        if run.spilled is not None:
            run.spilled.unlink(missing_ok=True)
            run.spilled = None

    # --- ends -------------------------------------------------------------------------------------------------------------------

    def release(self, run: Run, keep: bool) -> None:
        """Take an answer's cells; keep: as a cached prefix, where they are what evaluating its tokens gives."""
        seq, run.seq = run.seq, None
        if seq is None:
            return
        if keep and run.edited_at is None and len(seq):
            self.hold(run, seq)
        else:
            seq.free()

    def hold(self, run: Run, seq: Sequence) -> None:
        """Make a sequence findable by the tokens it has evaluated."""
        key, tokens = run.job.request.key, seq.tokens.astype(np.int64)
        if not self.by_points:
            self._share(seq, self.tree.match(key, tokens).holder)
        for spare in self.tree.insert(key, tokens, seq):
            spare.free()

    def _share(self, seq: Sequence, other: Sequence | None) -> None:
        """Own the cells another sequence has for the same beginning, instead of one's own."""
        if other is None or other is seq:
            return
        common = common_prefix(seq.tokens, other.tokens)
        mine, theirs = (self.cache.cells.column(0, s.id)[:common] for s in (seq, other))
        if not np.array_equal(mine, theirs):
            self.cache.seq_rm(seq, 0, common)
            self.cache.seq_cp(other, seq, 0, common)

    def note_point(self, run: Run) -> None:
        """Hold a place that shall stay restorable, if the answer stands at one."""
        while run.points and run.points[0] <= run.computed:
            if run.points.pop(0) == run.computed and run.seq is not None and run.edited_at is None:
                self.hold(run, self.fork(run.seq, run.computed))

    def end(self, run: Run) -> None:
        """An answer has ended: its cells go to its session, or stay as a cached prefix."""
        self._leave(run)
        if run.job.request.session is None:
            self.release(run, keep=True)
        else:
            self._give_back(run, run.tokens if run.reason in ("stop", "length") else None)

    def discard(self, run: Run) -> None:
        """An answer has failed: its cells hold nobody knows what."""
        self._leave(run)
        self.release(run, keep=False)
        if run.job.request.session is not None:
            self._give_back(run, None)

    def _leave(self, run: Run) -> None:
        for answers in (self.running, self.waiting):
            if run in answers:
                answers.remove(run)
        self._forget_spilled(run)
        self.note_room()

    def _give_back(self, run: Run, tokens: list[int] | None) -> None:
        session = run.job.request.session
        if session is not None:
            self._clock += 1
            session.used = self._clock
            seq, run.seq = run.seq, None
            session.take_back(seq, tokens, run.edited_at)

    def new_session(self, engine: Engine, key: Any) -> Session:
        """One that is known here, so that its cells can be found and given up."""
        session = Session(engine, key)
        self._clock += 1
        session.used = self._clock
        self.sessions.add(session)
        return session

    def close(self) -> None:
        """Give back every cell and remove what was spilled."""
        for seq in self.tree.drop():
            seq.free()
        for session in self.sessions:
            session.evict()
        self._spills.cleanup()
