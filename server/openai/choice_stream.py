"""One choice (answer) while it is generated: token ids -> segments of text, with log-probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from generate.request import NewToken
from server.openai.logprobs import TokenLogprob
from text.detokenizer import Detokenizer
from text.harmony import HarmonyParser
from text.reply import ReplyParser
from text.stop_strings import StopStrings
from text.stream_parser import TextSegment
from text.tokenizer import TextTokenizer

Parser = ReplyParser | HarmonyParser
MakeParser = Callable[[], Parser]


@dataclass(slots=True)
class ChoiceDelta:
    """What a step adds to a choice."""

    segments: list[TextSegment] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the tokens that the segments were made of
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.segments or self.logprobs or self.finish_reason)


class ChoiceStream:
    """Text is held back while it may be the start of a stop string or half a character; the log-probabilities of its
    tokens are held back with it."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        parser: Parser,
        prompt_ids: Sequence[int] = (),
        stop_strings: tuple[str, ...] = (),
        hides_special: bool = True,
    ):
        """hides_special: special tokens have no text, except those that the parser or a stop string needs."""
        hidden_ids = tokenizer.hidden_ids(stop_strings) if hides_special else frozenset()
        self.detokenizer = Detokenizer(tokenizer, prompt_ids, hidden_ids)
        self.stop_strings = StopStrings(stop_strings)
        self.parser = parser
        self.num_chars = 0  # of the text that was parsed
        self.held_logprobs: list[TokenLogprob] = []
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.first_token_time: float | None = None
        self.last_token_time = 0.0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add_token(self, token: NewToken, now: float) -> ChoiceDelta:
        """Add a token that the engine generated at the time `now`."""
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        self.num_tokens += 1
        self.num_reasoning_tokens += self.parser.kind == "reasoning"
        if token.logprob is not None:
            offset = len(self.detokenizer.text)
            self.held_logprobs.append(TokenLogprob(token.id, token.logprob, token.top, offset))
        return self.parse_text(*self.stop_strings.filter_text(self.detokenizer.add_token(token.id)))

    def parse_text(self, text: str, is_stopped: bool) -> ChoiceDelta:
        self.num_chars += len(text)
        delta = ChoiceDelta(self.parser.parse_increment(text))
        if self.parser.is_finished:
            self.set_finish_reason("stop", delta)
        elif is_stopped:
            # Tokens of the stop string itself have no text in the answer.
            self.held_logprobs = [entry for entry in self.held_logprobs if entry.text_offset < self.num_chars]
            delta.segments += self.parser.flush()
            self.set_finish_reason("stop", delta)
        else:
            delta.logprobs = [entry for entry in self.held_logprobs if entry.text_offset < self.num_chars]
            self.held_logprobs = self.held_logprobs[len(delta.logprobs) :]
        return delta

    def flush(self, reason: str) -> ChoiceDelta:
        """Return the last delta, after the engine ended the answer."""
        delta = self.parse_text(*self.stop_strings.filter_text(self.detokenizer.flush()))
        if not self.is_finished:
            held = self.stop_strings.flush()
            self.num_chars += len(held)
            delta.segments += self.parser.parse_increment(held) + self.parser.flush(is_truncated=reason == "length")
            self.set_finish_reason(reason, delta)
        return delta

    def set_finish_reason(self, reason: str, delta: ChoiceDelta) -> None:
        delta.logprobs += self.held_logprobs
        self.held_logprobs = []
        self.finish_reason = "tool_calls" if self.parser.num_calls and reason == "stop" else reason
        delta.finish_reason = self.finish_reason
