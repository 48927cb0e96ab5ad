"""Opens and reads files of a snapshot: all requested bytes, or one line that says why not."""

import errno
import json
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from errors import Refused, shorten
from machine.page_cache import CachedPages

PAGE = 4096  # alignment of direct reads, in the file and in memory
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: macOS has none
DIRECT_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)  # from file systems without direct reads
TRANSIENT_ERRORS = (errno.EINTR, errno.EAGAIN, errno.EIO, errno.ENOMEM, errno.ETIMEDOUT)
RETRY_PAUSES = (0.1, 0.4)  # seconds before the second and the third attempt
MAX_TEXT_BYTES = 100_000_000  # of a JSON file or a template; published tokenizers have 20 MB
# What may lie under the name of a file of a snapshot instead of it: first bytes -> what that is and what to do.
NOT_THE_FILE = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file itself; run git lfs pull there, or hf download",
    b"<!doctype html": "is a web page, not the file itself; download it again, a gated model with a token",
    b"<html": "is a web page, not the file itself; download it again, a gated model with a token",
    b"GGUF": "is a GGUF file under another name; name it *.gguf and set SNAP to it",
    b"PK\x03\x04": "is a zip archive, as torch.save writes; download the model's safetensors",
}


def align_to_page(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def open_file(path: Path, flags: int = 0) -> int:
    """A read-only descriptor. Links are followed; only a regular file is opened: a FIFO would block forever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise Refused(f"{path}: links to a file that is not there; download it again") from None
        raise
    if not stat.S_ISREG(mode):
        raise Refused(f"{path}: is not a regular file but a folder, a pipe or a device; put the file there")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)


@contextmanager
def open_checked(path: Path, advice: str, magic: bytes = b"") -> Iterator[tuple[BinaryIO, int]]:
    """-> (a file to read, its bytes). Every OSError becomes Refused; `advice` says what to do if there is no file.
    magic: first bytes that are expected, where they mean another file to others."""
    try:
        with open(open_file(path), "rb") as file:
            head = file.read(64).lstrip()
            for start, problem in NOT_THE_FILE.items():
                text = head.lower() if start.startswith(b"<") else head
                if start != magic and text.startswith(start):
                    raise Refused(f"{path}: {problem}")
            file.seek(0)
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise Refused(f"{path}: no such file; {advice}") from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None


def read_file(path: Path, advice: str = "SNAP must name a Hugging Face snapshot folder") -> bytes:
    """All bytes of a small file."""
    with open_checked(path, advice) as (file, size):
        if size > MAX_TEXT_BYTES:
            raise Refused(f"{path}: has {size} bytes, above the limit of {MAX_TEXT_BYTES}")
        return file.read()


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a small file."""
    return parse_json_object(read_file(path), f"{path}:")


def parse_json_object(data: bytes, subject: str) -> dict[str, Any]:
    """UTF-8 bytes -> a JSON object without duplicate keys; `subject` begins every error message."""

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The parser keeps the last of two equal keys, so two programs could see two different files.
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise Refused(f"{subject} holds {shorten(twice)} twice")
        return values

    try:
        values = json.loads(data.decode("utf-8"), object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{subject} is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise Refused(f"{subject} must hold a JSON object")
    return values


class FileReader:
    """Reads from the files of a snapshot, each opened once. Threads may share it. Close it with the model."""

    def __init__(self, preadv: Callable[..., int] | None = None):
        self.preadv = preadv or os.preadv  # another in tests of read errors
        self.descriptors: dict[tuple[Path, int], int] = {}  # (path, flags) -> descriptor
        self.buffered_only: set[Path] = set()  # files whose file system refuses direct reads
        self.cached_pages: dict[Path, CachedPages | None] = {}  # None: the system does not tell
        self.opening = threading.Lock()

    def read_into(self, path: Path, offset: int, buffer: memoryview, what: str) -> None:
        """Fill `buffer` from `offset`; `what` names the tensor in error messages."""
        done = 0
        while done < len(buffer):
            count = self.pread(path, 0, offset + done, buffer[done:], what)
            if count == 0:
                raise Refused(f"{path}: ends at byte {offset + done}, inside {what}; download it again")
            done += count

    def read_direct(self, path: Path, offset: int, pages: memoryview, wanted: int, what: str) -> None:
        """Read the first `wanted` bytes of `pages` past the page cache, or buffered if the file system refuses that.

        `offset` and `pages` are page-aligned, and `pages` holds whole pages; the file may end in the last one.
        """
        count = 0
        if self.can_read_direct(path):
            # The rest of a short read may begin at any byte, which direct reads cannot: it is read buffered.
            count = self.pread(path, O_DIRECT, offset, pages, what)
        self.read_into(path, offset + count, pages[count:wanted], what)

    def can_read_direct(self, path: Path) -> bool:
        """False once the file system has refused a direct read, or if the system has none."""
        return bool(O_DIRECT) and path not in self.buffered_only

    def pread(self, path: Path, flags: int, offset: int, buffer: memoryview, what: str) -> int:
        """One preadv, repeated after transient errors -> bytes read; 0 at the end of the file and for a direct read
        that the file system refuses."""
        for pause in (*RETRY_PAUSES, None):
            try:
                return self.preadv(self.get_descriptor(path, flags), [buffer], offset)
            except OSError as error:
                if flags and error.errno in DIRECT_UNSUPPORTED:
                    self.buffered_only.add(path)
                    return 0
                if error.errno not in TRANSIENT_ERRORS or pause is None:
                    problem = f"{error.strerror} (errno {error.errno}) at byte {offset}, reading {what}"
                    raise Refused(f"{path}: {problem}") from None
                time.sleep(pause)
        raise AssertionError  # the last attempt returns or raises

    def get_descriptor(self, path: Path, flags: int = 0) -> int:
        """The descriptor of a file, opened at its first use."""
        with self.opening:
            if (path, flags) not in self.descriptors:
                self.descriptors[path, flags] = open_file(path, flags)
            return self.descriptors[path, flags]

    def drop_cached(self, path: Path, offset: int, num_bytes: int) -> None:
        """Drop a byte range from the page cache, where the system can."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self.get_descriptor(path), offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def cached_share(self, path: Path, offset: int, num_bytes: int) -> float:
        """About the share of a byte range that lies in the page cache, 0 to 1; 0 where the system does not tell."""
        if path not in self.cached_pages:
            pages = None
            with suppress(OSError, Refused):  # if there is no such file, reading it says so
                pages = CachedPages(self.get_descriptor(path))
            with self.opening:
                kept = self.cached_pages.setdefault(path, pages)
            if pages and pages is not kept:  # another thread was faster
                pages.close()
        pages = self.cached_pages[path]
        return pages.share(offset, num_bytes) if pages else 0.0

    def close(self) -> None:
        for pages in filter(None, self.cached_pages.values()):
            pages.close()
        self.cached_pages.clear()
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
