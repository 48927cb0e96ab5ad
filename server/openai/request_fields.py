"""RequestFields: typed reads of a JSON object from a client. Every field is read, or refused by its name.

null stands for an absent field, as in the OpenAI API.
"""

import json
from collections.abc import Collection
from typing import Any, NoReturn

from machine.fields import FieldReader
from server.openai.api_error import ApiError, JsonObject


def parse_object(data: bytes) -> JsonObject:
    """Parse the body of a request; ApiError unless it is a JSON object."""

    def refuse_constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a JSON number")

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


class RequestFields(FieldReader):
    """The fields of one object that were not read yet. subject: the path of the object in the request."""

    values: JsonObject

    def __init__(self, values: Any, subject: str = ""):
        if not isinstance(values, dict):
            raise ApiError(400, f"{subject}: expected an object", subject)
        super().__init__({name: value for name, value in values.items() if value is not None}, subject)
        self.notices: list[str] = []  # for the client, about what was accepted and has no effect, or another one

    def find(self, name: str) -> Any:
        return self.values.pop(name, None)

    def label(self, name: str) -> str:
        return f"{self.subject}.{name}" if self.subject else name

    def refuse(self, name: str, message: str) -> NoReturn:
        raise ApiError(400, message, self.label(name))

    def refuse_value(self, name: str, message: str) -> NoReturn:
        self.refuse(name, f"{self.label(name)}: {message}")

    def refuse_unsupported(self, name: str) -> NoReturn:
        label = self.label(name)
        raise ApiError(400, f"{label}: not supported by this server, leave it out", label, "unsupported_parameter")

    def object(self, name: str) -> "RequestFields":
        return RequestFields(self.find(name), self.label(name))

    def objects(self, name: str, expected: str = "a list of objects") -> list["RequestFields"]:
        """Return the objects of a list; an absent list is empty."""
        values = self.find(name)
        if not isinstance(values, list | None):
            self.refuse_value(name, f"expected {expected}")
        return [RequestFields(value, f"{self.label(name)}[{at}]") for at, value in enumerate(values or ())]

    def require_neutral(self, **neutral: Any) -> None:
        """Refuse each field unless its value asks for nothing: the neutral value, or one of a tuple of them."""
        for name, values in neutral.items():
            value = self.find(name)
            if value is not None and value not in (values if isinstance(values, tuple) else (values,)):
                self.refuse_unsupported(name)

    def refuse_unread(self, ignored: Collection[str] = ()) -> None:
        for name in self.values:
            if name not in ignored:
                self.refuse_unsupported(name)


def check_texts(value: Any, where: str) -> None:
    """ApiError if a text anywhere in a JSON value cannot be held by UTF-8."""
    if isinstance(value, str):
        RequestFields({where: value}).text(where)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            check_texts(item, f"{where}[{at}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            check_texts(name, where)
            check_texts(item, f"{where}.{name}")
