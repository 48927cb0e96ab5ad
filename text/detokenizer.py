"""Token ids -> text as it comes, never half a character."""

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Feed ids, get the text that is complete; what stays incomplete at the end becomes one U+FFFD."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.stream = DecodeStream(skip_special_tokens=False)
        self.ids, self.text = [], ""

    def push(self, token):
        """-> the new text, or "" while a character is incomplete."""
        self.ids.append(token)
        piece = self.stream.step(self.tokenizer.tokenizer, token) or ""
        self.text += piece
        return piece

    def finish(self):
        """-> the rest at the end of the text."""
        return self.tokenizer.decode(self.ids)[len(self.text) :]
