"""make_snapshot: write a synthetic snapshot (dev/make_synthetic.py) for a benchmark."""

import subprocess
import sys
from pathlib import Path

from errors import Refused

SCRIPT = Path(__file__).resolve().parents[1] / "dev" / "make_synthetic.py"


def make_snapshot(folder: Path, options: str) -> None:
    """options: the model's name and what follows it on the command line of dev/make_synthetic.py."""
    model, *more = options.split()
    if subprocess.run([sys.executable, str(SCRIPT), model, str(folder), *more], stdout=sys.stderr).returncode:
        raise Refused("the synthetic snapshot could not be written")
