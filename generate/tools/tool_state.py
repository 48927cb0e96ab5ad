"""ToolState: tool calls of one sequence while it is generated. It decides the next token, sampled or forced.

A model opens a block with a tool's start token, writes the input and closes it with the end token. The result then
follows as forced tokens, which the model reads as if it had written them.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Tool:
    """Four token ids and a function. `run` gets the text of a block; None from it, or an exception, forces nothing.

    Anything else is forced as str(result). A tool that passes on foreign texts limits their length itself, and takes
    care that the tokenizer makes no special token of them.
    """

    start: int
    end: int
    output_start: int
    output_end: int
    run: Callable[[str], object]


class ToolState:
    """The tool calls of one sequence. The tokenizer is needed with tools alone.

    Several tools may share an end id, no start id: ValueError otherwise, as for tools without a tokenizer.
    """

    def __init__(
        self,
        prompt_ids: Iterable[int],
        tools: Collection[Tool] = (),
        tokenizer: Tokenizer | None = None,
        terminal_ids: Collection[int] = frozenset(),
    ):
        self.ids = list(prompt_ids)  # with all that followed
        self.masks: list[int] = []  # of what followed the prompt: 1 sampled, 0 forced
        self.tools = {tool.start: tool for tool in tools}
        self.tokenizer, self.terminal_ids = tokenizer, frozenset(terminal_ids)
        self.forced: deque[int] = deque()  # ids that come next, whatever is sampled
        self.open_tool: Tool | None = None
        self.buffer: list[int] = []  # ids of the open block
        self.is_completed = False  # a terminal id has come
        if len(self.tools) < len(tools) or any(tool.end in self.tools for tool in tools):
            raise ValueError("each tool needs a start id of its own, which is no tool's end id")
        if tools and tokenizer is None:
            raise ValueError("tools need a tokenizer")

    @property
    def has_forced(self) -> bool:
        """True if the next token is known, so that none needs to be sampled."""
        return bool(self.forced)

    def next_token(self, sampled: int | None) -> tuple[int, int]:
        """Sampled id -> (id, mask): the forced one with mask 0 where there is one, else the sampled one with mask 1.

        Forced ids go through the same rules. A start inside a block begins the block anew, with its own tool; an end
        id that does not belong to the open tool is an id as any other, and so is a terminal id.
        """
        if self.forced:
            token, mask = self.forced.popleft(), 0
        else:
            assert sampled is not None
            token, mask = sampled, 1
        self.ids.append(token)
        self.masks.append(mask)
        if token in self.terminal_ids:
            self.is_completed = True
        if token in self.tools:
            self.open_tool, self.buffer = self.tools[token], []
        elif self.open_tool and token == self.open_tool.end:
            self.forced.extend(self.output_ids(self.open_tool, self.buffer))
            self.open_tool, self.buffer = None, []
        elif self.open_tool:
            self.buffer.append(token)
        return token, mask

    def output_ids(self, tool: Tool, ids: list[int]) -> list[int]:
        """Run a tool on a block of these ids -> the ids that follow; none where it is empty or the tool declines."""
        if not ids or not self.tokenizer:
            return []
        try:
            result = tool.run(self.tokenizer.decode(ids))
            if result is None:
                return []
            return [tool.output_start, *self.tokenizer.encode(str(result)), tool.output_end]
        except Exception:  # whatever a tool does with a text that a model wrote, the generation continues
            return []
