"""The generation loop: sequences decode together, with draft tokens, beside chunks of prompts that are prefilled.

One step is: propose draft tokens, one forward pass over all token rows, verify. It returns what each sequence got, and
the caller decides what follows. An expert that several rows ask for is read once. T token rows, D model
width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forward.finite import check_logits
from forward.layers_forward import Progress, layers_forward
from forward.lm_head import LOGIT_ROWS, lm_head
from forward.model import Model
from generate.accept import StepResult, accept
from generate.draft import Drafter, NoDraft
from generate.sampler import TokenLogprobs, token_logprobs
from generate.sequence import Drafts, Prefill, PromptChunks, Sequence


@dataclass(slots=True)
class BatchCounters:
    """Sums over all steps. tokens: those that were emitted, counted by whoever emits them."""

    tokens: int = 0
    forwards: int = 0
    answer_rows: int = 0  # token rows of sequences that went through the layers, draft tokens included
    prompt_rows: int = 0
    proposed: int = 0
    accepted: int = 0
    failed_forwards: int = 0


class Batch:
    """The sequences that decode. They leave when they end."""

    def __init__(self, model: Model, drafter: Drafter | None = None):
        self.model = model
        self.profile = model.profile
        self.drafter: NoDraft = drafter or NoDraft()
        self.sequences: list[Sequence] = []
        self.counters = BatchCounters()
        self.max_prompt_rows = model.prefill_chunk  # of a prompt in one step

    def prefill(
        self, prompt: Prefill, progress: Progress | None = None, should_stop: Callable[[], bool] | None = None
    ) -> Tensor | None:
        """Prefill a whole prompt, chunk by chunk -> logits [1, V] after it; None when should_stop ended it: then the KV
        cache holds the chunks before."""
        while True:
            chunk = prompt, min(prompt.num_left, self.max_prompt_rows)
            logits = self.forward([], None, [chunk], progress, should_stop)
            if logits is None or not prompt.num_left:
                return logits[0] if logits else None

    def start(self, sequence: Sequence, logits: Tensor) -> StepResult:
        """Begin to decode: sample the first token from logits [1, V] after the prompt."""
        with self.profile.measure("sample"):
            result = accept(sequence, logits)
        if sequence.finish_reason is None:
            self.sequences.append(sequence)
        return result

    def step(self) -> list[StepResult]:
        """Decode: every sequence gets a token or more."""
        sequences, drafts = self.sequences, self.drafter.propose(self.sequences)
        logits = self.forward(sequences, drafts)
        assert logits
        return self.verify(sequences, drafts, logits)

    def forward(
        self,
        sequences: list[Sequence],
        drafts: Drafts | None,
        prompt_chunks: PromptChunks = (),
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Tensor] | None:
        """One forward pass over the pending ids of sequences with their draft tokens, and over the next tokens of
        prompts -> logits: of each sequence [1 + drafts, V], of each prompt [1, V] at its end, else [0, V].

        None when should_stop ended it. Then, and after an exception, all KV caches are as before.
        """
        items: list[Sequence | Prefill] = [*sequences, *(prompt for prompt, _ in prompt_chunks)]
        lengths = [item.kv.length for item in items]
        tokens = [sequence.ids[length:] for sequence, length in zip(sequences, lengths, strict=False)]  # pending
        num_logits = [1] * len(sequences)  # from the last token row back
        if drafts:
            tokens = [ids + of_sequence for ids, of_sequence in zip(tokens, drafts, strict=True)]
            num_logits = [1 + len(of_sequence) for of_sequence in drafts]
        num_sequence_rows = sum(map(len, tokens))
        for (prompt, count), length in zip(prompt_chunks, lengths[len(sequences) :], strict=True):
            tokens.append(prompt.ids[length : length + count])
            num_logits.append(int(length + count == len(prompt.ids)))
        logits = None
        try:
            logits = self.run_layers(items, tokens, lengths, num_logits, progress, should_stop)
        finally:
            if logits is None:
                self.counters.failed_forwards += 1
                self.drafter.abandon()
                for item, length in zip(items, lengths, strict=True):
                    item.kv.trim(length)
        if logits is not None:
            self.counters.forwards += 1
            self.counters.answer_rows += num_sequence_rows
            self.counters.prompt_rows += sum(map(len, tokens)) - num_sequence_rows
        return logits

    def verify(self, sequences: list[Sequence], drafts: Drafts | None, logits: list[Tensor]) -> list[StepResult]:
        """Sample from the logits of `forward`; the KV caches drop the draft tokens that are not accepted. drafts None:
        the drafter learns nothing."""
        results = []
        for at, sequence in enumerate(sequences):
            num_known = len(sequence.ids)
            with self.profile.measure("sample"):
                result = accept(sequence, logits[at], drafts[at] if drafts else ())
            sequence.kv.trim(num_known + result.num_accepted)
            self.counters.proposed += result.num_drafts
            self.counters.accepted += result.num_accepted
            results.append(result)
        if drafts is not None:
            self.drafter.finish([result.num_accepted for result in results])
        self.sequences = [sequence for sequence in self.sequences if sequence.finish_reason is None]
        return results

    @torch.inference_mode()
    def run_layers(
        self,
        items: list[Sequence | Prefill],
        tokens: list[list[int]],
        lengths: list[int],
        num_logits: list[int],
        progress: Progress | None,
        should_stop: Callable[[], bool] | None,
    ) -> list[Tensor] | None:
        """The tokens of each item, from position `length` on -> for each item logits [num_logits, V] after its last
        tokens. Log-probabilities of prompts are added to them. None when should_stop ended it."""
        chunks = []
        batch = [(ids, item.kv) for ids, item in zip(tokens, items, strict=True)]
        for chunk, hidden in layers_forward(self.model, batch, progress, should_stop, self.drafter.routes):
            self.drafter.observe(chunk, hidden, items)
            chunks.append(hidden)
        num_rows = sum(map(len, tokens))
        if sum(map(len, chunks)) < num_rows:
            return None
        hidden = chunks[0] if len(chunks) == 1 else torch.cat(chunks)  # [T, D], the items one after the other
        ends = list(accumulate(map(len, tokens)))
        scores = [
            (item.logprobs, self.score(item, hidden[end - len(ids) : end], length))
            for item, ids, length, end in zip(items, tokens, lengths, ends, strict=True)
            if isinstance(item, Prefill) and item.logprobs is not None
        ]
        if num_rows > sum(num_logits):
            rows = [row for end, count in zip(ends, num_logits, strict=True) for row in range(end - count, end)]
            hidden = hidden[rows]
        logits = hidden.new_empty(0, 0)
        if len(hidden):
            known = [length + len(ids) for length, ids in zip(lengths, tokens, strict=True)]
            positions = [i for n, count in zip(known, num_logits, strict=True) for i in range(n - count, n)]
            logits = check_logits(lm_head(self.model, hidden), positions)
        for logprobs, more in scores:
            logprobs += more
        return list(logits.split(num_logits)) if len(items) > 1 else [logits]

    def score(self, prompt: Prefill, hidden: Tensor, first: int) -> list[TokenLogprobs]:
        """hidden [T, D] after the tokens from position `first` on -> log-probabilities of the prompt's tokens that
        follow them. The logits of a few rows exist at a time."""
        out: list[TokenLogprobs] = []
        targets = prompt.ids[first + 1 : first + 1 + len(hidden)]
        for start in range(0, len(targets), LOGIT_ROWS):
            some = targets[start : start + LOGIT_ROWS]
            positions = range(first + start, first + start + len(some))
            logits = check_logits(lm_head(self.model, hidden[start : start + len(some)]), positions)
            scores = token_logprobs(logits, some, prompt.top_logprobs)
            out += [(token, *score) for token, score in zip(some, scores, strict=True)]
        return out
