"""SERVE=stdio: the line protocol of the C engine, so that programs which drive its pipe can drive this one.

docs/stdio.md tells what is said, and what is different. One request is answered after the other. Whatever comes in,
exactly one END and one STAT go out for it. The byte that marks begin with never stands in an answer.
"""

import queue
import select
import sys
import time
from dataclasses import dataclass, field, replace

from errors import Refused
from generate.scheduler import Finished, NewToken, QueueFull, Request
from machine.memory import rss_bytes
from server.stdio.frames import BrokenFrame, CommandFrame, FrameReader, MessageFrame, PromptFrame
from text.detokenizer import Detokenizer
from text.prompt import PromptPrefix, all_stop_ids, max_answer_tokens, positions_needed
from text.tokenizer import TextTokenizer

READY, END, ERROR = (f"\x01\x01{word}\x01\x01" for word in ("READY", "END", "ERROR"))
DEFAULT_TEMPERATURE = 0.7  # as for PROMPT
WATCH_SECONDS = 0.2  # how often is looked whether anybody still reads


def run(loaded, scheduler, stdin, stdout, settings):
    """Answer what comes in on `stdin` (buffered, bytes) on `stdout` -> 0 when it ends. BrokenPipeError when nobody
    reads stdout any more. Whatever ends it, nothing is left running in the scheduler."""
    pipe = PipeServer(loaded, scheduler, stdout, settings)
    pipe.write(f"{READY}\n{StatLine()}\n")
    for request in FrameReader(stdin, scheduler.numbers()["slots"]):
        pipe.answer(request)
    return 0


@dataclass
class PipeSlot:
    """What a slot remembers: a text, and the messages it was made of where it is a chat."""

    number: int
    stream: Detokenizer  # the answer as text; half a character may wait in it for MORE
    messages: list[dict] = field(default_factory=list)  # up to the one that is answered
    thinks: bool = False  # the prompt ends in the middle of thoughts
    request: Request | None = None  # the last one
    ids: list[int] = field(default_factory=list)  # prompt and answer

    def conversation(self):
        """The messages with the answer, whole or cut off; thoughts that never ended end here."""
        if not self.messages:
            return []
        text, message = self.stream.text, {"role": "assistant"}
        if self.thinks or text.startswith("<think>"):
            thoughts, _, text = text.removeprefix("<think>").partition("</think>")
            message["reasoning_content"] = thoughts
        return [*self.messages, message | {"content": text}]


@dataclass(slots=True)
class StatLine:
    """The numbers of a STAT line. tokens_per_second and hit_rate are of decoding alone, without the prompt."""

    tokens: int = 0
    tokens_per_second: float = 0.0
    hit_rate: float = 0.0
    answer: tuple[int, int] | None = None  # prompt tokens, 1 when the answer was cut off by its length

    def __str__(self):
        fields = f"{self.tokens} {self.tokens_per_second:.2f} {100 * self.hit_rate:.1f} {rss_bytes() / 1e9:.2f}"
        return " ".join(map(str, ("STAT", fields, *(self.answer or ()))))


class PipeServer:
    """The answering side. `last`: the slot that RESET and MORE mean."""

    def __init__(self, loaded, scheduler, stdout, settings):
        self.scheduler, self.stdout, self.settings = scheduler, stdout, settings
        self.counters, config = loaded.model.experts.counters, loaded.config
        self.tokenizer = TextTokenizer(loaded.folder, config)
        self.prefix = PromptPrefix(config, self.tokenizer, settings.prefix)
        if self.prefix.notice:
            say(self.prefix.notice)
        self.stop_ids = all_stop_ids(config, self.tokenizer)
        self.slots, self.last, self.num_answers = {}, 0, 0

    def answer(self, request):
        """Everything that is said to a request."""
        try:
            match request:
                case BrokenFrame(reason):
                    raise Refused(reason)
                case PromptFrame():
                    self.answer_prompt(request)
                case MessageFrame(text):
                    self.answer_message(text)
                case CommandFrame("MORE") if self.last in self.slots:
                    self.answer_more(self.slots[self.last])
                case CommandFrame(name):
                    if name == "RESET":
                        self.slots.pop(self.last, None)
                    self.end(StatLine())
        except (Refused, QueueFull, ValueError) as error:
            self.end(StatLine(answer=(0, 0)), error=error)

    def answer_prompt(self, prompt):
        """A prompt as it is, special tokens written out in it included."""
        self.last = prompt.slot
        ids = self.add_prefix(self.tokenizer.encode(prompt.text))
        request = self.request(prompt.slot, ids, prompt.max_tokens, prompt.temperature, prompt.nucleus)
        self.generate(PipeSlot(prompt.slot, Detokenizer(self.tokenizer)), request)

    def answer_message(self, text):
        """A turn of the chat in slot 0. When it does not fit the oldest turns are forgotten, and that is said."""
        self.last, settings, context = 0, self.settings, self.scheduler.context
        before = self.slots[0].conversation() if 0 in self.slots else []
        messages = [*before, {"role": "user", "content": text}]
        ids, thinks = self.encode_chat(messages)
        if positions_needed(len(ids), min(settings.ngen, context // 4)) > context:
            while len(messages) > 1 and len(ids) > context // 2:
                messages = messages[2:]
                ids, thinks = self.encode_chat(messages)
        if forgotten := (len(before) + 1 - len(messages)) // 2:
            say(f"[stdio] CTX={context} is full: turns forgotten, the oldest first: {forgotten}")
        temperature = DEFAULT_TEMPERATURE if settings.temp is None else settings.temp
        request = self.request(0, ids, settings.ngen, temperature, settings.nucleus)
        self.generate(PipeSlot(0, Detokenizer(self.tokenizer), messages, thinks), request, line_end="\n")

    def answer_more(self, slot):
        """Go on where the last answer of a slot stopped, with its numbers."""
        r = slot.request
        request = self.request(slot.number, slot.ids, self.settings.ngen, r.temperature, r.nucleus, r.seed)
        self.generate(slot, request, line_end="\n")

    def encode_chat(self, messages):
        """Messages -> (ids after which the answer comes, whether they end in the middle of thoughts). A special token
        that the user wrote out stays text."""
        text, ids = self.tokenizer.encode_chat(messages, enable_thinking=self.settings.think)
        return self.add_prefix(ids), text.rstrip().endswith("<think>")

    def add_prefix(self, ids):
        ids = self.prefix.prepend(ids)
        if not ids:
            raise Refused("the prompt becomes no token")
        return ids

    def request(self, slot, ids, max_tokens, temperature, nucleus, seed=None):
        """-> Request of at most max_tokens, NGEN, and what CTX leaves. Without a seed it gets the next one."""
        context, ngen = self.scheduler.context, self.settings.ngen
        room = max_answer_tokens(len(ids), context)
        if room < 1:
            raise Refused(f"the text has {len(ids)} tokens, CTX is {context}; raise CTX or shorten it")
        if max_tokens > ngen:
            say(f"[stdio] max_tokens {max_tokens} is more than NGEN={ngen} allows")
        if seed is None:
            seed = (self.settings.seed + self.num_answers) % 2**64
            self.num_answers += 1
        return Request(
            tuple(ids),
            max_tokens=min(max_tokens, ngen, room),
            temperature=temperature,
            nucleus=nucleus,
            seed=seed,
            stop_ids=self.stop_ids,
            conversation=f"stdio {slot}",
        )

    def generate(self, slot, request, line_end=""):
        """Write the answer as it comes, then END and STAT. What the reader has seen is what the slot remembers."""
        events, began, before = queue.SimpleQueue(), None, None
        job = self.scheduler.submit(request, events.put)
        ids = list(request.prompt_ids)
        try:
            while not isinstance(event := self.next_of(events), Finished):
                if isinstance(event, NewToken):
                    if not began:
                        began, before = time.perf_counter(), replace(self.counters)
                    ids.append(event.id)
                    self.write_text(slot.stream.push(event.id))
        finally:
            job.cancel()  # when the reader or the user is gone; nothing to one that is finished
        tokens, is_cut = len(ids) - len(request.prompt_ids), event.reason == "length"
        if not is_cut:  # MORE gives the other half of a character that was cut
            self.write_text(slot.stream.finish())
        if tokens or event.reason in ("stop", "length"):
            slot.request, slot.ids = request, ids
            self.slots[slot.number] = slot
        stat = StatLine(tokens, answer=(len(request.prompt_ids), int(is_cut)))
        if began:
            # The prefill paid for the first token.
            decoded, seconds = tokens - 1 + (event.reason == "stop"), time.perf_counter() - began
            stat.tokens_per_second = decoded / seconds if seconds else 0.0
            stat.hit_rate = hit_rate_since(before, self.counters)
        error = None if event.reason in ("stop", "length") else event.error or event.reason
        self.end(stat, line_end, error)

    def next_of(self, events):
        """The next event; while there is none, whether anybody still reads is looked at."""
        while True:
            try:
                return events.get(timeout=WATCH_SECONDS)
            except queue.Empty:
                if nobody_reads(self.stdout):
                    raise BrokenPipeError from None

    def end(self, stat, line_end="", error=None):
        """The end of whatever was asked: END and STAT, before them what went wrong, in one line."""
        before = line_end if error is None else f"{ERROR} {harmless(' '.join(str(error).split()))}\n"
        self.write(f"{before}{END}\n{stat}\n")

    def write_text(self, text):
        if text:
            self.write(harmless(text))

    def write(self, text):
        self.stdout.write(text.encode("utf-8", "replace"))
        self.stdout.flush()


def harmless(text):
    """A text in which no mark stands: the byte that marks begin with becomes the picture of it."""
    return text.replace("\x01", "\u2401")


def hit_rate_since(before, now):
    """Share of the experts asked for since then that were in memory; 0 where none was."""
    hits, misses = now.hits - before.hits, now.misses - before.misses
    return hits / max(1, hits + misses)


def nobody_reads(stdout):
    """Whether the other end of the pipe is closed. False where that cannot be asked: then a write tells."""
    try:
        poll = select.poll()
        poll.register(stdout.fileno(), 0)
    except (AttributeError, OSError):
        return False
    return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))


def say(line):
    """One line to stderr."""
    print(line, file=sys.stderr, flush=True)
