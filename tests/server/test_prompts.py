"""From messages to tokens: where turns end, and what of a conversation need not be written again."""

from __future__ import annotations

import pytest

from onekv import Window
from onekv.server import prompts
from scripted import TEMPLATE, Scripted, byte_text, says
from serving import serving

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
]


def test_turns_end_where_the_template_ends_them() -> None:
    text = byte_text()
    ids = prompts.rendered(text, TURNS, None)
    ends = prompts.spans(text, TURNS, None, ids)
    assert [text.decode(ids[start:end], special=True) for start, end in zip([0, *ends], ends, strict=False)] == [
        f"<start>{turn['role']}\n{turn['content']}<end>\n" for turn in TURNS
    ]
    assert prompts.ends(text, TURNS, None, ids) == ends


def test_a_template_that_writes_earlier_turns_otherwise_has_no_clean_ends_there() -> None:
    strips = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:1] }}")
    text = byte_text(strips)
    ids = prompts.rendered(text, TURNS, None)
    assert prompts.spans(text, TURNS, None, ids) == [None, None, None, len(ids) - len("<assistant\n")]
    refuses = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}" + TEMPLATE
    assert prompts.spans(byte_text(refuses), TURNS, None, prompts.rendered(byte_text(refuses), TURNS, None))[0] is None


def test_tokens_of_another_conversation_have_no_turns_of_this() -> None:
    text = byte_text()
    assert prompts.spans(text, TURNS, None, text.encode("something else")) == [None] * 4
    assert prompts.spans(text, TURNS, None, []) == [None] * 4


def test_what_is_held_is_gone_on_from_as_it_was_made() -> None:
    text = byte_text()
    whole = prompts.rendered(text, TURNS, None)
    for count in range(1, len(TURNS)):
        held = prompts.rendered(text, TURNS[:count], None, add_generation_prompt=False)
        assert prompts.continued(text, held, TURNS, None) == whole
        assert prompts.continued(text, held[:-1], TURNS, None) == whole  # the end token of an answer, without what follows it
    assert prompts.continued(text, [], TURNS, None) == whole
    assert prompts.continued(text, text.encode("other"), TURNS, None) == whole


@pytest.mark.parametrize("size", [8, 16])
def test_a_windowed_model_can_go_on_from_the_end_of_every_turn(size: int) -> None:
    """What a window has given up is lost, except at points: a prompt that parts from another at the end of a turn finds its cells."""
    model = Scripted(says("a long enough answer"), window=Window.sliding(size))
    with serving(model, cells=400) as served:
        assert served.engine.scheduler.by_points
        system = {"role": "system", "content": "be kind and patient with everybody"}
        first = {"messages": [system, {"role": "user", "content": "one question"}], "temperature": 0}
        served.ok("/v1/chat/completions", first)
        other = {"messages": [system, {"role": "user", "content": "2"}], "temperature": 0}
        answer = served.ok("/v1/chat/completions", other)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len("<system\n") + len(system["content"]) + len(">\n")
    with serving() as served:
        assert not served.engine.scheduler.by_points
