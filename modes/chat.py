"""The interactive chat in the terminal: CHAT=1 python colibri.py, and scripts/chat_cli.py."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from types import FrameType

from errors import Refused
from forward.finite import NonFinite
from forward.kv_cache import make_kv_cache
from generate.decode import DecodeCounters, spec_decode
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.proposers import Proposers
from generate.sampler import Sampler
from generate.tools.tool_state import Tool, ToolState
from load.model import LoadedModel, OpenedSnapshot, load_model
from machine.console import PrefillProgress, leave_line_open, say, show_sign, write_answer
from machine.exit import Terminated
from machine.memory import rss_bytes
from modes.chat_history import ChatHistory
from modes.chat_tools import ToolTexts, make_tool, tools_notice
from modes.report import RunReport, divide, save_usage
from modes.text import describe_sampler
from settings import Settings
from text.detokenizer import Detokenizer
from text.prompt import all_stop_ids, max_answer_tokens, shared_prefix_length
from text.tokenizer import TextTokenizer

PROMPT_SIGN = "> "
STOPPED = "stopped"


def run_chat(settings: Settings, opened: OpenedSnapshot, message: str | None = None) -> int:
    """Answer `message` alone, or the lines of stdin turn by turn -> exit code."""
    tokenizer = TextTokenizer(opened.folder, opened.config)
    history = ChatHistory(settings, opened.config, tokenizer, opened.context)
    # Before the weights are read: both may be refused.
    ids = None if message is None else history.add_question(message)
    tools = [make_tool(tokenizer, settings.unsafe_sandbox)] if settings.tools else []
    for notice in history.prefix.notices + tokenizer.thinking_notices(settings.think):
        say(notice)
    if tools:
        say(tools_notice(settings.unsafe_sandbox))
    loaded = load_model(settings, opened)
    run = RunReport("chat", loaded)
    chat = Chat(settings, loaded, tokenizer, tools)
    say(
        f"[chat] answers of at most {settings.ngen} tokens (NGEN), {opened.context} positions (CTX) | "
        f"{describe_sampler(chat.sampler)}"
    )
    run.is_interrupted = True  # until it is known that it was not
    try:
        if ids is not None:
            run.is_interrupted = answer_question(chat, history, ids) == STOPPED
            return 130 if run.is_interrupted else 0
        chat_loop(chat, history)
        run.is_interrupted = False
    finally:
        save_usage(loaded, chat.totals.num_prefilled + chat.totals.num_tokens)
        run.write_session(settings, chat.drafter.draft_length, chat.totals.numbers(), seed=settings.seed)
    return 0


class StopKey:
    """Ctrl-C while an answer is generated: a flag, asked between tokens and between the layers of a prefill, so that
    the expert cache stays consistent. A second Ctrl-C interrupts the program at once."""

    def __init__(self) -> None:
        self.pressed = False
        self.previous: signal._HANDLER = None

    def __enter__(self) -> "StopKey":
        self.previous = signal.signal(signal.SIGINT, self.press)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@dataclass
class ChatTotals:
    """Sums over all answers. The first token of an answer belongs to its prefill."""

    num_answers: int = 0
    num_prompt_ids: int = 0
    num_prefilled: int = 0  # of the prompt ids, those that the KV cache did not hold
    num_tokens: int = 0
    num_decoded: int = 0
    num_forwards: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, num_ids: int, num_prefilled: int, counters: DecodeCounters, seconds: tuple[float, float]) -> None:
        """seconds: of prefill and decode."""
        self.num_answers += 1
        self.num_prompt_ids += num_ids
        self.num_prefilled += num_prefilled
        self.num_tokens += counters.tokens
        self.num_decoded += max(0, counters.tokens + (counters.stop_id is not None) - 1)
        self.num_forwards += counters.forwards
        self.num_proposed += counters.proposed
        self.num_accepted += counters.accepted
        self.prefill_seconds += seconds[0]
        self.decode_seconds += seconds[1]

    def numbers(self) -> dict[str, object]:
        """Under the keys of REPORT."""
        return {
            "answers": self.num_answers,
            "prompt_tokens": self.num_prefilled,
            "cached_tokens": self.num_prompt_ids - self.num_prefilled,
            "tokens": self.num_tokens,
            "prefill_s": self.prefill_seconds,
            "decode_s": self.decode_seconds,
            "tok_s": divide(self.num_decoded, self.decode_seconds) or None,
            "forwards": self.num_forwards,
            "tokens_per_forward": divide(self.num_decoded, self.num_forwards) or None,
            "drafts_proposed": self.num_proposed,
            "drafts_accepted": self.num_accepted,
        }


class Chat:
    """A loaded model with one KV cache, which keeps the prefix that a prompt shares with the one before."""

    def __init__(
        self, settings: Settings, loaded: LoadedModel, tokenizer: TextTokenizer, tools: Sequence[Tool] = ()
    ) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.kv = make_kv_cache(loaded.config, loaded.context)
        self.ids: list[int] = []  # the KV cache holds the first kv.length of them
        self.proposers = Proposers(loaded.model, self.kv)
        self.drafter = Drafter(loaded.model, DraftLength(loaded.draft, loaded.draft_guard))
        self.sampler = Sampler(settings.temp, settings.nucleus, settings.seed, top_k=settings.top_k)
        self.stop_ids = all_stop_ids(loaded.config, tokenizer)
        self.hidden_ids = tokenizer.hidden_ids()
        self.tools = tools
        self.ngen = settings.ngen
        self.totals = ChatTotals()

    def keep_shared_prefix(self, ids: list[int]) -> None:
        """Trim the KV cache to the prefix that it shares with `ids`."""
        self.kv.trim(shared_prefix_length(self.ids[: self.kv.length], ids))

    def generate_answer(
        self, ids: list[int], stop_key: StopKey, show: Callable[[str], None] = write_answer
    ) -> tuple[list[int], str | None] | None:
        """Generate what follows `ids`, shown as it comes -> (its ids, why it was cut off, or None); None, and nothing
        shown, when the key was pressed during the prefill."""
        kv, counters, stream = self.kv, DecodeCounters(), Detokenizer(self.tokenizer, ids, self.hidden_ids)
        self.keep_shared_prefix(ids[:-1])
        self.ids = list(ids)
        num_new = len(ids) - kv.length
        max_tokens = min(self.ngen, max_answer_tokens(len(ids), kv.capacity))
        self.proposers.resume(ids)
        tokens = spec_decode(
            self.loaded.model,
            kv,
            ids,
            self.sampler,
            max_tokens,
            self.stop_ids,
            self.drafter,
            PrefillProgress(num_new),
            counters,
            self.proposers,
            should_stop=lambda: stop_key.pressed,
            tool_state=ToolState(ids, self.tools, ToolTexts(self.tokenizer)) if self.tools else None,
        )
        began, started = None, time.perf_counter()
        try:
            with closing(tokens):
                for token in tokens:
                    began = began or time.perf_counter()
                    self.ids.append(token)
                    show(stream.add_token(token))
                    if stop_key.pressed:
                        break
        except (NonFinite, Refused):
            show(stream.flush() + "\n")  # the text so far is whole, and the error gets a line of its own
            raise
        if not began and counters.stop_id is None:
            self.totals.num_prefilled += kv.length - (len(ids) - num_new)  # of chunks that were complete
            return None
        show(stream.flush() + "\n")
        ended = time.perf_counter()
        began = began or ended
        self.totals.add(len(ids), num_new, counters, (began - started, ended - began))
        return self.ids[len(ids) :], self.cut_reason(stop_key, counters, max_tokens)

    def cut_reason(self, stop_key: StopKey, counters: DecodeCounters, max_tokens: int) -> str | None:
        if counters.stop_id is not None:
            return None
        if stop_key.pressed:
            return STOPPED
        return f"cut off at NGEN={self.ngen}" if max_tokens == self.ngen else f"cut off: CTX={self.kv.capacity} is full"

    def statistics_line(self) -> str:
        t, hits = self.totals, self.loaded.model.experts.counters.hit_rate
        speed = f"{t.num_decoded / t.decode_seconds:.1f}" if t.num_decoded else "-"
        return (
            f"[stats] {t.num_answers} answers, {t.num_tokens} tokens  {speed} tok/s  "
            f"{divide(t.num_decoded, t.num_forwards):.2f} tok/fw  hit {hits:.1%}  RSS {rss_bytes() / 1e9:.2f} GB | "
            f"{t.num_prefilled} of {t.num_prompt_ids} prompt tokens prefilled | "
            f"KV {self.kv.length} of {self.kv.capacity} positions"
        )


def chat_loop(chat: Chat, history: ChatHistory) -> None:
    """Turn after turn until the user or stdin ends it; a bad message is reported."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]  # a terminal's
        with suppress(ImportError):  # line editing, on systems that have it
            import readline  # noqa: F401
        say("[chat] /clear starts a new conversation, /stats shows statistics, /quit ends; Ctrl-C stops an answer")
    while (line := read_line(is_terminal)) is not None:
        line = line.strip()
        command = line.removeprefix("/").lower()
        if command in ("quit", "exit"):
            break
        if command == "clear":
            history.clear()
            chat.keep_shared_prefix(history.first_ids)
            say("[chat] a new conversation")
        elif command == "stats":
            say(chat.statistics_line())
        elif line.startswith("/") and command.isalpha():
            say(f"[chat] {line} is not a command; the commands are /clear, /stats, /quit and /exit")
        elif line:
            try:
                ids = history.add_question(utf8(line, "the message"))
            except Refused as error:
                say(f"[chat] {error}")
            else:
                answer_question(chat, history, ids)
    if is_terminal:
        say("goodbye")


def read_line(is_terminal: bool) -> str | None:
    """Read a line of stdin, after a prompt sign on a terminal; bytes that are no UTF-8 become surrogates.

    None at the end of stdin, and for Ctrl-C on a terminal.
    """
    if sys.stdin is None:
        return None
    if not is_terminal:
        return sys.stdin.buffer.readline().decode("utf-8", "surrogateescape") or None
    try:
        if sys.stdout.isatty():
            return input(PROMPT_SIGN)  # edits lines, but shows the sign on stdout
        if sys.stderr.isatty():
            show_sign(PROMPT_SIGN)
        return sys.stdin.readline() or None
    except Terminated:
        raise
    except (EOFError, KeyboardInterrupt):
        leave_line_open()
        return None


def answer_question(chat: Chat, history: ChatHistory, ids: list[int]) -> str | None:
    """Answer the last question -> why the answer was cut off, or None."""
    with StopKey() as stop_key:
        answer = chat.generate_answer(ids, stop_key)
    if answer is None:
        history.drop_question()
        say("[chat] stopped before the answer began; the question is removed")
        return STOPPED
    answer_ids, cut = answer
    history.add_answer(answer_ids)
    if cut:
        say(f"[chat] {cut}; the answer stays in the conversation as it is")
    return cut


def utf8(text: str, subject: str) -> str:
    """Decode a text of the user whose surrogates stand for bytes; Refused when they are no UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise Refused(f"{subject} is not valid UTF-8; check the terminal's encoding") from None
