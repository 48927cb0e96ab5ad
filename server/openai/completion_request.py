"""A request to /v1/completions: one or many prompts, as texts or token ids."""

from dataclasses import dataclass
from typing import Any

from server.http_service import HttpService
from server.openai.request_fields import RequestFields, check_texts
from server.openai.sampling_params import MAX_TOP_LOGPROBS, WITHOUT_EFFECT, SamplingParams, read_sampling_params
from text.detokenizer import Detokenizer
from text.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16  # of the OpenAI API
MAX_PROMPTS = 1024


@dataclass(frozen=True)
class CompletionPrompt:
    ids: list[int]
    text: str  # for echo
    num_prefix: int  # ids of the family's prefix that were put in front


def read_completion_request(
    fields: RequestFields, service: HttpService
) -> tuple[list[CompletionPrompt], SamplingParams, bool]:
    """Return (the prompts, the sampling parameters, whether the prompts are echoed in front of the answers)."""
    max_tokens = min(fields.whole("max_tokens", DEFAULT_MAX_TOKENS, 0, 1 << 62), service.settings.ngen)
    top_logprobs = fields.whole("logprobs", None, 0, MAX_TOP_LOGPROBS)
    echo = fields.flag("echo", False)
    params = read_sampling_params(fields, service, max_tokens, top_logprobs, echo and top_logprobs is not None)
    fields.require_neutral(best_of=params.request.num_samples, suffix="")
    prompts = read_prompts(fields, service)
    fields.refuse_unread(WITHOUT_EFFECT)
    return prompts, params, echo


def read_prompts(fields: RequestFields, service: HttpService) -> list[CompletionPrompt]:
    """Read a text, token ids, or a list of either."""
    value = fields.find("prompt")
    if value is None:
        fields.refuse_value("prompt", "is missing")
    is_list = isinstance(value, list) and not is_ids(value)
    values = value if is_list else [value]
    if not 1 <= len(values) <= MAX_PROMPTS:
        fields.refuse_value("prompt", f"expected 1 to {MAX_PROMPTS} prompts")
    return [
        read_prompt(value, f"prompt[{at}]" if is_list else "prompt", fields, service) for at, value in enumerate(values)
    ]


def read_prompt(value: Any, label: str, fields: RequestFields, service: HttpService) -> CompletionPrompt:
    """Ids stay exactly as they are; a text gets the family's prefix."""
    if isinstance(value, str):
        check_texts(value, label)
        ids = service.tokenizer.encode(value)
        with_prefix = service.prefix.prepend(ids)
        prompt = CompletionPrompt(with_prefix, value, len(with_prefix) - len(ids))
    elif is_ids(value):
        if not all(0 <= i < service.vocab_size for i in value):
            fields.refuse("prompt", f"{label}: expected token ids from 0 to {service.vocab_size - 1}")
        prompt = CompletionPrompt(value, complete_text(service.tokenizer, value), 0)
    else:
        fields.refuse("prompt", f"{label}: expected a text or a list of token ids")
    if not prompt.ids:
        fields.refuse("prompt", f"{label}: the prompt is empty, it needs at least one token")
    service.check_length(prompt.ids)
    return prompt


def complete_text(tokenizer: TextTokenizer, ids: list[int]) -> str:
    """The text of ids without the incomplete character at its end, which the answer completes."""
    detokenizer = Detokenizer(tokenizer)
    return "".join(map(detokenizer.add_token, ids))


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
