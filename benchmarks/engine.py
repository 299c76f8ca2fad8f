"""How fast does the engine serve many requests, and what does a cached prefix save?

    python -m benchmarks.engine [--weights auto] [--k-dtype bfloat16] [--speculate 0] [--turns 1] [--quick] [--busy]

The demo model, greedy, end tokens ignored: every answer has 32 tokens on every side. Prompts are random words, each of one token, so that
ids and text are the same prompt. A run begins with nothing cached, and all its requests come at once; its seconds end with the last answer.

    32 on one prompt of 2000   requests of the same 2,000 tokens and 16 of their own
    32 of 256                  requests that share nothing
    first token of 2016        of one request alone, with nothing cached and with the first 2,000 tokens
    K/V of ...                 cells in use at the peak, against the tokens that differ in themselves or in what precedes them

"evaluated" are the tokens that went through the model: prompts less what was cached, and answers less their last token. The others:

    llama-cpp server       llama-cpp-python's own, over HTTP with a thread per request, on the same file with 16-bit keys and values. It
                           answers one request at a time, and goes on from what the last request's prompt has in common with the next one
    continuous batching    transformers' own, in float32, pages shared; fewer requests, on both sides, as its turn is long

onekv is called in this process, without HTTP. Ratios are of generated tokens a second, ours over theirs: above 1 we are ahead. "half after"
is when half of the answers were complete, which says what waiting for one's turn costs. A side that cannot run is left out with a line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence as Listing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.report import Result, begin, in_turns, options, report, timed
from benchmarks.transformers import PAGE, stock_model
from onekv.core.prefix import common_prefix
from onekv.engine.engine import Engine
from onekv.engine.request import Delta, Done, Event, Failed
from onekv.models import Model, cache_for, gguf, load_model
from onekv.models.pull import NAMED_MODELS
from onekv.models.text import Text

MODEL: Final = "smollm2"
OURS: Final = "onekv"
SERVER: Final = "llama-cpp server"
BATCHING: Final = "continuous batching"
BATCH: Final = 512  # rows of a step, on every side
SERVER_COMMAND: Final = (sys.executable, "-m", "llama_cpp.server")
START_S: Final = 60.0  # within which a server answers
ANSWER_S: Final = 600.0  # within which it answers a request, all those before it included

Tokens = list[list[int]]


class CannotRun(Exception):
    """Another side cannot run a case; says why."""


@dataclass(frozen=True)
class Sizes:
    """Counts of requests and tokens. `few`: requests of the side that takes long."""

    requests: int = 32
    few: int = 8
    common: int = 2000
    own: int = 16
    alone: int = 256
    new_tokens: int = 32


QUICK: Final = Sizes(requests=4, few=2, common=48, own=4, alone=16, new_tokens=4)


class Words:
    """Random words of one token each, whose text has the same tokens again."""

    def __init__(self, text: Text) -> None:
        self.rng = np.random.default_rng(0)
        ids = [i for i in range(text.vocab_size) if re.fullmatch(" [a-z]{3,}", text.decode([i]))]
        self.ids = np.array([i for i in ids if text.encode(text.decode([i])) == [i]])

    def __call__(self, count: int) -> list[int]:
        found: list[int] = self.rng.choice(self.ids, count).tolist()
        return found

    def sharing(self, requests: int, common: int, own: int) -> Tokens:
        """Prompts that begin alike."""
        prefix = self(common)
        return [prefix + self(own) for _ in range(requests)]


def distinct(rows: Listing[Listing[int]]) -> int:
    """How many tokens there are, one counted once however many rows begin with it and with all that precedes it."""
    ordered = [np.array(row, np.int64) for row in sorted(map(list, rows))]
    return sum(map(len, ordered)) - sum(common_prefix(a, b) for a, b in itertools.pairwise(ordered))


# --- sides --------------------------------------------------------------------------------------------------------------------------


class Ours:
    """onekv. Every run has an engine and a buffer of its own, made outside of the time; what it noted of the last run is kept."""

    def __init__(self, model: Model, k_dtype: str, speculate: int, new_tokens: int) -> None:
        self.model, self.k_dtype, self.speculate, self.new_tokens = model, k_dtype, speculate, new_tokens
        self.evaluated = self.peak = self.unique = self.drafted = self.accepted = 0
        self.waits: list[float] = []

    def engine(self, prompts: Tokens) -> Engine:
        """With cells for twice what is needed, so that cells that should have been shared show up in the peak."""
        answers = len(prompts) * (self.new_tokens + self.speculate)
        cache = cache_for(self.model, 2 * (distinct(prompts) + answers), k_dtype=self.k_dtype)
        return Engine(self.model, cache, max_running=max(len(prompts), 1), max_batch_tokens=BATCH, speculate=self.speculate)

    def run(self, prompts: Tokens) -> float:
        """Seconds until all are answered."""
        made: Tokens = [[] for _ in prompts]
        ended: SimpleQueue[Done | Failed] = SimpleQueue()
        self.peak = 0
        with self.engine(prompts) as engine:

            def hear(row: list[int], event: Event) -> None:
                self.peak = max(self.peak, engine.cache.num_used)
                if isinstance(event, Delta):
                    row.extend(event.token_ids)
                elif isinstance(event, Done | Failed):
                    ended.put(event)

            requests = [engine.request(prompt, max_tokens=self.new_tokens, ignore_eos=True) for prompt in prompts]
            start = time.perf_counter()
            for request, row in zip(requests, made, strict=True):
                engine.submit(request).listen(partial(hear, row))
            last = [ended.get() for _ in prompts]
            took = time.perf_counter() - start
            stats = engine.stats()
        for event in last:
            if isinstance(event, Failed):
                raise event.error
        _check_counts(OURS, made, self.new_tokens, len(prompts))
        self.waits = [event.total_s for event in last if isinstance(event, Done)]
        self.evaluated = stats.prompt_tokens - stats.cached_tokens + stats.generated_tokens - len(prompts)
        self.drafted, self.accepted = stats.drafted_tokens, stats.accepted_tokens
        self.unique = distinct([prompt + row[:-1] for prompt, row in zip(prompts, made, strict=True)])
        return took

    def first_token(self, first: list[int], second: list[int], is_cached: bool) -> float:
        """Seconds until the second prompt's first token; is_cached: after the first was answered."""
        with self.engine([first, second]) as engine:
            if is_cached:
                engine.generate(first, max_tokens=1)
            found = engine.generate(second, max_tokens=1, ignore_eos=True).usage.first_token_s
        if found is None:
            raise RuntimeError("a request ended without a token")
        return found


class Served:
    """A server of llama-cpp-python at a port of this machine."""

    def __init__(self, port: int, text: Text, new_tokens: int, forgetting: list[int]) -> None:
        self.port, self.text, self.new_tokens, self.forgetting = port, text, new_tokens, forgetting
        self.waits: list[float] = []
        # Whatever could end an answer, of all the model's special tokens.
        never = dict.fromkeys(map(str, text.tokenizer.added_tokens_decoder), -100.0)
        self.settings = {"max_tokens": new_tokens, "temperature": 0.0, "repeat_penalty": 1.0, "logit_bias": never}

    def run(self, prompts: Tokens) -> float:
        """Seconds until all are answered."""
        self._answer(self.forgetting)  # its one conversation is another one, then
        with _threads(len(prompts)) as pool:
            start = time.perf_counter()
            ends = [pool.submit(self._answer, prompt) for prompt in prompts]
            self.waits = [end.result() - start for end in ends]
        return max(self.waits)

    def _answer(self, prompt: list[int]) -> float:
        """When the answer came."""
        body = json.dumps({"prompt": self.text.decode(prompt), **self.settings})
        try:
            answer = json.loads(_asked(self.port, "POST", "/v1/completions", body))
        except (OSError, HTTPException) as error:
            raise CannotRun(f"the server did not answer a request: {error!r}") from error
        end = time.perf_counter()
        counts = [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
        if counts != [len(prompt), self.new_tokens]:
            raise RuntimeError(f"the server counts {counts} tokens of prompt and answer, not {[len(prompt), self.new_tokens]}")
        return end


class Batching:
    """transformers' continuous batching. Its pages are made outside of the time, anew for each run."""

    def __init__(self, stock: PreTrainedModel, new_tokens: int, warming: Tokens) -> None:
        self.stock, self.new_tokens, self.warming = stock, new_tokens, warming

    def run(self, prompts: Tokens) -> float:
        """Seconds until all are answered."""
        model: Any = self.stock
        config_of: Any = GenerationConfig
        config = config_of(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        pages = sum(-(-(len(p) + self.new_tokens) // PAGE) for p in prompts)
        paged = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages + len(prompts),
            max_batch_tokens=BATCH,
            max_requests_per_batch=len(prompts),
            max_blocks_per_request=0,  # for an attention that other devices have
        )
        made: Tokens = []
        try:
            with model.continuous_batching_context_manager(config, continuous_batching_config=paged, block=True, timeout=30) as batching:
                self._answers(batching, self.warming)
                took = timed(lambda: made.extend(self._answers(batching, prompts)))
        except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise CannotRun(f"it raised {error!r}") from error
        _check_counts(BATCHING, made, self.new_tokens, len(prompts))
        return took

    def _answers(self, batching: Any, prompts: Tokens) -> Tokens:
        """In the order of the prompts."""
        ids = batching.add_requests(inputs=prompts, max_new_tokens=self.new_tokens)
        made: dict[str, list[int]] = {}
        while len(made) < len(ids):
            one = batching.get_result(timeout=1)
            if one is None and not batching.is_running():
                raise CannotRun("its thread has ended")
            if one is not None and one.error is not None:
                raise CannotRun(f"a request failed: {one.error}")
            if one is not None and one.is_finished():
                made[one.request_id] = list(one.generated_tokens)
        return [made[request] for request in ids]


def _check_counts(side: str, made: Tokens, new_tokens: int, requests: int) -> None:
    counts = [len(row) for row in made]
    if counts != [new_tokens] * requests:
        raise RuntimeError(f"{side} made {counts} tokens, not {new_tokens} for each of {requests} requests")


# --- the server ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def llama_server(model: str, num_tokens: int, threads: int, command: Listing[str] = SERVER_COMMAND) -> Iterator[int]:
    """Run a server for conversations of so many tokens; its port. It is gone at the end of the block, however that comes.

    Raises:
        CannotRun: it ended, or did not answer in time; with its last words.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "n_ctx": -(-num_tokens // 256) * 256,
        "n_batch": BATCH,
        "n_ubatch": BATCH,
    }
    # Its defaults take half of the cores and compute logits of the whole prompt.
    settings |= {"n_threads": threads, "n_threads_batch": threads, "logits_all": "false", "flash_attn": "true", "verbose": "false"}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen([*command, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            if not _starts(process, port):
                log.seek(0)
                said = log.read().strip().splitlines() or ["nothing"]
                raise CannotRun(f"{' '.join(command[1:])} did not start; the last it said: {said[-1]}")
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _starts(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            _asked(port, "GET", "/v1/models")
        except (OSError, HTTPException):
            time.sleep(0.1)
        else:
            return True
    return False


def _asked(port: int, method: str, path: str, body: str | None = None) -> bytes:
    """What it answers. A connection of its own, and no proxy.

    Raises:
        OSError, HTTPException: no answer, or one of another status than 200.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        found = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise HTTPException(f"{method} {path}: status {response.status}, {found[:200]!r}")
    return found


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Not waited for when the block fails: they end with the server."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# --- cases --------------------------------------------------------------------------------------------------------------------------


class Bench:
    """The cases; each gives its rows."""

    def __init__(self, ours: Ours, words: Words, sizes: Sizes, turns: int, has_goals: bool) -> None:
        self.ours, self.words, self.sizes, self.turns, self.has_goals = ours, words, sizes, turns, has_goals

    def _goal(self, goal: str) -> str | None:
        return goal if self.has_goals else None

    def shared(self, requests: int, peer: str, other: Served | Batching | None) -> list[Result]:
        """On one prompt."""
        size = self.sizes
        name = f"{requests} on one prompt of {size.common}"
        rows = self._compared(name, self.words.sharing(requests, size.common, size.own), peer, other)
        if requests == size.requests:
            rows.append(Result(f"K/V of {name}: cells / unique tokens", self.ours.peak / self.ours.unique, "x", self._goal("<= 1.1")))
        return rows

    def unrelated(self, requests: int, peer: str, other: Served | Batching | None) -> list[Result]:
        """Without anything in common."""
        prompts = [self.words(self.sizes.alone) for _ in range(requests)]
        return self._compared(f"{requests} of {self.sizes.alone}", prompts, peer, other)

    def _compared(self, name: str, prompts: Tokens, peer: str, other: Served | Batching | None) -> list[Result]:
        ours = self.ours
        sides: dict[str, Callable[[], float]] = {OURS: lambda: ours.run(prompts)}
        try:
            if other is not None:
                theirs = other
                took = in_turns({**sides, peer: lambda: theirs.run(prompts)}, self.turns, warm_up=0)
            else:
                took = in_turns(sides, self.turns, warm_up=0)
        except CannotRun as error:
            print(f"{name}: without {peer}: {error}", flush=True)
            took = in_turns(sides, self.turns, warm_up=0)
        total = len(prompts) * ours.new_tokens
        rows = [Result(f"{name}: {side}", total / seconds, "tokens/s") for side, seconds in took.items()]
        rows.append(Result(f"{name}: {OURS}, evaluated", ours.evaluated / took[OURS], "tokens/s"))
        if ours.drafted:
            rows.append(Result(f"{name}: {OURS}, guesses accepted", 100 * ours.accepted / ours.drafted, "%"))
        if peer in took:
            rows.append(Result(f"{name}: {OURS} / {peer}", took[peer] / took[OURS], "x"))
        for side, one in ((OURS, ours), (peer, other)):
            if side in took and isinstance(one, Ours | Served):
                rows.append(Result(f"{name}: {side}, half after", statistics.median(one.waits), "s"))
        return rows

    def first_token(self) -> list[Result]:
        """Alone, cold and not."""
        size = self.sizes
        first, second = self.words.sharing(2, size.common, size.own)
        sides = {
            "nothing cached": lambda: self.ours.first_token(first, second, False),
            f"{size.common} cached": lambda: self.ours.first_token(first, second, True),
        }
        took = in_turns(sides, 3 if self.has_goals else 1, warm_up=0)
        name = f"first token of {len(second)}"
        rows = [Result(f"{name}: {side}", seconds * 1e3, "ms") for side, seconds in took.items()]
        cold, warm = took.values()
        return [*rows, Result(f"{name}: cached / not", warm / cold, "x", self._goal("<= 0.1"))]


def main(argv: Listing[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = options(__doc__)
    parser.add_argument("--weights", default="auto", help="weights of onekv's side, as load_model takes them")
    parser.add_argument("--k-dtype", default="bfloat16", help="onekv's cells")
    parser.add_argument("--speculate", type=int, default=0, help="most tokens onekv guesses per step and answer")
    parser.add_argument("--turns", type=int, default=1, help="runs of every side that are counted")
    given = parser.parse_args(argv)
    conditions = begin(given)
    path = NAMED_MODELS[MODEL].path
    if not path.is_file():
        raise SystemExit(f"{MODEL} is not on this machine; fetch it with: onekv pull {MODEL}")
    sizes = QUICK if conditions.quick else Sizes()
    with gguf.quiet():
        model, stock = load_model(MODEL, weights=given.weights), stock_model(MODEL, "float32")
    words = Words(model.text)
    ours = Ours(model, given.k_dtype, given.speculate, sizes.new_tokens)
    bench = Bench(ours, words, sizes, given.turns, not conditions.quick)
    ours.run(words.sharing(2, 32, 4))  # what is compiled at the first use
    results = bench.first_token()
    with contextlib.ExitStack() as running:
        served: Served | None = None
        try:
            port = running.enter_context(llama_server(str(path), sizes.common + sizes.own + sizes.new_tokens + 1, torch.get_num_threads()))
            served = Served(port, model.text, sizes.new_tokens, words(8))
        except CannotRun as error:
            print(f"without {SERVER}: {error}", flush=True)
        results += bench.shared(sizes.requests, SERVER, served) + bench.unrelated(sizes.requests, SERVER, served)
    batching = Batching(stock, sizes.new_tokens, [words(8), words(8)])
    results += bench.shared(sizes.few, BATCHING, batching) + bench.unrelated(sizes.few, BATCHING, batching)
    report("engine", results, conditions)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then, too
    main()
