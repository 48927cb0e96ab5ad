"""Tokens and log-probabilities as JSON of the OpenAI API."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.openai.api_error import JsonObject
from text.detokenizer import Detokenizer
from text.tokenizer import TextTokenizer

LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float | None  # None: not known, of a prompt's first token
    top: list[tuple[int, float]] | None  # the most likely tokens
    text_offset: int  # characters in front of the token's text


class LogprobFormatter:
    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer

    def chat_logprobs(self, entries: list[TokenLogprob]) -> list[JsonObject]:
        """Return the logprobs.content of a chat."""
        tops = [[self.token_entry(*candidate) for candidate in entry.top or ()] for entry in entries]
        return [self.token_entry(e.token, e.logprob) | {"top_logprobs": t} for e, t in zip(entries, tops, strict=True)]

    def token_entry(self, token: int, logprob: float | None) -> JsonObject:
        data = self.tokenizer.token_bytes(token, token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    def token_name(self, token: int) -> str:
        """Return the text of a token, or the bytes of one that is a part of a character."""
        data = self.tokenizer.token_bytes(token, token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def text_offsets(self, ids: Sequence[int]) -> list[int]:
        """Return where the text of each token begins in the text of all."""
        detokenizer = Detokenizer(self.tokenizer)
        offsets = []
        for token in ids:
            offsets.append(len(detokenizer.text))
            detokenizer.add_token(token)
        return offsets

    def completion_logprobs(self, entries: list[TokenLogprob]) -> JsonObject:
        """Return the logprobs of a choice of /v1/completions."""
        tops = []
        for entry in entries:
            top = {self.token_name(token): finite(logprob) for token, logprob in entry.top or ()}
            if top and entry.logprob is not None:
                top.setdefault(self.token_name(entry.token), finite(entry.logprob))
            tops.append(top or None)
        return {
            "tokens": [self.token_name(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [entry.text_offset for entry in entries],
        }


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
