"""PrefixTree: which beginnings are held, found by token ids. A radix tree, one token at a time, no blocks.

The tree holds *holders*: whatever the caller keeps the cells by, a sequence of the cache. It owns the order in which they are given up and
the memory of what was given up, and touches neither cells nor keys.

    root ─ [1 2 3 4] ─ [5 6]       holder of 1..6
                     └ [7 8 9]     holder of 1..4, 7..9; both own the cells of 1..4

Where any beginning of a holder can be gone on from (`points=False`: every layer sees everything), only the ends of branches hold, and a
branch is given up from its end, as many tokens as are wanted. Where it cannot (windows, recurrent layers: `points=True`), a place that
shall stay restorable has a holder of its own, whose window is what the cache must keep for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Listing
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from onekv.errors import ConfigError, OneKVError

Holder = TypeVar("Holder")
Key = tuple[tuple[str, str], ...]  # what changes keys and values besides the tokens, each part with its tag
Tokens = NDArray[np.int64]

_REMEMBERED: Final = 1_000_000  # tokens given up that `explain` still knows
SHOWN: Final = 8  # tokens on either side of a difference


@dataclass(frozen=True)
class Match(Generic[Holder]):
    """What is held of a prompt.

    Attributes:
        length: tokens that can be gone on from; 0: nothing
        holder: whose first `length` entries they are; None iff length is 0
        known:  tokens that are held, though a window may keep them from being gone on from
    """

    length: int
    holder: Holder | None
    known: int


@dataclass(frozen=True)
class Difference:
    """Where and why a prompt and what is held part.

    Attributes:
        matched: tokens held from the start
        total:   tokens of the prompt
        reason:  "all": everything is held; "differs": another token is held there; "evicted": it was held, and given up;
                 "never": nothing was ever held there
        held, given: tokens around the difference, up to 8 before it and 8 from it on; equal before it. `held` is what a branch goes
                 on with, empty beyond its end
    """

    matched: int
    total: int
    reason: Literal["all", "differs", "evicted", "never"]
    held: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True)
class Evicted(Generic[Holder]):
    """What the caller has to do: cut `holder` to its first `keep` tokens; 0: free it."""

    holder: Holder
    keep: int


class _Node(Generic[Holder]):
    """The tokens of one edge. Every leaf has a holder, who holds all from the root to its end, so every node is held."""

    __slots__ = ("children", "depth", "edge", "holder", "key", "parent", "used")

    def __init__(self, key: Key, parent: _Node[Holder] | None, edge: Tokens, depth: int) -> None:
        self.key = key
        self.parent = parent
        self.edge = edge
        self.depth = depth  # tokens from the root to the end of the edge
        self.children: dict[int, _Node[Holder]] = {}
        self.holder: Holder | None = None
        self.used = 0  # when, by the tree's clock

    @property
    def start(self) -> int:
        return self.depth - self.edge.size

    def up(self) -> Iterator[_Node[Holder]]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def tokens(self) -> Tokens:
        """All tokens from the root."""
        return np.concatenate([node.edge for node in self.up()][::-1])


class PrefixTree(Generic[Holder]):
    """What is held, by key and tokens.

    Args:
        points: True where a beginning of a holder can in general not be gone on from

    Attributes:
        num_tokens: different tokens held: the cells they take, where equal beginnings share theirs

    >>> tree = PrefixTree[str]()
    >>> tree.insert((), [1, 2, 3, 4, 5, 6], "a"), tree.insert((), [1, 2, 3, 4, 7, 8, 9], "b")
    ([], [])
    >>> tree.match((), [1, 2, 3, 4, 7, 0])
    Match(length=5, holder='b', known=5)
    >>> tree.num_tokens
    9
    """

    def __init__(self, points: bool = False) -> None:
        self.points = points
        self.num_tokens = 0
        self._roots: dict[Key, _Node[Holder]] = {}
        self._holding: dict[int, _Node[Holder]] = {}  # nodes with a holder, by identity
        self._given_up: deque[tuple[Key, Tokens]] = deque()
        self._remembered = 0  # tokens in it
        self._symbols: dict[tuple[str, bytes], int] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._holding)

    def holders(self) -> list[Holder]:
        """Everyone who holds something."""
        return [node.holder for node in self._holding.values() if node.holder is not None]

    def symbol(self, tag: str, content: bytes) -> int:
        """A number to stand in a token list for content that is no token, such as the whole digest of an image: below -1, equal for equal
        tag and content, and never equal for others."""
        return self._symbols.setdefault((tag, content), -2 - len(self._symbols))

    def match(
        self, key: Key, tokens: Listing[int] | Tokens, usable: Callable[[Holder, int], int] = lambda holder, length: length
    ) -> Match[Holder]:
        """The longest held beginning that can be gone on from. Marks its path as used.

        Args:
            usable: (holder, length) -> the most tokens, up to length, from which that holder can be gone on
        Cost: O(tokens), and up to two calls of `usable` for each node of the path.
        """
        path, matched = self._walk(key, _array(tokens))
        self._clock += 1
        best: tuple[int, Holder | None] = (0, None)
        below = matched  # tokens that the holders here have in common with the prompt
        for node in reversed(path):
            candidates = _nearest(node) if node is path[-1] else [node.holder]
            for holder in candidates if below > best[0] else ():
                length = 0 if holder is None else usable(holder, below)
                if length > best[0]:
                    best = length, holder
            node.used = self._clock
            below = node.start
        return Match(*best, matched)

    def insert(self, key: Key, tokens: Listing[int] | Tokens, holder: Holder) -> list[Holder]:
        """Hold `tokens` by `holder`, which has exactly these.

        Returns:
            holders that are no longer needed, for the caller to free; the given one too, where another holds all of it.
        """
        given = _array(tokens)
        self._clock += 1
        path, matched = self._walk(key, given)
        node = path[-1] if path else self._roots.setdefault(key, _Node(key, None, np.empty(0, np.int64), 0))
        if matched < node.depth:
            node = self._split(node, matched)
        if matched < given.size:
            fresh = _Node(key, node, given[matched:].copy(), given.size)
            node.children[int(given[matched])] = fresh
            self.num_tokens += fresh.edge.size
            node = fresh
        for one in node.up():
            one.used = self._clock
        if node.parent is None or (node.children and not self.points):
            return [holder]
        spare = [node.holder] if node.holder is not None else []
        self._hold(node, holder)
        if not self.points:
            for above in node.parent.up():
                if above.holder is not None:
                    spare.append(above.holder)
                    self._release(above)
        return spare

    def evict(self, wanted: int, gain: Callable[[Holder, int], int]) -> Evicted[Holder] | None:
        """Give up what was used least recently, ends of branches first. None: nothing is held whose end would free a cell.

        Args:
            wanted: cells that are needed. Where any beginning can be gone on from, a branch gives up no more tokens than needed for that
            gain:   (holder, keep) -> cells that are freed when it is cut to its first `keep` tokens
        Cost: O(holders x log), and `gain` of those that free nothing.
        """
        for node in sorted(self._holding.values(), key=lambda n: (n.used, -n.depth)):
            holder, parent = node.holder, node.parent
            if holder is None or parent is None:
                continue
            low = 0 if self.points else node.start
            keep = low if self.points else max(low, node.depth - max(wanted, 1))
            freed = gain(holder, keep)
            if freed < wanted and keep > low:  # others own some of these cells too: the longest beginning that frees enough, if any does
                keep = bisect_right(range(low, keep), -wanted, key=lambda n: -gain(holder, n)) - 1 + low
                keep = max(keep, low)
                freed = gain(holder, keep)
            if not freed:
                continue
            self._note_given_up(node)
            return Evicted(holder, self._cut(node, holder, keep))
        return None

    def evict_holder(self) -> Holder | None:
        """Give up a whole holder, the one used least recently, for the caller to free; None: there is none."""
        node = min(self._holding.values(), key=lambda n: (n.used, -n.depth), default=None)
        if node is None or node.holder is None:
            return None
        holder = node.holder
        self._note_given_up(node)
        self._cut(node, holder, 0)
        return holder

    def drop(self) -> list[Holder]:
        """Hold nothing any more. Returns the holders, for the caller to free."""
        held = self.holders()
        self._roots.clear()
        self._holding.clear()
        self.num_tokens = 0
        return held

    def explain(self, key: Key, tokens: Listing[int] | Tokens) -> Difference:
        """Where a prompt and what is held part. Changes nothing, not even what counts as used.

        Cost: O(tokens + what was given up and is remembered).
        """
        given = _array(tokens)
        path, matched = self._walk(key, given)
        once = max((common_prefix(old, given) for k, old in self._given_up if k == key), default=0)
        return difference(given, matched, _tail(path[-1] if path else self._roots.get(key), matched), once)

    def check(self) -> None:
        """Compare the tree with what it says of itself.

        Raises:
            OneKVError: an invariant is broken; the message says which.
        """
        found, tokens, stack = 0, 0, list(self._roots.values())
        while stack:
            node = stack.pop()
            tokens += node.edge.size
            found += node.holder is not None
            if node.parent is not None and not node.children and node.holder is None:
                raise OneKVError(f"prefix tree: the branch ending in {node.edge[-SHOWN:].tolist()} has no holder")
            for first, child in node.children.items():
                if child.parent is not node or child.edge[0] != first or child.start != node.depth:
                    raise OneKVError(f"prefix tree: an edge from {node.depth} does not fit where it hangs")
                stack.append(child)
        if found != len(self._holding) or tokens != self.num_tokens:
            raise OneKVError(f"prefix tree: counts {len(self)} holders, {self.num_tokens} tokens; there are {found} and {tokens}")

    # --- the tree itself --------------------------------------------------------------------------------------------------------

    def _walk(self, key: Key, given: Tokens) -> tuple[list[_Node[Holder]], int]:
        """Nodes that share tokens with a prompt, from the top, and how many tokens they share."""
        node, path, matched = self._roots.get(key), [], 0
        while node is not None and node.depth == matched < given.size:
            node = node.children.get(int(given[matched]))
            if node is not None:
                matched += common_prefix(node.edge, given[matched:])
                path.append(node)
        return path, matched

    def _split(self, node: _Node[Holder], depth: int) -> _Node[Holder]:
        """A new node in the middle of an edge; the old one keeps the lower part."""
        assert node.parent is not None
        upper = _Node(node.key, node.parent, node.edge[: depth - node.start], depth)
        node.parent.children[int(upper.edge[0])] = upper
        upper.used = node.used
        node.edge = node.edge[upper.edge.size :]
        node.parent = upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _hold(self, node: _Node[Holder], holder: Holder) -> None:
        node.holder = holder
        self._holding[id(node)] = node

    def _release(self, node: _Node[Holder]) -> None:
        node.holder = None
        del self._holding[id(node)]

    def _cut(self, node: _Node[Holder], holder: Holder, keep: int) -> int:
        """Take a holder away beyond `keep` tokens. Returns how many it goes on to hold: 0 where others hold them, or nobody can."""
        if not node.children and keep > node.start:
            self.num_tokens -= node.depth - keep
            node.edge = node.edge[: keep - node.start]
            node.depth = keep
            return keep
        self._release(node)
        while node.parent is not None and not node.children and node.holder is None:
            if keep == node.depth:
                self._hold(node, holder)
                return keep
            self.num_tokens -= node.edge.size
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.parent is None and not node.children:
            self._roots.pop(node.key, None)
        return 0

    def _note_given_up(self, node: _Node[Holder]) -> None:
        tokens = node.tokens()
        if self._given_up:  # a branch is given up from its end, piece by piece: the first piece tells it all
            key, last = self._given_up[-1]
            if key == node.key and common_prefix(last, tokens) == tokens.size:
                return
        self._given_up.append((node.key, tokens))
        self._remembered += node.depth
        while self._remembered > _REMEMBERED:
            self._remembered -= self._given_up.popleft()[1].size


def difference(given: Tokens, matched: int, held: NDArray[np.integer], once: int = 0) -> Difference:
    """What `explain` says of a prompt that agrees with what is held up to `matched`, where that goes on with `held`.

    Args:
        once: how many tokens of it were held before
    """
    reason: Literal["all", "differs", "evicted", "never"] = "differs" if held.size else "never"
    if matched == given.size:
        reason = "all"
    elif once > matched:
        reason = "evicted"
    first = max(matched - SHOWN, 0)
    around = np.concatenate([given[first:matched], held[:SHOWN]])
    return Difference(matched, int(given.size), reason, tuple(around.tolist()), tuple(given[first : matched + SHOWN].tolist()))


def checked_key(key: Key) -> Key:
    """The key itself.

    Raises:
        ConfigError: it is no tuple of (tag, text).
    """
    pairs = isinstance(key, tuple) and all(isinstance(part, tuple) and len(part) == 2 for part in key)
    if not pairs or not all(isinstance(text, str) for part in key for text in part):
        raise ConfigError(f'key must be a tuple of (tag, text), such as (("salt", "x"),); got {key!r}')
    return key


def common_prefix(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """Length of the longest common beginning. Cost: O(the shorter)."""
    n = min(one.size, other.size)
    differs = one[:n] != other[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _array(tokens: Listing[int] | Tokens) -> Tokens:
    return np.asarray(tokens, np.int64)


def _nearest(node: _Node[Holder]) -> Iterator[Holder]:
    """Those who hold everything up to a node: its own holder, and the first one beneath on the branch that was used last."""
    if node.holder is not None:
        yield node.holder
    while node.children:
        node = max(node.children.values(), key=lambda child: child.used)
        if node.holder is not None:
            yield node.holder
            return


def _tail(node: _Node[Holder] | None, matched: int) -> Tokens:
    """What a branch goes on with after `matched` tokens; where there are several, the one used last."""
    if node is not None and node.depth == matched and node.children:
        return max(node.children.values(), key=lambda child: child.used).edge
    return node.edge[matched - node.start :] if node is not None and node.depth > matched else np.empty(0, np.int64)
