"""What goes through the layers together: every answer with its guesses, and some of the prompts that are read in.

A step is one forward, so an expert that several ask for is read once. What is drawn depends on (seed, row, position)
and the logits of its own row alone: an answer is the same alone or in any company.
"""

from dataclasses import dataclass

import torch

from errors import Refused
from forward.finite import NonFinite
from forward.lm_head import LOGIT_ROWS
from forward.step import logits_after, step_hidden
from generate.decode import draw
from generate.draft import Drafter
from generate.request import NewToken, Prefilled
from generate.sampler import Sampler, token_logprobs

# Rows of prompts in a step beside answers, which wait for them: few where all experts are in memory, for there each
# costs its arithmetic; many where nearly all experts have to be read for a few rows already.
ROWS_IN_MEMORY, ROWS_FROM_DISK = 64, 256
OLDEST_SHARE = 4  # of these rows the prompt that waits longest gets one in so many, whatever shorter ones there are
SHORT_SHARE = 4  # a prompt with at most one in so many of them left is short: it does not wait for a long one
GUESS_SHARE = 4  # of the rows of a chunk, for guesses


class Interrupted(Exception):
    """Nobody waits any more for what goes through the layers."""


class Sequence:
    """A row of a job that is being answered. Its slot holds all ids but the last."""

    def __init__(self, job, row, slot):
        r = job.request
        self.job, self.row, self.slot = job, row, slot
        self.sampler = Sampler(r.temperature, r.nucleus, r.seed, row, r.top_k)
        self.end = len(r.prompt_ids) + r.max_tokens
        self.drawn, self.reason = [], None  # [(id, log p, top), ...] that were not told yet; why it ends with them

    @property
    def num_left(self):
        return self.end - len(self.slot.ids)

    def draw(self, model, logits, guesses=()):
        """logits [1 + guesses, vocab], after the last id and after each guess -> how many guesses were what came."""
        r, position = self.job.request, len(self.slot.ids)
        for right, guess in enumerate((*guesses, None)):
            token = draw(model, self.sampler, logits[right], position + right)
            if token in r.stop_ids:
                self.job.stop_ids[self.row], self.reason = token, "stop"
                return right
            logprob = top = None
            if r.top_logprobs is not None:
                [(logprob, top)] = token_logprobs(logits[right : right + 1], [token], r.top_logprobs)
            self.drawn.append((token, logprob, top))
            if position + right + 1 == self.end:
                self.reason = "length"
            if token != guess or self.reason:
                return right + (token == guess)

    def give(self):
        """Tell what was drawn, as long as somebody waits for it -> how many tokens."""
        before = len(self.slot.ids)
        for token, logprob, top in self.drawn:
            if self.row in self.job.cancelled:
                self.reason = "cancelled"
                break
            self.slot.ids.append(token)
            self.job.tell(NewToken(self.job, self.row, token, logprob, top))
        self.drawn = []
        self.slot.kv.trim(min(self.slot.kv.length, len(self.slot.ids)))
        return len(self.slot.ids) - before


class Prefill:
    """A job whose prompt is read in, into the first of its slots."""

    def __init__(self, job, slots):
        self.job, self.slots, self.slot = job, slots, slots[0]
        r = job.request
        self.logprobs = [(r.prompt_ids[0], None, None)] if r.prompt_logprobs else None

    @property
    def num_left(self):
        return len(self.job.request.prompt_ids) - self.slot.kv.length

    def score(self, model, hidden, first):
        """hidden [T, D] after the prompt's tokens from position `first` on -> log-probabilities of those that follow;
        the logits of a few rows exist at a time."""
        r, out = self.job.request, []
        targets = r.prompt_ids[first + 1 : first + 1 + len(hidden)]
        for start in range(0, len(targets), LOGIT_ROWS):
            some = targets[start : start + LOGIT_ROWS]
            rows = slice(start, start + len(some))
            logits = logits_after(model, hidden[rows], range(first + start, first + start + len(some)))
            scores = token_logprobs(logits, some, r.top_logprobs or 0)
            out += [(token, *score) for token, score in zip(some, scores, strict=True)]
        return out


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """What a forward takes of an Answer, its last id and guesses, or of a Reading, the next of its prompt."""

    of: Sequence | Prefill
    tokens: list[int]

    @property
    def kv(self):
        return self.of.slot.kv

    @property
    def is_answer(self):
        return isinstance(self.of, Sequence)

    @property
    def ends_prompt(self):
        return not self.is_answer and len(self.tokens) == self.of.num_left

    @property
    def num_wanted(self):
        """Tokens, from the last one back, whose hidden rows are wanted."""
        return len(self.tokens) if self.is_answer or self.of.logprobs else int(self.ends_prompt)


@dataclass(slots=True)
class BatchCounters:
    """What all steps did. Tokens are those of answers, each counted when it is told."""

    tokens: int = 0
    forwards: int = 0
    answer_rows: int = 0  # that went through the layers, guesses included
    prompt_rows: int = 0
    proposed: int = 0
    accepted: int = 0
    failed_forwards: int = 0


class Batch:
    """The answers and prompts under way. free(slot, job, row, reason) is called for each slot that nobody writes to any
    more, then finish(job, row, reason, error); is_closing() tells that nothing matters any more."""

    def __init__(self, model, governor, fits_memory, free, finish, is_closing):
        self.model, self.free, self.finish, self.is_closing = model, free, finish, is_closing
        self.draft = Drafter(model, None, governor)
        self.shared_rows = ROWS_IN_MEMORY if fits_memory else ROWS_FROM_DISK
        self.answers, self.readings, self.counters = [], [], BatchCounters()
        self.was_long = False  # whether the last forward had a part of a prompt that is not short

    @property
    def is_empty(self):
        return not self.answers and not self.readings

    def step(self):
        """One forward over all there is, and what follows from it."""
        self.drop_cancelled()
        if self.is_empty:
            return
        pieces = self.share_out()
        self.draft.take([answer.slot.sources for answer in self.answers], [r.slot.sources for r, _ in pieces])
        guesses, num_others = None, sum(count for _, count in pieces)
        if self.answers:
            guesses = self.guess(num_others)
        parts = [
            ScheduledTokens(answer, [answer.slot.ids[-1], *mine])
            for answer, mine in zip(self.answers, guesses or [()] * len(self.answers), strict=True)
        ]
        for reading, count in pieces:
            at = reading.slot.kv.length
            parts.append(ScheduledTokens(reading, list(reading.job.request.prompt_ids[at : at + count])))
        try:
            outcome = self.forward(parts)
        except Interrupted:
            return
        except Exception as error:
            self.run_alone(parts, error)
            return
        self.go_on(parts, *outcome, is_drafted=guesses is not None)

    def drop_cancelled(self):
        for answer in list(self.answers):
            if answer.row in answer.job.cancelled:
                self.end(answer, "cancelled")
        for reading in list(self.readings):
            job = reading.job
            if job.is_dropped:
                self.fail(reading, "cancelled")
            for row in sorted(job.left & job.cancelled):
                self.finish(job, row, "cancelled", None)

    def share_out(self):
        """-> [(Reading, how many of its tokens)] of the next forward.

        After a part of a long prompt short ones go without one, once: they have waited for it already. Else the
        shortest are read first, for what waits behind a long one costs it little, but the oldest gets its share.
        """
        most = self.model.prefill_chunk
        if self.answers:
            free = most - most // GUESS_SHARE - len(self.answers)
            most = max(1, min(self.shared_rows, free))
        short = [reading for reading in self.readings if reading.num_left <= max(1, most // SHORT_SHARE)]
        alone = short if self.was_long and len(short) < len(self.readings) else []
        counts = {}
        for reading in [] if alone else self.readings[:1]:
            counts[reading] = min(reading.num_left, max(1, most // OLDEST_SHARE))
        for reading in sorted(alone or self.readings, key=lambda reading: reading.num_left):
            before = counts.get(reading, 0)
            counts[reading] = min(reading.num_left, before + most - sum(counts.values()))
        self.was_long = not alone and len(short) < len(self.readings)
        return [(reading, count) for reading, count in counts.items() if count]

    def guess(self, num_others):
        """-> guesses for each answer, or None where making them failed: then there are none."""
        wanted = [(answer.slot.ids, answer.num_left - 1, 1) for answer in self.answers]
        try:
            return self.draft.propose_rows(wanted, num_others)
        except (Refused, NonFinite):
            self.draft.given_up()
            return None

    def go_on(self, parts, logits, prompt_logprobs, is_drafted=False):
        """What follows from a forward over the parts."""
        c = self.counters
        c.forwards += 1
        c.prompt_rows += sum(len(part.tokens) for part in parts if not part.is_answer)
        answers = [part for part in parts if part.is_answer]
        c.answer_rows += sum(len(part.tokens) for part in answers)

        # 1) draw, and forget the guesses that were wrong
        accepted = []
        for part, of_part in zip(answers, logits, strict=False):
            right = part.of.draw(self.model, of_part, part.tokens[1:])
            part.kv.trim(part.kv.length - len(part.tokens) + 1 + right)
            accepted.append(right)
        if is_drafted:
            self.draft.verified_rows(accepted)
        c.proposed += sum(len(part.tokens) - 1 for part in answers)
        c.accepted += sum(accepted)

        # 2) prompts that are read in: every row of the job begins, with a token of its own from the same logits
        begun = []
        for part, of_part in zip(parts[len(answers) :], logits[len(answers) :], strict=True):
            if part.of.logprobs:
                part.of.logprobs += prompt_logprobs[part.of]
            if not part.of.num_left:
                begun += self.begin(part.of, of_part)

        # 3) tell
        for answer in [*(part.of for part in answers), *begun]:
            self.give(answer)

    def forward(self, parts):
        """-> (logits for each part: after every token of an answer, after the last of a prompt, none before;
        log-probabilities {Reading: ...}). After an error all is as before."""
        lengths, is_done = [part.kv.length for part in parts], False
        wanted = [part.num_wanted for part in parts]
        ends = [part.ends_prompt for part in parts]
        try:
            batch = [(part.tokens, part.kv) for part in parts]
            hidden = step_hidden(self.model, batch, wanted, self.watch(parts), self.draft.follow, self.draft.routes)
            scores = {
                part.of: part.of.score(self.model, rows, length)
                for part, rows, length in zip(parts, hidden, lengths, strict=True)
                if not part.is_answer and part.of.logprobs
            }
            counts = [len(p.tokens) if p.is_answer else int(end) for p, end in zip(parts, ends, strict=True)]
            rows = [of_part[len(of_part) - count :] for of_part, count in zip(hidden, counts, strict=True)]
            positions = [i for p, n in zip(parts, counts, strict=True) for i in range(p.kv.length - n, p.kv.length)]
            logits = [()] * len(parts)
            if positions:
                logits = logits_after(self.model, torch.cat(rows), positions).split(counts)
            is_done = True
            return logits, scores
        finally:
            if not is_done:
                self.counters.failed_forwards += 1
                self.draft.given_up()
                for part, length in zip(parts, lengths, strict=True):
                    part.kv.trim(length)

    def watch(self, parts):
        """A progress callback that ends a forward once a prompt in it is no longer wanted."""

        def look(*_):
            if self.is_closing() or any(not part.is_answer and part.of.job.is_dropped for part in parts):
                raise Interrupted

        return look

    def begin(self, reading, logits):
        """The prompt is read in -> the Answers of its rows, each with its first token drawn from logits [1, vocab]."""
        job, slots = reading.job, reading.slots
        self.readings.remove(reading)
        job.tell(Prefilled(job, reading.logprobs))
        answers = [Sequence(job, row, slot) for row, slot in enumerate(slots)]
        for answer in answers:
            if answer.row not in job.left:
                self.free(answer.slot, job, answer.row, "cancelled")  # while the prompt was read in
                continue
            if answer.slot is not reading.slot:
                answer.slot.begin(job.request.prompt_ids, reading.slot.kv.length, reading.slot)
            self.answers.append(answer)
            if job.request.max_tokens:
                answer.draw(self.model, logits)
            else:
                answer.reason = "length"
        return [answer for answer in answers if answer.row in job.left]

    def give(self, answer):
        self.counters.tokens += answer.give()
        if answer.reason:
            self.end(answer, answer.reason)

    def end(self, answer, reason, error=None):
        self.answers.remove(answer)
        self.free(answer.slot, answer.job, answer.row, reason)
        self.finish(answer.job, answer.row, reason, error)

    def fail(self, of, reason, error=None):
        """An answer, or all rows of a job whose prompt is read in, can or need not go on."""
        if isinstance(of, Sequence):
            self.end(of, reason, error)
            return
        self.readings.remove(of)
        for row, slot in enumerate(of.slots):
            self.free(slot, of.job, row, reason)
        for row in sorted(of.job.left):
            self.finish(of.job, row, reason, error)

    def run_alone(self, parts, error):
        """A forward over several failed: each by itself and without guesses, so that only those end which fail."""
        for part in parts:
            if len(parts) > 1:
                alone = [ScheduledTokens(part.of, part.tokens[:1] if part.is_answer else part.tokens)]
                try:
                    outcome = self.forward(alone)
                except Interrupted:
                    return
                except Exception as of_part:
                    error = of_part
                else:
                    self.go_on(alone, *outcome)
                    continue
            self.fail(part.of, "error", words_of(error))


def words_of(error):
    """One line for an error; those of the engine are one already."""
    known = isinstance(error, (Refused, NonFinite, ValueError))
    return str(error) if known else f"{type(error).__name__}: {error}"
