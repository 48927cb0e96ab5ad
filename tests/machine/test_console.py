"""Notices and bars beside an answer on one terminal, rendered as a terminal shows them."""

import fcntl
import os
import pty
import struct
import sys
import termios
import tty

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machine import console
from machine.console import PrefillProgress, Terminal, say, set_up_terminal, show_bar, write_answer
from tests.support.screen import Screen, read_terminal

COLUMNS = 40


class OneTerminal:
    """A pseudo-terminal of 40 columns as stdout and stderr of this process; `finish` -> its Screen."""

    def __init__(self, monkeypatch, is_dumb=False, has_pipe=False):
        self.primary, self.secondary = pty.openpty()
        tty.setraw(self.secondary)  # newlines as written; ONLCR is added by `finish`
        fcntl.ioctl(self.secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.stream = open(self.secondary, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        monkeypatch.setattr(sys, "stderr", self.stream)
        monkeypatch.setattr(sys, "stdout", self.stream)
        set_up_terminal(is_dumb)

    def finish(self):
        set_up_terminal(False)
        self.stream.close()
        os.close(self.secondary)
        return Screen(COLUMNS).feed(read_terminal(self.primary).decode().replace("\n", "\r\n"))


@pytest.fixture
def one_terminal(monkeypatch):
    """one_terminal(is_dumb) -> a OneTerminal; the properties of the real one are found again at the end."""
    before = {name: value for name, value in vars(Terminal).items() if not name.startswith("_")}
    yield lambda **options: OneTerminal(monkeypatch, **options)
    for name, value in before.items():
        setattr(Terminal, name, value)


def test_a_notice_never_erases_the_answer(one_terminal):
    """A heartbeat wrote "\\r" and "erase line" before its newline: "She dances with the light, a" was gone."""
    terminal = one_terminal()
    write_answer("She dances with the light, a")
    say("[t=16  1.0 tok/s]")
    write_answer("nd sings.\n")
    say("[stop]")
    assert terminal.finish().lines == ["She dances with the light, a", "[t=16  1.0 tok/s]", "nd sings.", "[stop]"]


def test_a_bar_is_wiped_before_the_answer_and_before_a_notice(one_terminal):
    """An interrupted prefill left its bar behind, and the answer began in it."""
    terminal = one_terminal()
    show_bar("[prefill]", 0.5, 0)
    say("[drive] slow")
    show_bar("[prefill]", 0.7, 0)
    write_answer("Hear")
    show_bar("[prefill]", 0.8, 0)  # not over an answer
    write_answer(" me\n")
    show_bar("[prefill]", 0.9, 0)
    console.end_line()
    assert terminal.finish().lines == ["[drive] slow", "Hear me"]


@pytest.mark.parametrize("columns", [20, 79, 80, 81])
def test_a_bar_is_never_wider_than_the_terminal(one_terminal, monkeypatch, columns):
    """The bar of convert had more than 100 columns: each step of it scrolled a terminal of 80 by a line."""
    monkeypatch.setattr(console, "terminal_columns", lambda: columns)
    terminal = one_terminal()
    monkeypatch.setattr(sys, "stderr", StreamOf(texts := []))
    for share in (0.0, 0.1, 0.999):
        show_bar("[convert] out-00001.safetensors", share, 100, "12.34 of 406.00 GB | 120 MB/s")
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    screen = Screen(columns).feed("".join(texts))
    assert len(screen.rows) == 1 and len(screen.lines[0]) < columns
    assert screen.lines[0].startswith("[convert] out-00001")
    terminal.finish()


def test_a_prefill_of_many_layers_leaves_nothing(one_terminal):
    terminal = one_terminal()
    progress = PrefillProgress(20)
    for rows in (8, 12):
        for layer in range(1, 31):
            progress(layer, 30, rows)
    write_answer("done\n")
    assert terminal.finish().lines == ["done"]


def test_a_dumb_terminal_gets_lines(one_terminal):
    terminal = one_terminal(is_dumb=True)
    PrefillProgress(8)(4, 8, 8)
    write_answer("half a ")
    say("[notice]")
    assert terminal.finish().lines == ["[prefill] layer 4/8 | 8 tokens", "half a", "[notice]"]


class StreamOf:
    """A terminal as stdout and stderr: what is written goes to a list."""

    def __init__(self, written):
        self.written, self.buffer = written, self

    def write(self, data):
        self.written.append(data if isinstance(data, str) else data.decode())

    def flush(self):
        pass


EVENTS = st.one_of(
    st.tuples(st.just("answer"), st.text("ab \n", min_size=1, max_size=50)),
    st.tuples(st.just("notice"), st.integers(0, 99).map(lambda n: f"[{n}]" + "=" * n)),
    st.tuples(st.just("bar"), st.floats(0, 1.2)),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=20))
def test_whatever_is_written_is_seen(events):
    """Every character of the answer, in order, and every notice on a line of its own, among bars."""
    written = []
    with pytest.MonkeyPatch.context() as patch:
        stream = StreamOf(written)
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setattr(console, "terminal_columns", lambda: COLUMNS)
        for name in ("has_bar", "is_shared"):
            patch.setattr(Terminal, name, True)
        for name in ("is_bar_shown", "is_answer_open"):
            patch.setattr(Terminal, name, False)
        for kind, value in events:
            if kind == "answer":
                write_answer(value)
            elif kind == "notice":
                say(value)
            else:
                show_bar("bar", value, 5, "of something that is long enough to be cut")
        console.end_line()
    screen = Screen(COLUMNS).feed("".join(written).replace("\n", "\r\n"))
    lines = screen.text.split("\n")
    notices = [value for kind, value in events if kind == "notice"]
    assert [line for line in lines if line.startswith("[")] == notices
    answer = "".join(line for line in lines if not line.startswith("["))
    assert answer == "".join(value for kind, value in events if kind == "answer").replace("\n", "")
