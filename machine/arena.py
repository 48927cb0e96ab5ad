"""Arena: memory for weights, one mapping in huge pages, handed out in slices.

Each decode step reads weights from one end to the other; with pages of 4 KiB, TLB misses cost a sixth of the speed.
Pages count as memory only once they are written.
"""

import ctypes
import mmap

import torch
from torch import Tensor

LIBC = ctypes.CDLL(None)  # its calls release the GIL, which those of mmap do not
LINE = 64  # bytes of a cache line: no two slices share one
MADV_POPULATE_WRITE = 23  # Linux 5.14; other systems refuse it


class Arena:
    """`size` bytes, allocated front to back by `allocate`."""

    def __init__(self, size: int):
        self.memory = mmap.mmap(-1, max(mmap.PAGESIZE, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)  # [size]
        self.used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """The next `num_bytes` as a uint8 tensor that begins on a cache line."""
        start = self.used
        self.used = align_to_line(start + num_bytes)
        return self.bytes[start : start + num_bytes]

    def populate(self, start: int, stop: int) -> bool:
        """Fault in whole pages now instead of at the first write, contents unchanged; False if the system cannot.

        It takes as long as writing zeros to them; other threads run meanwhile.
        """
        address = ctypes.c_void_p(self.bytes.data_ptr() + start)
        return LIBC.madvise(address, ctypes.c_size_t(stop - start), MADV_POPULATE_WRITE) == 0

    def release(self, start: int, stop: int) -> None:
        """Return whole pages to the system; their contents are lost, and zeros at the next access."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


def align_to_line(num_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-num_bytes // LINE) * LINE
