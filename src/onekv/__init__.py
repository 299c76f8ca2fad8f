"""onekv: one fixed buffer of token cells, any number of conversations in it, any Hugging Face or GGUF model on top.

Names of `onekv.models` are loaded at their first use, so that `import onekv` loads no transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onekv.attention import Buckets
from onekv.cache import KVCache, Plan, Sequence, Step
from onekv.core.batch import Batch, Ubatch
from onekv.core.window import Window
from onekv.errors import (
    BatchError,
    CacheFull,
    ConfigError,
    OneKVError,
    RequestTooLarge,
    ShiftError,
    StateError,
    UnsupportedModel,
    WindowLost,
)
from onekv.storage import LayerSpec, Rope

if TYPE_CHECKING:
    from onekv.models import Model, cache_for, load_model

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BatchError",
    "Buckets",
    "CacheFull",
    "ConfigError",
    "KVCache",
    "LayerSpec",
    "Model",
    "OneKVError",
    "Plan",
    "RequestTooLarge",
    "Rope",
    "Sequence",
    "ShiftError",
    "StateError",
    "Step",
    "Ubatch",
    "UnsupportedModel",
    "Window",
    "WindowLost",
    "cache_for",
    "load_model",
]

_LATE = {"Model": "onekv.models", "cache_for": "onekv.models", "load_model": "onekv.models"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATE])
