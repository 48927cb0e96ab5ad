"""FieldReader: typed, range-checked reads of named values (variables, config keys, request fields)."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from errors import Refused, show

MISSING: Any = object()  # stands for "no default": an absent value is refused


class FieldReader:
    """Named values typed as in JSON; true and 1.0 are no whole numbers. A value of None counts as absent.

    An absent value gives the default, or is refused without one. Every complaint reads `label=value: expected ...`.
    A subclass says where a value is found (`find`), how a complaint names it (`label`) and how it is raised (`refuse`).
    """

    def __init__(self, values: Mapping[str, Any], subject: str = "") -> None:
        """subject: the file or line that holds the values; it begins every complaint."""
        self.values = values
        self.subject = subject

    def find(self, name: str) -> Any:
        return self.values.get(name)

    def label(self, name: str) -> str:
        return f"{self.subject}: {name}" if self.subject else name

    def refuse(self, name: str, message: str) -> NoReturn:
        raise Refused(message)

    def expected(self, name: str, value: Any, what: str) -> NoReturn:
        self.refuse(name, f"{self.label(name)}={show(value)}: expected {what}")

    def find_or(self, name: str, default: Any) -> Any:
        """The value, or None for an absent one that has a default."""
        value = self.find(name)
        if value is None and default is MISSING:
            self.refuse(name, f"{self.label(name)} is missing")
        return value

    def whole(self, name: str, default: Any = MISSING, low: int = 0, high: float = 1 << 31) -> Any:
        value = self.find_or(name, default)
        if value is None:
            return default
        number = self.to_whole(value)
        if number is None or not low <= number <= high:
            self.expected(name, value, whole_in(low, high))
        return number

    def number(self, name: str, default: Any = MISSING, low: float = 0.0, high: float = 1e12) -> Any:
        value = self.find_or(name, default)
        if value is None:
            return default
        number = self.to_number(value)
        if number is None or not (low <= number <= high and math.isfinite(number)):
            self.expected(name, value, f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else ""))
        return number

    def flag(self, name: str, default: Any = MISSING) -> Any:
        value = self.find_or(name, default)
        if value is None:
            return default
        if (flag := self.to_flag(value)) is None:
            self.expected(name, value, self.FLAGS)
        return flag

    def text(self, name: str, default: Any = MISSING) -> Any:
        """A text that UTF-8 can hold."""
        value = self.find_or(name, default)
        if value is None:
            return default
        if not isinstance(value, str):
            self.expected(name, value, "a text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.expected(name, value, "a text without halves of surrogate pairs")
        return value

    def one_of(self, name: str, words: Collection[str], default: Any = MISSING) -> Any:
        value = self.find_or(name, default)
        if value is None:
            return default
        if not isinstance(value, str) or value not in words:
            *most, last = words
            self.expected(name, value, f"{', '.join(most)} or {last}" if most else last)
        return value

    def wholes(self, name: str, default: Any = MISSING, low: int = 0, high: float = 1 << 31) -> Any:
        """A list of whole numbers, such as token ids; a bad entry is named by its index."""
        value = self.find_or(name, default)
        if value is None:
            return default
        if not isinstance(value, list):
            self.expected(name, value, "a list of whole numbers")
        for i, entry in enumerate(value):
            number = self.to_whole(entry)
            if number is None or not low <= number <= high:
                self.expected(f"{name}[{i}]", entry, whole_in(low, high))
        return value

    FLAGS = "true or false"

    def to_whole(self, value: Any) -> int | None:
        return value if type(value) is int else None

    def to_number(self, value: Any) -> float | None:
        return value if type(value) in (int, float) else None

    def to_flag(self, value: Any) -> bool | None:
        return value if isinstance(value, bool) else None


def whole_in(low: int, high: float) -> str:
    return f"a whole number from {low}" + (f" to {high}" if high < math.inf else "")


class TextFieldReader(FieldReader):
    """Named values that are all texts: environment variables and command-line arguments."""

    FLAGS = "1 (on) or 0 (off)"

    def to_whole(self, value: str) -> int | None:
        # int() alone would also take 1_0, blanks, or digits of other scripts.
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 20 else None

    def to_number(self, value: str) -> float | None:
        try:
            return float(value)
        except ValueError:
            return None

    def to_flag(self, value: str) -> bool | None:
        return {"1": True, "0": False}.get(value)
