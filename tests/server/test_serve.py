"""`onekv serve` as a user starts and stops it: the real process, the demo model, the real client."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from onekv import ContextShift, Engine, cli
from onekv.models.pull import NAMED_MODELS
from scripted import Scripted


@contextlib.contextmanager
def served(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server, stopped by SIGTERM, which must end it with success."""
    if not NAMED_MODELS["smollm2"].path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)
    command = [sys.executable, "-m", "onekv.cli", "serve", "--weights", "float32", "--port", "0", "--cells", "1024", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"smollm2 answers on (http://127\.0\.0\.1:\d+); sessions are saved in .*sessions\n", line)
            assert found, (line, process.stderr.read() if process.poll() is not None else "")
            assert process.stdout.readline().startswith(f"curl {found[1]}/v1/chat/completions")
            yield found[1], process
        finally:
            process.terminate()
            assert process.wait(60) == 0, process.stderr.read()
        assert process.stderr.read() == ""


@pytest.mark.demo_model
def test_case_E11_a_session_outlives_the_process_and_goes_on_from_its_cells(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-local\n")
    options = ("--sessions-dir", str(tmp_path / "sessions"), "--api-key-file", str(key))
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    more: Any = [{"role": "user", "content": "And of Italy?"}]
    fields: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 16}
    with served(*options) as (url, process):
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        client = OpenAI(base_url=f"{url}/v1", api_key="sk-local", max_retries=0)
        headers = {"Authorization": "Bearer sk-local"}
        session = httpx.post(f"{url}/v1/sessions", headers=headers, json={"name": "capitals"}).json()["id"]
        answer = client.chat.completions.create(messages=question, extra_body={"session": session}, **fields)
        assert "Paris" in (answer.choices[0].message.content or "")
        # Another server cannot have the directory, and says what to do.
        second = [sys.executable, "-m", "onekv.cli", "serve", "--weights", "float32", "--port", "0", *options]
        refused = subprocess.run(second, capture_output=True, text=True, timeout=120, check=False)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
        assert f"another server keeps its sessions in {tmp_path / 'sessions'}; stop that one, or" in refused.stderr
        # Stopped in the middle of a stream, which comes to its end.
        stream = client.completions.create(prompt="Count: one, two,", stream=True, **{**fields, "max_tokens": 40})
        first = next(stream)
        process.terminate()
        pieces = [first, *stream]
        assert pieces[-1].choices[0].finish_reason == "length"
    with served(*options) as (url, _):
        client = OpenAI(base_url=f"{url}/v1", api_key="sk-local", max_retries=0)
        [kept] = httpx.get(f"{url}/v1/sessions", headers=headers).json()["data"]
        assert (kept["id"], kept["name"], kept["state"], kept["saved"]) == (session, "capitals", "saved", True)
        again = client.chat.completions.create(messages=more, extra_body={"session": session}, **fields)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == kept["tokens"] - 1
        said = [*question, {"role": "assistant", "content": answer.choices[0].message.content}, *more]
        alone = client.chat.completions.create(messages=said, extra_body={"cache_salt": "alone"}, **fields)
        assert again.choices[0].message.content == alone.choices[0].message.content


def test_mistakes_are_one_clear_line_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "load_model", lambda *args, **settings: pytest.fail("a model was loaded"))
    empty = tmp_path / "empty"
    empty.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, says in (
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--api-key-file", str(empty)], "must hold one API key"),
            (["--api-key-file", str(tmp_path / "none")], "cannot read the API key"),
            (["--sessions-dir", str(tmp_path), "--no-save"], "leave out --sessions-dir"),
        ):
            monkeypatch.setattr(sys, "argv", ["onekv", "serve", *options])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert ended.value.code == 2
            error = capsys.readouterr().err
            assert says in error
            assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "kept", "says"),
    [
        ([], "home/sessions", "sessions are saved in {}/home/sessions"),
        (["--sessions-dir", "{}/own"], "own", "sessions are saved in {}/own"),
        (["--no-save"], None, "sessions are not saved"),
    ],
    ids=["default", "directory", "none"],
)
def test_sessions_are_saved_where_the_first_line_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], kept: str | None, says: str
) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(tmp_path / "home"))
    for name in ("load_model", "cache_for", "window_cells", "Engine"):
        monkeypatch.setattr(cli, name, MagicMock())
    create = MagicMock()
    monkeypatch.setattr("onekv.server.app.create_app", create)
    monkeypatch.setattr("onekv.server.run.serve", lambda app, bound, ready, stopping: ready())
    monkeypatch.setattr(sys, "argv", ["onekv", "serve", "--port", "0", *(option.format(tmp_path) for option in options)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert create.call_args.kwargs["sessions_dir"] == (None if kept is None else tmp_path / kept)
    assert f"; {says.format(tmp_path)}\n" in capsys.readouterr().out


def test_options_reach_the_engine_and_a_wrong_one_is_a_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {name: MagicMock() for name in ("load_model", "cache_for", "window_cells", "Engine")}
    for name, part in parts.items():
        monkeypatch.setattr(cli, name, part)
    monkeypatch.setattr("onekv.server.app.create_app", MagicMock())
    monkeypatch.setattr("onekv.server.run.serve", MagicMock())
    options = ["--no-save", "--context-shift", "3", "--preempt", "spill", "--device", "cuda", "--max-running", "5", "--speculate", "2"]
    monkeypatch.setattr(sys, "argv", ["onekv", "serve", "--port", "0", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert parts["load_model"].call_args.kwargs["device"] == "cuda"
    assert parts["Engine"].call_args.kwargs == {
        "max_running": 5,
        "speculate": 2,
        "context_shift": ContextShift(3),
        "preempt": "spill",
    }
    model = Scripted()
    parts["cache_for"].return_value = model.cache(16)
    parts["load_model"].return_value = model
    monkeypatch.setattr(cli, "Engine", Engine)
    monkeypatch.setattr(sys, "argv", ["onekv", "serve", "--port", "0", "--no-save", "--preempt", "drop"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert 'preempt must be "recompute" or "spill", got \'drop\'' in capsys.readouterr().err
