"""Requests made at random from the API's own description, right ones and wrong ones: none makes the server fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from serving import serving


def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    with serving(cells=32, sessions_dir=tmp_path) as served:
        described = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        sent = 0
        for result in described.get_all_operations():
            operation = result.ok()
            right, wrong = (operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))

            @settings(max_examples=15, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
            @given(right | wrong if operation.method == "post" else right)
            def send(case: Any) -> None:
                nonlocal sent
                sent += 1
                answer = case.call(timeout=10)
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)
                if answer.status_code >= 400 and answer.status_code != 499:
                    assert list(answer.json()["error"]) == ["message", "type", "param", "code"]

            send()
        assert sent > 150
        served.until(served.is_idle)
        stats = served.engine.stats()
        assert stats.used_cells == stats.evictable_cells
        assert served.ok("/health")["status"] == "ok"
