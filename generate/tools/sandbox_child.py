"""The program of the interpreter that execute_code starts: it builds the walls, then runs the code of a model.

Processes: the keeper, which the engine starts, watches time and memory. Its child is the first process of the
namespaces, with which everything in them dies; its child, the runner, runs the code. Without walls (UNSAFE_SANDBOX=1)
the runner is the child of the keeper. All is set up before the code is seen and none of it between fork and exec of the
engine, which would not be safe while it has threads. Only the standard library can be imported here.
"""

import contextlib
import os
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from generate.tools import sandbox_walls as walls
from generate.tools.sandbox_filter import build_filter, install_filter

POLL = 0.05  # seconds between two looks at the memory
CODE_NAME = "<llm>"

# Names that are None for the code: what deletes, kills or leaves the working folder by mistake.
REMOVED = {
    "os": "kill killpg system putenv fork forkpty posix_spawn posix_spawnp remove removedirs unlink rmdir rename "
    "renames replace truncate chdir fchdir chroot chmod fchmod lchmod chown fchown lchown chflags lchflags setuid",
    "shutil": "rmtree move chown",
    "subprocess": "Popen",
}
BLOCKED_IMPORTS = "ipdb joblib psutil resource tkinter"


def main(memory_bytes: int, seconds: int, engine: int, status: int, has_walls: int) -> None:
    """The keeper. `engine` is its parent, `status` the descriptor that `tell` writes to. Only the runner returns from
    start_runner."""
    code = read_code()
    watched = (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler macOS drops it
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    signal.alarm(seconds)  # should the engine die or stall
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.executable = os.path.realpath(sys.executable)
    with refusals(status):
        start_runner(memory_bytes, engine, status, bool(has_walls), watched)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        walls.set_limits(memory_bytes, seconds, bool(has_walls))
        if has_walls:
            install_filter(build_filter())
    os.close(status)
    run_code(code)


def read_code() -> str:
    with open(0, "rb", closefd=False) as stream:
        code = stream.read().decode("utf-8", "surrogatepass")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return code


def tell(status: int, line: str) -> None:
    """To the engine, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(status, f"{line}\n".encode())


@contextlib.contextmanager
def refusals(status: int) -> Iterator[None]:
    """The code is not run where a wall cannot be built."""
    try:
        yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        tell(status, f"refused {place}{error.strerror or error}")
        os._exit(1)


def start_runner(
    memory_bytes: int, engine: int, status: int, has_walls: bool, watched: tuple[signal.Signals, ...]
) -> None:
    folder = walls.enter_namespaces(memory_bytes // 2 or walls.FOLDER_BYTES) if has_walls else None
    walls.prctl(walls.PR_SET_CHILD_SUBREAPER, 1)
    walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != engine:  # it died before that
        os._exit(1)
    keeper_ended, held = os.pipe()
    child = os.fork()
    if child:
        keep(child, status, watched, memory_bytes, folder)
    os.close(held)
    if has_walls:
        walls.enter_root()
        walls.drop_privileges()
    else:
        walls.give_up_capabilities()
    walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([keeper_ended], [], [], 0)[0]:
        os._exit(1)
    if has_walls:
        walls.prctl(walls.PR_SET_DUMPABLE, 0)  # the code cannot look into the first process
        be_first_process(status)
        walls.prctl(walls.PR_SET_DUMPABLE, 1)  # the keeper can see how much the runner shares
    for descriptor in (keeper_ended, folder):
        if descriptor is not None:
            os.close(descriptor)


def be_first_process(status: int) -> None:
    """Returns in the runner. It awaits orphans, and when it ends, after the runner, all others die. The code can signal
    it, but the kernel does not kill it for a signal without a handler, and those with one wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    runner = os.fork()
    while runner:
        pid, how = os.wait()
        if pid == runner:
            tell(status, f"ended {how}")
            os._exit(0)


def keep(
    child: int, status: int, watched: tuple[signal.Signals, ...], memory_bytes: int, folder: int | None
) -> NoReturn:
    """Wait for the child to end or for a reason to end it, then kill what is left."""
    ended, how = 0, 0
    while not ended:
        number = signal.sigwait(watched) if folder is None else wait_a_moment(watched)
        if number == signal.SIGCHLD:
            ended, how = os.waitpid(child, os.WNOHANG)
        elif number:
            break
        elif memory_bytes and folder is not None and walls.is_memory_exceeded(child, folder, memory_bytes):
            tell(status, "memory")
            break
    if not ended:
        os.kill(child, signal.SIGKILL)
    if folder is None:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        if ended:
            tell(status, f"ended {how}")
    end_children()
    os._exit(0)


def wait_a_moment(watched: tuple[signal.Signals, ...]) -> int | None:
    """-> the signal that came. Where there are namespaces there is this call; macOS lacks it."""
    caught = signal.sigtimedwait(watched, POLL)
    return caught and caught.si_signo


def end_children() -> None:
    """Kill and await them until there is none; on Linux the children of one that died become the keeper's own."""
    listed = Path("/proc/thread-self/children")
    with contextlib.suppress(OSError):  # no children, or no /proc
        while True:
            for pid in listed.read_text().split() if walls.LINUX else []:
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def run_code(code: str) -> None:
    """As the program of this interpreter. What the code leaves running or raises, the interpreter handles as always."""
    program = sys.modules["__main__"] = ModuleType("__main__")
    sys.excepthook = show_error
    sys.argv[:] = [CODE_NAME]
    tempfile.tempdir = os.getcwd()
    for module_name, names in REMOVED.items():
        module = import_module(module_name)
        for name in names.split():
            if hasattr(module, name):  # not every system has all of them
                setattr(module, name, None)
    for name in BLOCKED_IMPORTS.split():
        sys.modules[name] = None  # type: ignore[assignment]  # makes its import fail
    exec(compile(code, CODE_NAME, "exec", dont_inherit=True), program.__dict__)


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename != CODE_NAME:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
