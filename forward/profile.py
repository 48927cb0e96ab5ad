"""The stage timer: seconds of each stage of a forward pass. Disk wait is counted by the expert cache."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

STAGES = ("expert-matmul", "attention", "lm_head", "router", "dense-mlp", "sample", "text")


class Profile:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started
