"""The prefix tree alone: holders are letters, and a dict of token lists is its twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onekv import OneKVError
from onekv.core.prefix import Difference, Evicted, Match, PrefixTree, common_prefix

SALT = (("salt", "x"),)


def everything(holder: Any, keep: int) -> int:
    return 1_000_000


def test_a_prompt_finds_the_longest_beginning_that_is_held() -> None:
    tree = PrefixTree[str]()
    assert tree.insert((), [1, 2, 3, 4, 5], "a") == []
    assert tree.match((), [1, 2, 3, 9]) == Match(3, "a", 3)
    assert tree.match((), [1, 2, 3, 4, 5, 6]) == Match(5, "a", 5)
    assert tree.match((), [9]) == tree.match((), []) == Match(0, None, 0)
    assert tree.match(SALT, [1, 2, 3]) == Match(0, None, 0)


def test_a_longer_branch_replaces_the_one_it_goes_on_from_and_a_shorter_one_is_not_needed() -> None:
    tree = PrefixTree[str]()
    tree.insert((), [1, 2], "a")
    assert tree.insert((), [1, 2, 3], "b") == ["a"]
    assert tree.insert((), [1, 2], "c") == ["c"]
    assert tree.insert((), [1, 2, 3], "d") == ["b"]
    assert tree.insert((), [], "e") == ["e"]
    assert tree.holders() == ["d"]
    assert tree.num_tokens == 3
    tree.check()


def test_points_stay_held_inside_a_branch() -> None:
    tree = PrefixTree[str](points=True)
    assert tree.insert((), [1, 2], "a") == []
    assert tree.insert((), [1, 2, 3, 4], "b") == []
    # b cannot go back to anything; a stands where it stands.
    assert tree.match((), [1, 2, 3, 9], lambda holder, n: 2 if holder == "a" else 0) == Match(2, "a", 3)
    assert tree.insert((), [1, 2], "c") == ["a"]
    assert tree.num_tokens == 4
    assert tree.evict(1, everything) == Evicted("b", 0)
    assert tree.num_tokens == 2
    tree.check()


def test_the_end_of_the_branch_used_least_recently_goes_first_and_only_as_much_as_is_wanted() -> None:
    tree = PrefixTree[str]()
    tree.insert((), [1, 2, 3, 4, 5, 6], "a")
    tree.insert((), [1, 2, 7, 8, 9], "b")
    tree.match((), [1, 2, 3])  # a is newer now
    owned = {"a": 6, "b": 5}
    gain = lambda holder, keep: min(owned[holder], 6) - max(keep, 2)  # noqa: E731  (two tokens are shared)
    assert tree.evict(2, gain) == Evicted("b", 3)
    owned["b"] = 3
    assert tree.match((), [1, 2, 7, 8]) == Match(3, "b", 3)
    assert tree.evict(9, gain) == Evicted("a", 0)  # b holds the two shared ones
    assert tree.num_tokens == 3
    assert tree.evict(9, lambda holder, keep: 3 - keep) == Evicted("b", 2)
    assert tree.evict(9, lambda holder, keep: 3 - keep) == Evicted("b", 0)
    assert tree.evict(9, everything) is None
    assert (tree.num_tokens, len(tree)) == (0, 0)


def test_what_frees_no_cell_is_not_given_up() -> None:
    tree = PrefixTree[str]()
    tree.insert((), [1, 2], "a")
    tree.insert((), [5, 6], "b")
    assert tree.evict(1, lambda holder, keep: int(holder == "b")) == Evicted("b", 1)
    assert tree.evict(1, lambda holder, keep: 0) is None


def test_cells_that_others_own_too_do_not_count_as_freed() -> None:
    tree = PrefixTree[str]()
    tree.insert((), list(range(10)), "a")
    # Entries 7, 8 and 9 have other owners: three tokens free nothing, the next two are needed.
    assert tree.evict(2, lambda holder, keep: max(0, 7 - keep)) == Evicted("a", 5)


def test_a_whole_holder_is_given_up_and_what_others_hold_stays() -> None:
    tree = PrefixTree[str]()
    tree.insert((), [1, 2, 3], "a")
    tree.insert((), [1, 2, 4], "b")
    assert tree.evict_holder() == "a"
    assert (tree.num_tokens, tree.match((), [1, 2, 3]).length) == (3, 2)
    tree.check()
    assert tree.evict_holder() == "b"
    assert tree.evict_holder() is None
    assert tree.num_tokens == 0
    tree.check()


def test_a_difference_says_where_and_why() -> None:
    tree = PrefixTree[str]()
    tree.insert((), list(range(20)), "a")
    assert tree.explain((), range(20)) == Difference(20, 20, "all", tuple(range(12, 20)), tuple(range(12, 20)))
    told = tree.explain((), [*range(10), 99, 11])
    assert told == Difference(10, 12, "differs", tuple(range(2, 18)), (*range(2, 10), 99, 11))
    assert tree.explain((), [*range(20), 7]).reason == "never"
    assert tree.explain(SALT, [1]) == Difference(0, 1, "never", (), (1,))
    tree.evict(15, lambda holder, keep: 20 - keep)
    assert tree.explain((), range(20)) == Difference(5, 20, "evicted", (0, 1, 2, 3, 4), tuple(range(13)))


def test_case_P04_another_adapter_or_scale_shares_nothing() -> None:
    tree = PrefixTree[int]()
    prompt = [1, 2, 3]
    keys = [(("adapter", "A"), ("scale", "1.0")), (("adapter", "A"), ("scale", "0.5")), (("adapter", "B"), ("scale", "1.0")), ()]
    keys.append((("adapter", "A"), ("scale", "1.0"), ("file", "sha256 of another file")))
    for i, key in enumerate(keys):
        assert tree.match(key, prompt).length == 0
        tree.insert(key, prompt, i)
    assert tree.match(keys[0], prompt) == Match(3, 0, 3)


def test_case_P05_parts_of_a_key_are_tagged() -> None:
    tree = PrefixTree[str]()
    tree.insert((("adapter", "X"),), [1, 2], "a")
    others: list[Any] = [(("salt", "X"),), (), (("salt", ""),), (("salt", "None"),)]
    for key in others:
        assert tree.match(key, [1, 2]).length == 0


def test_case_P06_equal_placeholders_of_different_images_are_different_tokens() -> None:
    tree = PrefixTree[str]()

    def prompt(*digests: bytes) -> list[int]:
        return [1, 2, 3, *(tree.symbol(f"image {i}", digest) for digest in digests for i in range(4)), 8, 9]

    red, blue, twin = b"\x01" * 30 + b"\xab\xcd", b"\x02" * 32, b"\x03" * 30 + b"\xab\xcd"
    assert tree.match((), prompt(red)[:-1]).length == 0
    tree.insert((), prompt(red), "red")
    assert tree.match((), prompt(blue)[:-1]).length == 3
    tree.insert((), prompt(blue), "blue")
    assert tree.match((), prompt(red)[:-1]) == Match(8, "red", 8)
    assert tree.match((), prompt(twin)[:-1]).length == 3
    tree.insert((), prompt(red, blue), "two")
    assert tree.match((), prompt(red, red)).length == 7
    assert all(symbol < -1 for symbol in prompt(red)[3:7])


def test_case_P07_an_edited_branch_is_another_branch() -> None:
    tree = PrefixTree[str]()
    tree.insert((), [1, 2, 3, 4, 5, 6, 90, 91, 92], "edited")
    assert tree.match((), [1, 2, 3, 4, 5, 6, 7, 8, 9]).length == 6
    assert tree.match((), [1, 2, 3, 4, 5, 6, 90, 91, 92]).length == 9


def test_case_P12_a_length_is_a_length() -> None:
    tree = PrefixTree[str]()
    tree.insert((), list(range(10)), "a")
    for last in (10, 11, 12):
        tree.insert((), list(range(last + 1)), f"{last}")
    assert [tree.match((), range(n)).length for n in (9, 8, 7, 3)] == [9, 8, 7, 3]


def test_a_broken_tree_is_told() -> None:
    tree = PrefixTree[str]()
    tree.insert((), [1, 2], "a")
    tree.num_tokens = 3
    with pytest.raises(OneKVError, match="counts 1 holders, 3 tokens; there are 1 and 2"):
        tree.check()


def test_common_prefix() -> None:
    a = np.array([1, 2, 3])
    assert [common_prefix(a, np.array(b, np.int64)) for b in ([], [1], [1, 2, 3, 4], [1, 9, 3], [0])] == [0, 1, 3, 1, 0]


_tokens = st.lists(st.integers(0, 2), max_size=8)
_action = st.one_of(
    st.tuples(st.just("insert"), _tokens),
    st.tuples(st.just("match"), _tokens),
    st.tuples(st.just("evict"), st.integers(1, 6)),
    st.tuples(st.just("evict holder"), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_action, max_size=30), st.booleans())
def test_the_tree_answers_as_a_list_of_token_lists(actions: list[tuple[str, Any]], points: bool) -> None:
    tree = PrefixTree[int](points)
    held: dict[int, list[int]] = {}  # what the caller keeps for each holder

    def free(holder: int) -> None:
        del held[holder]

    def sole(holder: int, keep: int) -> int:
        """Beginnings of this holder, beyond `keep`, that nobody else has."""
        others = {tuple(t[: i + 1]) for h, t in held.items() if h != holder for i in range(len(t))}
        return sum(tuple(held[holder][: i + 1]) not in others for i in range(keep, len(held[holder])))

    def beginnings() -> set[tuple[int, ...]]:
        return {tuple(t[: i + 1]) for t in held.values() for i in range(len(t))}

    for number, (action, given_) in enumerate(actions):
        if action == "insert":
            before = beginnings()
            held[number] = given_
            for spare in tree.insert((), given_, number):
                free(spare)
            assert beginnings() == before | {tuple(given_[: i + 1]) for i in range(len(given_))}
        elif action == "match":
            found = tree.match((), given_)
            best = max((common_prefix(np.array(t, np.int64), np.array(given_, np.int64)) for t in held.values()), default=0)
            assert found.known == best == tree.explain((), given_).matched
            assert found.length == best
            if found.holder is not None:
                assert held[found.holder][:best] == given_[:best]
        elif action == "evict holder":
            gone = tree.evict_holder()
            assert (gone is None) == (not held)
            if gone is not None:
                free(gone)
        else:
            before_tokens = tree.num_tokens
            evicted = tree.evict(given_, sole)
            if evicted is None:
                assert all(sole(h, 0) == 0 for h in held)
                continue
            freed = sole(evicted.holder, evicted.keep)
            assert freed > 0
            if not points:
                assert freed <= given_
            held[evicted.holder] = held[evicted.holder][: evicted.keep]
            if not evicted.keep:
                free(evicted.holder)
            assert tree.num_tokens == before_tokens - freed
        assert tree.num_tokens == len(beginnings())
        assert set(tree.holders()) == set(held)
        tree.check()


def test_a_branch_that_is_given_up_piece_by_piece_is_remembered_once() -> None:
    tree = PrefixTree[str]()
    tree.insert((), list(range(100)), "a")
    for left in range(99, 0, -1):
        assert tree.evict(1, lambda holder, keep, left=left: left + 1 - keep) == Evicted("a", left)
    assert tree._remembered == 100
    assert tree.explain((), range(100)).reason == "evicted"
