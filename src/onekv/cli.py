"""The `onekv` command.

A mistake of the user's (a missing model, an empty prompt, a prompt that does not fit) is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence as Listing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.progress import Progress
from rich.table import Table

from onekv import files
from onekv.cache import ContextShift
from onekv.config import MAX_SEQS
from onekv.core.prefix import common_prefix
from onekv.engine.bench import Speed, measure, num_tokens, other_load
from onekv.engine.engine import Engine, window_cells
from onekv.engine.request import Delta, Failed, Request
from onekv.engine.sampler import Sampling
from onekv.engine.session import Session
from onekv.errors import ConfigError, OneKVError, RequestTooLarge
from onekv.models import Model, cache_for, load_model
from onekv.models.budget import Budget, machine_memory
from onekv.models.pull import NAMED_MODELS, home, pull as fetch
from onekv.models.skeleton import skeleton
from onekv.storage import layer_groups

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.splitlines()[0] if __doc__ else None
)
_out = Console(soft_wrap=True, highlight=False)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A pulled model's name (smollm2), a .gguf file, a directory, or a hub id.")]
DemoName = Annotated[str, typer.Argument(metavar="MODEL", help="A pulled model's name, a .gguf file, a directory, or a hub id.")]
Cells = Annotated[int | None, typer.Option("--cells", min=1, help="Size of the buffer in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
KDtype = Annotated[str, typer.Option("--k-dtype", help="How keys are stored: float32, float16, bfloat16, q8_0 or q4_0.")]
VDtype = Annotated[str | None, typer.Option("--v-dtype", help="How values are stored; as the keys if left out.")]
Weights = Annotated[str, typer.Option(help="float32, bfloat16, int4 or auto (bfloat16 where the processor has it).")]


def _loaded(model: str, **settings: Any) -> Model:
    """The model; a terminal is told meanwhile."""
    with Console(stderr=True).status(f"loading {model}"):
        return load_model(model, **settings)


def main() -> None:
    """Entry point: runs the command, turns onekv's errors into one line and exit code 2."""
    try:
        app()
    except OneKVError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(message: str) -> NoReturn:
    print("onekv: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(NAMED_MODELS)}.")],
    accept_license: Annotated[bool, typer.Option("--accept-license", help="Agree to the licence, for models that ask.")] = False,
) -> None:
    """Fetch a model into the model cache."""
    print(fetch(name, accept_license=accept_license))


@app.command()
def generate(
    model: ModelName,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Raw prompt, no chat template. Several run together in one buffer.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for each prompt.")] = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    weights: Weights = "auto",
    cells: Cells = None,
    k_dtype: KDtype = "float32",
    v_dtype: VDtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt and line, in order.")] = False,
) -> None:
    """Continue one or several prompts."""
    sampling = Sampling(temperature=temperature, seed=seed)
    loaded = _loaded(model, weights=weights)
    prompts = [_encoded(loaded, text, i) for i, text in enumerate(prompt)]
    limits = [min(max_tokens, loaded.max_positions - len(ids)) for ids in prompts]
    needed = sum(len(ids) + limit for ids, limit in zip(prompts, limits, strict=True))
    cache = cache_for(loaded, cells or needed, max_seqs=2 * len(prompts) + 1, k_dtype=k_dtype, v_dtype=v_dtype)
    with Engine(loaded, cache, max_running=len(prompts), max_batch_tokens=max(512, len(prompts) + 1)) as engine:
        streams = [engine.stream(ids, max_tokens=limit, sampling=sampling) for ids, limit in zip(prompts, limits, strict=True)]
        results = [stream.result() for stream in streams]
    for text, result in zip(prompt, results, strict=True):
        if as_json:
            fields = {
                "text": result.text,
                "token_ids": result.token_ids,
                "prompt_tokens": result.usage.prompt_tokens,
                "cached_tokens": result.usage.cached_tokens,
                "finish_reason": result.choices[0].reason,
            }
            print(json.dumps(fields, ensure_ascii=False))
        else:
            print(text + result.text)


def _encoded(model: Model, text: str, index: int) -> list[int]:
    ids = model.text.encode(text)
    if not text or not ids:
        raise ConfigError(f"prompt {index + 1} is empty; give at least one character")
    if len(ids) >= model.max_positions:
        raise RequestTooLarge(
            f"prompt {index + 1} has {len(ids)} tokens; the model's context is {model.max_positions}, of which one is for the answer",
            needed=len(ids) + 1,
            limit=model.max_positions,
        )
    return ids


@app.command()
def inspect(file: Annotated[Path, typer.Argument(help="A file written by save.")]) -> None:
    """Check a saved sequence or cache, and print what is inside."""
    with Progress(transient=True) as bars:
        task = bars.add_task(f"checking {file.name}", total=None)
        state = files.load(file, lambda done, total: bars.update(task, completed=done, total=total))
    table = Table(
        title=f"{file.name}: {'a whole cache' if state.whole else 'one sequence'}, {file.stat().st_size / 1e6:.1f} MB", title_justify="left"
    )
    for column in ("sequence", "tokens", "positions", "token ids", "cells a group"):
        table.add_column(column)
    for row in state.rows:
        n = row.positions.size
        cells = ", ".join(f"{int((column >= 0).sum())}" for column in row.columns)
        span = f"{row.positions[0]} to {row.positions[-1]}" if n else "none"
        table.add_row(str(row.seq), str(n), span, f"{int((row.tokens >= 0).sum())} known", cells)
    _out.print(table)
    windows, group_of = layer_groups(state.layers)
    for g, window in enumerate(windows):
        owners = [i for i in state.keys if group_of[i] == g]
        spec = state.layers[owners[0]]
        heads = f"{spec.num_kv_heads} heads of {spec.head_dim}" + ("" if spec.head_dim == spec.v_dim else f" and {spec.v_dim}")
        dtypes = f"{state.k_codec} keys, {state.v_codec} values"
        _out.print(f"group {g} {window!r}: {state.num_cells(g)} cells, {len(owners)} layers, {heads}, {dtypes}", markup=False)
    if recurrent := [layer.states for layer in state.layers if layer.states]:
        count = sum(math.prod(shape) for shapes in recurrent for shape in shapes)
        _out.print(f"recurrent states: {len(recurrent)} layers, {4 * count / 1e6:.1f} MB a sequence", markup=False)
    _out.print(f"model {state.fingerprint or 'unnamed'}; digest correct", markup=False)


# --- plan -----------------------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    model: ModelName,
    context: Annotated[
        int | None, typer.Option(help="Tokens a sequence holds, prompt and answer. Left out: 4096, or the model's limit.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    k_dtype: KDtype = "float32",
    v_dtype: VDtype = None,
    weights: Weights = "auto",
    max_ubatch: Annotated[int, typer.Option(help="Most rows of one forward.")] = 512,
    memory_gb: Annotated[float | None, typer.Option("--memory", help="GB to fit into, of another machine; left out: this one's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say how much memory a model and its cells take, and what fits, from the model's config alone."""
    if memory_gb is not None and not 0 < memory_gb < 1e9:
        raise ConfigError(f"--memory must be a positive number of GB, got {memory_gb}")
    memory = machine_memory() if memory_gb is None else round(memory_gb * 1e9)
    seen = skeleton(model, weights=weights)
    budget = Budget(seen, min(4096, seen.max_positions) if context is None else context, sequences, max_ubatch, k_dtype, v_dtype)
    if as_json:
        print(json.dumps({"model": model, **_plan_fields(budget, memory)}))
    else:
        _print_plan(model, budget, memory)


def _plan_fields(budget: Budget, memory: int) -> dict[str, Any]:
    return {
        "context": budget.context,
        "sequences": budget.sequences,
        "max_ubatch": budget.max_ubatch,
        "k_dtype": budget.k_dtype,
        "v_dtype": budget.v_dtype or budget.k_dtype,
        "groups": [{**asdict(kind), "window": repr(kind.window), "nbytes": kind.nbytes} for kind in budget.kinds],
        "num_cells": budget.num_cells,
        "window_cells": budget.window_cells,
        "kv_nbytes": budget.kv_nbytes,
        "states_nbytes": budget.states_nbytes,
        "weights_nbytes": budget.model.weights_nbytes,
        "nbytes": budget.nbytes,
        "memory_nbytes": memory,
        "fits": budget.nbytes <= memory,
        "max_context": budget.max_context(memory),
        "max_sequences": budget.max_sequences(memory),
        "max_positions": budget.model.max_positions,
    }


def _print_plan(model: str, budget: Budget, memory: int) -> None:
    dtypes = f"{budget.k_dtype} keys, {budget.v_dtype or budget.k_dtype} values"
    table = Table(
        title=f"{model}: {budget.sequences} x {budget.context} tokens that share nothing, {dtypes}", title_justify="left", show_footer=True
    )
    kv, total = _size(budget.kv_nbytes), _size(budget.nbytes)
    table.add_column("group", "weights\n[bold]total[/bold]")
    table.add_column("layers")
    table.add_column("heads")
    for name, footer in (("bytes a cell", ""), ("cells", ""), ("bytes", f"{_size(budget.model.weights_nbytes)}\n[bold]{total}[/bold]")):
        table.add_column(name, footer, justify="right")
    for kind in budget.kinds:
        reading = kind.num_layers - kind.num_owning
        table.add_row(
            f"{kind.group} {kind.window!r}",
            f"{kind.num_layers}" + (f", {reading} reading another's" if reading else ""),
            f"{kind.num_kv_heads} of {kind.head_dim}" + ("" if kind.value_dim == kind.head_dim else f" and {kind.value_dim}"),
            f"{kind.cell_nbytes}",
            f"{kind.num_cells}",
            _size(kind.nbytes),
        )
    _out.print(table)
    window = "" if budget.window_cells is None else f", window_cells={budget.window_cells}"
    fits = "fits into" if budget.nbytes <= memory else "does NOT fit into"
    _out.print(f"{kv} of keys and values: cache_for(model, {budget.num_cells}{window})", markup=False)
    if budget.states_nbytes:
        _out.print(f"{_size(budget.states_nbytes)} of recurrent states, earlier ones to go back to included", markup=False)
    _out.print(f"{total} {fits} {_size(memory)}, what a forward allocates for a moment not counted", markup=False)
    context, sequences = budget.max_context(memory), budget.max_sequences(memory)
    limit = ", the model's limit" if context == budget.model.max_positions else ""
    _out.print(f"largest --context for {budget.sequences} sequences: {context}{limit}", markup=False)
    _out.print(f"largest --sequences of {budget.context} tokens: {sequences}{', the most a cache takes' if sequences == MAX_SEQS else ''}")


def _size(nbytes: int) -> str:
    """Bytes in words."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


# --- bench ----------------------------------------------------------------------------------------------------------------------

_BUSY_CORES = 0.25  # kept busy by other processes, above which timings say more about them than about us


@app.command()
def bench(
    model: DemoName = "smollm2",
    sequences: Annotated[str | None, typer.Option(help="Numbers of sequences at a time. Left out: 1,8,32.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of each prompt. Left out: 512.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens decoded after each. Left out: 32.")] = None,
    weights: Weights = "auto",
    k_dtype: KDtype = "float32",
    v_dtype: VDtype = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small numbers where left out: shows that it runs, not how fast.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure how many tokens a second a model evaluates and decodes here."""
    counts = _numbers(("1,2" if quick else "1,8,32") if sequences is None else sequences)
    context = (16 if quick else 512) if context is None else context
    new_tokens = (4 if quick else 32) if new_tokens is None else new_tokens
    load = other_load()
    loaded = _loaded(model, weights=weights)
    made: list[Speed] = []
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("warming up", total=sum(num_tokens(count, context, new_tokens) for count in counts))
        measure(loaded, 1, 1, 1, k_dtype=k_dtype, v_dtype=v_dtype)
        for count in counts:
            bars.update(task, description=f"{count} sequences")
            made.append(
                measure(loaded, count, context, new_tokens, k_dtype=k_dtype, v_dtype=v_dtype, advance=lambda done: bars.advance(task, done))
            )
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if as_json:
        results = [
            {**asdict(one), "prefill_tokens_per_s": one.prefill_tokens_per_s, "decode_tokens_per_s": one.decode_tokens_per_s}
            for one in made
        ]
        settings = {"model": model, "weights": weights, "k_dtype": k_dtype, "v_dtype": v_dtype or k_dtype, "quick": quick}
        print(json.dumps({**settings, "threads": threads, "cores": cores, "other_load": load, "results": results}))
        return
    table = Table(title=f"{loaded!r}: {context} tokens each, then {new_tokens} more, tokens a second of all together", title_justify="left")
    for column in ("sequences", "prefill", "decode", "decode, each", "buffer"):
        table.add_column(column, justify="right")
    for one in made:
        each = one.decode_tokens_per_s / one.sequences
        table.add_row(
            f"{one.sequences}", f"{one.prefill_tokens_per_s:.1f}", f"{one.decode_tokens_per_s:.1f}", f"{each:.1f}", _size(one.kv_nbytes)
        )
    _out.print(table)
    _out.print(f"{threads} threads on {cores} cores")
    if load > _BUSY_CORES:
        _out.print(f"other processes kept {load:.1f} cores busy when this began: expect better figures on a quiet machine", style="yellow")


def _numbers(text: str) -> list[int]:
    return [_number(part.strip(), 1, MAX_SEQS) for part in text.split(",")]


# --- chat -----------------------------------------------------------------------------------------------------------------------

_CHAT_HELP = """/fork       go on in a copy that shares every cell of this conversation
/use N      switch to conversation N
/rewind N   take back the last N exchanges (1 if left out)
/cells      draw the buffer
/exit       leave"""


class Conversation:
    """One branch of a chat: its messages, and the session that holds their tokens."""

    def __init__(self, session: Session, messages: list[dict[str, str]]) -> None:
        self.session = session
        self.messages = messages

    def fork(self) -> Conversation:
        """A branch with the same past; copies no keys or values."""
        return Conversation(self.session.fork(), list(self.messages))

    def rewind(self, exchanges: int) -> int:
        """Take back questions and their answers, at most `exchanges` of them; how many were there. Their cells go with the next turn."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        taken = min(exchanges, len(asked))
        if taken:
            del self.messages[asked[-taken] :]
        return taken


@app.command()
def chat(
    model: ModelName,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    weights: Weights = "auto",
    cells: Cells = 8192,
    k_dtype: KDtype = "float32",
    v_dtype: VDtype = None,
) -> None:
    """Talk to a model. /help lists what can be done with the conversation."""
    loaded = _loaded(model, weights=weights)
    cache = cache_for(loaded, cells or 8192, k_dtype=k_dtype, v_dtype=v_dtype)
    start = [{"role": "system", "content": system}] if system else []
    sampling = Sampling(temperature=temperature, seed=seed)
    with Engine(loaded, cache) as engine:
        _talk(engine, [Conversation(engine.session(), start)], sampling, max_tokens)


def _talk(engine: Engine, branches: list[Conversation], sampling: Sampling, max_tokens: int) -> None:
    """Read lines until the end of input or /exit."""
    current = 0
    _out.print("/help lists the commands", style="dim")
    while True:
        try:
            line = _out.input(f"[bold]{current + 1}>[/bold] ").strip()
        except EOFError:
            return
        command, _, argument = line.partition(" ")
        if command in ("/exit", "/quit"):
            return
        try:
            if command == "/fork":
                branches.append(branches[current].fork())
                current = len(branches) - 1
                _out.print(f"conversation {current + 1} shares {branches[current].session.num_cells} cells", style="dim")
            elif command == "/use":
                current = _number(argument, 1, len(branches)) - 1
            elif command == "/rewind":
                taken = branches[current].rewind(_number(argument or "1", 1, 10**6))
                _out.print(f"took back {taken} exchange{'' if taken == 1 else 's'}", style="dim")
            elif command == "/cells":
                _out.print(engine.call(engine.cache.draw), markup=False)
            elif command == "/help":
                _out.print(_CHAT_HELP, markup=False)
            elif command.startswith("/"):
                _out.print(f"there is no command {command}\n{_CHAT_HELP}", markup=False)
            elif line:
                _answer(engine, branches[current], line, sampling, max_tokens)
        except OneKVError as error:
            _out.print(f"onekv: {error}", style="red", markup=False)


def _number(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ConfigError(f"expected a number from {low} to {high}, got {text!r}")
    return int(text)


def _answer(engine: Engine, branch: Conversation, question: str, sampling: Sampling, max_tokens: int) -> None:
    """Stream one answer; on an error or an interrupt the question is taken back."""
    branch.messages.append({"role": "user", "content": question})
    try:
        ids = engine.model.text.chat(branch.messages)
        room = max(engine.limit - len(ids), 1)
        stream = engine.stream(ids, session=branch.session, max_tokens=min(max_tokens, room), sampling=sampling)
        pieces: list[str] = []
        try:
            for event in stream:
                if isinstance(event, Delta):
                    pieces.append(event.text)
                    print(event.text, end="", flush=True)
                elif isinstance(event, Failed):
                    raise event.error
        except KeyboardInterrupt:
            stream.cancel()
            raise
    except (OneKVError, KeyboardInterrupt) as stopped:
        branch.messages.pop()
        print()
        if not isinstance(stopped, KeyboardInterrupt):
            raise
        return
    print()
    branch.messages.append({"role": "assistant", "content": "".join(pieces)})


# --- serve ----------------------------------------------------------------------------------------------------------------------


@app.command()
def serve(
    model: DemoName = "smollm2",
    cells: Cells = 8192,
    k_dtype: KDtype = "float32",
    v_dtype: VDtype = None,
    weights: Weights = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same answer to the bit, whatever else runs.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key that clients must send.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Most requests answered at a time; others wait.")] = 32,
    sessions_dir: Annotated[Path | None, typer.Option(help="Where sessions are saved; left out: in onekv's own directory.")] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Save no sessions; they end with the server.")] = False,
    speculate: Annotated[int, typer.Option(min=0, help="Tokens guessed a step from the text so far.")] = 0,
    context_shift: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="At the limit the oldest tokens after the first N give way; left out: it ends.")
    ] = None,
    preempt: Annotated[str, typer.Option(help="What an answer does that waits for cells: recompute, or spill to a file.")] = "recompute",
    device: Annotated[str, typer.Option(help="Where the model and its cells are: cpu or cuda.")] = "cpu",
) -> None:
    """Answer over HTTP: OpenAI's API, sessions, and a page that shows the cells."""
    try:
        from onekv.server import app as server, run
    except ImportError as error:
        raise ConfigError(f"serving needs more packages: pip install 'onekv[server]' ({error})") from error
    if sessions_dir is not None and no_save:
        raise ConfigError("--no-save saves no sessions; leave out --sessions-dir")
    directory = None if no_save else sessions_dir or home() / "sessions"
    key = None if api_key_file is None else run.read_key(api_key_file)
    with run.listening_socket(host, port) as bound:
        loaded = _loaded(model, weights=weights, deterministic=deterministic, device=device)
        size = cells or 8192
        few = window_cells(loaded, size, max_running=max_running)
        ids = max(256, 8 * max_running)  # of answers, cached prefixes and sessions
        cache = cache_for(loaded, size, window_cells=few, max_seqs=min(ids, MAX_SEQS), k_dtype=k_dtype, v_dtype=v_dtype)
        shift = None if context_shift is None else ContextShift(context_shift)
        waiting: Any = preempt  # checked by the engine
        with Engine(loaded, cache, max_running=max_running, speculate=speculate, context_shift=shift, preempt=waiting) as engine:
            is_local = key is None and run.is_local(bound)
            made = server.create_app(engine, model, api_key=key, sessions_dir=directory, is_local=is_local)
            run.serve(made, bound, ready=lambda: _ready(run.url_of(bound), model, key is not None, directory), stopping=_stopping)


def _ready(url: str, model: str, has_key: bool, directory: Path | None) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"messages": [question], "temperature": 0, "max_tokens": 64})
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    kept = "sessions are not saved" if directory is None else f"sessions are saved in {directory}"
    _out.print(f"{model} answers on {url}; {kept}", style="bold", markup=False)
    _out.print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'", markup=False)


def _stopping(answers: int, seconds: float) -> None:
    if answers:
        _out.print(f"stopping; {answers} running, up to {seconds:.0f} s to finish. Once more ends them now", style="dim", markup=False)


@app.command()
def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from reading to reading.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One reading, and no more.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key the server asks for.")] = None,
) -> None:
    """Watch a server: its cells, requests, hits and speed."""
    try:
        from onekv.server import run, top as screen
    except ImportError as error:
        raise ConfigError(f"this needs more packages: pip install 'onekv[server]' ({error})") from error
    key = None if api_key_file is None else run.read_key(api_key_file)
    before, then = screen.read(url, key), time.monotonic()
    if once:
        _out.print(screen.view(before, before, 0.0))
        return
    with Live(screen.view(before, before, 0.0), console=_out, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            now, at = screen.read(url, key), time.monotonic()
            live.update(screen.view(now, before, at - then), refresh=True)
            before, then = now, at


# --- demo -----------------------------------------------------------------------------------------------------------------------

_SYSTEM = "You are a helpful assistant. Answer in one or two short sentences, in plain words, and say so when you do not know something."
_QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Name three animals that can swim.")


@app.command()
def demo(
    model: DemoName = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of one answer.")] = 48,
    weights: Weights = "auto",
) -> None:
    """Three conversations in one buffer: shared, decoded together, forked, rewound."""
    loaded = _loaded(model, weights=weights)
    prompts = [loaded.text.chat([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": q}]) for q in _QUESTIONS]
    common = min(common_prefix(np.array(prompts[0]), np.array(p)) for p in prompts[1:])
    with Engine(loaded, cache_for(loaded, 768, max_seqs=8), max_running=4) as engine:
        first = engine.session()
        engine.generate(prompts[0][:common], max_tokens=1, session=first)
        first.truncate(common)
        conversations = [first, first.fork(), first.fork()]
        _out.rule("the system prompt, evaluated once and shared by three conversations")
        _show_cells(engine)

        asked = [Request(tuple(p), max_tokens=max_tokens, session=c) for p, c in zip(prompts, conversations, strict=True)]
        for i, (question, answer) in enumerate(zip(_QUESTIONS, _together(engine, asked), strict=True)):
            _out.print(f"[bold]{i}[/bold] {question}  [green]{answer.strip()}[/green]")
        _out.rule("after decoding together, token by token")
        _show_cells(engine)

        # A fork goes on from where conversation 0 is; a rewind asks conversation 1 again, warmer, from its question on.
        branch = first.fork()
        more = (*branch.tokens, *loaded.text.encode("\nIn other words,"))
        warm = Sampling(temperature=0.8, seed=1)
        conversations[1].truncate(len(prompts[1]))
        again = [
            Request(more, max_tokens=max_tokens, session=branch),
            Request(tuple(prompts[1]), max_tokens=max_tokens, sampling=warm, session=conversations[1]),
        ]
        forked, rewound = _together(engine, again)
        _out.print(f"[bold]3[/bold] fork of 0  [green]{forked.strip()}[/green]")
        _out.print(f"[bold]1[/bold] rewound and sampled again  [green]{rewound.strip()}[/green]")
        _out.rule("after a fork of conversation 0 and a rewind of conversation 1")
        _show_cells(engine)
        engine.call(engine.cache.check)


def _together(engine: Engine, requests: Listing[Request]) -> list[str]:
    """The answers to some requests at once, and how fast they came."""
    start = time.perf_counter()
    results = [stream.result() for stream in [engine.submit(request) for request in requests]]
    took, made = time.perf_counter() - start, sum(result.usage.completion_tokens for result in results)
    _out.print(f"{made} tokens of {len(results)} conversations in {took:.2f} s, prompts included: {made / took:.1f} tokens/s", style="dim")
    return [result.text for result in results]


def _show_cells(engine: Engine) -> None:
    stats = engine.call(engine.cache.stats)
    _out.print(engine.call(engine.cache.draw), markup=False)
    for group in stats["groups"]:
        used, saved = group["used"] * group["nbytes"] / group["cells"], group["nbytes_saved"]
        _out.print(
            f"{group['used']} cells used, {group['shared']} of them shared: {used / 1e6:.1f} MB of keys and values instead of "
            f"{(used + saved) / 1e6:.1f} MB, {saved / 1e6:.1f} MB saved",
            style="bold",
        )


if __name__ == "__main__":
    main()
