"""Streaming parser of an answer: reasoning content, content and tool calls between <think> and <tool_call> tags."""

from text.stop_strings import partial_match_length
from text.stream_parser import Segment, StreamParser, join_segments
from text.tool_calls import CALL_START, GlmToolParser, HermesToolParser, ToolSchemas

THINK, THINK_END = "<think>", "</think>"


class ReplyParser(StreamParser):
    """reasoning: "open" (the prompt ended with <think>), "maybe" (the text may begin with it) or "off". tools: the
    functions that may be called; without them tool-call tags are text. one_call: parse nothing after the first call.
    answer_prefix: the start of the answer, where the prompt already holds it."""

    def __init__(
        self, reasoning: str = "off", tools: ToolSchemas | None = None, one_call: bool = False, answer_prefix: str = ""
    ):
        states = {"open": self.parse_reasoning, "maybe": self.parse_start, "off": self.parse_content}
        super().__init__(states[reasoning], answer_prefix)
        self.tools = tools
        self.one_call = one_call
        self.num_calls = 0
        self.call: GlmToolParser | HermesToolParser | None = None
        self.call_text = ""  # what followed <tool_call>, for a call that turns out to be text
        self.gap = ""  # the spaces before it
        self.is_reasoning = reasoning == "open"
        self.drops_spaces = reasoning == "open"  # at the start of a section

    def parse_start(self, segments: list[Segment]) -> bool:
        start = self.buffer.lstrip()
        if start.startswith(THINK):
            self.is_reasoning = True
            self.drops_spaces = True
            return self.enter(self.parse_reasoning, start[len(THINK) :])
        return not THINK.startswith(start) and self.enter(self.parse_content, self.buffer)

    def parse_reasoning(self, segments: list[Segment]) -> bool:
        thoughts, tag, rest = self.buffer.partition(THINK_END)
        if not tag:
            self.append_certain(segments, "reasoning", THINK_END)
            return False
        self.append_segment(segments, "reasoning", thoughts.rstrip())
        self.is_reasoning = False
        self.drops_spaces = True
        return self.enter(self.parse_content, rest)

    def parse_content(self, segments: list[Segment]) -> bool:
        if not self.tools:
            self.append_segment(segments, "content", self.buffer)
            self.buffer = ""
            return False
        text, tag, rest = self.buffer.partition(CALL_START)
        if not tag:
            self.append_certain(segments, "content", CALL_START)
            return False
        content = text.rstrip()
        self.append_segment(segments, "content", content)
        self.gap = text[len(content) :]
        self.call_text = ""
        return self.enter(self.parse_call, rest)

    def parse_call(self, segments: list[Segment]) -> bool:
        assert self.tools
        text = self.buffer
        self.call_text += text
        self.buffer = ""
        if self.call is None:
            start = self.call_text.lstrip()
            if not start:
                return False
            # The first character tells the format.
            self.call = (HermesToolParser if start.startswith("{") else GlmToolParser)(self.tools)
            text = self.call_text
        segments += self.call.parse_increment(text)
        if self.call.is_rejected:
            self.reject_call(segments)
        elif self.call.is_finished:
            self.end_call(self.call.buffer)
        else:
            return False
        return True

    def end_call(self, rest: str) -> None:
        self.num_calls += 1
        self.call = None
        self.drops_spaces = True
        self.is_finished = self.one_call
        self.enter(self.parse_content, rest)

    def reject_call(self, segments: list[Segment]) -> None:
        """Make the opening tag content, and parse again what follows it."""
        self.append_segment(segments, "content", self.gap + CALL_START)
        self.call = None
        self.drops_spaces = False
        self.enter(self.parse_content, self.call_text)

    def append_segment(self, segments: list[Segment], kind: str, text: str) -> None:
        """Append a segment, without the spaces at the start of its section."""
        if self.drops_spaces:
            text = text.lstrip()
            self.drops_spaces = not text
        if text:
            segments.append((kind, text))

    def append_certain(self, segments: list[Segment], kind: str, tag: str) -> None:
        """Append the buffer without what may be the start of the tag, and without the spaces before that, which a tag
        would drop."""
        certain = self.buffer[: len(self.buffer) - partial_match_length(self.buffer, (tag,))].rstrip()
        self.append_segment(segments, kind, certain)
        self.buffer = self.buffer[len(certain) :]

    def flush(self, is_truncated: bool = False) -> list[Segment]:
        """Return the last segments. is_truncated: the text was cut off by its length."""
        segments: list[Segment] = []
        if self.state == self.parse_call:
            if self.call:
                segments += self.call.flush(is_truncated)
            if self.call and self.call.name:
                self.end_call("")
            else:
                self.reject_call(segments)
        self.append_segment(segments, "reasoning" if self.is_reasoning else "content", self.buffer)
        self.buffer = ""
        return join_segments(segments)
