"""What a run says on stderr: notices, plan, prefill progress. stdout carries the answer alone.

A bar on a terminal, plain lines otherwise and with TERM=dumb. Nothing is coloured, so NO_COLOR changes nothing.
"""

import sys
import time
import warnings

PREFILL_EVERY = 4  # layers between two [prefill] lines
BAR_WIDTH = 24
WIPE = "\r\x1b[K"  # back to the start of the line, and clear it


class Terminal:
    """What stderr is: set once by the door, which knows the environment."""

    has_bar = False  # it can show a bar
    is_shared = False  # it is the terminal that also shows the answer


def say(line):
    """One line to stderr, clear of a bar that may be standing there."""
    print((WIPE if Terminal.has_bar else "") + line, file=sys.stderr, flush=True)


def say_warnings():
    """A warning of the engine becomes one line, the first of its kind alone: more would bury the answer."""
    said = set()

    def show(message, category, *rest):
        if category not in said:
            said.add(category)
            say(f"[warning] {message}")

    warnings.showwarning = show


def announce(opened):
    """What will be loaded and how: the first lines of every mode."""
    config = opened.config
    say(
        f"[snapshot] {opened.folder.resolve().name}: {config.model_type}, {config.num_layers} layers, "
        f"{config.num_experts} experts top-{config.num_active_experts}"
    )
    for line in (*opened.plan.lines(), *opened.notices):
        say(line)


class PrefillProgress:
    """Progress callback of a prefill of `num_rows` in all: a bar on a terminal, else every fourth layer and the last of
    each chunk."""

    def __init__(self, num_rows):
        self.num_rows, self.done, self.started = num_rows, 0, time.perf_counter()

    def __call__(self, layer, num_layers, rows):
        line = f"[prefill] layer {layer}/{num_layers} | {rows} tokens"
        share = min(1.0, (self.done + rows * layer / num_layers) / self.num_rows)
        self.done += rows if layer == num_layers else 0
        if Terminal.has_bar:
            show_progress(line, share, time.perf_counter() - self.started)
        elif layer % PREFILL_EVERY == 0 or layer == num_layers:
            say(line)


def show_progress(what, share, seconds, more=""):
    """A bar that stands in the last line of the terminal, with the time left; wiped when all is done."""
    filled = int(BAR_WIDTH * share)
    left = f"{seconds * (1 - share) / share:.0f} s left" if share and seconds > 1 else ""
    text = f"\r{what} {'#' * filled}{'.' * (BAR_WIDTH - filled)} {' | '.join(filter(None, (more, left)))}\x1b[K"
    print(text if share < 1 else WIPE, end="", file=sys.stderr, flush=True)
