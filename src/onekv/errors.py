"""Every exception onekv raises on purpose.

    OneKVError                      misuse that is none of the below, or a broken invariant found by check()
    ├── BatchError (ValueError)     a batch, sequence id, position or token that cannot be accepted
    │   ├── WindowLost              the batch would attend to cells that a sliding window has given up
    │   └── StateLost               a recurrent model's state at that position is not kept
    ├── CacheFull                   not enough cells; carries needed, free, group
    ├── ShiftError                  positions of this cache, or of these shared cells, cannot be shifted
    ├── StateError (ValueError)     a saved file is damaged, foreign, or does not fit this cache
    ├── UnsupportedModel            a model this library cannot serve exactly; says which part and why
    ├── RequestTooLarge             a request that can never fit, refused before it starts
    ├── QueueFull                   more requests wait than the engine takes
    ├── SessionBusy                 a request runs on the session
    ├── EngineClosed                the engine ends, or has ended
    └── ConfigError (ValueError)    a setting that cannot work

Whatever is raised, nothing has changed: the check comes before the first write.
"""

from __future__ import annotations


class OneKVError(Exception):
    """Root of the tree. Raised itself for misuse of plans and steps and for a broken invariant."""


class BatchError(OneKVError, ValueError):
    """A batch, sequence id, position or token that cannot be accepted.

    Attributes that do not apply are None.

        row:     index of the offending row in the batch
        seq:     sequence id
        stored:  the position the given one does not go with: the largest (or the clashing one) the cache holds of the sequence, the
                 missing one where there is a hole, the one before it in the batch where positions repeat or fall
        given:   the position, token or id that came
    """

    def __init__(
        self, message: str, *, row: int | None = None, seq: int | None = None, stored: int | None = None, given: int | None = None
    ) -> None:
        super().__init__(message)
        self.row = row
        self.seq = seq
        self.stored = stored
        self.given = given


class WindowLost(BatchError):
    """The batch would attend to positions whose cells a window has reclaimed. Remove the tail back to a position p
    for which `can_continue_at(seq, p)` is true, and feed the tokens from there again."""


class StateLost(BatchError):
    """A recurrent layer's state cannot follow: it exists for the end of a sequence and for a few earlier positions. `stored` is the last
    position p before the given one for which `can_continue_at(seq, p)` is true: remove the tail from there, and feed the tokens again."""


class CacheFull(OneKVError):
    """The buffer has not enough cells for what was asked. Nothing has changed.

    needed:  cells asked for, in the group that is short
    free:    cells that could have been used there
    group:   index of that layer group
    """

    def __init__(self, message: str, *, needed: int, free: int, group: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.group = group


class ShiftError(OneKVError):
    """Positions cannot be shifted here; the message says why."""


class StateError(OneKVError, ValueError):
    """A saved file that is damaged, of another model, or does not fit. The cache is unchanged."""


class UnsupportedModel(OneKVError):
    """A model that cannot be served exactly. The message names the model and the part that is missing."""


class RequestTooLarge(OneKVError):
    """A request that can never fit, whatever is evicted.

    needed:  cells the request would take
    limit:   the most a request may take here
    """

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit


class QueueFull(OneKVError):
    """The engine takes no more requests at the moment. Nothing was queued; try again later."""


class SessionBusy(OneKVError):
    """A request runs on this session, so it cannot be changed. Nothing has changed."""


class EngineClosed(OneKVError):
    """The engine is closing or closed: it takes nothing new, and what could not be finished in time ended with this."""


class ConfigError(OneKVError, ValueError):
    """A setting that cannot work; the message names it, what came and what is expected."""
