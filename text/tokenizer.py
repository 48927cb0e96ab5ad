"""Text <-> token ids, the chat template, and the stop ids the tokenizer declares.

Encoding is the tokenizers library's, rendering chat_template.py's. In a conversation a special token that stands in
what somebody said stays text: the template alone writes tokens.
"""

import json
import os
import re
import secrets
import threading
from contextlib import contextmanager
from functools import cached_property

from tokenizers import Tokenizer

from errors import Refused, reason, shorten, show
from snapshot.reader import parse_json_object, read_file, read_json_object
from text.chat_template import ChatTemplate

END_OF_TEXT = "<|endoftext|>"


class TextTokenizer:
    """tokenizer.json of a snapshot, with what tokenizer_config.json and chat_template.jinja add to it."""

    def __init__(self, folder, config):
        self.path = folder / "tokenizer.json"
        data = read_file(self.path, "text needs the snapshot's tokenizer")
        raw = parse_json_object(data, f"{self.path}:")  # as declared: the library renumbers added tokens
        with refusing(self.path, "is not a tokenizer"):
            self.tokenizer = Tokenizer.from_buffer(data)
        # What was cut or filled up when the tokenizer was trained must not cut or fill up a prompt.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.check_ids(raw, config.vocab_size)
        extra, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        # lexists: a link to nothing is a broken download, not an absent file.
        self.tokenizer_config = read_json_object(extra) if os.path.lexists(extra) else {}
        self.chat_template = (
            read_text(template) if os.path.lexists(template) else self.tokenizer_config.get("chat_template")
        )
        if isinstance(self.chat_template, list):  # several with names
            self.chat_template = pick_template(self.chat_template)
        self.lock = threading.Lock()  # encode_as_text changes the tokenizer for a moment
        self.is_byte_level = "ByteLevel" in json.dumps(raw.get("decoder"))
        added = [token for token in raw.get("added_tokens", []) if token.get("special")]
        self.special_ids = {token["id"] for token in added}
        # A token of one character cannot be broken in two; there is none.
        markers = sorted((token["content"] for token in added if len(token["content"]) > 1), key=len, reverse=True)
        self.markers = re.compile("|".join(map(re.escape, markers))) if markers else None

    def check_ids(self, raw, vocab_size):
        """Every id is a row of the model. A vocabulary may have holes, and the library renumbers added tokens."""
        alien = f"config.json a vocab_size of {vocab_size}; they belong to different models"
        if self.vocab_size > vocab_size:
            raise Refused(f"{self.path}: has {self.vocab_size} pieces, {alien}")
        declared = [(token["content"], token["id"]) for token in raw.get("added_tokens", [])]
        for piece, i in [*self.tokenizer.get_vocab().items(), *declared]:
            if i >= vocab_size:
                raise Refused(f"{self.path}: gives {show(piece)} the id {i}, {alien}")
        for piece, i in declared:
            if self.tokenizer.token_to_id(piece) != i:
                what = f"a hole in the ids of its added tokens before {show(piece)}, declared as {i}"
                raise Refused(f"{self.path}: has {what}; texts would get other ids than the model was trained on")

    def find_ids(self, tokens):
        """The ids of those tokens that the vocabulary has."""
        with refusing(self.path, "cannot look up a token"):
            ids = [self.tokenizer.token_to_id(token) for token in tokens]
        return [i for i in ids if i is not None]

    @property
    def stop_ids(self):
        """<|endoftext|> and the declared eos_token, where the vocabulary has them."""
        declared = self.tokenizer_config.get("eos_token")
        declared = declared.get("content") if isinstance(declared, dict) else declared
        return tuple(self.find_ids([END_OF_TEXT] + ([declared] if isinstance(declared, str) else [])))

    def encode(self, text, seam=None):
        """text -> ids; special tokens written out in the text are recognised, but for those with a `seam` in them,
        which were broken by `render_chat` and stay text."""
        with refusing(self.path, "cannot encode this text"), self.lock:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
            if not seam or seam not in text:
                return encoding.ids
            # The stretches between two special tokens that hold a seam are encoded again, as text alone.
            ids, first, begin = [], 0, 0
            for at, token in enumerate((*encoding.ids, None)):
                if token is None or token in self.special_ids:
                    low, high = (len(text), None) if token is None else encoding.offsets[at]
                    piece = text[begin:low]
                    ids += self.encode_as_text(piece.replace(seam, "")) if seam in piece else encoding.ids[first:at]
                    ids += encoding.ids[at : at + 1]
                    first, begin = at + 1, high
            return ids

    def encode_as_text(self, text):
        """text -> ids, special tokens written out in it being text. Under the lock alone."""
        self.tokenizer.encode_special_tokens = True
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self.tokenizer.encode_special_tokens = False

    def decode(self, ids):
        """ids -> text, special tokens written out; incomplete UTF-8 becomes U+FFFD."""
        with refusing(self.path, "cannot decode these ids"):
            return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token):
        """The bytes that a token stands for: UTF-8, perhaps a part of a character."""
        piece = self.tokenizer.id_to_token(token) or ""
        if token in self.added_ids:
            return piece.encode()
        if self.is_byte_level:
            return b"".join(BYTES.get(c) or c.encode() for c in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()  # SentencePiece's sign for a space

    @cached_property
    def added_ids(self):
        return frozenset(self.tokenizer.get_added_tokens_decoder())

    @cached_property
    def template(self):
        """The ChatTemplate; Refused where there is none, or a broken one."""
        if not isinstance(self.chat_template, str):
            raise Refused(f"{self.path.parent}: has no chat template (chat_template.jinja); leave CHAT unset")
        with refusing(self.path.parent, "the chat template failed"):
            return ChatTemplate(self.chat_template, self.special_tokens)

    @property
    def special_tokens(self):
        """bos_token, eos_token and the like, as tokenizer_config.json declares them, for templates."""
        tokens = {name: value for name, value in self.tokenizer_config.items() if name.endswith("_token")}
        tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
        return {name: value for name, value in tokens.items() if isinstance(value, str)}

    def render_chat(self, messages, enable_thinking=False, **variables):
        """Messages [{"role", "content"}, ...] -> the prompt text, ready for the assistant's turn. `variables`: tools,
        and whatever else the template knows."""
        # A template can fail as any program can: a division by zero, a name of the wrong type, an endless recursion.
        template = self.template
        with refusing(self.path.parent, "the chat template failed"):
            return template.render(messages, enable_thinking=enable_thinking, **variables)

    def encode_chat(self, messages, ending="", **variables):
        """As render_chat -> (the text with `ending` behind it, its ids). What special tokens somebody wrote into a
        message or a tool stay text."""
        seam = secrets.token_hex(8)  # nobody can guess it, and write it himself
        messages, tools = self.broken(messages, seam), self.broken(variables.pop("tools", None), seam)
        text = self.render_chat(messages, tools=tools, **variables) + ending
        return text.replace(seam, ""), self.encode(text, seam)

    def broken(self, value, seam):
        """A JSON value with every special token in its texts broken by the seam."""
        if isinstance(value, str):
            return self.markers.sub(lambda match: match[0][0] + seam + match[0][1:], value) if self.markers else value
        if isinstance(value, list):
            return [self.broken(item, seam) for item in value]
        if isinstance(value, dict):
            return {self.broken(name, seam): self.broken(item, seam) for name, item in value.items()}
        return value


def byte_alphabet():
    """character -> its byte in byte-level vocabularies: printable bytes are themselves, the others come from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): bytes([byte]) for byte in plain}
    return table | {chr(256 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTES = byte_alphabet()


def pick_template(templates):
    """[{"name", "template"}, ...] -> the one called default, None where there is none."""
    named = [entry for entry in templates if isinstance(entry, dict) and entry.get("name") == "default"]
    return named[0].get("template") if named else None


@contextmanager
def refusing(path, problem):
    """Whatever goes wrong inside is a fault of the snapshot: one line with the path, the problem and the reason."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library raises bare Exception, and a panic of its is not even that
        raise Refused(f"{path}: {problem} ({shorten(reason(error), 300)})") from None


def read_text(path):
    """A file of UTF-8 text."""
    try:
        return read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: is not valid UTF-8 at byte {error.start}; download it again") from None
