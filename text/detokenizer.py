"""Streaming detokenizer: token ids -> text while it is generated, never half a character."""

import codecs
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from text.tokenizer import TextTokenizer  # which decodes with this

TAIL_LENGTH = 4  # tokens that hold every byte of an incomplete character, and the token before it


class Detokenizer:
    """The text that ids add to what stands before them.

    before: ids of a prompt. A character that they leave incomplete belongs to the text of the ids behind them.
    hidden_ids: tokens that are left out.
    """

    def __init__(
        self, tokenizer: "TextTokenizer", before: Sequence[int] = (), hidden_ids: Collection[int] = frozenset()
    ):
        self.tokenizer = tokenizer
        self.hidden_ids = hidden_ids
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last: int | None = None  # the last token with a text: the space in front of the next one depends on it
        self.text = ""
        for token in before[self.find_tail(before) :]:
            self.add_token(token)
        self.text = ""

    def find_tail(self, ids: Sequence[int]) -> int:
        """The index from which on the ids decide what the next token's text is."""
        num_found = 0
        for at in range(len(ids) - 1, -1, -1):
            token = ids[at]
            num_found += token not in self.hidden_ids and bool(self.tokenizer.token_bytes(token, token))
            if num_found == TAIL_LENGTH:
                return at
        return 0

    def add_token(self, token: int) -> str:
        """Return the text that the token completes: "" while a character is incomplete."""
        if token in self.hidden_ids:
            new_text = self.flush()
        else:
            data = self.tokenizer.token_bytes(token, self.last)
            if data or self.last is None:
                self.last = token
            new_text = self.decoder.decode(data)
        self.text += new_text
        return new_text

    def flush(self) -> str:
        """Return the rest at the end of the text: an incomplete character as one U+FFFD."""
        return self.decoder.decode(b"", final=True)
