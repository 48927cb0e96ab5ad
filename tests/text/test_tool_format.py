"""The format of tool calls, found by reading back a call that a chat template rendered."""

import pytest

from tests.support import templates
from text.chat_template import ChatTemplate
from text.tool_format import ToolFormat

HERMES_START = '<tool_call>\n{"name": "%s", "arguments": {'
HARMONY_START = " to=functions.%s<|channel|>commentary json<|message|>"
STARTS = {
    "GLM_5_2": ("glm", "<tool_call>%s<arg_key>"),
    "GLM_4_5": ("glm", "<tool_call>%s\n<arg_key>"),
    "HERMES": ("hermes", HERMES_START),
    "GPT_OSS": ("harmony", HARMONY_START),
}


def compiled(source):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", STARTS)
def test_the_format_and_the_start_of_a_call(name):
    """Field case: a forced call began in the wrong form, or without the line break that the model was trained on."""
    format_name, start = STARTS[name]
    found = compiled(getattr(templates, name)).tool_format
    assert found and found.name == format_name
    assert found.call_prefix("weather") == start.replace("%s", "weather")
    assert found.call_prefix(None) == start.partition("%s")[0]
    without = found.call_prefix("now", has_arguments=False)
    assert without == ("<tool_call>now</tool_call>" if format_name == "glm" else start.replace("%s", "now"))


@pytest.mark.parametrize("name", templates.unread_forms)
def test_forms_that_no_parser_reads(name):
    """Field case: Qwen3-Coder's template was taken for Hermes, because both write <tool_call>."""
    template = compiled(getattr(templates, name))
    assert template.writes_tools and template.tool_format is None
    assert template.call_example.startswith(templates.unread_forms[name])


@pytest.mark.parametrize("name", ["MIXTRAL", "GLM_5_3", "QWEN_3_8"])
def test_templates_without_calls(name):
    template = compiled(getattr(templates, name))
    assert template.tool_format is None and not template.writes_tools
    assert "probe" not in template.call_example


def test_templates_that_write_the_call_in_another_order():
    """A format is read in any order of its fields and a tool by its name alone; what the template writes first is no
    start of a forced call then."""
    source = templates.with_calls(
        '<tool_call>{"arguments": {{ call.arguments | tojson }}, "name": "{{ call.name }}"}</tool_call>'
    )
    assert compiled(source).tool_format.call_prefix("f") == HERMES_START.replace("%s", "f")
    call = (
        "<|start|>assistant<|channel|>commentary to={{ call.name }} json<|message|>{{ call.arguments | tojson }}<|end|>"
    )
    found = compiled(templates.with_calls(call)).tool_format
    assert found == ToolFormat("harmony", "<|channel|>commentary to=probe_0 json<|message|>")


def test_a_name_is_json_in_the_format_of_hermes():
    assert compiled(templates.HERMES).tool_format.call_prefix('a"b') == HERMES_START.replace("%s", 'a\\"b')
