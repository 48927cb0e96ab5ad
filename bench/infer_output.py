"""For bench/infer_bench.py: what it prints and plots."""

from load.plan import gb


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
