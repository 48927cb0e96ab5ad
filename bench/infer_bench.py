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
import math
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import cost
from bench.peaks import find_machine_peaks, measure_drives, peak_memory, reset_peak
from dev.replay_trace import import_pyplot
from errors import Refused, printable
from forward.finite import NonFinite
from forward.kv_cache import kv_cache_bytes
from generate.engine import Engine
from kernels import dispatch
from load.model import DEFAULT_CONTEXT, load_model, open_snapshot, snapshot_folder
from load.plan import gb
from machine.console import say
from machine.threads import num_threads
from modes.reference import read_reference, reference_path
from modes.run import announce
from scripts.options import OneLineParser, number_from, whole_from
from settings import Settings
from snapshot.config import read_config
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("LICENSE", "README.md", "CONTRIBUTING.md")
WARM_UP = 8  # tokens
SEED = 1


# --- a run -----------------------------------------------------------------------------------------------------------


class Asked:
    """Stands where a route trace would: bytes of the experts that are asked for, the distinct ones, and those of all
    rows one by one."""

    def __init__(self, bytes_of_layer, trace=None):
        self.bytes_of_layer, self.trace = bytes_of_layer, trace
        self.reset()

    def reset(self):
        self.union_bytes = self.row_bytes = 0

    def record(self, layer, uses, chunk_rows, rows=None):
        each = self.bytes_of_layer[layer]
        self.union_bytes += each * len(uses)
        self.row_bytes += each * sum(uses.values())
        if self.trace:
            self.trace.record(layer, uses, chunk_rows, rows)


@dataclass(frozen=True)
class Timed:
    """One run of `batch` rows as it was measured."""

    batch: int
    state: str  # cold or warm
    ttft: float  # seconds
    steps: tuple[float, ...]  # seconds of each later step
    forwards: int  # of these steps
    rows: int  # that went through the layers in them
    peak_bytes: int
    union_bytes: int = 0  # of the experts that the steps asked for, each once a step
    row_bytes: int = 0  # the same, once for each row that asked
    disk_bytes: int = 0  # of experts, read in the steps
    prefill_disk_bytes: int = 0
    hit_rate: float | None = None
    wait_seconds: float = 0.0

    @property
    def seconds(self):
        return sum(self.steps)


class InferBench:
    """A loaded model and a prompt."""

    def __init__(self, loaded, settings, ids, temperature):
        self.loaded, self.ids, self.temperature = loaded, ids, temperature
        self.experts = loaded.model.experts
        self.asked = Asked(layer_bytes(loaded, settings), loaded.model.trace)
        model = replace(loaded.model, trace=self.asked)
        self.engine = Engine(model, terminal_ids=frozenset(), draft=settings.draft)

    def drop_experts(self):
        """Evict all experts and drop them from the page cache."""
        for key in list(self.experts.cached):
            self.experts.free_expert_slot(key, self.experts.evict(key))
        for layout in self.loaded.disk.layouts.values():
            for drive in self.loaded.disk.drives.usable:
                drive.drop_from_page_cache(layout)

    def run(self, batch, num_tokens, is_cold=False):
        """-> Timed."""
        if is_cold:
            self.drop_experts()
        reset_peak()
        self.experts.reset_counters()
        generator = self.engine.generate(self.ids, batch, num_tokens, self.temperature, seed=SEED)
        started = time.perf_counter()
        next(generator)
        ttft, bursts = time.perf_counter() - started, []
        prefill = self.experts.counters.bytes_read
        if is_cold:
            self.drop_experts()
        self.experts.reset_counters()
        self.asked.reset()
        engine, forwards = self.engine, self.engine.forwards
        first_forward, first_row = engine.forwards, engine.forward_rows
        before = time.perf_counter()
        for _ in generator:
            now = time.perf_counter()
            if engine.forwards > forwards:
                bursts.append([])
            bursts[-1].append(now - before)
            before, forwards = now, engine.forwards
        counters = self.experts.counters
        return Timed(
            batch=batch,
            state="cold" if is_cold else "warm",
            ttft=ttft,
            steps=tuple(sum(burst) / len(burst) for burst in bursts for _ in burst),
            forwards=engine.forwards - first_forward,
            rows=engine.forward_rows - first_row,
            peak_bytes=peak_memory(),
            union_bytes=self.asked.union_bytes,
            row_bytes=self.asked.row_bytes,
            disk_bytes=counters.bytes_read,
            prefill_disk_bytes=prefill,
            hit_rate=counters.hit_rate if counters.hits + counters.misses else None,
            wait_seconds=counters.wait_seconds,
        )


def layer_bytes(loaded, settings):
    """layer -> mean bytes of one of its experts in memory."""
    total, count = Counter(), Counter()
    for (layer, _), layout in loaded.disk.layouts.items():
        total[layer] += cost.expert_bytes(layout, settings.expert_bits)
        count[layer] += 1
    return {layer: total[layer] / count[layer] for layer in total}


# --- the numbers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What one step costs whatever was measured: of all rows together, and of each."""

    dense_bytes: int  # read in a step
    row_kv_bytes: int  # read in a step by each row
    row_flops: float
    expert_bytes: float  # that one row asks for in a step


def share(part, whole):
    """part / whole, None where one of them is not known or there is nothing to divide by."""
    return part / whole if part is not None and whole else None


def percent(part, whole):
    return share(100 * part, whole)


def percentile(values, part):
    """The least of the values that `part` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def bytes_of_step(run, costs):
    """Bytes that a step reads from memory, on average."""
    read = run.forwards * costs.dense_bytes + run.union_bytes + run.rows * costs.row_kv_bytes
    return read / len(run.steps)


def floors(run, costs, peaks, drive):
    """Seconds of a step at the peak of each: memory, arithmetic, disk; None where a peak is not known."""
    return {
        "memory": share(bytes_of_step(run, costs), peaks.bandwidth),
        "arithmetic": share(run.rows / len(run.steps) * costs.row_flops, peaks.flops),
        "disk": share(run.disk_bytes / len(run.steps), drive),
    }


def summarise(run, costs, peaks, drive, single=None):
    """Timed -> the numbers of one row of the sweep. single: the run of one row in the same state, to compare with."""
    tpot, tokens = statistics.median_high(run.steps), run.batch * len(run.steps)
    speed = tokens / run.seconds
    floor = max((s for s in floors(run, costs, peaks, drive).values() if s is not None), default=None)
    union_ratio = share(run.row_bytes / run.batch, run.union_bytes)
    gain = disk_ratio = None
    if single:
        gain = speed * single.seconds / len(single.steps)
        disk_ratio = share(single.disk_bytes / len(single.steps), run.disk_bytes / len(run.steps))
    return {
        "batch_size": run.batch,
        "state": run.state,
        "ttft_sec": run.ttft,
        "tpot_sec": tpot,
        "tpot_p95_sec": percentile(run.steps, 0.95),
        "tok_per_sec": speed,
        "mbu_percent": percent(bytes_of_step(run, costs) / tpot, peaks.bandwidth),
        "mfu_percent": percent(run.rows / len(run.steps) * costs.row_flops / tpot, peaks.flops),
        "peak_vram_bytes": None,
        "peak_memory_bytes": run.peak_bytes,
        "decode_steps": len(run.steps),
        "steps_per_forward": len(run.steps) / run.forwards,
        "hit_rate": run.hit_rate,
        "disk_bytes_per_token": run.disk_bytes / tokens,
        "prefill_disk_bytes": run.prefill_disk_bytes,
        "disk_wait_share": run.wait_seconds / run.seconds,
        "drive_use": share(run.disk_bytes / run.seconds, drive),
        "expert_bytes_one_row": run.row_bytes / tokens,
        "expert_bytes_union": run.union_bytes / len(run.steps),
        "union_ratio": union_ratio,
        "speedup": gain,
        "speedup_share": share(gain, run.batch * (union_ratio or 0)),
        "disk_ratio": disk_ratio,
        "disk_speedup_share": share(gain, run.batch * (disk_ratio or 0)),
        "floor_sec": floor,
        "floor_share": share(floor, run.seconds / len(run.steps)),
    }


def count_parameters(loaded):
    """-> {format: parameters} of everything that is loaded, routed experts and all."""
    counts = Counter()
    for stored in loaded.dense.matrices.values():
        counts[str(stored.format)] += stored.rows * stored.columns
    for entry in loaded.dense.floats.values():
        counts[entry.dtype.lower()] += math.prod(entry.shape)
    for layout in loaded.disk.layouts.values():
        for matrix in layout.matrices:
            counts[str(matrix.format)] += matrix.rows * matrix.columns
    return dict(counts)


def find_costs(loaded, per_layer, context):
    """-> Costs at `context` positions."""
    config, weights = loaded.config, loaded.model.weights
    return Costs(
        dense_bytes=cost.dense_bytes_read(weights, config, context),
        row_kv_bytes=cost.kv_bytes_read(config, context, weights.has_indexer),
        row_flops=cost.decode_flops(config, context, weights.has_indexer),
        expert_bytes=config.num_active_experts * sum(per_layer[layer] for layer in config.sparse_layers),
    )


def full_rows(loaded, context):
    """Rows of `context` positions that the budget has room for, with one expert of each layer in memory."""
    plan = loaded.plan
    least = sum(len(slots.layers) * slots.slot_bytes for slots in plan.expert_slots)
    room = plan.budget_bytes - plan.process_bytes - plan.dense_bytes - plan.scratch_bytes - least
    return max(0, room // kv_cache_bytes(loaded.config, context))


# --- the prompt -------------------------------------------------------------------------------------------------------


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
        ids = read_reference(settings, opened, "full_ids")["full_ids"]
        if len(ids) >= count:
            return ids[:count], f"full_ids of {reference_path(settings).name}"
    ids = random.Random(SEED).choices(range(opened.config.vocab_size), k=count)
    return ids, "random ids: there is neither text nor a reference of that length"


# --- what a person reads ----------------------------------------------------------------------------------------------


def cell(value, factor=1.0, digits=2, unit=""):
    return "-" if value is None else f"{value * factor:.{digits}f}{unit}"


def print_card(card, peaks):
    """What is known before anything is measured."""
    c = card
    parameters = ", ".join(f"{count / 1e6:,.2f} M {name}" for name, count in c["dtypes"].items())
    print(f"model       {c['source']}: {c['model_config']['model_type']}, {c['params'] / 1e6:,.2f} M parameters: "
          f"{parameters}")  # fmt: skip
    print(f"device      {c['device']} | budget {gb(c['total_memory_bytes'])}")
    for what, value, unit, source in (
        ("arithmetic", peaks.flops, "GFLOP/s", peaks.flops_source),
        ("memory", peaks.bandwidth, "GB/s", peaks.bandwidth_source),
        ("drive", c["peak_drive"], "GB/s", "measured: plain reads of experts, before the sweep"),
    ):
        print(f"{what:12}" + (f"{value / 1e9:.2f} {unit} ({source})" if value else "-"))
    streamed = f"{c['slots']} of {c['num_experts']} experts fit in memory" if c["num_experts"] else "no routed experts"
    print(f"weights     {gb(c['weight_bytes'])}, of them {gb(c['resident_bytes'])} dense | {streamed}")
    print(f"a step      at {c['c_mid']} positions: dense {gb(c['resident_bytes_read'])}, experts of one row "
          f"{gb(c['expert_bytes_per_row'])}, KV {c['kv_bytes_read_per_row'] / 1e6:.3f} MB and "
          f"{c['decode_flops'] / 1e9:.4f} GFLOP a row")  # fmt: skip
    print(f"KV          {c['kv_bytes_per_token']} bytes a token and row | {c['max_rows']} rows of {c['max_context']} "
          "positions fit beside the weights")  # fmt: skip
    print(f"ceiling     {cell(c['ceiling_tok_per_sec'], digits=1)} tok/s of one row, all in memory")
    print(f"prompt      {c['prompt_tokens']} tokens, {c['prompt_source']} | decode {c['decode_tokens']}, temperature "
          f"{c['temperature']:g}, DRAFT={c['draft']}", flush=True)  # fmt: skip


# Title, key, factor, digits of the numbers of a row.
COLUMNS = (
    ("TTFT ms", "ttft_sec", 1e3, 1),
    ("TPOT ms", "tpot_sec", 1e3, 2),
    ("p95 ms", "tpot_p95_sec", 1e3, 2),
    ("tok/s", "tok_per_sec", 1, 1),
    ("step/fw", "steps_per_forward", 1, 2),
    ("MBU %", "mbu_percent", 1, 1),
    ("MFU %", "mfu_percent", 1, 1),
    ("hit %", "hit_rate", 100, 1),
    ("MB/tok", "disk_bytes_per_token", 1e-6, 1),
    ("U", "drive_use", 1, 2),
    ("1/union", "union_ratio", 1, 2),
    ("asked", "speedup_share", 1, 2),
    ("read", "disk_speedup_share", 1, 2),
    ("floor", "floor_share", 1, 2),
    ("GB", "peak_memory_bytes", 1e-9, 2),
    ("steps", "decode_steps", 1, 0),
)


def print_sweep(rows, expected_steps):
    print(f"{'rows':>4}{'':6}" + "".join(f"{title:>9}" for title, *_ in COLUMNS))
    for row in rows:
        cells = [cell(row[key], factor, digits) for _, key, factor, digits in COLUMNS]
        early = "  early stop" if row["decode_steps"] < expected_steps else ""
        print(f"{row['batch_size']:>4} {row['state']:5}" + "".join(f"{text:>9}" for text in cells) + early)


def plot(pyplot, path, sweep, floors_of):
    """Tokens a second over rows, measured, and what the peaks allow for the same bytes and operations."""
    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, state in enumerate(dict.fromkeys(row["state"] for row in sweep)):
        rows = [row for row in sweep if row["state"] == state]
        batches = [row["batch_size"] for row in rows]
        colour = f"C{number}"
        panel.plot(batches, [row["tok_per_sec"] for row in rows], "o-", color=colour, label=f"{state}, measured")
        for what, style in (("memory", "--"), ("arithmetic", ":"), ("disk", "-.")):
            known = [(n, n / s) for n in batches if (s := floors_of[state, n][what])]
            if known:
                panel.plot(*zip(*known, strict=True), style, color=colour, label=f"{state}, {what} at its peak")
    panel.set(xscale="log", yscale="log", xlabel="rows", ylabel="tokens a second")
    ticks = sorted({row["batch_size"] for row in sweep})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper")
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


# --- the door ---------------------------------------------------------------------------------------------------------


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
    """-> Opened, with memory for the KV caches of all rows and of the prompt they are cloned from."""
    try:
        return open_snapshot(replace(settings, ctx=prompt + num_rows * (prompt + decode)))
    except Refused as error:
        if "does not fit" not in str(error):
            raise
        raise Refused(f"{num_rows} rows of {prompt + decode} positions: {error}; or give fewer --batches") from None


def run(args):
    pyplot = import_pyplot() if args.plot else None  # a long run should not end with a missing package
    if args.plot and not args.plot.resolve().parent.is_dir():
        raise Refused(f"--plot {printable(str(args.plot))}: its folder does not exist")
    settings = replace(Settings.read(args.arguments, draft="0"), usage=False)
    for notice in settings.notices:
        say(notice)
    prompt, decode, limit = fit(args, read_config(snapshot_folder(settings))[0], settings)
    threads = settings.threads or num_threads()
    # Before the model takes its memory: plain reads of memory need some, too.
    dispatch.start(settings.kernels, settings.cache / "kernels", threads)
    peaks = find_machine_peaks(threads, args.device_name, args.peak_flops, args.peak_bandwidth)
    if args.device_name is not None and None in (peaks.flops, peaks.bandwidth):
        say(f"[peaks] {printable(args.device_name)} is not known; --peak-flops and --peak-bandwidth say what it can do")
    opened = open_with_rows(settings, prompt, decode, args.batches[-1])
    try:
        announce(replace(opened, notices=[line for line in opened.notices if not line.startswith("[ctx]")]))
        ids, source = make_prompt(opened, settings, prompt)
        measure(args, settings, load_model(settings, opened), peaks, ids, source, decode, limit, pyplot)
    finally:
        opened.close()


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
    try:
        run(make_parser().parse_args(arguments))
        return 0
    except Refused as error:
        print(f"infer_bench: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        print(f"infer_bench: {where}{error.strerror or error}", file=sys.stderr)
    except NonFinite as error:
        print(f"infer_bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninfer_bench: interrupted", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
