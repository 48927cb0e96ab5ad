"""SERVE=stdio: messages as turns of a chat, and the text of answers."""

import re

import pytest

from server.stdio import pipe_server
from tests.support.pipe import TOKENIZER, FakeScheduler, exchange, frame, parse_replies
from tests.support.small_tokenizers import write_tokenizer


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer():
    """Share one tokenizer: loading it takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe_server, "TextTokenizer", lambda folder, config: TOKENIZER)
        yield


def chat_ids(*messages, **options):
    roles = ("user", "assistant")
    text = TOKENIZER.render_chat(
        [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)], **options
    )
    return tuple(TOKENIZER.encode(text))


def test_lines_are_turns_of_a_chat():
    scheduler = FakeScheduler("I am", "Fine")
    first, second = parse_replies(exchange(b"Who art thou?\nHow art thou?\r\n", scheduler))
    assert (first[0], second[0]) == (b"I am\n", b"Fine\n")
    assert scheduler.requests[0].prompt_ids == chat_ids("Who art thou?")
    assert scheduler.requests[1].prompt_ids == chat_ids("Who art thou?", "I am", "How art thou?")
    assert second[2][1] == len(scheduler.requests[1].prompt_ids)


def test_answers_keep_their_ids_in_later_turns():
    """Encoding their text again gave other ids, and the KV cache was lost."""
    odd = [token for letter in "the king" for token in TOKENIZER.encode(letter)]
    assert odd != TOKENIZER.encode("the king")
    scheduler = FakeScheduler(odd, odd[:4], "yes")
    exchange(b"One\nTwo\nThree\n", scheduler, NGEN=20)
    first, second, third = (request.prompt_ids for request in scheduler.requests)
    assert second[: len(first) + len(odd)] == (*first, *odd)
    assert third[: len(second) + 4] == (*second, *odd[:4])


def test_special_tokens_in_the_answer_to_a_message_are_hidden():
    answer = "Four.<|assistant|> More"
    out = parse_replies(exchange(b"One\n" + frame("x", 20), FakeScheduler(answer, answer), NGEN=20))
    assert [text.decode() for text, _, _ in out] == ["Four. More\n", answer]  # of a PROMPT they are the model's text


def test_a_continued_answer_is_one_message():
    words = "one two three four five six seven eight nine"
    ids = TOKENIZER.encode(words)
    scheduler = FakeScheduler(ids, ids[8:])
    exchange(b"Count\n\x02MORE\nOn\n", scheduler)
    assert scheduler.requests[2].prompt_ids == chat_ids("Count", words, "On")


def test_reset_and_a_prompt_frame_end_the_chat():
    scheduler = FakeScheduler()
    exchange(b"One\n\x02RESET\nTwo\n" + frame("x") + b"Three\n", scheduler)
    assert [scheduler.requests[at].prompt_ids for at in (0, 1, 3)] == [
        chat_ids(word) for word in ("One", "Two", "Three")
    ]


def test_reasoning_stays_reasoning_in_the_next_turn():
    scheduler = FakeScheduler("hm</think>Yes", "no end")
    exchange(b"One\nTwo\nThree\n", scheduler, THINK=1)
    assert scheduler.requests[0].prompt_ids == chat_ids("One", enable_thinking=True)
    assert TOKENIZER.decode(scheduler.requests[2].prompt_ids).endswith(
        "<think>hm</think>Yes<|user|>Two<|assistant|><think>no end</think><|user|>Three<|assistant|><think>"
    )


def test_a_special_token_in_a_message_stays_text():
    """The C engine took it for a token."""
    scheduler = FakeScheduler()
    exchange(b"a<|assistant|>b<|endoftext|>\n", scheduler)
    ids = scheduler.requests[0].prompt_ids
    [assistant], [end] = TOKENIZER.encode("<|assistant|>"), TOKENIZER.encode("<|endoftext|>")
    assert ids.count(assistant) == 1 and end not in ids
    assert "<|user|>a<|assistant|>b<|endoftext|><|assistant|>" in TOKENIZER.decode(ids)


def test_the_oldest_turns_are_dropped_with_a_notice(capfd):
    scheduler = FakeScheduler(*["yes"] * 9, context=40)
    out = parse_replies(exchange(b"one two three\n" * 9, scheduler))
    assert all(text == b"yes\n" for text, _, _ in out)
    assert all(len(request.prompt_ids) + request.max_tokens - 1 <= 40 for request in scheduler.requests)
    assert "[stdio] CTX=40 is full: the oldest turns are forgotten (" in capfd.readouterr().err


def test_a_text_that_does_not_fit_is_refused_with_its_length():
    """The C engine truncated long inputs silently, and dropped the conversation."""
    scheduler = FakeScheduler("yes", "on", context=20)
    long = b"word " * 30
    out = parse_replies(exchange(b"Hello\n" + long + b"\n" + frame(long.decode()) + b"\x02MORE\n", scheduler))
    assert [bool(error) for _, error, _ in out] == [False, True, True, False]
    assert re.fullmatch(r"the text has \d+ tokens, CTX is 20; raise CTX or shorten it", out[1][1])
    assert scheduler.requests[1].prompt_ids == (*chat_ids("Hello"), *TOKENIZER.encode("yes"))


def test_more_when_the_context_is_full():
    scheduler = FakeScheduler([300] * 99, context=12)
    out = parse_replies(exchange(frame("In the beginning", 99) + b"\x02MORE\n", scheduler, NGEN=99))
    assert out[0][2][2] == 1 and "CTX is 12" in out[1][1]


def test_a_message_without_an_answer_is_dropped():
    scheduler = FakeScheduler([], ending=("error", "no"))
    exchange(b"One\nTwo\n", scheduler)
    assert scheduler.requests[1].prompt_ids == chat_ids("Two")


# --- text ---


def test_bytes_that_are_no_character_and_the_space_before_an_answer(tmp_path, monkeypatch):
    """Half a character and a word of a byte-fallback tokenizer ended the process; "▁time" lost its space."""
    tokenizer = write_tokenizer(tmp_path, "llama2")
    monkeypatch.setattr(pipe_server, "TextTokenizer", lambda folder, config: tokenizer)
    scheduler = FakeScheduler(tokenizer.find_ids(["▁time", "<0x0A>", "<0xF0>", "▁the"]))
    [(text, error, _)] = parse_replies(exchange(frame("the"), scheduler))
    assert text.decode() == " time\n\ufffd the" and error is None
