"""What csrc/colibri.h declares, field by field: the structs a kernel is called with, and the table of the kernels."""

import ctypes
import struct
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p


class WeightStruct(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("row_bytes", c_int64),
        ("row_scales", c_int64),
        ("kind", c_int32),
        ("group", c_int32),
        ("scale_kind", c_int32),
        ("exact", c_int32),
    ]


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
    ]


class ExpertsStruct(ctypes.Structure):
    _fields_ = [
        ("matrices", c_void_p),
        ("starts", c_void_p),
        ("rows", c_void_p),
        ("shares", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("experts", c_int64),
        ("count", c_int64),
        ("hidden", c_int64),
        ("width", c_int64),
        ("places", c_void_p),
        ("gate_bias", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("limit", c_float),
        ("alpha", c_float),
    ]


class MlpStruct(ctypes.Structure):
    _fields_ = [
        ("gate", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
    ]


class AddStruct(ctypes.Structure):
    _fields_ = [
        ("outputs", c_void_p),
        ("shares", c_void_p),
        ("rows", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
        ("columns", c_int64),
    ]


class MlaStruct(ctypes.Structure):
    _fields_ = [
        ("kv_b", c_void_p),
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
        ("kind", c_int32),
    ]


class GroupedStruct(ctypes.Structure):
    _fields_ = [
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("count", c_int64),
        ("position", c_int64),
        ("window", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("width", c_int64),
        ("value", c_int64),
        ("scale", c_float),
        ("kind", c_int32),
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
        ("kind", c_int32),
    ]


class TopStruct(ctypes.Structure):
    _fields_ = [
        ("scores", c_void_p),
        ("chosen", c_void_p),
        ("rows", c_int64),
        ("positions", c_int64),
        ("first", c_int64),
        ("topk", c_int64),
    ]


class NormStruct(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("added", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("x_stride", c_int64),
        ("eps", c_float),
    ]


class RotateStruct(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rows", c_int64),
        ("heads", c_int64),
        ("width", c_int64),
        ("first", c_int64),
        ("rotary", c_int64),
        ("halves", c_int64),
    ]


class RouteStruct(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("bias", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("rows", c_int64),
        ("experts", c_int64),
        ("active", c_int64),
        ("groups", c_int64),
        ("active_groups", c_int64),
        ("mass", c_double),
        ("scaling", c_float),
        ("normalize", c_int32),
    ]


class GroupStruct(ctypes.Structure):
    _fields_ = [
        ("chosen", c_void_p),
        ("shares", c_void_p),
        ("experts", c_void_p),
        ("starts", c_void_p),
        ("grouped_rows", c_void_p),
        ("grouped_shares", c_void_p),
        ("rows", c_int64),
        ("active", c_int64),
        ("num_experts", c_int64),
    ]


class LogprobsStruct(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("targets", c_void_p),
        ("logprobs", c_void_p),
        ("best", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
    ]


class ValuesStruct(ctypes.Structure):
    _fields_ = [
        ("values", c_void_p),
        ("count", c_int64),
    ]


CALL = ctypes.CFUNCTYPE(c_int, c_char_p)
CALLS = {
    "linear": LinearStruct,
    "experts": ExpertsStruct,
    "gated_mlp": MlpStruct,
    "add_weighted": AddStruct,
    "mla": MlaStruct,
    "grouped_attention": GroupedStruct,
    "index_scores": IndexStruct,
    "top_positions": TopStruct,
    "rms_norm": NormStruct,
    "layer_norm": NormStruct,
    "rotate": RotateStruct,
    "route": RouteStruct,
    "group_by_expert": GroupStruct,
    "logprobs": LogprobsStruct,
    "all_finite": ValuesStruct,
}


class KernelsStruct(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        *((name, CALL) for name in CALLS),
        ("read_memory", ctypes.CFUNCTYPE(c_int64, c_void_p, c_int64)),
    ]


STRUCTS = (WeightStruct, *dict.fromkeys(CALLS.values()), KernelsStruct)
CODES = {c_void_p: "P", c_int64: "q", c_int32: "i", c_float: "f", c_double: "d"}


def packer(kind):
    """A struct as bytes, from the values of its fields in order; 0 is a pointer to nothing."""
    codes = "".join(CODES[field] for _, field in kind._fields_)
    return struct.Struct(f"{codes}0P").pack  # 0P: filled to a whole number of pointers, as C does
