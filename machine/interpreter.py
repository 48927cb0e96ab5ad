"""The Python that runs this: in one line, what it lacks and which one to use. Every program imports this file first.

It runs by any Python 3, before anything else of the project, and has therefore none of the newer syntax.
"""

import atexit
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

OLDEST = (3, 11)
PACKAGES = ("torch", "numpy", "tokenizers", "jinja2", "psutil")  # of every program; others are imported where needed
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV_PYTHON = os.path.join(ROOT, ".venv", "bin", "python")


def problem_of(version: "Sequence[int]", packages: "Sequence[str]") -> str:
    """-> the line about a Python of this version that needs these packages; empty: it will do."""
    if tuple(version) < OLDEST:
        needed, found = (".".join(map(str, numbers)) for numbers in (OLDEST, version))
        return f"Python {needed} or newer is needed, {sys.executable} is {found}; {advice()}"
    for name in packages:
        if find_spec(name) is None:
            return missing_package(name)
    return ""


def missing_package(name: str) -> str:
    """-> the line about a package that cannot be imported."""
    top = name.split(".")[0]
    if top in PACKAGES or not runs_in_venv():
        return f"{top} is not installed for {sys.executable}; {advice()}"
    return f"{top} is not installed; {sys.executable} -m pip install -c constraints.txt {top}"


def broken_package(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"a package of {sys.executable} cannot be loaded: {message}"


def runs_in_venv() -> bool:
    return os.path.realpath(sys.prefix) == os.path.realpath(os.path.join(ROOT, ".venv"))


def advice() -> str:
    """-> what to type instead."""
    script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "colibri.py"
    if os.access(VENV_PYTHON, os.X_OK) and not runs_in_venv():
        near = os.path.relpath(VENV_PYTHON)
        return f"use {VENV_PYTHON if near.startswith(os.pardir) else near} {script}"
    return f"run `make setup` in {ROOT}, then .venv/bin/python {os.path.relpath(os.path.abspath(script), ROOT)}"


def end_in_one_line(kind: type, error: BaseException, trace: object) -> None:
    """The hook for exceptions that come up while modules are imported: a package that is missing or broken, Ctrl-C."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        give_up(missing_package(error.name))
    if isinstance(error, (ImportError, OSError)):
        give_up(broken_package(error))
    if not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]


def give_up(line: str) -> None:
    name = os.path.basename(sys.argv[0] if sys.argv else "").rpartition(".")[0] or "colibri"
    if sys.stderr is not None:
        sys.stderr.write(f"{name}: {line}\n")
    raise SystemExit(2)


def flush_stdout() -> None:
    """Flush what is left, as of --help; it is lost where that fails, and would fail again when the interpreter ends."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except AttributeError:  # closed before the start
        pass


atexit.register(flush_stdout)
sys.excepthook = end_in_one_line
problem = problem_of(sys.version_info[:2], PACKAGES)
if problem:
    give_up(problem)
