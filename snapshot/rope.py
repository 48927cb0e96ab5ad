"""Rotary position embedding from config.json: the frequency of each pair of columns, plain or scaled by YaRN."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from snapshot.config_fields import ConfigFields


@dataclass(frozen=True)
class Rope:
    """Pair j of the rotary columns turns by position * frequencies[j]; cos and sin are multiplied by `factor`."""

    frequencies: tuple[float, ...]
    factor: float = 1.0
    score_factor: float = 1.0  # of the attention scores of MLA, beside 1 / sqrt(head width)


def parse_rope(fields: ConfigFields, width: int, max_positions: int) -> Rope:
    """rope_parameters, or the older rope_scaling and top-level rope_theta -> Rope of `width` columns."""
    rope = rope_fields(fields)
    kind = rope.first_present("rope_type", "type")
    rope.prefer(kind, rope.find(kind), "type", rope.find("type"))
    rope.require(kind, "default", "yarn")
    theta = rope.number("rope_theta", fields.get("rope_theta", 10000.0), low=1.0)
    rope.prefer("rope_theta", theta, "rope_theta of the top level", fields.find("rope_theta"))
    if rope.get(kind, "default") == "yarn":
        return yarn_rope(rope, theta, width, max_positions)
    return Rope(tuple(plain_frequencies(theta, width).tolist()))


def rope_fields(fields: ConfigFields) -> ConfigFields:
    """The object that describes the rotary embedding. Of two, transformers reads the older rope_scaling alone."""
    old, new = fields.find("rope_scaling"), fields.find("rope_parameters")
    if old and new:
        fields.prefer("rope_scaling", old, "rope_parameters", new)
    return fields.nested("rope_scaling" if old else "rope_parameters")


def plain_frequencies(theta: float, width: int) -> Tensor:
    """theta^(-2j / width), float32 [width / 2]."""
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def yarn_rope(rope: ConfigFields, theta: float, width: int, max_positions: int) -> Rope:
    """YaRN (Peng et al. 2023) as in transformers 5.24: low frequencies are interpolated by `factor`, high ones stay,
    with a linear ramp between them."""
    original = rope.count("original_max_position_embeddings", max_positions, high=1 << 31)
    scale = rope.number("factor", max(1.0, max_positions / original), low=1.0)
    if theta == 1.0:
        rope.reject("rope_theta", "is 1, yarn needs more")
    mscale = rope.number("mscale", 0.0)
    mscale_all = rope.number("mscale_all_dim", 0.0)
    inferred = yarn_mscale(scale)
    if mscale and mscale_all:
        inferred = yarn_mscale(scale, mscale) / yarn_mscale(scale, mscale_all)

    def pair_of(rotations: float) -> float:
        """The pair, as a fraction, that makes this many rotations over the original context."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_of(rope.number("beta_fast", 32.0, low=1e-3))
    high = pair_of(rope.number("beta_slow", 1.0, low=1e-3))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)  # 1: not interpolated
    powers = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    frequencies = 1.0 / (scale * powers) * (1 - kept) + 1.0 / powers * kept
    factor = rope.number("attention_factor", inferred)
    score_factor = yarn_mscale(scale, mscale_all) ** 2 if mscale_all else 1.0
    return Rope(tuple(frequencies.tolist()), factor, score_factor)


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: how much larger the attention scores become for a context longer by `scale`."""
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0
