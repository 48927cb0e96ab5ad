"""Small tokenizers of every kind, as published models have them: tokenizer.json built in the test."""

import json
from types import SimpleNamespace

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from text.tokenizer import TextTokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = list("▁Onceupatimh.:,[]INST/wx\n")
MERGES = [
    ("▁", "t"),
    ("h", "e"),
    ("▁t", "he"),
    ("▁t", "i"),
    ("m", "e"),
    ("▁ti", "me"),
    ("▁", "O"),
    ("n", "c"),
    ("▁", "a"),
]
PIECES = ["▁t", "he", "▁the", "▁ti", "me", "▁time", "▁O", "nc", "▁a"]
# Replace, ByteFallback, Fuse, Strip: Llama 2, Mixtral.
SENTENCE_PIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
KINDS = (
    "llama2",
    "mixtral",
    "gemma",
    "unigram",
    "unigram_bare",
    "byte_unigram",
    "word_piece",
    "suffix_bpe",
    "byte_level",
)


def byte_fallback_bpe():
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *BYTE_PIECES, *LETTERS, *PIECES])}
    return Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def unigram(byte_fallback=False):
    pieces = [*SPECIAL, *(BYTE_PIECES if byte_fallback else ()), *LETTERS, *PIECES]
    return Tokenizer(models.Unigram([(piece, -float(i + 1)) for i, piece in enumerate(pieces)], 0, byte_fallback))


def make_tokenizer(kind):
    """-> a tokenizer of the library."""
    if kind in ("llama2", "mixtral", "gemma"):
        tokenizer = byte_fallback_bpe()
        tokenizer.decoder = decoders.Sequence(SENTENCE_PIECE[: 3 if kind == "gemma" else 4])
        if kind == "mixtral":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", False)
        else:
            prepend = [normalizers.Prepend("▁")] if kind == "llama2" else []
            tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    elif kind in ("unigram", "unigram_bare"):
        tokenizer = unigram()
        scheme = "always" if kind == "unigram" else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme)
        tokenizer.decoder = decoders.Metaspace("▁", scheme)
    elif kind == "byte_unigram":
        tokenizer = unigram(byte_fallback=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")])
    elif kind == "word_piece":
        pieces = [*SPECIAL, "once", "upon", "a", "time", "the", ".", ",", "##s", "##me", "t", "##i"]
        tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece("##", True)
    elif kind == "suffix_bpe":
        pieces = [*SPECIAL, *"oncetim", "c</w>", "e</w>", "m</w>", "on", "t</w>"]
        vocab = {piece: i for i, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("o", "n")], end_of_word_suffix="</w>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = [*SPECIAL, *letters, "Ġt", "he", "Ġthe", "ðŁ", "ĺĢ"]
        merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("ĺ", "Ģ")]
        tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return tokenizer


def write_tokenizer(folder, kind, num_rows=None):
    """Write tokenizer.json of a kind -> a TextTokenizer; num_rows: rows of the model, with some that have no token."""
    raw = json.loads(make_tokenizer(kind).to_str())
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return TextTokenizer(folder, SimpleNamespace(vocab_size=num_rows or 400))
