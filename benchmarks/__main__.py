"""Run every benchmark and write what they found into docs/benchmarks.md, with a chart.

    python -m benchmarks [NAME ...] [--quick] [--busy]

A benchmark that is not run now keeps the table it has: each run is kept in docs/benchmarks.json. The text of the page outside of the marked
part is written by hand and stays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent.parent / "docs"
PAGE: Final = DOCS / "benchmarks.md"
RUNS: Final = DOCS / "benchmarks.json"
CHART: Final = DOCS / "benchmarks.svg"
START: Final = "<!-- tables: written by python -m benchmarks -->"
END: Final = "<!-- end of tables -->"
NAMES: Final = ("bookkeeping", "sequence_ops", "attention", "files", "quality", "transformers", "llama_cpp", "engine")
MARKS: Final = {True: "met", False: "**not met**", None: ""}


def run(name: str, flags: list[str]) -> dict[str, Any] | None:
    """One benchmark in a process of its own; its last line. None: it refused to run or failed."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *(flags if name != "quality" else [])]
    print(f"$ python -m benchmarks.{name}", flush=True)
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if not line.startswith("{"):
                print(f"  {line}", end="", flush=True)
            lines.append(line)
    if process.returncode:
        print(f"  benchmarks.{name} ended with code {process.returncode}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def tables(runs: dict[str, Any]) -> str:
    """Markdown: one table a benchmark."""
    parts = []
    for name in NAMES:
        if name not in runs:
            continue
        one = runs[name]
        flags = "".join(f", {flag}" for flag in ("busy", "quick") if one.get(flag))
        parts.append(f"## {name}\n\n`python -m benchmarks.{name}`, commit {one['commit']}, {one['machine']}{flags}\n")
        parts.append("| what | measured | goal | |\n|---|---|---|---|")
        parts += [f"| {r['name']} | {r['value']:.4g} {r['unit']} | {r['goal'] or ''} | {MARKS[r['met']]} |" for r in one["results"]]
        parts.append("")
    return "\n".join(parts)


def chart(runs: dict[str, Any]) -> None:
    """Bars of the ratios that have a goal against another program: how many times as fast."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    bars = [
        (r["name"].replace("llama.cpp", "llama.cpp (better mode)"), r["value"])
        for name in ("llama_cpp", "transformers")
        for r in runs.get(name, {}).get("results", [])
        if r["goal"] is not None and r["unit"] == "x"
    ]
    if not bars:
        return
    matplotlib.rcParams["svg.hashsalt"] = "onekv"
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(bars) + 1))
    names, values = zip(*reversed(bars), strict=True)
    made = axes.barh(names, values, color=["#2a7f62" if value >= 1 else "#b5533c" for value in values])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.bar_label(made, fmt="%.2f", padding=3)
    axes.set_xlabel("times as fast (above 1: onekv is ahead)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(CHART, metadata={"Date": None})


def main() -> None:
    """Run them, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help=f"which; all of them by default: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; writes nothing")
    parser.add_argument("--busy", action="store_true", help="also where other processes keep the machine busy")
    given = parser.parse_args()
    unknown = sorted({*given.names} - {*NAMES})
    if unknown:
        parser.error(f"unknown benchmarks: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    flags = [f"--{flag}" for flag in ("quick", "busy") if getattr(given, flag)]
    found = {name: run(name, flags) for name in given.names or NAMES}
    if not given.quick:
        runs: dict[str, Any] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
        runs |= {name: one for name, one in found.items() if one is not None}
        RUNS.write_text(json.dumps(runs, indent=1) + "\n")
        page = PAGE.read_text()
        before, rest = page.split(START)
        PAGE.write_text(f"{before}{START}\n\n{tables(runs)}\n{END}{rest.split(END)[1]}")
        chart(runs)
    if None in found.values():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
