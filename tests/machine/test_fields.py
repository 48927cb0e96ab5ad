"""FieldReader: what each kind of value accepts, and how a bad one is named."""

import math

import pytest

from errors import Refused
from machine.fields import FieldReader, TextFieldReader


def read(kind, value, *arguments, reader=FieldReader, **options):
    return getattr(reader({"x": value}, "a.json"), kind)("x", *arguments, **options)


@pytest.mark.parametrize(
    ("kind", "value", "arguments", "what"),
    [
        ("whole", True, (), "a whole number from 0 to 2147483648"),
        ("whole", 1.0, (), "a whole number"),
        ("whole", "1", (), "a whole number"),
        ("whole", 9, (None, 1, 8), "a whole number from 1 to 8"),
        ("whole", 0, (None, 1, math.inf), "a whole number from 1$"),
        ("number", math.nan, (), "a number from 0 to 1e\\+12"),
        ("number", math.inf, (None, 0, math.inf), "a number from 0$"),
        ("number", 10**400, (), "a number"),
        ("number", False, (), "a number"),
        ("flag", 1, (), "true or false"),
        ("text", 1, (), "a text of valid Unicode"),
        ("text", "\ud800", (), "a text of valid Unicode"),
        ("one_of", "c", (("a", "b"),), "a or b"),
        ("one_of", ["a"], (("a", "b"),), "a or b"),
        ("wholes", {}, (), "a list of whole numbers"),
    ],
)
def test_a_bad_json_value_is_refused_with_its_name_and_value(kind, value, arguments, what):
    with pytest.raises(Refused, match=rf"^a.json: x=.*: expected {what}"):
        read(kind, value, *arguments)


@pytest.mark.parametrize("value", ["1_0", " 5", "5 ", "+5", "-1", "1e3", "\u0665", "9" * 5000, ""])
def test_texts_are_whole_numbers_in_plain_digits_alone(value):
    with pytest.raises(Refused, match=r"x=.*: expected a whole number"):
        read("whole", value, reader=TextFieldReader)


@pytest.mark.parametrize("value", ["0_1", "\u0665", "nan", "inf", "1e999", "", "x"])
def test_texts_are_numbers_in_plain_digits_alone(value):
    with pytest.raises(Refused, match=r"x=.*: expected a number"):
        read("number", value, reader=TextFieldReader)


def test_good_values_and_defaults():
    assert read("whole", 3) == 3 and read("number", 3) == 3 and read("flag", False) is False
    assert read("text", "é") == "é" and read("one_of", "b", ("a", "b")) == "b" and read("wholes", [0, 7]) == [0, 7]
    assert read("whole", None, 7) == 7 and read("flag", None, None) is None and read("text", None, "") == ""
    assert read("whole", "12", reader=TextFieldReader) == 12
    assert read("number", "1.5", reader=TextFieldReader) == 1.5 and read("flag", "0", reader=TextFieldReader) is False
    with pytest.raises(Refused, match="x is missing"):
        read("whole", None)
    with pytest.raises(Refused, match=r"x\[1\]=9: expected a whole number from 0 to 8"):
        read("wholes", [1, 9], high=8)
