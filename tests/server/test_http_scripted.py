"""The HTTP server over a scripted scheduler: stop strings, parsers, failures, disconnects, timeouts.

The server runs in a thread; the scheduler emits the events that a test has written down.
"""

import json
import queue
import socket
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

import server.transport.http_server
from experts.cache import CacheCounters
from generate.request import ActiveRequest, NewToken, Prefilled, QueueFull, Started
from server.app import make_app
from server.http_service import HttpService
from server.openai.choice_stream import ChoiceStream
from server.openai.responses import ResponseBuilder
from server.transport.access_control import AccessControl
from server.transport.http_server import HttpServer, open_socket
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from tests.support.server_process import CHAT, COMPLETIONS, HttpClient, wait_for
from tests.support.small_tokenizers import write_tokenizer
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
TOKENIZER = TextTokenizer(EMBEDDED_SNAPSHOT, CONFIG)
CONTEXT = 1000
INTERNAL_ERROR = {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
CHAT_BODY = {"messages": [{"role": "user", "content": "x"}]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    }
]


class FakeScheduler:
    """A scheduler that plays scripts.

    script: the steps of every request, each a text or a list of ids to emit, seconds to sleep, a function to call with
    the ActiveRequest, or the reason that ends its sequences (stop, length, error). full: seconds for which the queue is
    full. limit: the most requests at once.
    """

    def __init__(self):
        self.context, self.script, self.full, self.limit, self.submitted = CONTEXT, ["stop"], None, None, []
        self.work, self.is_closed = queue.Queue(), False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def statistics(self):
        return {"slots": 4, "slots_free": 4, "slots_busy": 0, "queue": 0}

    def submit(self, request, listener):
        is_full = self.limit is not None and sum(bool(active.unfinished) for active in self.submitted) >= self.limit
        if self.full is not None or is_full:
            raise QueueFull(3, self.full or 1.0)
        active = ActiveRequest(len(self.submitted), request, listener, lambda: None)
        self.submitted.append(active)
        self.work.put((active, self.script))
        return active

    def run(self):
        while (item := self.work.get()) is not None:
            self.play(*item)

    def play(self, active, script):
        active.emit(Started(active, 0))
        active.emit(Prefilled(active, None))
        for step in script:
            if active.is_cancelled or self.is_closed:
                break
            if step in ("stop", "length", "error"):
                for row in sorted(active.unfinished):
                    active.finish(row, step, "disk on fire" if step == "error" else None)
            elif isinstance(step, int | float):
                time.sleep(step)
            elif callable(step):
                step(active)
            else:
                for token in TOKENIZER.encode(step) if isinstance(step, str) else step:
                    for row in sorted(active.unfinished - active.cancelled):
                        active.emit(NewToken(active, row, token, None, None))
        for row in sorted(active.unfinished):
            active.finish(row, "cancelled")

    def close(self):
        self.is_closed = True
        self.work.put(None)
        self.thread.join()


class ScriptedServer(HttpClient):
    """The server in a thread of this process, over a FakeScheduler."""

    def __init__(self):
        settings = Settings.read([], {"SERVE": "1", "TEMP": "0"})
        queue, drives = SimpleNamespace(num_done=0, total_read_seconds=0.0), SimpleNamespace(all=[], cached_bytes=0)
        experts = SimpleNamespace(counters=CacheCounters(), queue=queue, disk=SimpleNamespace(drives=drives))
        loaded = SimpleNamespace(config=CONFIG, folder=EMBEDDED_SNAPSHOT, model=SimpleNamespace(experts=experts))
        self.scheduler, self.lines = FakeScheduler(), []
        self.service = HttpService(settings, loaded, self.scheduler, TOKENIZER, self.lines.append)
        self.service.keep_alive = 0.05
        self.sock, self.url = open_socket("127.0.0.1", 0, has_key=False)
        self.port = int(self.url.rpartition(":")[2])
        started = threading.Event()
        app = make_app(self.service, AccessControl())
        self.server = HttpServer(app, self.scheduler.close, started.set)
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],))
        self.thread.start()
        assert started.wait(20)
        self.post("/tokenize", {"prompt": "x"})  # starts the worker's thread

    def stop(self):
        self.server.should_exit = True
        self.thread.join()
        self.service.worker.shutdown()
        self.sock.close()

    def play_script(self, *script, path=CHAT, **fields):
        """Return the choice of a script, after a check that its stream adds up to the same."""
        self.scheduler.script = script
        request = CHAT_BODY if path == CHAT else {"prompt": "x", "max_tokens": 90}
        status, response, _ = self.post(path, request | fields)
        assert status == 200, response
        [choice] = response["choices"]
        chunks = self.stream(path, request | fields | {"stream_options": {"include_usage": True}})
        assert chunks[-1]["usage"] == response["usage"]
        assert sum_chunks(chunks[:-1]) == summarize(choice)
        return choice | {"tokens": response["usage"]["completion_tokens"]}


def sum_chunks(chunks):
    """Return the text, calls and finish reason that the chunks of one choice add up to."""
    found = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
    for [choice] in (chunk["choices"] for chunk in chunks):
        delta = choice.get("delta", {})
        found["content"] += delta.get("content", "") + choice.get("text", "")
        found["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(found["calls"]):
                assert call["id"] and call["type"] == "function"
                found["calls"].append([call["function"]["name"], ""])
            found["calls"][call["index"]][1] += call["function"]["arguments"]
        found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return found


def summarize(choice):
    """Return the same of a choice of a whole response."""
    message = choice.get("message", {"content": choice.get("text")})
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }


@pytest.fixture(scope="module")
def scripted():
    scripted = ScriptedServer()
    yield scripted
    scripted.stop()


# --- text and tool calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stop_string_that_spans_tokens(scripted, path):
    """Field case: the token count shows where generation stopped, and the text is the same with and without stream."""
    choice = scripted.play_script("say E", "ND and more", "length", path=path, stop="END")
    assert summarize(choice)["content"] == "say " and choice["finish_reason"] == "stop"
    assert choice["tokens"] < len(TOKENIZER.encode("say E") + TOKENIZER.encode("ND and more"))
    choice = scripted.play_script("say EN", "x", "stop", path=path, stop=["END"])
    assert summarize(choice)["content"] == "say ENx" and choice["finish_reason"] == "stop"


def test_a_stop_string_cancels_the_sequence(scripted):
    scripted.play_script("END", 0.2, "length", stop="END")
    assert scripted.scheduler.submitted[-1].cancelled == {0}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_character_of_several_tokens_is_sent_complete(scripted, path):
    ids = TOKENIZER.encode("😀")
    assert len(ids) > 1
    choice = scripted.play_script(ids[:1], 0.1, ids[1:], "ok", "stop", path=path)
    assert summarize(choice)["content"] == "😀ok"
    chunks = scripted.stream(path, CHAT_BODY if path == CHAT else {"prompt": "x"})
    texts = [c["choices"][0].get("text", c["choices"][0].get("delta", {}).get("content")) for c in chunks]
    assert next(text for text in texts if text) == "😀"
    choice = scripted.play_script("a", ids[:-1], "length", path=path)
    assert summarize(choice)["content"] == "a\ufffd" and choice["finish_reason"] == "length"


def test_reasoning_content_is_separated(scripted):
    choice = scripted.play_script("abc</thi", "nk>def", "stop", enable_thinking=True)
    assert choice["message"] == {"role": "assistant", "content": "def", "refusal": None, "reasoning_content": "abc"}
    choice = scripted.play_script("abc", "length", chat_template_kwargs={"enable_thinking": True})
    assert summarize(choice)["reasoning_content"] == "abc" and choice["message"]["content"] == ""
    choice = scripted.play_script("a <b </think> c", "stop")
    assert choice["message"] == {"role": "assistant", "content": "a <b </think> c", "refusal": None}
    assert "reasoning_tokens" in scripted.post(CHAT, CHAT_BODY)[1]["usage"]["completion_tokens_details"]


CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("call", [CALL, HERMES])
def test_tool_calls(scripted, call):
    choice = scripted.play_script("I check.", call, call, "stop", tools=TOOLS)
    assert summarize(choice) == {
        "content": "I check.",
        "reasoning_content": "",
        "calls": [["weather", '{"city": "Rome"}']] * 2,
        "finish_reason": "tool_calls",
    }
    choice = scripted.play_script(call, call, "stop", tools=TOOLS, parallel_tool_calls=False)
    assert len(summarize(choice)["calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    choice = scripted.play_script(call, "stop", tools=TOOLS, tool_choice="none")
    assert choice["message"]["content"] == call and choice["finish_reason"] == "stop"


def test_a_truncated_tool_call_has_finish_reason_length(scripted):
    choice = scripted.play_script(CALL[:-20], "length", tools=TOOLS)
    assert choice["finish_reason"] == "length" and summarize(choice)["calls"] == [["weather", '{"city": "Rome']]


def test_a_required_tool_call_begins_in_the_prompt(scripted):
    choice = scripted.play_script(
        "city</arg_key><arg_value>Rome</arg_value></tool_call>", "stop", tools=TOOLS, tool_choice="required"
    )
    assert summarize(choice)["calls"] == [["weather", '{"city": "Rome"}']]
    assert TOKENIZER.decode(scripted.scheduler.submitted[-1].request.prompt_ids).endswith("<tool_call>weather<arg_key>")


def test_the_request_to_the_engine(scripted):
    assert scripted.play_script("stop", top_p=0) and 0 < scripted.scheduler.submitted[-1].request.nucleus < 1e-6
    scripted.play_script("stop", temperature=0.5, top_p=0.3, top_k=7, seed=-1, n=1, max_tokens=10**12)
    request = scripted.scheduler.submitted[-1].request
    assert (request.temperature, request.nucleus, request.top_k, request.seed) == (0.5, 0.3, 7, 2**64 - 1)
    assert request.max_tokens == CONTEXT - len(request.prompt_ids) + 1
    assert request.stop_ids >= set(CONFIG.stop_ids) and len(CONFIG.stop_ids) == 3
    scripted.play_script("stop", max_tokens=9, max_completion_tokens=5)
    assert scripted.scheduler.submitted[-1].request.max_tokens == 5


PATHS = ["/health", "/metrics", "/v1/models", f"/v1/models/{EMBEDDED_SNAPSHOT.name}"]
POSTS = [(CHAT, CHAT_BODY), (COMPLETIONS, {"prompt": "x"}), ("/tokenize", {"prompt": "x"}), ("/detokenize", {})]


def test_a_slash_too_many_in_a_path(scripted):
    """Field case: GET /v1/models/ was answered with 404, and a POST to /v1/chat/completions/ with a redirect that no
    client follows. A base URL that ends with a slash gave /v1//models."""
    scripted.scheduler.script = ["ok", "stop"]
    for path, body in [*((path, None) for path in PATHS), *POSTS]:
        for variant in (f"{path}/", f"{path}//", f"/{path}", path.replace("/", "//")):
            status, found, _ = scripted.get(variant) if body is None else scripted.post(variant, body)
            assert status == 200, (variant, found)
    assert scripted.get("/v1/models/")[1]["object"] == "list"
    assert scripted.get("/")[0] == 404 == scripted.get("/v1/models/other/")[0]
    assert 'colibri_requests_total{path="/v1/models",status="200"}' in scripted.get("/metrics")[1]


def test_special_tokens_are_hidden_unless_a_request_wants_them(scripted):
    """The token <|assistant|> stood in the content of chats; other servers hide special tokens by default."""
    for path in (CHAT, COMPLETIONS):
        choice = scripted.play_script("Four.<|assistant|> More", "<|bos|>", "stop", path=path)
        assert summarize(choice)["content"] == "Four. More"
        shown = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
        choice = scripted.play_script("Four.<|assistant|> More", "stop", path=path, **shown)
        assert summarize(choice)["content"] == "Four.<|assistant|> More"
        # A stop string is found, whatever is hidden, and so are the tags of an answer.
        choice = scripted.play_script("Four.<|user|> More", "length", path=path, stop="<|user|>")
        assert summarize(choice)["content"] == "Four." and choice["finish_reason"] == "stop"
        choice = scripted.play_script("<|python_start|>1<|python_end|>", "stop", path=path)
        assert summarize(choice)["content"] == "<|python_start|>1<|python_end|>"
    status, body, _ = scripted.post(CHAT, CHAT_BODY | {"skip_special_tokens": "no"})
    assert status == 400 and body["error"]["param"] == "skip_special_tokens"


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_text_with_a_token_that_the_model_has_no_row_for_is_refused(scripted, monkeypatch, path):
    """The pad token of a fine-tune, written out in a prompt: an error of the server's (500)."""
    token = TOKENIZER.find_ids(["[MASK]"])[0]
    monkeypatch.setattr(scripted.service.tokenizer, "unusable", {token: "[MASK]"})
    status, body, *_ = scripted.post(path, {"prompt": "In [MASK] the"})
    assert status == 400 and "tokenizer.json: the text holds '[MASK]'" in body["error"]["message"]
    assert str(EMBEDDED_SNAPSHOT) not in body["error"]["message"]
    assert scripted.post(CHAT, {"messages": [{"role": "user", "content": "In [MASK] the"}]})[0] == 200


@pytest.fixture
def llama2(scripted, tmp_path, monkeypatch):
    """The scripted server with a SentencePiece tokenizer -> the tokenizer."""
    tokenizer = write_tokenizer(tmp_path, "llama2")
    monkeypatch.setattr(scripted.service, "tokenizer", tokenizer)
    monkeypatch.setattr(scripted.service.prefix, "ids", [])
    return tokenizer


def test_the_space_between_prompt_and_answer_stays(scripted, llama2):
    """A prompt "Once upon a" continued by "▁time" read "Once upon atime", and text_offset did not fit."""

    def emit(active):
        for token in llama2.find_ids(["▁time", "."]):
            active.emit(NewToken(active, 0, token, -1.0, []))

    for prompt in ("the", llama2.encode("the")):
        scripted.scheduler.script = [emit, "stop"]
        body = {"prompt": prompt, "max_tokens": 9, "logprobs": 0}
        [choice] = scripted.post(COMPLETIONS, body)[1]["choices"]
        assert choice["text"] == " time." and choice["logprobs"]["text_offset"] == [0, 5]
        assert choice["logprobs"]["tokens"] == [" time", "."]
    scripted.scheduler.script = [llama2.find_ids(["▁time"]), "stop"]
    assert scripted.post(COMPLETIONS, {"prompt": "the", "echo": True})[1]["choices"][0]["text"] == "the time"
    _, body, _ = scripted.post("/tokenize", {"prompt": "the time", "return_token_strs": True})
    assert body["token_strs"] == [" the", " time"]


def test_a_character_that_the_prompt_began(scripted, llama2):
    smile = llama2.find_ids([f"<0x{byte:02X}>" for byte in "😀".encode()])
    for echo, text in ((False, "😀"), (True, "the😀")):
        scripted.scheduler.script = [smile[2:], "stop"]
        body = {"prompt": llama2.encode("the") + smile[:2], "echo": echo}
        assert scripted.post(COMPLETIONS, body)[1]["choices"][0]["text"] == text


def test_bytes_that_are_no_character(scripted, llama2):
    """A model with byte fallback wrote a line end, half a character and a word: status 500, a cut stream."""
    ids = llama2.find_ids(["<0x0A>", "<0xF0>", "▁the"])
    choice = scripted.play_script(ids, "stop", path=COMPLETIONS)
    assert choice["text"] == "\n\ufffd the"


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_has_no_effect_is_said_in_a_header_and_the_log(scripted, is_stream):
    """Field case: a word of chat_template_kwargs that the template does not know was passed over without one."""
    scripted.scheduler.script = ["ok", "stop"]
    fields = {"chat_template_kwargs": {"tön\x7f\n": 1}, "reasoning_effort": "low", "stream": is_stream}
    status, _, headers = scripted.post(CHAT, CHAT_BODY | fields)
    effort, unread = headers.get_all("Warning")
    assert status == 200 and effort.startswith('299 colibri.py "reasoning_effort: low turns reasoning on')
    assert "does not read it: chat_template_kwargs.t\\u00f6n\\\\x7f\\\\n" in unread
    request_id = headers["X-Request-Id"]
    wait_for(lambda: any(request_id in line and "reasoning_effort: low" in line for line in scripted.lines))
    assert scripted.post(CHAT, CHAT_BODY)[2]["Warning"] is None
    assert scripted.post("/tokenize", CHAT_BODY | {"reasoning_effort": "low"})[2]["Warning"] == effort
    many = {"chat_template_kwargs": {f"name{i}": i for i in range(10_000)}}
    assert len(scripted.post(CHAT, CHAT_BODY | many)[2]["Warning"]) < 1000


# --- failures ---------------------------------------------------------------------------------------------------------


def test_an_engine_failure_is_status_500_and_the_server_continues(scripted):
    scripted.scheduler.script = ["some", "error"]
    status, body, _ = scripted.post(CHAT, CHAT_BODY)
    assert status == 500 and body["error"]["code"] == "engine_error" and "disk on fire" in body["error"]["message"]
    *chunks, last = scripted.stream(CHAT, CHAT_BODY)
    assert last["error"]["type"] == "server_error" and sum_chunks(chunks)["content"] == "some"
    assert any("disk on fire" in line for line in scripted.lines)
    assert summarize(scripted.play_script("fine", "stop"))["content"] == "fine"


def test_an_unexpected_fault_ends_a_stream_with_the_error_event(scripted, monkeypatch):
    """A stream that just stops reads as a whole answer. What came before goes out first, and the server goes on."""
    add_token = ChoiceStream.add_token

    def failing(self, token, now):
        if token.id == TOKENIZER.encode("!")[0]:
            raise Exception("Invalid prefix encountered")
        return add_token(self, token, now)

    monkeypatch.setattr(ChoiceStream, "add_token", failing)
    for path, body in ((CHAT, CHAT_BODY), (COMPLETIONS, {"prompt": "x"})):
        scripted.scheduler.script = ["some", "!", "stop"]
        assert scripted.post(path, body)[:2] == (500, {"error": INTERNAL_ERROR})
        *chunks, last = scripted.stream(path, body)
        assert last == {"error": INTERNAL_ERROR} and sum_chunks(chunks)["content"] == "some"
        assert any("generation failed: Exception: Invalid prefix" in line for line in scripted.lines)
        assert scripted.scheduler.submitted[-1].is_cancelled
    monkeypatch.setattr(ResponseBuilder, "chunk", None)  # a fault in what is sent
    monkeypatch.setattr(ChoiceStream, "add_token", add_token)
    scripted.scheduler.script = ["fine", "stop"]
    assert scripted.stream(COMPLETIONS, {"prompt": "x"}) == [{"error": INTERNAL_ERROR}]
    monkeypatch.undo()
    assert summarize(scripted.play_script("fine", "stop"))["content"] == "fine"


def test_a_full_queue_is_status_429_with_retry_after(scripted):
    scripted.scheduler.full = 12.3
    try:
        for fields in ({}, {"stream": True}):
            status, body, headers = scripted.post(CHAT, CHAT_BODY | fields)
            assert status == 429 and headers["Retry-After"] == "12" and body["error"]["code"] == "queue_full"
            assert body["error"]["type"] == "rate_limit_error"
    finally:
        scripted.scheduler.full = None
    assert "colibri_queue_full_total 2.0" in scripted.get("/metrics")[1]


def test_comments_keep_a_stream_alive_during_a_long_prefill(scripted):
    scripted.scheduler.script = [0.5, "done", "stop"]
    _, text, headers = scripted.post(CHAT, CHAT_BODY | {"stream": True})
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    comments = [line for line in text.split("\n\n") if line.startswith(":")]
    assert len(comments) >= 2 and comments[0] == ": reading the prompt"
    assert text.endswith("data: [DONE]\n\n") and text.index('"content":"d') > text.rindex(": reading")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_disconnect_cancels_the_request(scripted, is_stream):
    def wait(active):
        for _ in range(100):
            if active.cancelled:
                return
            time.sleep(0.05)

    scripted.scheduler.script = ["some", wait, "stop"]
    submitted, before = scripted.scheduler.submitted, len(scripted.scheduler.submitted)
    data = json.dumps(CHAT_BODY | {"stream": is_stream}).encode()
    with scripted.connect() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        if is_stream:
            connection.recv(1000)
        else:
            time.sleep(0.2)
    wait_for(lambda: len(submitted) > before and submitted[-1].cancelled)
    wait_for(lambda: 'colibri_answers_total{reason="cancelled"}' in scripted.get("/metrics")[1])
    if not is_stream:
        wait_for(lambda: any(" 499 " in line for line in scripted.lines))


def test_prompts_are_submitted_again_after_a_full_queue(scripted):
    """Also when no prompt of the request is active: other requests filled the queue."""

    def close_queue(active):
        scripted.scheduler.full = 1.0
        scripted.scheduler.script = ["later", "stop"]

    def open_queue():
        time.sleep(0.5)
        scripted.scheduler.full = None

    scripted.scheduler.script = [close_queue, "now", "stop"]
    scripted.scheduler.limit = 1
    opener = threading.Thread(target=open_queue)
    opener.start()
    try:
        status, body, _ = scripted.post(COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 9})
    finally:
        opener.join()
        scripted.scheduler.full = scripted.scheduler.limit = None
    assert status == 200 and [choice["text"] for choice in body["choices"]] == ["now", "later", "later"]


@contextmanager
def timeouts(monkeypatch, **seconds):
    for name, value in seconds.items():
        monkeypatch.setattr(server.transport.http_server, name, value)
    yield


def test_an_incomplete_header_closes_the_connection(scripted, monkeypatch):
    """Also one whose bytes arrive one by one; a connection with a request under way stays open."""
    with timeouts(monkeypatch, HEADER_SECONDS=0.3), scripted.connect() as silent, scripted.connect() as slow:
        started = time.monotonic()
        try:
            while time.monotonic() - started < 5:
                slow.sendall(b"G")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - started < 5
        with suppress(ConnectionResetError):
            assert silent.recv(1) == b""
    scripted.scheduler.script = [0.6, "slow", "stop"]
    assert scripted.post(CHAT, CHAT_BODY)[0] == 200


def test_a_client_that_never_reads_is_disconnected(scripted, monkeypatch):
    stopped = threading.Event()

    def flood(active):
        for _ in range(200_000):
            if active.cancelled:
                stopped.set()
                return
            active.emit(NewToken(active, 0, 300, None, None))
            time.sleep(0)

    scripted.scheduler.script = [flood, "stop"]
    with timeouts(monkeypatch, UNREAD_SECONDS=0.3):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", scripted.port))
        with connection:
            data = json.dumps(CHAT_BODY | {"stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            assert stopped.wait(20)
