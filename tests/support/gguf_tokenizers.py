"""tokenizer.json -> the metadata that a converter to GGUF makes of it, and the tokenizers of both."""

import json
from types import SimpleNamespace

from tests.conftest import ROOT, read_json
from tests.support.gguf_files import write_gguf
from text.tokenizer import TextTokenizer

FIXTURE = read_json(ROOT / "tests" / "fixtures" / "gguf_tokenizers.json")
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def own_json(pre):
    """The tokenizer.json that a model with this pre-tokenizer has on the hub, with a small vocabulary; llama: that of
    Mixtral."""
    parts = dict(FIXTURE["models"][pre]["tokenizer"])
    added = [{"id": i, "content": text, "special": special} | FLAGS for i, text, special in parts.pop("added_tokens")]
    if "model" not in parts:
        tokens, merges = FIXTURE["byte_level"]["tokens"], FIXTURE["byte_level"]["merges"]
        model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
        parts["model"] = model | {"ignore_merges": parts.pop("ignore_merges")}
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return head | parts


def metadata_of(tokenizer, pre, size=512, /, **more):
    """The metadata with `size` tokens, holes as [PADn]; more: other keys, without tokenizer.ggml."""
    model = tokenizer["model"]
    texts = {i: (text, NORMAL) for text, i in model["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        texts[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    tokens, types = zip(*(texts.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)), strict=True)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    values = {"model": "gpt2", "pre": pre, "tokens": list(tokens), "token_type": list(types), "merges": merges}
    if pre == "llama":
        made = ["".join(merge.split(" ")) for merge in merges]
        rank = {piece: at for at, piece in reversed(list(enumerate(made)))}
        types = [BYTE if text.startswith("<0x") else kind for text, kind in zip(tokens, types, strict=True)]
        scores = [float(-rank.get(text, len(made))) for text in tokens]
        values = {"model": "llama", "pre": "default", "tokens": list(tokens), "token_type": types, "scores": scores}
    if first := (tokenizer.get("post_processor") or {}).get("special_tokens"):
        [[bos]] = [token["ids"] for token in first.values()]
        values |= {"bos_token_id": bos, "add_bos_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | more).items() if value is not None}


def gguf_tokenizer(folder, metadata, size=512, name="model.gguf"):
    """Write a GGUF of metadata alone -> its TextTokenizer."""
    path = write_gguf(folder / name, {"general.architecture": "test"} | metadata, {})
    return TextTokenizer(path, SimpleNamespace(vocab_size=size, text_prefix=()))


def folder_tokenizer(folder, tokenizer, size=512, **config):
    """Write tokenizer.json and tokenizer_config.json -> their TextTokenizer."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TextTokenizer(folder, SimpleNamespace(vocab_size=size, text_prefix=()))
