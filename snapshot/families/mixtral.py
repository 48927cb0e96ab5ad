"""mixtral (8x7B, 8x22B): grouped queries, softmax router whose chosen weights add up to 1."""

from snapshot.config import ModelConfig
from snapshot.config_parts import check_num_experts, parse_common, parse_experts, parse_gqa, parse_sliding_window
from snapshot.family import Family


def parse_config(fields):
    """Fields -> ModelConfig."""
    model = parse_common(fields, positions=4096 * 32)
    config = ModelConfig(
        text_prefix=("<s>",),
        **model,
        **parse_gqa(fields, model, theta=1e6),
        **parse_sliding_window(fields, model["num_layers"]),
        **parse_experts(fields, ("num_local_experts", "num_experts"), "intermediate_size", count=8, active=2),
        mlp_types=("sparse",) * model["num_layers"],
        router="softmax",
    )
    return check_num_experts(fields, config, "num_local_experts")


FAMILY = Family(
    parse_config,
    moe="block_sparse_moe.",
    experts=("w1", "w3", "w2"),
    aliases=((".block_sparse_moe.", ".mlp."),),
)
