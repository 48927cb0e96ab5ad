"""Answers of earlier turns in a prompt: the ids that the model gave, where encoding their text could give others.

The KV cache holds the ids of an answer. A tokenizer makes other ids of its text whenever the model chose pieces that it
would not choose, so the cached prefix would end there.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from text.chat_template import Message
from text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from text.tokenizer import TextTokenizer  # which encodes with this

FIELDS = ("reasoning_content", "content")


class AnswerMessage(dict[str, Any]):
    """The message of an answer, with its ids. opening: the text with which the prompt opened the answer's turn, None
    where that is not known. lead, tail: tags that the answer had in front of its first field and behind its last."""

    def __init__(self, message: Message, ids: Sequence[int], opening: str | None, lead: str = "", tail: str = ""):
        super().__init__(message)
        self.ids = list(ids)
        self.lead, self.tail = lead, tail
        self.opening = opening


def encode_with_answers(
    tokenizer: "TextTokenizer", messages: Sequence[Message], render: Callable[[list[Message]], str], separator: str
) -> list[int] | None:
    """Messages -> ids of the prompt that `render` makes of them; None where a part of its text between two answers
    cannot be encoded by itself. The template decides what of an answer stands in the prompt, and where: it is rendered
    with a placeholder in each field."""
    marked: list[Message] = []
    marks: list[tuple[AnswerMessage, dict[str, str]]] = []  # field -> placeholder
    for message in messages:
        if isinstance(message, AnswerMessage):
            marks.append((message, {name: secrets.token_hex(8) for name in FIELDS if message.get(name)}))
            message = {**message, **marks[-1][1]}
        marked.append(message)
    text = render(marked)
    ids: list[int] = []
    end, answer_ids = 0, None  # of what is encoded so far, and of the answer before
    for answer, placeholders in marks:
        text, begin, next_end, next_ids = place_answer(tokenizer, text, answer, placeholders, separator)
        if next_ids:
            part = encode_part(tokenizer, text[end:begin], answer_ids, separator) if begin >= end else None
            if part is None:
                return None
            ids += part + next_ids
            end, answer_ids = next_end, next_ids
    part = encode_part(tokenizer, text[end:], answer_ids, separator)
    return None if part is None else ids + part


def place_answer(
    tokenizer: "TextTokenizer", text: str, answer: AnswerMessage, placeholders: dict[str, str], separator: str
) -> tuple[str, int, int, list[int]]:
    """-> the text, the characters from and to which ids stand in place of it, and these ids."""
    found = {name: text.find(mark) for name, mark in placeholders.items() if text.count(mark) == 1}
    if found and len(found) == len(placeholders) and answer.opening is not None:
        begin, end = min(found.values()), max(at + len(placeholders[name]) for name, at in found.items())
        # The whole answer stands behind what it was generated behind. The prompt may hold its first tag already.
        for lead in (answer.lead, ""):
            if text[:begin].endswith(answer.opening + lead) and text[end:].startswith(answer.tail):
                return text, begin - len(lead), end + len(answer.tail), answer.ids
    # The template drops the reasoning of earlier turns, or writes it in another form.
    content_ids = find_content_ids(tokenizer, answer) if "content" in found else []
    for name, mark in placeholders.items():
        if name != "content" or not content_ids:
            text = text.replace(mark, tokenizer.break_special(answer[name], separator))
    begin = text.find(placeholders["content"]) if content_ids else 0
    return text, begin, begin + len(placeholders["content"]) if content_ids else 0, content_ids


def find_content_ids(tokenizer: "TextTokenizer", answer: AnswerMessage) -> list[int]:
    """The last ids of an answer, whose text is its content; none where a token holds more than that."""
    detokenizer, starts = Detokenizer(tokenizer), []
    for token in answer.ids:
        starts.append(len(detokenizer.text))
        detokenizer.add_token(token)
    text = detokenizer.text + detokenizer.flush()
    content = answer["content"] if len(answer["content"]) == len(text) else answer["content"].lstrip()
    at = len(text) - len(content)
    return answer.ids[starts.index(at) :] if text.endswith(content) and at in starts else []


def encode_part(
    tokenizer: "TextTokenizer", text: str, answer_ids: list[int] | None, separator: str
) -> list[int] | None:
    """The text of a prompt behind an answer -> ids; None where it would get other ids if it were encoded with it."""
    ids = tokenizer.encode(text, separator, is_start=answer_ids is None)
    # A tokenizer splits texts at added tokens. Some put a space in front of any other part.
    if answer_ids is None or not ids or ids[0] in tokenizer.added_ids:
        return ids
    detokenizer = Detokenizer(tokenizer, answer_ids)
    detokenizer.flush()
    decoded = "".join(map(detokenizer.add_token, ids)) + detokenizer.flush()
    return ids if decoded == text.replace(separator, "") else None
