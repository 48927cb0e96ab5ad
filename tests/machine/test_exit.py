"""exit_code: whatever a program raises becomes one line and an exit code, and lost streams change neither."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from errors import Refused
from forward.finite import NonFinite
from machine import exit as exit_module
from machine.exit import Terminated, exit_code
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def signals():
    """Signal handlers and hooks are put back."""
    handlers = {number: signal.getsignal(number) for number in exit_module.SIGNALS}
    hook = threading.excepthook
    yield
    threading.excepthook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


def raising(error):
    def work():
        raise error

    return work


TORCH_ERROR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000 bytes. Error code 12 (Cannot allocate memory)\n"
)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (Refused("SNAP=x: no such folder"), 2, "SNAP=x: no such folder"),
        (PermissionError(13, "Permission denied", "/a/b"), 2, "/a/b: Permission denied"),
        (OSError("a message alone"), 2, "a message alone"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (MemoryError(), 2, "not enough memory"),
        (TORCH_ERROR, 2, "not enough memory"),
        (RuntimeError("can't start new thread"), 2, "threads"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "torch is not installed"),
        (ImportError("libgomp.so.1: cannot open shared object file"), 2, "libgomp.so.1"),
        (RuntimeError("two\nlines"), 1, r"RuntimeError: two\nlines in test_exit.py, line"),
        (NonFinite("nan"), 1, "NonFinite"),
        (RecursionError(), 1, "RecursionError"),
        (KeyError("home"), 1, "KeyError"),
        (UnicodeEncodeError("ascii", "\u00e9", 0, 1, "ordinal not in range"), 1, "UnicodeEncodeError"),
        (AssertionError(), 1, "AssertionError"),
        (psutil.AccessDenied(1), 1, "AccessDenied"),
        (subprocess.TimeoutExpired("cc", 3), 1, "TimeoutExpired"),
        (ExceptionGroup("several", [ValueError("x")]), 1, "ExceptionGroup"),
        (GeneratorExit(), 1, "GeneratorExit"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_exception_is_one_line(capsys, error, code, words):
    """A user without HOME saw a traceback of twenty lines that ended in RuntimeError."""
    assert exit_code("program", raising(error)) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("program: ") and words in line and "Traceback" not in line


def test_interrupts_have_their_codes(capsys):
    assert exit_code("program", raising(KeyboardInterrupt())) == 130 and capsys.readouterr().err == ""
    assert exit_code("program", raising(Terminated()), "it goes on") == 143
    assert capsys.readouterr().err == "program: it goes on\n"
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        assert exit_code("program", lambda number=number: signal.raise_signal(number)) == code
    assert exit_code("program", raising(BrokenPipeError(32, "Broken pipe"))) == 141
    with pytest.raises(SystemExit):
        exit_code("program", raising(SystemExit(3)))


def test_nohup_stays_in_effect():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert exit_code("program", lambda: signal.raise_signal(signal.SIGHUP) or 0) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_thread_that_fails_is_one_line(capsys):
    def work():
        thread = threading.Thread(target=raising(ValueError("bad\nday")), name="reader")
        thread.start()
        thread.join()
        return 0

    assert exit_code("program", work) == 0
    assert capsys.readouterr().err.startswith(
        r"[thread] reader ended by a fault of the program: ValueError: bad\nday in"
    )


PROGRAM = """
import os, sys
from machine.console import say, write_answer
from machine.exit import exit_code

def work():
    say("a notice")
    with open(sys.argv[1], "w") as file:
        os.write(2, b"from C")
        file.write("mine")
    say("another")
    {work}
    return 0

sys.exit(exit_code("program", work))
"""


@pytest.mark.parametrize(
    ("streams", "work", "code"),
    [
        ("2>/dev/full", "write_answer('answer')", 0),
        ("2>&-", "write_answer('answer')", 0),
        ("2>&-", "raise KeyError", 1),
        ("2>/dev/full", "raise KeyError", 1),
        ("2>/dev/full >/dev/full", "write_answer('answer')", 2),
        (">&- 2>&-", "print('answer')", 2),
        ("<&- >&- 2>&-", "pass", 0),
        (">&-", "pass", 0),
        (">&-", "write_answer('answer')", 2),
        (">/dev/full", "print('answer')", 2),
    ],
)
def test_lost_streams(tmp_path, streams, work, code):
    """2>/dev/full ended a run with 1 and no answer, >&- with a traceback. With 2>&- notices came to stdout, and what C
    writes to stderr came into whichever file the run opened first."""
    (tmp_path / "program.py").write_text(PROGRAM.format(work=work))
    command = f'"$@" {streams}'
    arguments = ["sh", "-c", command, "sh", sys.executable, str(tmp_path / "program.py"), str(tmp_path / "file")]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(arguments, env=environ, capture_output=True, timeout=60)
    assert process.returncode == code
    assert process.stdout == (b"answer" if "answer" in work and code == 0 else b"")
    assert (tmp_path / "file").read_text() == "mine"
    assert b"Traceback" not in process.stderr and b"Exception" not in process.stderr
    if "2>" not in streams and code:
        assert process.stderr.splitlines()[-1].startswith(b"program: ")


STOPPED_WHILE_IMPORTING = """
import os, runpy, signal, sys

NUMBER = int(sys.argv[1])

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":
            try:  # as C code and callbacks of weak references do
                os.kill(os.getpid(), NUMBER)
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
del sys.argv[1:]
runpy.run_path("colibri.py", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_torch_is_imported_is_not_lost(number):
    """Of 40 servers that got SIGTERM in their first second six went on serving: imports drop what a handler raises."""
    command = [sys.executable, "-c", STOPPED_WHILE_IMPORTING, str(number.value)]
    process = subprocess.run(command, cwd=ROOT, env=os.environ | {"TF": "1"}, capture_output=True, timeout=60)
    assert (process.returncode, process.stderr) == (-number, b"")


ENDING = """
import atexit, os, signal, sys
from machine.exit import exit_code

atexit.register(lambda: (os.kill(os.getpid(), signal.{name}), print("went on")))
exit_code("program", lambda: 0)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_the_interpreter_ends_shows_no_traceback(name):
    """Ctrl-C just after the end of convert showed one of what torch does then."""
    program = [sys.executable, "-c", ENDING.format(name=name)]
    process = subprocess.run(program, cwd=ROOT, capture_output=True, timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (-getattr(signal, name), b"", b"")
