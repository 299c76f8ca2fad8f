"""How do onekv's cells compare with transformers' own caches, and its decoding with transformers' generate and continuous batching?

    python -m benchmarks.transformers [--weights auto] [--dtype float32] [--model smollm2] [--quick] [--busy]

Every row is the median of runs made in turns, the sides one after the other in each turn; ratios are theirs / ours, or our tokens a second
over theirs: above 1 we are ahead. The operations take random keys and values in the shape of the demo model, all its layers:

    append    one decode step's keys and values behind 4k tokens; ours with the plan and the bookkeeping
    fork      a copy of a 4k sequence: `Sequence.fork` against `deepcopy`
    crop      a 4k sequence down to half
    reorder   8 beams of 1k tokens change places
    generate  8 prompts of 64 to 512 random tokens, 64 new tokens each, greedy, no end token; prompts included in the time

onekv generates twice: by the engine's loop (`decode`, weights by --weights), for which the goal is stated, and by transformers' `generate`
over our cells (`as_cache`, in --dtype as the other sides). "tokens as DynamicCache" is the share of equal tokens: a check, not a speed.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence as Listing
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

import onekv
from benchmarks.report import Result, Side, begin, in_turns, options, report, timed
from onekv.cache import KVCache
from onekv.core.batch import Batch
from onekv.engine.engine import Engine
from onekv.engine.request import Request
from onekv.models import Model, gguf, load_model
from onekv.models.pull import NAMED_MODELS

OURS: Final = "onekv"
GOAL: Final = ">= 3"
PAGE: Final = 256  # tokens, of transformers' continuous batching

Tokens = list[list[int]]


def compared(name: str, medians: dict[str, float]) -> list[Result]:
    """Microseconds of each side, then how many times ours each of the others takes."""
    rows = [Result(f"{name}: {side}", seconds * 1e6, "us") for side, seconds in medians.items()]
    return rows + [Result(f"{name}: {side} / {OURS}", medians[side] / medians[OURS], "x") for side in medians if side != OURS]


# --- operations ---------------------------------------------------------------------------------------------------------------------


class Filled:
    """The same random tokens in each kind of cache: B sequences of T tokens, and room for more."""

    def __init__(self, model: PreTrainedModel, layers: Listing[onekv.LayerSpec], sequences: int, tokens: int, room: int) -> None:
        self.tokens = tokens
        self.kv = KVCache(layers, sequences * (tokens + room), vocab_size=model.config.vocab_size)
        self.seqs = [self.kv.sequence() for _ in range(sequences)]
        self.dynamic = DynamicCache(config=model.config)
        self.static = StaticCache(config=model.config, max_cache_len=tokens + room)
        shapes = [(sequences, spec.num_kv_heads, tokens, spec.head_dim) for spec in layers]
        for layer, shape in enumerate(shapes):
            keys = torch.randn(shape)
            for cache in (self.dynamic, self.static):
                cache.update(keys, keys, layer)
        size = 512
        for start in range(0, tokens, size):
            count = min(size, tokens - start)
            ids = np.zeros(count * sequences, np.int64)
            self._store(
                Batch(ids, seqs=np.repeat(np.array([s.id for s in self.seqs]), count)), [torch.randn(len(ids), *s[1::2]) for s in shapes]
            )
        self.new = [torch.randn(sequences, spec.num_kv_heads, 1, spec.head_dim) for spec in layers]  # [B, G, 1, D]

    def _store(self, batch: Batch, keys: Listing[Tensor]) -> None:
        """keys: per layer [T, G, D]; values are the same."""
        for step in self.kv.plan(batch, max_ubatch=len(keys[0])):
            with step:
                for layer, key in enumerate(keys):
                    step.store(layer, key, key)

    def append(self) -> dict[str, Side]:
        """One token each; taken back afterwards, outside of the time."""
        rows = [key.squeeze(2) for key in self.new]  # [B, G, D]
        ids = np.zeros(len(self.seqs), np.int64)

        def ours() -> float:
            took = timed(lambda: self._store(Batch(ids, seqs=[s.id for s in self.seqs]), rows))
            for seq in self.seqs:
                seq.truncate(self.tokens)
            return took

        def theirs(cache: Any) -> float:
            def update() -> None:
                for layer, key in enumerate(self.new):
                    cache.update(key, key, layer)

            took = timed(update)
            cache.crop(-1)
            return took

        return {OURS: ours, "DynamicCache": lambda: theirs(self.dynamic), "StaticCache": lambda: theirs(self.static)}

    def fork(self) -> dict[str, Side]:
        """A copy, dropped at once."""

        def ours() -> float:
            start = time.perf_counter()
            twin = self.seqs[0].fork()
            took = time.perf_counter() - start
            twin.free()
            return took

        def theirs(cache: Any) -> Side:
            return lambda: timed(lambda: copy.deepcopy(cache))

        return {OURS: ours, "DynamicCache": theirs(self.dynamic), "StaticCache": theirs(self.static)}

    def crop(self) -> dict[str, Side]:
        """Half of a copy."""

        def ours() -> float:
            twin = self.seqs[0].fork()
            took = timed(lambda: twin.truncate(self.tokens // 2))
            twin.free()
            return took

        def theirs(cache: Any) -> float:
            twin = copy.deepcopy(cache)
            return timed(lambda: twin.crop(-(self.tokens - self.tokens // 2)))

        return {OURS: ours, "DynamicCache": lambda: theirs(self.dynamic), "StaticCache": lambda: theirs(self.static)}

    def reorder(self) -> dict[str, Side]:
        """Every beam takes another's place; some beams win twice."""
        count = len(self.seqs)
        beams: Any = torch.tensor([(3 * i) // 4 for i in range(count)])
        cache = onekv.as_cache(self.kv, self.seqs)
        return {
            OURS: lambda: timed(lambda: cache.reorder_cache(beams)),
            "DynamicCache": lambda: timed(lambda: self.dynamic.reorder_cache(beams)),
            "StaticCache": lambda: timed(lambda: self.static.reorder_cache(beams)),
        }


# --- generate -----------------------------------------------------------------------------------------------------------------------


class Generating:
    """The same prompts on every side; `made` holds the new tokens of each."""

    def __init__(self, stock: PreTrainedModel, model: Model, prompts: Tokens, new_tokens: int) -> None:
        self.stock, self.prompts, self.new_tokens, self.runs = stock, prompts, new_tokens, 0
        self.made: dict[str, Tokens] = {}
        self.width = max(map(len, prompts))
        self.ids = torch.zeros(len(prompts), self.width, dtype=torch.int64)
        self.mask = torch.zeros_like(self.ids)
        for row, prompt in enumerate(prompts):
            self.ids[row, self.width - len(prompt) :] = torch.tensor(prompt)
            self.mask[row, self.width - len(prompt) :] = 1
        num_cells = sum(len(p) + new_tokens for p in prompts) + 1
        self.engine = Engine(model, onekv.cache_for(model, num_cells), max_running=len(prompts))
        self.attached = copy.deepcopy(stock)
        self.attached_cache = onekv.cache_for(self.attached, num_cells, k_dtype=str(stock.dtype).removeprefix("torch."))
        pages = sum(-(-(len(p) + new_tokens) // PAGE) for p in prompts)
        # Kept from turn to turn, as a server keeps it, but without the prompts of the turn before.
        self.paged = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages + len(prompts), max_batch_tokens=512, allow_block_sharing=False
        )

    def sides(self) -> dict[str, Side]:
        """The engine first."""
        return {
            OURS: lambda: self._timed(OURS, self._decode),
            "as_cache": lambda: self._timed("as_cache", self._generate_in_cells),
            "DynamicCache": lambda: self._timed("DynamicCache", lambda: self._generate(self.stock)),
            "StaticCache": lambda: self._timed(
                "StaticCache", lambda: self._generate(self.stock, cache_implementation="static", disable_compile=True)
            ),
            "continuous batching": lambda: self._timed("continuous batching", self._generate_batch),
        }

    def _timed(self, name: str, work: Callable[[], Tokens]) -> float:
        start = time.perf_counter()
        self.made[name] = work()
        took = time.perf_counter() - start
        counts = [len(row) for row in self.made[name]]
        if counts != [self.new_tokens] * len(self.prompts):
            raise RuntimeError(f"{name} made {counts} tokens, not {self.new_tokens} each")
        return took

    def _decode(self) -> Tokens:
        self.runs += 1  # a key of its own for every run, so that none finds the cells of another
        key = (("run", str(self.runs)),)
        asked = [Request(tuple(p), max_tokens=self.new_tokens, ignore_eos=True, key=key) for p in self.prompts]
        return [stream.result().token_ids for stream in [self.engine.submit(one) for one in asked]]

    def _generate(self, model: PreTrainedModel, **how: Any) -> Tokens:
        ids: Any = model.generate(input_ids=self.ids, attention_mask=self.mask, max_new_tokens=self.new_tokens, do_sample=False, **how)  # type: ignore[operator]
        made: Tokens = ids[:, self.width :].tolist()
        return made

    def _generate_in_cells(self) -> Tokens:
        seqs = [self.attached_cache.sequence() for _ in self.prompts]
        made = self._generate(self.attached, cache=onekv.as_cache(self.attached_cache, seqs))
        for seq in seqs:
            seq.free()
        return made

    def _generate_batch(self) -> Tokens:
        config_of: Any = GenerationConfig
        config = config_of(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        model: Any = self.stock
        attention = model.config._attn_implementation
        outputs = model.generate_batch(
            self.prompts, generation_config=config, continuous_batching_config=self.paged, persistent_manager=True
        )
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)  # the next side is not to run with what this one chose
        by_prompt = {tuple(output.prompt_ids): list(output.generated_tokens) for output in outputs.values()}
        return [by_prompt[tuple(prompt)] for prompt in self.prompts]

    def results(self, medians: dict[str, float]) -> list[Result]:
        """Tokens a second, ours over theirs, and how many tokens are equal."""
        total = self.new_tokens * len(self.prompts)
        name = f"generate {len(self.prompts)} x {self.new_tokens}"
        rows = [Result(f"{name}: {side}", total / seconds, "tokens/s") for side, seconds in medians.items()]
        for side, ours in itertools.product(("DynamicCache", "StaticCache", "continuous batching"), (OURS, "as_cache")):
            rows.append(Result(f"{name}: {ours} / {side}", medians[side] / medians[ours], "x", GOAL if ours == OURS else None))
        reference = np.array(self.made["DynamicCache"])
        for side, made in self.made.items():
            if side != "DynamicCache":
                rows.append(Result(f"{name}: {side}, tokens as DynamicCache", 100 * float((np.array(made) == reference).mean()), "%"))
        return rows


def stock_model(name: str, dtype: str) -> PreTrainedModel:
    """The same weights, loaded by transformers alone; no end token."""
    if name in NAMED_MODELS and not NAMED_MODELS[name].path.is_file():
        raise SystemExit(f"{name} is not on this machine; fetch it with: onekv pull {name}")
    source = str(gguf.converted(NAMED_MODELS[name].path)) if name in NAMED_MODELS else name
    auto_model: Any = AutoModelForCausalLM
    model: Any = auto_model.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    stock: PreTrainedModel = model
    return stock


def main(argv: Listing[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = options(__doc__)
    parser.add_argument("--weights", default="auto", help="weights of onekv's engine, as load_model takes them")
    parser.add_argument("--dtype", default="float32", help="weights of the other sides: float32 or bfloat16")
    parser.add_argument("--model", default="smollm2", help="a pulled model's name, a directory or a hub id")
    parser.add_argument("--turns", type=int, default=None, help="runs of every side that are counted")
    given = parser.parse_args(argv)
    conditions = begin(given)
    quick = conditions.quick
    turns = given.turns or (1 if quick else 5)
    torch.manual_seed(0)
    with gguf.quiet():
        stock, engine = stock_model(given.model, given.dtype), load_model(given.model, weights=given.weights)
    engine.text.eos_ids = frozenset()
    results: list[Result] = []
    with torch.inference_mode():
        length = 128 if quick else 4096
        one = Filled(stock, engine.layers, 1, length, 8)
        for name in ("append", "fork", "crop"):
            results += compared(f"{name} at {length}", in_turns(getattr(one, name)(), 10 * turns if name == "append" else turns))
        one.kv.check()
        del one
        length = 32 if quick else 1024
        beams = Filled(stock, engine.layers, 8, length, 8)
        results += compared(f"reorder 8 x {length}", in_turns(beams.reorder(), turns))
        beams.kv.check()
        del beams
    longest, new_tokens = (24, 4) if quick else (512, 64)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, stock.config.vocab_size, int(n)).tolist() for n in np.linspace(longest // 8, longest, 8)]
    generating = Generating(stock, engine, prompts, new_tokens)
    with generating.engine:
        results += generating.results(in_turns(generating.sides(), turns))
    report("transformers", results, conditions)


if __name__ == "__main__":
    main()
