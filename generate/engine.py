"""Engine: N answers of one prompt in lock-step, as reinforcement learning and evaluation want them.

The prompt is prefilled once; its state is cloned to N rows, and each draws its own first token. A step gives one id and
one mask for each row: 1 where the id was sampled, 0 where a tool forced it. All rows share one forward, so an expert
that several of them ask for is read once. A row that is finished leaves the forward, and the others do not notice: a
token depends on (seed, row, position) and the logits of its row alone.

A forward may give a row more than one token: with drafts (generate/draft.py) each accepted draft token, and all that
a tool forces. Such a row runs ahead, and its tokens wait for the step in which every row has one, so the steps are
the same with any drafts.
"""

from collections import deque
from itertools import chain

import torch

from forward.model import Model
from forward.step import step_last
from generate.draft import Drafter, NoDraft
from generate.draft_length import DraftLength
from generate.kv_rows import BatchKvCache, HeadKvCache
from generate.sampler import Sampler
from generate.tools.row_state import RowState


class EngineRow:
    """One answer on its way, up to `end` ids with its prompt. runs_ahead: what a tool forces needs no forward of its
    own."""

    def __init__(self, state, sampler, end, runs_ahead):
        self.state, self.sampler, self.end, self.runs_ahead = state, sampler, end, runs_ahead
        self.ready = deque()  # (id, mask) that no step has given yet
        self.pending = []  # ids that the cache does not hold yet

    @property
    def is_going(self):
        return not self.state.is_completed and len(self.state.history) < self.end

    @property
    def num_left(self):
        """Tokens that may still come."""
        return self.end - len(self.state.history)

    def take(self, logits, guesses=()):
        """logits [1 + guesses, vocab], after the last id and after each guess -> how many guesses were what came, each
        after the one before."""
        for right, guess in enumerate((*guesses, None)):
            token = self.next(logits[right])
            if token != guess or not self.is_going:
                break
        self.pending = [token]
        while self.runs_ahead and self.state.has_forced and self.is_going:
            self.pending.append(self.next())
        return right

    def next(self, logits=None):
        """The next id, forced or drawn from logits [vocab]."""
        position = len(self.state.history)
        sampled = None if self.state.has_forced else self.sampler.draw(logits, position)
        token, mask = self.state.next_token(sampled)
        self.ready.append((token, mask))
        return token

    def give(self):
        """The (id, mask) of a step: of a row that is finished its terminal id."""
        return self.ready.popleft() if self.ready else (self.state.history[-1], 0)


class Engine:
    """model: ours, or any with `config` and forward(ids [B, T], kv_cache) -> logits [B, T, vocab], see HeadRows.

    tokenizer: encode(text) -> ids and decode(ids) -> text; only tools need it. terminal_ids end a row; by default the
    model's stop ids. tools: generate.tools.row_state.Tool, none by default. draft: guesses that a forward verifies for
    each row, auto or a number, none by default; `governor` then tells what became of them. Only our model drafts.

    forwards and forward_rows count the forwards after prefills, and the ids that went through the layers in them.
    """

    def __init__(self, model, tokenizer=None, terminal_ids=None, tools=(), draft=0):
        self.rows = LatentRows(model) if isinstance(model, Model) else HeadRows(model)
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        if self.tools and tokenizer is None:
            raise ValueError("tools need a tokenizer")
        if draft != "auto" and not str(draft or 0).isdecimal():
            raise ValueError(f"draft={draft}: expected auto or a number of guesses")
        self.governor, self.forwards, self.forward_rows = DraftLength(draft or 0), 0, 0
        if self.governor.most and not self.rows.runs_ahead:
            raise ValueError(f"draft={draft}: a model that keeps keys and values by heads cannot draft")
        self.terminal_ids = frozenset(self.rows.stop_ids if terminal_ids is None else terminal_ids)

    def generate(self, prompt_ids, num_samples=1, max_tokens=None, temperature=1.0, top_k=None, seed=42):
        """Yield (ids, masks) for each step, lists with one entry for each of num_samples rows, until every row has
        given a terminal id or max_tokens steps are done. max_tokens None: as many as the model has positions.

        A row that is finished repeats its terminal id with mask 0. top_k None or 0 keeps the whole vocabulary.
        ValueError for a prompt that is empty or too long, and for numbers out of range; nothing runs before the first
        `next`.
        """
        prompt_ids, capacity = self.check(prompt_ids, num_samples, max_tokens, temperature)
        if max_tokens == 0:
            return
        rows = [
            EngineRow(
                RowState(prompt_ids, self.tools, self.tokenizer, self.terminal_ids),
                Sampler(temperature, seed=seed, row=row, top_k=top_k or 0),
                capacity,
                self.rows.runs_ahead,
            )
            for row in range(num_samples)
        ]

        # 1) prefill once, clone: the first logits are those of every row
        prefilled = self.rows.new_cache(len(prompt_ids))
        draft = Drafter(self.rows.model, prefilled.states[0], self.governor) if self.governor.most else NoDraft()
        first = self.rows.forward([prompt_ids], prefilled, [1], draft)[0]
        cache = prefilled.clone(num_samples, capacity)
        draft = draft.clone(cache, prompt_ids)
        del prefilled
        for row in rows:
            row.take(first)

        going = rows
        while True:
            # 2) one id for each row: drawn, forced by a tool, or the terminal one of a row that is finished
            while all(row.ready or not row.is_going for row in rows):
                if not any(row.ready for row in rows):
                    return
                column, masks = zip(*(row.give() for row in rows), strict=True)
                yield list(column), list(masks)

            # 3) go on with the rows that do
            kept = [at for at, row in enumerate(going) if row.is_going]
            if len(kept) < len(going):
                going = [going[at] for at in kept]
                cache.keep(kept)
                draft.keep(kept)
            self.advance(going, cache, draft)

    def advance(self, going, cache, draft):
        """One forward: every row of `going` gets a token or more."""
        guesses = draft.propose_rows([(row.state.history, row.num_left - 1, len(row.pending)) for row in going])
        ids = [row.pending + of_row for row, of_row in zip(going, guesses, strict=True)]
        logits = self.rows.forward(ids, cache, [1 + len(of_row) for of_row in guesses], draft)
        self.forwards, self.forward_rows = self.forwards + 1, self.forward_rows + sum(map(len, ids))
        before = [len(row.state.history) for row in going]
        right = [row.take(of_row, mine) for row, of_row, mine in zip(going, logits, guesses, strict=True)]
        draft.verified_rows(right)
        if any(guesses):
            cache.trim_rows([length + count for length, count in zip(before, right, strict=True)])

    def check(self, prompt_ids, num_samples, max_tokens, temperature):
        """-> (a list of ids, positions that are needed)."""
        prompt_ids = list(prompt_ids)
        if not prompt_ids or not all(isinstance(i, int) for i in prompt_ids):
            raise ValueError("a prompt is a list of at least one token id")
        if num_samples < 1 or temperature < 0 or (max_tokens is not None and max_tokens < 0):
            raise ValueError(
                f"num_samples={num_samples}, temperature={temperature}, max_tokens={max_tokens}: "
                "expected a sample or more, and nothing negative"
            )
        most = self.rows.max_positions
        capacity = most if max_tokens is None else len(prompt_ids) + max_tokens
        # The last token needs no position of its own, but a row holds as many as it yields.
        if len(prompt_ids) > most or capacity > most + 1:
            raise ValueError(f"{len(prompt_ids)} prompt tokens and {max_tokens} more do not fit {most} positions")
        return prompt_ids, capacity

    def generate_batch(self, prompt_ids, num_samples=1, **options):
        """-> (sequences, masks), one list of ids and one of masks for each row: the prompt with mask 0, and what was
        generated up to the first terminal id, which is left out."""
        prompt_ids = list(prompt_ids)
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


class LatentRows:
    """Our own model: rows are KV caches, a forward is one batch over all of them."""

    runs_ahead = True  # a row may be longer than others

    def __init__(self, model):
        self.model, self.stop_ids = model, model.config.stop_ids
        self.max_positions = model.config.max_positions

    def new_cache(self, capacity):
        return BatchKvCache.empty(self.model.config, capacity)

    def forward(self, ids, cache, counts, draft):
        """ids: a list for each row -> for each row logits [count, vocab], after the last so many."""
        batch = list(zip(ids, cache.states, strict=True))
        return step_last(self.model, batch, counts, on_hidden=draft.follow, observer=draft.routes).split(counts)


class HeadRows:
    """A model that keeps keys and values by heads. Its config gives n_layer, n_head, n_kv_head, n_embd, sequence_len;
    forward(ids int64 [B, T], kv_cache) writes into the cache, advances it by T, and returns logits [B, T, vocab]."""

    runs_ahead = False  # the cache has one length for all rows

    def __init__(self, model):
        self.model, self.stop_ids = model, getattr(model.config, "stop_ids", ())
        self.max_positions = model.config.sequence_len
        self.device = model.get_device() if hasattr(model, "get_device") else "cpu"

    def new_cache(self, capacity):
        c = self.model.config
        return HeadKvCache(c.n_layer, 1, capacity, c.n_kv_head, c.n_embd // c.n_head, device=self.device)

    def forward(self, ids, cache, counts, draft):
        """As of LatentRows, for lists of one length, counts of 1 and no draft."""
        before, count = cache.length, len(ids[0])
        cache.check_room(count)
        logits = self.model.forward(torch.tensor(ids, dtype=torch.long, device=self.device), cache)
        if cache.length != before + count:
            raise ValueError(f"the model advanced its cache by {cache.length - before} for {count} tokens")
        return logits[:, -1:]


def naive_generate(model, prompt_ids, max_tokens, sampler):
    """What Engine must equal: every token by a forward over the whole text so far, nothing kept -> ids.

    model: ours or one of HeadRows; sampler: of generate.sampler."""
    rows = LatentRows(model) if isinstance(model, Model) else HeadRows(model)
    ids = list(prompt_ids)
    for position in range(len(ids), len(ids) + max_tokens):
        [logits] = rows.forward([ids], rows.new_cache(len(ids)), [1], NoDraft())
        ids = list(chain(ids, [sampler.draw(logits[0], position)]))
    return ids[len(prompt_ids) :]
