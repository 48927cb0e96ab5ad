"""Lines and progress bars on stderr: notices, plan, prefill progress. Answers on stdout, perhaps the same terminal.

A bar on a terminal, plain lines otherwise and with TERM=dumb. Nothing is colored, so NO_COLOR changes nothing. All that
is written goes through here, so that a notice wipes a bar, and never a line of the answer. A stderr that cannot be
written is no error: a notice must not end the work that it is about.
"""

import fcntl
import os
import stat
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import TextIO

from errors import Refused

PREFILL_EVERY = 4  # layers between two [prefill] lines
BAR_WIDTH = 24
MIN_BAR_WIDTH = 4
WIPE = "\r\x1b[K"  # back to the start of the line, and clear it


class Terminal:
    """Properties of stderr, set once at the start of the program (set_up_terminal), and what its last line holds."""

    has_bar = False  # it can show a bar
    is_shared = False  # the answer comes to the same place: from here, or from a program behind a pipe (tee)
    is_bar_shown = False
    is_answer_open = False  # its last line is an unfinished line of the answer


LOCK = threading.RLock()  # notices come from several threads


def set_up_terminal(is_dumb: bool) -> None:
    """Find out where stderr and stdout lead. is_dumb: the terminal cannot move its cursor."""
    Terminal.has_bar = is_terminal(sys.stderr) and not is_dumb
    to_terminals = is_terminal(sys.stderr) and (is_terminal(sys.stdout) or is_pipe(sys.stdout))
    Terminal.is_shared = to_terminals or is_same_file(sys.stdout, sys.stderr)
    Terminal.is_bar_shown = Terminal.is_answer_open = False


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def is_pipe(stream: TextIO | None) -> bool:
    with suppress(OSError, ValueError, AttributeError):  # a stream without a file, or none
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)  # type: ignore[union-attr]
    return False


def is_same_file(stream: TextIO | None, other: TextIO | None) -> bool:
    """True for 2>&1."""
    with suppress(OSError, ValueError, AttributeError):
        return os.path.sameopenfile(stream.fileno(), other.fileno())  # type: ignore[union-attr]
    return False


def check_stdout() -> None:
    """Refuse a stdout that was closed before the program began, before a model is loaded for an answer that would go
    there (machine/exit.py opened it for reading alone)."""
    with suppress(OSError, ValueError):  # a stream without a file
        if fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise Refused("stdout is closed, and the answer goes there; redirect it to a file or to /dev/null")


def say(line: str) -> None:
    """Print one line to stderr: in place of a bar, below a line of the answer."""
    with LOCK:
        write_notice(start_of_line() + line + "\n")


def end_line() -> None:
    """Bring the cursor to the start of an empty line."""
    with LOCK:
        if start := start_of_line():
            write_notice(start)


def start_of_line() -> str:
    """-> what brings the cursor of stderr to the start of an empty line."""
    start = WIPE if Terminal.is_bar_shown else "\n" if Terminal.is_answer_open else ""
    Terminal.is_bar_shown = Terminal.is_answer_open = False
    return start


def show_sign(text: str) -> None:
    """Print a sign for input, after which the cursor stays, to stderr."""
    with LOCK:
        write_notice(start_of_line() + text)


def leave_line_open() -> None:
    """The last line holds what a user typed or a sign for input: the next notice comes below it."""
    Terminal.is_answer_open = is_terminal(sys.stderr) and not Terminal.is_bar_shown


def write_answer(text: str) -> None:
    """Write to stdout as UTF-8, whatever the locale says, at once."""
    if text:
        with LOCK:
            if Terminal.is_shared:
                if Terminal.is_bar_shown:
                    end_line()
                Terminal.is_answer_open = not text.endswith("\n")
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()


def write_notice(text: str) -> None:
    """Write to stderr; once that fails, this and what follows is dropped."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except BlockingIOError:  # a pipe that does not block, and is full now
        pass
    except (OSError, ValueError, AttributeError):  # a full disk, a reader that went away; closed; None
        discard(sys.stderr)


def discard(stream: TextIO | None) -> None:
    """Lead a stream that failed to /dev/null: what it still holds would fail again when the interpreter ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), stream.fileno())  # type: ignore[union-attr]


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
    """Draw a bar in the last line of the terminal, with the time left; wiped when share reaches 1. It is no wider than
    the terminal: what wraps cannot be wiped."""
    left = f"{seconds * (1 - share) / share:.0f} s left" if share and seconds > 1 else ""
    details = " | ".join(filter(None, (detail, left)))
    room = terminal_columns() - 1
    width = min(BAR_WIDTH, room - len(label) - len(details) - 2)
    filled = int(width * share)
    bar = f"{'#' * filled}{'.' * (width - filled)}" if width >= MIN_BAR_WIDTH else ""
    text = " ".join(filter(None, (label, bar, details)))[:room]
    with LOCK:
        if share >= 1:
            end_line()
        elif not Terminal.is_answer_open:
            write_notice(f"\r{text}\x1b[K")
            Terminal.is_bar_shown = True


def terminal_columns() -> int:
    """Of the terminal behind stderr; 80 where it does not say."""
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80
