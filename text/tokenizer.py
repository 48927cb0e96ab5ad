"""Tokenizer: text <-> token ids, the chat template, and the stop ids that the tokenizer declares.

The tokenizers library encodes and text/chat_template.py renders. In a conversation, special tokens in the content of
messages and tools are encoded as plain text: only the template can write control tokens.
"""

import itertools
import json
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, pre_tokenizers
from tokenizers.pre_tokenizers import Metaspace

from errors import Refused, printable, reason, shorten, show
from snapshot.config import ModelConfig
from snapshot.folder import list_names
from text.answer_tags import hidden_tokens
from text.chat_answers import AnswerMessage, encode_with_answers
from text.chat_template import ChatTemplate, Message
from text.declared_tokens import DeclaredTokens
from text.detokenizer import Detokenizer
from text.gguf_tokenizer import read_gguf_tokenizer
from text.tokenizer_files import read_tokenizer_folder

END_OF_TEXT = "<|endoftext|>"


class TextTokenizer:
    """The tokenizer of a snapshot: tokenizer.json of a folder, with tokenizer_config.json and chat_template.jinja if
    there are any, or the metadata of a GGUF."""

    def __init__(self, snapshot: Path, config: ModelConfig):
        files = read_gguf_tokenizer(snapshot) if snapshot.is_file() else read_tokenizer_folder(snapshot)
        self.path, self.model_path, declared = files.path, files.model, files.tokenizer
        with refusing(self.path, "is not a tokenizer"):
            self.tokenizer = Tokenizer.from_buffer(files.data)
        # Truncation and padding of the training run must not apply to prompts.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.check_vocabulary(declared, config.vocab_size)
        with refusing(self.path, "cannot add the tokens of tokenizer_config.json"):
            self.declared = DeclaredTokens(self.tokenizer, declared, files.config, files.special_map)
        self.notices = [*self.declared.notices, *files.notices]  # where files disagree, a line each for stderr
        self.unusable = self.find_unusable(config.vocab_size)
        self.chat_templates = files.templates
        self.stop_tokens = files.stop_tokens
        self.compiled_templates: dict[str, ChatTemplate] = {}
        self.lock = threading.Lock()  # encode_part changes the tokenizer for a moment
        self.metaspaces = find_metaspaces(self.tokenizer)
        decoder = json.dumps(declared.get("decoder"))
        self.is_byte_level, self.has_byte_fallback = "ByteLevel" in decoder, "ByteFallback" in decoder
        special = [token for token in self.declared.added.values() if token["special"]]
        self.special: dict[str, int] = {token["content"]: token["id"] for token in special}
        self.special_ids = set(self.special.values())
        # The longest first. A token of one character cannot be broken in two; there is none.
        texts = sorted((text for text in self.special if len(text) > 1), key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def check_vocabulary(self, declared: dict[str, Any], vocab_size: int) -> None:
        """Every piece must be a row of the model. There may be holes, and the library renumbers added tokens."""
        mismatch = f"the model a vocabulary of {vocab_size}; they belong to different models"
        size = self.tokenizer.get_vocab_size(with_added_tokens=False)
        if size > vocab_size:
            raise Refused(f"{self.path}: has {size} pieces, {mismatch}")
        for piece, i in self.tokenizer.get_vocab(with_added_tokens=False).items():
            if i >= vocab_size:
                raise Refused(f"{self.path}: gives {show(piece)} the id {i}, {mismatch}")
        for piece, i in [(token["content"], token["id"]) for token in declared.get("added_tokens", [])]:
            if self.tokenizer.token_to_id(piece) != i:
                hole = f"a hole in the ids of its added tokens before {show(piece)}, declared as {i}"
                raise Refused(f"{self.path}: has {hole}; texts would get other ids than the model was trained on")

    def find_unusable(self, vocab_size: int) -> dict[int, str]:
        """{id: text} of added tokens that the model has no row for, as fine-tunes have for padding. They are no fault
        while no text holds one."""
        tokens = self.tokenizer.get_added_tokens_decoder().items()
        unusable = {i: token.content for i, token in tokens if i >= vocab_size}
        if unusable:
            names = list_names(map(show, unusable.values()))
            problem = f"the vocabulary of {vocab_size} has no row for {names}: a text with it is refused"
            self.notices.append(f"[tokenizer] {problem}")
        return unusable

    def check_usable(self, ids: list[int]) -> list[int]:
        """The ids. Refused for one that the model has no row for."""
        for i in self.unusable.keys() & ids if self.unusable else ():
            piece = show(self.unusable[i])
            raise Refused(f"{self.path}: the text holds {piece}, id {i}, which is not in the vocabulary of the model")
        return ids

    def find_ids(self, tokens: Iterable[str]) -> list[int]:
        """The ids of those tokens that are in the vocabulary."""
        with refusing(self.path, "cannot look up a token"):
            ids = [self.tokenizer.token_to_id(token) for token in tokens]
        return [i for i in ids if i is not None and i not in self.unusable]

    @property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as the tokenizer's files declare them."""
        return self.declared.special

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """<|endoftext|>, the declared eos_token and what else a GGUF names, if they are in the vocabulary."""
        eos = self.special_tokens.get("eos_token")
        tokens = [END_OF_TEXT, *([] if eos is None else [eos]), *self.stop_tokens]
        return tuple(self.find_ids(dict.fromkeys(tokens)))

    @property
    def own_prefix(self) -> list[str]:
        """The tokens that tokenizer.json itself puts in front of a text, printable."""
        with refusing(self.path, "cannot encode this text"), self.lock:
            encoding = self.tokenizer.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        count = added.index(0) if 0 in added else 0
        return [printable(shorten(token)) for token in encoding.tokens[:count]]

    def encode(self, text: str, separator: str | None = None, is_start: bool = True) -> list[int]:
        """text -> ids. Special tokens in the text are recognized, except those that a separator breaks in two.
        is_start: nothing stands before it; some tokenizers put a space in front of a text."""
        with refusing(self.path, "cannot encode this text"), self.lock:
            encoding = self.encode_part(text, is_start)
            if not separator or separator not in text:
                return self.check_usable(encoding.ids)
            # Encode each stretch between two special tokens again, as text alone, if it holds a separator.
            ids: list[int] = []
            first = begin = 0  # token and character where the stretch begins
            for at, token in enumerate((*encoding.ids, None)):
                if token is None or token in self.special_ids:
                    end, next_begin = (len(text), 0) if token is None else encoding.offsets[at]
                    stretch = text[begin:end]
                    if separator in stretch:
                        part = stretch.replace(separator, "")
                        ids += self.encode_part(part, is_start and begin == 0, special_as_text=True).ids
                    else:
                        ids += encoding.ids[first:at]
                    ids += encoding.ids[at : at + 1]
                    first, begin = at + 1, next_begin
            return self.check_usable(ids)

    def encode_as_text(self, text: str) -> list[int]:
        """A text within another -> ids, special tokens as plain text."""
        with refusing(self.path, "cannot encode this text"), self.lock:
            return self.check_usable(self.encode_part(text, is_start=False, special_as_text=True).ids)

    def encode_part(self, text: str, is_start: bool, special_as_text: bool = False) -> Encoding:
        """The caller holds the lock: the tokenizer is changed for a moment."""
        self.tokenizer.encode_special_tokens = special_as_text
        changed = [] if is_start else self.metaspaces
        try:
            for metaspace in changed:
                metaspace.prepend_scheme = "never"
            return self.tokenizer.encode(text, add_special_tokens=False)
        finally:
            self.tokenizer.encode_special_tokens = False
            for metaspace in changed:
                metaspace.prepend_scheme = "first"

    def hidden_ids(self, stop_strings: tuple[str, ...] = ()) -> frozenset[int]:
        """The special tokens that an answer with these stop strings is shown without."""
        return frozenset(self.special[token] for token in hidden_tokens(set(self.special), stop_strings))

    def decode(self, ids: Sequence[int]) -> str:
        """ids -> text with special tokens; incomplete UTF-8 becomes U+FFFD."""
        detokenizer = Detokenizer(self)
        return "".join(map(detokenizer.add_token, ids)) + detokenizer.flush()

    def token_bytes(self, token: int, before: int | None) -> bytes:
        """The bytes that a token adds to a text, UTF-8 or a part of a character. before: the token in front of it, None
        at the start of a text, where many tokenizers drop a space; behind itself a token has its usual text."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None:  # a row of the model without a token
            return b""
        if self.is_byte_level:
            # An added token stands in its own letters, as does a token with a letter that is no byte.
            if token in self.added_ids or not BYTES.keys() >= set(piece):
                return piece.encode()
            return b"".join(BYTES[letter] for letter in piece)
        if self.has_byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        with refusing(self.path, "cannot decode these ids"):
            if before is not None:
                text, head = (
                    self.tokenizer.decode(ids, skip_special_tokens=False) for ids in ([before, token], [before])
                )
                if text.startswith(head):
                    return text[len(head) :].encode()
            return self.tokenizer.decode([token], skip_special_tokens=False).encode()

    @cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_added_tokens_decoder())

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template for a conversation without tools."""
        return self.chat_templates.get("default")

    @property
    def template(self) -> ChatTemplate:
        return self.find_template()

    def find_template(self, with_tools: bool = False) -> ChatTemplate:
        """The compiled chat template: tool_use with tools where there is one. Refused if there is none or it is
        broken."""
        name = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            named = f", only {', '.join(sorted(self.chat_templates))}" if self.chat_templates else ""
            raise Refused(f"{self.model_path}: has no chat template (chat_template.jinja){named}; leave CHAT unset")
        if name not in self.compiled_templates:
            with refusing(self.model_path, "the chat template failed"):
                self.compiled_templates[name] = ChatTemplate(self.chat_templates[name], self.special_tokens)
        return self.compiled_templates[name]

    def render_chat(self, messages: list[Message], enable_thinking: bool = False, **variables: Any) -> str:
        """Messages -> prompt text that ends where the assistant's turn begins. `variables`: tools, and others that the
        template reads, which count more than enable_thinking."""
        template = self.find_template(bool(variables.get("tools")))
        # A template can fail as any program can: a division by zero, a wrong type, an endless recursion.
        with refusing(self.model_path, "the chat template failed"):
            return template.render(messages, **{**template.reasoning.variables(enable_thinking), **variables})

    def thinking_notices(self, think: bool) -> list[str]:
        """A line for stderr where reasoning was asked for with THINK=1, and the chat template cannot be asked."""
        with suppress(Refused):  # a missing or broken template is refused by the chats that need it
            if think and not self.template.reasoning.has_switch:
                return ["[think] THINK=1 has no effect: the chat template has no switch for reasoning"]
        return []

    def encode_chat(self, messages: list[Message], ending: str = "", **variables: Any) -> tuple[str, list[int]]:
        """As render_chat -> (the text and `ending`, its ids). Special tokens inside messages and tools stay text; an
        AnswerMessage keeps its ids."""
        separator = secrets.token_hex(8)  # random: nobody can write it into a message
        tools = self.break_special(variables.pop("tools", None), separator)

        def render(messages: list[Message]) -> str:
            return self.render_chat(self.break_special(messages, separator), tools=tools, **variables) + ending

        text = render(messages)
        ids = None
        if any(isinstance(message, AnswerMessage) for message in messages):
            ids = encode_with_answers(self, messages, render, separator)
        return text.replace(separator, ""), self.encode(text, separator) if ids is None else ids

    def break_special(self, value: Any, separator: str) -> Any:
        """A JSON value with a separator inside every special token of its strings."""
        if isinstance(value, str) and self.special_pattern:
            return self.special_pattern.sub(lambda match: match[0][0] + separator + match[0][1:], value)
        if isinstance(value, list):
            return [self.break_special(item, separator) for item in value]
        if isinstance(value, dict):
            return dict(self.break_special([*pair], separator) for pair in value.items())
        return value


def byte_alphabet() -> dict[str, bytes]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes are themselves, the others start at 256."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): bytes([byte]) for byte in plain}
    return table | {chr(256 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTES = byte_alphabet()


def find_metaspaces(tokenizer: Tokenizer) -> list[Metaspace]:
    """The pre-tokenizers that put a space in front of the first part of a text alone."""
    found = [tokenizer.pre_tokenizer]
    if isinstance(found[0], pre_tokenizers.Sequence):
        with suppress(IndexError):
            for at in itertools.count():
                found.append(found[0][at])
    return [part for part in found if isinstance(part, Metaspace) and part.prepend_scheme == "first"]


@contextmanager
def refusing(path: Path, problem: str) -> Iterator[None]:
    """Turns any exception inside, all faults of the snapshot, into Refused: path, problem and reason in one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, Refused):
        raise
    except BaseException as error:  # the tokenizers library raises bare Exception, and its panics are not even that
        raise Refused(f"{path}: {problem} ({shorten(reason(error), 300)})") from None
