"""execute_code: no process, descriptor or folder is left behind, and nothing gets out."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from errors import Refused
from generate.tools import sandbox
from generate.tools.sandbox import execute_code, missing_wall, remove_folder
from tests.conftest import ROOT
from tests.support.sandbox import (
    BEATING,
    fail,
    linux,
    processes_of,
    stands_still,
    succeed,
    wait_for_none,
    without_namespaces,
)


@pytest.mark.parametrize("ending", ["", "1 / 0", "while True: pass"])
def test_grandchildren_die_with_the_code(walls, ending):
    result = execute_code(BEATING.format(path="/tmp/beat") + ending, timeout=2 if "while" in ending else 30)
    assert result.stdout == "begun\n" and result.timeout == ("while" in ending) and result.success == (not ending)
    assert processes_of() == []


@linux
@pytest.mark.parametrize("ending", ["", "time.sleep(60)"])
def test_grandchildren_die_without_namespaces_too(tmp_path, ending):
    path = tmp_path / "beat"
    code = BEATING.format(path=str(path)) + ending
    result = without_namespaces(lambda: execute_code(code, timeout=2 if ending else 30, unsafe=True))
    assert result.stdout == "begun\n" and result.timeout == bool(ending) and result.success == (not ending)
    assert stands_still(path) and processes_of() == []


@linux
def test_children_in_the_same_session_die(tmp_path):
    path = tmp_path / "beat"
    code = BEATING.format(path=str(path)).replace("    posix.setsid()\n", "")
    assert without_namespaces(lambda: execute_code(code, timeout=30, unsafe=True)).stdout == "begun\n"
    assert stands_still(path)


@linux
def test_where_no_walls_can_be_built_nothing_runs(tmp_path):
    path = tmp_path / "ran"
    message = "not run: unshare: Operation not permitted; UNSAFE_SANDBOX=1 runs"
    with pytest.raises(Refused, match=message):
        without_namespaces(lambda: execute_code(f"open({str(path)!r}, 'w')"))
    assert not path.exists() and without_namespaces(missing_wall) == "unshare: Operation not permitted"


@linux
@pytest.mark.parametrize("name", ["mount", "pivot_root", "mount_setattr"])
def test_a_wall_that_fails_half_way_is_a_refusal(name, walls):
    """As under AppArmor of Ubuntu 24.04: namespaces can be made, but nothing be mounted in them."""
    with pytest.raises(Refused, match=f"not run: {name}: Operation not permitted"):
        without_namespaces(lambda: execute_code("print(1)"), name)


def test_a_call_without_descriptors_is_a_refusal(monkeypatch):
    """A tool's trouble must not end the chat that called it with a traceback."""

    def start(*arguments, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(Refused, match=r"programs of the model cannot be run: .*Too many open files"):
        execute_code("print(1)")


def engine_at_work():
    """An engine in a process of its own, once its code has two children."""
    code = "import posix, time\nfor _ in range(2):\n    if posix.fork() == 0:\n        posix.setsid()\n        break\n"
    code += "time.sleep(60)"
    call = f"from generate.tools.sandbox import execute_code\nexecute_code({code!r}, timeout=50)"
    engine = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT)
    deadline = time.monotonic() + 30
    while len(processes_of(engine.pid)) < 5 and time.monotonic() < deadline:  # keeper, first process, runner, two
        time.sleep(0.02)
    return engine


def test_the_code_dies_with_the_engine(walls):
    with engine_at_work() as engine:
        assert len(processes_of(engine.pid)) == 5
        engine.kill()
    assert wait_for_none(engine.pid) == []


def test_the_code_dies_with_its_keeper(walls):
    """Seen: a keeper that was killed left one process that went on."""
    with engine_at_work() as engine:
        keeper = next(process for process in processes_of(engine.pid) if process.ppid() == engine.pid)
        keeper.kill()
        assert engine.wait(timeout=30) == 0
    assert wait_for_none(engine.pid) == []


def test_the_code_dies_with_the_first_process(walls):
    with engine_at_work() as engine:
        keeper = next(process for process in processes_of(engine.pid) if process.ppid() == engine.pid)
        keeper.children()[0].kill()
        assert engine.wait(timeout=30) == 0
    assert wait_for_none(engine.pid) == []


def test_an_interrupt_of_the_engine_ends_the_code(temporary, monkeypatch):
    read_streams = sandbox.read_streams

    def interrupted(selector, deadline):
        monkeypatch.setattr(sandbox, "read_streams", read_streams)
        assert processes_of()
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "read_streams", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute_code("import time\ntime.sleep(60)", timeout=50, unsafe=True)
    assert wait_for_none() == [] and list(temporary.iterdir()) == []


def test_several_threads_at_once(temporary):
    outputs = {}

    def work(number):
        code = f"import time\nopen('own', 'w').write('{number}')\ntime.sleep(0.1)\nprint(open('own').read())"
        outputs[number] = succeed(code) if number else fail("while True: pass", timeout=0.5).error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {number: f"{number}\n" for number in range(1, 6)} | {0: "Execution timed out after 0.5 s"}
    assert outputs == expected and list(temporary.iterdir()) == []


@linux
def test_nothing_of_a_call_is_left(temporary):
    """Descriptors, threads, processes, mounts, folders; a file in /dev/shm was seen to stay."""

    def left():
        lists = [sorted(os.listdir(path)) for path in ("/proc/self/fd", "/proc/self/task")]
        return lists, Path("/proc/self/mountinfo").read_text(), processes_of(), list(temporary.iterdir())

    succeed("print(1)")
    before = left()
    for _ in range(5):
        succeed("open('/dev/shm/colibri_left', 'w').write('x' * 1000)" if missing_wall() is None else "")
    fail("import time; time.sleep(60)", timeout=0.2)
    fail("x", memory_bytes=1)
    assert left() == before and not Path("/dev/shm/colibri_left").exists()


@linux
def test_descriptors_of_the_engine_are_not_inherited(tmp_path):
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\nfor number in range(3, 1000):\n    try:\n        print(os.fstat(number))\n"
        assert succeed(code + "    except OSError:\n        pass") == ""


def test_a_deep_folder_is_deleted(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    (tmp_path / "kept").write_text("outside")
    (top / "link").symlink_to(tmp_path)
    (top / "closed").mkdir(mode=0)
    inner = os.open(top, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=inner)
        os.close(os.open("file", os.O_CREAT, dir_fd=inner))
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
    remove_folder(str(top))
    assert not top.exists() and (tmp_path / "kept").exists()
