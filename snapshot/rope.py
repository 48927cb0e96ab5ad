"""Rotary embedding as config.json asks for it: the frequency of each pair of columns, plain or stretched by yarn."""

import math
from dataclasses import dataclass

import torch

ROPE_TYPES = ("default", "yarn")


@dataclass(frozen=True)
class Rope:
    """Pair j of the rotary columns turns by position * frequencies[j]; cos and sin are multiplied by `factor`."""

    frequencies: tuple[float, ...]
    factor: float = 1.0
    score_factor: float = 1.0  # of the scores of MLA, beside the root of the head's width


def parse_rope(fields, width, max_positions, theta=10000.0, absent=None):
    """rope_parameters, or the older rope_scaling and top-level rope_theta -> Rope of `width` columns.

    theta: what the family takes where the config has none; absent: its rope_parameters where there are none. Refused
    for a rope type that is not computed here.
    """
    raw = fields.get(("rope_parameters", "rope_scaling"), absent or {})
    if not isinstance(raw, dict):
        fields.refuse("rope_parameters", "must be an object")
    rope = fields.inside("rope_parameters", raw)
    rope.only(("rope_type", "type"), *ROPE_TYPES)
    theta = rope.number("rope_theta", fields.get("rope_theta", theta), low=1.0)
    if rope.get(("rope_type", "type"), "default") == "yarn":
        return yarn(rope, theta, width, max_positions)
    return Rope(tuple(plain_frequencies(theta, width).tolist()))


def plain_frequencies(theta, width):
    """theta^(-2j / width), float32 [width / 2]."""
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def yarn(rope, theta, width, max_positions):
    """YaRN (Peng et al. 2023) as transformers 5.24 has it: slow pairs are stretched by `factor`, quick ones stay, and
    between them the frequencies go over into each other."""
    original = rope.count("original_max_position_embeddings", max_positions, high=1 << 31)
    scale = rope.number("factor", max(1.0, max_positions / original), low=1.0)
    if theta == 1.0:
        rope.refuse("rope_theta", "is 1, yarn needs more")
    mscale, mscale_all = (rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim"))
    inferred = growth(scale, mscale) / growth(scale, mscale_all) if mscale and mscale_all else growth(scale)

    def pair_of(rotations):
        """The pair, as a fraction, that turns so many times over the original context."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_of(rope.number("beta_fast", 32.0, low=1e-3))
    high = pair_of(rope.number("beta_slow", 1.0, low=1e-3))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    kept = 1 - stretched
    powers = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    frequencies = 1.0 / (scale * powers) * (1 - kept) + 1.0 / powers * kept
    factor = rope.number("attention_factor", inferred)
    score_factor = growth(scale, mscale_all) ** 2 if mscale_all else 1.0
    return Rope(tuple(frequencies.tolist()), factor, score_factor)


def growth(scale, mscale=1.0):
    """How much larger yarn makes what goes into scores, for a context longer by `scale`."""
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0
