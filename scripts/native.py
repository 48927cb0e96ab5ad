"""Compile the C kernels for every set of instructions of this machine, as `make native` does; else it is at first use.

    python scripts/native.py [--asan]

--asan compiles them with the sanitizers for addresses and undefined behaviour, and prints where the library is.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.build import VARIANTS, BuildError, find_library, processor_flags
from settings import Settings

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asan", action="store_true", help="with sanitizers")
    args = parser.parse_args(arguments)
    folder = Settings.read([]).cache / "kernels"
    for name, needs in VARIANTS.items():
        if not processor_flags().issuperset(needs):
            continue
        started = time.monotonic()
        try:
            path = find_library(folder, name, extra=SANITIZE if args.asan else ())
        except BuildError as error:
            print(f"native: {name}: {error}", file=sys.stderr)
            return 2
        print(f"{name:12}{path}  ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
