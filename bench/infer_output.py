"""For bench/infer_bench.py: the printed table and the plot."""

from pathlib import Path
from typing import Any

from bench.peaks import Peaks
from load.plan import gb

Floors = dict[str, float | None]  # least seconds of a step by memory, arithmetic, disk


def cell(value: float | None, factor: float = 1.0, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}{unit}"


def print_model(model: dict[str, Any], peaks: Peaks) -> None:
    """Print what is known before the sweep: model, machine, weights and the cost model of a step."""
    m = model
    parameters = ", ".join(f"{count / 1e6:,.2f} M {name}" for name, count in m["dtypes"].items())
    print(f"model       {m['source']}: {m['model_config']['model_type']}, {m['params'] / 1e6:,.2f} M parameters: "
          f"{parameters}")  # fmt: skip
    print(f"device      {m['device']} | budget {gb(m['total_memory_bytes'])}")
    for what, value, unit, source in (
        ("arithmetic", peaks.flops, "GFLOP/s", peaks.flops_source),
        ("memory", peaks.bandwidth, "GB/s", peaks.bandwidth_source),
        ("drive", m["peak_drive"], "GB/s", "measured: plain reads of experts, before the sweep"),
    ):
        print(f"{what:12}" + (f"{value / 1e9:.2f} {unit} ({source})" if value else "-"))
    streamed = f"{m['slots']} of {m['num_experts']} experts fit in memory" if m["num_experts"] else "no routed experts"
    print(f"weights     {gb(m['weight_bytes'])}, of them {gb(m['resident_bytes'])} dense | {streamed}")
    print(f"a step      at {m['c_mid']} positions: dense {gb(m['resident_bytes_read'])}; a sequence: experts "
          f"{gb(m['expert_bytes_per_row'])}, KV cache {m['kv_bytes_read_per_row'] / 1e6:.3f} MB, "
          f"{m['decode_flops'] / 1e9:.4f} GFLOP")  # fmt: skip
    print(f"KV cache    {m['kv_bytes_per_token']} bytes a token | {m['max_rows']} sequences of {m['max_context']} "
          "positions fit beside the weights")  # fmt: skip
    print(f"ceiling     {cell(m['ceiling_tok_per_sec'], digits=1)} tok/s of one sequence, all weights in memory")
    print(f"prompt      {m['prompt_tokens']} tokens, {m['prompt_source']} | decode {m['decode_tokens']}, temperature "
          f"{m['temperature']:g}, DRAFT={m['draft']}", flush=True)  # fmt: skip


# Title, key, factor and digits of the numbers of a line.
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
    ("drive", "drive_use", 1, 2),
    ("1/union", "union_ratio", 1, 2),
    ("/union", "speedup_share", 1, 2),
    ("/disk", "disk_speedup_share", 1, 2),
    ("floor", "floor_share", 1, 2),
    ("GB", "peak_memory_bytes", 1e-9, 2),
    ("steps", "decode_steps", 1, 0),
)


def print_sweep(lines: list[dict[str, Any]], expected_steps: int) -> None:
    print(f"{'seqs':>4}{'':6}" + "".join(f"{title:>9}" for title, *_ in COLUMNS))
    for line in lines:
        cells = [cell(line[key], factor, digits) for _, key, factor, digits in COLUMNS]
        early = "  early stop" if line["decode_steps"] < expected_steps else ""
        print(f"{line['batch_size']:>4} {line['state']:5}" + "".join(f"{text:>9}" for text in cells) + early)


def plot(pyplot: Any, path: Path, sweep: list[dict[str, Any]], floors_of: dict[tuple[str, int], Floors]) -> None:
    """Plot tokens a second over the batch size, as measured and as bounded by each peak.

    floors_of: (state, batch size) -> the lower bounds of a step's seconds.
    """
    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, state in enumerate(dict.fromkeys(line["state"] for line in sweep)):
        lines = [line for line in sweep if line["state"] == state]
        batches = [line["batch_size"] for line in lines]
        color = f"C{number}"
        panel.plot(batches, [line["tok_per_sec"] for line in lines], "o-", color=color, label=f"{state}, measured")
        for what, style in (("memory", "--"), ("arithmetic", ":"), ("disk", "-.")):
            bounds = [(n, n / s) for n in batches if (s := floors_of[state, n][what])]
            if bounds:
                panel.plot(*zip(*bounds, strict=True), style, color=color, label=f"{state}, bound by {what}")
    panel.set(xscale="log", yscale="log", xlabel="sequences", ylabel="tokens a second")
    ticks = sorted({line["batch_size"] for line in sweep})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper")
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)
