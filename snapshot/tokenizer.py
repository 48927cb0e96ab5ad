"""Text <-> token ids, the family's prefix, the chat template, and the stop ids the tokenizer declares.

Encoding is the tokenizers library's; the chat template is rendered by jinja2 in its sandbox, set up as transformers
does it, for a template is part of a hostile snapshot.
"""

import json
import os
from contextlib import contextmanager

from tokenizers import Tokenizer

from snapshot.config import parse_json, read_json
from snapshot.errors import Refused, reason, shorten, show
from snapshot.reader import read_file

END_OF_TEXT = "<|endoftext|>"


class TextTokenizer:
    """tokenizer.json of a snapshot, with what tokenizer_config.json and chat_template.jinja add to it."""

    def __init__(self, folder, config):
        self.path = folder / "tokenizer.json"
        data = read_file(self.path, "text needs the snapshot's tokenizer")
        raw = parse_json(data, f"{self.path}:")  # as declared: the library renumbers added tokens
        with refusing(self.path, "is not a tokenizer"):
            self.tokenizer = Tokenizer.from_buffer(data)
        # What was cut or filled up when the tokenizer was trained must not cut or fill up a prompt.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.check_ids(raw, config.vocab_size)
        extra, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        # lexists: a link to nothing is a broken download, not an absent file.
        self.extra = read_json(extra) if os.path.lexists(extra) else {}
        self.chat_template = read_text(template) if os.path.lexists(template) else self.extra.get("chat_template")
        self.prefix_ids = self.ids_of(config.text_prefix)
        self.has_prefix = len(self.prefix_ids) == len(config.text_prefix)

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

    def ids_of(self, tokens):
        """The ids of those tokens that the vocabulary has."""
        with refusing(self.path, "cannot look up a token"):
            ids = [self.tokenizer.token_to_id(token) for token in tokens]
        return [i for i in ids if i is not None]

    @property
    def stop_ids(self):
        """<|endoftext|> and the declared eos_token, where the vocabulary has them."""
        declared = self.extra.get("eos_token")
        declared = declared.get("content") if isinstance(declared, dict) else declared
        return tuple(self.ids_of([END_OF_TEXT] + ([declared] if isinstance(declared, str) else [])))

    def encode(self, text):
        """text -> ids; special tokens written out in the text are recognised."""
        with refusing(self.path, "cannot encode this text"):
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def with_prefix(self, ids):
        """ids with the family's prefix in front, unless they begin with it."""
        if not self.has_prefix or ids[: len(self.prefix_ids)] == self.prefix_ids:
            return ids
        return self.prefix_ids + ids

    def decode(self, ids):
        """ids -> text, special tokens written out; incomplete UTF-8 becomes U+FFFD."""
        with refusing(self.path, "cannot decode these ids"):
            return self.tokenizer.decode(ids, skip_special_tokens=False)

    def render_chat(self, messages, enable_thinking=False):
        """Messages [{"role", "content"}, ...] -> the prompt text, ready for the assistant's turn."""
        if not isinstance(self.chat_template, str):
            raise Refused(f"{self.path.parent}: has no chat template (chat_template.jinja); leave CHAT unset")
        # Only chats need jinja2, and importing it costs a cold start a tenth of a second.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def fail(message):
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = fail
        # A template can fail as any program can: a division by zero, a name of the wrong type, an endless recursion.
        with refusing(self.path.parent, "the chat template failed"):
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, enable_thinking=enable_thinking)


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


def to_json(value, ensure_ascii=False, indent=None):
    """JSON for a chat template: plain, not HTML-escaped as jinja2's own filter makes it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
