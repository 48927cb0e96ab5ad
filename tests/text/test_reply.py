"""Streaming parsers, with the text split anywhere: stop strings, reasoning content, tool calls, harmony."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.harmony import HarmonyParser
from text.reply import ReplyParser
from text.stop_strings import StopStrings

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {}},
    },
    "now": {"type": "object", "properties": {}},
}
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Tromsø "n" <b></arg_value>\n<arg_key>days</arg_key>'
    "<arg_value>3</arg_value>\n</tool_call>"
)
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Tromsø \\"n\\" }", "days": 3}}\n</tool_call>'


def parse(increments, is_truncated=False, parser_class=ReplyParser, **options):
    """Return {"reasoning", "content", "calls": [[name, arguments], ...]} of a text in increments."""
    parser, parsed = parser_class(**options), {"reasoning": "", "content": "", "calls": []}
    segments = [segment for increment in increments for segment in parser.parse_increment(increment)]
    for kind, text in segments + parser.flush(is_truncated):
        if kind == "call":
            parsed["calls"].append([text, ""])
        elif kind == "arguments":
            parsed["calls"][-1][1] += text
        else:
            parsed[kind] += text
    return parsed


def splits(text):
    """Return the text whole, by characters, and split in two everywhere."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


def parse_every_split(text, **options):
    """Return what is parsed, after a check that it is the same for every split."""
    parsed = [parse(increments, **options) for increments in splits(text)]
    assert all(other == parsed[0] for other in parsed)
    return parsed[0]


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("increments", "text", "is_stopped"),
    [
        (["say E", "ND more"], "say ", True),
        (["EN", "x"], "ENx", False),
        (["E", "N", "D"], "", True),
        (["EEN", "D"], "E", True),
        (["nothing", " E"], "nothing E", False),
    ],
)
def test_a_stop_string_may_span_tokens(increments, text, is_stopped):
    """Field case: tokens E and ND were sent before END was complete, and generation went on."""
    stop, out, found = StopStrings(["END"]), "", False
    for increment in increments:
        if not found:
            new, found = stop.filter_text(increment)
            out += new
    assert (out + ("" if found else stop.flush()), found) == (text, is_stopped)


@given(st.text("abx", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_by_characters_equal_the_whole_text(text, stops):
    stop, out, found = StopStrings(stops), "", False
    for c in text:
        new, found = stop.filter_text(c)
        out += new
        if found:
            break
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert not found and out + stop.flush() == text
    else:  # the first complete stop string ends the text
        end = min(ends)
        assert found and out == text[: min(text[:end].find(s) for s in stops if s in text[:end])]


# --- reasoning content ------------------------------------------------------------------------------------------------


def test_reasoning_and_content_are_separated():
    assert parse(["abc</thi", "nk>def"], reasoning="open") == {"reasoning": "abc", "content": "def", "calls": []}
    parsed = parse_every_split("\nabc < 1 </ b\n</think>\n\ndef <b>", reasoning="open")
    assert (parsed["reasoning"], parsed["content"]) == ("abc < 1 </ b", "def <b>")


def test_reasoning_without_an_end_leaves_no_content():
    parsed = parse_every_split("abc </thin", reasoning="open")
    assert (parsed["reasoning"], parsed["content"]) == ("abc </thin", "")


def test_reasoning_that_the_model_opens_itself():
    parsed = parse_every_split("<think>hm</think>yes", reasoning="maybe")
    assert (parsed["reasoning"], parsed["content"]) == ("hm", "yes")
    parsed = parse_every_split("<thin air", reasoning="maybe")
    assert (parsed["reasoning"], parsed["content"]) == ("", "<thin air")


def test_without_reasoning_and_tools_everything_is_content():
    text = " <think>a</think> < <tool_call>weather</tool_call>\n"
    assert parse_every_split(text) == {"reasoning": "", "content": text, "calls": []}


# --- tool calls -------------------------------------------------------------------------------------------------------


def test_a_tool_call_in_the_format_of_glm():
    parsed = parse_every_split(f"Let me see.\n{GLM}\n", tools=SCHEMAS)
    [[name, arguments]] = parsed["calls"]
    assert (parsed["content"], name) == ("Let me see.", "weather")
    assert json.loads(arguments) == {"city": 'Tromsø "n" <b>', "days": 3}


def test_a_tool_call_in_the_format_of_hermes():
    parsed = parse_every_split(f"Let me see. {HERMES}", tools=SCHEMAS)
    [[name, arguments]] = parsed["calls"]
    assert (parsed["content"], name) == ("Let me see.", "weather")
    assert json.loads(arguments) == {"city": 'Tromsø "n" }', "days": 3}


def test_several_tool_calls_after_reasoning():
    parsed = parse_every_split(f"hm</think>{HERMES}\n{GLM}<tool_call>now</tool_call>", reasoning="open", tools=SCHEMAS)
    assert parsed["reasoning"] == "hm" and parsed["content"] == ""
    assert [name for name, _ in parsed["calls"]] == ["weather", "weather", "now"]
    assert [set(json.loads(arguments)) for _, arguments in parsed["calls"]] == [{"city", "days"}] * 2 + [set()]


def test_one_call_ends_the_answer():
    parser = ReplyParser(tools=SCHEMAS, one_call=True)
    parser.parse_increment(GLM + HERMES)
    assert parser.is_finished and parser.num_calls == 1


def test_arguments_are_streamed():
    """A long string must not wait for its end."""
    for text in (GLM, HERMES):
        parser, seen = ReplyParser(tools=SCHEMAS), []
        for c in text[: text.index("ø") + 1]:
            seen += parser.parse_increment(c)
        assert "".join(text for kind, text in seen if kind == "arguments").endswith("Tromsø")


@pytest.mark.parametrize(
    ("value", "key", "expected"),
    [("3", "days", 3), ("3", "city", "3"), ('{"a": [1]}', "exact", {"a": [1]}), ("so so", "days", "so so")],
)
def test_the_schema_gives_the_types_of_arguments(value, key, expected):
    text = f"<tool_call>weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert json.loads(parse_every_split(text, tools=SCHEMAS)["calls"][0][1]) == {key: expected}


NULLABLE = {"f": {"properties": {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("null", None), (" null\n", None), ("nul", "nul"), ("nullable", "nullable"), ("94110", "94110"), ("", "")],
)
def test_a_text_that_may_be_null(value, expected):
    text = f"<tool_call>f<arg_key>text</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert json.loads(parse_every_split(text, tools=NULLABLE)["calls"][0][1]) == {"text": expected}


def test_a_text_that_may_be_null_is_streamed():
    """pydantic's Optional[str]: the text of a file arrived at once, when it was complete."""
    parser = ReplyParser(tools=NULLABLE)
    segments = parser.parse_increment("<tool_call>f<arg_key>text</arg_key><arg_value>null and vo")
    assert segments == [("call", "f"), ("arguments", '{"text": "null and vo')]


@pytest.mark.parametrize(
    ("types", "value", "expected"),
    [
        (["string", "integer"], "true", "true"),
        (["string", "integer"], "7", 7),
        (["string", "integer"], "7.5", "7.5"),
        (["string", "integer"], "7.0", 7),
        (["string", "boolean"], "null", "null"),
        (["string", "object"], '{"a": 1}', {"a": 1}),
        (["integer"], '"7"', "7"),
        ([], "NaN", "NaN"),
        ([], "[1e999]", "[1e999]"),
        ([], "[" * 5000, "[" * 5000),
        ([], '["\\ud800"]', ["\ud800"]),
    ],
)
def test_an_argument_is_json_only_where_the_schema_admits_its_value(types, value, expected):
    """Field case: "true" for a text or a number became a boolean. NaN made arguments that are no JSON, 5000 brackets
    ended the stream with an exception, and half a surrogate pair ended the whole answer with status 500."""
    schema = {"f": {"properties": {"a": {"type": types} if types else {}}}}
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    [[_, arguments]] = parse([text], tools=schema)["calls"]
    arguments.encode()
    assert json.loads(arguments, parse_constant=pytest.fail) == {"a": expected}


def test_a_tool_call_without_its_end_is_recovered():
    """Field case: a complete argument, and no closing tag."""
    for text in (GLM.removesuffix("</tool_call>"), HERMES.removesuffix("\n</tool_call>"), HERMES[:-14]):
        [[name, arguments]] = parse_every_split(text, tools=SCHEMAS)["calls"]
        assert name == "weather" and json.loads(arguments)["days"] == 3, text


def test_a_tool_call_with_its_fields_in_another_order():
    text = '<tool_call>{"arguments": "{\\"days\\": 2}", "name": "weather"}</tool_call>'
    assert parse_every_split(text, tools=SCHEMAS)["calls"] == [["weather", '{"days": 2}']]


WEATHER = '{"name": "weather", "arguments": {"city": "x"}}'
NOW = '{"name": "now", "arguments": "{}"}'


@pytest.mark.parametrize("separator", ["", "\n", ",\n", "}\n", "<tool_call>", "</tool_call>\n<tool_call>"])
@pytest.mark.parametrize("end", ["</tool_call>", "\n</tool_call>\n", ""])
def test_several_objects_in_one_block_are_several_calls(separator, end):
    """Field case: the second JSON object in one <tool_call> block was lost without a word, as was one behind a block
    without its closing tag."""
    parsed = parse_every_split(f"So: <tool_call>{WEATHER}{separator}{NOW}{separator}{WEATHER}{end}", tools=SCHEMAS)
    weather = ["weather", '{"city": "x"}']
    assert parsed == {"reasoning": "", "content": "So:", "calls": [weather, ["now", "{}"], weather]}
    parser = ReplyParser(tools=SCHEMAS, one_call=True)
    segments = parser.parse_increment(f"<tool_call>{WEATHER}{separator}{NOW}{end}") + parser.flush()
    assert segments == [("call", "weather"), ("arguments", '{"city": "x"}')] and parser.num_calls == 1


@pytest.mark.parametrize("separator", ["", "\n", "<tool_call>"])
def test_several_calls_in_one_block_in_the_format_of_glm(separator):
    weather = "weather<arg_key>days</arg_key><arg_value>1</arg_value>"
    parsed = parse_every_split(f"<tool_call>{weather}{separator}{weather}</tool_call> So.", tools=SCHEMAS)
    assert parsed == {"reasoning": "", "content": "So.", "calls": [["weather", '{"days": 1}']] * 2}
    parsed = parse_every_split(f"<tool_call>{weather}\nnow</tool_call>", tools=SCHEMAS)
    assert parsed["calls"] == [["weather", '{"days": 1}'], ["now", "{}"]]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (f'{WEATHER}\n{{"name": "unknown", "arguments": {{}}}}', '{"name": "unknown", "arguments": {}}'),
        (f"{WEATHER} and more <b> ", "and more <b>"),
        (f"{WEATHER}}}]", ""),
        (WEATHER[:-1], ""),
        (WEATHER.removesuffix("}") + ', "id": "1"}', ""),
    ],
)
def test_text_behind_a_call_in_its_block(block, content):
    """What is no call is content; a bracket too many or too few is nothing."""
    parsed = parse_every_split(f"<tool_call>{block}</tool_call> So.", tools=SCHEMAS)
    assert parsed["calls"] == [["weather", '{"city": "x"}']] and parsed["content"] == f"{content}So."


@pytest.mark.parametrize("name", ['"a\nb"', '"\\x"', '"' + "[" * 3000])
def test_a_name_that_is_no_json_is_content(name):
    """Seen in an audit: a line break or a wrong escape in the name of a call ended the stream with an exception."""
    text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
    assert parse([text], tools=SCHEMAS) == {"reasoning": "", "content": text, "calls": []}
    deep = '<tool_call>{"arguments": ' + '{"a":' * 3000 + "</tool_call>"
    assert parse([deep], tools=SCHEMAS)["content"] == deep


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
def test_text_about_tool_calls_is_content(text):
    parsed = parse_every_split(text, tools=SCHEMAS)
    assert parsed["calls"] == [] and parsed["content"] == text


def test_a_tool_call_that_the_prompt_begins():
    prefix = "<tool_call>weather<arg_key>"
    parsed = parse(
        ["city</arg_key><arg_value>x</arg_value></tool_call>"], tools=SCHEMAS, one_call=True, answer_prefix=prefix
    )
    assert parsed["calls"] == [["weather", '{"city": "x"}']]
    parsed = parse(
        ["nonsense"], tools=SCHEMAS, one_call=True, answer_prefix='<tool_call>\n{"name": "weather", "arguments": {'
    )
    assert parsed["calls"] == [["weather", "{nonsense"]]


def test_a_truncated_tool_call_stays_open():
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>Trom"
    assert parse([text], is_truncated=True, tools=SCHEMAS)["calls"] == [["weather", '{"city": "Trom']]
    assert parse([text], tools=SCHEMAS)["calls"] == [["weather", '{"city": "Trom"}']]


# --- harmony ----------------------------------------------------------------------------------------------------------


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
        (
            "<|start|>assistant to=weather<|channel|>analysis json<|message|>{}<|end|><|channel|>commentary to=now "
            "<|constrain|>json<|message|>{}<|call|>",
            "",
            "",
            [["weather", "{}"], ["now", "{}"]],
        ),
        (
            "<|channel|>commentary to=functions.now<|message|>{}<|call|><|start|>functions.now to=assistant<|channel|>"
            "commentary<|message|>12:00<|end|><|start|>assistant<|channel|>final<|message|>Noon.",
            "",
            "Noon.",
            [["now", "{}"]],
        ),
        ("<|channel|>final<|message|>Hi<|start|>user<|message|>You are", "", "Hi", []),
        ("<|channel|>final<|message|>Hi<|end|><|start|>functions.now to=assi", "", "Hi", []),
        ("plain text", "", "plain text", []),
        ("<|channel|>analysis<|mess", "", "", []),
    ],
)
def test_harmony_messages(text, reasoning, content, calls):
    """Field case: gpt-oss calls a tool by its bare name too (to=now), which came as content. What it writes behind a
    call in the name of the tool came as content as well."""
    expected = {"reasoning": reasoning, "content": content, "calls": calls}
    assert parse_every_split(text, parser_class=HarmonyParser, tools=SCHEMAS) == expected


def test_a_harmony_call_that_the_prompt_begins():
    prefix = " to=functions.weather<|channel|>commentary json<|message|>"
    parser = HarmonyParser(tools=SCHEMAS, one_call=True, answer_prefix=prefix)
    segments = parser.parse_increment('{"days": 1}<|call|> more')
    assert (
        segments == [("call", "weather"), ("arguments", '{"days": 1}')] and parser.is_finished and parser.num_calls == 1
    )


# --- any text ---------------------------------------------------------------------------------------------------------

FRAGMENTS = (
    """<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> { } [ ] " \\ , : <
{"name": "arguments": "weather" weather now functions. days null 1 x <|channel|> <|message|> <|start|> <|end|> <|call|>
assistant analysis to= final user""".split()
    + [" ", "\n", WEATHER, NOW, GLM, '{"name": "now", "arguments": {']
)


@pytest.mark.parametrize("parser_class", [ReplyParser, HarmonyParser])
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), is_truncated=st.booleans(), data=st.data())
def test_any_text_is_parsed_and_its_increments_do_not_matter(parser_class, parts, is_truncated, data):
    """An exception in a parser ends a stream without its last events."""
    options = {"parser_class": parser_class, "tools": SCHEMAS, "is_truncated": is_truncated}
    if parser_class is ReplyParser:
        options["reasoning"] = data.draw(st.sampled_from(["off", "maybe", "open"]))
    text = "".join(parts)
    whole = parse([text], **options)
    assert parse(parts, **options) == whole == parse(text, **options)
    assert all(name in SCHEMAS for name, _ in whole["calls"])
