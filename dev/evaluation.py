"""Evaluation requests to a model: log-likelihoods of continuations and whole texts, answers up to a stop string.

Texts are encoded as SCORE encodes them, so the numbers are those of SCORE; requests with the same context are computed
together (generate/score.py). Answers are generated KV_SLOTS at a time (generate/scheduler.py), and a shared prefix is
prefilled once. Texts that do not fit CTX are truncated on the left, with a notice.
"""

import queue
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from errors import Refused
from generate import scheduler as scheduling
from generate.request import Finished, NewToken
from generate.scheduler import Scheduler
from generate.score import Score, ScoreRequest, score_requests
from load.model import LoadedModel, OpenedSnapshot
from machine.console import say
from modes.score import ScoreFileReader
from settings import Settings
from text.detokenizer import Detokenizer
from text.prompt import all_stop_ids, positions_needed
from text.tokenizer import TextTokenizer

PROGRESS_SECONDS = 5.0
DEFAULT_ANSWER = 256  # tokens, where a task gives no length; the default of lm_eval
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one wins


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Sampling parameters of an answer, which ends before the first of the `until` strings."""

    until: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_ANSWER
    temperature: float = 0.0
    nucleus: float = 1.0
    top_k: int = 0

    @staticmethod
    def read(kwargs: dict[str, Any]) -> "EvaluationOptions":
        """A task's generation_kwargs -> EvaluationOptions. Refused for unknown keys, which might change the answer."""
        kwargs = dict(kwargs)
        until = kwargs.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        lengths = [kwargs.pop(name, None) for name in LENGTH_KEYS]
        max_tokens = next((int(length) for length in lengths if length is not None), DEFAULT_ANSWER)
        temperature = float(kwargs.pop("temperature", 0.0) or 0.0)
        samples = kwargs.pop("do_sample", None)
        options = EvaluationOptions(
            until=tuple(filter(None, until)),
            max_tokens=max_tokens,
            temperature=0.0 if samples is False else temperature,
            nucleus=float(kwargs.pop("top_p", 1.0)),
            top_k=int(kwargs.pop("top_k", 0)),
        )
        if kwargs.pop("num_beams", 1) != 1 or kwargs:
            raise Refused(f"generation_kwargs: {', '.join(sorted(kwargs)) or 'num_beams'} is not known to this engine")
        if max_tokens < 1:
            raise Refused(f"generation_kwargs: {max_tokens} tokens; an answer has one or more")
        return options


class Evaluation:
    """Evaluation of one snapshot. Encoding needs only its headers, everything else the model that `load` sets."""

    def __init__(self, settings: Settings, opened: OpenedSnapshot):
        self.settings = settings
        self.context = opened.context
        self.reader = ScoreFileReader(settings, opened)
        if self.reader.tokenizer is None:
            raise Refused(f"{opened.folder}: has no tokenizer.json; an evaluation is made of texts")
        self.tokenizer: TextTokenizer = self.reader.tokenizer
        for notice in self.tokenizer.thinking_notices(settings.think):
            say(notice)
        # Every text begins with the family's prefix, truncated or not.
        self.prefix = self.reader.prefix.ids
        self.start = self.prefix or first_token(self.tokenizer, opened)  # stands for an empty context
        self.stop_ids = all_stop_ids(opened.config, self.tokenizer)
        self.separator = secrets.token_hex(8)  # breaks the special tokens of messages in two, as in encode_chat
        self.num_cut = 0  # texts truncated on the left since the last notice
        self.all_cut = 0  # and since the start
        self.loaded: LoadedModel | None = None

    def load(self, loaded: LoadedModel) -> None:
        """Set the loaded model, whose memory plan gives the number of KV caches."""
        self.loaded = loaded

    # --- texts -> ids -------------------------------------------------------------------------------------------------

    def pair(self, context: str, continuation: str) -> ScoreRequest:
        """Two texts -> ScoreRequest of at most CTX + 1 ids. An empty context becomes the prefix, or else one token."""
        if context:
            context_ids, ids = self.reader.encode_pair(context, continuation, self.separator)
        else:
            context_ids, ids = [], self.tokenizer.encode(continuation)
            if ids[: len(self.start)] == self.start:
                ids = ids[len(self.start) :]
        return ScoreRequest(tuple(self.fit(context_ids, self.context + 1 - len(ids), "continuation")), tuple(ids))

    def fit(self, ids: list[int], room: int, what: str) -> list[int]:
        """A context -> at most `room` ids: the prefix, and the last tokens of the context."""
        ids = list(self.reader.prefix.prepend(ids) or self.start)
        least = max(len(self.prefix), 1)
        if room < least:
            raise Refused(f"a {what} of {self.context + 1 - room} tokens does not fit CTX={self.context}; raise CTX")
        if len(ids) <= room:
            return ids
        self.num_cut += 1
        kept = room - len(self.prefix)
        return self.prefix + ids[len(ids) - kept :]

    def windows(self, text: str) -> list[ScoreRequest]:
        """A whole text -> ScoreRequests that score each of its tokens once. If longer than CTX, every window but the
        first begins with the last token of the one before, and the last one is as long as the others."""
        ids = self.tokenizer.encode(text)
        if ids[: len(self.start)] == self.start:
            ids = ids[len(self.start) :]
        if not ids:
            return []
        size, first = self.context + 1 - len(self.prefix), self.context + 1 - len(self.start)
        if first < 2:
            raise Refused(f"CTX={self.context} is too small for a window of a text; raise CTX")
        done = min(first, len(ids))
        requests = [ScoreRequest(tuple(self.start), tuple(ids[:done]))]
        while done < len(ids):
            end = min(done + size - 1, len(ids))
            requests.append(ScoreRequest((*self.prefix, *ids[end - size : done]), tuple(ids[done:end])))
            done = end
        return requests

    # --- log-likelihoods ----------------------------------------------------------------------------------------------

    def loglikelihood(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """[(context, continuation), ...] -> [(log-likelihood, whether greedy decoding would write it), ...]"""
        requests = [self.pair(context, continuation) for context, continuation in pairs]
        self.say_cut("contexts")
        return [(score.logprob, score.greedy) for score in self.score(requests)]

    def loglikelihood_rolling(self, texts: list[str]) -> list[float]:
        """Texts -> the log-likelihood of each, from its first token on."""
        windows = [self.windows(text) for text in texts]
        if several := sum(len(of_text) > 1 for of_text in windows):
            say(f"[evaluation] {several} of {len(texts)} texts are longer than CTX={self.context}: scored in windows")
        scores = iter(self.score([request for of_text in windows for request in of_text]))
        return [sum(next(scores).logprob for _ in of_text) for of_text in windows]

    def score(self, requests: list[ScoreRequest]) -> list[Score]:
        """-> Scores in the order of the requests."""
        assert self.loaded, "load comes before"
        progress = EvaluationProgress("score", len(requests))
        scores: dict[int, Score] = {}
        most = self.context * self.loaded.plan.kv_slots
        for index, score in score_requests(self.loaded.model, requests, most):
            scores[index] = score
            progress(len(scores))
        return [scores[index] for index in range(len(requests))]

    # --- answers ------------------------------------------------------------------------------------------------------

    def generate(self, requests: list[tuple[str, EvaluationOptions]]) -> list[str]:
        """[(context, EvaluationOptions), ...] -> texts. A repeated request is sampled with another seed."""
        assert self.loaded, "load comes before"
        prompts: list[list[int]] = []
        rows: list[int] = []
        repeats: Counter[tuple[str, EvaluationOptions]] = Counter()
        for context, options in requests:
            room = self.context - positions_needed(0, options.max_tokens)
            prompts.append(self.fit(self.tokenizer.encode(context, self.separator), room, "answer"))
            rows.append(repeats[context, options])
            repeats[context, options] += 1
        self.say_cut("prompts")
        readers: queue.SimpleQueue[AnswerReader] = queue.SimpleQueue()
        progress = EvaluationProgress("generate", len(requests))
        answers: dict[int, str] = {}
        scheduler = Scheduler(self.loaded, max_queue=len(requests))
        try:
            # Sorted, so that requests with a shared prefix follow each other and reuse its KV cache.
            for index in sorted(range(len(requests)), key=lambda index: prompts[index]):
                options = requests[index][1]
                stream = Detokenizer(self.tokenizer, prompts[index], self.tokenizer.hidden_ids(options.until))
                reader = AnswerReader(index, stream, options.until, readers)
                scheduler.submit(self.request(prompts[index], options, rows[index]), reader)
            while len(answers) < len(requests):
                reader = readers.get()
                if reader.error:
                    raise Refused(f"an answer failed: {reader.error}")
                assert reader.answer is not None  # of a finished one without an error
                answers[reader.index] = reader.answer
                progress(len(answers))
        finally:
            scheduler.close()
        return [answers[index] for index in range(len(requests))]

    def request(self, prompt: list[int], options: EvaluationOptions, row: int) -> scheduling.Request:
        return scheduling.Request(
            tuple(prompt),
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            nucleus=options.nucleus,
            top_k=options.top_k,
            seed=(self.settings.seed + row) % 2**64,
            stop_ids=self.stop_ids,
        )

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages -> the text of the snapshot's chat template. Without a generation prompt the last message is one
        to be continued: the text that the template appends is removed. Special tokens in a message stay text: in what
        is returned they are broken in two, until it is encoded."""
        messages = self.tokenizer.break_special(messages, self.separator)
        text = self.tokenizer.render_chat(messages, self.settings.think, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def say_cut(self, what: str) -> None:
        if self.num_cut:
            say(f"[truncated] {self.num_cut} {what} were cut on the left to fit CTX={self.context}; raise CTX")
        self.num_cut, self.all_cut = 0, self.all_cut + self.num_cut


class AnswerReader:
    """Listener of one answer: collects its text and cancels the request at the first of the `until` strings."""

    def __init__(self, index: int, stream: Detokenizer, until: tuple[str, ...], done: "queue.SimpleQueue"):
        self.index = index
        self.until = until
        self.done = done  # gets this reader at the end
        self.stream = stream
        self.answer: str | None = None
        self.error: str | None = None

    def __call__(self, event: object) -> None:
        if isinstance(event, NewToken) and self.answer is None:
            self.stream.add_token(event.id)
            self.answer = cut_at(self.stream.text, self.until)
            if self.answer is not None:
                event.active.cancel()
        elif isinstance(event, Finished):
            self.error = event.error
            if self.answer is None:
                text = self.stream.text + self.stream.flush()
                cut = cut_at(text, self.until)
                self.answer = text if cut is None else cut
            self.done.put(self)


def cut_at(text: str, until: tuple[str, ...]) -> str | None:
    """The text before the first of the strings, None where none of them occurs."""
    found = [at for at in map(text.find, until) if at >= 0]
    return text[: min(found)] if found else None


def first_token(tokenizer: TextTokenizer, opened: OpenedSnapshot) -> list[int]:
    """The id that stands for an empty context of a family without prefix: bos_token, or else eos_token."""
    for key in ("bos_token", "eos_token"):
        if (token := tokenizer.special_tokens.get(key)) and (ids := tokenizer.find_ids([token])):
            return ids
    if stop_ids := (*tokenizer.stop_ids, *opened.config.stop_ids):
        return [stop_ids[0]]
    raise Refused(f"{tokenizer.model_path}: declares no bos_token and no eos_token to stand for an empty context")


class EvaluationProgress:
    """A line on stderr every few seconds."""

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.started = time.perf_counter()
        self.last_notice = self.started

    def __call__(self, done: int) -> None:
        now = time.perf_counter()
        if now - self.last_notice > PROGRESS_SECONDS:
            self.last_notice = now
            seconds = now - self.started
            left = seconds / done * (self.total - done)
            say(f"[{self.what} {done}/{self.total} req | {seconds:.0f} s | {left:.0f} s left]")
