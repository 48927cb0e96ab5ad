"""execute_code: run Python code that a model wrote in an interpreter of its own, with limits.

This is NOT a security boundary. It stops accidents: endless loops, floods of output, memory leaks, processes left
behind, a deleted working folder. Hostile code can
- read and write every file that the user running this engine can; only the working folder is a temporary one;
- get back every function that is removed here, through ctypes, posix or gc; no filter of system calls is set;
- fill the drive with many files (each one is limited) and use the memory limit once per process;
- attack the kernel, or measure what others do on the machine.
For code that nobody vouches for, put the whole engine into a container or a virtual machine.

What holds where:
- everywhere: time, output, size of a file, no core dump, PATH alone in the environment (Python may add LC_CTYPE), no
  stdin, none of the packages installed beside Python, a session of its own that is killed as a whole;
- Linux: memory, no new privileges, no capabilities, and all descendants are killed, also those with a session of their
  own;
- Linux where the kernel lets this user make namespaces (many containers do not): no network, other processes cannot be
  signalled, and at most 64 processes and threads. The last does not hold for root, whom the kernel never counts;
- macOS: no limit of memory, network stays open, and a descendant that made its own session survives.

generate/tools/sandbox_child.py is the script that the new interpreter runs.
"""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from errors import Refused, show
from generate.tools import sandbox_child

MAX_TIMEOUT = 86_400  # seconds
GRACE = 5.0  # seconds for the keeper to kill everything, before it is killed itself
BLOCK = 1 << 16
INTERPRETER = (sys.executable, "-I", "-S", "-B", "-X", "utf8")  # isolated, without installed packages


@dataclass(frozen=True)
class ExecutionResult:
    """How the code ended. A stream longer than allowed is its beginning, a line that says so, and its end."""

    success: bool  # it ended in time with exit code 0
    stdout: str
    stderr: str
    error: str | None  # one line, None on success
    timeout: bool  # it was killed for using too much time
    memory_exceeded: bool  # it failed, and a MemoryError is on stderr


def execute_code(
    code: str, timeout: float = 5.0, memory_bytes: int | None = 256 << 20, output_bytes: int = 1 << 20
) -> ExecutionResult:
    """Run the text `code` as a program -> ExecutionResult. Callable from any thread, by several at once.

    `timeout` is in seconds, of the clock and, rounded up and one more, of processor time for each process;
    `memory_bytes` bounds the address space of each process, None for no bound; `output_bytes` is what is kept of
    stdout, and of stderr. Refused where an argument makes no sense. See the module for what this does not protect from.
    """
    check_arguments(code, timeout, memory_bytes, output_bytes)
    stdout, stderr = Capture(output_bytes), Capture(output_bytes)
    folder = tempfile.mkdtemp(prefix="execute_code_")
    try:
        Path(folder, sandbox_child.CODE_FILE).write_bytes(code.encode("utf-8", "surrogatepass"))
        exit_code, in_time = run_interpreter(folder, timeout, memory_bytes, stdout, stderr)
    finally:
        remove_folder(folder)
    return result_of(exit_code, in_time, timeout, stdout.text(), stderr.text())


def check_arguments(code: object, timeout: object, memory_bytes: object, output_bytes: object) -> None:
    if not isinstance(code, str):
        raise Refused(f"code to execute must be a text, not {type(code).__name__}")
    if not (isinstance(timeout, int | float) and 0 < timeout <= MAX_TIMEOUT):
        raise Refused(f"timeout={show(timeout)} must be a number of seconds above 0, at most {MAX_TIMEOUT}")
    if memory_bytes is not None and not (isinstance(memory_bytes, int) and 0 < memory_bytes < 1 << 63):
        raise Refused(f"memory_bytes={show(memory_bytes)} must be a number of bytes above 0, or None")
    if not (isinstance(output_bytes, int) and output_bytes > 0):
        raise Refused(f"output_bytes={show(output_bytes)} must be a number of bytes above 0")


def result_of(exit_code: int, in_time: bool, timeout: float, stdout: str, stderr: str) -> ExecutionResult:
    """`exit_code` as subprocess gives it: minus the signal for a process that was killed."""
    late = not in_time or exit_code == -signal.SIGXCPU
    success = exit_code == 0 and not late
    last = stderr.rstrip().rpartition("\n")[2].strip()
    error = f"Execution timed out after {timeout:g} s" if late else last or "Execution failed"
    return ExecutionResult(
        success=success,
        stdout=stdout,
        stderr=stderr,
        error=None if success else error,
        timeout=late,
        memory_exceeded=not success and "MemoryError" in stderr,
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


def run_interpreter(
    folder: str, timeout: float, memory_bytes: int | None, stdout: Capture, stderr: Capture
) -> tuple[int, bool]:
    """Run the code file in `folder`, output into the Captures -> exit code, and whether it ended in time."""
    deadline = time.monotonic() + timeout
    process = subprocess.Popen(
        [*INTERPRETER, sandbox_child.__file__, str(memory_bytes or 0), str(math.ceil(timeout) + 1)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={"PATH": os.defpath},
        start_new_session=True,
    )
    assert process.stdout and process.stderr
    with process, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, stdout)
        selector.register(process.stderr, selectors.EVENT_READ, stderr)
        in_time = False
        try:
            in_time = read_streams(selector, deadline)
        finally:  # on an interrupt of the engine too
            if not in_time:
                process.terminate()  # the keeper kills all the others, then ends
                if not read_streams(selector, time.monotonic() + GRACE):
                    process.kill()
    return process.returncode, in_time


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
