"""A request to /v1/chat/completions: the prompt that the chat template makes of it, and how to parse the answer."""

from functools import partial

from errors import Refused
from server.http_service import HttpService
from server.openai.api_error import ApiError, JsonObject
from server.openai.chat_messages import read_messages, read_tool_choice, read_tools
from server.openai.choice_stream import MakeParser
from server.openai.request_fields import RequestFields, check_texts
from server.openai.sampling_params import MAX_TOP_LOGPROBS, WITHOUT_EFFECT, SamplingParams, read_sampling_params
from text.chat_template import ChatTemplate
from text.harmony import HarmonyParser, is_harmony
from text.json_schema import has_arguments
from text.reasoning_control import EFFORT, EFFORTS, OFF_WORDS, SWITCHES, ReasoningControl, reasoning_state
from text.reply import THINK, THINK_END, ReplyParser

RESERVED_VARIABLES = ("add_generation_prompt", "documents", "messages", "tools")


def read_chat_request(fields: RequestFields, service: HttpService) -> tuple[list[int], MakeParser, SamplingParams]:
    """Return (the ids of the prompt, the constructor of the answers' parsers, the sampling parameters)."""
    with_logprobs = fields.flag("logprobs", False)
    top_logprobs = fields.whole("top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if top_logprobs is not None and not with_logprobs:
        fields.refuse_value("top_logprobs", "needs logprobs to be true")
    ngen = service.settings.ngen
    max_tokens = min(ngen, *(fields.whole(name, ngen, 1, 1 << 62) for name in ("max_completion_tokens", "max_tokens")))
    top_logprobs = (top_logprobs or 0) if with_logprobs else None
    params = read_sampling_params(fields, service, max_tokens, top_logprobs, prompt_logprobs=False)
    fields.require_neutral(service_tier=("auto", "default"), store=False, modalities=["text"])
    fields.require_neutral(response_format={"type": "text"}, verbosity="medium")
    ids, make_parser = read_chat_prompt(fields, service, one_call=not fields.flag("parallel_tool_calls", True))
    fields.refuse_unread(WITHOUT_EFFECT)
    return ids, make_parser, params


def read_chat_prompt(
    fields: RequestFields, service: HttpService, one_call: bool = False
) -> tuple[list[int], MakeParser]:
    """Read the messages, the tools and the variables of the chat template, and render them up to the assistant's turn.
    one_call: parse nothing after the first tool call."""
    tools, schemas = read_tools(fields)
    tool_choice = read_tool_choice(fields, schemas)
    if tool_choice == "none" or not schemas:
        tools, schemas = [], {}
    try:
        template = service.tokenizer.find_template(bool(tools))
    except Refused as error:
        raise ApiError(400, without_folder(error, service), code="no_chat_template") from None
    messages = read_messages(fields, template)
    variables = read_template_variables(fields, service, template)
    if tools:
        check_tool_format(fields, template)
    variables["tools"] = tools or None
    answer_prefix = ""
    if tool_choice not in ("none", "auto"):
        assert template.tool_format
        name = tool_choice[0] if isinstance(tool_choice, list) else None
        answer_prefix = template.tool_format.call_prefix(name, name is None or has_arguments(schemas[name]))
        variables |= template.reasoning.variables(False)  # the answer begins with the call
    try:
        text, ids = service.tokenizer.encode_chat(messages, **variables)
        if answer_prefix:
            ending = THINK_END + answer_prefix if text.rstrip().endswith(THINK) else answer_prefix
            _, ids = service.tokenizer.encode_chat(messages, ending=ending, **variables)
    except Refused as error:
        fields.refuse_value("messages", without_folder(error, service))
    lost = [f"messages[{at}].{part}" for at, message in enumerate(messages) if (part := template.lost_part(message))]
    if lost:
        fields.notices.append(f"no effect, as the chat template leaves it out: {', '.join(lost)}")
    ids = service.prefix.prepend(ids)
    if not ids:
        fields.refuse_value("messages", "the chat template makes no token of them")
    service.check_length(ids)
    arguments = (schemas, one_call or isinstance(tool_choice, list), answer_prefix)
    if is_harmony(template.source):
        return ids, partial(HarmonyParser, *arguments)
    return ids, partial(ReplyParser, "off" if answer_prefix else reasoning_state(text, template.source), *arguments)


def read_template_variables(fields: RequestFields, service: HttpService, template: ChatTemplate) -> JsonObject:
    """Return the variables of the chat template other than messages and tools."""
    more = fields.values.pop("chat_template_kwargs", {})
    check_texts(more, "chat_template_kwargs")
    if not isinstance(more, dict) or not more.keys().isdisjoint(RESERVED_VARIABLES):
        fields.refuse_value("chat_template_kwargs", f"expected an object without {', '.join(RESERVED_VARIABLES)}")
    kwargs = RequestFields(more, "chat_template_kwargs")
    variables = read_reasoning(fields, kwargs, template.reasoning, service.settings.think)
    if unread := [kwargs.label(name) for name in kwargs.values if name not in template.variables]:
        fields.notices.append(f"no effect, as the chat template does not read it: {', '.join(unread)}")
    return variables | kwargs.values


def read_reasoning(fields: RequestFields, kwargs: RequestFields, control: ReasoningControl, think: bool) -> JsonObject:
    """Return the variables of the chat template for the reasoning that a request asks for, which is done or refused.

    kwargs: chat_template_kwargs, which count more than the fields of the same name. think: for a request
    that does not say.
    """
    owners = {name: kwargs if name in kwargs.values else fields for name in (*SWITCHES, EFFORT)}
    for name in owners:
        if owners[name] is kwargs and fields.find(name) not in (None, kwargs.values[name]):
            fields.notices.append(f"{name} has no effect: {kwargs.label(name)} counts more")
    asked = {name: on for name in SWITCHES if (on := read_switch(owners[name], name)) is not None}
    effort = owners[EFFORT].text(EFFORT, None)
    if effort is not None:
        asked[EFFORT] = effort not in OFF_WORDS
    if not asked:
        return control.variables(think)
    first, think = next(iter(asked.items()))  # the field that counts, and whether to reason
    own = control.nearest(effort) if effort is not None and asked[EFFORT] else None
    if own is None and effort not in (*EFFORTS, *OFF_WORDS, None):
        known = ", ".join(control.efforts or EFFORTS)
        owners[EFFORT].refuse_value(EFFORT, f"expected one of {known}, not {effort!r}")
    if think and not control.can_reason:
        owners[first].refuse_value(first, "the model's chat template has no reasoning")
    if not think and not control.can_stop:
        efforts = f"; it knows the efforts {', '.join(control.efforts)}" if control.efforts else ""
        owners[first].refuse_value(first, f"the model's chat template cannot turn reasoning off{efforts}")

    def add_notice(name: str, text: str) -> None:
        fields.notices.append(f"{owners[name].label(name)}{text}")

    if not (control.has_switch or (first == EFFORT and control.efforts)):
        add_notice(first, " has no effect: the chat template has no such variable")
    for name in asked:
        if asked[name] != think:
            add_notice(name, f" has no effect: {owners[first].label(first)} counts more")
    if think and asked.get(EFFORT):
        if own is None and control.switches:
            add_notice(EFFORT, f": {effort} turns reasoning on; the chat template knows no efforts")
        elif own not in (None, effort):
            add_notice(EFFORT, f": {effort} is read as {own}; the chat template knows {', '.join(control.efforts)}")
    return control.variables(think, own)


def read_switch(fields: RequestFields, name: str) -> bool | None:
    """Read true or false, or {"type": "enabled"} or "disabled" as some APIs have it."""
    if not isinstance(fields.values.get(name), dict):
        return fields.flag(name, None)
    mode = fields.object(name)
    is_enabled = mode.one_of("type", ("enabled", "disabled")) == "enabled"
    mode.refuse_unread()
    return is_enabled


def check_tool_format(fields: RequestFields, template: ChatTemplate) -> None:
    """Refuse tools that the template does not show to the model, or whose calls no parser reads."""
    if not template.writes_tools:
        fields.refuse_value("tools", "the model's chat template does not write them")
    if template.tool_format is None:
        call = template.call_example
        if "probe_value" in call:
            form = f"writes calls as {call[:60]!r}..., which is not the format of GLM, Hermes or gpt-oss"
        else:
            form = "leaves tool calls out" if template.call_text else "fails for tool calls"
        fields.refuse_value("tools", f"the model's chat template {form}; leave tools out or set tool_choice to none")


def without_folder(error: Refused, service: HttpService) -> str:
    """Return the message without the folder of the snapshot, which is not for the client."""
    return str(error).removeprefix(f"{service.folder}: ").removeprefix(f"{service.folder}/")
