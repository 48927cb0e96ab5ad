"""A cgroup with a memory limit for the processes of a benchmark; file pages count against it. Linux only."""

import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from machine.console import say
from machine.memory import cgroup_folders

MOVE = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')  # a cgroup, and the command to run in it


def cgroup_parents() -> Iterator[tuple[Path, str]]:
    """Folders for a cgroup with a memory limit that stays under all our limits, with the name of the limit's file: in
    our own cgroup, and beside it with version 2, where a cgroup with processes cannot have limited ones below."""
    for version in (False, True):
        folders = [folder for folder, is_v2 in cgroup_folders("memory") if is_v2 == version]
        for folder in folders[: 1 + version]:
            yield folder, "memory.max" if version else "memory.limit_in_bytes"


@contextmanager
def memory_cgroup(num_bytes: int) -> Iterator[Path | None]:
    """The folder of a new cgroup limited to num_bytes, None where none can be made; removed at the end."""
    group = next((made for parent, limit in cgroup_parents() if (made := make_cgroup(parent, limit, num_bytes))), None)
    try:
        yield group
    finally:
        if group:
            remove_cgroup(group)


def make_cgroup(parent: Path, limit: str, num_bytes: int) -> Path | None:
    """The folder of a new cgroup that a process can be moved to, or None."""
    group = parent / f"colibri-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        # Without the memory controller the file does not exist and cannot be created.
        (group / limit).write_text(f"{num_bytes}\n")
        subprocess.run([*MOVE, str(group), "true"], check=True, stderr=subprocess.DEVNULL)
        return group
    except (OSError, subprocess.CalledProcessError):
        remove_cgroup(group)
        return None


def drop_from_page_cache(paths: Iterable[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove_cgroup(group: Path) -> None:
    """Remove a cgroup, which a process that has just ended keeps busy for a moment."""
    for _ in range(50):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)
    say(f"{group}: cannot be removed; remove it with rmdir")
