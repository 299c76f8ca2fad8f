"""An agent drops a tool's result from the middle of its context: once exactly, once by shifting what follows.

    python examples/edit_context.py

Prints, for both modes, how long the edit took and how far the model's next-token distribution is from the one it would have had if the
tool's result had never been there (Kullback-Leibler divergence, nats; and whether the likeliest token is the same).
"""

from __future__ import annotations

import time
from typing import Literal

import torch

import onekv

TOOL_RESULT = "\n".join(f"row {i}: sensor {i % 7}, reading {(i * 37) % 101}, status ok" for i in range(24))
MESSAGES = [
    {"role": "system", "content": "You are an agent that answers from its notes."},
    {"role": "user", "content": "Remember: the meeting is on Thursday at ten, in the blue room. Then read the sensors."},
    {"role": "tool", "content": TOOL_RESULT},
    {"role": "user", "content": "The sensors are fine. On which day is the meeting?"},
]


def main() -> None:
    """Run both edits and print the comparison."""
    model = onekv.load_model("smollm2")
    tokens = model.text.chat(MESSAGES)
    without = model.text.chat([m for m in MESSAGES if m["role"] != "tool"])
    # What both have in common at the start and at the end; the tool's message is what lies between.
    start = next(i for i, (a, b) in enumerate(zip(tokens, without, strict=False)) if a != b)
    stop = start + len(tokens) - len(without)
    assert tokens[:start] + tokens[stop:] == without

    cache = onekv.cache_for(model, num_cells=2048, max_seqs=8)
    fresh = cache.sequence()
    begin = time.perf_counter()
    wanted = torch.log_softmax(model.extend(cache, [fresh], [without])[0], dim=-1)
    print(f"without the tool's result from the start: {len(without)} tokens evaluated in {time.perf_counter() - begin:.3f} s")

    agent = cache.sequence()
    model.extend(cache, [agent], [tokens[:-1]])
    print(f"the agent's context: {len(agent)} tokens, of which the tool's result is {stop - start}")
    modes: tuple[Literal["exact"], Literal["shift"]] = ("exact", "shift")
    for mode in modes:
        with agent.fork() as edited:
            begin = time.perf_counter()
            again = edited.remove(start, stop, mode=mode)
            got = model.extend(cache, [edited], [[*again.tolist(), tokens[-1]]])[0]
            took = time.perf_counter() - begin
            given = torch.log_softmax(got, dim=-1)
            divergence = float((wanted.exp() * (wanted - given)).sum())
            same = "the same" if given.argmax() == wanted.argmax() else "another"
            print(
                f"{mode:>5}: {took:.3f} s to the next token, {len(again) + 1} tokens evaluated, divergence {divergence:.2e} nats, "
                f"{same} likeliest token {model.text.decode([int(given.argmax())])!r}"
            )
    cache.check()


if __name__ == "__main__":
    main()
