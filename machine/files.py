"""Atomic file writes (a temporary file takes the target's name once it is complete), and temporary folders."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from machine.exit import hold_signals

PARTIAL = ".partial"  # suffix of a file that is not complete


@contextmanager
def atomic_write(path: Path, sync: bool = False, keep_partial: bool = False) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` if the block ends without an exception. OSError as the system raises it.

    sync: the contents reach the disk before the name does. keep_partial: the file is <path>.partial, readable by others
    as the umask allows, and a failure leaves it to be overwritten by the next attempt; otherwise it has a name of its
    own, is readable by the user alone, and a failure or an interrupt deletes it.
    """
    partial, descriptor = f"{path}{PARTIAL}", None
    if not keep_partial:
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(partial if descriptor is None else descriptor, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if not keep_partial:
            Path(partial).unlink(missing_ok=True)
        raise


@contextmanager
def temporary_folder(prefix: str = "colibri-", parent: Path | None = None) -> Iterator[Path]:
    """A folder that is removed with all in it, whatever ends the block: it may hold gigabytes."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        with hold_signals():
            shutil.rmtree(folder, ignore_errors=True)


def save_text(path: Path, text: str) -> None:
    """Write a private file and its folder, complete or not at all; where that is not possible nothing happens."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
