"""SmallGpt: a model with parameters that is called, and calls its KV cache, as nanochat's GPT does."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEADS, KV_HEADS, DIM, VOCAB = 4, 2, 8, 64


class SmallGpt(nn.Module):
    """Two layers in `dtype`; each token is mixed with the embedding of the one before, which the cache keeps. Without a
    cache a forward is the definition that a forward with one must equal."""

    def __init__(self, dtype=torch.bfloat16, sequence_len=64):
        super().__init__()
        width = HEADS * DIM
        self.config = SimpleNamespace(
            n_layer=2, n_head=HEADS, n_kv_head=KV_HEADS, n_embd=width, sequence_len=sequence_len
        )
        generator = torch.Generator().manual_seed(4)

        def weight(*shape):
            return nn.Parameter((torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype))

        self.embedding, self.head = weight(VOCAB, width), weight(VOCAB, width)
        self.layers = nn.ParameterList(
            [weight(rows, width) for _ in range(2) for rows in (width, KV_HEADS * DIM, KV_HEADS * DIM, width)]
        )
        angles = torch.outer(torch.arange(sequence_len), 100.0 ** -torch.linspace(0, 1, DIM // 2))
        self.register_buffer("cos", angles.cos()[None, :, None].to(dtype))
        self.register_buffer("sin", angles.sin()[None, :, None].to(dtype))
        self.cache_dtypes = set()

    def get_device(self):
        return self.embedding.device

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        assert targets is None and loss_reduction == "mean"
        start, count = kv_cache.get_pos() if kv_cache else 0, idx.shape[1]
        turn = self.cos[:, start : start + count], self.sin[:, start : start + count]
        x = F.embedding(idx, self.embedding)  # [B, T, width]
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        if kv_cache:
            if kv_cache.prev_embedding is not None:
                before[:, :1] = kv_cache.prev_embedding
            kv_cache.prev_embedding = x[:, -1:, :]
        x = x + before / 2
        for layer in range(2):
            x = x + self.attend(F.rms_norm(x, x.shape[-1:]), layer, turn, kv_cache)
        return F.linear(F.rms_norm(x, x.shape[-1:]), self.head).float() * 3

    def attend(self, x, layer, turn, kv_cache):
        q, k, v, out = self.layers[4 * layer : 4 * layer + 4]
        rows, count, _ = x.shape
        q, k, v = (F.linear(x, each).view(rows, count, -1, DIM) for each in (q, k, v))
        q, k = rotate(q, *turn), rotate(k, *turn)
        start = 0
        if kv_cache:
            keys, values = kv_cache.get_layer_cache(layer)
            self.cache_dtypes.add(keys.dtype)
            start = int(kv_cache.cache_seqlens[0])
            keys[:, start : start + count], values[:, start : start + count] = k, v
            k, v = keys[:, : start + count], values[:, : start + count]
            if layer == kv_cache.n_layers - 1:
                kv_cache.advance(count)
        mask = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return F.linear(attended.transpose(1, 2).reshape(rows, count, -1), out)


def rotate(x, cos, sin):
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos + other * sin, other * cos - one * sin], -1)
