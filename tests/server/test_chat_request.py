"""The prompt of a chat request with published chat templates: reasoning, tools, and what has no effect is said."""

import json
from types import SimpleNamespace

import pytest

from server.openai.api_error import ApiError
from server.openai.chat_request import read_chat_prompt
from server.openai.request_fields import RequestFields
from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from tests.support import templates
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
QUESTION = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}


@pytest.fixture
def ask(text_folder):
    """ask(template, THINK, **fields) -> (the prompt's text, the notices)."""

    def ask(source, think=False, **fields):
        (text_folder / "chat_template.jinja").write_text(source)
        tokenizer = TextTokenizer(text_folder, CONFIG)
        service = SimpleNamespace(
            tokenizer=tokenizer,
            settings=SimpleNamespace(think=think),
            prefix=PromptPrefix(CONFIG, tokenizer, enabled=False),
            check_length=lambda ids: None,
            folder=text_folder,
        )
        request = RequestFields(json.loads(json.dumps({"messages": [QUESTION]} | fields)))
        ids, _ = read_chat_prompt(request, service)
        request.refuse_unread()
        return tokenizer.decode(ids), request.notices

    return ask


def refused(ask, *arguments, **fields):
    with pytest.raises(ApiError) as caught:
        ask(*arguments, **fields)
    assert caught.value.status == 400
    return caught.value.param, str(caught.value)


EFFORT_TESTS = [
    ("GLM_5_2", "low", "Effort: High", "low is read as high; the chat template knows high, max"),
    ("GLM_5_2", "medium", "Effort: High", "medium is read as high"),
    ("GLM_5_2", "high", "Effort: High", None),
    ("GLM_5_2", "xhigh", "Effort: Max", "xhigh is read as max"),
    ("GLM_5_2", "max", "Effort: Max", None),
    ("GLM_5_2", "none", "<think></think>", None),
    ("GPT_OSS", "minimal", "Reasoning: low", "minimal is read as low"),
    ("GPT_OSS", "max", "Reasoning: high", "max is read as high"),
    ("QWEN_3_8", "max", "xhigh", "max is read as xhigh"),
    ("HY_3", "none", "no_think", None),
    ("HY_3", "no_think", "no_think", None),
    ("DEEPSEEK_V3_1", "low", "<think>", "low turns reasoning on; the chat template knows no efforts"),
    ("QWEN_3", "none", "</think>", None),
    ("DEEPSEEK_R1", "high", "<think>", "has no effect"),
    ("MIXTRAL", "none", "[INST]", "has no effect"),
]


@pytest.mark.parametrize(("name", "effort", "found", "notice"), EFFORT_TESTS)
@pytest.mark.parametrize("in_kwargs", [False, True])
def test_reasoning_effort(ask, name, effort, found, notice, in_kwargs):
    """Field case: low and medium gave GLM-5.2 its greatest effort, without a word, and max was refused. It is the same
    as a field and in chat_template_kwargs."""
    fields = {"reasoning_effort": effort}
    text, notices = ask(getattr(templates, name), **({"chat_template_kwargs": fields} if in_kwargs else fields))
    assert found in text
    assert len(notices) == (notice is not None)
    label = "chat_template_kwargs.reasoning_effort" if in_kwargs else "reasoning_effort"
    assert notice is None or (notices[0].startswith(label) and notice in notices[0])


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("GPT_OSS", {"reasoning_effort": "none"}, "cannot turn reasoning off; it knows the efforts low, medium, high"),
        ("GPT_OSS", {"enable_thinking": False}, "cannot turn reasoning off; it knows the efforts low, medium, high"),
        ("GPT_OSS", {"reasoning_effort": "much"}, "expected one of low, medium, high, not 'much'"),
        ("GLM_5_3", {"reasoning_effort": "none"}, "cannot turn reasoning off"),
        ("GLM_5_2", {"reasoning_effort": "deep"}, "expected one of high, max, not 'deep'"),
        ("DEEPSEEK_R1", {"enable_thinking": False}, "cannot turn reasoning off"),
        ("DEEPSEEK_R1", {"thinking": {"type": "disabled"}}, "cannot turn reasoning off"),
        ("MIXTRAL", {"enable_thinking": True}, "has no reasoning"),
        ("MIXTRAL", {"reasoning_effort": "high"}, "has no reasoning"),
        ("QWEN_3", {"enable_thinking": "false"}, "true or false"),
        ("QWEN_3", {"thinking": {"type": "adaptive"}}, "adaptive"),
    ],
)
def test_reasoning_that_cannot_be_is_refused_by_name(ask, name, fields, message):
    """Field case: enable_thinking was ignored without a word where the template has no such word; "false", a text, is
    true for a template."""
    [field] = fields
    for body, label in ((fields, field), ({"chat_template_kwargs": fields}, f"chat_template_kwargs.{field}")):
        param, text = refused(ask, getattr(templates, name), **body)
        assert param.startswith(field) or param.startswith(label)
        assert message in text and field in text


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True},
        {"thinking": True},
        {"thinking": {"type": "enabled"}},
        {"chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
        {"reasoning_effort": "high"},
    ],
)
@pytest.mark.parametrize("name", ["DEEPSEEK_V3_1", "QWEN_3", "GLM_5_2", "HY_3", "DEEPSEEK_V4"])
def test_one_wish_for_reasoning_for_all_templates(ask, name, fields):
    source = getattr(templates, name)
    text, notices = ask(source, **fields)
    assert text == ask(source, think=True)[0] or "reasoning_effort" in fields
    assert text != ask(source)[0] and not text.rstrip().endswith("</think>")
    assert all("no efforts" in notice or "counts more" in notice for notice in notices)


def test_what_changes_nothing_is_said(ask):
    kwargs = {"clear_thinking": True, "tone": "ä"}
    _, notices = ask(templates.MIXTRAL, enable_thinking=False, chat_template_kwargs=kwargs)
    assert notices == [
        "enable_thinking has no effect: the chat template has no such variable",
        "no effect, as the chat template does not read it: chat_template_kwargs.clear_thinking, "
        "chat_template_kwargs.tone",
    ]
    _, notices = ask(templates.GLM_5_2, enable_thinking=False, reasoning_effort="high")
    assert notices == ["reasoning_effort has no effect: enable_thinking counts more"]
    _, notices = ask(templates.GLM_5_2, enable_thinking=True, thinking=False, reasoning_effort="high")
    assert notices == ["thinking has no effect: enable_thinking counts more"]
    kwargs = {"enable_thinking": True, "reasoning_effort": "high"}
    _, notices = ask(templates.GLM_5_2, enable_thinking=False, reasoning_effort="high", chat_template_kwargs=kwargs)
    assert notices == ["enable_thinking has no effect: chat_template_kwargs.enable_thinking counts more"]
    assert ask("{{ tone }}{{ messages[0].content }}", chat_template_kwargs={"tone": "ä"}) == ("äHi", [])
    assert ask(templates.QWEN_3)[1] == ask(templates.QWEN_3, think=True)[1] == []


def test_tool_calls_of_earlier_answers(ask):
    """Field case: 400 "can only concatenate str" with DeepSeek's templates; other servers and clients send null."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "c1", "content": "wet"})
    for name in ("DEEPSEEK_R1", "DEEPSEEK_V3_1"):
        text, notices = ask(getattr(templates, name), messages=history)
        assert '{"city": "Köln"}</call>' in text and notices == []
    history[1] |= {"content": "I look."}
    [notice] = ask(templates.DEEPSEEK_R1, messages=history)[1]
    assert notice == "no effect, as the chat template leaves it out: messages[1].tool_calls"


def test_a_system_message_that_the_template_leaves_out_is_said(ask):
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    for role in ("system", "developer"):
        _, notices = ask(source, messages=[{"role": role, "content": "Be brief."}, QUESTION])
        assert notices == ["no effect, as the chat template leaves it out: messages[0].content"]
    assert ask(templates.QWEN_3, messages=[{"role": "developer", "content": "Be brief."}, QUESTION])[1] == []


def test_tools_that_the_template_does_not_write_are_refused(ask):
    """A template that names tools, and <tool_call> for the answers, but shows none to the model."""
    source = "{{ messages[0].content }}{{ '<tool_call>' if tools }}"
    assert refused(ask, source, tools=[TOOL])[0] == "tools"
    assert ask(source, tools=[TOOL], tool_choice="none")[0] == "Hi"


@pytest.mark.parametrize("name", templates.unread_forms)
def test_tools_whose_calls_no_parser_reads_are_refused(ask, name):
    """Field case: Qwen3-Coder's template was taken for Hermes, because both write <tool_call>: its calls came as
    content, and a forced call began in the wrong form."""
    source = getattr(templates, name)
    for choice in ("auto", "required"):
        param, text = refused(ask, source, tools=[TOOL], tool_choice=choice)
        assert param == "tools" and repr(templates.unread_forms[name])[1:-1] in text
    assert "weather" not in ask(source, tools=[TOOL], tool_choice="none")[0]


def test_tools_that_cannot_come_back_are_refused(ask):
    shown = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    assert "leaves tool calls out" in refused(ask, shown, tools=[TOOL])[1]
    failing = shown + "{{ raise_exception('no calls') if messages | length > 1 }}"
    assert "fails for tool calls" in refused(ask, failing, tools=[TOOL])[1]


def test_a_forced_call_begins_as_the_template_writes_calls(ask):
    """Field case: GLM-4.6 writes a line break behind the name; a schema that is a reference had no arguments."""
    reference = {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": TOOL["function"]["parameters"]}}
    by_reference = {"type": "function", "function": {"name": "weather", "parameters": reference}}
    nothing = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    for source, tool, start in (
        (templates.GLM_4_5, TOOL, "<tool_call>weather\n<arg_key>"),
        (templates.GLM_4_5, by_reference, "<tool_call>weather\n<arg_key>"),
        (templates.GLM_4_5, nothing, "<tool_call>weather</tool_call>"),
        (templates.HERMES, TOOL, '<tool_call>\n{"name": "weather", "arguments": {'),
        (templates.GPT_OSS, TOOL, "assistant to=functions.weather<|channel|>commentary json<|message|>"),
    ):
        assert ask(source, tools=[tool], tool_choice="required")[0].endswith(start)


def test_a_tool_without_a_description(ask):
    """Field case: 400 from inside the template of gpt-oss."""
    text, _ = ask(templates.GPT_OSS, tools=[TOOL])
    assert "// \ntype weather = (_: {city: string}) => any;" in text


def test_a_forced_call_is_not_preceded_by_reasoning(ask):
    for think in (False, True):
        text, _ = ask(templates.GLM_5_2, think=think, tools=[TOOL], tool_choice="required", reasoning_effort="max")
        assert text.endswith("<|assistant|><think></think><tool_call>weather<arg_key>")


def test_with_tools_the_template_for_tools_is_taken(ask, text_folder):
    """Field case: a list of named templates always gave the default one, which knows no tools: they were refused."""
    (text_folder / "additional_chat_templates").mkdir()
    (text_folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates.GLM_5_2)
    assert "[INST]" in ask(templates.MIXTRAL)[0]
    text, _ = ask(templates.MIXTRAL, tools=[TOOL])
    assert "<|system|>" in text and "weather" in text
    assert "[INST]" in ask(templates.MIXTRAL, tools=[TOOL], tool_choice="none")[0]
    assert "reasoning" in refused(ask, templates.MIXTRAL, enable_thinking=True)[1]
    assert ask(templates.MIXTRAL, tools=[TOOL], enable_thinking=True)[0].endswith("<think>")
