"""Files of a snapshot, opened and read: all bytes that were asked for, or one line that says why not."""

import errno
import os
import stat
import threading
import time
from contextlib import suppress

from errors import Refused

PAGE = 4096  # what direct reads are aligned to, in the file and in memory
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: macOS has none
DIRECT_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)  # of direct reads, by a file system that cannot do them
TRANSIENT_ERRORS = (errno.EINTR, errno.EAGAIN, errno.EIO, errno.ENOMEM, errno.ETIMEDOUT)  # may pass: tried again
PAUSES = (0.1, 0.4)  # seconds before the second and the third try
MAX_TEXT_BYTES = 100_000_000  # of a JSON file or a template; published tokenizers have 20 MB


def align_to_page(num_bytes):
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def open_file(path, flags=0):
    """A read-only descriptor. Links are followed, and only a regular file is opened: a FIFO would wait forever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise Refused(f"{path}: links to a file that is not there; download it again") from None
        raise
    if not stat.S_ISREG(mode):
        raise Refused(f"{path}: is not a regular file but a folder, a pipe or a device; put the file there")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)


def read_file(path, advice="SNAP must name a Hugging Face snapshot folder"):
    """All bytes of a small file; `advice` says what to do when there is none."""
    try:
        with open(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_TEXT_BYTES:
                raise Refused(f"{path}: has {size} bytes, above the limit of {MAX_TEXT_BYTES}")
            return file.read()
    except FileNotFoundError:
        raise Refused(f"{path}: no such file; {advice}") from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None


class FileReader:
    """Open files of a snapshot, read-only, each opened once. Threads may share it. Close it when the model goes.

    `preadv` is what reads, os.preadv but in tests of what goes wrong.
    """

    def __init__(self, preadv=None):
        self.preadv = preadv or os.preadv
        self.descriptors, self.opening = {}, threading.Lock()  # (path, flags) -> descriptor
        self.buffered_only = set()  # files whose file system refuses direct reads

    def read_into(self, path, offset, buffer, what):
        """Fill `buffer` (a writable memoryview) from `offset`; `what` names the tensor in a complaint."""
        done = 0
        while done < len(buffer):
            count = self.pread(path, 0, offset + done, buffer[done:], what)
            if count == 0:
                raise Refused(f"{path}: ends at byte {offset + done}, inside {what}; download it again")
            done += count

    def read_direct(self, path, offset, pages, wanted, what):
        """The same past the page cache: `pages` is whole pages, page-aligned as `offset` is, of which the first
        `wanted` bytes must come; the file may end in the last page. Buffered where the file system refuses it."""
        count = 0
        if self.can_read_direct(path):
            # What a short read leaves may begin at any byte, which direct reads cannot: the rest is read buffered.
            count = self.pread(path, O_DIRECT, offset, pages, what)
        self.read_into(path, offset + count, pages[count:wanted], what)

    def can_read_direct(self, path):
        """Whether direct reads of a file are possible, as far as is known before one was tried."""
        return O_DIRECT and path not in self.buffered_only

    def pread(self, path, flags, offset, buffer, what):
        """One preadv -> bytes read, 0 at the end of the file, and for a direct read that is refused; transient errors
        are tried again."""
        for pause in (*PAUSES, None):
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

    def get_descriptor(self, path, flags=0):
        """The descriptor of a file, opened at its first use."""
        with self.opening:
            if (path, flags) not in self.descriptors:
                self.descriptors[path, flags] = open_file(path, flags)
            return self.descriptors[path, flags]

    def drop_cached(self, path, offset, num_bytes):
        """Drop a part of a file from the page cache; nothing happens where the system knows no such advice."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self.get_descriptor(path), offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self):
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
