"""The operations of the forward pass, run by the C kernels or in plain torch. kernels/reference.py defines each.

`start` is called when a model is loaded. The choice is one for the process: kernels know no model.
"""

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from kernels import reference
from kernels.build import VARIANTS, BuildError, CannotBuild, NoCompiler, find_library, usable_variants
from kernels.native import Native

Operation = TypeVar("Operation", bound=Callable[..., Any])

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
        native, problem = open_library(usable_variants() if choice in (None, "native") else [choice], folder)
    except (BuildError, OSError) as error:
        return f"[kernels] plain torch, which is slow: {error}"
    native.set_threads(threads)
    torch.set_num_threads(1)  # a second pool would spin against the first
    active = native
    seconds = time.monotonic() - started
    compiled = f", compiled in {seconds:.0f} s" if seconds > 1 else ""  # finding a library takes milliseconds
    slower = f"; nothing faster: {problem}" if problem else ""
    return f"[kernels] {native.name}, {threads} thread{'s' if threads > 1 else ''}{compiled}{slower}"


def is_native() -> bool:
    """True if the C kernels run, False for plain torch."""
    return active is not reference


def open_library(variants: list[str], folder: Path) -> tuple[Native, Exception | None]:
    """-> (the first instruction set that compiles and runs here, the problem of the first one if it is another).
    Where there is none it raises the error of the first one: BuildError, OSError."""
    problem: Exception | None = None
    for variant in variants:
        try:
            path = find_library(folder, variant)
            if path not in opened:
                opened[path] = Native(path)
            return opened[path], problem
        except (BuildError, OSError) as error:
            problem = problem or error
            if isinstance(error, CannotBuild):
                break
    raise problem or NoCompiler("no instruction set to compile for")


def operation(definition: Operation) -> Operation:
    """The operation that a function of reference.py defines, run by the active kernels."""
    name = definition.__name__

    @wraps(definition)
    def call(*args: Any) -> Any:  # positional: packing keywords takes longer than the rest of the call
        return getattr(active, name)(*args)

    return cast(Operation, call)


linear = operation(reference.linear)
gated_mlp = operation(reference.gated_mlp)
add_experts = operation(reference.add_experts)
expert_outputs = operation(reference.expert_outputs)
add_weighted = operation(reference.add_weighted)
quantize_kv = operation(reference.quantize_kv)
absorbed_attention = operation(reference.absorbed_attention)
grouped_attention = operation(reference.grouped_attention)
index_scores = operation(reference.index_scores)
top_k_positions = operation(reference.top_k_positions)
rms_norm = operation(reference.rms_norm)
layer_norm = operation(reference.layer_norm)
apply_rope = operation(reference.apply_rope)
route = operation(reference.route)
route_softmax = operation(reference.route_softmax)
group_by_expert = operation(reference.group_by_expert)
logprobs = operation(reference.logprobs)
all_finite = operation(reference.all_finite)
