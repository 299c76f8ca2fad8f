"""An agent in one process: one context, three ways to go on, one of them kept, a tool's result dropped from its middle.

    python examples/agent.py

The context (a system prompt, a question, what a tool answered) is evaluated once. Three branches share its cells and are answered at the
same time. One is kept and the tool's result cut out of it; what follows moves down, so that the next turn evaluates its own tokens only.
"""

from __future__ import annotations

import time
from typing import Any

import onekv

SENSORS = "\n".join(f"sensor {i}: {18 + i % 5} degrees, humidity {50 + (i * 7) % 20} %, ok" for i in range(16))
CONTEXT = [
    {"role": "system", "content": "You are an agent that looks after a greenhouse. Answer in one short sentence."},
    {"role": "user", "content": "Read the sensors. Is anything wrong?"},
    {"role": "tool", "content": SENSORS},
]
TRIES = ("Which sensor is the warmest?", "Write one line for the log.", "What should be done next?")


def main() -> None:
    """Run the agent and print what it does."""
    model = onekv.load_model("smollm2", weights="float32")
    cache = onekv.cache_for(model, num_cells=2048, max_seqs=64)
    # Where the tool's message lies.
    start, stop = (len(model.text.chat(CONTEXT[:count], add_generation_prompt=False)) for count in (2, 3))

    with onekv.Engine(model, cache) as engine:
        agent = engine.session()
        begin = time.perf_counter()
        engine.generate(CONTEXT, session=agent, max_tokens=1)
        agent.truncate(stop)  # the context alone
        print(f"context: {stop} tokens, {stop - start} of them the tool's result, evaluated in {time.perf_counter() - begin:.2f} s")

        begin = time.perf_counter()
        branches = [agent.fork() for _ in TRIES]
        print(f"three forks: {(time.perf_counter() - begin) * 1e3:.1f} ms, {engine.stats().used_cells} cells in use")

        turns: list[list[dict[str, Any]]] = [[*CONTEXT, {"role": "user", "content": question}] for question in TRIES]
        begin = time.perf_counter()
        streams = [engine.stream(turn, session=branch, max_tokens=24) for turn, branch in zip(turns, branches, strict=True)]
        results = [stream.result() for stream in streams]
        for question, result in zip(TRIES, results, strict=True):
            cached, total = result.usage.cached_tokens, result.usage.prompt_tokens
            print(f"  {cached} of {total} tokens cached: {question} {result.text.strip()!r}")
        print(f"three answers: {time.perf_counter() - begin:.2f} s, {engine.stats().used_cells} cells in use")

        best = max(range(3), key=lambda i: len(results[i].text))  # an agent would judge
        kept, turn = branches[best], turns[best]
        for session in (agent, *branches):
            if session is not kept:
                session.free()

        kept.remove(start, stop)  # by a shift; mode="exact" would evaluate what follows again
        turn += [{"role": "assistant", "content": results[best].text}, {"role": "user", "content": "Thank you. Anything else?"}]
        begin = time.perf_counter()
        last = engine.generate([m for m in turn if m["role"] != "tool"], session=kept, max_tokens=24)
        cached, total = last.usage.cached_tokens, last.usage.prompt_tokens
        print(f"branch {best + 1}, the tool's result dropped: {cached} of {total} tokens cached, {time.perf_counter() - begin:.2f} s")
        print(f"  {last.text.strip()!r}")
        engine.call(cache.check)


if __name__ == "__main__":
    main()
