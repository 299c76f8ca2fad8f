"""Every scenario and case has a test or a reason, and the page that says so is the one that would be written now."""

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import NOTES, PAGE, faults, find_tests, functions_of, ids_in, page

NOTED = tomllib.loads(NOTES.read_text())
FOUND, FILES = find_tests()


def test_every_id_has_a_test_or_a_reason() -> None:
    assert list(faults(NOTED, FOUND, FILES)) == []


def test_the_page_is_the_one_that_would_be_written_now() -> None:
    assert PAGE.read_text() == page(NOTED, FOUND, FILES), "run `python tests/conformance.py`"


def test_the_ids_are_all_there() -> None:
    assert (len(NOTED["spec"]), len(NOTED["case"]), len(NOTED["deviations"])) == (146, 125, 26)


SOURCE = """
OPERATIONS: dict[str, int] = {"S20": 1, "S21-again": 2, **OTHER}

@pytest.mark.parametrize("op", OPERATIONS.values(), ids=[f"spec_{name}" for name in OPERATIONS])
@pytest.mark.parametrize("mode", ["a", "b"], ids=["case_A01-x", "plain"])
@pytest.mark.parametrize("more", [pytest.param(1, id="spec_S_D1b")])
def test_operations(op, mode, more): ...

def test_spec_M06_rows(): ...

class TestThings:
    def test_case_E04_files(self): ...

def helper_spec_S99(): ...
"""


def test_names_of_functions_parameters_and_tables_are_found(tmp_path: Path) -> None:
    assert dict(functions_of(SOURCE)).keys() == {"test_operations", "test_spec_M06_rows", "test_case_E04_files"}
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "test_one.py").write_text(SOURCE)
    found, files = find_tests(tmp_path)
    assert {key: tests for key, tests in found.items() if tests} == {
        ("spec", "S20"): ["test_operations[spec_S20]"],
        ("spec", "S21"): ["test_operations[spec_S21-again]"],
        ("case", "A01"): ["test_operations[case_A01-x]"],
        ("spec", "S-D1b"): ["test_operations[spec_S_D1b]"],
        ("spec", "M06"): ["test_spec_M06_rows"],
        ("case", "E04"): ["test_case_E04_files"],
    }
    assert set(files.values()) == {"core/test_one.py"}


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_spec_S1x_a", []),
        ("test_spec_S_D1_a", [("spec", "S-D1")]),
        ("spec_B34-given", [("spec", "B34")]),
        ("the special case", []),
        ("test_case_B08_iii_one", [("case", "B08")]),
    ],
)
def test_an_id_ends_where_its_number_does(name: str, ids: list[tuple[str, str]]) -> None:
    assert ids_in(name) == ids


def removed(document: str, name: str) -> Callable[[dict[str, Any], Any], None]:
    return lambda notes, found: notes["notes"][document].pop(name)


def noted(document: str, **notes: str) -> Callable[[dict[str, Any], Any], None]:
    return lambda told, found: told["notes"][document].update(notes)


UNTESTED, UNLISTED = "has neither a test nor a reason", "which is not listed"
FAULTS: dict[str, tuple[Callable[[dict[str, Any], Any], Any], str]] = {
    "a test is gone": (lambda notes, found: found.pop(("spec", "S42")), f"spec S42 {UNTESTED}"),
    "a reason is gone": (removed("spec", "S69"), f"spec S69 {UNTESTED}"),
    "an empty reason": (noted("spec", S69="later: "), f"spec S69 {UNTESTED}"),
    "another kind of reason": (noted("spec", S69="hard"), f"spec S69 {UNTESTED}"),
    "a reason beside a test": (noted("spec", S42="later: no"), "spec S42 has a test and a reason why not"),
    "a difference without a test": (lambda notes, found: found.pop(("case", "A12")), "case A12 differs, but no test holds it"),
    "a new id": (lambda notes, found: notes["case"].update(C09="new"), f"case C09 {UNTESTED}"),
    "an unknown id": (lambda notes, found: found.update({("case", "Z01"): ["test_z"]}), f"test_z names case Z01, {UNLISTED}"),
    "a note for nothing": (noted("case", Z01="later: x"), f"a note for case Z01, {UNLISTED}"),
    "replaced by nothing": (noted("spec", S64="replaced by test_that_never_was: x"), "there is no test test_that_never_was"),
    "a rule without a test": (lambda notes, found: notes["rules"].update({"4.4": ["there", "here"]}), "rules 4.4: no text or no test"),
    "a rule without its test": (
        lambda notes, found: notes["deviations"].update({"D-1": ["x", "y", "spec_Z"]}),
        "there is no test spec_Z",
    ),
    "a peer's test without ours": (lambda notes, found: notes["peers"].update(test_x=["x"]), "peers test_x: no behaviour, or neither"),
    "a peer's test without its own": (lambda notes, found: notes["peers"].update(test_x=["x", "test_y"]), "there is no test test_y"),
    "a peer's test without a reason": (
        lambda notes, found: notes["peers"].update(test_x=["x", "not applicable: "]),
        "there is no test not applicable",
    ),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=list(FAULTS))
def test_what_is_missing_is_told(change: Callable[[dict[str, Any], Any], Any], message: str) -> None:
    notes, found = copy.deepcopy(NOTED), dict(FOUND)
    change(notes, found)
    assert any(fault.startswith(message) for fault in faults(notes, found, FILES))
