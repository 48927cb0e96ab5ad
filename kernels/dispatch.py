"""Which implementation of an operation runs: each candidate in order, None declines, plain torch last.

`start` is called when a model is loaded. The choice is one for the process: kernels know no model.
"""

import time

import torch

from kernels import reference
from kernels.build import VARIANTS, BuildError, NoCompiler, find_library, usable_variants
from kernels.native import Native

CHOICES = ("native", "reference", *VARIANTS)

candidates = []  # the open libraries, at most one
opened = {}  # path -> Native


def start(choice, folder, threads=1):
    """Choose the kernels -> a line that says which run.

    choice: None or "native" for the best of this processor, a set of instructions by name, or "reference". folder:
    where compiled libraries are kept.
    """
    candidates.clear()
    if choice == "reference":
        return "[kernels] plain torch (KERNELS=reference)"
    started = time.monotonic()
    try:
        native = open_library(usable_variants() if choice in (None, "native") else [choice], folder)
    except (BuildError, OSError) as error:
        return f"[kernels] plain torch, which is slow: {error}"
    native.set_threads(threads)
    torch.set_num_threads(1)  # a second pool would spin against the first
    candidates.append(native)
    seconds = time.monotonic() - started
    compiled = f", compiled in {seconds:.0f} s" if seconds > 1 else ""  # finding a library takes milliseconds
    return f"[kernels] {native.name}, {threads} thread{'s' if threads > 1 else ''}{compiled}"


def open_library(variants, folder):
    """The first set of instructions that can be compiled and that this system lets run -> Native. The complaint about
    the first one where there is none: BuildError, OSError."""
    problem = None
    for variant in variants:
        try:
            path = find_library(folder, variant)
            if path not in opened:
                opened[path] = Native(path)
            return opened[path]
        except (BuildError, OSError) as error:
            problem = problem or error
            if isinstance(error, NoCompiler):
                break
    raise problem


def first(operation, *arguments):
    for candidate in candidates:
        result = getattr(candidate, operation)(*arguments)
        if result is not None:
            return result
    return getattr(reference, operation)(*arguments)


def linear(x, weight, bias=None):
    """As reference.linear."""
    return first("linear", x, weight, bias)


def gated_mlp(x, gate, up, down):
    """As reference.gated_mlp."""
    return first("gated_mlp", x, gate, up, down)


def add_experts(out, x, experts, starts, rows, shares, gates=None):
    """As reference.add_experts."""
    return first("add_experts", out, x, experts, starts, rows, shares, gates)


def expert_outputs(outputs, x, experts, starts, rows, places, gates=None):
    """As reference.expert_outputs."""
    return first("expert_outputs", outputs, x, experts, starts, rows, places, gates)


def add_weighted(out, outputs, rows, shares):
    """As reference.add_weighted."""
    return first("add_weighted", out, outputs, rows, shares)


def absorbed_attention(queries, kv_b, latents, rope_keys, position, selection, value_dim, scale):
    """As reference.absorbed_attention."""
    return first("absorbed_attention", queries, kv_b, latents, rope_keys, position, selection, value_dim, scale)


def grouped_attention(queries, keys, values, position, window=0, sinks=None, scale=1.0):
    """As reference.grouped_attention."""
    return first("grouped_attention", queries, keys, values, position, window, sinks, scale)


def index_scores(queries, head_weights, keys):
    """As reference.index_scores."""
    return first("index_scores", queries, head_weights, keys)


def top_positions(scores, first_position, topk):
    """As reference.top_positions."""
    return first("top_positions", scores, first_position, topk)


def rms_norm(x, weight, eps, added=None):
    """As reference.rms_norm, of rows [T, D]."""
    return first("rms_norm", x, weight, eps, added)


def layer_norm(x, weight, bias, eps):
    """As reference.layer_norm, of rows [T, D]."""
    return first("layer_norm", x, weight, bias, eps)


def rotate(x, first_column, cos, sin, interleaved=True):
    """As reference.rotate, or as reference.rotate_halves where pairs do not lie side by side."""
    return first("rotate" if interleaved else "rotate_halves", x, first_column, cos, sin)


def route(logits, bias, num_active, num_groups, num_active_groups, normalize, scaling, mass=0.0):
    """As reference.route."""
    return first("route", logits, bias, num_active, num_groups, num_active_groups, normalize, scaling, mass)


def route_softmax(logits, num_active, normalize, scaling, mass=0.0):
    """As reference.route_softmax."""
    return first("route_softmax", logits, num_active, normalize, scaling, mass)


def group_by_expert(chosen, shares, num_experts):
    """As reference.group_by_expert."""
    return first("group_by_expert", chosen, shares, num_experts)


def logprobs(logits, targets):
    """As reference.logprobs."""
    return first("logprobs", logits, targets)


def all_finite(x):
    """As reference.all_finite."""
    return first("all_finite", x)
