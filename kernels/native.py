"""The kernels of csrc/ through ctypes, which lets other Python threads run meanwhile. Arrays in, arrays out.

The structs mirror csrc/colibri.h; their sizes are compared when a library is opened.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p

import torch

KINDS = {"f32": 0, "bf16": 1, "f16": 2, "fp8-b128": 3}
INTEGER_KINDS = {8: 4, 4: 5, 3: 6, 2: 7}
SCALE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class WeightStruct(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("row_bytes", c_int64),
        ("kind", c_int32),
        ("group", c_int32),
        ("scale_kind", c_int32),
        ("exact", c_int32),
    ]


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", POINTER(WeightStruct)),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
    ]


class ExpertsStruct(ctypes.Structure):
    _fields_ = [
        ("matrices", POINTER(WeightStruct)),
        ("starts", c_void_p),
        ("rows", c_void_p),
        ("shares", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("experts", c_int64),
        ("count", c_int64),
        ("hidden", c_int64),
        ("width", c_int64),
    ]


class MlaStruct(ctypes.Structure):
    _fields_ = [
        ("kv_b", POINTER(WeightStruct)),
        ("queries", c_void_p),
        ("latents", c_void_p),
        ("rope_keys", c_void_p),
        ("selection", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
        ("position", c_int64),
        ("topk", c_int64),
        ("heads", c_int64),
        ("nope", c_int64),
        ("rope", c_int64),
        ("value", c_int64),
        ("latent", c_int64),
        ("scale", c_float),
    ]


class IndexStruct(ctypes.Structure):
    _fields_ = [
        ("queries", c_void_p),
        ("weights", c_void_p),
        ("keys", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
        ("heads", c_int64),
        ("width", c_int64),
        ("positions", c_int64),
    ]


class KernelsStruct(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("linear", ctypes.CFUNCTYPE(c_int, POINTER(LinearStruct))),
        ("experts", ctypes.CFUNCTYPE(c_int, POINTER(ExpertsStruct))),
        ("mla", ctypes.CFUNCTYPE(c_int, POINTER(MlaStruct))),
        ("index_scores", ctypes.CFUNCTYPE(c_int, POINTER(IndexStruct))),
        ("rms_norm", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float)),
        ("sigmoid", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64)),
        ("silu_product", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64)),
        ("read_memory", ctypes.CFUNCTYPE(c_int64, c_void_p, c_int64)),
    ]


STRUCTS = (WeightStruct, LinearStruct, ExpertsStruct, MlaStruct, IndexStruct, KernelsStruct)


def struct_of(weight):
    """The C view of a Weight, made once; the Weight keeps the memory alive."""
    if weight.native is None:
        fmt, scales = weight.format, weight.scales
        struct = WeightStruct(
            data=weight.data.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            rows=weight.rows,
            columns=weight.columns,
            row_bytes=weight.data.stride(0) * weight.data.element_size(),
            kind=INTEGER_KINDS[fmt.bits] if fmt.is_integer else KINDS[fmt.name],
            group=fmt.group or weight.columns,
            scale_kind=0 if scales is None else SCALE_KINDS[scales.dtype],
            exact=weight.exact,
        )
        object.__setattr__(weight, "native", struct)
    return weight.native


class Native:
    """One opened library. Its functions may be called from several threads."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.colibri_kernels.restype = POINTER(KernelsStruct)
        sizes = [self.library.colibri_size(i) for i in range(len(STRUCTS))]
        if sizes != [ctypes.sizeof(struct) for struct in STRUCTS]:
            raise OSError(f"{path}: is of another version")
        kernels = self.library.colibri_kernels()
        if not kernels:
            raise OSError(f"{path}: needs instructions that this processor does not have")
        self.name, self.kernels = kernels.contents.name.decode(), kernels.contents

    def set_threads(self, threads):
        """Work on so many threads from now on, the caller's included."""
        self.library.colibri_set_threads(threads)

    def linear(self, x, weight, bias=None):
        """As reference.linear."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(len(x), weight.rows)
        call = LinearStruct(
            ctypes.pointer(struct_of(weight)),
            x.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            len(x),
            x.stride(0),
            weight.rows,
        )
        check(self.kernels.linear(ctypes.byref(call)))
        return out

    def add_experts(self, out, x, experts, starts, rows, shares):
        """As reference.add_experts."""
        first = experts[0]
        matrices = (WeightStruct * (3 * len(experts)))(*(struct_of(matrix) for three in experts for matrix in three))
        call = ExpertsStruct(
            matrices,
            starts.data_ptr(),
            rows.data_ptr(),
            shares.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            len(experts),
            len(x),
            x.shape[1],
            first[0].rows,
        )
        check(self.kernels.experts(ctypes.byref(call)))
        return out

    def absorbed_attention(self, queries, kv_b, latents, rope_keys, position, selection, value_dim, scale):
        """As reference.absorbed_attention."""
        T, H, width = queries.shape
        queries, out = queries.contiguous(), torch.empty(T, H, value_dim)
        selection = selection if selection is None else selection.contiguous()
        R, L = rope_keys.shape[1], latents.shape[1]
        call = MlaStruct(
            ctypes.pointer(struct_of(kv_b)),
            queries.data_ptr(),
            latents.data_ptr(),
            rope_keys.data_ptr(),
            None if selection is None else selection.data_ptr(),
            out.data_ptr(),
            T,
            position,
            0 if selection is None else selection.shape[1],
            H,
            width - R,
            R,
            value_dim,
            L,
            scale,
        )
        check(self.kernels.mla(ctypes.byref(call)))
        return out

    def index_scores(self, queries, head_weights, keys):
        """As reference.index_scores."""
        queries, head_weights = queries.contiguous(), head_weights.contiguous()
        T, H, D = queries.shape
        out = torch.empty(T, len(keys))
        pointers = queries.data_ptr(), head_weights.data_ptr(), keys.data_ptr(), out.data_ptr()
        check(self.kernels.index_scores(ctypes.byref(IndexStruct(*pointers, T, H, D, len(keys)))))
        return out

    def rms_norm(self, x, weight, eps):
        """As reference.rms_norm, of rows [T, D]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, width = x.shape
        out = torch.empty(rows, width)
        check(self.kernels.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, x.stride(0), eps))
        return out

    def silu_product(self, gate, up):
        """As reference.silu_product."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        check(self.kernels.silu_product(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel()))
        return out

    def sigmoid(self, x):
        """As reference.sigmoid."""
        x = x.contiguous()
        out = torch.empty_like(x)
        check(self.kernels.sigmoid(x.data_ptr(), out.data_ptr(), x.numel()))
        return out

    def read_memory(self, tensor):
        """Read all of a tensor as fast as memory allows, for benchmarks."""
        self.kernels.read_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def check(failed):
    if failed:
        raise MemoryError("the kernels found no memory for their work")
