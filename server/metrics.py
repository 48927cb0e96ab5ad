"""Metrics for Prometheus at /metrics: requests, tokens, latencies, and the counters of the expert cache."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from forward.model import Model
from generate.scheduler import Scheduler
from machine.memory import rss_bytes
from server.openai.choice_stream import ChoiceStream

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: from a small model in memory to a large one on a slow drive.
FIRST_TOKEN_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
TOKEN_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Metrics(Collector):
    """The counters of the model and of the scheduler are read when /metrics is."""

    def __init__(self, model: Model, scheduler: Scheduler):
        self.experts = model.experts
        self.scheduler = scheduler
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.requests = self.counter("colibri_requests", "HTTP requests", "path", "status")
        self.refused = self.counter("colibri_queue_full", "Requests refused because the queue was full")
        self.prompt_tokens = self.counter("colibri_prompt_tokens", "Prompt tokens")
        self.cached_tokens = self.counter("colibri_cached_tokens", "Prompt tokens found in the prefix cache")
        self.tokens = self.counter("colibri_generated_tokens", "Generated tokens")
        self.answers = self.counter("colibri_answers", "Choices by finish reason", "reason")
        name, description = "colibri_time_to_first_token_seconds", "Time from a request to the first token of a choice"
        self.first_token = Histogram(name, description, buckets=FIRST_TOKEN_BUCKETS, registry=self.registry)
        name, description = "colibri_time_per_output_token_seconds", "Time between two tokens, mean over a choice"
        self.each_token = Histogram(name, description, buckets=TOKEN_BUCKETS, registry=self.registry)
        self.registry.register(self)

    def counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(name, description, labels, registry=self.registry)

    def choice_ended(self, choice: ChoiceStream, reason: str | None) -> None:
        """Count a choice. reason: its finish reason, cancelled or error."""
        self.answers.labels(reason).inc()
        self.tokens.inc(choice.num_tokens)
        if choice.first_token_time is not None and choice.num_tokens > 1:
            seconds = choice.last_token_time - choice.first_token_time
            self.each_token.observe(seconds / (choice.num_tokens - 1))

    def drive_metrics(self) -> Iterator[Metric]:
        """How each drive is read now, and what it gave."""
        depth = GaugeMetricFamily("colibri_drive_depth", "Reads that a drive has in flight", labels=["drive", "mode"])
        best = GaugeMetricFamily("colibri_drive_best_bytes_per_second", "Best speed seen of a drive", labels=["drive"])
        drives = self.experts.disk.drives
        for name, drive in zip(("drive", "mirror"), drives.all, strict=False):
            depth.add_metric([name, drive.setting[0]], drive.setting[1])
            best.add_metric([name], drive.best_bytes_per_second or 0)
        yield depth
        yield best
        yield CounterMetricFamily(
            "colibri_expert_page_cache_bytes", "Bytes of experts that came from the page cache", drives.cached_bytes
        )

    def collect(self) -> Iterator[Metric]:
        """Return what is counted elsewhere; prometheus_client calls this."""
        counters = self.experts.counters
        queue = self.experts.queue
        statistics = self.scheduler.statistics()
        yield CounterMetricFamily("colibri_expert_hits", "Experts found in memory", counters.hits)
        yield CounterMetricFamily(
            "colibri_expert_misses", "Experts that were not in memory when a layer requested them", counters.misses
        )
        yield CounterMetricFamily("colibri_expert_read_bytes", "Bytes of experts read", counters.bytes_read)
        yield CounterMetricFamily("colibri_expert_evictions", "Experts evicted from memory", counters.evictions)
        yield CounterMetricFamily(
            "colibri_expert_wait_seconds", "Time with nothing to compute until an expert arrived", counters.wait_seconds
        )
        yield from self.drive_metrics()
        reads = queue.num_done, queue.total_read_seconds
        yield SummaryMetricFamily("colibri_expert_read_seconds", "Duration of expert reads", *reads)
        yield GaugeMetricFamily("colibri_queue_length", "Requests in the queue", statistics["queue"])
        slots = GaugeMetricFamily("colibri_slots", "KV slots", labels=["state"])
        slots.add_metric(["busy"], statistics["slots_busy"])
        slots.add_metric(["free"], statistics["slots_free"])
        yield slots
        yield GaugeMetricFamily("colibri_resident_memory_bytes", "Memory of the process", rss_bytes())
