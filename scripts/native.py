"""Compile the C kernels for every set of instructions of this machine: `make native`. Else it is at first use."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.build import BuildError, find_library, usable_variants
from settings import Settings


def main():
    folder = Settings.read([]).cache / "kernels"
    made = 0
    for name in usable_variants():
        started = time.monotonic()
        try:
            path = find_library(folder, name)
        except BuildError as error:
            print(f"native: {name}: {error}", file=sys.stderr)  # an older compiler may not know the newest instructions
            continue
        made += 1
        print(f"{name:12}{path}  ({time.monotonic() - started:.1f} s)")
    return 0 if made else 2


if __name__ == "__main__":
    sys.exit(main())
