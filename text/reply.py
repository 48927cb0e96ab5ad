"""Streaming parser of an answer: reasoning content, content and tool calls between <think> and <tool_call> tags."""

import re

from text.stop_strings import split_partial_match
from text.stream_parser import StreamParser, TextSegment
from text.tool_calls import CALL_END, CALL_START, GlmToolParser, HermesToolParser, ToolSchemas

THINK, THINK_END = "<think>", "</think>"
BLOCK_END = re.compile(f"{CALL_END}|{CALL_START}")
BETWEEN_CALLS = " \t\r\n,;}]"  # characters without a meaning between the calls of one block


class ReplyParser(StreamParser):
    """reasoning: "open" (the prompt ended with <think>), "maybe" (the text may begin with it) or "off". tools: the
    functions that may be called; without them tool-call tags are text. one_call: parse nothing after the first call.
    answer_prefix: the start of the answer, where the prompt already holds it."""

    def __init__(
        self, reasoning: str = "off", tools: ToolSchemas | None = None, one_call: bool = False, answer_prefix: str = ""
    ):
        states = {"open": self.parse_reasoning, "maybe": self.parse_start, "off": self.parse_content}
        super().__init__(states[reasoning], answer_prefix)
        self.tools = tools or {}
        self.one_call = one_call
        self.num_calls = 0
        self.call: GlmToolParser | HermesToolParser | None = None
        self.call_text = ""  # what followed <tool_call>, for a call that turns out to be text
        self.opening = ""  # what stood before it: the tag and the spaces in front of that
        self.kind = "reasoning" if reasoning == "open" else "content"
        self.drops_spaces = reasoning == "open"  # at the start of a section

    def parse_start(self) -> bool:
        start = self.buffer.lstrip()
        if start.startswith(THINK):
            self.kind = "reasoning"
            self.drops_spaces = True
            return self.enter(self.parse_reasoning, start[len(THINK) :])
        return not THINK.startswith(start) and self.enter(self.parse_content, self.buffer)

    def parse_reasoning(self) -> bool:
        thoughts, tag, rest = self.buffer.partition(THINK_END)
        if not tag:
            self.append_certain((THINK_END,))
            return False
        self.append_text(thoughts.rstrip())
        self.kind = "content"
        self.drops_spaces = True
        return self.enter(self.parse_content, rest)

    def parse_content(self) -> bool:
        if not self.tools:
            self.append_text(self.buffer)
            self.buffer = ""
            return False
        text, tag, rest = self.buffer.partition(CALL_START)
        if not tag:
            self.append_certain((CALL_START,))
            return False
        content = text.rstrip()
        self.append_text(content)
        self.opening = text[len(content) :] + CALL_START
        self.call_text = ""
        return self.enter(self.parse_call, rest)

    def parse_call(self) -> bool:
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
        for segment in self.call.parse_increment(text):
            self.append_segment(*segment)
        if self.call.is_rejected:
            self.reject_call()
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
        self.enter(self.parse_block, rest)

    def parse_block(self) -> bool:
        """Parse what follows a call in its block: the closing tag, which may be missing, or another call."""
        text = self.buffer.lstrip(BETWEEN_CALLS)
        if text.startswith(CALL_END):
            return self.enter(self.parse_content, text[len(CALL_END) :])
        if text.startswith(CALL_START):
            return self.enter(self.parse_content, text)
        if CALL_END.startswith(text) or CALL_START.startswith(text):
            return False
        self.opening = self.call_text = ""
        return self.enter(self.parse_call, text)

    def reject_call(self) -> None:
        """Make the opening tag content, and parse again what follows it; within a block, what is left of that."""
        self.append_text(self.opening)
        self.call = None
        if self.opening:
            self.drops_spaces = False
        self.enter(self.parse_content if self.opening else self.parse_block_text, self.call_text)

    def parse_block_text(self) -> bool:
        """Parse text that is no call, behind a call in its block: content up to the closing tag."""
        tag = BLOCK_END.search(self.buffer)
        if not tag:
            self.append_certain((CALL_END, CALL_START))
            return False
        self.append_text(self.buffer[: tag.start()].rstrip())
        self.drops_spaces = True
        return self.enter(self.parse_content, self.buffer[tag.end() if tag[0] == CALL_END else tag.start() :])

    def append_text(self, text: str) -> None:
        """Append a segment of the current kind, without the spaces at the start of its section."""
        if self.drops_spaces:
            text = text.lstrip()
            self.drops_spaces = not text
        self.append_segment(self.kind, text)

    def append_certain(self, tags: tuple[str, ...]) -> None:
        """Append the buffer without what may be the start of a tag, and without the spaces before that, which a tag
        would drop."""
        certain = split_partial_match(self.buffer, tags)[0].rstrip()
        self.append_text(certain)
        self.buffer = self.buffer[len(certain) :]

    def flush(self, is_truncated: bool = False) -> list[TextSegment]:
        """Return the last segments. is_truncated: the text was cut off by its length."""
        if self.is_finished:
            return self.take_segments()
        while self.state == self.parse_call:
            for segment in self.call.flush(is_truncated) if self.call else ():
                self.append_segment(*segment)
            if self.call and self.call.name:
                self.end_call(self.call.buffer if self.call.is_finished else "")
            else:
                self.reject_call()
            self.run_states()
        if self.state != self.parse_block:  # whose text has no meaning
            self.append_text(self.buffer)
        self.buffer = ""
        return self.take_segments()
