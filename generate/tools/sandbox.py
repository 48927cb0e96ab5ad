"""execute_code: run Python code that a model wrote in an interpreter of its own, behind walls and with limits.

docs/sandbox.md lists walls and limits, and what they do not hold. Where the walls cannot be built (not on Linux, or
where the kernel lets this user make no namespaces, as in many containers) the code is refused, unless `unsafe` is set.

Unsafe, this is no security boundary. It stops accidents: endless loops, floods of output, memory leaks, processes left
behind. The code can read and write every file that the user of this engine can, and its environment, and reach the
network. On macOS memory has no limit then, and a descendant that made its own session survives.

generate/tools/sandbox_child.py is the program of the new interpreter.
"""

import contextlib
import functools
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from errors import Refused, reason, show
from generate.also_named import also_named
from generate.tools import sandbox_child as child  # imported so that its bytecode is cached

MAX_TIMEOUT = 86_400  # seconds
GRACE = 5.0  # seconds for the keeper to kill everything, before it is killed itself
BLOCK = 1 << 16
INTERPRETER = (sys.executable, "-I", "-S", "-B", "-X", "utf8")  # isolated, without installed packages
ROOT = str(Path(__file__).resolve().parents[2])
PROGRAM = f"""\
import sys
sys.path.insert(0, {ROOT!r})
from {child.__name__} import main
del sys.path[0]
main(*map(int, sys.argv[1:]))"""


@dataclass(frozen=True)
class ExecutionResult:
    """How the code ended. A stream longer than allowed is its beginning, a line that says so, and its end."""

    success: bool  # it ended in time with exit code 0
    stdout: str
    stderr: str
    error: str | None  # one line, None on success
    timeout: bool  # it was killed for using too much time
    memory_exceeded: bool  # it was killed for using too much memory, or it failed, and a MemoryError is on stderr


@also_named(maximum_memory_bytes="memory_bytes")
def execute_code(
    code: str,
    timeout: float = 5.0,
    memory_bytes: int | None = 256 << 20,
    output_bytes: int = 1 << 20,
    unsafe: bool = False,
) -> ExecutionResult:
    """Run the text `code` as a program -> ExecutionResult. Callable from any thread, by several at once.

    `timeout` is in seconds, of the clock and, rounded up and one more, of processor time for each process;
    `memory_bytes` bounds the address space of each process and what all of them and their files take, None for no
    bound; `output_bytes` is what is kept of stdout, and of stderr. `unsafe`: run it without walls where they cannot be
    built. Refused where they cannot and it is not set, and where an argument makes no sense.
    """
    check_arguments(code, timeout, memory_bytes, output_bytes)
    has_walls = not unsafe or missing_wall() is None
    run = InterpreterRun(code, timeout, memory_bytes or 0, output_bytes, has_walls)
    try:
        with contextlib.nullcontext("/") if has_walls else temporary_folder() as folder:
            run.start(folder)
    except OSError as error:  # no process or descriptor is left for it, or no folder
        raise Refused(f"programs of the model cannot be run: {reason(error)}") from None
    return run.result()


def missing_wall() -> str | None:
    """-> why the walls cannot be built here, or None."""
    try:
        try_walls()
    except OSError as error:
        return reason(error)
    return None


@functools.cache  # remembers that they can be built; an error may be that of a moment
def try_walls() -> None:
    run = InterpreterRun("", 60.0, 0, 1000, has_walls=True)
    run.start("/")
    missing = run.refusal()
    if missing is not None:
        raise OSError(missing)


def describe_walls(unsafe: bool) -> str:
    """What holds on this machine, in one line."""
    missing = missing_wall()
    if missing is None:
        return "programs see no files, network or processes of this machine and make few system calls (docs/sandbox.md)"
    if unsafe:
        return f"programs run with limits of time and memory but WITHOUT walls: UNSAFE_SANDBOX=1, {missing}"
    return f"programs are refused: {missing}; UNSAFE_SANDBOX=1 runs them without walls (docs/sandbox.md)"


def check_arguments(code: object, timeout: object, memory_bytes: object, output_bytes: object) -> None:
    if not isinstance(code, str):
        raise Refused(f"code to execute must be a text, not {type(code).__name__}")
    if not (isinstance(timeout, int | float) and 0 < timeout <= MAX_TIMEOUT):
        raise Refused(f"timeout={show(timeout)} must be a number of seconds above 0, at most {MAX_TIMEOUT}")
    if memory_bytes is not None and not (isinstance(memory_bytes, int) and 0 < memory_bytes < 1 << 63):
        raise Refused(f"memory_bytes={show(memory_bytes)} must be a number of bytes above 0, or None")
    if not (isinstance(output_bytes, int) and output_bytes > 0):
        raise Refused(f"output_bytes={show(output_bytes)} must be a number of bytes above 0")


class InterpreterRun:
    """One interpreter and what came out of it."""

    def __init__(self, code: str, timeout: float, memory_bytes: int, output_bytes: int, has_walls: bool) -> None:
        self.code = code
        self.timeout = timeout
        self.memory_bytes = memory_bytes
        self.has_walls = has_walls
        self.stdout, self.stderr = Capture(output_bytes), Capture(output_bytes)
        self.status = Capture(1000)  # lines of sandbox_child.tell
        self.in_time = False

    def start(self, folder: str) -> None:
        """Run the code to its end, `folder` being where an interpreter without walls works."""
        deadline = time.monotonic() + self.timeout
        status, status_end = os.pipe()
        limits = (self.memory_bytes, math.ceil(self.timeout) + 1)
        with open(status, "rb") as status_stream, selectors.DefaultSelector() as selector:
            try:
                process = subprocess.Popen(
                    [*INTERPRETER, "-c", PROGRAM, *map(str, (*limits, os.getpid(), status_end, int(self.has_walls)))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(status_end,),
                    cwd=folder,
                    env={"PATH": os.defpath},
                    start_new_session=True,
                )
            finally:
                os.close(status_end)
            with process:
                for stream, capture in ((process.stdout, self.stdout), (process.stderr, self.stderr)):
                    assert stream
                    selector.register(stream, selectors.EVENT_READ, capture)
                selector.register(status_stream, selectors.EVENT_READ, self.status)
                try:
                    send(process, self.code)
                    self.in_time = read_streams(selector, deadline)
                finally:  # on an interrupt of the engine too
                    if not self.in_time:
                        process.terminate()  # the keeper kills all the others, then ends
                        if not read_streams(selector, time.monotonic() + GRACE):
                            process.kill()

    def refusal(self) -> str | None:
        """Why the walls could not be built. The code was not run then."""
        return self.told("refused")

    def told(self, word: str) -> str | None:
        lines = (line.partition(" ") for line in self.status.text().splitlines())
        return next((rest for name, _, rest in lines if name == word), None)

    def result(self) -> ExecutionResult:
        missing = self.refusal()
        if missing is not None:
            raise Refused(
                f"programs of the model are not run: {missing}; UNSAFE_SANDBOX=1 runs them without walls "
                "(docs/sandbox.md)"
            )
        ended = self.told("ended")
        exit_code = -signal.SIGKILL if ended is None else os.waitstatus_to_exitcode(int(ended))
        too_much = self.told("memory") is not None
        return result_of(exit_code, self.in_time, self.timeout, self.stdout.text(), self.stderr.text(), too_much)


def send(process: "subprocess.Popen[bytes]", code: str) -> None:
    """The keeper reads all of it before it does anything else."""
    assert process.stdin
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(code.encode("utf-8", "surrogatepass"))


def result_of(
    exit_code: int, in_time: bool, timeout: float, stdout: str, stderr: str, too_much_memory: bool = False
) -> ExecutionResult:
    """`exit_code` as subprocess gives it: minus the signal for a process that was killed."""
    late = not in_time or exit_code == -signal.SIGXCPU
    success = exit_code == 0 and not late
    error = stderr.rstrip().rpartition("\n")[2].strip() or "Execution failed"
    if late:
        error = f"Execution timed out after {timeout:g} s"
    elif too_much_memory:
        error = "MemoryError: all processes and files together"
    return ExecutionResult(
        success=success,
        stdout=stdout,
        stderr=stderr,
        error=None if success else error,
        timeout=late,
        memory_exceeded=too_much_memory or (not success and "MemoryError" in stderr),
    )


class Capture:
    """One stream: all of it, or its beginning and its end once it is longer than `limit` bytes."""

    def __init__(self, limit: int):
        self.end_limit = limit // 2
        self.begin_limit = limit - self.end_limit
        self.begin, self.end, self.dropped = bytearray(), bytearray(), 0

    def add(self, block: bytes) -> None:
        room = self.begin_limit - len(self.begin)
        self.begin += block[:room]
        self.end += block[room:]
        too_many = max(0, len(self.end) - self.end_limit)
        del self.end[:too_many]
        self.dropped += too_many

    def text(self) -> str:
        cut = b"\n[%d bytes of output left out]\n" % self.dropped if self.dropped else b""
        return bytes(self.begin + cut + self.end).decode("utf-8", "replace")


def read_streams(selector: selectors.BaseSelector, deadline: float) -> bool:
    """Read until every stream is closed, which it is when the keeper has ended -> whether that was in time."""
    while selector.get_map():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        for key, _ in selector.select(left):
            block = os.read(key.fd, BLOCK)
            key.data.add(block)
            if not block:
                selector.unregister(key.fileobj)
    return True


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="execute_code_")
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: str) -> None:
    """Delete it. shutil.rmtree gives up on folders that lie a thousand deep: here each is first moved to the top."""
    folders = [folder]
    for inner in folders:  # grows meanwhile
        for entry in list_folder(inner):
            with contextlib.suppress(OSError):  # what cannot be deleted stays
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                moved = os.path.join(folder, os.urandom(8).hex())
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, moved)
                folders.append(moved)
    for inner in reversed(folders):
        with contextlib.suppress(OSError):
            os.rmdir(inner)


def list_folder(path: str) -> Iterable[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return list(entries)
    return []
