"""A snapshot's chat template -> the text of a conversation, as transformers 5 renders it.

jinja2 in its sandbox with the filters and globals that templates count on, for a template is part of a hostile
snapshot. Messages and tools are plain JSON values; nothing else reaches a template.
"""

import json
from datetime import datetime

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts, the usual one first


class ChatTemplate:
    """Compiled once. `variables` are the names that the template asks for from outside."""

    def __init__(self, source, special_tokens):
        from jinja2 import meta

        environment = make_environment()
        self.source, self.special_tokens = source, special_tokens
        self.variables = meta.find_undeclared_variables(environment.parse(source))
        self.template = environment.from_string(source)

    def render(self, messages, tools=None, add_generation_prompt=True, **variables):
        """Messages and tools of the OpenAI API, arguments of tool calls as objects -> text."""
        return self.template.render(
            **self.special_tokens | variables,
            messages=[clean(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


def clean(message):
    """A message without its empty fields, its thoughts under the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    thoughts = next((message[name] for name in REASONING if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def make_environment():
    """-> the jinja2 environment of chat templates. Only chats need jinja2, and importing it costs a cold start a tenth
    of a second."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationExtension(Extension):
        """{% generation %} marks for training what the assistant said; to a prompt it is only a block."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def fail(message):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON for a chat template: plain, not HTML-escaped as jinja2's own filter makes it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
