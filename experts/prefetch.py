"""Step 2b of an expert's way: who is read before being asked for, and whether that pays.

A guess costs the drive time that something needed now would have had, if it is wrong; it gains the time that the drive
would have idled, if it is right. Both are measured for every guess, beside the time that guessing itself takes.
"""

from dataclasses import dataclass

MODES = ("auto", "0", "1")
LONG_CHUNK = 32  # rows; the experts that so many choose are hardly ever guessed wrong
TRIAL, PAUSE, LONGEST_PAUSE = 16, 32, 512  # tokens
LOOKS = 2  # at each layer: one layer ahead, and when it begins
KEPT = 0.5  # of the sums, from one trial to the next


@dataclass(slots=True)
class PrefetchGains:
    """Seconds."""

    gained: float = 0.0
    lost: float = 0.0
    thinking: float = 0.0

    @property
    def is_worth_it(self):
        return self.gained > self.lost + self.thinking


class PrefetchController:
    """Decides before each guess whether it is made. `auto` makes none while the last ones were not worth it, and tries
    again after a pause, each time a longer one. Where two tokens missed nothing there is nothing to guess."""

    def __init__(self, mode, num_layers):
        self.mode, self.num_layers = mode, max(1, num_layers)
        self.gains = PrefetchGains()
        self.is_on, self.pause = mode != "0", PAUSE
        self.calls = 0  # since the last decision, LOOKS for each layer of each token
        self.right, self.made = 1.0, 2.0  # guesses, slowly forgotten
        self.hits_in_a_row = 0  # layers that missed nothing

    def note_misses(self, count):
        """A layer missed so many experts."""
        self.hits_in_a_row = 0 if count else self.hits_in_a_row + 1

    def wants(self, chunk_rows):
        """Whether to guess a layer of a chunk."""
        if self.hits_in_a_row >= 2 * self.num_layers:
            return False
        if self.mode != "auto" or chunk_rows >= LONG_CHUNK:
            return self.mode != "0"
        self.calls += 1
        if self.calls >= (TRIAL if self.is_on else self.pause) * LOOKS * self.num_layers:
            self.decide()
        return self.is_on

    def decide(self):
        self.calls = 0
        if not self.is_on:
            self.is_on, self.gains = True, PrefetchGains()
        elif self.gains.is_worth_it:
            self.pause = PAUSE
            for name in PrefetchGains.__slots__:
                setattr(self.gains, name, KEPT * getattr(self.gains, name))
        else:
            self.is_on = False
            self.pause, wait = min(2 * self.pause, LONGEST_PAUSE), self.pause
            self.calls = (self.pause - wait) * LOOKS * self.num_layers  # this pause is the shorter one

    def note(self, is_right, seconds):
        """What became of a guess: the drive time it gained or cost."""
        self.right, self.made = 0.99 * self.right + is_right, 0.99 * self.made + 1
        if is_right:
            self.gains.gained += seconds
        else:
            self.gains.lost += seconds

    def note_thinking(self, seconds):
        """What finding out the guesses of a layer took."""
        self.gains.thinking += seconds

    @property
    def confidence(self):
        """Share of late guesses that were right, 0 to 1."""
        return self.right / self.made
