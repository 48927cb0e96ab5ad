"""The kernels of csrc/ through ctypes, which lets other Python threads run meanwhile. Arrays in, arrays out.

The structs are those of structs.py; their sizes are compared when a library is opened. A call hands over one of them,
as bytes: packing bytes takes a fraction of the time that filling a ctypes struct or passing many arguments does, and a
small model is mostly calls.
"""

import ctypes
from array import array
from ctypes import POINTER
from dataclasses import replace
from types import SimpleNamespace

import torch

from kernels.structs import CALLS, STRUCTS, KernelsStruct, WeightStruct, packer

KINDS = {"f32": 0, "bf16": 1, "f16": 2, "fp8-b128": 3, "mxfp4": 4}
INTEGER_KINDS = {8: 5, 4: 6, 3: 7, 2: 8}
SCALE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
KV_KINDS = {torch.float32: 0, torch.bfloat16: 1}


def struct_of(weight):
    """The C view of a Weight, made once; the Weight keeps the memory alive. `address` and `raw` are where it is, and
    its bytes. The numbers of a row lie side by side."""
    if weight.native is None:
        fmt, scales = weight.format, weight.scales
        view = WeightStruct(
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


def row_major(weight):
    """A Weight whose rows have their numbers side by side: itself, or a copy for a matrix that lies as [in, out]."""
    return weight if weight.data.stride(1) == 1 else replace(weight, data=weight.data.contiguous(), native=None)


def pointer(tensor):
    """Where a tensor begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(x):
    """x [T, D] with columns side by side -> (x, T, D, how far rows are apart)."""
    rows, columns = x.shape
    if x.is_contiguous():
        return x, rows, columns, columns
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, rows, columns, x.stride(0)


class Native:
    """One opened library. Its functions may be called from several threads."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.colibri_kernels.restype = POINTER(KernelsStruct)
        sizes = [self.library.colibri_size(i) for i in range(len(STRUCTS))]
        if sizes != [ctypes.sizeof(kind) for kind in STRUCTS]:
            raise OSError(f"{path}: is of another version")
        kernels = self.library.colibri_kernels()
        if not kernels:
            raise OSError(f"{path}: needs instructions that this processor does not have")
        kernels = kernels.contents
        self.name, self.read = kernels.name.decode(), kernels.read_memory
        self.call = SimpleNamespace(**{name: getattr(kernels, name) for name in CALLS})
        self.pack = SimpleNamespace(**{name: packer(kind) for name, kind in CALLS.items()})

    def set_threads(self, threads):
        """Work on so many threads from now on, the caller's included."""
        self.library.colibri_set_threads(threads)

    def linear(self, x, weight, bias=None):
        """As reference.linear."""
        x, rows, _, stride = rows_of(x)
        view = struct_of(weight)
        width = view.rows
        out = torch.empty(rows, width)
        call = view.address, x.data_ptr(), pointer(bias), out.data_ptr(), rows, stride, width
        check(self.call.linear(self.pack.linear(*call)))
        return out

    def gated_mlp(self, x, gate, up, down):
        """As reference.gated_mlp."""
        x = x.contiguous()
        out = torch.empty_like(x)
        weights = struct_of(gate).address, struct_of(up).address, struct_of(down).address
        check(self.call.gated_mlp(self.pack.gated_mlp(*weights, x.data_ptr(), out.data_ptr(), len(x))))
        return out

    def add_experts(self, out, x, experts, starts, rows, shares, gates=None):
        """As reference.add_experts."""
        return self._experts(out, x, experts, starts, rows, shares, None, gates)

    def expert_outputs(self, outputs, x, experts, starts, rows, places, gates=None):
        """As reference.expert_outputs."""
        return self._experts(outputs, x, experts, starts, rows, None, places, gates)

    def _experts(self, out, x, experts, starts, rows, shares, places, gates):
        weights = [row_major(matrix) for three in experts for matrix in three]  # held until the call is done
        matrices = array("b", b"".join([struct_of(weight).raw for weight in weights]))
        pointers = matrices.buffer_info()[0], starts.data_ptr(), rows.data_ptr(), pointer(shares), x.data_ptr()
        call = *pointers, out.data_ptr(), len(experts), *x.shape, weights[0].rows, pointer(places)
        clamped = (0, 0, 0, 0.0, 0.0)
        if gates:
            biases = gates.gate_bias.contiguous(), gates.up_bias.contiguous(), gates.down_bias.contiguous()
            clamped = *map(pointer, biases), gates.limit, gates.alpha
        check(self.call.experts(self.pack.experts(*call, *clamped)))
        return out

    def add_weighted(self, out, outputs, rows, shares):
        """As reference.add_weighted."""
        count, columns = outputs.shape
        pointers = outputs.data_ptr(), shares.data_ptr(), rows.data_ptr(), out.data_ptr()
        check(self.call.add_weighted(self.pack.add_weighted(*pointers, count, columns)))
        return out

    def absorbed_attention(self, queries, kv_b, latents, rope_keys, position, selection, value_dim, scale):
        """As reference.absorbed_attention."""
        T, H, width = queries.shape
        queries, out = queries.contiguous(), torch.empty(T, H, value_dim)
        selection = selection if selection is None else selection.contiguous()
        topk = 0 if selection is None else selection.shape[1]
        R, L = rope_keys.shape[1], latents.shape[1]
        pointers = queries.data_ptr(), latents.data_ptr(), rope_keys.data_ptr(), pointer(selection), out.data_ptr()
        sizes = T, position, topk, H, width - R, R, value_dim, L
        kind = KV_KINDS[latents.dtype]
        check(self.call.mla(self.pack.mla(struct_of(kv_b).address, *pointers, *sizes, scale, kind)))
        return out

    def grouped_attention(self, queries, keys, values, position, window=0, sinks=None, scale=1.0):
        """As reference.grouped_attention; keys and values lie position after position."""
        T, H, D = queries.shape
        G, V = values.shape[1:]
        queries, out = queries.contiguous(), torch.empty(T, H, V)
        pointers = queries.data_ptr(), keys.data_ptr(), values.data_ptr(), pointer(sinks), out.data_ptr()
        call = *pointers, T, position, window, H, G, D, V, scale, KV_KINDS[keys.dtype]
        check(self.call.grouped_attention(self.pack.grouped_attention(*call)))
        return out

    def index_scores(self, queries, head_weights, keys):
        """As reference.index_scores."""
        queries, head_weights = queries.contiguous(), head_weights.contiguous()
        T, H, D = queries.shape
        out = torch.empty(T, len(keys))
        pointers = queries.data_ptr(), head_weights.data_ptr(), keys.data_ptr(), out.data_ptr()
        check(self.call.index_scores(self.pack.index_scores(*pointers, T, H, D, len(keys), KV_KINDS[keys.dtype])))
        return out

    def top_positions(self, scores, first, topk):
        """As reference.top_positions."""
        rows, positions = scores.shape
        chosen = torch.empty(rows, topk, dtype=torch.int64)
        call = scores.data_ptr(), chosen.data_ptr(), rows, positions, first, topk
        check(self.call.top_positions(self.pack.top_positions(*call)))
        return chosen

    def rms_norm(self, x, weight, eps, added=None):
        """As reference.rms_norm, of rows [T, D]."""
        x, rows, columns, stride = rows_of(x)
        out = torch.empty(rows, columns)
        pointers = x.data_ptr(), pointer(added), weight.data_ptr(), 0, out.data_ptr()
        check(self.call.rms_norm(self.pack.rms_norm(*pointers, rows, columns, stride, eps)))
        return out

    def layer_norm(self, x, weight, bias, eps):
        """As reference.layer_norm, of rows [T, D]."""
        x, rows, columns, stride = rows_of(x)
        out = torch.empty(rows, columns)
        pointers = x.data_ptr(), 0, weight.data_ptr(), bias.data_ptr(), out.data_ptr()
        check(self.call.layer_norm(self.pack.layer_norm(*pointers, rows, columns, stride, eps)))
        return out

    def rotate(self, x, first, cos, sin, halves=0):
        """As reference.rotate."""
        rows, half = cos.shape
        width = x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        call = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, width, first, 2 * half, halves
        check(self.call.rotate(self.pack.rotate(*call)))
        return x

    def rotate_halves(self, x, first, cos, sin):
        """As reference.rotate_halves."""
        return self.rotate(x, first, cos, sin, 1)

    def route(self, logits, bias, num_active, num_groups, num_active_groups, normalize, scaling, mass=0.0):
        """As reference.route."""
        rows, experts = logits.shape
        active = min(num_active, experts)
        chosen, weights = torch.empty(rows, active, dtype=torch.int64), torch.empty(rows, active)
        pointers = logits.data_ptr(), pointer(bias), chosen.data_ptr(), weights.data_ptr()
        sizes = rows, experts, active, num_groups, num_active_groups
        check(self.call.route(self.pack.route(*pointers, *sizes, mass, scaling, normalize)))
        return chosen, weights

    def route_softmax(self, logits, num_active, normalize, scaling, mass=0.0):
        """As reference.route_softmax."""
        return self.route(logits, None, num_active, 1, 1, normalize, scaling, mass)

    def group_by_expert(self, chosen, shares, num_experts):
        """As reference.group_by_expert."""
        rows, active = chosen.shape
        total, most = rows * active, min(rows * active, num_experts)
        experts, starts = array("q", bytes(8 * most + 8)), torch.empty(most + 1, dtype=torch.int64)
        grouped_rows, grouped_shares = torch.empty(total, dtype=torch.int64), torch.empty(total)
        pointers = experts.buffer_info()[0], starts.data_ptr(), grouped_rows.data_ptr(), grouped_shares.data_ptr()
        call = chosen.data_ptr(), shares.data_ptr(), *pointers, rows, active, num_experts
        found = self.call.group_by_expert(self.pack.group_by_expert(*call))
        check(found < 0)
        if found < most:
            starts = starts[: found + 1]
        if experts[found] < total:
            total = experts[found]
            grouped_rows, grouped_shares = grouped_rows[:total], grouped_shares[:total]
        return experts[:found].tolist(), starts, grouped_rows, grouped_shares

    def logprobs(self, logits, targets):
        """As reference.logprobs."""
        logits, targets = logits.contiguous(), targets.contiguous()
        rows, vocab = logits.shape
        out, best = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.int64)
        pointers = logits.data_ptr(), targets.data_ptr(), out.data_ptr(), best.data_ptr()
        failed = self.call.logprobs(self.pack.logprobs(*pointers, rows, vocab))
        if failed == 2:
            raise IndexError(f"a target is not one of {vocab} ids")
        check(failed)
        return out, best

    def all_finite(self, x):
        """As reference.all_finite."""
        x = x.contiguous()
        return bool(self.call.all_finite(self.pack.all_finite(x.data_ptr(), x.numel())))

    def read_memory(self, tensor):
        """Read all of a tensor as fast as memory allows, for benchmarks."""
        self.read(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def check(failed):
    if failed:
        raise MemoryError("the kernels found no memory for their work")
