"""GGUF files: converted once into a directory that transformers loads in a moment, and only if nothing is lost.

Owns the directories under `home()/converted` and the table of what each architecture's metadata means. transformers' own reader takes a
part of the metadata and its own defaults for the rest without a word. So the config is made here, and every key of the file is held
against it: it agrees, or the config is set to follow it, or the file is refused by the key's name. So is every tensor that nothing is
made from, and every weight that no tensor is found for. A new architecture is a new entry in `_ARCHITECTURES`.

    file ── metadata ──► config ── rules: agree / write / refuse ──► weights, dequantised to float32 ──► config + safetensors + tokenizer
                            └── scaling keys and frequency tensors ──► rope parameters
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
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.utils import logging as transformers_logging

from onekv.errors import ConfigError, OneKVError, UnsupportedModel
from onekv.models import linears
from onekv.models.pull import home

_FORMAT: Final = 3  # of the converted directory; raise it when a rule changes what a file turns into
_STAMP: Final = "onekv.json"
_INDEX: Final = "blocks.json"
_BLOCK: Final = 1 << 20
_FRESH_S: Final = 2.0  # a file changed this recently may change again within the clock's tick, so its digest is not remembered

Config = Any  # a transformers config: its fields depend on the family
Metadata = Mapping[str, Any]  # keys without the architecture's prefix


# --- converting ---------------------------------------------------------------------------------------------------------------------


def converted(path: Path) -> Path:
    """The directory a GGUF file was converted to; converts it first if need be.

    Weights are float32 and equal, to the bit, what transformers' `from_pretrained(gguf_file=...)` gives for the architectures it reads.

    Raises:
        ConfigError: no such file, or a damaged one.
        UnsupportedModel: an architecture without an entry, or metadata or tensors that the conversion would lose. Names key and value.
    Cost: some 10 s and 4 bytes a weight the first time (135M weights); then a look at the file's size and time.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    digest = _digest(path)
    target = home() / "converted" / f"{digest[:24]}-{_FORMAT}"  # so that two versions of onekv do not convert in turns
    if not _is_current(target):
        _convert(path, digest, target)
    return target


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
    rules = _ARCHITECTURES.get(file.architecture)
    if rules is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedModel(f"{file.name}: general.architecture = {file.architecture!r}; GGUF files of {known} can be read")
    _check_outside(file)
    auto_model: Any = AutoModelForCausalLM
    try:
        config = _config_of(file, rules)
        with torch.device("meta"):
            skeleton = auto_model.from_config(config)
        weights = _weights_of(file, config, skeleton)
        tokenizer = _tokenizer_of(file)
    except OneKVError:
        raise
    except Exception as error:
        raise ConfigError(f"{file.name} cannot be converted: {type(error).__name__}: {error}") from error
    _follow_tokenizer(file, tokenizer)
    config.architectures = [type(skeleton).__name__]
    config.dtype = torch.float32
    generation = GenerationConfig.from_model_config(config)
    _follow_end_tokens(file, generation)
    config.save_pretrained(directory)
    generation.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    _write_index(file, _places(file, config, skeleton)[1], directory)


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


# --- blocks -------------------------------------------------------------------------------------------------------------------------


class Blocks:
    """The quantised blocks of a file as groups of `linears`, by the name of the layer they became.

    Q4_0, Q4_1, Q4_K and Q8_0 map without a second rounding of the integers; scales and zeros are rounded to bfloat16. Other types of more
    than 4 bits become 8 bits. In a file without 4-bit blocks nothing but the output layer is kept in 8 bits.

    Args:
        path:      the file
        directory: what it was converted to
        model:     the model loaded from there, its weights not packed yet
    """

    def __init__(self, path: Path, directory: Path, model: Any) -> None:
        noted = json.loads((directory / _INDEX).read_text())
        self._processor = _processor_of(noted["architecture"], model.config)
        self._bytes = np.memmap(path, np.uint8, mode="r")
        weights = model.state_dict()
        stored = {weights[name].data_ptr(): _Tensor(*tensor) for name, tensor in noted["tensors"].items()}
        # By address: the output layer may be tied to the embedding, and is then stored under the embedding's name only.
        self._tensors = {
            name: stored[module.weight.data_ptr()]
            for name, module in model.named_modules()
            if type(module) is torch.nn.Linear and module.weight.data_ptr() in stored
        }
        head = model.get_output_embeddings()
        self._head = next((name for name, module in model.named_modules() if module is head), None)
        self._has_four_bits = any(tensor.kind in _FOUR_BITS for tensor in self._tensors.values())

    def __call__(self, name: str, weight: torch.Tensor) -> linears.Groups | None:
        """The groups of a layer's weight [N, K]; None: round the weight itself."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        read: Callable[[Any], linears.Groups] | None = _FOUR_BITS.get(tensor.kind)
        if read is None and (self._has_four_bits or name == self._head):
            if tensor.kind in _MORE_BITS:
                return linears.eight_bits(weight) if weight.shape[1] % linears.GROUP == 0 else None
            read = _EIGHT_BITS.get(tensor.kind)
        if read is None:
            return None
        # transformers reorders the rows of some weights; the processor is given their numbers to learn the order.
        order = self._processor.process(np.arange(weight.shape[0])[:, None], name=tensor.name).weights[:, 0]
        data = self._bytes[tensor.start : tensor.start + tensor.size].reshape(weight.shape[0], -1)[order]
        return read(data) if _stands_for(data, tensor.kind, weight) else None


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies in a file: `size` bytes from `start`."""

    name: str
    kind: int
    start: int
    size: int


def _write_index(file: GGUFFile, place: Mapping[str, str], directory: Path) -> None:
    tensors = {
        place[t.name]: (t.name, int(t.tensor_type), int(t.data_offset), int(t.n_bytes)) for t in file.reader.tensors if t.name in place
    }
    (directory / _INDEX).write_text(json.dumps({"architecture": file.architecture, "tensors": tensors}))


def _stands_for(data: Any, kind: int, weight: torch.Tensor) -> bool:
    """Whether rows of blocks are those that a weight was dequantised from, judged by some of the rows."""
    rows = np.unique(np.linspace(0, weight.shape[0] - 1, 64).astype(np.int64))
    values = torch.from_numpy(package.quants.dequantize(data[rows], _TYPES(kind)))
    found = weight.detach()[torch.from_numpy(rows)]
    return values.shape == found.shape and torch.equal(values.to(weight.dtype), found)


def _halves(raw: Any) -> torch.Tensor:
    """Pairs of bytes [..., 2] as float16 -> [...] float32."""
    return torch.from_numpy(np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32))


def _split(data: Any, block_bytes: int) -> Any:
    """Rows of bytes -> [N, blocks, bytes of a block]."""
    return data.reshape(data.shape[0], -1, block_bytes)


def _unpacked(raw: Any) -> torch.Tensor:
    """Bytes [N, blocks, 16], the low halves first -> integers [N, 32 * blocks]."""
    return torch.from_numpy(np.concatenate((raw & 15, raw >> 4), -1).reshape(raw.shape[0], -1))


def _q4_0(data: Any) -> linears.Groups:
    blocks = _split(data, 18)
    scale = _halves(blocks[..., :2])
    return linears.nibbles(_unpacked(blocks[..., 2:]), scale, torch.zeros_like(scale))


def _q4_1(data: Any) -> linears.Groups:
    blocks = _split(data, 20)
    scale, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return linears.nibbles(_unpacked(blocks[..., 4:]), scale, least + 8 * scale)


def _q4_k(data: Any) -> linears.Groups:
    """8 groups of 32 a block: 6 bits each for scale and minimum, times the block's two factors."""
    blocks = _split(data, 144)
    factor, least = _halves(blocks[..., :2])[..., None], _halves(blocks[..., 2:4])[..., None]
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    raw = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    q = np.concatenate((raw & 15, raw >> 4), -2).reshape(blocks.shape[0], -1)
    rows = blocks.shape[0]
    scale = (factor * torch.from_numpy(scales)).reshape(rows, -1)
    return linears.nibbles(torch.from_numpy(q), scale, 8 * scale - (least * torch.from_numpy(minima)).reshape(rows, -1))


def _q8_0(data: Any) -> linears.Groups:
    blocks = _split(data, 34)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(blocks.shape[0], -1)
    return linears.bytes_in_groups(torch.from_numpy(values), _halves(blocks[..., :2]))


_TYPES: Final = package.GGMLQuantizationType
_FOUR_BITS: Final[dict[int, Callable[[Any], linears.Groups]]] = {_TYPES.Q4_0: _q4_0, _TYPES.Q4_1: _q4_1, _TYPES.Q4_K: _q4_k}
_EIGHT_BITS: Final[dict[int, Callable[[Any], linears.Groups]]] = {_TYPES.Q8_0: _q8_0}
_MORE_BITS: Final[frozenset[int]] = frozenset({_TYPES.Q5_0, _TYPES.Q5_1, _TYPES.Q5_K, _TYPES.Q6_K, _TYPES.Q8_1, _TYPES.Q8_K})


# --- reading ------------------------------------------------------------------------------------------------------------------------


class GGUFFile:
    """Metadata and tensor names of a GGUF file.

    Raises:
        ConfigError: not a GGUF file, or cut short.

    Attributes:
        reader:  the gguf package's reader, parsed
        fields:  every metadata key and value but the long arrays of the vocabulary
        tensors: name -> shape as the file states it
        followed: tensors that the config follows, so that no weight is made of them
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
        self.followed: set[str] = set()

    @property
    def metadata(self) -> dict[str, Any]:
        """The architecture's own keys, without their prefix. A list of equal numbers, one per layer, is given as that number.

        A window pattern is given as one bool per layer; a file may state its period only.
        """
        prefix = self.architecture + "."
        stated = {k.removeprefix(prefix): v for k, v in self.fields.items() if k.startswith(prefix)}
        metadata = {k: v if k in _LISTS else _one(v) for k, v in stated.items()}
        pattern = metadata.get(_PATTERN)
        if isinstance(pattern, list):
            metadata[_PATTERN] = [bool(v) for v in pattern]
        elif pattern is not None:
            metadata[_PATTERN] = _pattern(int(pattern))(metadata)
        return metadata

    def array(self, name: str) -> NDArray[np.float32]:
        """A tensor, dequantised; axes in numpy's order."""
        (tensor,) = (t for t in self.reader.tensors if t.name == name)
        array: NDArray[np.float32] = package.dequantize(tensor.data, tensor.tensor_type)
        return array

    def follow_array(self, name: str) -> list[float] | None:
        """A tensor that the config follows; None if the file has none of this name."""
        if name not in self.tensors:
            return None
        self.followed.add(name)
        return [float(v) for v in self.array(name).ravel()]


_PATTERN: Final = "attention.sliding_window_pattern"
_LISTS: Final = frozenset({_PATTERN})
_VOCABULARY: Final = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))

# Keys that are followed, checked, or that change no token of a text. Chat templates come beside them.
_TOKENIZER_KEYS: Final = _VOCABULARY | {
    "tokenizer.huggingface.json",
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "token_type_count", "precompiled_charsmap")),
    *(f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")),
    *(f"tokenizer.ggml.{name}_whitespaces" for name in ("remove_extra", "escape")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "separator")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("mask", "cls", "prefix", "suffix", "middle")),
    *(f"tokenizer.ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
}


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
        if key == "tokenizer.ggml.add_sep_token" and not value:
            continue
        if room == "tokenizer" and key not in _TOKENIZER_KEYS and not key.startswith("tokenizer.chat_template"):
            raise UnsupportedModel(f"{file.name}: {key} = {_shown(value)} is not known to onekv, so text could be cut differently")
    for key, value in file.metadata.items():
        if isinstance(value, list) and key not in _LISTS:
            raise UnsupportedModel(f"{file.name}: {file.architecture}.{key} = {_shown(value)}; values that differ by layer are not served")
    if file.fields.get("general.type", "model") != "model":
        raise UnsupportedModel(f"{file.name}: general.type = {file.fields['general.type']!r}, not a model")


# --- weights ------------------------------------------------------------------------------------------------------------------------


def _processor_of(architecture: str, config: Config) -> Any:
    """What transformers does to the tensors of a file after reading them."""
    processor_of: Any = _PROCESSORS.get(architecture, TensorProcessor)
    return processor_of(config=config.to_dict())


def _places(file: GGUFFile, config: Config, skeleton: nn.Module) -> tuple[Any, dict[str, str]]:
    """The processor, and for each tensor the name of the weight that it becomes."""
    processor = _processor_of(file.architecture, config)
    weights_map: Any = get_gguf_hf_weights_map
    return processor, weights_map(skeleton, processor, model_type=file.architecture)


def _weights_of(file: GGUFFile, config: Config, skeleton: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the file as the weight it becomes, float32; tied weights once.

    Raises:
        UnsupportedModel: a tensor without a place, or a weight without a tensor; names it.
        ConfigError: a shape that the metadata does not ask for.
    Cost: 4 bytes a weight.
    """
    processor, place = _places(file, config, skeleton)
    shapes = {name: weight.shape for name, weight in skeleton.state_dict().items()}
    for name, shape in file.tensors.items():
        if name in file.followed:
            continue
        if name not in place:
            raise UnsupportedModel(f"{file.name}: tensor {name} {list(shape)} has no place in the converted model, so it would be lost")
        asked = list(reversed(shapes[place[name]]))
        if list(shape) != asked:
            raise ConfigError(f"{file.name}: tensor {name} is {list(shape)}, and the metadata asks for {asked}")
    filled = {place[name] for name in file.tensors if name in place}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = sorted(set(shapes) - filled - tied)
    if missing:
        raise UnsupportedModel(f"{file.name}: the file does not fill the model's weights, missing: {missing[:4]}")
    weights = {}
    for name in file.tensors:
        if name not in file.followed:
            array = processor.process(weights=file.array(name), name=name).weights
            weights[place[name]] = torch.from_numpy(np.array(array, np.float32, order="C"))
    return weights


# --- config -------------------------------------------------------------------------------------------------------------------------

# Keys that a config field states directly, and that the rest of a config is made from.
_DIRECT: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_NEEDED: Final = tuple(key for key in _DIRECT if key not in ("attention.head_count_kv", "vocab_size"))
# Config fields that say whether the projections have biases, and the tensor that is there if they have.
_BIASES: Final = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}


def _config_of(file: GGUFFile, rules: Iterable[Rule]) -> Config:
    """The config that a file's metadata and tensors ask for.

    Raises:
        ConfigError: a key that every file has is missing.
        UnsupportedModel: names the key or tensor that would be lost.
    """
    metadata = file.metadata
    for key in _NEEDED:
        if key not in metadata:
            raise ConfigError(f"{file.name} has no {file.architecture}.{key}")
    fields: dict[str, Any] = {field: metadata[key] for key, field in _DIRECT.items() if key in metadata}
    fields.setdefault("num_key_value_heads", metadata["attention.head_count"])
    if "token_embd.weight" in file.tensors:
        fields.setdefault("vocab_size", file.tensors["token_embd.weight"][-1])
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token = file.fields.get(f"tokenizer.ggml.{key}_token_id")
        fields[name] = token if token is not None and token < fields.get("vocab_size", 0) else None
    model_type = file.architecture
    if model_type == "llama" and metadata.get("attention.sliding_window"):
        model_type = "mistral"  # llama.cpp has one name for both
    config: Config = AutoConfig.for_model(
        _MODEL_TYPES.get(model_type, model_type), **fields, tie_word_embeddings="output.weight" not in file.tensors
    )
    for name, tensor in _BIASES.items():
        if tensor in file.tensors:
            _set(config, name, True)
    follow(file, config, rules)
    return config


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


class _NoWindow:
    """What a model without windowed layers says: no window, or one that the whole context fits in."""

    def __init__(self, context: int) -> None:
        self._context = context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and (other == 0 or other >= self._context)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"0, or {self._context} and more"


def _head_dim(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _set_head_dim(config: Config, value: int) -> None:
    """Every family looks for this field, also those that do not have it by themselves."""
    config.head_dim = value


def _plain_head_dim(metadata: Metadata) -> int:
    return int(metadata["embedding_length"] // metadata["attention.head_count"])


def _rope(config: Config) -> dict[str, Any]:
    """Rotary parameters of the full-attention layers."""
    parameters: dict[str, Any] = config.rope_parameters
    full: dict[str, Any] = parameters.get("full_attention", parameters)
    return full


def _rotary_dims(config: Config) -> int:
    return int(_head_dim(config) * _rope(config).get("partial_rotary_factor", 1.0))


def _set_rotary_dims(config: Config, value: int) -> None:
    """Phi-3 alone reads the factor; for the others it stays absent, and another number of dimensions is refused."""
    if "partial_rotary_factor" in _rope(config):
        _rope(config)["partial_rotary_factor"] = value / _head_dim(config)


def _window(config: Config) -> int:
    """The window of every layer, or of every layer that is marked as windowed."""
    return getattr(config, "sliding_window", None) or 0


def _set_window(config: Config, value: int) -> None:
    """A window of 0 is none, which layers that are marked as windowed cannot have."""
    if value or "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        _set(config, "sliding_window", value or None)


def _optional_window(config: Config) -> Any:
    """The same in families whose layers are full unless marked."""
    return _window(config) if any(_is_windowed(config)) else _NoWindow(config.max_position_embeddings)


def _set_optional_window(config: Config, value: int) -> None:
    if any(_is_windowed(config)):
        config.use_sliding_window, config.sliding_window = True, value


def _is_windowed(config: Config) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _set_windowed(config: Config, value: Sequence[bool]) -> None:
    if len(value) == config.num_hidden_layers:
        config.layer_types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in value]


def _pattern(period: int) -> Callable[[Metadata], list[bool]]:
    """Every `period`-th layer is full, the others have a window; 0: all have one."""
    return lambda m: [period == 0 or (layer + 1) % period != 0 for layer in range(m.get("block_count", 0))]


# --- rules: rotary scaling ----------------------------------------------------------------------------------------------------------

_ROPE_SCALING_KEYS: Final = frozenset(
    {"rope.scale_linear", "rope.scaling.finetuned"}
    | {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")}
    | {f"rope.scaling.yarn_{name}" for name in ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow")}
)
_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Architectures whose graph in llama.cpp divides frequencies by those tensors, and the type each can follow.
_FREQS_ARE_READ: Final = ("llama", "smollm3")
_LONG_SHORT_ARE_READ: Final = ("llama", "phi3")


def _follow_rope_scaling(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    """Set the config's rotary scaling from the file: none, linear, yarn, longrope, or Llama 3's, which is a tensor.

    Raises:
        UnsupportedModel: another type, a combination, or a yarn detail transformers has no word for.
        ConfigError: a tensor of another length.
    """

    def get(name: str, default: Any) -> Any:
        return metadata.get(f"rope.scaling.{name}", default)

    def must_be(name: str, value: Any) -> None:
        if not _agree(get(name, value), value):
            raise UnsupportedModel(
                f"{file.name}: {file.architecture}.rope.scaling.{name} = {get(name, value)!r}, and the converted model would use {value!r}"
            )

    factors = {}
    for name, readers in ((_FREQS, _FREQS_ARE_READ), (_LONG, _LONG_SHORT_ARE_READ), (_SHORT, _LONG_SHORT_ARE_READ)):
        values = file.follow_array(name) if file.architecture in readers else None
        if values is None:
            continue
        pairs = metadata.get("rope.dimension_count", _head_dim_of(metadata)) // 2
        if len(values) != pairs:
            raise ConfigError(f"{file.name}: tensor {name} has {len(values)} values, and the metadata asks for {pairs}")
        factors[name] = values

    kind = get("type", "longrope" if _LONG in factors else "linear")  # llama.cpp's default, at a factor of 1
    factor = float(get("factor", metadata.get("rope.scale_linear", 1.0)) or 1.0)
    original = int(get("original_context_length", metadata["context_length"]))
    _set(config, "original_max_position_embeddings", original)
    scaling: dict[str, Any]
    if kind == "longrope":
        if set(factors) != {_LONG, _SHORT}:
            raise UnsupportedModel(
                f"{file.name}: {file.architecture}.rope.scaling.type = 'longrope' takes the tensors {_LONG} and {_SHORT}, "
                f"and the file has {sorted(factors) or 'neither'} for this architecture"
            )
        must_be("factor", 1.0)
        scaling = _longrope(factors[_SHORT], factors[_LONG], original, metadata["context_length"], float(get("attn_factor", 1.0)))
    elif factors:
        if set(factors) != {_FREQS} or not (kind == "none" or (kind == "linear" and factor == 1.0)):
            raise UnsupportedModel(
                f"{file.name}: tensors {sorted(factors)} beside {file.architecture}.rope.scaling.type = {kind!r} and factor {factor}"
            )
        must_be("attn_factor", 1.0)
        freqs = factors[_FREQS]
        # Divisors that Llama 3's formula does not give are still followed: longrope takes any.
        scaling = _llama3(freqs, float(metadata.get("rope.freq_base", 10000.0))) or _longrope(
            freqs, freqs, original, metadata["context_length"], 1.0
        )
    elif kind == "none" or (kind == "linear" and factor == 1.0):
        must_be("attn_factor", 1.0)
        scaling = {"rope_type": "default"}
    elif kind == "linear":
        must_be("attn_factor", 1.0)
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        for name, value in {"yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}.items():
            must_be(name, value)
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": float(get("yarn_beta_fast", 32.0)),
            "beta_slow": float(get("yarn_beta_slow", 1.0)),
        }
        if not _agree(get("attn_factor", 1.0), 1.0):  # llama.cpp's multiplies the usual one, transformers' replaces it
            scaling["attention_factor"] = get("attn_factor", 1.0) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    else:
        raise UnsupportedModel(
            f"{file.name}: {file.architecture}.rope.scaling.type = {kind!r} is not read; none, linear, yarn and longrope are"
        )
    if file.architecture == "phi3" and scaling["rope_type"] not in ("default", "longrope"):
        raise UnsupportedModel(f"{file.name}: phi3.rope.scaling.type = {kind!r}, and transformers' phi3 has none and longrope only")
    rope = _rope(config)
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    rope.clear()
    rope.update(kept | scaling)


def _head_dim_of(metadata: Metadata) -> int:
    return int(metadata.get("attention.key_length", _plain_head_dim(metadata)))


def _longrope(short: list[float], long: list[float], original: int, context: int, attention_factor: float) -> dict[str, Any]:
    """Frequencies divided by one list up to the original context, by the other beyond."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "factor": max(context / original, 1.0),
        "attention_factor": attention_factor,
    }


def _llama3(divisors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """The settings of Llama 3's scaling that a file's divisors were computed from; None if they were not.

    By that scaling short waves stay, long waves are divided by the factor, and between them 1 / divisor changes linearly with the
    frequency. So the straight line through those gives the two bounds, up to a common scale: low_freq_factor is 1, as in every release.
    """
    divided = np.array(divisors)  # [rotary pairs]
    factor = round(float(divided.max()), 4)
    frequency = theta ** -(np.arange(len(divided)) / len(divided)) / (2 * math.pi)
    is_between = (divided > 1 + 1e-6) & (divided < factor * (1 - 1e-6))
    if is_between.sum() < 2:
        return None
    share = (1 / divided - 1 / factor) / (1 - 1 / factor)  # 1: as it was, 0: divided by the factor
    slope, offset = np.polyfit(frequency[is_between], share[is_between], 1)
    if slope <= 0 or offset >= 0:
        return None
    high = round(1 - 1 / float(offset), 3)
    original = round(float(slope) * (high - 1))
    expected = 1 / ((1 - 1 / factor) * np.clip((original * frequency - 1) / (high - 1), 0, 1) + 1 / factor)
    if not np.allclose(expected, divided, rtol=2e-6, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# --- rules: each architecture -------------------------------------------------------------------------------------------------------


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
    *(_field(key, name) for key, name in _DIRECT.items()),
    Rule("attention.key_length", _head_dim, _plain_head_dim, _set_head_dim),
    Rule("attention.value_length", _head_dim, _head_dim_of),
    Rule("rope.freq_base", lambda c: _rope(c)["rope_theta"], lambda m: 10000.0, _set_theta),
    Rule("rope.dimension_count", _rotary_dims, _head_dim_of, _set_rotary_dims),
    _always("attention.causal", True),
    _always("attention.clamp_kqv", 0.0),
    _always("attention.max_alibi_bias", 0.0),
    _always("expert_count", 0),
    _always("expert_used_count", 0),
    _always("logit_scale", 1.0, 0.0),
    _always("embedding_scale", 1.0, 0.0),
    _always("residual_scale", 1.0, 0.0),
)
_PLAIN_SCORES: Final = (
    Rule("attention.scale", lambda c: _AnyOf((_head_dim(c) ** -0.5, 0.0))),
    _always("attn_logit_softcapping", 0.0),
    _always("final_logit_softcapping", 0.0),
)
# A window of all layers; llama.cpp has none in "llama" (Mistral) and took Phi-3's from its size before files stated it.
_ONE_WINDOW: Final = (Rule("attention.sliding_window", _window, lambda m: 0, _set_window),)
_PHI3_WINDOW: Final = (
    Rule(
        "attention.sliding_window",
        _window,
        lambda m: 2047 if m["block_count"] in (32, 40) and m["context_length"] == 4096 else 0,
        _set_window,
    ),
)
# Layers are full unless the file marks them.
_MARKED_WINDOW: Final = (
    Rule(_PATTERN, _is_windowed, None, _set_windowed),
    Rule("attention.sliding_window", _optional_window, lambda m: 0, _set_optional_window),
)


def _gemma(layers_of_27b: int, period: int, window: int, attn_softcap: float | None, final_softcap: float | None) -> tuple[Rule, ...]:
    return (
        Rule("attention.scale", lambda c: c.query_pre_attn_scalar**-0.5, _gemma_scale(layers_of_27b), _set_scale),
        Rule(_PATTERN, _is_windowed, _pattern(period), _set_windowed),
        Rule("attention.sliding_window", _window, lambda m: window, _set_window),
        _field("attn_logit_softcapping", "attn_logit_softcapping", lambda m: attn_softcap),
        _field("final_logit_softcapping", "final_logit_softcapping", lambda m: final_softcap),
    )


_GEMMA3_LOCAL_ROPE: Final = Rule(
    "rope.freq_base_swa", lambda c: c.rope_parameters["sliding_attention"]["rope_theta"], lambda m: 10000.0, _set_local_theta
)

_ARCHITECTURES: Final[dict[str, tuple[Rule, ...]]] = {
    "llama": (*_COMMON, *_PLAIN_SCORES, *_ONE_WINDOW),
    "qwen2": (*_COMMON, *_PLAIN_SCORES, *_MARKED_WINDOW),
    "qwen3": (*_COMMON, *_PLAIN_SCORES, *_MARKED_WINDOW),
    "gemma2": (*_COMMON, *_gemma(46, 2, 4096, 50.0, 30.0)),
    "gemma3": (*_COMMON, *_gemma(62, 6, 0, None, None), _GEMMA3_LOCAL_ROPE),
    "phi3": (*_COMMON, *_PLAIN_SCORES, *_PHI3_WINDOW),
    # Every fourth layer without rotation, as llama.cpp has it in its code and transformers in its config; no key says so.
    "smollm3": (*_COMMON, *_PLAIN_SCORES, *_MARKED_WINDOW),
}
# Where transformers' name differs from the file's.
_MODEL_TYPES: Final = {"gemma3": "gemma3_text"}
# How tensors are turned back; smollm3's queries and keys are permuted as llama's are.
_PROCESSORS: Final[dict[str, Any]] = {**TENSOR_PROCESSORS, "smollm3": TENSOR_PROCESSORS["llama"]}


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


def _tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers makes of the file; for architectures it has no reader for, of the vocabulary alone."""
    made_by: Any = AutoTokenizer if file.architecture in GGUF_SUPPORTED_ARCHITECTURES else PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = made_by.from_pretrained(str(file.path.parent), gguf_file=file.path.name, local_files_only=True)
    return tokenizer


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


def _follow_end_tokens(file: GGUFFile, generation: GenerationConfig) -> None:
    """An answer ends at the end of a turn or message as well as at the end of text; transformers reads the last only."""
    names = ("eos", "eot", "eom")
    ids = [file.fields[key] for key in (f"tokenizer.ggml.{name}_token_id" for name in names) if key in file.fields]
    if ids:
        generation.eos_token_id = ids[0] if len(ids) == 1 else list(dict.fromkeys(ids))
