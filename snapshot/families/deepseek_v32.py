"""deepseek_v32 (DeepSeek-V3.2): deepseek_v3 with a DSA indexer in every layer, whose rotary pairs lie in two halves."""

from snapshot.config import ModelConfig
from snapshot.config_parts import (
    EXPERT_NAMES,
    check_count,
    read_dense_layers,
    read_experts,
    read_indexer,
    read_mla,
    read_model,
    read_mtp,
    read_sigmoid_router,
)
from snapshot.families.deepseek_v3 import TEXT_PREFIX
from snapshot.family import Family


def read_config(fields):
    """Fields -> ModelConfig."""
    fields.only("rope_interleave", True)
    model = read_model(fields, positions=163840, eps=1e-6)
    attention = read_mla(fields, model)
    experts = read_experts(fields, EXPERT_NAMES, count=256, active=8)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=True,
        indexer_types=("full",) * model["num_layers"],
        index_rope_interleaved=False,
        **model,
        **attention,
        **read_indexer(fields, attention, heads=64),
        **read_dense_layers(fields, model["num_layers"], 3),
        **experts,
        **read_sigmoid_router(fields, experts, groups=8, active_groups=4, scaling=2.5),
        **read_mtp(fields),
    )
    return check_count(fields, config, "n_routed_experts")


FAMILY = Family(read_config)
