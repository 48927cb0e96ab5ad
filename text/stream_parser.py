"""Base of the streaming parsers of generated text: a buffer, and a state that consumes it.

A segment is ("reasoning", text), ("content", text), ("call", function name) or ("arguments", JSON text). The joined
segments of a text do not depend on the increments in which it arrives.
"""

from collections.abc import Callable

TextSegment = tuple[str, str]
State = Callable[[], bool]


class StreamParser:
    """`state` is the method that parses the buffer next: it appends segments, and returns whether parsing goes on
    without more text."""

    def __init__(self, state: State, buffer: str = ""):
        self.state = state
        self.buffer = buffer
        self.segments: list[TextSegment] = []  # that are not returned yet
        self.is_finished = False  # nothing counts any more; the rest of the text stays in the buffer

    def parse_increment(self, text: str) -> list[TextSegment]:
        """Return the segments that an increment of text completes."""
        self.buffer += text
        self.run_states()
        return self.take_segments()

    def run_states(self) -> None:
        while not self.is_finished and self.state():
            pass

    def take_segments(self) -> list[TextSegment]:
        segments, self.segments = self.segments, []
        return segments

    def append_segment(self, kind: str, text: str) -> None:
        """Append a segment, joined to the one before if that has the same kind; calls are never joined."""
        if self.segments and self.segments[-1][0] == kind != "call":
            text = self.segments.pop()[1] + text
        if text:
            self.segments.append((kind, text))

    def enter(self, state: State, buffer: str) -> bool:
        """Parse the buffer with another state."""
        self.state = state
        self.buffer = buffer
        return True
