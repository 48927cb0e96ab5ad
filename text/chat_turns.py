"""Turns of a chat: the message of an answer, and what a conversation drops when the context is full."""

from collections.abc import Callable
from typing import Any

from text.prompt import positions_needed
from text.reply import THINK, THINK_END

Message = dict[str, Any]


def assistant_message(text: str, starts_in_reasoning: bool) -> Message:
    """Return the message of an answer, complete or cut off; reasoning that did not end ends here."""
    message: Message = {"role": "assistant", "content": text}
    if starts_in_reasoning or text.startswith(THINK):
        reasoning, _, content = text.removeprefix(THINK).partition(THINK_END)
        message |= {"reasoning_content": reasoning, "content": content}
    return message


def drop_oldest_turns(
    messages: list[Message], encode: Callable[[list[Message]], list[int]], context: int, reserve: int
) -> tuple[list[Message], list[int]]:
    """Return (the messages that fit the context with `reserve` tokens of an answer, their ids). The last message
    always stays."""
    ids = encode(messages)
    if positions_needed(len(ids), reserve) > context:
        # Down to half of the context at once: each drop means a prefill of all that is left.
        while len(messages) > 1 and len(ids) > context // 2:
            messages = messages[2:]
            ids = encode(messages)
    return messages, ids
