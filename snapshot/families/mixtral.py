"""mixtral (8x7B, 8x22B): GQA, softmax router with normalized top-k weights."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.family import Family


def parse_config(fields: ConfigFields) -> ModelConfig:
    common = parts.parse_common(fields, positions=4096 * 32)
    return ModelConfig(
        text_prefix=("<s>",),
        **common,
        **parts.parse_gqa(fields, common, theta=1e6),
        **parts.parse_sliding_window(fields, common["num_layers"]),
        **parts.parse_experts(fields, ("num_local_experts", "num_experts"), "intermediate_size", count=8, active=2),
        mlp_types=("sparse",) * common["num_layers"],
        router="softmax",
    )


FAMILY = Family(
    parse_config,
    moe_prefix="block_sparse_moe.",
    expert_names=("w1", "w3", "w2"),
    alias=(".block_sparse_moe.", ".mlp."),
)
