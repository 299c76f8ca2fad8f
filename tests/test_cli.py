"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onekv import KVCache, LayerSpec, cli
from onekv.models.pull import NAMED_MODELS, home
from tiny import feed, toy

pytestmark = pytest.mark.usefixtures("clean_argv")


@pytest.fixture
def clean_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["onekv"])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["onekv", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


@pytest.fixture
def demo_model() -> None:
    if not NAMED_MODELS["smollm2"].path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "no/such/model.gguf", "-p", "a"], "no/such/model.gguf"),
        (["generate", "/no/such/directory", "-p", "a"], "/no/such/directory"),
        (["generate", "smollm2", "-p", "a"], "onekv pull smollm2"),
        (["generate", "smollm2", "-p", "a", "--temperature", "-1"], "temperature"),
        (["pull", "nothing-like-it"], "smollm2"),
        (["pull", "gemma3-270m"], "Gemma Terms of Use"),
        (["inspect", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(tmp_path))  # nothing is pulled there
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("onekv: ")
    assert error.count("\n") == 1


@pytest.mark.demo_model
@pytest.mark.usefixtures("demo_model")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", ""], "prompt 1 is empty"),
        (["-p", "a", "-p", ""], "prompt 2 is empty"),
        (["-p", "word " * 9000], "the model's context is 8192"),
        (["-p", "a b c", "--cells", "3"], "--cells is 3"),
        (["-p", "a", "--weights", "int3"], "int3"),
        (["-p", "a", "--k-dtype", "q5_0"], "k_dtype must be one of float32, float16, bfloat16, q8_0, q4_0; got 'q5_0'"),
        (["-p", "a", "--v-dtype", "q8"], "v_dtype must be one of"),
    ],
)
def test_a_prompt_that_cannot_run_is_one_clear_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "smollm2", *arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.demo_model
@pytest.mark.usefixtures("demo_model")
def test_several_prompts_give_one_json_line_each_equal_to_each_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["The capital of France is", "Two plus two is"]
    options = ["generate", "smollm2", "--max-tokens", "6", "--temperature", "0", "--weights", "float32", "--json"]
    assert run(monkeypatch, *options, "-p", prompts[0], "-p", prompts[1]) == 0
    together = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sorted(one) for one in together] == [["cached_tokens", "finish_reason", "prompt_tokens", "text", "token_ids"]] * 2
    assert [one["prompt_tokens"] for one in together] == [5, 4]
    assert [one["finish_reason"] for one in together] == ["length", "length"]
    assert together[0]["text"].startswith(" Paris")
    for prompt, one in zip(prompts, together, strict=True):
        assert run(monkeypatch, *options, "-p", prompt) == 0
        assert json.loads(capsys.readouterr().out) == one


@pytest.mark.demo_model
@pytest.mark.usefixtures("demo_model")
def test_quantised_cells_answer_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "smollm2", "--max-tokens", "6", "-p", "The capital of France is", "--k-dtype", "q8_0", "--v-dtype", "q4_0"]
    assert run(monkeypatch, *options) == 0
    assert "Paris" in capsys.readouterr().out


@pytest.mark.demo_model
@pytest.mark.usefixtures("demo_model")
def test_a_chat_forks_rewinds_and_draws() -> None:
    lines = ["Say hello.", "/cells", "/fork", "And now say goodbye.", "/use 1", "/rewind", "/use 9", "/rewind x", "/nonsense", "/exit"]
    command = [sys.executable, "-m", "onekv.cli", "chat", "smollm2", "--max-tokens", "8"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    assert "Hello" in done.stdout
    assert "cells used, head" in done.stdout
    assert "conversation 2 shares" in done.stdout
    assert "took back 1 exchanges" in done.stdout
    assert "expected a number from 1 to 2, got '9'" in done.stdout
    assert "expected a number from 1 to 1000000, got 'x'" in done.stdout
    assert "/rewind N" in done.stdout


@pytest.mark.demo_model
@pytest.mark.usefixtures("demo_model")
def test_the_demo_shares_forks_and_rewinds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "demo", "--max-tokens", "8") == 0
    out = capsys.readouterr().out
    assert out.count("cells used, head") == 3
    assert out.count("MB saved") == 3
    assert out.count("tokens/s") == 2
    assert "Paris" in out


def test_inspect_prints_what_a_file_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cache = toy(8)
    feed(cache, "0:0..4")
    cache.save(tmp_path / "one.safetensors", 0)
    assert run(monkeypatch, "inspect", str(tmp_path / "one.safetensors")) == 0
    out = capsys.readouterr().out
    assert "one sequence" in out
    assert "0 to 4" in out
    assert "group 0 Window.full(): 5 cells, 1 layers, 1 heads of 2 and 1, float32 keys, float32 values" in out
    assert "recurrent" not in out
    hybrid = KVCache([*cache.layers, LayerSpec(0, 0, states=((500, 500), (2,)))], 8)
    hybrid.save(tmp_path / "hybrid.safetensors")
    assert run(monkeypatch, "inspect", str(tmp_path / "hybrid.safetensors")) == 0
    assert "recurrent states: 1 layers, 1.0 MB a sequence" in capsys.readouterr().out
    wide = KVCache([LayerSpec(2, 64)], 8, k_dtype="q8_0", v_dtype="q4_0")
    wide.save(tmp_path / "wide.safetensors")
    assert run(monkeypatch, "inspect", str(tmp_path / "wide.safetensors")) == 0
    assert "0 cells, 1 layers, 2 heads of 64, q8_0 keys, q4_0 hadamard values" in capsys.readouterr().out
    (tmp_path / "bad").write_bytes(b"x" * 100)
    assert run(monkeypatch, "inspect", str(tmp_path / "bad")) == 2


def test_the_model_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(tmp_path))
    assert home() == tmp_path
    assert NAMED_MODELS["smollm2"].path.parent.parent == tmp_path
