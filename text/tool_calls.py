"""Streaming parsers of tool calls: the text between <tool_call> and </tool_call>, in one of two formats.

GLM:    name<arg_key>key</arg_key><arg_value>value</arg_value>...
Hermes: {"name": "...", "arguments": {...}}

A parser gives ("call", name) once, then ("arguments", JSON text). When it is finished, its buffer holds the text behind
the call; `is_rejected`: the text is no call (only before the first segment).
"""

import json
import re
from typing import Any

from text.stop_strings import partial_match_length
from text.stream_parser import Segment, StreamParser

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
# Hermes, up to the arguments.
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
DECODER = json.JSONDecoder()


class ToolSchemas:
    """The functions that a request offers: name -> JSON schema of its parameters."""

    def __init__(self, schemas: dict[str, dict[str, Any]]):
        self.schemas = schemas

    def argument_types(self, name: str, key: str) -> set[str]:
        """Return the JSON types that an argument may have; none where the schema does not say."""
        schema = (self.schemas[name].get("properties") or {}).get(key)
        if not isinstance(schema, dict):
            return set()
        types = schema.get("type")
        if types is None and schema.get("enum"):
            return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
        return {types} if isinstance(types, str) else {t for t in types or () if isinstance(t, str)}

    def argument_json(self, name: str, key: str, text: str) -> str:
        """Return the JSON of an argument in GLM's format, which writes strings plainly and everything else as JSON."""
        types = self.argument_types(name, key)
        if types != {"string"}:
            try:
                value = json.loads(text.strip())
                if not (types and types <= {"string", "null"}) or value is None:
                    return dump_json(value)
            except ValueError:
                pass
        return dump_json(text)


class GlmToolParser(StreamParser):
    """Parser of GLM's format. Strings are passed on as they come, other values when they are complete."""

    def __init__(self, tools: ToolSchemas):
        super().__init__(self.parse_name)
        self.tools = tools
        self.name = ""
        self.key = ""
        self.num_arguments = 0
        self.is_rejected = False
        self.is_in_string = False

    def parse_name(self, segments: list[Segment]) -> bool:
        at = self.find_tag()
        if at is None:
            name = self.buffer[: len(self.buffer) - partial_match_length(self.buffer, (KEY, CALL_END))].strip()
            is_known = any(known.startswith(name) for known in self.tools.schemas)
        else:
            name = self.buffer[:at].strip()
            is_known = name in self.tools.schemas
        self.is_finished = self.is_rejected = not is_known
        if at is None or not is_known:
            return False
        self.name = name
        segments.append(("call", name))
        return self.enter(self.parse_next, self.buffer[at:])

    def find_tag(self) -> int | None:
        """Return where the next argument or the end of the call begins."""
        return min((at for tag in (KEY, CALL_END) if (at := self.buffer.find(tag)) >= 0), default=None)

    def parse_next(self, segments: list[Segment]) -> bool:
        """Parse the tag of another argument, or the end of the call. Other text here has no meaning."""
        at = self.find_tag()
        if at is None:
            self.buffer = self.buffer[len(self.buffer) - partial_match_length(self.buffer, (KEY, CALL_END)) :]
            return False
        if self.buffer.startswith(CALL_END, at):
            self.buffer = self.buffer[at + len(CALL_END) :]
            self.is_finished = True
            segments.append(("arguments", self.closing_bracket()))
            return False
        return self.enter(self.parse_key, self.buffer[at + len(KEY) :])

    def parse_key(self, segments: list[Segment]) -> bool:
        key, tag, rest = self.buffer.partition(KEY_END)
        self.key = key.strip()
        return bool(tag) and self.enter(self.parse_value_tag, rest)

    def parse_value_tag(self, segments: list[Segment]) -> bool:
        _, tag, rest = self.buffer.partition(VALUE)
        if not tag:
            return False
        self.is_in_string = self.tools.argument_types(self.name, self.key) == {"string"}
        if self.is_in_string:
            segments.append(("arguments", f'{self.key_json()}"'))
        return self.enter(self.parse_value, rest)

    def key_json(self) -> str:
        """Return the JSON in front of a value."""
        self.num_arguments += 1
        return f"{', ' if self.num_arguments > 1 else '{'}{dump_json(self.key)}: "

    def closing_bracket(self) -> str:
        return "}" if self.num_arguments else "{}"

    def parse_value(self, segments: list[Segment]) -> bool:
        value, tag, rest = self.buffer.partition(VALUE_END)
        if self.is_in_string:
            held = 0 if tag else partial_match_length(value, (VALUE_END,))
            text = value[: len(value) - held]
            self.buffer = value[len(text) :]
            if inner := dump_json(text)[1:-1] + ('"' if tag else ""):
                segments.append(("arguments", inner))
        elif tag:
            segments.append(("arguments", self.key_json() + self.tools.argument_json(self.name, self.key, value)))
        if not tag:
            return False
        self.is_in_string = False
        return self.enter(self.parse_next, rest)

    def flush(self, is_truncated: bool) -> list[Segment]:
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

    def parse_header(self, segments: list[Segment]) -> bool:
        match = HEADER.match(self.buffer)
        # The first character of the arguments tells whether they are an object or a string.
        if match and self.buffer[match.end() :].startswith("{"):
            name = json.loads(match[1])
            if name in self.tools.schemas:
                self.name = name
                segments.append(("call", name))
                return self.enter(self.parse_arguments, self.buffer[match.end() :])
        elif CALL_END in self.buffer:
            self.parse_complete_call(segments)
            if self.name:
                return True
        elif re.match(r'\s*\{\s*("|$)', self.buffer):
            return False
        self.is_finished = self.is_rejected = True
        return False

    def parse_complete_call(self, segments: list[Segment]) -> None:
        """Parse a call with its fields in another order, or with its arguments as a string."""
        try:
            call, _ = DECODER.raw_decode(self.buffer.lstrip())
            name = call["name"]
            arguments = call.get("arguments", call.get("parameters")) or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, KeyError):
            return
        if isinstance(name, str) and name in self.tools.schemas and isinstance(arguments, dict):
            self.name = name
            self.state = self.parse_end
            segments += [("call", name), ("arguments", dump_json(arguments))]

    def parse_arguments(self, segments: list[Segment]) -> bool:
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
                    segments.append(("arguments", self.buffer[: at + 1]))
                    return self.enter(self.parse_end, self.buffer[at + 1 :])
        if self.buffer:
            segments.append(("arguments", self.buffer))
            self.buffer = ""
        return False

    def parse_end(self, segments: list[Segment]) -> bool:
        _, tag, rest = self.buffer.partition(CALL_END)
        if tag:
            self.buffer = rest
            self.is_finished = True
        return False

    def flush(self, is_truncated: bool) -> list[Segment]:
        """Return a complete call that was not closed; an incomplete one stays as it was given out."""
        segments: list[Segment] = []
        if not self.name:
            self.parse_complete_call(segments)
        return segments


def dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
