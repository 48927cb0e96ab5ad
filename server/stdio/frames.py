"""Bytes of a pipe -> requests of the line protocol, docs/stdio.md. A broken one becomes Broken and nothing else: what
belongs to it is skipped, so that no payload is ever taken for a message.
"""

import math
from dataclasses import dataclass

MAX_BYTES = 16 << 20  # of a payload, and of a line
MARK = b"\x02"  # begins every command
ALIASES = {":reset": "RESET", ":more": "MORE", ":piu": "MORE", ":più": "MORE", ":continua": "MORE"}
SKIPPING = "what follows is skipped up to a line that begins with \\x02"


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """A prompt as it is, for a slot."""

    text: str
    max_tokens: int
    temperature: float
    nucleus: float
    slot: int


@dataclass(frozen=True, slots=True)
class MessageFrame:
    """A user's turn of the conversation in slot 0."""

    text: str


@dataclass(frozen=True, slots=True)
class CommandFrame:
    """RESET or MORE, or a blank line: the empty name."""

    name: str


@dataclass(frozen=True, slots=True)
class BrokenFrame:
    """What cannot be understood, and why, in one line."""

    reason: str


class FrameReader:
    """The requests that come in on a buffered stream of bytes, until it ends."""

    def __init__(self, stream, num_slots):
        self.stream, self.num_slots = stream, num_slots
        self.is_lost = False  # where the next request begins is not known: at the next mark

    def __iter__(self):
        while line := self.stream.readline(MAX_BYTES + 1):
            is_whole = line.endswith(b"\n") or len(line) <= MAX_BYTES
            if not is_whole:
                while (rest := self.stream.readline(MAX_BYTES)) and not rest.endswith(b"\n"):
                    pass
            if self.is_lost and not line.startswith(MARK):
                continue
            self.is_lost = False
            yield (
                self.parse(line.rstrip(b"\r\n")) if is_whole else BrokenFrame(f"a line of more than {MAX_BYTES} bytes")
            )

    def parse(self, line):
        """A line without its end -> its request; a PROMPT takes its payload from the stream."""
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            self.is_lost = line.startswith(MARK)
            return BrokenFrame(f"the line is not valid UTF-8 at byte {error.start}")
        if not line.startswith(MARK):
            name = ALIASES.get(text) if text else ""
            return MessageFrame(text) if name is None else CommandFrame(name)
        name, *fields = text[1:].split() or [""]
        if name == "PROMPT":
            return self.read_prompt(fields)
        if name in ("RESET", "MORE") and not fields:
            return CommandFrame(name)
        return BrokenFrame(
            "expected \\x02RESET, \\x02MORE or \\x02PROMPT <bytes> <max_tokens> <temperature> <top_p> [slot]"
        )

    def read_prompt(self, fields):
        """The fields of a header -> Prompt, or Broken when they, the payload or its end are wrong."""
        num_bytes = whole(fields[0]) if fields else None
        if num_bytes is None:
            self.is_lost = True
            return BrokenFrame(f"PROMPT: the first field must be the bytes of the payload; {SKIPPING}")
        payload, num_read = self.read_payload(num_bytes)
        if num_read < num_bytes:
            return BrokenFrame(f"PROMPT: the payload ended after {num_read} of {num_bytes} bytes")
        if (following := self.stream.peek(1)[:1]) == b"\n":
            self.stream.read(1)
        elif following:
            self.is_lost = True
            return BrokenFrame(f"PROMPT: no line end after {num_bytes} bytes of payload, is that its size?; {SKIPPING}")
        if num_bytes > MAX_BYTES:
            return BrokenFrame(f"PROMPT: a payload of {num_bytes} bytes, at most {MAX_BYTES} are taken")
        try:
            return self.check(fields, payload.decode("utf-8"))
        except UnicodeDecodeError as error:
            return BrokenFrame(f"PROMPT: the payload is not valid UTF-8 at byte {error.start}")
        except ValueError as error:
            return BrokenFrame(f"PROMPT: {error}")

    def read_payload(self, num_bytes):
        """-> (the bytes, how many came). One that is too large is read past."""
        if num_bytes <= MAX_BYTES:
            payload = self.stream.read(num_bytes)
            return payload, len(payload)
        left = num_bytes
        while left and (part := self.stream.read(min(left, 1 << 20))):
            left -= len(part)
        return b"", num_bytes - left

    def check(self, fields, text):
        """-> Prompt; ValueError says which number is out of range."""
        if len(fields) not in (4, 5):
            raise ValueError(f"{len(fields)} fields, expected <bytes> <max_tokens> <temperature> <top_p> [slot]")
        max_tokens, slot = whole(fields[1]), whole(fields[4]) if len(fields) == 5 else 0
        temperature, nucleus = number(fields[2]), number(fields[3])
        if not max_tokens:
            raise ValueError(f"max_tokens {fields[1]}: expected 1 or more")
        if not 0 <= temperature <= 2:
            raise ValueError(f"temperature {fields[2]}: expected 0 to 2")
        if not 0 < nucleus <= 1:
            raise ValueError(f"top_p {fields[3]}: expected a number above 0, at most 1")
        if slot is None or slot >= self.num_slots:
            raise ValueError(f"slot {fields[4]}: expected 0 to {self.num_slots - 1}, KV_SLOTS is {self.num_slots}")
        if not text:
            raise ValueError("an empty payload")
        return PromptFrame(text, max_tokens, temperature, nucleus, slot)


def whole(word):
    """Digits -> their number, None for anything else; int() alone would also take 1_0 and digits of other scripts."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 20 else None


def number(word):
    """-> float, NaN for what is none."""
    try:
        return float(word) if word.isascii() and "_" not in word else math.nan
    except ValueError:
        return math.nan
