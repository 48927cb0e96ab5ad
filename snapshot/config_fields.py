"""ConfigFields: typed, range-checked values of a config.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from errors import show
from machine.fields import MISSING, FieldReader


class ConfigFields(FieldReader):
    """Fields of a JSON object; null counts as absent. Every error names the file and the key.

    Defaults are range-checked as values are: some ranges depend on other keys.
    """

    def __init__(self, values: dict[str, Any], path: Path | str, prefix: str = ""):
        super().__init__(values, str(path))
        self.defaults: dict[str, Any] = {}  # of the family; they win over those of the callers
        self.prefix = prefix  # of keys in error messages, "rope_parameters." for a nested object
        self.notices: list[str] = []  # lines for the user; a nested object shares them

    def nested(self, key: str) -> "ConfigFields":
        """Fields of the object under `key`; of an empty one if absent."""
        values = self.get(key, {})
        if not isinstance(values, dict):
            self.reject(key, "must be an object")
        inner = ConfigFields(values, self.subject, f"{self.prefix}{key}.")
        inner.notices = self.notices
        return inner

    def label(self, name: str) -> str:
        return f"{self.subject}: {self.prefix}{name}"

    def reject(self, name: str, problem: str) -> NoReturn:
        self.refuse(name, f"{self.label(name)} {problem}")

    def expected(self, name: str, value: Any, what: str) -> NoReturn:
        self.reject(name, f"is {show(value)}, expected {what}")

    def get(self, name: str, default: Any = MISSING) -> Any:
        """The value as JSON has it, or its default."""
        default = self.defaults.get(name, default)
        value = super().get(name, default)
        return default if value is None else value

    def count(self, name: str, default: int | None = MISSING, low: int = 1, high: int = 1 << 24) -> int:
        """A whole number; the range of most counts and widths."""
        return self.whole(name, default, low, high)

    def first_present(self, *names: str) -> str:
        """The first of several spellings that the object has, or the first spelling if it has none."""
        return next((name for name in names if self.find(name) is not None), names[0])

    def alias(self, *names: str) -> str:
        """The first of several names of one value that is present; refused if two present values differ."""
        name = self.first_present(*names)
        value = self.find(name)
        for other in names:
            if self.find(other) not in (None, value):
                self.reject(name, f"is {show(value)}, but {other} is {show(self.find(other))}; they mean the same")
        return name

    def prefer(self, name: str, value: Any, other: str, passed_over: Any) -> None:
        """Say that of two values of one thing `name` counts, where another one is passed over."""
        if passed_over is not None and value != passed_over:
            self.say(f"{name} ({show(value)}) counts, not {other} ({show(passed_over)})")

    def say(self, line: str) -> None:
        """A notice, in the words of this file and object."""
        self.notices.append(f"[config] {Path(self.subject).name}: {self.prefix}{line}")

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse a value that changes the arithmetic, unless it is absent or one that this engine computes."""
        value = self.find(name)
        if value is not None and value not in allowed:
            self.reject(name, f"is {show(value)}, this engine computes only {' or '.join(map(repr, allowed))}")

    def words(self, name: str, allowed: Sequence[str], length: int) -> tuple[str, ...] | None:
        """A list of `length` words out of `allowed`, or None if absent."""
        value = self.find(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(word not in allowed for word in value):
            self.reject(name, f"must be a list of {length} entries, each {' or '.join(allowed)}")
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; empty if absent. Those that the vocabulary does not have are passed over with a
        notice: transformers warns of them, and no token can ever be one."""
        value = self.get(name, [])
        value = value if isinstance(value, list) else [value]
        for token in value:
            if type(token) is not int:
                self.reject(name, f"holds {show(token)}, expected token ids")
        if absent := [token for token in value if not 0 <= token < vocab_size]:
            self.say(f"{name} {show(absent[0])} is not in the vocabulary of {vocab_size}: no answer ends with it")
        return tuple(token for token in value if 0 <= token < vocab_size)
