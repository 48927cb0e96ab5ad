"""The text of an answer, cut into pieces at any place: stop strings, thoughts, tool calls of both forms."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.harmony import HarmonyParser
from text.reply import ReplyParser
from text.stop_strings import StopStrings
from text.tool_calls import ToolSchemas

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {}},
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS = ToolSchemas(SCHEMAS)
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Tromsø "n" <b></arg_value>\n<arg_key>days</arg_key>'
    "<arg_value>3</arg_value>\n</tool_call>"
)
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Tromsø \\"n\\" }", "days": 3}}\n</tool_call>'


def read(pieces, is_cut=False, make=ReplyParser, **options):
    """-> {"reasoning", "content", "calls": [[name, arguments], ...]} of a text in pieces."""
    reader, got = make(**options), {"reasoning": "", "content": "", "calls": []}
    for kind, text in [p for piece in pieces for p in reader.push(piece)] + reader.finish(is_cut):
        if kind == "call":
            got["calls"].append([text, ""])
        elif kind == "arguments":
            got["calls"][-1][1] += text
        else:
            got[kind] += text
    return got


def cuts(text):
    """The text whole, by characters, and cut in two everywhere."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


def read_alike(text, **options):
    """The same for every way to cut it -> what was read."""
    found = [read(pieces, **options) for pieces in cuts(text)]
    assert all(other == found[0] for other in found)
    return found[0]


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "text", "stops"),
    [
        (["say E", "ND more"], "say ", True),
        (["EN", "x"], "ENx", False),
        (["E", "N", "D"], "", True),
        (["EEN", "D"], "E", True),
        (["nothing", " E"], "nothing E", False),
    ],
)
def test_a_stop_string_may_span_tokens(pieces, text, stops):
    """Field case: tokens E and ND were given out before END was seen, and the text ran on."""
    stop, out, found = StopStrings(["END"]), "", False
    for piece in pieces:
        if not found:
            new, found = stop.push(piece)
            out += new
    assert (out + ("" if found else stop.finish()), found) == (text, stops)


@given(st.text("abx", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_by_characters_equal_the_whole_text(text, stops):
    stop, out, found = StopStrings(stops), "", False
    for c in text:
        new, found = stop.push(c)
        out += new
        if found:
            break
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert not found and out + stop.finish() == text
    else:  # what is complete first ends the text
        end = min(ends)
        assert found and out == text[: min(text[:end].find(s) for s in stops if s in text[:end])]


# --- thoughts ---------------------------------------------------------------------------------------------------------


def test_thoughts_and_content_come_apart():
    assert read(["abc</thi", "nk>def"], thinking="open") == {"reasoning": "abc", "content": "def", "calls": []}
    got = read_alike("\nabc < 1 </ b\n</think>\n\ndef <b>", thinking="open")
    assert (got["reasoning"], got["content"]) == ("abc < 1 </ b", "def <b>")


def test_thoughts_that_never_end_are_all_there_is():
    got = read_alike("abc </thin", thinking="open")
    assert (got["reasoning"], got["content"]) == ("abc </thin", "")


def test_thoughts_that_the_model_opens_itself():
    got = read_alike("<think>hm</think>yes", thinking="maybe")
    assert (got["reasoning"], got["content"]) == ("hm", "yes")
    got = read_alike("<thin air", thinking="maybe")
    assert (got["reasoning"], got["content"]) == ("", "<thin air")


def test_without_thoughts_and_tools_every_sign_is_text():
    text = " <think>a</think> < <tool_call>weather</tool_call>\n"
    assert read_alike(text) == {"reasoning": "", "content": text, "calls": []}


# --- tool calls -------------------------------------------------------------------------------------------------------


def test_a_call_in_the_form_of_glm():
    got = read_alike(f"Let me see.\n{GLM}\n", tools=TOOLS)
    [[name, arguments]] = got["calls"]
    assert (got["content"], name) == ("Let me see.", "weather")
    assert json.loads(arguments) == {"city": 'Tromsø "n" <b>', "days": 3}


def test_a_call_in_the_form_of_hermes():
    got = read_alike(f"Let me see. {HERMES}", tools=TOOLS)
    [[name, arguments]] = got["calls"]
    assert (got["content"], name) == ("Let me see.", "weather")
    assert json.loads(arguments) == {"city": 'Tromsø "n" }', "days": 3}


def test_several_calls_after_thoughts():
    got = read_alike(f"hm</think>{HERMES}\n{GLM}<tool_call>now</tool_call>", thinking="open", tools=TOOLS)
    assert got["reasoning"] == "hm" and got["content"] == ""
    assert [name for name, _ in got["calls"]] == ["weather", "weather", "now"]
    assert [set(json.loads(arguments)) for _, arguments in got["calls"]] == [{"city", "days"}] * 2 + [set()]


def test_the_first_call_alone():
    reader = ReplyParser(tools=TOOLS, one_call=True)
    reader.push(GLM + HERMES)
    assert reader.is_over and reader.num_calls == 1


def test_arguments_are_streamed_while_they_come():
    """A long text must not wait for its end: a client sees it grow."""
    for text in (GLM, HERMES):
        reader, seen = ReplyParser(tools=TOOLS), []
        for c in text[: text.index("ø") + 1]:
            seen += reader.push(c)
        assert "".join(text for kind, text in seen if kind == "arguments").endswith("Tromsø")


@pytest.mark.parametrize(
    ("value", "key", "read_as"),
    [("3", "days", 3), ("3", "city", "3"), ('{"a": [1]}', "exact", {"a": [1]}), ("so so", "days", "so so")],
)
def test_the_schema_gives_the_types(value, key, read_as):
    text = f"<tool_call>weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert json.loads(read_alike(text, tools=TOOLS)["calls"][0][1]) == {key: read_as}


def test_a_call_whose_end_is_missing_is_recovered():
    """Field case: a complete argument, and no closing tag."""
    for text in (GLM.removesuffix("</tool_call>"), HERMES.removesuffix("\n</tool_call>"), HERMES[:-14]):
        [[name, arguments]] = read_alike(text, tools=TOOLS)["calls"]
        assert name == "weather" and json.loads(arguments)["days"] == 3, text


def test_a_call_in_another_order():
    text = '<tool_call>{"arguments": "{\\"days\\": 2}", "name": "weather"}</tool_call>'
    assert read_alike(text, tools=TOOLS)["calls"] == [["weather", '{"days": 2}']]


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> before the name.",
        "Write <tool_call> and then </tool_call>, like this.",
        "<tool_call>unknown<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>{not json}</tool_call> and more",
        "<tool_call>weather",
        "ends with <tool_ca",
        '<tool_call>{"name": "weather", "argu',
    ],
)
def test_prose_about_calls_is_no_call(text):
    got = read_alike(text, tools=TOOLS)
    assert got["calls"] == [] and got["content"] == text


def test_a_call_that_was_begun_for_the_model():
    begun = "<tool_call>weather<arg_key>"
    got = read(["city</arg_key><arg_value>x</arg_value></tool_call>"], tools=TOOLS, one_call=True, begun=begun)
    assert got["calls"] == [["weather", '{"city": "x"}']]
    got = read(["nonsense"], tools=TOOLS, one_call=True, begun='<tool_call>\n{"name": "weather", "arguments": {')
    assert got["calls"] == [["weather", "{nonsense"]]


def test_a_text_that_was_cut_off_stays_open():
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>Trom"
    assert read([text], is_cut=True, tools=TOOLS)["calls"] == [["weather", '{"city": "Trom']]
    assert read([text], tools=TOOLS)["calls"] == [["weather", '{"city": "Trom"}']]


# --- gpt-oss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (
            "<|channel|>analysis<|message|>hm <b<|end|><|start|>assistant<|channel|>final<|message|>Hello <| there",
            "hm <b",
            "Hello <| there",
            [],
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            '<|constrain|>json<|message|>{"city": "Rome"}<|call|>',
            "hm",
            "",
            [["weather", '{"city": "Rome"}']],
        ),
        (
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|><|start|>assistant "
            "to=functions.unknown<|channel|>commentary<|message|>?",
            "",
            "?",
            [["now", "{}"]],
        ),
        ("plain text", "", "plain text", []),
        ("<|channel|>analysis<|mess", "", "", []),
    ],
)
def test_messages_of_gpt_oss(text, reasoning, content, calls):
    expected = {"reasoning": reasoning, "content": content, "calls": calls}
    assert read_alike(text, make=HarmonyParser, tools=TOOLS) == expected


def test_a_call_of_gpt_oss_that_was_begun_for_the_model():
    begun = " to=functions.weather<|channel|>commentary json<|message|>"
    reader = HarmonyParser(tools=TOOLS, one_call=True, begun=begun)
    pieces = reader.push('{"days": 1}<|call|> more')
    assert pieces == [("call", "weather"), ("arguments", '{"days": 1}')] and reader.is_over and reader.num_calls == 1
