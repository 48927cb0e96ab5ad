"""Compile the C kernels for every instruction set of this machine: `make native`. Else the first run compiles them."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from errors import Refused
from kernels.build import BuildError, CannotBuild, find_library, usable_variants
from machine.console import say
from machine.exit import exit_code
from scripts.options import OneLineParser
from settings import Settings


def main(arguments: list[str] | None = None) -> int:
    return exit_code("native", lambda: compile_all(OneLineParser(description=__doc__).parse_args(arguments)))


def compile_all(_: argparse.Namespace) -> int:
    folder = Settings.read([]).cache / "kernels"
    made = 0
    for name in usable_variants():
        started = time.monotonic()
        try:
            path = find_library(folder, name)
        except CannotBuild as error:
            raise Refused(str(error)) from None
        except BuildError as error:
            say(f"native: {name}: {error}")  # older compilers lack the newest ones
            continue
        made += 1
        print(f"{name:12}{path}  ({time.monotonic() - started:.1f} s)")
    return 0 if made else 2


if __name__ == "__main__":
    sys.exit(main())
