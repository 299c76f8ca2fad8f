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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from onekv.models.pull import NAMED_MODELS

VOCAB = 97
_WINDOW = 7
_PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_OWN_WIDTH = {**_GROUPED, "head_dim": 8}
_GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SLIDING, _FULL = "sliding_attention", "full_attention"

# name -> model_type, config
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "qwen3": ("qwen3", _OWN_WIDTH),
    "mistral": ("mistral", {**_OWN_WIDTH, "sliding_window": None}),
    "mistral_wide": ("mistral", {**_OWN_WIDTH, "sliding_window": 4096}),
    "mistral_sliding": ("mistral", {**_OWN_WIDTH, "sliding_window": _WINDOW}),
    "gpt2": ("gpt2", _GPT),
    "gpt_neox": ("gpt_neox", _PLAIN),
    "qwen2_half_sliding": ("qwen2", {**_GROUPED, "use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_GROUPED,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
            "max_window_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "phimoe": ("phimoe", {**_GROUPED, **_MOE, "sliding_window": _WINDOW}),
    "gemma2": ("gemma2", {**_OWN_WIDTH, "sliding_window": _WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3n": (
        "gemma3n_text",
        {
            **_OWN_WIDTH,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "sliding_window": _WINDOW,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
        },
    ),
    "gpt_oss": ("gpt_oss", {**_OWN_WIDTH, **_MOE, "sliding_window": _WINDOW}),
    "llama4": (
        "llama4_text",
        {
            **_OWN_WIDTH,
            "attention_chunk_size": _WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            # Small, so that the temperature of the layers without rotation changes within a short test.
            "floor_scale": 8,
            "attn_scale": 0.3,
        },
    ),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "dynamic": ("llama", {**_GROUPED, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "longrope": (
        "phi3",
        {
            **_GROUPED,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_PLAIN,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "diffllama": ("diffllama", _GROUPED),
    "doge": ("doge", _GROUPED),
    "falcon_h1": ("falcon_h1", _GROUPED),
    "recurrent_gemma": ("recurrent_gemma", _GROUPED),
}


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family, the same every time, with weights large enough for attention to matter."""
    model_type, config = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**config, **changes})).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15, generator=generator)
    return model


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


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, a few merges, two special tokens, one plain added token outside the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    merges = [("h", "e"), ("Ġ", "he"), ("ð", "Ł")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens(["→漢"])
    return fast


def sentencepiece_tokenizer(*stages: Any) -> PreTrainedTokenizerFast:
    """Pieces with ▁ for a space, and a token per byte for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "é", "▁▁", "▁b", "<0xZZ>"]
    vocab = {token: i for i, token in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "▁"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = stages[0] if len(stages) == 1 else decoders.Sequence(list(stages))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _spaces_and_bytes() -> list[Any]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte level": byte_level_tokenizer,
    "sentencepiece": lambda: sentencepiece_tokenizer(*_spaces_and_bytes(), decoders.Strip(" ", 1, 0)),
    "sentencepiece without strip": lambda: sentencepiece_tokenizer(*_spaces_and_bytes()),
    "metaspace": lambda: sentencepiece_tokenizer(decoders.Metaspace()),
    "metaspace never": lambda: sentencepiece_tokenizer(decoders.Metaspace(prepend_scheme="never")),
    "metaspace and bytes, not read": lambda: sentencepiece_tokenizer(decoders.ByteFallback(), decoders.Metaspace()),
    "wordpiece, not read": lambda: sentencepiece_tokenizer(decoders.WordPiece()),
}


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


def write_gguf(path: Path, model: PreTrainedModel, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    """A GGUF file of a tiny Llama, Qwen2, Qwen3 or Gemma, as llama.cpp's converter would write it.

    Args:
        metadata: keys to add, to change, or to leave out (None)
        tensors:  tensors to add, to change, or to leave out (None)
    """
    config = model.config
    arch = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
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
    if head_dim * heads != config.hidden_size or arch != "llama":
        fields[f"{arch}.attention.key_length"] = fields[f"{arch}.attention.value_length"] = head_dim
    fields |= metadata or {}
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    arrays: dict[str, Any] = {}
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = weight.float().numpy().copy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
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
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
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

    def build(model: PreTrainedModel, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        return write_gguf(tmp_path / "tiny.gguf", model, metadata, tensors)

    return build


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home for onekv."""
    monkeypatch.setenv("ONEKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
