"""The C kernels of csrc/ through ctypes, which releases the GIL during a call. reference.py defines each method.

A call passes one of the structs of structs.py as bytes: packing bytes takes a fraction of the time of filling a ctypes
struct or passing many arguments, and a small model is mostly calls.
"""

import ctypes
from array import array
from collections.abc import Callable
from ctypes import POINTER, cast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels.kv_rows import KvRows
from kernels.reference import ClampedSwiGlu, ExpertMatrices
from kernels.structs import CALLS, READ_MEMORY, STRUCTS, packer
from kernels.weight import Weight

KINDS = {"f32": 0, "bf16": 1, "f16": 2, "fp8-b128": 3, "mxfp4": 4}
INTEGER_KINDS = {8: 5, 4: 6, 3: 7, 2: 8}
SCALE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
OUT_OF_MEMORY = "the C kernels could not allocate memory"
KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 5}


def struct_of(weight: Weight) -> Any:
    """The weight_t of a Weight, made once; the Weight keeps the memory alive. Columns must be contiguous. `address` and
    `raw` are its address and its bytes."""
    if weight.native is None:
        fmt, scales = weight.format, weight.scales
        view = STRUCTS["weight_t"](
            data=weight.data.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            rows=weight.rows,
            columns=weight.columns,
            row_bytes=weight.data.stride(0) * weight.data.element_size(),
            row_scales=0 if scales is None else scales.stride(0),
            kind=INTEGER_KINDS[fmt.bits] if fmt.is_integer else KINDS[fmt.name],
            group=fmt.group or weight.columns,
            scale_kind=0 if scales is None else SCALE_KINDS[scales.dtype],
            exact=weight.exact,
        )
        view.address, view.raw = ctypes.addressof(view), bytes(view)
        object.__setattr__(weight, "native", view)
    return weight.native


def row_major(weight: Weight) -> Weight:
    """A Weight with contiguous columns: itself, or a copy of a matrix that lies as [in, out]."""
    return weight if weight.data.stride(1) == 1 else replace(weight, data=weight.data.contiguous(), native=None)


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [T, D] -> (x with contiguous columns, T, D, stride of a row)."""
    rows, columns = x.shape
    if x.is_contiguous():
        return x, rows, columns, columns
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, rows, columns, x.stride(0)


def caller(kernel: Any, kind: Any) -> Callable[..., int]:
    """A function of the fields of a kernel's struct that calls the kernel -> what it returns."""
    pack = packer(kind)
    return lambda *values: kernel(pack(*values))


def checked(kernel: Any, kind: Any) -> Callable[..., None]:
    """A function of the fields of a kernel's struct that calls the kernel; raises MemoryError."""
    pack = packer(kind)

    def run(*values: float) -> None:
        if kernel(pack(*values)):
            raise MemoryError(OUT_OF_MEMORY)

    return run


class Native:
    """One opened library. Its methods may be called from several threads."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.library.colibri_kernels.restype = POINTER(STRUCTS["kernels_t"])
        sizes = [self.library.colibri_size(i) for i in range(len(STRUCTS))]
        if sizes != [ctypes.sizeof(kind) for kind in STRUCTS.values()]:
            raise OSError(f"{path}: is of another version")
        kernels = self.library.colibri_kernels()
        if not kernels:
            raise OSError(f"{path}: needs instructions that this processor does not have")
        kernels = kernels.contents
        self.name: str = ctypes.string_at(kernels.name).decode()
        self.read = cast(kernels.read_memory, READ_MEMORY)
        self.call = SimpleNamespace(**{name: caller(getattr(kernels, name), kind) for name, kind in CALLS.items()})
        self.run = SimpleNamespace(**{name: checked(getattr(kernels, name), kind) for name, kind in CALLS.items()})

    def set_threads(self, threads: int) -> None:
        """Use `threads` threads from now on, the caller's included."""
        self.library.colibri_set_threads(threads)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x, rows, _, stride = rows_of(x)
        view = struct_of(weight)
        out = torch.empty(rows, weight.rows)
        self.run.linear(view.address, x.data_ptr(), pointer(bias), out.data_ptr(), rows, stride, weight.rows)
        return out

    def gated_mlp(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        weights = struct_of(gate).address, struct_of(up).address, struct_of(down).address
        self.run.gated_mlp(*weights, x.data_ptr(), out.data_ptr(), len(x))
        return out

    def add_experts(
        self,
        out: Tensor,
        x: Tensor,
        experts: ExpertMatrices,
        starts: Tensor,
        rows: Tensor,
        topk_weights: Tensor,
        swiglu: ClampedSwiGlu | None = None,
    ) -> Tensor:
        return self._experts(out, x, experts, starts, rows, topk_weights, None, swiglu)

    def expert_outputs(
        self,
        outputs: Tensor,
        x: Tensor,
        experts: ExpertMatrices,
        starts: Tensor,
        rows: Tensor,
        out_rows: Tensor,
        swiglu: ClampedSwiGlu | None = None,
    ) -> Tensor:
        return self._experts(outputs, x, experts, starts, rows, None, out_rows, swiglu)

    def _experts(
        self,
        out: Tensor,
        x: Tensor,
        experts: ExpertMatrices,
        starts: Tensor,
        rows: Tensor,
        topk_weights: Tensor | None,
        out_rows: Tensor | None,
        swiglu: ClampedSwiGlu | None,
    ) -> Tensor:
        weights = [row_major(matrix) for three in experts for matrix in three]  # held until the call is done
        matrices = array("b", b"".join([struct_of(weight).raw for weight in weights]))
        pointers = matrices.buffer_info()[0], starts.data_ptr(), rows.data_ptr(), pointer(topk_weights), x.data_ptr()
        call = *pointers, out.data_ptr(), len(experts), *x.shape, weights[0].rows, pointer(out_rows)
        clamped: tuple[float, ...] = (0, 0, 0, 0.0, 0.0)
        if swiglu:
            biases = swiglu.gate_bias.contiguous(), swiglu.up_bias.contiguous(), swiglu.down_bias.contiguous()
            clamped = *map(pointer, biases), swiglu.limit, swiglu.alpha
        self.run.experts(*call, *clamped)
        return out

    def add_weighted(self, out: Tensor, outputs: Tensor, rows: Tensor, topk_weights: Tensor) -> Tensor:
        pointers = outputs.data_ptr(), topk_weights.data_ptr(), rows.data_ptr(), out.data_ptr()
        self.run.add_weighted(*pointers, *outputs.shape)
        return out

    def quantize_kv(self, rows: Tensor, num_heads: int, out: Tensor) -> None:
        rows = rows.contiguous()
        T, width = rows.shape
        self.run.quantize_kv(rows.data_ptr(), out.data_ptr(), T * num_heads, width // num_heads)

    def absorbed_attention(
        self,
        queries: Tensor,
        kv_b: Weight,
        latents: KvRows,
        rope_keys: KvRows,
        position: int,
        selection: Tensor | None,
        value_dim: int,
        scale: float,
    ) -> Tensor:
        T, H, width = queries.shape
        queries, out = queries.contiguous(), torch.empty(T, H, value_dim)
        selection = selection if selection is None else selection.contiguous()
        topk = 0 if selection is None else selection.shape[1]
        R, L = rope_keys.shape[1], latents.shape[1]
        pointers = queries.data_ptr(), latents.data_ptr(), rope_keys.data_ptr(), pointer(selection), out.data_ptr()
        sizes = T, position, topk, H, width - R, R, value_dim, L
        self.run.mla(struct_of(kv_b).address, *pointers, *sizes, scale, KV_KINDS[latents.dtype])
        return out

    def grouped_attention(
        self,
        queries: Tensor,
        keys: KvRows,
        values: KvRows,
        position: int,
        window: int = 0,
        sinks: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        T, H, D = queries.shape
        G, V = values.shape[1:]
        queries, out = queries.contiguous(), torch.empty(T, H, V)
        pointers = queries.data_ptr(), keys.data_ptr(), values.data_ptr(), pointer(sinks), out.data_ptr()
        self.run.gqa(*pointers, T, position, window, H, G, D, V, scale, KV_KINDS[keys.dtype])
        return out

    def index_scores(self, queries: Tensor, head_weights: Tensor, keys: KvRows) -> Tensor:
        queries, head_weights = queries.contiguous(), head_weights.contiguous()
        out = torch.empty(len(queries), len(keys))
        pointers = queries.data_ptr(), head_weights.data_ptr(), keys.data_ptr(), out.data_ptr()
        self.run.index_scores(*pointers, *queries.shape, len(keys), KV_KINDS[keys.dtype])
        return out

    def top_k_positions(self, scores: Tensor, first: int, topk: int) -> Tensor:
        selected = torch.empty(len(scores), topk, dtype=torch.int64)
        self.run.top_k_positions(scores.data_ptr(), selected.data_ptr(), *scores.shape, first, topk)
        return selected

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
        x, rows, columns, stride = rows_of(x)
        out = torch.empty(rows, columns)
        pointers = x.data_ptr(), pointer(added), weight.data_ptr(), 0, out.data_ptr()
        self.run.rms_norm(*pointers, rows, columns, stride, eps)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x, rows, columns, stride = rows_of(x)
        out = torch.empty(rows, columns)
        pointers = x.data_ptr(), 0, weight.data_ptr(), bias.data_ptr(), out.data_ptr()
        self.run.layer_norm(*pointers, rows, columns, stride, eps)
        return out

    def apply_rope(self, x: Tensor, first: int, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
        rows, half = cos.shape
        heads = x.shape[1] if x.dim() == 3 else 1
        sizes = rows, heads, x.shape[-1], first, 2 * half
        self.run.rope(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *sizes, not interleaved)
        return x

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        num_active: int,
        num_groups: int,
        num_active_groups: int,
        normalize: bool,
        scaling: float,
        mass: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        rows, experts = logits.shape
        active = min(num_active, experts)
        topk_ids, weights = torch.empty(rows, active, dtype=torch.int64), torch.empty(rows, active)
        pointers = logits.data_ptr(), pointer(bias), topk_ids.data_ptr(), weights.data_ptr()
        sizes = rows, experts, active, num_groups, num_active_groups
        self.run.route(*pointers, *sizes, mass, scaling, normalize)
        return topk_ids, weights

    def route_softmax(
        self, logits: Tensor, num_active: int, normalize: bool, scaling: float, mass: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        return self.route(logits, None, num_active, 1, 1, normalize, scaling, mass)

    def group_by_expert(
        self, topk_ids: Tensor, topk_weights: Tensor, num_experts: int
    ) -> tuple[list[int], Tensor, Tensor, Tensor]:
        rows, active = topk_ids.shape
        total, most = rows * active, min(rows * active, num_experts)
        experts, starts = array("q", bytes(8 * most + 8)), torch.empty(most + 1, dtype=torch.int64)
        grouped_rows, grouped_weights = torch.empty(total, dtype=torch.int64), torch.empty(total)
        pointers = experts.buffer_info()[0], starts.data_ptr(), grouped_rows.data_ptr(), grouped_weights.data_ptr()
        sizes = rows, active, num_experts
        found = self.call.group_by_expert(topk_ids.data_ptr(), topk_weights.data_ptr(), *pointers, *sizes)
        if found < 0:
            raise MemoryError(OUT_OF_MEMORY)
        if found < most:
            starts = starts[: found + 1]
        if experts[found] < total:
            total = experts[found]
            grouped_rows, grouped_weights = grouped_rows[:total], grouped_weights[:total]
        return experts[:found].tolist(), starts, grouped_rows, grouped_weights

    def logprobs(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, targets = logits.contiguous(), targets.contiguous()
        rows, vocab = logits.shape
        out, best = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.int64)
        if self.call.logprobs(logits.data_ptr(), targets.data_ptr(), out.data_ptr(), best.data_ptr(), rows, vocab):
            raise IndexError(f"a target is not one of {vocab} ids")
        return out, best

    def all_finite(self, x: Tensor) -> bool:
        x = x.contiguous()
        return bool(self.call.all_finite(x.data_ptr(), x.numel()))

    def read_memory(self, tensor: Tensor) -> None:
        """Read all of a tensor as fast as memory allows, for benchmarks."""
        self.read(tensor.data_ptr(), tensor.numel() * tensor.element_size())
