"""execute_code: no process, descriptor or folder is left behind, and nothing gets out."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from generate.tools import sandbox
from generate.tools.sandbox import execute_code, remove_folder
from tests.conftest import ROOT
from tests.support.sandbox import BEATING, fail, linux, namespaces_allowed, stands_still, succeed


@linux
@pytest.mark.parametrize("ending", ["", "1 / 0", "while True: pass"])
def test_grandchildren_die_with_the_code(tmp_path, ending):
    check_grandchildren(tmp_path, ending)


@linux
@pytest.mark.parametrize("ending", ["", "time.sleep(60)"])
def test_grandchildren_die_without_namespaces_too(tmp_path, ending, without_namespaces):
    check_grandchildren(tmp_path, ending)


def check_grandchildren(tmp_path, ending):
    path = tmp_path / "beat"
    slow = ending.startswith(("while", "time"))
    result = execute_code(BEATING.format(path=str(path)) + ending, timeout=2 if slow else 30)
    assert result.stdout == "begun\n" and result.timeout == slow and result.success == (not ending)
    assert stands_still(path)


def test_children_in_the_same_session_die(tmp_path, without_namespaces):
    path = tmp_path / "beat"
    code = BEATING.format(path=str(path)).replace("    posix.setsid()\n", "")
    assert execute_code(code, timeout=30).stdout == "begun\n"
    assert stands_still(path)


@linux
def test_the_code_dies_with_the_engine(tmp_path):
    path = tmp_path / "beat"
    code = BEATING.format(path=str(path)) + "time.sleep(60)"
    call = f"from generate.tools.sandbox import execute_code\nexecute_code({code!r}, timeout=50)"
    with subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, env={"TMPDIR": str(tmp_path)}) as engine:
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        engine.kill()
    time.sleep(0.3)
    assert stands_still(path)


@linux
def test_an_interrupt_of_the_engine_ends_the_code(tmp_path, temporary, monkeypatch):
    path, read_streams = tmp_path / "beat", sandbox.read_streams

    def interrupted(selector, deadline):
        monkeypatch.setattr(sandbox, "read_streams", read_streams)
        limit = time.monotonic() + 30
        while not path.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "read_streams", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute_code(BEATING.format(path=str(path)) + "time.sleep(60)", timeout=50)
    assert stands_still(path) and list(temporary.iterdir()) == []


@linux
def test_no_privileges_are_left():
    lines = succeed("print(open('/proc/self/status').read())").splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["NoNewPrivs"] == "1" and int(status["CapEff"], 16) == 0 and int(status["CapPrm"], 16) == 0


def test_no_network():
    if not namespaces_allowed():
        pytest.skip("the kernel lets this user make no namespaces: the network stays open")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        socket.create_connection(address).close()
        result = fail(f"import socket\nsocket.create_connection({address!r}, timeout=5)")
    assert result.error.startswith("OSError") and "unreachable" in result.error


def test_other_processes_cannot_be_signalled():
    if not namespaces_allowed():
        pytest.skip("the kernel lets this user make no namespaces: processes of the same user can be signalled")
    assert fail(f"import posix\nposix.kill({os.getpid()}, 0)").error.startswith("ProcessLookupError")


def test_the_number_of_processes_is_limited():
    if not namespaces_allowed() or os.geteuid() == 0:
        pytest.skip("only in a namespace, and not for root")
    code = "import posix, time\nfor _ in range(200):\n    if posix.fork() == 0:\n        time.sleep(60)"
    assert fail(code).error.startswith("BlockingIOError")


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
def test_no_descriptor_stays_open(temporary):
    count = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = count()
    succeed("print(1)")
    fail("import time; time.sleep(60)", timeout=0.2)
    fail("x", memory_bytes=1)
    assert count() == before and list(temporary.iterdir()) == []


@linux
def test_descriptors_of_the_engine_are_not_inherited(tmp_path):
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        opened = succeed(
            "import os\nprint([os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
        )
    assert "secret" not in opened


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
