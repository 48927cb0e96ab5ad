"""Warm decode and prefill of a whole model in memory: tokens a second, MBU, and time by kernel and stage.

    make bench-decode             or     SNAP=/models/glm-5.2-int4 RAM_GB=20 python bench/decode.py [--prompt 512]

Without SNAP a synthetic snapshot is made in a temporary folder: GLM-5.2's layers (one dense, three sparse), 64 experts,
4.8 GB. A step is repeated from the same KV cache, so that after the first time all its experts are in the cache and
no disk is measured. MBU is weight bytes a second over those of a plain read of memory in the same run, with as many
threads; GFLOP/s of the prefill stand beside those of torch's bf16 linear at as many rows.
"""

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
import torch.nn.functional as F

from bench.synthetic import make_snapshot
from experts.cache import ExpertCache
from experts.prefetch import PrefetchController
from forward.kv_cache import make_kv_cache
from forward.model import Model
from forward.step import step
from kernels import dispatch
from kernels.native import Native
from kernels.weight import Weight
from load.model import load_model
from machine.arena import Arena
from machine.exit import exit_code
from machine.files import temporary_folder
from machine.threads import num_threads
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.weights import MoeWeights

SNAPSHOT = "glm-5.2 --experts 64 --vocab 32768 --prompt 64 --tokens 8 --report-tokens 0"
READ_BYTES = 256 << 20
OPERATIONS = [name for name, value in vars(dispatch).items() if inspect.isfunction(value) and hasattr(Native, name)]
CONTEXT = 1024
CACHE_TURNS = 12


class Clocked:
    """The kernels with a clock around each call."""

    def __init__(self, native: Native):
        self.native = native
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        for name in OPERATIONS:
            setattr(self, name, self.clocked(name, getattr(native, name)))

    def clocked(self, name: str, operation: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = operation(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.calls[name] = self.calls.get(name, 0) + 1
            return result

        return call


def weight_bytes(model: Model) -> tuple[int, int]:
    """-> (bytes of all weights that one token reads, its multiplications): each matrix but the embedding once, and the
    routed experts of one token."""
    matrices, c = [], model.config
    for layer, weights in enumerate(model.weights.layers):
        attention = weights.attention
        parts = [getattr(attention, field.name) for field in fields(attention)]
        matrices += [part for part in parts if isinstance(part, Weight)]
        if weights.indexer:
            matrices += [weights.indexer.q_b, weights.indexer.k, weights.indexer.head_weights]
        mlp = weights.mlp
        if isinstance(mlp, MoeWeights):
            matrices += [mlp.router, *([mlp.shared.gate, mlp.shared.up, mlp.shared.down] if mlp.shared else [])]
            with model.experts.request(layer, {0: 1}) as request:
                [[(_, three)]] = request.ready(0, 1)
            matrices += [*three] * c.num_active_experts
        else:
            matrices += [mlp.gate, mlp.up, mlp.down]
    matrices.append(model.weights.lm_head)
    return sum(m.num_bytes for m in matrices), sum(m.rows * m.columns for m in matrices[:-1])


def repeat(work: Callable[[], object], seconds: float = 4.0, least: int = 5) -> list[float]:
    """Seconds of each of many calls."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < until:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times


class AllCached:
    """Expert lookup without eviction policy or prefetch, for a model whose experts are all cached: the baseline."""

    def __init__(self, cache: ExpertCache):
        self.cache = cache
        self.prefetcher = PrefetchController("0", 1)
        self.pool_of = cache.pool_of

    def request(self, layer: int, uses: dict[int, int], chunk_rows: int) -> nullcontext:
        self.batch = [(i, self.cache.cached[layer, expert][1]) for i, expert in enumerate(uses)]
        return nullcontext(self)

    def ready(self, start: int, stop: int) -> Iterator[list]:
        yield self.batch[start:stop]


def print_cache_overhead(model: Model, decode: Callable[[Model], None]) -> None:
    """Print the time of a warm decode with the expert cache and with AllCached, by turns."""
    bare = replace(model, experts=AllCached(model.experts))  # type: ignore[arg-type]  # what moe uses of it
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(CACHE_TURNS):
        for one in (model, bare):
            times[one is bare] += repeat(partial(decode, one), 0.5, least=1)
    mine, plain = (statistics.median(times[key]) for key in (False, True))
    print(f"the expert cache, all in memory: {mine * 1e3:.2f} ms a token, without it {plain * 1e3:.2f}: "
          f"{mine / plain - 1:+.1%}")  # fmt: skip


def run(folder: str, prompt: int) -> None:
    settings = Settings.read([], snap=folder)
    loaded = load_model(settings)
    model, native = loaded.model, dispatch.active
    print(f"{Path(folder).name} | {loaded.kernels} | {loaded.plan.num_expert_slots} slots\n")
    memory = Arena(READ_BYTES).allocate(READ_BYTES).fill_(1)

    def read() -> float:
        return READ_BYTES / statistics.median(repeat(lambda: native.read_memory(memory), 0.5)) / 1e9

    ids = torch.randint(model.config.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    kv = make_kv_cache(model.config, CONTEXT)
    step(model, [(ids[:64], kv)])
    num_bytes, num_weights = weight_bytes(model)

    def decode(model: Model = model) -> None:
        step(model, [(ids[64:65], kv)])
        kv.trim(64)

    decode()
    print_cache_overhead(model, decode)
    model.experts.reset_counters()
    model.profile.seconds = dict.fromkeys(model.profile.seconds, 0.0)
    dispatch.active = clocked = Clocked(native)
    before = read()
    times = repeat(decode)
    plain = (before + read()) / 2
    dispatch.active = native
    median, total = statistics.median(times), sum(times)
    hit = model.experts.counters.hit_rate
    print(f"decode: {1 / median:.1f} tok/s, {median * 1e3:.2f} ms a token, expert hit {hit:.0%}")
    print(f"  weights {num_bytes / 1e9:.3f} GB a token, {num_bytes / median / 1e9:.1f} GB/s of {plain:.1f}: MBU "
          f"{num_bytes / median / 1e9 / plain:.2f}")  # fmt: skip
    print(f"  in kernels {sum(clocked.seconds.values()) / total:.1%} of the time")
    for name, seconds in clocked.seconds.items():
        each = seconds / len(times)
        print(f"    {name:20}{each * 1e3:8.2f} ms {seconds / total:6.1%}  {clocked.calls[name] / len(times):.0f} calls")
    stages = " | ".join(
        f"{stage} {value / len(times) * 1e3:.2f}" for stage, value in model.profile.seconds.items() if value
    )
    print(f"  by stage, ms: {stages}\n")

    kv.trim(0)

    def prefill() -> None:
        step(model, [(ids[:prompt], kv)])
        kv.trim(0)

    prefill()
    model.experts.reset_counters()
    seconds = statistics.median(repeat(prefill, least=3))
    torch.set_num_threads(native_threads := settings.threads or num_threads())
    x, w = torch.randn(prompt, 6144).bfloat16(), torch.randn(2048, 6144).bfloat16()
    rate = 2 * prompt * w.numel() / statistics.median(repeat(lambda: F.linear(x, w), 1.0)) / 1e9
    mine = 2 * prompt * num_weights / seconds / 1e9
    print(f"prefill: {prompt} tokens in {seconds:.2f} s, {prompt / seconds:.0f} tok/s, expert hit "
          f"{model.experts.counters.hit_rate:.0%}")  # fmt: skip
    print(f"  {mine:.0f} GFLOP/s in matrices; torch bf16 linear at {prompt} rows, {native_threads} threads: {rate:.0f} "
          f"-> {mine / rate:.2f}")  # fmt: skip
    loaded.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill (default 512)")
    args = parser.parse_args(arguments)
    return exit_code("decode", lambda: run_on_snapshot(args), "interrupted")


def run_on_snapshot(args: argparse.Namespace) -> int:
    """Run on SNAP, or on a synthetic snapshot."""
    snap = Settings.read([]).snap
    if snap != str(EMBEDDED_SNAPSHOT):
        run(snap, args.prompt)
        return 0
    with temporary_folder() as folder:
        make_snapshot(folder / "glm", SNAPSHOT)
        run(f"{folder}/glm", args.prompt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
