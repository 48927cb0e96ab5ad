"""The fields that both endpoints share: how tokens are drawn, when an answer ends, how it is delivered."""

from dataclasses import dataclass

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
MAX_TOP_LOGPROBS = 20
MAX_NAME = 512
SMALLEST_NUCLEUS = 1e-9
# Fields that change no answer: they name the user, or say how long something is kept elsewhere.
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_retention")


@dataclass(frozen=True)
class SamplingParams:
    """max_tokens None: as many as there is room for."""

    max_tokens: int | None
    temperature: float
    nucleus: float
    top_k: int
    seed: int | None
    n: int
    stops: tuple[str, ...]
    top_logprobs: int | None
    is_stream: bool
    with_usage: bool
    conversation: str | None  # whose KV slot is kept, and saved


def read_sampling(fields, service, max_tokens, top_logprobs):
    """Fields of a request -> Sampling; ApiError for a value that means nothing, or asks for what is not there."""
    n = fields.whole("n", 1, 1, 1 << 20)
    if n > service.num_slots:
        raise fields.bad("n", f"{n} answers at once, this server has room for {service.num_slots} (KV_SLOTS)")
    is_stream = fields.flag("stream", False)
    options = fields.take("stream_options")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", service.temperature, 0, 2),
        nucleus=read_nucleus(fields, service),
        top_k=fields.whole("top_k", 0, 0, 1 << 31),
        seed=fields.whole("seed", None, -(2**63), 2**64 - 1),
        n=n,
        stops=read_stops(fields),
        top_logprobs=top_logprobs,
        is_stream=is_stream,
        with_usage=read_stream_options(fields, options, is_stream),
        conversation=read_conversation(fields, service),
    )
    fields.neutral("frequency_penalty", 0)
    fields.neutral("presence_penalty", 0)
    fields.neutral("logit_bias", {})
    return sampling


def read_nucleus(fields, service):
    """top_p, where 0 is the likeliest token alone; to the sampler it would be no limit."""
    nucleus = fields.number("top_p", None, 0, 1)
    return service.nucleus if nucleus is None else max(nucleus, SMALLEST_NUCLEUS)


def read_conversation(fields, service):
    """prompt_cache_key: a name for the conversation, which means something where conversations are saved."""
    name = fields.text("prompt_cache_key")
    if name is not None and len(name) > MAX_NAME:
        raise fields.bad("prompt_cache_key", f"expected at most {MAX_NAME} characters")
    return name if service.saves else None


def read_stops(fields):
    stops = fields.take("stop", ())
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS:
        raise fields.bad("stop", f"expected a text or a list of at most {MAX_STOPS} texts")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise fields.bad("stop", f"expected texts of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def read_stream_options(fields, options, is_stream):
    """-> whether a stream ends with the usage."""
    if options is None:
        return False
    if not is_stream:
        raise fields.bad("stream_options", "means something only with stream")
    options = type(fields)(options, "stream_options")
    with_usage = options.flag("include_usage", False)
    options.neutral("include_obfuscation", False)
    options.end()
    return with_usage
