"""Settings of the whole suite."""

import os
from typing import Any

# Tiny tensors: a second thread costs more than it gives. Set before torch is imported, and inherited by the processes tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# No deadline: the first call of a compiled loop takes seconds. Derandomized: a run that passed passes again.
settings.register_profile("onekv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("onekv")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each family of models that was compared with stock transformers."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "family" and report.when == "call":
                terminalreporter.write_line(line)
