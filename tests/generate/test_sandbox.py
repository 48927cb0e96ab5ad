"""execute_code: what comes back, every limit, and that nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from errors import Refused
from generate.tools import sandbox, sandbox_child
from generate.tools.sandbox import Capture, execute_code, remove_folder, result_of
from tests.conftest import ROOT

linux = pytest.mark.skipif(not sandbox_child.LINUX, reason="only Linux has it")
HUGE = "data = bytearray(1 << 40)"
# A grandchild with a session of its own that writes on for as long as it lives, and signs when it has begun.
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
    """Asked in a process of its own, as the keeper asks."""
    asking = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x78000000) != 0)"
    return sandbox_child.LINUX and subprocess.run([sys.executable, "-c", asking]).returncode == 0


@pytest.fixture
def without_namespaces(tmp_path, monkeypatch):
    """As on a kernel that allows none."""
    head = "def enter_namespaces() -> bool:\n"
    source = Path(sandbox_child.__file__).read_text(encoding="utf-8")
    assert head in source
    copy = tmp_path / "sandbox_child.py"
    copy.write_text(source.replace(head, f"{head}    return False\n\n\ndef unused():\n"), encoding="utf-8")
    monkeypatch.setattr(sandbox_child, "__file__", str(copy))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder in which the temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def stands_still(path):
    """Whether the grandchild that writes there is gone."""
    time.sleep(0.02)
    before = path.stat().st_size
    time.sleep(0.15)
    return path.stat().st_size == before > 0


# What the tests of nanochat ask.


def test_output_comes_back():
    result = execute_code("import sys\nprint('out')\nprint('err', file=sys.stderr)", timeout=30)
    assert (result.success, result.stdout, result.stderr, result.error) == (True, "out\n", "err\n", None)
    assert not result.timeout and not result.memory_exceeded


def test_exception_is_captured():
    result = fail("print('before')\ndef f():\n    raise ValueError('bad thing')\nf()")
    assert result.stdout == "before\n" and result.error == "ValueError: bad thing"
    assert result.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<llm>", line 4, in <module>\n'
        '  File "<llm>", line 3, in f\n'
        "ValueError: bad thing\n"
    )


def test_endless_loop_is_killed_in_time():
    start = time.monotonic()
    result = fail("while True: pass", timeout=0.5)
    assert time.monotonic() - start < 4
    assert result.timeout and result.error == "Execution timed out after 0.5 s" and not result.memory_exceeded


@linux
def test_memory_is_limited():
    result = fail("data = bytearray(256 << 20)")
    assert result.memory_exceeded and result.error == "MemoryError" and not result.timeout
    untouched = "import mmap\nmmap.mmap(-1, 1 << 30)"
    assert fail(untouched).error.startswith("OSError")
    assert succeed(untouched, memory_bytes=None) == ""


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.system('true')",
        "import os; open('x', 'w').close(); os.remove('x')",
        "import shutil; shutil.rmtree('/nowhere')",
        "import subprocess; subprocess.run(['true'])",
    ],
)
def test_destructive_calls_are_taken_away(code):
    assert fail(code).error == "TypeError: 'NoneType' object is not callable"


def test_stdin_is_closed():
    assert fail("input()").error.startswith("EOFError")
    assert succeed("import sys; print(repr(sys.stdin.read()))") == "''\n"


def test_files_land_in_a_folder_that_goes(temporary):
    code = "import os, tempfile\nopen('a', 'w').write('x')\nprint(os.getcwd(), tempfile.gettempdir(), os.listdir())"
    folder, again, *names = succeed(code).split()
    assert folder == again and Path(folder).parent == temporary and names == ["['a']"]
    assert list(temporary.iterdir()) == []


def test_environment_is_scrubbed(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = set(succeed("import os\nprint(*os.environ)").split())
    assert "PATH" in names and names <= {"PATH", "LC_CTYPE", "__CF_USER_TEXT_ENCODING"}


def test_quotes_survive():
    text = "'''\"\"\"\\n\\\\ {braces} %s é\r\t"
    assert succeed(f"print(ascii({text!r}))") == ascii(text) + "\n"
    assert succeed('x = """a\'\'\'b"""\nprint(x)') == "a'''b\n"


def test_globals_are_fresh():
    succeed("leftover = 1")
    assert fail("print(leftover)").error == "NameError: name 'leftover' is not defined"
    assert succeed("print(sorted(name for name in globals() if name[0] != '_'), __name__)") == "[] __main__\n"


# How code ends.


@pytest.mark.parametrize("code", ["", "sys.exit()", "sys.exit(0)", "os._exit(0)"])
def test_good_ends(code):
    assert succeed("import os, sys\n" + code) == ""


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; sys.exit(3)", "Execution failed"),
        ("import sys; sys.exit('no luck')", "no luck"),
        ("import os; os._exit(1)", "Execution failed"),
        ("exit()", "NameError: name 'exit' is not defined"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os; os.abort()", "Execution failed"),
        ("import signal; signal.raise_signal(signal.SIGTERM)", "Execution failed"),
        ("import signal; signal.raise_signal(signal.SIGKILL)", "Execution failed"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("\ud800", "UnicodeEncodeError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("import resource", "ModuleNotFoundError"),
        ("import torch", "ModuleNotFoundError"),  # what is installed beside Python is out of reach
    ],
)
def test_bad_ends(code, error):
    result = fail(code)
    assert result.error.startswith(error) and "sandbox_child.py" not in result.stderr
    assert not result.timeout and not result.memory_exceeded


def test_null_bytes_are_an_error():
    assert "null bytes" in fail("print(1)\0").error


def test_the_memory_flag_is_for_failures_alone():
    mention = "import sys\nprint('MemoryError', file=sys.stderr)\n"
    assert not succeed(mention)
    assert fail(mention + "sys.exit(1)").memory_exceeded


@linux
def test_a_caught_memory_error_is_no_failure():
    assert succeed(f"try:\n    {HUGE}\nexcept MemoryError:\n    print('caught')") == "caught\n"


def test_processor_time_counts_as_time():
    result = result_of(-signal.SIGXCPU, True, 5.0, "out", "")
    assert not result.success and result.timeout and result.error == "Execution timed out after 5 s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(code=b"1"), "must be a text, not bytes"),
        (dict(code="", timeout=0), "timeout=0"),
        (dict(code="", timeout=float("nan")), "timeout=nan"),
        (dict(code="", timeout=float("inf")), "timeout=inf"),
        (dict(code="", timeout="5"), "timeout='5'"),
        (dict(code="", memory_bytes=0), "memory_bytes=0"),
        (dict(code="", memory_bytes=1 << 70), "memory_bytes=1180591620717411303424"),
        (dict(code="", memory_bytes=1e9), r"memory_bytes=1000000000\.0"),
        (dict(code="", output_bytes=-1), "output_bytes=-1"),
        (dict(code="", output_bytes=None), "output_bytes=None"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(Refused, match=message):
        execute_code(**arguments)


# Output.


def test_a_flood_of_output_is_cut():
    code = "import sys\nprint('first')\nfor _ in range(400):\n    sys.stdout.write('x' * 50_000)\nprint('last')"
    output = succeed(code, output_bytes=1000)
    assert output.startswith("first\nxxx") and output.endswith("xxx" + "last\n")
    assert f"\n[{20_000_000 + 11 - 1000} bytes of output left out]\n" in output and len(output) < 1100


def test_floods_of_both_streams_do_not_block():
    code = "import sys\nfor _ in range(300):\n    sys.stderr.write('e' * 9999)\n    sys.stdout.write('o' * 9999)\n1 / 0"
    result = fail(code, output_bytes=500)
    assert result.error == "ZeroDivisionError: division by zero"  # the end of a long stream is kept
    assert len(result.stdout) < 600 and len(result.stderr) < 600


def test_partial_output_survives_a_timeout():
    code = "import sys, time\nprint('é' * 3, flush=True)\nsys.stderr.write('why')\nsys.stderr.flush()\ntime.sleep(60)"
    result = fail(code, timeout=2)
    assert result.timeout and (result.stdout, result.stderr) == ("ééé\n", "why")


def test_an_endless_flood_ends_in_time():
    start = time.monotonic()
    result = fail("while True: print('x' * 10_000)", timeout=1, output_bytes=100)
    assert result.timeout and len(result.stdout) < 200 and time.monotonic() - start < 6


def test_closed_streams_do_not_end_the_wait():
    result = fail("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)", timeout=0.7)
    assert result.timeout


def test_output_that_is_no_text():
    assert succeed("print('\\u20ac \\U0001f600 \\udc80')") == "€ \U0001f600 \ufffd\n"
    assert succeed("import sys; sys.stdout.buffer.write(b'a\\xff\\r\\nb')") == "a\ufffd\r\nb"
    result = fail("print('\\ud800')")
    assert result.error.startswith("UnicodeEncodeError")


@pytest.mark.parametrize("limit", [1, 2, 7, 10])
def test_capture_keeps_both_ends(limit):
    text = "0123456789"
    for size in (1, 3, 100):
        capture = Capture(limit)
        for start in range(0, len(text), size):
            capture.add(text[start : start + size].encode())
        begin, end = (limit + 1) // 2, limit // 2
        cut = f"\n[{10 - limit} bytes of output left out]\n" if limit < 10 else ""
        assert capture.text() == text[:begin] + cut + text[10 - end :]


# A program as always.


def test_common_modules_still_load():
    modules = (
        "asyncio collections dataclasses fractions heapq itertools json logging math multiprocessing pathlib pickle"
    )
    modules += " random re statistics string typing unittest"
    code = f"import {', '.join(modules.split())}\n"
    code += "class A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)\nimport __main__\nprint(__main__.A is A)"
    assert succeed(code) == "True\nTrue\n"


def test_threads_fit_into_the_memory():
    code = "from concurrent.futures import ThreadPoolExecutor\nimport time\nwith ThreadPoolExecutor(8) as pool:\n"
    code += "    print(sum(pool.map(lambda x: time.sleep(0.01) or x, range(40))))"
    assert succeed(code) == "780\n"


def test_a_program_ends_as_always():
    code = "import atexit, threading\natexit.register(print, 'exit')\n"
    code += "threading.Timer(0.05, print, ['timer']).start()\nprint('main')"
    assert succeed(code) == "main\ntimer\nexit\n"


def test_a_large_file_is_refused():
    assert fail("with open('big', 'wb') as file:\n    file.seek(1 << 31)\n    file.write(b'x')").error.startswith(
        "OSError"
    )


# Nothing stays behind, nothing gets out.


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
