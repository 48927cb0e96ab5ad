"""Stop strings in text that arrives in increments."""

from collections.abc import Iterable


class StopStrings:
    """Holds back text that may be the start of a stop string; a stop string may span increments."""

    def __init__(self, stop_strings: Iterable[str] = ()):
        self.stop_strings = tuple(stop_strings)
        self.held = ""

    def filter_text(self, text: str) -> tuple[str, bool]:
        """Return (the text that can be given out, whether a stop string followed it). The first stop ends the text."""
        text = self.held + text
        found = [at for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        if found:
            self.held = ""
            return text[: min(found)], True
        text, self.held = split_partial_match(text, self.stop_strings)
        return text, False

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self.held = self.held, ""
        return held


def split_partial_match(text: str, words: Iterable[str]) -> tuple[str, str]:
    """Split off the longest end of the text that is the start of a word, but not all of it."""
    begin = len(text)
    for word in words:
        at = text.find(word[0], max(0, len(text) - len(word) + 1))
        while at >= 0 and not word.startswith(text[at:]):
            at = text.find(word[0], at + 1)
        if at >= 0:
            begin = min(begin, at)
    return text[:begin], text[begin:]
