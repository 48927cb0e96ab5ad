"""exit_code: run a program to its exit code, with one line on stderr for an error that ends it."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from errors import Refused


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def exit_code(program: str, work: Callable[[], int], interrupted: str = "") -> int:
    """-> the exit code of `work`, or that of the error that ended it, with a line on stderr that `program` begins;
    an interrupt has one where `interrupted` gives it."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        code = work()
        sys.stdout.flush()  # here a failure can still be reported
        return code
    except Refused as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        if interrupted:
            print(f"\n{program}: {interrupted}", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    except OSError as error:
        # A folder without permission, a name too long, a full disk. Without a name it may be stdout that failed, and
        # flushing what is buffered would fail again when the interpreter exits.
        if not error.filename:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {Refused(where + (error.strerror or str(error)))}", file=sys.stderr)
        return 2
