"""Checkpoints quantized in ways that this engine does not read: what they are, in words for an error message."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from errors import show

if TYPE_CHECKING:  # index.py imports this file
    from snapshot.index import TensorEntry

# quantization_config.quant_method of config.json -> the name that people know.
METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors (llm-compressor)",
    "fbgemm_fp8": "FP8 with a scale for each channel (fbgemm)",
    "modelopt": "NVIDIA ModelOpt",
    "auto-round": "AutoRound",
    "hqq": "HQQ",
    "torchao": "torchao",
    "quanto": "Quanto",
    "quark": "AMD Quark",
}
# Tensors beside a matrix X.weight that show how it is quantized, the most telling first: (ending behind X, what it is).
SIGNS = (
    (".g_idx", "GPTQ"),
    (".qweight", "AWQ or GPTQ"),
    (".weight_packed", "compressed-tensors (packed integers)"),
    (".weight.quant_state.bitsandbytes__nf4", "bitsandbytes (NF4)"),
    (".weight.quant_state.bitsandbytes__fp4", "bitsandbytes (FP4)"),
    (".weight.absmax", "bitsandbytes (4 bits)"),
    (".SCB", "bitsandbytes (8 bits)"),
    (".weight_scale_2", "NVFP4 (NVIDIA ModelOpt)"),
    (".W_q", "HQQ"),
)
ADVICE = "take the original, scripts/convert.py makes fewer bits of it"
CHANNEL_SCALES = ".weight_scale"  # of FP8 and int8: one for the whole matrix, or one for each row


def describe_method(method: object) -> str:
    """The name of a quant_method."""
    return METHODS.get(method, show(method)) if isinstance(method, str) else show(method)


def describe_quantized(entries: Mapping[str, "TensorEntry"], name: str) -> str | None:
    """How the matrix `name` is quantized, from the tensors beside it; None if nothing is known of it."""
    stem = name.removesuffix(".weight")
    quantized = "quantized with {}, which this engine does not read"
    entry = entries.get(name)
    if entry is not None and entry.dtype in ("BF16", "F16", "F32"):
        return None  # what lies beside it is left from another form
    for ending, method in SIGNS:
        if stem + ending in entries:
            if ending == ".qweight":
                packed, scales = (entries.get(stem + end) for end in (".qweight", ".scales"))
                # AWQ packs 8 columns of [in, out] to a word, GPTQ 8 rows.
                if packed and scales and len(packed.shape) == len(scales.shape) == 2:
                    method = "AWQ" if packed.shape[1] != scales.shape[1] else "GPTQ"
            return quantized.format(method)
    scales = entries.get(stem + CHANNEL_SCALES)
    if entry is not None and scales is not None:
        whole = len(scales.shape) < 2 and max((*scales.shape, 1)) == 1
        kind = "FP8" if entry.dtype.startswith("F8") else shown_dtype(entry.dtype)
        each = "the whole matrix" if whole else "each channel"
        return f"{kind} with a scale for {each} ({stem}{CHANNEL_SCALES}); this engine reads FP8 in blocks of 128 x 128"
    return None


def shown_dtype(dtype: str) -> str:
    return {"I8": "int8", "U8": "packed bytes"}.get(dtype, show(dtype))
