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


def announce(settings, loaded):
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
        self.prefilled = None

    def on_token(self):
        """Call for each token as it comes; every 16 tokens it says how things go."""
        if self.prefilled is None:
            self.prefilled = time.perf_counter()
        if self.counters.tokens % HEARTBEAT_EVERY == 0:
            c = self.counters
            hit, speed = self.model.experts.counters.hit_rate, self.decode_speed()
            say(
                f"[t={c.tokens}  RSS {rss_bytes() / 1e9:.2f} GB  hit {hit:.1%}  {speed:.1f} tok/s  "
                f"{c.tokens_per_forward:.2f} tok/fw]"
            )

    def decode_speed(self):
        """Tokens a second after the first, which the prefill paid for."""
        seconds = time.perf_counter() - (self.prefilled or self.started)
        return max(0, self.counters.tokens - 1) / seconds if seconds > 0 else 0.0

    def summary(self, num_prompt_ids):
        """The statistics at the end, and the profile."""
        end = time.perf_counter()
        prefill = (self.prefilled or end) - self.started
        decode, c, cache = end - self.started - prefill, self.counters, self.model.experts.counters
        speed = f"{max(0, c.tokens - 1) / decode:.1f} tok/s" if decode > 0 and c.tokens > 1 else "- tok/s"
        say(
            f"[done] prompt {num_prompt_ids} tokens in {prefill:.2f} s | {c.tokens} tokens in {decode:.2f} s | {speed} | "
            f"{c.tokens_per_forward:.2f} tok/fw | hit {cache.hit_rate:.1%} | read {cache.bytes_read / 1e9:.3f} GB | "
            f"RSS {rss_bytes() / 1e9:.2f} GB"
        )
        say(profile_line(self.model, end - self.started))


def profile_line(model, elapsed):
    """Where `elapsed` seconds went: PROFILE: expert-disk a | expert-matmul b | attention c | lm_head d | rest e."""
    stages = {"expert-disk": model.experts.counters.wait_seconds}
    for stage in ("expert-matmul", "attention", "lm_head"):
        stages[stage] = model.profile.seconds.get(stage, 0.0)
    stages["rest"] = elapsed - sum(stages.values())
    return "PROFILE: " + " | ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items()) + " s"
