"""For tests of the sandbox: run code that must succeed or fail, and a grandchild process that lives on."""

import subprocess
import sys
import time

import pytest

from generate.tools import sandbox_child
from generate.tools.sandbox import execute_code

linux = pytest.mark.skipif(not sandbox_child.LINUX, reason="only Linux has it")
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


def succeed(code, **options):
    """-> stdout. A busy machine gets more time than the default."""
    result = execute_code(code, timeout=30, **options)
    assert result.success and result.error is None, result
    assert not result.timeout and not result.memory_exceeded
    return result.stdout


def fail(code, **options):
    result = execute_code(code, **{"timeout": 30, **options})
    assert not result.success and result.error
    return result


def namespaces_allowed():
    """Tried in a process of its own, as the keeper does."""
    asking = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x78000000) != 0)"
    return sandbox_child.LINUX and subprocess.run([sys.executable, "-c", asking]).returncode == 0


def stands_still(path):
    """Whether the grandchild that writes there is gone."""
    time.sleep(0.02)
    before = path.stat().st_size
    time.sleep(0.15)
    return path.stat().st_size == before > 0
