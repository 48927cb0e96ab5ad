"""The walls of the sandbox: namespaces, a root folder of its own, no privileges, limits. Linux 5.14 or newer.

Each function raises OSError where the kernel declines. Only the standard library can be imported here, and nothing
here runs in the engine: the keeper calls enter_namespaces, the first process of the namespaces enter_root and
drop_privileges, the runner set_limits (sandbox_child.py).
"""

import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from generate.tools.sandbox_filter import number_of

LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True)
FILE_BYTES = 64 << 20  # of each file that the code writes
FOLDER_BYTES = 128 << 20  # of all its files, where memory has no bound; otherwise half of the bound
MAX_FILES = 10_000  # folders count
MAX_DESCRIPTORS = 128  # of each process
SOCKET_BYTES = 212_992  # what waits in a socket at most, by the kernel's default
PROCESSES = 64  # threads count
NOBODY = 65534
HOST_NAME = b"sandbox"

WORK = "/tmp"  # the working folder
WRITABLE = (WORK, "/dev/shm")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Read-only, what of it there is: libraries, and what the C library looks up.
SYSTEM = "/lib /lib64 /usr/lib /usr/lib64 /nix/store /gnu/store /etc/ld.so.cache /etc/localtime /usr/share/zoneinfo"
BASE = "/dev"  # where the new root is mounted at first: a folder that every system has
OLD = "/old"

# Numbers of Linux, the same on every processor.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x04000000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
SEPARATE = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
READ_ONLY, NO_SUID, NO_DEVICES, AT_FDCWD, AT_RECURSIVE = 1, 2, 4, -100, 0x8000  # of mount_setattr
CAPABILITY_VERSION_3 = 0x20080522
M_ARENA_MAX = -8


def call(name: str, *arguments: object) -> None:
    """A function of the C library that returns 0. OSError with its name otherwise."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def system_call(name: str, *arguments: object) -> None:
    """One that the C library may lack."""
    longs = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    try:
        call("syscall", ctypes.c_long(number_of(name) or -1), *longs)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {os.strerror(error.errno or 0)}") from None


def prctl(option: int, value: int) -> None:
    """Nothing on other systems, nor where the kernel declines: what needs it is tested where it must hold."""
    if LINUX:
        LIBC.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def enter_namespaces(folder_bytes: int) -> int:
    """Namespaces for this process and, of processes, for its children, and an empty file system in memory of the size
    `folder_bytes` -> a descriptor of it, which tells how full it is. Without /proc to write to there is no way in."""
    if not LINUX:
        raise OSError(f"{sys.platform} has no namespaces")
    user, group = os.geteuid(), os.getegid()
    call("unshare", SEPARATE if user == 0 else SEPARATE | CLONE_NEWUSER)
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            Path("/proc/self", name).write_text(text)
    Path("/proc/thread-self/children").read_text()  # memory_in_use needs it
    call("sethostname", HOST_NAME, len(HOST_NAME))
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    options = f"mode=755,size={max(folder_bytes, 1 << 20)},nr_inodes={MAX_FILES}"
    call("mount", b"tmpfs", BASE.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
    return os.open(BASE, os.O_PATH | os.O_DIRECTORY)


def enter_root() -> None:
    """Make that file system the root: two writable folders, and read-only what Python needs to run."""
    sources = {path: os.path.realpath(path) for path in sorted(readable_paths())}
    os.umask(0o022)
    call("unshare", CLONE_NEWNS)  # the keeper still sees all
    os.chdir(BASE)
    os.mkdir(OLD[1:])
    system_call("pivot_root", b".", OLD[1:].encode())
    os.chdir("/")
    for path in WRITABLE:
        os.makedirs(path)
        os.chmod(path, 0o1777)
        call("mount", path.encode(), path.encode(), None, MS_BIND, None)
    bound: list[str] = []
    for path, source in sources.items():
        if not any(path.startswith(outer + "/") for outer in bound):
            bind(source, path, READ_ONLY | NO_SUID | NO_DEVICES)
            bound.append(path)
    for path in DEVICES:
        bind(path, path, READ_ONLY | NO_SUID)
    call("umount2", OLD.encode(), MNT_DETACH)
    os.rmdir(OLD)
    set_attributes("/", READ_ONLY | NO_SUID | NO_DEVICES, 0)
    os.chdir(WORK)


def readable_paths() -> Iterator[str]:
    """Of this interpreter and the libraries of the system, as they are named outside."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix}
    folders = (f"{prefix}/{name}" for prefix in prefixes for name in {"lib", sys.platlibdir})
    for path in (*SYSTEM.split(), *folders, *sys.path, sys.executable):
        if os.path.isabs(path) and os.path.exists(path):
            yield os.path.normpath(path)


def bind(source: str, path: str, attributes: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(OLD + source):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
    call("mount", os.fsencode(OLD + source), os.fsencode(path), None, MS_BIND | MS_REC, None)
    set_attributes(path, attributes, AT_RECURSIVE)


def set_attributes(path: str, attributes: int, flags: int) -> None:
    changes = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    system_call("mount_setattr", AT_FDCWD, os.fsencode(path), flags, ctypes.byref(changes), ctypes.sizeof(changes))


def drop_privileges() -> None:
    """Become nobody, without capabilities: the kernel counts the processes of everybody but root."""
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError as error:  # a root to which few users are mapped
            raise OSError(error.errno, f"root cannot become the user {NOBODY}: {error.strerror}") from None
        with suppress(OSError):  # then its processes are counted for this call alone, otherwise for all calls together
            call("unshare", CLONE_NEWUSER)
    give_up_capabilities()
    if not os.access(os.__file__, os.R_OK):
        raise OSError(f"{os.path.dirname(os.__file__)} is not readable for other users than root")


def give_up_capabilities() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if LINUX:
        for capability in range(64):
            prctl(PR_CAPBSET_DROP, capability)
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        LIBC.capset(header, none)


def set_limits(memory_bytes: int, seconds: int, has_walls: bool) -> None:
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    limit(resource.RLIMIT_CPU, seconds, extra=1)  # first a signal that tells the reason
    if memory_bytes and LINUX:
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK):
            limit(kind, memory_bytes)
        if hasattr(LIBC, "mallopt"):  # glibc reserves 128 MiB of addresses for each thread's heap
            LIBC.mallopt(M_ARENA_MAX, 1)
    if has_walls:  # otherwise all processes of the user would count
        limit(resource.RLIMIT_NPROC, PROCESSES)
        limit(resource.RLIMIT_NOFILE, MAX_DESCRIPTORS)
        limit(resource.RLIMIT_MEMLOCK, 0)


def limit(kind: int, value: int, extra: int = 0) -> None:
    """Signalled at `value`, refused or killed at `value + extra`; never more than the engine itself may have."""
    soft, hard = (math.inf if own == resource.RLIM_INFINITY else own for own in resource.getrlimit(kind))
    resource.setrlimit(kind, (int(min(value, soft)), int(min(value + extra, hard))))


def is_memory_exceeded(first: int, folder: int, memory_bytes: int) -> bool:
    """Of the process `first`, its descendants, the files and what sockets may hold, as the keeper sees them. Pages that
    several processes share count once; that takes longer to ask, and is asked only where it matters."""
    files = os.fstatvfs(folder)
    left = memory_bytes - (files.f_blocks - files.f_bfree) * files.f_frsize
    left -= Path("/proc/thread-self/net/unix").read_bytes().count(b"\n") * SOCKET_BYTES
    pids = list(descendants(first))
    return sum(map(resident_bytes, pids)) > left and sum(map(proportional_bytes, pids)) > left


def descendants(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):  # it ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from descendants(int(child))


def resident_bytes(pid: int) -> int:
    return sum_of_fields(f"/proc/{pid}/status", "VmRSS", "VmSwap")


def proportional_bytes(pid: int) -> int:
    """A process that hides its memory counts with all that it shares."""
    return sum_of_fields(f"/proc/{pid}/smaps_rollup", "Pss_Anon", "Pss_Shmem", "SwapPss") or resident_bytes(pid)


def sum_of_fields(path: str, *names: str) -> int:
    """Of lines `name: number kB`; 0 where the process ended or hides them."""
    with suppress(OSError):
        lines = (line.partition(":") for line in Path(path).read_text().splitlines())
        return sum(int(value.split()[0]) << 10 for name, _, value in lines if name in names)
    return 0
