"""A lean forward for Llama-shaped models: few calls of torch a layer, straight to the step's cells.

Owns the arithmetic of those families between the products, nothing else: the products are those that `linears` packed, rotary angles are
asked of the model's own module, cells are behind the sink. A family is served if every class in it is, exactly, one that is listed here
and nobody has put a hook on it; any other model runs through transformers' own code. Tests compare the two.

    rows h [T, E] float32, one layer:
      norm ─► q, k, v in one product ─► turn q and k ─► store, attend ─► product ─► h +=
      norm ─► gate, up in one product ─► act(gate) * up ─► product ─► h +=
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.smollm3 import modeling_smollm3 as smollm3

from onekv.attention import Score
from onekv.models.hooks import Hooked, Sink
from onekv.models.linears import Join, Packed, Product
from onekv.models.rotary import pinned
from onekv.storage import LayerSpec

_CHUNK: Final = 64  # positions whose angles are computed in one go: so their bits do not depend on how far the table reaches
_SERIAL: Final = 32768  # elements from which torch cuts an elementwise operation between threads, in the middle of a row


@dataclass(frozen=True)
class _Family:
    """The classes a served model is made of, and no other."""

    model: type
    layer: type
    attention: type
    mlp: type
    norm: type
    rotary: type
    embedding: type = nn.Embedding


_FAMILIES: Final = {
    family.model: family
    for family in (
        _Family(
            llama.LlamaForCausalLM,
            llama.LlamaDecoderLayer,
            llama.LlamaAttention,
            llama.LlamaMLP,
            llama.LlamaRMSNorm,
            llama.LlamaRotaryEmbedding,
        ),
        _Family(
            mistral.MistralForCausalLM,
            mistral.MistralDecoderLayer,
            mistral.MistralAttention,
            mistral.MistralMLP,
            mistral.MistralRMSNorm,
            mistral.MistralRotaryEmbedding,
        ),
        _Family(
            qwen2.Qwen2ForCausalLM,
            qwen2.Qwen2DecoderLayer,
            qwen2.Qwen2Attention,
            qwen2.Qwen2MLP,
            qwen2.Qwen2RMSNorm,
            qwen2.Qwen2RotaryEmbedding,
        ),
        _Family(
            qwen3.Qwen3ForCausalLM,
            qwen3.Qwen3DecoderLayer,
            qwen3.Qwen3Attention,
            qwen3.Qwen3MLP,
            qwen3.Qwen3RMSNorm,
            qwen3.Qwen3RotaryEmbedding,
        ),
        _Family(
            smollm3.SmolLM3ForCausalLM,
            smollm3.SmolLM3DecoderLayer,
            smollm3.SmolLM3Attention,
            smollm3.SmolLM3MLP,
            smollm3.SmolLM3RMSNorm,
            smollm3.SmolLM3RotaryEmbedding,
        ),
        _Family(
            gemma3.Gemma3ForCausalLM,
            gemma3.Gemma3DecoderLayer,
            gemma3.Gemma3Attention,
            gemma3.Gemma3MLP,
            gemma3.Gemma3RMSNorm,
            gemma3.Gemma3RotaryEmbedding,
            gemma3.Gemma3TextScaledWordEmbedding,
        ),
    )
}


def serves(model: Any) -> bool:
    """Whether a model, its weights not packed yet, can run through `Fused`."""
    family = _FAMILIES.get(type(model))
    if family is None or any(_is_changed(module) for module in model.modules()):
        return False
    if getattr(model.config, "use_bidirectional_attention", False):
        return False
    inner = model.model
    expected: list[tuple[Any, type]] = [
        (inner.embed_tokens, family.embedding),
        (inner.norm, family.norm),
        (inner.rotary_emb, family.rotary),
        (model.lm_head, nn.Linear),
    ]
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        expected += [(layer, family.layer), (attention, family.attention), (mlp, family.mlp)]
        expected += [(child, family.norm) for name, child in layer.named_children() if name not in ("self_attn", "mlp")]
        expected += [(child, family.norm if name in ("q_norm", "k_norm") else nn.Linear) for name, child in attention.named_children()]
        expected += [(child, nn.Linear) for name, child in mlp.named_children() if name != "act_fn"]
    return all(type(module) is kind for module, kind in expected)


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody watches or replaces what this module computes."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" in module.__dict__ or any(len(one) for one in hooks)


def joins(model: Any) -> list[Join]:
    """The linear layers that a served model multiplies as one."""
    found = []
    for layer in model.model.layers:
        found += [Join(layer.self_attn, ("q_proj", "k_proj", "v_proj")), Join(layer.mlp, ("gate_proj", "up_proj"))]
    return found


class Fused:
    """The lean forward of one model.

    Args:
        hooked: a model that `serves` accepted and whose linear layers were packed with `joins` since
        deterministic: a row has the same bits whatever rows come with it
    """

    def __init__(self, hooked: Hooked, deterministic: bool) -> None:
        model: Any = hooked.model
        inner = model.model
        config = model.config
        rows_at_once = _SERIAL - 1 if deterministic else 0
        tables: dict[str | None, _Angles] = {}
        self._layers = [_Layer(i, layer, tables, hooked, rows_at_once) for i, layer in enumerate(inner.layers[: config.num_hidden_layers])]
        self._tables = tables
        self._embed: Callable[[Tensor], Tensor] = inner.embed_tokens
        self._norm = _Norm(inner.norm)
        self._head: Product = model.lm_head.product
        self._num_tokens = int(model.lm_head.out_features)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def run(
        self,
        sink: Sink,
        layers: Sequence[LayerSpec],
        positions: Tensor,
        *,
        tokens: Tensor | None = None,
        embeddings: Tensor | None = None,
        keep: Tensor,
    ) -> Tensor:
        """One forward over packed rows.

        Shapes:
            positions [T] int64; tokens [T] int64, or embeddings [T, E]; keep [n] int64 -> float32 [n, V]
        """
        with torch.inference_mode():
            if tokens is not None:
                h = self._embed(tokens).float()
            else:
                h = torch.as_tensor(embeddings).to(torch.float32, copy=True)  # changed in place below
            farthest = int(positions.max())
            for table in self._tables.values():
                table.look_up(positions, farthest)
            last = len(self._layers) - 1
            for i, layer in enumerate(self._layers):
                # Nothing after the last layer's attention reads rows whose logits nobody wants.
                h = layer(h, sink, layers[i], keep if i == last else None)
            if not keep.shape[0]:
                return h.new_zeros(0, self._num_tokens)
            logits = self._head(self._norm(h).to(self._head.dtype)).float()
            if self._softcap is not None:
                logits = torch.cat([torch.tanh(row / self._softcap) * self._softcap for row in torch.split(logits, 1)])
            return logits


class _Norm:
    """weight * x / sqrt(mean(x * x) + eps) over the last axis, in float32.

    Written as sqrt(E) weight * x / sqrt(sum(x * x) + E eps) in calls that torch does not split further: F.rms_norm is eight of them, and
    takes twice the time for one row.
    """

    def __init__(self, *modules: Any) -> None:
        weights = [module.weight.detach().float() + (1.0 if isinstance(module, gemma3.Gemma3RMSNorm) else 0.0) for module in modules]
        width = weights[0].shape[0]
        self.weight = torch.stack(weights).mul_(math.sqrt(width)).squeeze(0)
        self._floor = width * float(getattr(modules[0], "eps", None) or modules[0].variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x * size.square_().add_(self._floor).rsqrt_()
        return x.mul_(self.weight)


class _Angles:
    """Cosines and sines of the positions of a forward, from the model's own rotary module.

    The table grows with the farthest position seen: 8 bytes a position and head dimension.
    """

    def __init__(self, hooked: Hooked, kind: str | None) -> None:
        self._hooked = hooked
        self._rotary: Any = hooked.model.model.rotary_emb
        self._named = {} if kind is None else {"layer_type": kind}
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)  # the first half negative: half-turned heads are added
        self.cos = self.sin = self._cos

    def look_up(self, positions: Tensor, farthest: int) -> None:
        """Set `cos` and `sin` [T, 1, D] for the rows of a forward."""
        if farthest >= self._cos.shape[0]:
            self._grow(max(farthest + 1, 2 * self._cos.shape[0]))
        self.cos = self._cos[positions]
        self.sin = self._sin[positions]

    def _grow(self, count: int) -> None:
        like = torch.empty(0, dtype=torch.float32)
        start, parts = self._cos.shape[0], [(self._cos, self._sin)] if self._cos.shape[0] else []
        with pinned(self._hooked.pins):
            for first in range(start, count, _CHUNK):
                cos, sin = self._rotary(like, position_ids=torch.arange(first, first + _CHUNK)[None], **self._named)
                half = sin.shape[-1] // 2
                parts.append((cos[0, :, None], torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)))
        self._cos, self._sin = (torch.cat([part[i] for part in parts]) for i in range(2))


class _Layer:
    """One decoder layer."""

    def __init__(self, index: int, module: Any, tables: dict[str | None, _Angles], hooked: Hooked, rows_at_once: int) -> None:
        attention, mlp = module.self_attn, module.mlp
        is_gemma = isinstance(module, gemma3.Gemma3DecoderLayer)
        self._index = index
        self._norm = _Norm(module.input_layernorm)
        self._qkv = _product(attention.q_proj)
        self._out = _product(attention.o_proj)
        self._width = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // self._width
        self._turned = self._heads + attention.k_proj.out_features // self._width  # heads of q and k together
        self._score = Score(float(attention.scaling))
        self._head_norm: _Norm | None = None
        if hasattr(attention, "q_norm"):
            groups = self._turned - self._heads
            self._head_norm = _Norm(*[attention.q_norm] * self._heads, *[attention.k_norm] * groups)  # a weight for each head
        self._angles: _Angles | None = None
        if getattr(attention, "use_rope", True):
            kind = attention.layer_type if is_gemma else None
            self._angles = tables.setdefault(kind, _Angles(hooked, kind))
        self._mlp_norm = _Norm(module.pre_feedforward_layernorm if is_gemma else module.post_attention_layernorm)
        self._after_attention = _Norm(module.post_attention_layernorm) if is_gemma else None
        self._after_mlp = _Norm(module.post_feedforward_layernorm) if is_gemma else None
        self._gate_up = _product(mlp.gate_proj)
        self._down = _product(mlp.down_proj)
        self._gate_width = int(mlp.gate_proj.out_features)
        self._act: Callable[[Tensor], Tensor] = F.silu if type(mlp.act_fn) is nn.SiLU else mlp.act_fn
        self._rows_at_once = max(1, rows_at_once // self._gate_width) if rows_at_once else None

    def __call__(self, h: Tensor, sink: Sink, spec: LayerSpec, keep: Tensor | None) -> Tensor:
        """h [T, E], which is changed -> [T, E], or the rows to keep."""
        rows, heads, turned = h.shape[0], self._heads, self._turned
        qkv = self._qkv(self._norm(h).to(self._qkv.dtype)).view(rows, -1, self._width)  # [T, H + 2 G, D]
        qk = self._turn(qkv[:, :turned]).to(qkv.dtype)
        sink.store(self._index, qk[:, heads:], qkv[:, turned:])
        out = sink.attend(self._index, self._index, spec.window, qk[:, :heads], self._score)
        out = out.reshape(rows, -1)
        if keep is not None:
            out, h = out[keep], h[keep]
            if not keep.shape[0]:
                return h
        self._add(h, self._out(out.to(self._out.dtype)), self._after_attention)
        mixed = self._mix(self._gate_up(self._mlp_norm(h).to(self._gate_up.dtype)))
        self._add(h, self._down(mixed.to(self._down.dtype)), self._after_mlp)
        return h

    def _turn(self, x: Tensor) -> Tensor:
        """q and k [T, H + G, D], normed if the family does, turned to their positions in float32.

        One multiplication or addition a call: each is rounded alone, so that a result does not depend on where torch cuts the rows.
        """
        if self._head_norm is not None:
            x = self._head_norm(x.float())
        if self._angles is None:
            return x
        return (x * self._angles.cos).add_(x.roll(self._width // 2, -1) * self._angles.sin)

    def _mix(self, gate_up: Tensor) -> Tensor:
        """act(gate) * up [T, I] of [T, 2 I]."""
        gate, up = gate_up[:, : self._gate_width], gate_up[:, self._gate_width :]
        if self._rows_at_once is None:
            return self._act(gate).mul_(up)
        # Vector and scalar code of an activation may round differently: cut between rows only, never where a thread's share ends.
        return torch.cat([self._act(some) for some in torch.split(gate, self._rows_at_once)]).mul_(up)

    @staticmethod
    def _add(h: Tensor, change: Tensor, norm: _Norm | None) -> None:
        h.add_(change if norm is None else norm(change.float()))


def _product(module: Packed) -> Product:
    return module.product
