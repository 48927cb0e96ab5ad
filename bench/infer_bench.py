"""Inference benchmark: time to first token, time per token and tokens a second over batch sizes, with their bounds.

    python bench/infer_bench.py                                   # models/tiny, less than a minute
    SNAP=/models/glm-5.2 RAM_GB=20 python bench/infer_bench.py --prompt 256 --decode 32 --batches 1,4 --cold
    python bench/infer_bench.py --plot sweep.png 0 4 8            # cap, expert_bits, dense_bits as of colibri.py

N sequences continue one prompt in lock-step (generate/engine.py): it is prefilled once and its KV cache is cloned.
Variables are those of colibri.py, but no usage history is read or written (USAGE=0), and DRAFT is 0 where it is not
set. Stop ids do not end a sequence. With draft tokens one forward may give several steps, which share its time; its
bytes and operations are those of all its token rows, rejected draft tokens included. The work of the MTP layer is in
the times, and in the bytes of experts only.

    TTFT        from the request to the first token of every sequence: prefill, clone, first sample
    TPOT, p95   the median time of the later steps, and their 95th percentile
    tok/s       sequences * steps / seconds of the steps
    step/fw     steps a forward; 1 without draft tokens
    MBU         bytes a step reads, over TPOT, as a share of the memory's bandwidth: dense weights, each distinct
                expert that was requested, and the KV cache that attention reads for each sequence
    MFU         operations of a step over TPOT, as a share of the FLOP/s of a large matrix product
    hit, MB/tok share of the distinct requested experts that were cached; bytes of experts read from disk
    drive       bytes of experts read over the seconds of the steps, as a share of plain reads of experts measured
                before and after the sweep (the larger); "-" where all experts fit and none is read
    1/union     bytes of experts that one sequence requests, over those that all request together; N times this is
                what N sequences can gain where reading experts decides
    /union      speedup over one sequence, as a share of N * 1/union
    /disk       the same as a share of N * (bytes a step of one sequence read from disk in its own run / those of a
                step of this run): where the disk decides, 1 is all that sharing reads can give
    floor       lower bound of a step's seconds (memory, disk and arithmetic each at its peak, all overlapped), over
                its mean time

"warm" follows 8 tokens of warm-up. --cold adds a run before it with no expert cached or in the page cache, at the
start and again after the prefill, which reads nearly all of them.

The bandwidth and the FLOP/s are measured in the run, with all threads; --peak-bandwidth and --peak-flops replace them,
--device-name takes them from a table (bench/peaks.py). At temperature 0 all sequences are the same and request the
same experts, so the default is 1. The prompt is text (LICENSE and README.md of this project) where the snapshot has a
tokenizer, else ids of REF or random ones. By default: a prompt of 2048 tokens, as far as it fits, 64 tokens of each
sequence, and 1, 8 and 32 sequences; choose fewer for a model that is streamed.

The last line on stdout is a JSON object with every number; an unknown one is null. Exit code 2 for bad input, with one
line on stderr. --plot needs matplotlib.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from bench import cost
from bench.infer_numbers import (
    StepCosts,
    count_parameters,
    floors,
    max_sequences,
    percent,
    share,
    step_costs,
    summarize,
)
from bench.infer_output import cell, plot, print_model, print_sweep
from bench.infer_run import SEED, InferBench, TimedRun
from bench.peaks import Peaks, find_machine_peaks, measure_drives
from dev.replay_trace import import_pyplot
from errors import Refused, printable
from kernels import dispatch
from load.model import DEFAULT_CONTEXT, LoadedModel, OpenedSnapshot, load_model, open_snapshot, snapshot_folder
from machine.console import say
from machine.exit import exit_code
from machine.threads import num_threads
from modes.reference import read_reference, reference_path
from modes.run import run_mode
from scripts.options import OneLineParser, number_from, whole_from
from settings import Settings
from snapshot.config import ModelConfig
from snapshot.config_file import read_config
from snapshot.folder import snapshot_name
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer
from text.tokenizer_files import has_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PROMPT_FILES = ("LICENSE", "README.md", "CONTRIBUTING.md")
WARM_UP = 8  # tokens


def prompt_length(args: argparse.Namespace, config: ModelConfig, settings: Settings) -> tuple[int, int]:
    """-> (tokens of the prompt, positions of a KV cache); prints a note if the prompt is cut."""
    limit = min(config.max_positions, settings.ctx or DEFAULT_CONTEXT)
    if args.decode >= limit:
        raise Refused(f"--decode {args.decode} leaves no room for a prompt in {limit} positions; decode fewer tokens")
    num_tokens = min(args.prompt, limit - args.decode)
    if num_tokens < args.prompt:
        print(f"note: the prompt has {num_tokens} tokens instead of {args.prompt}: with {args.decode} to decode they "
              f"fill the {limit} positions of the model and CTX")  # fmt: skip
    return num_tokens, limit


def make_prompt(opened: OpenedSnapshot, settings: Settings, num_tokens: int) -> tuple[list[int], str]:
    """-> (ids, where they are from, in words)."""
    if has_tokenizer(opened.folder):
        tokenizer = TextTokenizer(opened.folder, opened.config)
        files = [ROOT / name for name in PROMPT_FILES if (ROOT / name).is_file()]
        text = "\n\n".join(path.read_text(encoding="utf-8") for path in files)
        ids = PromptPrefix(opened.config, tokenizer, settings.prefix).prepend(tokenizer.encode(text))
        if len(ids) >= num_tokens:
            return ids[:num_tokens], f"text ({PROMPT_FILES[0]} and what follows it)"
    elif reference_path(settings).exists():
        ids = read_reference(settings, opened, "full_ids")[0]
        if len(ids) >= num_tokens:
            return ids[:num_tokens], f"full_ids of {reference_path(settings).name}"
    ids = random.Random(SEED).choices(range(opened.config.vocab_size), k=num_tokens)
    return ids, "random ids: there is neither text nor a reference of that length"


def batch_list(text: str) -> tuple[int, ...]:
    """ "1,8,32" -> (1, 8, 32), each once, ascending."""
    return tuple(sorted({whole_from(1)(word) for word in text.split(",")}))


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="cap, expert_bits, dense_bits", help="as of colibri.py")
    parser.add_argument("--prompt", type=whole_from(1), default=2048, help="tokens, default 2048 or as many as fit")
    parser.add_argument("--decode", type=whole_from(2), default=64, help="tokens of each sequence, default 64")
    parser.add_argument("--batches", type=batch_list, default=(1, 8, 32), help="batch sizes, default 1,8,32")
    parser.add_argument("--temperature", type=number_from(0), default=1.0, help="default 1; 0 is greedy")
    parser.add_argument("--cold", action="store_true", help="a run without cached experts before each warm one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of the sweep and its roofline")
    parser.add_argument("--device-name", metavar="NAME", help="take the peaks of this device from the table")
    parser.add_argument("--peak-flops", type=number_from(1), metavar="FLOP/s", help="instead of measuring")
    parser.add_argument("--peak-bandwidth", type=number_from(1), metavar="B/s", help="instead of measuring")
    return parser


def open_for_batch(settings: Settings, prompt: int, decode: int, batch: int) -> OpenedSnapshot:
    """Open with memory for the KV caches of all sequences and of the prompt that they are cloned from."""
    try:
        opened = open_snapshot(replace(settings, ctx=prompt + batch * (prompt + decode)))
        return replace(opened, notices=tuple(line for line in opened.notices if not line.startswith("[ctx]")))
    except Refused as error:
        if "does not fit" not in str(error):
            raise
        raise Refused(f"{batch} sequences of {prompt + decode} positions: {error}; or use smaller --batches") from None


def run(args: argparse.Namespace) -> int:
    pyplot = import_pyplot() if args.plot else None  # a long run should not end with a missing package
    if args.plot and not args.plot.resolve().parent.is_dir():
        raise Refused(f"--plot {printable(str(args.plot))}: its folder does not exist")
    settings = replace(Settings.read(args.arguments, draft="0"), usage=False)
    num_tokens, limit = prompt_length(args, read_config(snapshot_folder(settings))[0], settings)
    threads = settings.threads or num_threads()
    # Before the model takes its memory: measuring the bandwidth needs some, too.
    dispatch.start(settings.kernels, settings.cache / "kernels", threads)
    peaks = find_machine_peaks(threads, args.device_name, args.peak_flops, args.peak_bandwidth)
    if args.device_name is not None and None in (peaks.flops, peaks.bandwidth):
        say(f"[peaks] {printable(args.device_name)} is not known; set its peaks with --peak-flops and --peak-bandwidth")

    def mode(settings: Settings, opened: OpenedSnapshot) -> int:
        ids, source = make_prompt(opened, settings, num_tokens)
        bench = InferBench(load_model(settings, opened), settings, ids, args.temperature)
        measure(bench, args, settings, peaks, source, limit, pyplot)
        return 0

    return run_mode(
        "infer_bench", settings, mode, lambda s: open_for_batch(s, num_tokens, args.decode, args.batches[-1])
    )


def measure(
    bench: InferBench,
    args: argparse.Namespace,
    settings: Settings,
    peaks: Peaks,
    prompt_source: str,
    limit: int,
    pyplot: Any,
) -> None:
    """Measure and print: the model, prefill, sweep, plot, JSON. limit: positions of a KV cache."""
    loaded = bench.loaded
    context = len(bench.ids) + args.decode // 2  # of the middle step
    costs = step_costs(loaded, bench.requested.bytes_of_layer, context)
    is_streamed = loaded.plan.num_expert_slots < len(loaded.disk.layouts)
    drive = measure_drives(loaded.disk) if loaded.disk.layouts and (args.cold or is_streamed) else None
    numbers = describe_model(loaded, costs, peaks, context, limit) | {
        "gpu": args.device_name,
        "peak_drive": drive,
        "prompt_tokens": len(bench.ids),
        "prompt_source": prompt_source,
        "decode_tokens": args.decode,
        "temperature": args.temperature,
        "draft": settings.draft,
    }
    print_model(numbers, peaks)

    numbers["prefill"] = measure_prefill(bench, peaks)
    runs = list(sweep(bench, args))
    if drive is not None:
        numbers["peak_drive"] = drive = max(drive, measure_drives(loaded.disk))
    lines = []
    for timed in runs:
        single = next((one for one in runs if one.batch == 1 and one.state == timed.state), None)
        lines.append(summarize(timed, costs, peaks, drive, single))
    print_sweep(lines, args.decode - 1)
    for line in bench.engine.draft_length.summary_lines():
        print(line)
    if args.temperature == 0 and args.batches[-1] > 1:
        print("note: at temperature 0 all sequences are the same and request the same experts")
    if args.plot:
        plot(pyplot, args.plot, lines, {(one.state, one.batch): floors(one, costs, peaks, drive) for one in runs})
    print(json.dumps(numbers | {"sweep": lines}, separators=(",", ":"), allow_nan=False))


def describe_model(loaded: LoadedModel, costs: StepCosts, peaks: Peaks, context: int, limit: int) -> dict[str, Any]:
    """The numbers of the last line that hold for every run."""
    config, plan, has_indexer = loaded.config, loaded.plan, loaded.model.weights.has_indexer
    dtypes = count_parameters(loaded)
    return {
        "source": snapshot_name(loaded.folder.resolve()),
        "step": None,
        "model_config": asdict(config),
        "device": f"CPU, {loaded.kernels.removeprefix('[kernels] ')}",
        "peak_flops": peaks.flops,
        "peak_flops_source": peaks.flops_source,
        "peak_bandwidth": peaks.bandwidth,
        "peak_bandwidth_source": peaks.bandwidth_source,
        "total_vram_bytes": None,
        "total_memory_bytes": plan.budget_bytes,
        "params": sum(dtypes.values()),
        "dtypes": dtypes,
        "weight_bytes": plan.dense_bytes + loaded.disk.stored_bytes,
        "resident_bytes": plan.dense_bytes,
        "slots": plan.num_expert_slots,
        "num_experts": len(loaded.disk.layouts),
        "resident_bytes_read": costs.dense_bytes,
        "expert_bytes_per_row": costs.expert_bytes,
        "kv_bytes_per_token": cost.kv_bytes_per_token(config, has_indexer),
        "kv_bytes_read_per_row": costs.row_kv_bytes,
        "c_mid": context,
        "decode_flops": costs.row_flops,
        "ceiling_tok_per_sec": share(peaks.bandwidth, costs.dense_bytes + costs.expert_bytes + costs.row_kv_bytes),
        "max_rows": max_sequences(loaded, limit),
        "max_context": limit,
        "lossy": list(loaded.lossy.values()),
    }


def measure_prefill(bench: InferBench, peaks: Peaks) -> dict[str, Any]:
    """Prefill the prompt, the second time measured; print and return the numbers."""
    bench.run(1, 2)
    timed = bench.run(1, 2)
    flops = cost.prefill_flops(bench.loaded.config, len(bench.ids), bench.loaded.model.weights.has_indexer)
    prefill = {
        "tok_per_sec": len(bench.ids) / timed.ttft,
        "mfu_percent": percent(flops / timed.ttft, peaks.flops),
        "time_sec": timed.ttft,
        "disk_bytes": timed.prefill_disk_bytes,
    }
    print(f"prefill     {len(bench.ids) / timed.ttft:.1f} tok/s, {timed.ttft:.3f} s, MFU "
          f"{cell(prefill['mfu_percent'], digits=1, unit=' %')}\n", flush=True)  # fmt: skip
    return prefill


def sweep(bench: InferBench, args: argparse.Namespace) -> Iterator[TimedRun]:
    """Yield a run for each batch size and state."""
    for batch in args.batches:
        for is_cold in (True, False) if args.cold else (False,):
            if not is_cold:
                bench.run(batch, min(WARM_UP, args.decode))
            timed = bench.run(batch, args.decode, is_cold)
            say(f"[sweep] {batch} sequences, {timed.state}: {batch * len(timed.steps) / timed.seconds:.1f} tok/s")
            yield timed


def main(arguments: list[str] | None = None) -> int:
    return exit_code("infer_bench", lambda: run(make_parser().parse_args(arguments)), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
