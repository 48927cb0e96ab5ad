"""Lines and progress bars on stderr: notices, plan, prefill progress. stdout is for the answer alone.

A bar on a terminal, plain lines otherwise and with TERM=dumb. Nothing is colored, so NO_COLOR changes nothing.
"""

import sys
import time
import warnings

PREFILL_EVERY = 4  # layers between two [prefill] lines
BAR_WIDTH = 24
WIPE = "\r\x1b[K"  # back to the start of the line, and clear it


class Terminal:
    """Properties of stderr, set once at the start of the program (modes/run.py)."""

    has_bar = False  # it can show a bar
    is_shared = False  # it is the terminal that also shows the answer


def say(line: str) -> None:
    """Print one line to stderr, in place of a bar that may be there."""
    print((WIPE if Terminal.has_bar else "") + line, file=sys.stderr, flush=True)


def say_warnings() -> None:
    """Print warnings as one line each, and only the first of a kind, so that they cannot bury the answer."""
    shown = set()

    def show(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
        if category not in shown:
            shown.add(category)
            say(f"[warning] {message}")

    warnings.showwarning = show


class PrefillProgress:
    """Progress callback for a prefill of `num_rows` token rows: a bar on a terminal, otherwise a line for every fourth
    layer and the last of each chunk."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_done = 0
        self.started = time.perf_counter()

    def __call__(self, layer: int, num_layers: int, rows: int) -> None:
        line = f"[prefill] layer {layer}/{num_layers} | {rows} tokens"
        share = min(1.0, (self.num_done + rows * layer / num_layers) / self.num_rows)
        if layer == num_layers:
            self.num_done += rows
        if Terminal.has_bar:
            show_bar(line, share, time.perf_counter() - self.started)
        elif layer % PREFILL_EVERY == 0 or layer == num_layers:
            say(line)


def show_bar(label: str, share: float, seconds: float, detail: str = "") -> None:
    """Draw a bar in the last line of the terminal, with the time left; wiped when share reaches 1."""
    filled = int(BAR_WIDTH * share)
    left = f"{seconds * (1 - share) / share:.0f} s left" if share and seconds > 1 else ""
    bar = f"{'#' * filled}{'.' * (BAR_WIDTH - filled)}"
    text = f"\r{label} {bar} {' | '.join(filter(None, (detail, left)))}\x1b[K"
    print(text if share < 1 else WIPE, end="", file=sys.stderr, flush=True)
