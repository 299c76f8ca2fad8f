"""/v1/completions: parameters, choices, log-probabilities, echo, streams, and what they add up to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from scripted import Scripted, says
from serving import NAME, Served, coin, error_of, serving

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Answers what depends on every token before; 512 cells."""
    with serving() as it:
        yield it


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A limit of 64 tokens."""
    with serving(cells=64) as it:
        yield it


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def test_a_completion_has_openais_shape(served: Served) -> None:
    body = served.ok(PATH, {"model": NAME, "prompt": "abc", "max_tokens": 4, "temperature": 0})
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", NAME, "cmpl-")
    [choice] = body["choices"]
    assert choice == {"index": 0, "text": choice["text"], "logprobs": None, "finish_reason": "length"}
    assert len(choice["text"]) == 4
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }


def test_openais_own_client_reads_whole_answers_and_streams(served: Served) -> None:
    client = served.openai
    fields: dict[str, Any] = {"model": NAME, "prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**fields)
    pieces = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 6
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert whole.usage is not None
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens == 11
    assert all(piece.usage is None for piece in pieces[:-1])


def test_the_same_prompt_again_is_cached_up_to_its_last_token(served: Served) -> None:
    body = {"prompt": "The lighthouse keeper wrote in his log:", "max_tokens": 3, "temperature": 0}
    first, second = served.ok(PATH, body), served.ok(PATH, body)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1


def test_salts_keep_prefixes_apart(served: Served) -> None:
    body = {"prompt": "Q prompt that two tenants send", "max_tokens": 1, "temperature": 0}
    assert served.ok(PATH, body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    for salt, cached in (("one", 0), ("two", 0), ("one", 29), ("two", 29)):
        usage = served.ok(PATH, {**body, "cache_salt": salt})["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}, salt


def test_several_prompts_are_answered_each_as_alone(served: Served) -> None:
    fields = {"max_tokens": 5, "temperature": 0}
    prompts = ["first", "second one", "third"]
    alone = [served.ok(PATH, {"prompt": prompt, **fields})["choices"][0]["text"] for prompt in prompts]
    for given in (prompts, [list(prompt.encode()) for prompt in prompts]):
        body = served.ok(PATH, {"prompt": given, **fields, "n": 2})
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert [choice["text"] for choice in body["choices"]] == [text for text in alone for _ in range(2)]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (sum(map(len, prompts)), 30)
        chunks = served.stream(PATH, {"prompt": given, **fields, "n": 2})
        assert [text_of(chunks, i) for i in range(6)] == [text for text in alone for _ in range(2)]


def test_echo_gives_the_prompt_back_in_both_modes(served: Served) -> None:
    plain = served.ok(PATH, {"prompt": "echo!", "max_tokens": 3, "temperature": 0})["choices"][0]["text"]
    for given in ("echo!", list(b"echo!")):
        body = {"prompt": given, "max_tokens": 3, "temperature": 0, "echo": True}
        assert served.ok(PATH, body)["choices"][0]["text"] == "echo!" + plain
        assert text_of(served.stream(PATH, body)) == "echo!" + plain


def test_a_stop_string_is_cut_off_and_usage_counts_it() -> None:
    with serving(Scripted(says("one two three four", after=5))) as served:
        body = {"prompt": "count", "stop": ["two t", "zzz"], "temperature": 0}
        for stop in (["wo th", "zzz"], "wo th"):
            whole = served.ok(PATH, {**body, "stop": stop})
            assert whole["choices"][0]["text"] == "one t"
            assert whole["choices"][0]["finish_reason"] == "stop"
            chunks = served.stream(PATH, {**body, "stop": stop, "stream_options": {"include_usage": True}})
            assert text_of(chunks) == "one t"
            assert chunks[-1]["usage"] == {**whole["usage"], "prompt_tokens_details": {"cached_tokens": 4}}


def test_stop_token_ids_end_an_answer_and_ignored_end_tokens_do_not() -> None:
    with serving(Scripted(says("abc", after=1))) as served:
        stopped = served.ok(PATH, {"prompt": "x", "temperature": 0, "stop_token_ids": [98]})["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("a", "stop")
        going = served.ok(PATH, {"prompt": "x", "temperature": 0, "ignore_eos": True, "max_tokens": 8})["choices"][0]
        assert (going["text"], going["finish_reason"]) == ("abc", "length")


def test_emoji_over_several_tokens_stream_whole() -> None:
    with serving(Scripted(says("caffè 😸🐢!", after=1))) as served:
        body = {"prompt": "x", "temperature": 0}
        assert served.ok(PATH, body)["choices"][0]["text"] == "caffè 😸🐢!"
        texts = [choice["text"] for chunk in served.stream(PATH, body) for choice in chunk["choices"]]
        assert "".join(texts) == "caffè 😸🐢!"
        assert {"😸", "🐢", "è"} <= set(texts)


# --- S08: too long --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_case_S08_a_prompt_over_the_limit_is_a_400_with_both_numbers_before_any_byte(small: Served, stream: bool) -> None:
    kept = {"prompt": "an earlier prompt", "max_tokens": 1, "temperature": 0}
    small.ok(PATH, kept)
    for length in (64, 65, 10000):
        error = small.refused(PATH, {"prompt": [97] * length, "stream": stream})
        assert (error["code"], error["param"], error["type"]) == ("context_length_exceeded", "prompt", "invalid_request_error")
        assert f"{length} tokens" in error["message"]
        assert "limit is 64" in error["message"]
    # One token is all there is room for.
    if stream:
        chunks = small.stream(PATH, {"prompt": [98] * 63, "temperature": 0})
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None, "length"]
    else:
        body = small.ok(PATH, {"prompt": [98] * 63, "temperature": 0})
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 1)
    assert small.engine.stats().used_cells <= 64


def test_case_S08_an_answer_that_can_never_fit_is_refused_and_earlier_prefixes_stay(small: Served) -> None:
    kept = {"prompt": "a prompt to be kept", "max_tokens": 1, "temperature": 0}
    small.ok(PATH, kept)
    error = small.refused(PATH, {"prompt": "abc", "max_tokens": 62})
    assert error["code"] == "context_length_exceeded"
    assert "65" in error["message"]
    assert "64" in error["message"]
    assert small.refused(PATH, {"prompt": "x " * 70_000, "max_tokens": None})["code"] == "context_length_exceeded"
    assert small.ok(PATH, kept)["usage"]["prompt_tokens_details"]["cached_tokens"] == 18


def test_case_S08_a_chat_that_is_too_long_names_its_messages(small: Served) -> None:
    error = small.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "pebble " * 70_000}], "stream": True})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


# --- S12, I15: log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_case_S12_logprobs_are_those_of_the_raw_logits_one_entry_a_token(temperature: int) -> None:
    with serving(Scripted(coin)) as served:
        body = {"prompt": "abcde", "max_tokens": 4, "logprobs": 2, "temperature": temperature, "seed": 3}
        whole = served.ok(PATH, body)["choices"][0]["logprobs"]
        chunks = served.stream(PATH, body)
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
        streamed = {name: [one for part in parts for one in part[name]] for name in whole}
        assert streamed == whole
        assert whole["text_offset"] == [0, 1, 2, 3]
        names = ("\x00", "\x01")
        assert set(whole["tokens"]) <= set(names)
        for token, logprob, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True):
            assert top == pytest.approx({names[1]: math.log(0.75), names[0]: math.log(0.25)}, abs=1e-6)
            assert logprob == top[token]
        if temperature == 0:
            assert whole["tokens"] == ["\x01"] * 4


def test_case_S12_logprobs_survive_stop_strings_and_end_tokens() -> None:
    with serving(Scripted(says("abcXYZ", after=2))) as served:
        body = {"prompt": "12", "logprobs": 0, "temperature": 0}
        for stop, count in ((None, 7), (["XYZ"], 6), (["XYQ"], 7)):
            whole = served.ok(PATH, {**body, "stop": stop})
            assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == count
            assert all(len(top) == 1 for top in whole["choices"][0]["logprobs"]["top_logprobs"])
            chunks = served.stream(PATH, {**body, "stop": stop})
            tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["logprobs"]["tokens"]]
            assert tokens == whole["choices"][0]["logprobs"]["tokens"]


def test_case_I15_echoed_logprobs_start_with_null_and_offsets_go_on_after_the_prompt() -> None:
    with serving(Scripted(coin)) as served:
        body = {"prompt": [0, 1, 1, 0], "max_tokens": 2, "logprobs": 1, "echo": True, "temperature": 0}
        first, again = (served.ok(PATH, body)["choices"][0] for _ in range(2))
        assert first == again
        table = first["logprobs"]
        assert table["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert table["token_logprobs"][0] is None
        assert table["top_logprobs"][0] is None
        assert table["token_logprobs"][1:] == pytest.approx([math.log(p) for p in (0.75, 0.75, 0.25, 0.75, 0.75)], abs=1e-6)
        assert first["text"] == "\x00\x01\x01\x00\x01\x01"
        streamed = served.stream(PATH, body)
        offsets = [o for chunk in streamed for choice in chunk["choices"] for o in choice["logprobs"]["text_offset"]]
        assert offsets == table["text_offset"]
        scored = served.ok(PATH, {**body, "max_tokens": 0})
        assert scored["choices"][0]["logprobs"]["token_logprobs"] == table["token_logprobs"][:4]
        assert scored["usage"]["completion_tokens"] == 0


def test_a_token_inside_a_character_starts_where_that_does() -> None:
    with serving(Scripted(says("è😸!", after=1))) as served:
        table = served.ok(PATH, {"prompt": "x", "temperature": 0, "logprobs": 0})["choices"][0]["logprobs"]
        assert table["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
        assert table["tokens"] == [*(f"bytes:\\x{byte:02x}" for byte in "è😸".encode()), "!", "<end>"]


def test_impossible_tokens_have_a_finite_logprob() -> None:
    with serving(Scripted(coin)) as served:
        body = {"prompt": "ab", "max_tokens": 0, "logprobs": 3, "echo": True}
        assert served.ok(PATH, body)["choices"][0]["logprobs"]["token_logprobs"] == [None, -9999.0]


@pytest.mark.parametrize("value", [-1, 21, True, "2", 1.5])
def test_case_S12_logprobs_out_of_range_are_refused(served: Served, value: Any) -> None:
    assert served.refused(PATH, {"prompt": "a", "logprobs": value})["param"] == "logprobs"


# --- S13, I14: choices ----------------------------------------------------------------------------------------------------------


def test_case_S13_three_choices_share_the_prompt_and_are_billed_once() -> None:
    with serving(Scripted(coin)) as served:
        body = {"prompt": "Once!", "n": 3, "max_tokens": 4, "seed": 7, "temperature": 1.0}
        whole = served.ok(PATH, body)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (5, 12)
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3
        assert served.model.batches[0] == {0: 5}  # the prompt was evaluated once
        assert served.ok(PATH, body)["choices"] == whole["choices"]
        chunks = served.stream(PATH, body)
        assert [text_of(chunks, i) for i in range(3)] == [choice["text"] for choice in whole["choices"]]
        assert len({choice["text"] for choice in served.ok(PATH, {**body, "max_tokens": 20})["choices"]}) > 1
        greedy = served.ok(PATH, {**body, "temperature": 0})["choices"]
        assert len({choice["text"] for choice in greedy}) == 1
        served.until(served.is_idle)
        stats = served.engine.stats()
        assert stats.used_cells == stats.evictable_cells


def test_case_I14_choices_that_cannot_be_are_refused_by_name(served: Served) -> None:
    for n in (0, -1, 1.5, "2", True, 129):
        assert served.refused(PATH, {"prompt": "Once", "n": n})["param"] == "n"
    with serving(engine={"max_running": 4}) as few:
        assert few.refused(PATH, {"prompt": "Once", "n": 5})["param"] == "n"
        assert len(few.ok(PATH, {"prompt": "Once", "n": 4, "max_tokens": 2})["choices"]) == 4


def test_best_of_is_only_a_name_for_n(served: Served) -> None:
    assert served.refused(PATH, {"prompt": "Once", "n": 1, "best_of": 2})["param"] == "best_of"
    assert len(served.ok(PATH, {"prompt": "Once", "n": 2, "best_of": 2, "max_tokens": 1})["choices"]) == 2


# --- S14, S15, I16: counts and odd parameters -----------------------------------------------------------------------------------


def test_case_S14_counts_and_reasons_of_lengths_and_ends() -> None:
    with serving(Scripted(says("ab", after=1)), cells=32) as served:
        for most, count, reason in ((1, 1, "length"), (2, 2, "length"), (3, 3, "stop"), (20, 3, "stop"), (None, 3, "stop")):
            body = served.ok(PATH, {"prompt": "x", "max_tokens": most, "temperature": 0})
            assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (count, reason)
    with serving(cells=32) as served:
        for most in (1, 5, 20):
            body = served.ok(PATH, {"prompt": "x", "max_tokens": most, "temperature": 0})
            assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (most, "length")


def test_case_S14_an_answer_that_meets_the_limit_ends_its_stream_well(small: Served) -> None:
    chunks = small.stream(PATH, {"prompt": [99] * 40, "temperature": 0, "stream_options": {"include_usage": True}})
    *_, last, usage = chunks
    assert last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == ([], 40, 24)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1e9}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [""]}, "prompt.0"),
        ({"prompt": [999_999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [2**70]}, "prompt.0"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"user": "someone"}, "user"),
        ({"id_slot": 0}, "id_slot"),
        ({"id_slot": "zero"}, "id_slot"),
        ({"messages": []}, "messages"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_case_S15_odd_parameters_are_a_400_that_names_the_field(served: Served, fields: dict[str, Any], param: str) -> None:
    before = served.engine.stats()
    for stream in ({}, {"stream": True}) if "stream_options" not in fields else ({},):
        error = served.refused(PATH, {"prompt": "a", **stream, **fields})
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"].startswith(param)
    assert served.engine.stats() == before


def test_case_I16_what_asks_for_nothing_may_be_sent(served: Served) -> None:
    nothing = dict.fromkeys(
        ("suffix", "user", "stop", "logprobs", "best_of", "seed", "logit_bias", "stream", "stream_options", "echo", "max_tokens", "model")
    )
    assert served.ok(PATH, {**nothing, "prompt": "a", "n": 1, "suffix": "", "max_tokens": 1})["choices"]
    assert served.ok(PATH, {"prompt": [[97], [98]], "max_tokens": 1, "top_k": -1, "logit_bias": {}, "stop": []})["choices"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_body"),
        (b"[]", "invalid_body"),
        (b"null", "invalid_body"),
        (b"5", "invalid_body"),
        (b'"text"', "invalid_body"),
        (b"[" * 50 + b"]" * 50, "invalid_json"),
        (b'{"prompt": ' + b"[" * 50 + b"]" * 50 + b"}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": Infinity}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"\\udfff": 1}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_value"),
    ],
)
def test_case_I16_bodies_that_are_no_request(served: Served, body: bytes, code: str) -> None:
    assert served.refused(PATH, body)["code"] == code
    assert served.ok("/health")["status"] == "ok"


def test_a_body_must_say_that_it_is_json(served: Served) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        answer = served.http.post(PATH, content=json.dumps({"prompt": "a"}), headers=headers)
        assert "application/json" in error_of(answer, 400)["message"]


def test_another_model_is_not_found(served: Served) -> None:
    error = served.refused(PATH, {"model": "gpt-5", "prompt": "a"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_prompt_that_parts_from_what_is_held_is_explained(served: Served) -> None:
    served.ok(PATH, {"prompt": "shared, then one way", "max_tokens": 1, "temperature": 0})
    body = {"prompt": "shared, then another", "max_tokens": 1, "temperature": 0}
    explained = served.ok(f"{PATH}?explain=1", body)["explain"]
    assert explained == {
        "matched": 13,
        "total": 20,
        "where": "differs",
        "position": 13,
        "cached_text": "ed, thenone way",
        "given_text": "ed, then another",
    } or (explained["matched"], explained["where"]) == (13, "differs")
    chunks = served.stream(f"{PATH}?explain=1", body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["explain"]["matched"] == 20
    assert all("explain" not in chunk for chunk in chunks[:-1])
    two = served.ok(f"{PATH}?explain=1", {**body, "prompt": ["one", "two"]})["explain"]
    assert [one["total"] for one in two] == [3, 3]
    assert error_of(served.http.post(f"{PATH}?explain=perhaps", json=body), 400)["param"] == "explain"
