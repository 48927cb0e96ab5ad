"""What an evaluation asks of a model: log-likelihoods of continuations and of whole texts, answers up to a stop string.

Texts are encoded as SCORE encodes them, so the numbers are those of SCORE; requests with the same context are computed
together (generate/score.py). Answers are generated KV_SLOTS at a time (generate/scheduler.py), and a shared prefix is
prefilled once. What does not fit CTX is cut on the left, and said.
"""

import queue
import time
from dataclasses import dataclass

from errors import Refused
from generate import scheduler as scheduling
from generate.scheduler import Finished, NewToken, Scheduler
from generate.score import ScoreRequest, score_requests
from machine.console import say
from modes.score import ScoreFileReader
from text.detokenizer import Detokenizer
from text.prompt import all_stop_ids, positions_needed

PROGRESS_SECONDS = 5.0
DEFAULT_ANSWER = 256  # tokens, where a task says nothing; that is lm_eval's own
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # its names, the first one wins


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """How an answer is generated. The text before the first of the `until` strings is the answer."""

    until: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_ANSWER
    temperature: float = 0.0
    nucleus: float = 1.0
    top_k: int = 0

    @staticmethod
    def read(kwargs):
        """A task's generation_kwargs -> Options. Refused for what would change the answer and is not known."""
        kwargs = dict(kwargs)
        until = kwargs.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        lengths = [kwargs.pop(name, None) for name in LENGTHS]
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
    """A snapshot whose headers are read; `load` brings the model, which everything but encoding needs."""

    def __init__(self, settings, opened):
        self.settings, self.context = settings, opened.context
        self.reader = ScoreFileReader(settings, opened)
        self.tokenizer = self.reader.tokenizer
        if self.tokenizer is None:
            raise Refused(f"{opened.folder}: has no tokenizer.json; an evaluation is made of texts")
        # In front of every text, cut or not, stands the family's prefix.
        self.prefix = self.reader.prefix.ids
        self.start = self.prefix or first_token(self.tokenizer, opened)  # stands for an empty context
        self.stop_ids = all_stop_ids(opened.config, self.tokenizer)
        self.num_cut = self.all_cut = 0  # texts that were cut on the left: since the last word about it, and in all
        self.loaded = None

    def load(self, loaded):
        """Its plan says how many KV caches there may be at once."""
        self.loaded = loaded

    # --- texts -> ids -------------------------------------------------------------------------------------------------

    def pair(self, context, continuation):
        """Two texts -> Request, of at most CTX + 1 ids. An empty context is the prefix, or else one token."""
        if context:
            context_ids, ids = self.reader.encode_pair(context, continuation)
        else:
            context_ids, ids = [], self.tokenizer.encode(continuation)
            if ids[: len(self.start)] == self.start:
                ids = ids[len(self.start) :]
        return ScoreRequest(tuple(self.fit(context_ids, self.context + 1 - len(ids), "continuation")), tuple(ids))

    def fit(self, ids, room, what):
        """A context -> at most `room` ids: the prefix, and what stands nearest to its end."""
        ids = list(self.reader.prefix.prepend(ids) or self.start)
        least = max(len(self.prefix), 1)
        if room < least:
            raise Refused(f"a {what} of {self.context + 1 - room} tokens does not fit CTX={self.context}; raise CTX")
        if len(ids) <= room:
            return ids
        self.num_cut += 1
        kept = room - len(self.prefix)
        return self.prefix + ids[len(ids) - kept :]

    def windows(self, text):
        """A whole text -> Requests that score each of its tokens once. Where it is longer than CTX every window but the
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

    def loglikelihood(self, pairs):
        """[(context, continuation), ...] -> [(log-likelihood, whether greedy decoding would write it), ...]"""
        requests = [self.pair(context, continuation) for context, continuation in pairs]
        self.say_cut("contexts")
        return [(score.logprob, score.greedy) for score in self.score(requests)]

    def loglikelihood_rolling(self, texts):
        """Texts -> the log-likelihood of each, from its first token on."""
        windows = [self.windows(text) for text in texts]
        if several := sum(len(of_text) > 1 for of_text in windows):
            say(f"[evaluation] {several} of {len(texts)} texts are longer than CTX={self.context}: scored in windows")
        scores = iter(self.score([request for of_text in windows for request in of_text]))
        return [sum(next(scores).logprob for _ in of_text) for of_text in windows]

    def score(self, requests):
        """-> Scores in the order of the requests."""
        progress, scores = EvaluationProgress("score", len(requests)), {}
        most = self.context * self.loaded.plan.kv_slots
        for index, score in score_requests(self.loaded.model, requests, most):
            scores[index] = score
            progress(len(scores))
        return [scores[index] for index in range(len(requests))]

    # --- answers ------------------------------------------------------------------------------------------------------

    def generate(self, requests):
        """[(context, Options), ...] -> texts. The same request asked again is sampled anew."""
        prompts, rows, asked = [], [], {}
        for context, options in requests:
            room = self.context - positions_needed(0, options.max_tokens)
            prompts.append(self.fit(self.tokenizer.encode(context), room, "answer"))
            rows.append(asked.setdefault((context, options), 0))
            asked[context, options] += 1
        self.say_cut("prompts")
        readers, progress = queue.SimpleQueue(), EvaluationProgress("generate", len(requests))
        scheduler, answers = Scheduler(self.loaded, max_queue=len(requests)), {}
        try:
            # Those that begin alike come one after the other: the beginning is read in once.
            for index in sorted(range(len(requests)), key=lambda index: prompts[index]):
                options = requests[index][1]
                reader = AnswerReader(index, self.tokenizer, options.until, readers)
                scheduler.submit(self.request(prompts[index], options, rows[index]), reader)
            while len(answers) < len(requests):
                reader = readers.get()
                if reader.error:
                    raise Refused(f"an answer failed: {reader.error}")
                answers[reader.index] = reader.answer
                progress(len(answers))
        finally:
            scheduler.close()
        return [answers[index] for index in range(len(requests))]

    def request(self, prompt, options, row):
        return scheduling.Request(
            tuple(prompt),
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            nucleus=options.nucleus,
            top_k=options.top_k,
            seed=(self.settings.seed + row) % 2**64,
            stop_ids=self.stop_ids,
        )

    def render_chat(self, messages, add_generation_prompt=True):
        """Messages -> the text of the snapshot's chat template. Without a generation prompt the last message is one
        that goes on: what the template puts after it is cut off."""
        text = self.tokenizer.render_chat(messages, self.settings.think, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def say_cut(self, what):
        if self.num_cut:
            say(f"[truncated] {self.num_cut} {what} were cut on the left to fit CTX={self.context}; raise CTX")
        self.num_cut, self.all_cut = 0, self.all_cut + self.num_cut


class AnswerReader:
    """Listens to one answer: its text up to the first of the `until` strings, with which the work on it ends."""

    def __init__(self, index, tokenizer, until, done):
        self.index, self.until, self.done = index, until, done
        self.stream, self.answer, self.error = Detokenizer(tokenizer), None, None

    def __call__(self, event):
        if isinstance(event, NewToken) and self.answer is None:
            self.stream.push(event.id)
            self.answer = cut_at(self.stream.text, self.until)
            if self.answer is not None:
                event.job.cancel()
        elif isinstance(event, Finished):
            self.error = event.error
            if self.answer is None:
                text = self.stream.text + self.stream.finish()
                cut = cut_at(text, self.until)
                self.answer = text if cut is None else cut
            self.done.put(self)


def cut_at(text, until):
    """The text before the first of the strings, None where none of them occurs."""
    found = [at for at in map(text.find, until) if at >= 0]
    return text[: min(found)] if found else None


def first_token(tokenizer, opened):
    """What stands for an empty context where the family has no prefix: the declared bos_token, or else eos_token."""
    for key in ("bos_token", "eos_token"):
        declared = tokenizer.tokenizer_config.get(key)
        declared = declared.get("content") if isinstance(declared, dict) else declared
        if isinstance(declared, str) and (ids := tokenizer.find_ids([declared])):
            return ids
    if ids := (*tokenizer.stop_ids, *opened.config.stop_ids)[:1]:
        return list(ids)
    raise Refused(f"{tokenizer.path.parent}: declares no bos_token and no eos_token to stand for an empty context")


class EvaluationProgress:
    """A line on stderr every few seconds."""

    def __init__(self, what, total):
        self.what, self.total, self.started = what, total, time.perf_counter()
        self.said = self.started

    def __call__(self, done):
        now = time.perf_counter()
        if now - self.said > PROGRESS_SECONDS:
            self.said, seconds = now, now - self.started
            left = seconds / done * (self.total - done)
            say(f"[{self.what} {done}/{self.total} req | {seconds:.0f} s | {left:.0f} s left]")
