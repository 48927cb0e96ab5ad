"""SCORE: log-likelihoods of a file of requests, one line each on stdout in the order of the file.

    <ctxlen> <contlen> id id ...                       token ids, context then continuation
    {"context": ..., "continuation": ...}              JSON, each a text or a list of token ids

A line of output is `logprob contlen greedy`: the sum of log p over the continuation, its tokens, and 1 when greedy
decoding would have written it. Blank lines, and ids that are none, are errors that name the line: a file is checked
whole before anything runs.
"""

import json
import sys
import time
from pathlib import Path

from errors import Refused
from generate.score import ScoreCounters, ScoreRequest, score_requests
from load.model import load_model
from machine.console import say
from machine.memory import rss_bytes
from modes.report import RunReport, profile_line, write_report
from text.prompt import PromptPrefix, positions_needed
from text.tokenizer import TextTokenizer

PROGRESS_SECONDS, LAYER_SECONDS = 2.0, 10.0


def run_score(settings, opened):
    """-> 0 when every request has its line."""
    requests = read_requests(settings, opened)
    loaded = load_model(settings, opened)
    run, counters, results, printed = RunReport("score", loaded), ScoreCounters(), {}, 0
    said = run.started.seconds

    def layer_progress(layer, num_layers, rows):
        nonlocal said
        if time.perf_counter() - said > LAYER_SECONDS:  # a wave of a large model takes minutes, of a small one none
            said = time.perf_counter()
            say(f"[prefill] layer {layer}/{num_layers} | {rows} tokens")

    for index, score in score_requests(loaded.model, requests, loaded.context, counters, layer_progress):
        results[index] = score
        while printed in results:  # waves end out of order, lines do not
            score = results[printed]
            print(f"{score.logprob:.6f} {len(requests[printed].continuation)} {int(score.greedy)}")
            printed += 1
        sys.stdout.flush()
        if (now := time.perf_counter()) - said > PROGRESS_SECONDS or len(results) == len(requests):
            said = now
            say(progress_line(len(results), len(requests), now - run.started.seconds, loaded.model))
    run.end()
    run.num_prompt_ids = counters.context_rows
    numbers = run.numbers(
        0,
        requests=len(requests),
        context_rows=counters.context_rows,
        continuation_rows=counters.continuation_rows,
    )
    say(
        f"[done] {len(requests)} requests in {numbers['prefill_s']:.2f} s | rows: {counters.context_rows} of contexts, "
        f"{counters.continuation_rows} of continuations | read {numbers['expert_bytes_read'] / 1e9:.3f} GB"
    )
    run.summary(0)
    say(profile_line(numbers["profile"]))
    write_report(settings, numbers)
    return 0


def progress_line(done, total, seconds, model):
    left, rss = seconds / done * (total - done), rss_bytes() / 1e9
    hit = model.experts.counters.hit_rate
    return f"[score {done}/{total} req | {seconds:.0f} s | {left:.0f} s left | RSS {rss:.2f} GB | hit {hit:.1%}]"


def read_requests(settings, opened):
    """The file -> list of Request, prefixed by the family's rule. Every fault names its line."""
    path = Path(settings.score)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise Refused(f"SCORE={path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Refused(f"SCORE={path}: is not valid UTF-8") from None
    if not lines[-1]:
        lines.pop()  # the line end of the last line begins no other
    if not lines:
        raise Refused(f"SCORE={path}: holds no requests")
    reader = ScoreFileReader(settings, opened)
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(reader.read(line.strip()))
        except ValueError as error:
            raise Refused(f"SCORE={path}, line {number}: {error}") from None
    return requests


def is_whole(word):
    """Digits and perhaps a minus; int() alone would also take 1_0, or digits of other scripts. No id has 20 of them."""
    return word.isascii() and word.removeprefix("-").isdigit() and len(word) < 20


class ScoreFileReader:
    """Lines -> Requests. The tokenizer is needed for texts, and for the prefix of a family that has one."""

    def __init__(self, settings, opened):
        self.config, self.context = opened.config, opened.context
        self.tokenizer = None
        if (opened.folder / "tokenizer.json").exists():
            self.tokenizer = TextTokenizer(opened.folder, self.config)
        self.prefix = PromptPrefix(self.config, self.tokenizer, settings.prefix)
        if self.prefix.notice:
            say(self.prefix.notice)

    def read(self, line):
        """One line -> Request; ValueError says what is wrong with it."""
        if not line:
            raise ValueError("is blank; every line must be a request")
        context, continuation = self.read_json(line) if line.startswith("{") else self.read_ids(line)
        for token in (*context, *continuation):
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.config.vocab_size}")
        context = self.prefix.prepend(context)
        if not context:
            raise ValueError("the context is empty; the first token of a text has no log-likelihood")
        if positions_needed(len(context), len(continuation)) > self.context:
            raise ValueError(f"has {len(context) + len(continuation)} tokens, CTX is {self.context}; raise CTX")
        return ScoreRequest(tuple(context), tuple(continuation))

    def read_ids(self, line):
        """<ctxlen> <contlen> id id ..."""
        words = line.split()
        if len(words) < 2 or not all(is_whole(word) for word in words):
            raise ValueError("expected whole numbers: ctxlen contlen id id ...")
        num_context, num_continuation, *ids = map(int, words)
        if num_context < 0 or num_continuation < 0:
            raise ValueError("ctxlen and contlen cannot be negative")
        if len(ids) != num_context + num_continuation:
            raise ValueError(f"has {len(ids)} ids, ctxlen + contlen is {num_context + num_continuation}")
        return ids[:num_context], ids[num_context:]

    def read_json(self, line):
        """{"context": text or ids, "continuation": text or ids}"""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("is not valid JSON") from None
        if set(fields) != {"context", "continuation"}:
            raise ValueError(
                f'needs exactly "context" and "continuation", has {", ".join(sorted(fields)) or "nothing"}'
            )
        context, continuation = fields["context"], fields["continuation"]
        if isinstance(context, str) and isinstance(continuation, str):
            return self.encode_pair(context, continuation)
        for key, ids in fields.items():
            if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
                raise ValueError(f"{key} must be a list of token ids, or both must be texts")
        return context, continuation

    def encode_pair(self, context, continuation):
        """Two texts -> ids. The spaces that end a context belong to the continuation, as lm-eval does it. They are
        encoded together; where that merges a piece across the border (a word cut in two), each is encoded alone, so
        that every character of the continuation is scored."""
        if self.tokenizer is None:
            raise ValueError("texts need the snapshot's tokenizer.json; give token ids instead")
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        context_ids, whole = self.tokenizer.encode(context), self.tokenizer.encode(context + continuation)
        if whole[: len(context_ids)] == context_ids:
            return context_ids, whole[len(context_ids) :]
        return context_ids, self.tokenizer.encode(continuation)
