"""What a run says on stderr: notices, plan, prefill progress. stdout carries the answer alone.

A bar on a terminal, plain lines otherwise and with TERM=dumb. Nothing is coloured, so NO_COLOR changes nothing.
"""

import sys
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


def prefill_progress(layer, num_layers, rows):
    """Progress callback of a prefill: a bar on a terminal, else every fourth layer and the last."""
    line = f"[prefill] layer {layer}/{num_layers} | {rows} tokens"
    if Terminal.has_bar:
        filled = BAR_WIDTH * layer // num_layers
        end = WIPE if layer == num_layers else ""
        print(f"\r{line} {'#' * filled}{'.' * (BAR_WIDTH - filled)} {end}", end="", file=sys.stderr, flush=True)
    elif layer % PREFILL_EVERY == 0 or layer == num_layers:
        say(line)
