"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onekv import KVCache, LayerSpec, Window, cli
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
        (["plan", "/no/such/directory"], "/no/such/directory"),
        (["plan", "smollm2"], "onekv pull smollm2"),
        (["plan", "smollm2", "--memory", "-1"], "--memory must be a positive number of GB, got -1.0"),
        (["plan", "smollm2", "--memory", "nan"], "--memory"),
        (["plan", "smollm2", "--weights", "int3"], "int3"),
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
        (["-p", "a b c", "--cells", "3"], "need 131; the limit is 3"),
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
    assert "took back 1 exchange\n" in done.stdout
    assert "there is no command /nonsense" in done.stdout
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


@pytest.fixture
def config_only(tmp_path: Path) -> str:
    """A directory with a Gemma 3's config and no weights: three layers with a window of 16, then a full one."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "layer_types": kinds, "sliding_window": 16}
    path = tmp_path / "gemma"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3_text", **sizes, **heads}))
    return str(path)


def test_a_plan_says_what_a_cache_will_take(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config_only: str) -> None:
    options = [
        "plan",
        config_only,
        "--context",
        "200",
        "--sequences",
        "2",
        "--max-ubatch",
        "64",
        "--k-dtype",
        "float16",
        "--memory",
        "1e-3",
    ]
    assert run(monkeypatch, *options, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    layers = [LayerSpec(2, 8, window=Window.sliding(16))] * 3 + [LayerSpec(2, 8)]
    cache = KVCache(layers, planned["num_cells"], window_cells=planned["window_cells"], k_dtype="float16")
    assert (planned["num_cells"], planned["window_cells"]) == (400, 2 * 16 + 64)
    assert planned["kv_nbytes"] == cache.nbytes == sum(group["nbytes"] for group in planned["groups"])
    assert planned["nbytes"] == planned["weights_nbytes"] + cache.nbytes
    assert [(g["window"], g["num_layers"], g["cell_nbytes"]) for g in planned["groups"]] == [
        ("Window.full()", 1, 2 * 2 * 8 * 2),
        ("Window.sliding(16)", 3, 3 * 2 * 2 * 8 * 2),
    ]
    assert (planned["memory_nbytes"], planned["fits"], planned["max_context"], planned["max_positions"]) == (10**6, True, 256, 256)
    assert planned["max_sequences"] > 2
    assert run(monkeypatch, *options) == 0
    out = capsys.readouterr().out
    for text in ("1 Window.sliding(16)", "cache_for(model, 400, window_cells=96)", "fits into 1.00 MB", "256, the model's limit"):
        assert text in out
    assert run(monkeypatch, *options[:-1], "1e-6") == 0
    out = capsys.readouterr().out
    assert "does NOT fit into 1.00 kB" in out
    assert "largest --context for 2 sequences: 0\n" in out


def test_a_plan_without_numbers_takes_what_the_model_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config_only: str
) -> None:
    assert run(monkeypatch, "plan", config_only, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["context"], planned["sequences"], planned["k_dtype"], planned["v_dtype"]) == (256, 1, "float32", "float32")
    assert planned["fits"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--context", "-5"], "context must be a positive integer, got -5"),
        (["--context", "257"], "Gemma3ForCausalLM takes 256 positions"),
        (["--sequences", "0"], "sequences must be a positive integer, got 0"),
        (["--max-ubatch", "0"], "max_ubatch must be a positive integer, got 0"),
        (["--k-dtype", "int3"], "k_dtype must be one of"),
        (["--v-dtype", "int3"], "v_dtype must be one of"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_clear_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config_only: str
) -> None:
    assert run(monkeypatch, "plan", config_only, *arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.demo_model
@pytest.mark.usefixtures("demo_model")
def test_a_plan_of_the_demo_model_reads_its_header(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "smollm2", "--context", "1000", "--sequences", "4", "--weights", "float32", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["kv_nbytes"] == 4000 * 30 * 2 * 3 * 64 * 4
    tied = 49152 * 576  # the output layer is packed, and the embedding kept besides
    assert 0 <= planned["weights_nbytes"] - 4 * (134_515_008 + tied) < 1000  # and the rotary frequencies


@pytest.mark.demo_model
@pytest.mark.usefixtures("demo_model")
def test_a_bench_measures_and_warns_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "other_load", lambda: 1.5)
    assert run(monkeypatch, "bench", "--quick", "--json", "--k-dtype", "bfloat16", "--sequences", "2,3", "--weights", "float32") == 0
    measured = json.loads(capsys.readouterr().out)
    assert [(one["sequences"], one["context"], one["new_tokens"]) for one in measured["results"]] == [(2, 16, 4), (3, 16, 4)]
    for one in measured["results"]:
        assert one["prefill_tokens_per_s"] == pytest.approx(one["sequences"] * 16 / one["prefill_s"])
        assert one["decode_tokens_per_s"] == pytest.approx(one["sequences"] * 4 / one["decode_s"])
        assert one["kv_nbytes"] == one["sequences"] * 20 * 30 * 2 * 3 * 64 * 2
    assert (measured["other_load"], measured["threads"], measured["v_dtype"]) == (1.5, torch.get_num_threads(), "bfloat16")
    assert run(monkeypatch, "bench", "smollm2", "--quick", "--sequences", "1", "--context", "5", "--new-tokens", "2") == 0
    out = capsys.readouterr().out
    assert f"{torch.get_num_threads()} threads on" in out
    assert "other processes kept 1.5 cores busy" in out
    for arguments, says in (
        (["--context", "0"], "context must be a positive integer, got 0"),
        (["--context", "8190"], "8190 tokens and 4 new ones exceed the model's context of 8192"),
        (["--k-dtype", "int3"], "k_dtype must be one of"),
    ):
        assert run(monkeypatch, "bench", "--quick", *arguments) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("sequences", ["", ",", "0", "1,x", "5000"])
def test_a_bench_of_impossible_numbers_is_one_clear_line(
    sequences: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bench", "--sequences", sequences) == 2
    error = capsys.readouterr().err
    assert "expected a number from 1 to 4096" in error
    assert error.count("\n") == 1


def test_the_model_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(tmp_path))
    assert home() == tmp_path
    assert NAMED_MODELS["smollm2"].path.parent.parent == tmp_path
