"""Who gets which rows of the next batch, and whose cells give way when they run out. Owns queue, running answers, prefix tree, sessions.

No phases: an answer catches up with its tokens, and the one that has gets a new token. Everything here runs on the engine's thread.

When cells run out: cached prefixes go first, least recently used, ends of branches before what they share; then the cells of idle sessions;
then the youngest answer waits again (its tokens stay, its cells become a cached prefix, or a file). An older one never pays for a younger.
"""

from __future__ import annotations

import tempfile
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from onekv.cache import KVCache, Sequence
from onekv.core.prefix import PrefixTree, common_prefix
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
    """

    job: Job
    index: int
    tokens: list[int]
    sampler: Sampler
    output: Output
    splits: int = 1
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
    def age(self) -> tuple[int, int]:
        """Sorts the older first."""
        return self.job.arrival, self.index


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of a batch: the next `count` tokens of an answer, and guesses of what follows them."""

    run: Run
    count: int
    draft: tuple[int, ...] = ()


@dataclass(slots=True)
class Counts:
    """What has happened since the engine began."""

    preemptions: int = 0
    evictions: int = 0
    evicted_cells: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


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
        self.counts = Counts()
        self._clock = 0
        self._max_rows = max_batch_tokens  # fewer for a while, after that many did not fit at once
        self._spills = tempfile.TemporaryDirectory(prefix="onekv-")
        self._num_spilled = 0

    # --- the next batch ---------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether an answer runs or waits."""
        return bool(self.running or self.waiting)

    def next_batch(self) -> list[Share]:
        """Admit who fits, and share out the rows: one to each answer that is up to date, the rest evenly to those that are not."""
        self._admit()
        shares = {run: Share(run, 1) for run in self.running if run.pending == 1 and self._in_step(run)}
        left = max(self._max_rows - len(shares), 0)
        behind = sorted((run for run in self.running if run.pending > 1), key=lambda run: run.pending)
        for i, run in enumerate(behind):
            most = run.pending if run.job.search is None else run.pending - 1
            count = min(most, -(-left // (len(behind) - i)))
            count = min([count, *(point - run.computed for point in run.points if point > run.computed)])
            if count > 0:
                shares[run] = Share(run, count)
                left -= count
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
        """After the rows of a batch did not fit at once, though all else was given up: fewer, for the next ones. False: it was one."""
        rows = sum(share.count + len(share.draft) for share in shares)
        self._max_rows = max(rows // 2, 1)
        return rows > 1

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
        taken = {run.job.request.session for run in self.running} - {None}
        for run in list(self.waiting):
            if sum(r.splits for r in self.running) + run.splits > self.max_running:
                return
            session = run.job.request.session
            if session not in taken:
                if not self._start(run):
                    return
                taken |= {session} - {None}

    def _start(self, run: Run) -> bool:
        """Give an answer the cells that are there for it and let it run; False: it has to wait for cells. One that waits for what another
        evaluates stays in the queue, and does not hold up those behind it."""
        session = run.job.request.session
        if run.spilled is not None:
            if (self.running and not self._fits(run)) or not self._read_spilled(run):
                return False
        else:
            length, source, coming = self._match(run)
            if coming > length:
                return True
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
            self.counts.prefix_queries += 1
            self.counts.prefix_hits += run.computed > 0
        return True

    def _match(self, run: Run) -> tuple[int, Sequence | None, int]:
        """The longest beginning of an answer's tokens that can be gone on from, whose cells it is, and up to where another answer that
        begins alike will come."""
        request = run.job.request
        session = request.session
        if request.prompt_logprobs and not run.job.prompt_told:
            return 0, None, 0  # the logits of all its tokens are wanted
        wanted = np.array(run.tokens[:-1], np.int64)
        if session is not None and session.edited_at is not None and session.seq is not None:
            # What was shifted is what the session is asked to go on with; nobody else has it.
            return self._usable(session.seq, common_prefix(session.seq.tokens, wanted)), session.seq, 0
        found = self.tree.match(request.key, wanted, self._usable)
        length, source, coming = found.length, found.holder, 0
        for idle in self.sessions:
            if idle.seq is not None and idle.key == request.key:
                usable = self._common(idle.seq, idle.seq.tokens, idle.edited_at, wanted)
                if usable > length or (usable == length and idle is session):
                    length, source = usable, idle.seq
        for other in self.running:
            if other.job.request.key != request.key or other.seq is None:
                continue
            usable = self._common(other.seq, other.job.prompt[: other.computed], other.edited_at, wanted)
            if usable > length:
                length, source = usable, other.seq
            common = common_prefix(other.job.prompt, wanted) if other.made == 0 else 0
            if common > other.computed and common >= _WORTH_WAITING:
                coming = max(coming, common)
                if self.by_points and common not in other.points:
                    insort(other.points, common)
        return length, source, coming

    def _common(self, seq: Sequence, tokens: NDArray[np.integer], edited_at: int | None, wanted: NDArray[np.int64]) -> int:
        """How many wanted tokens can be gone on from in somebody's cells: those from before an edit."""
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
        run.seq = self.new_sequence() if source is None else self.fork(source, length)

    def _fits(self, run: Run) -> bool:
        """Whether all who run, and this one, can catch up with their tokens and get one more each."""
        answers = [*self.running, run]
        if not self.cache.cells.groups[0].window.is_full:
            return True  # a window's cells are taken over as it moves on; what does not fit is seen when the batch is planned
        owned = self.cache.cells.count_owned(0, [r.seq.id for r in answers if r.seq is not None])
        return owned + sum(r.pending + r.splits for r in answers) <= self.cache.num_cells

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
                holder = self.tree.evict_holder()
                idle = min((s for s in self.sessions if s.seq is not None), key=lambda s: s.used, default=None)
                if holder is not None:
                    holder.free()
                elif idle is not None:
                    idle.evict()
                else:
                    raise
                self.counts.evictions += 1

    def fork(self, seq: Sequence, length: int) -> Sequence:
        """A sequence that shares the first cells of another, as many as can be gone on from."""
        twin = self.new_sequence()
        if not len(seq):  # it was given up for its id
            return twin
        length = self._usable(seq, length)
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
                if not self.evict(error):
                    raise

    def evict(self, error: CacheFull) -> bool:
        """Give up cells for what did not fit. False: there are none to give up."""
        wanted, group = max(error.needed - error.free, 1), error.group
        freed = 0
        while freed < wanted:
            found = self._give_up(wanted - freed, lambda seq, keep: self.cache.cells.count_sole(group, seq.id, keep))
            if not found:
                break
            freed += found
        return freed > 0

    def _give_up(self, wanted: int, gain: Callable[[Sequence, int], int]) -> int:
        """Give up one branch of cached prefixes, or one idle session. Returns what `gain` says of it; 0: there is nothing."""
        before = self.cache.num_free
        evicted = self.tree.evict(wanted, gain)
        found = 0
        if evicted is not None:
            found = gain(evicted.holder, evicted.keep)
            if evicted.keep:
                self.cache.seq_rm(evicted.holder, evicted.keep, -1)
            else:
                evicted.holder.free()
        else:
            for session in sorted(self.sessions, key=lambda s: s.used):
                if session.seq is not None and (found := gain(session.seq, 0)):
                    session.evict()
                    break
        if found:
            self.counts.evictions += 1
            self.counts.evicted_cells += self.cache.num_free - before
        return found

    def preempt(self) -> bool:
        """Let the youngest answer wait, if there is another."""
        if len(self.running) < 2:
            return False
        run = max(self.running, key=lambda r: r.age)
        self.running.remove(run)
        self.counts.preemptions += 1
        if run.seq is not None and len(run.seq) and (run.edited_at is not None or self.preempt_by == "spill"):
            self._num_spilled += 1
            run.spilled = Path(self._spills.name) / f"{self._num_spilled}.safetensors"
            self.cache.save(run.spilled, run.seq)
            run.seq.free()
            run.seq = None
        else:
            self.release(run, keep=True)
        self.submit(run)
        return True

    def _read_spilled(self, run: Run) -> bool:
        path, seq = run.spilled, self.new_sequence()
        if path is None:
            raise StateError("no file to read")
        try:
            self.with_room(lambda: self.cache.load(path, seq))
        except CacheFull:
            seq.free()
            return False
        path.unlink()
        run.spilled, run.seq = None, seq
        return True

    # --- ends -------------------------------------------------------------------------------------------------------------------

    def release(self, run: Run, keep: bool) -> None:
        """Take an answer's cells; keep: as a cached prefix, where they are what evaluating its tokens gives."""
        seq, run.seq = run.seq, None
        if run.spilled is not None:
            run.spilled.unlink(missing_ok=True)
            run.spilled = None
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
        for session in list(self.sessions):
            session.take_back(None, None, None)
        self._spills.cleanup()
