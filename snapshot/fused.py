"""Fused experts, all of a layer in a few tensors -> the matrices of one expert.

gate_up_proj [E, 2 W, D], down_proj [E, D, W]         gate rows before up rows
gate_up_proj [E, D, 2 W], down_proj [E, W, D]         gpt_oss: [in, out], gate and up columns alternate
gate_proj, up_proj [E, W, D], down_proj [E, D, W]     GGUF: gate and up apart
gate_up_proj_blocks [E, 2 W, D / 32, 16], _scales [E, 2 W, D / 32], the same of down_proj
                                                      gpt_oss as published: MXFP4, gate and up rows alternate

E experts, W expert width, D model width.
"""

from collections.abc import Callable

from errors import Refused
from kernels.formats import MXFP4, WeightFormat
from kernels.weight import RowSelection
from snapshot.config import ModelConfig
from snapshot.family import Family, TensorTable
from snapshot.formats import StoredWeight, entry_format, slice_bytes
from snapshot.index import TensorEntry, TensorIndex


def find_fused_experts(
    config: ModelConfig, family: Family, index: TensorIndex, layer: int
) -> Callable[[int], list[StoredWeight]] | None:
    """-> a function expert -> [gate, up, down]; None if the experts of a layer have tensors of their own."""
    table = find_table(index, config, family, layer)
    if not table:
        return None
    dtypes = ("U8",) if "down_scales" in table else index.matrix_dtypes
    for expert in range(config.num_experts):
        single = family.expert_tensors(config, layer, expert)["gate"][0]
        if single in index:
            raise Refused(f"{index.subject}: layer {layer} has its experts twice, as {index.label(single)} and fused")
    entries = {word: index.find_checked(name, shape, dtypes) for word, (name, shape) in table.items()}
    formats = {word: MXFP4 if dtypes == ("U8",) else entry_format(index, entry) for word, entry in entries.items()}
    return lambda expert: split_expert(config, family, entries, formats, expert)


def find_table(index: TensorIndex, config: ModelConfig, family: Family, layer: int) -> TensorTable:
    """The tensors that hold all experts of a layer, of which one at least is there; empty if there are none."""
    mxfp4, floats = family.mxfp4_expert_tensors(config, layer), family.fused_expert_tensors(config, layer)
    stacked = family.stacked_expert_tensors(config, layer)
    tables = [mxfp4, stacked if stacked["gate"][0] in index or stacked["up"][0] in index else floats]
    return next((table for table in tables if any(name in index for name, _ in table.values())), {})


def has_fused_experts(index: TensorIndex, config: ModelConfig, family: Family, layer: int) -> bool:
    """True if tensors that hold all experts of a layer are there, all of them."""
    table = find_table(index, config, family, layer)
    return bool(table) and all(name in index for name, _ in table.values())


def split_expert(
    config: ModelConfig,
    family: Family,
    entries: dict[str, TensorEntry],
    formats: dict[str, WeightFormat],
    expert: int,
) -> list[StoredWeight]:
    """The matrices [gate, up, down] of one expert; entries and formats: by the words of the family's table."""
    W, D = config.moe_intermediate_size, config.hidden_size
    sliced = {}
    for word, entry in entries.items():  # [E, ...]
        num_bytes = entry.num_bytes // config.num_experts
        sliced[word] = slice_bytes(entry, expert * num_bytes, num_bytes)
    if "gate" in sliced:
        shapes = {"gate": (W, D), "up": (W, D), "down": (D, W)}
        return [StoredWeight(e.name, formats[word], *shapes[word], e) for word, e in sliced.items()]
    gate_up, down = sliced["gate_up"], sliced["down"]
    is_float = "down_scales" not in sliced  # else MXFP4
    fmt, down_fmt = formats["gate_up"], formats["down"]
    if family.is_gate_up_interleaved:
        scales, down_scales = sliced.get("gate_up_scales"), sliced.get("down_scales")
        rows = [RowSelection(i, 2, 2 * W, is_transposed=is_float) for i in (0, 1)]
        gate, up = (StoredWeight(gate_up.name, fmt, W, D, gate_up, scales, selection) for selection in rows)
        down_rows = RowSelection(0, 1, D, is_transposed=True) if is_float else None
        return [gate, up, StoredWeight(down.name, down_fmt, D, W, down, down_scales, down_rows)]
    half = gate_up.num_bytes // 2
    gate, up = (StoredWeight(gate_up.name, fmt, W, D, slice_bytes(gate_up, start, half)) for start in (0, half))
    return [gate, up, StoredWeight(down.name, down_fmt, D, W, down)]
