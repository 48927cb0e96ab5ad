"""Side by side with llama.cpp and the C engine: decode, prefill and long contexts of the same layer shapes, by turns.

    make bench-peers LLAMA_BENCH=/path/to/llama-bench [C_ENGINE=COMMAND] [PEERS_OPTIONS="--work DIR --cold 6"]
    python bench/peers.py --llama-bench PATH [--rounds 5] [--work DIR] [--depths 0,4096] [--prompts 512]
    KERNELS=avx2 python bench/peers.py --llama-bench PATH_OF_AN_AVX2_BUILD --plot peers.svg
    python bench/peers.py --show bench/peers.csv

Two models of random weights are made: a container of ours (dev/make_synthetic.py: int4 with a scale for each row) and a
GGUF with the same shapes and routers (Q4_0, 4.5 bits a weight; it needs the package gguf). By default GLM-5.2's layers,
one dense and three sparse, 64 experts: 9.3 GB of disk, 8 GB of memory. The indexer is left out, because llama.cpp has
none: both attend to every position. --work keeps them for the next run. Speed only: the models say nothing.

A round runs each test by each engine in turn, a process for each run, every other round in the opposite order:

    prefill   of --prompts tokens
    decode    of --tokens behind each of --depths positions
    cold      with --cold GIB: a decode of --cold-tokens of a model with 256 experts (32 GB of disk) in a cgroup of so
              much memory, file pages included, dropped from the page cache before; refused where none can be made

Tests of more than 2,000 tokens are in the first --long-rounds rounds alone. llama.cpp runs with repacked weights
(-lm none --repack 1) and, but for the long tests, from the mapped file (-lm mmap --repack 0), cold from that alone;
--llama-arm NAME=OPTIONS adds another setting. --c-engine "PATH [ARGUMENTS]" adds the C engine's REPLAY of 48 prompt
tokens and --tokens, --c-variables "NAME=VALUE ..." set its environment. Warm, everything is in memory: an engine loads
and warms up before its clock starts.

Compare engines within a round only: on a shared machine speeds drift from one round to the next. A plain read of memory
by all threads is measured as each round begins, the load average before each run; every run is a row of --csv. The
table has medians, ranges, and our speed over that of each peer as the median and range of the rounds' ratios. A run
that fails is said on stderr and has no row. Exit code 1 if one failed, 2 for bad input. --plot needs matplotlib.
Linux only.
"""

import argparse
import csv
import os
import platform
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from bench.memory_cgroup import memory_cgroup
from bench.peaks import measure_bandwidth
from bench.side_by_side.arms import OURS, Arm, ArmFailed, CEngineArm, Files, OurArm, SpeedTest, llama_arms
from bench.side_by_side.gguf_file import import_gguf, write_gguf
from bench.side_by_side.table import COLUMNS, Row, plot, print_tables
from bench.synthetic import make_snapshot
from dev import make_synthetic
from dev.replay_trace import import_pyplot
from errors import Refused, printable
from kernels import dispatch
from machine.console import say
from machine.exit import exit_code
from machine.files import temporary_folder
from machine.threads import num_threads
from scripts.options import OneLineParser, number_from, whole_from
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config

ROOT = Path(__file__).resolve().parents[1]
MODEL = "glm-5.2 --layers 4 --experts 64 --vocab 4096"
COLD_MODEL = "glm-5.2 --layers 4 --experts 256 --vocab 4096"
OPTIONS = "--format int4-row --scales F32 --routing uniform --no-indexer --prompt 64 --tokens 64 --report-tokens 0"


def numbers(low: int) -> Any:
    """An argparse type: "512,4096" -> (512, 4096), ascending; nothing is ()."""
    one = whole_from(low)
    return lambda text: tuple(sorted({one(word) for word in text.split(",")})) if text else ()


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="the program llama-bench of llama.cpp")
    parser.add_argument(
        "--llama-arm", action="append", default=[], metavar="NAME=OPTIONS", help="another setting of it"
    )
    parser.add_argument("--c-engine", type=shlex.split, metavar="COMMAND", help="the C engine, with its arguments")
    parser.add_argument("--c-variables", type=shlex.split, default=[], metavar="NAME=VALUE", help="its environment")
    parser.add_argument("--rounds", type=whole_from(1), default=5, help="default 5")
    parser.add_argument("--long-rounds", type=whole_from(0), default=1, help="of the long tests, default 1")
    parser.add_argument("--prompts", type=numbers(1), default=(512, 4096), help="of prefills, default 512,4096")
    parser.add_argument("--depths", type=numbers(0), default=(0, 512, 2048, 4096, 16384), help="0,512,2048,4096,16384")
    parser.add_argument("--tokens", type=whole_from(1), default=64, help="of a decode, default 64")
    parser.add_argument("--threads", type=whole_from(1), help="of every engine, default THREADS or all cores")
    parser.add_argument("--cold", type=number_from(0.1), metavar="GIB", help="memory of the cold case, left out")
    parser.add_argument("--cold-tokens", type=whole_from(1), default=24, help="of a cold decode, default 24")
    parser.add_argument("--model", default=MODEL, help=f"for make_synthetic.py, default {MODEL}")
    parser.add_argument("--cold-model", default=COLD_MODEL, help=f"default {COLD_MODEL}")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="your own, of the model that SNAP names")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps the models; by default a temporary folder")
    parser.add_argument("--csv", type=Path, default=ROOT / "bench" / "peers.csv", help="default bench/peers.csv")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="SVG or PNG of tok/s over context and prompt length")
    parser.add_argument("--show", type=Path, nargs="+", metavar="CSV", help="tables and plot of earlier runs")
    return parser


def processor_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def our_commit() -> str:
    """The checkout's commit, with + where files differ from it; empty outside of one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def make_models(folder: Path, words: str) -> tuple[Path, Path]:
    """-> (snapshot, GGUF) of the options of make_synthetic.py; those that a folder has already are taken."""
    name = "_".join(words.replace("--", "").split())
    snapshot, gguf = folder / name, folder / f"{name}.gguf"
    if not (snapshot / "config.json").exists():
        make_snapshot(snapshot, f"{words} {OPTIONS}")
    if not gguf.exists():
        say(f"[peers] writing {gguf.name}")
        args = make_synthetic.make_parser().parse_args([*f"{words} {OPTIONS}".split(), "unused"])
        write_gguf(gguf, make_synthetic.fill_in(args), args.routing, args.seed)
    return snapshot, gguf


class PeersBench:
    """The rounds: rows are written to the CSV as they come."""

    def __init__(self, arms: list[Arm], tests: list[SpeedTest], long_rounds: int, writer: csv.DictWriter) -> None:
        self.arms, self.tests, self.long_rounds, self.writer = arms, tests, long_rounds, writer
        self.rows: list[Row] = []
        self.num_failed = 0
        self.processor, self.commit = processor_name(), our_commit()

    def run_round(self, number: int, files_of: dict[str, Files], group: Path | None) -> None:
        memory = measure_bandwidth(self.arms[0].threads)[0] / 1e9
        for test in self.tests:
            if test.is_long and number > self.long_rounds:
                continue
            for arm in self.arms[:: 1 if number % 2 else -1]:
                if arm.can_run(test):
                    self.run_arm(number, arm, test, files_of[test.case], group, memory)

    def run_arm(self, number: int, arm: Arm, test: SpeedTest, files: Files, group: Path | None, memory: float) -> None:
        """One run: a row of the CSV, a line on stderr."""
        row: Row = {"round": number, "arm": arm.name, "case": test.case, "memory_gb_s": memory, "threads": arm.threads}
        row |= {"n_prompt": test.prompt, "n_gen": test.gen, "n_depth": test.depth, "model": files.snapshot.name}
        row |= {
            "processor": self.processor,
            "load_average": os.getloadavg()[0],
            "time": time.strftime("%FT%TZ", time.gmtime()),
        }
        is_cold = test.case == "cold"
        if is_cold:
            files.drop_from_page_cache()
        vocab = read_config(files.snapshot)[0].vocab_size
        try:
            result = arm.run(test, files, vocab, group if is_cold else None)
        except ArmFailed as error:
            self.num_failed += 1
            say(f"[round {number}] {arm.name}, {test}: failed, {error}")
            return
        row |= {"tok_s": result["avg_ts"], "hit_rate": result.get("hit_rate", ""), "kernels": result.get("kernels", "")}
        row["commit"] = self.commit if arm.name == OURS else result.get("commit", "")
        self.rows.append(row)
        self.writer.writerow(
            {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
        )
        say(f"[round {number}] {arm.name}, {test}: {row['tok_s']:.2f} tok/s | load {row['load_average']:.1f}")


def plan_tests(args: argparse.Namespace) -> list[SpeedTest]:
    tests = [SpeedTest("warm", gen=args.tokens, depth=depth) for depth in args.depths]
    tests += [SpeedTest("warm", prompt=prompt) for prompt in args.prompts]
    tests += [SpeedTest("cold", gen=args.cold_tokens)] if args.cold else []
    return sorted(tests, key=lambda test: test.length)


def plan_arms(args: argparse.Namespace, settings: Settings) -> list[Arm]:
    threads = args.threads or settings.threads or num_threads()
    arms: list[Arm] = [OurArm(OURS, threads, settings.kernels or "native")]
    if args.llama_bench:
        arms += llama_arms(args.llama_bench.absolute(), threads, args.llama_arm)
    if args.c_engine:
        pairs = [word.partition("=") for word in args.c_variables]
        arms.append(CEngineArm("C engine", threads, tuple(args.c_engine), {name: value for name, _, value in pairs}))
    return arms


def find_files(
    args: argparse.Namespace, settings: Settings, tests: list[SpeedTest], temporary: Path
) -> dict[str, Files]:
    """case -> its models, made where SNAP and --gguf do not name them."""
    is_own = settings.snap != str(EMBEDDED_SNAPSHOT)
    if is_own != bool(args.gguf):
        raise Refused("SNAP and --gguf name two forms of one model: set both, or neither to have them made")
    if args.gguf and not args.gguf.is_file():
        raise Refused(f"--gguf {printable(str(args.gguf))}: no such file")
    folder = args.work or temporary
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for case in {test.case for test in tests}:
        words = args.cold_model if case == "cold" else args.model
        snapshot, gguf = (Path(settings.snap), args.gguf.absolute()) if is_own else make_models(folder, words)
        files[case] = Files(snapshot, gguf, temporary)
    return files


def show(paths: list[Path]) -> list[Row]:
    """The rows of CSV files. Rounds of different files are different rounds."""
    rows: list[Row] = []
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != COLUMNS:
                raise Refused(f"{printable(str(path))}: its first line is not that of bench/peers.py")
            rows += [row | {"round": f"{path} {row['round']}"} for row in reader]
    return rows


def measure(args: argparse.Namespace) -> PeersBench:
    """All rounds."""
    settings = Settings.read([])
    tests, arms = plan_tests(args), plan_arms(args, settings)
    if len(arms) == 1:
        raise Refused("nothing to compare with: --llama-bench names llama.cpp's llama-bench, --c-engine the C engine")
    if not tests:
        raise Refused("no tests: --prompts, --depths and --cold are all empty")
    if not args.gguf:
        import_gguf()  # before minutes of work
    with ExitStack() as stack:
        temporary = stack.enter_context(temporary_folder())
        files = find_files(args, settings, tests, temporary)
        group = stack.enter_context(memory_cgroup(int(args.cold * 2**30))) if args.cold else None
        if args.cold and not group:
            raise Refused("--cold: no memory cgroup can be made here; run as root or in a delegated cgroup")
        say(dispatch.start(settings.kernels, settings.cache / "kernels", arms[0].threads))
        file = stack.enter_context(open(args.csv, "w", buffering=1, newline="", encoding="utf-8"))
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        bench = PeersBench(arms, tests, args.long_rounds, writer)
        for number in range(1, args.rounds + 1):
            bench.run_round(number, files, group)
    return bench


def run(args: argparse.Namespace) -> int:
    pyplot = import_pyplot() if args.plot else None  # before hours of runs
    num_failed, rows = 0, show(args.show) if args.show else []
    if not args.show:
        started = time.perf_counter()
        bench = measure(args)
        num_failed, rows = bench.num_failed, bench.rows
        minutes = (time.perf_counter() - started) / 60
        say(f"[peers] {len(rows)} runs in {minutes:.0f} minutes, each a row of {printable(str(args.csv))}")
    print_tables(rows)
    if args.plot:
        plot(pyplot, args.plot, rows)
    return 1 if num_failed else 0


def main(arguments: list[str] | None = None) -> int:
    return exit_code("peers", lambda: run(make_parser().parse_args(arguments)), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
