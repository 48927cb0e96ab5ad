"""Rows of a batch: sequences that decode, and prompts that are prefilled."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from generate.sampler import Sampler, TokenLogprobs
from generate.tools.tool_state import ToolState

if TYPE_CHECKING:  # a drafter works on sequences
    from generate.draft import Proposers


class Sequence:
    """A text that is continued token by token. Its KV cache holds the first kv.length of its ids, the rest is pending.

    max_tokens are counted from the ids at the start. stop_ids end it and do not become part of it. top_logprobs None:
    no log-probabilities; n: those of each token and of the n likeliest. is_lockstep: a step gives it one token, also
    where a tool forces several. kv: a KvCache or HeadKvRow. `owner` belongs to whoever made the sequence.
    """

    def __init__(
        self,
        ids: list[int],
        kv: Any,
        sampler: Sampler,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        top_logprobs: int | None = None,
        proposers: "Proposers | None" = None,
        tool_state: ToolState | None = None,
        is_lockstep: bool = False,
        owner: Any = None,
    ):
        self.ids, self.kv = ids, kv
        self.sampler = sampler
        self.end = len(ids) + max_tokens
        self.stop_ids = stop_ids
        self.top_logprobs = top_logprobs
        self.proposers = proposers
        self.tool_state = tool_state
        self.is_lockstep = is_lockstep
        self.owner = owner
        self.stop_id: int | None = None  # the stop token that ended it
        self.finish_reason: str | None = None if max_tokens else "length"

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.end - len(self.ids)

    def truncate(self, length: int) -> None:
        """Forget the ids from `length` on."""
        del self.ids[length:]
        self.kv.trim(min(self.kv.length, length))


class Prefill:
    """A prompt on its way into a KV cache. with_logprobs: log-probabilities of its tokens are collected too."""

    def __init__(
        self,
        ids: list[int],
        kv: Any,
        proposers: "Proposers | None" = None,
        with_logprobs: bool = False,
        top_logprobs: int | None = None,
        owner: Any = None,
    ):
        self.ids, self.kv = ids, kv
        self.proposers = proposers
        self.top_logprobs = top_logprobs or 0
        self.logprobs: list[TokenLogprobs] | None = [(ids[0], None, None)] if with_logprobs else None
        self.owner = owner

    @property
    def num_left(self) -> int:
        """Tokens that the KV cache does not hold yet."""
        return len(self.ids) - self.kv.length


PromptChunks = Collection[tuple[Prefill, int]]  # prompts, and how many of their tokens go through the layers next
Drafts = list[list[int]]  # draft tokens of each sequence
