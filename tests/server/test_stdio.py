"""SERVE=stdio: the C engine's line protocol; each request gets exactly one END and one STAT."""

import io
import os
import re
import subprocess
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.cache import CacheCounters
from generate.request import QueueFull
from generate.scheduler import Scheduler
from server.stdio import frames as stdio_frames
from server.stdio import pipe_server
from server.stdio.pipe_server import hit_rate_since
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import read_json
from tests.support.forked import environment, forker, start_colibri
from tests.support.pipe import (
    CONFIG,
    END,
    PREFIX,
    START,
    STAT,
    TOKENIZER,
    FakeScheduler,
    exchange,
    fake_loaded,
    frame,
    parse_replies,
    serve,
)
from text.detokenizer import Detokenizer


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer():
    """Share one tokenizer: loading it takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe_server, "TextTokenizer", lambda folder, config: TOKENIZER)
        yield


# --- frames -----------------------------------------------------------------------------------------------------------


def test_empty_stdin():
    assert exchange(b"", FakeScheduler()) == b""


def test_a_prompt_frame_uses_no_chat_template():
    scheduler = FakeScheduler("And it was so")
    [(text, error, (tokens, prompt, cut))] = parse_replies(
        exchange(frame("In the <|user|>", 100, "0.5", "0.9", 1), scheduler, NGEN=50)
    )
    assert (text, error, cut) == (b"And it was so", None, 0)
    assert tokens == len(TOKENIZER.encode("And it was so"))
    [request] = scheduler.requests
    assert (
        request.prompt_ids == PREFIX + tuple(TOKENIZER.encode("In the <|user|>")) and len(request.prompt_ids) == prompt
    )
    assert (request.max_tokens, request.temperature, request.nucleus, request.seed) == (50, 0.5, 0.9, 5)
    assert request.stop_ids == {*CONFIG.stop_ids, *TOKENIZER.stop_ids} and request.num_samples == 1


def test_a_prompt_without_the_prefix():
    scheduler = FakeScheduler()
    exchange(frame("In the"), scheduler, PREFIX=0)
    assert scheduler.requests[0].prompt_ids == tuple(TOKENIZER.encode("In the"))


def test_a_truncated_answer_is_marked_in_stat():
    [(text, _, (tokens, _, cut))] = parse_replies(exchange(frame("x", 2), FakeScheduler("one two three four")))
    assert b"one two three four".startswith(text) and (tokens, cut) == (2, 1)


def test_the_context_limits_max_tokens():
    scheduler = FakeScheduler(context=10)
    exchange(frame("In the beginning"), scheduler)
    assert len(scheduler.requests[0].prompt_ids) + scheduler.requests[0].max_tokens - 1 == 10


def test_the_numbers_of_stat():
    """The expert misses of the prefill do not count."""
    out = exchange(frame("x"), FakeScheduler("yes"), fake_loaded(hits=10, misses=90))
    assert re.fullmatch(rb"yes" + END + rb"STAT \d+ \d+\.\d\d 0\.0 \d\.\d\d 3 0\n", out)
    assert hit_rate_since(CacheCounters(hits=10, misses=90), CacheCounters(hits=13, misses=91)) == 0.75
    assert hit_rate_since(CacheCounters(hits=10), CacheCounters(hits=10)) == 0


def test_kv_slots_are_separate_conversations():
    scheduler = FakeScheduler("a", "b", "c", "d", "e")
    exchange(
        frame("one", slot=0) + frame("two", slot=1) + b"\x02MORE\n" + frame("three", slot=0) + b"\x02MORE\n", scheduler
    )
    assert [request.conversation for request in scheduler.requests] == [f"stdio {slot}" for slot in (0, 1, 1, 0, 0)]


BROKEN = [
    (b"\x02PROMPT 3 8 0\nabc\n", "3 fields"),
    (b"\x02PROMPT 3 8 0 1 0 7\nabc\n", "6 fields"),
    (b"\x02PROMPT 3 0 0 1\nabc\n", "max_tokens='0'"),
    (b"\x02PROMPT 3 1_0 0 1\nabc\n", "max_tokens='1_0'"),
    (b"\x02PROMPT 3 -1 0 1\nabc\n", "max_tokens='-1'"),
    (b"\x02PROMPT 3 8 2.1 1\nabc\n", "temperature='2.1'"),
    (b"\x02PROMPT 3 8 nan 1\nabc\n", "temperature='nan'"),
    (b"\x02PROMPT 3 8 hot 1\nabc\n", "temperature='hot'"),
    (b"\x02PROMPT 3 8 0_1 1\nabc\n", "temperature='0_1'"),
    (b"\x02PROMPT 3 8 0 0\nabc\n", "top_p=0"),
    (b"\x02PROMPT 3 8 0 1 2\nabc\n", "slot=2: expected 0 to 1"),
    (b"\x02PROMPT 3 8 0 1 x\nabc\n", "slot='x'"),
    (b"\x02PROMPT 3 8 \x01\x01END\x01\x01 1\nabc\n", "temperature='\\x01\\x01END"),
    (b"\x02PROMPT 0 8 0 1\n\n", "payload is empty"),
    (b"\x02PROMPT 3 8 0 1\nab\xff\n", "not valid UTF-8 at byte 2"),
    (b"\x02PROMPT 3 8 0 1\nabc", "no line end after 3 bytes"),
    (b"\x02PROMPT 3 8 0 1\nabcde\nrun this\n", "no line end after 3 bytes"),
    (b"\x02PROMPT 40 8 0 1\n" + b"a" * 40 + b"\n", "a payload of 40 bytes, at most 32"),
    (b"\x02PROMPT\nrun this\n", "first field"),
    (b"\x02PROMPT many 8 0 1\nrun this\nand this\n\n", "first field"),
    (b"\x02PROMPT -3 8 0 1\nrun this\n", "first field"),
    (b"\x02PROMPTS 3 8 0 1\n", "expected \\x02RESET"),
    (b"\x02MORE please\n", "expected \\x02RESET"),
    (b"\x02\n", "expected \\x02RESET"),
    (b"\x02\xff\n", "line is not valid UTF-8"),
    (b"caf\xe9\n", "line is not valid UTF-8 at byte 3"),
    (b"a" * 99 + b"\n", "a line of more than 32 bytes"),
]


@pytest.mark.parametrize(("stdin", "error"), BROKEN)
def test_a_broken_frame_gives_one_error_and_the_next_is_answered(stdin, error, monkeypatch):
    """The C engine left the payload of a rejected frame in the stream, and answered it as a message."""
    monkeypatch.setattr(stdio_frames, "MAX_BYTES", 32)
    scheduler = FakeScheduler("good")
    first, second = parse_replies(exchange(stdin + frame("next"), scheduler))
    assert error in first[1] and first[0] == b"" and first[2] == (0, 0, 0)
    assert second[:2] == (b"good", None)
    assert scheduler.requests[0].prompt_ids == PREFIX + tuple(TOKENIZER.encode("next"))


def test_a_payload_that_ends_too_early():
    [(_, error, _)] = parse_replies(exchange(b"\x02PROMPT 10 8 0 1\nabc", FakeScheduler()))
    assert error == "PROMPT: the payload ended after 3 of 10 bytes"


def test_the_last_line_end_may_be_missing():
    assert [text for text, _, _ in parse_replies(exchange(frame("x")[:-1], FakeScheduler("yes")))] == [b"yes"]
    assert [text for text, _, _ in parse_replies(exchange(b"hello", FakeScheduler("yes")))] == [b"yes\n"]


def test_a_payload_may_contain_markers_and_line_ends():
    text = "a\n\x02RESET\n\x00\x01\x01END\x01\x01\né😀"
    scheduler = FakeScheduler()
    assert len(parse_replies(exchange(frame(text), scheduler))) == 1
    assert TOKENIZER.decode(scheduler.requests[0].prompt_ids[2:]) == text


FRAGMENTS = [
    b"\x02PROMPT ",
    b"\x02MORE\n",
    b"\x02RESET\n",
    b"\n",
    b"3",
    b" ",
    b"8",
    b"0 1\n",
    b"abc\n",
    b"\xff",
    b"\x01\x01END\x01\x01\n",
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=8), max_size=20).map(b"".join))
def test_any_input_gives_output_that_can_be_parsed(stdin):
    for text, error, (tokens, _, _) in parse_replies(exchange(stdin, FakeScheduler(context=512))):
        assert b"\x01" not in text and (error is None or (tokens == 0 and "\x01" not in error))


# --- answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_contains_no_marker():
    out = exchange(frame("x", 50), FakeScheduler("a\x01\x01END\x01\x01\nSTAT b"), NGEN=50)
    [(text, error, _)] = parse_replies(out)
    assert text.decode() == "a␁␁END␁␁\nSTAT b" and error is None


class RecordedWrites(io.BytesIO):
    """Keeps each write by itself."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, data):
        self.writes.append(bytes(data))
        return super().write(data)


def test_a_character_is_never_split():
    """The C engine wrote the bytes of each token as they are."""
    out, ids = RecordedWrites(), TOKENIZER.encode("a😀é")
    assert len(ids) > 4
    serve(frame("x", 50), FakeScheduler(ids), out)
    assert "".join(data.decode() for data in out.writes).count("😀") == 1


def test_more_completes_a_split_character():
    ids = TOKENIZER.encode("a😀")
    scheduler = FakeScheduler(ids[:2], [*ids[2:], *TOKENIZER.encode(" b")])
    first, second = parse_replies(exchange(frame("x", 2) + b"\x02MORE\n", scheduler))
    assert (first[0], second[0]) == (b"a", "😀 b\n".encode())
    assert scheduler.requests[1].prompt_ids == (*scheduler.requests[0].prompt_ids, *ids[:2])


def test_half_a_character_at_the_end_becomes_one_replacement():
    [(text, _, _)] = parse_replies(exchange(frame("x", 8), FakeScheduler(TOKENIZER.encode("a😀")[:2])))
    assert text.decode() == "a�"


def test_an_unexpected_fault_is_one_error_and_the_next_request_is_answered(monkeypatch):
    """A library's exception ended the whole process."""
    add_token = Detokenizer.add_token

    def failing(self, token):
        if token == TOKENIZER.encode("!")[0]:
            raise Exception("Invalid prefix encountered")
        return add_token(self, token)

    monkeypatch.setattr(Detokenizer, "add_token", failing)
    scheduler = FakeScheduler("some!", "good")
    first, second = parse_replies(exchange(frame("x") + frame("x"), scheduler))
    assert first[0].startswith(b"some") and "Exception: Invalid prefix" in first[1] and second[:2] == (b"good", None)
    assert scheduler.submitted[0].cancelled.is_set()


def test_more_uses_the_sampling_params_of_the_answer_it_continues():
    """The C engine forwarded the last token again, and wrote it twice."""
    scheduler = FakeScheduler("one two three four five six seven", "more")
    out = parse_replies(exchange(frame("x", 3, "0.5", "0.7", 1) + b"\x02MORE\n", scheduler))
    first, second = scheduler.requests
    assert second.prompt_ids == (*first.prompt_ids, *TOKENIZER.encode("one two three four five six seven")[:3])
    assert (second.temperature, second.nucleus, second.seed) == (0.5, 0.7, first.seed) and second.max_tokens == 8
    assert out[1][0] == b"more\n" and out[1][2][1] == len(second.prompt_ids)


def test_each_answer_has_its_own_seed():
    scheduler = FakeScheduler()
    exchange(frame("x") * 3 + b"hello\n", scheduler, SEED=2**64 - 2)
    assert [request.seed for request in scheduler.requests] == [2**64 - 2, 2**64 - 1, 0, 1]


def test_reset_more_and_blank_lines_without_a_conversation():
    scheduler = FakeScheduler("a")
    out = exchange(b"\x02MORE\n\n\x02RESET\n" + frame("x") + b"\x02RESET\n\x02MORE\n:more\n:reset\r\n", scheduler)
    assert [text for text, _, _ in parse_replies(out)] == [b"", b"", b"", b"a", b"", b"", b"", b""]
    assert [numbers[1] for _, _, numbers in parse_replies(out)] == [None, None, None, 3, None, None, None, None]
    assert len(scheduler.requests) == 1


def test_reset_clears_the_kv_slot_that_was_used_last():
    scheduler = FakeScheduler()
    exchange(
        frame("one", slot=0) + frame("two", slot=1) + b"\x02RESET\n\x02MORE\n" + frame("x", slot=0) + b"\x02MORE\n",
        scheduler,
    )
    assert [request.conversation[-1] for request in scheduler.requests] == ["0", "1", "0", "0"]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_and_a_refused_request_are_errors_of_one_line():
    scheduler = FakeScheduler(QueueFull(3, 2.0), ValueError("too\nlong"), "yes")
    out = parse_replies(exchange(frame("x") * 3, scheduler))
    assert out[0][1] and out[1][1] == "too long" and out[2][:2] == (b"yes", None)


def test_a_failed_answer_keeps_its_text():
    scheduler = FakeScheduler("one two", ending=("error", "layer 3 is not finite"))
    [(text, error, (tokens, prompt, cut))] = parse_replies(exchange(frame("x"), scheduler))
    assert (text, error) == (b"one two", "layer 3 is not finite") and tokens > 0 and prompt == 3 and cut == 0


@pytest.mark.parametrize("ending", [None, "never"])
def test_a_closed_stdout_cancels_the_answer(ending):
    """While text is written, and while there is none."""
    scheduler = FakeScheduler("yes" if ending is None else [], ending=ending)
    read, write = os.pipe()
    with os.fdopen(write, "wb") as stdout:
        closer = threading.Timer(0.3, os.close, [read])

        class Stdin(io.BufferedReader):
            def readline(self, size):
                if ending is None:
                    closer.join()  # the frame comes after stdout is closed
                return super().readline(size)

        closer.start()
        with pytest.raises(BrokenPipeError):
            serve(Stdin(io.BytesIO(frame("x"))), scheduler, stdout)
        closer.join()
        assert [active.cancelled.is_set() for active in scheduler.submitted] == [True]
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # for the data that is still buffered


def test_ctrl_c_cancels_the_answer():
    scheduler = FakeScheduler("yes")

    class Stdout(io.BytesIO):
        def write(self, data):
            if not data.startswith(b"\x01"):
                raise KeyboardInterrupt
            return super().write(data)

    with pytest.raises(KeyboardInterrupt):
        serve(frame("x"), scheduler, Stdout())
    assert scheduler.submitted[0].cancelled.is_set()


# --- with a real model ------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(load):
    loaded = load(EMBEDDED_SNAPSHOT, CTX=256)
    scheduler = Scheduler(loaded, num_slots=2)
    scheduler.loaded = loaded
    yield scheduler
    scheduler.close()


def test_the_greedy_answer_equals_the_reference(scheduler):
    ref = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
    n = len(ref["prompt_ids"])
    prompt, answer = TOKENIZER.decode(ref["prompt_ids"]), ref["full_ids"][n:]
    out = exchange(frame(prompt, len(answer), "0", "1"), scheduler, scheduler.loaded, NGEN=500)
    [(text, error, numbers)] = parse_replies(out)
    assert (text.decode(), error) == (TOKENIZER.decode(answer), None) and numbers == (len(answer), n, 1)


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_an_answer_in_parts_equals_the_whole_answer(scheduler, temperature):
    """The C engine wrote the last token of a part twice."""
    whole = parse_replies(
        exchange(frame("In the beginning", 24, temperature, "0.9"), scheduler, scheduler.loaded, NGEN=24)
    )
    parts = parse_replies(
        exchange(frame("In the beginning", 8, temperature, "0.9") + b"\x02MORE\n" * 2, scheduler, scheduler.loaded)
    )
    assert b"".join(text.removesuffix(b"\n") if at else text for at, (text, _, _) in enumerate(parts)) == whole[0][0]
    assert sum(numbers[0] for _, _, numbers in parts) == whole[0][2][0] == 24


def test_two_kv_slots_do_not_mix(scheduler):
    """Interleaved in two KV slots and each alone, the greedy texts are the same, and the prefix cache is used."""

    def texts(stdin):
        return [text for text, _, _ in parse_replies(exchange(stdin, scheduler, scheduler.loaded))]

    a, b = frame("In the beginning", slot=0), frame("Enter the king", slot=1)
    mixed = texts(a + b + b"\x02MORE\n" + a + b"\x02MORE\n")
    assert mixed == [texts(a)[0], *texts(b + b"\x02MORE\n"), *texts(a + b"\x02MORE\n")]
    assert scheduler.statistics()["cached_tokens"] > 0


def test_a_chat_with_a_real_model(scheduler):
    out = parse_replies(
        exchange(b"Who art thou?\nAnd thy name?\n\x02RESET\nWho art thou?\n", scheduler, scheduler.loaded)
    )
    assert [error for _, error, _ in out] == [None] * 4 and out[0][0] == out[3][0]
    assert all(text.decode() for text in (out[0][0], out[1][0]))


# --- as a process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def process():
    """Return a function that starts SERVE=stdio python colibri.py with these variables and pipes."""
    started = []

    def start(is_new=False, **variables):
        environ = {"USAGE": "0", "SERVE": "stdio", "CTX": "256", "THREADS": "1"}
        environ |= {name: str(value) for name, value in variables.items()}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        begin = start_colibri if is_new else forker().start
        started.append(begin([], environment(environ), **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()


def read_reply(stdout):
    """Read the next lines, up to a STAT line."""
    lines = []
    while not lines or not STAT.fullmatch(lines[-1]):
        lines.append(stdout.readline())
        assert lines[-1], lines
    return b"".join(lines)


def test_a_program_drives_the_pipe(process, run_colibri):
    """READY is the first line; an answer comes before the next request is sent; in the C locale too."""
    p = process(is_new=True, LC_ALL="C", KV_SLOTS=2)
    assert START.fullmatch(read_reply(p.stdout))
    p.stdin.write(frame("In the beginning", 16))
    p.stdin.flush()
    [(text, error, numbers)] = parse_replies(read_reply(p.stdout))
    plain = run_colibri(PROMPT="In the beginning", NGEN=16, TEMP=0, CTX=256)
    assert (text + b"\n", error, numbers[0]) == (plain.stdout, None, 16)
    p.stdin.write(frame("x", slot=2) + "Wer bist du, Mädchen?\n".encode())
    p.stdin.close()
    refused, answered = parse_replies(p.stdout.read())
    assert "slot=2: expected 0 to 1" in refused[1] and answered[0].decode() and answered[1] is None
    assert p.wait(30) == 0 and b"Traceback" not in p.stderr.read()


def test_a_closed_stdout_ends_the_process(process):
    p = process(NGEN=200)
    read_reply(p.stdout)
    p.stdin.write(frame("In the beginning", 200, "1"))
    p.stdin.flush()
    p.stdout.read(1)
    p.stdout.close()
    assert p.wait(30) == 141 and b"Traceback" not in p.stderr.read()


def test_sigterm_ends_the_process_in_the_middle_of_an_answer(process):
    p = process(NGEN=200)
    read_reply(p.stdout)
    p.stdin.write(frame("In the beginning", 200, "1"))
    p.stdin.flush()
    p.stdout.read(1)
    p.terminate()
    assert p.wait(30) == 0 and b"Traceback" not in p.stderr.read()
