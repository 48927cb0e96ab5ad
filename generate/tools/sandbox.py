"""Run Python code of a model in an interpreter of its own, with limits: execute_code.

This is NOT a security boundary. It stops accidents: endless loops, floods of output, memory that runs away, processes
left behind, a deleted working folder. Code that means harm can
- read and write every file that the user running this engine can; only the working folder is a temporary one;
- get back every function that is taken away here, through ctypes, posix or gc; no filter of system calls is set;
- fill the drive with many files (each one is limited) and use the memory limit once per process;
- attack the kernel, or time what others do on the machine.
For code that nobody vouches for, put the whole engine into a container or a virtual machine.

What holds where:
- everywhere: time, output, size of a file, no core dump, PATH alone in the environment (Python may add LC_CTYPE), no
  stdin, none of the packages installed beside Python, a session of its own that is killed as a whole;
- Linux: memory, no new privileges, no capabilities, and all descendants are killed, those with a session of their own
  too;
- Linux where the kernel lets this user make namespaces (many containers do not): no network, other processes cannot be
  signalled, and at most 64 processes and threads. The last does not hold for root, whom the kernel never counts;
- macOS: no limit of memory, network stays open, and a descendant that made its own session survives.

The module is also the script that the new interpreter runs. There, a keeper process makes the namespaces and starts
two children: a first process of the namespace, with which everything in it dies, and the one that runs the code. All
limits are set in that one, before it sees the code, so nothing has to run between fork and exec of the engine, which
would not be safe while it has threads.
"""

import contextlib
import ctypes
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

LINUX = sys.platform == "linux"

FILE_BYTES = 64 << 20  # of each file that the code writes
MAX_TIMEOUT = 86_400  # seconds
PROCESSES = 64  # threads count
GRACE = 5.0  # seconds for the keeper to kill everything, before it is killed itself
BLOCK = 1 << 16

CODE_FILE = "code"

# Names the code finds set to None: what deletes, kills or leaves the working folder by mistake.
TAKEN = {
    "os": "kill killpg system putenv fork forkpty posix_spawn posix_spawnp remove removedirs unlink rmdir rename "
    "renames replace truncate chdir fchdir chroot chmod fchmod lchmod chown fchown lchown chflags lchflags setuid",
    "shutil": "rmtree move chown",
    "subprocess": "Popen",
}
BLOCKED_IMPORTS = "ipdb joblib psutil resource tkinter"


@dataclass(frozen=True)
class ExecutionResult:
    """What became of the code. A stream longer than allowed is its beginning, a line that says so, and its end."""

    success: bool  # it ended in time with exit code 0
    stdout: str
    stderr: str
    error: str | None  # one line, None on success
    timeout: bool  # it was killed for using too much time
    memory_exceeded: bool  # it failed, and a MemoryError is on stderr


def execute_code(code, timeout=5.0, memory_bytes=256 << 20, output_bytes=1 << 20):
    """Run the text `code` as a program -> ExecutionResult. Callable from any thread, by several at once.

    `timeout` is in seconds, of the clock and, rounded up and one more, of processor time for each process;
    `memory_bytes` bounds the address space of each process, None for no bound; `output_bytes` is what is kept of
    stdout, and of stderr. Refused where an argument makes no sense. See the module for what this does not protect from.
    """
    check_arguments(code, timeout, memory_bytes, output_bytes)
    stdout, stderr = Capture(output_bytes), Capture(output_bytes)
    folder = tempfile.mkdtemp(prefix="execute_code_")
    try:
        Path(folder, CODE_FILE).write_bytes(code.encode("utf-8", "surrogatepass"))
        exit_code, in_time = run_interpreter(folder, timeout, memory_bytes, stdout, stderr)
    finally:
        remove_folder(folder)
    return result_of(exit_code, in_time, timeout, stdout.text(), stderr.text())


def check_arguments(code, timeout, memory_bytes, output_bytes):
    from errors import Refused, show  # here, for the new interpreter cannot import it

    if not isinstance(code, str):
        raise Refused(f"code to execute must be a text, not {type(code).__name__}")
    if not (isinstance(timeout, int | float) and 0 < timeout <= MAX_TIMEOUT):
        raise Refused(f"timeout={show(timeout)} must be a number of seconds above 0, at most {MAX_TIMEOUT}")
    if memory_bytes is not None and not (isinstance(memory_bytes, int) and 0 < memory_bytes < 1 << 63):
        raise Refused(f"memory_bytes={show(memory_bytes)} must be a number of bytes above 0, or None")
    if not (isinstance(output_bytes, int) and output_bytes > 0):
        raise Refused(f"output_bytes={show(output_bytes)} must be a number of bytes above 0")


def result_of(exit_code, in_time, timeout, stdout, stderr):
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

    def __init__(self, limit):
        self.end_limit = limit // 2
        self.begin_limit = limit - self.end_limit
        self.begin, self.end, self.dropped = bytearray(), bytearray(), 0

    def add(self, block):
        room = self.begin_limit - len(self.begin)
        self.begin += block[:room]
        self.end += block[room:]
        too_many = max(0, len(self.end) - self.end_limit)
        del self.end[:too_many]
        self.dropped += too_many

    def text(self):
        cut = b"\n[%d bytes of output left out]\n" % self.dropped if self.dropped else b""
        return bytes(self.begin + cut + self.end).decode("utf-8", "replace")


def run_interpreter(folder, timeout, memory_bytes, stdout, stderr):
    """Run the code file in `folder`, output into the Captures -> exit code, and whether it ended in time."""
    deadline = time.monotonic() + timeout
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", __file__, str(memory_bytes or 0), str(math.ceil(timeout) + 1)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={"PATH": os.defpath},
        start_new_session=True,
    )
    with process, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, stdout)
        selector.register(process.stderr, selectors.EVENT_READ, stderr)
        in_time = False
        try:
            in_time = drain(selector, deadline)
        finally:  # on an interrupt of the engine too
            if not in_time:
                process.terminate()  # the keeper kills all the others, then ends
                if not drain(selector, time.monotonic() + GRACE):
                    process.kill()
    return process.returncode, in_time


def drain(selector, deadline):
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


def remove_folder(folder):
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


def list_folder(path):
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return list(entries)
    return []


# The rest runs in the new interpreter.


def main(memory_bytes, seconds):
    """The keeper. Only the runner, the process that is to run the code, comes out of start_runner."""
    code = read_code()
    alone = start_runner(seconds)
    give_up_privileges()
    set_limits(memory_bytes, seconds, alone)
    run_code(code)


def read_code():
    path = Path(CODE_FILE)
    code = path.read_bytes().decode("utf-8", "surrogatepass")
    path.unlink()  # the code finds an empty folder
    return code


def start_runner(seconds):
    """-> in the runner, whether it has namespaces of its own."""
    watched = (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler macOS drops it
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    signal.alarm(seconds)  # should the engine die or stall
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    alone = enter_namespaces()
    if alone and os.fork() == 0:
        be_first_process()
    runner = os.fork()
    if runner:
        keep(runner, watched)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    return alone


def keep(runner, watched):
    """Wait for the runner to end or for a signal to end it, kill what is left, and end as the runner did."""
    ended, status = 0, 0
    while not ended and signal.sigwait(watched) == signal.SIGCHLD:
        ended, status = os.waitpid(runner, os.WNOHANG)
    if not ended:
        os.kill(runner, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(runner, signal.SIGKILL)
    end_children()
    if not ended:
        os._exit(1)
    if os.WIFSIGNALED(status):
        end_by(os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def end_children():
    """Kill and await them until there is none; on Linux the children of one that died become the keeper's own."""
    listed = Path("/proc/thread-self/children")
    with contextlib.suppress(OSError):  # no children, or no /proc
        while True:
            for pid in listed.read_text().split() if LINUX else []:
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def end_by(number):
    """Let the engine see the signal that ended the runner."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), number)


def be_first_process():
    """With it all others in its namespace die; it awaits the orphans among them."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


# Numbers of Linux, the same on every processor.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CAPABILITY_VERSION_3 = 0x20080522
M_ARENA_MAX = -8


def prctl(option, value):
    """Nothing on other systems, nor where the kernel declines: these calls add safety, the code runs without."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def enter_namespaces():
    """For the children to come: no network, and none but themselves to signal -> whether the kernel allows that."""
    if not LINUX:
        return False
    libc = ctypes.CDLL(None)
    user, group = os.geteuid(), os.getegid()
    separate = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    if libc.unshare(CLONE_NEWUSER | separate) != 0:
        return libc.unshare(separate) == 0  # root, where namespaces of users are off
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError):  # without, the code sees the user nobody
            Path("/proc/self", name).write_text(text)
    return True


def give_up_privileges():
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if LINUX:
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(header, none)


def set_limits(memory_bytes, seconds, alone):
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    limit(resource.RLIMIT_CPU, seconds, extra=1)  # first a signal that tells the reason
    if memory_bytes and LINUX:
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK):
            limit(kind, memory_bytes)
        if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc reserves 128 MiB of addresses for each thread's heap
            libc.mallopt(M_ARENA_MAX, 1)
    if alone:  # otherwise all processes of the user would count
        limit(resource.RLIMIT_NPROC, PROCESSES)


def limit(kind, value, extra=0):
    """Signalled at `value`, refused or killed at `value + extra`; never more than the engine itself may have."""
    soft, hard = (math.inf if own == resource.RLIM_INFINITY else own for own in resource.getrlimit(kind))
    resource.setrlimit(kind, (min(value, soft), min(value + extra, hard)))


def run_code(code):
    """As the program of this interpreter. What the code leaves running or raises, the interpreter handles as always."""
    program = sys.modules["__main__"] = ModuleType("__main__")
    sys.excepthook = show_error
    sys.argv[:] = ["<llm>"]
    tempfile.tempdir = os.getcwd()
    for module, names in TAKEN.items():
        module = import_module(module)
        for name in names.split():
            if hasattr(module, name):  # not every system has all of them
                setattr(module, name, None)
    for name in BLOCKED_IMPORTS.split():
        sys.modules[name] = None
    exec(compile(code, "<llm>", "exec", dont_inherit=True), program.__dict__)


def show_error(kind, error, trace):
    """Without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
