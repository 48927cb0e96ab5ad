"""The HTTP server as a process on models/tiny: responses, refused requests, access control."""

import json
from contextlib import closing

import pytest

from errors import Refused
from modes.serve import KV_SHARE, open_server
from server.transport.http_server import open_socket
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from tests.support.server_process import CHAT, COMPLETIONS, CONTEXT, complete
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
TOKENIZER = TextTokenizer(EMBEDDED_SNAPSHOT, CONFIG)
PREFIX = PromptPrefix(CONFIG, TOKENIZER, enabled=True)
MESSAGES = [{"role": "user", "content": "Who art thou?"}]


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai", reason="openai is not installed: pip install openai")


@pytest.fixture
def client(server, openai):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(text):
    return PREFIX.prepend(TOKENIZER.encode(text))


# --- responses --------------------------------------------------------------------------------------------------------


def test_models_and_health(server):
    _, models, _ = server.get("/v1/models")
    [model] = models["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", CONTEXT)
    assert server.get("/v1/models/tiny")[1] == model
    assert server.get("/v1/models/other")[0] == 404
    assert server.get("/health")[1] == {"status": "ok", "model": "tiny", "slots": 4, "slots_free": 4, "queue": 0}


def test_a_completion_equals_prompt_mode(server, run_colibri):
    process = run_colibri(PROMPT="In the beginning", NGEN=16, TEMP=0, CTX=CONTEXT)
    body = complete(server)
    assert body["choices"][0]["text"] == process.stdout.decode().removesuffix("\n")
    assert body["usage"]["prompt_tokens"] == len(ids_of("In the beginning"))


def test_chat_completions_with_the_openai_client(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12 and answer.model == "tiny"
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert client.models.list().data[0].id == "tiny"


def test_n_choices_and_seeds(client):
    def sample(**fields):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=12, temperature=1.5, **fields
        )
        return [choice.message.content for choice in answer.choices]

    three = sample(n=3, seed=7)
    assert three == sample(n=3, seed=7) and len(set(three)) == 3
    assert sample(seed=7) == three[:1] != sample(seed=8)
    assert sample() != sample()  # without a seed each request has its own


def test_log_probabilities_of_a_chat(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs) < 0
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [e for chunk in chunks if (found := chunk.choices[0].logprobs) for e in found.content]
    assert streamed == entries


def test_completions_of_texts_token_ids_and_lists(client):
    text = "In the beginning"

    def create(prompt, **fields):
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0, **fields)

    [alone] = create(text).choices
    assert create(ids_of(text)).choices[0].text == create([ids_of(text)]).choices[0].text == alone.text
    both = create([text, "The LORD", text], n=2)
    assert [choice.index for choice in both.choices] == list(range(6))
    assert [choice.text for choice in both.choices[:2]] == [alone.text] * 2 == [c.text for c in both.choices[4:]]
    streamed = {}
    for chunk in create([text, "The LORD"], stream=True, echo=True):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == {0: text + alone.text, 1: "The LORD" + both.choices[2].text}


def test_more_prompts_than_the_queue_holds(server):
    """Prompts of one request wait for each other."""
    body = complete(server, ["The LORD"] * 100, max_tokens=1)
    assert len(body["choices"]) == 100 and len({choice["text"] for choice in body["choices"]}) == 1


def test_a_stop_string(server):
    whole = complete(server, max_tokens=16)["choices"][0]["text"]
    stop = whole[10:14]
    body = complete(server, max_tokens=16, stop=[stop, "never"], logprobs=0)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert body["usage"]["completion_tokens"] < 16
    assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    chunks = server.stream(
        COMPLETIONS, {"prompt": "In the beginning", "temperature": 0, "max_tokens": 16, "stop": [stop, "never"]}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_echo_with_log_probabilities(server, run_colibri, tmp_path):
    """Field case: entries of the prompt and of the answer, the first null; their sums equal those of SCORE."""
    context, continuation = ids_of("In the beginning God"), TOKENIZER.encode(" created the heaven")
    body = complete(server, context + continuation, max_tokens=1, echo=True, logprobs=2)
    [choice] = body["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(context + continuation) + 1 == len(found["token_logprobs"])
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert "".join(found["tokens"]) == choice["text"]
    assert [choice["text"][at:][:3] for at in found["text_offset"]] == [
        (token + "".join(found["tokens"][at + 1 :]))[:3] for at, token in enumerate(found["tokens"])
    ]
    (tmp_path / "requests.jsonl").write_text(json.dumps({"context": context, "continuation": continuation}))
    scored = run_colibri(SCORE=tmp_path / "requests.jsonl").stdout.split()
    of_continuation = slice(len(context), len(context + continuation))
    assert sum(found["token_logprobs"][of_continuation]) == pytest.approx(float(scored[0]), abs=1e-4)
    is_greedy = all(
        token == max(top, key=top.get)
        for token, top in zip(found["tokens"][of_continuation], found["top_logprobs"][of_continuation], strict=True)
    )
    assert is_greedy == bool(int(scored[2]))
    # max_tokens 0 generates nothing.
    body = complete(server, context, max_tokens=0, echo=True, logprobs=0)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        [None, *found["token_logprobs"][1 : len(context)]], abs=1e-4
    )
    assert body["usage"]["completion_tokens"] == 0 and body["choices"][0]["finish_reason"] == "length"


def test_echo_returns_the_prompt_as_it_was_sent(server):
    """The family's prefix has log-probabilities, and no place in the text."""
    [choice] = complete(server, "In the beginning", max_tokens=2, echo=True, logprobs=1)["choices"]
    assert choice["text"].startswith("In the beginning")
    assert choice["logprobs"]["tokens"][:3] == ["[gMASK]", "<sop>", "In"]
    assert choice["logprobs"]["text_offset"][:4] == [0, 0, 0, 2]
    chunks = server.stream(
        COMPLETIONS, {"prompt": "In the beginning", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    offsets = [at for chunk in chunks for at in (chunk["choices"][0]["logprobs"] or {}).get("text_offset", [])]
    assert offsets == choice["logprobs"]["text_offset"]


def test_a_second_turn_hits_the_prefix_cache(server):
    """Two interleaved conversations give what each gives alone, and most of their prompt tokens are cached."""
    chats = {name: [{"role": "user", "content": f"I am {name}. Who art thou?"}] for name in ("Ruth", "Job")}
    fields = {"max_tokens": 8, "temperature": 0}
    for turn in range(2):
        for messages in chats.values():
            _, body, _ = server.post(CHAT, {"messages": messages} | fields)
            messages += [body["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            if turn:
                cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached > body["usage"]["prompt_tokens"] // 2
    for name, messages in chats.items():
        alone = [{"role": "user", "content": f"I am {name}. Who art thou?"}]
        for turn in (1, 3):
            assert server.post(CHAT, {"messages": alone} | fields)[1]["choices"][0]["message"] == messages[turn]
            alone = messages[: turn + 2]


def test_a_required_tool_call(client, openai):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {"city": {"type": "string"}}}}}
        for name in ("weather", "time")
    ]
    choice = {"type": "function", "function": {"name": "time"}}
    fields = dict(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, tools=tools, tool_choice=choice)
    answer = client.chat.completions.create(**fields)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "time" and call.type == "function" and call.id.startswith("call_")
    name, arguments = "", ""
    for chunk in client.chat.completions.create(stream=True, **fields):
        for call_delta in chunk.choices[0].delta.tool_calls or []:
            name += call_delta.function.name or ""
            arguments += call_delta.function.arguments or ""
    assert (name, arguments) == ("time", call.function.arguments)
    with pytest.raises(openai.BadRequestError, match=r"tool_choice\.function\.name"):
        client.chat.completions.create(**fields | {"tool_choice": {"type": "function", "function": {"name": "x"}}})


def test_tokenize_and_detokenize(server):
    _, body, _ = server.post("/tokenize", {"prompt": "In the <|user|> 😀"})
    assert body == {"count": len(body["tokens"]), "max_model_len": CONTEXT, "tokens": ids_of("In the <|user|> 😀")}
    _, body, _ = server.post(
        "/tokenize", {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True, "model": "tiny"}
    )
    assert body["tokens"] == TOKENIZER.encode("a b") and "".join(body["token_strs"]) == "a b"
    _, body, _ = server.post("/tokenize", {"messages": MESSAGES})
    assert body["tokens"] == TOKENIZER.encode_chat(MESSAGES)[1]
    assert server.post("/detokenize", {"tokens": ids_of("In 😀")})[1] == {"prompt": "[gMASK]<sop>In 😀"}
    status, body, _ = server.post("/detokenize", {"tokens": [5, -1]})
    assert (status, body["error"]["param"]) == (400, "tokens") and "tokens[1]=-1" in body["error"]["message"]


def test_metrics_for_prometheus(server):
    parser = pytest.importorskip("prometheus_client.parser")
    complete(server, max_tokens=4)
    _, text, headers = server.get("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {s.name: s for family in parser.text_string_to_metric_families(text) for s in family.samples}
    wanted = (
        "requests_total prompt_tokens_total cached_tokens_total generated_tokens_total queue_full_total "
        "time_to_first_token_seconds_count time_per_output_token_seconds_sum expert_hits_total expert_misses_total "
        "expert_read_bytes_total expert_evictions_total expert_read_seconds_count expert_read_seconds_sum "
        "expert_wait_seconds_total queue_length slots resident_memory_bytes expert_page_cache_bytes_total drive_depth "
        "drive_best_bytes_per_second"
    )
    values = {name: found[f"colibri_{name}"].value for name in wanted.split()}
    assert values["generated_tokens_total"] >= 4 and values["expert_hits_total"] > 0
    assert found["colibri_drive_depth"].labels == {"drive": "drive", "mode": "buffered"} and values["drive_depth"] == 4
    assert 1e8 < values["resident_memory_bytes"] < 2e9
    assert f'colibri_requests_total{{path="{COMPLETIONS}",status="200"}}' in text


def test_fewer_kv_slots_when_memory_is_short(monkeypatch):
    """A KV slot of this length takes a quarter of a GB; they may take a quarter of what the dense weights leave."""
    monkeypatch.setattr("load.plan.total_bytes", lambda: None)  # a machine of 50 GB
    variables = {"SERVE": "stdio", "CTX": "100000", "RAM_GB": "50"}
    with closing(open_server(Settings.read([], variables))) as opened:
        assert opened.plan.kv_slots == 4
        slot, fixed = opened.plan.kv_bytes / 4, opened.plan.fixed_bytes - opened.plan.kv_bytes
    for num_slots, factor in ((1, 0.5), (2, 2.5), (3, 3.5)):
        budget = {"RAM_GB": str((fixed + max(1.5 * slot, factor * slot / KV_SHARE)) / 1e9)}
        with closing(open_server(Settings.read([], variables | budget))) as opened:
            assert opened.plan.kv_slots == num_slots
    with closing(open_server(Settings.read([], variables | {"KV_SLOTS": "7"}))) as opened:
        assert opened.plan.kv_slots == 7


# --- refused requests -------------------------------------------------------------------------------------------------


def test_the_longest_prompt_fits_and_one_more_token_is_refused(server):
    """Field case: prompts of the context's length were truncated, or failed after the 200."""
    ids = [5] * CONTEXT
    body = complete(server, ids, max_tokens=1)
    assert body["usage"]["completion_tokens"] == 1
    for fields in ({}, {"stream": True}):
        status, body, _ = server.post(COMPLETIONS, {"prompt": [*ids, 5], "max_tokens": 1} | fields)
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert f"{CONTEXT + 1} tokens" in body["error"]["message"] and str(CONTEXT) in body["error"]["message"]
    long = [{"role": "user", "content": "word " * CONTEXT}]
    status, body, _ = server.post(CHAT, {"messages": long, "stream": True})
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"


def test_max_tokens_beyond_the_context_is_clamped(server):
    body = complete(server, [5] * (CONTEXT - 3), max_tokens=10**9)
    assert body["usage"]["completion_tokens"] <= 4
    assert body["choices"][0]["finish_reason"] == ("length" if body["usage"]["completion_tokens"] == 4 else "stop")


REFUSED_CHAT_FIELDS = [
    ("logit_bias", {"5": 100}),
    ("frequency_penalty", 0.5),
    ("presence_penalty", -1),
    ("response_format", {"type": "json_object"}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("audio", {"voice": "x"}),
    ("modalities", ["audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("service_tier", "flex"),
    ("store", True),
    ("web_search_options", {}),
    ("surprise", 1),
    ("best_of", 2),
    ("n", 0),
    ("n", 5),
    ("n", True),
    ("temperature", 2.5),
    ("temperature", "hot"),
    ("top_p", -0.1),
    ("top_k", -1),
    ("seed", 1.5),
    ("max_tokens", 0),
    ("max_tokens", "many"),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("logprobs", 2),
    ("top_logprobs", 2),
    ("reasoning_effort", "much"),
    ("tools", [{"type": "other"}]),
    ("tools", [{"type": "function", "function": {}}]),
    ("tool_choice", "required"),
    ("messages", []),
    ("messages", "hello"),
    ("chat_template_kwargs", {"tools": []}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED_CHAT_FIELDS)
def test_an_unsupported_field_is_refused_by_name(server, name, value):
    """Field case: logit_bias, best_of and others were ignored, with status 200."""
    status, body, _ = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1} | {name: value})
    assert status == 400 and body["error"]["param"].startswith(name) and name in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("best_of", 3), ("suffix", "x"), ("logprobs", 99), ("logprobs", True), ("echo", 1), ("max_tokens", -1)),
        *(("prompt", None), ("prompt", []), ("prompt", [[]]), ("prompt", [1, "a"]), ("prompt", [2048]), ("prompt", 5)),
        *(("prompt", [-1]), ("logit_bias", {"1": 1}), ("messages", MESSAGES)),
    ],
)
def test_an_unsupported_field_of_completions_is_refused_by_name(server, name, value):
    status, body, _ = server.post(COMPLETIONS, {"prompt": "x", "n": 2, "max_tokens": 1} | {name: value})
    assert status == 400 and body["error"]["param"] == name


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "store": False},
        {"logit_bias": {}, "frequency_penalty": 0.0, "presence_penalty": 0, "n": 1, "seed": -5, "stop": None},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "top_k": 3, "service_tier": "auto"},
        {"reasoning_effort": "none", "parallel_tool_calls": True, "logprobs": False, "modalities": ["text"]},
    ],
)
def test_neutral_fields_are_accepted(server, fields):
    assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1} | fields)[0] == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": "x", "surprise": 1}, "messages[0].surprise"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("hello", "messages[0]"),
    ],
)
def test_a_bad_message_is_refused_by_its_path(server, message, param):
    status, body, _ = server.post(CHAT, {"messages": [message]})
    assert status == 400 and body["error"]["param"] == param


def test_messages_in_the_formats_that_clients_send(server):
    """Text parts, a developer message, earlier answers as the client received them with their null fields."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "index": 0}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "2+2?", "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "hm", "tool_calls": None},
        {"role": "user", "content": "So?"},
    ]
    _, body, _ = server.post("/tokenize", {"messages": messages})
    assert TOKENIZER.decode(body["tokens"]) == (
        "[gMASK]<sop><|system|>Be brief.<|user|>2+2?<|assistant|><think></think>"
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        "<|observation|><tool_response>4</tool_response><|assistant|><think>hm</think>Four."
        "<|user|>So?<|assistant|><think></think>"
    )


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'{"a": 1' + b"0" * 9999]
)
def test_a_body_that_is_not_a_json_object(server, body):
    status, answer, _ = server.post(COMPLETIONS, body)
    assert status == 400 and "body" in answer["error"]["message"]


def test_unknown_paths_methods_and_models(server):
    assert server.get("/v2")[0] == 404 and server.get("/v2")[1]["error"]["type"] == "not_found_error"
    assert server.get(CHAT)[0] == 405
    status, body, _ = server.post(CHAT, {"messages": MESSAGES, "model": "gpt-4"})
    assert status == 404 and body["error"]["code"] == "model_not_found" and body["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:5173"}, 200),
    ],
)
def test_access_by_host_and_origin(server, headers, status):
    """Field case: a web page whose host name resolves to this machine sent requests without its user's knowledge."""
    assert server.get("/v1/models", headers)[0] == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_address_without_a_key_is_refused(host):
    with pytest.raises(Refused, match="set API_KEY"):
        open_socket(host, 0, has_key=False)


def test_an_address_that_cannot_be_used(run_colibri, server):
    process = run_colibri(SERVE=1, PORT=server.port)
    assert process.returncode == 2 and f"PORT={server.port}: cannot listen there".encode() in process.stderr
    assert process.stdout == b""
    with pytest.raises(Refused, match=r"HOST=no\.such\.name\.invalid: no such address"):
        open_socket("no.such.name.invalid", 0, has_key=True)
