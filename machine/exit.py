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
    """-> the exit code of `work`, or that of the error that ended it; `program` begins the line on stderr.

    interrupted: the line for an interrupt, by default none.
    """
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
    except BrokenPipeError:
        discard_stdout()
        return 141
    except OSError as error:
        # A folder without permission, a name too long, a full disk; that of stdout has no name.
        if not error.filename:
            discard_stdout()
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {Refused(where + (error.strerror or str(error)))}", file=sys.stderr)
        return 2


def discard_stdout() -> None:
    """Point stdout at /dev/null: flushing what is buffered would fail again when the interpreter exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
