"""The order of the packages, read from every import, and what `import onekv` loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onekv

SRC = Path(onekv.__file__).parent
ORDER = [
    ("errors", "config"),
    ("core",),
    ("codecs",),
    ("storage",),
    ("rope",),
    ("files",),
    ("attention",),
    ("cache",),
    ("models",),
    ("engine",),
    ("server",),
    ("cli", "ray_app"),
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FILES = sorted(path for path in SRC.rglob("*.py") if path != SRC / "__init__.py")


def imports(source: str, package: str) -> Iterator[str]:
    """Full names of all modules a file imports, wherever in the file; `package` is where it lives."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def faults(source: str, package: str, part: str) -> list[str]:
    """Imports a file of this part of the library may not have."""
    found = []
    for name in imports(source, package):
        root, _, rest = name.partition(".")
        if root == "onekv":
            other = rest.split(".")[0]
            if other not in RANK:
                found.append(f"{name}: the package itself, or a part without a place in the order")
            elif RANK[other] > RANK[part]:
                found.append(f"{name}: a higher layer")
        elif root == "transformers" and part != "models":
            found.append(f"{name}: only models knows transformers")
        elif root == "torch" and part in ("core", "errors", "config"):
            found.append(f"{name}: core knows no torch")
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SRC)) for path in FILES])
def test_no_file_imports_a_higher_layer(path: Path) -> None:
    parts = path.relative_to(SRC).with_suffix("").parts
    package = ".".join(("onekv", *parts[:-1]))
    assert parts[0] in RANK, f"{parts[0]} has no place in the order of DESIGN section 4"
    assert faults(path.read_text(), package, parts[0]) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "from onekv.storage import KVStore"),
        ("core", "import torch"),
        ("core", "def f():\n    from torch import Tensor"),
        ("attention", "from onekv.cache import KVCache"),
        ("attention", "from onekv import cache"),
        ("attention", "from onekv import KVCache"),
        ("cache", "import onekv.models.hf"),
        ("cache", "from transformers import AutoModel"),
        ("engine", "import transformers.cache_utils"),
        ("models", "from ..engine import Engine"),
        ("models", "from .. import cli"),
        ("storage", "from onekv.helpers import x"),
    ],
)
def test_a_wrong_import_is_seen(part: str, source: str) -> None:
    assert len(faults(source, f"onekv.{part}", part)) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("attention", "from onekv.core.cells import Group\nimport torch"),
        ("cache", "from onekv.attention import View\nfrom onekv import errors, files"),
        ("models", "import transformers\nfrom .hooks import x\nfrom onekv.cache import KVCache"),
        ("cli", "from onekv.models import load_model"),
        ("core", "import numpy as np\nfrom numba import njit\nfrom onekv.core import loops"),
    ],
)
def test_a_right_import_is_not_held_against_a_file(part: str, source: str) -> None:
    assert faults(source, f"onekv.{part}", part) == []


def test_importing_onekv_loads_no_transformers() -> None:
    script = (
        "import sys, onekv; print(sorted({m.partition('.')[0] for m in sys.modules} & {'transformers', 'gguf', 'accelerate', 'fastapi'}))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert loaded.stdout.strip() == "[]"


def test_public_names_are_sorted_complete_and_resolve() -> None:
    names = onekv.__all__
    assert names == sorted(set(names))
    for name in names:
        assert getattr(onekv, name).__name__ == name
    present = {name for name, value in vars(onekv).items() if getattr(value, "__module__", "").startswith("onekv.")}
    assert {name for name in present if not name.startswith("_")} <= set(names)
    assert set(names) <= set(dir(onekv))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        onekv.nonsense  # noqa: B018


def test_the_exception_tree_is_the_one_that_is_drawn() -> None:
    tree = {
        onekv.BatchError: (onekv.OneKVError, ValueError),
        onekv.WindowLost: (onekv.BatchError,),
        onekv.CacheFull: (onekv.OneKVError,),
        onekv.ShiftError: (onekv.OneKVError,),
        onekv.StateError: (onekv.OneKVError, ValueError),
        onekv.UnsupportedModel: (onekv.OneKVError,),
        onekv.RequestTooLarge: (onekv.OneKVError,),
        onekv.ConfigError: (onekv.OneKVError, ValueError),
        onekv.OneKVError: (Exception,),
    }
    for error, bases in tree.items():
        assert error.__bases__ == bases
