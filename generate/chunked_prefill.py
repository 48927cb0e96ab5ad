"""Chunked prefill: which tokens of which prompts go through the layers in the next step of the scheduler."""

from generate.sequence import Prefill

# Prompt rows in a step beside sequences that decode, which wait for them: few where all experts are in memory, for
# there each row costs its arithmetic; many where a few rows already have nearly all experts read.
ROWS_IN_MEMORY, ROWS_FROM_DISK = 64, 256
OLDEST_DIVISOR = 4  # the prompt that waits longest gets 1 / 4 of these rows, whatever shorter ones there are
SHORT_DIVISOR = 4  # a prompt with at most 1 / 4 of these rows left is short: it does not wait for a long one
DRAFT_DIVISOR = 4  # 1 / 4 of the rows of a chunk is left to draft tokens


class ChunkedPrefill:
    """Divides the rows of a step among prompts."""

    def __init__(self, prefill_chunk: int, fits_memory: bool):
        self.prefill_chunk = prefill_chunk
        self.shared_rows = ROWS_IN_MEMORY if fits_memory else ROWS_FROM_DISK
        self.was_long = False  # whether the last step had tokens of a prompt that is not short

    def schedule(self, prefills: list[Prefill], num_sequences: int) -> list[tuple[Prefill, int]]:
        """prefills, the oldest first -> [(Prefill, number of its tokens), ...] for the next step.

        After tokens of a long prompt short ones go without one, once: they have waited for it already. Else the
        shortest come first, for what waits behind a long one costs it little, but the oldest gets its share.
        """
        most = self.prefill_chunk
        if num_sequences:
            free = most - most // DRAFT_DIVISOR - num_sequences
            most = max(1, min(self.shared_rows, free))
        short = [prefill for prefill in prefills if prefill.num_left <= max(1, most // SHORT_DIVISOR)]
        alone = short if self.was_long and len(short) < len(prefills) else []
        counts: dict[Prefill, int] = {}
        for prefill in [] if alone else prefills[:1]:
            counts[prefill] = min(prefill.num_left, max(1, most // OLDEST_DIVISOR))
        for prefill in sorted(alone or prefills, key=lambda prefill: prefill.num_left):
            before = counts.get(prefill, 0)
            counts[prefill] = min(prefill.num_left, before + most - sum(counts.values()))
        self.was_long = not alone and len(short) < len(prefills)
        return [(prefill, count) for prefill, count in counts.items() if count]
