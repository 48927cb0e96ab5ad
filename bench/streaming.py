"""A model larger than its memory: how well the drive and the memory are used when experts are streamed.

    make bench-streaming          or     python bench/streaming.py [--ram 6] [--tokens 16] [--rounds 2]
    SNAP=/models/glm-5.2-int4 python bench/streaming.py --ram 20

Without SNAP two synthetic snapshots of GLM-5.2's layers are made (dev/make_synthetic.py), one after the other,
about 16 GB each, in a temporary folder (TMPDIR says where; it must be on the drive that is to be measured):

    uniform   even routing; 8 layers, 108 experts in each of the 7 sparse ones, so that what a token does between its
              sparse layers weighs little, as in the 75 of the real one
    trace     routing as in traces of real models; 4 layers, 256 experts in each of the 3 sparse ones

RAM_GB is --ram.

The page cache must not help: each run is a process of its own in a cgroup that may hold --ram GiB, pages of files
included. Where such a group cannot be made, or with --no-cgroup, experts are read with READ_MODE=direct. Before each
run the pages of the snapshot are dropped. The first line says which it was.

Runs of REPLAY, USAGE=0, by turns (A B C D A B C D), of which the medians count:

    cold      uniform: decode from an empty cache, after a prompt of two ids
    warm      trace: decode after a prompt of 24 ids that went through one at a time (PREFILL_CHUNK=1), so that the
              cache is as a decode of them leaves it
    prefill   trace: 512 ids at once; read / needed is 1 when no expert is read twice in a chunk

    reference EXPERT_TIER=reference; full-0, full-1, full-auto: EXPERT_TIER=full with LOOKAHEAD 0, 1, auto

Before and after each run, in the same minute, plain reads of random experts of the snapshot past the page cache, the
best of several depths. What the table shows:

    U         bytes of experts a second of the run, those read in vain too, over those of the plain reads around it
    overlap   seconds of the run over the larger of disk (bytes read / plain speed) and compute (seconds less those
              waited for a read): 1 when the smaller is hidden whole
    wait      share of the run in which it waited for a read
    ahead     MB a token read before they were asked for: used, and in vain
    peak      GB the process held at most

and, of the reference, (disk + compute) / max(disk, compute): the speed-up that overlapping alone could give. Every run
is a row of --csv, by default bench/streaming.csv. THREADS, KERNELS, XDG_CACHE_HOME and, in a cgroup, READ_MODE hold as
they do for colibri.py. Linux only. The defaults take about 8 minutes and read 300 GB; more --tokens and --rounds
make the numbers steadier.
"""

import argparse
import csv
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from errors import Refused
from experts.disk import ExpertDisk
from experts.drive import Drive, DriveSpeed, time_reads
from experts.route_trace import read_trace
from machine.arena import Arena
from machine.memory import cgroup_folders
from settings import EMBEDDED_SNAPSHOT, VARIABLES, Settings
from snapshot.config import read_config, read_json_object
from snapshot.index import read_index
from snapshot.reader import FileReader

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "reference": {"EXPERT_TIER": "reference"},
    "full-0": {"EXPERT_TIER": "full", "LOOKAHEAD": "0"},
    "full-1": {"EXPERT_TIER": "full", "LOOKAHEAD": "1"},
    "full-auto": {"EXPERT_TIER": "full", "LOOKAHEAD": "auto"},
}
SIZES = {"uniform": "--layers 8 --experts 108", "trace": "--layers 4 --experts 256"}
KINDS = {"uniform": ("cold",), "trace": ("warm", "prefill"), "own": ("cold", "warm", "prefill")}
PREFILL_ARMS = ("reference", "full-auto")
WARM_IDS, PREFILL_IDS = 24, 512
KEPT = ("THREADS", "KERNELS", "XDG_CACHE_HOME", "READ_MODE", "TERM")
MOVE = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')  # a group, and what to run in it
DEPTHS = (2, 4, 8)
PLAIN_BYTES = 400e6  # read at each depth
TOKENS_PER_GB = 8  # of decode in a run, for each GB/s of the drive
MIN_TOKENS, MAX_TOKENS = 8, 16
COLUMNS = (
    "routing kind arm round tokens tok_s hit_rate mb_per_token u overlap wait_share ahead_useful_mb ahead_wasted_mb "
    "peak_rss_gb disk_s compute_s seconds gb_read plain_before plain_after read_over_needed cache_filled kernels limit"
).split()


# --- the limit --------------------------------------------------------------------------------------------------------


def group_parents():
    """Where a group with a memory limit of its own may be made, without leaving any limit that holds for us: in our own
    cgroup, and beside it with version 2, where a group with processes in it cannot have limited ones below."""
    for version in (False, True):
        folders = [folder for folder, is_v2 in cgroup_folders("memory") if is_v2 == version]
        for folder in folders[: 1 + version]:
            yield folder, "memory.max" if version else "memory.limit_in_bytes"


@contextmanager
def memory_group(num_bytes):
    """-> the folder of a new cgroup that may hold so many bytes, None where none can be made; removed at the end."""
    group = next((made for parent, limit in group_parents() if (made := make_group(parent, limit, num_bytes))), None)
    try:
        yield group
    finally:
        if group:
            remove_group(group)


def make_group(parent, limit, num_bytes):
    """-> the folder of a group that a process could be moved to, or None."""
    group = parent / f"colibri-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        # Without the memory controller the file is not there, and cannot be made either.
        (group / limit).write_text(f"{num_bytes}\n")
        subprocess.run([*MOVE, str(group), "true"], check=True, stderr=subprocess.DEVNULL)
        return group
    except (OSError, subprocess.CalledProcessError):
        remove_group(group)
        return None


def remove_group(group):
    """A process that has just ended may still be counted for a moment."""
    for _ in range(50):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)
    print(f"streaming: {group}: cannot be removed; remove it with rmdir", file=sys.stderr)


# --- one run ----------------------------------------------------------------------------------------------------------


class PlainReads:
    """What the drive gives to plain reads of random experts of a snapshot."""

    def __init__(self, folder):
        config, family = read_config(folder)
        index, self.reader = read_index(folder), FileReader()
        self.disk = ExpertDisk(config, family, index, self.reader)
        self.places = list(self.disk.places.values())
        if not self.places:
            raise Refused(f"{folder}: has no routed experts, there is nothing to stream")
        self.size = self.disk.max_expert_bytes
        arena = Arena(max(DEPTHS) * self.size)
        self.buffers = [memoryview(arena.memory)[i * self.size : (i + 1) * self.size] for i in range(max(DEPTHS))]
        self.drive = self.disk.drives.all[0]
        self.read_arm("direct", 1, 1)
        self.mode = "direct" if self.drive.takes_direct(self.places[0]) else "buffered"

    def read_arm(self, mode, depth, count):
        """GB/s of `count` experts."""
        sample = random.choices(self.places, k=count)
        seconds = time_reads(Drive(self.drive.root, self.reader, DriveSpeed(mode, depth)), sample, self.buffers)
        return sum(place.stored_bytes for place in sample) / seconds / 1e9

    def measure(self):
        """GB/s, the best of some depths."""
        return max(
            self.read_arm(self.mode, depth, max(depth, round(PLAIN_BYTES / self.size / depth) * depth))
            for depth in DEPTHS
        )

    def drop_pages(self):
        """Forget all that the page cache holds of the snapshot."""
        for path in sorted(self.drive.root.glob("*.safetensors")):
            with open(path, "rb") as file:
                os.fsync(file.fileno())  # a page that is not written yet stays
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self):
        self.reader.close()


def run_colibri(group, variables):
    """REPLAY in a process of its own -> what REPORT says. Refused when it fails."""
    others = [name for name in VARIABLES if name not in KEPT]
    command = [
        "env",
        *(f"--unset={name}" for name in others),
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    command += [sys.executable, str(ROOT / "colibri.py")]
    if group:
        command = [*MOVE, str(group), *command]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Refused(f"a run ended with code {process.returncode}: {last}")
    return read_json_object(Path(variables["REPORT"]))


class StreamingBench:
    """The runs over one snapshot. `rows` are filled, and written to the CSV as they come."""

    def __init__(self, args, group, limit, writer, folder, routing, work):
        self.args, self.group, self.limit, self.writer = args, group, limit, writer
        self.folder, self.routing, self.work = folder, routing, work
        self.plain = PlainReads(folder)
        self.plain.drop_pages()
        self.speed = self.plain.measure()
        self.rows = []
        self.tokens = args.tokens or max(MIN_TOKENS, min(MAX_TOKENS, round(TOKENS_PER_GB * self.speed)))

    def ids(self, count):
        """The snapshot's own where it has as many, else random ones."""
        path = self.folder / "ref_glm.json"
        own = read_json_object(path).get("full_ids", []) if path.exists() else []
        vocab_size = self.plain.disk.config.vocab_size
        return own[:count] if len(own) >= count else random.Random(1).choices(range(vocab_size), k=count)

    def decode(self):
        """Cold, warm, or both; all arms by turns."""
        for turn in range(self.args.rounds):
            for kind, num_prompt in (("cold", 2), ("warm", WARM_IDS)):
                for arm in ARMS if kind in KINDS[self.routing] else ():
                    self.one(kind, arm, turn, num_prompt, self.tokens, PREFILL_CHUNK=1)

    def prefill(self):
        for arm in PREFILL_ARMS:
            self.one("prefill", arm, 0, PREFILL_IDS + 1, 1, ROUTE_TRACE=self.work / "routes.jsonl")

    def one(self, kind, arm, turn, num_prompt, num_tokens, **variables):
        """One run: plain reads before it and after it, a row of the CSV, a line on stderr."""
        ids, reference, report = self.ids(num_prompt + num_tokens), self.work / "ref.json", self.work / "report.json"
        reference.write_text(json.dumps({"prompt_ids": ids[:num_prompt], "full_ids": ids}))
        variables |= ARMS[arm] | {"SNAP": self.folder, "REPLAY": 1, "REF": reference, "REPORT": report, "USAGE": 0}
        variables["RAM_GB"] = f"{self.args.ram:g}"
        if not self.group:
            variables["READ_MODE"] = "direct"
        trace = variables.get("ROUTE_TRACE")
        if trace:
            trace.unlink(missing_ok=True)
        self.plain.drop_pages()
        numbers = run_colibri(self.group, variables)
        before, self.speed = self.speed, self.plain.measure()
        row = {"routing": self.routing, "kind": kind, "arm": arm, "round": turn + 1, "limit": self.limit}
        row |= {"kernels": numbers["kernels"], "plain_before": before, "plain_after": self.speed}
        row["peak_rss_gb"] = numbers["peak_rss_bytes"] / 1e9
        needed = self.needed_bytes(trace) if trace else None
        row |= summarise(numbers, (before + self.speed) / 2, needed)
        self.rows.append(row)
        self.writer.writerow({name: show(value) for name, value in row.items()})
        print(
            f"[{self.routing} {kind} {arm} {turn + 1}] {row['tok_s']:.2f} tok/s | U {row['u']:.2f} | plain reads "
            f"{before:.2f}, {self.speed:.2f} GB/s",
            file=sys.stderr,
            flush=True,
        )

    def needed_bytes(self, trace):
        """Of the distinct experts of each layer of each chunk of a prefill."""
        places, (_, events) = self.plain.disk.places, read_trace(trace)
        return sum(places[layer, e].stored_bytes for layer, rows, uses in events if rows > 1 for e in uses)


def summarise(numbers, plain, needed=None):
    """REPORT, GB/s of plain reads, and for a prefill the bytes that it needs -> the numbers of a row.

    What cannot be known of a prefill is left out: REPORT has its waits and hits for the decode alone."""
    if needed is not None:
        seconds, num_bytes, tokens = (
            numbers["prefill_s"],
            numbers["prefill_expert_bytes_read"],
            numbers["prompt_tokens"],
        )
        row = {"read_over_needed": num_bytes / needed}
    else:
        seconds, num_bytes, tokens = numbers["decode_s"], numbers["expert_bytes_read"], numbers["tokens"]
        disk, compute = num_bytes / plain / 1e9, seconds - numbers["disk_wait_s"]
        row = {
            "hit_rate": numbers["hit_rate"],
            "overlap": seconds / max(disk, compute),
            "wait_share": numbers["disk_wait_s"] / seconds,
            "ahead_useful_mb": numbers.get("ahead_useful_bytes", 0) / tokens / 1e6,
            "ahead_wasted_mb": numbers.get("ahead_wasted_bytes", 0) / tokens / 1e6,
            "disk_s": disk,
            "compute_s": compute,
            "cache_filled": min(1.0, numbers["prefill_expert_bytes_read"] / max(1, numbers["cache_bytes"])),
        }
    return row | {
        "tokens": tokens,
        "seconds": seconds,
        "tok_s": tokens / seconds,
        "gb_read": num_bytes / 1e9,
        "mb_per_token": num_bytes / tokens / 1e6,
        "u": num_bytes / seconds / plain / 1e9,
    }


def show(value):
    return f"{value:.5g}" if isinstance(value, float) else value


# --- what a person reads ----------------------------------------------------------------------------------------------


def print_tables(rows):
    """A table for each routing and kind, of medians over the rounds; then the prefill."""
    of = {}
    for row in rows:
        of.setdefault((row["routing"], row["kind"]), {}).setdefault(row["arm"], []).append(row)
    for (routing, kind), arms in of.items():
        print()
        if kind == "prefill":
            print_prefill(routing, arms)
        else:
            print_decode(routing, kind, arms)


def median(rows, name):
    return statistics.median(row[name] for row in rows)


def print_decode(routing, kind, arms):
    first = arms["reference"]
    speeds = [row["plain_after"] for rows in arms.values() for row in rows]
    print(
        f"{routing}, {kind}: {first[0]['tokens']} tokens | plain reads {min(speeds):.2f} to {max(speeds):.2f} GB/s | "
        f"the cache was {median(first, 'cache_filled'):.0%} full at the start"
    )
    print(f"  {'':10}{'tok/s':>8}{'/ ref':>7}{'hit':>7}{'MB/token':>10}{'U':>6}{'overlap':>9}{'wait':>6}"
          f"{'ahead':>12}{'peak':>7}")  # fmt: skip
    for arm, rows in arms.items():
        m = {name: median(rows, name) for name in COLUMNS if isinstance(rows[0].get(name), float)}
        ahead = f"{m['ahead_useful_mb']:.0f} + {m['ahead_wasted_mb']:.0f}"
        print(f"  {arm:10}{m['tok_s']:8.2f}{m['tok_s'] / median(first, 'tok_s'):7.2f}{m['hit_rate']:7.1%}"
              f"{m['mb_per_token']:10.1f}{m['u']:6.2f}{m['overlap']:9.2f}{m['wait_share']:6.0%}"
              f"{ahead:>12}{m['peak_rss_gb']:7.2f}")  # fmt: skip
    disk, compute, seconds = (median(first, name) for name in ("disk_s", "compute_s", "seconds"))
    print(
        f"  reference: disk {disk:.2f} s, compute {compute:.2f} s, together {seconds:.2f} s; overlapping alone could "
        f"give {(disk + compute) / max(disk, compute):.2f} times its speed"
    )


def print_prefill(routing, arms):
    for arm, (row,) in arms.items():
        print(
            f"{routing}, prefill of {row['tokens']}, {arm}: {row['tok_s']:.0f} tok/s | {row['gb_read']:.2f} GB read, "
            f"{row['read_over_needed']:.3f} of what its chunks need | U {row['u']:.2f} | "
            f"peak {row['peak_rss_gb']:.2f} GB"
        )


# --- the door ---------------------------------------------------------------------------------------------------------


def make_snapshot(folder, routing):
    script = [sys.executable, str(ROOT / "dev" / "make_synthetic.py"), "glm-5.2", str(folder), "--routing", routing]
    sizes = f"{SIZES[routing]} --vocab 32768 --prompt 64 --tokens 512 --report-tokens 0".split()
    made = subprocess.run([*script, *sizes], stdout=sys.stderr)
    if made.returncode:
        raise Refused("the synthetic snapshot could not be made; SNAP names one that is there")


def run(args, group, limit, writer):
    """-> the rows of all runs."""
    snap, rows = Settings.read([]).snap, []
    for routing in ("uniform", "trace") if snap == str(EMBEDDED_SNAPSHOT) else ("own",):
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work, "glm") if routing != "own" else Path(snap)
            if routing != "own":
                make_snapshot(folder, routing)
            bench = StreamingBench(args, group, limit, writer, folder, routing, Path(work))
            try:
                bench.decode()
                if "prefill" in KINDS[routing]:
                    bench.prefill()
            finally:
                bench.plain.close()
            rows += bench.rows
    return rows


def positive(kind):
    """-> what reads an option as an int or float above 0."""

    def read(text):
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {'a whole' if kind is int else 'a'} number above 0")
        return number

    return read


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", type=positive(float), default=6, metavar="GB", help="RAM_GB, default 6")
    parser.add_argument("--tokens", type=positive(int), help="of decode in a run, default 8 to 16, by the drive")
    parser.add_argument("--rounds", type=positive(int), default=2, help="of all arms, default 2")
    parser.add_argument(
        "--csv", type=Path, default=ROOT / "bench" / "streaming.csv", help="default bench/streaming.csv"
    )
    parser.add_argument("--no-cgroup", action="store_true", help="READ_MODE=direct instead of a cgroup")
    return parser


def main(arguments=None):
    args = make_parser().parse_args(arguments)
    started = time.perf_counter()
    try:
        with memory_group(int(args.ram * 2**30)) if not args.no_cgroup else nullcontext() as group:
            limit = f"a cgroup of {args.ram:g} GiB" if group else "none, READ_MODE=direct"
            print(
                f"RAM_GB={args.ram:g} | memory limit: {limit} | pages of the snapshot dropped before each run",
                flush=True,
            )
            with open(args.csv, "w", buffering=1, newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                rows = run(args, group, limit, writer)
        print_tables(rows)
        print(f"\n{len(rows)} runs in {(time.perf_counter() - started) / 60:.1f} minutes; each is a row of {args.csv}")
        return 0
    except Refused as error:
        print(f"streaming: {error}", file=sys.stderr)
    except OSError as error:
        print(f"streaming: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("streaming: interrupted", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
