"""Sampling parameters: the fields that chat completions and completions share."""

from dataclasses import dataclass

from generate.request import Request
from server.http_service import HttpService
from server.openai.request_fields import RequestFields

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
MAX_TOP_LOGPROBS = 20
MAX_CACHE_KEY_LENGTH = 512
SMALLEST_TOP_P = 1e-9
# Fields that change no answer: they name the user, say how long something is kept elsewhere, or are about tokenizers
# that this library does not have: those of tokenizer.json put no spaces between special tokens.
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_retention", "spaces_between_special_tokens")


@dataclass(frozen=True)
class SamplingParams:
    request: Request  # a template: its prompt is empty
    seed: int | None  # None: each prompt gets a seed of its own
    stop_strings: tuple[str, ...]
    hides_special: bool  # special tokens in the text of an answer
    is_stream: bool
    includes_usage: bool  # at the end of a stream


def read_sampling_params(
    fields: RequestFields, service: HttpService, max_tokens: int, top_logprobs: int | None, prompt_logprobs: bool
) -> SamplingParams:
    n = fields.whole("n", 1, 1, 1 << 20)
    if n > service.num_slots:
        fields.refuse_value("n", f"this server generates at most {service.num_slots} choices at once (KV_SLOTS)")
    is_stream = fields.flag("stream", False)
    request = Request(
        (),
        max_tokens,
        temperature=fields.number("temperature", service.settings.temp, 0, 2),
        nucleus=read_top_p(fields, service),
        top_k=fields.whole("top_k", 0, 0, 1 << 31),
        num_samples=n,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        conversation=read_conversation(fields, service),
    )
    seed = fields.whole("seed", None, -(2**63), 2**64 - 1)
    stop_strings = read_stop_strings(fields)
    hides_special = fields.flag("skip_special_tokens", True)
    includes_usage = read_stream_options(fields, is_stream)
    fields.require_neutral(frequency_penalty=0, presence_penalty=0, logit_bias={})
    return SamplingParams(request, seed, stop_strings, hides_special, is_stream, includes_usage)


def read_top_p(fields: RequestFields, service: HttpService) -> float:
    """Return top_p. 0 asks for the most likely token alone; to the sampler 0 would be no limit."""
    top_p = fields.number("top_p", None, 0, 1)
    return service.settings.nucleus if top_p is None else max(top_p, SMALLEST_TOP_P)


def read_conversation(fields: RequestFields, service: HttpService) -> str | None:
    """Return prompt_cache_key, the name of a conversation, where conversations are saved."""
    name = fields.text("prompt_cache_key", None)
    if name is not None and len(name) > MAX_CACHE_KEY_LENGTH:
        fields.refuse_value("prompt_cache_key", f"expected at most {MAX_CACHE_KEY_LENGTH} characters")
    return name if service.settings.kvsave else None


def read_stop_strings(fields: RequestFields) -> tuple[str, ...]:
    value = fields.find("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOP_STRINGS:
        fields.refuse_value("stop", f"expected a text or a list of at most {MAX_STOP_STRINGS} texts")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        fields.refuse_value("stop", f"expected texts of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def read_stream_options(fields: RequestFields, is_stream: bool) -> bool:
    """Return whether a stream ends with its usage."""
    if "stream_options" not in fields.values:
        return False
    if not is_stream:
        fields.refuse_value("stream_options", "needs stream to be true")
    options = fields.object("stream_options")
    includes_usage = options.flag("include_usage", False)
    options.require_neutral(include_obfuscation=False)
    options.refuse_unread()
    return includes_usage
