"""mixtral (8x7B, 8x22B): grouped queries, softmax router whose chosen weights add up to 1."""

from snapshot.config import ModelConfig
from snapshot.config_parts import check_count, read_experts, read_gqa, read_model, read_windows
from snapshot.family import Family


def read_config(fields):
    """Fields -> ModelConfig."""
    model = read_model(fields, positions=4096 * 32)
    config = ModelConfig(
        text_prefix=("<s>",),
        **model,
        **read_gqa(fields, model, theta=1e6),
        **read_windows(fields, model["num_layers"]),
        **read_experts(fields, ("num_local_experts", "num_experts"), "intermediate_size", count=8, active=2),
        mlp_types=("sparse",) * model["num_layers"],
        router="softmax",
    )
    return check_count(fields, config, "num_local_experts")


FAMILY = Family(
    read_config,
    moe="block_sparse_moe.",
    experts=("w1", "w3", "w2"),
    aliases=((".block_sparse_moe.", ".mlp."),),
)
