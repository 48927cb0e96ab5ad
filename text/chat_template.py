"""Chat template of a snapshot: messages -> prompt text, as transformers 5 renders it.

jinja2 in its sandbox, since a template is part of an untrusted snapshot, with the filters and globals that templates
expect. Messages and tools are plain JSON values; nothing else reaches a template.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

Message = dict[str, Any]  # of the OpenAI API: role, content, tool_calls, ...
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning, the usual one first


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        from jinja2 import meta

        environment = make_environment()
        self.source, self.special_tokens = source, special_tokens
        # Names that the template reads: messages, tools, enable_thinking, ...
        self.variables: set[str] = meta.find_undeclared_variables(environment.parse(source))
        self.template = environment.from_string(source)

    def render(
        self, messages: list[Message], tools: Any = None, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Messages and tools -> text; arguments of tool calls are objects, not JSON texts."""
        return self.template.render(
            **{**self.special_tokens, **variables},
            messages=[normalize_message(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


def normalize_message(message: Message) -> Message:
    """A message without empty fields, its reasoning under both keys that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def make_environment() -> Any:
    """The jinja2 environment of chat templates. Imported here: only chats need jinja2, and it takes 0.1 s."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationExtension(Extension):
        """{% generation %} marks the assistant's tokens for training; in a prompt it is a plain block."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Scope:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The tojson filter of chat templates: plain JSON, not HTML-escaped as by jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
