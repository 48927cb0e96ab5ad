"""Streaming parser of answers in the harmony format of gpt-oss.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content
<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{"arguments": "of the call"}<|call|>
"""

import re

from text.stop_strings import partial_match_length
from text.stream_parser import Segment, StreamParser
from text.tool_calls import ToolSchemas

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
HEADER_STARTS = (CHANNEL, "<|start|>", "to=")


class HarmonyParser(StreamParser):
    """Parameters as of ReplyParser. The header of a message tells its kind; a text without any header is content."""

    def __init__(self, tools: ToolSchemas | None = None, one_call: bool = False, answer_prefix: str = ""):
        super().__init__(self.parse_header, answer_prefix)
        self.tools = tools
        self.one_call = one_call
        self.num_calls = 0
        self.kind: str | None = None  # of the message that is parsed
        self.is_first = True

    @property
    def is_reasoning(self) -> bool:
        return self.kind == "reasoning"

    def parse_header(self, segments: list[Segment]) -> bool:
        header, tag, rest = self.buffer.partition(MESSAGE)
        text = self.buffer.lstrip()
        if self.is_first and not any(start.startswith(text) or text.startswith(start) for start in HEADER_STARTS):
            self.kind = "content"
        elif not tag:
            return False
        else:
            self.buffer = rest
            name = re.search(r"to=functions\.([^\s<]+)", header)
            if name and self.tools and name[1] in self.tools.schemas:
                self.kind = "arguments"
                segments.append(("call", name[1]))
            else:
                self.kind = "reasoning" if f"{CHANNEL}analysis" in header else "content"
        self.state = self.parse_message
        self.is_first = False
        return True

    def parse_message(self, segments: list[Segment]) -> bool:
        assert self.kind
        found = [(at, end) for end in ENDS if (at := self.buffer.find(end)) >= 0]
        length, end = min(found, default=(len(self.buffer) - partial_match_length(self.buffer, ENDS), ""))
        if length:
            segments.append((self.kind, self.buffer[:length]))
        self.buffer = self.buffer[length + len(end) :]
        if end:
            self.end_message()
        return bool(end)

    def end_message(self) -> None:
        if self.kind == "arguments":
            self.num_calls += 1
            self.is_finished = self.one_call
        self.kind = None
        self.state = self.parse_header

    def flush(self, is_truncated: bool = False) -> list[Segment]:
        """Return the last segment; a header without its message gives none."""
        segments = [(self.kind, self.buffer)] if self.kind and self.buffer else []
        if self.kind:
            self.end_message()
        self.buffer = ""
        return segments
