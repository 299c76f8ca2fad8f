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
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import gguf as package
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import logging as transformers_logging

from onekv.errors import ConfigError, OneKVError, UnsupportedModel
from onekv.models import linears
from onekv.models.pull import home

_FORMAT: Final = 1  # of the converted directory; raise it when a rule changes what a file turns into
_STAMP: Final = "onekv.json"
_INDEX: Final = "blocks.json"
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
    _write_index(file, model, directory)


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
        index = _read_index(path, directory, model)
        processor_of: Any = TENSOR_PROCESSORS.get(index.architecture, TensorProcessor)
        self._processor = processor_of(config=model.config.to_dict())
        self._bytes = np.memmap(path, np.uint8, mode="r")
        weights = model.state_dict()
        stored = {weights[name].data_ptr(): tensor for name, tensor in index.tensors.items()}
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


@dataclass(frozen=True, slots=True)
class _Index:
    """The tensors of a file by the name of the weight that each became."""

    architecture: str
    tensors: dict[str, _Tensor]


def _read_index(path: Path, directory: Path, model: Any) -> _Index:
    """What the conversion noted; files converted without a note are parsed again, once."""
    try:
        noted = json.loads((directory / _INDEX).read_text())
        return _Index(noted["architecture"], {name: _Tensor(*tensor) for name, tensor in noted["tensors"].items()})
    except (OSError, ValueError, KeyError, TypeError):
        file = GGUFFile(path)
        with quiet(), _parsed_once(file):
            return _write_index(file, model, directory)


def _write_index(file: GGUFFile, model: Any, directory: Path) -> _Index:
    weights_map: Any = get_gguf_hf_weights_map
    processor_of: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
    used = weights_map(model, processor_of(config=model.config.to_dict()))
    tensors = {
        used[t.name]: _Tensor(t.name, int(t.tensor_type), int(t.data_offset), int(t.n_bytes)) for t in file.reader.tensors if t.name in used
    }
    beside = directory / f"{_INDEX}.{os.getpid()}"
    beside.write_text(json.dumps({"architecture": file.architecture, "tensors": {name: astuple(t) for name, t in tensors.items()}}))
    os.replace(beside, directory / _INDEX)
    return _Index(file.architecture, tensors)


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
