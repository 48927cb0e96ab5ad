"""Streaming parser of answers in the harmony format of gpt-oss.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content
<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{"arguments": "of the call"}<|call|>
"""

import re

from text.stop_strings import split_partial_match
from text.stream_parser import StreamParser, TextSegment
from text.tool_calls import ToolSchemas

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", START, "<|call|>", "<|return|>")
HEADER_STARTS = (CHANNEL, START, "to=")


def is_harmony(source: str) -> bool:
    """Return whether a chat template is one of the harmony format."""
    return CHANNEL in source and MESSAGE in source


class HarmonyParser(StreamParser):
    """Parameters as of ReplyParser. The header of a message tells its kind; a text without any header is content."""

    def __init__(self, tools: ToolSchemas | None = None, one_call: bool = False, answer_prefix: str = ""):
        super().__init__(self.parse_header, answer_prefix)
        self.tools = tools or {}
        self.one_call = one_call
        self.num_calls = 0
        self.kind: str | None = None  # of the message that is parsed; foreign: in the name of a tool or of the user
        self.is_first = True

    def parse_header(self) -> bool:
        header, tag, rest = self.buffer.partition(MESSAGE)
        text = self.buffer.lstrip()
        if self.is_first and not any(start.startswith(text) or text.startswith(start) for start in HEADER_STARTS):
            self.kind = "content"
        elif not tag:
            return False
        else:
            self.buffer = rest
            self.kind = self.message_kind(header)
        self.state = self.parse_message
        self.is_first = False
        return True

    def message_kind(self, header: str) -> str:
        """Return the kind of segment of a message; a call's name is a segment of its own."""
        _, tag, header = header.rpartition(START)
        role = re.split(r"[\s<]", header.lstrip(), maxsplit=1)[0]
        if tag and role and "=" not in role and role != "assistant":
            return "foreign"
        recipient = re.search(r"\bto=([^\s<]+)", header)
        names = [recipient[1], recipient[1].removeprefix("functions.")] if recipient else []
        if name := next((name for name in names if name in self.tools), None):
            self.append_segment("call", name)
            return "arguments"
        return "reasoning" if f"{CHANNEL}analysis" in header else "content"

    def parse_message(self) -> bool:
        found = [(at, end) for end in ENDS if (at := self.buffer.find(end)) >= 0]
        length, end = min(found, default=(len(split_partial_match(self.buffer, ENDS)[0]), ""))
        self.append_to_message(self.buffer[:length])
        self.buffer = self.buffer[length + (0 if end == START else len(end)) :]
        if end:
            self.end_message()
        return bool(end)

    def append_to_message(self, text: str) -> None:
        if self.kind and self.kind != "foreign":
            self.append_segment(self.kind, text)

    def end_message(self) -> None:
        if self.kind == "arguments":
            self.num_calls += 1
            self.is_finished = self.one_call
        self.kind = None
        self.state = self.parse_header

    def flush(self, is_truncated: bool = False) -> list[TextSegment]:
        """Return the last segment; a header without its message gives none."""
        if self.kind:
            self.append_to_message(self.buffer)
            self.end_message()
        self.buffer = ""
        return self.take_segments()
