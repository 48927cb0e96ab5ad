"""Chat template of a snapshot: messages -> prompt text, as transformers 5 renders it.

jinja2 in its sandbox, since a template is part of an untrusted snapshot, with the filters and globals that templates
expect. Messages and tools are plain JSON values; nothing else reaches a template.
"""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from errors import Refused
from snapshot.reader import read_file
from text.call_form import (
    PROBE_QUESTION,
    PROBE_TEXT,
    PROBE_TOOL,
    REASONING,
    CallForm,
    Message,
    Tools,
    find_call_form,
    probe_conversation,
    variants,
    without_none,
)
from text.prompt import shared_prefix_length
from text.reasoning_control import ReasoningControl, Variables, find_reasoning_control
from text.tool_format import ToolFormat, find_tool_format

TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def read_templates(folder: Path, declared: Any) -> dict[str, str]:
    """The sources of the chat templates of a snapshot by name: default, tool_use, ...

    declared: chat_template of tokenizer_config.json, a source or a list of named ones; chat_template.jinja replaces it.
    Anything else counts as no template.
    """
    entries = declared if isinstance(declared, list) else [{"name": "default", "template": declared}]
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    templates = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    # lexists: a dangling link is a broken download, not an absent file.
    if os.path.lexists(folder / TEMPLATE_FILE):
        templates = {"default": read_source(folder / TEMPLATE_FILE)}
    return templates | {path.stem: read_source(path) for path in named_template_files(folder)}


def named_template_files(folder: Path) -> list[Path]:
    """The files of further templates, each named after its template, as transformers writes them."""
    return sorted(path for path in (folder / MORE_TEMPLATES).glob("*.jinja") if not path.name.startswith("."))


def read_source(path: Path) -> str:
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: is not valid UTF-8; download it again ({error})") from None


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        from jinja2 import meta, nodes

        environment = make_environment()
        tree = environment.parse(source)
        self.source, self.special_tokens = source, special_tokens
        # Names that the template reads: messages, tools, enable_thinking, ...
        self.variables: set[str] = meta.find_undeclared_variables(tree)
        self.literals = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.template = environment.from_string(source)
        self.lost_parts: dict[tuple[str, bool, int], str | None] = {}  # see lost_part

    def render(
        self, messages: list[Message], tools: Tools = None, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Messages and tools -> text; arguments of tool calls are objects, not JSON texts.

        What the template fails for is tried in other forms of the same meaning (text/call_form.py).
        """
        form = self.call_form if any(message.get("tool_calls") for message in messages) else CallForm()
        normal = [form.apply(normalize_message(message)) for message in messages]
        failure = None
        for conversation, tool_list in variants(normal, tools):
            try:
                return self.render_exactly(conversation, tool_list, add_generation_prompt, **variables)
            except Exception as error:
                failure = failure or error
        assert failure
        raise failure

    def render_exactly(
        self, messages: list[Message], tools: Tools, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        return self.template.render(
            **{**self.special_tokens, **variables},
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )

    def probe(self, messages: list[Message], tools: Tools = None, **variables: Any) -> str | None:
        """Return the text of a conversation that shows what the template reads; None where it fails. The clock stands
        still, so that equal forms give equal texts."""
        try:
            return self.render_exactly(messages, tools, strftime_now=str, **variables)
        except Exception:  # as any program can: see TextTokenizer.render_chat
            return None

    @cached_property
    def reasoning(self) -> ReasoningControl:
        def probe(variables: Variables) -> str | None:
            return self.probe([PROBE_QUESTION], **variables)

        return find_reasoning_control(probe, self.source, self.variables, self.literals)

    @cached_property
    def call_form(self) -> CallForm:
        messages = probe_conversation("", 1)
        return find_call_form(lambda form: self.probe([form.apply(message) for message in messages], [PROBE_TOOL]))

    def probe_calls(self, messages: list[Message]) -> str | None:
        """As probe, of messages with tool calls."""
        return self.probe([self.call_form.apply(message) for message in messages], [PROBE_TOOL])

    @cached_property
    def call_text(self) -> str:
        return self.probe_calls(probe_conversation("", 1)) or ""

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        return find_tool_format(self.call_text, self.source)

    @cached_property
    def call_example(self) -> str:
        """The text of a call of probe_0 as the template writes it, and what follows; for a message about it."""
        answers = [[{"role": "assistant", "content": content}] for content in ("", "x")]
        plain = (self.probe([PROBE_QUESTION, *answer], [PROBE_TOOL]) for answer in (*answers, []))
        at = shared_prefix_length(self.call_text, next(filter(None, plain), ""))
        tag = self.call_text.rfind("<", 0, at)
        return self.call_text[at if ">" in self.call_text[tag:at] or tag < 0 else tag :]  # a tag is shown whole

    @cached_property
    def writes_tools(self) -> bool:
        return "probe_0" in (self.probe([PROBE_QUESTION], [PROBE_TOOL]) or "")

    @cached_property
    def knows_developer(self) -> bool:
        """Whether the template has a developer message: it names the role, and writes its content."""
        return "developer" in self.literals and not self.lost_part({"role": "developer", "content": "x"})

    def lost_part(self, message: Message) -> str | None:
        """Return what the template leaves out of such a message: content, or tool_calls beside a text or behind the
        first. None also where it fails."""
        kind = (message["role"], bool(message.get("content")), min(len(message.get("tool_calls") or ()), 2))
        if kind not in self.lost_parts:
            self.lost_parts[kind] = self.find_lost_part(*kind)
        return self.lost_parts[kind]

    def find_lost_part(self, role: str, has_content: bool, num_calls: int) -> str | None:
        if num_calls:
            messages = probe_conversation("x" if has_content else "", num_calls)
        elif role == "tool":
            messages = probe_conversation("", 1, result=PROBE_TEXT)
        else:
            messages = [{"role": role, "content": PROBE_TEXT}, *([PROBE_QUESTION] if role != "user" else [])]
        text = self.probe_calls(messages)
        if text is None:
            return None
        if num_calls:
            return "tool_calls" if text.count("probe_value") < num_calls else None
        return "content" if has_content and PROBE_TEXT not in text else None


def normalize_message(message: Message) -> Message:
    """A message without empty fields, its reasoning under both keys that templates read."""
    message = without_none(message)
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
