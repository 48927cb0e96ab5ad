"""accept: the one place where tokens are sampled and draft tokens accepted."""

from dataclasses import dataclass

from torch import Tensor

from generate.sampler import TokenLogprobs, token_logprobs
from generate.sequence import Sequence


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
