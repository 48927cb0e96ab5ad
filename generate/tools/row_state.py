"""RowState: one sequence that may call tools while it is generated. It decides the next token, sampled or forced.

A model opens a block with a tool's start token, writes the input and closes it with the end token. The result then
follows as forced tokens, which the model reads as if it had written them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    """Four token ids and what runs. `run` takes the text of a block; None from it, or an exception, injects nothing.

    Anything else is injected as str(result), so a tool that passes on texts of others takes care of their length,
    and that the tokenizer makes no special token of them.
    """

    start: int
    end: int
    output_start: int
    output_end: int
    run: Callable[[str], object]


class RowState:
    """The row of one sequence. `tokenizer` (encode(text) -> ids, decode(ids) -> text) is needed with tools alone.

    Several tools may share an end id, no start id: ValueError otherwise, as for tools without a tokenizer.
    """

    def __init__(self, prompt_ids, tools=(), tokenizer=None, terminal_ids=frozenset()):
        tools, self.history = tuple(tools), list(prompt_ids)
        self.tools = {tool.start: tool for tool in tools}
        self.tokenizer, self.terminal_ids = tokenizer, frozenset(terminal_ids)
        self.forced = deque()  # ids that come next, whatever is sampled
        self.open_tool, self.buffer = None, []  # the tool whose block is open, and the ids in the block
        self.is_completed = False  # a terminal id has come; the row may go on beside others, it stays completed
        if len(self.tools) < len(tools) or any(tool.end in self.tools for tool in tools):
            raise ValueError("each tool needs a start id of its own, which is no tool's end id")
        if tools and tokenizer is None:
            raise ValueError("tools need a tokenizer")

    @property
    def has_forced(self):
        """Whether the next token is known, so that none needs to be sampled."""
        return bool(self.forced)

    def next_token(self, sampled):
        """Sampled id -> (id, mask): the forced one with mask 0 where there is one, else the sampled one with mask 1.

        Forced ids go through the same rules. A start inside a block begins the block anew, with its own tool; an end
        id that does not belong to the open tool is an id as any other, and so is a terminal id.
        """
        token, mask = (self.forced.popleft(), 0) if self.forced else (sampled, 1)
        self.history.append(token)
        if token in self.terminal_ids:
            self.is_completed = True
        if token in self.tools:
            self.open_tool, self.buffer = self.tools[token], []
        elif self.open_tool and token == self.open_tool.end:
            self.forced.extend(self.answer(self.open_tool, self.buffer))
            self.open_tool, self.buffer = None, []
        elif self.open_tool:
            self.buffer.append(token)
        return token, mask

    def answer(self, tool, ids):
        """The ids that follow a block of these ids; none where it is empty or the tool declines."""
        if not ids:
            return []
        try:
            result = tool.run(self.tokenizer.decode(ids))
            if result is None:
                return []
            return [tool.output_start, *self.tokenizer.encode(str(result)), tool.output_end]
        except Exception:  # whatever a tool does with what a model wrote, the generation goes on
            return []
