"""What every benchmark prints: a table, then one line of JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Result:
    """One figure. `goal` reads like "<= 150"; it is met iff the comparison holds. None: no goal."""

    name: str
    value: float
    unit: str
    goal: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met."""
        if self.goal is None:
            return None
        sign, bound = self.goal.split()
        return self.value <= float(bound) if sign == "<=" else self.value >= float(bound)


def machine() -> str:
    """Processor and cores, in words."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            name = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """Short hash of the checkout, "unknown" outside one."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def report(bench: str, results: Sequence[Result]) -> None:
    """Print the table and the JSON line."""
    width = max(len(r.name) for r in results)
    for r in results:
        goal = "" if r.goal is None else f"  goal {r.goal}  {'met' if r.met else 'NOT met'}"
        print(f"{r.name:<{width}}  {r.value:>10.1f} {r.unit}{goal}")
    entries = [{**asdict(r), "met": r.met} for r in results]
    print(json.dumps({"bench": bench, "commit": commit(), "machine": machine(), "results": entries}))
