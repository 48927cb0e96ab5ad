"""The one exception for bad input: a line that names what is wrong and what to do, and exit code 2."""

import reprlib

MAX_LINE = 600
MAX_NAME = 120

VALUES = reprlib.Repr()  # stops at a depth, so that a value of a thousand brackets cannot overflow the stack
VALUES.maxlevel = 2
VALUES.maxstring = VALUES.maxlong = VALUES.maxother = 60


class Refused(Exception):
    """Bad usage or a bad snapshot. The message is one printable line for the user, whatever the snapshot holds."""

    def __init__(self, message):
        super().__init__(shorten(printable(shorten(message, MAX_LINE)), MAX_LINE))


def shorten(text, limit=MAX_NAME):
    """The text, or its beginning and end around '...' when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"


def printable(text):
    """Newlines, terminal codes and lone surrogates escaped: names and values come from files of others."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def show(value):
    """A value of a JSON file, short enough for a message."""
    return shorten(VALUES.repr(value))


def reason(error):
    """What an exception of a library says, or at least its name."""
    return str(error) or type(error).__name__
