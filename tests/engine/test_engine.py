"""The engine on a scripted model: every answer equals its answer alone, whatever happens to the others."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onekv import BatchError, ConfigError, ContextShift, RequestTooLarge, Window
from onekv.engine.request import Delta, Done, Failed, Finished, Request, Started, Stream
from onekv.errors import EngineClosed, QueueFull, SessionBusy
from scripted import END, VOCAB, Scripted, alone, engine_of, ids, says, settled


def test_an_answer_is_what_the_model_says() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        result = engine.generate([5, 6, 7], max_tokens=10)
        assert ids(result) == alone(model, [5, 6, 7], 10)
        assert result.text == bytes(ids(result)).decode()
        assert result.choices[0].reason == "length"
        assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (3, 0, 10)
        settled(engine)


def test_requests_at_once_equal_each_alone_though_prompts_are_cut_and_answers_preempted() -> None:
    model = Scripted()
    prompts = [[i + 1] * (3 + 5 * i) for i in range(6)]
    with engine_of(model, 64) as engine:
        streams = [engine.stream(prompt, max_tokens=12) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert ids(stream.result()) == alone(model, prompt, 12)
        assert engine.stats().preemptions > 0
        assert any(len(batch) > 1 for batch in model.batches)
        assert max(sum(batch.values()) for batch in model.batches) <= 8
        settled(engine)


@pytest.mark.parametrize("preempt", ["recompute", "spill"])
def test_case_P11_a_preempted_answer_goes_on_where_it_was(preempt: Any) -> None:
    model = Scripted()
    one, two = [1, 2, 3, 4], [9, 8, 7, 6]
    with engine_of(model, 14, preempt=preempt) as engine:
        model.may_go.clear()
        streams = [engine.stream(prompt, max_tokens=8) for prompt in (one, two)]
        model.may_go.set()
        results = [stream.result() for stream in streams]
        assert [ids(r) for r in results] == [alone(model, one, 8), alone(model, two, 8)]
        assert [r.usage.completion_tokens for r in results] == [8, 8]
        assert engine.stats().preemptions == 1
        settled(engine)


def test_case_S06_one_answer_ends_with_all_the_cells_there_are() -> None:
    model = Scripted()
    prompts = [list(range(12)), list(range(20, 32))]
    with engine_of(model, 32) as engine:
        results = [stream.result() for stream in [engine.stream(prompt) for prompt in prompts]]
        for prompt, result in zip(prompts, results, strict=True):
            assert ids(result) == alone(model, prompt, 20)
            assert result.choices[0].reason == "length"
        settled(engine)


def test_case_S06_a_row_that_breaks_the_model_fails_only_its_request() -> None:
    model = Scripted(broken=lambda tokens: tokens[0] == 66 and len(tokens) > 6)
    with engine_of(model) as engine:
        model.may_go.clear()
        streams = [engine.stream([i, 3, 4, 5], max_tokens=9) for i in (65, 66, 67)]
        model.may_go.set()
        with pytest.raises(RuntimeError, match="this row breaks the model"):
            streams[1].result()
        for i, stream in ((65, streams[0]), (67, streams[2])):
            assert ids(stream.result()) == alone(model, [i, 3, 4, 5], 9)
        assert engine.stats().finished == {"failed": 1, "length": 2}
        settled(engine)


def test_case_S07_idle_cells_give_way() -> None:
    model = Scripted()
    a, b = [1] * 20, [2] * 20
    with engine_of(model, 64) as engine:
        streams = [engine.stream(a, max_tokens=40), engine.stream(b, max_tokens=8)]
        assert [ids(s.result()) for s in streams] == [alone(model, a, 40), alone(model, b, 8)]
        settled(engine)
    with engine_of(model, 32) as engine:
        assert len(ids(engine.generate(list(range(12)), max_tokens=8))) == 8
        assert engine.stats().evictable_cells == 19
        assert ids(engine.generate([7] * 24, max_tokens=2)) == alone(model, [7] * 24, 2)
        assert engine.stats().evicted_cells > 0
        settled(engine)


# --- prefixes -----------------------------------------------------------------------------------------------------------------------


def test_case_P01_the_last_token_of_a_prompt_is_always_evaluated() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        first = engine.generate([1, 2, 3, 4, 5], max_tokens=8)
        again = engine.generate([1, 2, 3, 4, 5], max_tokens=8)
        assert (again.usage.cached_tokens, ids(again)) == (4, ids(first))
        shorter = engine.generate([1, 2, 3], max_tokens=3)
        assert (shorter.usage.cached_tokens, ids(shorter)) == (2, alone(model, [1, 2, 3], 3))
        assert engine.generate([1], max_tokens=1).usage.cached_tokens == 0


@pytest.mark.parametrize("prompt", [[5], [1, 2, 3, 4, 5], list(range(30))], ids=len)
def test_case_P01_a_window_that_cannot_step_back_is_evaluated_again(prompt: list[int]) -> None:
    model = Scripted(window=Window.sliding(4))
    with engine_of(model, 64) as engine:
        first = engine.generate(prompt, max_tokens=12)
        for given in (prompt, prompt[:-2] or prompt, prompt):
            again = engine.generate(given, max_tokens=12)
            assert ids(again) == alone(model, given, 12)
            assert again.usage.cached_tokens < len(given)
        assert ids(first) == alone(model, prompt, 12)
        settled(engine)


def test_case_P02_another_first_token_shares_nothing() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        engine.generate(list(range(10)), max_tokens=6)
        other = engine.generate(list(range(50, 60)), max_tokens=6)
        assert (other.usage.cached_tokens, ids(other)) == (0, alone(model, list(range(50, 60)), 6))


def test_case_P05_keys_do_not_mix() -> None:
    with engine_of(Scripted(), 128) as engine:
        keys: list[Any] = [(("adapter", "X"),), (("salt", "X"),), (), (("salt", "None"),), (("salt", ""),)]
        assert [engine.generate([1, 2, 3], max_tokens=1, key=key).usage.cached_tokens for key in keys] == [0] * 5
        assert [engine.generate([1, 2, 3], max_tokens=1, key=key).usage.cached_tokens for key in keys] == [2] * 5


def test_case_P07_a_session_that_was_edited_is_found_by_what_it_holds_now() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        session = engine.session()
        first = engine.generate([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1, session=session)
        session.truncate(6)
        edited = [1, 2, 3, 4, 5, 6, 90, 91, 92]
        assert engine.generate(edited, max_tokens=1, session=session).usage.cached_tokens == 6
        for prompt, cached in (([1, 2, 3, 4, 5, 6, 7, 8, 9], 6), (edited, 8)):
            result = engine.generate(prompt, max_tokens=2)
            assert (result.usage.cached_tokens, ids(result)) == (cached, alone(model, prompt, 2))
        assert ids(first) == alone(model, [1, 2, 3, 4, 5, 6, 7, 8], 1)
        settled(engine)


def test_case_P08_token_ids_are_compared_and_not_texts() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        engine.generate([1, 2, 65, 66], max_tokens=2)
        result = engine.generate([1, 2, 200, 7], max_tokens=2)
        assert (result.usage.cached_tokens, ids(result)) == (2, alone(model, [1, 2, 200, 7], 2))


def test_case_P09_log_probabilities_of_a_prompt_are_all_there_each_time() -> None:
    def answer(tokens: list[int]) -> torch.Tensor:
        return torch.arange(VOCAB).float().roll(sum(tokens)) / 50

    model = Scripted(answer)
    prompt = [3, 1, 4, 1, 5, 9]
    with engine_of(model, max_batch_tokens=5) as engine:
        engine.generate(prompt, max_tokens=4)
        results = [engine.generate(prompt, max_tokens=2, logprobs=2, prompt_logprobs=True) for _ in range(2)]
        for result in results:
            assert result.prompt_logprobs[0] is None
            for i, entry in enumerate(result.prompt_logprobs[1:], 1):
                assert entry is not None
                told = torch.log_softmax(answer(prompt[:i]), -1)
                assert entry.token_id == prompt[i]
                assert entry.logprob == pytest.approx(float(told[prompt[i]]), abs=1e-5)
                assert [t for t, _ in entry.top] == told.topk(2).indices.tolist()
            assert len(result.prompt_logprobs) == 6
            assert len(result.choices[0].logprobs) == 2
        assert results[0].choices == results[1].choices
        scored = engine.generate([7], max_tokens=0, prompt_logprobs=True)
        assert (scored.prompt_logprobs, scored.choices[0].token_ids, scored.choices[0].reason) == ((None,), [], "length")
        settled(engine)


def test_case_P10_the_accounts_add_up() -> None:
    model = Scripted()
    with engine_of(model, 32) as engine:
        for last in (1, 2, 3):
            engine.generate([*range(10), last, 50, 51, 52], max_tokens=1)
        assert engine.stats().used_cells == engine.scheduler.tree.num_tokens == 10 + 3 * 4
        settled(engine)
        engine.generate([100] * 20, max_tokens=1)
        assert engine.stats().used_cells == engine.scheduler.tree.num_tokens <= 32
        settled(engine)
    with engine_of(model, 1024) as engine:
        for count, cached in ((256, 0), (256, 255), (257, 256)):
            evaluated = sum(sum(batch.values()) for batch in model.batches)
            usage = engine.generate([i % 250 for i in range(count)], max_tokens=1).usage
            evaluated = sum(sum(batch.values()) for batch in model.batches) - evaluated
            assert (usage.cached_tokens, usage.prompt_tokens) == (cached, count)
            assert evaluated == count - cached


def test_case_P10_shared_cells_count_once_and_are_given_back_once() -> None:
    with engine_of(Scripted(), 32) as engine:
        trunk = engine.session()
        engine.generate(list(range(10)), max_tokens=1, session=trunk)
        sessions = [trunk.fork(10) for _ in range(3)]
        for i, session in enumerate(sessions):
            engine.generate([*range(10), 50 + i, 61, 62, 63], max_tokens=1, session=session)
        trunk.free()
        assert engine.stats().used_cells == 10 + 3 * 4
        for _ in range(2):
            sessions[0].free()
            stats = engine.stats()
            assert (stats.used_cells, stats.used_cells + stats.free_cells) == (18, 32)
        settled(engine)


def test_equal_prompts_at_once_are_evaluated_once() -> None:
    model = Scripted()
    prompt = [i % 200 for i in range(100)]
    with engine_of(model, 256) as engine:
        model.may_go.clear()
        streams = [engine.stream([*prompt, i], max_tokens=3) for i in range(4)]
        model.may_go.set()
        results = [stream.result() for stream in streams]
        assert [ids(r) for r in results] == [alone(model, [*prompt, i], 3) for i in range(4)]
        assert sum(sum(batch.values()) for batch in model.batches) <= 101 + 4 * 3
        assert sorted(r.usage.cached_tokens for r in results) == [0, 100, 100, 100]
        settled(engine)
        assert engine.stats().used_cells == 100 + 4 * 3


def test_beginnings_evaluated_twice_are_kept_once() -> None:
    model = Scripted()
    with engine_of(model, 64) as engine:
        model.may_go.clear()
        streams = [engine.stream([1, 2, 3, 4, i], max_tokens=2) for i in range(3)]  # too short to wait for
        model.may_go.set()
        for stream in streams:
            stream.result()
        assert engine.stats().used_cells == engine.scheduler.tree.num_tokens == 4 + 3 * 2
        settled(engine)


def test_points_stay_restorable_on_a_windowed_model() -> None:
    model = Scripted(window=Window.sliding(4))
    system = list(range(10, 20))
    with engine_of(model, 64) as engine:
        first = engine.generate([*system, *[1] * 30], max_tokens=2, points=[10])
        assert ids(first) == alone(model, [*system, *[1] * 30], 2)
        # The window has moved on; cells are scarce.
        engine.generate([100] * 55, max_tokens=1)
        again = engine.generate([*system, 2, 2], max_tokens=3)
        assert again.usage.cached_tokens == 10
        assert ids(again) == alone(model, [*system, 2, 2], 3)
        settled(engine)


def test_explain_says_where_a_prompt_leaves_what_is_held() -> None:
    with engine_of(Scripted()) as engine:
        engine.generate([1, 2, 3, 4, 5], max_tokens=1)
        told = engine.explain([1, 2, 9])
        assert (told.matched, told.reason, told.held, told.given) == (2, "differs", (1, 2, 3, 4, 5), (1, 2, 9))
        result = engine.generate([1, 2, 9], max_tokens=1, explain=True)
        assert result.explanation == told


def test_what_a_session_holds_is_explained_too() -> None:
    with engine_of(Scripted()) as engine:
        session = engine.session()
        first = engine.generate([1, 2, 3, 4, 5], max_tokens=2, session=session)
        told = engine.explain([1, 2, 3, 9])
        assert (told.matched, told.reason, told.held) == (3, "differs", (1, 2, 3, 4, 5, ids(first)[0]))
        again = engine.generate([*session.tokens, 7], max_tokens=1, session=session, explain=True)
        assert again.explanation is not None
        assert (again.explanation.matched, again.explanation.reason) == (6, "never")
        session.remove(1, 2, mode="shift")
        assert engine.explain([1, 3, 4]).matched == 1  # what was shifted is nobody else's
        shifted = engine.generate([*session.tokens[:4], 9], max_tokens=1, session=session, explain=True)
        assert shifted.explanation is not None
        assert (shifted.explanation.matched, shifted.usage.cached_tokens) == (4, 4)


# --- several answers ----------------------------------------------------------------------------------------------------------------


def test_case_S13_answers_share_the_cells_of_the_prompt() -> None:
    model = Scripted()
    with engine_of(model, 64) as engine:
        used: list[int] = []
        forward = model.forward

        def watched(step: Any) -> torch.Tensor:
            used.append(step.plan.cache.num_used)
            return forward(step)

        model.forward = watched  # type: ignore[method-assign]
        result = engine.generate([1, 2, 3, 4, 5], max_tokens=4, n=3, seed=1)
        assert [ids(result, i) for i in range(3)] == [alone(model, [1, 2, 3, 4, 5], 4)] * 3
        assert max(used) <= 5 + 3 * 4
        assert sum(sum(batch.values()) for batch in model.batches) == 5 + 3 * 3
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 12)
        settled(engine)
        with pytest.raises(ConfigError, match="n=5 answers at a time are more than the 4 that can run"):
            engine.stream([1], n=5)


def test_sampled_answers_differ_and_can_be_repeated() -> None:
    model = Scripted(lambda tokens: torch.zeros(VOCAB))
    with engine_of(model, 128) as engine:
        one, two = (engine.generate([1, 2], max_tokens=8, n=3, temperature=1.0, seed=7, ignore_eos=True) for _ in range(2))
        assert [ids(one, i) for i in range(3)] == [ids(two, i) for i in range(3)]
        assert len({tuple(ids(one, i)) for i in range(3)}) == 3
        assert ids(engine.generate([1, 2], max_tokens=8, temperature=1.0, seed=8, ignore_eos=True)) == ids(one, 1)


def test_beams_share_cells_wait_for_each_other_and_leave_nothing_behind() -> None:
    def answer(tokens: list[int]) -> torch.Tensor:
        return torch.sin(torch.arange(VOCAB) * 0.7 + sum(tokens) % 91) * 3

    model = Scripted(answer)
    with engine_of(model, 512) as roomy:
        expected = [[ids(roomy.generate([i] * 6, beams=3, n=3, max_tokens=10), k) for k in range(3)] for i in range(3)]
        assert len({tuple(choice) for choice in expected[0]}) == 3
        assert roomy.stats().used_cells < 3 * (6 + 3 * 9)
        settled(roomy)
    for cells in (36, 44):
        with engine_of(model, cells, max_running=10, max_batch_tokens=16) as engine:
            streams = [engine.stream([i] * 6, beams=3, n=3, max_tokens=10) for i in range(3)]
            beside = engine.stream([9] * 8, max_tokens=20)
            for i, stream in enumerate(streams):
                result = stream.result()
                assert [ids(result, k) for k in range(3)] == expected[i]
            assert ids(beside.result()) == alone(model, [9] * 8, 20)
            assert engine.stats().preemptions > 0
            settled(engine)


def test_beams_go_on_though_every_likely_token_ends_an_answer() -> None:
    def answer(tokens: list[int]) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[200:205] = 9.0
        return logits

    model = Scripted(answer)
    model.text.eos_ids = frozenset(range(200, 205))
    with engine_of(model) as engine:
        result = engine.generate([1, 2, 3], beams=2, n=2, max_tokens=3)
        assert all(choice.token_ids[-1] in model.text.eos_ids for choice in result.choices)
        settled(engine)


def test_a_beam_search_is_cancelled_and_refused_like_any_request() -> None:
    model = Scripted(lambda tokens: torch.zeros(VOCAB), delay=0.002)
    with engine_of(model, 64) as engine:
        stream = engine.stream([1, 2, 3], beams=3, n=2, max_tokens=15)
        next(iter(stream))
        stream.cancel()
        assert [c.reason for c in stream.result().choices] == ["cancelled"] * 2
        settled(engine)
        with pytest.raises(RequestTooLarge, match="a prompt of 3 tokens and 3 beams may need 93 cells at a time, the buffer has 64"):
            engine.stream([1, 2, 3], beams=3, max_tokens=30)
        for options, message in (
            ({"n": 4}, "at most as many answers, n is 4"),
            ({"temperature": 1.0}, "takes no sampling"),
            ({"stop": ("x",)}, "takes no stop"),
            ({"logprobs": 1}, "takes no logprobs"),
            ({"prompt_logprobs": True}, "takes no prompt_logprobs"),
            ({"beams": -1}, "beams must be an integer of at least 0"),
            ({"beams": 9}, "n=9 answers"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine.stream([1], **{"beams": 3, **options})


# --- ends ---------------------------------------------------------------------------------------------------------------------------


def test_an_end_token_and_a_stop_string_and_a_stop_id_end_an_answer() -> None:
    model = Scripted(says("The quick brown fox"))
    with engine_of(model) as engine:
        whole = engine.generate("Go\n", max_tokens=40)
        assert (whole.choices[0].text, whole.choices[0].reason) == ("The quick brown fox", "stop")
        assert ids(whole)[-1] == END
        cut = engine.generate("Go\n", max_tokens=40, stop=("own fox", "ow"))
        assert (cut.choices[0].text, cut.choices[0].reason) == ("The quick br", "stop")
        assert bytes(ids(cut)) == b"The quick brow"
        by_id = engine.generate("Go\n", max_tokens=40, stop_ids=(ord("q"),))
        assert (by_id.choices[0].text, by_id.choices[0].reason) == ("The ", "stop")
        assert [engine.generate("Go\n", max_tokens=n).usage.completion_tokens for n in (1, 5, 19)] == [1, 5, 19]
        settled(engine)


def test_a_stream_has_its_events_in_order() -> None:
    with engine_of(Scripted(says("ab"))) as engine:
        events = list(engine.stream("Go\n", max_tokens=9))
        assert [type(e) for e in events] == [Started, Delta, Delta, Delta, Finished, Done]
        assert events[-2] == Finished(0, "stop", 3)
        heard: list[Any] = []
        over = threading.Event()
        stream = engine.stream("Go\n", max_tokens=9)
        stream.listen(lambda event: (heard.append(event), over.set() if isinstance(event, Done | Failed) else None))
        assert over.wait(10)
        assert [type(e) for e in heard] == [type(e) for e in events]


def test_a_cancelled_answer_ends_at_once_wherever_it_is() -> None:
    model = Scripted(delay=0.005)
    with engine_of(model, 64, max_running=1, max_batch_tokens=4) as engine:
        running, waiting = engine.stream([1] * 20), engine.stream([2] * 20)
        events = iter(running)
        assert isinstance(next(events), Started)
        waiting.cancel()
        assert [c.reason for c in waiting.result().choices] == ["cancelled"]
        running.cancel()
        running.cancel()
        assert next(e for e in events if isinstance(e, Finished)).reason == "cancelled"
        settled(engine)
        running.cancel()  # after its end: nothing
        assert ids(engine.generate([1] * 20, max_tokens=3)) == alone(model, [1] * 20, 3)
        assert engine.stats().finished == {"cancelled": 2, "length": 1}


def test_one_of_several_answers_does_not_keep_the_others_when_cancelled() -> None:
    model = Scripted(delay=0.002)
    with engine_of(model) as engine:
        stream = engine.stream([1, 2], n=3)
        next(iter(stream))
        stream.cancel()
        assert [c.reason for c in stream.result().choices] == ["cancelled"] * 3
        settled(engine)


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    with engine_of(Scripted(max_positions=20), 64) as engine:
        with pytest.raises(RequestTooLarge, match=r"25 tokens and 1 to generate need 26; the limit is 20"):
            engine.stream([1] * 25)
        with pytest.raises(RequestTooLarge) as told:
            engine.stream([1] * 15, max_tokens=6)
        assert (told.value.needed, told.value.limit) == (21, 20)
        assert len(ids(engine.generate([1] * 19))) == 1
        assert engine.stats().used_cells == 19


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"n": 1.5}, "n must be an integer of at least 1"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"logprobs": -1}, "logprobs must be an integer of at least 0"),
        ({"stop": ("",)}, "stop takes non-empty strings"),
        ({"colour": 1}, "unknown options: colour"),
        ({"temperature": -1}, "temperature"),
        ({"context_shift": 3}, "context_shift"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with engine_of(Scripted()) as engine, pytest.raises(ConfigError, match=message):
        engine.generate([1], **options)


def test_bad_tokens_are_named() -> None:
    with engine_of(Scripted()) as engine:
        for prompt, message in (([], "at least one token"), ([VOCAB], "258 is not in"), ([-1], "non-negative"), ([1.5], "non-negative")):
            with pytest.raises(BatchError, match=message):
                engine.generate(prompt)
        with pytest.raises(BatchError, match="is not in"):
            engine.generate([1], logit_bias={9999: 1.0})
        assert engine.stats().requests == 0


def test_bad_settings_are_named() -> None:
    model = Scripted()
    for settings, message in (
        ({"max_running": 0}, "max_running"),
        ({"max_batch_tokens": 4}, "max_batch_tokens must be an integer of at least 5"),
        ({"preempt": "drop"}, "preempt"),
        ({"speculate": -1}, "speculate"),
        ({"cache": {"max_seqs": 4}}, "max_running=4 answers need a cache with more than max_seqs=4"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_of(model, **settings)  # type: ignore[arg-type]


def test_a_full_queue_refuses() -> None:
    model = Scripted()
    with engine_of(model, max_running=1, max_waiting=2) as engine:
        model.may_go.clear()
        streams = [engine.stream([1], max_tokens=2)]
        deadline = time.monotonic() + 5
        while engine._queued and time.monotonic() < deadline:
            time.sleep(0.001)
        streams += [engine.stream([2], max_tokens=2) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 answers wait"):
            engine.stream([3], max_tokens=2)
        model.may_go.set()
        for stream in streams:
            stream.result()
        assert engine.generate([3], max_tokens=2).choices[0].reason == "length"


def test_a_closing_engine_finishes_what_it_can_and_tells_the_rest() -> None:
    model = Scripted(delay=0.01)
    engine = engine_of(model)
    short, long = engine.stream([1], max_tokens=3), engine.stream([2])
    engine.close(timeout=0.3)
    assert len(ids(short.result())) == 3
    with pytest.raises(EngineClosed, match="closed before this request was finished"):
        long.result()
    with pytest.raises(EngineClosed, match="takes no more requests"):
        engine.stream([1])
    with pytest.raises(EngineClosed, match="has ended"):
        engine.explain([1])
    engine.close()
    assert engine.stats().used_cells == 0


def test_the_next_request_finds_the_engine_working_after_a_fault_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scripted()
    with engine_of(model) as engine:
        monkeypatch.setattr(engine.scheduler, "next_batch", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([1], max_tokens=1)
        monkeypatch.undo()
        assert ids(engine.generate([1], max_tokens=2)) == alone(model, [1], 2)
        settled(engine)


def test_case_S18_a_failure_leaves_nothing_behind() -> None:
    is_broken = False
    model = Scripted(broken=lambda tokens: is_broken)
    with engine_of(model, 32) as engine:
        first = engine.generate([1, 2, 3])
        assert len(ids(first)) == 29
        other = engine.generate([50] * 10, max_tokens=4)
        assert (other.usage.cached_tokens, ids(other)) == (0, alone(model, [50] * 10, 4))
        is_broken = True
        with pytest.raises(RuntimeError):
            engine.generate([50, 51], max_tokens=4)
        is_broken = False
        assert ids(engine.generate([1, 2, 3])) == ids(first)
        settled(engine)


# --- the oldest tokens give way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_keep", [0, 3, 63, 64])
def test_case_I11_an_endless_answer_goes_on_while_its_oldest_tokens_give_way(n_keep: int) -> None:
    model = Scripted(lambda tokens: 97)
    with engine_of(model, 64) as engine:
        result = engine.generate([1, 2, 3, 4], max_tokens=150, context_shift=ContextShift(n_keep))
        assert (ids(result), result.choices[0].reason) == ([97] * 150, "length")
        assert engine.scheduler.tree.num_tokens == 0  # what was shifted is nobody else's beginning
        settled(engine)


def test_a_shifted_answer_that_has_to_wait_comes_back_as_it_was() -> None:
    model = Scripted(lambda tokens: 97 + len(tokens) % 5)
    with engine_of(model, 48) as engine:
        model.may_go.clear()
        streams = [engine.stream([i] * 8, max_tokens=100, context_shift=ContextShift(2)) for i in (1, 2)]
        model.may_go.set()
        for stream in streams:
            assert len(ids(stream.result())) == 100
        assert engine.stats().preemptions > 0
        settled(engine)


def test_a_model_that_cannot_shift_says_so() -> None:
    model = Scripted()
    with engine_of(model, cache={"no_shift": "learned positions"}) as engine, pytest.raises(ConfigError, match="learned positions"):
        engine.generate([1], context_shift=ContextShift())


# --- guesses --------------------------------------------------------------------------------------------------------------------------


def test_guessed_tokens_change_nothing_but_the_number_of_steps() -> None:
    text = "abcdefgh abcdefgh abcdefgh abcdexyz abcdexyz"
    counts = []
    for speculate in (0, 4):
        model = Scripted(says(text))
        with engine_of(model, 128, speculate=speculate, max_batch_tokens=16) as engine:
            result = engine.generate("abcdefgh\n", max_tokens=60)
            assert result.choices[0].text == text
            stats = engine.stats()
            counts.append(len(model.batches))
            assert (stats.accepted_tokens > 0) == (stats.drafted_tokens > stats.accepted_tokens) == bool(speculate)
            settled(engine)
    assert counts[1] < 0.7 * counts[0]


def test_guesses_at_the_end_of_an_answer_leave_the_right_cells() -> None:
    model = Scripted(lambda tokens: 97 + len(tokens) % 3)
    prompt = [97 + (i + 2) % 3 for i in range(20)]
    for max_tokens in range(1, 9):
        with engine_of(model, 128, speculate=5, max_batch_tokens=16) as engine:
            result = engine.generate(prompt, max_tokens=max_tokens)
            assert ids(result) == alone(model, prompt, max_tokens)
            assert engine.stats().used_cells == 20 + max_tokens - 1
            settled(engine)


@pytest.mark.parametrize("window", [None, Window.sliding(6)])
def test_guesses_are_taken_back_on_every_kind_of_window(window: Window | None) -> None:
    model = Scripted(lambda tokens: 97 + (tokens[-1] * 7 + len(tokens) // 5) % 4, window=window)
    with engine_of(model, 64, speculate=4, max_batch_tokens=16) as engine:
        streams = [engine.stream([100 + i] * 9, max_tokens=40) for i in range(3)]
        for i, stream in enumerate(streams):
            assert ids(stream.result()) == alone(model, [100 + i] * 9, 40)
        assert engine.stats().accepted_tokens > 0
        settled(engine)


# --- sessions -------------------------------------------------------------------------------------------------------------------------


def test_a_session_goes_on_forks_rewinds_and_is_edited() -> None:
    model = Scripted()
    with engine_of(model, 128) as engine:
        session = engine.session()
        first = engine.generate([1, 2, 3], max_tokens=4, session=session)
        assert session.tokens == [1, 2, 3, *ids(first)]
        assert session.num_cells == 6
        again = engine.generate([*session.tokens, 50], max_tokens=3, session=session)
        assert (again.usage.cached_tokens, ids(again)) == (6, alone(model, [1, 2, 3, *ids(first), 50], 3))
        fork = session.fork(5)
        assert (fork.tokens, fork.num_cells) == (session.tokens[:5], 5)
        session.truncate(4)
        assert (session.tokens, session.num_cells) == ([1, 2, 3, ids(first)[0]], 4)
        other = engine.generate([*fork.tokens, 9], max_tokens=2, session=fork)
        assert other.usage.cached_tokens == 5
        fork.remove(1, 3, mode="exact")
        assert (len(fork.tokens), fork.num_cells, fork.exact) == (6, 1, True)
        fork.free()
        fork.free()
        session.remove(1, 2, mode="shift")
        assert (session.tokens, session.num_cells, session.exact) == ([1, 3, ids(first)[0]], 3, False)
        # What was shifted is the session's own: nobody else finds it, and the session does.
        assert engine.generate([1, 3, ids(first)[0], 7], max_tokens=1).usage.cached_tokens == 1
        assert engine.generate([1, 3, ids(first)[0], 7], max_tokens=1, session=session).usage.cached_tokens == 3
        session.truncate(1)
        assert session.exact
        settled(engine)


def test_a_session_finds_its_answer_again_in_another_request_and_a_busy_one_is_left_alone() -> None:
    model = Scripted(delay=0.002)
    with engine_of(model, 64) as engine:
        session = engine.session()
        engine.generate([1, 2, 3, 4], max_tokens=2, session=session)
        assert engine.generate([1, 2, 3, 4, 9], max_tokens=1).usage.cached_tokens == 4
        stream = engine.stream([1, 2, 3, 4, 8], session=session)
        for action in (lambda: session.truncate(0), session.fork, session.free, lambda: session.remove(0, 1)):
            with pytest.raises(SessionBusy):
                action()
        later = engine.stream([1, 2, 3, 4, 8, 8], max_tokens=1, session=session)
        stream.cancel()
        assert stream.result().choices[0].reason == "cancelled"
        assert len(ids(later.result())) == 1
        assert session.tokens[:6] == [1, 2, 3, 4, 8, 8]
        assert not session.busy
        settled(engine)


def test_an_idle_session_gives_way_and_evaluates_again() -> None:
    model = Scripted()
    with engine_of(model, 32) as engine:
        session = engine.session()
        engine.generate([1] * 10, max_tokens=3, session=session)
        engine.generate([2] * 28, max_tokens=2)
        assert session.num_cells < 12
        assert len(session.tokens) == 13
        result = engine.generate([*session.tokens, 5], max_tokens=3, session=session)
        assert ids(result) == alone(model, session.tokens[:14], 3)
        settled(engine)


def test_a_session_is_saved_and_loaded(tmp_path: Any) -> None:
    model = Scripted()
    with engine_of(model, 64) as engine:
        session = engine.session()
        engine.generate([1, 2, 3], max_tokens=4, session=session)
        assert session.save(tmp_path / "s") == 6
        tokens = session.tokens
    with engine_of(model, 64) as engine:
        session = engine.session()
        assert session.load(tmp_path / "s") == 6
        assert session.tokens == tokens[:6]
        assert engine.generate([*tokens, 9], max_tokens=1).usage.cached_tokens == 6
        with pytest.raises(Exception, match="nope"):
            session.load(tmp_path / "nope")
        assert session.tokens == tokens[:6]
        settled(engine)


class Disk(io.BytesIO):
    """A file that does not come to an end before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        self.begun.set()
        assert self.may_end.wait(10)
        return super().write(data)

    def read(self, size: int | None = -1) -> bytes:
        self.begun.set()
        assert self.may_end.wait(10)
        return super().read(size)


def test_answers_go_on_while_a_session_is_written_or_read() -> None:
    model = Scripted()
    with engine_of(model, 64) as engine:
        session = engine.session()
        engine.generate([1, 2, 3], max_tokens=4, session=session)
        tokens, disk = session.tokens, Disk()
        for work in (lambda: session.save(disk), lambda: session.load(disk)):
            thread = threading.Thread(target=work)
            thread.start()
            assert disk.begun.wait(10)
            assert len(ids(engine.generate([9, 9], max_tokens=3))) == 3
            disk.may_end.set()
            thread.join()
            disk.seek(0)
            disk.begun.clear()
            disk.may_end.clear()
        assert (session.tokens, session.num_cells) == (tokens[:6], 6)


def test_positions_of_a_session_are_checked() -> None:
    with engine_of(Scripted()) as engine:
        session = engine.session()
        for action in (lambda: session.truncate(1), lambda: session.fork(-1), lambda: session.remove(0, 2), lambda: session.truncate(True)):
            with pytest.raises(BatchError, match="must be a position from 0 to 0"):
                action()
        with pytest.raises(ConfigError, match="one answer"):
            engine.generate([1], n=2, session=session)
        with pytest.raises(ConfigError, match="made for key"):
            engine.generate([1], session=session, key=(("salt", "x"),))


# --- what others see ------------------------------------------------------------------------------------------------------------------


def test_the_map_of_cells_names_owners() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        session = engine.session()
        engine.generate([1, 2, 3], max_tokens=2, session=session)
        engine.generate([1, 2, 9], max_tokens=1)
        told = engine.cells()
        assert told["num_cells"] == 64
        assert sorted(owner["kind"] for owner in told["owners"].values()) == ["prefix", "session"]
        assert all(owner["evictable"] for owner in told["owners"].values())
        shared = [cell for cell in told["cells"] if len(cell[2]) == 2]
        assert [(position, token) for _, position, _, token in shared] == [(0, 1), (1, 2)]
        with pytest.raises(ConfigError, match="group"):
            engine.cells(3)


def test_status_does_not_wait_for_a_step() -> None:
    model = Scripted()
    with engine_of(model) as engine:
        model.may_go.clear()
        stream = engine.stream([1] * 20, max_tokens=3)
        time.sleep(0.05)
        start = time.monotonic()
        engine.stats()
        assert time.monotonic() - start < 0.05
        model.may_go.set()
        stream.result()
        assert engine.stats().steps > 0


# --- all of it, at random -----------------------------------------------------------------------------------------------------------


def _random_requests(rng: random.Random, count: int) -> Iterator[Request]:
    stems = [[rng.randrange(1, 250) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    for _ in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(1, 250) for _ in range(rng.randrange(0, 10))]
        points = tuple(rng.sample(range(1, len(prompt) + 1), min(2, len(prompt))))
        yield Request(tuple(prompt), max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 1, 2, 3]), points=points)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_change_no_answer_and_lose_no_cell(seed: int) -> None:
    rng = random.Random(seed)
    window = [None, Window.sliding(5), Window.chunked(8)][seed % 3]
    model = Scripted(window=window)
    with engine_of(model, 80, speculate=[0, 3][seed % 2], preempt="spill" if seed > 3 else "recompute", cache={"max_seqs": 12}) as engine:
        streams: list[tuple[Stream, bool]] = []
        for request in _random_requests(rng, 60):
            stream = engine.submit(request)
            streams.append((stream, rng.random() < 0.2))
            if streams[-1][1]:
                threading.Timer(rng.random() * 0.02, stream.cancel).start()
            time.sleep(rng.random() * 0.002)
        for stream, may_be_cancelled in streams:
            request = stream.request
            expected = alone(model, request.prompt, request.max_tokens or 0)
            for choice in stream.result().choices:
                if choice.reason == "cancelled":
                    assert may_be_cancelled
                    assert choice.token_ids == expected[: len(choice.token_ids)]
                else:
                    assert choice.token_ids == expected
        stats = engine.stats()
        assert stats.prefix_hits > 0
        assert stats.evictions > 0
        settled(engine)
