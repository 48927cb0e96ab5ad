"""JSON schema of a function's parameters: the JSON types that an argument may have, as pydantic and zod write them.

$ref ($defs, definitions, any JSON pointer), allOf, anyOf, oneOf, not, const, enum, lists of types and nullable are
resolved; a schema that refers to itself ends where it began.
"""

from contextlib import suppress
from typing import Any
from urllib.parse import unquote

JsonSchema = dict[str, Any]
Types = frozenset[str]
EMPTY: Types = frozenset()
FRACTION = "fraction"  # a number that is no integer
NUMBER = frozenset({"integer", FRACTION})
ANY = NUMBER | {"null", "boolean", "object", "array", "string"}
TYPES = {name: frozenset({name}) for name in ANY} | {"number": NUMBER}
# Words of other languages, in schemas that are written by hand.
SYNONYMS = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
SYNONYMS |= {"list": "array", "none": "null"}
UNIONS = ("anyOf", "oneOf")


def argument_types(schema: JsonSchema, key: str) -> Types:
    """Return the JSON types that an argument may have; none where the schema of the parameters does not say."""
    with suppress(RecursionError):
        types = SchemaResolver(schema).argument_types(schema, key)
        if types not in (None, ANY):
            return types
    return EMPTY


def has_arguments(schema: JsonSchema) -> bool:
    """Return whether the schema of the parameters names an argument."""
    with suppress(RecursionError):
        return SchemaResolver(schema).names_argument(schema)
    return True


def value_type(value: Any) -> str:
    """Return the type of a JSON value, as of Types."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else FRACTION
    names: dict[type, str] = {str: "string", dict: "object", list: "array"}
    return "null" if value is None else names[type(value)]


class SchemaResolver:
    """Each reference is resolved once; one that is met again on its own path says nothing."""

    def __init__(self, root: JsonSchema):
        self.root = root
        self.ref_types: dict[str, Types] = {}
        self.ref_arguments: dict[tuple[str, str], Types | None] = {}
        self.seen: set[str] = set()

    def types(self, schema: Any) -> Types:
        """Return the types that a schema allows."""
        if not isinstance(schema, dict):
            return ANY if schema is not False else EMPTY
        allowed = [declared_types(schema.get("type"))]
        if isinstance(schema.get("enum"), list):
            allowed.append(frozenset(map(value_type, schema["enum"])))
        if "const" in schema:
            allowed.append(frozenset({value_type(schema["const"])}))
        ref = schema.get("$ref")
        if isinstance(ref, str):
            if ref not in self.ref_types:
                self.ref_types[ref] = EMPTY  # on this path
                self.ref_types[ref] = self.types(self.find_target(ref))
            allowed.append(self.ref_types[ref])
        allowed += [self.types(part) for part in parts(schema, "allOf")]
        for union in UNIONS:
            if members := parts(schema, union):
                allowed.append(EMPTY.union(*map(self.types, members)))
        excluded = schema.get("not")
        # zod writes undefined as {"not": {}}. Another keyword beside the type excludes only a part of its values.
        if excluded is not None and (not isinstance(excluded, dict) or set(excluded) <= {"type"}):
            allowed.append(ANY - self.types(excluded))
        types = ANY.intersection(*allowed)
        return types | {"null"} if schema.get("nullable") is True else types

    def argument_types(self, schema: Any, key: str) -> Types | None:
        """Return the types of an argument; None where the schema of an object does not mention it."""
        if not isinstance(schema, dict):
            return None
        named = named_schema(schema, key)
        found = [None if named is None else self.types(named)]
        ref = schema.get("$ref")
        if isinstance(ref, str):
            if (ref, key) not in self.ref_arguments:
                self.ref_arguments[ref, key] = None  # on this path
                self.ref_arguments[ref, key] = self.argument_types(self.find_target(ref), key)
            found.append(self.ref_arguments[ref, key])
        found += [self.argument_types(part, key) for part in parts(schema, "allOf")]
        for union in UNIONS:
            members = [self.argument_types(part, key) for part in parts(schema, union)]
            if mentioned := [types for types in members if types is not None]:
                found.append(EMPTY.union(*mentioned))
        known = [types for types in found if types is not None]
        return ANY.intersection(*known) if known else None

    def names_argument(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return False
        if isinstance(schema.get("properties"), dict) and schema["properties"]:
            return True
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in self.seen:
            self.seen.add(ref)
            if self.names_argument(self.find_target(ref)):
                return True
        return any(self.names_argument(part) for name in ("allOf", *UNIONS) for part in parts(schema, name))

    def find_target(self, ref: str) -> Any:
        """Return what a reference of the form #/a/b points to; True, which says nothing, if there is no such place."""
        document, _, pointer = ref.partition("#")
        target: Any = self.root
        for name in pointer.split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                return True
        return target if not document and pointer[:1] in ("", "/") else True


def declared_types(value: Any) -> Types:
    """Return the types that the keyword type stands for: a word, or a list of words."""
    words = [word.lower() for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    return EMPTY.union(*(TYPES.get(SYNONYMS.get(word, word), ANY) for word in words)) if words else ANY


def parts(schema: JsonSchema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def named_schema(schema: JsonSchema, key: str) -> Any:
    """Return the schema that an object's own keywords give for one of its members; None if they do not mention it."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    patterns = schema.get("patternProperties")  # not matched: a pattern of a stranger can take forever
    members = list(patterns.values()) if isinstance(patterns, dict) else []
    members += [more] if isinstance(more := schema.get("additionalProperties"), dict) else []
    return {"anyOf": members} if members else None
