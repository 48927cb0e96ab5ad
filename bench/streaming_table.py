"""The numbers of a streaming run (bench/streaming.py), and tables of them."""

import statistics
from typing import Any

REFERENCE = "reference"  # the arm that others are compared with
Row = dict[str, Any]  # a line of the CSV
COLUMNS = (
    "routing kind arm round tokens tok_s hit_rate mb_per_token u overlap wait_share ahead_useful_mb ahead_wasted_mb "
    "peak_rss_gb disk_s compute_s seconds gb_read plain_before plain_after read_over_needed cache_filled kernels limit "
    "read_mode read_depth"
).split()


def streaming_row(numbers: dict[str, Any], plain: float, needed: int | None = None) -> Row:
    """REPORT, GB/s of plain reads, and for a prefill the bytes that it needs -> the numbers of a row.

    A prefill has fewer of them: REPORT has waits and hits of the decode alone."""
    row: Row
    if needed is not None:
        seconds = numbers["prefill_s"]
        num_bytes = numbers["prefill_expert_bytes_read"]
        tokens = numbers["prompt_tokens"]
        row = {"read_over_needed": num_bytes / needed}
    else:
        seconds = numbers["decode_s"]
        num_bytes = numbers["expert_bytes_read"]
        tokens = numbers["tokens"]
        disk = num_bytes / plain / 1e9
        compute = seconds - numbers["disk_wait_s"]
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


def format_cell(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def print_tables(rows: list[Row]) -> None:
    """A table of medians over the rounds for each routing and kind; then the prefill."""
    tables: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        tables.setdefault((row["routing"], row["kind"]), {}).setdefault(row["arm"], []).append(row)
    for (routing, kind), arms in tables.items():
        print()
        if kind == "prefill":
            print_prefill(routing, arms)
        else:
            print_decode(routing, kind, arms)


def median(rows: list[Row], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def print_decode(routing: str, kind: str, arms: dict[str, list[Row]]) -> None:
    first = arms[REFERENCE]
    speeds = [row["plain_after"] for rows in arms.values() for row in rows]
    print(
        f"{routing}, {kind}: {first[0]['tokens']} tokens | plain reads {min(speeds):.2f} to {max(speeds):.2f} GB/s | "
        f"the cache was {median(first, 'cache_filled'):.0%} full at the start"
    )
    print(f"  {'':10}{'tok/s':>8}{'/ ref':>7}{'hit':>7}{'MB/token':>10}{'U':>6}{'overlap':>9}{'wait':>6}"
          f"{'prefetch':>12}{'peak':>7}")  # fmt: skip
    for arm, rows in arms.items():
        m = {name: median(rows, name) for name in COLUMNS if isinstance(rows[0].get(name), float)}
        prefetch = f"{m['ahead_useful_mb']:.0f} + {m['ahead_wasted_mb']:.0f}"
        print(f"  {arm:10}{m['tok_s']:8.2f}{m['tok_s'] / median(first, 'tok_s'):7.2f}{m['hit_rate']:7.1%}"
              f"{m['mb_per_token']:10.1f}{m['u']:6.2f}{m['overlap']:9.2f}{m['wait_share']:6.0%}"
              f"{prefetch:>12}{m['peak_rss_gb']:7.2f}")  # fmt: skip
    disk, compute, seconds = (median(first, name) for name in ("disk_s", "compute_s", "seconds"))
    print(
        f"  reference: disk {disk:.2f} s, compute {compute:.2f} s, together {seconds:.2f} s; overlapping alone could "
        f"give {(disk + compute) / max(disk, compute):.2f} times its speed"
    )


def print_prefill(routing: str, arms: dict[str, list[Row]]) -> None:
    for arm, (row,) in arms.items():
        print(
            f"{routing}, prefill of {row['tokens']}, {arm}: {row['tok_s']:.0f} tok/s | {row['gb_read']:.2f} GB read, "
            f"{row['read_over_needed']:.3f} of what its chunks need | U {row['u']:.2f} | "
            f"peak {row['peak_rss_gb']:.2f} GB"
        )
