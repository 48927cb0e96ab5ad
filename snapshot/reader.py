"""Files of a snapshot, opened and read: all bytes that were asked for, or one line that says why not."""

import os
import stat
import threading

from snapshot.errors import Refused

MAX_TEXT_BYTES = 100_000_000  # of a JSON file or a template; published tokenizers have 20 MB


def open_file(path):
    """A read-only descriptor. Links are followed, and only a regular file is opened: a FIFO would wait forever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise Refused(f"{path}: links to a file that is not there; download it again") from None
        raise
    if not stat.S_ISREG(mode):
        raise Refused(f"{path}: is not a regular file but a folder, a pipe or a device; put the file there")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


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


class Reader:
    """Open files of a snapshot, read-only, each opened once. Threads may share it. Close it when the model goes."""

    def __init__(self):
        self.descriptors, self.opening = {}, threading.Lock()

    def read_into(self, path, offset, buffer, what):
        """Fill `buffer` (a writable memoryview) from `offset`; `what` names the tensor in a complaint."""
        done, size = 0, len(buffer)
        try:
            with self.opening:
                descriptor = self.descriptors.get(path)
                if descriptor is None:
                    descriptor = self.descriptors[path] = open_file(path)
            while done < size:
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    raise Refused(f"{path}: ends at byte {offset + done}, inside {what}; download it again")
                done += count
        except OSError as error:
            raise Refused(f"{path}: {error.strerror} at byte {offset + done}, reading {what}") from None

    def close(self):
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
