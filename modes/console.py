"""What a run says on stderr: notices, progress, heartbeat, statistics. stdout carries the answer alone.

A bar on a terminal, plain lines otherwise.
"""

import sys
import time

from snapshot.memory import rss_bytes

PREFILL_EVERY = 4  # layers between two [prefill] lines
HEARTBEAT_EVERY = 16  # tokens


def say(line):
    """One line to stderr, clear of a bar that may be standing there."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(clear + line, file=sys.stderr, flush=True)


def announce(loaded):
    """What was loaded and how: the first lines of every mode."""
    config, plan = loaded.model.config, loaded.plan
    say(
        f"[snapshot] {loaded.folder.name}: {config.model_type}, {config.num_layers} layers, {config.num_experts} "
        f"experts top-{config.num_active_experts}, CTX {loaded.context}"
    )
    for line in (*plan.lines(), *loaded.notices):
        say(line)


def prefill_progress(layer, num_layers, rows):
    """Progress callback of a prefill: a bar on a terminal, else every fourth layer and the last."""
    line = f"[prefill] layer {layer}/{num_layers} | {rows} tokens"
    if sys.stderr.isatty():
        filled = 24 * layer // num_layers
        end = "\r\x1b[K" if layer == num_layers else ""
        print(f"\r{line} {'#' * filled}{'.' * (24 - filled)} {end}", end="", file=sys.stderr, flush=True)
    elif layer % PREFILL_EVERY == 0 or layer == num_layers:
        say(line)


class Run:
    """Clocks and counters of one generation, and the lines they become."""

    def __init__(self, model, counters):
        self.model, self.counters = model, counters
        self.started = time.perf_counter()
        self.prefilled = None  # when the first token came

    def on_token(self):
        """Call for each token as it comes; every 16 tokens it says how things go."""
        if self.prefilled is None:
            self.prefilled = time.perf_counter()
        if self.counters.tokens % HEARTBEAT_EVERY == 0:
            say(f"[t={self.counters.tokens}  {self.state(self.decode_seconds())}]")

    def decode_seconds(self):
        return time.perf_counter() - self.prefilled if self.prefilled else 0.0

    def state(self, decode_seconds):
        """RSS, hit rate, speed after the first token (which the prefill paid for), tokens per forward."""
        c = self.counters
        speed = (c.tokens - 1) / decode_seconds if c.tokens > 1 else 0.0
        return (
            f"RSS {rss_bytes() / 1e9:.2f} GB  hit {self.model.experts.counters.hit_rate:.1%}  "
            f"{speed:.1f} tok/s  {c.tokens_per_forward:.2f} tok/fw"
        )

    def summary(self, num_prompt_ids):
        """The statistics at the end, and the profile."""
        elapsed, decode = time.perf_counter() - self.started, self.decode_seconds()
        read, num_tokens = self.model.experts.counters.bytes_read / 1e9, self.counters.tokens
        say(
            f"[done] prompt: {num_prompt_ids} tokens in {elapsed - decode:.2f} s | answer: {num_tokens} tokens in "
            f"{decode:.2f} s | read {read:.3f} GB | {self.state(decode)}"
        )
        say(profile_line(self.model, elapsed))


def profile_line(model, elapsed):
    """Where `elapsed` seconds went: PROFILE: expert-disk a | expert-matmul b | attention c | lm_head d | rest e."""
    stages = {"expert-disk": model.experts.counters.wait_seconds}
    for stage in ("expert-matmul", "attention", "lm_head"):
        stages[stage] = model.profile.seconds.get(stage, 0.0)
    stages["rest"] = elapsed - sum(stages.values())
    return "PROFILE: " + " | ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items()) + " s"
