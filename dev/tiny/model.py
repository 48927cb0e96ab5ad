"""The trainable twin of the glm_moe_dsa forward pass, for models/tiny: batched, differentiable, no cache.

Parameter names are the published ones, so the state dict is the snapshot (the experts are split on saving). It is not
used for inference; the engine's own forward pass and transformers both read what it writes.

B batch, T positions, D hidden, H heads, N/R/V nope, rope and value width of a head, E experts, A active experts.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

LATENT_EPS = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, angles):
    """Interleaved pairs in, halves out, as the reference writes them. x [B, T, heads, R], angles [T, R/2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Indexer(nn.Module):
    """Its inputs are detached: the language loss gives it no gradient, its own loss (index_loss) trains it alone."""

    def __init__(self, c):
        super().__init__()
        self.heads, self.width, self.rope = c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim
        self.wq_b = linear(c.q_lora_rank, self.heads * self.width)
        self.wk = linear(c.hidden_size, self.width)
        self.k_norm = nn.LayerNorm(self.width, eps=LATENT_EPS)
        self.weights_proj = linear(c.hidden_size, self.heads)

    def forward(self, x, query_latent, angles):
        """-> index scores [B, T, T], not yet causal."""
        B, T, _ = x.shape
        x, query_latent = x.detach(), query_latent.detach()
        q = self.wq_b(query_latent).view(B, T, self.heads, self.width)
        k = self.k_norm(self.wk(x)).unsqueeze(2)
        q = torch.cat([rotate(q[..., : self.rope], angles), q[..., self.rope :]], dim=-1)
        k = torch.cat([rotate(k[..., : self.rope], angles), k[..., self.rope :]], dim=-1).squeeze(2)
        scores = F.relu(torch.einsum("bthd,bsd->bths", q, k) * self.width**-0.5)
        weights = self.weights_proj(x) * self.heads**-0.5
        return torch.einsum("bth,bths->bts", weights, scores)


class Attention(nn.Module):
    def __init__(self, c, has_indexer):
        super().__init__()
        self.H, self.N, self.R, self.V = (
            c.num_attention_heads,
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
        )
        self.latent = c.kv_lora_rank
        self.topk = c.index_topk
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_EPS)
        self.q_b_proj = linear(c.q_lora_rank, self.H * (self.N + self.R))
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + self.R)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = linear(c.kv_lora_rank, self.H * (self.N + self.V))
        self.o_proj = linear(self.H * self.V, c.hidden_size)
        if has_indexer:
            self.indexer = Indexer(c)

    def forward(self, x, angles, mask, probe):
        """mask [B, 1, T, T] boolean of the last full layer, or None while everything is selected.
        -> output [B, T, D], that mask, (index scores, attention) of the first `probe` sequences."""
        B, T, _ = x.shape
        query_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(query_latent).view(B, T, self.H, self.N + self.R)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.R], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, self.H, self.N + self.V)
        k_rope = rotate(k_rope.unsqueeze(2), angles).expand(B, T, self.H, self.R)
        q = torch.cat([q[..., : self.N], rotate(q[..., self.N :], angles)], dim=-1).transpose(1, 2)
        k = torch.cat([kv[..., : self.N], k_rope], dim=-1).transpose(1, 2)
        v = kv[..., self.N :].transpose(1, 2)

        causal = torch.ones(T, T, dtype=torch.bool).tril()
        index_scores = None
        if hasattr(self, "indexer"):
            index_scores = self.indexer(x[:probe], query_latent[:probe], angles)
            index_scores = index_scores.float().masked_fill(~causal, -torch.inf)
            if self.topk < T:
                mask = torch.stack([self.select(*row, angles, causal) for row in zip(x, query_latent, strict=True)])
        with torch.no_grad():
            logits = (q[:probe] @ k[:probe].transpose(-1, -2)) * (self.N + self.R) ** -0.5
            attention = logits.float().masked_fill(~causal, -torch.inf).softmax(-1).sum(1)  # summed over heads
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, self.N + self.R - self.V)), is_causal=True)
        else:
            out = F.scaled_dot_product_attention(
                q, k, F.pad(v, (0, self.N + self.R - self.V)), attn_mask=mask.expand(B, 1, T, T)
            )
        out = out[..., : self.V].transpose(1, 2).reshape(B, T, -1)
        return self.o_proj(out), mask, (index_scores, attention)

    @torch.no_grad()
    def select(self, x, query_latent, angles, causal):
        """The positions one sequence may attend to, boolean [1, T, T]; row by row to keep memory small."""
        scores = self.indexer(x[None], query_latent[None], angles).masked_fill(~causal, -torch.inf)
        chosen = scores.topk(self.topk, dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True) & causal


class MLP(nn.Module):
    def __init__(self, c, width):
        super().__init__()
        self.gate_proj = linear(c.hidden_size, width)
        self.up_proj = linear(c.hidden_size, width)
        self.down_proj = linear(width, c.hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.active, self.scaling = c.num_experts_per_tok, c.routed_scaling_factor
        E, D, W = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        self.gate = linear(D, E)
        self.register_buffer("e_score_correction_bias", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E), persistent=False)
        self.experts_gate_up = nn.Parameter(torch.empty(E, 2 * W, D))
        self.experts_down = nn.Parameter(torch.empty(E, D, W))
        self.shared_experts = MLP(c, W * c.n_shared_experts)

    def forward(self, x):
        B, T, D = x.shape
        x = x.view(-1, D)
        scores = self.gate(x).float().sigmoid()  # [B*T, E]
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.active, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling
        order = chosen.flatten().argsort(stable=True)  # assignments sorted by expert
        counts = torch.bincount(chosen.flatten(), minlength=len(self.load))
        self.load += counts
        rows = order // self.active
        parts = x[rows].split(counts.tolist())
        out = []
        for e, part in enumerate(parts):
            gate, up = F.linear(part, self.experts_gate_up[e]).chunk(2, dim=-1)
            out.append(F.linear(F.silu(gate) * up, self.experts_down[e]))
        out = torch.cat(out).float() * weights.flatten()[order].unsqueeze(-1)
        routed = torch.zeros_like(x).index_add(0, rows, out.to(x.dtype))
        return (routed + self.shared_experts(x)).view(B, T, D)

    @torch.no_grad()
    def balance(self, rate):
        """Loss-free balancing: push the selection bias of an expert towards the mean load."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, c, is_sparse, has_indexer):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, has_indexer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c) if is_sparse else MLP(c, c.intermediate_size)

    def forward(self, x, angles, mask, probe):
        out, mask, probed = self.self_attn(self.input_layernorm(x), angles, mask, probe)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), mask, probed


class MTPLayer(Layer):
    """The multi-token-prediction layer: predicts token i+2 from the hidden state at i and the embedding of i+1."""

    def __init__(self, c):
        super().__init__(c, is_sparse=True, has_indexer=True)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = linear(2 * c.hidden_size, c.hidden_size)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


def index_loss(probes):
    """KL between the head-summed attention of a full layer with the shared layers that follow it, and the softmax of
    its index scores (the indexer objective of the DeepSeek-V3.2 report). probes: (scores or None, attention)."""
    losses, groups = [], []
    for scores, attention in probes:
        if scores is not None:
            groups.append([scores, attention])
        else:
            groups[-1][1] = groups[-1][1] + attention
    for scores, attention in groups:
        target = attention / attention.sum(-1, keepdim=True)
        log_p = scores.log_softmax(-1).masked_fill(target == 0, 0.0)
        losses.append((target * (target.clamp_min(1e-12).log() - log_p)).sum(-1).mean())
    return torch.stack(losses).sum()


class TinyGlm(nn.Module):
    """c: an object with the fields of config.json."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        types = zip(c.mlp_layer_types, c.indexer_types, strict=True)
        self.layers = nn.ModuleList([Layer(c, mlp == "sparse", kind == "full") for mlp, kind in types])
        self.layers.append(MTPLayer(c))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = linear(c.hidden_size, c.vocab_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                bound = (3.0 / p.shape[-1]) ** 0.5
                p.uniform_(-bound, bound)
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts_down", "lm_head.weight")):
                p.mul_(0.1)
        self.embed_tokens.weight.normal_(std=0.5)

    def angles(self, T):
        R = self.c.qk_rope_head_dim
        inv_freq = self.c.rope_parameters["rope_theta"] ** (-torch.arange(0, R, 2).float() / R)
        return torch.arange(T).float()[:, None] * inv_freq

    def logits(self, ids, probe=1, mtp_rows=0):
        """ids [B, T+1] -> logits after the first T of each row [B, T, vocab], the MTP layer's [mtp_rows, T-1, vocab]
        (entry i predicts the token after i+1), and what index_loss needs."""
        inputs = ids[:, :-1]
        angles = self.angles(inputs.shape[1])
        x, mask, probes = self.embed_tokens(inputs), None, []
        for layer in self.layers[:-1]:
            x, mask, probed = layer(x, angles, mask, probe)
            probes.append(probed)
        hidden = self.norm(x)
        logits = self.lm_head(hidden).float()
        if not mtp_rows:
            return logits, None, probes
        mtp = self.layers[-1]
        e = mtp.enorm(self.embed_tokens(ids[:mtp_rows, 1:-1]))
        h = mtp.hnorm(hidden[:mtp_rows, :-1])
        x = mtp.eh_proj(torch.cat([e, h], dim=-1))
        x, _, probed = mtp(x, angles[:-1], None, probe)
        return logits, self.lm_head(mtp.shared_head.norm(x)).float(), [*probes, probed]

    def forward(self, ids, probe=1, mtp_rows=0):
        """ids [B, T+1] -> (language loss, MTP loss, index loss), means in nats. The MTP layer sees mtp_rows rows."""
        logits, mtp_logits, probes = self.logits(ids, probe, mtp_rows)
        loss, mtp_loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), torch.zeros(())
        if mtp_rows:
            mtp_loss = F.cross_entropy(mtp_logits.flatten(0, 1), ids[:mtp_rows, 2:].flatten())
        return loss, mtp_loss, index_loss(probes)

    def snapshot(self):
        """The state dict under its published names: BF16, the router bias F32, one tensor per expert matrix."""
        out, width = {}, self.c.moe_intermediate_size
        for name, value in self.state_dict().items():
            value = value.detach().clone()
            prefix = name.rsplit(".", 1)[0]
            if name.endswith("experts_gate_up"):
                for e, matrix in enumerate(value.bfloat16()):
                    out[f"model.{prefix}.experts.{e}.gate_proj.weight"] = matrix[:width].contiguous()
                    out[f"model.{prefix}.experts.{e}.up_proj.weight"] = matrix[width:].contiguous()
            elif name.endswith("experts_down"):
                for e, matrix in enumerate(value.bfloat16()):
                    out[f"model.{prefix}.experts.{e}.down_proj.weight"] = matrix.contiguous()
            elif name.endswith("e_score_correction_bias"):
                out[f"model.{prefix}.gate.e_score_correction_bias"] = value.float()
            else:
                out[name if name.startswith("lm_head") else f"model.{name}"] = value.bfloat16()
        return out
