"""Rows of a batch: sequences that decode, prompts that are prefilled, and `accept`, which samples the next tokens.

V vocabulary.
"""

from collections.abc import Collection
from dataclasses import InitVar, dataclass, field
from typing import Any

from torch import Tensor

from generate.proposers import Proposers
from generate.sampler import Sampler, TokenLogprobs, token_logprobs
from generate.tools.tool_state import ToolState


@dataclass(eq=False, slots=True)
class Sequence:
    """A text that is continued token by token. Its KV cache holds the first kv.length of its ids, the rest is pending.

    stop_ids end it and do not become part of it. top_logprobs None: no log-probabilities; n: those of each token and of
    the n likeliest. is_lockstep: a step gives it one token, also where a tool forces several.
    """

    ids: list[int]
    kv: Any  # KvCache or HeadKvRow
    sampler: Sampler
    max_tokens: InitVar[int]  # counted from the ids at the start
    stop_ids: Collection[int] = ()
    top_logprobs: int | None = None
    proposers: Proposers | None = None
    tool_state: ToolState | None = None
    is_lockstep: bool = False
    owner: Any = None  # of whoever made the sequence
    end: int = field(init=False)  # ids at most
    stop_id: int | None = field(default=None, init=False)  # the stop token that ended it
    finish_reason: str | None = field(default=None, init=False)

    def __post_init__(self, max_tokens: int) -> None:
        self.end = len(self.ids) + max_tokens
        self.finish_reason = None if max_tokens else "length"

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.end - len(self.ids)

    def truncate(self, length: int) -> None:
        """Forget the ids from `length` on."""
        del self.ids[length:]
        self.kv.trim(min(self.kv.length, length))


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt on its way into a KV cache. with_logprobs: log-probabilities of its tokens are collected too."""

    ids: list[int]
    kv: Any
    proposers: Proposers | None = None
    with_logprobs: InitVar[bool] = False
    top_logprobs: int | None = None
    owner: Any = None
    logprobs: list[TokenLogprobs] | None = field(default=None, init=False)

    def __post_init__(self, with_logprobs: bool) -> None:
        self.logprobs = [(self.ids[0], None, None)] if with_logprobs else None

    @property
    def num_left(self) -> int:
        """Tokens that the KV cache does not hold yet."""
        return len(self.ids) - self.kv.length


PromptChunks = Collection[tuple[Prefill, int]]  # prompts, and how many of their tokens go through the layers next
Drafts = list[list[int]]  # draft tokens of each sequence


@dataclass(slots=True)
class StepResult:
    """The tokens that one step gave a sequence; its finish_reason says whether they are its last."""

    sequence: Sequence
    tokens: list[TokenLogprobs]
    num_drafts: int
    num_accepted: int


def accept(sequence: Sequence, logits: Tensor, drafts: list[int] | tuple[()] = ()) -> StepResult:
    """Sample the next tokens of a sequence from logits [1 + drafts, V], after its last id and after each draft token.

    A draft token is accepted where it equals the token sampled at its position: the first one that differs is replaced
    by that token, and the rest is dropped. A token depends on (seed, row, position) and its logits alone, so the text
    is the same with any drafts, greedy or sampled; acceptance equals the draft token's probability (Leviathan et al.,
    2023, for a draft that proposes one token with certainty). Tokens that a tool forces follow without logits.
    """
    ids, tool_state = sequence.ids, sequence.tool_state
    tokens: list[TokenLogprobs] = []
    num_accepted, is_verifying = 0, True
    while sequence.finish_reason is None:
        row = logits[num_accepted]  # [V]
        if tool_state is None:
            token = sequence.sampler.sample(row, len(ids))
        else:
            token, _ = tool_state.next_token(None if tool_state.has_forced else sequence.sampler.sample(row, len(ids)))
        if token in sequence.stop_ids:
            sequence.stop_id, sequence.finish_reason = token, "stop"
            break
        logprob = top = None
        if sequence.top_logprobs is not None:
            [(logprob, top)] = token_logprobs(row[None], [token], sequence.top_logprobs)
        ids.append(token)
        tokens.append((token, logprob, top))
        if len(ids) == sequence.end:
            sequence.finish_reason = "length"
        elif is_verifying and num_accepted < len(drafts) and token == drafts[num_accepted]:
            num_accepted += 1
        else:
            is_verifying = False
            if tool_state is None or not tool_state.has_forced or sequence.is_lockstep:
                break
    return StepResult(sequence, tokens, len(drafts), num_accepted)
