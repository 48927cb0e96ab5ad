"""Streaming parsers of tool calls: the text between <tool_call> and </tool_call>, in one of two formats.

GLM:    name<arg_key>key</arg_key><arg_value>value</arg_value>...
Hermes: {"name": "...", "arguments": {...}}

A parser gives ("call", name) once, then ("arguments", JSON text). When it is finished, its buffer holds the text behind
the call; `is_rejected`: the text is no call (only before the first segment).
"""

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any

from text.stop_strings import split_partial_match
from text.stream_parser import StreamParser, TextSegment

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
# Hermes, up to the arguments.
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
NEXT_TAG = re.compile(f"{KEY}|{CALL_END}")  # GLM: another argument, or the end of the call
DECODER = json.JSONDecoder()
dump_json = partial(json.dumps, ensure_ascii=False)
JsonSchema = dict[str, Any]
ToolSchemas = dict[str, JsonSchema]  # of the parameters of each function that may be called


def argument_types(schema: JsonSchema, key: str) -> set[str]:
    """Return the JSON types that an argument may have; none where the schema of the parameters does not say."""
    argument = (schema.get("properties") or {}).get(key)
    if not isinstance(argument, dict):
        return set()
    types = argument.get("type")
    if types is None and argument.get("enum"):
        return {"string"} if all(isinstance(value, str) for value in argument["enum"]) else set()
    return {types} if isinstance(types, str) else {t for t in types or () if isinstance(t, str)}


def argument_json(types: set[str], text: str) -> str:
    """Return the JSON of an argument in GLM's format, which writes strings plainly and everything else as JSON."""
    with suppress(ValueError):
        value = json.loads(text.strip())
        if value is None or not types or not types <= {"string", "null"}:
            return dump_json(value)
    return dump_json(text)


class GlmToolParser(StreamParser):
    """Parser of GLM's format. Strings are passed on as they come, other values when they are complete."""

    def __init__(self, tools: ToolSchemas):
        super().__init__(self.parse_name)
        self.tools = tools
        self.name = ""
        self.key = ""
        self.types: set[str] = set()  # of the argument
        self.num_arguments = 0
        self.is_rejected = False
        self.is_in_string = False

    def parse_name(self) -> bool:
        tag = NEXT_TAG.search(self.buffer)
        if tag:
            name = self.buffer[: tag.start()].strip()
            is_known = name in self.tools
        else:
            name = split_partial_match(self.buffer, (KEY, CALL_END))[0].strip()
            is_known = any(known.startswith(name) for known in self.tools)
        self.is_finished = self.is_rejected = not is_known
        if not tag or not is_known:
            return False
        self.name = name
        self.append_segment("call", name)
        return self.enter(self.parse_next, self.buffer[tag.start() :])

    def parse_next(self) -> bool:
        """Parse the tag of another argument, or the end of the call. Other text here has no meaning."""
        tag = NEXT_TAG.search(self.buffer)
        if not tag:
            _, self.buffer = split_partial_match(self.buffer, (KEY, CALL_END))
            return False
        if tag[0] == CALL_END:
            self.is_finished = True
            self.append_segment("arguments", self.closing_bracket())
        return self.enter(self.parse_key, self.buffer[tag.end() :])

    def parse_key(self) -> bool:
        key, _, rest = self.buffer.partition(KEY_END)
        _, tag, rest = rest.partition(VALUE)
        if not tag:
            return False
        self.key = key.strip()
        self.types = argument_types(self.tools[self.name], self.key)
        self.is_in_string = self.types == {"string"}
        if self.is_in_string:
            self.append_segment("arguments", f'{self.key_json()}"')
        return self.enter(self.parse_value, rest)

    def key_json(self) -> str:
        """Return the JSON in front of a value."""
        self.num_arguments += 1
        return f"{', ' if self.num_arguments > 1 else '{'}{dump_json(self.key)}: "

    def closing_bracket(self) -> str:
        return "}" if self.num_arguments else "{}"

    def parse_value(self) -> bool:
        value, tag, rest = self.buffer.partition(VALUE_END)
        if self.is_in_string:
            text, self.buffer = (value, "") if tag else split_partial_match(value, (VALUE_END,))
            self.append_segment("arguments", dump_json(text)[1:-1] + ('"' if tag else ""))
        elif tag:
            self.append_segment("arguments", self.key_json() + argument_json(self.types, value))
        if not tag:
            return False
        self.is_in_string = False
        return self.enter(self.parse_next, rest)

    def flush(self, is_truncated: bool) -> list[TextSegment]:
        """Return the end of a call that was not closed. A truncated string stays open, without the start of a tag
        that may stand behind it."""
        if not self.name or (self.is_in_string and is_truncated):
            return []
        return [("arguments", '"}' if self.is_in_string else self.closing_bracket())]


class HermesToolParser(StreamParser):
    """Parser of the Hermes format. The arguments are passed on as they come."""

    def __init__(self, tools: ToolSchemas):
        super().__init__(self.parse_header)
        self.tools = tools
        self.name = ""
        self.is_rejected = False
        self.depth = 0  # open brackets of the arguments
        self.is_quoted = False
        self.is_escaped = False

    def parse_header(self) -> bool:
        match = HEADER.match(self.buffer)
        # The first character of the arguments tells whether they are an object or a string.
        if match and self.buffer[match.end() :].startswith("{"):
            name = json.loads(match[1])
            if name in self.tools:
                self.name = name
                self.append_segment("call", name)
                return self.enter(self.parse_arguments, self.buffer[match.end() :])
        elif CALL_END in self.buffer:
            self.parse_complete_call()
            if self.name:
                return True
        elif re.match(r'\s*\{\s*("|$)', self.buffer):
            return False
        self.is_finished = self.is_rejected = True
        return False

    def parse_complete_call(self) -> None:
        """Parse a call with its fields in another order, or with its arguments as a string."""
        try:
            call, _ = DECODER.raw_decode(self.buffer.lstrip())
            name = call["name"]
            arguments = call.get("arguments", call.get("parameters")) or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, KeyError):
            return
        if isinstance(name, str) and name in self.tools and isinstance(arguments, dict):
            self.name = name
            self.state = self.parse_end
            self.append_segment("call", name)
            self.append_segment("arguments", dump_json(arguments))

    def parse_arguments(self) -> bool:
        """Pass on the text up to the bracket that closes the first one."""
        for at, c in enumerate(self.buffer):
            if self.is_quoted:
                self.is_quoted = self.is_escaped or c != '"'
                self.is_escaped = not self.is_escaped and c == "\\"
            elif c == '"':
                self.is_quoted = True
            elif c in "{[":
                self.depth += 1
            elif c in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.append_segment("arguments", self.buffer[: at + 1])
                    return self.enter(self.parse_end, self.buffer[at + 1 :])
        self.append_segment("arguments", self.buffer)
        self.buffer = ""
        return False

    def parse_end(self) -> bool:
        _, tag, rest = self.buffer.partition(CALL_END)
        if tag:
            self.buffer = rest
            self.is_finished = True
        return False

    def flush(self, is_truncated: bool) -> list[TextSegment]:
        """Return a complete call that was not closed; an incomplete one stays as it was given out."""
        if not self.name:
            self.parse_complete_call()
        return self.take_segments()
