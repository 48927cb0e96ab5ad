"""The script of the interpreter that execute_code starts: it sets the limits, then runs the code of a model.

A keeper process makes the namespaces and starts two children: a first process of the namespace, with which everything
in it dies, and the runner, which runs the code. All limits are set in the runner, before it sees the code, so nothing
has to run between fork and exec of the engine, which would not be safe while it has threads. Only the standard library
can be imported here.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType

LINUX = sys.platform == "linux"
CODE_FILE = "code"  # in the working folder
FILE_BYTES = 64 << 20  # of each file that the code writes
PROCESSES = 64  # threads count

# Names that are None for the code: what deletes, kills or leaves the working folder by mistake.
REMOVED = {
    "os": "kill killpg system putenv fork forkpty posix_spawn posix_spawnp remove removedirs unlink rmdir rename "
    "renames replace truncate chdir fchdir chroot chmod fchmod lchmod chown fchown lchown chflags lchflags setuid",
    "shutil": "rmtree move chown",
    "subprocess": "Popen",
}
BLOCKED_IMPORTS = "ipdb joblib psutil resource tkinter"


def main(memory_bytes: int, seconds: int) -> None:
    """The keeper. Only the runner returns from start_runner."""
    code = read_code()
    has_namespaces = start_runner(seconds)
    drop_privileges()
    set_limits(memory_bytes, seconds, has_namespaces)
    run_code(code)


def read_code() -> str:
    path = Path(CODE_FILE)
    code = path.read_bytes().decode("utf-8", "surrogatepass")
    path.unlink()  # the code finds an empty folder
    return code


def start_runner(seconds: int) -> bool:
    """-> in the runner, whether it has namespaces of its own."""
    watched = (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler macOS drops it
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    signal.alarm(seconds)  # should the engine die or stall
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    has_namespaces = enter_namespaces()
    if has_namespaces and os.fork() == 0:
        be_first_process()
    runner = os.fork()
    if runner:
        keep(runner, watched)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    return has_namespaces


def keep(runner: int, watched: tuple[signal.Signals, ...]) -> None:
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


def end_children() -> None:
    """Kill and await them until there is none; on Linux the children of one that died become the keeper's own."""
    listed = Path("/proc/thread-self/children")
    with contextlib.suppress(OSError):  # no children, or no /proc
        while True:
            for pid in listed.read_text().split() if LINUX else []:
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def end_by(number: int) -> None:
    """Let the engine see the signal that ended the runner."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), number)


def be_first_process() -> None:
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


def prctl(option: int, value: int) -> None:
    """Nothing on other systems, nor where the kernel declines: these calls add safety, the code runs without."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def enter_namespaces() -> bool:
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


def drop_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if LINUX:
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(header, none)


def set_limits(memory_bytes: int, seconds: int, has_namespaces: bool) -> None:
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    limit(resource.RLIMIT_CPU, seconds, extra=1)  # first a signal that tells the reason
    if memory_bytes and LINUX:
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK):
            limit(kind, memory_bytes)
        if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc reserves 128 MiB of addresses for each thread's heap
            libc.mallopt(M_ARENA_MAX, 1)
    if has_namespaces:  # otherwise all processes of the user would count
        limit(resource.RLIMIT_NPROC, PROCESSES)


def limit(kind: int, value: int, extra: int = 0) -> None:
    """Signalled at `value`, refused or killed at `value + extra`; never more than the engine itself may have."""
    soft, hard = (math.inf if own == resource.RLIM_INFINITY else own for own in resource.getrlimit(kind))
    resource.setrlimit(kind, (int(min(value, soft)), int(min(value + extra, hard))))


def run_code(code: str) -> None:
    """As the program of this interpreter. What the code leaves running or raises, the interpreter handles as always."""
    program = sys.modules["__main__"] = ModuleType("__main__")
    sys.excepthook = show_error
    sys.argv[:] = ["<llm>"]
    tempfile.tempdir = os.getcwd()
    for module_name, names in REMOVED.items():
        module = import_module(module_name)
        for name in names.split():
            if hasattr(module, name):  # not every system has all of them
                setattr(module, name, None)
    for name in BLOCKED_IMPORTS.split():
        sys.modules[name] = None  # type: ignore[assignment]  # makes its import fail
    exec(compile(code, "<llm>", "exec", dont_inherit=True), program.__dict__)


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
