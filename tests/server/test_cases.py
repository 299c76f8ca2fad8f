"""Cases from public bug reports, replayed against a server with a scripted model: crowds, clients that leave, odd names, damaged files."""

from __future__ import annotations

import base64
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import httpx
import openai
import pytest

from onekv import Window
from scripted import END, Scripted, alone, mixed, says
from serving import ALL, CHAT, NAME, TEXT, Client, Served, cached, contents, do, error_of, files_of, new, say, seen, serving

LOG = {"prompt": "The lighthouse keeper wrote in his log:", "max_tokens": 16, "temperature": 0}


def usual() -> str:
    """What the model of letters says to the lighthouse keeper's prompt."""
    return bytes(alone(Scripted(), list(str(LOG["prompt"]).encode()), 16)).decode()


def asked(served: Served, prompt: str, **fields: Any) -> dict[str, Any]:
    return served.ok(TEXT, {"prompt": prompt, "temperature": 0, **fields})


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


# --- S05: a crowd ---------------------------------------------------------------------------------------------------------------


def locker(tokens: list[int]) -> int:
    """Answers with the marker of the prompt, twice, and a number that depends on the whole prompt."""
    data = bytes(t for t in tokens if t < 256)
    prompt, _, made = data.partition(b"\n")
    code = prompt[prompt.index(b"<") : prompt.index(b">") + 1]
    script = code + code + str(sum((i + 1) * byte for i, byte in enumerate(prompt)) % 99991).encode()
    return script[len(made)] if len(made) < len(script) else END


def test_case_S05_sixteen_clients_at_once_each_have_their_own_marker() -> None:
    rng = random.Random(5)
    prompts = [[f"<KIWI-{i:02}{k}> " + "filler " * rng.choice([0, 0, 3, 20, 60]) + "\n" for k in range(10)] for i in range(16)]
    model = Scripted(locker)
    expected = {p: bytes(alone(model, list(p.encode()), 40)[:-1]).decode() for own in prompts for p in own}
    faults: list[str] = []
    completed = 0
    with serving(model, cells=1200, engine={"max_running": 8, "max_batch_tokens": 64}) as served:
        client = served.openai.with_options(timeout=120)

        def ask(own: list[str], rng: random.Random) -> None:
            nonlocal completed
            for prompt in own:
                stream = client.completions.create(model=NAME, prompt=prompt, temperature=0, stream=True)
                if rng.random() < 0.2:  # leaves
                    next(iter(stream))
                    stream.close()
                    continue
                said = "".join(piece.choices[0].text for piece in stream)
                completed += 1
                if said != expected[prompt]:
                    faults.append(f"{prompt!r} > {said!r}")

        threads = [threading.Thread(target=ask, args=(own, random.Random(i))) for i, own in enumerate(prompts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert faults == []
        assert 100 < completed < 160
        served.until(served.is_idle)
        stats = served.engine.stats()
        assert stats.evictions > 0
        assert stats.finished.get("failed", 0) == 0
        assert stats.used_cells == stats.evictable_cells
        served.engine.call(served.engine.cache.check)


# --- S06, S07, I26: one pool ----------------------------------------------------------------------------------------------------


def both(served: Served, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to requests that start together."""
    answers: list[dict[str, Any]] = [{}] * len(bodies)

    def ask(i: int) -> None:
        with httpx.Client(base_url=served.url, timeout=20) as http:
            answers[i] = http.post(TEXT, json={"temperature": 0, **bodies[i]}).json()

    served.model.may_go.clear()
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    served.model.may_go.set()
    for thread in threads:
        thread.join(20)
    return answers


def test_case_I26_two_requests_share_a_pool_that_holds_them_one_after_the_other() -> None:
    a, b = "a" * 20, "b" * 20
    few: dict[str, Any] = {"max_running": 2, "max_batch_tokens": 16}
    with serving(cells=64, engine=few) as served:
        answers = both(served, {"prompt": a, "max_tokens": 40}, {"prompt": b, "max_tokens": 8})
        for prompt, count, answer in ((a, 40, answers[0]), (b, 8, answers[1])):
            assert text(answer) == bytes(alone(served.model, list(prompt.encode()), count)).decode()
            assert answer["usage"]["completion_tokens"] == count
    with serving(cells=32, engine=few) as served:
        # 60 tokens can never fit into 32 cells, whoever else is there.
        for refused in both(served, {"prompt": a, "max_tokens": 40}, {"prompt": b, "max_tokens": 40}):
            assert refused["error"]["code"] == "context_length_exceeded"
        # As many as fit: each has all cells in turn.
        for prompt, answer in zip((a, b), both(served, {"prompt": a}, {"prompt": b}), strict=True):
            assert text(answer) == bytes(alone(served.model, list(prompt.encode()), 12)).decode()
            assert answer["choices"][0]["finish_reason"] == "length"


def test_case_S07_an_idle_session_gives_way_to_a_new_request() -> None:
    with serving(cells=32) as served:
        one = new(served)
        asked(served, "s" * 12, session=one, max_tokens=8)
        assert seen(served, one)["cells"] == 19
        assert text(asked(served, "n" * 24, max_tokens=4)) == bytes(alone(served.model, list(b"n" * 24), 4)).decode()
        assert seen(served, one)["state"] == "evicted"


def test_case_S06_a_request_with_impossible_rows_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third request is given rows of a sequence that there is not; the two beside it are answered as alone."""
    with serving(Scripted(delay=0.002), cells=256) as served:
        seq_id = served.engine._seq_id
        wrong = lambda run: 9999 if run.tokens[0] == 98 and run.made > 2 else seq_id(run)  # noqa: E731
        monkeypatch.setattr(served.engine, "_seq_id", wrong)
        answers = both(served, *({"prompt": c * 8, "max_tokens": 20} for c in "abc"))
        assert "9999" in answers[1]["error"]["message"]
        for i in (0, 2):
            assert text(answers[i]) == bytes(alone(served.model, list("abc"[i].encode() * 8), 20)).decode()
        assert text(asked(served, "aaaaaaaa", max_tokens=20)) == text(answers[0])


# --- S09, S10: text over token borders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "most", "whole"),
    [
        ("😸!", None, "😸!"),
        ("€", None, "€"),
        ("😸🐢", None, "😸🐢"),
        ("😸", 2, "\ufffd"),
        (b"a\xffb", None, "a\ufffdb"),
        ("👩\u200d🚀 e\u0301", None, "👩\u200d🚀 e\u0301"),
    ],
    ids=["emoji", "three", "two", "cut", "invalid", "joined"],
)
def test_case_S09_streams_add_up_and_replace_only_what_is_no_text(said: str | bytes, most: int | None, whole: str) -> None:
    with serving(Scripted(says(said, after=1))) as served:
        body: dict[str, Any] = {"prompt": "x", "temperature": 0, "max_tokens": most}
        assert text(served.ok(TEXT, body)) == whole
        deltas = [choice["text"] for chunk in served.stream(TEXT, body) for choice in chunk["choices"]]
        assert "".join(deltas) == whole
        if said == "😸🐢":
            assert [delta for delta in deltas if delta] == ["😸", "🐢"]


@pytest.mark.parametrize("stop", [["own fox"], ["ow", "own fox"], ["own fox", "ow"]])
def test_case_S10_a_stop_string_never_shows_and_the_session_holds_what_was_evaluated(stop: list[str]) -> None:
    with serving(Scripted(says("The quick brown fox jumps", after=1))) as served:
        one = new(served)
        for fields in ({}, {"session": one}):
            body: dict[str, Any] = {"prompt": "x", "temperature": 0, "stop": stop, **fields}
            answer = served.ok(TEXT, body)
            assert (text(answer), answer["choices"][0]["finish_reason"]) == ("The quick br", "stop")
            count = len("The quick brow") if "ow" in stop else len("The quick brown fox")
            assert answer["usage"]["completion_tokens"] == count
        # The tokens of the session are those that were evaluated, and the last one.
        session = seen(served, one)
        assert (session["tokens"], session["cells"]) == (1 + count, count)
        chunks = served.stream(TEXT, {"prompt": "x", "temperature": 0, "stop": stop})
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "The quick br"


def test_case_S10_a_stop_string_may_cross_a_character() -> None:
    with serving(Scripted(says("ab😸cd", after=1))) as served:
        body: dict[str, Any] = {"prompt": "x", "temperature": 0, "stop": "b😸c"}
        assert text(served.ok(TEXT, body)) == "a"
        assert "".join(choice["text"] for chunk in served.stream(TEXT, body) for choice in chunk["choices"]) == "a"


# --- S18, E13: after trouble ----------------------------------------------------------------------------------------------------


def test_case_S18_a_full_context_and_a_failure_leave_nothing_behind() -> None:
    is_broken = False
    with serving(Scripted(broken=lambda tokens: is_broken), cells=64) as served:
        one = new(served)
        first = asked(served, "first", session=one)
        assert first["usage"]["total_tokens"] == 64
        error = served.refused(TEXT, {"prompt": "more", "session": one})
        assert error["code"] == "context_length_exceeded"
        do(served, one, "rewind", {"position": 0})
        other = asked(served, "unrelated", session=one, max_tokens=4)
        assert (cached(other), text(other)) == (0, bytes(alone(served.model, list(b"unrelated"), 4)).decode())
        is_broken = True
        served.refused(TEXT, {"prompt": "unrelated, and it fails"}, 500)
        is_broken = False
        assert text(asked(served, "first")) == text(first)


def test_case_E13_a_saved_blank_session_is_a_fresh_start(tmp_path: Path) -> None:
    with serving(sessions_dir=tmp_path) as served:
        one = new(served)
        do(served, one, "save")
        rounds = []
        for letter in "abcde":
            asked(served, letter * 3, session=one, max_tokens=3)
            blank = do(served, one, "restore")
            assert (blank["tokens"], blank["cells"], blank["bytes"], blank["exact"]) == (0, 0, 0, True)
            rounds.append(text(asked(served, "xyz", session=one, max_tokens=3)))
            do(served, one, "restore")
        assert rounds == [bytes(alone(served.model, list(b"xyz"), 3)).decode()] * 5


# --- E11, I19, I20: save and restore --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, Window.sliding(8)], ids=["full", "window"])
def test_case_I19_a_session_is_saved_erased_restored_and_restored_again_after_a_restart(tmp_path: Path, window: Window | None) -> None:
    def model() -> Scripted:
        return Scripted(mixed, window=window)

    first, more = "a text that is longer than any window", " and more"
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served)
        start = asked(served, first, session=one, max_tokens=6)
        saved = do(served, one, "save")
        expected = text(asked(served, more, session=one, max_tokens=6))
        whole = [*first.encode(), *text(start).encode(), *more.encode()]
        assert expected == bytes(alone(served.model, whole, 6)).decode()
        assert do(served, one, "rewind", {"position": 0})["tokens"] == 0
        restored = do(served, one, "restore")
        assert (restored["tokens"], restored["cells"]) == (saved["tokens"], saved["cells"])
        twin = do(served, one, "fork", None, 201)["id"]  # the same in another session
        for session in (twin, one):
            again = asked(served, more, session=session, max_tokens=6)
            assert text(again) == expected
            assert cached(again) >= saved["tokens"] - 1
        do(served, one, "restore")
    for _ in range(2):  # a restart, and another
        with serving(model(), sessions_dir=tmp_path) as served:
            assert do(served, one, "restore")["tokens"] == saved["tokens"]
            again = asked(served, more, session=one, max_tokens=6)
            assert (text(again), cached(again)) == (expected, saved["tokens"] - 1)
            do(served, one, "rewind", {"position": saved["tokens"]})


def test_case_I20_a_session_that_was_never_used_is_saved_restored_and_used(tmp_path: Path) -> None:
    with serving(sessions_dir=tmp_path) as served:
        one = new(served)
        assert do(served, one, "save")["saved"]
        assert do(served, one, "restore")["tokens"] == 0
        assert text(served.ok(TEXT, {**LOG, "session": one})) == usual()
    with serving(sessions_dir=tmp_path) as served:
        assert seen(served, one)["tokens"] == len(str(LOG["prompt"])) + 16


# --- S01, I21, I22: names -------------------------------------------------------------------------------------------------------

NAMES: list[Any] = ["../s.bin", "/abs/s.bin", "sub/s.bin", "..\\s.bin", ".", "..", "", "s.bin\0.txt", "a" * 300, "C:x", 42, None]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_case_I21_no_name_is_ever_a_path(tmp_path: Path, name: Any) -> None:
    """A session is named by an id that the server makes, and the file by the server; what a client calls it is text."""
    directory = tmp_path / "sessions"
    with serving(sessions_dir=directory) as served:
        made = served.http.post(ALL, json={"name": name})
        allowed = name is None or (isinstance(name, str) and 1 <= len(name) <= 200)
        assert made.status_code == (201 if allowed else 400)
        if allowed:
            do(served, made.json()["id"], "save")
        for what in ("save", "restore", "fork"):
            answer = served.http.post(f"{ALL}/{quote(str(name), safe='')}/{what}")
            assert answer.status_code in (404, 405)
            error_of(answer, answer.status_code)
        assert (
            served.refused(TEXT, {"prompt": "a", "session": name}, 404 if isinstance(name, str) and name else 400)
            if name is not None
            else True
        )
        # A file name is no field of a save.
        one = new(served)
        served.http.post(f"{ALL}/{one}/save", json={"filename": name})
        assert all(path.parent == directory and path.name.startswith(("sess_", "index.sqlite")) for path in directory.rglob("*"))
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]


@pytest.mark.parametrize("target", ["outside.txt", "nowhere"])
def test_case_I22_a_symbolic_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, target: str) -> None:
    directory, outside = tmp_path / "sessions", tmp_path / "outside.txt"
    outside.write_text("theirs")
    with serving(sessions_dir=directory) as served:
        one = new(served)
        asked(served, "some text", session=one, max_tokens=3)
        do(served, one, "save")
        [file] = files_of(directory)
        (directory / file).unlink()
        (directory / file).symlink_to(tmp_path / target)
        before = seen(served, one)
        assert error_of(served.http.post(f"{ALL}/{one}/restore"), 400)["code"] == "state_refused"
        assert seen(served, one) == before
        do(served, one, "save")
        assert outside.read_text() == "theirs"
        assert not (tmp_path / "nowhere").exists()
        assert do(served, one, "restore")["tokens"] == before["tokens"]
        assert not any(path.is_symlink() for path in directory.iterdir())


# --- I23: damage ----------------------------------------------------------------------------------------------------------------


def damages(data: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    size = len(data)
    for length in (0, 1, 7, 8, 15, 16, size // 4, size // 2, size * 99 // 100, size - 1):
        yield f"cut to {length}", data[:length]
    for i in range(64):
        changed = bytearray(data)
        changed[i] ^= 1 << i % 8
        yield f"a bit of byte {i}", bytes(changed)
    yield "count", b"\xff\xff\xff\x7f" + data[4:]
    yield "appended", data + bytes(1024)
    yield "text", b"a file of text\n" * 20
    yield "another model's", other


def test_case_I23_a_damaged_file_is_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    foreign = tmp_path / "other"
    with serving(Scripted(window=Window.sliding(4)), sessions_dir=foreign) as served:
        theirs = new(served)
        asked(served, "some text", session=theirs, max_tokens=3)
        do(served, theirs, "save")
    other = (foreign / files_of(foreign)[0]).read_bytes()
    with serving(sessions_dir=tmp_path / "sessions") as served:
        one = new(served)
        asked(served, "some text", session=one, max_tokens=3)
        do(served, one, "save")
        asked(served, " and more", session=one, max_tokens=3)
        before, used = seen(served, one), None
        [file] = [tmp_path / "sessions" / name for name in files_of(tmp_path / "sessions")]
        good = file.read_bytes()
        for what, data in damages(good, other):
            file.write_bytes(data)
            answer = served.http.post(f"{ALL}/{one}/restore")
            assert answer.status_code == 400, what
            assert answer.json()["error"]["code"] == "state_refused", what
            assert text(served.ok(TEXT, LOG)) == usual(), what
            stats = served.engine.stats()
            assert used in (None, stats.used_cells), what
            used = stats.used_cells
        file.unlink()
        file.mkdir()
        assert error_of(served.http.post(f"{ALL}/{one}/restore"), 400)["code"] == "state_refused"
        file.rmdir()
        assert text(served.ok(TEXT, LOG)) == usual()
        assert seen(served, one) == before
        file.write_bytes(good)
        assert do(served, one, "restore")["tokens"] == len("some text") + 3
        # What failed to load has left nothing of itself in the session.
        file.write_bytes(good[:-1])
        do(served, one, "rewind", {"position": 0})
        error_of(served.http.post(f"{ALL}/{one}/restore"), 400)
        unlike = asked(served, "unlike anything", session=one, max_tokens=3)
        assert (cached(unlike), text(unlike)) == (0, bytes(alone(served.model, list(b"unlike anything"), 3)).decode())


# --- clients that leave at the end ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_the_last_token(tmp_path: Path | None = None, **settings: Any) -> Iterator[tuple[Served, threading.Event, threading.Event]]:
    """A server whose model waits before the last token of an answer of "ok": until `go`, once `reached`."""
    reached, go = threading.Event(), threading.Event()
    script = says("ok")

    def answer(tokens: list[int]) -> int:
        said = script(tokens)
        if isinstance(said, int) and said == END:
            reached.set()
            assert go.wait(20)
        return int(said)

    with serving(Scripted(answer), sessions_dir=tmp_path, **settings) as served:
        try:
            yield served, reached, go
        finally:
            go.set()


@pytest.mark.parametrize("stream", [False, True])
def test_messages_and_tokens_agree_when_the_client_leaves_at_the_last_token(stream: bool) -> None:
    with at_the_last_token() as (served, reached, go):
        one = new(served)
        body = {"session": one, "messages": [{"role": "user", "content": "a"}], "temperature": 0, "stream": stream}
        client = Client(served, body, CHAT)
        assert reached.wait(10)
        client.cut()
        served.until(lambda: served.engine._inbox.qsize() > 0)  # the server has noticed
        assert seen(served, one)["busy"]
        go.set()
        served.until(served.is_idle)
        served.until(lambda: not seen(served, one)["busy"])
        session = seen(served, one)
        assert contents(session) == [("user", "a"), ("assistant", "ok")]
        assert session["tokens"] == session["messages"][1]["end"]
        second = say(served, one, "b")
        assert cached(second) == session["tokens"] - 1
        assert len(seen(served, one)["messages"]) == 4


def test_messages_and_tokens_agree_when_the_client_leaves_before_the_last_token() -> None:
    scripted = Scripted(says("ok"), delay=0.03)
    with serving(scripted) as served:
        one = new(served)
        say(served, one, "a")
        before = seen(served, one)
        client = Client(served, {"session": one, "messages": [{"role": "user", "content": "b"}], "temperature": 0}, CHAT)
        served.until(lambda: served.engine.stats().running == 1)
        client.cut()
        served.until(lambda: not seen(served, one)["busy"])
        after = seen(served, one)
        assert (contents(after), after["tokens"]) == (contents(before), before["tokens"])
        assert cached(say(served, one, "c")) >= before["tokens"] - 1


def test_messages_and_tokens_agree_when_the_server_stops_at_the_last_token(tmp_path: Path) -> None:
    with at_the_last_token(tmp_path, limit=0.05) as (served, reached, go):
        one = new(served)
        client = Client(served, {"session": one, "messages": [{"role": "user", "content": "a"}], "temperature": 0}, CHAT)
        assert reached.wait(10)
        served.server.should_exit = True
        served.until(lambda: served.engine._inbox.qsize() > 0)
        go.set()
        assert b"503" in client.read_until(b"}}")
        client.cut()
    with serving(Scripted(says("ok")), sessions_dir=tmp_path) as served:
        session = seen(served, one)
        assert contents(session) == [("user", "a"), ("assistant", "ok")]
        assert session["tokens"] == session["messages"][1]["end"]
        assert cached(say(served, one, "b")) == session["tokens"] - 1


# --- I08, I10, I12, I13, I27 ----------------------------------------------------------------------------------------------------


def test_case_I08_a_history_without_its_reasoning_goes_on_from_what_is_still_the_same() -> None:
    with serving(Scripted(says("<think>two and two</think>4"))) as served:
        question = {"role": "user", "content": "2 + 2?"}
        first = served.ok(CHAT, {"messages": [question], "temperature": 0})
        assert first["choices"][0]["message"]["content"] == "<think>two and two</think>4"
        body = {"messages": [question, {"role": "assistant", "content": "4"}, {"role": "user", "content": "+ 1?"}], "temperature": 0}
        second = served.ok(CHAT, body)
        assert cached(second) == first["usage"]["prompt_tokens"]
        assert second["choices"] == served.ok(CHAT, {**body, "cache_salt": "cold"})["choices"]


def test_case_I10_what_is_too_long_is_told_both_numbers_at_once_and_disturbs_nobody() -> None:
    with serving(Scripted(delay=0.002), cells=256) as served:
        asked(served, "kept before", max_tokens=1)
        client = Client(served, {"prompt": "beside", "max_tokens": 200, "temperature": 0, "stream": True})
        client.read_until(b"data: ")
        for prompt, count in (("pebble " * 70_000, 490_000), ([97] * 256, 256), ([97] * 257, 257)):
            for stream in (False, True):
                start = time.monotonic()
                error = served.refused(TEXT, {"prompt": prompt, "stream": stream})
                assert time.monotonic() - start < 5
                assert error["code"] == "context_length_exceeded"
                assert f"{count} tokens" in error["message"]
                assert "limit is 256" in error["message"]
        said = client.read_until(b"[DONE]")
        assert said.count(b'"text"') > 100
        client.cut()
        one = served.ok(TEXT, {"prompt": [97] * 255, "temperature": 0})
        assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (1, "length")


def test_case_I12_two_tenants_never_share_and_adapters_are_refused_by_name() -> None:
    body = {"prompt": "the same prompt for all", "max_tokens": 2, "temperature": 0}
    with serving() as served:
        for i, scale in ((0, 1.0), (1, 1.0), (0, 0.5)):
            error = served.refused(TEXT, {**body, "lora": [{"id": i, "scale": scale}]})
            assert (error["param"], error["code"]) == ("lora", "unknown_parameter")
        assert served.engine.stats().used_cells == 0
        assert [cached(served.ok(TEXT, {**body, **salt})) for salt in ({}, {"cache_salt": "0"}, {"cache_salt": "None"})] == [0, 0, 0]
        assert [cached(served.ok(TEXT, {**body, **salt})) for salt in ({}, {"cache_salt": "0"}, {"cache_salt": "None"})] == [22, 22, 22]


@pytest.mark.parametrize("colour", ["red", "blue"])
def test_case_I13_pictures_are_refused_by_name_and_not_left_out(colour: str) -> None:
    picture = "data:image/png;base64," + base64.b64encode(colour.encode()).decode()
    content = [{"type": "text", "text": "Which colour?"}, {"type": "image_url", "image_url": {"url": picture}}]
    with serving() as served:
        error = served.refused(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert error["code"] == "unsupported_parameter"
        assert error["param"] == "messages.0.content.1.type"
        assert served.engine.stats().used_cells == 0
        with pytest.raises(openai.BadRequestError):
            served.openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}])  # type: ignore[list-item]


def test_case_I27_health_and_sessions_answer_while_the_longest_prompt_is_evaluated() -> None:
    with serving(Scripted(delay=0.03), cells=512, engine={"max_running": 2, "max_batch_tokens": 16}) as served:
        one = new(served)
        body = {"prompt": [97] * 511, "temperature": 0, "session": one}
        asking = threading.Thread(target=lambda: served.http.post(TEXT, json=body))
        asking.start()
        polls, busy, used = 0, set(), []
        with httpx.Client(base_url=served.url, timeout=5) as poll:
            while asking.is_alive():
                start = time.monotonic()
                used.append(poll.get("/health").json()["used_cells"])
                busy.add(poll.get(ALL).json()["data"][0]["busy"])
                assert time.monotonic() - start < 1
                polls += 1
                time.sleep(0.1)
        assert polls >= 4
        assert True in busy
        assert used == sorted(used)


# --- I24: a directory that cannot be written ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left"), OSError(30, "Read-only file system"), "is full", "readonly"], ids=str)
def test_case_I24_a_full_or_read_only_directory_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | str
) -> None:
    with serving(sessions_dir=tmp_path) as served:
        one = new(served)
        asked(served, "first", session=one, max_tokens=3)
        saved = do(served, one, "save")
        before = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
        asked(served, "second", session=one, max_tokens=3)
        index = served.app.state.api.sessions._saved._index
        with monkeypatch.context() as patched:
            if isinstance(error, OSError):
                patched.setattr("safetensors.torch.save_file", Mock(side_effect=error))
            elif error == "is full":
                index.execute("PRAGMA max_page_count = 1")
                served.app.state.api.sessions.get(one).turns.append({"role": "user", "content": "x" * 20_000})
            else:
                index.execute("PRAGMA query_only = 1")
            refused = error_of(served.http.post(f"{ALL}/{one}/save"), 500)
            index.execute("PRAGMA query_only = 0")
            index.execute("PRAGMA max_page_count = 100000")
        assert refused["code"] == "save_failed"
        assert (error.strerror if isinstance(error, OSError) else error) in refused["message"]
        assert {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")} == before
        assert not list(tmp_path.glob("*.part"))
        going = asked(served, "third", session=one, max_tokens=3)  # the session itself is as it was
        assert going["usage"]["prompt_tokens"] == 5 + 3 + 6 + 3 + 5
        assert do(served, one, "restore")["tokens"] == saved["tokens"]
