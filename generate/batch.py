"""The generation loop: sequences decode together, with draft tokens, beside chunks of prompts that are prefilled.

One step is: propose draft tokens, one forward pass over all token rows, verify. It returns what each sequence got, and
the caller decides what follows. An expert that several rows ask for is read once. T token rows, D model width, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forward.layers_forward import Progress, layers_forward
from forward.lm_head import LOGIT_ROWS
from forward.model import Model
from forward.step import logits_after
from generate.draft import Drafter, NoDraft
from generate.sampler import TokenLogprobs, token_logprobs
from generate.sequence import Drafts, Prefill, PromptChunks, Sequence, StepResult, accept

Scheduled = tuple[
    Sequence | Prefill, list[int], int
]  # its next token ids, and logits after how many, counted from the last


@dataclass(slots=True)
class BatchCounters:
    """Sums over all steps. tokens: those that were emitted, counted by whoever emits them."""

    tokens: int = 0
    forwards: int = 0
    answer_rows: int = 0  # token rows of sequences that went through the layers, draft tokens included
    prompt_rows: int = 0
    proposed: int = 0
    accepted: int = 0
    failed_forwards: int = 0  # failed or stopped


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
        prompts -> logits: of each sequence [1 + drafts, V], of each prompt [1, V] at its end, else no rows.

        None when should_stop ended it. Then, and after an exception, all KV caches are as before.
        """
        scheduled: list[Scheduled] = [
            (sequence, sequence.ids[sequence.kv.length :] + draft, 1 + len(draft))
            for sequence, draft in zip(sequences, drafts or [[] for _ in sequences], strict=True)
        ]
        for prompt, count in prompt_chunks:
            end = prompt.kv.length + count
            scheduled.append((prompt, prompt.ids[prompt.kv.length : end], int(end == len(prompt.ids))))
        lengths = [item.kv.length for item, _, _ in scheduled]
        logits = None
        try:
            logits = self.run_layers(scheduled, progress, should_stop)
        finally:
            if logits is None:
                self.counters.failed_forwards += 1
                self.drafter.abandon()
                for (item, _, _), length in zip(scheduled, lengths, strict=True):
                    item.kv.trim(length)
        if logits is not None:
            num_rows = [len(ids) for _, ids, _ in scheduled]
            self.counters.forwards += 1
            self.counters.answer_rows += sum(num_rows[: len(sequences)])
            self.counters.prompt_rows += sum(num_rows[len(sequences) :])
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
        self, scheduled: list[Scheduled], progress: Progress | None, should_stop: Callable[[], bool] | None
    ) -> list[Tensor] | None:
        """-> logits of each item; None when should_stop ended it. Log-probabilities of prompts are added to them."""
        batch = [(ids, item.kv) for item, ids, _ in scheduled]
        chunks = []
        for chunk, hidden in layers_forward(self.model, batch, progress, should_stop, self.drafter.routes):
            self.drafter.observe(chunk, hidden, [item for item, _, _ in scheduled])
            chunks.append(hidden)
        if sum(map(len, chunks)) < sum(len(ids) for ids, _ in batch):
            return None
        hidden = chunks[0] if len(chunks) == 1 else torch.cat(chunks)  # [T, D], the items one after the other
        rows: list[int] = []  # that need logits
        positions: list[int] = []
        scores, end = [], 0
        for item, ids, count in scheduled:
            end, length = end + len(ids), item.kv.length
            rows += range(end - count, end)
            positions += range(length - count, length)
            if isinstance(item, Prefill) and item.logprobs is not None:
                scores.append((item.logprobs, self.score(item, hidden[end - len(ids) : end], length - len(ids))))
        if len(rows) < end:
            hidden = hidden[rows]
        logits = logits_after(self.model, hidden, positions) if rows else hidden.new_empty(0, 0)
        for logprobs, more in scores:
            logprobs += more
        return list(logits.split([count for _, _, count in scheduled]))

    def score(self, prompt: Prefill, hidden: Tensor, first: int) -> list[TokenLogprobs]:
        """hidden [T, D] after the tokens from position `first` on -> log-probabilities of the prompt's tokens that
        follow them. The logits of a few rows exist at a time."""
        out: list[TokenLogprobs] = []
        targets = prompt.ids[first + 1 : first + 1 + len(hidden)]
        for start in range(0, len(targets), LOGIT_ROWS):
            some = targets[start : start + LOGIT_ROWS]
            positions = range(first + start, first + start + len(some))
            logits = logits_after(self.model, hidden[start : start + len(some)], positions)
            scores = token_logprobs(logits, some, prompt.top_logprobs or 0)
            out += [(token, *score) for token, score in zip(some, scores, strict=True)]
        return out
