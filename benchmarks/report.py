"""What every benchmark shares: its options, a look at what else the machine is doing, a table, and one line of JSON at the end."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

Side = Callable[[], float]  # does it once, gives its seconds

MAX_OTHER_LOAD: Final = 0.25  # cores kept busy by other processes, above which timings say more about them than about us


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


@dataclass(frozen=True)
class Conditions:
    """How a run was made: whether small, and how many cores other processes kept busy when it began."""

    quick: bool = False
    other_load: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the timings are not to be trusted."""
        return self.other_load is not None and self.other_load > MAX_OTHER_LOAD


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--busy", action="store_true", help="run although other processes keep the machine busy; the JSON line says so")
    return parser


def begin(given: argparse.Namespace) -> Conditions:
    """Print how busy the machine is; refuse to measure on a busy one unless told to.

    Raises:
        SystemExit: code 2, with a message on the error stream.
    """
    load = other_load()
    print(f"other processes keep {load:.2f} of {os.cpu_count()} cores busy")
    conditions = Conditions(given.quick, load)
    if conditions.is_busy and not given.busy:
        print(f"too busy to measure: at most {MAX_OTHER_LOAD} is accepted. Wait, or run anyway with --busy", file=sys.stderr)
        raise SystemExit(2)
    return conditions


def other_load(seconds: float = 0.5) -> float:
    """Cores that other processes keep busy, looked at for some time; the last minute's load average where there is no /proc/stat."""
    if not os.path.exists("/proc/stat"):
        return os.getloadavg()[0]
    start, busy, own = time.perf_counter(), _busy_s(), _own_s()
    time.sleep(seconds)
    return max((_busy_s() - busy) - (_own_s() - own), 0.0) / (time.perf_counter() - start)


def _busy_s() -> float:
    """Processor seconds of the whole machine that were neither idle nor waiting for a disk."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, *interrupts = (int(n) for n in stat.readline().split()[1:9])  # the rest is part of user time
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    return sum(os.times()[:2])


def in_turns(sides: Mapping[str, Side], turns: int, warm_up: int = 1) -> dict[str, float]:
    """Median seconds of every side: each turn runs all of them, each time starting with another one. The first turns are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(turns + warm_up):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            took = sides[name]()
            if turn >= warm_up:
                seconds[name].append(took)
    return {name: statistics.median(took) for name, took in seconds.items()}


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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


def report(bench: str, results: Sequence[Result], conditions: Conditions | None = None) -> None:
    """Print the table and the JSON line. The line has "busy" or "quick" if the run was."""
    width = max(len(r.name) for r in results)
    for r in results:
        goal = "" if r.goal is None else f"  goal {r.goal}  {'met' if r.met else 'NOT met'}"
        print(f"{r.name:<{width}}  {r.value:>10.{1 if r.value >= 1 else 3}f} {r.unit}{goal}")
    line: dict[str, Any] = {"bench": bench, "commit": commit(), "machine": machine()}
    if conditions is not None:
        if conditions.other_load is not None:
            line["other_load"] = round(conditions.other_load, 2)
        line |= {name: True for name, holds in (("busy", conditions.is_busy), ("quick", conditions.quick)) if holds}
    line["results"] = [{**asdict(r), "met": r.met} for r in results]
    print(json.dumps(line))
