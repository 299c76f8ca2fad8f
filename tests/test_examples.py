"""examples/: they run on the demo model, and what they claim is what they print."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from onekv.models.pull import NAMED_MODELS

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.demo_model


@pytest.fixture
def printed(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints."""
    if not NAMED_MODELS["smollm2"].path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)
    runpy.run_path(str(EXAMPLES / request.param), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("printed", ["agent.py"], indirect=True)
def test_an_agent_shares_its_context_and_drops_a_tools_result(printed: str) -> None:
    context, result = numbers(printed, r"context: (\d+) tokens, (\d+) of them the tool's result")
    assert numbers(printed, r"three forks: .*, (\d+) cells in use") == [context]
    (cells,) = numbers(printed, r"three answers: .*, (\d+) cells in use")
    assert cells < 2 * context
    tries = re.findall(r"^  (\d+) of (\d+) tokens cached: ", printed, re.MULTILINE)
    assert len(tries) == 3
    assert all(context <= int(cached) < int(total) < context + 24 for cached, total in tries)
    cached, total = numbers(printed, r"dropped: (\d+) of (\d+) tokens cached")
    assert context - result < cached < total < context


@pytest.mark.parametrize("printed", ["edit_context.py"], indirect=True)
def test_an_exact_edit_costs_the_tail_and_diverges_by_nothing(printed: str) -> None:
    edits = {
        mode: (int(count), float(divergence), same)
        for mode, count, divergence, same in re.findall(r"(\w+): .* (\d+) tokens evaluated, divergence (\S+) nats, (.*) likeliest", printed)
    }
    assert edits["exact"][0] > edits["shift"][0] == 1
    assert abs(edits["exact"][1]) < 1e-4
    assert edits["exact"][2] == "the same"
    assert edits["shift"][1] > edits["exact"][1]


@pytest.mark.parametrize("printed", ["hf_generate.py"], indirect=True)
def test_generate_makes_the_same_tokens_with_our_cells(printed: str) -> None:
    assert printed.count("the same tokens") == 3
    assert "OTHER TOKENS" not in printed
    assert re.search(r"fork \d+ us and 0 new cells", printed)


def numbers(text: str, pattern: str) -> list[int]:
    found = re.search(pattern, text)
    assert found, text
    return [int(one) for one in found.groups()]
