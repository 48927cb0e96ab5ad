"""Answers as history: those of every format, cut off anywhere, are accepted when they come back in a request."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generate.request import NewToken
from server.openai.chat_request import read_chat_prompt
from server.openai.choice_stream import ChoiceStream
from server.openai.request_fields import RequestFields
from server.openai.responses import ChatResponseBuilder
from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from tests.conftest import ROOT
from tests.support import templates
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
QUESTION = {"role": "user", "content": "Hi"}
PROPERTIES = {"text": {"type": "string"}, "maybe": {"type": ["string", "null"]}, "any": {}}
NAMES = ["weather", "now"]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]

# --- the server -------------------------------------------------------------------------------------------------------


class ChatService:
    """The part of the HTTP service that chat requests need, with a chat template."""

    def __init__(self, folder, source):
        (folder / "chat_template.jinja").write_text(source)
        self.tokenizer = TextTokenizer(folder, CONFIG)
        self.settings = SimpleNamespace(think=False)
        self.prefix = PromptPrefix(CONFIG, self.tokenizer, enabled=False)
        self.folder, self.model_id = folder, "model"

    def check_length(self, ids):
        pass

    def read(self, **fields):
        """Return (ids, make_parser) of a request as a client sends it; ApiError where it is refused."""
        request = RequestFields(json.loads(json.dumps(fields)))
        found = read_chat_prompt(request, self)
        request.refuse_unread()
        return found

    def answers(self, text, reason, **fields):
        """Return the message of an answer, whole and as a client adds it up from the chunks of the stream."""
        ids, make_parser = self.read(messages=[QUESTION], **fields)
        choice = ChoiceStream(self.tokenizer, make_parser(), ids)
        params = SimpleNamespace(request=SimpleNamespace(top_logprobs=None))
        builder = ChatResponseBuilder(SimpleNamespace(service=self, params=params, choices=[choice]))
        chunks = builder.start_chunks()
        for token in [*self.tokenizer.encode(text), None]:
            if not choice.is_finished:
                event = NewToken(None, 0, token, None, None)
                delta = choice.flush(reason) if token is None else choice.add_token(event, 0.0)
                chunks += builder.add_update(0, delta) if delta else []
        return json.loads(json.dumps(builder.choice(0)["message"])), add_deltas(chunks)


def add_deltas(chunks):
    message = {"content": "", "tool_calls": []}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for name, text in delta.items():
            if name != "tool_calls":
                message[name] = text if name == "role" else message.get(name, "") + text
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(part)
            else:
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


# --- answers ----------------------------------------------------------------------------------------------------------

words = st.text(st.sampled_from('ab ö😀\n"\\{}[]<>|/:,0'), max_size=8)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(words, inner, max_size=2)),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from([*PROPERTIES, "other"]), json_values, max_size=3)
names = st.sampled_from([*NAMES, "unknown"])
json_texts = st.one_of(
    st.builds(json.dumps, arguments, ensure_ascii=st.booleans()),
    st.sampled_from(['{"a": "\\ud83d', '{"any": "line\nline"}', "[1]", "null", '{"a":' * 300, "{nonsense", "", "{}}"]),
    words,
)


def glm_call(name, values):
    pairs = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values.items()]
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in pairs)
    return f"<tool_call>{name}\n{body}</tool_call>"


def hermes_block(objects):
    return "<tool_call>\n" + "\n".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in objects)


think = st.builds("{}</think>{}".format, words, words)
glm_answers = st.builds(
    lambda start, calls: start + "".join(calls), think, st.lists(st.builds(glm_call, names, arguments), max_size=2)
)
hermes_answers = st.builds(
    lambda start, blocks: start + "".join(f"{block}\n</tool_call>" for block in blocks),
    think,
    st.lists(st.builds(hermes_block, st.lists(st.tuples(names, json_texts), min_size=1, max_size=2)), max_size=2),
)
harmony_messages = st.one_of(
    st.builds("<|channel|>analysis<|message|>{}<|end|>".format, words),
    st.builds("<|channel|>{}<|message|>{}<|end|>".format, st.sampled_from(["final", "commentary"]), words),
    st.builds(
        " to={}{}<|channel|>commentary json<|message|>{}<|call|>".format,
        st.sampled_from(["functions.", ""]),
        names,
        json_texts,
    ),
)
harmony_answers = st.lists(harmony_messages, max_size=4).map("<|start|>assistant".join)
# template, whether it reasons, its answers
FORMATS = {
    "glm": (templates.GLM_5_2, True, glm_answers),
    "tiny": ((ROOT / "models" / "tiny" / "chat_template.jinja").read_text(), True, glm_answers),
    "hermes": (templates.HERMES, False, hermes_answers),
    "harmony": (templates.GPT_OSS, False, harmony_answers),
    "reasoning": (templates.DEEPSEEK_R1, False, think),
    "plain": (templates.MIXTRAL, False, words),
}


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    import shutil

    found = {}
    for name, (source, _, _) in FORMATS.items():
        folder = tmp_path_factory.mktemp(name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "models" / "tiny" / file, folder)
        found[name] = ChatService(folder, source)
    return found


@pytest.mark.parametrize("name", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data(), reason=st.sampled_from(["stop", "length"]))
def test_every_answer_cut_anywhere_is_accepted_as_history(services, name, data, reason):
    """Field case: a call that the token limit had cut off ({"a": "x y) came back in the next request and was refused
    for ever, as were arguments that are no JSON object."""
    _, reasons, answers = FORMATS[name]
    service = services[name]
    fields = {"enable_thinking": True} if reasons else {}
    if "tools" in service.tokenizer.template.variables:
        fields["tools"] = TOOLS
    text = data.draw(answers)
    text = text[: data.draw(st.integers(0, len(text)))] if reason == "length" else text
    for answer in service.answers(text, reason, **fields):
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in answer.get("tool_calls") or ()]
        ids, _ = service.read(messages=[QUESTION, answer, *results, QUESTION], **fields)
        prompt = service.tokenizer.decode(ids)
        assert all(call["function"]["name"] in NAMES for call in answer.get("tool_calls") or ())
        assert (answer["content"] or "").strip() in prompt or answer.get("tool_calls")


def test_a_call_that_was_cut_off_is_shown_to_the_model(services):
    answer, _ = services["hermes"].answers(
        '<tool_call>{"name": "weather", "arguments": {"text": "x y', "length", tools=TOOLS
    )
    [call] = answer["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"text": "x y'}
    for name, shown in (
        ("hermes", '"arguments": {"text": "x y"}}'),
        ("glm", "<arg_key>text</arg_key><arg_value>x y</arg_value>"),
        ("harmony", '<|message|>{"text": "x y"}<|call|>'),
    ):
        ids, _ = services[name].read(messages=[QUESTION, answer])
        assert shown in services[name].tokenizer.decode(ids)


def test_an_empty_answer_that_a_client_writes_as_null(services):
    """Clients drop the content of an answer that was cut off while it reasoned, or make null of an empty one."""
    for fields in ({"reasoning_content": "hm"}, {"content": None}, {"content": None, "tool_calls": []}):
        services["glm"].read(messages=[QUESTION, {"role": "assistant"} | fields, QUESTION])
