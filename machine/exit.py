"""exit_code: run a program to its exit code, with one line on stderr for an error that ends it."""

import atexit
import io
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from errors import Refused, reason
from machine.console import discard, end_line, is_terminal, leave_line_open, say
from machine.interpreter import broken_package, missing_package

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # the terminal is closed: handled alike, so that nothing is left behind
NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # of torch's allocators
SAME_SECONDS = 1.0
HELD = (signal.SIGINT, *SIGNALS)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled as Ctrl-C is."""

    number = signal.SIGTERM


class Terminator:
    """The handler that raises Terminated. `timeout` sends its signal twice at once: the second must not end what the
    first made the program tidy up."""

    def __init__(self) -> None:
        self.last = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before, self.last = self.last, time.monotonic()
        if self.last - before > SAME_SECONDS:
            error = Terminated()
            error.number = signal.Signals(number)
            raise error


def exit_code(program: str, work: Callable[[], int], interrupted: str | Callable[[], str] = "") -> int:
    """-> the exit code of `work`, or that of the error that ended it, with a line on stderr that `program` begins;
    an interrupt has one where `interrupted` is or gives it. No exception leaves it but SystemExit."""
    hook = threading.excepthook
    try:
        open_streams()
        threading.excepthook = say_thread_error
        terminator = Terminator()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, terminator)
        result = work()
        sys.stdout.flush()  # here a failure can still be reported
        return result
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        code, line = explain(error)
        if isinstance(error, KeyboardInterrupt):
            line = interrupted if isinstance(interrupted, str) else interrupted()
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Terminated) and is_terminal(sys.stderr):
            leave_line_open()  # the terminal shows ^C
        if line:
            say(f"{program}: {Refused(line)}")
        return code
    finally:
        end_line()
        flush_stdout()
        threading.excepthook = hook
        atexit.register(end_by_signals)  # called before what packages registered


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Ctrl-C and the signals that end a program go to `handler` while the block runs."""
    if threading.current_thread() is not threading.main_thread():  # it alone has handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in HELD}
    before = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each if each is not None else signal.SIG_DFL)


def end_by_signals() -> None:
    """Let signals end an interpreter that is ending anyway, without a traceback of what it tidies up."""
    for number in HELD:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Hold these signals until the block, which tidies up, is done."""
    held: list[int] = []
    with handled_by(lambda number, frame: held.append(number)):
        yield
    if held:
        signal.raise_signal(held[0])


def explain(error: BaseException) -> tuple[int, str]:
    """-> (exit code, the line that says why; empty: none)."""
    match error:
        case Refused():
            return 2, str(error)
        case KeyboardInterrupt():
            return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT), ""
        case BrokenPipeError() if not error.filename:
            return 141, ""
        case OSError():  # a folder without permission, a name too long, a full disk
            where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
            return 2, where + (error.strerror or reason(error))
        case MemoryError():
            return 2, "there is not enough memory; lower RAM_GB or CTX, or free some"
        case ModuleNotFoundError() if error.name:
            return 2, missing_package(error.name)
        case ImportError():
            return 2, broken_package(error)
        case RuntimeError() if any(words in str(error) for words in NO_MEMORY):
            return 2, "there is not enough memory; lower RAM_GB or CTX, or free some"
        case RuntimeError() if "start new thread" in str(error):
            return 2, "no more threads may be started here; raise the limit (ulimit -u, or pids.max of the cgroup)"
    if sys.flags.dev_mode:
        traceback.print_exception(error)
    return 1, f"a fault of the program: {describe_fault(error)}; please report it, with what python -X dev shows"


def describe_fault(error: BaseException) -> str:
    """The class, message and place of an exception that should not have come up."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""
    message = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{message}{place}"


def say_thread_error(args: threading.ExceptHookArgs) -> None:
    """Print an exception that ended a thread in one line."""
    if args.exc_value is not None:
        name = args.thread.name if args.thread else "?"
        say(f"[thread] {name} ended by a fault of the program: {Refused(describe_fault(args.exc_value))}")


def flush_stdout() -> None:
    """Flush what is left; it is lost where that fails, and would fail again when the interpreter ends."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        discard(sys.stdout)


def open_streams() -> None:
    """Give a program that was started with closed streams (2>&-) /dev/null in their places: a file opened later would
    take the number of one, and notices would be written into it. stdout then refuses what is written: an answer must
    not vanish silently. What a locale's encoding lacks is written escaped."""
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free: that of the stream
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
