"""A server on a free port of this machine, with a scripted model behind it, stopped at the end whatever happens."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from fastapi import FastAPI
from openai import OpenAI

from onekv import cache_for
from onekv.engine.engine import Engine
from onekv.models.pull import NAMED_MODELS
from onekv.server import run
from onekv.server.app import create_app
from scripted import VOCAB, Scripted

NAME = "scripted"
CHAT, TEXT, ALL = "/v1/chat/completions", "/v1/completions", "/v1/sessions"


def coin(tokens: list[int]) -> torch.Tensor:
    """Token 1 three times as likely as token 0, all others impossible."""
    logits = torch.full((VOCAB,), -math.inf)
    logits[0], logits[1] = 0.0, math.log(3)
    return logits


@dataclass
class Served:
    """A server and what is behind it."""

    model: Any
    engine: Engine
    app: FastAPI
    url: str
    http: httpx.Client
    server: run.Server
    thread: threading.Thread

    @property
    def openai(self) -> OpenAI:
        """OpenAI's own client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def ok(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request that must work."""
        answer = self.http.get(path) if body is None else self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text[:500]
        return answer.json()

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that must not work; in OpenAI's shape."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return error_of(self.http.post(path, content=content, headers={"Content-Type": "application/json"}), status)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that must end well."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def until(self, holds: Callable[[], bool], seconds: float = 2.0) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"not so after {seconds} s: {self.engine.stats()}"
            time.sleep(0.005)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        stats = self.engine.stats()
        return stats.running == stats.waiting == 0


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """What an answer says is wrong."""
    assert answer.status_code == status, answer.text[:500]
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert isinstance(body["error"]["message"], str)
    return body["error"]


@contextlib.contextmanager
def serving(
    model: Any = None, *, name: str = NAME, cells: int = 512, engine: dict[str, Any] | None = None, limit: float = 0.0, **settings: Any
) -> Iterator[Served]:
    """Serve a model; settings go to `create_app`. limit: seconds that requests have when the server is stopped."""
    model = model or Scripted()
    cache = model.cache(cells) if isinstance(model, Scripted) else cache_for(model, cells)
    with Engine(model, cache, **(engine or {})) as made:
        app = create_app(made, name, **settings)
        with run.listening_socket("127.0.0.1", 0) as bound:
            started = threading.Event()
            server = run.Server(app, started.set, limit)
            thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
            thread.start()
            assert started.wait(20), "the server did not start"
            url = run.url_of(bound)
            try:
                with httpx.Client(base_url=url, timeout=20) as http:
                    yield Served(model, made, app, url, http, server, thread)
            finally:
                if isinstance(model, Scripted):
                    model.may_go.set()
                server.should_exit = True
                thread.join(20)
                assert not thread.is_alive()


class Client:
    """A connection that can be cut."""

    def __init__(self, served: Served, body: dict[str, Any], path: str = TEXT) -> None:
        at = urlsplit(served.url)
        self.socket = socket.create_connection((at.hostname, at.port), timeout=10)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def read_until(self, text: bytes) -> bytes:
        """Everything up to some text."""
        data = b""
        while text not in data:
            piece = self.socket.recv(4096)
            assert piece, data
            data += piece
        return data

    def cut(self) -> None:
        """Go away."""
        self.socket.close()


# --- sessions -------------------------------------------------------------------------------------------------------------------


def new(served: Served, **fields: Any) -> str:
    answer = served.http.post(ALL, json=fields)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def say(served: Served, session: str, text: str, **fields: Any) -> dict[str, Any]:
    return served.ok(CHAT, {"session": session, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields})


def seen(served: Served, session: str) -> dict[str, Any]:
    return served.ok(f"{ALL}/{session}")


def do(served: Served, session: str, what: str, body: Any = None, status: int = 200) -> dict[str, Any]:
    answer = served.http.post(f"{ALL}/{session}/{what}", **({} if body is None else {"json": body}))
    assert answer.status_code == status, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def contents(session: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in session["messages"]]


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix == ".safetensors")


@contextlib.contextmanager
def demo_server(cells: int) -> Iterator[str]:
    """A process `onekv serve` of the demo model, deterministic, saving nothing; its address. Stopped in order at the end."""
    if not NAMED_MODELS["smollm2"].path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)
    options = ["--weights", "float32", "--deterministic", "--port", "0", "--cells", str(cells), "--no-save"]
    command = [sys.executable, "-m", "onekv.cli", "serve", "smollm2", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            found = re.match(r"smollm2 answers on (http://127\.0\.0\.1:\d+); sessions are not saved\n", line)
            assert found, line
            yield found[1]
        finally:
            process.terminate()
            assert process.wait(60) == 0
