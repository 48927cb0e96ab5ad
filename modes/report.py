"""RunReport: clocks and counters of one run, and their output: heartbeat, statistics, profile, usage, REPORT."""

import json
import os
import time
from dataclasses import asdict, astuple, dataclass, replace
from operator import sub
from pathlib import Path
from typing import Any

from errors import Refused
from experts.cache import CacheCounters
from experts.drive import Drive
from experts.drive_speed import describe_learned
from generate.decode import DecodeCounters
from generate.draft_length import DraftLength
from load.model import LoadedModel
from machine.console import Terminal, say, show_bar
from machine.files import atomic_write
from machine.memory import peak_rss_bytes, rss_bytes
from settings import Settings
from snapshot.folder import snapshot_name

HEARTBEAT_EVERY = 16  # tokens
QUIET_SECONDS = 10  # between heartbeats that would cut into the text on the same terminal

# A row fits 80 columns. read/tok: experts. GB/s: while a read was under way. U: bytes over the whole time, as a share
# of what the drive gives to plain reads.
HEAD = ("", "tokens", "s", "tok/s", "active", "hit", "read/tok", "GB/tok", "GB/s", "U", "wait")


@dataclass(frozen=True, slots=True)
class CounterMark:
    """Clocks and counters at one moment, or the difference of two moments."""

    seconds: float
    cache: CacheCounters
    busy_seconds: float  # of the drives
    cached_bytes: int  # of experts that came from the page cache
    profile: dict[str, float]  # stage -> seconds

    def since(self, before: "CounterMark") -> "CounterMark":
        cache = CacheCounters(*map(sub, astuple(self.cache), astuple(before.cache)))
        profile = {stage: seconds - before.profile[stage] for stage, seconds in self.profile.items()}
        busy, cached = self.busy_seconds - before.busy_seconds, self.cached_bytes - before.cached_bytes
        return CounterMark(self.seconds - before.seconds, cache, busy, cached, profile)

    @property
    def drive_bytes(self) -> int:
        """Bytes of experts that came from drives."""
        return max(0, self.cache.bytes_read - self.cached_bytes)


class RunReport:
    """Measures one run from the moment the model is loaded: a prefill phase, then a decode phase.

    A mode fills `counters`, calls `on_token` for each token of its answer or sets `prefilled`, and ends with `finish`.
    Before it prints numbers of its own it calls `end`.
    """

    def __init__(self, mode: str, loaded: LoadedModel, num_prompt_ids: int = 0) -> None:
        self.mode = mode
        self.loaded = loaded
        self.model = loaded.model
        say_loaded(loaded)
        self.counters = DecodeCounters()
        self.draft_length = DraftLength(loaded.draft, loaded.draft_guard)
        self.num_prompt_ids = num_prompt_ids
        self.started = self.mark()
        self.prefilled: CounterMark | None = None  # when decoding began
        self.ended: CounterMark | None = None
        self.heartbeat_at = self.started.seconds
        self.is_interrupted = False

    def mark(self) -> CounterMark:
        experts, profile = self.model.experts, dict(self.model.profile.seconds)
        cached = self.loaded.disk.drives.cached_bytes
        return CounterMark(time.perf_counter(), replace(experts.counters), experts.busy_seconds, cached, profile)

    def end(self) -> None:
        """Stop the clocks, so that everything said of the run is the same number."""
        self.ended = self.ended or self.mark()

    def interrupt(self, num_prefilled: int) -> None:
        """Stop the clocks of a run that did not end: its numbers are those of the tokens that it came to.

        num_prefilled: positions of the KV cache, which has no part of a chunk that was under way."""
        self.end()
        self.is_interrupted = True
        self.num_prompt_ids = min(self.num_prompt_ids, num_prefilled)

    def on_token(self, max_tokens: int | None = None) -> None:
        """Count a token that was just yielded, and print a heartbeat every 16 tokens.

        On a terminal that also shows the text, heartbeats are at least ten seconds apart, and wait for the end of a
        line of the text.
        """
        now = time.perf_counter()
        if self.prefilled is None:
            self.prefilled = self.mark()
            self.heartbeat_at = now
        num_tokens = self.counters.tokens
        if Terminal.is_shared:
            if Terminal.is_answer_open or now - self.heartbeat_at < QUIET_SECONDS:
                return
        else:
            if max_tokens and Terminal.has_bar:
                show_bar("decode", num_tokens / max_tokens, now - self.prefilled.seconds, f"{num_tokens} tokens")
            if num_tokens % HEARTBEAT_EVERY:
                return
        self.heartbeat_at = now
        decode = self.phases()[1]
        speed = divide(num_tokens - 1, decode.seconds)  # the prefill paid for the first token
        say(
            f"[t={num_tokens}  RSS {rss_bytes() / 1e9:.2f} GB  hit {decode.cache.hit_rate:.1%}  {speed:.1f} tok/s  "
            f"{self.counters.tokens_per_forward:.2f} tok/fw]"
        )

    def phases(self) -> tuple[CounterMark, CounterMark, CounterMark]:
        """-> (prefill, decode, both) up to the end, or up to now."""
        now = self.ended or self.mark()
        prefilled = self.prefilled or now
        return prefilled.since(self.started), now.since(prefilled), now.since(self.started)

    def finish(self, settings: Settings, num_decoded: int = 0, **more: object) -> None:
        """End the run: print statistics and profile, write REPORT.

        num_decoded: tokens that took the decode time. more: keys of REPORT that this mode alone has.
        """
        self.end()
        numbers = self.numbers(num_decoded, **more)
        self.say_statistics(num_decoded)
        say("PROFILE: " + " | ".join(f"{stage} {seconds:.2f}" for stage, seconds in numbers["profile"].items()) + " s")
        write_report(settings, numbers)

    def write_session(
        self, settings: Settings, draft_length: DraftLength, numbers: dict[str, Any], **more: object
    ) -> None:
        """Write REPORT for a chat or a server: `numbers` of its answers, and those of the whole time."""
        self.end()
        self.draft_length = draft_length
        self.num_prompt_ids = numbers["prompt_tokens"]
        unknown = ("prefill_s", "decode_s", "tok_s", "tokens_per_forward", "prefill_expert_bytes_read")
        write_report(settings, self.numbers(numbers["tokens"], **(dict.fromkeys(unknown) | numbers | more)))

    def numbers(self, num_decoded: int, **more: object) -> dict[str, Any]:
        """Every number of the run under the keys of REPORT (docs/report.md)."""
        prefill, decode, whole = self.phases()
        counters, experts, plan = self.counters, self.model.experts, self.loaded.plan
        is_replay = self.mode == "replay"
        if is_replay:  # it measures the decode phase alone
            whole = decode
        cache, drives = whole.cache, self.loaded.disk.drives
        tokens = num_decoded if is_replay else num_decoded + self.num_prompt_ids
        profile = {"expert-disk": cache.wait_seconds, **whole.profile}
        profile["rest"] = whole.seconds - sum(profile.values())
        return {
            "mode": self.mode,
            "interrupted": self.is_interrupted,
            "model": snapshot_name(self.loaded.folder.resolve()),
            "model_type": self.model.config.model_type,
            "kernels": self.loaded.kernels.removeprefix("[kernels] "),
            "prompt_tokens": self.num_prompt_ids,
            "tokens": num_decoded if is_replay else counters.tokens,
            "prefill_s": prefill.seconds,
            "decode_s": decode.seconds,
            "tok_s": divide(num_decoded, decode.seconds) or None,
            "forwards": counters.forwards,
            "tokens_per_forward": counters.tokens_per_forward if counters.forwards else None,
            "drafts_proposed": counters.proposed,
            "drafts_accepted": counters.accepted,
            **self.draft_length.statistics(),
            "hits": cache.hits,
            "misses": cache.misses,
            "hit_rate": cache.hit_rate,
            "active_experts": cache.active_experts,
            "experts_read_per_token": divide(cache.misses, tokens) if tokens else None,
            "expert_bytes_read": cache.bytes_read,
            "prefill_expert_bytes_read": prefill.cache.bytes_read,
            "disk_wait_s": cache.wait_seconds,
            "wait_share": divide(cache.wait_seconds, whole.seconds),
            "disk_busy_s": whole.busy_seconds,
            "drive": self.loaded.drive,
            "drives": [drive_numbers(drive) for drive in drives.all],
            "drive_bytes_s": drives.bytes_per_second,
            "drive_use": divide(whole.drive_bytes, whole.seconds * (drives.bytes_per_second or 0)),
            "page_cache_bytes": whole.cached_bytes,
            "ahead_useful_bytes": cache.useful_prefetch_bytes,
            "ahead_wasted_bytes": cache.wasted_prefetch_bytes,
            "rss_bytes": rss_bytes(),
            "peak_rss_bytes": peak_rss_bytes(),
            "budget_bytes": plan.budget_bytes,
            "context": self.loaded.context,
            "cache_slots": plan.num_expert_slots,
            "cache_bytes": experts.num_bytes,
            "lossy": list(self.loaded.lossy.values()),
            "profile": profile,
            **more,
        }

    def say_statistics(self, num_decoded: int) -> None:
        """Print a table of both phases, then what the prefetch, the cache, memory and draft tokens did."""
        prefill, decode, whole = self.phases()
        rows = [HEAD, self.table_row("prefill", prefill, self.num_prompt_ids)]
        if num_decoded > 0:
            rows.append(self.table_row("decode", decode, num_decoded))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            say("[run] " + " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        say(
            f"[run] expert prefetch: {whole.cache.useful_prefetch_bytes / 1e9:.3f} GB used, "
            f"{whole.cache.wasted_prefetch_bytes / 1e9:.3f} GB wasted | "
            f"expert cache {self.model.experts.num_bytes / 1e9:.2f} GB | "
            f"peak RSS {peak_rss_bytes() / 1e9:.2f} of {self.loaded.plan.budget_bytes / 1e9:.2f} GB | "
            f"{self.counters.tokens_per_forward:.2f} tokens a forward"
        )
        for drive in self.loaded.disk.drives.all:
            if line := describe_learned(drive):
                say(line)
        for line in self.draft_length.summary_lines():
            say(line)

    def table_row(self, phase: str, mark: CounterMark, tokens: int) -> tuple[str, ...]:
        cache, speed = mark.cache, self.loaded.disk.drives.bytes_per_second

        def per_token(number: float, digits: int) -> str:
            return (
                f"{number / tokens:.{digits}f}" if tokens else "-"
            )  # a prefill that was interrupted in its first chunk

        return (
            phase,
            str(tokens),
            compact(mark.seconds),
            compact(divide(tokens, mark.seconds)) if tokens else "-",
            f"{cache.active_experts:.1f}",
            f"{cache.hit_rate:.1%}",
            per_token(cache.misses, 1),
            per_token(cache.bytes_read / 1e9, 3),
            f"{divide(cache.bytes_read / 1e9, mark.busy_seconds):.2f}",
            f"{mark.drive_bytes / mark.seconds / speed:.2f}" if speed else "-",
            f"{divide(cache.wait_seconds, mark.seconds):.0%}",
        )


def drive_numbers(drive: Drive) -> dict[str, Any]:
    """What a run learned of a drive, under the keys of REPORT (docs/report.md)."""
    learner, (mode, depth) = drive.learner, drive.setting
    numbers = {"mode": mode, "depth": depth, "bytes_s": None, "best_bytes_s": drive.best_bytes_per_second}
    if learner:
        numbers |= {"bytes_s": learner.speed or None, **asdict(learner.counters)}
    return numbers


def say_loaded(loaded: LoadedModel) -> None:
    """Print what a loaded model runs on: kernels, drives, usage history."""
    for line in (loaded.kernels, loaded.drive, loaded.history):
        if line:
            say(line)


def save_usage(loaded: LoadedModel, num_tokens: int) -> None:
    """Add the expert use of a run of `num_tokens` to the history that the next run begins with."""
    if loaded.usage:
        loaded.usage.save(loaded.model.experts.use_counts(), num_tokens)


def divide(a: float, b: float) -> float:
    """a / b, 0 for b = 0."""
    return a / b if b else 0.0


def compact(number: float) -> str:
    """At most four digits before two decimals run out: 0.04, 12.35, 123.5, 12346."""
    return f"{number:.{max(0, min(2, 4 - len(str(int(number)))))}f}"


def check_report(settings: Settings) -> None:
    """Refuse a REPORT that cannot be written before the run instead of after it."""
    if not settings.report:
        return
    path = Path(settings.report).resolve()
    if path.is_dir():
        raise Refused(f"REPORT={settings.report}: is a folder; name a file")
    if not path.parent.is_dir():
        raise Refused(f"REPORT={settings.report}: its folder does not exist")
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise Refused(f"REPORT={settings.report}: cannot be written; check the permissions")


def write_report(settings: Settings, numbers: dict[str, Any]) -> None:
    """Write REPORT, complete or not at all. A pipe or device is written to instead of being replaced."""
    if not settings.report:
        return
    path, data = Path(settings.report).resolve(), json.dumps(numbers, indent=1).encode() + b"\n"
    is_special = path.exists() and not path.is_file()
    try:
        with path.open("wb") if is_special else atomic_write(path, keep_partial=True) as file:
            file.write(data)
    except OSError as error:
        raise Refused(f"REPORT={settings.report}: cannot be written ({error.strerror})") from None
