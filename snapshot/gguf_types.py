"""The tensor types of GGUF files: names, and sizes of their blocks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufType:
    """A tensor type: each `values` numbers of a row are a block of `num_bytes` bytes."""

    name: str
    values: int
    num_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of whole blocks."""
        return columns // self.values * self.num_bytes


def block_types(values: int, sizes: dict[int, tuple[str, int]]) -> dict[int, GgufType]:
    """Types with blocks of one length; sizes: id -> (name, bytes of a block)."""
    return {number: GgufType(name, values, num_bytes) for number, (name, num_bytes) in sizes.items()}


# Floats have the names that safetensors gives them, so that they are read as those are.
GGUF_TYPES = block_types(1, {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2), 24: ("I8", 1), 25: ("I16", 2)})
GGUF_TYPES |= block_types(1, {26: ("I32", 4), 27: ("I64", 8), 28: ("F64", 8)})
GGUF_TYPES |= block_types(32, {2: ("q4_0", 18), 3: ("q4_1", 20), 6: ("q5_0", 22), 7: ("q5_1", 24), 8: ("q8_0", 34)})
GGUF_TYPES |= block_types(32, {20: ("iq4_nl", 18), 39: ("mxfp4", 17)}) | block_types(64, {40: ("nvfp4", 36)})
GGUF_TYPES |= block_types(256, {10: ("q2_K", 84), 11: ("q3_K", 110), 12: ("q4_K", 144), 13: ("q5_K", 176)})
GGUF_TYPES |= block_types(256, {14: ("q6_K", 210), 16: ("iq2_xxs", 66), 17: ("iq2_xs", 74), 18: ("iq3_xxs", 98)})
GGUF_TYPES |= block_types(256, {19: ("iq1_s", 50), 21: ("iq3_s", 110), 22: ("iq2_s", 82), 23: ("iq4_xs", 136)})
GGUF_TYPES |= block_types(256, {29: ("iq1_m", 56), 34: ("tq1_0", 54), 35: ("tq2_0", 66)})
GGUF_TYPES |= block_types(128, {41: ("q1_0", 18)}) | block_types(64, {42: ("q2_0", 18)})
# Numbers that files once had, or that only activations have while a product is computed.
NOT_IN_FILES = {4: "q4_2", 5: "q4_3", 9: "q8_1", 15: "q8_K", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8"}
NOT_IN_FILES |= {36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8"}
BLOCK_TYPES = {kind.name: kind for kind in GGUF_TYPES.values() if kind.values > 1}  # quantized
