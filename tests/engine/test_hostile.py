"""The engine among listeners that raise, disks that are full, buffers that are too small: one request's trouble is its own."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from onekv import ConfigError, ContextShift, OneKVError, Window
from onekv.engine.engine import Engine
from onekv.engine.request import Delta, Done, Event, Failed, Finished, Request, Stream
from onekv.errors import BatchError, EngineClosed, StateError
from scripted import VOCAB, Scripted, alone, engine_of, ids, settled

PATIENCE = 20.0  # seconds after which an engine that does not answer counts as dead


def events_of(stream: Stream) -> list[Event]:
    """All events; a stream that ends nowhere is an error and not a test that hangs."""
    events: list[Event] = []
    while not events or not isinstance(events[-1], Done | Failed):
        events.append(stream._events.get(timeout=PATIENCE))
    return events


def answer_of(stream: Stream, index: int = 0) -> list[int]:
    """The tokens of one answer. Raises what the request failed with."""
    events = events_of(stream)
    if isinstance(events[-1], Failed):
        raise events[-1].error
    return [t for e in events if isinstance(e, Delta) and e.index == index for t in e.token_ids]


def held_back(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[Stream]:
    """Streams of requests that the engine finds all at once."""
    gate = threading.Event()
    waiter = threading.Thread(target=lambda: engine.call(gate.wait))
    waiter.start()
    streams = [engine.stream(**request) for request in requests]
    gate.set()
    waiter.join()
    return streams


# --- listeners and threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 3, -1])
def test_a_listener_that_raises_ends_only_its_own_request(at: int) -> None:
    model = Scripted(delay=0.001)
    with engine_of(model) as engine:
        beside = engine.stream([7, 8], max_tokens=20)
        heard: list[Event] = []

        def listen(event: Event) -> None:
            heard.append(event)
            if len(heard) == at + 1 or (at == -1 and isinstance(event, Done)):
                raise RuntimeError("the listener is broken")

        stream = engine.stream([1, 2, 3], max_tokens=10)
        with contextlib.suppress(RuntimeError):  # what was there already is told on this thread
            stream.listen(listen)
        assert answer_of(beside) == alone(model, [7, 8], 20)
        assert ids(engine.generate([4, 5], max_tokens=3)) == alone(model, [4, 5], 3)
        settled(engine)


def test_close_may_be_called_by_several_threads_and_by_a_listener_and_the_earliest_end_counts() -> None:
    model = Scripted(delay=0.002)
    engine = engine_of(model, max_running=2)
    streams = [engine.stream([i + 1], ignore_eos=True, max_tokens=60) for i in range(4)]
    closers = [threading.Thread(target=engine.close, args=(timeout,)) for timeout in (None, 0.01, 5.0)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(PATIENCE)
        assert not closer.is_alive()
    assert any(isinstance(events_of(stream)[-1], Failed) for stream in streams)
    engine = engine_of(model)
    over = threading.Event()

    def end_it(event: Event) -> None:
        if isinstance(event, Delta):
            engine.close(None)
            over.set()

    engine.stream([1], max_tokens=3).listen(end_it)
    assert over.wait(PATIENCE)
    engine._thread.join(PATIENCE)
    assert not engine._thread.is_alive()
    assert engine.stats().used_cells == 0


def test_what_was_submitted_before_a_patient_close_is_finished() -> None:
    for _ in range(60):
        model = Scripted()
        engine = engine_of(model)
        caller = threading.Thread(target=lambda e=engine: e.explain([1]))
        caller.start()
        stream = engine.stream([1, 2], max_tokens=2)
        engine.close(None)
        caller.join()
        assert answer_of(stream) == alone(model, [1, 2], 2)


def test_a_call_and_a_request_at_the_very_end_are_answered() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        engine = engine_of(Scripted())
        ends: list[str] = []

        def ask(engine: Engine = engine, ends: list[str] = ends) -> None:
            try:
                while True:
                    engine.session()
                    events_of(engine.stream([1], max_tokens=1))
            except EngineClosed:
                ends.append("closed")

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        time.sleep(rng.random() * 0.01)
        engine.close()
        for asker in askers:
            asker.join(PATIENCE)
        assert ends == ["closed"] * 3
        assert engine._queued == 0


def test_an_exception_that_is_no_Exception_ends_one_request() -> None:
    class Panic(BaseException):
        pass

    class Panicking:
        is_finished = False

        def fork(self) -> Panicking:
            return self

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            raise Panic("from a foreign library")

    model = Scripted()
    with engine_of(model) as engine:
        request = Request(prompt=(1, 2))
        object.__setattr__(request, "guide", Panicking())
        streams = [engine.submit(request), engine.stream([3, 4], max_tokens=5)]
        assert isinstance(events_of(streams[0])[-1], Failed)
        assert answer_of(streams[1]) == alone(model, [3, 4], 5)
        settled(engine)


def test_nothing_comes_after_the_end_of_a_request_with_several_answers_of_which_one_fails() -> None:
    model = Scripted(lambda tokens: torch.full((VOCAB,), -torch.inf if len(tokens) > 6 else 0.0))
    with engine_of(model) as engine:
        stream = engine.stream([1, 2, 3, 4], n=3, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
        assert isinstance(events_of(stream)[-1], Failed)
        time.sleep(0.05)
        assert stream._events.empty()
        assert engine.stats().finished == {"failed": 1}
        settled(engine)


# --- requests that are wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": [("salt", "x")]}, ConfigError),
        ({"key": (["salt", "x"],)}, ConfigError),
        ({"key": "salt"}, ConfigError),
        ({"points": ("x",)}, ConfigError),
        ({"points": 3}, ConfigError),
        ({"stop": "end"}, ConfigError),
        ({"stop": 5}, ConfigError),
        ({"stop_ids": 5}, ConfigError),
        ({"stop_ids": None}, ConfigError),
        ({"prompt": None}, BatchError),
        ({"prompt": 5}, BatchError),
        ({"sampling": None}, ConfigError),
        ({"length_penalty": "x"}, ConfigError),
        ({"length_penalty": float("nan")}, ConfigError),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_by_name(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        Request(**{"prompt": (1,), **options})


def test_what_is_no_request_or_no_setting_is_refused() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        for wrong in (None, [1, 2], {"prompt": [1]}):
            with pytest.raises(ConfigError, match="Request"):
                engine.submit(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="key"):
            engine.session(key=[("salt", "x")])  # type: ignore[arg-type]
        assert engine._queued == 0
    for settings, message in (
        ({"context_shift": 3}, "context_shift"),
        ({"max_running": "4"}, "max_running"),
        ({"max_batch_tokens": None}, "max_batch_tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_of(model, **settings)
    with pytest.raises(ConfigError, match="cache"):
        Engine(model, object())  # type: ignore[arg-type]


def test_the_largest_seed_has_several_answers_too() -> None:
    model = Scripted(lambda tokens: torch.zeros(VOCAB))
    with engine_of(model) as engine:
        result = engine.generate([1], n=2, temperature=1.0, seed=2**63 - 1, max_tokens=4, ignore_eos=True)
        assert len(ids(result, 1)) == 4


def test_a_session_of_another_engine_and_a_freed_one_are_refused() -> None:
    model = Scripted()
    with engine_of(model) as one, engine_of(model) as two:
        stranger = two.session()
        two.generate([1, 2, 3], max_tokens=2, session=stranger)
        beside = one.stream([5], max_tokens=20)
        with pytest.raises(ConfigError, match="session"):
            one.generate([1, 2, 3, 4], session=stranger)
        assert answer_of(beside) == alone(model, [5], 20)
        gone = one.session()
        one.generate([1, 2, 3], max_tokens=2, session=gone)
        gone.free()
        with pytest.raises(ConfigError, match="session"):
            one.generate([1, 2, 3, 4], max_tokens=2, session=gone)
        for action in (lambda: gone.load("x"), gone.fork, lambda: gone.truncate(0)):
            with pytest.raises(OneKVError, match="freed"):
                action()
        assert not gone.busy
        settled(one)


# --- cells that others own, too -----------------------------------------------------------------------------------------------------


def test_idle_sessions_that_share_all_their_cells_give_way() -> None:
    model = Scripted()
    with engine_of(model, 32) as engine:
        session = engine.session()
        engine.generate([1] * 20, max_tokens=2, session=session)
        twins = [session.fork() for _ in range(3)]
        assert answer_of(engine.stream([2] * 28, max_tokens=3)) == alone(model, [2] * 28, 3)
        assert [len(s.tokens) for s in (session, *twins)] == [22] * 4
        settled(engine)


def test_a_session_within_a_cached_prefix_gives_way() -> None:
    model = Scripted()
    with engine_of(model, 32) as engine:
        session = engine.session()
        engine.generate([1] * 10, max_tokens=2, session=session)
        engine.generate([*session.tokens, 5, 6], max_tokens=2)
        assert answer_of(engine.stream([2] * 30, max_tokens=2)) == alone(model, [2] * 30, 2)
        settled(engine)


def test_the_oldest_tokens_give_way_though_a_cached_prefix_shares_them() -> None:
    model = Scripted(lambda tokens: 97)
    with engine_of(model, 64) as engine:
        engine.generate([1] * 20, max_tokens=2)
        assert answer_of(engine.stream([1] * 24, max_tokens=150, context_shift=ContextShift(2))) == [97] * 150
        session = engine.session()
        engine.generate([2] * 20, max_tokens=2, session=session)
        twin = session.fork()
        assert answer_of(engine.stream(twin.tokens, max_tokens=150, context_shift=ContextShift(2), session=twin)) == [97] * 150
        settled(engine)


def test_answers_that_share_a_prompt_shift_one_after_the_other() -> None:
    model = Scripted(lambda tokens: 97)
    with engine_of(model, 64) as engine:
        stream = engine.stream([1] * 30, n=3, max_tokens=100, context_shift=ContextShift(2))
        events = events_of(stream)
        assert isinstance(events[-1], Done)
        assert events[-1].completion_tokens == 300
        settled(engine)


def test_a_session_is_edited_in_a_full_buffer_and_does_not_give_way_to_itself() -> None:
    model = Scripted()
    with engine_of(model, 32) as engine:
        session = engine.session()
        engine.generate(list(range(1, 21)), max_tokens=2, session=session)
        twin = session.fork()
        engine.generate([*twin.tokens, 5, 6, 7, 8, 9], max_tokens=5, session=twin)
        session.remove(2, 4, mode="shift")
        assert session.tokens[:4] == [1, 2, 5, 6]
        assert (session.num_cells, session.exact) == (19, False)
        settled(engine)


def test_a_source_that_is_given_up_for_its_id_is_evaluated_again() -> None:
    model = Scripted()
    with engine_of(model, 64, max_running=1, cache={"max_seqs": 2}) as engine:
        session = engine.session()
        engine.generate([1, 2, 3, 4], max_tokens=2, session=session)
        engine.generate([5, 6, 7, 8], max_tokens=2)
        assert answer_of(engine.stream([5, 6, 7, 8, 9], max_tokens=2)) == alone(model, [5, 6, 7, 8, 9], 2)
        twin = session.fork()
        others = [engine.session() for _ in range(3)]
        for i, other in enumerate([*others, twin, session]):
            prompt = [*other.tokens, i, i]
            assert answer_of(engine.stream(prompt, max_tokens=3, session=other)) == alone(model, prompt, 3)
            other.fork().truncate(2)
        settled(engine)


# --- disks --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["save", "load"])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_full_or_broken_disk_costs_time_and_no_request(monkeypatch: pytest.MonkeyPatch, broken: str, shifted: bool) -> None:
    model = Scripted(lambda tokens: 97 + len(tokens) % 5) if shifted else Scripted()
    options: dict[str, Any] = {"max_tokens": 100, "context_shift": ContextShift(2)} if shifted else {"max_tokens": 30}
    with engine_of(model, 48, preempt="spill") as engine:

        def refuse(*_: Any, **__: Any) -> int:
            raise StateError("no space left on device")

        monkeypatch.setattr(engine.cache, broken, refuse)
        streams = held_back(engine, [{"prompt": [i] * 8, **options} for i in (1, 2, 3)])
        for i, stream in zip((1, 2, 3), streams, strict=True):
            told = answer_of(stream)
            assert len(told) == options["max_tokens"]
            assert shifted or told == alone(model, [i] * 8, 30)
        assert engine.stats().preemptions > 0
        settled(engine)


def test_files_of_answers_that_had_to_wait_do_not_stay() -> None:
    model = Scripted(lambda tokens: 97 + len(tokens) % 5, delay=0.001)
    with engine_of(model, 48, preempt="spill") as engine:
        sessions = [engine.session() for _ in range(3)]
        streams = held_back(engine, [{"prompt": [i] * 8, "max_tokens": 39, "session": s} for i, s in enumerate(sessions)])
        deadline = time.monotonic() + PATIENCE
        while not engine.stats().preemptions and time.monotonic() < deadline:
            time.sleep(0.001)
        for stream in streams:
            stream.cancel()
        for stream in streams:
            events_of(stream)
        assert not list(Path(engine.scheduler._spills.name).iterdir())
        settled(engine)


# --- windows ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preempt", ["recompute", "spill"])
@pytest.mark.parametrize("window", [Window.sliding(16), Window.chunked(16)])
def test_answers_whose_windows_do_not_fit_at_once_take_turns(window: Window, preempt: Any) -> None:
    model = Scripted(window=window)
    prompts = [[i + 1] * (5 + 6 * i) for i in range(5)]
    with engine_of(model, 40, preempt=preempt) as engine:
        streams = held_back(engine, [{"prompt": prompt, "max_tokens": 25} for prompt in prompts])
        for prompt, stream in zip(prompts, streams, strict=True):
            assert answer_of(stream) == alone(model, prompt, 25)
        assert len(model.batches) < 600
        settled(engine)


def test_log_probabilities_of_a_prompt_whose_steps_do_not_fit() -> None:
    model = Scripted(window=Window.sliding(16))
    prompt = [i % 90 for i in range(60)]
    with engine_of(model, 20) as engine:
        stream = engine.stream(prompt, max_tokens=3, prompt_logprobs=True, logprobs=1)
        assert answer_of(stream) == alone(model, prompt, 3)
        assert len(model.batches) < 200
        settled(engine)


# --- exactness ----------------------------------------------------------------------------------------------------------------------


def test_an_answer_that_has_to_wait_just_before_it_shifts_shifts_the_same_tokens() -> None:
    model = Scripted(lambda tokens: 97 + (len(tokens) * 7 + sum(tokens[:6])) % 20)
    prompt = [50, 51, 52, 53, 54, 55] + [60] * 54
    options: dict[str, Any] = {"max_tokens": 30, "context_shift": ContextShift(6)}
    with engine_of(model, 64) as engine:
        expected = answer_of(engine.stream(prompt, **options))
    for length in (61, 62, 63, 64):
        with engine_of(model, 64) as engine:
            set_back(engine, length)
            assert answer_of(engine.stream(prompt, **options)) == expected
            settled(engine)


def set_back(engine: Engine, length: int) -> None:
    """Let the first answer that is `length` tokens long lose all its cells and wait."""
    scheduler, step, done = engine.scheduler, engine._step, []

    def first() -> None:
        for run in list(scheduler.running):
            if len(run.tokens) == length and not done:
                done.append(run)
                scheduler.running.remove(run)
                scheduler.release(run, keep=False)
                scheduler.submit(run)
        step()

    engine._step = first  # type: ignore[method-assign]


def test_what_an_interrupted_answer_has_shifted_does_not_stay_in_its_session_as_exact() -> None:
    model = Scripted(lambda tokens: 97, delay=0.001)
    with engine_of(model, 32) as engine:
        session = engine.session()
        engine.generate([97] * 20, max_tokens=2, session=session)
        stream = engine.stream([97] * 24, context_shift=ContextShift(4), session=session)
        seen = 0
        while seen < 30:
            event = stream._events.get(timeout=PATIENCE)
            seen += len(event.token_ids) if isinstance(event, Delta) else 0
        stream.cancel()
        events_of(stream)
        assert session.tokens == [97] * 22
        assert session.num_cells <= 4 or not session.exact
        assert engine.generate([97] * 25, max_tokens=1).usage.cached_tokens <= 4
        settled(engine)


def test_a_request_that_is_cancelled_before_it_begins_leaves_its_session_as_it_was() -> None:
    model = Scripted()
    with engine_of(model, 64, max_running=1) as engine:
        session = engine.session()
        engine.generate(list(range(1, 12)), max_tokens=2, session=session)
        session.remove(2, 4, mode="shift")
        before = (session.tokens, session.num_cells, session.exact)
        model.may_go.clear()
        first = engine.stream([50] * 5, max_tokens=2)
        waiting = engine.stream([*session.tokens, 7], max_tokens=2, session=session)
        waiting.cancel()
        model.may_go.set()
        assert [e.reason for e in events_of(waiting) if isinstance(e, Finished)] == ["cancelled"]
        answer_of(first)
        assert (session.tokens, session.num_cells, session.exact) == before
        settled(engine)
