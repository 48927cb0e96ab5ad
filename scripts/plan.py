"""Print the memory plan of a snapshot on this machine, made from its headers alone: what the engine would allocate.

    python scripts/plan.py models/tiny
    RAM_GB=24 CTX=8192 python scripts/plan.py /models/glm-5.2 0 4 8 --json

The folder may be left out when SNAP is set; the other arguments and the variables are those of colibri.py. Exit code 2
when it does not fit, with need and have in one line.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from load.model import open_snapshot
from machine.exit import exit_code
from settings import Settings


def main(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    positional = [argument for argument in arguments if argument != "--json"]
    folder = positional.pop(0) if positional and not positional[0].isdigit() else None
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    return exit_code("plan", lambda: print_plan(positional, folder, as_json))


def print_plan(positional: list[str], folder: str | None, as_json: bool) -> int:
    settings = Settings.read(positional, snap=folder)
    opened = open_snapshot(settings, anywhere=True)
    notices = [*settings.notices, *opened.notices]
    if as_json:
        print(json.dumps(opened.plan.as_json() | {"lossy": list(opened.lossy.values()), "notices": notices}, indent=1))
    else:
        print(*opened.plan.lines(), *notices, sep="\n")
    opened.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
