"""Model: an unmodified transformers model that runs steps of a cache. Loading, reading its layers, one forward.

Owns the order of one forward and nothing of the bookkeeping: cells belong to the cache, tokens to `text`, the meeting with transformers'
code to `hooks`. The model's own weights, code and config are left as they were found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from onekv.attention import Score
from onekv.attention.sdpa import attend_to_entries
from onekv.cache import KVCache, Step
from onekv.core.batch import Batch
from onekv.core.loops import FARTHEST
from onekv.core.window import Window
from onekv.errors import BatchError, ConfigError, UnsupportedModel
from onekv.models import gguf, linears
from onekv.models.fused import Fused, joins, serves
from onekv.models.hooks import Hooked, RecurrentState, Sink
from onekv.models.probe import read_layers, read_ropes, read_states
from onekv.models.pull import NAMED_MODELS
from onekv.models.rows import dependence
from onekv.models.text import Text
from onekv.storage import LayerSpec, owning_layers

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Config fields that say where a model came from or how it is run, not what it computes.
_NOT_IDENTITY: Final = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "quantization_config",
)
_SAMPLES: Final = 16
# What `load_model` packed a transformers model for; by reference only, so that neither keeps the other.
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[Model]] = weakref.WeakKeyDictionary()


class Model:
    """A transformers causal language model and its tokenizer.

    Args:
        model:     any causal language model of transformers; put into evaluation mode, otherwise left as it is
        tokenizer: its tokenizer; without one `text` raises
    Raises:
        ConfigError: not a transformers causal language model.
        UnsupportedModel: its forward takes no cache. Whatever else cannot be served is found at the first use of `layers`.

    Rotary frequencies that transformers changes with the length of its input (dynamic NTK, LongRoPE) are fixed, during a forward of this
    class only, to those of the whole context.

    Attributes:
        weights: how `load_model` packed the weights; None: they are the transformers model's own
        deterministic: whether a row's result has the same bits whatever other rows are evaluated with it, attention aside
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(f"Model takes a transformers model, got {type(model).__name__}")
        if cast(Any, model).get_output_embeddings() is None:
            raise ConfigError(f"{type(model).__name__} has no language model head; load it with AutoModelForCausalLM")
        self._hooked = Hooked(cast(Any, model).eval())
        self._tokenizer = tokenizer
        self.weights: linears.Kind | None = None
        self.deterministic = False
        self._packed_bytes = 0
        self._fused: Fused | None = None
        self._matching: weakref.WeakSet[KVCache] = weakref.WeakSet()

    @property
    def transformers_model(self) -> PreTrainedModel:
        """The model this was built from. With packed weights it still runs, somewhat slower, but cannot be trained or saved."""
        return self._hooked.model

    @property
    def config(self) -> Any:
        """transformers' config of the model."""
        return self._hooked.model.config

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._hooked.model.device

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: token ids are below it."""
        embedding: Any = self._hooked.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    @property
    def max_positions(self) -> int:
        """The model's context: positions are below it. Where the config names no limit, the most a cache can hold."""
        limit = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else FARTHEST + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and buffers, packed ones as they are kept; shared ones once."""
        model = self._hooked.model
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers())
        }
        return sum(storages.values()) + self._packed_bytes

    @cached_property
    def text(self) -> Text:
        """The tokenizer.

        Raises:
            ConfigError: the model was built without one.
        """
        if self._tokenizer is None:
            raise ConfigError("this model has no tokenizer; pass one to Model(model, tokenizer), or feed token ids")
        generation = self._hooked.model.generation_config
        named = [self.config.get_text_config(decoder=True).eos_token_id, None if generation is None else generation.eos_token_id]
        eos_ids = [i for ids in named for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]
        return Text(self._tokenizer, eos_ids)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One spec per layer, found by a probe.

        Raises:
            UnsupportedModel: names the model and the part that cannot be served exactly.
        Cost: three forwards of two or three rows, once.
        """
        return self._probed[0]

    @property
    def packing(self) -> Literal["packed", "equal"]:
        """How rows of several sequences share a forward: "packed" takes any rows in any order, "equal" as many of each sequence."""
        return "equal" if self._states[0] else "packed"

    @property
    def row_by_row(self) -> bool:
        """True iff a sequence can take only one row a forward once it has a recurrent state; `KVCache` plans accordingly."""
        return self._states[1]

    @property
    def no_shift(self) -> str | None:
        """Why stored keys of this model cannot be moved to other positions; None if they can."""
        return self._probed[1]

    @cached_property
    def _probed(self) -> tuple[tuple[LayerSpec, ...], str | None]:
        return read_ropes(self._hooked, read_layers(self._hooked, self.vocab_size, self.max_positions), self.max_positions)

    @cached_property
    def _states(self) -> tuple[dict[int, RecurrentState], bool]:
        _ = self.layers  # finds which layers are recurrent
        return read_states(self._hooked, self.vocab_size, self.max_positions)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the model: equal for the same config and weights, whatever dtype or packing they were loaded in. 16 hex digits.

        So sequences saved with one kind of weights go on with another; their keys and values then differ by the rounding of the weights.
        """
        config = {k: v for k, v in self.config.to_diff_dict().items() if k not in _NOT_IDENTITY}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, weight in sorted(self._hooked.model.named_parameters()):
            flat = weight.detach().reshape(-1)
            picks = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long().to(flat.device)
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            digest.update(flat[picks].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def forward(self, step: Step) -> Tensor:
        """Evaluate the rows of an open step: every layer stores its keys and values at the step's cells and attends over them.

        Returns:
            logits float32 [outputs in the step, V], in the order of the step's rows, on the model's device; [0, V] if none is wanted.
        Raises:
            UnsupportedModel: the model attends in a way that cannot be served exactly.
            ConfigError: the cache was built for other layers, or without the model's `row_by_row`.
            BatchError: a position beyond the model's context, or positions of several components.
        Any exception leaves the model as it was; leaving the `with step:` block by it undoes the step.
        """
        self._check_cache(step.plan.cache)
        ubatch = step.ubatch
        positions = self._positions(ubatch.positions)
        keep = torch.from_numpy(np.flatnonzero(ubatch.outputs)).to(self.device)
        sink = _StepSink(step, self._hooked, self.layers, self._owner)
        kinds, _ = self._states
        states = {i: kind.filled(step.read_states(i)) for i, kind in kinds.items()}
        num_seqs = ubatch.num_sets if kinds else 1
        if ubatch.tokens is not None:
            tokens = torch.from_numpy(ubatch.tokens).to(self.device)
            logits, after = self._evaluate(sink, positions, keep, num_seqs, states, tokens=tokens)
        else:
            embeddings = torch.as_tensor(ubatch.embeddings).to(self.device, self._hooked.model.dtype)
            logits, after = self._evaluate(sink, positions, keep, num_seqs, states, embeddings=embeddings)
        sink.check()
        for i, state in after.items():
            step.store_states(i, state.tensors)
        # Made outside of inference mode, so that a sampler may change it in place.
        return logits.to(torch.float32, copy=True)

    def _evaluate(
        self,
        sink: Sink,
        positions: Tensor,
        keep: Tensor,
        num_seqs: int = 1,
        states: Mapping[int, RecurrentState] | None = None,
        **rows: Tensor,
    ) -> tuple[Tensor, dict[int, RecurrentState]]:
        """rows: tokens [T] or embeddings [T, E] -> logits [n, V], and recurrent states after the rows."""
        if self._fused is not None:
            return self._fused.run(sink, self.layers, positions, keep=keep, **rows), {}
        running = self._hooked.begin(sink, positions, self._shared, num_seqs, states)
        return self._hooked.run(running, keep=keep, **rows), running.states

    def _pack(self, kind: linears.Kind, blocks: linears.Blocks | None, deterministic: bool) -> None:
        """Pack the weights, once. The transformers model must be nobody else's.

        Raises:
            UnsupportedModel: deterministic, and rows of this family depend on each other by more than attention.
        """
        model = self._hooked.model
        if deterministic and self._hooked.recurrent:
            raise UnsupportedModel(f"{self._hooked.name}: deterministic=True cannot be kept by recurrent layers: their rows come in parts")
        _ = self.fingerprint  # of the weights as they were loaded
        is_fused = serves(model)
        found = joins(model) if is_fused else []
        self._packed_bytes = linears.pack(model, kind, joins=found, blocks=blocks, deterministic=deterministic)
        if is_fused:
            self._fused = Fused(self._hooked, deterministic)
        self.weights, self.deterministic = kind, deterministic
        if deterministic:
            differs = dependence(
                lambda sink, tokens, positions, keep: self._evaluate(sink, positions, keep, tokens=tokens)[0],
                self.vocab_size,
                self.max_positions,
            )
            if differs is not None:
                raise UnsupportedModel(f"{self._hooked.name}: deterministic=True cannot be kept; not equal to the bit: {differs}")

    def extend(self, cache: KVCache, seqs: Sequence[Any], tokens: Sequence[Sequence[int]], *, max_ubatch: int = 512) -> Tensor:
        """Feed each sequence its next tokens, all in one batch.

        Args:
            seqs:   sequence ids or Sequences, no two equal
            tokens: one list of token ids per sequence, none empty
        Returns:
            float32 [S, V]: the logits after each sequence's last token, in the order of `seqs`.
        Raises:
            BatchError, WindowLost, CacheFull: from `KVCache.plan`; and what `forward` raises. Every sequence is then as long as before.
        """
        if len(seqs) != len(tokens):
            raise BatchError(f"extend got {len(seqs)} sequences and {len(tokens)} lists of tokens")
        for seq, new in zip(seqs, tokens, strict=True):
            if len(new) == 0:
                raise BatchError(f"extend got no tokens for {seq!r}")
        counts = np.array([len(new) for new in tokens])
        ends = np.cumsum(counts) - 1  # each sequence's last row in the batch
        lengths = {int(seq): cache.seq_pos_max(seq) + 1 for seq in seqs}
        if len(lengths) != len(seqs):
            raise BatchError(f"extend got a sequence twice: {list(seqs)}")
        is_last = np.zeros(counts.sum(), np.bool_)
        is_last[ends] = True
        batch = Batch(np.concatenate([np.asarray(t) for t in tokens]), seqs=np.repeat([*lengths], counts), outputs=is_last)
        plan = cache.plan(batch, max_ubatch=max_ubatch)
        last: list[Tensor | None] = [None] * len(seqs)
        try:
            for step in plan:
                with step:
                    logits = self.forward(step)
                rows = step.ubatch.rows[step.ubatch.outputs]
                for row, place in zip(logits, np.searchsorted(ends, rows), strict=True):
                    last[place] = row
        except BaseException:
            for seq, length in lengths.items():
                cache.seq_rm(seq, length, -1)
            raise
        return torch.stack([row for row in last if row is not None])

    def __repr__(self) -> str:
        weights = "" if self.weights is None else f"{self.weights} weights, "
        return f"Model({self._hooked.name}, {weights}{self._hooked.model.dtype}, {self.device})"

    @cached_property
    def _owner(self) -> list[int]:
        """For each layer the layer whose keys and values it reads."""
        return owning_layers(self.layers)

    @cached_property
    def _shared(self) -> frozenset[int]:
        """Layers whose keys and values a later layer reads."""
        return frozenset(owner for layer, owner in enumerate(self._owner) if owner not in (layer, -1))

    def _positions(self, positions: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
        """[T] int64 on the model's device."""
        if positions.ndim != 1:
            raise BatchError(f"{self._hooked.name} takes one position a row, got {positions.shape[0]} components")
        if int(positions.max()) >= self.max_positions:
            row = int(positions.argmax())
            raise BatchError(
                f"row {row} has position {positions[row]}, beyond the model's context of {self.max_positions} positions",
                row=row,
                given=int(positions[row]),
            )
        return torch.from_numpy(positions.astype(np.int64)).to(self.device)

    def _check_cache(self, cache: KVCache) -> None:
        if cache in self._matching:
            return
        mine, theirs = _geometry(self.layers), _geometry(cache.layers)
        if mine != theirs:
            if len(mine) != len(theirs):
                raise ConfigError(f"the cache has {len(theirs)} layers, the model {len(mine)}; build it with cache_for(model, ...)")
            layer = next(i for i in range(len(mine)) if mine[i] != theirs[i])
            raise ConfigError(
                f"layer {layer} of the cache is {cache.layers[layer]}, of the model {self.layers[layer]}; "
                "build it with cache_for(model, ...)"
            )
        if self.row_by_row and not cache.config.row_by_row:
            raise ConfigError(
                f"{self._hooked.name} takes one row at a time; build the cache with row_by_row=True, or by cache_for(model, ...)"
            )
        self._matching.add(cache)


def _geometry(layers: Sequence[LayerSpec]) -> list[tuple[Any, ...]]:
    """What must agree between a model and a cache: heads, widths, window, states, owner."""
    return [
        (spec.num_kv_heads, spec.head_dim, spec.v_dim, spec.window, spec.states, owner)
        for spec, owner in zip(layers, owning_layers(layers), strict=True)
    ]


class _StepSink:
    """Sends a forward's tensors to a step, after comparing what each layer does with what the probe saw."""

    def __init__(self, step: Step, hooked: Hooked, layers: Sequence[LayerSpec], owner: Sequence[int]) -> None:
        self._step = step
        self._model = hooked.name
        self._gathers = hooked.gathers
        self._attends_itself = hooked.attends_itself
        self._layers = layers
        self._owner = owner
        self._attended: set[int] = set()

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        self._step.store(layer, k, v)
        if self._attends_itself:
            self._attended.add(layer)
        return self._step._gather(layer) if layer in self._gathers else None

    def attend(self, layer: int, origin: int, window: Window, q: Tensor, score: Score) -> Tensor:
        if layer >= len(self._layers) or origin != self._owner[layer] or window != self._layers[layer].window:
            raise UnsupportedModel(
                f"{self._model}, layer {layer}: attends to layer {origin} under {window}, and did otherwise when it was probed"
            )
        self._attended.add(layer)
        return self._step.attend(layer, q, scale=score.scale, softcap=score.softcap, sinks=score.sinks)

    def attend_to(self, layer: int, window: Window, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        if layer not in self._gathers or window != self._layers[layer].window:
            raise UnsupportedModel(
                f"{self._model}, layer {layer}: attends under {window} to keys it did not store, and did otherwise when it was probed"
            )
        self._attended.add(layer)
        return attend_to_entries(q, k, v, self._step._entries(layer), score)

    def visible(self, window: Window) -> Tensor:
        first = next(i for i, spec in enumerate(self._layers) if spec.has_cells)
        if window != self._layers[first].window:
            raise UnsupportedModel(f"{self._model}: asks for a mask of {window}, and did otherwise when it was probed")
        return self._step._entries(first).mask

    def check(self) -> None:
        """Every layer that has cells has attended, or has been handed what it attends to.

        Raises:
            UnsupportedModel: names the layers that did not.
        """
        idle = sorted({i for i, spec in enumerate(self._layers) if spec.has_cells} - self._attended)
        if idle:
            raise UnsupportedModel(f"{self._model}: layers {idle} did not attend")


def load_model(
    name_or_path: str | Path, *, weights: str = "auto", deterministic: bool = False, device: str | torch.device = "cpu"
) -> Model:
    """Load a model and its tokenizer.

    Args:
        name_or_path: a .gguf file, a directory in transformers' format, the name of a model fetched by `onekv pull`, or a name on the
            Hugging Face hub (needs the network unless it is in the local hub cache)
        weights: how weights are kept and multiplied. On cpu they are packed, so that the model can no longer be trained or saved.
            "float32":  4 bytes a weight.
            "bfloat16": 2 bytes a weight; embeddings, norms and activations too, as transformers does.
            "int4":     groups of 32 weights in 4 bits; a GGUF's 4-bit blocks are taken over without rounding their integers again, the
                        output layer and what the file has in more bits are kept in 8. Where the processor has bfloat16, many rows are
                        multiplied in it, with another copy of the weights. cpu only.
            "auto":     bfloat16 where the processor has instructions for it and the model runs on cpu, else float32.
        deterministic: a row has the same bits whatever other rows are evaluated with it, and however many; attention is the cache's
            part (`KVCache(deterministic=True)`). One weight kernel for every number of rows: int4 for all of them. cpu only.
    Raises:
        ConfigError: nothing by that name, a damaged file, or a setting that is not available; says what to do.
        UnsupportedModel: a GGUF whose metadata holds something the conversion would lose, or a family that cannot be deterministic.
    Cost: a GGUF is converted at its first load (some 10 s for 135M weights) and kept under `home()/converted`.
    """
    device = torch.device(device)
    kind = linears.resolve(weights, device)
    if deterministic and device.type != "cpu":
        raise ConfigError(f"deterministic=True is kept on cpu only, the device is {device}")
    source, is_local, blocks_path = locate(str(name_or_path))
    try:
        with gguf.quiet() if is_local else contextlib.nullcontext():
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=linears.dtype_of(kind), local_files_only=is_local)
            tokenizer = None
            if not is_local or any((Path(source) / name).exists() for name in _TOKENIZER_FILES):
                tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=is_local)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load {name_or_path}: {str(error).strip().splitlines()[0]}") from error
    loaded = Model(model.to(device), tokenizer)
    if device.type == "cpu":
        blocks = gguf.Blocks(blocks_path, Path(source), model) if kind == "int4" and blocks_path is not None else None
        loaded._pack(kind, blocks, deterministic)
        _loaded[model] = weakref.ref(loaded)
    return loaded


def loaded_as(model: PreTrainedModel) -> Model | None:
    """The living Model that `load_model` packed a transformers model for; None if there is none."""
    reference = _loaded.get(model)
    return None if reference is None else reference()


def gguf_file(name: str) -> Path | None:
    """The GGUF file a name stands for, there or not; None if it stands for something else.

    Raises:
        ConfigError: a model that `onekv pull` fetches and has not fetched.
    """
    if name in NAMED_MODELS:
        path = NAMED_MODELS[name].path
        if not path.is_file():
            raise ConfigError(f"{name} is not on this machine; fetch it with: onekv pull {name}")
        return path
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" else None


def locate(name: str) -> tuple[str, bool, Path | None]:
    """What to give to from_pretrained, whether it is on this machine, and the GGUF file it was converted from: at its first use."""
    file = gguf_file(name)
    if file is not None:
        return str(gguf.converted(file)), True, file
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json; it is no model directory")
        return str(path), True, None
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(f"there is no {path}")
    return name, False, None
