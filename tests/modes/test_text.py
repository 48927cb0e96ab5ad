"""PROMPT: the text of an answer behind its prompt, whatever ids the model gives; special tokens in both."""

import os
import shutil

import pytest

import colibri
from modes import text as text_mode
from modes.text import encode_prompt
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from tests.support.small_tokenizers import write_tokenizer
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
TOKENIZER = TextTokenizer(EMBEDDED_SNAPSHOT, CONFIG)
ASSISTANT, END = TOKENIZER.find_ids(["<|assistant|>", "<|endoftext|>"])


@pytest.fixture
def run_prompt(tmp_path, monkeypatch, capfdbinary):
    """run_prompt(kind, pieces, **variables) -> what PROMPT prints when the model gives these tokens. kind: of a small
    tokenizer; None: the tokenizer of models/tiny."""

    def run(kind, pieces, **variables):
        folder, tokenizer = EMBEDDED_SNAPSHOT, TOKENIZER
        if kind:
            folder = shutil.copytree(EMBEDDED_SNAPSHOT, tmp_path / "snap", copy_function=os.symlink)
            (folder / "tokenizer.json").unlink()
            tokenizer = write_tokenizer(folder, kind)
        monkeypatch.setattr(text_mode, "spec_decode", lambda *arguments: iter(tokenizer.find_ids(pieces)))
        monkeypatch.setattr("signal.signal", lambda *rest: None)
        for name, value in ({"SNAP": folder, "USAGE": 0, "TEMP": 0, "DRAFT": 0} | variables).items():
            monkeypatch.setenv(name, str(value))
        assert colibri.main([]) == 0
        return capfdbinary.readouterr().out.decode()

    return run


def test_bytes_that_are_no_character(run_prompt):
    """A line end, half a character and a word of a byte-fallback tokenizer ended the run in a traceback."""
    assert run_prompt("llama2", ["<0x0A>", "<0xF0>", "▁the"], PROMPT="the") == "\n\ufffd the\n"


def test_the_space_between_prompt_and_answer_stays(run_prompt):
    """A prompt "Once upon a" continued by "▁time" read "Once upon atime"."""
    assert run_prompt("llama2", ["▁time"], PROMPT="the") == " time\n"


def test_special_tokens_of_an_answer_are_shown_in_raw_text_alone(run_prompt):
    """The token <|assistant|> stood in answers of a chat; in raw text, where PROMPT may hold some too, they stay."""
    pieces = ["a", "<|assistant|>", "<think>", "b"]
    assert run_prompt(None, pieces, PROMPT="x") == "a<|assistant|><think>b\n"
    assert run_prompt(None, pieces, PROMPT="x", CHAT=1) == "a<think>b\n"


def test_a_special_token_typed_into_a_message_stays_text():
    """With CHAT=1 PROMPT became a message whose "<|assistant|>" ended the user's turn."""
    text = "a<|assistant|>b<|endoftext|>"
    ids = encode_prompt(Settings.read([], {"PROMPT": text, "CHAT": "1"}), CONFIG, TOKENIZER)
    assert ids.count(ASSISTANT) == 1 and END not in ids and f"<|user|>{text}<|assistant|>" in TOKENIZER.decode(ids)
    ids = encode_prompt(Settings.read([], {"PROMPT": text}), CONFIG, TOKENIZER)
    assert ids.count(ASSISTANT) == ids.count(END) == 1  # of raw text it is the model's own token
