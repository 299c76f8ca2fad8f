# Every target makes .venv by itself. Nothing outside this folder and the model cache (~/.cache/onekv or $ONEKV_HOME) is written.
PYTHON ?= python3
BIN := .venv/bin
MODEL := smollm2

.PHONY: setup demo serve test test-all check bench pages clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("onekv needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# The environment and the demo model (98 MB, fetched once).
setup: .venv/installed
	$(BIN)/onekv pull $(MODEL)

# Three conversations in one buffer, drawn.
demo: setup
	$(BIN)/onekv demo

# OpenAI's API and the page on http://127.0.0.1:8000, until interrupted.
serve: setup
	$(BIN)/onekv serve $(MODEL)

# The page's tests also need Chromium (Debian: apt-get install chromium); without it they fail and say so.
test: setup
	$(BIN)/python -m pytest -q -n auto --dist worksteal --durations=10

# Also what needs minutes.
test-all: setup
	$(BIN)/python -m pytest -q -m ''

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The generated pages of docs/; tests fail when they are stale.
pages: .venv/installed
	$(BIN)/python tests/conformance.py
	$(BIN)/python tests/models/report.py

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
