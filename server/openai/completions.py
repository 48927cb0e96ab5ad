"""A request of the legacy endpoint: prompts as texts or ids, one or many."""

from dataclasses import dataclass

from server.openai.fields import check_text
from server.openai.sampling import WITHOUT_EFFECT, SamplingParams, read_sampling

DEFAULT_MAX_TOKENS = 16  # of the OpenAI API
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024


@dataclass(frozen=True)
class CompletionPrompt:
    """text: as it is echoed. num_prefix: ids in front that the family wants and nobody wrote."""

    ids: list[int]
    text: str
    num_prefix: int


@dataclass(frozen=True)
class CompletionRequest:
    prompts: list[CompletionPrompt]
    sampling: SamplingParams
    echo: bool


def read_completion(fields, service):
    """Fields of a request -> CompletionRequest. Every field is honoured, or refused by name."""
    max_tokens = fields.whole("max_tokens", DEFAULT_MAX_TOKENS, 0, 1 << 62)
    if service.max_tokens is not None:
        max_tokens = min(max_tokens, service.max_tokens)
    sampling = read_sampling(fields, service, max_tokens, fields.whole("logprobs", None, 0, MAX_LOGPROBS))
    echo = fields.flag("echo", False)
    fields.neutral("best_of", sampling.n)
    fields.neutral("suffix", "")
    prompts = read_prompts(fields, service)
    fields.end(WITHOUT_EFFECT)
    return CompletionRequest(prompts, sampling, echo)


def read_prompts(fields, service):
    """A text, a list of texts, ids, or a list of ids -> Prompts. Ids stay exactly as they are."""
    value = fields.take("prompt")
    if value is None:
        raise fields.bad("prompt", "is missing")
    many = isinstance(value, list) and not is_ids(value)
    values = value if many else [value]
    if not 1 <= len(values) <= MAX_PROMPTS:
        raise fields.bad("prompt", f"expected 1 to {MAX_PROMPTS} prompts")
    return [
        read_prompt(value, f"prompt[{at}]" if many else "prompt", fields, service) for at, value in enumerate(values)
    ]


def read_prompt(value, where, fields, service):
    if isinstance(value, str):
        check_text(value, where)
        bare = service.tokenizer.encode(value)
        ids = service.prefix.prepend(bare)
        prompt = CompletionPrompt(ids, value, len(ids) - len(bare))
    elif is_ids(value):
        if not all(0 <= i < service.vocab_size for i in value):
            raise fields.bad("prompt", f"{where} holds an id outside the vocabulary of {service.vocab_size}")
        prompt = CompletionPrompt(value, service.tokenizer.decode(value), 0)
    else:
        raise fields.bad("prompt", f"{where} is neither a text nor a list of token ids")
    if not prompt.ids:
        raise fields.bad("prompt", f"{where} becomes no token")
    service.check_room(prompt.ids)
    return prompt


def is_ids(value):
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
