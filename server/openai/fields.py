"""Typed reads of a JSON object from a client. Every field is read, or refused by its name: none is overlooked.

null stands for a field that is not there, as in the OpenAI API.
"""

import json
import math

from server.openai.api_error import ApiError, bad


def parse_object(data):
    """Bytes of a request -> a JSON object; ApiError for anything else."""

    def no_number(word):
        raise ValueError(f"{word} is no number of JSON")

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


class RequestFields:
    """The fields of one object; `where` is its place in the request, for messages."""

    def __init__(self, values, where=""):
        if not isinstance(values, dict):
            raise bad(where, "expected an object")
        self.values = {name: value for name, value in values.items() if value is not None}
        self.where = where

    def name(self, name):
        return f"{self.where}.{name}" if self.where else name

    def take(self, name, default=None):
        """Any value, once."""
        return self.values.pop(name, default)

    def bad(self, name, message, code=None):
        return bad(self.name(name), message, code)

    def number(self, name, default, low, high):
        value = self.take(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not default and not (is_number and math.isfinite(value) and low <= value <= high):
            raise self.bad(name, f"expected a number from {low} to {high}")
        return value

    def whole(self, name, default, low, high):
        value = self.take(name, default)
        if value is not default and not (isinstance(value, int) and type(value) is not bool and low <= value <= high):
            raise self.bad(name, f"expected a whole number from {low} to {high}")
        return value

    def flag(self, name, default):
        value = self.take(name, default)
        if not isinstance(value, bool | None):
            raise self.bad(name, "expected true or false")
        return value

    def text(self, name, default=None):
        value = self.take(name, default)
        if value is not default:
            check_text(value, self.name(name))
        return value

    def one_of(self, name, default, words):
        value = self.take(name, default)
        if value is not default and (not isinstance(value, str) or value not in words):
            raise self.bad(name, f"expected one of {', '.join(words)}")
        return value

    def items(self, name):
        """A list, [] where there is none."""
        value = self.take(name, [])
        if not isinstance(value, list):
            raise self.bad(name, "expected a list")
        return value

    def neutral(self, name, *values):
        """A field that is honoured only where it asks for nothing."""
        value = self.take(name)
        if value is not None and value not in values:
            raise self.bad(name, "not supported by this server", "unsupported_parameter")

    def end(self, ignored=()):
        """Refuse what nobody asked for."""
        for name in self.values:
            if name not in ignored:
                raise self.bad(name, "not supported by this server", "unsupported_parameter")


def check_text(value, where):
    """ApiError unless it is a text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise bad(where, "expected a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise bad(where, "holds half of a surrogate pair, which is no character") from None


def check_texts(value, where):
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            check_texts(item, f"{where}[{at}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            check_text(name, where)
            check_texts(item, f"{where}.{name}")
