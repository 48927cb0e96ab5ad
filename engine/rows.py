"""Engine: N answers of one prompt in lock-step, as reinforcement learning and evaluation want them.

The prompt is prefilled once; its state is cloned to N rows, and each draws its own first token. A step gives one id and
one mask for each row: 1 where the id was sampled, 0 where a tool forced it. All rows share one forward a step, so an
expert that several of them ask for is read once. A row that is finished leaves the forward, and the others do not
notice: a token depends on (seed, row, position) and the logits of its row alone.
"""

from itertools import chain

import torch

from engine.kv_rows import HeadCache, LatentCache
from engine.sample import Sampler
from engine.tools.row_state import RowState
from forward.model import Model
from forward.step import step


class Engine:
    """model: ours, or any with `config` and forward(ids [B, T], kv_cache) -> logits [B, T, vocab], see HeadRows.

    tokenizer: encode(text) -> ids and decode(ids) -> text; only tools need it. terminal_ids end a row; by default the
    model's stop ids. tools: engine.tools.row_state.Tool, none by default.
    """

    def __init__(self, model, tokenizer=None, terminal_ids=None, tools=()):
        self.rows = LatentRows(model) if isinstance(model, Model) else HeadRows(model)
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        if self.tools and tokenizer is None:
            raise ValueError("tools need a tokenizer")
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
        samplers = [Sampler(temperature, seed=seed, row=row, top_k=top_k or 0) for row in range(num_samples)]
        states = [RowState(prompt_ids, self.tools, self.tokenizer, self.terminal_ids) for _ in range(num_samples)]

        # 1) prefill once, clone: the first logits are those of every row
        prefilled = self.rows.new_cache(len(prompt_ids))
        first = self.rows.forward([prompt_ids], prefilled)[0]
        cache = prefilled.clone(num_samples, capacity)
        del prefilled
        logits = dict.fromkeys(range(num_samples), first)  # row -> [vocab], of the rows that go on

        for position in range(len(prompt_ids), capacity):
            # 2) one id for each row: drawn, forced by a tool, or the terminal one of a row that is finished
            column, masks = [], []
            for row, state in enumerate(states):
                token, mask = state.history[-1], 0
                if row in logits:
                    sampled = None if state.has_forced else samplers[row].draw(logits[row], position)
                    token, mask = state.next_token(sampled)
                column.append(token)
                masks.append(mask)
            yield column, masks

            # 3) go on with the rows that do
            going = [row for row in logits if not states[row].is_completed]
            if not going or position + 1 == capacity:
                return
            if len(going) < len(logits):
                cache.keep([i for i, row in enumerate(logits) if row in going])
            of_rows = self.rows.forward([[column[row]] for row in going], cache)
            logits = dict(zip(going, of_rows, strict=True))

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
    """Our own model: rows are KvStates, a forward is one batch over all of them."""

    def __init__(self, model):
        self.model, self.stop_ids = model, model.config.stop_ids
        self.max_positions = model.config.max_positions

    def new_cache(self, capacity):
        return LatentCache.empty(self.model.config, capacity)

    def forward(self, ids, cache):
        """ids: a list for each row -> logits [rows, vocab] after the last of each."""
        return step(self.model, list(zip(ids, cache.states, strict=True)))


class HeadRows:
    """A model that keeps keys and values by heads. Its config gives n_layer, n_head, n_kv_head, n_embd, sequence_len;
    forward(ids int64 [B, T], kv_cache) writes into the cache, advances it by T, and returns logits [B, T, vocab]."""

    def __init__(self, model):
        self.model, self.stop_ids = model, getattr(model.config, "stop_ids", ())
        self.max_positions = model.config.sequence_len
        self.device = model.get_device() if hasattr(model, "get_device") else "cpu"

    def new_cache(self, capacity):
        c = self.model.config
        return HeadCache(c.n_layer, 1, capacity, c.n_kv_head, c.n_embd // c.n_head, device=self.device)

    def forward(self, ids, cache):
        before, count = cache.length, len(ids[0])
        cache.check_room(count)
        logits = self.model.forward(torch.tensor(ids, dtype=torch.long, device=self.device), cache)
        if cache.length != before + count:
            raise ValueError(f"the model advanced its cache by {cache.length - before} for {count} tokens")
        return logits[:, -1]


def naive_generate(model, prompt_ids, max_tokens, sampler):
    """What Engine must equal: every token by a forward over the whole text so far, nothing kept -> ids.

    model: ours or one of HeadRows; sampler: of engine.sample."""
    rows = LatentRows(model) if isinstance(model, Model) else HeadRows(model)
    ids = list(prompt_ids)
    for position in range(len(ids), len(ids) + max_tokens):
        logits = rows.forward([ids], rows.new_cache(len(ids)))[0]
        ids = list(chain(ids, [sampler.draw(logits, position)]))
    return ids[len(prompt_ids) :]
