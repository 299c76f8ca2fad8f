"""Benchmarks run, end with one line of JSON, and refuse a busy machine. Timings are not tested."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as every, bookkeeping, engine, report, transformers
from benchmarks.report import Conditions, Result


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return line


def test_the_table_ends_in_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report.report("b", [Result("one", 2.0, "us", "<= 3"), Result("two", 2.0, "x", ">= 3"), Result("three", 0.5, "x")])
    line = last_line(capsys)
    assert list(line) == ["bench", "commit", "machine", "results"]
    assert [(r["name"], r["value"], r["unit"], r["goal"], r["met"]) for r in line["results"]] == [
        ("one", 2.0, "us", "<= 3", True),
        ("two", 2.0, "x", ">= 3", False),
        ("three", 0.5, "x", None, None),
    ]


def test_a_busy_machine_is_refused_unless_told_to_and_the_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "other_load", lambda: 0.26)
    parser = report.options("A question?\n\nMore.")
    with pytest.raises(SystemExit) as refused:
        report.begin(parser.parse_args([]))
    assert refused.value.code == 2
    said = capsys.readouterr()
    assert "other processes keep 0.26 of" in said.out
    assert "--busy" in said.err
    report.report("b", [Result("one", 2.0, "us")], report.begin(parser.parse_args(["--busy"])))
    line = last_line(capsys)
    assert (line["busy"], line["other_load"], "quick" in line) == (True, 0.26, False)
    monkeypatch.setattr(report, "other_load", lambda: 0.25)
    report.report("b", [Result("one", 2.0, "us")], report.begin(parser.parse_args(["--quick", "--busy"])))
    line = last_line(capsys)
    assert ("busy" in line, line["quick"]) == (False, True)


def test_our_own_work_is_not_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine's clock is made of our own time and half a core of somebody else's.
    start = time.perf_counter()
    monkeypatch.setattr(report.os.path, "exists", lambda path: True)
    monkeypatch.setattr(report, "_busy_s", lambda: report._own_s() + 0.5 * (time.perf_counter() - start))
    done = threading.Event()
    spinning = threading.Thread(target=lambda: [None for _ in iter(done.is_set, True)])
    spinning.start()
    try:
        assert report.other_load(0.3) == pytest.approx(0.5, abs=0.1)
    finally:
        done.set()
        spinning.join()


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the machine has no /proc/stat")
def test_the_machines_busy_seconds_only_grow() -> None:
    before = report._busy_s()
    sum(range(3_000_000))
    assert report._busy_s() >= before > 0
    assert report.other_load(0.05) >= 0


def test_bookkeeping_runs(capsys: pytest.CaptureFixture[str]) -> None:
    bookkeeping.main(["--quick", "--busy"])
    line = last_line(capsys)
    assert (line["bench"], line["quick"], len(line["results"])) == ("bookkeeping", True, 5)
    assert all(r["value"] > 0 for r in line["results"])


@pytest.mark.slow
@pytest.mark.demo_model
def test_the_comparison_with_transformers_runs_and_all_sides_make_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    transformers.main(["--quick", "--busy", "--weights", "float32"])
    line = last_line(capsys)
    values = {r["name"]: r["value"] for r in line["results"]}
    assert (line["bench"], len(values)) == ("transformers", len(line["results"]))
    assert [r["goal"] for r in line["results"]].count(transformers.GOAL) == 3
    assert {v for name, v in values.items() if name.endswith("tokens as DynamicCache")} == {100.0}


@pytest.mark.slow
@pytest.mark.demo_model
def test_the_engine_is_measured_with_the_sides_that_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    engine.main(["--quick", "--busy", "--weights", "float32", "--speculate", "2"])
    said = capsys.readouterr().out
    line = json.loads(said.splitlines()[-1])
    values = {r["name"]: r["value"] for r in line["results"]}
    assert (line["bench"], line["quick"], len(values)) == ("engine", True, len(line["results"]))
    assert all(r["value"] >= 0 and r["goal"] is None for r in line["results"])
    assert values["K/V of 4 on one prompt of 48: cells / unique tokens"] <= 1.2
    assert 0 < values["first token of 52: cached / not"] < 1
    for case in ("4 on one prompt of 48", "4 of 16", "2 on one prompt of 48", "2 of 16"):
        assert values[f"{case}: onekv"] > 0
    for side, case in ((engine.SERVER, "4 of 16"), (engine.BATCHING, "2 of 16")):
        assert f"{case}: onekv / {side}" in values or f"without {side}: " in said


def test_tokens_that_begin_alike_are_counted_once() -> None:
    assert engine.distinct([]) == 0
    assert engine.distinct([[1, 2, 3]] * 3) == 3
    assert engine.distinct([[1, 2, 3, 4], [2, 3, 4], [1, 2, 5], [1, 2]]) == 5 + 3


# Answers one path, whatever it is asked to serve.
STAND_IN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
    def log_message(self, *what): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
"""


def test_a_server_is_gone_after_the_block_however_that_ended() -> None:
    ports = []

    def serve(ending: BaseException | None) -> None:
        with engine.llama_server("model.gguf", 64, 1, [sys.executable, "-c", STAND_IN]) as port:
            ports.append(port)
            socket.create_connection(("127.0.0.1", port), 5).close()
            if ending is not None:
                raise ending

    serve(None)
    with pytest.raises(KeyboardInterrupt):
        serve(KeyboardInterrupt())
    assert len(ports) == 2
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


def test_a_server_that_cannot_start_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('No module named sse_starlette')"]
    with pytest.raises(engine.CannotRun, match="the last it said: No module named sse_starlette"), engine.llama_server("m", 64, 1, command):
        pass


def test_a_server_that_refuses_a_request_leaves_its_side_out() -> None:
    class Letters:
        tokenizer = type("tokenizer", (), {"added_tokens_decoder": {0: "</s>"}})

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    with engine.llama_server("model.gguf", 64, 1, [sys.executable, "-c", STAND_IN]) as port:
        served: Any = engine.Served(port, Letters(), 4, [1])  # type: ignore[arg-type]
        assert served.settings["logit_bias"] == {"0": -100.0}
        with pytest.raises(engine.CannotRun, match="status 501"):
            served.run([[1, 2], [3]])


def test_every_benchmark_is_run_by_name() -> None:
    shared = {"__init__", "__main__", "report"}
    assert {*every.NAMES} == {path.stem for path in Path(engine.__file__).parent.glob("*.py")} - shared


def test_every_side_has_its_turn_and_the_first_is_not_counted() -> None:
    order: list[str] = []
    took = {"a": iter([9.0, 1.0, 2.0, 3.0]), "b": iter([9.0, 5.0, 5.0, 8.0])}

    def side(name: str) -> float:
        order.append(name)
        return next(took[name])

    medians = transformers.in_turns({name: lambda name=name: side(name) for name in took}, 3)  # type: ignore[misc]
    assert medians == {"a": 2.0, "b": 5.0}
    assert "".join(order) == "abbaabba"
    assert [(r.name, r.value) for r in transformers.compared("x", {"onekv": 2.0, "c": 5.0})][-1] == ("x: c / onekv", 2.5)


def test_options_name_the_question_and_conditions_know_busy() -> None:
    assert Conditions(other_load=0.2).is_busy is Conditions().is_busy is False
    assert report.options("A question?\n\nMore.").description == "A question?"
    assert isinstance(report.Result("a", 1.0, "x").met, type(None))
