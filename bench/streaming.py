"""Streaming benchmark: drive utilization and decode speed of a model larger than its memory.

    make bench-streaming          or     python bench/streaming.py [--ram 6] [--tokens 16] [--rounds 2]
    SNAP=/models/glm-5.2-int4 python bench/streaming.py --ram 20

Without SNAP two synthetic snapshots of GLM-5.2's layers are made (dev/make_synthetic.py), one after the other, about
16 GB each, in a temporary folder (set TMPDIR to a folder on the drive to measure):

    uniform   even routing; 8 layers, 108 experts in each of the 7 sparse ones, so that what a token does between its
              sparse layers weighs little, as in the 75 of the real one
    trace     routing as in traces of real models; 4 layers, 256 experts in each of the 3 sparse ones

RAM_GB is --ram.

The page cache must not help: each run is a process in a cgroup that may use --ram GiB, file pages included. Where such
a cgroup cannot be made, or with --no-cgroup, experts are read with READ_MODE=direct (O_DIRECT). The pages of the
snapshot are dropped before each run. The first line of the output says which it was.

Runs of REPLAY with USAGE=0, arms by turns (A B C D A B C D), of which the medians count:

    cold      uniform: decode from an empty cache, after a prompt of two ids
    warm      trace: decode after a prompt of 24 ids, prefilled one at a time (PREFILL_CHUNK=1), so that the cache is as
              after a decode of them
    prefill   trace: 512 ids at once; read / needed is 1 when no expert is read twice in a chunk

    reference LRU per layer, reading and computing by turns (bench/reference_tier.py)
    full-0, full-1, full-auto: the engine with LOOKAHEAD 0, 1, auto

Before and after each run, in the same minute, plain reads of random experts of the snapshot past the page cache are
measured, at the best of several queue depths. Columns:

    U         expert bytes per second of the run, wasted prefetches included, over those of the plain reads around it
    overlap   seconds of the run over the larger of disk (bytes read / plain speed) and compute (seconds minus those
              waited for a read): 1 when the smaller one is hidden completely
    wait      share of the run that waited for a read
    prefetch  MB a token that were prefetched: useful + wasted
    peak      peak RSS, GB

and, for the reference, (disk + compute) / max(disk, compute): the speed-up that overlapping alone could give. Every run
is a row of --csv, by default bench/streaming.csv. THREADS, KERNELS, XDG_CACHE_HOME and, in a cgroup, READ_MODE apply as
for colibri.py. Linux only. The defaults take about 8 minutes and read 300 GB; more --tokens and --rounds make the
numbers steadier.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from bench.memory_cgroup import MOVE, drop_from_page_cache, memory_cgroup
from bench.peaks import measure_drives
from bench.streaming_table import COLUMNS, REFERENCE, Row, format_cell, print_tables, streaming_row
from errors import Refused
from experts.disk import ExpertDisk
from experts.route_trace import read_trace
from machine.console import say
from machine.exit import exit_code
from machine.files import temporary_folder
from scripts.options import number_from, whole_from
from settings import EMBEDDED_SNAPSHOT, VARIABLES, Settings
from snapshot.config_file import read_config
from snapshot.folder import own_files
from snapshot.index import read_index
from snapshot.reader import FileReader, read_json_object

ROOT = Path(__file__).resolve().parents[1]
ARMS: dict[str, dict[str, str]] = {
    REFERENCE: {},
    "full-0": {"LOOKAHEAD": "0"},
    "full-1": {"LOOKAHEAD": "1"},
    "full-auto": {"LOOKAHEAD": "auto"},
}
SIZES = {"uniform": "--layers 8 --experts 108", "trace": "--layers 4 --experts 256"}
KINDS = {"uniform": ("cold",), "trace": ("warm", "prefill"), "own": ("cold", "warm", "prefill")}
PREFILL_ARMS = (REFERENCE, "full-auto")
WARM_IDS, PREFILL_IDS = 24, 512
KEPT = ("THREADS", "KERNELS", "XDG_CACHE_HOME", "READ_MODE", "TERM")
TOKENS_PER_GB = 8  # of decode in a run, for each GB/s of the drive
MIN_TOKENS, MAX_TOKENS = 8, 16


# --- one run ----------------------------------------------------------------------------------------------------------


def run_colibri(group: Path | None, script: str, variables: dict[str, Any]) -> dict[str, Any]:
    """Run REPLAY in a process -> its REPORT. Refused when it fails."""
    command = ["env", *(f"--unset={name}" for name in VARIABLES if name not in KEPT)]
    command += [*(f"{name}={value}" for name, value in variables.items()), sys.executable, str(ROOT / script)]
    if group:
        command = [*MOVE, str(group), *command]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise Refused(f"a run ended with code {process.returncode}: {last}")
    return read_json_object(Path(variables["REPORT"]))


class StreamingBench:
    """The runs over one snapshot. `rows` are written to the CSV as they come."""

    def __init__(
        self,
        args: argparse.Namespace,
        group: Path | None,
        limit: str,
        writer: csv.DictWriter,
        folder: Path,
        routing: str,
        work: Path,
    ) -> None:
        self.args, self.group, self.limit, self.writer = args, group, limit, writer
        self.folder, self.routing, self.work = folder, routing, work
        config, family = read_config(folder)
        self.reader = FileReader()
        self.disk = ExpertDisk(config, family, read_index(folder), self.reader)
        if not self.disk.layouts:
            raise Refused(f"{folder}: has no routed experts, there is nothing to stream")
        drop_from_page_cache(own_files(folder, ".safetensors"))
        self.speed = measure_drives(self.disk) / 1e9
        self.rows: list[Row] = []
        self.tokens = args.tokens or max(MIN_TOKENS, min(MAX_TOKENS, round(TOKENS_PER_GB * self.speed)))

    def ids(self, count: int) -> list[int]:
        """Token ids of the snapshot's reference if there are as many, else random ones."""
        path = self.folder / "ref_glm.json"
        own = read_json_object(path).get("full_ids", []) if path.exists() else []
        vocab_size = self.disk.config.vocab_size
        return own[:count] if len(own) >= count else random.Random(1).choices(range(vocab_size), k=count)

    def decode(self) -> None:
        """Cold, warm, or both; all arms by turns."""
        for turn in range(self.args.rounds):
            for kind, num_prompt in (("cold", 2), ("warm", WARM_IDS)):
                for arm in ARMS if kind in KINDS[self.routing] else ():
                    self.run_arm(kind, arm, turn, num_prompt, self.tokens, PREFILL_CHUNK=1)

    def prefill(self) -> None:
        for arm in PREFILL_ARMS:
            self.run_arm("prefill", arm, 0, PREFILL_IDS + 1, 1, ROUTE_TRACE=self.work / "routes.jsonl")

    def run_arm(self, kind: str, arm: str, turn: int, num_prompt: int, num_tokens: int, **variables: Any) -> None:
        """One run between plain reads: a row of the CSV, a line on stderr."""
        ids, reference, report = self.ids(num_prompt + num_tokens), self.work / "ref.json", self.work / "report.json"
        reference.write_text(json.dumps({"prompt_ids": ids[:num_prompt], "full_ids": ids}))
        variables |= ARMS[arm] | {"SNAP": self.folder, "REPLAY": 1, "REF": reference, "REPORT": report, "USAGE": 0}
        variables["RAM_GB"] = f"{self.args.ram:g}"
        if not self.group:
            variables["READ_MODE"] = "direct"
        trace = variables.get("ROUTE_TRACE")
        if trace:
            trace.unlink(missing_ok=True)
        drop_from_page_cache(own_files(self.folder, ".safetensors"))
        script = "bench/reference_tier.py" if arm == REFERENCE else "colibri.py"
        numbers = run_colibri(self.group, script, variables)
        before, self.speed = self.speed, measure_drives(self.disk) / 1e9
        row: Row = {"routing": self.routing, "kind": kind, "arm": arm, "round": turn + 1, "limit": self.limit}
        row |= {"kernels": numbers["kernels"], "plain_before": before, "plain_after": self.speed}
        row["peak_rss_gb"] = numbers["peak_rss_bytes"] / 1e9
        row |= {f"read_{name}": numbers["drives"][0][name] for name in ("mode", "depth")}
        needed = self.needed_bytes(trace) if trace else None
        row |= streaming_row(numbers, (before + self.speed) / 2, needed)
        self.rows.append(row)
        self.writer.writerow({name: format_cell(value) for name, value in row.items()})
        say(
            f"[{self.routing} {kind} {arm} {turn + 1}] {row['tok_s']:.2f} tok/s | U {row['u']:.2f} | plain reads "
            f"{before:.2f}, {self.speed:.2f} GB/s"
        )

    def needed_bytes(self, trace: Path) -> int:
        """Bytes of the distinct experts of each layer of each chunk of a prefill."""
        layouts, (_, events) = self.disk.layouts, read_trace(trace)
        return sum(layouts[layer, e].stored_bytes for layer, rows, uses in events if rows > 1 for e in uses)


# --- command line -----------------------------------------------------------------------------------------------------


def make_snapshot(folder: Path, routing: str) -> None:
    script = [sys.executable, str(ROOT / "dev" / "make_synthetic.py"), "glm-5.2", str(folder), "--routing", routing]
    sizes = f"{SIZES[routing]} --vocab 32768 --prompt 64 --tokens 512 --report-tokens 0".split()
    made = subprocess.run([*script, *sizes], stdout=sys.stderr)
    if made.returncode:
        raise Refused("the synthetic snapshot could not be made; set SNAP to an existing one")


def run_benches(args: argparse.Namespace, group: Path | None, limit: str, writer: csv.DictWriter) -> list[Row]:
    """All runs -> their rows."""
    snap = Settings.read([]).snap
    rows: list[Row] = []
    for routing in ("uniform", "trace") if snap == str(EMBEDDED_SNAPSHOT) else ("own",):
        with temporary_folder() as work:
            folder = work / "glm" if routing != "own" else Path(snap)
            if routing != "own":
                make_snapshot(folder, routing)
            bench = StreamingBench(args, group, limit, writer, folder, routing, work)
            try:
                bench.decode()
                if "prefill" in KINDS[routing]:
                    bench.prefill()
            finally:
                bench.reader.close()
            rows += bench.rows
    return rows


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", type=number_from(0.01), default=6, metavar="GB", help="RAM_GB, default 6")
    parser.add_argument("--tokens", type=whole_from(1), help="decoded in a run, default 8 to 16, by the drive")
    parser.add_argument("--rounds", type=whole_from(1), default=2, help="of all arms, default 2")
    parser.add_argument(
        "--csv", type=Path, default=ROOT / "bench" / "streaming.csv", help="default bench/streaming.csv"
    )
    parser.add_argument("--no-cgroup", action="store_true", help="READ_MODE=direct instead of a cgroup")
    return parser


def main(arguments: list[str] | None = None) -> int:
    return exit_code("streaming", lambda: run(make_parser().parse_args(arguments)), "interrupted")


def run(args: argparse.Namespace) -> int:
    """Run everything, print the tables -> exit code."""
    started = time.perf_counter()
    with memory_cgroup(int(args.ram * 2**30)) if not args.no_cgroup else nullcontext() as group:
        limit = f"a cgroup of {args.ram:g} GiB" if group else "none, READ_MODE=direct"
        print(
            f"RAM_GB={args.ram:g} | memory limit: {limit} | pages of the snapshot dropped before each run", flush=True
        )
        with open(args.csv, "w", buffering=1, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            rows = run_benches(args, group, limit, writer)
    print_tables(rows)
    print(f"\n{len(rows)} runs in {(time.perf_counter() - started) / 60:.1f} minutes; each is a row of {args.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
