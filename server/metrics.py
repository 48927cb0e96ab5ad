"""What Prometheus is told at /metrics: requests, tokens, latencies, and the numbers of the expert cache."""

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

from machine.memory import rss_bytes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: from a small model in memory to a large one on a slow drive.
FIRST_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
TOKEN_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Metrics:
    """model: of load/model.py; its counters, and those of the scheduler, are read when somebody asks."""

    def __init__(self, model):
        self.model, self.scheduler = model, None
        disable_created_metrics()  # when a counter began is known: with the server
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("colibri_requests", "HTTP requests", ["path", "status"], registry=registry)
        self.refused = Counter("colibri_queue_full", "Requests refused because too many waited", registry=registry)
        self.prompt_tokens = Counter("colibri_prompt_tokens", "Prompt tokens", registry=registry)
        self.cached_tokens = Counter("colibri_cached_tokens", "Prompt tokens that a slot remembered", registry=registry)
        self.tokens = Counter("colibri_generated_tokens", "Tokens of answers", registry=registry)
        self.answers = Counter("colibri_answers", "Answers by how they ended", ["reason"], registry=registry)
        self.first_token = Histogram(
            "colibri_time_to_first_token_seconds",
            "From a request to the first token of an answer",
            buckets=FIRST_BUCKETS,
            registry=registry,
        )
        self.each_token = Histogram(
            "colibri_time_per_output_token_seconds",
            "Between two tokens, the mean of an answer",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        registry.register(self)

    def prompt_started(self, num_ids, num_cached):
        self.prompt_tokens.inc(num_ids)
        self.cached_tokens.inc(num_cached)

    def answer_over(self, answer, reason):
        """An Answer has ended: by itself, because nobody wanted more of it, or because the engine failed."""
        self.answers.labels(reason).inc()
        self.tokens.inc(answer.num_tokens)
        if answer.num_tokens > 1:
            self.each_token.observe((answer.last_time - answer.first_time) / (answer.num_tokens - 1))

    def collect(self):
        """What is counted elsewhere, as of now."""
        experts = self.model.experts
        counters, numbers = experts.counters, self.scheduler.numbers() if self.scheduler else {}
        yield CounterMetricFamily("colibri_expert_hits", "Experts found in memory", counters.hits)
        yield CounterMetricFamily("colibri_expert_misses", "Experts waited for", counters.misses)
        yield CounterMetricFamily("colibri_expert_read_bytes", "Bytes of experts read", counters.bytes_read)
        yield CounterMetricFamily("colibri_expert_evictions", "Experts given up for others", counters.evictions)
        yield CounterMetricFamily(
            "colibri_expert_wait_seconds", "Time with nothing to compute until an expert came", counters.wait_seconds
        )
        yield SummaryMetricFamily(
            "colibri_expert_read_seconds",
            "What the reads of experts took",
            count_value=experts.queue.num_over,
            sum_value=experts.queue.seconds_over,
        )
        yield GaugeMetricFamily("colibri_queue_length", "Requests that wait", numbers.get("queue", 0))
        slots = GaugeMetricFamily("colibri_slots", "KV slots", labels=["state"])
        slots.add_metric(["busy"], numbers.get("slots_busy", 0))
        slots.add_metric(["free"], numbers.get("slots_free", 0))
        yield slots
        yield GaugeMetricFamily("colibri_resident_memory_bytes", "Memory of the process", rss_bytes())

    def text(self):
        return generate_latest(self.registry)
