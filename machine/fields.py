"""FieldReader: typed, range-checked reads of named values (variables, config keys, request fields)."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from errors import Refused, show

MISSING: Any = object()  # stands for "no default": an absent value is refused


class FieldReader:
    """Named values typed as in JSON; true and 1.0 are no whole numbers. A value of None counts as absent.

    An absent value gives the default, or is refused without one. Every complaint reads `label=value: expected ...`.
    A subclass says where a value is found (`find`), how a complaint names it (`label`) and how it is raised (`refuse`).
    """

    FLAGS = "true or false"

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

    def get(self, name: str, default: Any) -> Any:
        """The value, or None for an absent one that has a default."""
        value = self.find(name)
        if value is None and default is MISSING:
            self.refuse(name, f"{self.label(name)} is missing")
        return value

    def check(self, name: str, default: Any, convert: Callable[[Any], Any], what: str) -> Any:
        """The converted value; refused where `convert` gives None."""
        value = self.get(name, default)
        if value is None:
            return default
        converted = convert(value)
        if converted is None:
            self.expected(name, value, what)
        return converted

    def whole(self, name: str, default: Any = MISSING, low: int = 0, high: float = 1 << 31) -> Any:
        what = f"a whole number from {low}" + (f" to {high}" if high < math.inf else "")
        return self.check(name, default, lambda value: within(self.to_whole(value), low, high), what)

    def number(self, name: str, default: Any = MISSING, low: float = 0.0, high: float = 1e12) -> Any:
        what = f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else "")
        return self.check(name, default, lambda value: within(self.to_number(value), low, high), what)

    def flag(self, name: str, default: Any = MISSING) -> Any:
        return self.check(name, default, self.to_flag, self.FLAGS)

    def text(self, name: str, default: Any = MISSING) -> Any:
        return self.check(name, default, to_text, "a text of valid Unicode")

    def one_of(self, name: str, words: Collection[str], default: Any = MISSING) -> Any:
        *most, last = words
        what = f"{', '.join(most)} or {last}" if most else last
        return self.check(name, default, lambda v: v if isinstance(v, str) and v in words else None, what)

    def wholes(self, name: str, default: Any = MISSING, low: int = 0, high: int = 1 << 31) -> Any:
        """A list of whole numbers, such as token ids; a bad entry is named by its index."""
        values = self.check(name, default, lambda v: v if isinstance(v, list) else None, "a list of whole numbers")
        for i, value in enumerate(values or ()):
            if within(self.to_whole(value), low, high) is None:
                self.refuse(
                    name, f"{self.label(name)}[{i}]={show(value)}: expected a whole number from {low} to {high}"
                )
        return values

    def to_whole(self, value: Any) -> int | None:
        return value if type(value) is int else None

    def to_number(self, value: Any) -> float | None:
        # An integer of 400 digits is no float.
        return float(value) if type(value) in (int, float) and abs(value) < 1e308 else None

    def to_flag(self, value: Any) -> bool | None:
        return value if isinstance(value, bool) else None


def within(number: float | None, low: float, high: float) -> float | None:
    return number if number is not None and low <= number <= high else None


def to_text(value: Any) -> str | None:
    """A text that UTF-8 can hold."""
    try:
        return value if isinstance(value, str) and value.encode("utf-8") is not None else None
    except UnicodeEncodeError:
        return None


class TextFieldReader(FieldReader):
    """Named values that are all texts: environment variables and command-line arguments."""

    FLAGS = "1 (on) or 0 (off)"

    def to_whole(self, value: str) -> int | None:
        # int() alone would also take 1_0, blanks, or digits of other scripts.
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 20 else None

    def to_number(self, value: str) -> float | None:
        # float() alone would also take 1_0, or digits of other scripts.
        try:
            number = float(value) if value.isascii() and "_" not in value else math.nan
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    def to_flag(self, value: str) -> bool | None:
        return {"1": True, "0": False}.get(value)
