"""Where the time goes, stage by stage. Disk wait is counted by the expert cache itself."""

import time
from contextlib import contextmanager

STAGES = ("expert-matmul", "attention", "lm_head", "router", "dense-mlp", "sample", "text")


class Profile:
    """Seconds by stage name."""

    def __init__(self):
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def measure(self, stage):
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started

    def reset(self):
        self.seconds = dict.fromkeys(STAGES, 0.0)
