"""Packed products against torch.nn.functional.linear, blocks of GGUF files against their dequantised weights, and rows that do not depend
on each other, to the bit."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from onekv import Batch
from onekv.errors import ConfigError, OneKVError, UnsupportedModel
from onekv.models import Model, cache_for, gguf as gguf_files, linears, load_model
from onekv.models.rows import dependence
from packed import alone

Tiny = Callable[..., PreTrainedModel]
Write = Callable[..., Path]
Tokens = Callable[..., list[list[int]]]

WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 112, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _says_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_said", set())


@pytest.fixture
def saved(tiny: Tiny, tmp_path: Path) -> Callable[..., str]:
    """Builds a directory of a tiny model."""

    def build(name: str, **changes: Any) -> str:
        tiny(name, **changes).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return build


@pytest.fixture
def bfloat16_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies bfloat16, played by torch's plain product."""
    monkeypatch.setattr(linears, "has_bfloat16", lambda: True)
    monkeypatch.setattr(linears, "_pack_onednn", lambda weight: weight)
    monkeypatch.setattr(linears, "_multiply_onednn", F.linear)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blocks(kind: Type, rows: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows of random quantised blocks."""
    if kind != Type.Q4_K:
        return gguf.quants.quantize(random(rows, width, seed=seed).numpy() * 0.05, kind)
    rng = np.random.default_rng(seed)  # the gguf package does not quantise this one
    raw = rng.integers(0, 256, (rows, width // 256, 144), dtype=np.uint8)
    raw[..., :4] = rng.uniform(0.0005, 0.002, (rows, width // 256, 2)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


READ: dict[Type, Callable[[Any], linears.Groups]] = {
    Type.Q4_0: gguf_files._q4_0,
    Type.Q4_1: gguf_files._q4_1,
    Type.Q4_K: gguf_files._q4_k,
    Type.Q8_0: gguf_files._q8_0,
}


# --- products -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "out", "width"), [(1, 33, 40), (5, 96, 64), (64, 128, 100)])
def test_a_packed_float32_product_equals_torchs(rows: int, out: int, width: int, has_bias: bool) -> None:
    weight, x, bias = random(out, width), random(rows, width, seed=1), random(out, seed=2) if has_bias else None
    product = linears.floating(weight, bias, torch.float32)
    assert isinstance(product, linears.OneDNN)
    assert (product(x) - F.linear(x, weight, bias)).abs().max() < 1e-4
    assert product.nbytes == out * width * 4


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_bfloat16_product_equals_that_of_the_rounded_weight(has_bias: bool) -> None:
    weight, x, bias = random(96, 64), random(9, 64, seed=1, dtype=torch.bfloat16), random(96, seed=2) if has_bias else None
    product = linears.floating(weight, bias, torch.bfloat16)
    got = product(x.to(product.dtype)).float()
    expected = F.linear(x.float(), weight.bfloat16().float(), None if bias is None else bias.bfloat16().float())
    assert (got - expected).abs().max() < 2**-8 * expected.abs().max()
    # The negative control: the weight that was not rounded is farther.
    assert (got - F.linear(x.float(), weight, bias)).abs().max() > (got - expected).abs().max()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", READ)
def test_a_packed_product_of_blocks_equals_that_of_the_dequantised_weight(kind: Type, has_bias: bool) -> None:
    data, x = blocks(kind, 48, 256), random(7, 256, seed=1, dtype=torch.bfloat16)
    bias = random(48, seed=2) if has_bias else None
    product = linears.grouped(READ[kind](data), bias)
    assert product is not None
    expected = F.linear(x.float(), torch.from_numpy(gguf.quants.dequantize(data, kind)), bias)
    # bfloat16 keeps 8 bits of each scale, zero and result.
    assert (product(x).float() - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("kind", READ)
def test_the_integers_of_a_block_are_not_rounded_again(kind: Type) -> None:
    data = blocks(kind, 16, 512)
    groups = READ[kind](data)
    exact = torch.from_numpy(gguf.quants.dequantize(data, kind)).view(16, -1, 32)
    high = groups.q.view(16, groups.copies, -1, 32).float()
    integers = high[:, 0] if groups.copies == 1 else 16 * high[:, 0] + high[:, 1]
    # One step of the integer changes the dequantised weight by one scale, everywhere in its group.
    least, most = integers.argmin(-1, keepdim=True), integers.argmax(-1, keepdim=True)
    steps = integers.gather(-1, most) - integers.gather(-1, least)
    scale = (exact.gather(-1, most) - exact.gather(-1, least)) / steps
    assert (exact - exact.gather(-1, least) - (integers - integers.gather(-1, least)) * scale).abs().max() < 1e-5 * exact.abs().max()
    assert (groups.weight.view_as(exact) - exact).abs().max() < 2**-8 * 2 * exact.abs().max()


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q4_K])
@pytest.mark.parametrize("seed", range(3))
def test_taking_blocks_over_is_never_worse_than_rounding_the_dequantised_weight(kind: Type, seed: int) -> None:
    data = blocks(kind, 64, 512, seed)
    exact = torch.from_numpy(gguf.quants.dequantize(data, kind))
    taken, rounded = READ[kind](data).weight, linears.four_bits(exact).weight
    assert (taken - exact).square().mean() <= (rounded - exact).square().mean()


def test_rounding_to_groups_stays_within_half_a_step() -> None:
    weight = random(32, 64)
    grouped = weight.view(32, -1, 32)
    for round_to, levels in ((linears.four_bits, 15), (linears.eight_bits, 254)):
        error = (round_to(weight).weight - weight).view_as(grouped).abs().amax(-1)
        span = (grouped.amax(-1) - grouped.amin(-1)) if levels == 15 else 2 * grouped.abs().amax(-1)
        # Half a step, and what rounding the scale and the zero to bfloat16 adds at the ends of the range.
        assert (error <= 0.5 * span / levels + 2**-8 * grouped.abs().amax(-1)).all()
    assert linears.four_bits(torch.full((16, 32), 0.5)).weight.unique().tolist() == [0.5]
    assert linears.eight_bits(torch.zeros(16, 32)).weight.unique().tolist() == [0.0]


def test_weights_of_4_and_of_8_bits_can_be_multiplied_as_one() -> None:
    parts = [linears.four_bits(random(16, 64)), linears.eight_bits(random(32, 64, seed=1))]
    both = linears.join(parts)
    assert torch.equal(both.weight, torch.cat([part.weight for part in parts]))
    product, x = linears.grouped(both, None), random(3, 64, seed=2, dtype=torch.bfloat16)
    assert product is not None
    expected = F.linear(x.float(), both.weight)
    assert (product(x).float() - expected).abs().max() < 2**-7 * expected.abs().max()


# --- what the processor has ---------------------------------------------------------------------------------------------------------


def test_auto_takes_bfloat16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_it, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(linears, "has_bfloat16", lambda has_it=has_it: has_it)
        assert linears.resolve("auto", torch.device("cpu")) == expected
        assert linears.resolve("auto", torch.device("cuda")) == "float32"


def test_a_kind_of_weights_nobody_knows_is_refused_with_the_choices(saved: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"one of auto, float32, bfloat16, int4, got 'int3'"):
        load_model(saved("llama"), weights="int3")


def test_what_runs_on_cpu_only_is_refused_elsewhere(saved: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"int4.*cpu only.*cuda"):
        load_model(saved("llama"), weights="int4", device="cuda")
    with pytest.raises(ConfigError, match=r"deterministic=True.*cpu only.*cuda"):
        load_model(saved("llama"), deterministic=True, device="cuda")


def refuse(*arguments: Any) -> torch.Tensor:
    raise RuntimeError("not on this processor")


def no_such_operator(*arguments: Any) -> torch.Tensor:
    raise AttributeError("no such operator")


@pytest.mark.parametrize(
    ("operator", "answer", "kind"),
    [
        ("_pack_onednn", refuse, "float32"),
        ("_pack_onednn", no_such_operator, "bfloat16"),
        ("_multiply_onednn", refuse, "float32"),
        ("_multiply_onednn", lambda x, packed, bias: x.new_zeros(x.shape[0], 96), "bfloat16"),
    ],
)
def test_without_a_private_operator_torchs_own_product_is_used_and_said_once(
    operator: str, answer: Any, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linears, operator, answer)
    dtype = getattr(torch, kind)
    weight, x = random(96, 64), random(3, 64, seed=1, dtype=dtype)
    with caplog.at_level(logging.WARNING, "onekv.weights"):
        products = [linears.floating(weight, None, dtype) for _ in range(3)]
    assert {type(product) for product in products} == {linears.Plain}
    assert len(caplog.messages) == len(set(caplog.messages)) >= 1
    assert "oneDNN" in caplog.text
    assert torch.equal(products[0](x), F.linear(x, weight.to(dtype)))


def test_without_bfloat16_instructions_rounded_weights_are_multiplied_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack = linears._pack_onednn
    monkeypatch.setattr(linears, "_pack_onednn", lambda weight: refuse() if weight.dtype == torch.bfloat16 else pack(weight))
    weight, x = random(96, 64), random(3, 64, seed=1)
    product = linears.floating(weight, None, torch.bfloat16)
    assert product.dtype == torch.float32
    assert (product(x) - F.linear(x, weight.bfloat16().float())).abs().max() < 1e-4
    assert "multiplied in float32" in caplog.text


@pytest.mark.parametrize("operator", ["_pack_int4", "_multiply_int4"])
def test_without_the_int4_operator_int4_layers_are_bfloat16(
    operator: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linears, operator, no_such_operator)
    model = tiny("llama", **WIDE).bfloat16()
    weight = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    linears.pack(model, "int4")
    x = random(3, 96, dtype=torch.bfloat16)
    expected = F.linear(x.float(), weight.float())
    assert (model.model.layers[0].mlp.down_proj(x).float() - expected).abs().max() < 2**-7 * expected.abs().max()
    assert "int4 product is not used" in caplog.text


@pytest.mark.usefixtures("bfloat16_processor")
def test_int4_multiplies_few_rows_in_4_bits_and_many_in_bfloat16() -> None:
    module = torch.nn.Module()
    module.linear = torch.nn.Linear(64, 32)
    module.get_output_embeddings = lambda: None
    weight, bias = module.linear.weight.detach().clone(), module.linear.bias.detach().clone()
    nbytes = linears.pack(module, "int4")
    x = random(linears.FEW_ROWS + 1, 64, dtype=torch.bfloat16)
    rounded = linears.four_bits(weight)
    few, many = module.linear(x[:-1]).float(), module.linear(x).float()
    assert (few - F.linear(x[:-1].float(), rounded.weight, bias)).abs().max() < 2**-6
    assert (many - F.linear(x.float(), weight, bias)).abs().max() < 2**-6
    assert (few - many[:-1]).abs().max() > 2**-6
    assert nbytes == 64 * 32 * (0.5 + 4 / 32 + 2)


# --- a whole model ------------------------------------------------------------------------------------------------------------------


def test_weights_are_freed_when_they_are_packed_and_tied_embeddings_stay(tiny: Tiny) -> None:
    model = tiny("llama", **WIDE, tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight
    packed = [weakref.ref(module) for module in model.modules() if type(module) is torch.nn.Linear]
    before, copy = Model(model).nbytes, embedding.detach().clone()
    assert before == sum(p.numel() for p in model.parameters()) * 4 + sum(b.numel() for b in model.buffers()) * 4
    loaded = Model(model)
    loaded._pack("float32", None, False)
    gc.collect()
    assert [ref() for ref in packed] == [None] * 15
    assert model.model.embed_tokens.weight is embedding
    assert torch.equal(embedding, copy)
    # The output layer was tied: its packed weight is the only one more.
    assert loaded.nbytes == before + embedding.numel() * 4


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.5), ("int4", 0.3)])
def test_packed_weights_take_less_memory(kind: Any, share: float, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_pack_onednn", lambda weight: weight)
    monkeypatch.setattr(linears, "_multiply_onednn", F.linear)
    monkeypatch.setattr(linears, "has_bfloat16", lambda: False)
    stock = tiny("llama", **WIDE)
    before = Model(stock).nbytes
    model = Model(tiny("llama", **WIDE).bfloat16())
    model._pack(kind, None, False)
    assert model.nbytes < before * share + 1024


def test_layers_that_int4_cannot_hold_are_kept_in_bfloat16(tiny: Tiny) -> None:
    model = tiny("llama", **{**WIDE, "intermediate_size": 80, "vocab_size": 97}).bfloat16()
    linears.pack(model, "int4")
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    assert isinstance(attention.q_proj.product, (linears.Int4, linears.ByRows))
    assert isinstance(mlp.gate_proj.product, (linears.Int4, linears.ByRows))
    for odd in (mlp.down_proj, model.lm_head):  # K = 80, N = 97
        assert isinstance(odd.product, (linears.OneDNN, linears.Plain))


def test_int4_keeps_the_output_layer_in_8_bits(tiny: Tiny) -> None:
    model, x = tiny("llama", **WIDE).bfloat16(), random(3, 64, dtype=torch.bfloat16)
    head = model.lm_head.weight.detach().float()
    linears.pack(model, "int4")
    expected = F.linear(x.float(), head)
    assert (model.lm_head(x).float() - expected).abs().max() < 0.015 * expected.abs().max()
    # The negative control: 4 bits are farther.
    assert (F.linear(x.float(), linears.four_bits(head).weight) - expected).abs().max() > 0.03 * expected.abs().max()


def test_a_packed_model_refuses_to_be_saved(saved: Callable[..., str], tmp_path: Path) -> None:
    model = load_model(saved("llama"), weights="float32")
    with pytest.raises(OneKVError, match="packed weights cannot be saved"):
        model.transformers_model.save_pretrained(tmp_path / "again")
    with pytest.raises(OneKVError, match="packed weights cannot be saved"):
        model.transformers_model.state_dict()


def test_the_fingerprint_does_not_depend_on_how_weights_are_kept(saved: Callable[..., str], tiny: Tiny) -> None:
    path = saved("llama", **WIDE)
    prints = {load_model(path, weights=kind).fingerprint for kind in ("float32", "bfloat16", "int4")}
    assert prints == {Model(tiny("llama", **WIDE)).fingerprint}


@pytest.mark.usefixtures("bfloat16_processor")
@pytest.mark.parametrize("kind", ["auto", "bfloat16", "int4"])
def test_a_processor_with_bfloat16_gets_products_in_bfloat16(kind: str, saved: Callable[..., str], tiny: Tiny, tokens_of: Tokens) -> None:
    model = load_model(saved("llama", **WIDE), weights=kind)
    products = {type(module.product) for module in model.transformers_model.modules() if isinstance(module, linears.Packed)}
    assert products == {linears.ByRows if kind == "int4" else linears.OneDNN}
    assert all(
        module.product.dtype == torch.bfloat16 for module in model.transformers_model.modules() if isinstance(module, linears.Packed)
    )
    (prompt,) = tokens_of((13,))
    got = model.extend(cache_for(model, 32), [0], [prompt])[0]
    assert got.dtype == torch.float32
    expected = alone(tiny("llama", **WIDE), prompt)[-1]
    # The last layer evaluates one row only, which int4 rounds to 4 bits.
    assert 0 < (got - expected).abs().max() < (0.15 if kind == "int4" else 0.05) * expected.abs().max()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_a_packed_models_own_forward_agrees_with_the_one_over_cells(kind: str, saved: Callable[..., str], tokens_of: Tokens) -> None:
    model = load_model(saved("llama", **WIDE), weights=kind)
    assert repr(model).startswith(f"Model(LlamaForCausalLM, {kind} weights, ")
    (prompt,) = tokens_of((13,))
    (step,) = (cache := cache_for(model, 16)).plan(Batch(prompt, outputs="all"))
    with step:
        got = model.forward(step)
    assert cache.num_used == 13
    assert got.dtype == torch.float32
    expected = alone(model.transformers_model, prompt)
    assert (got - expected).abs().max() < (1e-5 if kind == "float32" else 0.05) * expected.abs().max()


# --- GGUF ---------------------------------------------------------------------------------------------------------------------------

KINDS = {
    "attn_q": Type.Q4_1,
    "attn_k": Type.Q4_0,
    "attn_v": Type.Q8_0,
    "attn_output": Type.Q5_0,
    "ffn_down": Type.Q4_1,
    "token_embd": Type.Q8_0,
}


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_int4_takes_the_blocks_of_a_gguf_over_in_transformers_order(
    family: str, tiny: Tiny, make_gguf: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_gguf(tiny(family, **WIDE, tie_word_embeddings=True), kinds=KINDS)
    exact = dict(load_plain(path).named_modules())
    model = load_model(path, weights="int4")
    for name, module in model.transformers_model.named_modules():
        if isinstance(module, linears.Packed):
            x = random(5, module.in_features, seed=1, dtype=torch.bfloat16)
            expected = exact[name](x.float())
            # Taken over: bfloat16's rounding. Rounded to 4 bits, as gate and up are that come as float32: farther.
            limit = 0.2 if "gate_proj" in name or "up_proj" in name else 2**-6
            assert (module(x).float() - expected).abs().max() < limit * expected.abs().max(), name
    assert not caplog.messages or "int4" not in caplog.text


def load_plain(path: Path) -> PreTrainedModel:
    """The model converted from a GGUF, without onekv's products."""
    from transformers import AutoModelForCausalLM

    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(gguf_files.converted(path), dtype=torch.float32)
    return loaded


@pytest.mark.usefixtures("own_home")
def test_blocks_that_are_not_the_models_weights_are_not_taken(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama", **WIDE), kinds=KINDS)
    model = load_plain(path)
    blocks_of = gguf_files.Blocks(path, gguf_files.converted(path), model)
    name, linear = "model.layers.1.mlp.down_proj", model.model.layers[1].mlp.down_proj
    assert blocks_of(name, linear.weight) is not None
    assert blocks_of("model.layers.1.mlp.up_proj", model.model.layers[1].mlp.up_proj.weight) is None  # float32 in the file
    linear.weight.data[63] += 1e-3
    assert blocks_of(name, linear.weight) is None


@pytest.mark.usefixtures("own_home")
def test_a_file_of_8_bits_is_rounded_to_4_but_for_the_output_layer(tiny: Tiny, make_gguf: Write) -> None:
    path = make_gguf(tiny("llama", **WIDE), kinds=dict.fromkeys(["attn_q", "token_embd", "output"], Type.Q8_0))
    model = load_plain(path)
    blocks_of = gguf_files.Blocks(path, gguf_files.converted(path), model)
    assert blocks_of("model.layers.0.self_attn.q_proj", model.model.layers[0].self_attn.q_proj.weight) is None
    head = blocks_of("lm_head", model.lm_head.weight)
    assert head is not None
    assert head.copies == 2


# --- determinism --------------------------------------------------------------------------------------------------------------------

ROWS = [*range(1, 41), 64, 128, 512]


def products(kind: str) -> list[tuple[linears.Product, int]]:
    made: list[tuple[linears.Product | None, int]] = []
    for out, width in ((96, 64), (960, 576), (64, 1536), (33, 40)):
        weight, bias = random(out, width) * 0.05, random(out, seed=3)
        if kind == "int4":
            if out % 16 == 0:
                made += [
                    (linears.grouped(linears.four_bits(weight), bias), width),
                    (linears.grouped(linears.eight_bits(weight), None), width),
                ]
        else:
            made.append((linears.floating(weight, bias, getattr(torch, kind)), width))
    return [(linears.independent(product, width), width) for product, width in made if product is not None]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_a_row_of_a_product_has_the_same_bits_whatever_rows_come_with_it(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for product, width in products(kind):
        x = random(max(ROWS), width, seed=4).to(product.dtype)
        whole = product(x)
        for count in ROWS:
            chosen = torch.randperm(max(ROWS), generator=generator)[:count]
            assert torch.equal(product(x[chosen]), whole[chosen]), (kind, width, count)


class _Counting:
    """A product whose result depends on the number of rows, unless that is fixed; or always."""

    dtype, nbytes = torch.float32, 0

    def __init__(self, depends_on_place: bool) -> None:
        self.depends_on_place = depends_on_place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[0])[:, None] if self.depends_on_place else 0
        return x[:, :3] + x.shape[0] * 1e-3 + place


def test_a_model_is_deterministic_on_a_kernel_that_depends_on_the_number_of_rows(
    saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = linears._multiply_onednn
    monkeypatch.setattr(linears, "_multiply_onednn", lambda x, packed, bias: multiply(x, packed, bias) * (1 + 1e-6 * x.shape[0]))
    model = load_model(saved("llama", **WIDE), weights="float32", deterministic=True)
    products = [module.product for module in model.transformers_model.modules() if isinstance(module, linears.Packed)]
    assert {type(product) for product in products} == {linears.FixedRows}
    assert differences(model, 100, (1, 3, 40)) is None


def test_a_product_whose_rows_are_independent_is_left_as_it_is() -> None:
    product = linears.grouped(linears.four_bits(random(64, 64)), None)
    assert product is not None
    assert linears.independent(product, 64) is product


def test_a_product_that_depends_on_the_number_of_rows_is_given_a_fixed_number() -> None:
    fixed = linears.independent(_Counting(False), 8)
    assert isinstance(fixed, linears.FixedRows)
    x = random(35, 8)
    assert torch.equal(fixed(x)[20:21], fixed(x[20:21]))
    assert torch.equal(fixed(x), x[:, :3] + 16 * 1e-3)
    with pytest.raises(ConfigError, match="cannot be kept on this processor"):
        linears.independent(_Counting(True), 8)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "gemma3"])
def test_a_row_of_a_deterministic_model_has_the_same_bits_whatever_rows_come_with_it(
    family: str, kind: str, saved: Callable[..., str]
) -> None:
    # An odd width, so that vectors do not fit and rows end where scalar code begins.
    model = load_model(saved(family, **{**WIDE, "intermediate_size": 75, "num_hidden_layers": 4}), weights=kind, deterministic=True)
    assert model.deterministic
    assert differences(model, 512, tuple(ROWS[:-1])) is None


def test_no_activation_is_large_enough_to_be_cut_within_a_row(saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Elements from which torch shares an operation among threads: rows of 75 would then end in scalar code in other places.
    model = load_model(saved("llama", intermediate_size=75), weights="float32", deterministic=True)
    sizes = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return F.silu(x)

    assert model._fused is not None
    for layer in model._fused._layers:
        monkeypatch.setattr(layer, "_act", watched)
    assert differences(model, 899, (1, 600)) is None
    assert sum(sizes) == (899 + 1 + 600) * 75 * 4
    assert max(sizes) < 32768


def differences(model: Model, rows: int, counts: tuple[int, ...]) -> str | None:
    return dependence(
        lambda sink, tokens, positions, keep: model._evaluate(sink, positions, keep, tokens=tokens)[0],
        model.vocab_size,
        model.max_positions,
        rows,
        counts,
    )


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "gpt_neox", "starcoder2"])
def test_families_without_a_lean_forward_are_deterministic_or_refused(family: str, saved: Callable[..., str]) -> None:
    try:
        model = load_model(saved(family), weights="float32", deterministic=True)
    except UnsupportedModel as refused:
        assert "deterministic=True cannot be kept" in str(refused)  # noqa: PT017
    else:
        assert differences(model, 40, (1, 3, 17)) is None


def test_a_model_whose_rows_depend_on_each_other_is_refused(saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("llama", **WIDE)
    monkeypatch.setattr(linears, "independent", lambda product, width: product)
    multiply = linears._multiply_onednn
    monkeypatch.setattr(linears, "_multiply_onednn", lambda x, packed, bias: multiply(x, packed, bias) * (1 + 1e-6 * (x.shape[0] == 7)))
    with pytest.raises(UnsupportedModel, match=r"deterministic=True cannot be kept.*keys of layer 0 with 7 rows and with 40"):
        load_model(path, weights="float32", deterministic=True)


# --- real weights -------------------------------------------------------------------------------------------------------------------

TEXT = """The history of the lighthouse begins with fires built on hilltops. As ports grew, mariners needed guidance that could be seen from
farther away, and so the fires were raised on platforms. Modern lamps use lenses, which bend the light of a small source into a narrow beam.
"Why," asked the boy, "does it turn?" Because each light has its own rhythm, said the keeper: def area(r): return 3.14159 * r ** 2"""


@pytest.mark.slow
@pytest.mark.demo_model
def test_packed_weights_of_the_demo_model_stay_close_to_float32(demo_path: Path) -> None:
    logits = {}
    for kind in ("float32", "bfloat16", "int4"):
        model = load_model(demo_path, weights=kind)
        cache = cache_for(model, 256)
        parts = []
        for step in cache.plan(Batch(model.text.encode(TEXT), outputs="all"), max_ubatch=5):
            with step:
                parts.append(model.forward(step))
        logits[kind] = torch.cat(parts).double().log_softmax(-1)
        if kind == "float32":
            expected = load_plain(demo_path)(torch.tensor([model.text.encode(TEXT)])).logits[0].double().log_softmax(-1)
            assert (logits[kind] - expected).abs().max() < 1e-3
    for kind, limit in (("bfloat16", 2e-3), ("int4", 1e-2)):
        true = logits["float32"]
        divergence = (true.exp() * (true - logits[kind])).sum(-1).mean()
        assert 0 < divergence < limit


@pytest.mark.slow
@pytest.mark.demo_model
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_rows_of_the_demo_model_are_deterministic(kind: str, demo_path: Path) -> None:
    model = load_model(demo_path, weights=kind, deterministic=True)
    assert differences(model, 160, (1, 5, 32, 100)) is None
