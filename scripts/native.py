"""Compile the C kernels for every instruction set of this machine: `make native`. Else the first run compiles them."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.build import BuildError, find_library, usable_variants
from settings import Settings


def main() -> int:
    folder = Settings.read([]).cache / "kernels"
    made = 0
    for name in usable_variants():
        started = time.monotonic()
        try:
            path = find_library(folder, name)
        except BuildError as error:
            print(f"native: {name}: {error}", file=sys.stderr)  # older compilers lack the newest ones
            continue
        made += 1
        print(f"{name:12}{path}  ({time.monotonic() - started:.1f} s)")
    return 0 if made else 2


if __name__ == "__main__":
    sys.exit(main())
