"""Tiny random models of many families, tiny tokenizers, and tiny GGUF files made from them. Nothing here touches the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from families import VOCAB, tiny_model
from onekv.models.pull import NAMED_MODELS
from vocabularies import TOKENIZERS


@pytest.fixture(autouse=True, scope="session")
def _quiet_single_thread() -> Iterator[None]:
    """Tiny matrices are faster without a second thread; transformers' advice on tiny configs is no news."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    """Builds a tiny model of a family."""
    return tiny_model


@pytest.fixture
def tokens_of() -> Callable[..., list[list[int]]]:
    """Builds random prompts of given lengths that share their first `shared` tokens."""

    def build(lengths: tuple[int, ...], shared: int = 0, vocab: int = VOCAB, seed: int = 1) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        prefix = rng.integers(3, vocab, shared).tolist()
        return [prefix + rng.integers(3, vocab, n - shared).tolist() for n in lengths]

    return build


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's file."""
    path = NAMED_MODELS["smollm2"].path
    if not path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)
    return path


# --- tokenizers ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """A tiny tokenizer of every kind."""
    return TOKENIZERS[request.param]()


@pytest.fixture(params=["byte level", "sentencepiece", "sentencepiece without strip"])
def byte_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """A tiny tokenizer of every kind that can spell any character in bytes."""
    return TOKENIZERS[request.param]()


@pytest.fixture
def tokenizer_named() -> Callable[[str], PreTrainedTokenizerFast]:
    """Builds one kind of tiny tokenizer."""
    return lambda name: TOKENIZERS[name]()


# --- GGUF ---------------------------------------------------------------------------------------------------------------------------


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file of a tiny model, with the keys and tensors that llama.cpp's converter writes for every family it knows.

    What it writes for some only (windows, softcaps, rotary scaling) is passed in; test_gguf_lossless.py does so for each family.

    Args:
        metadata: keys to add, to change, or to leave out (None)
        tensors:  tensors to add, to change, or to leave out (None)
        kinds:    how to quantise tensors whose name contains the key; others are float32
    """
    config = model.config
    arch = {"gemma3_text": "gemma3", "mistral": "llama"}.get(config.model_type, config.model_type)
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    fields: dict[str, Any] = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": rope["rope_theta"],
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": _vocabulary(config.vocab_size),
        "tokenizer.ggml.token_type": [1] * config.vocab_size,
        "tokenizer.ggml.merges": ["Ġ a"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}",
    }
    if head_dim * heads != config.hidden_size or arch not in ("llama", "phi3", "smollm3"):
        fields[f"{arch}.attention.key_length"] = fields[f"{arch}.attention.value_length"] = head_dim
    fields |= metadata or {}
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    arrays: dict[str, Any] = {}
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = weight.float().numpy().copy()
        if arch in ("llama", "smollm3") and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            count = heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        stem, suffix = name.rsplit(".", 1)
        arrays[f"{names.get_name(stem)}.{suffix}"] = array
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if value is not None:
            _add(writer, key, value)
    for name, array in (arrays | (tensors or {})).items():
        if array is not None:
            kind = next((kind for part, kind in (kinds or {}).items() if part in name), gguf.GGMLQuantizationType.F32)
            array = np.ascontiguousarray(array, np.float32)
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary(size: int) -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [c for c in alphabet if c.isascii()]
    return ["<s>", "<x>", "</s>", "Ġ", "Ġa", *printable[: size - 5]]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny GGUF file."""

    def build(model: PreTrainedModel, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, **kinds: Any) -> Path:
        return write_gguf(tmp_path / "tiny.gguf", model, metadata, tensors, **kinds)

    return build


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home for onekv."""
    monkeypatch.setenv("ONEKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
