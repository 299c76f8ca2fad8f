"""A model without its weights: built from its config alone, and run far enough to see what its layers store.

Owns the trick: weights live on torch's meta device, and whatever is computed from a weight is zeros of the right shape. All else
(positions, masks, what passes from layer to layer) is computed as always, so that the probe of a loaded model sees the same layers here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from onekv.errors import ConfigError, OneKVError, UnsupportedModel
from onekv.models import gguf, linears
from onekv.models.hf import Model, gguf_file, locate
from onekv.storage import LayerSpec

_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")
_READS: Final = ("item", "tolist", "__bool__", "__int__", "__float__")  # calls that take numbers out of a tensor


@dataclass(frozen=True)
class Skeleton:
    """What a model's config says about its memory.

    Attributes:
        name:           the model's class
        layers:         one spec per layer, without ropes
        weights_nbytes: bytes of all weights and buffers, shared ones once; of 4-bit weights that a GGUF holds, as if they were rounded here
        max_positions:  the model's context
    """

    name: str
    layers: tuple[LayerSpec, ...]
    weights_nbytes: int
    max_positions: int


def skeleton(name: str, *, weights: str = "auto") -> Skeleton:
    """Look at a model as `load_model` would load it, without its weights: a GGUF's header, or a directory's or hub id's config.

    Layers that only weights can refuse (attention that depends on the order of keys) are not refused here.

    Args:
        name:    as for `load_model`
        weights: as for `load_model`
    Raises:
        ConfigError: nothing by that name, or a setting that is not available.
        UnsupportedModel: a model that cannot be served, or not be seen through without weights.
    Cost: under a second for a small model, some seconds for a hundred layers; no memory to speak of.
    """
    kind = linears.resolve(weights, _CPU)
    file = gguf_file(name)
    auto_model: Any = AutoModelForCausalLM
    try:
        if file is not None:
            config = gguf.config_of(file)
        else:
            source, is_local, _ = locate(name)
            config = AutoConfig.from_pretrained(source, local_files_only=is_local)
        with _META:
            # Of the ways to run experts, the one whose shapes follow from shapes alone.
            model = auto_model.from_config(config, dtype=linears.dtype_of(kind), experts_implementation="batched_mm")
    except (OSError, ValueError) as error:
        if isinstance(error, OneKVError):
            raise
        raise ConfigError(f"cannot read the config of {name}: {str(error).strip().splitlines()[0]}") from error
    return skeleton_of(model, kind)


def skeleton_of(model: PreTrainedModel, kind: linears.Kind | None = None) -> Skeleton:
    """As `skeleton`, of a model whose weights are on the meta device. kind: how `load_model` would pack them; None: not at all."""
    with _ZeroWeights():
        mine = Model(model)
        try:
            layers = mine.layers
        except OneKVError:
            raise
        except Exception as error:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be seen through without its weights: {type(error).__name__}: {error}"
            ) from error
    return Skeleton(type(model).__name__, layers, _nbytes(model, kind), mine.max_positions)


def _nbytes(model: PreTrainedModel, kind: linears.Kind | None) -> int:
    """Bytes of all weights and buffers. Packed layers are counted as `linears.pack` keeps them; tied embeddings keep theirs besides."""
    kept = {id(t): t for t in (*model.parameters(), *model.buffers())}
    if kind is None:
        return sum(t.nbytes for t in kept.values())
    packed = {id(module.weight): module.weight for module in model.modules() if type(module) is nn.Linear}
    others = {id(t) for module in model.modules() if type(module) is not nn.Linear for t in module.parameters(recurse=False)}
    head: Any = cast(Any, model).get_output_embeddings()
    rest = sum(t.nbytes for key, t in kept.items() if key in others or key not in packed)
    return rest + sum(linears.packed_nbytes(weight, kind, is_head=weight is head.weight) for weight in packed.values())


class _ZeroWeights(TorchFunctionMode):
    """Tensors on the meta device are weights. They claim to be on cpu; with one another they make weights, with others zeros."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        if not any(t.is_meta for t in tensors):
            return func(*given[0], **given[1])
        if func == torch.Tensor.device.__get__:
            return _CPU
        if func.__name__ in _READS:
            return func(torch.zeros_like(args[0], device=_CPU), *args[1:])
        args, kwargs = tree_map(_on_meta, given)
        made = func(*args, **kwargs)
        return made if all(t.is_meta for t in tensors) else tree_map(_zeros, made)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to(_META)
    return _META if isinstance(value, torch.device) else value


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value, device=_CPU) if isinstance(value, Tensor) else value
