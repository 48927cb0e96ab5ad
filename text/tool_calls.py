"""Streaming parsers of tool calls: the text between <tool_call> and </tool_call>, in one of two formats.

GLM:    name<arg_key>key</arg_key><arg_value>value</arg_value>...
Hermes: {"name": "...", "arguments": {...}}

A parser gives ("call", name) once, then ("arguments", JSON text). When it is finished, its buffer holds the text behind
the call, with the tag if there is one; `is_rejected`: the text is no call (only before the first segment).
"""

import json
import re
from contextlib import suppress
from typing import Any

from text.json_schema import JsonSchema, Types, argument_types, value_type
from text.stop_strings import split_partial_match
from text.stream_parser import StreamParser, TextSegment

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
# Hermes, up to the arguments.
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
OBJECT_END = re.compile(f"[{{}}]|{CALL_END}|{CALL_START}")  # Hermes, behind the arguments
NAME_END = re.compile(f"{KEY}|{CALL_END}")  # GLM: behind the name
NEXT_TAG = re.compile(f"{KEY}|{CALL_END}|{CALL_START}")  # GLM: another argument, or the end of the call
DECODER = json.JSONDecoder()
ToolSchemas = dict[str, JsonSchema]  # of the parameters of each function that may be called


def dump_json(value: Any) -> str:
    """Return JSON text; ValueError for NaN and infinity. Lone surrogates, which UTF-8 cannot hold, stay escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if any("\ud800" <= c <= "\udfff" for c in text) else text


def argument_json(types: Types, text: str) -> str:
    """Return the JSON of an argument in GLM's format, which writes strings plainly and everything else as JSON."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text.strip())
        # A text in quotes is JSON only where other types were possible.
        is_plain = value_type(value) not in types or (isinstance(value, str) and types <= {"string", "null"})
        if not types or not ("string" in types and is_plain):
            return dump_json(value)
    return dump_json(text)


class GlmToolParser(StreamParser):
    """Parser of GLM's format. Strings are passed on as they come, other values when they are complete."""

    def __init__(self, tools: ToolSchemas):
        super().__init__(self.parse_name)
        self.tools = tools
        self.name = ""
        self.key = ""
        self.types: Types = frozenset()  # of the argument
        self.num_arguments = 0
        self.is_rejected = False
        self.is_in_string = False

    def parse_name(self) -> bool:
        tag = NAME_END.search(self.buffer)
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
        """Parse the tag of another argument, or the end of the call: a tag or the name of another one. Other text here
        has no meaning."""
        tag = NEXT_TAG.search(self.buffer)
        if not tag:
            return False
        is_name = self.buffer[: tag.start()].strip() in self.tools
        if tag[0] == KEY and not is_name:
            return self.enter(self.parse_key, self.buffer[tag.end() :])
        self.is_finished = True
        self.append_segment("arguments", self.closing_bracket())
        self.buffer = self.buffer[0 if is_name else tag.start() :]
        return False

    def parse_key(self) -> bool:
        key, _, rest = self.buffer.partition(KEY_END)
        _, tag, rest = rest.partition(VALUE)
        if not tag:
            return False
        self.key = key.strip()
        self.types = argument_types(self.tools[self.name], self.key)
        return self.enter(self.parse_value, rest)

    def key_json(self) -> str:
        """Return the JSON in front of a value."""
        self.num_arguments += 1
        return f"{', ' if self.num_arguments > 1 else '{'}{dump_json(self.key)}: "

    def closing_bracket(self) -> str:
        return "}" if self.num_arguments else "{}"

    def parse_value(self) -> bool:
        value, tag, rest = self.buffer.partition(VALUE_END)
        held = ""  # what may be the start of the tag
        if not tag:
            value, held = split_partial_match(value, (VALUE_END,))
        if not self.is_in_string and self.is_text(value):
            self.is_in_string = True
            self.append_segment("arguments", f'{self.key_json()}"')
        if self.is_in_string:
            self.append_segment("arguments", dump_json(value)[1:-1] + ('"' if tag else ""))
            self.buffer = held
        elif tag:
            self.append_segment("arguments", self.key_json() + argument_json(self.types, value))
        if not tag:
            return False
        self.is_in_string = False
        return self.enter(self.parse_next, rest)

    def is_text(self, value: str) -> bool:
        """Return whether a value that begins like this is a text, by its schema: one that may be null can be told from
        null."""
        if self.types == {"string", "null"}:
            return not "null".startswith(value.strip())
        return self.types == {"string"}

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
            with suppress(ValueError):
                name = json.loads(match[1])
                if name in self.tools:
                    self.name = name
                    self.append_segment("call", name)
                    return self.enter(self.parse_arguments, self.buffer[match.end() :])
        elif CALL_END in self.buffer:
            self.parse_complete_call()
            if self.name:
                return False
        elif re.match(r'\s*\{\s*("|$)', self.buffer):
            return False
        self.is_finished = self.is_rejected = True
        return False

    def parse_complete_call(self) -> None:
        """Parse a call with its fields in another order, or with its arguments as a string."""
        text = self.buffer.lstrip()
        try:
            call, end = DECODER.raw_decode(text)
            if not isinstance(call, dict):
                return
            name = call.get("name")
            arguments = call.get("arguments", call.get("parameters")) or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            arguments_json = dump_json(arguments)
        except (ValueError, RecursionError):
            return
        if isinstance(name, str) and name in self.tools and isinstance(arguments, dict):
            self.name = name
            self.is_finished = True
            self.append_segment("call", name)
            self.append_segment("arguments", arguments_json)
            self.buffer = text[end:]

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
        """Parse the bracket that closes the call; a tag or another object tells that it is missing."""
        found = OBJECT_END.search(self.buffer)
        if found:
            self.is_finished = True
            self.buffer = self.buffer[found.end() if found[0] == "}" else found.start() :]
        else:
            self.buffer = split_partial_match(self.buffer, (CALL_START, CALL_END))[1]
        return False

    def flush(self, is_truncated: bool) -> list[TextSegment]:
        """Return a complete call that was not closed; an incomplete one stays as it was given out."""
        if not self.name:
            self.parse_complete_call()
        return self.take_segments()
