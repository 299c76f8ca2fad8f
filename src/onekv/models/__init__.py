"""Models: the only room that knows transformers. `pull` and `gguf` bring weights to disk, `text` turns text into tokens, `hooks` and `probe`
meet transformers' code, `hf` runs the model.

Names are loaded at their first use: fetching a model needs no transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onekv.models.hf import Model, cache_for, load_model
    from onekv.models.pull import NAMED_MODELS, home, pull
    from onekv.models.text import Text, TextStream

__all__ = ["NAMED_MODELS", "Model", "Text", "TextStream", "cache_for", "home", "load_model", "pull"]

_ROOM = {
    "NAMED_MODELS": "pull",
    "Model": "hf",
    "Text": "text",
    "TextStream": "text",
    "cache_for": "hf",
    "home": "pull",
    "load_model": "hf",
    "pull": "pull",
}


def __getattr__(name: str) -> Any:
    if name in _ROOM:
        return getattr(importlib.import_module(f"onekv.models.{_ROOM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM])
