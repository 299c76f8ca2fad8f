"""The file format: one sequence or a whole cache as a safetensors file.

    tensors   layers.I.k [n, G, D], layers.I.v [n, G, Dv]   of every owning layer I; n cells of its group, in the stored dtype. Where
                                                            that is quantised, heads are the uint8 of `codecs` instead of D numbers
              seqs.S.positions [n] int32                    ascending
              seqs.S.tokens [n] int32                       -1 where an embedding was fed
              seqs.S.cells.g [n] int32                      which of group g's n cells each entry has, -1 lost
              seqs.S.axes [2, n] int32                      y and x, only where positions have them
              seqs.S.states.I.j float32                     state j of recurrent layer I after all n entries, if there are any
    metadata  "onekv": JSON: version, whole, layers (geometry, window, rope, source, states), keys and values (their codecs: dtype and
                       Hadamard rotation), fingerprint, sequence ids
              "sha256": of the whole file with these 64 characters zeroed

A file says nothing of cell numbers, placement, V layout or buffer size, so it loads into any. Everything read is untrusted: counts are
compared with the file's real size before anything is allocated, the digest before anything is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from onekv.codecs import Codec
from onekv.core.window import Window
from onekv.errors import OneKVError, StateError
from onekv.storage import LayerSpec, Rope, layer_groups

Int32 = NDArray[np.int32]
Target = str | os.PathLike[str] | BinaryIO
Progress = Callable[[int, int], object]  # bytes done, bytes in all

VERSION: Final = 1
_FIELDS: Final = frozenset({"version", "whole", "fingerprint", "layers", "keys", "values", "sequences"})
_DIGEST: Final = "sha256"
_ZEROS: Final = "0" * 64
_MAX_HEADER: Final = 100_000_000  # safetensors' own limit
_CHUNK: Final = 1 << 22


@dataclass(frozen=True, eq=False)
class SavedRow:
    """One sequence: its positions [n], token ids [n], per group the index of each entry's cell [n] (-1 lost), y and x [2, n], and per
    recurrent layer its states."""

    seq: int
    positions: Int32
    tokens: Int32
    columns: list[Int32]
    axes: Int32 | None = None
    states: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class State:
    """What a file holds.

    Attributes:
        layers:      geometry of every model layer
        fingerprint: identity of the model
        whole:       a whole cache; else one sequence
        rows:        its sequences
        k_codec, v_codec: how keys and values are stored
        keys, values: per owning layer [n, G, D] and [n, G, Dv], as stored
    """

    layers: tuple[LayerSpec, ...]
    fingerprint: str
    whole: bool
    rows: list[SavedRow]
    k_codec: Codec
    v_codec: Codec
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def num_cells(self, group: int) -> int:
        """Cells the file holds of a group."""
        _, group_of = layer_groups(self.layers)
        return next(k.shape[0] for i, k in self.keys.items() if group_of[i] == group)


# --- writing --------------------------------------------------------------------------------------------------------------------


def save(target: Target, state: State, progress: Progress | None = None) -> None:
    """Write a state. To a path: beside it, synced, then renamed over it, so that a crash leaves the old file or the new one, whole.

    Raises:
        StateError: the file cannot be written; the old one is unchanged.
    Cost: one copy of the state in memory; each byte is written once and read once for the digest.
    """
    metadata = {"onekv": json.dumps(_describe(state)), _DIGEST: _ZEROS}
    tensors = _tensors(state)
    if not isinstance(target, str | os.PathLike):
        data = bytearray(safetensors.torch.save(tensors, metadata))
        at = _digest_offset(bytes(data[: 8 + _header_length(data[:8], len(data))]))
        data[at : at + 64] = hashlib.sha256(data).hexdigest().encode()
        try:
            target.write(data)
        except OSError as error:
            raise StateError(f"cannot write the state: {error}") from error
        return
    path = Path(target)
    try:
        scratch = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
        os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            rights = scratch.stat().st_mode  # those any new file gets; safetensors would leave it to its owner alone
            safetensors.torch.save_file(tensors, scratch, metadata)
            os.chmod(scratch, rights)
            with open(scratch, "r+b") as file:
                header, digest = _hashed(file, progress)
                file.seek(_digest_offset(header))
                file.write(digest.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
        sync_directory(path.parent)
    except (OSError, safetensors.SafetensorError) as error:
        raise StateError(f"cannot write {path}: {error}; what was there is unchanged") from error


def sync_directory(directory: Path) -> None:
    """Make a rename durable, where the system lets a directory be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _describe(state: State) -> dict[str, Any]:
    return {
        "version": VERSION,
        "whole": state.whole,
        "fingerprint": state.fingerprint,
        "layers": [asdict(layer) for layer in state.layers],
        "keys": asdict(state.k_codec),
        "values": asdict(state.v_codec),
        "sequences": [row.seq for row in state.rows],
    }


def _tensors(state: State) -> dict[str, Tensor]:
    tensors = {}
    for i in state.keys:
        tensors[f"layers.{i}.k"] = state.keys[i].cpu().contiguous()
        tensors[f"layers.{i}.v"] = state.values[i].cpu().contiguous()
    for row in state.rows:
        name = f"seqs.{row.seq}."
        tensors[name + "positions"] = torch.tensor(row.positions, dtype=torch.int32)
        tensors[name + "tokens"] = torch.tensor(row.tokens, dtype=torch.int32)
        for g, column in enumerate(row.columns):
            tensors[f"{name}cells.{g}"] = torch.tensor(column, dtype=torch.int32)
        if row.axes is not None:
            tensors[name + "axes"] = torch.tensor(row.axes, dtype=torch.int32)
        for i, states in row.states.items():
            for j, tensor in enumerate(states):
                tensors[f"{name}states.{i}.{j}"] = tensor.cpu().contiguous()
    return tensors


# --- reading --------------------------------------------------------------------------------------------------------------------


def load(source: Target, progress: Progress | None = None) -> State:
    """Read and check a file, whoever wrote it.

    Raises:
        StateError: not a file of ours, damaged, or inconsistent in itself; says what is wrong.
    Cost: reads every byte twice (digest, data); memory at most the file's size.
    """
    try:
        if not isinstance(source, str | os.PathLike):
            data = source.read()
            with tempfile.TemporaryFile() as file:
                file.write(data)
                return _parse(file, lambda: safetensors.torch.load(data), progress)
        with open(source, "rb") as file:
            return _parse(file, lambda: _tensors_of(Path(source)), progress)
    except OSError as error:
        raise StateError(f"cannot read {source}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise StateError(f"not a valid safetensors file: {error}") from error


def _tensors_of(path: Path) -> dict[str, Tensor]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _parse(file: BinaryIO, read: Callable[[], dict[str, Tensor]], progress: Progress | None) -> State:
    header, digest = _hashed(file, progress)
    metadata = _header_json(header[8:]).get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("onekv"), str):
        raise StateError("not a file of onekv: it carries no such metadata")
    if metadata.get(_DIGEST) != digest:
        raise StateError("the file is damaged: its digest does not match its bytes")
    described = _header_json(metadata["onekv"].encode())
    version = described.get("version")
    if version != VERSION:
        raise StateError(f"the file has format version {version!r}; this onekv reads version {VERSION}")
    try:
        return _state(described, read())
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OneKVError) as error:
        raise error if isinstance(error, StateError) else StateError(f"the file contradicts itself: {error}") from error


def _hashed(file: BinaryIO, progress: Progress | None) -> tuple[bytes, str]:
    """The first bytes up to the end of the header, and the digest of the whole file with its own characters zeroed."""
    file.seek(0, os.SEEK_END)
    size = file.tell()
    file.seek(0)
    start = file.read(8)
    header = start + file.read(_header_length(start, size))
    at = _digest_offset(header)
    running = hashlib.sha256(header[:at] + _ZEROS.encode() + header[at + 64 :])
    done = len(header)
    while chunk := file.read(_CHUNK):
        running.update(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, size)
    return header, running.hexdigest()


def _header_length(start: bytes | bytearray, size: int) -> int:
    if len(start) < 8:
        raise StateError(f"the file is too short: {size} bytes")
    (length,) = struct.unpack("<Q", start)
    if length > min(size - 8, _MAX_HEADER):
        raise StateError(f"the file is cut or no file of ours: its header claims {length} bytes of {size}")
    return int(length)


def _digest_offset(header: bytes) -> int:
    """Where the digest's 64 characters are. A quote inside a JSON string is escaped, so this spelling occurs only as a key."""
    key = f'"{_DIGEST}":"'.encode()
    at = header.find(key)
    if at < 0 or header.find(key, at + 1) >= 0 or len(header) < at + len(key) + 64:
        raise StateError("not a file of onekv: it carries no digest")
    return at + len(key)


def _header_json(text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"the file's header is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise StateError("the file's header is not a JSON object")
    return parsed


def _state(described: dict[str, Any], tensors: dict[str, Tensor]) -> State:
    """Rebuild and check a state; what is missing or of a wrong type raises anything that `_parse` turns into a StateError."""
    if set(described) != _FIELDS:
        raise StateError(f"the file's description has the fields {sorted(described)}, expected {sorted(_FIELDS)}")
    layers = tuple(_layer(entry) for entry in described["layers"])
    windows, group_of = layer_groups(layers)
    whole, seqs = described["whole"], described["sequences"]
    if not isinstance(whole, bool) or not isinstance(described["fingerprint"], str):
        raise StateError("the file's description has a field of a wrong type")
    if any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in seqs) or len(set(seqs)) != len(seqs):
        raise StateError(f"sequence ids must be distinct and not negative, got {seqs}")
    if not whole and len(seqs) != 1:
        raise StateError(f"a file of one sequence names {len(seqs)}")
    state = State(layers, described["fingerprint"], whole, [], Codec(**described["keys"]), Codec(**described["values"]))
    dtypes = state.k_codec.dtype, state.v_codec.dtype
    counts: list[int | None] = [None] * len(windows)
    for i, layer in enumerate(layers):
        if layer.source is not None or not layer.has_cells:
            continue
        k, v = tensors.pop(f"layers.{i}.k"), tensors.pop(f"layers.{i}.v")
        g = group_of[i]
        count = counts[g] = k.shape[0] if counts[g] is None else counts[g]
        widths = state.k_codec.width(layer.head_dim), state.v_codec.width(layer.v_dim)
        expected = ([count, layer.num_kv_heads, widths[0]], [count, layer.num_kv_heads, widths[1]])
        if (list(k.shape), list(v.shape)) != expected:
            raise StateError(f"layer {i} holds {list(k.shape)} and {list(v.shape)}, its description says {expected}")
        if (k.dtype, v.dtype) != dtypes:
            raise StateError(f"layer {i} holds {k.dtype} and {v.dtype}, its description says {dtypes[0]} and {dtypes[1]}")
        state.keys[i], state.values[i] = k, v
    for seq in seqs:
        row = _row(seq, tensors, [count or 0 for count in counts], windows)
        state.rows.append(replace(row, states=_states(seq, tensors, layers) if row.positions.size else {}))
    if tensors:
        raise StateError(f"the file holds tensors nobody asked for: {sorted(tensors)[:3]}")
    for g, count in enumerate(counts):
        _check_cells(g, state.rows, count or 0)
    return state


def _row(seq: int, tensors: dict[str, Tensor], counts: list[int], windows: list[Window]) -> SavedRow:
    def take(name: str, shape: list[int] | None = None) -> Int32:
        tensor = tensors.pop(f"seqs.{seq}.{name}")
        if tensor.dtype != torch.int32 or (shape is not None and list(tensor.shape) != shape):
            raise StateError(f"seqs.{seq}.{name} is {tensor.dtype} {list(tensor.shape)}, expected int32 {shape or '[n]'}")
        return np.asarray(tensor.numpy())

    positions = take("positions")
    if positions.ndim != 1:
        raise StateError(f"positions of sequence {seq} have shape {list(positions.shape)}, expected [n]")
    n = positions.size
    tokens, columns = take("tokens", [n]), [take(f"cells.{g}", [n]) for g in range(len(counts))]
    axes = take("axes", [2, n]) if f"seqs.{seq}.axes" in tensors else None
    order = positions[None] if axes is None else np.stack([axes[1], axes[0], positions])
    if (order < 0).any() or not np.array_equal(np.lexsort(order), np.arange(n)):
        raise StateError(f"positions of sequence {seq} are negative or not ascending")
    if (tokens < -1).any():
        raise StateError(f"sequence {seq} holds the token id {tokens.min()}")
    for column, count, window in zip(columns, counts, windows, strict=True):
        held = column[column >= 0]
        if (column < -1).any() or (held >= count).any() or np.unique(held).size != held.size:
            raise StateError(f"sequence {seq} names cells that the file does not hold, or one twice")
        if window.is_full and held.size != n:
            raise StateError(f"sequence {seq} lacks cells of layers without a window")
    return SavedRow(seq, positions, tokens, columns, axes)


def _states(seq: int, tensors: dict[str, Tensor], layers: tuple[LayerSpec, ...]) -> dict[int, list[Tensor]]:
    states = {i: [tensors.pop(f"seqs.{seq}.states.{i}.{j}") for j in range(len(spec.states))] for i, spec in enumerate(layers)}
    for i, held in states.items():
        if any(t.dtype != torch.float32 or tuple(t.shape) != shape for t, shape in zip(held, layers[i].states, strict=True)):
            raise StateError(f"sequence {seq}, layer {i}: states {[tuple(t.shape) for t in held]} are not float32 {layers[i].states}")
    return {i: held for i, held in states.items() if held}


def _check_cells(group: int, rows: list[SavedRow], count: int) -> None:
    """Every cell belongs to someone, and holds one token at one position, whoever owns it."""
    content = np.full((4, count), -1, np.int64)  # position, y, x, token
    for row in rows:
        y, x = (row.positions, row.positions) if row.axes is None else row.axes
        held = row.columns[group] >= 0
        cells = row.columns[group][held]
        mine = np.stack([row.positions, y, x, row.tokens])[:, held]
        if ((content[0, cells] >= 0) & (content[:, cells] != mine).any(axis=0)).any():
            raise StateError(f"group {group}: a cell holds two tokens, or one at two positions")
        content[:, cells] = mine
    if (content[0] < 0).any():
        raise StateError(f"group {group}: {int((content[0] < 0).sum())} cells belong to no sequence")


def _layer(entry: dict[str, Any]) -> LayerSpec:
    window, rope = Window(**entry["window"]), entry["rope"]
    return LayerSpec(**{**entry, "window": window, "rope": None if rope is None else Rope(**rope)})


# --- comparing ------------------------------------------------------------------------------------------------------------------


def differences(state: State, layers: tuple[LayerSpec, ...], fingerprint: str) -> Iterator[str]:
    """Why a state does not belong to a cache of these layers; nothing if it does."""
    if len(state.layers) != len(layers):
        yield f"the file has {len(state.layers)} layers, the cache {len(layers)}"
        return
    for i, (saved, mine) in enumerate(zip(state.layers, layers, strict=True)):
        if saved != mine:
            yield f"layer {i} of the file is {saved}, of the cache {mine}"
            return
    if state.fingerprint != fingerprint:
        yield f"the file is of model {state.fingerprint!r}, the cache of {fingerprint!r}"
