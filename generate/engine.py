"""Engine: N samples of one prompt in lock-step, as reinforcement learning and evaluation want them.

The prompt is prefilled once; its KV cache is cloned for N sequences, and each samples its own first token. A step gives
one id and one mask for each sequence: 1 where the id was sampled, 0 where a tool forced it. All share one forward
(generate/batch.py). A sequence that ends leaves the forward, and the others do not change: a token depends on (seed,
row, position) and the logits of its own sequence.

A forward may give a sequence more than one token: with drafts (generate/draft.py) each accepted draft token, and all
that a tool forces. Such a sequence runs ahead, and its tokens wait for the step in which every sequence has one, so the
steps are the same with any drafts. B sequences, T tokens of each, V vocabulary.
"""

import warnings
from collections.abc import Collection, Iterator
from typing import Any

from errors import Refused
from forward.kv_cache import kv_cache_bytes, make_kv_cache
from forward.lm_head import LOGIT_ROWS
from forward.model import Model
from generate.also_named import also_named
from generate.batch import Batch
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.head_batch import HeadBatch, head_cache_bytes, make_head_cache, named_terminal_ids
from generate.head_kv_cache import HeadKvRow
from generate.proposers import Proposers
from generate.sampler import Sampler
from generate.sequence import Prefill, Sequence
from generate.tools.tool_state import Tokenizer, Tool, ToolState
from load.plan import gb
from machine.memory import available_bytes
from text.prompt import positions_needed

LOGIT_BYTES = 6  # of a logit: float32, and masks


class Engine:
    """Generates N samples of a prompt in lock-step.

    model: our Model, or any with `config` and forward(ids [B, T], kv_cache) -> logits [B, T, V], see HeadBatch.

    tokenizer: tools need one. terminal_ids end a sequence; by default the model's stop ids, and assistant_end and bos
    where the tokenizer names them as nanochat's does. draft: draft tokens that a forward verifies for each sequence,
    auto or a number, which draft_guard pauses where hardly any is accepted; `draft_length` has their statistics. Only
    our model drafts.

    forwards and forward_rows count the forwards after prefills, and the token rows that went through the layers in
    them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        terminal_ids: Collection[int] | None = None,
        tools: Collection[Tool] = (),
        draft: int | str | None = 0,
        draft_guard: bool = True,
    ):
        self.model, self.tokenizer, self.tools = model, tokenizer, tuple(tools)
        self.by_heads = not isinstance(model, Model)
        if self.tools and tokenizer is None:
            raise ValueError("tools need a tokenizer")
        if draft != "auto" and not str(draft or 0).isdecimal():
            raise ValueError(f"draft={draft}: expected auto or a number of draft tokens")
        self.draft_length = DraftLength(draft or 0, draft_guard)
        self.forwards = 0
        self.forward_rows = 0
        if self.draft_length.most and self.by_heads:
            raise ValueError(f"draft={draft}: a model that keeps keys and values by heads cannot draft")
        config = model.config
        self.max_positions = config.sequence_len if self.by_heads else config.max_positions
        if terminal_ids is None:
            terminal_ids = {*getattr(config, "stop_ids", ()), *named_terminal_ids(tokenizer)}
        self.terminal_ids = frozenset(terminal_ids)

    @also_named(tokens="prompt_ids")
    def generate(
        self,
        prompt_ids: Collection[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (ids, masks) for each step, lists with one entry for each of num_samples sequences, until each has
        given a terminal id or max_tokens steps are done. max_tokens None: as many as the model has positions.

        A sequence that ended repeats its terminal id with mask 0. top_k None or 0 keeps the whole vocabulary.
        ValueError for a prompt that is empty or too long, and for numbers out of range; Refused where the memory budget
        does not hold the KV caches (with max_tokens None they are as long as it holds, with a warning). Nothing runs
        before the first `next`.
        """
        prompt_ids, capacity = self.check(prompt_ids, num_samples, max_tokens, temperature)
        if capacity == len(prompt_ids):
            return
        # 1) prefill once: the first logits are those of every sequence
        drafter = Drafter(self.model, self.draft_length) if self.draft_length.most else None
        batch, prompt = new_batch(self.model, prompt_ids, capacity, drafter)
        first = batch.prefill(prompt)
        assert first is not None

        # 2) clone its KV cache, sample the first tokens
        if not self.by_heads:
            self.model.experts.make_room((num_samples - 1) * len(prompt_ids) * self.position_bytes)
        states = [ToolState(prompt_ids, self.tools, self.tokenizer, self.terminal_ids) for _ in range(num_samples)]
        for row, (kv, proposers) in enumerate(self.clone(prompt, num_samples, capacity)):
            sequence = Sequence(
                list(prompt_ids),
                kv,
                Sampler(temperature, seed=seed, row=row, top_k=top_k or 0),
                capacity - len(prompt_ids),
                self.terminal_ids,
                proposers=proposers,
                tool_state=states[row],
                is_lockstep=self.by_heads,
            )
            batch.start(sequence, first)
        del prompt, first  # and, of a model by heads, the cache that was cloned

        # 3) yield a step when every sequence has a token for it, or has ended; decode until then
        for at in range(capacity - len(prompt_ids)):
            while any(len(sequence.ids) <= len(prompt_ids) + at for sequence in batch.sequences):
                before = batch.counters.answer_rows
                batch.step()
                self.forwards += 1
                self.forward_rows += batch.counters.answer_rows - before
            if all(len(state.masks) <= at for state in states):
                return
            # The ids of a tool state hold the terminal id too.
            column = [state.ids[min(len(prompt_ids) + at, len(state.ids) - 1)] for state in states]
            yield column, [state.masks[at] if at < len(state.masks) else 0 for state in states]

    def clone(self, prompt: Prefill, num_samples: int, capacity: int) -> Iterator[tuple[Any, Proposers | None]]:
        """-> (KV cache, proposers) of each sequence."""
        if self.by_heads:
            cache = prompt.kv.cache.clone(num_samples, capacity)
            yield from ((HeadKvRow(cache, row), None) for row in range(num_samples))
            return
        if prompt.proposers:
            prompt.proposers.ngrams.index(prompt.ids)  # once for all
        yield prompt.kv, prompt.proposers
        for _ in range(num_samples - 1):
            kv = prompt.kv.clone()
            yield kv, prompt.proposers and prompt.proposers.clone(kv)

    def check(
        self, prompt_ids: Collection[int], num_samples: int, max_tokens: int | None, temperature: float
    ) -> tuple[list[int], int]:
        """-> (a list of ids, ids of a sequence at most)."""
        prompt_ids = list(prompt_ids)
        if not prompt_ids or not all(isinstance(i, int) for i in prompt_ids):
            raise ValueError("a prompt is a list of at least one token id")
        if num_samples < 1 or temperature < 0 or (max_tokens is not None and max_tokens < 0):
            raise ValueError(
                f"num_samples={num_samples}, temperature={temperature}, max_tokens={max_tokens}: "
                "expected a sample or more, and nothing negative"
            )
        most = self.max_positions
        end = max(most, len(prompt_ids) + 1) if max_tokens is None else len(prompt_ids) + max_tokens
        if len(prompt_ids) > most or positions_needed(len(prompt_ids), end - len(prompt_ids)) > most:
            raise ValueError(f"{len(prompt_ids)} prompt tokens and {max_tokens} more do not fit {most} positions")
        return prompt_ids, self.plan_rows(len(prompt_ids), num_samples, end, max_tokens is None)

    @property
    def position_bytes(self) -> int:
        """Memory of a position in the KV cache of a sequence."""
        return head_cache_bytes(self.model, 1) if self.by_heads else kv_cache_bytes(self.model.config, 1)

    def plan_rows(self, num_prompt: int, num_samples: int, end: int, may_shorten: bool) -> int:
        """-> ids of a sequence at most: `end`, or what memory holds. Refused where that is less, if not may_shorten."""
        if self.by_heads:
            room, source = available_bytes(), "are free"
            beside = num_prompt * self.position_bytes  # of the prompt, while it is cloned
        else:
            room, source = self.model.kv_room_bytes, "the memory budget leaves"
            beside = LOGIT_BYTES * self.model.config.vocab_size * max(0, num_samples - LOGIT_ROWS)
        if room is None or num_samples * end * self.position_bytes + beside <= room:
            return end
        held = max(0, room - beside) // (num_samples * self.position_bytes)
        need = gb(num_samples * end * self.position_bytes + beside)
        rows = f"{num_samples} sequences of {end} tokens need {need} for KV caches, {gb(room)} {source}"
        if not may_shorten or held <= num_prompt:
            fewer = max(0, room - beside) // (end * self.position_bytes)
            raise Refused(f"{rows}: take at most {fewer} sequences, or {held} tokens of each, or raise RAM_GB")
        warnings.warn(f"{rows}: they end at {held} tokens", stacklevel=4)
        return held

    @also_named(tokens="prompt_ids")
    def generate_batch(
        self, prompt_ids: Collection[int], num_samples: int = 1, **options: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """-> (sequences, masks), one list of ids and one of masks for each sequence: the prompt with mask 0, and what
        was generated up to the first terminal id, which is left out."""
        sequences = [list(prompt_ids) for _ in range(num_samples)]
        masks = [[0] * len(prompt_ids) for _ in range(num_samples)]
        is_over = [False] * num_samples
        for column, column_masks in self.generate(prompt_ids, num_samples, **options):
            for row, (token, mask) in enumerate(zip(column, column_masks, strict=True)):
                is_over[row] |= token in self.terminal_ids
                if not is_over[row]:
                    sequences[row].append(token)
                    masks[row].append(mask)
        return sequences, masks


def new_batch(
    model: Any, prompt_ids: list[int], capacity: int, drafter: Drafter | None = None
) -> tuple[Batch, Prefill]:
    """-> (an empty batch, a prompt to prefill with it) for our model or one of HeadBatch. Our KV cache has room for
    `capacity` positions."""
    if isinstance(model, Model):
        kv = make_kv_cache(model.config, capacity)
        return Batch(model, drafter), Prefill(prompt_ids, kv, Proposers(model, kv) if drafter else None)
    return HeadBatch(model), Prefill(prompt_ids, HeadKvRow(make_head_cache(model, len(prompt_ids)), 0))


def naive_generate(model: Any, prompt_ids: Collection[int], max_tokens: int, sampler: Sampler) -> list[int]:
    """The definition that Engine must equal: every token by a forward over the whole text so far, nothing kept -> ids.

    model: ours or one of HeadBatch."""
    ids = list(prompt_ids)
    for position in range(len(ids), len(ids) + max_tokens):
        batch, prompt = new_batch(model, ids, len(ids))
        logits = batch.prefill(prompt)
        assert logits is not None
        ids.append(sampler.sample(logits[0], position))
    return ids[len(prompt_ids) :]
