"""Rules about token ids that all modes share: the family's prefix, stop ids, shared prefixes, positions needed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from snapshot.config import ModelConfig

if TYPE_CHECKING:
    from text.tokenizer import TextTokenizer  # imports tokenizers, which modes without text do not need


class PromptPrefix:
    """The special tokens that a family puts in front of every text; empty with PREFIX=0 or if the tokenizer lacks one.

    notices: lines for the user: those of the tokenizer, and one if the prefix cannot be added or is not its own.
    """

    def __init__(self, config: ModelConfig, tokenizer: "TextTokenizer | None", enabled: bool):
        self.ids: list[int] = []
        self.notices: list[str] = list(tokenizer.notices) if tokenizer else []
        own = tokenizer.own_prefix if tokenizer and enabled else []
        if own and own != list(config.text_prefix):
            goes = f"go with {' '.join(config.text_prefix)}" if config.text_prefix else "go without a prefix"
            self.notices.append(f"[prefix] texts {goes} as those of {config.model_type}, not with {' '.join(own)}")
        if not config.text_prefix or not enabled:
            return
        ids = tokenizer.find_ids(config.text_prefix) if tokenizer else []
        if len(ids) == len(config.text_prefix):
            self.ids = ids
        else:
            source = f"{tokenizer.path.name} lacks" if tokenizer else "no tokenizer with"
            self.notices.append(f"[prefix] {source} {' '.join(config.text_prefix)}: texts go without this prefix")

    def prepend(self, ids: list[int]) -> list[int]:
        """ids with the prefix in front, unless they begin with it."""
        return ids if ids[: len(self.ids)] == self.ids else self.ids + ids


def all_stop_ids(config: ModelConfig, tokenizer: "TextTokenizer") -> frozenset[int]:
    """Ids that end an answer: those of config.json and generation_config.json, and those of the tokenizer."""
    return frozenset((*config.stop_ids, *tokenizer.stop_ids))


def shared_prefix_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading elements two sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


def positions_needed(num_prompt: int, max_tokens: int) -> int:
    """KV cache positions of a prompt and its answer. The last token is never forwarded, so it needs none."""
    return num_prompt + max_tokens - 1


def max_answer_tokens(num_prompt: int, capacity: int) -> int:
    """Tokens of the longest answer after a prompt in `capacity` positions; the inverse of `positions_needed`."""
    return capacity - num_prompt + 1
