"""Clocks and counters of one run, and what becomes of them: heartbeat, statistics, profile, REPORT."""

import json
import os
import time
from pathlib import Path

from engine.decode import DecodeCounters
from modes.console import Terminal, say
from snapshot.errors import Refused
from snapshot.memory import peak_rss_bytes, rss_bytes

HEARTBEAT_EVERY = 16  # tokens
QUIET_SECONDS = 10


class Run:
    """Made when the model is loaded. `counters` are those of spec_decode, which fills them."""

    def __init__(self, mode, loaded):
        self.mode, self.loaded, self.model = mode, loaded, loaded.model
        say(loaded.kernels)
        say(loaded.drive)
        self.counters = DecodeCounters()
        self.num_prompt_ids = 0
        self.started = time.perf_counter()
        self.prefilled = None  # when decoding began
        self.ended = None  # what comes after is reporting
        self.said = self.started  # when the last heartbeat was

    def prefill_done(self):
        """Everything before this was prefill, everything after it is decoding."""
        self.prefilled = time.perf_counter()

    def end(self):
        """The clocks stop: whatever is said of the run from here on is the same number."""
        self.ended = time.perf_counter()

    def on_token(self):
        """Call for each token of spec_decode as it comes; every 16 tokens it says how things go. Into a text that is
        being read on the same terminal it speaks only when the last word is ten seconds old, on a line of its own."""
        now = time.perf_counter()
        if self.prefilled is None:
            self.prefill_done()
            self.said = now
        if self.counters.tokens % HEARTBEAT_EVERY:
            return
        if Terminal.is_shared and now - self.said < QUIET_SECONDS:
            return
        self.said = now
        # The prefill paid for the first token.
        line = f"[t={self.counters.tokens}  {self.state(self.counters.tokens - 1)}]"
        say(f"\n{line}" if Terminal.is_shared else line)

    def seconds(self):
        """-> (prefill, decode) up to the end, or up to now."""
        now = self.ended or time.perf_counter()
        prefilled = self.prefilled or now
        return prefilled - self.started, now - prefilled

    def state(self, num_decoded):
        """RSS, hit rate, speed and tokens per forward in one line."""
        decode, cache = self.seconds()[1], self.model.experts.counters
        speed = f"{num_decoded / decode:.1f}" if num_decoded > 0 and decode > 0 else "-"
        return (
            f"RSS {rss_bytes() / 1e9:.2f} GB  hit {cache.hit_rate:.1%}  {speed} tok/s  "
            f"{self.counters.tokens_per_forward:.2f} tok/fw"
        )

    def numbers(self, num_decoded, **more):
        """Every number of the run, as REPORT holds it: docs/report.md. `num_decoded` tokens took the decode time."""
        (prefill, decode), c, cache = self.seconds(), self.counters, self.model.experts.counters
        profile = {"expert-disk": cache.wait_seconds, **self.model.profile.seconds}
        profile["rest"] = prefill + decode - sum(profile.values())
        plan = self.loaded.plan
        return {
            "mode": self.mode,
            "model": self.loaded.folder.resolve().name,
            "model_type": self.model.config.model_type,
            "kernels": self.loaded.kernels.removeprefix("[kernels] "),
            "prompt_tokens": self.num_prompt_ids,
            "tokens": num_decoded if self.mode == "replay" else c.tokens,
            "prefill_s": prefill,
            "decode_s": decode,
            "tok_s": num_decoded / decode if num_decoded > 0 and decode > 0 else None,
            "forwards": c.forwards,
            "tokens_per_forward": c.tokens_per_forward if c.forwards else None,
            "drafts_proposed": c.proposed,
            "drafts_accepted": c.accepted,
            "hits": cache.hits,
            "misses": cache.misses,
            "hit_rate": cache.hit_rate,
            "expert_bytes_read": cache.bytes_read,
            "disk_wait_s": cache.wait_seconds,
            "disk_busy_s": self.model.experts.busy_seconds,
            "drive": self.loaded.drive,
            "rss_bytes": rss_bytes(),
            "peak_rss_bytes": peak_rss_bytes(),
            "budget_bytes": plan.budget_bytes,
            "context": self.loaded.context,
            "cache_slots": plan.num_slots,
            "cache_bytes": plan.cache_bytes,
            "lossy": list(self.loaded.lossy),
            "profile": profile,
            **more,
        }

    def summary(self, numbers):
        """The statistics of a generation, and its profile."""
        say(
            f"[done] prompt: {numbers['prompt_tokens']} tokens in {numbers['prefill_s']:.2f} s | answer: "
            f"{numbers['tokens']} tokens in {numbers['decode_s']:.2f} s | "
            f"read {numbers['expert_bytes_read'] / 1e9:.3f} GB | {self.state(self.counters.tokens - 1)}"
        )
        say(profile_line(numbers["profile"]))


def profile_line(profile):
    """PROFILE: expert-disk a | expert-matmul b | attention c | lm_head d | ... | rest z s"""
    return "PROFILE: " + " | ".join(f"{stage} {seconds:.2f}" for stage, seconds in profile.items()) + " s"


def check_report(settings):
    """Refuse a REPORT that cannot be written before the run, not after it."""
    if not settings.report:
        return
    path = Path(settings.report).resolve()
    if path.is_dir():
        raise Refused(f"REPORT={settings.report}: is a folder; name a file")
    if not path.parent.is_dir():
        raise Refused(f"REPORT={settings.report}: its folder does not exist")
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise Refused(f"REPORT={settings.report}: cannot be written; check the permissions")


def write_report(settings, numbers):
    """REPORT=file.json: the numbers of a run, whole or not at all. A pipe or device is written to, not replaced."""
    if not settings.report:
        return
    path, text = Path(settings.report).resolve(), json.dumps(numbers, indent=1) + "\n"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise Refused(f"REPORT={settings.report}: cannot be written ({error.strerror})") from None
