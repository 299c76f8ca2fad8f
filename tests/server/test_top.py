"""`onekv top`: what a server is doing, in a terminal."""

from __future__ import annotations

import http.server
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from onekv import ConfigError, cli
from onekv.server import top
from serving import serving

PATH = "/v1/completions"


def shown(now: top.Reading, before: top.Reading, seconds: float) -> str:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(top.view(now, before, seconds))
    return out.getvalue()


def test_a_screen_has_cells_requests_hits_and_speed() -> None:
    with serving(cells=128) as served:
        before = top.read(served.url)
        for _ in range(2):
            served.ok(PATH, {"prompt": "abcdefgh", "max_tokens": 5, "temperature": 0, "ignore_eos": True})
        screen = shown(top.read(served.url + "/"), before, 2.0)
    for line in (
        "0 in use, 12 cached, 116 free of 128",
        "0 running, 0 waiting",
        "5.0 made, 8.0 of prompts",
        "43.8 % of all tokens of prompts",
        "0 cells in 0 evictions",
    ):
        assert line in screen


def test_rates_of_one_reading_are_zero_and_shares_of_nothing_a_dash() -> None:
    with serving() as served:
        now = top.read(served.url)
    screen = shown(now, now, 0.0)
    assert "0.0 made, 0.0 of prompts" in screen
    assert "- of all tokens of prompts" in screen


def test_the_command_reads_once_and_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(cells=128) as served:
        monkeypatch.setattr(sys, "argv", ["onekv", "top", served.url, "--once"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code in (0, None)
    assert "free of 128" in capsys.readouterr().out


def test_a_server_with_a_key_wants_it(tmp_path: Path) -> None:
    with serving(api_key="secret") as served:
        with pytest.raises(ConfigError, match=r"answers 401 to /metrics; give the key"):
            top.read(served.url)
        assert top.read(served.url, "secret")["kv_cache_cells"] > 0


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"other_metric 1\n")

    log_message: Callable[..., None] = lambda self, *args: None


def test_what_is_no_server_of_ours_is_told() -> None:
    with pytest.raises(ConfigError, match="begins with http"):
        top.read("ftp://x")
    with pytest.raises(ConfigError, match=r"nobody answers on http://127.0.0.1:9"):
        top.read("http://127.0.0.1:9")
    with http.server.HTTPServer(("127.0.0.1", 0), _Elsewhere) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(ConfigError, match="not those of onekv"):
            top.read(f"http://127.0.0.1:{other.server_port}")
        thread.join()
