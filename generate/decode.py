"""spec_decode, the one generation loop: draft (possibly nothing), verify in one forward, accept, emit.

A token at a position is drawn from (seed, row, position) alone, so a draft is accepted exactly if it equals what is
drawn, and the text is the same at any draft depth, greedy or sampled.
"""

from dataclasses import dataclass

from forward.step import step, step_all
from generate.draft import NoDraft
from text.prompt import positions_needed


@dataclass(slots=True)
class DecodeCounters:
    """What a generation did; forwards do not count the prefill."""

    tokens: int = 0
    forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    stop_id: int | None = None  # the stop token that ended it, if one did

    @property
    def tokens_per_forward(self):
        """Tokens drawn from the forwards after the prefill, which paid for the first one; 0 before any."""
        drawn = self.tokens + (self.stop_id is not None)
        return (drawn - 1) / self.forwards if self.forwards else 0.0


def spec_decode(model, kv, prompt_ids, sampler, max_tokens, stop_ids=(), draft=None, progress=None, counters=None):
    """Yield up to max_tokens ids that follow prompt_ids; a stop id ends it and is not yielded.

    kv may already hold a beginning of the prompt (kv.length of its ids); the rest is prefilled, and afterwards kv
    holds every id but the last yielded. Needs kv.room for the rest of the prompt and max_tokens - 1 more: ValueError
    otherwise. Nothing runs before the first `next`.
    """
    draft, counters = draft or NoDraft(), counters or DecodeCounters()
    ids, end = list(prompt_ids), len(prompt_ids) + max_tokens
    if kv.length >= len(ids):
        raise ValueError("spec_decode needs at least one prompt id that the KV cache does not hold")
    if positions_needed(len(ids), max_tokens) > kv.capacity:
        raise ValueError(f"{len(ids)} prompt tokens and {max_tokens} more do not fit {kv.capacity} positions")
    if max_tokens < 1:
        return

    try:
        # 1) prefill: the logits after the last prompt token alone
        logits = step(model, [(ids[kv.length :], kv)], progress, draft.follow)
        token = draw(model, sampler, logits[0], len(ids))
        while True:
            # 2) emit: stop ids and the limit are looked at before another forward is paid for
            if token in stop_ids:
                counters.stop_id = token
                return
            ids.append(token)
            counters.tokens += 1
            yield token
            left = end - len(ids)
            if left < 1:
                return

            # 3) draft, and verify the guesses and the new token in one forward
            guesses = draft.propose(ids, left - 1)[: left - 1]
            logits = step_all(model, [([token, *guesses], kv)], on_hidden=draft.follow, observer=draft.routes)
            counters.forwards += 1
            counters.proposed += len(guesses)

            # 4) accept while the draw agrees with the guess; the first that differs is the next token
            accepted = 0
            for guess in [*guesses, None]:
                token = draw(model, sampler, logits[accepted], len(ids) + accepted)
                if token != guess or token in stop_ids:
                    break
                accepted += 1
            draft.verified(accepted)
            counters.accepted += accepted
            for guess in guesses[:accepted]:
                ids.append(guess)
                counters.tokens += 1
                yield guess
            kv.trim(len(ids))
    finally:
        # Whoever stops listening in the middle of accepted guesses leaves no guess behind that was not yielded.
        kv.trim(min(kv.length, len(ids)))


def draw(model, sampler, logits, position):
    """The sampler's token, its time counted."""
    with model.profile.measure("sample"):
        return sampler.draw(logits, position)
