"""SimulatedDrive: a drive with a clock of its own, read by a DriveLearner; every run of it is the same."""

import random

SIZE = 20_000_000


class SimulatedDrive:
    """speed(mode, reads in flight, seconds) -> bytes a second of all reads together. Reads come in bursts, as a layer
    misses experts; between two bursts the drive is idle. noise: standard deviation of the logarithm of a read's work.
    """

    def __init__(self, speed, burst=(8, 8), noise=0.0, seed=1, size=SIZE):
        self.speed, self.burst, self.noise, self.size = speed, burst, noise, size
        self.random = random.Random(seed)
        self.now = 0.0

    def run(self, learner, num_reads, after_each=lambda: None):
        """Read num_reads experts as a ReadQueue does: as many at once as the learner wants."""
        left = num_reads
        while left > 0:
            waiting = min(left, self.random.randint(*self.burst))
            left -= waiting
            in_flight: list = []  # [bytes left, TimedRead]
            while waiting or in_flight:
                while waiting and len(in_flight) < learner.depth:
                    work = self.size * self.random.lognormvariate(0, self.noise)
                    in_flight.append([work, learner.begin(self.now)])
                    waiting -= 1
                count = len(in_flight)
                paces = [self.speed(read.mode, count, self.now) / count for _, read in in_flight]
                step = min(work / pace for (work, _), pace in zip(in_flight, paces, strict=True))
                self.now += step
                for read, pace in zip(in_flight, paces, strict=True):
                    read[0] -= pace * step
                for read in [read for read in in_flight if read[0] <= 1e-6 * self.size]:
                    in_flight.remove(read)
                    learner.end(read[1], self.now, self.size)
                    after_each()
            self.now += 0.005
