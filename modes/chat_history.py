"""ChatHistory: the messages of an interactive chat, its answers as token ids, and the prompts that they become."""

from errors import Refused
from machine.console import say
from settings import Settings
from snapshot.config import ModelConfig
from text.chat_turns import ChatTurns, Message, drop_oldest_turns
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer


class ChatHistory:
    """Questions and answers by turns. Every prompt is the whole history in the chat template, with the ids that the
    model gave for the answers."""

    def __init__(self, settings: Settings, config: ModelConfig, tokenizer: TextTokenizer, context: int) -> None:
        """Refused for a snapshot whose chat template is missing or fails."""
        if not isinstance(tokenizer.chat_template, str):
            raise Refused(
                f"{tokenizer.model_path}: has no chat template (chat_template.jinja), so it cannot chat; "
                "colibri.py continues plain text (PROMPT)"
            )
        self.tokenizer = tokenizer
        self.context = context
        self.prefix = PromptPrefix(config, tokenizer, settings.prefix)
        self.turns = ChatTurns(tokenizer, self.prefix, settings.think)
        self.ngen = settings.ngen
        self.messages: list[Message] = []
        self.prompt_ids: list[int] = []  # of the last question
        self.first_ids = self.encode([question("x")])  # shares its first ids with every conversation

    def encode(self, messages: list[Message]) -> list[int]:
        """-> the prompt ids after which the answer comes."""
        ids = self.turns.encode(messages)
        if not ids:
            raise Refused(f"{self.tokenizer.model_path}: the chat template makes no token of a message")
        return ids

    def add_question(self, text: str) -> list[int]:
        """-> the prompt ids. Drops the oldest turns, with a notice, where CTX is full.

        Refused, and nothing changed, when the question does not fit CTX by itself.
        """
        messages = [*self.messages, question(text)]
        messages, ids = drop_oldest_turns(messages, self.encode, self.context, self.ngen)
        if len(ids) > self.context:
            raise Refused(f"the message has {len(ids)} tokens, CTX is {self.context}; raise CTX or shorten it")
        if num_dropped := (len(self.messages) + 1 - len(messages)) // 2:
            turns = "turn is" if num_dropped == 1 else f"{num_dropped} turns are"
            say(f"[chat] CTX={self.context} is full: the oldest {turns} forgotten")
        self.messages, self.prompt_ids = messages, ids
        return ids

    def add_answer(self, ids: list[int]) -> None:
        """Add the answer to the last question, complete or cut off; unfinished reasoning is closed."""
        self.messages.append(self.turns.answer_message(self.messages, self.prompt_ids, ids))

    def drop_question(self) -> None:
        """Remove the last question, which got no answer."""
        self.messages.pop()

    def clear(self) -> None:
        self.messages = []


def question(text: str) -> Message:
    return {"role": "user", "content": text}
