"""How fast are saving and loading, against what the disk can do and against computing the conversation again?

    python -m benchmarks.files [--directory DIR] [--quick] [--busy]

One sequence of 4,096 tokens of the demo model in float32 cells: written to a file and made durable, then read back. The plain sides write
the same number of bytes with one `write` and `fsync`, and read them with one `read`; before each reading the system is asked to forget what
it holds of the file, on both sides. The prefill is the demo model's, on the same tokens.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence as Listing
from pathlib import Path

import numpy as np

from benchmarks.report import Result, begin, in_turns, options, report, timed
from onekv.models import cache_for, gguf, load_model


def main(argv: Listing[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = options(__doc__)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; the system's temporary directory if not given")
    given = parser.parse_args(argv)
    conditions = begin(given)
    count, turns = (64, 2) if conditions.quick else (4096, 7)
    with gguf.quiet():
        model = load_model("smollm2")
    cache = cache_for(model, 2 * count)
    seq, other = cache.sequence(), cache.sequence()
    tokens = np.random.default_rng(0).integers(100, 49_000, count).tolist()
    prefill = timed(lambda: model.extend(cache, [seq], [tokens]))
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        saved, plain = Path(directory) / "saved.safetensors", Path(directory) / "plain"
        seq.save(saved)
        data = saved.read_bytes()

        def write() -> None:
            with plain.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        def forget() -> None:
            descriptor = os.open(saved, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

        def load() -> float:
            forget()
            return timed(lambda: cache.load(saved, other))

        def read() -> float:
            forget()
            return timed(saved.read_bytes)

        sides = {
            "save": lambda: timed(lambda: seq.save(saved)),
            "plain write": lambda: timed(write),
            "load": load,
            "plain read": read,
        }
        took = in_turns(sides, turns)
    results = [Result(f"{name}, {len(data) / 1e6:.0f} MB", seconds * 1e3, "ms") for name, seconds in took.items()]
    results += [
        Result("save, of the plain write rate", took["plain write"] / took["save"], "x", ">= 0.7"),
        Result("load, of the plain read rate", took["plain read"] / took["load"], "x", ">= 0.7"),
        Result(f"prefill of {count} tokens", prefill * 1e3, "ms"),
        Result("load / prefill", took["load"] / prefill, "x", "<= 0.05"),
    ]
    report("files", results, conditions)


if __name__ == "__main__":
    main()
