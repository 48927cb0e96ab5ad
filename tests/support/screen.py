"""Screen: what a terminal shows of the bytes that were written to it, with the line wrap of a real one."""

import os
import re
import select
import time

TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|[\s\S]")


class Screen:
    """Rows of text as wide as the terminal. A character after the last column wraps; the cursor stays there before."""

    def __init__(self, columns=80):
        self.columns = columns
        self.rows, self.row, self.column = [[]], 0, 0
        self.wrapped = set()  # numbers of the rows that go on in the next one

    def feed(self, text):
        for match in TOKEN.finditer(text):
            parameter, final = match[1], match[2]
            if final is None:
                self.put(match[0])
            elif final == "K":
                start = {"": self.column, "0": self.column, "2": 0}[parameter]
                del self.rows[self.row][start:]
            elif final == "C":
                self.column = min(self.columns - 1, self.column + int(parameter or 1))
            else:
                assert final in "hlm", f"the screen knows no {match[0]!r}"  # modes and colors show nothing here
        return self

    def put(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.move_down()
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character != "\a":
            if self.column == self.columns:
                self.wrapped.add(self.row)
                self.move_down()
                self.column = 0
            row = self.rows[self.row]
            row.extend(" " * (self.column - len(row)))
            row[self.column : self.column + 1] = [character]
            self.column += 1

    def move_down(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    @property
    def lines(self):
        """The rows without spaces at their ends, up to the last one that is not empty."""
        lines = ["".join(row).rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self):
        """All rows as one text, those that wrapped joined."""
        return "".join("".join(row) + ("" if i in self.wrapped else "\n") for i, row in enumerate(self.rows))


def read_terminal(primary, seconds=60):
    """Everything that a pseudo-terminal showed until the program ended, which must be within `seconds`; closes it."""
    shown, end = b"", time.monotonic() + seconds
    try:
        while select.select([primary], [], [], max(0, end - time.monotonic()))[0]:
            if not (data := os.read(primary, 4096)):
                return shown
            shown += data
        raise AssertionError(f"the program did not end: {shown[-300:]}")
    except OSError:  # the other end is closed: EIO on Linux
        return shown
    finally:
        os.close(primary)
