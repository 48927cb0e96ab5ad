"""Arguments of earlier tool calls: objects, also where the answer was cut off or is no JSON at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.call_arguments import read_arguments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "x y', {"a": "x y"}),
        ('{"a": "x", "b', {"a": "x", "b": None}),
        ('{"a": "x", "b"', {"a": "x", "b": None}),
        ('{"a": "x", "b": ', {"a": "x", "b": None}),
        ('{"city": "x", "city', {"city": "x"}),
        ('{"a": [1, {"b": tr', {"a": [1, {"b": True}]}),
        ('{"a": 1, ', {"a": 1}),
        ('{"a": -', {"a": 0}),
        ('{"a": 1.', {"a": 1.0}),
        ('{"a": "\\', {"a": ""}),
        ('{"a": "x\\u00e', {"a": "x"}),
        ('{"a": "\\\\', {"a": "\\"}),
        ('{"a": "{[', {"a": "{["}),
        ('{"a": "x\\ud83d', {"a": "x\ufffd"}),
        ('{"a": "line\nline"}', {"a": "line\nline"}),
        ("{", {}),
        ("", {}),
        (" null", {}),
        ("[1]", {"arguments": "[1]"}),
        ("{nonsense", {"arguments": "{nonsense"}),
        ('{"a": 1}}', {"arguments": '{"a": 1}}'}),
        ("]{", {"arguments": "]{"}),
        ('{"a":' * 70, {"arguments": '{"a":' * 70}),
        ("9" * 5000, {"arguments": "9" * 5000}),
    ],
)
def test_arguments_that_were_cut_off(text, expected):
    """Field case: a call that the token limit had cut off ({"a": "x y) was refused for ever when it came back."""
    assert read_arguments(text) == expected


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4), st.booleans(), st.data())
def test_every_start_of_an_object_is_completed(value, in_ascii, data):
    text = json.dumps(value, ensure_ascii=in_ascii)
    assert read_arguments(text) == value
    cut = text[: data.draw(st.integers(0, len(text)))]
    found = read_arguments(cut)
    assert "arguments" in value or found.get("arguments") != cut
    complete = list(value.items())[: max(0, len(found) - 1)]
    assert list(found.items())[: len(complete)] == complete  # all but the last member came through whole


@given(st.text('{}[]",:\\x1 n', max_size=12))
def test_any_text_gives_an_object(text):
    found = read_arguments(text)
    assert isinstance(found, dict) and json.dumps(found, ensure_ascii=False).encode()
