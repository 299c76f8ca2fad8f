"""Answers held to JSON, written by a model that would rather write anything else."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from onekv import BatchError, ConfigError, OneKVError
from onekv.engine.guide import Guide, Guides
from onekv.engine.output import Output
from onekv.engine.sampler import Sampler, Sampling
from onekv.engine.tools import forced_call_schema
from onekv.models import gguf
from onekv.models.pull import NAMED_MODELS
from onekv.models.text import Text
from vocabularies import TOKENIZERS

Scripted = Callable[[Sequence[bytes]], tuple[Text, list[int]]]
END = 256
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def allowed(guide: Guide, size: int = 300) -> set[int]:
    """The ids that may come next."""
    return set((guide.apply(torch.zeros(size)) > -math.inf).nonzero().flatten().tolist())


def write(guide: Guide, text: str) -> None:
    for byte in text.encode():
        assert byte in allowed(guide), f"{chr(byte)!r} in {text!r}"
        guide.accept(byte)


def random_answer(text: Text, guide: Guide, vocab_size: int, seed: int, most: int = 400) -> str:
    """What random logits say when the guide is followed."""
    random = torch.Generator().manual_seed(seed)
    sampler = Sampler(Sampling(temperature=1.0, seed=seed), guide=guide)
    output = Output(text)
    for _ in range(most):
        token = sampler(torch.randn(vocab_size, generator=random))
        if token in text.eos_ids:
            break
        output.push(token)
        if guide.is_finished:
            break
    output.finish()
    return output.text


@pytest.fixture(scope="module")
def bytes_only(scripted: Scripted) -> Text:
    return scripted([b'{"', b'":', b"Rome", b'"}', "é".encode()])[0]


@pytest.fixture
def guides(bytes_only: Text) -> Guides:
    return Guides(bytes_only, 300)


def test_only_what_the_schema_allows_may_come_and_the_end_only_when_it_is_complete(guides: Guides) -> None:
    guide = guides.json_schema(SCHEMA)
    assert not guide.is_finished
    assert END not in allowed(guide)
    write(guide, '{"city": "Rome", "days": 1')
    assert not guide.is_finished
    assert {ord("2"), ord("}")} <= allowed(guide)
    assert not {END, ord("a"), ord(",")} & allowed(guide)
    write(guide, "2}")
    assert guide.is_finished
    assert allowed(guide) == {END}
    guide.accept(END)
    assert guide.is_finished


def test_ids_beyond_the_vocabulary_may_never_come(guides: Guides) -> None:
    assert max(allowed(guides.json_object(), size=400)) < 262


def test_a_guide_does_not_change_logits(guides: Guides) -> None:
    logits = torch.randn(300)
    kept = logits.clone()
    forbidden = guides.json_object().apply(logits) == -math.inf
    assert forbidden.any()
    assert torch.equal(logits, kept)


def test_a_number_may_end_or_go_on(guides: Guides) -> None:
    guide = guides.json_schema({"type": "integer"})
    write(guide, "4")
    assert not guide.is_finished
    assert {END, ord("2")} <= allowed(guide)
    guide.accept(END)
    for one in (guide, guide.fork()):
        assert one.is_finished
        assert allowed(one) == {END}


def test_every_end_token_of_the_model_ends_the_answer(scripted: Scripted) -> None:
    text, [other] = scripted([b"<other end>"])
    text = Text(text.tokenizer, [other])
    guide = Guides(text, 300).json_object()
    assert not {END, other} & allowed(guide)
    write(guide, "{}")
    assert allowed(guide) == {END, other}
    for end in (END, other):
        fork = guide.fork()
        fork.accept(end)
        assert fork.is_finished


def test_a_model_without_end_tokens_is_finished_with_its_json(scripted: Scripted) -> None:
    text, _ = scripted([])
    text.tokenizer.eos_token = None
    guide = Guides(Text(text.tokenizer), 300).json_object()
    write(guide, "{}")
    assert guide.is_finished
    assert allowed(guide) == set()


def test_a_fork_goes_on_by_itself(guides: Guides) -> None:
    guide = guides.json_schema(SCHEMA)
    write(guide, '{"city": "')
    fork = guide.fork()
    write(fork, 'Rome", "days": 3}')
    assert fork.is_finished
    write(guide, "Oslo")
    assert not guide.is_finished


def test_what_may_not_come_is_refused(guides: Guides) -> None:
    for token in (ord("x"), END, 299):
        with pytest.raises(BatchError, match=str(token)):
            guides.json_object().accept(token)
    guide = guides.json_object()
    write(guide, "{}")
    guide.accept(END)
    with pytest.raises(BatchError, match="over"):
        guide.accept(ord("{"))


@pytest.mark.parametrize(
    "schema", [{"type": "no such type"}, {"$ref": "#/nowhere"}, {"$ref": "#"}, {"type": "string", "pattern": "("}, {"minLength": "x"}]
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(guides: Guides, schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"this JSON schema cannot be followed: .+"):
        guides.json_schema(schema)


@pytest.mark.parametrize("schema", [True, [], "{}", None])
def test_a_schema_that_is_no_object_is_refused(guides: Guides, schema: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        guides.json_schema(schema)


def test_a_schema_nested_too_deep_is_refused(guides: Guides) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(5000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(ConfigError, match="cannot be followed"):
        guides.json_schema(schema)
    with pytest.raises(ConfigError, match="nested too deep"):
        forced_call_schema([{"type": "function", "function": {"name": "f", "parameters": schema}}])


def test_without_llguidance_the_error_says_what_to_install(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'onekv\[guidance\]'"):
        guides.json_object()


def test_white_space_comes_to_an_end(guides: Guides) -> None:
    guide = guides.json_object()
    write(guide, "{" + "\n" * 32)
    assert not {ord(" "), ord("\n")} & allowed(guide)


@pytest.mark.parametrize("seed", range(3))
def test_random_logits_write_json_of_the_schema(bytes_only: Text, guides: Guides, seed: int) -> None:
    answer = json.loads(random_answer(bytes_only, guides.json_schema(SCHEMA), 300, seed))
    assert list(answer) == ["city", "days"]
    assert len(answer["city"]) <= 8
    assert 1 <= answer["days"] <= 99


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece without strip"])
@pytest.mark.parametrize("spaced", [False, True])
def test_every_kind_of_tokenizer_can_be_held_to_json(kind: str, spaced: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    if spaced:  # begins every text with a space
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.ByteLevel() if kind == "byte level" else pre_tokenizers.Metaspace()
        assert len(tokenizer("[", add_special_tokens=False)["input_ids"]) == 2
    text = Text(tokenizer)
    for schema, expected in (({"enum": [["ab", 1]]}, ["ab", 1]), ({"const": {"é 漢": "a→漢b"}}, {"é 漢": "a→漢b"})):
        guide = Guides(text, text.vocab_size).json_schema(schema)
        assert json.loads(random_answer(text, guide, text.vocab_size, seed=1)) == expected


def test_a_tokenizer_that_cannot_write_json_is_an_error_and_no_endless_answer() -> None:
    text = Text(TOKENIZERS["metaspace"]())  # has no way to decode bytes, and no token for a bracket
    with pytest.raises(OneKVError, match=r"may not come here|no token is left"):
        random_answer(text, Guides(text, text.vocab_size).json_object(), text.vocab_size, seed=1)


def test_a_forced_call_follows_references_inside_its_parameters(bytes_only: Text, guides: Guides) -> None:
    parameters = {
        "type": "object",
        "$defs": {"day": {"enum": ["Mon", "Tue"]}},
        "properties": {"day": {"$ref": "#/$defs/day"}, "next": {"$ref": "#"}},
        "required": ["day"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": "book", "parameters": parameters}},
        {"type": "function", "function": {"name": "stop"}},
    ]
    guide = guides.json_schema(forced_call_schema(tools))
    write(guide.fork(), '{"name": "stop", "arguments": {}}')
    write(guide, '{"name": "book", "arguments": {"day": "Tue", "next": {"day": "M')
    assert allowed(guide) == {ord("o")}
    write(guide, 'on"}}}')
    assert guide.is_finished


@pytest.mark.demo_model
def test_the_demo_models_tokenizer_is_held_to_json() -> None:
    path = NAMED_MODELS["smollm2"].path
    if not path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)
    text = Text(AutoTokenizer.from_pretrained(gguf.converted(path)))
    size = text.vocab_size + 64
    answer = json.loads(random_answer(text, Guides(text, size).json_schema(SCHEMA), size, seed=0))
    assert list(answer) == ["city", "days"]
