"""How a program ends: an exit code for each way, and one line on stderr for what ended it early."""

import os
import signal
import sys

from errors import Refused


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a run as Ctrl-C does."""


def terminate(*_):
    raise Terminated


def exit_code(name, work):
    """Do `work` -> its exit code; what ends it early is said in one line that begins with `name`."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        code = work()
        sys.stdout.flush()  # while a failure can still be told
        return code
    except Refused as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return 143 if isinstance(error, Terminated) else 130
    except BrokenPipeError:
        drop_stdout()
        return 141
    except OSError as error:
        # A folder that may not be entered, a name too long, a full disk behind stdout.
        drop_stdout()
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {Refused(where + (error.strerror or str(error)))}", file=sys.stderr)
        return 2


def drop_stdout():
    """What is still buffered has nowhere to go: point stdout at nothing, so that the interpreter does not complain
    about it on the way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
