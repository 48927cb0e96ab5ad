"""Base of the streaming parsers of generated text: a buffer, and a state that consumes it.

A segment is ("reasoning", text), ("content", text), ("call", function name) or ("arguments", JSON text). The joined
segments of a text do not depend on the increments in which it arrives.
"""

from collections.abc import Callable

Segment = tuple[str, str]
State = Callable[[list[Segment]], bool]


class StreamParser:
    """`state` is the method that parses the buffer next: it appends segments, and returns whether parsing goes on
    without more text."""

    def __init__(self, state: State, buffer: str = ""):
        self.state = state
        self.buffer = buffer
        self.is_finished = False  # nothing counts any more; the rest of the text stays in the buffer

    def parse_increment(self, text: str) -> list[Segment]:
        """Return the segments that an increment of text completes."""
        self.buffer += text
        segments: list[Segment] = []
        while not self.is_finished and self.state(segments):
            pass
        return join_segments(segments)

    def enter(self, state: State, buffer: str) -> bool:
        """Parse the buffer with another state."""
        self.state = state
        self.buffer = buffer
        return True


def join_segments(segments: list[Segment]) -> list[Segment]:
    """Join neighbors of one kind, except calls."""
    joined: list[Segment] = []
    for kind, text in segments:
        if joined and joined[-1][0] == kind != "call":
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return joined
