"""Tokenizer, prompt prefix, chat template and streaming detokenizer, on the tokenizer of models/tiny."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import Refused
from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from text.detokenizer import Detokenizer
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

SPECIAL = (
    "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <|endoftext|> <tool_call> "
    "</tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> "
    "<|bos|> <|assistant_end|> <|python_start|> <|python_end|> <|output_start|> <|output_end|>"
).split()
CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
TOKENIZER = TextTokenizer(EMBEDDED_SNAPSHOT, CONFIG)


def stream_of(ids):
    stream = Detokenizer(TOKENIZER)
    return [stream.add_token(i) for i in ids], stream.flush()


@pytest.mark.parametrize("token", SPECIAL)
def test_every_special_token_is_one_token(token):
    [i] = TOKENIZER.encode(token)
    assert TOKENIZER.decode([i]) == token and i < CONFIG.vocab_size
    assert TOKENIZER.encode(f"a{token}b")[1] == i


@given(st.text(max_size=60))
def test_text_survives_encoding_and_streaming(text):
    ids = TOKENIZER.encode(text)
    pieces, rest = stream_of(ids)
    assert TOKENIZER.decode(ids) == "".join(pieces) + rest == text


def test_an_incomplete_character_is_held_back():
    """An emoji is several tokens here: no text before its last byte."""
    ids = TOKENIZER.encode("a😀ok")
    pieces, rest = stream_of(ids)
    assert "".join(pieces) == "a😀ok" and rest == ""
    assert all("�" not in piece for piece in pieces) and "" in pieces


def test_two_streams_do_not_mix_their_bytes():
    first, second = TOKENIZER.encode("a😀b"), TOKENIZER.encode("c🐦d")
    streams, out = [Detokenizer(TOKENIZER), Detokenizer(TOKENIZER)], ["", ""]
    for i in range(max(len(first), len(second))):
        for which, ids in enumerate((first, second)):
            if i < len(ids):
                out[which] += streams[which].add_token(ids[i])
    assert [text + stream.flush() for text, stream in zip(out, streams, strict=True)] == ["a😀b", "c🐦d"]


def test_an_incomplete_character_at_the_end_becomes_one_replacement():
    ids = TOKENIZER.encode("a😀")
    pieces, rest = stream_of(ids[:-1])
    assert ("".join(pieces), rest) == ("a", "�")


def test_the_prefix_is_added_once():
    prefix, ids = PromptPrefix(CONFIG, TOKENIZER, enabled=True), TOKENIZER.encode("In the beginning")
    assert prefix.ids == TOKENIZER.encode("[gMASK]<sop>") and prefix.notices == []
    assert prefix.prepend(ids) == prefix.prepend(prefix.ids + ids) == prefix.ids + ids
    assert PromptPrefix(CONFIG, TOKENIZER, enabled=False).prepend(ids) == ids


def test_the_chat_template_with_and_without_thinking():
    messages = [{"role": "user", "content": "Who art thou?"}]
    text = "[gMASK]<sop><|user|>Who art thou?<|assistant|><think></think>"
    assert TOKENIZER.render_chat(messages) == text
    assert TOKENIZER.render_chat(messages, enable_thinking=True).endswith("<|assistant|><think>")


def test_a_conversation_with_a_tool_call():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "hm"},
    ]
    assert TOKENIZER.render_chat(messages) == (
        "[gMASK]<sop><|system|>Be brief.<|user|>2+2?<|assistant|><think></think>"
        "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"
        "<|observation|><tool_response>4</tool_response><|assistant|><think>hm</think>Four."
        "<|assistant|><think></think>"
    )


def test_stop_ids_of_the_tokenizer():
    assert TOKENIZER.encode("<|endoftext|>")[0] in TOKENIZER.stop_ids


# --- other folders ----------------------------------------------------------------------------------------------------


def test_a_missing_or_broken_tokenizer_is_refused(text_folder):
    path = text_folder / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(Refused, match=r"tokenizer\.json: is not a tokenizer"):
        TextTokenizer(text_folder, CONFIG)
    path.unlink()
    with pytest.raises(Refused, match=r"tokenizer\.json: no such file"):
        TextTokenizer(text_folder, CONFIG)


def test_a_tokenizer_of_another_model_is_refused(text_folder):
    from dataclasses import replace

    with pytest.raises(Refused, match="belong to different models"):
        TextTokenizer(text_folder, replace(CONFIG, vocab_size=2000))


def test_the_chat_template_may_be_in_tokenizer_config(text_folder):
    (text_folder / "chat_template.jinja").unlink()
    with pytest.raises(Refused, match="no chat template"):
        TextTokenizer(text_folder, CONFIG).render_chat([])
    (text_folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[0].content | tojson }}"})
    )
    assert TextTokenizer(text_folder, CONFIG).render_chat([{"role": "user", "content": "<é>"}]) == '"<é>"'


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_fails_or_leaves_the_sandbox_is_refused(text_folder, template):
    (text_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(Refused, match="chat template failed"):
        TextTokenizer(text_folder, CONFIG).render_chat([{"role": "user", "content": "x"}])


def test_a_vocabulary_without_the_prefix(text_folder):
    tokenizer = json.loads((text_folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] == "<sop>":
            token["content"] = "<other>"
    (text_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    bare = TextTokenizer(text_folder, CONFIG)
    prefix = PromptPrefix(CONFIG, bare, enabled=True)
    assert prefix.prepend([1, 2]) == [1, 2]
    assert prefix.notices == ["[prefix] tokenizer.json lacks [gMASK] <sop>: texts go without this prefix"]
    assert "no tokenizer with [gMASK] <sop>" in PromptPrefix(CONFIG, None, enabled=True).notices[0]
