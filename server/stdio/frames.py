"""Frames of the stdio protocol (docs/stdio.md): the requests in a stream of bytes. A frame that is wrong becomes its
Refused, and what belongs to it is skipped, so that no payload is taken for a message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from errors import Refused
from machine.fields import TextFieldReader

MAX_BYTES = 16 << 20  # of a payload, and of a line
MARKER = b"\x02"  # begins every command
ALIASES = {":reset": "RESET", ":more": "MORE", ":piu": "MORE", ":più": "MORE", ":continua": "MORE"}
SKIPPING = "everything up to the next line that begins with \\x02 is skipped"
HEADER = "<bytes> <max_tokens> <temperature> <top_p> [slot]"
HEADER_NAMES = ("bytes", "max_tokens", "temperature", "top_p", "slot")


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """A prompt without a chat template, for a slot."""

    text: str
    max_tokens: int
    temperature: float
    top_p: float
    slot: int


@dataclass(frozen=True, slots=True)
class MessageFrame:
    """A user's turn of the chat in slot 0."""

    text: str


@dataclass(frozen=True, slots=True)
class CommandFrame:
    """RESET or MORE; a blank line has the empty name."""

    name: str


Frame = PromptFrame | MessageFrame | CommandFrame | Refused


class FrameReader:
    """Iterates over the frames of a buffered stream, until it ends."""

    def __init__(self, stream: Any, num_slots: int):  # a BufferedReader
        self.stream = stream
        self.num_slots = num_slots
        self.is_skipping = False  # up to the next marker, because the end of a payload is not known

    def __iter__(self) -> Iterator[Frame]:
        while line := self.stream.readline(MAX_BYTES + 1):
            is_complete = line.endswith(b"\n") or len(line) <= MAX_BYTES
            if not is_complete:
                while (rest := self.stream.readline(MAX_BYTES)) and not rest.endswith(b"\n"):
                    pass
            if self.is_skipping and not line.startswith(MARKER):
                continue
            self.is_skipping = False
            try:
                if not is_complete:
                    raise Refused(f"a line of more than {MAX_BYTES} bytes; send shorter lines")
                yield self.parse_frame(line.rstrip(b"\r\n"))
            except Refused as error:
                yield error

    def parse_frame(self, line: bytes) -> PromptFrame | MessageFrame | CommandFrame:
        """Parse a line without its end. A PROMPT reads its payload from the stream. Refused for a broken frame."""
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            self.is_skipping = line.startswith(MARKER)
            raise Refused(f"the line is not valid UTF-8 at byte {error.start}") from None
        if not line.startswith(MARKER):
            name = ALIASES.get(text) if text else ""
            return MessageFrame(text) if name is None else CommandFrame(name)
        name, *words = text[1:].split() or [""]
        if name == "PROMPT":
            return self.read_prompt_frame(words)
        if name in ("RESET", "MORE") and not words:
            return CommandFrame(name)
        raise Refused(f"expected \\x02RESET, \\x02MORE or \\x02PROMPT {HEADER}")

    def read_prompt_frame(self, words: list[str]) -> PromptFrame:
        header = TextFieldReader(dict(zip(HEADER_NAMES, words, strict=False)), "PROMPT")
        num_bytes = header.to_whole(words[0]) if words else None
        if num_bytes is None:
            self.is_skipping = True
            raise Refused(f"PROMPT: the first field must be the number of payload bytes; {SKIPPING}")
        payload, num_read = self.read_payload(num_bytes)
        if num_read < num_bytes:
            raise Refused(f"PROMPT: the payload ended after {num_read} of {num_bytes} bytes")
        if (following := self.stream.peek(1)[:1]) == b"\n":
            self.stream.read(1)
        elif following:
            self.is_skipping = True
            raise Refused(f"PROMPT: no line end after {num_bytes} bytes of payload, is that its size?; {SKIPPING}")
        if num_bytes > MAX_BYTES:
            raise Refused(f"PROMPT: a payload of {num_bytes} bytes, at most {MAX_BYTES} are allowed")
        try:
            text = payload.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refused(f"PROMPT: the payload is not valid UTF-8 at byte {error.start}") from None
        if len(words) not in (4, 5):
            raise Refused(f"PROMPT: {len(words)} fields, expected {HEADER}")
        max_tokens = header.whole("max_tokens", low=1, high=1 << 63)
        temperature = header.number("temperature", low=0, high=2)
        top_p = header.number("top_p", low=0, high=1)
        if not top_p:
            header.expected("top_p", top_p, "a number above 0, at most 1")
        slot = header.whole("slot", 0)
        if slot >= self.num_slots:
            header.expected("slot", slot, f"0 to {self.num_slots - 1} (KV_SLOTS={self.num_slots})")
        if not text:
            raise Refused("PROMPT: the payload is empty, it needs at least one character")
        return PromptFrame(text, max_tokens, temperature, top_p, slot)

    def read_payload(self, num_bytes: int) -> tuple[bytes, int]:
        """Return (the payload, the bytes that came). One that is too large is read and dropped."""
        if num_bytes <= MAX_BYTES:
            payload = self.stream.read(num_bytes)
            return payload, len(payload)
        left = num_bytes
        while left and (chunk := self.stream.read(min(left, 1 << 20))):
            left -= len(chunk)
        return b"", num_bytes - left
