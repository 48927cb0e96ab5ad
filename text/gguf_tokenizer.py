"""The tokenizer of a GGUF file: its metadata -> what tokenizer.json and tokenizer_config.json of the model say.

tokenizer.ggml.model  gpt2: byte-level BPE; llama: SentencePiece BPE, whose merges follow from the scores
.pre                  the pre-tokenizer by name; of one that is not known the model's own tokenizer.json is needed
.tokens .token_type .merges .scores .*_token_id .add_bos_token .add_space_prefix; tokenizer.chat_template
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from errors import Refused, show
from machine.fields import FieldReader
from snapshot.gguf import read_metadata
from snapshot.reader import parse_json_object, read_file
from text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from text.tokenizer_files import TokenizerFiles

BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
KEY, TEMPLATE, OWN_JSON = "tokenizer.ggml.", "tokenizer.chat_template", "tokenizer.huggingface.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
MAX_TOKEN_CHARS = 1024
MAX_CUTS = 1 << 23  # of all tokens in two, where merges are derived; 262,144 tokens have two million
NO_ID = (-1, 0xFFFFFFFF)
# Names in tokenizer_config.json -> in the metadata: tokenizer.ggml.*_token_id.
SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "eot_token": "eot",
    "eom_token": "eom",
    "unk_token": "unknown",
    "pad_token": "padding",
}
SENTENCE_PIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where a file does not say
STOP_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Tokens that end an answer by their texts: a file may name one alone by its id.
STOP_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <eos> <turn|> <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <|repo_name|> "
    "<|file_sep|>"
).split()
HARMONY_STOPS, HARMONY_MESSAGE_END = {"<|return|>", "<|call|>"}, "<|end|>"
SPACE = "▁"


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer in the metadata of a GGUF file, of a split one its first shard."""
    return GgufTokenizer(path, read_metadata(path)).files()


class GgufTokenizer:
    """The metadata of a GGUF about text, checked."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.fields = FieldReader(metadata, str(path))
        self.model, self.pre = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre")
        self.tokens: list[str] = self.array("tokens", str)
        self.types: list[int] = self.array("token_type", int) or [NORMAL] * len(self.tokens)
        self.check_tokens()
        names = {*SPECIAL.values(), *STOP_NAMES}
        self.special: dict[str, str] = {name: text for name in names if (text := self.find_special(name))}
        self.stop_tokens = self.find_stop_tokens()
        # A token that ends an answer is a control token, whatever an old converter wrote.
        stops = {*self.stop_tokens}
        self.types = [
            CONTROL if kind == NORMAL and token in stops else kind
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]

    def refuse(self, problem: str) -> NoReturn:
        raise Refused(f"{self.path}: {problem}")

    def array(self, name: str, *kinds: type) -> Any:
        """A list of values of these types; empty if there is none."""
        values = self.metadata.get(KEY + name, [])
        if not isinstance(values, list) or any(type(value) not in kinds for value in values):
            self.refuse(f"{KEY}{name} is no list of {kinds[0].__name__}; the file is broken, download it again")
        return values

    def check_tokens(self) -> None:
        """Refuse what no vocabulary has: other numbers of types than of tokens, a text twice, texts without end."""
        if not self.tokens:
            self.refuse(f"has no vocabulary ({KEY}tokens); text needs a file with one")
        if len(self.types) != len(self.tokens):
            self.refuse(f"has {len(self.tokens)} tokens, but {len(self.types)} types of tokens ({KEY}token_type)")
        longest = max(self.tokens, key=len)
        if len(longest) > MAX_TOKEN_CHARS:
            self.refuse(f"has a token of {len(longest)} characters, above the limit of {MAX_TOKEN_CHARS}")
        first: dict[str, int] = {}
        for i, token in self.used():
            if first.setdefault(token, i) != i:
                self.refuse(f"tokens {first[token]} and {i} are both {show(token)}; the file is broken")

    def used(self, *kinds: int) -> Iterable[tuple[int, str]]:
        """The id and text of each token, or of those of some types. Holes in the vocabulary are filled with unused
        ones, which no text has."""
        return (
            (i, token)
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and kind != UNUSED and (not kinds or kind in kinds)
        )

    def find_special(self, name: str) -> str | None:
        """The token that tokenizer.ggml.{name}_token_id names."""
        key = f"{KEY}{name}_token_id"
        i = None
        if self.metadata.get(key) not in NO_ID:
            default = SENTENCE_PIECE_IDS.get(name) if self.model == SENTENCE_PIECE else None
            i = self.fields.whole(key, default, 0, len(self.tokens) - 1)
        return None if i is None or i >= len(self.tokens) or self.types[i] == UNUSED else self.tokens[i]

    def find_stop_tokens(self) -> list[str]:
        """The tokens that end an answer: those named, and those with the usual texts, unless that is text like any."""
        types = {token: self.types[i] for i, token in self.used()}
        usual = [text for text in STOP_TEXTS if text in types]
        usual = [text for text in usual if types[text] != NORMAL or text.startswith(("<|", "<｜"))]
        if types.keys() >= HARMONY_STOPS:
            usual = [text for text in usual if text != HARMONY_MESSAGE_END]
        named = (self.special[name] for name in STOP_NAMES if name in self.special)
        return list(dict.fromkeys((*named, *usual)))

    def files(self) -> TokenizerFiles:
        """The tokenizer in the form of a snapshot folder."""
        notices: tuple[str, ...] = ()
        if self.model == SENTENCE_PIECE:
            tokenizer = self.make_json(self.sentence_piece(), adds_bos=True)
        elif self.model == BYTE_LEVEL and isinstance(self.pre, str) and self.pre in PRE_TOKENIZERS:
            pre = PRE_TOKENIZERS[self.pre]
            tokenizer = self.make_json(self.byte_level(pre), pre.adds_bos)
        else:
            tokenizer, notice = self.own_json()
            notices = (notice,)
        data = json.dumps(tokenizer, ensure_ascii=False).encode()
        config = {name: self.special[key] for name, key in SPECIAL.items() if key in self.special}
        templates, stops = self.find_templates(), tuple(self.stop_tokens)
        return TokenizerFiles(self.path, self.path, data, tokenizer, config, {}, templates, stops, notices)

    def make_json(self, parts: dict[str, Any], adds_bos: bool) -> dict[str, Any]:
        """tokenizer.json. Its vocabulary holds the special tokens too, so that they keep their ids behind a hole."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": i, "content": token, "special": self.types[i] != USER_DEFINED} | flags
            for i, token in self.used(UNKNOWN, CONTROL, USER_DEFINED)
        ]
        adds_bos = self.fields.flag(f"{KEY}add_bos_token", adds_bos)
        bos = self.special.get("bos") if adds_bos else None
        processor = None if bos is None else first_token(bos, self.tokens.index(bos))
        head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
        return head | parts | {"post_processor": processor}

    def byte_level(self, pre: PreTokenizer) -> dict[str, Any]:
        merges: list[Any] = self.array("merges", str)
        if any(merge.count(" ") != 1 or merge[0] == " " or merge[-1] == " " for merge in merges):
            merges = [self.split_merge(i, merge) for i, merge in enumerate(merges)]
        if not merges:  # as in tiktoken: of all pairs the one that makes the token with the lowest id
            pieces = [token for _, token in self.used(NORMAL)]
            merges = self.derive_merges(pieces, {token: i for i, token in self.used(NORMAL)})
        model = self.bpe(merges, ignore_merges=pre.ignore_merges)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        normalizer = {"type": "NFC"} if pre.is_nfc else None
        return {"model": model, "normalizer": normalizer, "pre_tokenizer": pre.to_json(), "decoder": byte_level}

    def split_merge(self, i: int, merge: str) -> list[str]:
        """The two halves; a space may begin the first."""
        at = merge.find(" ", 1)
        if not 0 < at < len(merge) - 1:
            self.refuse(f"{KEY}merges[{i}] is {show(merge)}, expected two pieces; the file is broken")
        return [merge[:at], merge[at + 1 :]]

    def derive_merges(self, pieces: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
        """The merges of pieces in the order in which they are merged: every way to make each from two others."""
        if (num_cuts := sum(map(len, pieces))) > MAX_CUTS:
            self.refuse(f"has tokens of {num_cuts} characters, above the limit of {MAX_CUTS}; the file is broken")
        merges: list[tuple[str, str]] = []
        for piece in pieces:
            cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            known = [(left, right) for left, right in cuts if left in ids and right in ids]
            merges += sorted(known, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
        return merges

    def sentence_piece(self) -> dict[str, Any]:
        scores: list[float] = self.array("scores", float, int)
        if len(scores) != len(self.tokens):
            self.refuse(f"has {len(self.tokens)} tokens, but {len(scores)} scores ({KEY}scores)")
        ids = {token: i for i, token in self.used(NORMAL)}
        best_first = sorted(ids, key=lambda token: -scores[ids[token]])
        unknown = self.special.get("unknown")
        has_bytes = len(list(self.used(BYTE))) == 256
        model = self.bpe(self.derive_merges(best_first, ids), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
        spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self.fields.flag(f"{KEY}add_space_prefix", True):
            spaces.insert(0, {"type": "Prepend", "prepend": SPACE})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        normalizer, decoder = (
            {"type": "Sequence", "normalizers": spaces},
            {"type": "Sequence", "decoders": decoders},
        )
        return {"model": model, "normalizer": normalizer, "pre_tokenizer": None, "decoder": decoder}

    def bpe(self, merges: list[Any], **options: Any) -> dict[str, Any]:
        vocab = {token: i for i, token in self.used()}
        defaults = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        return {"type": "BPE", "dropout": None, **defaults, **options, "vocab": vocab, "merges": merges}

    def own_json(self) -> tuple[dict[str, Any], str]:
        """The model's own tokenizer.json, within the file or beside it, where the metadata is not enough -> (it, a
        line that says so)."""
        named = {"model": self.model} if self.model != BYTE_LEVEL else {"pre": self.pre}
        [(name, value)] = named.items()
        problem = f"{KEY}{name} is {show(value)}, which this engine does not know"
        beside = self.path.parent / "tokenizer.json"
        inside = self.metadata.get(OWN_JSON)
        if isinstance(inside, str):
            return parse_json_object(inside.encode(), f"{self.path}: {OWN_JSON}"), f"[tokenizer] {OWN_JSON} counts"
        if not os.path.lexists(beside):
            self.refuse(f"{problem}; put the model's own tokenizer.json beside the file")
        tokenizer = parse_json_object(read_file(beside), f"{beside}:")
        self.check_same_model(beside, tokenizer)
        return tokenizer, f"[tokenizer] {beside.name} beside {self.path.name} counts: {problem}"

    def check_same_model(self, path: Path, tokenizer: dict[str, Any]) -> None:
        """Refuse a tokenizer.json whose ids are not those of the file."""
        model = tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(vocab, dict):
            raise Refused(f"{path}: is no BPE tokenizer; {self.path.name} needs the model's own")
        for i, token in self.used(NORMAL):
            if vocab.get(token) != i:
                raise Refused(f"{path}: is of another model: the token {i} of {self.path.name} is {show(token)}")

    def find_templates(self) -> dict[str, str]:
        """The sources of the chat templates by name."""
        named = {"default": self.metadata.get(TEMPLATE)}
        start = f"{TEMPLATE}."
        named |= {key.removeprefix(start): text for key, text in self.metadata.items() if key.startswith(start)}
        return {name: text for name, text in named.items() if isinstance(text, str)}


def first_token(token: str, i: int) -> dict[str, Any]:
    """A post-processor of tokenizer.json that puts a token in front of a text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    tokens = {token: {"id": token, "ids": [i], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [special, texts[0]],
        "pair": [special, *texts],
        "special_tokens": tokens,
    }
