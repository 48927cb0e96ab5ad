"""Answers keep their ids in the prompts of later turns, with any tokenizer and template."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from tests.support.small_tokenizers import write_tokenizer
from text.chat_answers import AnswerMessage
from text.chat_turns import ChatTurns, harmony_message
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
TINY = TextTokenizer(EMBEDDED_SNAPSHOT, CONFIG)
MIXTRAL = """<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
CHATML = """{% for m in messages %}<|user|>{{ m.role }}
{{ m.content | trim }}</s>
{% endfor %}{% if add_generation_prompt %}<|user|>assistant
{% endif %}"""
PLAIN = "{% for m in messages %}{{ 'I' if m.role == 'user' else 'O' }}:{{ m.content }}\n{% endfor %}O:"
# Qwen3: reasoning of earlier turns is dropped, and an empty one opens an answer without reasoning.
DROPPING = """{% for m in messages %}<|user|>{{ m.role }}
{{ m.content.lstrip('\n') }}</s>
{% endfor %}<|user|>assistant
{% if not enable_thinking %}<think></think>{% endif %}"""
CASES = [
    ("byte_level", CHATML), ("byte_level", PLAIN), ("byte_level", DROPPING), ("llama2", MIXTRAL), ("mixtral", MIXTRAL),
    ("llama2", CHATML), ("mixtral", PLAIN), ("gemma", PLAIN), ("byte_unigram", CHATML), ("unigram_bare", PLAIN),
]  # fmt: skip


def make_turns(tokenizer, thinking=False):
    return ChatTurns(tokenizer, PromptPrefix(CONFIG, tokenizer, enabled=True), thinking)


def turns_of(folder, kind, template, thinking=False):
    tokenizer = write_tokenizer(folder, kind)
    tokenizer.chat_templates = {"default": template}
    return make_turns(tokenizer, thinking)


def question(text):
    return {"role": "user", "content": text}


def converse(turns, answers):
    """Ask before each answer -> the prompts, each with the ids of the answer to it."""
    messages, prompts = [], []
    for ids in answers:
        messages.append(question("the time"))
        prompts.append((turns.encode(messages), list(ids)))
        messages.append(turns.answer_message(messages, prompts[-1][0], ids))
    return [*prompts, (turns.encode([*messages, question("a")]), [])]


def check_prefixes(prompts):
    for (prompt, ids), (following, _) in zip(prompts, prompts[1:], strict=False):
        assert following[: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize(("kind", "template"), CASES, ids=lambda value: value[:12])
def test_any_ids_stand_unchanged_in_the_prompts_behind_them(tmp_path, kind, template):
    """At high temperature encoding the texts again changed the ids of 8 of 12 turns, and the KV cache was lost."""
    turns = turns_of(tmp_path, kind, template)
    count = turns.tokenizer.tokenizer.get_vocab_size()

    @settings(max_examples=60)
    @given(st.lists(st.lists(st.integers(5, count - 1), max_size=6), min_size=1, max_size=4))
    def check(answers):
        prompts = converse(turns, answers)
        if template == DROPPING:  # the prompt itself opens otherwise than the history
            for (_, ids), (following, _) in zip(prompts, prompts[1:], strict=False):
                assert str(ids)[1:-1] in str(following)
        else:
            check_prefixes(prompts)

    check()


@pytest.mark.parametrize("thinking", [False, True])
def test_any_ids_of_the_embedded_model(thinking):
    """With reasoning, closed or cut off; its tags may stand anywhere."""
    turns = make_turns(TINY, thinking)
    tags = TINY.find_ids(["<think>", "</think>", "<|assistant|>", "<tool_call>", "<|endoftext|>"])

    @settings(max_examples=60)
    @given(st.lists(st.lists(st.integers(0, 2047), min_size=1, max_size=5), min_size=1, max_size=3), st.integers(0, 9))
    def check(answers, place):
        if thinking and place % 2:
            answers = [[*ids[: place % 3], tags[1], *ids[place % 3 :]] for ids in answers]
        prompts = converse(turns, answers)
        check_prefixes(prompts)

    check()


def test_reasoning_that_a_template_drops_is_dropped_and_the_content_keeps_its_ids(tmp_path):
    turns = turns_of(tmp_path, "byte_level", DROPPING, thinking=True)
    encode = turns.tokenizer.encode
    odd = turns.tokenizer.find_ids(["t", "h", "e"])  # which the tokenizer would not choose
    assert encode("the") != odd
    (_, _), (following, _) = converse(turns, [[*encode("<think>x</think>\n\n"), *odd]])
    opened, closed = encode("<|user|>assistant\n"), encode("</s>\n")
    assert str([*opened, *odd, *closed])[1:-1] in str(following) and "x<" not in turns.tokenizer.decode(following)


def test_a_token_that_holds_more_than_the_content_is_encoded_anew(tmp_path):
    turns = turns_of(tmp_path, "byte_level", DROPPING, thinking=True)
    encode, [both] = turns.tokenizer.encode, turns.tokenizer.find_ids(["Ġthe"])
    (_, _), (following, _) = converse(turns, [[*encode("x</think>"), both]])
    assert "<|user|>assistant\nx</think> the</s>" in turns.tokenizer.decode(following)  # all of it is content
    (_, _), (following, _) = converse(turns, [[*encode("<think>x</think>"), both]])
    assert "<|user|>assistant\n the</s>" in turns.tokenizer.decode(following)


def test_a_part_of_a_prompt_that_has_other_ids_by_itself(tmp_path):
    """Llama 2 puts a space in front of any text: without a special token between two turns their text decides."""
    turns = turns_of(tmp_path, "llama2", PLAIN)
    _, (following, _) = converse(turns, [turns.tokenizer.find_ids(["t", "h", "e"])])
    assert following == turns.tokenizer.encode("I:the time\nO:the\nI:a\nO:")


@pytest.mark.parametrize("kind", ["llama2", "mixtral", "byte_level"])
def test_special_tokens_of_users_stay_text_and_cost_no_space(tmp_path, kind):
    """Behind a special token of the template, a message with one of its own got a space that no other message has."""
    turns = turns_of(tmp_path, kind, "<s>{{ messages[-1].content }}</s>")
    tokenizer = turns.tokenizer
    ids, plain = turns.encode([question("a</s>")]), turns.encode([question("a")])
    assert ids[:-1][: len(plain) - 1] == plain[:-1] and tokenizer.decode(ids).endswith("a</s></s>")
    assert ids.count(tokenizer.special["</s>"]) == 1


def test_answers_of_gpt_oss_become_messages():
    """Their channels stood in the content, which the template refuses."""
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four"
    assert harmony_message(text) == {"role": "assistant", "reasoning_content": "Hm.", "content": "Four"}
    assert harmony_message(text[:40]) == {"role": "assistant", "reasoning_content": "Hm.", "content": ""}


def test_a_message_without_ids_is_encoded_as_before():
    messages = [question("a"), {"role": "assistant", "content": "b"}, question("c")]
    answered = [messages[0], AnswerMessage(messages[1], TINY.encode("b"), None), messages[2]]
    assert TINY.encode_chat(answered) == TINY.encode_chat(messages)
    assert json.dumps(answered) == json.dumps(messages)
