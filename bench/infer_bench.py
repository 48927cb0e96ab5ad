"""Time to the first token, time per token and tokens a second over batch sizes, beside what the machine could do.

    python bench/infer_bench.py                                   # models/tiny, less than a minute
    SNAP=/models/glm-5.2 RAM_GB=20 python bench/infer_bench.py --prompt 256 --decode 32 --batches 1,4 --cold
    python bench/infer_bench.py --plot sweep.png 0 4 8            # cap, expert_bits, dense_bits as of colibri.py

N rows continue one prompt in lock-step (generate/engine.py): it is prefilled once and its state is cloned. Variables
are those of colibri.py; no history is read or kept (USAGE=0), and DRAFT is 0 where it is not set. Stop ids do not end a
row. With drafts a forward may give several steps, which share its time, and what it takes and reads is that of all its
rows, rejected draft tokens too; what the MTP layer computes is in the times and in the bytes of experts alone.

    TTFT        from asking to the first token of every row: prefill, clone, first sample
    TPOT, p95   the median time of the later steps, and what 95 % of them stay below
    tok/s       rows * steps / seconds of the steps
    step/fw     steps a forward; 1 without drafts
    MBU         bytes a step reads, over TPOT, as a share of the memory's bandwidth: dense weights, each distinct
                expert that the rows asked for, and for each row what attention reads
    MFU         operations of a step over TPOT, as a share of what a large product reaches
    hit, MB/tok share of the distinct experts that were in memory when they were asked for; experts read from disk
    U           bytes of experts read over the seconds of the steps, as a share of what plain reads of experts got
                before or after the sweep; "-" where all experts fit and nothing is read
    1/union     bytes of experts that one row asks for, over those that all rows ask for together; N times this is what
                N rows can gain where reading experts decides
    asked       tok/s over that of one row, as a share of N * 1/union
    read        the same as a share of N * (bytes a step of one row read from disk in its own run / those of a step of
                this run): where the disk decides, 1 is all that sharing reads can give
    floor       seconds of a step if memory, disk and arithmetic each ran at their peak and all overlapped, over its
                mean time

"warm" follows 8 tokens of warm-up. --cold adds a run before it with no expert in memory or in the page cache, at the
start and again after the prefill, which reads nearly all of them.

The bandwidth and the operations a second are measured in the run, with all threads; --peak-bandwidth and --peak-flops
replace them, --device-name takes them of a table (bench/peaks.py). At temperature 0 all rows write the same and ask
for the same experts, so the default is 1. The prompt is text (LICENSE and README.md of this project) where the snapshot
has a tokenizer, else ids of REF or random ones. Without options: a prompt of 2048 tokens, as far as it fits, 64 tokens
of each row, and 1, 8 and 32 rows; with a model that streams, fewer are enough.

The last line on stdout is a JSON object with every number; what is not known is null. Exit code 2 for bad input, said
in one line. --plot needs matplotlib.
"""

import argparse
import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import cost
from bench.infer_numbers import count_parameters, find_costs, floors, full_rows, percent, share, summarise
from bench.infer_output import cell, plot, print_card, print_sweep
from bench.infer_run import SEED, InferBench
from bench.peaks import find_machine_peaks, measure_drives
from dev.replay_trace import import_pyplot
from errors import Refused, printable
from kernels import dispatch
from load.model import DEFAULT_CONTEXT, load_model, open_snapshot, snapshot_folder
from machine.console import say
from machine.exit import exit_code
from machine.threads import num_threads
from modes.reference import read_reference, reference_path
from modes.run import run_mode
from scripts.options import OneLineParser, number_from, whole_from
from settings import Settings
from snapshot.config_file import read_config
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("LICENSE", "README.md", "CONTRIBUTING.md")
WARM_UP = 8  # tokens


def fit(args, config, settings):
    """-> (prompt tokens, tokens to decode, positions that there are); said when the prompt is cut."""
    limit = min(config.max_positions, settings.ctx or DEFAULT_CONTEXT)
    if args.decode >= limit:
        raise Refused(f"--decode {args.decode} leaves no room for a prompt in {limit} positions; ask for fewer")
    prompt = min(args.prompt, limit - args.decode)
    if prompt < args.prompt:
        print(f"note: the prompt has {prompt} tokens instead of {args.prompt}: with {args.decode} to decode they fill "
              f"the {limit} positions of the model and CTX")  # fmt: skip
    return prompt, args.decode, limit


def make_prompt(opened, settings, count):
    """-> (count ids, in words what they are)."""
    if (opened.folder / "tokenizer.json").is_file():
        tokenizer = TextTokenizer(opened.folder, opened.config)
        text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS if (ROOT / name).is_file())
        ids = PromptPrefix(opened.config, tokenizer, settings.prefix).prepend(tokenizer.encode(text))
        if len(ids) >= count:
            return ids[:count], f"text ({TEXTS[0]} and what follows it)"
    elif reference_path(settings).exists():
        ids = read_reference(settings, opened, "full_ids")[0]
        if len(ids) >= count:
            return ids[:count], f"full_ids of {reference_path(settings).name}"
    ids = random.Random(SEED).choices(range(opened.config.vocab_size), k=count)
    return ids, "random ids: there is neither text nor a reference of that length"


def batch_list(text):
    """ "1,8,32" -> (1, 8, 32), each once, ascending."""
    return tuple(sorted({whole_from(1)(word) for word in text.split(",")}))


def make_parser():
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="cap, expert_bits, dense_bits", help="as of colibri.py")
    parser.add_argument(
        "--prompt", type=whole_from(1), default=2048, help="tokens, default 2048, fewer where they do not fit"
    )
    parser.add_argument("--decode", type=whole_from(2), default=64, help="tokens of each row, default 64")
    parser.add_argument("--batches", type=batch_list, default=(1, 8, 32), help="rows, default 1,8,32")
    parser.add_argument("--temperature", type=number_from(0), default=1.0, help="default 1; 0 is greedy")
    parser.add_argument("--cold", action="store_true", help="a run without any expert in memory before each warm one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of the sweep and its roofline")
    parser.add_argument("--device-name", metavar="NAME", help="take the peaks of this device from the table")
    parser.add_argument("--peak-flops", type=number_from(1), metavar="FLOP/s", help="instead of measuring")
    parser.add_argument("--peak-bandwidth", type=number_from(1), metavar="B/s", help="instead of measuring")
    return parser


def open_with_rows(settings, prompt, decode, num_rows):
    """-> OpenedSnapshot with memory for the KV caches of all rows and of the prompt they are cloned from."""
    try:
        opened = open_snapshot(replace(settings, ctx=prompt + num_rows * (prompt + decode)))
        return replace(opened, notices=[line for line in opened.notices if not line.startswith("[ctx]")])
    except Refused as error:
        if "does not fit" not in str(error):
            raise
        raise Refused(f"{num_rows} rows of {prompt + decode} positions: {error}; or give fewer --batches") from None


def run(args):
    pyplot = import_pyplot() if args.plot else None  # a long run should not end with a missing package
    if args.plot and not args.plot.resolve().parent.is_dir():
        raise Refused(f"--plot {printable(str(args.plot))}: its folder does not exist")
    settings = replace(Settings.read(args.arguments, draft="0"), usage=False)
    prompt, decode, limit = fit(args, read_config(snapshot_folder(settings))[0], settings)
    threads = settings.threads or num_threads()
    # Before the model takes its memory: plain reads of memory need some, too.
    dispatch.start(settings.kernels, settings.cache / "kernels", threads)
    peaks = find_machine_peaks(threads, args.device_name, args.peak_flops, args.peak_bandwidth)
    if args.device_name is not None and None in (peaks.flops, peaks.bandwidth):
        say(f"[peaks] {printable(args.device_name)} is not known; --peak-flops and --peak-bandwidth say what it can do")

    def mode(settings, opened):
        ids, source = make_prompt(opened, settings, prompt)
        measure(args, settings, load_model(settings, opened), peaks, ids, source, decode, limit, pyplot)
        return 0

    return run_mode("infer_bench", settings, mode, lambda s: open_with_rows(s, prompt, decode, args.batches[-1]))


def measure(args, settings, loaded, peaks, ids, source, decode, limit, pyplot):
    """Card, prefill, sweep, plot and JSON of a loaded model."""
    config, has_indexer, plan = loaded.config, loaded.model.weights.has_indexer, loaded.plan
    bench, c_mid = InferBench(loaded, settings, ids, args.temperature), len(ids) + decode // 2
    costs = find_costs(loaded, bench.asked.bytes_of_layer, c_mid)
    dtypes = count_parameters(loaded)
    reads_disk = bool(loaded.disk.layouts) and (args.cold or plan.num_expert_slots < len(loaded.disk.layouts))
    drive = measure_drives(loaded.disk) if reads_disk else None
    step_bytes = costs.dense_bytes + costs.expert_bytes + costs.row_kv_bytes
    card = {
        "source": loaded.folder.resolve().name,
        "step": None,
        "model_config": asdict(config),
        "gpu": args.device_name,
        "device": f"CPU, {loaded.kernels.removeprefix('[kernels] ')}",
        "peak_flops": peaks.flops,
        "peak_flops_source": peaks.flops_source,
        "peak_bandwidth": peaks.bandwidth,
        "peak_bandwidth_source": peaks.bandwidth_source,
        "peak_drive": drive,
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
        "c_mid": c_mid,
        "decode_flops": costs.row_flops,
        "ceiling_tok_per_sec": share(peaks.bandwidth, step_bytes),
        "max_rows": full_rows(loaded, limit),
        "max_context": limit,
        "prompt_tokens": len(ids),
        "prompt_source": source,
        "decode_tokens": decode,
        "temperature": args.temperature,
        "draft": settings.draft,
        "lossy": list(loaded.lossy),
    }
    print_card(card, peaks)

    bench.run(1, 2)
    first = bench.run(1, 2)
    flops = cost.prefill_flops(config, len(ids), has_indexer)
    prefill = {
        "tok_per_sec": len(ids) / first.ttft,
        "mfu_percent": percent(flops / first.ttft, peaks.flops),
        "time_sec": first.ttft,
        "disk_bytes": first.prefill_disk_bytes,
    }
    print(f"prefill     {prefill['tok_per_sec']:.1f} tok/s, {prefill['time_sec']:.3f} s, MFU "
          f"{cell(prefill['mfu_percent'], digits=1, unit=' %')}\n", flush=True)  # fmt: skip
    runs = list(sweep(bench, args, decode))
    if reads_disk:
        card["peak_drive"] = drive = max(drive, measure_drives(loaded.disk))
    rows = []
    for timed in runs:
        single = next((one for one in runs if one.batch == 1 and one.state == timed.state), None)
        rows.append(summarise(timed, costs, peaks, drive, single))
    print_sweep(rows, decode - 1)
    for line in bench.engine.draft_length.summary_lines():
        print(line)
    if args.temperature == 0 and args.batches[-1] > 1:
        print("note: at temperature 0 all rows write the same and ask for the same experts")
    if args.plot:
        plot(pyplot, args.plot, rows, {(one.state, one.batch): floors(one, costs, peaks, drive) for one in runs})
    print(json.dumps(card | {"prefill": prefill, "sweep": rows}, separators=(",", ":"), allow_nan=False))


def sweep(bench, args, decode):
    """Yield a Timed for each batch size and state."""
    for batch in args.batches:
        for is_cold in (True, False) if args.cold else (False,):
            if not is_cold:
                bench.run(batch, min(WARM_UP, decode))
            timed = bench.run(batch, decode, is_cold)
            say(f"[sweep] {batch} rows, {timed.state}: {batch * len(timed.steps) / timed.seconds:.1f} tok/s")
            yield timed


def main(arguments=None):
    return exit_code("infer_bench", lambda: run(make_parser().parse_args(arguments)), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
