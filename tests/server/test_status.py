"""What is not an answer: models, tokens, cells, health, metrics, keys, limits, the page, and errors of all of them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from onekv.errors import ConfigError
from onekv.server import run
from scripted import Scripted
from serving import NAME, Served, error_of, serving

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as it:
        yield it


def test_there_is_one_model_and_openais_client_lists_it(served: Served) -> None:
    [model] = served.openai.models.list()
    assert (model.id, model.owned_by) == (NAME, "onekv")
    assert served.openai.models.retrieve(NAME).id == NAME
    assert served.ok(f"/v1/models/{NAME}")["max_model_len"] == 512
    assert error_of(served.http.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"


def test_embeddings_are_refused_because_no_model_here_was_trained_to_embed(served: Served) -> None:
    for given in ("a", ["a", "b"], [1, 2], [[1], [2]]):
        error = served.refused("/v1/embeddings", {"model": NAME, "input": given})
        assert (error["param"], error["code"]) == ("model", "model_not_supported")
        assert "not trained to embed" in error["message"]
    assert served.refused("/v1/embeddings", {"input": []})["param"] == "input"
    assert served.refused("/v1/embeddings", {"model": "other", "input": "a"}, 404)["code"] == "model_not_found"


def test_tokens_go_there_and_back(served: Served) -> None:
    made = served.ok("/tokenize", {"prompt": "caffè 😸"})
    assert made["tokens"] == list("caffè 😸".encode())
    assert (made["count"], made["max_model_len"]) == (11, 512)
    assert made["token_strs"][:6] == ["c", "a", "f", "f", "bytes:\\xc3", "bytes:\\xa8"]
    assert served.ok("/detokenize", {"tokens": made["tokens"]}) == {"prompt": "caffè 😸"}
    assert served.ok("/tokenize", {"prompt": ""})["count"] == 0
    assert served.ok("/detokenize", {"tokens": [257, 97, 100_000]}) == {"prompt": "<start>a"}
    messages = [{"role": "user", "content": "a"}]
    closed = served.ok("/tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]
    assert served.ok("/tokenize", {"messages": messages})["tokens"] == [*closed, 257, *b"assistant\n"]
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": messages}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": []}, "messages"),
    ):
        assert served.refused("/tokenize", body)["param"] == param
    for tokens in ([-1], ["a"], [2**40], [1.5], None):
        assert served.refused("/detokenize", {"tokens": tokens})["param"].startswith("tokens")


def test_cells_say_what_is_in_them_and_whose_they_are() -> None:
    with serving() as served:
        served.ok(PATH, {"prompt": "abc", "max_tokens": 2, "temperature": 0})
        seen = served.ok("/v1/cells")
        assert (seen["num_cells"], len(seen["cells"])) == (512, 4)
        assert [cell[4] for cell in seen["cells"]][:3] == ["a", "b", "c"]
        assert [cell[3] for cell in seen["cells"]][:3] == [97, 98, 99]
        [owner] = {str(owner) for cell in seen["cells"] for owner in cell[2]}
        assert seen["owners"][owner]["kind"] == "prefix"
        assert error_of(served.http.get("/v1/cells?group=1"), 400)["param"] == "group"
        assert error_of(served.http.get("/v1/cells?group=-1"), 400)["param"] == "group"
        assert error_of(served.http.get("/v1/cells?group=x"), 400)["param"] == "group"


# --- S16 ------------------------------------------------------------------------------------------------------------------------


def test_case_S16_status_answers_while_a_prompt_is_evaluated() -> None:
    """A prompt of 200 tokens, 50 ms a step of 16; every poll is answered within a second, and counts never fall."""
    with serving(Scripted(delay=0.05), engine={"max_running": 2, "max_batch_tokens": 16}) as served:
        body = {"prompt": "x" * 200, "max_tokens": 3, "temperature": 0}
        asking = threading.Thread(target=lambda: served.http.post(PATH, json=body))
        asking.start()
        used: list[int] = []
        steps: list[float] = []
        was_running = False
        with httpx.Client(base_url=served.url, timeout=5) as poll:
            while asking.is_alive():
                start = time.monotonic()
                health = poll.get("/health").json()
                metrics = poll.get("/metrics").text
                assert time.monotonic() - start < 1
                start = time.monotonic()
                assert poll.get("/v1/cells").status_code == 200
                assert time.monotonic() - start < 1
                was_running |= health["running"] == 1
                used.append(health["used_cells"])
                steps.append(float(re.findall(r"^onekv:engine_steps_total\{.*\} (.*)$", metrics, re.M)[0]))
                time.sleep(0.02)
        assert was_running
        assert used == sorted(used)
        assert steps == sorted(steps)
        assert len(set(steps)) > 5


# --- metrics --------------------------------------------------------------------------------------------------------------------


def values_of(served: Served) -> dict[str, float]:
    lines = served.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_count_what_happened() -> None:
    with serving(engine={"max_running": 4}) as served:
        served.ok(PATH, {"prompt": "abcd", "n": 2, "max_tokens": 3, "temperature": 0})
        served.ok(PATH, {"prompt": "abcd", "max_tokens": 5, "temperature": 0})
        served.refused(PATH, {"prompt": "x" * 999})
        values = values_of(served)
        label = f'{{model_name="{NAME}"}}'
        assert values[f"onekv:num_requests_running{label}"] == 0
        assert values[f"onekv:num_requests_waiting{label}"] == 0
        assert values[f"onekv:prompt_tokens_total{label}"] == 8
        assert values[f"onekv:generation_tokens_total{label}"] == 11
        assert values[f"onekv:prefix_cache_queries_total{label}"] == 8
        assert values[f"onekv:prefix_cache_hits_total{label}"] == 3
        assert values[f"onekv:num_preemptions_total{label}"] == 0
        assert 0 < values[f"onekv:kv_cache_usage_perc{label}"] < 1
        assert values[f'onekv:request_success_total{{finished_reason="length",model_name="{NAME}"}}'] == 2
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert values[f"onekv:{name}_count{label}"] == 2
        assert values[f"onekv:request_generation_tokens_sum{label}"] == 11
        assert values[f'onekv:request_prompt_tokens_bucket{{le="5.0",model_name="{NAME}"}}'] == 2


def test_two_servers_in_one_process_count_apart() -> None:
    with serving() as one, serving() as other:
        one.ok(PATH, {"prompt": "abcd", "max_tokens": 3})
        label = f'{{model_name="{NAME}"}}'
        assert values_of(one)[f"onekv:generation_tokens_total{label}"] == 3
        assert values_of(other)[f"onekv:generation_tokens_total{label}"] == 0


# --- doors ----------------------------------------------------------------------------------------------------------------------


def test_a_key_opens_everything_and_health_and_page_need_none() -> None:
    with serving(api_key="sésame-1") as served:
        for path in ("/v1/models", "/metrics", "/v1/cells", "/openapi.json", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame-1".encode()}, {"Authorization": "Bearer"}):
                answer = served.http.get(path, headers=headers)
                error = error_of(answer, 401)
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert error_of(served.http.post(PATH, json={"prompt": "a"}), 401)
        assert served.http.get("/v1/models", headers={"Authorization": "Bearer sésame-1".encode()}).status_code == 200
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/").status_code in (200, 404)
        assert served.http.get("/static/nothing.js").status_code == 404
        assert served.engine.stats().requests == 0


def test_a_local_server_answers_to_its_own_names_only() -> None:
    """A page elsewhere may point its own name at this machine; what it then asks for carries that name."""
    with serving(is_local=True) as served:
        port = served.url.rpartition(":")[2]
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "[::1]", f"LOCALHOST:{port}"):
            assert served.http.get("/health", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "192.0.2.1", ""):
            assert error_of(served.http.get("/health", headers={"Host": host}), 403)["code"] == "foreign_host", host
    with serving() as served:
        assert served.http.get("/health", headers={"Host": "any.example"}).status_code == 200


def test_a_page_of_another_origin_may_ask_for_nothing(served: Served) -> None:
    for origin in ("http://evil.example", "https://127.0.0.1", "null", "http://127.0.0.1:1"):
        assert error_of(served.http.post("/v1/sessions", headers={"Origin": origin}), 403)["code"] == "foreign_origin", origin
    answer = served.http.post("/v1/sessions", headers={"Origin": served.url})
    assert answer.status_code == 201
    assert served.http.delete(f"/v1/sessions/{answer.json()['id']}").status_code == 200


def test_a_body_that_is_too_large_is_a_413_however_it_comes() -> None:
    with serving(max_body=1000) as served:
        body = b'{"prompt": "' + b"x" * 2000 + b'"}'
        headers = {"Content-Type": "application/json"}
        for content in (body, iter([body[i : i + 300] for i in range(0, len(body), 300)])):  # the second says no length
            error = error_of(served.http.post(PATH, content=content, headers=headers), 413)
            assert (error["code"], "1000 bytes" in error["message"]) == ("body_too_large", True)
        assert served.ok(PATH, {"prompt": "x" * 300, "max_tokens": 1})["choices"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", "/static/../app.py", 404, "not_found"),
        ("GET", "/static/%2e%2e/app.py", 404, "not_found"),
        ("GET", "/static/nothing.js", 404, "not_found"),
        ("GET", PATH, 405, "method_not_allowed"),
        ("PUT", PATH, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods_have_the_same_shape(served: Served, method: str, path: str, status: int, code: str) -> None:
    assert error_of(served.http.request(method, path), status)["code"] == code


def test_every_answer_forbids_foreign_content(served: Served) -> None:
    for path in ("/health", "/nothing", "/"):
        policy = served.http.get(path).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy.replace("http-", "")


def test_the_api_describes_itself(served: Served) -> None:
    described = served.ok("/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= set(described["paths"])
    assert "422" not in described["paths"][PATH]["post"]["responses"]
    assert served.http.get("/docs").status_code == served.http.get("/redoc").status_code == 404  # they load from elsewhere


# --- run ------------------------------------------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_had_is_one_clear_error() -> None:
    with run.listening_socket("127.0.0.1", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            run.listening_socket("127.0.0.1", port)
        assert run.url_of(bound) == f"http://127.0.0.1:{port}"
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:80"):
        run.listening_socket("192.0.2.1", 80)


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff", "é".encode()])
def test_a_file_without_one_key_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="key"):
        run.read_key(path)
    path.write_bytes(b"sk-local-1\n")
    assert run.read_key(path) == "sk-local-1"
    with pytest.raises(ConfigError, match="cannot read"):
        run.read_key(tmp_path / "none")


def test_no_answer_is_taken_from_a_browsers_memory_without_asking() -> None:
    with serving() as served:
        for path in ("/", "/static/app.js", "/health"):
            assert served.http.get(path).headers["cache-control"] == "no-cache"
