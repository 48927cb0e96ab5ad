"""Every operation of the forward pass in plain torch: the definition that the C kernels are tested against.

Pure functions of tensors. Activations are float32. Ties go to the lowest index, everywhere.

T token rows, S key positions, D columns, H heads, G key-value heads, K selected positions, E experts, A active experts
(the top k), N assignments of token rows to experts, L latent width, R rotary width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.formats import GROUP
from kernels.kv_rows import quantize_kv  # noqa: F401
from kernels.reference_attention import (  # noqa: F401
    absorbed_attention,
    grouped_attention,
    index_scores,
    top_k_indices,
    top_k_mask,
    top_k_positions,
)
from kernels.weight import Weight

ExpertMatrices = Sequence[tuple[Weight, ...]]  # gate, up, down of each expert

# A matrix is dequantized to float32 a block of rows at a time: the lm_head of a large model needs no second copy. Small
# blocks are also faster: they stay in the cache, and malloc does not map each of them anew.
DEQUANTIZE_BYTES = 4 << 20
SMALLEST = torch.finfo(torch.float32).smallest_normal


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times a Weight [out, in] -> float32 [T, out]. An integer weight quantizes x first, unless exact."""
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
    """The clamped SwiGLU of gpt_oss for some experts, with biases. Rows of the biases are experts."""

    gate_bias: Tensor  # [experts, width]
    up_bias: Tensor  # [experts, width]
    down_bias: Tensor  # [experts, D]
    limit: float
    alpha: float

    def mlp(self, expert: int, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        """x [T, D] -> down((u + 1) * g * sigmoid(alpha * g)) [T, D] of one expert, with its biases: g = gate x, at most
        `limit`, and u = up x, between -limit and limit."""
        g = linear(x, gate, self.gate_bias[expert]).clamp_(max=self.limit)
        u = linear(x, up, self.up_bias[expert]).clamp_(-self.limit, self.limit)
        return linear((u + 1) * g * (self.alpha * g).sigmoid(), down, self.down_bias[expert])


def add_experts(
    out: Tensor,
    x: Tensor,
    experts: ExpertMatrices,
    starts: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    swiglu: ClampedSwiGlu | None = None,
) -> Tensor:
    """Add the weighted gated MLPs of some experts to out [T, D], in their order -> out.

    starts [experts + 1], rows and topk_weights [N]: expert e gets the rows rows[starts[e] : starts[e + 1]] of x [T, D],
    and its output is added times the topk_weights of the same places. swiglu: of the same experts, None for silu.
    """
    for e, (three, start, stop) in enumerate(zip(experts, starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        at = rows[start:stop]
        result = swiglu.mlp(e, x[at], *three) if swiglu else gated_mlp(x[at], *three)
        out.index_add_(0, at, result * topk_weights[start:stop, None])
    return out


def expert_outputs(
    outputs: Tensor,
    x: Tensor,
    experts: ExpertMatrices,
    starts: Tensor,
    rows: Tensor,
    out_rows: Tensor,
    swiglu: ClampedSwiGlu | None = None,
) -> Tensor:
    """The gated MLPs of some experts, each row of outputs [N, D] written once, in any order -> outputs.

    As add_experts, but the unweighted output goes to the rows out_rows [N] of the same places.
    """
    for e, (three, start, stop) in enumerate(zip(experts, starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        at = rows[start:stop]
        outputs[out_rows[start:stop]] = swiglu.mlp(e, x[at], *three) if swiglu else gated_mlp(x[at], *three)
    return outputs


def add_weighted(out: Tensor, outputs: Tensor, rows: Tensor, topk_weights: Tensor) -> Tensor:
    """out[rows[i]] += topk_weights[i] * outputs[i], i ascending; out [T, D], outputs [N, D] -> out.

    After expert_outputs, with assignments in the order of their experts, the result is that of add_experts.
    """
    return out.index_add_(0, rows, outputs * topk_weights[:, None])


def gated_mlp(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """x [T, D] -> down(silu(gate x) * up x) [T, D], of three Weights."""
    return linear(silu_product(linear(x, gate), linear(x, up)), down)


def quantize_activations(x: Tensor) -> Tensor:
    """Dynamic int8 quantization of x [..., D] in groups of 64 columns, dequantized to float32 [..., D] again.

    scale = max|x| / 127 of the group, code = round half to even(x / scale). Products of codes are whole numbers, so a
    kernel may add them in any order. A last group may be shorter.
    """
    width = x.shape[-1]
    groups = F.pad(x, (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    scales.masked_fill_(scales < SMALLEST, 0.0)  # too small to divide by
    codes = (groups / scales.where(scales > 0, 1.0)).round_()
    return codes.mul_(scales).flatten(-2)[..., :width]


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """RMSNorm: x * rsqrt(mean(x^2) + eps) * weight over the last dimension of x [..., D]. `added`, like x, is added
    to x first, in place."""
    if added is not None:
        x += added
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: the SwiGLU activation."""
    return F.silu(gate) * up


def rope_angles(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] of positions [T] * frequencies [R / 2], times a factor."""
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of pairs (x[2j], x[2j+1]); x [T, ..., R], cos and sin [T, R/2].

    The result is stored as [all first halves | all second halves], as transformers does: queries and keys share that
    order, so it does not change their products.
    """
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of pairs (x[j], x[j + R/2]); x [T, ..., R], cos and sin [T, R/2]."""
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def apply_rope(x: Tensor, first: int, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """RoPE of columns first .. first + R of x [T, ..., D] in place, by rope_interleaved or rope_halves -> x."""
    part = x[..., first : first + 2 * cos.shape[1]]
    part.copy_((rope_interleaved if interleaved else rope_halves)(part, cos, sin))
    return x


def route(
    logits: Tensor,
    bias: Tensor,
    num_active: int,
    num_groups: int,
    num_active_groups: int,
    normalize: bool,
    scaling: float,
    mass: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The noaux_tc top-k router: logits [T, E], bias [E] -> (expert ids [T, A] ascending, weights [T, A]).

    Scores are sigmoids; the bias counts in the choice, not in the weights. With groups, a group scores the sum of its
    two best experts and only experts of the top groups compete. 0 < mass < 1 is lossy: of the top-k experts the fewest
    whose scores reach that share of their sum keep a weight, the others get 0.
    """
    scores = logits.sigmoid()
    choice = scores + bias
    if num_groups > 1:
        grouped = choice.view(len(choice), num_groups, -1)
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = top_k_mask(group_scores, num_active_groups)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    experts = top_k_indices(choice, num_active)
    return experts, expert_weights(scores.gather(1, experts), normalize, scaling, mass)


def route_softmax(
    logits: Tensor, num_active: int, normalize: bool, scaling: float, mass: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The softmax top-k router: logits [T, E] -> (expert ids [T, A] ascending, weights [T, A]). Normalized weights are
    the softmax of the top-k logits alone. mass as of route."""
    scores = logits.softmax(-1)
    experts = top_k_indices(logits, num_active)
    return experts, expert_weights(scores.gather(1, experts), normalize, scaling, mass)


def expert_weights(scores: Tensor, normalize: bool, scaling: float, mass: float) -> Tensor:
    """Scores of the top-k experts [T, A] -> their weights [T, A]; mass as of route."""
    weights = scores
    if 0 < mass < 1:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        enough = ordered.cumsum(-1) - ordered >= mass * ordered.sum(-1, keepdim=True)
        enough[:, 0] = False  # the best expert stays, however small the mass
        weights = weights.scatter(1, order, ordered.masked_fill(enough, 0.0))
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling


def group_by_expert(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """topk_ids and topk_weights [T, A] -> (experts, starts [U + 1], rows [N], weights [N]): the assignments by expert.

    experts: the U distinct ids, ascending. Expert e has the token rows rows[starts[e] : starts[e + 1]], ascending, and
    the weights of the same places. Assignments of weight 0 are left out.
    """
    rows, column = topk_weights.nonzero(as_tuple=True)  # [N]
    ids, weights = topk_ids[rows, column], topk_weights[rows, column]  # [N]
    order = ids.argsort(stable=True)
    experts, counts = ids.unique(return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return experts.tolist(), starts, rows[order], weights[order]


def logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, vocab], targets [T] -> (log-softmax(logits)[target], float64 [T]; ids of the largest logits [T])."""
    # Row by row: a float64 copy of all of them would be the largest tensor of the pass.
    normalizers = torch.stack([row.double().logsumexp(-1) for row in logits])
    return logits.gather(1, targets[:, None])[:, 0].double() - normalizers, logits.argmax(-1)


def all_finite(x: Tensor) -> bool:
    """True if no value is NaN or infinite."""
    return bool(x.isfinite().all())
