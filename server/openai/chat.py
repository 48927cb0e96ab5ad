"""A chat request -> the ids after which the answer comes, and how the answer is to be read."""

import json
from dataclasses import dataclass

from errors import Refused
from server.openai.api_error import ApiError, bad
from server.openai.fields import check_texts
from server.openai.messages import read_messages, read_tool_choice, read_tools
from server.openai.sampling import MAX_TOP_LOGPROBS, WITHOUT_EFFECT, SamplingParams, read_sampling
from text.harmony import CHANNEL, MESSAGE, HarmonyParser
from text.reply import THINK, THINK_END, ReplyParser
from text.tool_calls import CLOSE, KEY, OPEN, ToolSchemas

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class ChatRequest:
    prompt_ids: list[int]
    sampling: SamplingParams
    with_logprobs: bool
    thinking: str  # as of ReplyReader, or harmony
    tools: ToolSchemas | None
    one_call: bool
    begun: str  # of the answer, what the prompt holds already

    def make_reader(self):
        if self.thinking == "harmony":
            return HarmonyParser(self.tools, self.one_call, self.begun)
        return ReplyParser(self.thinking, self.tools, self.one_call, self.begun)


def read_chat(fields, service):
    """Fields of a request -> ChatRequest. Every field is honoured, or refused by name."""
    with_logprobs = fields.flag("logprobs", False)
    top_logprobs = fields.whole("top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if top_logprobs is not None and not with_logprobs:
        raise fields.bad("top_logprobs", "means something only with logprobs")
    limits = [fields.whole(name, None, 1, 1 << 62) for name in ("max_completion_tokens", "max_tokens")]
    limits = [limit for limit in (*limits, service.max_tokens) if limit is not None]
    max_tokens = min(limits, default=None)
    sampling = read_sampling(fields, service, max_tokens, (top_logprobs or 0) if with_logprobs else None)
    fields.neutral("service_tier", "auto", "default")
    fields.neutral("store", False)
    fields.neutral("modalities", ["text"])
    fields.neutral("response_format", {"type": "text"})
    fields.neutral("verbosity", "medium")
    parallel = fields.flag("parallel_tool_calls", True)
    turn = read_turn(fields, service)
    fields.end(WITHOUT_EFFECT)
    return ChatRequest(
        turn.ids, sampling, with_logprobs, turn.thinking, turn.tools, not parallel or turn.is_one_call, turn.begun
    )


@dataclass(frozen=True)
class RenderedChat:
    """The conversation, rendered up to the assistant's turn."""

    ids: list[int]
    thinking: str
    tools: ToolSchemas | None
    is_one_call: bool
    begun: str


def read_turn(fields, service):
    """Messages, tools and what concerns the template -> Turn."""
    try:
        template = service.tokenizer.template
    except Refused as error:
        raise ApiError(400, without_path(error, service), code="no_chat_template") from None
    messages = read_messages(fields, template)
    tools, schemas = read_tools(fields)
    choice = read_tool_choice(fields, schemas)
    variables = read_variables(fields, service, template)
    form = tool_form(template)
    if choice == "none" or not schemas:
        tools, schemas = [], {}
    elif form is None:
        raise bad(
            "tools",
            "the model's chat template has no tool calls in a form that is read here: GLM's, Hermes' or gpt-oss'",
        )
    if choice not in ("none", "auto"):
        variables["enable_thinking"] = False  # the answer begins with the call
    try:
        begun = "" if choice in ("none", "auto") else opening(form, choice, schemas)
        text, ids = render(service, messages, {"tools": tools or None} | variables, begun)
    except Refused as error:
        raise bad("messages", without_path(error, service)) from None
    thinking = thinking_of(text, template, begun)
    return RenderedChat(ids, thinking, ToolSchemas(schemas) if schemas else None, isinstance(choice, list), begun)


def read_variables(fields, service, template):
    """What the template is told beside messages and tools."""
    variables = {"enable_thinking": service.think}
    effort = fields.one_of("reasoning_effort", None, EFFORTS)
    if effort is not None:
        if not {"enable_thinking", "reasoning_effort"} & template.variables:
            raise fields.bad("reasoning_effort", "the model's chat template knows no such thing")
        variables |= {"enable_thinking": effort != "none", "reasoning_effort": effort}
    enabled = fields.flag("enable_thinking", None)
    if enabled is not None:
        variables["enable_thinking"] = enabled
    more = fields.take("chat_template_kwargs", {})
    check_texts(more, "chat_template_kwargs")
    reserved = {"messages", "tools", "documents", "add_generation_prompt"}
    if not isinstance(more, dict) or reserved & set(more):
        raise fields.bad("chat_template_kwargs", f"expected an object without {', '.join(sorted(reserved))}")
    return variables | more


def tool_form(template):
    """How the template's model calls tools: glm, hermes, harmony, or None."""
    if "tools" not in template.variables:
        return None
    if CHANNEL in template.source:
        return "harmony"
    if OPEN not in template.source:
        return None
    return "glm" if KEY in template.source else "hermes"


def render(service, messages, variables, begun):
    """-> (the text up to the assistant's turn, its ids with those of `begun`)."""
    text, ids = service.tokenizer.encode_chat(messages, **variables)
    if begun:
        ending = THINK_END + begun if text.rstrip().endswith(THINK) else begun
        _, ids = service.tokenizer.encode_chat(messages, ending=ending, **variables)
    ids = service.prefix.prepend(ids)
    if not ids:
        raise bad("messages", "the chat template makes no token of them")
    return text, service.check_room(ids)


def opening(form, choice, schemas):
    """The beginning of a call: of the tool in a list of one, or of one that the model chooses."""
    if form == "harmony":
        to = " to=functions."
        return to if choice == "required" else f"{to}{choice[0]}{CHANNEL}commentary json{MESSAGE}"
    if choice == "required":
        return OPEN if form == "glm" else f'{OPEN}\n{{"name": "'
    [name] = choice
    if form == "glm":
        return OPEN + name + (KEY if schemas[name].get("properties") else CLOSE)
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{'


def thinking_of(text, template, begun):
    """Whether the answer begins with thoughts, by the end of the prompt."""
    if CHANNEL in template.source:
        return "harmony"
    if begun:
        return "off"
    end = text.rstrip()
    if end.endswith(THINK):
        return "open"
    return "maybe" if THINK_END in template.source and not end.endswith(THINK_END) else "off"


def without_path(error, service):
    """The words of a Refused, without the folder it names: that is not the client's concern."""
    return str(error).removeprefix(f"{service.folder}: ")
