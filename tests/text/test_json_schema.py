"""JSON schemas of parameters as pydantic, zod and people write them: the types that an argument may have."""

import enum
import json
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.json_schema import ANY, NUMBER, argument_types, has_arguments
from text.reply import ReplyParser


def types(schema, **root):
    """Return the types of an argument "a" with this schema, as one text; root: keywords beside the properties."""
    return " ".join(sorted(argument_types({"type": "object", "properties": {"a": schema}} | root, "a")))


STRING = {"type": "string"}
REF = {"$ref": "#/$defs/Zip"}
ZIP = {"$defs": {"Zip": STRING}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [STRING, {"type": "null"}]}, "null string"),
        ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, "string"),
        ({"allOf": [STRING, {"minLength": 3}]}, "string"),
        ({"const": "94110"}, "string"),
        ({"const": 94110}, "integer"),
        ({"enum": ["a", None]}, "null string"),
        ({"enum": [1, 2.5, True]}, "boolean fraction integer"),
        ({"type": ["string", "null"], "enum": ["a"]}, "string"),
        ({"type": "string", "nullable": True}, "null string"),
        ({"anyOf": [{"not": {}}, STRING]}, "string"),
        ({"not": {"type": "number"}, "type": ["string", "integer"]}, "string"),
        ({"not": {"const": "x"}}, ""),
        ({"anyOf": [{"type": "array", "items": STRING}, {"anyOf": [STRING]}]}, "array string"),
        ({"allOf": [{"anyOf": [STRING, {"type": "integer"}]}, {"type": ["string", "array"]}]}, "string"),
        ({"type": "number"}, "fraction integer"),
        ({"type": "str"}, "string"),
        ({"type": "STRING"}, "string"),
        ({"type": ["Optional[str]"]}, ""),
        ({"description": "anything"}, ""),
        (True, ""),
        ({}, ""),
        ({"type": "string", "const": 1}, ""),
        ({"type": 5, "enum": 7, "anyOf": {}, "allOf": None, "$ref": [], "not": None}, ""),
    ],
)
def test_the_types_of_an_argument(schema, expected):
    assert types(schema) == expected


@pytest.mark.parametrize(
    ("schema", "root", "expected"),
    [
        (REF, ZIP, "string"),
        (REF | {"description": "beside"}, ZIP, "string"),
        ({"allOf": [REF], "default": "x"}, ZIP, "string"),
        ({"anyOf": [REF, {"type": "null"}]}, ZIP, "null string"),
        ({"$ref": "#/definitions/Zip"}, {"definitions": ZIP["$defs"]}, "string"),
        ({"$ref": "#/properties/b/items"}, {"properties": {"b": {"items": STRING}}}, "string"),
        ({"$ref": "#/$defs/a~1b%20~0/anyOf/0"}, {"$defs": {"a/b ~": {"anyOf": [STRING]}}}, "string"),
        ({"$ref": "#/$defs/Missing"}, ZIP, ""),
        ({"$ref": "https://example.org/zip.json"}, ZIP, ""),
        ({"$ref": "#zip"}, ZIP, ""),
    ],
)
def test_references(schema, root, expected):
    root = root | {"properties": root.get("properties", {}) | {"a": schema}}
    assert types(schema, **root) == expected


def test_references_without_an_end():
    """A schema may refer to itself; resolving it must end, also where every reference is met twice."""
    tree = {"$defs": {"Tree": {"anyOf": [STRING, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]}}}
    assert types({"$ref": "#/$defs/Tree"}, **tree) == "array string"
    loop = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}, STRING]}, "B": {"$ref": "#/$defs/A"}}}
    assert types({"$ref": "#/$defs/A"}, **loop) == types({"$ref": "#/$defs/B"}, **loop) == "string"
    assert types({"$ref": "#/properties/a"}) == ""
    doubled = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2, "allOf": []} for i in range(200)}
    assert types({"$ref": "#/$defs/D0"}, **{"$defs": doubled | {"D200": STRING}}) == "string"
    deep = STRING
    for _ in range(20_000):
        deep = {"anyOf": [deep]}
    assert types(deep) == ""


@pytest.mark.parametrize(
    "root",
    [
        {"$ref": "#/definitions/Input", "definitions": {"Input": {"properties": {"a": STRING}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": STRING}}]},
        {"oneOf": [{"properties": {"b": {}}}, {"$ref": "#/$defs/A"}], "$defs": {"A": {"properties": {"a": STRING}}}},
        {"properties": None, "additionalProperties": STRING},
        {"patternProperties": {"(a+)+$": STRING}, "additionalProperties": False},
    ],
)
def test_where_an_object_may_name_its_members(root):
    """zod-to-json-schema with a name writes the whole schema of the parameters as a reference."""
    assert argument_types(root, "a") == {"string"}
    assert has_arguments(root) == any("properties" in str(part).split("'") for part in root.values())


def test_a_schema_without_members():
    assert not has_arguments({}) and not has_arguments({"properties": {}, "$ref": "#"})
    assert argument_types({}, "a") == argument_types({"properties": {"b": STRING}}, "a") == frozenset()


def test_schemas_of_pydantic():
    """Field case: zip codes and dates of models in pydantic arrived as numbers."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic comes with the openai package")

    class Unit(enum.Enum):
        METER = "1"
        FOOT = "2"

    class Level(enum.IntEnum):
        LOW = 1

    class Zip(pydantic.RootModel):
        root: Annotated[str, pydantic.Field(pattern=r"\d{5}")]

    class Node(pydantic.BaseModel):
        value: str
        children: list["Node"] = []

    class Arguments(pydantic.BaseModel):
        text: str | None = None
        kind: Literal["1", "2"] = "1"
        one: Literal["1"]
        unit: Unit = pydantic.Field(Unit.METER, description="with a description")
        maybe_unit: Unit | None
        level: Level
        zip_code: Zip
        mixed: str | int
        node: Node
        blob: bytes
        anything: object
        number: float
        flags: dict[str, bool]

    schema = Arguments.model_json_schema()
    expected = {
        "text": {"string", "null"},
        **dict.fromkeys(("kind", "one", "unit", "zip_code", "blob"), frozenset({"string"})),
        "maybe_unit": {"string", "null"},
        "level": {"integer"},
        "mixed": {"string", "integer"},
        **dict.fromkeys(("node", "flags"), frozenset({"object"})),
        "anything": set(),
        "number": NUMBER,
    }
    assert {name: argument_types(schema, name) for name in expected} == expected
    assert argument_types(Node.model_json_schema(), "children") == {"array"}


@pytest.mark.parametrize(
    ("schema", "root"),
    [
        (STRING, {}),
        ({"type": ["string"]}, {}),
        ({"anyOf": [STRING, {"type": "null"}]}, {}),
        ({"oneOf": [{"const": "94110"}, {"const": "10115"}]}, {}),
        ({"allOf": [REF]}, ZIP),
        (REF, ZIP),
        ({"const": "94110"}, {}),
        ({"enum": ["94110", None]}, {}),
        ({"type": "string", "nullable": True}, {}),
        ({"anyOf": [STRING, {"type": "boolean"}]}, {}),
    ],
)
def test_a_text_of_digits_stays_a_text(schema, root):
    """Field case: GLM's "94110" became a number where the schema says text in another way than by its type."""
    tools = {"f": root | {"properties": {"zip": schema}}}
    text = "<tool_call>f<arg_key>zip</arg_key><arg_value>94110</arg_value></tool_call>"
    assert ReplyParser(tools=tools).parse_increment(text) == [("call", "f"), ("arguments", '{"zip": "94110"}')]


def test_references_that_fan_out_are_resolved_once():
    """A schema of 3 KB whose every definition refers twice to the next one took hours, in the server's event loop."""
    pair = {f"d{at}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{at + 1}"}]} for at in range(40)}
    root = {"$ref": "#/$defs/d0", "$defs": pair | {"d40": {"properties": {"zip": STRING}}}}
    assert argument_types(root, "zip") == {"string"} and has_arguments(root)
    assert argument_types({"properties": {"zip": root}, "$defs": root["$defs"]}, "zip") == set()


names = st.sampled_from(["A", "B", "C"])
schemas = st.recursive(
    st.one_of(
        st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, names),
        st.builds(lambda name: {"type": name}, st.sampled_from(sorted(ANY - {"fraction"}))),
        st.sampled_from(
            [True, False, {}, {"const": "1"}, {"enum": [1, None]}, {"$ref": "#"}, {"$ref": "#/properties/a"}]
        ),
    ),
    lambda inner: st.builds(
        lambda keyword, members: {keyword: members},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


@given(schemas, st.dictionaries(names, schemas))
def test_any_schema_is_resolved(schema, definitions):
    root = {"$defs": definitions, "properties": {"a": schema}}
    before = json.dumps(root)
    found = argument_types(root, "a")
    assert found < ANY and found == argument_types(root | {"properties": {"a": {"allOf": [schema]}}}, "a")
    assert json.dumps(root) == before
