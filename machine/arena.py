"""Memory for weights: one piece, asked for in huge pages, given out in slices.

A weight is read once a token from one end to the other; with pages of 4 KiB looking them up costs a sixth of the speed.
Pages count as memory only once they are written.
"""

import ctypes
import mmap
from functools import cache

import torch

LINE = 64  # bytes of a cache line: no two slices share one
MADV_POPULATE_WRITE = 23  # Linux 5.14; others refuse it


@cache
def libc():
    """The system's calls; unlike those of mmap they let other threads run."""
    return ctypes.CDLL(None)


class Arena:
    """`size` bytes; `take` gives them out one slice after the other."""

    def __init__(self, size):
        self.memory = mmap.mmap(-1, max(mmap.PAGESIZE, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.used = 0

    def allocate(self, num_bytes):
        """The next `num_bytes` as a uint8 tensor that begins on a cache line."""
        start = self.used
        self.used = align_to_line(start + num_bytes)
        return self.bytes[start : start + num_bytes]

    def populate(self, start, stop):
        """Have the system find memory for whole pages now, not at the first write; what they hold stays. -> whether it
        can do that. Takes as long as writing zeros to them; other threads go on."""
        address = ctypes.c_void_p(self.bytes.data_ptr() + start)
        return libc().madvise(address, ctypes.c_size_t(stop - start), MADV_POPULATE_WRITE) == 0

    def release(self, start, stop):
        """Memory of whole pages that is not needed for a while: it is lost, and zeros when written to again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


def align_to_line(num_bytes):
    """Rounded up to whole cache lines."""
    return -(-num_bytes // LINE) * LINE
