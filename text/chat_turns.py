"""Turns of a chat: their prompts, the messages of their answers, and what is dropped when the context is full."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from errors import Refused
from text.chat_answers import AnswerMessage
from text.chat_template import Message
from text.detokenizer import Detokenizer
from text.harmony import HarmonyParser, is_harmony
from text.prompt import PromptPrefix, positions_needed
from text.reasoning_control import reasoning_state
from text.reply import THINK, THINK_END
from text.tokenizer import TextTokenizer


class ChatTurns:
    """Messages -> prompt ids, and the ids of the answer -> its message."""

    def __init__(self, tokenizer: TextTokenizer, prefix: PromptPrefix, enable_thinking: bool):
        self.tokenizer = tokenizer
        self.prefix = prefix
        self.enable_thinking = enable_thinking

    def encode(self, messages: list[Message]) -> list[int]:
        """-> the prompt ids after which the answer comes. Special tokens that a user wrote stay text."""
        return self.prefix.prepend(self.tokenizer.encode_chat(messages, enable_thinking=self.enable_thinking)[1])

    def answer_message(self, messages: list[Message], prompt_ids: Sequence[int], ids: Sequence[int]) -> AnswerMessage:
        """The message of the answer `ids` to these messages, complete or cut off."""
        detokenizer = Detokenizer(self.tokenizer, prompt_ids)
        text = "".join(map(detokenizer.add_token, ids)) + detokenizer.flush()
        prompt = self.tokenizer.render_chat(messages, self.enable_thinking)
        source = self.tokenizer.template.source
        if is_harmony(source):
            message = harmony_message(text)
        else:
            message = assistant_message(text, reasoning_state(prompt, source) == "open")
        opening = None
        with suppress(Refused):  # of templates that want an answer behind a question
            closed = self.tokenizer.render_chat(messages, self.enable_thinking, add_generation_prompt=False)
            opening = prompt.removeprefix(closed) if prompt.startswith(closed) else None
        reasoning, content = message.get("reasoning_content", ""), message["content"]
        lead, tail = THINK if reasoning and text.startswith(THINK) else "", ""
        if not reasoning and content:
            lead = text.removesuffix(content)
        elif not content:
            tail = text[len(lead + reasoning) :]
        return AnswerMessage(message, ids, opening, lead, tail)


def assistant_message(text: str, starts_in_reasoning: bool) -> Message:
    """Return the message of an answer, complete or cut off; reasoning that did not end ends here."""
    message: Message = {"role": "assistant", "content": text}
    if starts_in_reasoning or text.startswith(THINK):
        reasoning, _, content = text.removeprefix(THINK).partition(THINK_END)
        message |= {"reasoning_content": reasoning, "content": content}
    return message


def harmony_message(text: str) -> Message:
    """Return the message of an answer in the harmony format."""
    parser = HarmonyParser()
    message: Message = {"role": "assistant", "reasoning_content": "", "content": ""}
    for kind, part in parser.parse_increment(text) + parser.flush(is_truncated=True):
        message["reasoning_content" if kind == "reasoning" else "content"] += part
    return message


def drop_oldest_turns(
    messages: list[Message], encode: Callable[[list[Message]], list[int]], context: int, max_tokens: int
) -> tuple[list[Message], list[int]]:
    """Return (the messages that fit the context with an answer of max_tokens, or of a quarter of the context; their
    ids). The last message always stays."""
    ids = encode(messages)
    if positions_needed(len(ids), max(1, min(max_tokens, context // 4))) > context:
        # Down to half of the context at once: each drop means a prefill of all that is left.
        while len(messages) > 1 and len(ids) > context // 2:
            messages = messages[2:]
            ids = encode(messages)
    return messages, ids
