"""PROMPT: generate text. stdout gets the completion alone, token by token."""

from errors import Refused
from forward.kv_cache import make_kv_cache
from generate.decode import DecodeCounters, spec_decode
from generate.draft import Drafter
from generate.sampler import Sampler
from load.model import OpenedSnapshot, load_model
from machine.console import PrefillProgress, say, write_answer
from modes.report import RunReport, save_usage
from settings import Settings
from snapshot.config import ModelConfig
from text.detokenizer import Detokenizer
from text.prompt import PromptPrefix, all_stop_ids, max_answer_tokens
from text.tokenizer import TextTokenizer


def run_text(settings: Settings, opened: OpenedSnapshot) -> int:
    """Generate from PROMPT -> exit code."""
    config, context = opened.config, opened.context
    tokenizer = TextTokenizer(opened.folder, config)
    prompt_ids = encode_prompt(settings, config, tokenizer)
    if len(prompt_ids) > context:
        raise Refused(f"PROMPT has {len(prompt_ids)} tokens, CTX is {context}; raise CTX or shorten it")
    max_tokens = min(settings.ngen, max_answer_tokens(len(prompt_ids), context))
    sampler = Sampler(settings.temp, settings.nucleus, settings.seed)
    stop_ids = all_stop_ids(config, tokenizer)
    say(f"[prompt] {len(prompt_ids)} tokens | at most {max_tokens} more | {describe_sampler(sampler)}")

    loaded = load_model(settings, opened)
    model = loaded.model
    run = RunReport("prompt", loaded, len(prompt_ids))
    # In raw text a special token is as much a part of the answer as of PROMPT; a chat shows none.
    hidden_ids = tokenizer.hidden_ids() if settings.chat else frozenset()
    kv, stream = make_kv_cache(config, context), Detokenizer(tokenizer, prompt_ids, hidden_ids)
    drafter, progress = Drafter(model, run.draft_length), PrefillProgress(len(prompt_ids))
    tokens = spec_decode(model, kv, prompt_ids, sampler, max_tokens, stop_ids, drafter, progress, run.counters)
    interrupt = None
    try:
        for token in tokens:
            with model.profile.measure("text"):
                write_answer(stream.add_token(token))
                run.on_token(max_tokens)
    except KeyboardInterrupt as error:
        interrupt = error
        run.interrupt(kv.length)
    finally:
        write_answer(stream.flush() + "\n")  # an error gets a line of its own
    run.end()
    why = "interrupted" if interrupt else stop_reason(run.counters, tokenizer, max_tokens, settings.ngen)
    say(f"[stop] {why}")
    save_usage(loaded, kv.length)
    run.finish(settings, max(0, run.counters.tokens - 1), stop=why, seed=settings.seed)
    if interrupt:
        raise interrupt
    return 0


def encode_prompt(settings: Settings, config: ModelConfig, tokenizer: TextTokenizer) -> list[int]:
    """PROMPT, in the chat template with CHAT=1, after the family's prefix -> token ids."""
    text = settings.prompt or ""
    prefix = PromptPrefix(config, tokenizer, settings.prefix)
    for notice in prefix.notices + tokenizer.thinking_notices(settings.think and settings.chat):
        say(notice)
    if settings.chat:
        question = {"role": "user", "content": text}
        _, ids = tokenizer.encode_chat([question], enable_thinking=settings.think)
    else:
        ids = tokenizer.encode(text)
    ids = prefix.prepend(ids)
    if not ids:
        raise Refused(f"{tokenizer.path}: PROMPT becomes no token; give it other text")
    return ids


def describe_sampler(sampler: Sampler) -> str:
    if not sampler.temperature:
        return "greedy"
    top_k = f"top-k {sampler.top_k}, " if sampler.top_k else ""
    return f"temperature {sampler.temperature:g}, {top_k}nucleus {sampler.nucleus:g}, SEED={sampler.seed}"


def stop_reason(counters: DecodeCounters, tokenizer: TextTokenizer, max_tokens: int, ngen: int) -> str:
    if counters.stop_id is not None:
        return f"stop token {tokenizer.decode([counters.stop_id])}"
    return f"NGEN={ngen} reached" if max_tokens == ngen else "CTX is full; raise CTX for more"
