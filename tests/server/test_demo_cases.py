"""Cases from public bug reports, replayed against `onekv serve` with the demo model and OpenAI's own client."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from serving import demo_server

pytestmark = pytest.mark.demo_model
CELLS = 2048


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_server(CELLS) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    salt = {"extra_body": {"cache_salt": fields.pop("salt")}} if "salt" in fields else {}
    return client.completions.create(model="smollm2", prompt=prompt, **{"temperature": 0, "max_tokens": 16, **fields}, **salt)


def streamed(client: OpenAI, prompt: Any, **fields: Any) -> str:
    return "".join(piece.choices[0].text for piece in complete(client, prompt, stream=True, **fields))


def chat(client: OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="smollm2", messages=messages, **{"temperature": 0, **fields})


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def idle(url: str, seconds: float = 2.0) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while True:
        health: dict[str, Any] = httpx.get(f"{url}/health").json()
        if health["running"] == health["waiting"] == 0:
            return health
        assert time.monotonic() < end, health
        time.sleep(0.02)


def test_case_I01_a_long_answer_is_given_up_when_its_client_leaves(url: str, client: OpenAI) -> None:
    prompt = "Count down from two hundred, one number per line:\n200\n199\n"
    stream = complete(client, prompt, max_tokens=256, stream=True)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    idle(url)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 256, "temperature": 0}, timeout=0.5)
    health = idle(url)
    assert health["used_cells"] == health["evictable_cells"]
    assert complete(client, prompt, max_tokens=4).choices[0].text == complete(client, prompt, max_tokens=4, salt="alone").choices[0].text


def test_case_I02_letters_up_to_a_stop_are_the_same_in_both_modes(client: OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "stop": ["m n o"]}
    whole = complete(client, "a b c d e f g h i j", **fields).choices[0]
    assert "k l" in whole.text
    assert "m n o" not in whole.text
    assert whole.finish_reason == "stop"
    assert streamed(client, "a b c d e f g h i j", **fields) == whole.text


def test_case_I04_emoji_stream_as_they_are_answered_whole(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Answer with exactly three animal emoji and the word 'caffè'."}]
    whole = chat(client, messages, max_tokens=24).choices[0].message.content
    pieces = [piece.choices[0].delta.content or "" for piece in chat(client, messages, max_tokens=24, stream=True)]
    assert "".join(pieces) == whole
    assert whole
    assert all("\ufffd" not in piece for piece in pieces[:-2])  # only a character that max_tokens cuts


def test_case_I05_a_repeated_prompt_is_cached_but_for_its_last_token(client: OpenAI) -> None:
    prompt = "The lighthouse keeper wrote in his log:"
    answers = [complete(client, prompt) for _ in range(3)]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert [cached(answer) for answer in answers[1:]] == [answers[0].usage.prompt_tokens - 1] * 2
    shorter = complete(client, "The lighthouse keeper wrote in his")
    assert cached(shorter) == shorter.usage.prompt_tokens - 1
    assert shorter.choices[0].text == complete(client, "The lighthouse keeper wrote in his", salt="cold").choices[0].text


def test_case_I06_a_list_with_a_changed_line_is_cached_up_to_that_line(client: OpenAI) -> None:
    lines = [f"{i} {name}" for i, name in enumerate(["apples", "bread", "milk", "eggs", "soap"] * 8)]
    prompt = "\n".join([*lines, "Total:"])
    total = complete(client, prompt, max_tokens=8).usage.prompt_tokens
    found = []
    for i, line in ((3, "3 nails"), (39, "39 nails"), (20, None)):
        changed = [*lines[:i], *([] if line is None else [line]), *lines[i + 1 :], "Total:"]
        answer = complete(client, "\n".join(changed), max_tokens=8)
        assert answer.choices[0].text == complete(client, "\n".join(changed), max_tokens=8, salt=f"cold {i}").choices[0].text
        found.append(cached(answer) / total)
    assert 0.03 < found[0] < 0.15
    assert 0.9 < found[1] < 1
    assert 0.4 < found[2] < 0.6


def test_case_I07_a_growing_chat_answers_every_turn(url: str, client: OpenAI) -> None:
    messages: list[Any] = []
    for turn in range(1, 28):
        if turn % 5 == 0:
            messages[2 * (turn // 5)]["content"] += " Please."
        messages.append({"role": "user", "content": f"Turn {turn}: add {turn} to the sum and reply with the sum only."})
        answer = chat(client, messages, max_tokens=6)
        said = answer.choices[0].message.content
        assert said
        if turn > 1 and turn % 5:
            assert cached(answer) > answer.usage.prompt_tokens // 2
        messages.append({"role": "assistant", "content": said})
    health = idle(url)
    assert health["used_cells"] == health["evictable_cells"]
    assert health["used_cells"] + health["free_cells"] == CELLS
    cold = client.chat.completions.create(
        model="smollm2", messages=messages[:-1], temperature=0, max_tokens=6, extra_body={"cache_salt": "cold"}
    )
    assert cold.choices[0].message.content == messages[-1]["content"]


def test_case_I09_sixteen_lockers_at_once_keep_their_codes(url: str, client: OpenAI) -> None:
    """Prompts with 0, 50, 400 and 1500 words before them; every fourth client leaves."""
    prompts = ["word " * (0, 50, 400, 1500)[i // 4] + f"My locker code is KIWI-{i:02}. Repeat my locker code: KIWI" for i in range(16)]
    alone = [complete(client, prompt, max_tokens=4, salt="alone").choices[0].text for prompt in prompts]
    assert alone[0].startswith("-00")
    said: dict[int, str] = {}

    def ask(i: int) -> None:
        stream = complete(client, prompts[i], max_tokens=4, stream=True)
        if i % 4 == 3:
            next(iter(stream))
            stream.close()
        else:
            said[i] = "".join(piece.choices[0].text for piece in stream)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert said == {i: alone[i] for i in range(16) if i % 4 != 3}
    health = idle(url)
    assert health["used_cells"] == health["evictable_cells"]


def test_case_I10_prompts_at_the_limit_and_over_it(url: str, client: OpenAI) -> None:
    start = time.monotonic()
    with pytest.raises(BadRequestError) as refused:
        complete(client, "pebble " * 70_000)
    assert time.monotonic() - start < 10
    numbers = [int(number) for number in re.findall(r"\d+", refused.value.message)]
    assert max(numbers) > 70_000
    assert CELLS in numbers
    assert refused.value.code == "context_length_exceeded"
    for length in (CELLS, CELLS + 1):
        with pytest.raises(BadRequestError, match=f"{length} tokens"):
            complete(client, [28] * length, stream=True, max_tokens=1)
    answer = complete(client, [28] * (CELLS - 1), max_tokens=None)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")
    assert complete(client, "The lighthouse keeper wrote in his log:").choices[0].text
