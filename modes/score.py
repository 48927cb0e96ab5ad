"""SCORE: log-likelihoods of the requests in a file, one line each on stdout in the order of the file.

    <ctxlen> <contlen> id id ...                       token ids, context then continuation
    {"context": ..., "continuation": ...}              JSON, each a text or a list of token ids

A line of output is `logprob contlen greedy`: the sum of log p over the continuation, its number of tokens, and 1 where
greedy decoding would have written it. The whole file is checked before anything runs; blank lines and bad ids are
errors that name the line.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from errors import Refused
from generate.score import Score, ScoreCounters, ScoreRequest, score_requests
from load.model import OpenedSnapshot, load_model
from machine.console import PrefillProgress, say
from machine.memory import rss_bytes
from modes.report import RunReport
from settings import Settings
from text.prompt import PromptPrefix, positions_needed
from text.tokenizer import TextTokenizer
from text.tokenizer_files import has_tokenizer

PROGRESS_SECONDS = 2.0  # between two lines about requests


def run_score(settings: Settings, opened: OpenedSnapshot) -> int:
    """-> 0 when every request has its line."""
    requests = read_requests(settings, opened)
    loaded = load_model(settings, opened)
    run, counters = RunReport("score", loaded), ScoreCounters()
    results: dict[int, Score] = {}
    num_printed, said_at = 0, run.started.seconds

    # At most: a context that several requests share is prefilled once.
    progress = PrefillProgress(sum(len(request.context) + len(request.continuation) - 1 for request in requests))
    for index, score in score_requests(loaded.model, requests, loaded.context, counters, progress):
        results[index] = score
        while num_printed in results:  # results come in the order of waves, lines in that of the file
            score = results[num_printed]
            print(f"{score.logprob:.6f} {len(requests[num_printed].continuation)} {int(score.greedy)}")
            num_printed += 1
        sys.stdout.flush()
        if (now := time.perf_counter()) - said_at > PROGRESS_SECONDS or len(results) == len(requests):
            said_at = now
            seconds = now - run.started.seconds
            left = seconds / len(results) * (len(requests) - len(results))
            say(
                f"[score {len(results)}/{len(requests)} req | {seconds:.0f} s | {left:.0f} s left | "
                f"RSS {rss_bytes() / 1e9:.2f} GB | hit {loaded.model.experts.counters.hit_rate:.1%}]"
            )
    run.end()
    run.num_prompt_ids = counters.context_rows
    whole = run.phases()[0]
    say(
        f"[done] {len(requests)} requests in {whole.seconds:.2f} s | rows: {counters.context_rows} of contexts, "
        f"{counters.continuation_rows} of continuations | read {whole.cache.bytes_read / 1e9:.3f} GB"
    )
    run.finish(settings, requests=len(requests), **asdict(counters))
    return 0


def read_requests(settings: Settings, opened: OpenedSnapshot) -> list[ScoreRequest]:
    """Read SCORE, with the family's prefix added. Refused, naming the line."""
    path = Path(settings.score or "")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise Refused(f"SCORE={path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Refused(f"SCORE={path}: is not valid UTF-8") from None
    if not lines[-1]:
        lines.pop()  # after the newline of the last line
    if not lines:
        raise Refused(f"SCORE={path}: holds no requests")
    reader = ScoreFileReader(settings, opened)
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(reader.parse_line(line.strip()))
        except ValueError as error:
            raise Refused(f"SCORE={path}, line {number}: {error}") from None
    return requests


class ScoreFileReader:
    """Turns lines into ScoreRequests. Texts, and the prefix of a family that has one, need the tokenizer."""

    def __init__(self, settings: Settings, opened: OpenedSnapshot) -> None:
        self.config = opened.config
        self.context = opened.context
        self.tokenizer = TextTokenizer(opened.folder, self.config) if has_tokenizer(opened.folder) else None
        self.prefix = PromptPrefix(self.config, self.tokenizer, settings.prefix)
        for line in self.prefix.notices:
            say(line)

    def parse_line(self, line: str) -> ScoreRequest:
        """ValueError says what is wrong with the line."""
        if not line:
            raise ValueError("is blank; every line must be a request")
        context, continuation = self.parse_json(line) if line.startswith("{") else self.parse_ids(line)
        for token in (*context, *continuation):
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.config.vocab_size}")
        context = self.prefix.prepend(context)
        if not context:
            raise ValueError("the context is empty; the first token of a text has no log-likelihood")
        if positions_needed(len(context), len(continuation)) > self.context:
            raise ValueError(f"has {len(context) + len(continuation)} tokens, CTX is {self.context}; raise CTX")
        return ScoreRequest(tuple(context), tuple(continuation))

    def parse_ids(self, line: str) -> tuple[list[int], list[int]]:
        """<ctxlen> <contlen> id id ..."""
        words = line.split()
        # int() alone would also take 1_0 and digits of other scripts; no id has 20 digits.
        if len(words) < 2 or not all(w.isascii() and w.removeprefix("-").isdigit() and len(w) < 20 for w in words):
            raise ValueError("expected whole numbers: ctxlen contlen id id ...")
        num_context, num_continuation, *ids = map(int, words)
        if min(num_context, num_continuation) < 0:
            raise ValueError("ctxlen and contlen cannot be negative")
        if len(ids) != num_context + num_continuation:
            raise ValueError(f"has {len(ids)} ids, ctxlen + contlen is {num_context + num_continuation}")
        return ids[:num_context], ids[num_context:]

    def parse_json(self, line: str) -> tuple[list[int], list[int]]:
        """{"context": text or ids, "continuation": text or ids}"""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("is not valid JSON") from None
        if set(fields) != {"context", "continuation"}:
            found = ", ".join(sorted(fields)) or "nothing"
            raise ValueError(f'needs exactly "context" and "continuation", has {found}')
        context, continuation = fields["context"], fields["continuation"]
        if isinstance(context, str) and isinstance(continuation, str):
            return self.encode_pair(context, continuation)
        for key, ids in fields.items():
            if not isinstance(ids, list) or any(type(i) is not int for i in ids):
                raise ValueError(f"{key} must be a list of token ids, or both must be texts")
        return context, continuation

    def encode_pair(self, context: str, continuation: str, separator: str | None = None) -> tuple[list[int], list[int]]:
        """Encode two texts. Spaces that end the context go to the continuation, as in lm-eval.

        They are encoded together; where a token spans the border (a word cut in two), each is encoded alone, so that
        every character of the continuation is scored.
        """
        if self.tokenizer is None:
            raise ValueError("texts need the snapshot's tokenizer.json; give token ids instead")
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        context_ids = self.tokenizer.encode(stripped, separator)
        ids = self.tokenizer.encode(stripped + continuation, separator)
        if ids[: len(context_ids)] == context_ids:
            return context_ids, ids[len(context_ids) :]
        return context_ids, self.tokenizer.encode(continuation, separator, is_start=not context_ids)
