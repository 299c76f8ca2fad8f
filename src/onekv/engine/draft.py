"""Guessing the next tokens of an answer from what it has said before: prompt lookup. A guess costs nothing but the rows that check it."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Final

_SIZES: Final = (4, 3, 2)  # tokens that must have occurred before; longer ones guess better


class PromptLookup:
    """Remembers for every few tokens in a row where they were last followed by something.

    >>> lookup = PromptLookup()
    >>> lookup.draft([5, 6, 7, 8, 9, 1, 5, 6], 3)
    [7, 8, 9]
    """

    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}
        self._seen = 0  # tokens whose predecessors are remembered

    def draft(self, tokens: Listing[int], count: int) -> list[int]:
        """Up to `count` tokens that may come next. `tokens` is what was given before, gone on; cost: O(new tokens)."""
        for i in range(self._seen, len(tokens)):
            for size in _SIZES:
                if i >= size:
                    self._following[tuple(tokens[i - size : i])] = i
        self._seen = len(tokens)
        for size in _SIZES:
            at = self._following.get(tuple(tokens[-size:]))
            if at is not None and count > 0:
                return list(tokens[at : at + count])
        return []
