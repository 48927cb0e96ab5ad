"""TokenizerFiles: what the files of a snapshot say about its tokenizer, in the form of tokenizer.json."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshot.gguf import read_metadata
from snapshot.reader import parse_json_object, read_file, read_json_object
from text.chat_template import read_templates
from text.declared_tokens import MAP_FILE


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a snapshot; of a GGUF what its metadata says, in the same form."""

    path: Path  # of tokenizer.json or the GGUF; begins error messages
    model: Path  # the folder or the GGUF
    data: bytes  # tokenizer.json
    tokenizer: dict[str, Any]  # parsed: the ids as in the file, where the library renumbers added tokens
    config: dict[str, Any]  # tokenizer_config.json
    special_map: dict[str, Any]  # special_tokens_map.json
    templates: dict[str, str]  # sources of chat templates by name
    stop_tokens: tuple[str, ...] = ()  # more tokens that end an answer, beside eos_token
    notices: tuple[str, ...] = ()  # where the files disagree, a line each for stderr

    def save(self, folder: Path, **more: Any) -> None:
        """Write tokenizer.json and tokenizer_config.json with the chat templates, as transformers reads them; more:
        other values of the config."""
        listed = [{"name": name, "template": source} for name, source in self.templates.items()]
        templates = self.templates.get("default") if self.templates.keys() <= {"default"} else listed
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.config}
        config |= {"chat_template": templates} if templates else {}
        (folder / "tokenizer.json").write_bytes(self.data)
        (folder / "tokenizer_config.json").write_text(json.dumps(config | more, indent=2) + "\n", encoding="utf-8")


def has_tokenizer(snapshot: Path) -> bool:
    """False for a folder without tokenizer.json, and for a GGUF without tokens."""
    if snapshot.is_file():
        return bool(read_metadata(snapshot).get("tokenizer.ggml.tokens"))
    return (snapshot / "tokenizer.json").exists()


def read_tokenizer_folder(folder: Path) -> TokenizerFiles:
    """tokenizer.json of a snapshot folder, and the files beside it that are there."""
    path = folder / "tokenizer.json"
    data = read_file(path, "text needs the snapshot's tokenizer")
    tokenizer = parse_json_object(data, f"{path}:")
    # lexists: a dangling link is a broken download, not an absent file.
    config, special_map = (
        read_json_object(extra) if os.path.lexists(extra) else {}
        for extra in (folder / "tokenizer_config.json", folder / MAP_FILE)
    )
    inline = config.get("chat_template")
    templates = read_templates(folder, inline)
    notices: tuple[str, ...] = ()
    if isinstance(inline, str) and inline.strip() != templates.get("default", "").strip():
        notices = ("[tokenizer] chat_template.jinja counts, not chat_template of tokenizer_config.json",)
    return TokenizerFiles(path, folder, data, tokenizer, config, special_map, templates, notices=notices)
