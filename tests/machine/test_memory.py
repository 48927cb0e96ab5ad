"""Free memory, as the host and the cgroups of versions 1 and 2 report it."""

import subprocess
import sys

import psutil
import pytest

import machine.memory
from tests.conftest import ROOT


def write_cgroup(folder, limit, used, inactive, v1=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    key = "total_inactive_file" if v1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{key} {inactive}\n")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A host with 100 GB free, and cgroups that a test writes."""

    def setup(line):
        (tmp_path / "self").write_text(line)
        return tmp_path / "fs"

    monkeypatch.setattr(machine.memory, "CGROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr(machine.memory, "CGROUP_SELF", tmp_path / "self")
    monkeypatch.setattr(
        "psutil.virtual_memory", lambda: type("Memory", (), {"available": 100 * 10**9, "total": 128 * 10**9})
    )
    return setup


def test_the_tightest_ancestor_counts_without_inactive_file_pages(cgroups):
    root = cgroups("0::/user/job\n")
    write_cgroup(root / "user" / "job", "max", 5, 0)
    assert machine.memory.available_bytes() == 100 * 10**9
    write_cgroup(root / "user", 8 * 10**9, 6 * 10**9, 3 * 10**9)
    assert machine.memory.available_bytes() == 5 * 10**9
    write_cgroup(root / "user" / "job", 4 * 10**9, 10**9, 0)
    assert machine.memory.available_bytes() == 3 * 10**9


def test_the_total_is_that_of_the_tightest_limit(cgroups):
    root = cgroups("0::/user/job\n")
    assert machine.memory.total_bytes() == (128 * 10**9, "this machine has")
    write_cgroup(root / "user", 8 * 10**9, 6 * 10**9, 3 * 10**9)
    assert machine.memory.total_bytes() == (8 * 10**9, "this cgroup allows")


def test_without_proc_the_peak_stands_for_the_rss(monkeypatch):
    """In a container without /proc psutil finds no process, not even this one: every start ended in a traceback."""
    monkeypatch.setattr("psutil.Process", lambda: (_ for _ in ()).throw(psutil.NoSuchProcess(1)))
    assert 1e7 < machine.memory.rss_bytes() <= machine.memory.peak_rss_bytes()


def test_cgroup_v1(cgroups):
    root = cgroups("4:cpu,memory:/box\n0::/\n")
    write_cgroup(root / "memory" / "box", 2 * 10**9, 10**9, 5 * 10**8, v1=True)
    write_cgroup(root / "memory", 9223372036854771712, 10**9, 0, v1=True)  # v1's way to say no limit
    assert machine.memory.available_bytes() == 1_500_000_000


def test_a_container_whose_own_cgroup_path_is_hidden(cgroups):
    root = cgroups("0::/docker/abc\n")
    write_cgroup(root, 3 * 10**9, 10**9, 0)
    assert machine.memory.available_bytes() == 2 * 10**9


def test_zero_available_memory_counts_as_unknown(monkeypatch):
    monkeypatch.setattr(machine.memory, "cgroup_usage", lambda: [])
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 0}))
    assert machine.memory.available_bytes() is None


def test_the_peak_is_that_of_the_program_itself():
    """A run started by a process of 2 GB reported 2 GB as its peak: Linux hands ru_maxrss on through fork and exec."""
    ballast = bytearray(400 << 20)
    ballast[:: 1 << 12] = b"x" * len(range(0, len(ballast), 1 << 12))  # every page is really there
    command = [sys.executable, "-c", "from machine.memory import peak_rss_bytes; print(peak_rss_bytes())"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 1 << 20 < int(process.stdout) < len(ballast) // 2


THREADS = """
import ctypes, re, sys, threading
from machine.memory import LIBC, share_heap

def heaps(path):
    LIBC.fopen.restype = LIBC.malloc.restype = ctypes.c_void_p
    file = ctypes.c_void_p(LIBC.fopen(path.encode(), b"w"))
    assert LIBC.malloc_info(0, file) == 0 and LIBC.fclose(file) == 0
    return len(re.findall("<heap nr=", open(path).read()))

def allocate():
    LIBC.malloc(1000)
    barrier.wait(20)

if sys.argv[2] == "shared":
    share_heap()
before, barrier = heaps(sys.argv[1]), threading.Barrier(8)
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(heaps(sys.argv[1]) - before)
"""


@pytest.mark.skipif(not hasattr(machine.memory.LIBC, "malloc_info"), reason="of glibc")
def test_threads_share_one_heap(tmp_path):
    """With 8 reads in flight that quantize, 0.55 GB were held where RAM_GB=0.5: each reader thread's heap kept what it
    had freed."""

    def new_heaps(how):
        command = [sys.executable, "-c", THREADS, str(tmp_path / "info.xml"), how]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout)

    assert new_heaps("own") > 0 and new_heaps("shared") == 0
