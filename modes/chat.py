"""An interactive chat in the terminal: scripts/chat_cli.py is its door, and says what it does."""

import signal
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from errors import Refused
from forward.finite import NonFinite
from forward.kv_cache import make_kv_cache
from generate.decode import DecodeCounters, spec_decode
from generate.draft import Drafter
from generate.sampler import Sampler
from load.model import check_folder, load_model, open_snapshot
from machine.console import PrefillProgress, Terminal, announce, say, say_warnings
from machine.exit import Terminated
from machine.memory import rss_bytes
from modes.report import RunReport, divide
from modes.text import DEFAULT_TEMPERATURE, write
from text.detokenizer import Detokenizer
from text.prompt import PromptPrefix, all_stop_ids, max_answer_tokens, positions_needed, shared_prefix_length
from text.tokenizer import TextTokenizer

SIGN = "> "
DEFAULT_NGEN = 256
OTHER_MODES = ("prompt", "score", "serve", "ref", "replay", "tf", "report")  # settings that mean nothing here


class PrefillStopped(Exception):
    """The user stopped the answer while its prompt was read in."""


class StopKey:
    """Ctrl-C while an answer is given. It is looked at between tokens, and between layers while a prompt is read in, so
    that nothing is left half done in the cache of experts; a second one ends the program at once."""

    def __init__(self):
        self.pressed, self.before = False, None

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self.press)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGINT, self.before)

    def press(self, *_):
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def watch(self, progress):
        """A progress callback -> one that raises Stopped once the key was pressed."""

        def watched(*where):
            progress(*where)
            if self.pressed:
                raise PrefillStopped

        return watched


class ChatHistory:
    """The messages so far, a question and its answer by turns, and the ids they become."""

    def __init__(self, settings, config, tokenizer, context):
        if not isinstance(tokenizer.chat_template, str):
            raise Refused(
                f"{tokenizer.path.parent}: has no chat template (chat_template.jinja), so it cannot chat; "
                "colibri.py continues plain text (PROMPT)"
            )
        self.tokenizer, self.think, self.context = tokenizer, settings.think, context
        self.prefix = PromptPrefix(config, tokenizer, settings.prefix)
        self.reserve = max(1, min(settings.ngen, context // 4))  # tokens that an answer should have
        self.messages, self.thinks = [], False
        self.start_ids = self.encode([question("x")])  # begins as every conversation; a bad template is refused here

    def encode(self, messages):
        """Messages -> the ids after which the answer comes."""
        text = self.tokenizer.render_chat(messages, self.think)
        self.thinks = text.rstrip().endswith("<think>")  # the answer begins with thoughts
        ids = self.prefix.prepend(self.tokenizer.encode(text))
        if not ids:
            raise Refused(f"{self.tokenizer.path.parent}: the chat template makes no token of a message")
        return ids

    def ask(self, text):
        """Add a question -> the ids of all. Says when turns are forgotten; Refused, and nothing changed, when it does
        not fit by itself."""
        messages = [*self.messages, question(text)]
        ids = self.encode(messages)
        if positions_needed(len(ids), self.reserve) > self.context:
            while len(messages) > 1 and len(ids) > self.context // 2:
                messages = messages[2:]
                ids = self.encode(messages)
        if len(ids) > self.context:
            raise Refused(f"the message has {len(ids)} tokens, CTX is {self.context}; raise CTX or shorten it")
        if forgotten := (len(self.messages) + 1 - len(messages)) // 2:
            turns = "turn is" if forgotten == 1 else f"{forgotten} turns are"
            say(f"[chat] CTX={self.context} is full: the oldest {turns} forgotten")
        self.messages = messages
        return ids

    def answer(self, text):
        """Add the answer to the last question, whole or cut off: thoughts that never ended end here."""
        message = {"role": "assistant", "content": text}
        if self.thinks or text.startswith("<think>"):
            thoughts, _, said = text.removeprefix("<think>").partition("</think>")
            message |= {"reasoning_content": thoughts, "content": said}
        self.messages.append(message)

    def clear(self):
        """Forget everything."""
        self.messages = []

    def take_back(self):
        """Forget the last question, which has no answer."""
        self.messages.pop()


def question(text):
    return {"role": "user", "content": text}


@dataclass
class ChatTotals:
    """What all answers together took. The prefill pays for the first token of an answer."""

    answers: int = 0
    prompt_ids: int = 0
    prefilled: int = 0  # of them, those that were not remembered
    tokens: int = 0
    decoded: int = 0
    forwards: int = 0
    decode_seconds: float = 0.0

    def add(self, num_ids, prefilled, counters, seconds):
        decoded = max(0, counters.tokens + (counters.stop_id is not None) - 1)
        self.answers += 1
        self.prompt_ids += num_ids
        self.prefilled += prefilled
        self.tokens += counters.tokens
        self.decoded += decoded
        self.forwards += counters.forwards
        self.decode_seconds += seconds


class Chat:
    """The model's side: a KvCache that remembers, over the answers, the ids it was given."""

    def __init__(self, settings, loaded, tokenizer):
        self.run, self.model, self.tokenizer = RunReport("chat", loaded), loaded.model, tokenizer
        self.kv = make_kv_cache(loaded.config, loaded.context)
        self.ids = []  # the KV cache holds the first kv.length of them
        self.draft = Drafter(self.model, self.kv, self.run.governor)
        temperature = DEFAULT_TEMPERATURE if settings.temp is None else settings.temp
        self.sampler = Sampler(temperature, settings.nucleus, settings.seed)
        self.stop_ids = all_stop_ids(loaded.config, tokenizer)
        self.ngen, self.totals = settings.ngen, ChatTotals()

    def remember(self, ids):
        """Keep in the KV cache what these ids begin with as well, and forget the rest."""
        self.kv.trim(shared_prefix_length(self.ids[: self.kv.length], ids))

    def reply(self, ids, stop_key, show=write):
        """Give the answer after `ids`, piece by piece to `show` -> (its text, what cut it off, if anything did).

        Stopped, before anything is shown, when the key was pressed while the ids were read in.
        """
        kv, counters, stream = self.kv, DecodeCounters(), Detokenizer(self.tokenizer)
        self.remember(ids[:-1])
        self.ids, new, began = list(ids), len(ids) - kv.length, None
        max_tokens = min(self.ngen, max_answer_tokens(len(ids), kv.capacity))
        progress = stop_key.watch(PrefillProgress(new))
        self.draft.resume(ids)
        tokens = spec_decode(
            self.model, kv, ids, self.sampler, max_tokens, self.stop_ids, self.draft, progress, counters=counters
        )
        try:
            with closing(tokens):
                for token in tokens:
                    began = began or time.perf_counter()
                    self.ids.append(token)
                    show(stream.push(token))
                    if stop_key.pressed:
                        break
        except (NonFinite, Refused):
            show(stream.finish() + "\n")  # the text so far is whole, and the fault gets a line of its own
            raise
        show(stream.finish() + "\n")
        self.totals.add(len(ids), new, counters, time.perf_counter() - began if began else 0.0)
        return self.tokenizer.decode(self.ids[len(ids) :]), self.why_cut(stop_key, counters, max_tokens)

    def why_cut(self, stop_key, counters, max_tokens):
        if counters.stop_id is not None:
            return None
        if stop_key.pressed:
            return "stopped"
        return f"cut off at NGEN={self.ngen}" if max_tokens == self.ngen else f"cut off: CTX={self.kv.capacity} is full"

    def stats(self):
        """How the chat went so far, in one line."""
        t, hits = self.totals, self.run.mark().cache.hit_rate
        speed = f"{t.decoded / t.decode_seconds:.1f}" if t.decoded else "-"
        return (
            f"[stats] {t.answers} answers, {t.tokens} tokens  {speed} tok/s  "
            f"{divide(t.decoded, t.forwards):.2f} tok/fw  hit {hits:.1%}  RSS {rss_bytes() / 1e9:.2f} GB | "
            f"{t.prefilled} of {t.prompt_ids} prompt tokens read in | "
            f"KV {self.kv.length} of {self.kv.capacity} positions"
        )

    def save_usage(self):
        """What this chat used, for the next run of the model."""
        if usage := self.run.loaded.usage:
            usage.save(self.model.experts.counts(), self.totals.prefilled + self.totals.tokens)


def talk(chat, history):
    """Turn after turn until the user or stdin ends it."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        with suppress(ImportError):  # line editing, on systems that have it
            import readline  # noqa: F401
        say("[chat] /clear forgets, /stats counts, /quit ends; Ctrl-C stops an answer")
    while (line := read_line(is_terminal)) is not None:
        line = line.strip()
        command = line.removeprefix("/").lower()
        if command in ("quit", "exit"):
            break
        if command == "clear":
            history.clear()
            chat.remember(history.start_ids)
            say("[chat] a new conversation")
        elif command == "stats":
            say(chat.stats())
        elif line.startswith("/") and command.isalpha():
            say(f"[chat] {line} is no command; there are /clear, /stats, /quit and /exit")
        elif line:
            take_turn(chat, history, line)
    if is_terminal:
        say("goodbye")


def read_line(is_terminal):
    """A line of stdin, None at its end or for Ctrl-C on a terminal, where a sign asks for it. Bytes that are no UTF-8
    become surrogates."""
    if sys.stdin is None:
        return None
    if is_terminal:
        try:
            if sys.stdout.isatty():
                return input(SIGN)  # which edits lines, but shows its sign on stdout
            if sys.stderr.isatty():
                print(SIGN, end="", file=sys.stderr, flush=True)
            return sys.stdin.readline() or None
        except EOFError:
            return None
        except KeyboardInterrupt as error:
            if isinstance(error, Terminated):
                raise
            return None
    return sys.stdin.buffer.readline().decode("utf-8", "surrogateescape") or None


def take_turn(chat, history, line):
    """A message, and the answer to it; what is wrong with the message is said, and the chat goes on."""
    try:
        ids = history.ask(utf8(line, "the message"))
    except Refused as error:
        say(f"[chat] {error}")
        return
    answer(chat, history, ids)


def answer(chat, history, ids):
    """The answer to the last question -> what cut it off, if anything did."""
    try:
        with StopKey() as stop_key:
            text, cut = chat.reply(ids, stop_key)
    except PrefillStopped:
        history.take_back()
        say("[chat] stopped before the answer began; the question is taken back")
        return "stopped"
    history.answer(text)
    if cut:
        say(f"[chat] {cut}; the answer stays in the conversation as it is")
    return cut


def utf8(text, what):
    """A text of the user whose surrogates stand for bytes -> the same; Refused when they are no UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise Refused(f"{what} is not valid UTF-8; check the terminal's encoding") from None


def run(settings, prompt):
    """Open the snapshot, and chat: one answer to `prompt`, or turns from stdin -> exit code."""
    Terminal.has_bar = sys.stderr.isatty() and not settings.dumb
    Terminal.is_shared = sys.stderr.isatty() and sys.stdout.isatty()
    ignored = [name.upper() for name in OTHER_MODES if getattr(settings, name) not in (None, False)]
    for notice in (*settings.notices, *(f"[env] {name} means nothing to a chat: ignored" for name in ignored)):
        say(notice)
    settings = replace(settings, prompt=None, score=None, serve=None, replay=False, tf=False)
    check_folder(settings)
    opened = open_snapshot(settings)
    announce(opened)
    say_warnings()
    try:
        tokenizer = TextTokenizer(opened.folder, opened.config)
        history = ChatHistory(settings, opened.config, tokenizer, opened.context)
        ids = None if prompt is None else history.ask(prompt)  # refused before the weights are read, if it is
        if history.prefix.notice:
            say(history.prefix.notice)
        chat = Chat(settings, load_model(settings, opened), tokenizer)
        t = chat.sampler.temperature
        how = f"temperature {t:g}, nucleus {settings.nucleus:g}, SEED={settings.seed}" if t else "greedy"
        say(f"[chat] answers of at most {settings.ngen} tokens (NGEN), {opened.context} positions (CTX) | {how}")
        try:
            if ids is not None:
                return 130 if answer(chat, history, ids) == "stopped" else 0
            talk(chat, history)
        finally:
            chat.save_usage()
        return 0
    except NonFinite as error:
        say(f"chat: {error}")
        return 1
    finally:
        opened.close()
