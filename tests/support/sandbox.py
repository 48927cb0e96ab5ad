"""For tests of the sandbox: run code that must succeed or fail, and look for processes that it left."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from generate.tools import sandbox_walls
from generate.tools.sandbox import execute_code, try_walls
from generate.tools.sandbox_filter import build_filter, install_filter

linux = pytest.mark.skipif(not sandbox_walls.LINUX, reason="only Linux has it")
# A grandchild with a session of its own that writes on for as long as it lives, and says when it has begun.
BEATING = """
import posix, time
if posix.fork() == 0:
    posix.setsid()
    if posix.fork() == 0:
        while True:
            with open({path!r}, "a") as file:
                file.write("x")
            time.sleep(0.01)
    posix._exit(0)
import os
while not os.path.exists({path!r}):
    time.sleep(0.01)
print("begun", flush=True)
"""
# For attacks by system calls: sys_call(number, ...) raises OSError.
SYSTEM_CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def sys_call(*arguments):
    result = libc.syscall(*map(ctypes.c_long, arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


def succeed(code, **options):
    """-> stdout. Behind walls where there are any. A busy machine gets more time than the default."""
    result = execute_code(code, **{"timeout": 30, "unsafe": True, **options})
    assert result.success and result.error is None, result
    assert not result.timeout and not result.memory_exceeded
    return result.stdout


def fail(code, **options):
    result = execute_code(code, **{"timeout": 30, "unsafe": True, **options})
    assert not result.success and result.error
    return result


def without_namespaces(function, denied="unshare"):
    """-> what `function` returns where the kernel refuses namespaces, as it does in most containers: in a thread whose
    filter of system calls refuses `denied`."""

    def work():
        sandbox_walls.prctl(sandbox_walls.PR_SET_NO_NEW_PRIVS, 1)
        install_filter(build_filter([denied]))
        return function()

    try_walls.cache_clear()
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    finally:
        try_walls.cache_clear()


def processes_of(engine=None):
    """The processes of all calls of the process `engine`, by default this one: they keep the keeper's command line."""
    engine, found = str(engine or os.getpid()), []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "-c" in words and "sandbox_child" in " ".join(words) and engine in words[-5:]:
            found.append(process)
    return found


def wait_for_none(engine=None, seconds=10.0):
    """-> the processes that are left after that time at most."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(engine)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def stands_still(path):
    """Whether the grandchild that writes there is gone."""
    time.sleep(0.02)
    before = path.stat().st_size
    time.sleep(0.15)
    return path.stat().st_size == before > 0
