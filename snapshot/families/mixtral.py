"""mixtral (8x7B, 8x22B): GQA, softmax router with normalized top-k weights."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.family import Family

FAMILY = Family("block_sparse_moe.", expert_names=("w1", "w3", "w2"), alias=(".block_sparse_moe.", ".mlp."))


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = dict(max_position_embeddings=131072, rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2)
    common = parts.parse_common(fields)
    return ModelConfig(
        text_prefix=("<s>",),
        **common,
        **parts.parse_gqa(fields, common),
        **parts.parse_sliding_window(fields, common["num_layers"]),
        **parts.parse_experts(fields, ("num_local_experts", "num_experts"), "intermediate_size"),
        mlp_types=("sparse",) * common["num_layers"],
    )
