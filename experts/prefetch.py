"""PrefetchController: whether experts are prefetched for the next layer, by what prefetches gained and cost so far.

A wasted prefetch costs the drive time that a needed read would have had; a useful one gains the time in which the drive
would have been idle. Both are measured for every prefetch, beside the time of predicting experts.
"""

LONG_CHUNK = 32  # rows; predictions for that many rows are hardly ever wrong
TRIAL, PAUSE, MAX_PAUSE = 16, 32, 512  # tokens
PREDICTIONS = 2  # of each layer: one layer ahead, and when it begins
CARRY_OVER = 0.5  # of the balance, from one trial to the next
FORGET = 0.99  # factor of the counts of prefetches at each new one


class PrefetchController:
    """Decides before each prediction whether it is made.

    `auto` stops while the last prefetches were not worth it, and tries again after pauses that double. Nothing is
    predicted where the last two tokens missed no expert.
    """

    def __init__(self, mode: str, num_layers: int) -> None:
        """mode: auto, 0 (never) or 1 (always, while experts are missed)."""
        self.mode = mode
        self.num_layers = max(1, num_layers)
        self.balance = 0.0  # seconds gained, minus those lost and those spent on predictions
        self.is_on = mode != "0"
        self.pause = PAUSE
        self.num_calls = 0  # since the last review, PREDICTIONS for each layer of each token
        self.useful, self.total = 1.0, 2.0  # decayed counts of prefetches
        self.layers_without_miss = 0  # the last ones, in a row

    def record_misses(self, count: int) -> None:
        """A layer missed `count` experts."""
        self.layers_without_miss = 0 if count else self.layers_without_miss + 1

    def should_predict(self, chunk_rows: int) -> bool:
        """Decide whether to predict the experts of a layer for a chunk."""
        if self.layers_without_miss >= 2 * self.num_layers:
            return False
        if self.mode != "auto" or chunk_rows >= LONG_CHUNK:
            return self.mode != "0"
        self.num_calls += 1
        if self.num_calls >= (TRIAL if self.is_on else self.pause) * PREDICTIONS * self.num_layers:
            self.review()
        return self.is_on

    def review(self) -> None:
        """Begin a trial after a pause, or a pause after a trial that was not worth it."""
        self.num_calls = 0
        if not self.is_on:
            self.is_on = True
            self.balance = 0.0
        elif self.balance > 0:
            self.pause = PAUSE
            self.balance *= CARRY_OVER
        else:
            self.is_on = False
            wait = self.pause
            self.pause = min(2 * wait, MAX_PAUSE)
            self.num_calls = (self.pause - wait) * PREDICTIONS * self.num_layers  # this pause is the shorter one

    def record_prefetch(self, is_useful: bool, seconds: float) -> None:
        """A prefetch turned out useful or wasted; it gained or cost that much drive time."""
        self.useful = FORGET * self.useful + is_useful
        self.total = FORGET * self.total + 1
        self.balance += seconds if is_useful else -seconds

    def record_prediction(self, seconds: float) -> None:
        """Predicting the experts of a layer took that long."""
        self.balance -= seconds

    @property
    def accuracy(self) -> float:
        """Share of recent prefetches that were useful, 0 to 1."""
        return self.useful / self.total
