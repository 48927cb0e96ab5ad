"""Refused: the one exception for bad input, a line that names what is wrong and what to do, and exit code 2."""

import reprlib
from typing import Any

MAX_LINE = 600
MAX_NAME = 120

VALUES = reprlib.Repr()  # limits the depth: a value of a thousand brackets must not overflow the stack
VALUES.maxlevel = 2
VALUES.maxstring = VALUES.maxlong = VALUES.maxother = 60


class Refused(Exception):
    """Bad usage or a bad snapshot. The message is one printable line for the user, whatever the snapshot holds."""

    def __init__(self, message: str):
        super().__init__(shorten(printable(shorten(message, MAX_LINE)), MAX_LINE))


def shorten(text: str, limit: int = MAX_NAME) -> str:
    """The text, or its start and end around '...' if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"


def printable(text: str) -> str:
    """Newlines, terminal codes and lone surrogates escaped: names and values come from untrusted files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def show(value: Any) -> str:
    """A value of a JSON file, short enough for a message."""
    return shorten(VALUES.repr(value))


def reason(error: BaseException) -> str:
    """The message of an exception, or its class if it has none."""
    return str(error) or type(error).__name__
