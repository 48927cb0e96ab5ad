"""How chat templates read tools and the tool calls of earlier answers: forms that are tried until the template renders.

Templates of one kind want the arguments of a call as an object, others as JSON text; some write a call only where the
content is null; some fail for a tool without a description. Messages hold one form: arguments are objects.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]  # of the OpenAI API: role, content, tool_calls, ...
Tools = Any  # a list of JSON objects, or None
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning, the usual one first
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")  # keywords that map names to schemas
PROBE_TEXT = "probe_text"
PROBE_QUESTION: Message = {"role": "user", "content": "x"}
PROBE_ARGUMENTS = {"probe_key": "probe_value"}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_0",
        "description": "x",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "x"}}},
    },
}


@dataclass(frozen=True)
class CallForm:
    """arguments_as_text: as JSON text. null_content: null where a message with tool calls has no text."""

    arguments_as_text: bool = False
    null_content: bool = False

    def apply(self, message: Message) -> Message:
        """Return the message in this form."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self.arguments_as_text:
            message = message | {"tool_calls": [arguments_as_text(call) for call in calls]}
        if self.null_content and not message.get("content"):
            message = message | {"content": None}
        return message


CALL_FORMS = [CallForm(as_text, is_null) for is_null in (False, True) for as_text in (False, True)]


def arguments_as_text(call: Any) -> Any:
    function = call.get("function")
    if isinstance(function, dict):
        return call | {"function": arguments_as_text(function)}
    arguments = call.get("arguments")
    return call if isinstance(arguments, str) else call | {"arguments": json.dumps(arguments, ensure_ascii=False)}


def probe_conversation(content: str, num_calls: int, result: str = "x") -> list[Message]:
    """A question, an answer with that many tool calls, and their results."""
    calls = [
        {"id": f"callprob{i}", "type": "function", "function": {"name": f"probe_{i}", "arguments": PROBE_ARGUMENTS}}
        for i in range(num_calls)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
    return [PROBE_QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}, *results]


def find_call_form(render: Callable[[CallForm], str | None]) -> CallForm:
    """Return the first form in which a template writes the call of probe_conversation("", 1) completely and as JSON."""
    repr_text, double_text = str(PROBE_ARGUMENTS), json.dumps(json.dumps(PROBE_ARGUMENTS))[1:-1]
    for form in CALL_FORMS:
        text = render(form)
        if text and "probe_value" in text and repr_text not in text and double_text not in text:
            return form
    return CallForm()


def variants(messages: list[Message], tools: Tools) -> Iterator[tuple[list[Message], Tools]]:
    """Yield a conversation as it came, then in forms for templates that fail for it: tools with all optional parts,
    with texts where schemas may hold other values; and answers with one text, not two or none."""
    yield messages, tools
    seen = [(messages, tools)]
    complete = [complete_tool(tool) for tool in tools] if tools else tools
    texts = [values_as_text(tool) for tool in complete] if complete else complete
    for joined in (messages, [one_text(message) for message in messages]):
        for version in (tools, complete, texts):
            if (joined, version) not in seen:
                seen.append((joined, version))
                yield joined, version


def complete_tool(tool: Any) -> Any:
    """Return a tool with its optional parts: a description and an object of parameters."""
    function = without_none(tool["function"])
    parameters = {"type": "object", "properties": {}} | without_none(function.get("parameters", {}))
    return tool | {"function": {"name": function["name"], "description": "", **function, "parameters": parameters}}


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def values_as_text(tool: Any) -> Any:
    """Return a tool in whose schemas enums, defaults and descriptions are texts, and a type that may be null is one
    word, as templates expect."""
    function = tool["function"]
    return tool | {"function": function | {"parameters": schema_as_text(function["parameters"])}}


def schema_as_text(schema: Any) -> Any:
    if isinstance(schema, list):
        return [schema_as_text(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            found[name] = {key: schema_as_text(item) for key, item in value.items()}
        elif name == "enum" and isinstance(value, list):
            found[name] = [to_text(item) for item in value]
        elif name == "type" and isinstance(value, list) and len(types := [t for t in value if t != "null"]) == 1:
            found[name] = types[0]
        elif name in ("default", "description"):
            found[name] = to_text(value)
        else:
            found[name] = schema_as_text(value)
    return found


def to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def one_text(message: Message) -> Message:
    """Return an answer with one text: its content holds the reasoning too beside tool calls, and an answer without
    anything, as when it was cut off while the model reasoned, has a space."""
    if message["role"] != "assistant" or bool(message.get("content")) != bool(message.get("tool_calls")):
        return message
    if not message.get("content"):
        return message | {"content": " "}
    if not message.get("reasoning_content"):
        return message
    content = f"{message['reasoning_content']}\n\n{message['content']}"
    return {name: value for name, value in message.items() if name not in REASONING} | {"content": content}
