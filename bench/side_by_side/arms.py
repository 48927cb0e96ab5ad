"""The engines that bench/peers.py compares: how each runs a test in a process of its own, and what it says of it."""

import json
import random
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.memory_cgroup import MOVE, drop_from_page_cache
from errors import Refused
from settings import VARIABLES
from snapshot.folder import own_files

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "bench" / "side_by_side" / "engine.py"
OURS = "colibri.py"
KEPT = ("KERNELS", "XDG_CACHE_HOME", "TERM", "RAM_GB")
WARM_IDS, COLD_IDS = 48, 2  # prompt of a REPLAY; the first brings every expert of a small model into the cache
LONG = 2000  # tokens: longer tests are in the first rounds alone
OLD_LOAD_MODES = {"none": ["-mmp", "0"], "mmap": ["-mmp", "1"]}  # of llama-bench before --load-mode
DECODED = re.compile(r"REPLAY decode: (\d+) token in ([\d.]+) s \| ([\d.]+) tok/s(?: \| expert hit ([\d.]+)%)?")


@dataclass(frozen=True, order=True)
class SpeedTest:
    """A prefill of `prompt` tokens or a decode of `gen`, behind `depth` positions."""

    case: str  # warm: all in memory; cold: nothing, and less memory than weights
    prompt: int = 0
    gen: int = 0
    depth: int = 0

    def __str__(self) -> str:
        what = f"prefill of {self.prompt:,}" if self.prompt else f"decode of {self.gen}"
        return f"{self.case} {what}" + (f" behind {self.depth:,}" if self.depth else "")

    @property
    def length(self) -> int:
        return self.prompt + self.gen + self.depth

    @property
    def is_long(self) -> bool:
        return self.length > LONG


@dataclass(frozen=True)
class Files:
    """The two forms of the model, and a folder for what a run needs."""

    snapshot: Path
    gguf: Path
    work: Path

    def drop_from_page_cache(self) -> None:
        drop_from_page_cache([*own_files(self.snapshot, ".safetensors"), self.gguf])


class ArmFailed(Exception):
    """A run that gave no number; the others go on."""


def run_process(command: list[str], variables: dict[str, Any], group: Path | None) -> str:
    """A command in the cgroup, without our variables but those named -> stdout."""
    environ = ["env", *(f"--unset={name}" for name in VARIABLES if name not in KEPT)]
    command = [*environ, *(f"{name}={value}" for name, value in variables.items()), *command]
    if group:
        command = [*MOVE, str(group), *command]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise ArmFailed(f"code {process.returncode}: {last}")
    return process.stdout


def read_speed(text: str, test: SpeedTest) -> dict[str, Any]:
    """JSON of llama-bench -> its entry for the test."""
    try:
        entries = json.loads(text)
        [entry] = [e for e in entries if (e["n_prompt"], e["n_gen"], e.get("n_depth", 0)) == tuple(key(test))]
        return entry | {"avg_ts": float(entry["avg_ts"])}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ArmFailed(f"no JSON of llama-bench with this test: {text.strip()[:80]!r}") from None


def key(test: SpeedTest) -> tuple[int, int, int]:
    return test.prompt, test.gen, test.depth


def read_replay(text: str) -> dict[str, Any]:
    found = DECODED.search(text)
    if not found:
        raise ArmFailed(f"no line of REPLAY: {text.strip()[-80:]!r}")
    tokens, seconds, speed, hit = found.groups()
    # The printed speed has two digits behind the point, too few for a slow one.
    precise = int(tokens) / float(seconds) if float(seconds) > 1 else float(speed)
    return {"avg_ts": precise} | ({"hit_rate": float(hit) / 100} if hit else {})


def replay_variables(files: Files, test: SpeedTest, vocab: int) -> dict[str, Any]:
    """Variables of a REPLAY of the test, and its file of random ids."""
    prompt = COLD_IDS if test.case == "cold" else WARM_IDS
    ids = random.Random(1).choices(range(2, vocab), k=prompt + test.gen)
    reference = files.work / "replay.json"
    reference.write_text(json.dumps({"prompt_ids": ids[:prompt], "full_ids": ids, "tf_pred": ids}))
    return {"SNAP": files.snapshot, "REF": reference, "REPLAY": 1, "DRAFT": 0, "CTX": max(512, len(ids))}


@dataclass(frozen=True)
class Arm:
    """An engine in one setting. `run` gives avg_ts, tokens a second, and what else the engine says of itself."""

    name: str
    threads: int

    def can_run(self, test: SpeedTest) -> bool:
        return True

    def run(self, test: SpeedTest, files: Files, vocab: int, group: Path | None) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class OurArm(Arm):
    """Warm by bench/side_by_side/engine.py, cold by REPLAY, which has no more memory than the cgroup."""

    kernels: str = "native"

    def run(self, test: SpeedTest, files: Files, vocab: int, group: Path | None) -> dict[str, Any]:
        own = {"THREADS": self.threads, "KERNELS": self.kernels, "USAGE": 0}
        if test.case == "cold":
            variables = replay_variables(files, test, vocab) | own
            return read_replay(run_process([sys.executable, str(ROOT / "colibri.py")], variables, group))
        what = ["--prompt", str(test.prompt)] if test.prompt else ["--gen", str(test.gen)]
        command = [sys.executable, str(ENGINE), *what, "--depth", str(test.depth)]
        return read_speed(run_process(command, own | {"SNAP": files.snapshot, "READ_MODE": "buffered"}, group), test)


@dataclass(frozen=True)
class LlamaArm(Arm):
    """llama-bench with the given options."""

    program: Path
    options: tuple[str, ...] = ()
    is_mapped: bool = False  # slower, and the only way where memory is short

    def can_run(self, test: SpeedTest) -> bool:
        return not test.is_long if self.is_mapped else test.case == "warm"

    def run(self, test: SpeedTest, files: Files, vocab: int, group: Path | None) -> dict[str, Any]:
        numbers = zip(("-p", "-n", "-d"), key(test), strict=True)
        command = [str(self.program), "-m", str(files.gguf), "-t", str(self.threads), "-r", "1", "-o", "json"]
        command += [*(str(word) for pair in numbers for word in pair), *self.options]
        entry = read_speed(run_process(command, {}, group), test)
        return entry | {"commit": f"{entry.get('build_commit')} ({entry.get('build_number')})"}


@dataclass(frozen=True)
class CEngineArm(Arm):
    """The C engine: REPLAY, so decodes without a depth alone."""

    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)

    def can_run(self, test: SpeedTest) -> bool:
        return test.gen > 0 and not test.depth

    def run(self, test: SpeedTest, files: Files, vocab: int, group: Path | None) -> dict[str, Any]:
        variables = replay_variables(files, test, vocab) | {"OMP_NUM_THREADS": self.threads, "AUTOPIN": 0}
        return read_replay(run_process([*self.command], variables | self.variables, group))


def llama_arms(program: Path, threads: int, more: list[str]) -> list[Arm]:
    """llama-bench with repacked weights and from the mapped file; `more` are NAME=OPTIONS."""
    try:
        shown = subprocess.run([program, "--help"], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise Refused(f"{program}: {error.strerror}; --llama-bench names the program llama-bench") from None
    usage = shown.stdout + shown.stderr

    def options(mode: str, repack: str) -> tuple[str, ...]:
        load = ["-lm", mode] if "--load-mode" in usage else OLD_LOAD_MODES[mode]
        return (*load, *(["--repack", repack] if "--repack" in usage else []))

    arms: list[Arm] = [
        LlamaArm("llama.cpp, repacked", threads, program, options("none", "1")),
        LlamaArm("llama.cpp, mmap", threads, program, options("mmap", "0"), is_mapped=True),
    ]
    for text in more:
        name, _, words = text.partition("=")
        arms.append(LlamaArm(f"llama.cpp, {name}", threads, program, tuple(shlex.split(words))))
    return arms
