"""Tool calls in a model's text, read as they come: what stands between <tool_call> and </tool_call>.

GLM:    name<arg_key>key</arg_key><arg_value>value</arg_value>...
Hermes: {"name": "...", "arguments": {...}}

Each form is read by a class with push(text) and finish(is_cut) -> pieces, a piece being ("call", name) once and then
("arguments", JSON text). `is_rejected`: this is no call, its text is prose (only before the first piece). `rest`: the
text behind the call, once `is_closed`.
"""

import json
import re

from text.stop_strings import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
# Hermes, up to the arguments.
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
DECODER = json.JSONDecoder()


class ToolSchemas:
    """The functions that a request offers: name -> JSON schema of its parameters."""

    def __init__(self, schemas):
        self.schemas = schemas

    def types(self, name, key):
        """The JSON types that an argument may have; none where the schema does not say."""
        schema = (self.schemas[name].get("properties") or {}).get(key) or {}
        types = schema.get("type") if isinstance(schema, dict) else None
        if types is None and isinstance(schema, dict) and schema.get("enum"):
            return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
        return {types} if isinstance(types, str) else {t for t in types or () if isinstance(t, str)}

    def value(self, name, key, text):
        """An argument as GLM writes it -> its JSON: texts stand there plainly, everything else as JSON."""
        types = self.types(name, key)
        if types != {"string"}:
            try:
                value = json.loads(text.strip())
                if not (types and types <= {"string", "null"}) or value is None:
                    return dump(value)
            except ValueError:
                pass
        return dump(text)


class ToolCallParser:
    """Waits for the first character, which tells the form."""

    def __init__(self, tools):
        self.tools, self.form, self.raw = tools, None, ""

    def push(self, text):
        self.raw += text
        if self.form:
            return self.form.push(text)
        start = self.raw.lstrip()
        if not start:
            return []
        self.form = (HermesToolParser if start.startswith("{") else GlmToolParser)(self.tools)
        return self.form.push(self.raw)

    def finish(self, is_cut):
        return self.form.finish(is_cut) if self.form else []

    @property
    def is_rejected(self):
        return bool(self.form) and self.form.is_rejected

    @property
    def is_closed(self):
        return bool(self.form) and self.form.is_closed

    @property
    def is_begun(self):
        """Whether a piece has been given: then it is a call, whatever comes."""
        return bool(self.form) and self.form.name is not None

    @property
    def rest(self):
        return self.form.rest


class GlmToolParser:
    """Texts are passed on as they come, other values when they are whole."""

    def __init__(self, tools):
        self.tools, self.rest, self.stage = tools, "", self.read_name
        self.name = self.key = None
        self.num_arguments, self.is_closed, self.is_rejected, self.is_in_text = 0, False, False, False

    def push(self, text):
        self.rest, pieces = self.rest + text, []
        while not (self.is_closed or self.is_rejected) and self.stage(pieces):
            pass
        return pieces

    def read_name(self, pieces):
        """A name of a tool, then the first argument or the end. Each stage tells whether the next may go on."""
        at = min((at for tag in (KEY, CLOSE) if (at := self.rest.find(tag)) >= 0), default=None)
        if at is None:
            name = self.rest[: len(self.rest) - overlap(self.rest, (KEY, CLOSE))].strip()
            self.is_rejected = not any(known.startswith(name) for known in self.tools.schemas)
            return False
        name = self.rest[:at].strip()
        if name not in self.tools.schemas:
            self.is_rejected = True
            return False
        self.begin(name, pieces)
        self.rest, self.stage = self.rest[at:], self.read_next
        return True

    def begin(self, name, pieces):
        self.name = name
        pieces.append(("call", name))

    def read_next(self, pieces):
        """Another argument, or the end; what else stands here has no meaning."""
        at = min((at for tag in (KEY, CLOSE) if (at := self.rest.find(tag)) >= 0), default=None)
        if at is None:
            self.rest = self.rest[len(self.rest) - overlap(self.rest, (KEY, CLOSE)) :]
            return False
        if self.rest.startswith(CLOSE, at):
            self.rest, self.is_closed = self.rest[at + len(CLOSE) :], True
            pieces.append(("arguments", "}" if self.num_arguments else "{}"))
            return False
        self.rest, self.stage = self.rest[at + len(KEY) :], self.read_key
        return True

    def read_key(self, pieces):
        key, tag, rest = self.rest.partition(KEY_END)
        if tag:
            self.key, self.rest, self.stage = key.strip(), rest, self.read_value_tag
        return bool(tag)

    def read_value_tag(self, pieces):
        _, tag, rest = self.rest.partition(VALUE)
        if not tag:
            return False
        self.rest, self.stage = rest, self.read_value
        self.is_in_text = self.tools.types(self.name, self.key) == {"string"}
        if self.is_in_text:
            pieces.append(("arguments", f'{self.lead()}"'))
        return True

    def lead(self):
        """What stands before a value."""
        self.num_arguments += 1
        return f"{', ' if self.num_arguments > 1 else '{'}{dump(self.key)}: "

    def read_value(self, pieces):
        value, tag, rest = self.rest.partition(VALUE_END)
        if self.is_in_text:
            held = 0 if tag else overlap(value, (VALUE_END,))
            text = value[: len(value) - held]
            self.rest = rest if tag else value[len(text) :]
            if inner := dump(text)[1:-1] + ('"' if tag else ""):
                pieces.append(("arguments", inner))
        elif tag:
            pieces.append(("arguments", self.lead() + self.tools.value(self.name, self.key, value)))
            self.rest = rest
        if tag:
            self.is_in_text, self.stage = False, self.read_next
        return bool(tag)

    def finish(self, is_cut):
        """The text ended inside the call. What is complete of it counts; a text that was cut off stays open, without
        the piece of a tag that may stand behind it."""
        if self.name is None:
            self.is_rejected = True
            return []
        if self.is_in_text:
            return [] if is_cut else [("arguments", '"}')]
        return [("arguments", "}" if self.num_arguments else "{}")]


class HermesToolParser:
    """The arguments are passed on as they come."""

    def __init__(self, tools):
        self.tools, self.rest, self.name = tools, "", None
        self.is_closed = self.is_rejected = self.is_over = False  # is_over: the arguments are
        self.depth, self.is_quoted, self.is_escaped = 0, False, False

    def push(self, text):
        self.rest, pieces = self.rest + text, []
        if self.name is None:
            self.read_header(pieces)
        if self.name is not None and not self.is_over:
            self.read_arguments(pieces)
        if self.is_over and CLOSE in self.rest:
            self.rest, self.is_closed = self.rest.partition(CLOSE)[2], True
        return pieces

    def read_header(self, pieces):
        match = HEADER.match(self.rest)
        # Not before its first character is there: what kind of value it is decides how it is read.
        if match and self.rest[match.end() :].startswith("{"):
            name = json.loads(match[1])
            if name in self.tools.schemas:
                self.name, self.rest = name, self.rest[match.end() :]
                pieces.append(("call", name))
            else:
                self.is_rejected = True
        elif CLOSE in self.rest:
            self.read_whole(pieces)
        elif not re.match(r'\s*\{\s*("|$)', self.rest):
            self.is_rejected = True

    def read_whole(self, pieces):
        """A call in another order, or with its arguments as a text: read when all of it is there."""
        try:
            call, _ = DECODER.raw_decode(self.rest.lstrip())
            name = call["name"]
            arguments = call.get("arguments", call.get("parameters")) or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, KeyError):
            name = arguments = None
        if not isinstance(name, str) or name not in self.tools.schemas or not isinstance(arguments, dict):
            self.is_rejected = True
            return
        self.name, self.is_over = name, True
        pieces += [("call", name), ("arguments", dump(arguments))]

    def read_arguments(self, pieces):
        """Up to the bracket that closes the first one."""
        for at, c in enumerate(self.rest):
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
                    pieces.append(("arguments", self.rest[: at + 1]))
                    self.rest, self.is_over = self.rest[at + 1 :], True
                    return
        if self.rest:
            pieces.append(("arguments", self.rest))
            self.rest = ""

    def finish(self, is_cut):
        """The text ended inside the call: a whole object is a call, a piece of one that is under way stays a piece."""
        pieces = []
        if self.name is None:
            self.read_whole(pieces)
        return pieces


def dump(value):
    return json.dumps(value, ensure_ascii=False)
