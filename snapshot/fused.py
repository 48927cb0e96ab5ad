"""All experts of a layer in a few tensors of three dimensions or more -> the matrices of one of them.

gate_up_proj [E, 2 W, D], down_proj [E, D, W]         gate rows before up rows
gate_up_proj [E, D, 2 W], down_proj [E, W, D]         gpt_oss: [in, out], gate and up by turns
gate_up_proj_blocks [E, 2 W, D / 32, 16], _scales [E, 2 W, D / 32], the same of down_proj
                                                      gpt_oss as published: MXFP4, gate and up rows by turns
"""

from errors import Refused
from kernels.formats import FLOATS, MXFP4
from kernels.weight import RowSelection
from snapshot.formats import StoredWeight, slice_bytes


def find_fused_experts(config, family, index, layer):
    """-> a function expert -> StoredWeights gate, up, down; None where the experts of a layer stand one by one."""
    packed, plain = family.packed_expert_tensors(config, layer), family.fused_expert_tensors(config, layer)
    if any(name in index for name, _ in packed.values()):
        table, parts, dtypes = packed, packed_parts, ("U8",)
    elif any(name in index for name, _ in plain.values()):
        table, parts, dtypes = plain, float_parts, tuple(FLOATS)
    else:
        return None
    for expert in range(config.num_experts):
        single = family.expert_tensors(config, layer, expert)["gate"][0]
        if single in index:
            raise Refused(f"{index.folder}: layer {layer} has its experts twice, as {single} and fused")
    entries = {word: index.find_checked(*named, dtypes) for word, named in table.items()}
    return lambda expert: parts(config, family, entries, expert)


def part_of(entry, expert):
    """What a tensor [experts, ...] holds of one."""
    num_bytes = entry.num_bytes // entry.shape[0]
    return slice_bytes(entry, num_bytes * expert, num_bytes)


def float_parts(config, family, entries, expert):
    W, D = config.moe_intermediate_size, config.hidden_size
    gate_up, down = entries["gate_up"], entries["down"]
    formats = FLOATS[gate_up.dtype], FLOATS[down.dtype]
    both, below = part_of(gate_up, expert), part_of(down, expert)
    if family.alternates:
        gate, up = (
            StoredWeight(gate_up.name, formats[0], W, D, both, None, RowSelection(i, 2, 2 * W, True)) for i in (0, 1)
        )
        return [gate, up, StoredWeight(down.name, formats[1], D, W, below, None, RowSelection(0, 1, D, True))]
    half = both.num_bytes // 2
    gate, up = (StoredWeight(gate_up.name, formats[0], W, D, slice_bytes(both, start, half)) for start in (0, half))
    return [gate, up, StoredWeight(down.name, formats[1], D, W, below)]


def packed_parts(config, family, entries, expert):
    W, D = config.moe_intermediate_size, config.hidden_size
    both, both_scales, below, below_scales = (part_of(entry, expert) for entry in entries.values())
    gate, up = (StoredWeight(both.name, MXFP4, W, D, both, both_scales, RowSelection(i, 2, 2 * W)) for i in (0, 1))
    return [gate, up, StoredWeight(below.name, MXFP4, D, W, below, below_scales)]
