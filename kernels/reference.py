"""Every operation of the forward pass in plain torch: the definition that faster kernels are held to.

Pure functions of arrays. Activations are float32. Ties go to the lowest index, everywhere.

T rows, S key positions, D columns, H heads, G groups of heads, K chosen positions or experts, L latent width, R rotary
width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.formats import GROUP

# A matrix is widened to float32 a block of rows at a time: the output head of a large model costs no second copy. Small
# blocks are also faster, for they stay in the cache and malloc does not map each of them anew.
DEQUANTIZE_BYTES = 4 << 20
SMALLEST = torch.finfo(torch.float32).smallest_normal
# Scores, or gathered latents, of one block of rows of attention stay below this.
BLOCK_BYTES = 64 << 20


def linear(x, weight, bias=None):
    """x [T, in] times a Weight [out, in] -> float32 [T, out]. An integer weight has x rounded first, unless exact."""
    if weight.format.is_integer and not weight.exact:
        x = quantize_activations(x)
    step = max(1, DEQUANTIZE_BYTES // (4 * weight.columns))
    if weight.rows <= step:
        return F.linear(x, weight.dequantize(), bias)
    out = torch.empty(x.shape[0], weight.rows)
    for start in range(0, weight.rows, step):
        out[:, start : start + step] = F.linear(x, weight.dequantize(start, start + step))
    return out if bias is None else out + bias


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """How the halves of some experts meet that have biases: clamped_mlp. Rows of the biases are experts."""

    gate_bias: torch.Tensor  # [experts, width]
    up_bias: torch.Tensor
    down_bias: torch.Tensor  # [experts, D]
    limit: float
    alpha: float

    def mlp(self, expert, x, gate, up, down):
        """clamped_mlp of one expert."""
        biases = self.gate_bias[expert], self.up_bias[expert], self.down_bias[expert]
        return clamped_mlp(x, gate, up, down, *biases, self.limit, self.alpha)


def add_experts(out, x, experts, starts, rows, shares, gates=None):
    """Add the gated MLPs of some experts to out [T, D], in their order -> out.

    experts: (gate, up, down) Weights of each. Expert e works on rows[starts[e] : starts[e + 1]] of x [T, D], and what
    it gives is added times `shares` of the same places. gates: ClampedGates of the same experts, None for silu.
    """
    for e, (three, start, stop) in enumerate(zip(experts, starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        at = rows[start:stop]
        result = gates.mlp(e, x[at], *three) if gates else gated_mlp(x[at], *three)
        out.index_add_(0, at, result * shares[start:stop, None])
    return out


def expert_outputs(outputs, x, experts, starts, rows, places, gates=None):
    """The gated MLPs of some experts, each row of outputs [assignments, D] written once, in any order -> outputs.

    Expert e works on rows[starts[e] : starts[e + 1]] of x [T, D]; what it gives goes to `places` of the same places.
    gates as of add_experts.
    """
    for e, (three, start, stop) in enumerate(zip(experts, starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        at = rows[start:stop]
        outputs[places[start:stop]] = gates.mlp(e, x[at], *three) if gates else gated_mlp(x[at], *three)
    return outputs


def add_weighted(out, outputs, rows, shares):
    """out[rows[i]] += shares[i] * outputs[i], i ascending; out [T, D], outputs [assignments, D] -> out.

    After expert_outputs, with assignments in the order of their experts, it gives what add_experts gives.
    """
    return out.index_add_(0, rows, outputs * shares[:, None])


def gated_mlp(x, gate, up, down):
    """x [T, D] -> down(silu(gate x) * up x) [T, D], of three Weights."""
    return linear(silu_product(linear(x, gate), linear(x, up)), down)


def clamped_mlp(x, gate, up, down, gate_bias, up_bias, down_bias, limit, alpha):
    """x [T, D] -> down((u + 1) * g * sigmoid(alpha * g)) [T, D] of three Weights with biases: g = gate x, at most
    `limit`, and u = up x, between -limit and limit. gpt_oss has this in place of silu."""
    g = linear(x, gate, gate_bias).clamp_(max=limit)
    u = linear(x, up, up_bias).clamp_(-limit, limit)
    return linear((u + 1) * g * (alpha * g).sigmoid(), down, down_bias)


def quantize_activations(x):
    """x [..., D] rounded to 8 bits in groups of 64 columns, as float32: what an integer kernel multiplies with.

    scale = max|x| / 127 of the group, code = round half to even(x / scale). Products of codes are whole numbers, so a
    kernel may add them in any order. A last group may be shorter.
    """
    width = x.shape[-1]
    groups = F.pad(x, (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    scales.masked_fill_(scales < SMALLEST, 0.0)  # too small to divide by
    codes = (groups / scales.where(scales > 0, 1.0)).round_()
    return codes.mul_(scales).flatten(-2)[..., :width]


def rms_norm(x, weight, eps, added=None):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension. `added`, like x, is added to x first, in place."""
    if added is not None:
        x += added
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def layer_norm(x, weight, bias, eps):
    """(x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def silu_product(gate, up):
    """silu(gate) * up, the activation between the two halves of a gated MLP."""
    return F.silu(gate) * up


def rope_angles(positions, frequencies, factor=1.0):
    """cos and sin [T, R / 2] of position * frequency, times a factor; frequencies float32 [R / 2]."""
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rope_interleaved(x, cos, sin):
    """Rotate pairs (x[2j], x[2j+1]); x [T, ..., R], cos and sin [T, R/2].

    The result lies as [all first halves | all second halves], the order the reference writes: queries and keys share
    it, so products do not see it.
    """
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotate(x, first, cos, sin):
    """Columns first .. first + R of x [T, ..., D] turned in place by cos and sin [T, R/2], as rope_interleaved -> x."""
    part = x[..., first : first + 2 * cos.shape[1]]
    part.copy_(rope_interleaved(part, cos, sin))
    return x


def rope_halves(x, cos, sin):
    """Rotate pairs (x[j], x[j + R/2]); x [T, ..., R], cos and sin [T, R/2]."""
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotate_halves(x, first, cos, sin):
    """Columns first .. first + R of x [T, ..., D] turned in place by cos and sin [T, R/2], as rope_halves -> x."""
    part = x[..., first : first + 2 * cos.shape[1]]
    part.copy_(rope_halves(part, cos, sin))
    return x


def top_k_mask(scores, k):
    """scores [T, N] -> boolean [T, N] with exactly k true in each row: the k largest, ties to the lowest index.

    What is not a number counts as the largest, so that it is chosen and seen."""
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    threshold = scores.topk(k, dim=-1).values[:, -1:]
    above, tied = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def top_k_indices(scores, k):
    """scores [T, N] -> [T, min(k, N)] indices of the largest, ascending by index."""
    return top_k_mask(scores, k).nonzero()[:, 1].view(scores.shape[0], -1)


def top_positions(scores, first, topk):
    """scores [T, S], S > topk; row t sees the positions up to first + t -> [T, topk]: the best it sees, ascending, -1
    where there are fewer. A row that sees a NaN chooses nothing, and attention over nothing gives NaN."""
    own = torch.arange(first, first + len(scores))[:, None]
    later = torch.arange(scores.shape[1]) > own
    chosen = top_k_indices(scores.masked_fill(later, -torch.inf), topk)
    bad = scores.masked_fill(later, 0.0).isnan().any(-1, keepdim=True)
    return chosen.masked_fill_((chosen > own) | bad, -1)


def route(logits, bias, *rest):
    """The router's logits [T, E] -> (expert ids [T, A] ascending, weights [T, A]): route_sigmoid of their sigmoid."""
    return route_sigmoid(logits.sigmoid(), bias, *rest)


def route_sigmoid(scores, bias, num_active, num_groups, num_active_groups, normalize, scaling, mass=0.0):
    """The noaux_tc router on sigmoid scores [T, E] -> (expert ids [T, A] ascending, weights [T, A]).

    The bias takes part in the choice, not in the weights. With groups, a group scores the sum of its two best
    experts and only the best groups compete. 0 < mass < 1 is lossy: of the chosen experts the fewest whose scores
    reach that share of their sum keep a weight, the others get 0.
    """
    choice = scores + bias
    if num_groups > 1:
        grouped = choice.view(len(choice), num_groups, -1)
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = top_k_mask(group_scores, num_active_groups)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    experts = top_k_indices(choice, num_active)
    return experts, expert_weights(scores.gather(1, experts), normalize, scaling, mass)


def route_softmax(logits, num_active, normalize, scaling, mass=0.0):
    """The softmax router: of the probabilities of all experts the largest -> (expert ids [T, A] ascending, weights
    [T, A]). Normalized, they are the softmax of the chosen logits alone. mass as of route_sigmoid."""
    scores = logits.softmax(-1)
    experts = top_k_indices(logits, num_active)
    return experts, expert_weights(scores.gather(1, experts), normalize, scaling, mass)


def expert_weights(scores, normalize, scaling, mass):
    """Scores of the chosen experts [T, A] -> their weights; mass as of route_sigmoid."""
    weights = scores
    if 0 < mass < 1:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        enough = ordered.cumsum(-1) - ordered >= mass * ordered.sum(-1, keepdim=True)
        enough[:, 0] = False  # the best stays, however little is asked for
        weights = weights.scatter(1, order, ordered.masked_fill(enough, 0.0))
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling


def group_by_expert(chosen, shares, num_experts):
    """chosen and shares [T, A], ids below num_experts -> (experts, starts, rows, shares): the assignments by expert.

    experts: the distinct ids as a list, ascending. Expert e has the rows rows[starts[e] : starts[e + 1]], ascending,
    and the shares of the same places. One without weight adds nothing, and is left out.
    """
    rows, column = shares.nonzero(as_tuple=True)
    chosen, shares = chosen[rows, column], shares[rows, column]
    order = chosen.argsort(stable=True)
    experts, counts = chosen.unique(return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return experts.tolist(), starts, rows[order], shares[order]


def logprobs(logits, targets):
    """logits [T, vocab], targets [T] -> (log-softmax(logits)[target], float64 [T]; ids of the largest logits [T])."""
    # Row by row: a float64 copy of all of them would be the largest tensor of the pass.
    normalizers = torch.stack([row.double().logsumexp(-1) for row in logits])
    return logits.gather(1, targets[:, None])[:, 0].double() - normalizers, logits.argmax(-1)


def all_finite(x):
    """Whether no value is NaN or infinite."""
    return bool(x.isfinite().all())


def index_scores(queries, head_weights, keys):
    """The DSA indexer's scores: sum over heads of weight * relu(query . key).

    queries [T, H, D], head_weights [T, H] (already scaled), keys [S, D], float32 or bfloat16 -> [T, S].
    """
    T, H, D = queries.shape
    scores = (queries.reshape(T * H, D) @ keys.float().T).relu_().view(T, H, -1) * D**-0.5
    return torch.einsum("th,ths->ts", head_weights, scores)


def absorbed_attention(queries, kv_b, latents, rope_keys, position, selection, value_dim, scale):
    """Multi-head latent attention of T new rows of one sequence, straight over the cached latents.

    queries [T, H, N + R], the rotary part rotated; kv_b Weight [H * (N + V), L], for each head N key rows and V value
    rows; latents [S, L] and rope_keys [S, R] of all positions, the new ones included: float32, or bfloat16 that is
    widened. Row t is position `position` + t and sees the positions up to its own, or those of selection [T, K]
    (ascending, -1 where there are fewer). -> [T, H, V], float32.
    q . (Wk l) = (q Wk) . l, and sum p Wv l = Wv sum p l: one key for all heads.
    """
    T, H = queries.shape[:2]
    R, L = rope_keys.shape[1], latents.shape[1]
    N = queries.shape[2] - R
    weights = kv_b.dequantize().view(H, N + value_dim, L)
    q_latent = torch.einsum("thn,hnl->thl", queries[..., :N], weights[:, :N])
    num_keys = len(latents) if selection is None else selection.shape[1]
    row_floats = H * num_keys if selection is None else num_keys * (L + R + H)
    step, mixed = max(1, BLOCK_BYTES // (4 * row_floats)), torch.empty_like(q_latent)
    if selection is None:
        latents, rope_keys = latents.float(), rope_keys.float()
    for start in range(0, T, step):
        rows = slice(start, start + step)
        if selection is None:
            keys = latents, rope_keys
            allowed = torch.arange(num_keys) <= torch.arange(position + start, position + min(start + step, T))[:, None]
        else:
            chosen = selection[rows].clamp_min(0)
            keys, allowed = (latents[chosen].float(), rope_keys[chosen].float()), selection[rows] >= 0
        mixed[rows] = latent_attention(q_latent[rows], queries[rows, :, N:], *keys, allowed, scale)
    return torch.einsum("thl,hvl->thv", mixed, weights[:, N:])


def latent_attention(q_latent, q_rope, latents, rope_keys, allowed, scale):
    """Absorbed MLA: attention straight over the cached latents, one key for all heads.

    q_latent [T, H, L], q_rope [T, H, R]; latents [S, L] and rope_keys [S, R], or one selection for each row
    [T, K, L] and [T, K, R]; allowed boolean [T, S or K]. -> [T, H, L], the attention-weighted latents.
    """
    scores = q_latent @ latents.transpose(-1, -2) + q_rope @ rope_keys.transpose(-1, -2)
    scores = (scores * scale).masked_fill_(~allowed[:, None, :], -torch.inf)
    return scores.softmax(-1) @ latents


def grouped_attention(queries, keys, values, position, window=0, sinks=None, scale=1.0):
    """Grouped-query attention of T new rows of one sequence: G groups of H / G heads, each with one key and value.

    queries [T, H, D]; keys [S, G, D] and values [S, G, V], float32 or bfloat16, of all positions, the new ones
    included. Row t is position
    `position` + t and sees the positions up to its own, of these the last `window` where that is above 0. sinks [H]:
    one more score of each head, in the softmax alone. -> [T, H, V].

    Row by row, over what the row sees and nothing else: so a row gets the same bits in any company.
    """
    T, H, D = queries.shape
    G, V = values.shape[1:]
    keys, values, out = keys.permute(1, 2, 0), values.transpose(0, 1), torch.empty(T, H, V)
    queries = queries.reshape(T, G, H // G, D) * scale
    for t in range(T):
        seen = slice(max(0, position + t + 1 - window) if window else 0, position + t + 1)
        scores = queries[t] @ keys[:, :, seen].float()  # [G, H / G, what is seen]
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(G, -1, 1)], dim=-1)
        shares = scores.softmax(-1)[..., : seen.stop - seen.start]
        out[t] = (shares @ values[:, seen].float()).view(H, V)
    return out
