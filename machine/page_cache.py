"""CachedPages: which pages of a file lie in the page cache, without reading any."""

import ctypes
import os
import sys

LIBC = ctypes.PyDLL(None)  # keeps the GIL: these calls take less than a microsecond, getting it back may take more
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
LIBC.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
PROT_READ, MAP_SHARED = 1, 1
FAILED = ctypes.c_void_p(-1).value
NUM_SAMPLES = 4  # pages of a byte range that are looked at: the kernel drops what was read together together


class CachedPages:
    """A file, mapped but never touched through the mapping, so that the system can be asked about its pages.

    preadv with RWF_NOWAIT would tell, too, but it starts to read what is not there.
    """

    def __init__(self, descriptor: int) -> None:
        """A descriptor that is open for reading; it may be closed afterwards. OSError where the system cannot tell."""
        if sys.platform != "linux":
            raise OSError("mincore tells this on Linux alone")
        status = os.fstat(descriptor)
        if not (status.st_uid == os.geteuid() or can_write(descriptor)):
            raise OSError("not the user's file: Linux then claims that all of it is cached")
        self.num_bytes = status.st_size
        self.address = LIBC.mmap(None, self.num_bytes, PROT_READ, MAP_SHARED, descriptor, 0)
        if self.address in (None, FAILED):
            raise OSError("the file system maps no files")
        self.page = os.sysconf("SC_PAGE_SIZE")

    def share(self, offset: int, num_bytes: int) -> float:
        """Share of the sampled pages of a byte range that are cached, 0 to 1. Takes some microseconds."""
        first, last = offset // self.page, (offset + max(1, num_bytes) - 1) // self.page
        state = ctypes.create_string_buffer(1)
        count = 0
        for i in range(NUM_SAMPLES):
            page = first + (last - first) * i // (NUM_SAMPLES - 1)
            failed = LIBC.mincore(self.address + page * self.page, self.page, state)
            count += not failed and state.raw[0] & 1
        return count / NUM_SAMPLES

    def close(self) -> None:
        LIBC.munmap(self.address, self.num_bytes)


def can_write(descriptor: int) -> bool:
    """True if this process may write to the open file, or is root."""
    return os.geteuid() == 0 or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)
