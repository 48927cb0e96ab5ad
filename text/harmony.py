"""The text of an answer in the form of gpt-oss, as it comes -> the pieces of text/reply.py.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>what it says
<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{"its": "arguments"}<|call|>
"""

import re

from text.reply import StreamParser
from text.stop_strings import overlap

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
STARTS = (CHANNEL, "<|start|>", "to=")  # what a header may begin with


class HarmonyParser(StreamParser):
    """As ReplyReader. Each message has a header that says what it is; a text without any is content."""

    def __init__(self, tools=None, one_call=False, begun=""):
        self.tools, self.one_call, self.rest = tools, one_call, begun
        self.state, self.kind, self.is_first = self.read_header, None, True
        self.num_calls, self.is_over = 0, False

    @property
    def is_thinking(self):
        return self.kind == "reasoning"

    def read_header(self, pieces):
        head, tag, rest = self.rest.partition(MESSAGE)
        begin = self.rest.lstrip()
        if self.is_first and not any(start.startswith(begin) or begin.startswith(start) for start in STARTS):
            self.kind, self.state, self.is_first = "content", self.read_body, False
            return True
        if not tag:
            return False
        self.rest, self.state, self.is_first = rest, self.read_body, False
        name = re.search(r"to=functions\.([^\s<]+)", head)
        if name and self.tools and name[1] in self.tools.schemas:
            self.kind = "arguments"
            pieces.append(("call", name[1]))
        else:
            self.kind = "reasoning" if f"{CHANNEL}analysis" in head else "content"
        return True

    def read_body(self, pieces):
        at, end = min(((at, end) for end in ENDS if (at := self.rest.find(end)) >= 0), default=(None, ""))
        length = len(self.rest) - overlap(self.rest, ENDS) if at is None else at
        if length:
            pieces.append((self.kind, self.rest[:length]))
        self.rest = self.rest[length + len(end) :]
        if at is not None:
            self.end_message()
        return at is not None

    def end_message(self):
        if self.kind == "arguments":
            self.num_calls += 1
            self.is_over = self.one_call
        self.kind, self.state = None, self.read_header

    def finish(self, is_cut=False):
        """-> the last piece; a header without its message is nothing."""
        pieces = [(self.kind, self.rest)] if self.kind and self.rest else []
        if self.kind:
            self.end_message()
        self.rest = ""
        return pieces
