"""Text <-> token ids, the family's prefix, the chat template, and the stop ids the tokenizer declares.

Encoding is the tokenizers library's; the chat template is rendered by jinja2 in its sandbox, set up as transformers
does it, for a template is part of a hostile snapshot.
"""

import json

from tokenizers import Tokenizer

from snapshot.config import read_json
from snapshot.errors import Refused

END_OF_TEXT = "<|endoftext|>"


class TextTokenizer:
    """tokenizer.json of a snapshot, with what tokenizer_config.json and chat_template.jinja add to it."""

    def __init__(self, folder, config):
        self.path = folder / "tokenizer.json"
        if not self.path.exists():
            raise Refused(f"{self.path}: no such file; text needs the snapshot's tokenizer")
        try:
            self.tokenizer = Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception
            raise Refused(f"{self.path}: is not a tokenizer ({error})") from None
        self.vocab_size = self.tokenizer.get_vocab_size()
        if self.vocab_size > config.vocab_size:
            raise Refused(
                f"{self.path}: has {self.vocab_size} pieces, config.json a vocab_size of {config.vocab_size}; "
                "they belong to different models"
            )
        extra = folder / "tokenizer_config.json"
        self.extra = read_json(extra) if extra.exists() else {}
        template = folder / "chat_template.jinja"
        self.chat_template = (
            template.read_text(encoding="utf-8") if template.exists() else self.extra.get("chat_template")
        )
        self.prefix_ids = self.ids_of(config.text_prefix)
        self.has_prefix = len(self.prefix_ids) == len(config.text_prefix)

    def ids_of(self, tokens):
        """The ids of those tokens that the vocabulary has."""
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
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def with_prefix(self, ids):
        """ids with the family's prefix in front, unless they begin with it."""
        if not self.has_prefix or ids[: len(self.prefix_ids)] == self.prefix_ids:
            return ids
        return self.prefix_ids + ids

    def decode(self, ids):
        """ids -> text, special tokens written out; incomplete UTF-8 becomes U+FFFD."""
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
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, enable_thinking=enable_thinking)
        except TemplateError as error:
            raise Refused(f"{self.path.parent}: the chat template failed ({error})") from None


def to_json(value, ensure_ascii=False, indent=None):
    """JSON for a chat template: plain, not HTML-escaped as jinja2's own filter makes it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
