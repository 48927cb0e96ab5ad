"""The operations of the forward pass, run by the C kernels or in plain torch. kernels/reference.py defines each.

`start` is called when a model is loaded. The choice is one for the process: kernels know no model. T token rows, D
columns, H heads, G key-value heads, S key positions, E experts, A active experts, N assignments of token rows to
experts, R rotary width.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.build import VARIANTS, BuildError, NoCompiler, find_library, usable_variants
from kernels.native import Native
from kernels.reference import ClampedSwiGlu, ExpertMatrices
from kernels.weight import Weight

CHOICES = ("native", "reference", *VARIANTS)

active: Any = reference  # a Native, or the module of plain torch
opened: dict[Path, Native] = {}


def start(choice: str | None, folder: Path, threads: int = 1) -> str:
    """Choose the kernels -> a line that says which run.

    choice: None or "native" for the best of this processor, an instruction set by name, or "reference". folder: where
    compiled libraries are kept.
    """
    global active
    active = reference
    if choice == "reference":
        return "[kernels] plain torch (KERNELS=reference)"
    started = time.monotonic()
    try:
        native = open_library(usable_variants() if choice in (None, "native") else [choice], folder)
    except (BuildError, OSError) as error:
        return f"[kernels] plain torch, which is slow: {error}"
    native.set_threads(threads)
    torch.set_num_threads(1)  # a second pool would spin against the first
    active = native
    seconds = time.monotonic() - started
    compiled = f", compiled in {seconds:.0f} s" if seconds > 1 else ""  # finding a library takes milliseconds
    return f"[kernels] {native.name}, {threads} thread{'s' if threads > 1 else ''}{compiled}"


def is_native() -> bool:
    """True if the C kernels run, False for plain torch."""
    return active is not reference


def open_library(variants: list[str], folder: Path) -> Native:
    """The first instruction set that compiles and that this system runs. Where there is none it raises the error of the
    first one: BuildError, OSError."""
    problem: Exception = NoCompiler("no instruction set to compile for")
    for i, variant in enumerate(variants):
        try:
            path = find_library(folder, variant)
            if path not in opened:
                opened[path] = Native(path)
            return opened[path]
        except (BuildError, OSError) as error:
            problem = problem if i else error
            if isinstance(error, NoCompiler):
                break
    raise problem


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]."""
    return active.linear(x, weight, bias)


def gated_mlp(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """x [T, D] -> [T, D]: SwiGLU."""
    return active.gated_mlp(x, gate, up, down)


def add_experts(
    out: Tensor,
    x: Tensor,
    experts: ExpertMatrices,
    starts: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    swiglu: ClampedSwiGlu | None = None,
) -> Tensor:
    """out [T, D] += the weighted outputs of some experts, of x [T, D]; starts [U + 1], rows and topk_weights [N]."""
    return active.add_experts(out, x, experts, starts, rows, topk_weights, swiglu)


def expert_outputs(
    outputs: Tensor,
    x: Tensor,
    experts: ExpertMatrices,
    starts: Tensor,
    rows: Tensor,
    out_rows: Tensor,
    swiglu: ClampedSwiGlu | None = None,
) -> Tensor:
    """The outputs of some experts, of x [T, D], into rows out_rows [N] of outputs [N, D]."""
    return active.expert_outputs(outputs, x, experts, starts, rows, out_rows, swiglu)


def add_weighted(out: Tensor, outputs: Tensor, rows: Tensor, topk_weights: Tensor) -> Tensor:
    """out [T, D] += topk_weights [N] * outputs [N, D], in rows [N] of out."""
    return active.add_weighted(out, outputs, rows, topk_weights)


def absorbed_attention(
    queries: Tensor,
    kv_b: Weight,
    latents: Tensor,
    rope_keys: Tensor,
    position: int,
    selection: Tensor | None,
    value_dim: int,
    scale: float,
) -> Tensor:
    """Absorbed MLA: queries [T, H, N + R], latents [S, L], rope_keys [S, R] -> [T, H, V]."""
    return active.absorbed_attention(queries, kv_b, latents, rope_keys, position, selection, value_dim, scale)


def grouped_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    window: int = 0,
    sinks: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """GQA: queries [T, H, D], keys [S, G, D], values [S, G, V] -> [T, H, V]."""
    return active.grouped_attention(queries, keys, values, position, window, sinks, scale)


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """The lightning indexer: queries [T, H, D], head_weights [T, H], keys [S, D] -> [T, S]."""
    return active.index_scores(queries, head_weights, keys)


def top_k_positions(scores: Tensor, first_position: int, topk: int) -> Tensor:
    """scores [T, S] -> [T, topk] positions, ascending, -1 where there are fewer."""
    return active.top_k_positions(scores, first_position, topk)


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """RMSNorm of x [T, D]; `added` [T, D] is added to x first, in place."""
    return active.rms_norm(x, weight, eps, added)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of x [T, D]."""
    return active.layer_norm(x, weight, bias, eps)


def apply_rope(x: Tensor, first_column: int, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """RoPE in place: columns first_column .. + R of x [T, ..., D], cos and sin [T, R / 2]."""
    return active.apply_rope(x, first_column, cos, sin, interleaved)


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
    """The sigmoid router: logits [T, E] -> (top-k expert ids [T, A] ascending, their weights [T, A])."""
    return active.route(logits, bias, num_active, num_groups, num_active_groups, normalize, scaling, mass)


def route_softmax(
    logits: Tensor, num_active: int, normalize: bool, scaling: float, mass: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The softmax router: logits [T, E] -> (top-k expert ids [T, A] ascending, their weights [T, A])."""
    return active.route_softmax(logits, num_active, normalize, scaling, mass)


def group_by_expert(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """topk_ids and topk_weights [T, A] -> (distinct experts, starts [U + 1], rows [N], weights [N])."""
    return active.group_by_expert(topk_ids, topk_weights, num_experts)


def logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, vocab], targets [T] -> (log p of the targets, float64 [T]; ids of the largest logits [T])."""
    return active.logprobs(logits, targets)


def all_finite(x: Tensor) -> bool:
    """True if no value is NaN or infinite."""
    return active.all_finite(x)
