"""Speed of the C kernels at the shapes of GLM-5.2, against a plain read of memory and against torch, in one run.

    make bench-kernels            or     python bench/kernels.py [--threads 1] [--rows 1,4,64] [--only int4-g64,bf16]

MBU is weight bytes a second over those of a plain read with as many threads, of the same kind of memory. The calls
take turns over matrices that together are far larger than the CPU caches. Every number is the median of many calls;
the plain read is measured again before each line. With one thread the clock counts the CPU time of the thread, which
other load on the machine disturbs less.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
import torch.nn.functional as F

from errors import Refused
from kernels.build import VARIANTS, BuildError, usable_variants
from kernels.dispatch import open_library
from kernels.formats import FORMATS, FP8
from kernels.quantize import quantize_fp8, quantize_rows
from kernels.weight import Weight, view_weight
from machine.arena import Arena, align_to_line
from machine.exit import exit_code
from machine.threads import num_threads
from settings import Settings

HIDDEN, WIDTH = 6144, 2048
ROWS = (1, 2, 4, 16, 64, 512)
NAMES = "int4-row int4-g64 int8-row int8-g64 int3-g64 int2-g64 fp8-b128 bf16 f16 f32".split()
FUSED = "int4-row int4-g64 int8-g64 bf16".split()
BUFFER_BYTES = 400 << 20  # for the matrices of one format
READ_BYTES = 256 << 20
SECONDS = 0.4  # of one measurement
EXPERTS = 8

Work = Callable[[int], object]  # one call of a kernel, on the i-th matrix


class KernelBench:
    """One library, its threads, and a clock."""

    def __init__(self, threads: int, variants: list[str]):
        try:
            self.native, _ = open_library(variants, Settings.read([]).cache / "kernels")
        except BuildError as error:
            raise Refused(str(error)) from None
        self.native.set_threads(threads)
        torch.set_num_threads(threads)
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        self.memory = Arena(READ_BYTES).allocate(READ_BYTES).fill_(1)
        self.reads: list[float] = []  # GB/s

    def seconds(self, work: Work) -> float:
        """Median seconds of one call of work(i), without the first."""
        times: list[float] = []
        until = time.perf_counter() + SECONDS
        while len(times) < 5 or time.perf_counter() < until:
            started = self.clock()
            work(len(times))
            times.append(self.clock() - started)
        return statistics.median(times[1:])

    def measure_read(self) -> float:
        """Speed of a plain read of memory, GB/s."""
        self.reads.append(READ_BYTES / self.seconds(lambda _: self.native.read_memory(self.memory)) / 1e9)
        return self.reads[-1]

    def print_linear(self, name: str, num_bytes: int, work_of: Callable[[int], Work], rows: Sequence[int]) -> None:
        """Print GB/s, MBU and GFLOP/s of products with a WIDTH x HIDDEN matrix, for each number of token rows."""
        read = self.measure_read()
        columns = ""
        for count in rows:
            seconds = self.seconds(work_of(count))
            speed = num_bytes / seconds / 1e9
            flops = 2 * count * WIDTH * HIDDEN / seconds / 1e9
            columns += f"{speed:8.1f}{speed / read:6.2f}{flops:7.0f} "
        print(f"{name:11}{columns}", flush=True)

    def print_experts(self, name: str) -> None:
        """Print the speed of eight routed experts of one layer and one token, in one call."""
        gates_and_ups, downs = make_weights(name, WIDTH, HIDDEN), make_weights(name, HIDDEN, WIDTH)
        experts = list(zip(gates_and_ups[::2], gates_and_ups[1::2], downs, strict=False))
        x = torch.randn(1, HIDDEN)
        topk_weights = torch.full((EXPERTS,), 0.125)
        starts = torch.arange(EXPERTS + 1)
        rows = torch.zeros(EXPERTS, dtype=torch.int64)
        read = self.measure_read()

        def work(i: int) -> None:
            active = [experts[(i * EXPERTS + e) % len(experts)] for e in range(EXPERTS)]
            self.native.add_experts(torch.zeros_like(x), x, active, starts, rows, topk_weights)

        seconds = self.seconds(work)
        speed = EXPERTS * sum(matrix.num_bytes for matrix in experts[0]) / seconds / 1e9
        print(f"{name:11}{speed:8.1f}{speed / read:6.2f} {seconds * 1e3:9.2f} ms", flush=True)


def make_weights(name: str, rows: int, columns: int) -> list[Weight]:
    """Random matrices of one format, with 16-bit scales, together far larger than the caches."""
    fmt = FORMATS[name]
    matrix = torch.randn(rows, columns) * 0.02
    scale_dtype = torch.float16 if fmt.is_integer else torch.float32
    size = align_to_line(fmt.num_bytes(rows, columns, scale_dtype.itemsize))
    data_at = fmt.num_bytes(rows, columns, scale_dtype.itemsize) - rows * fmt.row_bytes(columns)
    arena = Arena(BUFFER_BYTES)
    weights: list[Weight] = []
    while arena.used + size <= BUFFER_BYTES:
        weight = view_weight(arena.allocate(size), fmt, rows, columns, data_at, 0, scale_dtype)
        if weights:
            weight.data.copy_(weights[0].data)
            if weight.scales is not None and weights[0].scales is not None:
                weight.scales.copy_(weights[0].scales)
        elif fmt is FP8 and weight.scales is not None:
            weight.data[:], weight.scales[:] = quantize_fp8(matrix)
        elif fmt.is_integer:
            quantize_rows(weight, 0, matrix)
        else:
            weight.data.copy_(matrix)
        weights.append(weight)
    return weights


def native_work(bench: KernelBench, weights: list[Weight], count: int) -> Work:
    x = torch.randn(count, HIDDEN)
    return lambda i: bench.native.linear(x, weights[i % len(weights)])


def torch_work(weights: list[Weight], count: int) -> Work:
    x = torch.randn(count, HIDDEN).bfloat16()
    return lambda i: F.linear(x, weights[i % len(weights)].data)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_threads())
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=ROWS)
    parser.add_argument("--only", type=lambda text: text.split(","), default=NAMES)
    parser.add_argument("--kernels", choices=VARIANTS, help="an instruction set, else the best")
    args = parser.parse_args(arguments)
    return exit_code("kernels", lambda: run(args), "interrupted")


def run(args: argparse.Namespace) -> int:
    bench = KernelBench(args.threads, [args.kernels] if args.kernels else usable_variants())
    print(f"{bench.native.name}, {args.threads} thread{'s' * (args.threads > 1)}, matrices {WIDTH} x {HIDDEN}")
    print(f"plain read of memory: {bench.measure_read():.1f} GB/s\n")
    print("linear     " + "".join(f"{f'{count} row' + 's' * (count > 1):>21} " for count in args.rows))
    print(" " * 11 + "    GB/s   MBU GFLOPS " * len(args.rows))
    bench.print_linear(
        "torch bf16", WIDTH * HIDDEN * 2, partial(torch_work, make_weights("bf16", WIDTH, HIDDEN)), args.rows
    )
    for name in args.only:
        weights = make_weights(name, WIDTH, HIDDEN)
        bench.print_linear(name, weights[0].num_bytes, partial(native_work, bench, weights), args.rows)
    print(f"\n{EXPERTS} experts of one token in one call\n" + " " * 11 + "    GB/s   MBU")
    for name in FUSED:
        if name in args.only:
            bench.print_experts(name)
    reads = sorted(bench.reads)
    print(f"\nplain read of memory: {statistics.median(reads):.1f} GB/s, from {reads[0]:.1f} to {reads[-1]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
