"""Every program of the tree begins and ends as colibri.py does: in one line where its Python lacks something, in one
line for every error, and with nothing large left behind."""

import ast
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build
from machine import files, interpreter
from machine.exit import Terminated, hold_signals
from machine.files import temporary_folder
from scripts import convert, native
from tests.conftest import ROOT
from tests.support.screen import Screen

ROOMS = ("", "scripts", "dev", "bench")
PROGRAMS = [
    path.relative_to(ROOT)
    for room in ROOMS
    for path in sorted((ROOT / room).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]
OWN = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
OLD = (3, 8)  # its grammar; an older one may call it a syntax error


def tree_of(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), feature_version=OLD)


def imports_of(node):
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_a_program_looks_at_its_python_first(path):
    """Before anything of the project or of a package is imported, and an old Python can read the file so far."""
    assert len(PROGRAMS) > 20
    statements = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    first = next(i for i, node in enumerate(statements) if "machine.interpreter" in ast.unparse(node))
    for node in statements[:first]:
        assert imports_of(node) <= set(sys.stdlib_module_names), f"{path} imports {imports_of(node)} first"


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_a_program_ends_through_exit_code(path):
    """quality, make_synthetic, bench/decode and others had ways of their own: tracebacks, and gigabytes left behind."""
    names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
    assert "exit_code" in names or path.name == "reference_tier.py"  # the main of colibri.py
    assert not {"TemporaryDirectory", "mkdtemp"} & names
    text = (ROOT / path).read_text(encoding="utf-8")
    assert "TemporaryDirectory" not in text and "file=sys.stderr" not in text


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_a_python_without_packages_is_one_line(path):
    """`python colibri.py` without .venv ended in a traceback about torch."""
    process = subprocess.run(
        [sys.executable, "-S", str(path), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    [line] = process.stderr.splitlines()
    assert process.returncode == 2 and process.stdout == ""
    assert line.startswith(f"{path.stem}: torch is not installed for {sys.executable}; ")


def test_the_line_says_which_python_to_use(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["scripts/convert.py", "--help"])
    monkeypatch.chdir(tmp_path)
    assert interpreter.problem_of((3, 11), ()) == interpreter.problem_of((3, 14), ("os", "sys")) == ""
    monkeypatch.setattr(interpreter, "VENV_PYTHON", "/usr/bin/env")
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert interpreter.problem_of((3, 9), ()) == (
        f"Python 3.11 or newer is needed, {sys.executable} is 3.9; use /usr/bin/env scripts/convert.py"
    )
    assert "no_such_package is not installed" in interpreter.problem_of((3, 12), ("os", "no_such_package"))
    monkeypatch.setattr(interpreter, "VENV_PYTHON", "/no/python")
    assert interpreter.problem_of((3, 9), ()).endswith(
        f"run `make setup` in {ROOT}, then .venv/bin/python {os.path.relpath(tmp_path / 'scripts/convert.py', ROOT)}"
    )
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))  # a package of some programs alone
    assert interpreter.missing_package("gguf.x") == (
        f"gguf is not installed; {sys.executable} -m pip install -c constraints.txt gguf"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "gguf is not installed"),
        (
            ImportError("libgomp.so.1: cannot open\nshared object file"),
            "cannot be loaded: libgomp.so.1: cannot open shared",
        ),
        (OSError("libtorch_cpu.so: cannot open shared object file"), "cannot be loaded: libtorch_cpu.so"),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_comes_up_while_modules_are_imported_is_one_line(monkeypatch, capsys, error, words):
    """Ctrl-C in the first second showed where torch was at, a broken package its own frames."""
    monkeypatch.setattr(sys, "argv", ["scripts/convert.py"])
    if words:
        with pytest.raises(SystemExit) as ended:
            interpreter.end_in_one_line(type(error), error, None)
        assert ended.value.code == 2
    else:
        interpreter.end_in_one_line(type(error), error, None)
    err = capsys.readouterr().err
    assert (err.startswith("convert: ") and words in err and err.count("\n") == 1) if words else err == ""


@pytest.mark.parametrize(
    "arguments", [["colibri.py", "--help"], ["-P", "colibri.py", "--help"], ["scripts/native.py", "--help"]]
)
def test_help_whose_reader_went_away(arguments):
    """python scripts/native.py --help | true; with PYTHONSAFEPATH (-P) colibri.py did not find its own modules."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert process.returncode in (0, 141) and process.stderr == b""


def test_help_of_native_compiles_nothing(monkeypatch, capsys):
    """`python scripts/native.py --help` compiled for every instruction set."""
    monkeypatch.setattr(native, "find_library", lambda *rest: pytest.fail("compiled"))
    with pytest.raises(SystemExit) as ended:
        native.main(["--help"])
    assert ended.value.code == 0 and "Compile the C kernels" in capsys.readouterr().out
    assert native.main(["--everything"]) == 2
    assert capsys.readouterr().err == "native: unrecognized arguments: --everything\n"


def test_a_full_disk_is_said_once(monkeypatch, capsys):
    """native.py said that the disk is full for every instruction set."""

    def fail(*rest):
        raise build.CannotBuild("/cache/kernels: its disk is full")

    monkeypatch.setattr(native, "find_library", fail)
    assert native.main([]) == 2
    assert capsys.readouterr().err == "native: /cache/kernels: its disk is full\n"


# --- what is temporary is removed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated, ValueError, None])
def test_a_temporary_folder_is_removed_however_its_block_ends(monkeypatch, error):
    """A second Ctrl-C, or `timeout`, which sends two SIGTERM, interrupted the removal: 1.4 GB stayed."""
    remove = files.shutil.rmtree

    def interrupted(path, **options):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        remove(path, **options)

    monkeypatch.setattr("machine.files.shutil.rmtree", interrupted)
    folders = []
    with pytest.raises(KeyboardInterrupt), temporary_folder() as folder:
        folders.append(folder)
        (folder / "weights").write_bytes(b"x")
        if error:
            raise error
    assert not folders[0].exists()


def test_held_signals_count_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    done = []
    with pytest.raises(KeyboardInterrupt), hold_signals():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done and before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


HOLDER = """
import sys, time
from machine.exit import exit_code
from machine.files import temporary_folder

def work():
    with temporary_folder() as folder:
        for i in range(300):
            (folder / str(i)).write_text("x")
        print(folder, flush=True)
        time.sleep(60)

sys.exit(exit_code("holder", work, "interrupted"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_program_that_is_told_to_end_leaves_nothing(tmp_path, number):
    """soak.py left 1.4 GB behind."""
    (tmp_path / "holder.py").write_text(HOLDER)
    command = [sys.executable, str(tmp_path / "holder.py")]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    for _ in range(1 if number == signal.SIGINT else 3):  # `timeout` sends two
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and not folder.exists() and err == "holder: interrupted\n"


# --- convert's bar ----------------------------------------------------------------------------------------------------


def test_the_bar_of_convert_stays_in_one_row(monkeypatch):
    """It had more than 100 columns: on a terminal of 80 each step scrolled by a line."""
    now = 0.0
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(convert.Terminal, "has_bar", True)
    monkeypatch.setattr(convert.Terminal, "is_bar_shown", False)
    monkeypatch.setattr(convert.time, "monotonic", lambda: now)
    progress = convert.ConversionProgress("convert", 406_000_000_000)
    for _ in range(20):
        now += 100.0
        progress.add(20_000_000_000, "out-mtp-00001.safetensors")
    assert "#####" in shown.getvalue()
    screen = Screen(80).feed(shown.getvalue())
    assert len(screen.rows) == 1 and screen.lines[0].startswith("[convert] ######") and len(screen.lines[0]) < 80
    convert.say(progress.line("out-mtp-00001.safetensors"))
    screen = Screen(80).feed(shown.getvalue())
    assert screen.lines[0].startswith("[convert] out-mtp-00001.safetensors | 400.00 of 406.00 GB")
