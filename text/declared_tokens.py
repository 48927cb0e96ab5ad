"""The tokens that the files of a tokenizer declare: which file counts where they disagree, as in transformers 5.24.

tokenizer.json gives the ids. The flags of an added token (lstrip ...) are those of added_tokens_decoder in
tokenizer_config.json, if it is there. A token is special if either says so, or if it has a name (bos_token ...).
special_tokens_map.json counts, before tokenizer_config.json, only where that lacks added_tokens_decoder.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer

from errors import shorten, show
from snapshot.folder import list_names

FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
MAP_FILE = "special_tokens_map.json"

Token = dict[str, Any]


def content_of(token: Any) -> str | None:
    """The text of a token, which is a text or an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


class DeclaredTokens:
    """special: {bos_token and the like: text}; added: the added tokens of tokenizer.json with the flags that count, and
    those that tokenizer_config.json adds; notices: where the files disagree, a line each for stderr."""

    def __init__(
        self, library: Tokenizer, tokenizer: dict[str, Any], config: dict[str, Any], special_map: dict[str, Any]
    ) -> None:
        """library: the tokenizer as tokenizer.json (`tokenizer`) has it, which gets the flags and tokens of
        tokenizer_config.json (`config`). special_map: special_tokens_map.json."""
        self.notices: list[str] = []
        decoder = config.get("added_tokens_decoder")
        self.special = self.find_special(config, special_map, decoder is not None)
        self.added = {token["content"]: dict(token) for token in tokenizer.get("added_tokens") or []}
        before = {content: dict(token) for content, token in self.added.items()}
        if isinstance(decoder, dict):
            self.merge_flags(decoder)
        more = config.get("extra_special_tokens")
        named = {*self.special.values(), *map(content_of, more.values() if isinstance(more, dict) else ())}
        for content, token in self.added.items():
            token["special"] = bool(token.get("special")) or content in named
        changed = [token for content, token in self.added.items() if token != before.get(content)]
        # All at once: the library makes its table of added tokens anew each time.
        library.add_tokens(
            [AddedToken(token["content"], **{name: bool(token.get(name)) for name in FLAGS}) for token in changed]
        )
        for token in changed:
            token["id"] = library.token_to_id(token["content"])

    def find_special(self, config: dict[str, Any], mapped: dict[str, Any], has_decoder: bool) -> dict[str, str]:
        """The named tokens of tokenizer_config.json and special_tokens_map.json."""
        tokens = {name: content_of(value) for name, value in config.items() if name.endswith("_token")}
        for name, value in mapped.items():
            content = content_of(value)
            if not name.endswith("_token") or content is None:
                continue
            if tokens.get(name) not in (None, content):
                files = [f"{MAP_FILE} ({show(content)})", f"tokenizer_config.json ({show(tokens[name])})"]
                winner, other = reversed(files) if has_decoder else files
                self.notices.append(f"[tokenizer] {name} of {winner} counts, not that of {other}")
            if not has_decoder:
                tokens[name] = content
        return {name: content for name, content in tokens.items() if content is not None}

    def merge_flags(self, decoder: dict[str, Any]) -> None:
        """Give the added tokens the flags of added_tokens_decoder, and append those that tokenizer.json lacks."""
        found: dict[str, list[str]] = {}  # a notice -> the tokens that it is about
        for key in sorted(decoder, key=lambda key: (len(key), key)):
            value = decoder[key]
            content = content_of(value)
            if not content or not isinstance(value, dict):
                continue
            flags = {name: value[name] for name in FLAGS if isinstance(value.get(name), bool)}
            token = self.added.get(content)
            if token is None:
                found.setdefault("tokenizer_config.json adds {} to tokenizer.json", []).append(show(content))
                self.added[content] = {"content": content, "id": None} | flags
                continue
            flags["special"] = bool(flags.get("special") or token.get("special"))
            if changed := [name for name in flags if bool(token.get(name)) != flags[name]]:
                notice = f"{{}}: {', '.join(changed)} of tokenizer_config.json counts, not of tokenizer.json"
                found.setdefault(notice, []).append(show(content))
            if key != str(token["id"]):
                ids = f"{show(content)} ({token['id']}, not {shorten(key, 12)})"
                found.setdefault("{}: the id of tokenizer.json counts, not of tokenizer_config.json", []).append(ids)
            token |= flags
        self.notices += [f"[tokenizer] {notice.format(list_names(tokens))}" for notice, tokens in found.items()]
