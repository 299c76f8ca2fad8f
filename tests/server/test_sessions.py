"""Sessions: conversations that stay, their operations, and what of them is on disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from scripted import Scripted, says
from serving import ALL, CHAT, TEXT, cached, contents, do, error_of, files_of, new, say, seen, serving


def model() -> Scripted:
    """Answers "Sure, that is so." to everything."""
    return Scripted(says("Sure, that is so."))


# --- conversations --------------------------------------------------------------------------------------------------------------


def test_a_session_goes_on_from_its_cells_with_new_messages_only() -> None:
    with serving(model()) as served:
        one = new(served, name="holiday")
        assert {**seen(served, one), "created": 0} == {
            "id": one,
            "object": "session",
            "name": "holiday",
            "created": 0,
            "tokens": 0,
            "cells": 0,
            "bytes": 0,
            "exact": True,
            "state": "loaded",
            "saved": False,
            "busy": False,
            "messages": [],
        }
        first = say(served, one, "Is it warm?")
        second = say(served, one, "And dry?")
        whole = [
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": "Sure, that is so."},
            {"role": "user", "content": "And dry?"},
        ]
        stateless = served.ok(CHAT, {"messages": whole, "temperature": 0, "cache_salt": "apart"})
        assert second["choices"][0]["message"] == stateless["choices"][0]["message"]
        assert second["usage"]["prompt_tokens"] == stateless["usage"]["prompt_tokens"]
        # All but the answer's end token has its cell.
        assert cached(second) == first["usage"]["total_tokens"] - 1
        session = seen(served, one)
        assert contents(session) == [(m["role"], m["content"]) for m in whole] + [("assistant", "Sure, that is so.")]
        assert session["tokens"] == second["usage"]["total_tokens"] == session["cells"] + 1
        assert session["bytes"] == session["cells"] * served.engine.cell_nbytes
        assert served.ok(ALL)["data"] == [{name: value for name, value in session.items() if name != "messages"}]


def test_messages_say_where_their_tokens_are() -> None:
    with serving(model()) as served:
        one = new(served)
        say(served, one, "Hm")
        say(served, one, "Oh")
        session = seen(served, one)
        spans = [(message["start"], message["end"]) for message in session["messages"]]
        user, reply = len("<user\nHm>\n"), len("<assistant\nSure, that is so.>\n")
        assert spans == [(0, user), (user, user + reply), (user + reply, 2 * user + reply), (2 * user + reply, 2 * (user + reply) - 1)]
        tokens = served.app.state.api.sessions.get(one).session.tokens
        assert served.engine.model.text.decode(tokens[user : user + reply], special=True) == "<start>assistant\nSure, that is so.<end>\n"


def test_streams_and_answers_that_are_cut_short_are_kept_too() -> None:
    with serving(model()) as served:
        one = new(served)
        body = {"session": one, "temperature": 0, "messages": [{"role": "user", "content": "a"}]}
        served.stream(CHAT, body)
        say(served, one, "b", max_tokens=4)
        say(served, one, "c", stop="that")
        third = say(served, one, "d")
        assert [text for role, text in contents(seen(served, one)) if role == "assistant"] == [
            "Sure, that is so.",
            "Sure",
            "Sure, ",
            "Sure, that is so.",
        ]
        # Where the stop string was, the conversation is not what the model wrote.
        assert 0 < third["usage"]["prompt_tokens"] - cached(third) < 40


def test_a_text_goes_on_in_a_session_too() -> None:
    with serving() as served:
        one = new(served)
        fields = {"session": one, "temperature": 0, "max_tokens": 3}
        first = served.ok(TEXT, {**fields, "prompt": "Once"})
        second = served.ok(TEXT, {**fields, "prompt": list(b" more")})
        assert second["usage"]["prompt_tokens"] == 4 + 3 + 5
        assert cached(second) == 6
        whole = b"Once" + first["choices"][0]["text"].encode() + b" more"
        alone = served.ok(TEXT, {"prompt": list(whole), "temperature": 0, "max_tokens": 3, "cache_salt": "x"})
        assert alone["choices"][0]["text"] == second["choices"][0]["text"]
        assert seen(served, one)["messages"] == []
        assert served.refused(CHAT, {"session": one, "messages": [{"role": "user", "content": "a"}]})["param"] == "session"


def test_a_failed_or_refused_request_leaves_the_session_as_it_was() -> None:
    scripted = model()
    scripted.broken = lambda tokens: bytes(t for t in tokens if t < 256).endswith(b"boom")
    with serving(scripted) as served:
        one = new(served)
        say(served, one, "fine")
        before = seen(served, one)
        assert served.refused(CHAT, {"session": one, "messages": [{"role": "user", "content": "boom"}]}, 500)
        assert served.refused(CHAT, {"session": one, "messages": [{"role": "user", "content": "x" * 999}]})["param"] == "messages"
        served.refused(CHAT, {"session": one, "messages": [{"role": "tool", "tool_call_id": "a", "content": "b"}]})
        after = seen(served, one)
        assert (after["tokens"], after["messages"], after["busy"]) == (before["tokens"], before["messages"], False)
        assert say(served, one, "again")["choices"][0]["message"]["content"] == "Sure, that is so."


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"cache_salt": "a"}, "cache_salt"),
        (TEXT, {"n": 2}, "n"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt"),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"session": 0}, "session"),
        (TEXT, {"session": ""}, "session"),
    ],
)
def test_what_a_session_cannot_do_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    with serving() as served:
        body = {"session": new(served), **({"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"})}
        assert served.refused(path, {**body, **fields})["param"] == param


def test_case_S01_an_id_that_is_no_session_is_not_found() -> None:
    with serving() as served:
        for name in ("sess_0", "../x", "sess_" + "0" * 32, "x" * 300):
            assert served.refused(TEXT, {"session": name, "prompt": "a"}, 404)["code"] == "session_not_found"
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/save"), ("POST", "/restore"), ("POST", "/fork")):
            assert error_of(served.http.request(method, f"{ALL}/sess_0{path}"), 404)["code"] == "session_not_found"


# --- I18: one after the other -----------------------------------------------------------------------------------------------------


def test_case_I18_two_requests_on_one_session_run_one_after_the_other() -> None:
    scripted = model()
    scripted.delay = 0.005
    with serving(scripted) as served:
        one = new(served)
        asking = [threading.Thread(target=say, args=(served, one, text)) for text in ("first", "second", "third")]
        for thread in asking:
            thread.start()
        served.until(lambda: served.engine.stats().running > 0)
        assert served.engine.stats().running == 1
        for thread in asking:
            thread.join()
        messages = contents(seen(served, one))
        assert [role for role, _ in messages] == ["user", "assistant"] * 3
        assert {text for role, text in messages if role == "user"} == {"first", "second", "third"}
        assert {text for role, text in messages if role == "assistant"} == {"Sure, that is so."}


def test_case_S02_operations_on_a_busy_session_are_a_409_and_change_nothing(tmp_path: Path) -> None:
    scripted = model()
    with serving(scripted, sessions_dir=tmp_path) as served:
        one = new(served)
        say(served, one, "first")
        do(served, one, "save")
        scripted.may_go.clear()
        answers: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: answers.append(say(served, one, "second")))
        asking.start()
        served.until(lambda: served.app.state.api.sessions.get(one).lock.locked())
        for what, body in (("fork", {}), ("rewind", {"messages": 1}), ("edit", {"message": 0}), ("save", None), ("restore", None)):
            error = error_of(
                served.http.post(f"{ALL}/{one}/{what}", json=body) if body is not None else served.http.post(f"{ALL}/{one}/{what}"), 409
            )
            assert error["code"] == "session_busy"
        assert error_of(served.http.delete(f"{ALL}/{one}"), 409)
        scripted.may_go.set()
        asking.join()
        assert answers[0]["choices"][0]["message"]["content"] == "Sure, that is so."
        assert len(seen(served, one)["messages"]) == 4
        assert len(do(served, one, "restore")["messages"]) == 2


# --- fork, rewind, edit ---------------------------------------------------------------------------------------------------------


def test_a_fork_shares_the_cells_and_goes_its_own_way() -> None:
    with serving(model()) as served:
        one = new(served, name="trunk")
        for text in ("a", "b", "c"):
            say(served, one, text)
        before = seen(served, one)
        used = served.engine.stats().used_cells
        twin = do(served, one, "fork", {"message": 1}, 201)
        assert contents(twin) == contents(before)[:2]
        assert twin["tokens"] == before["messages"][1]["end"]
        full = do(served, one, "fork", {}, 201)
        assert (contents(full), full["tokens"]) == (contents(before), before["tokens"])
        assert contents(do(served, one, "fork", None, 201)) == contents(before)
        placed = do(served, one, "fork", {"position": before["messages"][2]["end"]}, 201)
        assert contents(placed) == contents(before)[:3]
        assert served.engine.stats().used_cells == used
        answer = say(served, twin["id"], "other")
        assert cached(answer) >= twin["tokens"] - 1
        assert seen(served, one) == before
        for body, param in (({"message": 6}, "message"), ({"position": 10**6}, "position"), ({"message": 0, "position": 0}, "position")):
            assert error_of(served.http.post(f"{ALL}/{one}/fork", json=body), 400)["param"] == param


def test_a_rewind_takes_back_the_last_messages_or_from_a_position() -> None:
    with serving(model()) as served:
        one = new(served)
        for text in ("a", "b", "c"):
            say(served, one, text)
        before = seen(served, one)
        back = do(served, one, "rewind", {"messages": 2})
        assert contents(back) == contents(before)[:4]
        assert back["tokens"] == before["messages"][3]["end"]
        assert cached(say(served, one, "c")) >= back["tokens"] - 1
        assert contents(seen(served, one)) == contents(before)
        inside = do(served, one, "rewind", {"position": before["messages"][1]["end"] + 2})
        assert contents(inside) == contents(before)[:2]
        assert contents(do(served, one, "rewind", {"messages": 2})) == []
        assert seen(served, one)["tokens"] == 0
        for body, param in (({"messages": 1}, "messages"), ({"messages": 0}, "messages"), ({}, "messages"), ({"position": 1}, "position")):
            assert error_of(served.http.post(f"{ALL}/{one}/rewind", json=body), 400)["param"] == param


@pytest.mark.parametrize("mode", ["exact", "shift"])
def test_an_edit_takes_a_message_out_of_the_middle(mode: str) -> None:
    with serving(model()) as served:
        one = new(served)
        for text in ("first", "second", "third"):
            say(served, one, text)
        before = seen(served, one)
        gone = before["messages"][2]
        after = do(served, one, "edit", {"message": 2, "mode": mode})
        assert contents(after) == contents(before)[:2] + contents(before)[3:]
        assert after["tokens"] == before["tokens"] - (gone["end"] - gone["start"])
        assert after["exact"] == (mode == "exact")
        assert after["cells"] == (gone["start"] if mode == "exact" else before["cells"] - (gone["end"] - gone["start"]))


def test_an_edit_by_positions_takes_whole_messages_only() -> None:
    with serving(model()) as served:
        one = new(served)
        for text in ("first", "second"):
            say(served, one, text)
        before = seen(served, one)
        start, end = before["messages"][0]["start"], before["messages"][1]["end"]
        for body, param in (
            ({"start": start, "end": end - 1}, "start"),
            ({"start": 5, "end": 5}, "end"),
            ({"start": 0, "end": 10**6}, "end"),
            ({"start": 0}, "message"),
            ({"message": 0, "start": 0, "end": 1}, "message"),
            ({}, "message"),
            ({"message": 9}, "message"),
            ({"message": 0, "mode": "fast"}, "mode"),
        ):
            assert error_of(served.http.post(f"{ALL}/{one}/edit", json=body), 400)["param"] == param, body
        assert seen(served, one) == before
        after = do(served, one, "edit", {"start": start, "end": end})
        assert contents(after) == contents(before)[2:]
        assert after["tokens"] == before["tokens"] - end


def test_a_deleted_session_gives_back_its_cells() -> None:
    with serving(model()) as served:
        one = new(served)
        say(served, one, "a")
        assert served.engine.stats().sessions == 1
        answer = served.http.delete(f"{ALL}/{one}")
        assert answer.json() == {"id": one, "object": "session", "deleted": True}
        served.until(lambda: served.engine.stats().sessions == 0)
        assert served.engine.stats().used_cells == 0
        assert served.ok(ALL)["data"] == []


# --- on disk --------------------------------------------------------------------------------------------------------------------


def test_without_a_directory_nothing_is_saved() -> None:
    with serving() as served:
        one = new(served)
        assert error_of(served.http.post(f"{ALL}/{one}/save"), 400)["code"] == "not_saved"
        assert error_of(served.http.post(f"{ALL}/{one}/restore"), 404)["code"] == "not_saved"


def test_case_E11_a_saved_session_is_there_after_a_restart_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served, name="kept", cache_salt="s")
        say(served, one, "a question that is long enough")
        saved = do(served, one, "save")
        assert (saved["saved"], saved["state"]) == (True, "loaded")
        created = saved["created"]
    with serving(model(), sessions_dir=tmp_path) as served:
        [listed] = served.ok(ALL)["data"]
        assert (listed["id"], listed["name"], listed["state"], listed["created"]) == (one, "kept", "saved", created)
        assert (listed["tokens"], listed["cells"], listed["saved"]) == (saved["tokens"], 0, True)
        assert contents(seen(served, one)) == contents(saved)
        restored = do(served, one, "restore")
        assert (restored["state"], restored["cells"], restored["tokens"]) == ("loaded", saved["cells"], saved["tokens"])
        assert cached(say(served, one, "and then?")) == saved["tokens"] - 1


def test_a_saved_session_is_restored_when_it_is_named(tmp_path: Path) -> None:
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served)
        say(served, one, "a question")
    # Stopping saves what has changed.
    with serving(model(), sessions_dir=tmp_path) as served:
        tokens = seen(served, one)["tokens"]
        assert cached(say(served, one, "and then?")) == tokens - 1
        twin = do(served, one, "fork", {"message": 0}, 201)
    with serving(model(), sessions_dir=tmp_path) as served:
        assert {session["id"] for session in served.ok(ALL)["data"]} == {one, twin["id"]}
        assert contents(do(served, twin["id"], "rewind", {"messages": 1})) == []


def test_a_saved_beginning_is_found_again_by_its_tokens(tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog, again and again."
    with serving(model(), sessions_dir=tmp_path) as served:
        for salt in (None, "apart"):
            one = new(served, **({} if salt is None else {"cache_salt": salt}))
            say(served, one, text)
            do(served, one, "save")
    with serving(model(), sessions_dir=tmp_path) as served:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        other = served.ok(CHAT, {**body, "cache_salt": "foreign"})
        assert cached(other) == 0
        assert {session["state"] for session in served.ok(ALL)["data"]} == {"saved"}
        again = served.ok(CHAT, body)
        assert cached(again) == again["usage"]["prompt_tokens"] - 1
        assert again["choices"][0]["message"] == other["choices"][0]["message"]
        assert sorted(session["state"] for session in served.ok(ALL)["data"]) == ["loaded", "saved"]
        # Nothing is read when it is there already.
        shorter = served.ok(CHAT, {**body, "messages": [{"role": "user", "content": text[:20]}]})
        assert cached(shorter) > 20


def test_a_damaged_file_is_refused_by_name_and_passed_over_when_it_would_have_been_found(tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog, again and again."
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served)
        say(served, one, text)
    [name] = files_of(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with serving(model(), sessions_dir=tmp_path) as served:
        error = error_of(served.http.post(f"{ALL}/{one}/restore"), 400)
        assert (error["code"], "damaged" in error["message"]) == ("state_refused", True)
        answer = served.ok(CHAT, {"messages": [{"role": "user", "content": text}], "temperature": 0})
        assert cached(answer) == 0
        assert served.ok(ALL)["data"][0]["state"] == "saved"
        assert served.engine.stats().sessions == 0


def test_case_E08_restoring_a_missing_file_keeps_the_session(tmp_path: Path) -> None:
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served)
        say(served, one, "first")
        do(served, one, "save")
        say(served, one, "second")
        before = seen(served, one)
        [name] = files_of(tmp_path)
        (tmp_path / name).unlink()
        assert error_of(served.http.post(f"{ALL}/{one}/restore"), 400)["code"] == "state_refused"
        assert seen(served, one) == before
        assert cached(say(served, one, "third")) == before["tokens"] - 1


def test_restoring_takes_back_what_was_said_since(tmp_path: Path) -> None:
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served)
        say(served, one, "first")
        saved = do(served, one, "save")
        say(served, one, "second")
        assert seen(served, one)["saved"] is False
        restored = do(served, one, "restore")
        assert contents(restored) == contents(saved)
        assert restored["tokens"] == saved["tokens"]


def test_an_empty_session_can_be_saved_and_restored(tmp_path: Path) -> None:
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served)
        do(served, one, "save")
        assert do(served, one, "restore")["tokens"] == 0
        assert say(served, one, "a")["choices"]


def test_a_session_whose_cells_were_taken_is_read_back_instead_of_evaluated(tmp_path: Path) -> None:
    with serving(model(), cells=200, sessions_dir=tmp_path) as served:
        one = new(served)
        say(served, one, "a question that fills some cells")
        tokens = do(served, one, "save")["tokens"]
        served.ok(TEXT, {"prompt": "x" * 190, "max_tokens": 2})
        assert seen(served, one)["state"] == "evicted"
        assert cached(say(served, one, "more")) == tokens - 1


def test_deleting_removes_the_file(tmp_path: Path) -> None:
    with serving(model(), sessions_dir=tmp_path) as served:
        one, other = new(served), new(served)
        for session in (one, other):
            say(served, session, "a")
            do(served, session, "save")
        assert len(files_of(tmp_path)) == 2
        do(served, one, "save")
        assert len(files_of(tmp_path)) == 2  # the new one is in the place of the old
        assert served.http.delete(f"{ALL}/{one}").status_code == 200
        [left] = files_of(tmp_path)
        assert left.startswith(other)
    with serving(model(), sessions_dir=tmp_path) as served:
        assert [session["id"] for session in served.ok(ALL)["data"]] == [other]
        assert served.http.delete(f"{ALL}/{other}").status_code == 200  # from disk alone
        assert files_of(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_an_error_and_keeps_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model(), sessions_dir=tmp_path) as served:
        one = new(served)
        say(served, one, "first")
        do(served, one, "save")
        before = files_of(tmp_path)
        say(served, one, "second")

        def full(*args: Any, **settings: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("safetensors.torch.save_file", full)
            error = error_of(served.http.post(f"{ALL}/{one}/save"), 500)
        assert (error["code"], "No space left" in error["message"]) == ("save_failed", True)
        assert files_of(tmp_path) == before
        assert [name for name in os.listdir(tmp_path) if name.endswith(".part")] == []
        assert len(do(served, one, "restore")["messages"]) == 2
