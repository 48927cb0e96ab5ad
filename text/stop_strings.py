"""Stop strings over text that comes in pieces."""


class StopStrings:
    """Gives back what cannot be the beginning of a stop string any more; a stop string may span pieces."""

    def __init__(self, stops=()):
        self.stops, self.held = stops, ""

    def push(self, text):
        """-> (the text that is certain, whether a stop string followed it). Nothing comes after that."""
        text = self.held + text
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.held = ""
            return text[: min(found)], True
        kept = overlap(text, self.stops)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def finish(self):
        """-> what was held back, at the end of the text."""
        held, self.held = self.held, ""
        return held


def overlap(text, words):
    """The length of the longest end of the text that one of the words begins with, short of the whole word."""
    return max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
