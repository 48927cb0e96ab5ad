"""Starts where much is missing: home, /proc, /dev/shm, locale, all that can be written. It runs, or says one line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# A mount namespace of our own: its mounts are seen by this process alone.
BARE = """
for folder in $EMPTY; do
    [ -d $folder ] && mount -t tmpfs -o ro,mode=555 tmpfs $folder
done
exec "$@"
"""
# Not what holds the checkout or the interpreter, which may lie in /tmp.
NEEDED = [ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()]
EMPTY = [
    folder
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/proc", "/sys")
    if not any(path.is_relative_to(folder) for path in NEEDED)
]
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_unshare():
    if not shutil.which("unshare"):
        return False
    command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/proc"]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def run_bare(arguments, **variables):
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/no/home",
        "LC_ALL": "xx_YY.none",
        "EMPTY": " ".join(EMPTY),
    } | variables
    command = [*UNSHARE, "sh", "-c", BARE, "sh", sys.executable, *arguments]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not can_unshare(), reason="needs namespaces")
def test_a_text_in_a_container_with_nothing():
    """It ended in a traceback of psutil, which finds no process without /proc; a missing home folder in another."""
    process = run_bare(["colibri.py"], PROMPT="In", NGEN="1", TEMP="0", KERNELS="reference")
    assert process.returncode == 0 and process.stdout.strip(), process.stderr
    assert "Traceback" not in process.stderr and "[memory] free memory is unknown" in process.stderr
