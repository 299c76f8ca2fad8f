"""What Prometheus reads: counts of the engine as they are at that moment, and histograms of requests. Names as vLLM's, with our prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onekv.engine.engine import Engine, EngineStats
from onekv.engine.request import Done, Event, Started

_SECONDS: Final = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """The metrics of one server. Each has a registry of its own, so that several may live in one process.

    Args:
        model: the label `model_name` of all of them
    """

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"onekv:{name}", about, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From submission to the first token.", _SECONDS)
        self._total = histogram("e2e_request_latency_seconds", "From submission to the last token.", _SECONDS)
        self._queued = histogram("request_queue_time_seconds", "From submission to the prompt's evaluation.", _SECONDS)
        self._each = histogram("request_time_per_output_token_seconds", "From token to token, mean of a request.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._made = histogram("request_generation_tokens", "Tokens made for a request.", _TOKENS)

    def observe(self, event: Event) -> None:
        """Count what a request says."""
        match event:
            case Started():
                self._prompt.observe(event.prompt_tokens)
            case Done():
                self._total.observe(event.total_s)
                self._queued.observe(event.queued_s)
                self._made.observe(event.completion_tokens)
                if event.first_token_s is not None:
                    self._first.observe(event.first_token_s)
                    if event.completion_tokens > 1:
                        self._each.observe((event.total_s - event.first_token_s) / (event.completion_tokens - 1))

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine when Prometheus asks, instead of being told all the time."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The engine's counts."""
        stats = self._engine.stats()
        for name, about, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"onekv:{name}", about, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, about, value in _counters(stats):
            counter = CounterMetricFamily(f"onekv:{name}", about, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        about = "Requests that did not fail, by the reason of their end."
        finished = CounterMetricFamily("onekv:request_success", about, labels=["model_name", "finished_reason"])
        for reason in ("stop", "length", "cancelled"):
            finished.add_metric([self._model, reason], stats.finished.get(reason, 0))
        yield finished

    def describe(self) -> Iterator[Metric]:
        """Nothing is read when it is registered."""
        return iter(())


def _gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "num_requests_running", "Requests being answered.", stats.running
    yield "num_requests_waiting", "Requests in the queue.", stats.waiting
    yield "num_sessions", "Sessions in memory.", stats.sessions
    yield "kv_cache_usage_perc", "Part of the cells in use; 1 is all.", stats.used_cells / stats.num_cells
    yield (
        "kv_cache_evictable_perc",
        "Part of the cells that hold prefixes and can be had at any time.",
        stats.evictable_cells / stats.num_cells,
    )
    yield "kv_cache_cells", "Cells of the buffer.", stats.num_cells


def _counters(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "prompt_tokens", "Tokens of prompts.", stats.prompt_tokens
    yield "request_failure", "Requests that failed.", stats.finished.get("failed", 0)
    yield "generation_tokens", "Tokens made.", stats.generated_tokens
    yield "prefix_cache_queries", "Tokens of prompts that were looked up.", stats.prompt_tokens
    yield "prefix_cache_hits", "Tokens of prompts whose cells were there.", stats.cached_tokens
    yield "num_preemptions", "Requests that lost their cells to others for a while.", stats.preemptions
    yield "num_evictions", "Prefixes given up.", stats.evictions
    yield "num_evicted_cells", "Their cells.", stats.evicted_cells
    yield "spec_decode_num_draft_tokens", "Tokens guessed.", stats.drafted_tokens
    yield "spec_decode_num_accepted_tokens", "Tokens guessed rightly.", stats.accepted_tokens
    yield "engine_steps", "Batches evaluated.", stats.steps
    yield "engine_step_seconds", "Seconds spent in them.", stats.step_seconds
