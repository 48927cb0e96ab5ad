"""Streaming detokenizer: token ids -> text while it is generated, never half a character."""

from tokenizers.decoders import DecodeStream

from text.tokenizer import TextTokenizer


class Detokenizer:
    """The ids and the text of one answer so far."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer
        self.decode_stream = DecodeStream(skip_special_tokens=False)
        self.ids: list[int] = []
        self.text = ""

    def add_token(self, token: int) -> str:
        """Return the text that the token completes: "" while a character is incomplete."""
        self.ids.append(token)
        new_text = self.decode_stream.step(self.tokenizer.tokenizer, token) or ""
        self.text += new_text
        return new_text

    def flush(self) -> str:
        """Return the rest at the end of the text: an incomplete character as one U+FFFD."""
        return self.tokenizer.decode(self.ids)[len(self.text) :]
