"""The text of one answer, token by token: what may be given out, what is still held back, and where a stop string ends it.

Owns no tokenizer and chooses no tokens. Text given out is never taken back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from onekv.engine.sampler import TokenLogprobs
from onekv.errors import ConfigError, OneKVError
from onekv.models.text import Text


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token, or the end, lets out. All pieces of an answer joined have every token once.

    Attributes:
        text:      the next characters
        token_ids: tokens whose text is now decided: all of it is given out, or cut off with a stop string
        logprobs:  of those tokens, where they came with any
        stopped:   a stop string has ended the answer; neither it nor what came after it is in the text
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    stopped: bool


class Output:
    """One answer's text, given out as soon as no stop string can reach into it and its characters are complete.

    The stop string that is complete first ends the answer, however the text was cut into tokens; of two complete with the same
    character, the longer. Bytes that are no UTF-8 are U+FFFD.

    Args:
        text:    the model's tokenizer
        stop:    strings that end the answer
        special: give out special tokens, such as the end token, as text
    Raises:
        ConfigError: a stop string is empty or no string.
    Cost: O(text held back * stop strings) a token.
    """

    def __init__(self, text: Text, stop: Sequence[str] = (), special: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop must be a list of strings, none of them empty; got {stop!r}")
        self._stops = tuple(stop)
        self._most_held = max((len(s) for s in self._stops), default=1) - 1
        self._stream = text.stream(special=special)
        self._pieces: list[str] = []
        self._num_given = 0  # characters
        self._held = ""  # characters not given out
        self._waiting: list[tuple[int, TokenLogprobs | None]] = []  # tokens not given out
        self._ends: list[int] = []  # where in the text they end; the last ones, with an incomplete character, have no entry
        self._is_over = False
        self._stopped = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._pieces)

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Piece:
        """Take the next token; give out what is decided by it.

        Raises:
            OneKVError: the answer is over: `finish` was called, or a stop string came.
            BatchError: a negative id.
        """
        if self._is_over:
            raise OneKVError("this answer is over; begin a new Output for the next one")
        new = self._stream.push(token_id)
        self._held += new
        self._waiting.append((token_id, logprobs))
        complete = len(self._waiting)
        if self._stream.is_incomplete:  # its bytes belong to this token, and to those before it that brought no text either
            complete = complete - 1 if new else len(self._ends)
        self._mark(complete)
        return self._give()

    def finish(self, token_id: int | None = None, logprobs: TokenLogprobs | None = None) -> Piece:
        """The end: what was held back, an incomplete character as U+FFFD.

        Args:
            token_id: the token that ends the answer, which has no text
        """
        if not self._is_over:
            if token_id is not None:
                self._waiting.append((token_id, logprobs))
            self._held += self._stream.flush()
            self._mark(len(self._waiting))
            self._is_over = True
        return self._give()

    def _mark(self, complete: int) -> None:
        """The first `complete` waiting tokens end, at the latest, where the text ends now."""
        self._ends += [self._num_given + len(self._held)] * (complete - len(self._ends))

    def _give(self) -> Piece:
        matches = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        if matches:
            self._is_over = self._stopped = True
            text, self._held = self._held[: min(matches)[1]], ""
        else:
            decided = len(self._held) if self._is_over else self._num_decided()
            text, self._held = self._held[:decided], self._held[decided:]
        self._num_given += len(text)
        if text:
            self._pieces.append(text)
        count = len(self._waiting) if self._is_over else bisect_right(self._ends, self._num_given)
        out, self._waiting, self._ends = self._waiting[:count], self._waiting[count:], self._ends[count:]
        return Piece(text, tuple(t for t, _ in out), tuple(entry for _, entry in out if entry is not None), self._stopped)

    def _num_decided(self) -> int:
        """How many held characters come before what may be the start of a stop string."""
        for at in range(max(0, len(self._held) - self._most_held), len(self._held)):
            if any(s.startswith(self._held[at:]) for s in self._stops):
                return at
        return len(self._held)
