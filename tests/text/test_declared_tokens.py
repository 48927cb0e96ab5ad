"""Tokens that the files of a tokenizer declare: which file counts where they disagree, and rows that a model lacks."""

import json
import time

import pytest

from errors import Refused
from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from tests.conftest import read_json
from text.prompt import PromptPrefix, all_stop_ids
from text.tokenizer import TextTokenizer

TOKENIZER = read_json(EMBEDDED_SNAPSHOT / "tokenizer.json")
SIZE = read_json(EMBEDDED_SNAPSHOT / "config.json")["vocab_size"]
FLAGS = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
IDS = {token["content"]: token["id"] for token in TOKENIZER["added_tokens"]}


@pytest.fixture
def tokenizer_of(text_folder):
    """tokenizer_of(added, **keys of tokenizer_config.json) -> the tokenizer, with more tokens in tokenizer.json."""

    def make(added=(), post_processor=None, **keys):
        tokenizer = TOKENIZER | {"added_tokens": [*TOKENIZER["added_tokens"], *added]}
        tokenizer |= {"post_processor": post_processor} if post_processor else {}
        (text_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = read_json(EMBEDDED_SNAPSHOT / "tokenizer_config.json") | keys
        (text_folder / "tokenizer_config.json").write_text(json.dumps(config))
        return TextTokenizer(text_folder, read_config(text_folder)[0])

    return make


def decoder(content, token_id, **flags):
    return {"added_tokens_decoder": {str(token_id): {"content": content, "special": True} | FLAGS | flags}}


# --- tokens without a row ---------------------------------------------------------------------------------------------


def test_a_pad_token_one_above_the_vocabulary(tokenizer_of, text_folder, run_colibri):
    """Fine-tunes have it, and transformers runs them; "they belong to different models" ended the start."""
    tokenizer = tokenizer_of([dict(id=SIZE, content="[PAD]", special=True) | FLAGS], pad_token="[PAD]")
    assert tokenizer.encode("In the beginning") == TextTokenizer(
        EMBEDDED_SNAPSHOT, read_config(EMBEDDED_SNAPSHOT)[0]
    ).encode("In the beginning")
    line = f"[tokenizer] the vocabulary of {SIZE} has no row for '[PAD]': a text with it is refused"
    assert tokenizer.notices == [line]
    with pytest.raises(Refused, match=rf"the text holds '\[PAD\]', id {SIZE}, which is not in the vocabulary"):
        tokenizer.encode("In [PAD] the")
    # In a conversation it is text, as every special token that somebody writes.
    _, ids = tokenizer.encode_chat([{"role": "user", "content": "In [PAD] the"}])
    assert max(ids) < SIZE
    for name in ("model.safetensors",):
        (text_folder / name).symlink_to(EMBEDDED_SNAPSHOT / name)
    done = run_colibri(SNAP=text_folder, PROMPT="In the", NGEN=2, TEMP=0, RAM_GB=4)
    assert done.returncode == 0 and line.encode() in done.stderr, done.stderr
    done = run_colibri(SNAP=text_folder, PROMPT="In [PAD] the", NGEN=2, TEMP=0, RAM_GB=4)
    assert done.returncode == 2 and b"the text holds '[PAD]'" in done.stderr and b"Traceback" not in done.stderr


def test_an_end_token_without_a_row_is_no_end(tokenizer_of):
    tokenizer = tokenizer_of([dict(id=SIZE, content="<|end|>", special=True) | FLAGS], eos_token="<|end|>")
    assert SIZE not in tokenizer.stop_ids and SIZE not in all_stop_ids(read_config(EMBEDDED_SNAPSHOT)[0], tokenizer)


# --- tokenizer.json and tokenizer_config.json -------------------------------------------------------------------------


def test_flags_of_tokenizer_config_count(tokenizer_of):
    """lstrip takes the blank before the token; of tokenizer.json alone the blank is a token."""
    think = IDS["<think>"]
    plain = tokenizer_of().encode("a <think>")
    tokenizer = tokenizer_of(**decoder("<think>", think, lstrip=True, special=False))
    assert len(plain) == 3 and tokenizer.encode("a <think>") == [plain[0], think]
    assert tokenizer.notices == ["[tokenizer] '<think>': lstrip of tokenizer_config.json counts, not of tokenizer.json"]
    assert tokenizer_of(**decoder("<think>", think, special=False)).notices == []


@pytest.mark.parametrize(
    "keys",
    [
        decoder("<think>", IDS["<think>"]),
        {"mask_token": "<think>"},
        {"think_token": {"content": "<think>"}},
        {"extra_special_tokens": {"think_token": "<think>"}},
    ],
    ids=["flag", "name", "own name", "extra"],
)
def test_a_token_that_either_file_calls_special_is_special(tokenizer_of, keys):
    """Then it is text in a message, where only the template may write control tokens."""
    assert IDS["<think>"] not in tokenizer_of().special_ids
    tokenizer = tokenizer_of(**keys)
    assert IDS["<think>"] in tokenizer.special_ids
    _, ids = tokenizer.encode_chat([{"role": "user", "content": "a <think> b"}], enable_thinking=True)
    assert tokenizer.decode(ids).count("<think>") == 1 + ids.count(IDS["<think>"])
    special = tokenizer_of(**decoder("[MASK]", IDS["[MASK]"], special=False))
    assert IDS["[MASK]"] in special.special_ids and special.notices == []


def test_ids_of_tokenizer_json_count(tokenizer_of):
    tokenizer = tokenizer_of(**decoder("[MASK]", 5))
    assert tokenizer.encode("[MASK]") == [IDS["[MASK]"]]
    names = f"'[MASK]' ({IDS['[MASK]']}, not 5)"
    assert tokenizer.notices == [f"[tokenizer] {names}: the id of tokenizer.json counts, not of tokenizer_config.json"]


def test_a_token_that_tokenizer_config_adds(tokenizer_of):
    """A piece of the vocabulary gets its id, another one the next, which may have no row."""
    tokenizer = tokenizer_of(**decoder("the", 70))
    assert tokenizer.encode("the") == [tokenizer.tokenizer.token_to_id("the")]
    assert tokenizer.notices == ["[tokenizer] tokenizer_config.json adds 'the' to tokenizer.json"]
    tokenizer = tokenizer_of(**decoder("<|new|>", 9000))
    with pytest.raises(Refused, match=f"id {SIZE}, which is not in the vocabulary"):
        tokenizer.encode("<|new|>")


def test_many_tokens_with_other_flags_are_one_notice(tokenizer_of):
    """3,000 unused tokens were 3,000 lines on the screen, and 5 s: the library rebuilt its table for each."""
    tokens = [dict(id=SIZE + at, content=f"<unused{at}>", special=False) | FLAGS for at in range(3000)]
    added_tokens_decoder = {str(token["id"]): token | {"lstrip": True} for token in tokens}
    started = time.process_time()
    tokenizer = tokenizer_of(tokens, added_tokens_decoder=added_tokens_decoder)
    assert time.process_time() - started < 3
    flags, rows = tokenizer.notices
    assert flags.startswith("[tokenizer] '<unused0>', '<unused1>', ") and "more: lstrip of tokenizer_config" in flags
    assert "has no row for '<unused0>'" in rows


BAD = [[], "x", {"1": None}, {"1": {"content": 5}}, {"²": {"content": "a"}}, {"x": {"content": "<think>", "lstrip": 5}}]


@pytest.mark.parametrize("value", [*BAD, {"9" * 5000: {"content": "[MASK]"}}, {"5": {"content": ""}}])
def test_a_malformed_decoder_is_passed_over(tokenizer_of, value):
    tokenizer = tokenizer_of(added_tokens_decoder=value)
    assert tokenizer.encode("In the") and all(len(line) < 200 for line in tokenizer.notices)


# --- special_tokens_map.json ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_decoder", [False, True])
def test_special_tokens_map_counts_without_a_decoder(tokenizer_of, text_folder, has_decoder):
    """The file was never read: an eos_token that stands there alone ended no answer."""
    tokens = {"eos_token": {"content": "<eop>"}, "bos_token": "<sop>", "additional_special_tokens": ["[MASK]"]}
    (text_folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = tokenizer_of(**(decoder("[MASK]", IDS["[MASK]"]) if has_decoder else {}))
    files = "special_tokens_map.json ('<eop>')", "tokenizer_config.json ('<|endoftext|>')"
    winner, other = reversed(files) if has_decoder else files
    assert tokenizer.notices == [f"[tokenizer] eos_token of {winner} counts, not that of {other}"]
    assert tokenizer.special_tokens.get("bos_token") == (None if has_decoder else "<sop>")
    assert (IDS["<eop>"] in tokenizer.stop_ids) == (not has_decoder)


# --- the chat template, the prefix ------------------------------------------------------------------------------------


def test_the_template_file_counts(tokenizer_of, text_folder):
    source = (text_folder / "chat_template.jinja").read_text()
    assert tokenizer_of(chat_template=source + "\n").notices == []
    tokenizer = tokenizer_of(chat_template="{{ messages }}")
    assert tokenizer.chat_templates == {"default": source}
    assert tokenizer.notices == ["[tokenizer] chat_template.jinja counts, not chat_template of tokenizer_config.json"]


def test_a_prefix_of_the_tokenizer_that_is_not_the_familys_is_named(tokenizer_of):
    config = read_config(EMBEDDED_SNAPSHOT)[0]
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<sop>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<sop>": {"id": "<sop>", "ids": [IDS["<sop>"]], "tokens": ["<sop>"]}},
    }
    tokenizer = tokenizer_of(post_processor=processor)
    line = "[prefix] texts go with [gMASK] <sop> as those of glm_moe_dsa, not with <sop>"
    assert PromptPrefix(config, tokenizer, enabled=True).notices == [line]
    assert PromptPrefix(config, tokenizer, enabled=False).notices == []
    assert PromptPrefix(config, tokenizer_of(), enabled=True).notices == []
