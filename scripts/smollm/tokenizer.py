"""Makes the tokenizer of SmolLM2 from the metadata of its GGUF: tokenizer.json, and tokenizer_config.json with the
chat template. A GGUF holds the vocabulary and the merges, and for all other rules only a name, "smollm"."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PRE_TOKENIZER = "smollm"
CONTROL = 3  # token_type of a special token


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with single digits, and no space before a text.

    The vocabulary lacks 21 of the 256 bytes: those that never occur in UTF-8, a few control characters and first bytes
    of unassigned planes. There is no unknown token, so they vanish from a text, as with the original.
    """
    vocabulary = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens(metadata)]
    )
    return tokenizer


def special_tokens(metadata: dict[str, Any]) -> list[str]:
    """The special tokens, in the order of their ids."""
    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in kinds if kind == CONTROL]


def save_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write the two files; tokenizer_config.json lets transformers open the folder too."""
    vocabulary = metadata["tokenizer.ggml.tokens"]
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    words = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: vocabulary[metadata[f"tokenizer.ggml.{word}_token_id"]] for key, word in words.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
