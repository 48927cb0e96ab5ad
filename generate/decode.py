"""spec_decode: one sequence with speculative decoding, as a generator over the generation loop of generate/batch.py."""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from forward.kv_cache import KvCache
from forward.layers_forward import Progress
from forward.model import Model
from generate.batch import Batch
from generate.draft import Drafter
from generate.proposers import Proposers
from generate.sampler import Sampler
from generate.sequence import Prefill, Sequence
from generate.tools.tool_state import ToolState
from text.prompt import positions_needed


@dataclass(slots=True)
class DecodeCounters:
    """Sums over one generation or several; forwards do not count the prefill."""

    tokens: int = 0
    forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    stop_id: int | None = None  # the stop token that ended it, if one did

    @property
    def tokens_per_forward(self) -> float:
        """Tokens sampled by the forwards after the prefill, which paid for the first one; 0 before any."""
        sampled = self.tokens + (self.stop_id is not None)
        return (sampled - 1) / self.forwards if self.forwards else 0.0


def spec_decode(
    model: Model,
    kv: KvCache,
    prompt_ids: list[int],
    sampler: Sampler,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    drafter: Drafter | None = None,
    progress: Progress | None = None,
    counters: DecodeCounters | None = None,
    proposers: Proposers | None = None,
    should_stop: Callable[[], bool] | None = None,
    tool_state: ToolState | None = None,
) -> Generator[int, None, None]:
    """Yield up to max_tokens ids that follow prompt_ids; a stop id ends the generation and is not yielded.

    kv may hold the first kv.length prompt ids; the rest is prefilled, and afterwards kv holds every id but the last
    yielded. It needs room for the rest of the prompt and max_tokens - 1 more: ValueError otherwise. proposers: of an
    earlier text in kv, by default new ones. should_stop is asked during the prefill: true ends the generation, and kv
    holds the chunks before. tool_state: tool calls of this text; forced tokens are yielded as sampled ones are. Nothing
    runs before the first `next`.
    """
    counters = counters or DecodeCounters()
    ids = list(prompt_ids)
    if kv.length >= len(ids):
        raise ValueError("spec_decode needs at least one prompt id that the KV cache does not hold")
    if positions_needed(len(ids), max_tokens) > kv.capacity:
        raise ValueError(f"{len(ids)} prompt tokens and {max_tokens} more do not fit {kv.capacity} positions")
    if max_tokens < 1:
        return
    if drafter and not proposers:
        proposers = Proposers(model, kv)
    batch, num_yielded = Batch(model, drafter), len(ids)
    sequence = Sequence(ids, kv, sampler, max_tokens, stop_ids, proposers=proposers, tool_state=tool_state)
    try:
        # 1) prefill: logits after the last prompt token alone
        logits = batch.prefill(Prefill(ids, kv, proposers), progress, should_stop)
        if logits is None:
            return
        batch.start(sequence, logits)
        while True:
            # 2) emit what the last step sampled, before another forward is paid for
            while num_yielded < len(ids):
                num_yielded += 1
                counters.tokens += 1
                yield ids[num_yielded - 1]
            if sequence.finish_reason == "stop":
                counters.stop_id = sequence.stop_id
            if sequence.finish_reason:
                return
            # 3) draft, verify in one forward, accept
            [result] = batch.step()
            counters.forwards += 1
            counters.proposed += result.num_drafts
            counters.accepted += result.num_accepted
    finally:
        # Whoever stops listening in the middle of accepted draft tokens leaves none behind that was not yielded.
        sequence.truncate(num_yielded)
