"""Text to ids and back, whole and as a stream, compared with the tokenizer's own decode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from onekv.errors import BatchError, ConfigError
from onekv.models import Text, gguf
from onekv.models.pull import NAMED_MODELS

FAMILY = "👩‍👩‍👧"
SAMPLES = ["", "a", "the  heap", "é", "漢字", "👋", "👋👋🏽", FAMILY, f"he {FAMILY} a→漢b", "a\r\n\tb", " a", "  a b"]


def stock(tokenizer: PreTrainedTokenizerFast, ids: list[int], special: bool) -> str:
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def streamed(text: Text, ids: list[int], special: bool = False) -> list[str]:
    stream = text.stream(special=special)
    return [*map(stream.push, ids), stream.flush()]


def test_encoding_and_decoding_equal_the_tokenizers_own(tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(tokenizer)
    for sample in SAMPLES:
        ids = text.encode(sample)
        assert ids == tokenizer(sample)["input_ids"]
        assert text.decode(ids) == stock(tokenizer, ids, False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(data=st.data(), special=st.booleans())
def test_streamed_pieces_join_to_the_decoded_text(data: st.DataObject, special: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(tokenizer)
    ids = data.draw(st.lists(st.integers(0, text.vocab_size + 3), max_size=12))
    whole = text.decode(ids, special=special)
    assert whole == stock(tokenizer, ids, special)
    is_byte_level = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())["type"] == "ByteLevel"
    # A SentencePiece decoder spoils a whole run of byte tokens for one invalid byte, which a stream cannot know beforehand.
    if is_byte_level or "\ufffd" not in whole:
        assert "".join(streamed(text, ids, special)) == whole


def test_a_character_is_given_out_with_its_last_byte_and_no_later(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(byte_tokenizer)
    stream = text.stream()
    for character in "👋👋🏽漢é":
        *before, last = byte_tokenizer(character, add_special_tokens=False)["input_ids"]
        assert "".join(map(stream.push, before)) == ""
        assert stream.push(last) == character
    assert stream.flush() == ""


def test_only_invalid_bytes_are_replaced_and_text_around_them_is_kept(tokenizer_named: Callable[[str], PreTrainedTokenizerFast]) -> None:
    byte_level = tokenizer_named("byte level")
    wave = byte_level("👋")["input_ids"]
    text = Text(byte_level)
    for ids, expected in (([*wave, wave[-1], *wave], "👋\ufffd👋"), ([*wave, *wave[:-1]], "👋\ufffd")):
        assert text.decode(ids) == expected
        assert "".join(streamed(text, ids)) == expected


def test_an_invalid_byte_spoils_and_delays_nothing(tokenizer_named: Callable[[str], PreTrainedTokenizerFast]) -> None:
    wave = "👋".encode()
    raw = b"\xff" + wave + b"a\xf0" + wave + b"\x80" + wave[:3] + b"b"
    for kind in ("byte level", "sentencepiece", "sentencepiece without strip", "metaspace and bytes, not read"):
        text = Text(tokenizer_named(kind))
        ids = {text.token_bytes(i): i for i in reversed(range(text.vocab_size))}  # of pieces alike, the byte's own comes first
        pieces = streamed(text, [ids[bytes([b])] for b in raw])
        assert pieces == ["\ufffd", "", "", "", "👋", "a", "", "\ufffd", "", "", "👋", "\ufffd", "", "", "", "\ufffdb", ""]


def test_a_piece_after_bytes_keeps_its_space(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    if "▁a" not in byte_tokenizer.get_vocab():
        return
    spaced = byte_tokenizer.convert_tokens_to_ids("▁a")
    for before, shown in ((b"\xff", "\ufffd"), (b"\xf0\x9f", "\ufffd"), ("👋".encode(), "👋"), (b"x", "x")):
        assert "".join(streamed(Text(byte_tokenizer), [*(b + 3 for b in before), spaced, spaced])) == f"{shown} a a"


def test_a_token_without_text_does_not_begin_a_new_one(tokenizer_named: Callable[[str], PreTrainedTokenizerFast]) -> None:
    text = Text(tokenizer_named("sentencepiece"))
    text.__dict__["_decoders"] = None  # as for a tokenizer that is none of the tokenizers library
    a, end, spaced = text.tokenizer.convert_tokens_to_ids(["a", "</s>", "▁a"])
    assert streamed(text, [end, spaced, end, spaced]) == ["", "a", "", " a", ""]
    assert streamed(text, [a, end, spaced], special=True) == ["a", "</s>", " a", ""]


def test_bytes_of_tokens_join_to_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(tokenizer)
    for sample in ("he a→漢b", "a a  b", "aé"):
        ids = tokenizer("a" + sample, add_special_tokens=False)["input_ids"]
        assert b"".join(map(text.token_bytes, ids)).decode().lstrip() == text.decode(ids, special=True).lstrip()
    assert text.token_bytes(10**6) == b""


def test_a_flushed_stream_gives_up_what_is_incomplete(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    stream = Text(byte_tokenizer).stream()
    assert "".join(map(stream.push, byte_tokenizer("👋")["input_ids"][:-1])) == ""
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() == ""


def test_special_tokens_are_shown_only_on_request(tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(tokenizer)
    ids = [tokenizer.bos_token_id, *text.encode("a"), tokenizer.eos_token_id]
    assert text.decode(ids).strip() == "a"
    assert "</s>" in text.decode(ids, special=True)


def test_ids_beyond_the_vocabulary_have_no_text_and_negative_ones_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(tokenizer)
    assert text.decode([10**6]) == ""
    with pytest.raises(BatchError, match="-1"):
        text.decode([-1])


def test_end_ids_are_the_models_and_the_tokenizers_together(tokenizer: PreTrainedTokenizerFast) -> None:
    assert Text(tokenizer, [7, 9]).eos_ids == {7, 9, tokenizer.eos_token_id}
    tokenizer.eos_token = None
    assert Text(tokenizer).eos_ids == frozenset()


def test_the_chat_template_opens_the_answer_only_on_request(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}b{% endif %}"
    text = Text(tokenizer)
    messages = [{"role": "user", "content": "a"}]
    assert text.chat(messages) == tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert text.chat(messages, add_generation_prompt=False) == tokenizer("a", add_special_tokens=False)["input_ids"]


def test_a_missing_or_refusing_chat_template_is_a_config_error(tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(tokenizer)
    assert not text.has_chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        text.chat([{"role": "user", "content": "a"}])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="roles must alternate"):
        text.chat([{"role": "user", "content": "a"}])


@pytest.mark.demo_model
def test_the_demo_tokenizer_streams_random_ids_and_emoji_as_it_decodes_them(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_HOME", str(demo_path.parent.parent))
    tokenizer = AutoTokenizer.from_pretrained(gguf.converted(NAMED_MODELS["smollm2"].path))
    text = Text(tokenizer)
    rng = np.random.default_rng(0)
    for ids in [rng.integers(0, text.vocab_size + 3, rng.integers(1, 20)).tolist() for _ in range(500)] + [text.encode(s) for s in SAMPLES]:
        for special in (False, True):
            pieces = streamed(text, ids, special)
            assert "".join(pieces) == text.decode(ids, special=special) == stock(tokenizer, ids, special)
    assert [p for p in streamed(text, text.encode("👋👋🏽")) if p] == ["👋", "👋", "🏽"]
