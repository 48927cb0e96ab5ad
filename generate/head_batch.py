"""HeadBatch: the generation loop for models that keep keys and values by heads, called as nanochat's GPT calls its own.

B sequences, T tokens of each, V vocabulary.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from forward.layers_forward import Progress
from forward.profile import Profile
from generate.batch import Batch, BatchCounters, Scheduled
from generate.draft import NoDraft
from generate.head_kv_cache import HeadKvCache


class HeadBatch(Batch):
    """All sequences are in one cache of one length. No drafts.

    The model's config gives n_layer, n_head, n_kv_head, n_embd, sequence_len; forward(ids int64 [B, T],
    kv_cache=HeadKvCache), or with the cache as second argument where none has that name, writes into the cache,
    advances it by T, and returns logits [B, T, V]. get_device() is optional; for the dtype of the cache see
    `cache_dtype`.
    """

    def __init__(self, model: Any):
        self.model: Any = model
        self.profile = Profile()
        self.drafter = NoDraft()
        self.sequences, self.counters = [], BatchCounters()
        self.max_prompt_rows = model.config.sequence_len
        parameters = inspect.signature(model.forward).parameters.values()
        self.has_named_cache = any(p.name == "kv_cache" or p.kind == p.VAR_KEYWORD for p in parameters)

    @torch.inference_mode()
    def run_layers(
        self, scheduled: list[Scheduled], progress: Progress | None, should_stop: Callable[[], bool] | None
    ) -> list[Tensor]:
        rows = [item.kv for item, _, _ in scheduled]
        cache, length = rows[0].cache, rows[0].length
        if len(rows) < cache.num_rows:  # the others have ended
            cache.keep([kv.row for kv in rows])
            for row, kv in enumerate(rows):
                kv.row = row
        tokens = torch.tensor([ids for _, ids, _ in scheduled], device=cache.keys.device)  # [B, T]
        cache.check_room(tokens.shape[1])
        forward = self.model.forward
        logits = forward(tokens, kv_cache=cache) if self.has_named_cache else forward(tokens, cache)  # [B, T, V]
        if cache.length != length + tokens.shape[1]:
            raise ValueError(f"the model advanced its cache by {cache.length - length} for {tokens.shape[1]} tokens")
        return list(logits[:, -1:].unbind())


def make_head_cache(model: Any, capacity: int) -> HeadKvCache:
    """An empty cache of one row for a model of HeadBatch."""
    c, device = model.config, model.get_device() if hasattr(model, "get_device") else "cpu"
    return HeadKvCache(c.n_layer, 1, capacity, c.n_kv_head, c.n_embd // c.n_head, cache_dtype(model), device)


def head_cache_bytes(model: Any, capacity: int) -> int:
    """Memory of a row of `capacity` positions."""
    c = model.config
    return 2 * c.n_layer * capacity * c.n_kv_head * (c.n_embd // c.n_head) * cache_dtype(model).itemsize


def cache_dtype(model: Any) -> torch.dtype:
    """The dtype in which a model computes its keys and values: its `compute_dtype` or that of its config, else that of
    its rotary table `cos` (nanochat's), else that of its first parameter, else float32."""
    for owner in (model, model.config):
        if isinstance(named := getattr(owner, "compute_dtype", None), torch.dtype):
            return named
    tensors = [getattr(model, "cos", None), *(model.parameters() if isinstance(model, torch.nn.Module) else ())]
    dtypes = (tensor.dtype for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point())
    return next(dtypes, torch.float32)


def named_terminal_ids(tokenizer: Any) -> set[int]:
    """The ids of assistant_end and bos, as far as a tokenizer names them as nanochat's does."""
    ids = set()
    for method, arguments in (("encode_special", ("<|assistant_end|>",)), ("get_bos_token_id", ())):
        with suppress(AttributeError, KeyError, ValueError):  # no such method, no such token
            ids.add(getattr(tokenizer, method)(*arguments))
    return ids - {None}
