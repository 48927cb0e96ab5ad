"""ToolFormat: the format in which a chat template writes tool calls, found by reading back a call that it rendered.

Formats share tags: behind <tool_call> stands JSON in one, XML of two kinds in others. A parser that reads the call of
a template knows its format; no tag alone tells it.
"""

import json
from dataclasses import dataclass

from text.call_form import PROBE_ARGUMENTS
from text.harmony import CHANNEL, MESSAGE, START, HarmonyParser, is_harmony
from text.stream_parser import StreamParser
from text.tool_calls import CALL_END, CALL_START, KEY, GlmToolParser, HermesToolParser, ToolSchemas, dump_json

# The call that is rendered.
NAME, [(ARGUMENT, VALUE)] = "probe_0", PROBE_ARGUMENTS.items()
SCHEMAS: ToolSchemas = {NAME: {}}
# The usual starts of calls, for templates that write the arguments before the name.
STARTS = {
    "glm": CALL_START + NAME + KEY,
    "hermes": f'{CALL_START}\n{{"name": "{NAME}", "arguments": {{',
    "harmony": f" to=functions.{NAME}{CHANNEL}commentary json{MESSAGE}",
}


@dataclass(frozen=True)
class ToolFormat:
    """name: glm, hermes or harmony. start: of the rendered call, up to its first argument."""

    name: str
    start: str

    def call_prefix(self, name: str | None, has_arguments: bool = True) -> str:
        """Return the start of a call of a function, or of one that the model chooses."""
        before, _, behind = (self.start if NAME in self.start else STARTS[self.name]).partition(NAME)
        if name is None:
            return before
        if self.name == "glm" and not has_arguments:
            behind = CALL_END
        return before + (dump_json(name)[1:-1] if self.name == "hermes" else name) + behind


def find_tool_format(text: str, source: str) -> ToolFormat | None:
    """Return the format of the call in a text that a chat template rendered; None if no parser reads it."""
    if is_harmony(source):
        if not reads_call(HarmonyParser(SCHEMAS), text):
            return None
        at = text.index(VALUE)
        header = text[text.rindex(START, 0, at) + len(START) : text.rindex(MESSAGE, 0, at) + len(MESSAGE)]
        return ToolFormat("harmony", header.removeprefix("assistant"))
    for call in text.split(CALL_START)[1:]:
        if reads_call(GlmToolParser(SCHEMAS), call):
            return ToolFormat("glm", CALL_START + call[: call.index(KEY) + len(KEY)])
        if reads_call(HermesToolParser(SCHEMAS), call):
            return ToolFormat("hermes", CALL_START + call[: call.rindex("{", 0, call.index(ARGUMENT)) + 1])
    return None


def reads_call(parser: StreamParser, text: str) -> bool:
    segments = parser.parse_increment(text)
    arguments = "".join(text for kind, text in segments if kind == "arguments")
    names = [name for kind, name in segments if kind == "call"]
    return names == [NAME] and arguments.endswith("}") and json.loads(arguments) == PROBE_ARGUMENTS
