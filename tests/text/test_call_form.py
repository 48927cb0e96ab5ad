"""Tools and tool calls in the forms that published chat templates read, found by rendering."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import templates
from text.chat_template import ChatTemplate

ARGUMENTS = {"city": "Köln", "days": [1, 2.5], "exact": None}
JSON_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)


def compiled(source):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def call(name="weather", arguments=ARGUMENTS):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(**fields):
    answer = {"role": "assistant", "content": "", "tool_calls": [call()]} | fields
    return [{"role": "user", "content": "Hi"}, answer, {"role": "tool", "tool_call_id": "c1", "content": "wet"}]


def tool(**function):
    return {"type": "function", "function": {"name": "weather"} | function}


CALLS = {
    "GLM_5_2": "weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
    "<arg_value>[1, 2.5]</arg_value><arg_key>exact</arg_key><arg_value>null</arg_value>",
    "GPT_OSS": f" to=functions.weather<|channel|>commentary json<|message|>{JSON_ARGUMENTS}<|call|>",
    "DEEPSEEK_R1": f"<call>function<sep>weather\n{JSON_ARGUMENTS}</call>",
    "DEEPSEEK_V3_1": f"<call>weather<sep>{JSON_ARGUMENTS}</call>",
    "QWEN_3": f'{{"name": "weather", "arguments": {JSON_ARGUMENTS}}}',
    "PYTHON_PRINTER": f"weather {JSON_ARGUMENTS}",
}


@pytest.mark.parametrize("name", CALLS)
def test_the_arguments_of_calls_in_the_form_that_a_template_reads(name):
    """Field case: status 400, 'can only concatenate str (not "dict") to str', for the second turn of every tool call
    with DeepSeek's template, which joins the arguments as text. One that prints them showed {'city': ...} to the
    model, and the oldest one left the call out where the content was "" and not null."""
    assert CALLS[name] in compiled(getattr(templates, name)).render(conversation())


def test_the_form_is_found_once_and_only_for_calls():
    template = compiled(templates.DEEPSEEK_R1)
    template.render([{"role": "user", "content": "Hi"}])
    assert "call_form" not in vars(template)
    template.render(conversation())
    assert vars(template)["call_form"] == template.call_form


def test_a_message_stays_as_it_came_where_the_template_reads_it():
    """Texts equal those of transformers: nothing is added to a tool, and no form is changed without need."""
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"
    messages, tools = conversation(), [tool()]
    text = compiled(source).render(messages, tools)
    assert text == "".join(json.dumps(message, ensure_ascii=False) for message in messages) + json.dumps(tools)


BAD_TOOLS = [
    tool(),
    tool(description=None, parameters=None),
    tool(description="d", parameters={"type": "object"}),
    tool(description="d", parameters={"properties": {"level": {"type": "integer", "enum": [1, 2], "default": 1}}}),
    tool(parameters={"properties": {"level": {"type": "string", "enum": [1, None, "x"], "default": None}}}),
    tool(parameters={"properties": {"any": {"oneOf": [{"type": "number", "description": 5}], "default": {"a": 1}}}}),
    tool(parameters={"properties": {"default": {"type": "string"}, "enum": {"type": "array", "items": {}}}}),
]


@pytest.mark.parametrize("bad_tool", BAD_TOOLS)
def test_a_tool_without_optional_parts_or_with_numbers_in_an_enum(bad_tool):
    """Field case: status 400 from inside the template of gpt-oss for a tool without a description, or with an enum of
    numbers and a default."""
    text = compiled(templates.GPT_OSS).render([{"role": "user", "content": "Hi"}], [bad_tool])
    assert "type weather = (_: {" in text
    for name, spec in ((bad_tool["function"].get("parameters") or {}).get("properties") or {}).items():
        assert f"{name}: " in text
        assert "default" not in spec or "// default: " in text


schemas = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["string", "integer", "boolean", "array", "null"]),
            "description": st.sampled_from(["x", "", None]),
            "enum": st.lists(st.sampled_from([1, "a", None, True, 2.5]), max_size=3),
            "default": st.sampled_from([1, "a", None, [], {}, False]),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "items": inner,
            "oneOf": st.lists(inner, max_size=2),
            "properties": st.dictionaries(st.sampled_from(["a", "items", "default", "enum"]), inner, max_size=3),
        },
    ),
    max_leaves=6,
)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["a", "b", "description"]), schemas, max_size=3), st.booleans())
def test_any_schema_is_rendered(properties, has_description):
    tools = [tool(parameters={"properties": properties}, **({"description": "d"} if has_description else {}))]
    before = json.dumps(tools)
    for source in (templates.GPT_OSS, templates.GLM_5_2):
        text = compiled_once(source).render([{"role": "user", "content": "Hi"}], tools)
        assert all(name in text for name in properties)
    assert json.dumps(tools) == before


COMPILED = {}


def compiled_once(source):
    return COMPILED.setdefault(source, compiled(source))


def test_reasoning_and_a_text_beside_a_call():
    """Field case: gpt-oss answered with reasoning, a preamble and a call; sent back as history it was refused for ever,
    since its template takes one of the two."""
    text = compiled(templates.GPT_OSS).render(conversation(content="I look.", reasoning_content="Rain?"))
    assert "<|channel|>analysis<|message|>Rain?\n\nI look.<|end|>" in text
    alone = compiled(templates.GPT_OSS).render(conversation(reasoning_content="Rain?"))
    assert "<|channel|>analysis<|message|>Rain?<|end|>" in alone


def test_an_empty_answer():
    """Field case: an answer that was cut off while the model reasoned was refused for ever by Ministral's template."""
    source = "{% for m in messages %}{{ m.content or raise_exception('no content') }}{% endfor %}"
    empty = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    question = {"role": "user", "content": "Hi"}
    assert compiled(source).render([question, empty, question]) == "Hi Hi"


def test_a_type_that_may_be_null():
    """Field case: Hermes' template recursed without an end for ["string", "null"], as zod writes optional texts."""
    source = """\
{%- macro kind(type) -%}
{{ type if type in ('string', 'integer') else '' }}{% if type not in ('string', 'integer') %}
{%- for t in type %}{{ kind(t) }}/{% endfor %}{% endif %}
{%- endmacro -%}
{%- for spec in tools[0].function.parameters.properties.values() %}{{ kind(spec.type) }};{% endfor %}"""
    properties = {"a": {"type": ["string", "null"]}, "b": {"type": ["string", "integer"]}, "c": {"type": ["string"]}}
    assert (
        compiled(source).render([], [tool(parameters={"properties": properties})]) == "string;string/integer/;string;"
    )


def test_the_first_error_of_a_template_is_kept():
    with pytest.raises(Exception, match="roles must alternate"):
        compiled(templates.MIXTRAL).render([{"role": "user", "content": "a"}] * 2, [tool()])


CALLING = {"role": "assistant", "content": "", "tool_calls": [call()]}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "wet", "tool_call_id": "c1"}
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}{# developer #}"


@pytest.mark.parametrize(
    ("name", "message", "lost"),
    [
        *(("GLM_5_2", CALLING | {"content": content}, None) for content in ("", "x")),
        ("GLM_5_2", CALLING | {"tool_calls": [call()] * 2}, None),
        ("GPT_OSS", CALLING, None),
        ("GPT_OSS", CALLING | {"tool_calls": [call()] * 2}, "tool_calls"),
        ("DEEPSEEK_R1", CALLING | {"tool_calls": [call()] * 2}, None),
        ("DEEPSEEK_R1", CALLING | {"content": "x"}, "tool_calls"),
        ("GLM_5_3", CALLING, "tool_calls"),
        ("QWEN_3", SYSTEM, None),
        (NO_SYSTEM, SYSTEM, "content"),
        (NO_SYSTEM, RESULT, None),
        ("MIXTRAL", RESULT, None),  # it fails, which is said then
        ("MIXTRAL", {"role": "user", "content": "x"}, None),
    ],
)
def test_parts_of_messages_that_a_template_leaves_out(name, message, lost):
    template = compiled(getattr(templates, name, name))
    assert template.lost_part(message) == lost
    assert template.lost_part({"role": "assistant", "content": "x"}) is None


def test_developer_messages_and_tools_that_a_template_writes():
    """The word developer somewhere in a template's source, in a comment or a sentence, is not its role."""
    of = {name: compiled(source) for name, source in [("none", NO_SYSTEM), ("gpt-oss", templates.GPT_OSS)]}
    assert not of["none"].knows_developer and not of["none"].writes_tools
    named = "{% for m in messages if m.role == 'developer' %}{{ m.content }}{% endfor %}{{ 'You are a developer' }}"
    assert compiled(named).knows_developer and not compiled(named.replace("'developer'", "'user'")).knows_developer
    assert of["gpt-oss"].writes_tools and compiled(templates.GLM_5_2).writes_tools
