"""Writes docs/conformance.md: every scenario, case and rule, with the tests that hold it or the reason why there is none.

    python tests/conformance.py

Tests are found by reading the test files, not by running them: an id belongs to a test if the name of the function, or of one of its
parameters, contains spec_ID or case_ID.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "conformance.md"
NOTES = ROOT / "tests" / "data" / "conformance.toml"
ID = re.compile(r"(spec|case)_(S_D\d+b?|[A-Z]\d+)(?![A-Za-z0-9])")
TITLES = {"spec": "Scenarios of the specification", "case": "Cases from public bug reports"}

Found = dict[tuple[str, str], list[str]]  # (document, id) -> names of its tests


def ids_in(name: str) -> list[tuple[str, str]]:
    """Documents and ids that a name contains.

    >>> ids_in("test_spec_S_D1b_shared_cells"), ids_in("spec_S31-copy"), ids_in("test_a_case_for_all")
    ([('spec', 'S-D1b')], [('spec', 'S31')], [])
    """
    return [(document, name.replace("_", "-")) for document, name in ID.findall(name)]


def functions_of(source: str) -> Iterator[tuple[str, list[str]]]:
    """Every test function of a file, with the names of its parameters as far as they are written in the file."""
    tree = ast.parse(source)
    tables = {target.id: node.value for node in tree.body for target in _targets(node) if isinstance(node.value, ast.Dict)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, [name for decorator in node.decorator_list for name in _parameters(decorator, tables)]


def _targets(node: Any) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target for target in targets if isinstance(target, ast.Name)]


def _parameters(decorator: ast.expr, tables: dict[str, ast.Dict]) -> Iterator[str]:
    """Strings of a decorator; f"spec_{name}" for every name of a table counts as one string for each key."""
    for node in ast.walk(decorator):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.ListComp) and isinstance(node.elt, ast.JoinedStr) and isinstance(node.generators[0].iter, ast.Name):
            start = node.elt.values[0]
            for key in tables[node.generators[0].iter.id].keys:
                if isinstance(start, ast.Constant) and isinstance(key, ast.Constant):
                    yield f"{start.value}{key.value}"


def find_tests(root: Path = ROOT / "tests") -> tuple[Found, dict[str, str]]:
    """Names of the tests of every id; and every test's file."""
    found: Found = defaultdict(list)
    files: dict[str, str] = {}
    for path in sorted(root.rglob("test_*.py")):
        for name, parameters in functions_of(path.read_text()):
            files[name] = path.relative_to(root).as_posix()
            labels = [(key, name) for key in ids_in(name)]
            labels += [(key, f"{name}[{label}]") for label in parameters for key in ids_in(label) if label.startswith(("spec_", "case_"))]
            for key, label in labels:
                if label not in found[key]:
                    found[key].append(label)
    return found, files


def faults(notes: dict[str, Any], found: Found, files: dict[str, str]) -> Iterator[str]:
    """What is wrong between the notes and the tests; nothing if every id has a test or a reason."""
    for document in TITLES:
        told = notes["notes"][document]
        for name in notes[document]:
            tests, note = found.get((document, name), []), told.get(name, "")
            if note.startswith("differs: ") and not tests:
                yield f"{document} {name} differs, but no test holds it"
            if tests and note and not note.startswith("differs: "):
                yield f"{document} {name} has a test and a reason why not: {note}"
            if not tests and not re.match(r"(replaced by \w+|not applicable|later|differs): \S", note):
                yield f"{document} {name} has neither a test nor a reason"
        yield from (f"a note for {document} {name}, which is not listed" for name in told if name not in notes[document])
        yield from (f"a note for {document} {name}, which is not listed" for name in told if name not in notes[document])
        named = {name: tests for (where, name), tests in found.items() if where == document}
        yield from (
            f"{tests[0]} names {document} {name}, which is not listed" for name, tests in named.items() if name not in notes[document]
        )
        for note in told.values():
            if note.startswith("replaced by "):
                yield from _unknown(note.split()[2].rstrip(":"), found, files)
    for table in ("deviations", "rules"):
        for name, (there, here, *tests) in notes[table].items():
            if not there or not here or not tests:
                yield f"{table} {name}: no text or no test"
            for test in tests:
                yield from _unknown(test, found, files)
    for name, (behaviour, *held) in notes["peers"].items():
        if not behaviour or not held:
            yield f"peers {name}: no behaviour, or neither a test nor a reason"
        for test in held:
            if not re.match(r"not applicable: \S", test):
                yield from _unknown(test, found, files)


def _unknown(test: str, found: Found, files: dict[str, str]) -> Iterator[str]:
    """A fault if a test, named by function or by id, does not exist."""
    if test not in files and not any(found.get(key) for key in ids_in(test)):
        yield f"there is no test {test}"


def page(notes: dict[str, Any], found: Found, files: dict[str, str]) -> str:
    """The page."""
    lines = [
        "# Conformance",
        "",
        "<!-- Written by tests/conformance.py from tests/data/conformance.toml and the names of the tests. Change those. -->",
        "",
        "onekv was written from two documents: a behavioural specification of llama.cpp's unified KV cache as of July 2025 (`spec`),",
        "and small cases made from public bug reports of many projects (`case`). Every scenario and case has an id; the tests are named",
        "by it, so `pytest -k spec_S53` runs one and `pytest -k case_E` a section. Where there is no test, this page says why.",
        "",
        *_counts(notes, found),
        "",
        "## Where llama.cpp answers with a status",
        "",
        "| there | here |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in notes["answers"].items()),
        "",
    ]
    for table, title, intro in (
        ("deviations", "Defects that are closed", "By the specification's own numbers."),
        ("rules", "Other rules that differ", "By section of the specification."),
    ):
        lines += [f"## {title}", "", intro, "", "| | llama.cpp | here | held by |", "|---|---|---|---|"]
        for name, (there, here, *tests) in notes[table].items():
            lines.append(f"| {name} | {there} | {here} | {', '.join(_shown(test, files) for test in tests)} |")
        lines.append("")
    lines += [
        "## transformers' cache tests",
        "",
        "What tests/utils/test_cache_utils.py and the cache tests of tests/generation in the transformers repository assert, over several",
        "versions, and the test of ours that asks the same of `as_cache`.",
        "",
        "| their test | behaviour | here |",
        "|---|---|---|",
    ]
    for name, (behaviour, *held) in notes["peers"].items():
        shown = [test if test.startswith("not applicable") else _shown(test, files) for test in held]
        lines.append(f"| {name} | {behaviour} | {'<br>'.join(shown)} |")
    lines.append("")
    for document, title in TITLES.items():
        lines += [f"## {title}", "", "| id | about | tests |", "|---|---|---|"]
        for name, about in notes[document].items():
            note = notes["notes"][document].get(name, "")
            tests = [_shown(test, files) for test in found.get((document, name), [])]
            note = re.sub(r"replaced by (\w+):", lambda match: f"replaced by {_shown(match[1], files)}:", note)
            lines.append(f"| {document} {name} | {about} | {'<br>'.join([*tests, note] if note else tests)} |")
        lines.append("")
    return "\n".join(lines)


def _counts(notes: dict[str, Any], found: Found) -> Iterator[str]:
    yield "| | ids | tested | replaced, not applicable | later |"
    yield "|---|---|---|---|---|"
    for document in TITLES:
        told, names = notes["notes"][document], list(notes[document])
        tested = [name for name in names if found.get((document, name))]
        settled = [name for name in names if told.get(name, "").startswith(("replaced", "not applicable"))]
        yield f"| {document} | {len(names)} | {len(tested)} | {len(settled)} | {len(names) - len(tested) - len(settled)} |"


def _shown(test: str, files: dict[str, str]) -> str:
    """A test as the page writes it; an id as it is."""
    name = test.split("[")[0]
    return f"[`{test}`](../tests/{files[name]})" if name in files else f"`{test}`"


def main() -> None:
    notes = tomllib.loads(NOTES.read_text())
    found, files = find_tests()
    for fault in faults(notes, found, files):
        print(fault)
    PAGE.write_text(page(notes, found, files))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
