"""Where the time of the forward pass goes. Disk wait is counted by the expert cache itself."""

import time
from contextlib import contextmanager


class Profile:
    """Seconds by stage name."""

    def __init__(self):
        self.seconds = {}

    @contextmanager
    def measure(self, stage):
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def reset(self):
        self.seconds.clear()
