"""Messages and tools of a chat request: checked, and in the form that chat templates read."""

from server.openai.api_error import JsonObject
from server.openai.request_fields import RequestFields, check_texts
from text.call_arguments import read_arguments
from text.call_form import without_none
from text.chat_template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: RequestFields, template: ChatTemplate) -> list[JsonObject]:
    """Text parts become one text; the arguments of tool calls become objects."""
    messages = fields.objects("messages", "a list of messages")
    if not messages:
        fields.refuse_value("messages", "expected at least one message")
    return [read_message(message, template) for message in messages]


def read_message(fields: RequestFields, template: ChatTemplate) -> JsonObject:
    check_texts(fields.values, fields.subject)
    role = fields.one_of("role", ROLES)
    if role == "developer" and not template.knows_developer:
        role = "system"
    message = {"role": role, "name": fields.text("name", None), "content": read_content(fields)}
    if role == "assistant":
        reasoning = fields.text("reasoning_content", None)
        message["reasoning_content"] = reasoning or fields.text("reasoning", None)
        message["tool_calls"] = [read_tool_call(call) for call in fields.objects("tool_calls")] or None
        fields.require_neutral(annotations=[])
    elif role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id", None)
    fields.refuse_unread()
    if message["content"] is None:
        if role != "assistant":
            fields.refuse_value("content", "is missing")
        message["content"] = ""  # clients write null for an empty text
    return without_none(message)


def read_content(fields: RequestFields) -> str | None:
    """Read a text, or text parts, which become one text."""
    if isinstance(fields.values.get("content"), str | None):
        return fields.text("content", None)
    texts = []
    for part in fields.objects("content", "a text or a list of text parts"):
        part.one_of("type", ("text",))
        texts.append(part.text("text", ""))
        part.refuse_unread()
    return "".join(texts)


def read_tool_call(fields: RequestFields) -> JsonObject:
    """Read a tool call of an earlier answer."""
    fields.one_of("type", ("function",), "function")
    function = fields.object("function")
    name = function.text("name")
    arguments = function.values.pop("arguments", "")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    if not isinstance(arguments, dict):
        function.refuse_value("arguments", "expected a JSON object, as a text")
    function.refuse_unread()
    call = {"id": fields.text("id", None), "type": "function", "function": {"name": name, "arguments": arguments}}
    fields.whole("index", None)
    fields.refuse_unread()
    return without_none(call)


def read_tools(fields: RequestFields) -> tuple[list[JsonObject], dict[str, JsonObject]]:
    """Return (the tools as they came, for the template; name -> JSON schema of the parameters)."""
    tools = fields.values.get("tools", [])
    check_texts(tools, "tools")
    schemas: dict[str, JsonObject] = {}
    for tool in fields.objects("tools"):
        tool.one_of("type", ("function",))
        function = tool.object("function")
        tool.refuse_unread()
        name = function.text("name")
        if not name or name.strip() != name or name in schemas:
            function.refuse_value("name", "expected a name that no other tool has")
        function.text("description", None)
        # Strict schemas would need sampling that is constrained by a grammar.
        function.require_neutral(strict=False)
        schema = function.values.pop("parameters", {})
        if not isinstance(schema, dict) or not isinstance(schema.get("properties") or {}, dict):
            function.refuse_value("parameters", "expected a JSON schema")
        schemas[name] = schema
        function.refuse_unread()
    return tools, schemas


def read_tool_choice(fields: RequestFields, schemas: dict[str, JsonObject]) -> str | list[str]:
    """Return none, auto, required, or the name of the one tool that must be called, in a list."""
    choice = fields.values.get("tool_choice", "auto" if schemas else "none")
    if choice not in ("none", "auto") and not schemas:
        fields.refuse_value("tool_choice", "there are no tools")
    if not isinstance(choice, dict):
        fields.one_of("tool_choice", ("none", "auto", "required"), None)
        return list(schemas) if choice == "required" and len(schemas) == 1 else choice
    named = fields.object("tool_choice")
    named.one_of("type", ("function",))
    function = named.object("function")
    named.refuse_unread()
    return [function.one_of("name", list(schemas))]
