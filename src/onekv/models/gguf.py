"""GGUF files: converted once into a directory that transformers loads in a moment, and only if nothing is lost.

Owns the directories under `home()/converted` and the table of what each architecture's metadata means. transformers reads a part of the
metadata and takes its own defaults for the rest without a word. So every key of the file is held against the config that came out: it
agrees, or the config is set to follow it, or the file is refused by the key's name. So is every tensor that no weight is made from, and
every weight that no tensor is found for. A new architecture is a new entry in `_ARCHITECTURES`.

    file ── metadata ──► config ── rules: agree / write / refuse ──► weights, dequantised to float32 ──► config + safetensors + tokenizer
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf as package
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import logging as transformers_logging

from onekv.errors import ConfigError, OneKVError, UnsupportedModel
from onekv.models.pull import home

_FORMAT: Final = 1  # of the converted directory; raise it when a rule changes what a file turns into
_STAMP: Final = "onekv.json"
_BLOCK: Final = 1 << 20
_FRESH_S: Final = 2.0  # a file changed this recently may change again within the clock's tick, so its digest is not remembered

Config = Any  # a transformers config: its fields depend on the family
Metadata = Mapping[str, Any]  # keys without the architecture's prefix


# --- converting ---------------------------------------------------------------------------------------------------------------------


def converted(path: Path) -> Path:
    """The directory a GGUF file was converted to; converts it first if need be.

    Weights are float32 and equal, to the bit, what transformers' `from_pretrained(gguf_file=...)` gives.

    Raises:
        ConfigError: no such file, or a damaged one.
        UnsupportedModel: an architecture without an entry, or metadata or tensors that the conversion would lose. Names key and value.
    Cost: some 10 s and 4 bytes a weight the first time (135M weights); then a look at the file's size and time.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    digest = _digest(path)
    target = home() / "converted" / digest[:24]
    if not _is_current(target):
        _convert(path, digest, target)
    return target


def config_of(path: Path) -> Config:
    """The config a GGUF file would be converted with. Reads its header only.

    Raises:
        ConfigError: no such file, or a damaged one.
        UnsupportedModel: an architecture without an entry, or metadata that the conversion would lose.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    file = GGUFFile(path)
    rules = _rules_of(file)
    _check_outside(file)
    with quiet(), _parsed_once(file):
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    follow(file, config, rules)
    return config


def _rules_of(file: GGUFFile) -> tuple[Rule, ...]:
    rules = _ARCHITECTURES.get(file.architecture)
    if rules is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedModel(f"{file.name}: general.architecture = {file.architecture!r}; GGUF files of {known} can be read")
    return rules


def _is_current(target: Path) -> bool:
    try:
        stamp = json.loads((target / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp.get("format") == _FORMAT and stamp.get("transformers") == transformers.__version__)


def _digest(path: Path) -> str:
    """SHA-256 of the content, hex. Remembered by path, size, time and inode, as git does, so that a large file is read once."""
    stat = path.stat()
    identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
    note = home() / "converted" / "digests" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    try:
        known = note.read_text()
        if len(known) == 64:
            return known
    except (OSError, ValueError):
        pass  # never hashed, or the note is unreadable: hash again
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - stat.st_mtime > _FRESH_S:
        note.parent.mkdir(parents=True, exist_ok=True)
        beside = note.with_suffix(f".{os.getpid()}")
        beside.write_text(digest)
        os.replace(beside, note)
    return digest


def _convert(path: Path, digest: str, target: Path) -> None:
    if sys.stderr.isatty():
        print(f"converting {path.name}, once", file=sys.stderr)
    file = GGUFFile(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        with quiet(), _parsed_once(file):
            _convert_into(file, scratch)
        stamp = {"format": _FORMAT, "transformers": transformers.__version__, "source": path.name, "sha256": digest}
        (scratch / _STAMP).write_text(json.dumps(stamp))
        for written in scratch.iterdir():
            with written.open("rb") as handle:
                os.fsync(handle.fileno())
        _put_in_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _put_in_place(scratch: Path, target: Path) -> None:
    """Rename; a conversion of another version goes away, one that another process just finished stays."""
    if target.exists() and not _is_current(target):
        old = Path(tempfile.mkdtemp(dir=target.parent, prefix=".old-"))
        os.replace(target, old / "old")
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.rename(scratch, target)
    except OSError:
        if not _is_current(target):
            raise


def _convert_into(file: GGUFFile, directory: Path) -> None:
    rules = _rules_of(file)
    _check_outside(file)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.path.parent), "gguf_file": file.path.name, "local_files_only": True}
    auto_model: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(**source)
        follow(file, config, rules)
        _check_tensors(file, config)
        model, loaded = auto_model.from_pretrained(**source, config=config, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except OneKVError:
        raise
    except NotImplementedError as error:
        raise UnsupportedModel(f"{file.name}: transformers cannot read this file: {error}") from error
    except Exception as error:
        raise ConfigError(f"{file.name} cannot be converted: {type(error).__name__}: {error}") from error
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if loaded[what]:
            raise UnsupportedModel(
                f"{file.name}: the file does not fill the model's weights, {what.replace('_', ' ')}: {sorted(loaded[what])[:4]}"
            )
    _follow_tokenizer(file, tokenizer)
    _follow_end_tokens(file, model)
    # transformers marks the model as quantized and then refuses to save it; these weights are plain float32.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def _parsed_once(file: GGUFFile) -> Iterator[None]:
    """For the body, the gguf package answers from what was parsed already.

    transformers parses the whole vocabulary again at each of its steps, and makes the table of tensor names anew for each submodule: two
    thirds of a conversion. Nothing else is changed, and nothing is kept afterwards.
    """
    stock: dict[str, Any] = {name: getattr(package, name) for name in ("GGUFReader", "get_tensor_name_map")}
    parsed = {"GGUFReader": lambda path, *mode: file.reader, "get_tensor_name_map": functools.cache(stock["get_tensor_name_map"])}
    for name, answer in parsed.items():
        setattr(package, name, answer)
    try:
        yield
    finally:
        for name, was in stock.items():
            setattr(package, name, was)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which report steps that are over before they can be read."""
    bars: Any = transformers_logging
    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


# --- reading ------------------------------------------------------------------------------------------------------------------------


class GGUFFile:
    """Metadata and tensor names of a GGUF file.

    Raises:
        ConfigError: not a GGUF file, or cut short.

    Attributes:
        reader:  the gguf package's reader, parsed
        fields:  every metadata key and value but the long arrays of the vocabulary
        tensors: name -> shape as the file states it
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        size = path.stat().st_size
        try:
            self.reader = package.GGUFReader(path)
            self.fields: dict[str, Any] = {key: f.contents() for key, f in self.reader.fields.items() if key not in _VOCABULARY}
            self.tensors = {t.name: tuple(int(n) for n in t.shape) for t in self.reader.tensors}
            ends = [t.data_offset + t.n_bytes for t in self.reader.tensors]
        except Exception as error:
            raise ConfigError(f"{path} is no readable GGUF file: {type(error).__name__}: {error}") from error
        if max(ends, default=0) > size:
            raise ConfigError(f"{path} is cut short: its tensors end at byte {max(ends)}, the file at {size}")
        self.architecture = str(self.fields.get("general.architecture", ""))

    @property
    def metadata(self) -> dict[str, Any]:
        """The architecture's own keys, without their prefix. A list of equal numbers, one per layer, is given as that number."""
        prefix = self.architecture + "."
        return {k.removeprefix(prefix): _one(v) for k, v in self.fields.items() if k.startswith(prefix)}


_LISTS: Final = frozenset({"attention.sliding_window_pattern"})
_VOCABULARY: Final = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value and all(v == value[0] for v in value) else value


def _check_outside(file: GGUFFile) -> None:
    """Keys that belong to no architecture."""
    for key, value in file.fields.items():
        room = key.split(".")[0]
        if key == "split.count" and value > 1:
            raise UnsupportedModel(f"{file.name}: {key} = {value}; join the parts of this model first (llama-gguf-split --merge)")
        if room not in ("GGUF", "general", "tokenizer", "split", "quantize", file.architecture):
            raise UnsupportedModel(f"{file.name}: {key} = {_shown(value)} is not known to onekv, so what it says would be lost")
    for key, value in file.metadata.items():
        if isinstance(value, list) and key not in _LISTS:
            raise UnsupportedModel(f"{file.name}: {file.architecture}.{key} = {_shown(value)}; values that differ by layer are not served")
    if file.fields.get("general.type", "model") != "model":
        raise UnsupportedModel(f"{file.name}: general.type = {file.fields['general.type']!r}, not a model")


def _check_tensors(file: GGUFFile, config: Config) -> None:
    """Every tensor of the file becomes a weight."""
    auto_model: Any = AutoModelForCausalLM
    weights_map: Any = get_gguf_hf_weights_map
    processor_of: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
    with torch.device("meta"):
        skeleton = auto_model.from_config(config)
    used = weights_map(skeleton, processor_of(config=config.to_dict()))
    weights = skeleton.state_dict()
    for name, shape in file.tensors.items():
        if name not in used:
            raise UnsupportedModel(f"{file.name}: tensor {name} {list(shape)} has no place in the converted model, so it would be lost")
        expected = weights[used[name]].shape
        if math.prod(shape) != expected.numel():
            raise ConfigError(f"{file.name}: tensor {name} is {list(shape)}, and the metadata asks for {list(reversed(expected))}")


# --- rules: what a key means --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """One metadata key.

    Attributes:
        key:     without the architecture's prefix
        says:    what the converted model does, in the words of the file
        default: what llama.cpp assumes where the key is absent; None: nothing, the config's own value stands
        write:   makes a config follow the file; None: the two must agree
    """

    key: str
    says: Callable[[Config], Any]
    default: Callable[[Metadata], Any] | None = None
    write: Callable[[Config, Any], None] | None = None


def follow(file: GGUFFile, config: Config, rules: Iterable[Rule]) -> None:
    """Hold every key of the file against the config, and let the config follow where it can.

    Raises:
        UnsupportedModel: names the first key that would be lost.
    """
    metadata = file.metadata
    _follow_rope_scaling(file, metadata, config)
    known = {"tensor_data_layout", *_ROPE_SCALING_KEYS}
    for rule in rules:
        known.add(rule.key)
        if rule.key in metadata:
            value = metadata[rule.key]
        elif rule.default is not None:
            value = rule.default(metadata)
        else:
            continue
        if not _agree(rule.says(config), value) and rule.write is not None:
            rule.write(config, value)
        if not _agree(rule.says(config), value):
            stated = "" if rule.key in metadata else " (not stated; the format's default)"
            raise UnsupportedModel(
                f"{file.name}: {file.architecture}.{rule.key} = {_shown(value)}{stated}, "
                f"and the converted model would use {_shown(rule.says(config))}"
            )
    for key in metadata:
        if key not in known:
            raise UnsupportedModel(
                f"{file.name}: {file.architecture}.{key} = {_shown(metadata[key])} is not known to onekv, so what it says would be lost"
            )


def _agree(one: Any, other: Any) -> bool:
    """Equal; numbers to float32's accuracy."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=0.0)
    return bool(one == other)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _field(key: str, name: str, default: Callable[[Metadata], Any] | None = None) -> Rule:
    """A key that a config field of this name states directly."""
    return Rule(key, lambda c: getattr(c, name, None), default, lambda c, value: _set(c, name, value))


def _set(config: Config, name: str, value: Any) -> None:
    """Fields a family does not have stay absent: its model would not look at them."""
    if name in config.to_dict():
        setattr(config, name, value)


def _always(key: str, *values: Any) -> Rule:
    """A key that may only say what the model does anyway; the values are ways of saying it."""
    return Rule(key, lambda c: values[0], None, None) if len(values) == 1 else Rule(key, lambda c: _AnyOf(values))


class _AnyOf:
    """Equal to each of some values."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __eq__(self, other: object) -> bool:
        return any(_agree(value, other) for value in self._values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return " or ".join(map(repr, self._values))


def _head_dim(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _plain_head_dim(metadata: Metadata) -> int:
    return int(metadata["embedding_length"] // metadata["attention.head_count"])


def _rope(config: Config) -> dict[str, Any]:
    """Rotary parameters of the full-attention layers."""
    parameters: dict[str, Any] = config.rope_parameters
    full: dict[str, Any] = parameters.get("full_attention", parameters)
    return full


def _rotary_dims(config: Config) -> int:
    return int(_head_dim(config) * _rope(config).get("partial_rotary_factor", 1.0))


def _window(config: Config) -> int:
    return getattr(config, "sliding_window", None) or 0


def _set_window(config: Config, value: int) -> None:
    """A window of 0 is none, which layers that are marked as windowed cannot have."""
    if value or "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        _set(config, "sliding_window", value or None)


def _is_windowed(config: Config) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _pattern(period: int) -> Callable[[Metadata], list[bool]]:
    """Every `period`-th layer is full, the others have a window."""
    return lambda m: [(layer + 1) % period != 0 for layer in range(m["block_count"])]


_ROPE_SCALING_KEYS: Final = frozenset(
    {"rope.scale_linear", "rope.scaling.finetuned"}
    | {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")}
    | {f"rope.scaling.yarn_{name}" for name in ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow")}
)


def _follow_rope_scaling(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    """Set the config's rotary scaling from the file: none, linear or yarn, which transformers and llama.cpp compute alike.

    Raises:
        UnsupportedModel: another type, or a yarn detail transformers has no word for.
    """

    def get(name: str, default: Any) -> Any:
        return metadata.get(f"rope.scaling.{name}", default)

    kind = get("type", "linear")  # llama.cpp's default, at a factor of 1
    factor = float(get("factor", metadata.get("rope.scale_linear", 1.0)) or 1.0)
    scaling: dict[str, Any]
    if kind == "none" or (kind == "linear" and factor == 1.0):
        scaling = {"rope_type": "default"}
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        plain = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
        for name, value in plain.items():
            if not _agree(get(name, value), value):
                raise UnsupportedModel(
                    f"{file.name}: {file.architecture}.rope.scaling.{name} = {get(name, value)!r}, "
                    f"and the converted model would use {value!r}"
                )
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(get("original_context_length", metadata["context_length"])),
            "beta_fast": float(get("yarn_beta_fast", 32.0)),
            "beta_slow": float(get("yarn_beta_slow", 1.0)),
        }
    else:
        raise UnsupportedModel(f"{file.name}: {file.architecture}.rope.scaling.type = {kind!r} is not read; none, linear and yarn are")
    rope = _rope(config)
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    rope.clear()
    rope.update(kept | scaling)


def _set_theta(config: Config, value: float) -> None:
    _rope(config)["rope_theta"] = float(value)


def _set_local_theta(config: Config, value: float) -> None:
    config.rope_parameters["sliding_attention"]["rope_theta"] = float(value)


def _set_scale(config: Config, value: float) -> None:
    config.query_pre_attn_scalar = round(value**-2)


def _gemma_scale(layers_of_27b: int) -> Callable[[Metadata], float]:
    """llama.cpp scales queries by the head's width, and by width / heads in the 27B models, which it knows by their number of layers."""
    return lambda m: (
        (_plain_head_dim(m) if m["block_count"] == layers_of_27b else m.get("attention.key_length", _plain_head_dim(m))) ** -0.5
    )


_COMMON: Final = (
    _field("context_length", "max_position_embeddings"),
    _field("embedding_length", "hidden_size"),
    _field("block_count", "num_hidden_layers"),
    _field("feed_forward_length", "intermediate_size"),
    _field("vocab_size", "vocab_size"),
    _field("attention.head_count", "num_attention_heads"),
    _field("attention.head_count_kv", "num_key_value_heads", lambda m: m["attention.head_count"]),
    _field("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    Rule("attention.key_length", _head_dim, _plain_head_dim, lambda c, value: _set(c, "head_dim", value)),
    Rule("attention.value_length", _head_dim, lambda m: m.get("attention.key_length", _plain_head_dim(m))),
    Rule("rope.freq_base", lambda c: _rope(c)["rope_theta"], lambda m: 10000.0, _set_theta),
    Rule("rope.dimension_count", _rotary_dims, lambda m: m.get("attention.key_length", _plain_head_dim(m))),
    _always("attention.causal", True),
    _always("attention.clamp_kqv", 0.0),
    _always("attention.max_alibi_bias", 0.0),
    _always("expert_count", 0),
    _always("expert_used_count", 0),
    _always("logit_scale", 1.0, 0.0),
    _always("embedding_scale", 1.0, 0.0),
    _always("residual_scale", 1.0, 0.0),
)
_PLAIN_ATTENTION: Final = (
    Rule("attention.scale", lambda c: _AnyOf((_head_dim(c) ** -0.5, 0.0))),
    Rule("attention.sliding_window", _window, lambda m: 0, _set_window),
    _always("attn_logit_softcapping", 0.0),
    _always("final_logit_softcapping", 0.0),
)


def _gemma(layers_of_27b: int, period: int, window: int, attn_softcap: float | None, final_softcap: float | None) -> tuple[Rule, ...]:
    return (
        Rule("attention.scale", lambda c: c.query_pre_attn_scalar**-0.5, _gemma_scale(layers_of_27b), _set_scale),
        Rule("attention.sliding_window", _window, lambda m: window, _set_window),
        Rule("attention.sliding_window_pattern", _is_windowed, _pattern(period)),
        _field("attn_logit_softcapping", "attn_logit_softcapping", lambda m: attn_softcap),
        _field("final_logit_softcapping", "final_logit_softcapping", lambda m: final_softcap),
    )


_GEMMA3_LOCAL_ROPE: Final = Rule(
    "rope.freq_base_swa", lambda c: c.rope_parameters["sliding_attention"]["rope_theta"], lambda m: 10000.0, _set_local_theta
)

_ARCHITECTURES: Final[dict[str, tuple[Rule, ...]]] = {
    "llama": (*_COMMON, *_PLAIN_ATTENTION),
    "qwen2": (*_COMMON, *_PLAIN_ATTENTION),
    "qwen3": (*_COMMON, *_PLAIN_ATTENTION),
    "gemma2": (*_COMMON, *_gemma(46, 2, 4096, 50.0, 30.0)),
    "gemma3": (*_COMMON, *_gemma(62, 6, 0, None, None), _GEMMA3_LOCAL_ROPE),
}


# --- tokenizer ----------------------------------------------------------------------------------------------------------------------


def _digits_apart(tokenizer: Tokenizer) -> None:
    """SmolLM: each digit is a word of its own, then GPT-2's split."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


# How text is cut before byte-level merges, by the file's name for it. transformers has a table of its own for others, and takes
# GPT-2's split for names it does not know.
_BYTE_LEVEL_SPLITS: Final[dict[str, Callable[[Tokenizer], None] | None]] = {
    "gpt-2": None,
    "smollm": _digits_apart,
    **dict.fromkeys(GGUF_PRE_TOKENIZER_SPLITS),
}


def _follow_tokenizer(file: GGUFFile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the tokenizer follow what the file says and transformers does not read.

    Raises:
        UnsupportedModel: names the key that would be lost.
    """
    kind = file.fields.get("tokenizer.ggml.model")
    split = file.fields.get("tokenizer.ggml.pre")
    if kind == "gpt2" and split is not None:
        if split not in _BYTE_LEVEL_SPLITS:
            raise UnsupportedModel(f"{file.name}: tokenizer.ggml.pre = {split!r} is not known to onekv, so text would be cut differently")
        fit = _BYTE_LEVEL_SPLITS[split]
        if fit is not None:
            fit(tokenizer.backend_tokenizer)
    if kind == "llama":
        spaced = file.fields.get("tokenizer.ggml.add_space_prefix", True)
        ids = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])
        if spaced != (ids[0] not in ("a", "<0x61>")):
            raise UnsupportedModel(
                f"{file.name}: tokenizer.ggml.add_space_prefix = {spaced}, and the converted tokenizer begins a text with {ids[0]!r}"
            )
    for key, default in (("remove_extra_whitespaces", False), ("escape_whitespaces", True)):
        value = file.fields.get(f"tokenizer.ggml.{key}", default)
        if value != default and kind == "llama":
            raise UnsupportedModel(f"{file.name}: tokenizer.ggml.{key} = {value}, and the converted tokenizer would use {default}")
    _follow_added_tokens(file, tokenizer)


def _follow_added_tokens(file: GGUFFile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Begin and end tokens of raw text."""
    for edge, place in (("bos", 0), ("eos", -1)):
        key = f"tokenizer.ggml.add_{edge}_token"
        token = getattr(tokenizer, f"{edge}_token_id")
        if key not in file.fields or token is None:
            continue
        ids = tokenizer("a")["input_ids"]
        if (len(ids) > 1 and ids[place] == token) != file.fields[key]:
            raise UnsupportedModel(f"{file.name}: {key} = {file.fields[key]}, and the converted tokenizer turns 'a' into {ids}")


def _follow_end_tokens(file: GGUFFile, model: PreTrainedModel) -> None:
    """An answer ends at the end of a turn or message as well as at the end of text; transformers reads the last only."""
    names = ("eos", "eot", "eom")
    ids = [file.fields[key] for key in (f"tokenizer.ggml.{name}_token_id" for name in names) if key in file.fields]
    if ids and model.generation_config is not None:
        model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else list(dict.fromkeys(ids))
