"""The text of an answer, as it comes -> its thoughts, what it says, and the tools it calls.

A piece is ("reasoning", text), ("content", text), ("call", name) or ("arguments", text). The pieces of a text are the
same however it is cut up, put together.
"""

from text.stop_strings import overlap
from text.tool_calls import OPEN, ToolCallParser

THINK, THINK_END = "<think>", "</think>"


class StreamParser:
    """Takes a text as it comes. `state` is the method that reads on in `rest`: it adds pieces, and tells whether there
    is more to do with what is left, by itself or by another state."""

    def push(self, text):
        self.rest, pieces = self.rest + text, []
        while not self.is_over and self.state(pieces):
            pass
        return join(pieces)


class ReplyParser(StreamParser):
    """thinking: "open" (the prompt ended with <think>), "maybe" (the text may begin with it), or "off". tools: Tools
    that may be called, or None: then their tags are text. one_call: nothing counts after the first call. begun: what
    the prompt already holds of the answer."""

    def __init__(self, thinking="off", tools=None, one_call=False, begun=""):
        self.tools, self.one_call = tools, one_call
        self.state = {"open": self.read_thoughts, "maybe": self.read_start, "off": self.read_content}[thinking]
        self.rest, self.gap, self.call = begun, "", None
        self.num_calls, self.is_over = 0, False
        self.is_fresh = thinking == "open"  # spaces at the beginning of what comes next are dropped
        self.is_thinking = thinking == "open"

    def read_start(self, pieces):
        start = self.rest.lstrip()
        if start.startswith(THINK):
            self.rest, self.state, self.is_fresh = start[len(THINK) :], self.read_thoughts, True
            self.is_thinking = True
            return True
        if THINK.startswith(start):
            return False
        self.state = self.read_content
        return True

    def read_thoughts(self, pieces):
        thoughts, tag, rest = self.rest.partition(THINK_END)
        if tag:
            self.give(pieces, "reasoning", thoughts.rstrip())
            self.rest, self.state, self.is_fresh, self.is_thinking = rest, self.read_content, True, False
            return True
        self.give_certain(pieces, "reasoning", (THINK_END,))
        return False

    def read_content(self, pieces):
        if not self.tools:
            self.give(pieces, "content", self.rest)
            self.rest = ""
            return False
        said, tag, rest = self.rest.partition(OPEN)
        if tag:
            self.give(pieces, "content", said.rstrip())
            self.gap = said[len(said.rstrip()) :]
            self.rest, self.state, self.call = rest, self.read_call, ToolCallParser(self.tools)
            return True
        self.give_certain(pieces, "content", (OPEN,))
        return False

    def read_call(self, pieces):
        text, self.rest = self.rest, ""
        pieces += self.call.push(text)
        if self.call.is_rejected:
            self.reject(pieces)
            return True
        if self.call.is_closed:
            self.rest, self.state, self.is_fresh = self.call.rest, self.read_content, True
            self.end_call()
            return True
        return False

    def end_call(self):
        self.num_calls, self.call = self.num_calls + 1, None
        self.is_over = self.one_call

    def reject(self, pieces):
        """No call: its opening tag is text, and what follows is read again."""
        self.give(pieces, "content", self.gap + OPEN)
        self.rest, self.state, self.is_fresh, self.call = self.call.raw, self.read_content, False, None

    def give(self, pieces, kind, text):
        """A piece, without spaces at the beginning of its part."""
        if self.is_fresh:
            text = text.lstrip()
            self.is_fresh = not text
        if text:
            pieces.append((kind, text))

    def give_certain(self, pieces, kind, tags):
        """All but what may be the beginning of a tag, and the spaces before that, which go if it is one."""
        certain = self.rest[: len(self.rest) - overlap(self.rest, tags)].rstrip()
        self.give(pieces, kind, certain)
        self.rest = self.rest[len(certain) :]

    def finish(self, is_cut=False):
        """-> the last pieces. is_cut: the text did not end by itself."""
        pieces = []
        if self.call:
            pieces += self.call.finish(is_cut)
            if self.call.is_begun:
                self.end_call()
            else:
                self.reject(pieces)
        self.give(pieces, "reasoning" if self.is_thinking else "content", self.rest)
        self.rest = ""
        return join(pieces)


def join(pieces):
    """Neighbours of one kind made one, but for calls."""
    joined = []
    for kind, text in pieces:
        if joined and joined[-1][0] == kind != "call":
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return joined
