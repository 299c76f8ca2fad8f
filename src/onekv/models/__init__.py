"""Models: the only room that knows transformers.

`pull` and `gguf` bring weights to disk, `text` turns text into tokens, `hooks` and `probe` meet transformers' code, `hf` runs the model,
`hf_cache` lets transformers' own `generate` run it.
Names are loaded at their first use: fetching a model needs no transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onekv.models.hf import Model, load_model
    from onekv.models.hf_cache import as_cache, cache_for, detach
    from onekv.models.text import Text, TextStream

__all__ = ["Model", "Text", "TextStream", "as_cache", "cache_for", "detach", "load_model"]

_FILE_OF = {
    "Model": "hf",
    "Text": "text",
    "TextStream": "text",
    "as_cache": "hf_cache",
    "cache_for": "hf_cache",
    "detach": "hf_cache",
    "load_model": "hf",
}


def __getattr__(name: str) -> Any:
    if name in _FILE_OF:
        return getattr(importlib.import_module(f"onekv.models.{_FILE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FILE_OF])
