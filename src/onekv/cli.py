"""The `onekv` command.

A mistake of the user's (a missing model, an empty prompt, a prompt that does not fit) is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence as Listing
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onekv import files
from onekv.cache import KVCache, Sequence
from onekv.engine.decode import Running, decode
from onekv.engine.sampler import Sampler, Sampling
from onekv.errors import ConfigError, OneKVError, RequestTooLarge
from onekv.models import Model, cache_for, load_model
from onekv.models.pull import NAMED_MODELS, pull as fetch
from onekv.storage import layer_groups

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.splitlines()[0] if __doc__ else None
)
_out = Console(soft_wrap=True, highlight=False)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A pulled model's name (smollm2), a .gguf file, a directory, or a hub id.")]
Cells = Annotated[int | None, typer.Option("--cells", min=1, help="Size of the buffer in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
KDtype = Annotated[str, typer.Option("--k-dtype", help="How keys are stored: float32, float16, bfloat16, q8_0 or q4_0.")]
VDtype = Annotated[str | None, typer.Option("--v-dtype", help="How values are stored; as the keys if left out.")]
Weights = Annotated[str, typer.Option(help="float32, bfloat16, int4 or auto (bfloat16 where the processor has it).")]


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
    sampling = Sampling(temperature, seed)
    loaded = load_model(model, weights=weights)
    prompts = [_encoded(loaded, text, i) for i, text in enumerate(prompt)]
    limits = [min(max_tokens, loaded.max_positions - len(ids) + 1) for ids in prompts]
    needed = sum(len(ids) + limit - 1 for ids, limit in zip(prompts, limits, strict=True))
    if cells is not None and cells < needed:
        raise RequestTooLarge(f"the prompts and their answers take {needed} cells; --cells is {cells}", needed=needed, limit=cells)
    cache = cache_for(loaded, needed, max_seqs=len(prompts), k_dtype=k_dtype, v_dtype=v_dtype)
    running = [Running(cache.sequence(), ids, Sampler(sampling), limit) for ids, limit in zip(prompts, limits, strict=True)]
    for _ in decode(loaded, cache, running):
        pass
    for text, ids, one in zip(prompt, prompts, running, strict=True):
        answer = loaded.text.decode(one.token_ids)
        if as_json:
            fields = {
                "text": answer,
                "token_ids": one.token_ids,
                "prompt_tokens": len(ids),
                "cached_tokens": 0,
                "finish_reason": one.finish_reason,
            }
            print(json.dumps(fields, ensure_ascii=False))
        else:
            print(text + answer)


def _encoded(model: Model, text: str, index: int) -> list[int]:
    ids = model.text.encode(text)
    if not text or not ids:
        raise ConfigError(f"prompt {index + 1} is empty; give at least one character")
    if len(ids) > model.max_positions:
        raise RequestTooLarge(
            f"prompt {index + 1} has {len(ids)} tokens; the model's context is {model.max_positions}",
            needed=len(ids),
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


# --- chat -----------------------------------------------------------------------------------------------------------------------

_CHAT_HELP = """/fork       go on in a copy that shares every cell of this conversation
/use N      switch to conversation N
/rewind N   take back the last N exchanges (1 if left out)
/cells      draw the buffer
/exit       leave"""


class Conversation:
    """One branch of a chat: its messages, and the sequence that holds their tokens."""

    def __init__(self, seq: Sequence, messages: list[dict[str, str]]) -> None:
        self.seq = seq
        self.messages = messages

    def fork(self) -> Conversation:
        """A branch with the same past; copies no keys or values."""
        return Conversation(self.seq.fork(), list(self.messages))

    def rewind(self, exchanges: int) -> int:
        """Take back questions and their answers, at most `exchanges` of them; how many were there. Their cells go with the next turn."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        taken = min(exchanges, len(asked))
        if taken:
            del self.messages[asked[-taken] :]
        return taken

    def catch_up(self, model: Model) -> list[int]:
        """Keep the longest stored prefix of the messages' tokens, and return the ids still to evaluate."""
        ids = model.text.chat(self.messages)
        kept = common_prefix(self.seq.tokens.tolist(), ids[:-1])
        while not self.seq.cache.can_continue_at(self.seq, kept):
            kept -= 1
        self.seq.truncate(kept)
        return ids[kept:]


def common_prefix(one: Listing[int], other: Listing[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


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
    loaded = load_model(model, weights=weights)
    cache = cache_for(loaded, cells or 8192, k_dtype=k_dtype, v_dtype=v_dtype)
    start = [{"role": "system", "content": system}] if system else []
    branches = [Conversation(cache.sequence(), start)]
    current, sampler = 0, Sampler(Sampling(temperature, seed))
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
                _out.print(f"conversation {current + 1} shares {len(branches[current].seq)} cells", style="dim")
            elif command == "/use":
                current = _number(argument, 1, len(branches)) - 1
            elif command == "/rewind":
                taken = branches[current].rewind(_number(argument or "1", 1, 10**6))
                _out.print(f"took back {taken} exchanges", style="dim")
            elif command == "/cells":
                _out.print(cache.draw(), markup=False)
            elif command.startswith("/"):
                _out.print(_CHAT_HELP, markup=False)
            elif line:
                _answer(loaded, cache, branches[current], line, sampler, max_tokens)
        except OneKVError as error:
            _out.print(f"onekv: {error}", style="red", markup=False)


def _number(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ConfigError(f"expected a number from {low} to {high}, got {text!r}")
    return int(text)


def _answer(model: Model, cache: KVCache, branch: Conversation, question: str, sampler: Sampler, max_tokens: int) -> None:
    """Stream one answer; on an error or an interrupt the question is taken back."""
    branch.messages.append({"role": "user", "content": question})
    pieces: list[str] = []
    stream = model.text.stream()
    try:
        running = Running(branch.seq, branch.catch_up(model), sampler, max_tokens)
        for _, token in decode(model, cache, [running]):
            pieces.append(stream.push(token))
            print(pieces[-1], end="", flush=True)
        pieces.append(stream.flush())
        print(pieces[-1])
    except (OneKVError, KeyboardInterrupt) as stopped:
        branch.messages.pop()
        print()
        if not isinstance(stopped, KeyboardInterrupt):
            raise
        return
    branch.messages.append({"role": "assistant", "content": "".join(pieces)})


# --- demo -----------------------------------------------------------------------------------------------------------------------

_SYSTEM = "You are a helpful assistant. Answer in one or two short sentences, in plain words, and say so when you do not know something."
_QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Name three animals that can swim.")


@app.command()
def demo(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A pulled model's name, a .gguf file, a directory, or a hub id.")
    ] = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of one answer.")] = 48,
    weights: Weights = "auto",
) -> None:
    """Three conversations in one buffer: shared, decoded together, forked, rewound."""
    loaded = load_model(model, weights=weights)
    cache = cache_for(loaded, 768, max_seqs=8)
    prompts = [loaded.text.chat([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": q}]) for q in _QUESTIONS]
    shared = min(common_prefix(prompts[0], p) for p in prompts[1:])

    first = cache.sequence()
    loaded.extend(cache, [first], [prompts[0][:shared]])
    conversations = [first, first.fork(), first.fork()]
    _out.rule("the system prompt, evaluated once and shared by three conversations")
    _show_cells(cache)

    running = [Running(seq, ids[shared:], Sampler(Sampling()), max_tokens) for seq, ids in zip(conversations, prompts, strict=True)]
    _decode_timed(loaded, cache, running)
    for question, one in zip(_QUESTIONS, running, strict=True):
        _out.print(f"[bold]{one.seq.id}[/bold] {question}  [green]{loaded.text.decode(one.token_ids).strip()}[/green]")
    _out.rule("after decoding together, token by token")
    _show_cells(cache)

    # A fork goes on from where conversation 0 is; a rewind asks conversation 1 again, warmer, from its question on.
    branch = first.fork()
    conversations[1].truncate(len(prompts[1]) - 1)
    again = [
        Running(branch, loaded.text.encode("\nIn other words,"), Sampler(Sampling()), max_tokens),
        Running(conversations[1], prompts[1][-1:], Sampler(Sampling(temperature=0.8, seed=1)), max_tokens),
    ]
    _decode_timed(loaded, cache, again)
    _out.print(f"[bold]{branch.id}[/bold] fork of 0  [green]{loaded.text.decode(again[0].token_ids).strip()}[/green]")
    _out.print(f"[bold]1[/bold] rewound and sampled again  [green]{loaded.text.decode(again[1].token_ids).strip()}[/green]")
    _out.rule("after a fork of conversation 0 and a rewind of conversation 1")
    _show_cells(cache)
    cache.check()


def _decode_timed(model: Model, cache: KVCache, running: list[Running]) -> None:
    start = time.perf_counter()
    made = _count(decode(model, cache, running))
    took = time.perf_counter() - start
    _out.print(f"{made} tokens of {len(running)} conversations in {took:.2f} s, prompts included: {made / took:.1f} tokens/s", style="dim")


def _count(items: Iterable[object]) -> int:
    return sum(1 for _ in items)


def _show_cells(cache: KVCache) -> None:
    stats = cache.stats()
    _out.print(cache.draw(), markup=False)
    for group in stats["groups"]:
        used, saved = group["used"] * group["nbytes"] / group["cells"], group["nbytes_saved"]
        _out.print(
            f"{group['used']} cells used, {group['shared']} of them shared: {used / 1e6:.1f} MB of keys and values instead of "
            f"{(used + saved) / 1e6:.1f} MB, {saved / 1e6:.1f} MB saved",
            style="bold",
        )


if __name__ == "__main__":
    main()
