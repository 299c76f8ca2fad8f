"""Everything at once, at random: windows, files, beams, sessions, cancellations, failures, guesses, few sequence ids."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from onekv import ContextShift, Window
from onekv.engine.engine import Engine
from onekv.engine.request import Delta, Done, Failed, Finished, Request, Stream
from onekv.engine.sampler import Sampling
from onekv.engine.session import Session
from onekv.errors import OneKVError, RequestTooLarge, SessionBusy
from scripted import VOCAB, Scripted, engine_of, settled

PATIENCE = 60.0  # seconds after which a stream without events counts as hanging
BROKEN = 251  # a row of this token makes the model fail


def answer(tokens: list[int]) -> torch.Tensor:
    """Logits that depend on every token; few tokens are likely, so that guesses are right now and then."""
    spread = torch.full((VOCAB,), -20.0)
    start = sum((i % 7 + 1) * t for i, t in enumerate(tokens[-12:])) % 5
    spread[97 + start : 103 + start] = torch.tensor([4.0, 3.5, 3.0, 1.0, 0.5, 0.0])
    return spread


def requests(rng: random.Random, count: int, shifts: bool) -> list[dict[str, Any]]:
    stems = [[rng.randrange(1, 250) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    made = []
    for _ in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(1, 250) for _ in range(rng.randrange(0, 10))]
        if rng.random() < 0.06:
            prompt[rng.randrange(len(prompt))] = BROKEN
        options: dict[str, Any] = {"prompt": tuple(prompt), "max_tokens": rng.randrange(1, 24), "ignore_eos": True}
        options["key"] = rng.choice([(), (), (("salt", "x"),)])
        options["points"] = tuple(rng.sample(range(1, len(prompt) + 1), min(2, len(prompt))))
        kind = rng.random()
        if kind < 0.15:
            options |= {"beams": rng.choice([2, 3]), "max_tokens": rng.randrange(1, 5), "key": ()}
            options["n"] = rng.randrange(1, options["beams"] + 1)
        elif kind < 0.3 and shifts:
            options |= {"context_shift": ContextShift(rng.randrange(0, 5)), "max_tokens": rng.randrange(60, 120)}
        else:
            options["n"] = rng.choice([1, 1, 1, 2, 3])
            options["logprobs"] = rng.choice([None, None, 2])
            options["prompt_logprobs"] = rng.random() < 0.15
            options["stop"] = rng.choice([(), ("de", "fff")])
            if rng.random() < 0.5:
                options["sampling"] = Sampling(
                    temperature=1.0, seed=rng.randrange(99), repetition_penalty=rng.choice([1.0, 1.3]), presence_penalty=0.4
                )
        made.append(options)
    return made


def told(stream: Stream) -> tuple[list[Any], Done | Failed]:
    """What a request has said, comparable: for each answer its text, tokens, log-probabilities and reason; and how it ended."""
    answers: list[Any] = [["", [], [], None] for _ in range(stream.request.n)]
    extra: list[Any] = []
    while True:
        event = stream._events.get(timeout=PATIENCE)
        match event:
            case Delta():
                one = answers[event.index]
                one[0] += event.text
                one[1] += event.token_ids
                one[2] += [(e.token_id, round(e.logprob, 4), [t for t, _ in e.top]) for e in event.logprobs]
            case Finished():
                answers[event.index][3] = event.reason
            case Done() | Failed():
                assert stream._events.empty()
                return [*answers, extra], event
            case _ if hasattr(event, "entries"):
                extra += [e and (e.token_id, round(e.logprob, 4)) for e in event.entries]


def edit(rng: random.Random, sessions: list[Session], engine: Engine, shifts: bool) -> None:
    """One operation on a session, whatever it is doing."""
    session = rng.choice(sessions)
    size = len(session.tokens)
    try:
        match rng.randrange(5):
            case 0:
                sessions.append(session.fork(rng.randrange(size + 1)))
            case 1:
                session.truncate(rng.randrange(size + 1))
            case 2 if size > 4:
                first = rng.randrange(size - 2)
                session.remove(first, first + 2, "shift" if shifts else "exact")
            case 3 if len(sessions) > 2:
                session.free()
                sessions.remove(session)
            case _:
                sessions.append(engine.session(session.key))
    except (SessionBusy, OneKVError):
        pass  # busy, or shorter by now


WINDOWS: list[Window | None] = [None, None, Window.sliding(6), Window.chunked(8), Window.sliding(16)]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_mixed_every_answer_equals_its_answer_alone_and_no_cell_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    window = WINDOWS[seed % len(WINDOWS)]
    model = Scripted(answer, window=window, broken=lambda tokens: BROKEN in tokens)
    settings: dict[str, Any] = {"speculate": rng.choice([0, 3]), "preempt": rng.choice(["recompute", "spill"])}
    shifts = window is None
    made = requests(rng, 70, shifts)
    cells = rng.choice([64, 80])
    expected: list[Any] = []
    with engine_of(model, cells, max_batch_tokens=64) as calm:  # one after the other
        for options in made:
            try:
                expected.append(told(calm.submit(Request(**options)))[0])
            except RequestTooLarge:
                expected.append(None)
    engine = engine_of(model, cells, cache={"max_seqs": rng.choice([5, 6, 12])}, **settings)
    with engine:
        sessions = [engine.session() for _ in range(3)]
        streams: list[tuple[Stream, Any, bool]] = []
        for options, wanted in zip(made, expected, strict=True):
            with_session = rng.random() < 0.3 and not options.get("beams") and options.get("n", 1) == 1 and not options["key"]
            session = rng.choice(sessions) if with_session else None
            try:
                stream = engine.submit(Request(**options, session=session))
            except RequestTooLarge:
                continue
            except OneKVError:
                assert session is not None
                continue
            # What a session has shifted it goes on with, though it is not what the tokens alone would give.
            streams.append((stream, None if session is not None and shifts else wanted, rng.random() < 0.2))
            if streams[-1][2]:
                threading.Timer(rng.random() * 0.05, stream.cancel).start()
            if rng.random() < 0.4:
                edit(rng, sessions, engine, shifts)
            time.sleep(rng.random() * 0.004)
        for stream, wanted, may_be_cancelled in streams:
            answers, end = told(stream)
            if BROKEN in stream.request.prompt:
                assert isinstance(end, Failed) or may_be_cancelled
                continue
            if isinstance(end, Failed):
                assert stream.request.session is not None, end.error
                continue
            assert end.completion_tokens >= sum(len(a[1]) for a in answers[:-1])
            if wanted is None:
                continue
            for one, alone in zip(answers[:-1], wanted[:-1], strict=True):
                if one[3] == "cancelled":
                    assert may_be_cancelled
                    assert one[1] == alone[1][: len(one[1])]
                else:
                    assert one == alone
            if answers[-1]:
                assert answers[-1] == wanted[-1]
        assert not any(session.busy for session in sessions)
        settled(engine)
        assert engine.stats().requests == len(streams)
        assert not list(Path(engine.scheduler._spills.name).iterdir())
