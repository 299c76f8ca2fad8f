"""onekv: one fixed buffer of token cells, any number of conversations in it, any Hugging Face or GGUF model on top.

Names of `onekv.models` and `onekv.engine` are loaded at their first use, so that `import onekv` loads no transformers.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from onekv.attention import Buckets
from onekv.cache import ContextShift, KVCache, Plan, Sequence, Step
from onekv.core.batch import Batch, Ubatch
from onekv.core.window import Window
from onekv.errors import (
    BatchError,
    CacheFull,
    ConfigError,
    EngineClosed,
    OneKVError,
    QueueFull,
    RequestTooLarge,
    SessionBusy,
    ShiftError,
    StateError,
    StateLost,
    UnsupportedModel,
    WindowLost,
)
from onekv.storage import LayerSpec, Rope

if TYPE_CHECKING:
    from onekv.engine.engine import Engine
    from onekv.engine.request import Request
    from onekv.engine.sampler import Sampling
    from onekv.engine.session import Session
    from onekv.models import Model, as_cache, cache_for, detach, load_model

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BatchError",
    "Buckets",
    "CacheFull",
    "ConfigError",
    "ContextShift",
    "Engine",
    "EngineClosed",
    "KVCache",
    "LayerSpec",
    "Model",
    "OneKVError",
    "Plan",
    "QueueFull",
    "Request",
    "RequestTooLarge",
    "Rope",
    "Sampling",
    "Sequence",
    "Session",
    "SessionBusy",
    "ShiftError",
    "StateError",
    "StateLost",
    "Step",
    "Ubatch",
    "UnsupportedModel",
    "Window",
    "WindowLost",
    "as_cache",
    "cache_for",
    "detach",
    "load_model",
]

# ONEKV_DEBUG=1 logs a line for each search for cells, 2 also draws the cells after every step.
_DEBUG = {"1": ("onekv.placement",), "2": ("onekv.placement", "onekv.cells")}
for _name in _DEBUG.get(os.environ.get("ONEKV_DEBUG", ""), ()):
    logging.getLogger(_name).setLevel(logging.DEBUG)
    logging.getLogger(_name).addHandler(logging.StreamHandler())

_LATE = dict.fromkeys(("Model", "as_cache", "cache_for", "detach", "load_model"), "onekv.models") | {
    "Engine": "onekv.engine.engine",
    "Request": "onekv.engine.request",
    "Sampling": "onekv.engine.sampler",
    "Session": "onekv.engine.session",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATE])
