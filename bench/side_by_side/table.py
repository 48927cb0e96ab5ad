"""The numbers of bench/peers.py: medians, ranges, ratios within rounds, as Markdown and as a plot."""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.side_by_side.arms import OURS, SpeedTest

COLUMNS = (
    "round arm case n_prompt n_gen n_depth tok_s hit_rate memory_gb_s load_average kernels threads commit model "
    "processor time"
).split()
Row = dict[str, Any]  # a line of the CSV


def test_of(row: Row) -> SpeedTest:
    return SpeedTest(row["case"], int(row["n_prompt"]), int(row["n_gen"]), int(row["n_depth"]))


def spread(values: Iterable[float], digits: int | None = None) -> str:
    """Median and range; of one value that alone. Digits behind the point, or about three in all."""
    known = sorted(values)
    if not known:
        return ""
    if digits is None:
        digits = sum(known[-1] < bound for bound in (100, 10))
    middle, *ends = (f"{value:.{digits}f}" for value in (statistics.median(known), known[0], known[-1]))
    return middle if len(known) == 1 else f"{middle} ({ends[0]}-{ends[1]})"


def speeds(rows: list[Row], test: SpeedTest, arm: str) -> dict[str, float]:
    """round -> tok/s."""
    return {row["round"]: float(row["tok_s"]) for row in rows if row["arm"] == arm and test_of(row) == test}


def ratios(rows: list[Row], test: SpeedTest, arm: str) -> list[float]:
    """Our speed over that of the arm, for each round that has both."""
    ours, theirs = speeds(rows, test, OURS), speeds(rows, test, arm)
    return [ours[number] / theirs[number] for number in ours if number in theirs]


def names(rows: list[Row]) -> list[str]:
    """The arms, ours first."""
    return sorted({row["arm"] for row in rows}, key=lambda arm: (arm != OURS, arm))


def print_tables(rows: list[Row]) -> None:
    """Where it was measured, then tok/s and our ratio to each peer."""
    if not rows:
        return
    for title, column in (
        ("model", "model"), ("processor", "processor"), ("kernels", "kernels"), ("threads", "threads"),
    ):  # fmt: skip
        print(f"{title}: {', '.join(dict.fromkeys(str(row[column]) for row in rows if row[column]))}")
    commits = {f"{row['arm']} {row['commit']}": None for row in rows if row["commit"]}
    print(f"commits: {'; '.join(commits)}")
    print(f"memory, plain read: {spread(float(row['memory_gb_s']) for row in rows)} GB/s")
    print(f"load average before the runs: {spread(float(row['load_average']) for row in rows)}\n")
    arms = names(rows)
    print("| tok/s, median (range) |" + "".join(f" {arm} |" for arm in arms))
    print("|---|" + "---:|" * len(arms))
    for test in sorted({test_of(row) for row in rows}):
        cells = []
        for arm in arms:
            cell = spread(speeds(rows, test, arm).values())
            ratio = spread(ratios(rows, test, arm), 2)
            cells.append(f"{cell}, x {ratio}" if cell and ratio and arm != OURS else cell)
        print(f"| {test} | {' | '.join(cells)} |")
    if len(arms) > 1:
        print(f"\nx: {OURS} over that engine, within rounds")


def plot(pyplot: Any, path: Path, rows: list[Row]) -> None:
    """tok/s over context and over prompt length, all in memory: medians, with the range of the rounds."""
    panels: list[tuple[str, str, Callable[[SpeedTest], int | None]]] = [
        ("decode", "positions before", lambda test: test.depth if test.gen else None),
        ("prefill", "tokens of the prompt", lambda test: test.prompt if test.prompt and not test.depth else None),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False, layout="constrained")
    warm = [row for row in rows if row["case"] == "warm"]
    for (title, label, place), panel in zip(panels, axes[0], strict=True):
        for arm in names(warm):
            found: dict[int, list[float]] = {}
            for row in warm:
                at = place(test_of(row))
                if row["arm"] == arm and at is not None:
                    found.setdefault(at, []).append(float(row["tok_s"]))
            if not found:
                continue
            places = sorted(found)
            middle = [statistics.median(found[at]) for at in places]
            below = [value - min(found[at]) for at, value in zip(places, middle, strict=True)]
            above = [max(found[at]) - value for at, value in zip(places, middle, strict=True)]
            panel.errorbar(places, middle, [below, above], marker="o", capsize=3, label=arm)
        ticks = sorted({at for row in warm if (at := place(test_of(row))) is not None})
        panel.set_xscale("symlog", base=2, linthresh=256)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.set_xticks([], minor=True)
        panel.set(title=title, xlabel=label, ylabel="tok/s")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
