"""For dev/quality.py: its tables, in Markdown."""

from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]  # of the tables


def table(*rows: Sequence[str]) -> None:
    """Print Markdown, the head first; all columns but the first are right-aligned."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    print(lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:], "", sep="\n")


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def weights_row(line: Line) -> Sequence[str]:
    return (
        line["format"],
        f"{line['bits']:.2f}",
        f"{line['bytes'] / 1e6:.1f}",
        f"{line['weight_error']:.6f}",
        f"{line['perplexity']:.3f}",
        f"{line['kl']:.6f}",
        percent(line["same_argmax"]),
    )


def activations_row(name: str, rounded: dict[str, Any]) -> Sequence[str]:
    error = rounded["kl_more_error"]
    return (
        name,
        f"{rounded['perplexity']:.3f}",
        f"{rounded['kl']:.6f}",
        f"{rounded['kl_more']:+.6f}" + (f" ± {error:.6f}" if error else ""),
        percent(rounded["kl_more_of_base"]),
        f"{rounded['kl_alone']:.6f}",
        percent(rounded["kl_alone_of_base"]),
    )


def kv_row(line: Line) -> Sequence[str]:
    return (
        line["kv_dtype"],
        f"{line['position_bytes']:,}",
        f"{line['perplexity']:.3f}",
        f"{line['kl']:.6f}",
        percent(line["same_argmax"]),
    )


def print_tables(lines: list[Line], kv_lines: list[Line], base: str) -> None:
    """lines: of the weight formats. kv_lines: of KV_DTYPE. base: the format whose KL is the unit of shares."""
    if lines:
        print_formats(lines, base)
    if kv_lines:
        head = ("KV_DTYPE", "bytes a position", "perplexity", "KL from f32, nats a token", "same best token")
        table(head, *map(kv_row, kv_lines))


def print_formats(lines: list[Line], base: str) -> None:
    head = ("weights", "bits a weight", "MB", "squared error", "perplexity", "KL, nats a token", "same best token")
    table(head, *map(weights_row, lines))
    share = f"of {base}'s"
    head = ("activations to 8 bits", "perplexity", "KL", "more than exact", share, "KL from exact", share)
    table(head, *(activations_row(line["format"], line["rounded"]) for line in lines if line["rounded"]))
