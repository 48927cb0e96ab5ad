"""execute_code: results and limits."""

import signal
import time
from pathlib import Path

import pytest

from errors import Refused
from generate.tools.sandbox import Capture, execute_code, missing_wall, result_of
from tests.support.sandbox import fail, linux, succeed

HUGE = "data = bytearray(1 << 40)"
# The cases of nanochat's tests.


def test_output_comes_back():
    result = execute_code("import sys\nprint('out')\nprint('err', file=sys.stderr)", timeout=30, unsafe=True)
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
def test_destructive_calls_are_removed(code):
    assert fail(code).error == "TypeError: 'NoneType' object is not callable"


def test_stdin_is_closed():
    assert fail("input()").error.startswith("EOFError")
    assert succeed("import sys; print(repr(sys.stdin.read()))") == "''\n"


def test_files_are_written_to_a_temporary_folder(temporary):
    code = "import os, tempfile\nopen('a', 'w').write('x')\nprint(os.getcwd(), tempfile.gettempdir(), os.listdir())"
    folder, again, *names = succeed(code).split()
    assert folder == again and names == ["['a']"]
    if missing_wall() is None:
        assert folder == "/tmp"
    else:
        assert Path(folder).parent == temporary
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
        ("import torch", "ModuleNotFoundError"),  # installed packages are out of reach
    ],
)
def test_bad_ends(code, error):
    result = fail(code)
    assert result.error.startswith(error) and "sandbox_child.py" not in result.stderr
    assert not result.timeout and not result.memory_exceeded


def test_null_bytes_are_an_error():
    assert "null bytes" in fail("print(1)\0").error


def test_the_memory_flag_is_set_only_by_failures():
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
        (dict(code="", maximum_memory_bytes=0), "memory_bytes=0"),  # nanochat's name
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


def test_long_output_is_truncated():
    code = "import sys\nprint('first')\nfor _ in range(400):\n    sys.stdout.write('x' * 50_000)\nprint('last')"
    output = succeed(code, output_bytes=1000)
    assert output.startswith("first\nxxx") and output.endswith("xxx" + "last\n")
    assert f"\n[{20_000_000 + 11 - 1000} bytes of output left out]\n" in output and len(output) < 1100


def test_long_output_of_both_streams_does_not_block():
    code = "import sys\nfor _ in range(300):\n    sys.stderr.write('e' * 9999)\n    sys.stdout.write('o' * 9999)\n1 / 0"
    result = fail(code, output_bytes=500)
    assert result.error == "ZeroDivisionError: division by zero"  # the end of a long stream is kept
    assert len(result.stdout) < 600 and len(result.stderr) < 600


def test_partial_output_survives_a_timeout():
    code = "import sys, time\nprint('é' * 3, flush=True)\nsys.stderr.write('why')\nsys.stderr.flush()\ntime.sleep(60)"
    result = fail(code, timeout=2)
    assert result.timeout and (result.stdout, result.stderr) == ("ééé\n", "why")


def test_endless_output_ends_in_time():
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
