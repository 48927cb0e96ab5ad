"""Bytes at (file, offset) into a buffer: all of them, or one line that says which tensor could not be read."""

import os

from snapshot.errors import Refused


class Reader:
    """Open files of a snapshot, read-only, each opened once. Close it when the model goes."""

    def __init__(self):
        self.descriptors = {}

    def read_into(self, path, offset, buffer, what):
        """Fill `buffer` (a writable memoryview) from `offset`; `what` names the tensor in a complaint."""
        done, size = 0, len(buffer)
        try:
            descriptor = self.descriptors.get(path)
            if descriptor is None:
                descriptor = self.descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
