"""docs/server.md and README.md: every request is sent, every answer shown is the one that comes, every table is complete."""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import httpx
import pytest
import typer

import onekv
from onekv import Engine, cli
from onekv.models.pull import NAMED_MODELS
from onekv.server import run, schema
from onekv.server.app import create_app
from serving import serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
URL = "http://127.0.0.1:8000"

# Qwen's way of showing tools and writing calls.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call these functions:\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    'For each call, return {"name": NAME, "arguments": OBJECT} in <tool_call></tool_call> tags.<|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# --- what is shown --------------------------------------------------------------------------------------------------------------


def shown_json(text: str) -> Any:
    """JSON in which a bare ... stands for any value, or for more fields or elements."""
    quoted = re.sub(r'("(?:[^"\\]|\\.)*")|\.\.\.', lambda found: found[1] or '"..."', text)
    return json.loads(re.sub(r'([,{]\s*)"\.\.\."(\s*\})', r'\1"...": null\2', quoted))


def differs(shown: Any, came: Any, names: dict[str, str], where: str = "") -> str | None:
    """Where an answer is not as shown; None: nowhere. "$name" is bound at its first sight; numbers with a fraction agree to 0.01."""
    if shown == "...":
        return None
    if isinstance(shown, dict) and isinstance(came, dict):
        keys = [key for key in shown if key != "..."]
        if any(key not in came for key in keys) or ("..." not in shown and len(keys) != len(came)):
            return f"{where}: fields {list(came)}, shown {list(shown)}"
        return next((found for key in keys if (found := differs(shown[key], came[key], names, f"{where}.{key}"))), None)
    if isinstance(shown, list) and isinstance(came, list):
        is_open = bool(shown) and shown[-1] == "..."
        first = shown[:-1] if is_open else shown
        if len(came) < len(first) or (len(came) > len(first) and not is_open):
            return f"{where}: {len(came)} elements, shown {len(first)}"
        pairs = enumerate(zip(first, came[: len(first)], strict=True))
        return next((found for i, (one, other) in pairs if (found := differs(one, other, names, f"{where}.{i}"))), None)
    if isinstance(shown, float) and isinstance(came, float):
        return None if abs(shown - came) < 0.01 else f"{where}: {came}, shown {shown}"
    if isinstance(shown, str) and isinstance(came, str):
        if shown.startswith("$"):
            return None if names.setdefault(shown, came) == came else f"{where}: {came}, {shown} was {names[shown]}"
        pattern = ".*".join(re.escape(part) for part in shown.split("..."))
        return None if re.fullmatch(pattern, came, re.DOTALL) else f"{where}: {came!r}, shown {shown!r}"
    return None if type(shown) is type(came) and shown == came else f"{where}: {came!r}, shown {shown!r}"


def lines_differ(shown: str, came: str, names: dict[str, str]) -> str | None:
    """The same for lines, of which a line ... stands for any number."""

    def one_differs(line: str, other: str) -> str | None:
        if line.startswith("data: {"):
            return (
                differs(shown_json(line[6:]), json.loads(other[6:]), names) if other.startswith("data: {") else f"{other!r}, shown {line!r}"
            )
        return differs(line, other, names)

    left = [line for line in came.splitlines() if line]
    may_skip = False
    for line in shown.splitlines():
        if line == "...":
            may_skip = True
            continue
        while left:
            found = one_differs(line, left.pop(0))
            if found is None:
                break
            if not may_skip:
                return found
        else:
            return f"no line {line!r}"
        may_skip = False
    return None if may_skip or not left else f"more lines: {left}"


# --- what is served -------------------------------------------------------------------------------------------------------------


class Reader:
    """Reads the page from its beginning, and does what it says against one server after the other."""

    def __init__(self, sessions_dir: Path) -> None:
        self._sessions_dir = sessions_dir
        self._model: onekv.Model | None = None
        self._template: Any = None
        self._names: dict[str, str] = {}
        self._scope: dict[str, Any] = {}
        self._open = contextlib.ExitStack()
        self.url = ""

    def serve(self, how: str) -> None:
        """Stop what is served, and start: "the demo model", "again", "with a key" or "with a template for tools"."""
        self._open.close()
        if self._model is None:
            self._model = onekv.load_model("smollm2", weights="float32")
            self._template = self._model.text.tokenizer.chat_template
        model = self._model
        model.text.tokenizer.chat_template = TOOL_TEMPLATE if how == "with a template for tools" else self._template
        engine = self._open.enter_context(Engine(model, onekv.cache_for(model, 4096, max_seqs=256)))
        key = "secret" if how == "with a key" else None
        app = create_app(engine, "smollm2", api_key=key, sessions_dir=self._sessions_dir)
        self.url = self._open.enter_context(running(app))

    def close(self) -> None:
        self._open.close()

    def http(self, block: str) -> str | None:
        """Send a request; returns what differs from the answer shown."""
        for name, value in self._names.items():
            block = re.sub(re.escape(name) + r"\b", value, block)
        asked, _, answered = block.partition("\n\n")
        first, *lines = asked.splitlines()
        method, path = first.split(" ")
        headers = {}
        while lines and not lines[0].startswith("{"):
            name, _, value = lines.pop(0).partition(": ")
            headers[name] = value
        body = "\n".join(lines)
        headers |= {"Content-Type": "application/json"} if body else {}
        answer = httpx.request(method, self.url + path, content=body.encode(), headers=headers, timeout=300)
        status, _, expected = answered.strip().partition("\n")
        if answer.status_code != int(status):
            return f"{answer.status_code}, shown {status}: {answer.text}"
        found = (
            differs(shown_json(expected), answer.json(), self._names)
            if expected.startswith("{")
            else lines_differ(expected, answer.text, {})
        )
        return None if found is None else f"{found}\n{answer.text[:3000]}"

    def python(self, code: str, expected: str) -> str | None:
        """Run code against the server; returns what differs from what it is shown to print."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code.replace(URL, self.url), "docs/server.md", "exec"), self._scope)
        return lines_differ(expected.rstrip(), out.getvalue(), {})


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """An app on a free port."""
    with run.listening_socket("127.0.0.1", 0) as bound:
        started = threading.Event()
        server = run.Server(app, started.set, 0.0)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        assert started.wait(60)
        try:
            yield run.url_of(bound)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, kind and text of what is fenced, and of comments that begin with "served "."""
    for found in re.finditer(r"^(?:```(\w+)\n(.*?)^```|<!-- served (.*?) -->)$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 1
        yield (line, "served", found[3]) if found[3] else (line, found[1], found[2])


def run_all(name: str, text: str, reader: Reader) -> int:
    """Everything a page shows, in order; returns how many examples that was. Code is run where what it prints is shown after it."""
    if not NAMED_MODELS["smollm2"].path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)
    wrong, code, count = [], "", 0
    with contextlib.closing(reader):
        for line, kind, block in blocks(text):
            found = None
            match kind:
                case "served":
                    reader.serve(block)
                case "http":
                    found = reader.http(block)
                case "python":
                    code = block
                case "text":
                    found = reader.python(code, block)
            count += kind in ("http", "text")
            if found:
                wrong.append(f"{name}:{line}: {found}")
    assert not wrong, "\n\n".join(wrong)
    return count


@pytest.mark.demo_model
def test_every_example_of_the_page_gives_what_it_shows(tmp_path: Path) -> None:
    assert run_all("docs/server.md", PAGE, Reader(tmp_path / "sessions")) > 40


@pytest.mark.demo_model
def test_what_the_readme_shows_of_server_and_engine_is_so(tmp_path: Path) -> None:
    assert run_all("README.md", f"<!-- served the demo model -->\n{README}", Reader(tmp_path / "sessions")) == 2


def test_the_readmes_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


# --- tables ---------------------------------------------------------------------------------------------------------------------


def table(heading: str, columns: str, page: str = PAGE) -> list[list[str]]:
    """The rows of the table that begins with these columns, after a heading."""
    lines = page[page.index(f"\n## {heading}\n") :].splitlines()
    start = lines.index(columns)
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def quoted(cell: str) -> list[str]:
    """What stands between backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_table_of_options_is_that_of_the_command() -> None:
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    rows = table("Start and stop", "| option | default | meaning |")
    named = [name for row in rows for name in quoted(row[0])]
    assert sorted(named) == sorted(["MODEL", *(one.opts[0] for one in command.params if one.opts[0] != "model" and one.name != "help")])
    for one in command.params:
        if isinstance(one.default, int) and not isinstance(one.default, bool):
            [row] = [row for row in rows if one.opts[0] in quoted(row[0])]
            assert str(one.default) in row[1]


def test_the_table_of_endpoints_is_that_of_the_server() -> None:
    with serving() as served:
        described = served.ok("/openapi.json")["paths"]
    there = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert there == {one for row in table("Endpoints", "| | |") for one in quoted(row[0])}
    asked = {text.partition("\n")[0].partition("?")[0] for _, kind, text in blocks(PAGE) if kind == "http"}
    asked = {re.sub(r"\$\w+", "{session_id}", one) for one in asked}
    assert there - asked == {"GET /", "GET /v1/models/{model}"}, "an endpoint without an example"


def test_the_table_of_metrics_is_that_of_the_server() -> None:
    with serving() as served:
        text = served.http.get("/metrics").text
    kinds = {name: kind for name, kind in re.findall(r"^# TYPE onekv:(\w+) (\w+)$", text, re.MULTILINE) if not name.endswith("_created")}
    assert kinds == {name: row[1] for row in table("What it is doing", "| metric | kind | meaning |") for name in quoted(row[0])}


def test_the_table_of_errors_has_every_code_of_the_server() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src" / "onekv" / "server").glob("*.py"))
    codes = set(re.findall(r'ApiError\([^\n]*code="(\w+)"', source)) | set(re.findall(r'PydanticCustomError\(\s*"(\w+)"', source))
    codes |= {"method_not_allowed"}  # made from the status
    rows = table("Errors", "| status | code | what happened, what to do |")
    assert codes == {code for row in rows for code in quoted(row[1])}


def test_the_table_of_unsupported_fields_is_complete() -> None:
    named = {name for row in table("What is not supported", "| fields | why |") for name in quoted(row[0])}
    refused = {"best_of"}
    for body, where in (
        (schema.ChatRequest, ""),
        (schema.CompletionRequest, ""),
        (schema.StreamOptions, "stream_options."),
        (schema.Instruction, "messages.N."),
        (schema.Question, "messages.N."),
        (schema.Reply, "messages.N."),
    ):
        refused |= {where + name for name, one in body.model_fields.items() if one.annotation is NoneType}
    assert named == refused
