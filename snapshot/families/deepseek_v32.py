"""deepseek_v32 (DeepSeek-V3.2): deepseek_v3 with a DSA indexer in every layer, whose rotary pairs lie in two halves."""

from snapshot.config import ModelConfig
from snapshot.config_parts import (
    EXPERT_NAMES,
    check_num_experts,
    parse_common,
    parse_experts,
    parse_indexer,
    parse_mla,
    parse_mlp_types,
    parse_mtp,
    parse_sigmoid_router,
)
from snapshot.families.deepseek_v3 import TEXT_PREFIX
from snapshot.family import Family


def parse_config(fields):
    """Fields -> ModelConfig."""
    fields.only("rope_interleave", True)
    model = parse_common(fields, positions=163840, eps=1e-6)
    attention = parse_mla(fields, model)
    experts = parse_experts(fields, EXPERT_NAMES, count=256, active=8)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=True,
        indexer_types=("full",) * model["num_layers"],
        index_rope_interleaved=False,
        **model,
        **attention,
        **parse_indexer(fields, attention, heads=64),
        **parse_mlp_types(fields, model["num_layers"], 3),
        **experts,
        **parse_sigmoid_router(fields, experts, groups=8, active_groups=4, scaling=2.5),
        **parse_mtp(fields),
    )
    return check_num_experts(fields, config, "n_routed_experts")


FAMILY = Family(parse_config)
