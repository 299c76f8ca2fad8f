"""How fast is the whole model, against llama.cpp on the same file and the same cores?

    python -m benchmarks.llama_cpp [--weights auto,int4] [--k-dtype bfloat16] [--threads N] [--quick] [--busy]

The demo model's GGUF, random tokens, the same counts on both sides; llama.cpp through its low-level calls with micro-batches of 512, 16-bit
keys and values, flash attention left to it, once with its unified buffer and once with a stream per sequence. A turn runs every side, one
after the other, and takes back what it fed; tokens a second from the median over turns. A ratio is ours over llama.cpp's better mode.

    prefill S x L         S prompts of L tokens
    decode S x L          one step of S sequences behind L tokens each
    decode 32 sharing L   the same with one prompt in all of them: `seq_cp` there, forks here
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence as Listing
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch

from benchmarks.report import Result, begin, in_turns, options, report, timed
from onekv.models import Model, cache_for, gguf, load_model
from onekv.models.pull import NAMED_MODELS

MODEL: Final = "smollm2"
UBATCH: Final = 512


class Player(Protocol):
    """One side of one case: S sequences, fed and taken back."""

    def feed(self, seq: int, tokens: Listing[int]) -> None:
        """Evaluate a prompt, for the logits of its last token."""
        ...

    def share(self) -> None:
        """Every sequence becomes a copy of the first."""
        ...

    def step(self, tokens: Listing[int]) -> None:
        """One token of every sequence, for the logits of all."""
        ...

    def rewind(self, length: int) -> None:
        """Take back what lies behind the first `length` tokens."""
        ...


class Ours:
    """onekv: one buffer for all sequences."""

    def __init__(self, model: Model, sequences: int, cells: int, dtype: str) -> None:
        self.model = model
        self.cache = cache_for(model, cells, k_dtype=dtype)
        self.seqs = [self.cache.sequence() for _ in range(sequences)]

    def feed(self, seq: int, tokens: Listing[int]) -> None:
        self.model.extend(self.cache, [self.seqs[seq]], [tokens], max_ubatch=UBATCH)

    def share(self) -> None:
        for seq in self.seqs[1:]:
            self.cache.seq_cp(self.seqs[0], seq)

    def step(self, tokens: Listing[int]) -> None:
        self.model.extend(self.cache, self.seqs, [[token] for token in tokens])

    def rewind(self, length: int) -> None:
        for seq in self.seqs:
            self.cache.seq_rm(seq, length, -1)


class Theirs:
    """llama.cpp: one unified buffer, or one stream per sequence."""

    def __init__(self, lib: Any, model: Any, sequences: int, cells: int, unified: bool, threads: int) -> None:
        self.lib = lib
        settings = lib.llama_context_default_params()
        settings.n_ctx = -(-cells // 256) * 256 if unified else -(-cells // sequences // 256) * 256 * sequences
        settings.n_batch = settings.n_ubatch = UBATCH
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = unified
        self.context = lib.llama_init_from_model(model, settings)
        if not self.context:
            raise SystemExit(f"llama.cpp made no context of {settings.n_ctx} cells for {sequences} sequences")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(UBATCH, 0, 1)
        self.lengths = [0] * sequences

    def _run(self, rows: Listing[tuple[int, int, bool]]) -> None:
        """(sequence, token, wants logits) each."""
        for i, (seq, token, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, self.lengths[seq]
            self.batch.n_seq_id[i], self.batch.seq_id[i][0], self.batch.logits[i] = 1, seq, wanted
            self.lengths[seq] += 1
        self.batch.n_tokens = len(rows)
        code = self.lib.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode answered {code}")
        self.lib.llama_synchronize(self.context)

    def feed(self, seq: int, tokens: Listing[int]) -> None:
        for start in range(0, len(tokens), UBATCH):
            part = tokens[start : start + UBATCH]
            self._run([(seq, token, start + i == len(tokens) - 1) for i, token in enumerate(part)])

    def share(self) -> None:
        for seq in range(1, len(self.lengths)):
            self.lib.llama_memory_seq_cp(self.memory, 0, seq, -1, -1)
            self.lengths[seq] = self.lengths[0]

    def step(self, tokens: Listing[int]) -> None:
        self._run([(seq, token, True) for seq, token in enumerate(tokens)])

    def rewind(self, length: int) -> None:
        for seq in range(len(self.lengths)):
            self.lib.llama_memory_seq_rm(self.memory, seq, length, -1)
            self.lengths[seq] = min(length, self.lengths[seq])

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)


class Bench:
    """Both libraries with the model loaded."""

    def __init__(self, weights: Listing[str], dtype: str, threads: int, turns: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        path = NAMED_MODELS[MODEL].path
        if not path.is_file():
            raise SystemExit(f"{MODEL} is not on this machine; fetch it with: onekv pull {MODEL}")
        self._quiet = self.lib.llama_log_callback(lambda level, text, data: None)
        self.lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.lib.llama_backend_init()
        self.theirs = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        with gguf.quiet():
            self.models = {f"onekv {kind}": load_model(MODEL, weights=kind) for kind in weights}
        self.dtype, self.threads, self.turns = dtype, threads, turns
        self.rng = np.random.default_rng(0)

    def tokens(self, count: int) -> list[int]:
        """Random ones."""
        found: list[int] = self.rng.integers(100, 49_000, count).tolist()
        return found

    def players(self, sequences: int, cells: int, longest: int) -> dict[str, Player]:
        """Every side. A stream has cells of its own for its whole sequence, also for what it has in common with others."""
        # Weights of 4 bits are for few rows.
        used = {name: model for name, model in self.models.items() if sequences <= 8 or len(self.models) == 1 or not name.endswith("int4")}
        ours: dict[str, Player] = {name: Ours(model, sequences, cells, self.dtype) for name, model in used.items()}
        modes = {"unified": True, "streams": False} if sequences > 1 else {"unified": True}
        sizes = {name: cells if unified else sequences * longest for name, unified in modes.items()}
        return ours | {
            name: Theirs(self.lib, self.theirs, sequences, sizes[name], unified, self.threads) for name, unified in modes.items()
        }

    def prefill(self, sequences: int, length: int, goal: str | None) -> list[Result]:
        players = self.players(sequences, sequences * length, length)
        prompts = [self.tokens(length) for _ in range(sequences)]

        def run(player: Player) -> float:
            def feed() -> None:
                for seq, prompt in enumerate(prompts):
                    player.feed(seq, prompt)

            player.rewind(0)
            return timed(feed)

        return self._results(f"prefill {sequences} x {length}", players, run, sequences * length, goal)

    def decode(self, sequences: int, length: int, goals: dict[str, str], shared: bool = False) -> list[Result]:
        steps = 4
        own = steps + 1
        players = self.players(sequences, (length if shared else sequences * length) + sequences * own, length + own)
        prompts = [self.tokens(length) for _ in range(1 if shared else sequences)]
        for player in players.values():
            for seq, prompt in enumerate(prompts):
                player.feed(seq, prompt)
            if shared:
                player.share()
        following = [self.tokens(sequences) for _ in range(steps)]

        def run(player: Player) -> float:
            def step() -> None:
                for tokens in following:
                    player.step(tokens)

            took = timed(step)
            player.rewind(length)
            return took

        name = f"decode {sequences} sharing {length}" if shared else f"decode {sequences} x {length}"
        return self._results(name, players, run, steps * sequences, goals)

    def _results(self, name: str, players: dict[str, Player], run: Callable[[Player], float], count: int, goals: Any) -> list[Result]:
        took = in_turns({side: partial(run, player) for side, player in players.items()}, self.turns)
        rates = {side: count / seconds for side, seconds in took.items()}
        best = max(rate for side, rate in rates.items() if side not in self.models)
        rows = [Result(f"{name}: {side}", rate, "tokens/s") for side, rate in rates.items()]
        for side in self.models.keys() & rates.keys():
            goal = goals.get(side.split()[1]) if isinstance(goals, dict) else goals
            rows.append(Result(f"{name}: {side} / llama.cpp", rates[side] / best, "x", goal))
        for player in players.values():
            if isinstance(player, Theirs):
                player.close()
        return rows


def main(argv: Listing[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = options(__doc__)
    parser.add_argument("--weights", default="auto,int4", help="weights of onekv's side, as load_model takes them; several with commas")
    parser.add_argument("--k-dtype", default="bfloat16", help="onekv's cells")
    parser.add_argument("--max-sequences", type=int, default=32, help="below 32: without the long cases of 32 sequences")
    parser.add_argument("--turns", type=int, default=5, help="runs of every side that are counted")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args(argv)
    conditions = begin(given)
    torch.set_num_threads(given.threads)
    weights = given.weights.split(",")
    try:
        bench = Bench(weights, given.k_dtype, given.threads, 2 if conditions.quick else given.turns)
    except ModuleNotFoundError:
        raise SystemExit("llama-cpp-python is not installed; pip install llama-cpp-python==0.3.36") from None
    results: list[Result] = []
    if conditions.quick:
        results += bench.prefill(1, 64, None) + bench.decode(2, 32, {}) + bench.decode(3, 64, {}, shared=True)
    else:
        every = dict.fromkeys(weights, "")
        results += bench.prefill(2, 512, ">= 3")
        results += bench.decode(1, 512, dict.fromkeys(every, ">= 1"))
        results += bench.decode(8, 512, dict.fromkeys(every, ">= 2"))
        if given.max_sequences >= 32:
            results += bench.decode(32, 512, dict.fromkeys(every, ">= 2"))
            results += bench.decode(32, 2048, dict.fromkeys(every, ">= 3"), shared=True)
    report("llama_cpp", results, conditions)


if __name__ == "__main__":
    main()
