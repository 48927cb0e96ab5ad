"""SERVE=stdio: the line protocol of the C engine (docs/stdio.md), for programs that drive its pipe.

Requests are answered one after the other. Each gets exactly one END and one STAT. The byte that begins markers never
stands in an answer.
"""

import queue
import select
import time
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from errors import Refused
from experts.cache import CacheCounters
from generate.request import Event, Finished, NewToken, QueueFull, Request
from generate.scheduler import Scheduler
from load.model import LoadedModel
from machine.console import say
from machine.memory import rss_bytes
from server.service import Service
from server.stdio.frames import CommandFrame, Frame, FrameReader, MessageFrame, PromptFrame
from settings import Settings
from text.chat_turns import ChatTurns, Message, drop_oldest_turns
from text.detokenizer import Detokenizer
from text.prompt import max_answer_tokens
from text.tokenizer import TextTokenizer

READY, END, ERROR = (f"\x01\x01{word}\x01\x01" for word in ("READY", "END", "ERROR"))
WATCH_SECONDS = 0.2  # between two checks whether stdout is still read


def run_pipe_server(
    loaded: LoadedModel, scheduler: Scheduler, stdin: BinaryIO, stdout: BinaryIO, settings: Settings
) -> int:
    """Answer the requests of stdin on stdout until stdin ends -> exit code 0. BrokenPipeError when stdout is not read
    any more. Nothing is left running in the scheduler, however it ends."""
    pipe = PipeServer(loaded, scheduler, stdout, settings)
    pipe.write_output(f"{READY}\n{StatLine()}\n")
    for frame in FrameReader(stdin, pipe.num_slots):
        pipe.answer_frame(frame)
    return 0


@dataclass
class PipeSlot:
    """The conversation of a slot: its ids, and the messages where it is a chat."""

    detokenizer: Detokenizer  # of the answer; half a character may wait in it for MORE
    prompt_ids: list[int]
    messages: list[Message] = field(default_factory=list)  # up to the one that is answered
    request: Request | None = None  # the last one
    ids: list[int] = field(default_factory=list)  # prompt and answer


@dataclass(slots=True)
class StatLine:
    """tokens_per_second and hit_rate are of decoding alone, without the prefill."""

    tokens: int = 0
    tokens_per_second: float = 0.0
    hit_rate: float = 0.0
    answer: tuple[int, int] | None = None  # prompt tokens, 1 if the answer was cut off by its length

    def __str__(self) -> str:
        fields = f"{self.tokens} {self.tokens_per_second:.2f} {100 * self.hit_rate:.1f} {rss_bytes() / 1e9:.2f}"
        return " ".join(map(str, ("STAT", fields, *(self.answer or ()))))


class PipeServer(Service):
    def __init__(self, loaded: LoadedModel, scheduler: Scheduler, stdout: BinaryIO, settings: Settings):
        super().__init__(settings, loaded, scheduler, TextTokenizer(loaded.folder, loaded.config), say)
        self.stdout = stdout
        self.turns = ChatTurns(self.tokenizer, self.prefix, settings.think)
        self.counters: CacheCounters = loaded.model.experts.counters
        self.slots: dict[int, PipeSlot] = {}
        self.last_slot = 0  # the one that RESET and MORE mean
        self.num_answers = 0

    def answer_frame(self, frame: Frame) -> None:
        try:
            match frame:
                case Refused():
                    raise frame
                case PromptFrame():
                    self.answer_prompt(frame)
                case MessageFrame(text):
                    self.answer_message(text)
                case CommandFrame("MORE") if self.last_slot in self.slots:
                    self.continue_answer(self.slots[self.last_slot])
                case CommandFrame(name):
                    if name == "RESET":
                        self.slots.pop(self.last_slot, None)
                    self.write_end(StatLine())
        except (Refused, QueueFull, ValueError) as error:
            self.write_end(StatLine(answer=(0, 0)), error=error)
        except OSError:  # of stdout
            raise
        except Exception as error:  # a fault of ours ends one answer, not the process
            self.write_end(StatLine(answer=(0, 0)), error=f"{type(error).__name__}: {error}")

    def answer_prompt(self, prompt: PromptFrame) -> None:
        """Special tokens that are written out in the text are tokens."""
        self.last_slot = prompt.slot
        ids = self.prefix.prepend(self.tokenizer.encode(prompt.text))
        request = self.new_request(ids, prompt.max_tokens, prompt.temperature, prompt.top_p)
        self.write_answer(PipeSlot(Detokenizer(self.tokenizer, ids), ids), request)

    def answer_message(self, text: str) -> None:
        """Answer a turn of the chat in slot 0. The oldest turns are dropped when the context is full."""
        self.last_slot = 0
        messages: list[Message] = [{"role": "user", "content": text}]
        before = self.slots.get(0)
        if before and before.messages:
            answer_ids = before.ids[len(before.prompt_ids) :]
            answer = self.turns.answer_message(before.messages, before.prompt_ids, answer_ids)
            messages = [*before.messages, answer, *messages]
        kept, ids = drop_oldest_turns(messages, self.turns.encode, self.context, self.settings.ngen)
        if num_dropped := (len(messages) - len(kept)) // 2:
            say(f"[stdio] CTX={self.context} is full: the oldest turns are forgotten ({num_dropped})")
        request = self.new_request(ids, self.settings.ngen, self.settings.temp, self.settings.nucleus)
        detokenizer = Detokenizer(self.tokenizer, ids, self.tokenizer.hidden_ids())
        self.write_answer(PipeSlot(detokenizer, ids, kept), request, line_end="\n")

    def continue_answer(self, slot: PipeSlot) -> None:
        """Continue the last answer of a slot, with its temperature, top_p and seed."""
        assert slot.request
        self.check_prompt(slot.ids)
        template = replace(slot.request, max_tokens=self.settings.ngen)
        self.write_answer(slot, self.make_request(template, slot.ids, slot.request.seed), line_end="\n")

    def new_request(self, ids: list[int], max_tokens: int, temperature: float, top_p: float) -> Request:
        """Return a request with the next seed, of at most max_tokens, NGEN, and what CTX leaves."""
        self.check_prompt(ids)
        if max_tokens > self.settings.ngen:
            say(f"[stdio] max_tokens {max_tokens} is more than NGEN={self.settings.ngen}; the answer ends there")
            max_tokens = self.settings.ngen
        template = Request((), max_tokens, temperature, top_p, conversation=f"stdio {self.last_slot}")
        self.num_answers += 1
        return self.make_request(template, ids, self.settings.seed + self.num_answers - 1)

    def check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise Refused("the prompt is empty, it needs at least one token")
        if max_answer_tokens(len(ids), self.context) < 1:
            raise Refused(f"the text has {len(ids)} tokens, CTX is {self.context}; raise CTX or shorten it")

    def write_answer(self, slot: PipeSlot, request: Request, line_end: str = "") -> None:
        """Write the answer while it is generated, then END and STAT. The slot keeps what was written."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        start_time = 0.0  # of the first token: the prefill paid for it
        before = CacheCounters()
        active = self.scheduler.submit(request, events.put)
        ids = list(request.prompt_ids)
        num_prompt = len(ids)
        try:
            while not isinstance(event := self.next_event(events), Finished):
                if isinstance(event, NewToken):
                    if not start_time:
                        start_time = time.perf_counter()
                        before = CacheCounters(self.counters.hits, self.counters.misses)
                    ids.append(event.id)
                    self.write_text(slot.detokenizer.add_token(event.id))
        finally:
            active.cancel()  # without effect on one that is finished
        num_tokens = len(ids) - num_prompt
        is_truncated = event.reason == "length"
        is_complete = event.reason in ("stop", "length")
        if not is_truncated:  # MORE gives the other half of a character
            self.write_text(slot.detokenizer.flush())
        if num_tokens or is_complete:
            slot.request = request
            slot.ids = ids
            self.slots[self.last_slot] = slot
        stat = StatLine(num_tokens, answer=(num_prompt, int(is_truncated)))
        if start_time:
            num_decoded = num_tokens - 1 + (event.reason == "stop")
            seconds = time.perf_counter() - start_time
            stat.tokens_per_second = num_decoded / seconds if seconds else 0.0
            stat.hit_rate = hit_rate_since(before, self.counters)
        self.write_end(stat, line_end, None if is_complete else event.error or event.reason)

    def next_event(self, events: queue.SimpleQueue[Event]) -> Event:
        """Wait for an event. BrokenPipeError when stdout is closed meanwhile."""
        while True:
            try:
                return events.get(timeout=WATCH_SECONDS)
            except queue.Empty:
                if is_closed(self.stdout):
                    raise BrokenPipeError from None

    def write_end(self, stat: StatLine, line_end: str = "", error: object = None) -> None:
        """Write END and STAT, before them the error in one line."""
        before = line_end if error is None else f"{ERROR} {without_markers(' '.join(str(error).split()))}\n"
        self.write_output(f"{before}{END}\n{stat}\n")

    def write_text(self, text: str) -> None:
        if text:
            self.write_output(without_markers(text))

    def write_output(self, text: str) -> None:
        self.stdout.write(text.encode("utf-8", "replace"))
        self.stdout.flush()


def without_markers(text: str) -> str:
    """Replace the byte that begins markers by its picture."""
    return text.replace("\x01", "\u2401")


def hit_rate_since(before: CacheCounters, now: CacheCounters) -> float:
    return CacheCounters(now.hits - before.hits, now.misses - before.misses).hit_rate


def is_closed(stdout: BinaryIO) -> bool:
    """Return whether the other end of a pipe is closed. False where that is not known; then a write will fail."""
    try:
        poll = select.poll()
        poll.register(stdout.fileno(), 0)
    except (AttributeError, OSError):
        return False
    return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))
