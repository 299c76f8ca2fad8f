"""Text of an answer as its tokens come: stop strings, characters over several tokens, log-probabilities."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from onekv import BatchError, ConfigError, OneKVError
from onekv.engine.output import Output, Piece
from onekv.engine.sampler import Sampler, Sampling, TokenLogprobs, token_logprobs
from onekv.models.text import Text

Scripted = Callable[[Sequence[bytes]], tuple[Text, list[int]]]
FOX = [b"The", b" quick", b" br", b"own", b" fox", b" jumps"]
CAT, FAMILY = "😸".encode(), "👩‍👩‍👧".encode()
END = 256


def pushed(text: Text, ids: Sequence[int], stop: Sequence[str] = (), **options: Any) -> list[Piece]:
    """The pieces of all tokens up to a stop, and of the end."""
    output, pieces = Output(text, stop, **options), []
    for token in ids:
        pieces.append(output.push(token))
        if pieces[-1].stopped:
            break
    pieces.append(output.finish())
    assert output.text == "".join(piece.text for piece in pieces)
    return pieces


def texts(scripted: Scripted, tokens: Sequence[bytes], stop: Sequence[str] = ()) -> list[str]:
    return [piece.text for piece in pushed(*scripted(tokens), stop)]


# --- characters ---------------------------------------------------------------------------------------------------------------------


def test_case_S09_a_character_over_tokens_is_given_out_with_its_last_byte(scripted: Scripted) -> None:
    assert texts(scripted, [CAT[:2], CAT[2:], b"!"]) == ["", "😸", "!", ""]
    assert texts(scripted, ["漢".encode()[i : i + 1] for i in range(3)]) == ["", "", "漢", ""]


def test_case_S09_the_first_of_two_emoji_does_not_wait_for_the_second(scripted: Scripted) -> None:
    assert texts(scripted, [CAT[:2], CAT[2:] + CAT[:1], CAT[1:3], CAT[3:]]) == ["", "😸", "", "😸", ""]


def test_case_S09_a_cut_character_is_one_replacement(scripted: Scripted) -> None:
    assert texts(scripted, [b"a", CAT[:2]]) == ["a", "", "\ufffd"]


def test_case_S09_an_invalid_byte_delays_nothing(scripted: Scripted) -> None:
    assert texts(scripted, [b"a", b"\xff", b"\xff", b"b", CAT[:2], b"\xff", CAT]) == [
        "a",
        "\ufffd",
        "\ufffd",
        "b",
        "",
        "\ufffd\ufffd",
        "😸",
        "",
    ]


def test_case_S09_a_token_comes_with_the_last_of_its_characters(scripted: Scripted) -> None:
    text, ids = scripted([b"a", CAT[:2], CAT[2:] + CAT[:1], CAT[1:], CAT[:1]])
    assert [piece.token_ids for piece in pushed(text, ids)] == [(ids[0],), (), (ids[1],), (ids[2], ids[3]), (), (ids[4],)]


def test_case_S09_joined_emoji_come_part_by_part(scripted: Scripted) -> None:
    pieces = texts(scripted, [FAMILY[i : i + 1] for i in range(len(FAMILY))])
    assert [piece for piece in pieces if piece] == list("👩‍👩‍👧")


def test_a_character_that_a_tokenizer_hides_is_given_up_after_four_tokens(scripted: Scripted) -> None:
    text, ids = scripted([b"a", CAT[:2], CAT[2:], b"\xff"])
    text.__dict__["_decoders"] = None  # as for a tokenizer that is none of the tokenizers library
    cat = [piece.text for piece in pushed(text, ids[:3])]
    assert cat == ["a", "", "😸", ""]
    assert [piece.text for piece in pushed(text, [ids[0], *[ids[3]] * 5])] == ["a", "", "", "", "\ufffd" * 4, "", "\ufffd"]


# --- stop strings -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [["own fox"], ["ow", "own fox"], ["own fox", "ow"]])
def test_case_S10_a_stop_string_over_token_borders_never_shows(scripted: Scripted, stop: list[str]) -> None:
    pieces = pushed(*scripted(FOX), stop)
    assert "".join(piece.text for piece in pieces) == "The quick br"
    assert [piece.stopped for piece in pieces][-2:] == [True, True]


def test_case_S10_only_what_may_begin_a_stop_string_is_held_back(scripted: Scripted) -> None:
    assert texts(scripted, [b"br", b"o", b"w", b"n", b" f", b"ig"], ["own fox"]) == ["br", "", "", "", "", "own fig", ""]
    assert texts(scripted, [b"aab", b"aab", b"c"], ["aabaac"]) == ["", "aab", "aabc", ""]


def test_case_S10_what_was_held_back_comes_at_the_end(scripted: Scripted) -> None:
    assert texts(scripted, [b"br", b"own"], ["own fox"]) == ["br", "", "own"]


def test_case_S10_a_stop_string_may_cross_a_character_of_several_tokens(scripted: Scripted) -> None:
    assert texts(scripted, [b"a", CAT[:2], CAT[2:] + b"b", b"c"], ["😸bc"]) == ["a", "", "", "", ""]
    assert texts(scripted, [b"a", CAT[:2]], ["\ufffd"]) == ["a", "", ""]


def test_case_S10_the_stop_string_complete_first_wins(scripted: Scripted) -> None:
    for tokens in ([b"xabcd"], [b"xa", b"bc", b"d"]):
        assert "".join(texts(scripted, tokens, ["abcd", "bc"])) == "xa"
        assert "".join(texts(scripted, tokens, ["bc", "abc"])) == "x"


def test_case_S10_tokens_of_a_cut_stop_string_come_with_the_stop(scripted: Scripted) -> None:
    text, ids = scripted(FOX)
    pieces = pushed(text, ids, ["own fox"])
    assert [piece.token_ids for piece in pieces] == [(ids[0],), (ids[1],), (ids[2],), (), (ids[3], ids[4]), ()]


def test_after_the_end_nothing_is_taken(scripted: Scripted) -> None:
    text, ids = scripted(FOX)
    output = Output(text, ["The"])
    assert output.push(ids[0]).stopped
    assert output.finish() == output.finish() == Piece("", (), (), True)
    with pytest.raises(OneKVError, match="over"):
        output.push(ids[1])
    output = Output(text)
    output.finish()
    with pytest.raises(OneKVError, match="over"):
        output.push(ids[1])


@pytest.mark.parametrize("stop", [[""], "own", [1]])
def test_a_stop_that_is_no_string_is_refused(scripted: Scripted, stop: Any) -> None:
    with pytest.raises(ConfigError, match="stop"):
        Output(scripted([])[0], stop)


def test_a_negative_id_is_refused_and_changes_nothing(scripted: Scripted) -> None:
    text, [a] = scripted([b"a"])
    output = Output(text)
    with pytest.raises(BatchError, match="-1"):
        output.push(-1)
    assert output.push(a) == Piece("a", (a,), (), False)


def test_special_tokens_are_text_only_on_request_and_tokens_always(scripted: Scripted) -> None:
    text, [a] = scripted([b"a"])
    assert pushed(text, [a, END]) == [Piece("a", (a,), (), False), Piece("", (END,), (), False), Piece("", (), (), False)]
    assert pushed(text, [a, END], special=True)[1] == Piece("</s>", (END,), (), False)
    assert "".join(piece.text for piece in pushed(text, [a, END], ["</s>"], special=True)) == "a"


# --- log-probabilities --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_S12_scripted_logits_give_their_log_probabilities(temperature: float) -> None:
    logits = torch.tensor([0.0, math.log(3.0)])
    sampler = Sampler(Sampling(temperature=temperature, seed=1))
    for _ in range(4):
        token = sampler(logits)
        entry = token_logprobs(logits, token, top=2)
        assert entry.token_id == token
        assert [token_id for token_id, _ in entry.top] == [1, 0]
        assert [value for _, value in entry.top] == pytest.approx([-0.2877, -1.3863], abs=1e-4)
        assert entry.logprob == dict(entry.top)[token]


def test_case_S12_no_entry_is_lost_with_text_that_is_held_back(scripted: Scripted) -> None:
    text, ids = scripted([*FOX[:4], CAT[:2], CAT[2:]])
    entries = [TokenLogprobs(token, -0.5, ()) for token in [*ids, END]]
    for stop in ([], ["own fox"], ["\U0001f638!"], ["brown", "x"]):
        output = Output(text, stop)
        pieces = []
        for entry in entries:
            pieces.append(output.push(entry.token_id, entry))
            if pieces[-1].stopped:
                break
        pieces.append(output.finish())
        count = len(pieces) - 1
        assert [entry for piece in pieces for entry in piece.logprobs] == entries[:count]
        assert all(piece.token_ids == tuple(entry.token_id for entry in piece.logprobs) for piece in pieces)


# --- any cut gives the same ---------------------------------------------------------------------------------------------------------

ALPHABET = [b"a", b"b", b"aa", b" ", b"\xff", b"\x80", b"\xf0", CAT[:1], CAT[:2], CAT[1:3], CAT[3:], CAT, "é".encode(), "é".encode()[:1]]


def until_stop(whole: str, stops: Sequence[str]) -> str:
    """The slow twin: the first prefix that ends with a stop string, without it."""
    for end in range(1, len(whole) + 1):
        matching = [s for s in stops if whole[:end].endswith(s)]
        if matching:
            return whole[: end - max(map(len, matching))]
    return whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(
    parts=st.lists(st.sampled_from(ALPHABET), max_size=16),
    cuts=st.sets(st.integers(1, 60)),
    stops=st.lists(st.sampled_from(["a", "b", "ab", "aab", "aabaa", "a ", "😸", "😸a", "\ufffd", "\ufffdb", "é\ufffd"]), max_size=3),
)
def test_any_cut_into_tokens_gives_the_text_up_to_the_stop(
    parts: list[bytes], cuts: set[int], stops: list[str], scripted: Scripted
) -> None:
    joined = b"".join(parts)
    borders = [0, *sorted(cut for cut in cuts if cut < len(joined)), len(joined)]
    tokens = [joined[i:j] for i, j in pairwise(borders) if i < j]
    text, ids = scripted(tokens)
    pieces = pushed(text, ids, stops)
    whole = joined.decode("utf-8", "replace")
    assert "".join(piece.text for piece in pieces) == until_stop(whole, stops)
    assert pieces[-1].stopped == (until_stop(whole, stops) != whole)
    used = len(pieces) - 1
    assert [token for piece in pieces for token in piece.token_ids] == ids[:used]
    # Nothing is held back without a reason: an incomplete character, or the start of a stop string.
    so_far = ""
    for i, piece in enumerate(pieces[:-1]):
        so_far += piece.text
        complete = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens[: i + 1]))
        if not piece.stopped:
            held = complete.removeprefix(so_far)
            assert so_far + held == complete
            assert not held or any(stop.startswith(held) for stop in stops)
