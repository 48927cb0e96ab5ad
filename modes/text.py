"""PROMPT: generate text. The completion alone goes to stdout, as it comes."""

import sys

from errors import Refused
from forward.finite import NonFinite
from forward.kv_cache import make_kv_cache
from generate.decode import spec_decode
from generate.draft import Drafter
from generate.sampler import Sampler
from load.model import load_model
from machine.console import PrefillProgress, say
from modes.report import RunReport, profile_line, write_report
from text.detokenizer import Detokenizer
from text.prompt import PromptPrefix, all_stop_ids, max_answer_tokens
from text.tokenizer import TextTokenizer

DEFAULT_TEMPERATURE = 0.7


def run_text(settings, opened):
    """Generate from PROMPT -> exit code."""
    config, context = opened.config, opened.context
    tokenizer = TextTokenizer(opened.folder, config)
    prompt_ids = encode_prompt(settings, config, tokenizer)
    if len(prompt_ids) > context:
        raise Refused(f"PROMPT has {len(prompt_ids)} tokens, CTX is {context}; raise CTX or shorten it")
    max_tokens = min(settings.ngen, max_answer_tokens(len(prompt_ids), context))
    temperature = DEFAULT_TEMPERATURE if settings.temp is None else settings.temp
    sampler = Sampler(temperature, settings.nucleus, settings.seed)
    stop_ids = all_stop_ids(config, tokenizer)
    how = (
        f"temperature {temperature:g}, nucleus {settings.nucleus:g}, SEED={settings.seed}" if temperature else "greedy"
    )
    say(f"[prompt] {len(prompt_ids)} tokens | at most {max_tokens} more | {how}")

    loaded = load_model(settings, opened)
    model = loaded.model
    run, stream, interrupted = RunReport("prompt", loaded), Detokenizer(tokenizer), None
    counters, run.num_prompt_ids = run.counters, len(prompt_ids)
    kv = make_kv_cache(config, context)
    try:
        for token in spec_decode(
            model,
            kv,
            prompt_ids,
            sampler,
            max_tokens,
            stop_ids,
            draft=Drafter(model, kv, run.governor),
            progress=PrefillProgress(len(prompt_ids)),
            counters=counters,
        ):
            with model.profile.measure("text"):
                write(stream.push(token))
                run.on_token(max_tokens)
    except KeyboardInterrupt as error:
        interrupted = error
    except NonFinite:
        write(stream.finish() + "\n")  # the text so far is whole, and the fault gets a line of its own
        raise
    write(stream.finish() + "\n")
    run.end()
    why = why_stopped(interrupted, counters, tokenizer, max_tokens, settings)
    say(f"[stop] {why}")
    numbers = run.numbers(counters.tokens - 1, stop=why, seed=settings.seed)
    run.summary(counters.tokens - 1)
    say(profile_line(numbers["profile"]))
    if loaded.usage:
        loaded.usage.save(model.experts.counts(), kv.length)
    write_report(settings, numbers)
    if interrupted:
        raise interrupted
    return 0


def encode_prompt(settings, config, tokenizer):
    """PROMPT, in the chat template with CHAT=1, with the family's prefix -> ids."""
    text = settings.prompt
    if settings.chat:
        text = tokenizer.render_chat([{"role": "user", "content": text}], settings.think)
    prefix = PromptPrefix(config, tokenizer, settings.prefix)
    if prefix.notice:
        say(prefix.notice)
    ids = prefix.prepend(tokenizer.encode(text))
    if not ids:
        raise Refused(f"{tokenizer.path}: PROMPT becomes no token; give it other text")
    return ids


def why_stopped(interrupted, counters, tokenizer, max_tokens, settings):
    if interrupted:
        return "interrupted"
    if counters.stop_id is not None:
        return f"stop token {tokenizer.decode([counters.stop_id])}"
    return f"NGEN={settings.ngen} reached" if max_tokens == settings.ngen else "CTX is full; raise CTX for more"


def write(text):
    """Text to stdout as UTF-8, whatever the locale says, at once."""
    if text:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()
