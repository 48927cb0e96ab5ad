"""Options of a script: numbers within bounds, and what is bad refused in one line."""

import argparse
import math

from errors import Refused


class OneLineParser(argparse.ArgumentParser):
    """Bad options are refused in one line, as any other bad input."""

    def error(self, message):
        raise Refused(message)


def whole(low):
    def read(text):
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
        if number < low:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {low}")
        return number

    return read


def number_above(low, includes):
    def read(text):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (low < number < math.inf or (includes and number == low)):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number {'from' if includes else 'above'} {low}")
        return number

    return read
