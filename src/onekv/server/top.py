"""What a server is doing, for a terminal: reads its metrics, and makes a table of two readings."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onekv.errors import ConfigError

Reading = Mapping[str, float]  # a metric's name without prefix and labels -> its value, summed over labels


def read(url: str, key: str | None = None, timeout: float = 10.0) -> Reading:
    """The metrics of a server.

    Raises:
        ConfigError: no address of a server, nobody answers there, or not as onekv does.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"a server's address begins with http:// or https://, got {url!r}")
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        hint = "; give the key it asks for with --api-key-file" if error.code == 401 else ""
        raise ConfigError(f"{url} answers {error.code} to /metrics{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"nobody answers on {url}: {getattr(error, 'reason', None) or error}") from error
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("onekv:")
            if name != sample.name:
                found[name] = found.get(name, 0.0) + sample.value
    if "kv_cache_cells" not in found:
        raise ConfigError(f"{url} has metrics, but not those of onekv")
    return found


def view(now: Reading, before: Reading, seconds: float) -> RenderableType:
    """One screen: cells, requests, rates since the reading before, totals."""
    cells = now["kv_cache_cells"]
    used, evictable = (now[f"kv_cache_{name}_perc"] * cells for name in ("usage", "evictable"))

    def rate(name: str) -> float:
        return max(now[name] - before[name], 0.0) / seconds if seconds > 0 else 0.0

    def share(part: str, whole: str) -> str:
        return f"{100 * now[part] / now[whole]:.1f} %" if now[whole] else "-"

    bar = ProgressBar(total=cells, completed=used - evictable, width=40)
    table = Table(box=None, show_header=False, padding=(0, 2))
    guesses = share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")
    rows = (
        ("cells", f"{used - evictable:.0f} in use, {evictable:.0f} cached, {cells - used:.0f} free of {cells:.0f}"),
        ("requests", f"{now['num_requests_running']:.0f} running, {now['num_requests_waiting']:.0f} waiting"),
        ("sessions", f"{now['num_sessions']:.0f}"),
        ("tokens/s", f"{rate('generation_tokens_total'):.1f} made, {rate('prompt_tokens_total'):.1f} of prompts"),
        ("prefix hits", f"{share('prefix_cache_hits_total', 'prefix_cache_queries_total')} of all tokens of prompts"),
        ("preempted", f"{now['num_preemptions_total']:.0f}"),
        ("evicted", f"{now['num_evicted_cells_total']:.0f} cells in {now['num_evictions_total']:.0f} evictions"),
        ("guesses", "none" if guesses == "-" else f"{guesses} right"),
        ("failed", f"{now['request_failure_total']:.0f}"),
    )
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return Group(bar, table)
