"""One answer on its way: token ids -> the pieces that a client gets, with log-probabilities where it asked for them."""

from dataclasses import dataclass, field

from text.detokenizer import Detokenizer
from text.stop_strings import StopStrings

LOWEST = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class Delta:
    """What is new of an answer: pieces of text/reply.py, and the entries of the tokens that they are made of."""

    pieces: list = field(default_factory=list)
    entries: list = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self):
        return bool(self.pieces or self.entries or self.finish_reason)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log p (None: not known), the likeliest [(id, log p), ...], and where its text begins."""

    id: int
    logprob: float | None
    top: list | None
    offset: int


class PlainParser:
    """Text that is text: of the legacy endpoint."""

    is_over, num_calls, is_thinking = False, 0, False

    def push(self, text):
        return [("content", text)] if text else []

    def finish(self, is_cut=False):
        return []


class ChoiceStream:
    """reader: turns text into pieces. Text waits while it may be the beginning of a stop string, or half a character;
    the entries of its tokens wait with it."""

    def __init__(self, tokenizer, stops, reader):
        self.stream, self.stops, self.reader = Detokenizer(tokenizer), StopStrings(stops), reader
        self.length, self.entries = 0, []  # characters that are certain; entries that wait
        self.num_tokens = self.num_thoughts = 0
        self.finish_reason = self.first_time = self.last_time = None

    @property
    def is_over(self):
        return self.finish_reason is not None

    def push(self, token, now):
        """A Token of the engine, and when it came -> Delta."""
        self.first_time, self.last_time = self.first_time or now, now
        self.num_tokens += 1
        self.num_thoughts += self.reader.is_thinking
        if token.logprob is not None:
            self.entries.append(TokenLogprob(token.id, token.logprob, token.top, len(self.stream.text)))
        text, is_stopped = self.stops.push(self.stream.push(token.id))
        return self.give(text, is_stopped)

    def give(self, text, is_stopped):
        self.length += len(text)
        delta = Delta(self.reader.push(text))
        if self.reader.is_over:
            self.end("stop", delta)
        elif is_stopped:
            # Tokens of the stop string itself have no text in the answer.
            self.entries = [entry for entry in self.entries if entry.offset < self.length]
            delta.pieces += self.reader.finish()
            self.end("stop", delta)
        else:
            ready = [entry for entry in self.entries if entry.offset < self.length]
            delta.entries, self.entries = ready, self.entries[len(ready) :]
        return delta

    def finish(self, reason):
        """The engine has ended the answer -> the last Delta."""
        text, is_stopped = self.stops.push(self.stream.finish())
        delta = self.give(text, is_stopped)
        if not self.is_over:
            held = self.stops.finish()
            self.length += len(held)
            delta.pieces += self.reader.push(held) + self.reader.finish(is_cut=reason == "length")
            self.end(reason, delta)
        return delta

    def end(self, reason, delta):
        delta.entries += self.entries
        self.entries = []
        self.finish_reason = "tool_calls" if self.reader.num_calls and reason == "stop" else reason
        delta.finish_reason = self.finish_reason


class LogprobFormatter:
    """Tokens and log-probabilities in the shapes of the API."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def chat(self, entry):
        """An entry of a chat's logprobs.content."""

        def one(token, logprob):
            data = self.tokenizer.token_bytes(token)
            return {
                "token": data.decode("utf-8", "replace"),
                "logprob": finite(logprob),
                "bytes": list(data),
            }

        top = [one(token, logprob) for token, logprob in entry.top or ()]
        return one(entry.id, entry.logprob) | {"top_logprobs": top}

    def name(self, token):
        """A token as a text of its own; parts of a character by their bytes."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def offsets(self, ids):
        """Where the text of each token begins in that of all."""
        stream, offsets = Detokenizer(self.tokenizer), []
        for token in ids:
            offsets.append(len(stream.text))
            stream.push(token)
        return offsets

    def legacy(self, entries):
        """The logprobs of a choice of the legacy endpoint."""
        tops = []
        for entry in entries:
            top = {self.name(token): finite(logprob) for token, logprob in entry.top or ()}
            if top and entry.logprob is not None:
                top.setdefault(self.name(entry.id), finite(entry.logprob))
            tops.append(top or None)
        return {
            "tokens": [self.name(entry.id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [entry.offset for entry in entries],
        }


def finite(logprob):
    return None if logprob is None else max(logprob, LOWEST)
