"""Writes docs/models.md: every family of the table, and what the probe finds in a tiny model of it.

python tests/models/report.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from families import FAMILIES, REFUSED, SERVED, tiny_model
from onekv import UnsupportedModel
from onekv.models import Model

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD: Final = """\
# Models

Written by `python tests/models/report.py` from the table in `tests/models/families.py`; do not edit.

No family has code of its own in onekv: a probe runs each model once when it is loaded and finds its layers, their windows, shared keys
and how keys turn with position. Rotary frequencies that transformers changes with the length of the input (dynamic NTK, LongRoPE) are
fixed, while onekv runs the model, to those for its whole context. A family that is not listed is served if the probe understands it,
and refused by name if not.
`pytest -v tests/models/test_families.py` runs a tiny random model of each row.

## Served

Rows of any sequences share one forward ("packed"); with recurrent layers, as many rows of each sequence ("equal"). Three interleaved
sequences with a common prefix give the logits that transformers gives for each alone, to 1e-5 of the largest logit. "Exact" shift: stored
keys can be moved to other positions, to float rounding; recurrent states do not depend on positions.
"Shared" counts layers that read the keys of an earlier layer and store none. A family with a window setting may be loaded without one.
"Gathered" families do something of their own with stored keys and values: latent attention stores small latents and expands them, others
attend by code that knows no other way. In every layer they are handed a copy of the entries that any row of the step sees, in any order,
and a mask. That is as exact, and costs more: what is made of the entries is made anew in every step, and code of a model's own compares
every row with the entries of all sequences in the step.

| row | `model_type` | windows | shift | shared | notes |
|---|---|---|---|---|---|
"""
_REFUSED_HEAD: Final = """
## Refused when loaded

`UnsupportedModel` names the model and the reason. Nothing here is served approximately.

| row | `model_type` | reason given |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_served()) + _REFUSED_HEAD + "".join(_refused())


def _served() -> Iterator[str]:
    for name in SERVED:
        model = Model(tiny_model(name))
        attending = [layer.window for layer in model.layers if layer.has_cells]
        kinds = dict.fromkeys("full" if window.is_full else repr(window)[7:].split("(")[0] for window in attending)
        if count := sum(bool(layer.states) for layer in model.layers):
            kinds[f"{count} of {len(model.layers)} recurrent"] = None
        shared = sum(layer.source is not None for layer in model.layers)
        shift = "exact" if model.no_shift is None else f"refused: {model.no_shift.split(': ', 1)[-1]}"
        share = f"{shared} of {len(model.layers)}" if shared else ""
        yield _row(name, FAMILIES[name].model_type, ", ".join(kinds), shift, share, FAMILIES[name].notes)


def _refused() -> Iterator[str]:
    for name in REFUSED:
        try:
            reason = f"served, {len(Model(tiny_model(name)).layers)} layers"
        except UnsupportedModel as error:
            reason = str(error)
        yield _row(name, FAMILIES[name].model_type, reason)


def _row(name: str, model_type: str, *cells: str) -> str:
    return "| " + " | ".join([name, f"`{model_type}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
