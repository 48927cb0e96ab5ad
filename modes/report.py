"""Clocks and counters of one run, and what becomes of them: heartbeat, statistics, profile, REPORT."""

import json
import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

from errors import Refused
from experts.cache import CacheCounters
from generate.decode import DecodeCounters
from generate.draft_length import DraftLength
from machine.console import Terminal, say, show_progress
from machine.files import atomic_write
from machine.memory import peak_rss_bytes, rss_bytes

HEARTBEAT_EVERY = 16  # tokens
QUIET_SECONDS = 10


@dataclass(frozen=True, slots=True)
class CounterMark:
    """The clocks and counters at one moment, or between two: then of what happened from one to the other."""

    seconds: float
    cache: CacheCounters
    busy_seconds: float  # of the drives
    profile: dict[str, float]

    def since(self, before):
        cache = CacheCounters(
            *(getattr(self.cache, f.name) - getattr(before.cache, f.name) for f in fields(self.cache))
        )
        profile = {stage: seconds - before.profile[stage] for stage, seconds in self.profile.items()}
        return CounterMark(self.seconds - before.seconds, cache, self.busy_seconds - before.busy_seconds, profile)


class RunReport:
    """Made when the model is loaded. `counters` are those of spec_decode, which fills them."""

    def __init__(self, mode, loaded):
        self.mode, self.loaded, self.model = mode, loaded, loaded.model
        for line in (loaded.kernels, loaded.drive, loaded.history):
            if line:
                say(line)
        self.counters, self.governor = DecodeCounters(), DraftLength(loaded.draft)
        self.num_prompt_ids = 0
        self.started = self.mark()
        self.prefilled = None  # when decoding began
        self.ended = None  # what comes after is reporting
        self.said = self.started.seconds  # when the last heartbeat was

    def mark(self):
        """The clocks and counters of this moment."""
        experts = self.model.experts
        return CounterMark(
            time.perf_counter(), replace(experts.counters), experts.busy_seconds, dict(self.model.profile.seconds)
        )

    def prefill_done(self):
        """Everything before this was prefill, everything after it is decoding."""
        self.prefilled = self.mark()

    def end(self):
        """The clocks stop: whatever is said of the run from here on is the same number."""
        self.ended = self.mark()

    def on_token(self, max_tokens=None):
        """Call for each token of spec_decode as it comes; every 16 tokens it says how things go. Into a text that is
        being read on the same terminal it speaks only when the last word is ten seconds old, on a line of its own."""
        now = time.perf_counter()
        if self.prefilled is None:
            self.prefill_done()
            self.said = now
        if max_tokens and Terminal.has_bar and not Terminal.is_shared:
            seconds = now - self.prefilled.seconds
            show_progress("decode", self.counters.tokens / max_tokens, seconds, f"{self.counters.tokens} tokens")
        if self.counters.tokens % HEARTBEAT_EVERY:
            return
        if Terminal.is_shared and now - self.said < QUIET_SECONDS:
            return
        self.said = now
        # The prefill paid for the first token.
        line = f"[t={self.counters.tokens}  {self.state(self.counters.tokens - 1)}]"
        say(f"\n{line}" if Terminal.is_shared else line)

    def phases(self):
        """-> (prefill, decode) up to the end, or up to now: Marks of what happened in each."""
        now = self.ended or self.mark()
        prefilled = self.prefilled or now
        return prefilled.since(self.started), now.since(prefilled)

    def state(self, num_decoded):
        """RSS, hit rate, speed and tokens per forward in one line."""
        _, decode = self.phases()
        speed = f"{num_decoded / decode.seconds:.1f}" if num_decoded > 0 and decode.seconds > 0 else "-"
        return (
            f"RSS {rss_bytes() / 1e9:.2f} GB  hit {decode.cache.hit_rate:.1%}  {speed} tok/s  "
            f"{self.counters.tokens_per_forward:.2f} tok/fw"
        )

    @property
    def drive_speed(self):
        """Bytes a second that the drives give to plain reads, as measured at their first use; None: not measured."""
        drives = self.loaded.disk.drives.all
        known = all(drive.speed.arms for drive in drives)
        return sum(drive.speed.gigabytes_per_second for drive in drives) * 1e9 if known else None

    def numbers(self, num_decoded, **more):
        """Every number of the run, as REPORT holds it: docs/report.md. `num_decoded` tokens took the decode time."""
        (prefill, decode), c, experts = self.phases(), self.counters, self.model.experts
        # What a replay measures is the decode alone.
        is_replay = self.mode == "replay"
        whole = decode if is_replay else (self.ended or self.mark()).since(self.started)
        cache, plan = whole.cache, self.loaded.plan
        tokens = num_decoded if is_replay else num_decoded + self.num_prompt_ids
        profile = {"expert-disk": cache.wait_seconds, **whole.profile}
        profile["rest"] = whole.seconds - sum(profile.values())
        return {
            "mode": self.mode,
            "model": self.loaded.folder.resolve().name,
            "model_type": self.model.config.model_type,
            "kernels": self.loaded.kernels.removeprefix("[kernels] "),
            "prompt_tokens": self.num_prompt_ids,
            "tokens": num_decoded if is_replay else c.tokens,
            "prefill_s": prefill.seconds,
            "decode_s": decode.seconds,
            "tok_s": divide(num_decoded, decode.seconds) or None,
            "forwards": c.forwards,
            "tokens_per_forward": c.tokens_per_forward if c.forwards else None,
            "drafts_proposed": c.proposed,
            "drafts_accepted": c.accepted,
            **self.governor.numbers(),
            "hits": cache.hits,
            "misses": cache.misses,
            "hit_rate": cache.hit_rate,
            "experts_read_per_token": divide(cache.misses, tokens),
            "expert_bytes_read": cache.bytes_read,
            "prefill_expert_bytes_read": prefill.cache.bytes_read,
            "disk_wait_s": cache.wait_seconds,
            "wait_share": divide(cache.wait_seconds, whole.seconds),
            "disk_busy_s": whole.busy_seconds,
            "drive": self.loaded.drive,
            "drive_bytes_s": self.drive_speed,
            "drive_use": divide(cache.bytes_read, whole.seconds * (self.drive_speed or 0)),
            "ahead_useful_bytes": cache.ahead_useful_bytes,
            "ahead_wasted_bytes": cache.ahead_wasted_bytes,
            "rss_bytes": rss_bytes(),
            "peak_rss_bytes": peak_rss_bytes(),
            "budget_bytes": plan.budget_bytes,
            "context": self.loaded.context,
            "cache_slots": plan.num_slots,
            "cache_bytes": experts.num_bytes,
            "lossy": list(self.loaded.lossy),
            "profile": profile,
            **more,
        }

    def summary(self, num_decoded):
        """What the run did, as a table, and its profile."""
        prefill, decode = self.phases()
        rows = [self.row("prefill", prefill, self.num_prompt_ids)]
        if num_decoded > 0:
            rows.append(self.row("decode", decode, num_decoded))
        widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
        for row in (HEAD, *rows):
            say("[run] " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        whole = (self.ended or self.mark()).since(self.started)
        useful, wasted = whole.cache.ahead_useful_bytes / 1e9, whole.cache.ahead_wasted_bytes / 1e9
        say(
            f"[run] read ahead: {useful:.3f} GB useful, {wasted:.3f} GB wasted | "
            f"cache {self.model.experts.num_bytes / 1e9:.2f} GB | peak RSS {peak_rss_bytes() / 1e9:.2f} of "
            f"{self.loaded.plan.budget_bytes / 1e9:.2f} GB | {self.counters.tokens_per_forward:.2f} tokens a forward"
        )

        for line in self.governor.lines():
            say(line)

    def row(self, phase, mark, tokens):
        """One line of the table."""
        cache, speed = mark.cache, self.drive_speed
        return (
            phase,
            str(tokens),
            f"{mark.seconds:.2f}",
            f"{divide(tokens, mark.seconds):.2f}",
            f"{cache.hit_rate:.1%}",
            f"{divide(cache.misses, tokens):.1f}",
            f"{divide(cache.bytes_read / 1e9, tokens):.3f}",
            f"{divide(cache.bytes_read / 1e9, mark.busy_seconds):.2f}",
            f"{cache.bytes_read / mark.seconds / speed:.2f}" if speed else "-",
            f"{divide(cache.wait_seconds, mark.seconds):.0%}",
        )


# GB/s while something was read; U: bytes over the whole time, as a share of what the drive gives to plain reads.
HEAD = ("", "tokens", "s", "tok/s", "hit", "experts read/tok", "GB/tok", "GB/s", "U", "waiting")


def divide(a, b):
    """a / b, 0 where there is nothing to divide by."""
    return a / b if b else 0.0


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
        with atomic_write(path, keep_partial=True) as file:
            file.write(text.encode())
    except OSError as error:
        raise Refused(f"REPORT={settings.report}: cannot be written ({error.strerror})") from None
