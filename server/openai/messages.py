"""The conversation and the tools of a chat request: checked, and brought into the form that chat templates read."""

import json

from server.openai.api_error import bad
from server.openai.fields import RequestFields, check_texts

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields, template):
    """-> the messages, for the template. Texts in parts become one text; arguments of tool calls become objects."""
    messages = fields.items("messages")
    if not messages:
        raise fields.bad("messages", "expected a list of at least one message")
    return [read_message(RequestFields(m, f"messages[{at}]"), template) for at, m in enumerate(messages)]


def read_message(fields, template):
    check_texts(fields.values, fields.where)
    role = fields.one_of("role", None, ROLES)
    if role is None:
        raise fields.bad("role", f"expected one of {', '.join(ROLES)}")
    # Templates that do not know developers take them for what they are to them.
    message = {"role": "system" if role == "developer" and "developer" not in template.source else role}
    content = read_content(fields)
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    if role == "assistant":
        message |= {"reasoning_content": fields.text("reasoning_content") or fields.text("reasoning")}
        message["tool_calls"] = [
            read_call(RequestFields(call, f"{fields.where}.tool_calls[{at}]"))
            for at, call in enumerate(fields.items("tool_calls"))
        ] or None
        fields.neutral("annotations", [])
    elif role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id")
    fields.end()
    if content is None and not message.get("tool_calls"):
        raise fields.bad("content", "is missing")
    return {name: value for name, value in (message | {"content": content or ""}).items() if value is not None}


def read_content(fields):
    """A text, or parts that are texts -> a text, None where there is none."""
    content = fields.take("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.bad("content", "expected a text or a list of parts")
    texts = []
    for at, part in enumerate(content):
        part = RequestFields(part, f"{fields.name('content')}[{at}]")
        if part.take("type") != "text":
            raise part.bad("type", "only parts of the type text are supported")
        texts.append(part.text("text", ""))
        part.end()
    return "".join(texts)


def read_call(fields):
    """A tool call of an earlier answer."""
    if fields.one_of("type", "function", ("function",)) and not isinstance(fields.values.get("function"), dict):
        raise fields.bad("function", "expected an object")
    function = RequestFields(fields.take("function"), fields.name("function"))
    name, arguments = function.text("name"), function.take("arguments", "{}")
    if name is None:
        raise function.bad("name", "is missing")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise function.bad("arguments", "expected a JSON object, as a text")
    function.end()
    call = {"id": fields.text("id"), "type": "function", "function": {"name": name, "arguments": arguments}}
    fields.whole("index", None, 0, 1 << 31)
    fields.end()
    return {name: value for name, value in call.items() if value is not None}


def read_tools(fields):
    """-> (the tools as they came, for the template; name -> schema of the parameters)."""
    tools = fields.items("tools")
    check_texts(tools, "tools")
    schemas = {}
    for at, tool in enumerate(tools):
        tool = RequestFields(tool, f"tools[{at}]")
        if tool.take("type") != "function":
            raise tool.bad("type", "only tools of the type function are supported")
        function = RequestFields(tool.take("function", {}), tool.name("function"))
        tool.end()
        name = function.text("name")
        if not name or not name.strip() == name or name in schemas:
            raise function.bad("name", "expected a name that no other tool has")
        function.text("description")
        # To keep to a schema strictly would take a grammar over the tokens.
        function.neutral("strict", False)
        schemas[name] = function.take("parameters", {})
        if not isinstance(schemas[name], dict) or not isinstance(schemas[name].get("properties") or {}, dict):
            raise function.bad("parameters", "expected a JSON schema")
        function.end()
    return tools, schemas


def read_tool_choice(fields, schemas):
    """-> none, auto, required, or the name of a tool in a list of one."""
    choice = fields.take("tool_choice", "auto" if schemas else "none")
    if choice in ("none", "auto"):
        return choice
    if not schemas:
        raise fields.bad("tool_choice", "there are no tools")
    if choice == "required":
        return [next(iter(schemas))] if len(schemas) == 1 else choice
    choice = RequestFields(choice if isinstance(choice, dict) else {}, "tool_choice")
    function = choice.take("function")
    if choice.take("type") != "function" or not isinstance(function, dict):
        raise bad("tool_choice", 'expected none, auto, required, or {"type": "function", "function": {"name": ...}}')
    choice.end()
    if function.get("name") not in schemas:
        raise bad("tool_choice.function.name", "is none of the tools")
    return [function["name"]]
