"""Option types of the scripts for argparse: numbers in a range, and bad options refused in one line."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from errors import Refused
from machine.fields import TextFieldReader


class OneLineParser(argparse.ArgumentParser):
    """Raises Refused for bad options."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


class OptionReader(TextFieldReader):
    """Reads the text of one option, called `value`."""

    def refuse(self, name: str, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def whole_from(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `low`."""
    return lambda text: OptionReader({"value": text}).whole("value", low=low, high=math.inf)


def number_from(low: float) -> Callable[[str], float]:
    """An argparse type: numbers from `low`."""
    return lambda text: OptionReader({"value": text}).number("value", low=low, high=math.inf)
