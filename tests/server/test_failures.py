"""What goes wrong: clients that go away, requests that fail, queues that are full, a server that stops."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from scripted import Scripted, mixed
from serving import NAME, Client, Served, error_of, serving

PATH = "/v1/completions"
LONG = {"prompt": "count", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def unchanged(model: Scripted, **settings: Any) -> Iterator[Served]:
    """Serve; at the end threads and cells must be as at the start, but for cached prefixes, which can be had at any time."""
    with serving(model, **settings) as served:
        served.ok(PATH, {"prompt": "warm", "max_tokens": 1})
        threads = threading.active_count()
        yield served
        leaves_nothing(served)
        stats = served.engine.stats()
        assert stats.used_cells + stats.free_cells == stats.num_cells
        served.engine.call(served.engine.cache.check)
        served.until(lambda: threading.active_count() <= threads)


def leaves_nothing(served: Served) -> None:
    """Within 2 s nothing runs or waits, no cell is in use, and the next request is answered."""

    def nothing() -> bool:
        stats = served.engine.stats()
        return served.is_idle() and stats.used_cells == stats.evictable_cells and not len(served.app.state.api.listeners)

    served.until(nothing)
    alone = Scripted().answer(list(b"next"))
    assert served.ok(PATH, {"prompt": "next", "max_tokens": 1, "temperature": 0})["choices"][0]["text"] == chr(int(alone))


ONE = {"max_running": 1, "max_batch_tokens": 8}
TIMES = 100


def test_case_S03_a_stream_that_is_cut_ends_its_request() -> None:
    with unchanged(Scripted(delay=0.001), cells=1024, engine=ONE) as served:
        for _ in range(TIMES):
            client = Client(served, {**LONG, "stream": True})
            client.read_until(b"data: ")
            client.cut()
            served.until(served.is_idle)
        served.until(lambda: served.engine.stats().finished["cancelled"] == TIMES)


def test_case_S03_a_client_that_waits_for_the_whole_answer_and_goes_ends_its_request() -> None:
    with unchanged(Scripted(delay=0.001), cells=1024, engine=ONE) as served:
        for _ in range(TIMES):
            before = served.engine.stats().generated_tokens
            client = Client(served, LONG)
            served.until(lambda: served.engine.stats().generated_tokens > before)  # noqa: B023 - called at once
            client.cut()
            served.until(served.is_idle)
        served.until(lambda: served.engine.stats().finished["cancelled"] == TIMES)
        assert served.engine.stats().generated_tokens < TIMES * 200


def test_case_S03_a_client_that_goes_during_its_prompt_ends_its_request() -> None:
    """A prompt of 75 steps."""
    with unchanged(Scripted(delay=0.001), cells=1024, engine=ONE) as served:
        for i in range(TIMES):
            client = Client(served, {**LONG, "prompt": f"{i:4}" + "x" * 596, "stream": i % 2 == 0})
            served.until(lambda: served.engine.stats().running == 1)
            client.cut()
            served.until(served.is_idle)
        served.until(lambda: served.engine.stats().finished["cancelled"] == TIMES)
        assert served.engine.stats().generated_tokens == 1


def test_case_S03_a_client_that_goes_while_queued_leaves_the_queue() -> None:
    with unchanged(Scripted(delay=0.001), cells=1024, engine=ONE) as served:
        for _ in range(TIMES // 10):
            first = Client(served, {**LONG, "max_tokens": 1000, "stream": True})
            first.read_until(b"data: ")
            queued = [Client(served, {**LONG, "stream": i % 2 == 0}) for i in range(10)]
            served.until(lambda: served.engine.stats().waiting == 10)
            for client in queued:
                client.cut()
            served.until(lambda: served.engine.stats().waiting == 0)
            assert served.engine.stats().running == 1  # the one who stayed is undisturbed
            first.cut()
            served.until(served.is_idle)
        served.until(lambda: served.engine.stats().finished["cancelled"] == TIMES + TIMES // 10)


def test_case_S03_all_choices_and_prompts_of_a_client_that_goes_are_ended() -> None:
    with unchanged(Scripted(delay=0.02), cells=4096) as served:
        client = Client(served, {**LONG, "prompt": ["one", "two", "three"], "n": 3, "stream": True})
        served.until(lambda: served.engine.stats().running == 9)
        client.cut()


def test_case_S03_clients_that_go_at_any_moment_leave_no_thread_and_no_cell() -> None:
    with unchanged(Scripted(delay=0.001), cells=2048) as served:
        for i in range(TIMES):
            client = Client(served, {**LONG, "prompt": f"prompt {i}", "stream": i % 2 == 0})
            if i % 3:
                time.sleep(0.003)
            client.cut()


# --- requests that fail ---------------------------------------------------------------------------------------------------------


def breaks_on(text: bytes) -> Callable[[list[int]], bool]:
    return lambda tokens: bytes(t for t in tokens if t < 256).endswith(text)


def test_a_request_that_fails_is_a_500_of_its_own() -> None:
    with serving(Scripted(broken=breaks_on(b"boom"))) as served:
        error = served.refused(PATH, {"prompt": "boom"}, 500)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "this row breaks the model" in error["message"]
        assert served.ok(PATH, {"prompt": "fine", "max_tokens": 2})["choices"]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    model = Scripted(lambda tokens: ord("a") + len(tokens) % 26)
    model.broken = lambda tokens: len(tokens) == 8
    with serving(model) as served:
        body = {"prompt": "abcd", "temperature": 0, "max_tokens": 20}
        with served.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200
        assert lines[-2] == "event: error"
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        assert "data: [DONE]" not in lines
        with pytest.raises(openai.APIError, match="breaks the model"):
            list(served.openai.completions.create(model=NAME, **body, stream=True))  # type: ignore[call-overload]


def test_a_full_queue_is_a_429_that_says_when_to_come_again() -> None:
    with serving(Scripted(delay=0.02), engine={"max_running": 1, "max_waiting": 2, "max_batch_tokens": 16}) as served:
        clients = [Client(served, {**LONG, "stream": True})]
        clients[0].read_until(b"data: ")
        clients += [Client(served, LONG) for _ in range(2)]
        served.until(lambda: served.engine.stats().waiting == 2)
        answer = served.http.post(PATH, json=LONG)
        error = error_of(answer, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        # All prompts of a request are queued, or none.
        clients[2].cut()
        served.until(lambda: served.engine.stats().waiting == 1)
        assert error_of(served.http.post(PATH, json={**LONG, "prompt": ["a", "b"]}), 429)
        served.until(lambda: served.engine.stats().waiting == 1)
        for client in clients:
            client.cut()
        served.until(served.is_idle)


def test_a_closed_engine_is_a_503() -> None:
    with serving() as served:
        served.engine.close()
        error = error_of(served.http.post(PATH, json={"prompt": "a"}), 503)
        assert (error["type"], error["code"]) == ("server_error", "stopping")


def test_a_request_that_fails_leaves_its_neighbours_as_they_were() -> None:
    """Answers made beside a failing one equal those made alone."""
    body = {"prompt": "a neighbour", "temperature": 0, "max_tokens": 30}
    with serving(Scripted(mixed, broken=breaks_on(b"boom"), delay=0.002)) as served:
        alone = served.ok(PATH, body)["choices"][0]["text"]
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(served.ok(PATH, {**body, "cache_salt": "x"})["choices"][0]["text"]))
        asking.start()
        with httpx.Client(base_url=served.url) as other:
            assert [other.post(PATH, json={"prompt": "boom"}).status_code for _ in range(5)] == [500] * 5
        asking.join()
        assert answers == [alone]


# --- stopping -------------------------------------------------------------------------------------------------------------------


def test_a_server_that_stops_lets_requests_finish() -> None:
    with serving(Scripted(delay=0.01), limit=10) as served:
        client = Client(served, {"prompt": "a", "max_tokens": 30, "temperature": 0, "stream": True})
        client.read_until(b"data: ")
        served.server.should_exit = True
        assert client.read_until(b"[DONE]").count(b"data: ") >= 20
        client.cut()
        served.thread.join(5)
        assert not served.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_a_server_that_stops_tells_those_it_does_not_wait_for() -> None:
    with serving(Scripted(delay=0.01), limit=0.1) as served:
        stream, whole = Client(served, {**LONG, "stream": True}), Client(served, LONG)
        stream.read_until(b"data: ")
        served.until(lambda: served.engine.stats().running == 2)
        served.server.should_exit = True
        assert b"event: error" in stream.read_until(b"the server is stopping")
        answer = whole.read_until(b"}}")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"stopping"' in answer
        served.thread.join(5)
        assert not served.thread.is_alive()
        assert served.is_idle()
        for client in (stream, whole):
            client.cut()


def test_a_second_signal_tells_at_once_those_who_would_be_waited_for() -> None:
    with serving(Scripted(delay=0.03), limit=60) as served:
        told: list[Any] = []
        served.server._stopping = lambda *counts: told.append(counts)
        client = Client(served, {**LONG, "stream": True})
        client.read_until(b"data: ")
        served.server.handle_exit(signal.SIGINT, None)
        served.until(lambda: bool(told))
        assert told == [(1, 60)]
        served.server.handle_exit(signal.SIGINT, None)
        assert b"event: error" in client.read_until(b"the server is stopping")
        served.thread.join(5)
        assert not served.thread.is_alive()
        client.cut()


def test_an_unknown_path_is_named() -> None:
    with serving() as served:
        error = error_of(served.http.get("/v1/foo"), 404)
        assert (error["message"], error["code"]) == ("there is nothing at /v1/foo", "not_found")
