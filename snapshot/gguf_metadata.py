"""The metadata of a GGUF model, typed, and its keys by those of config.json."""

import struct
from dataclasses import dataclass, field
from typing import Any, NoReturn

from errors import Refused, show
from machine.fields import MISSING
from snapshot.config_fields import ConfigFields
from snapshot.gguf_files import GgufModel

# Keys of config.json -> of the metadata behind the architecture: those that are copied, and names for messages.
COPIED = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_attention_heads": "attention.head_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
LABELS = COPIED | {
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "qk_nope_head_dim": "attention.key_length_mla",
    "v_head_dim": "attention.value_length_mla",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "indexer_types": "attention.indexer.types",
    "sliding_window": "attention.sliding_window",
    "layer_types": "attention.sliding_window_pattern",
    "rope_type": "rope.scaling.type",
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
}


class MetadataFields(ConfigFields):
    """Fields of a config.json that was made from metadata; complaints name the keys of the file."""

    architecture = ""

    def nested(self, key: str) -> ConfigFields:
        values = self.get(key, {})
        inner = MetadataFields(values, self.subject)
        inner.architecture, inner.notices = self.architecture, self.notices
        return inner

    def label(self, name: str) -> str:
        return f"{self.subject}: {self.architecture}.{LABELS[name]}" if name in LABELS else super().label(name)


@dataclass
class Metadata:
    """The metadata of a model, and the config.json that is made from it. Keys are those behind the architecture."""

    model: GgufModel
    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def refuse(self, key: str, problem: str) -> NoReturn:
        raise Refused(f"{self.model.path}: {self.architecture}.{key} {problem}")

    def find(self, key: str, default: Any = None) -> Any:
        """A value. float32 as the shortest decimal number that it is; lists that hold one value again and again as that
        value."""
        value = self.model.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return default
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        return shortest(value) if isinstance(value, float) else value

    def whole(self, key: str, default: int = MISSING, low: int = 0) -> int:
        value = self.find(key, default)
        if value is MISSING:
            self.refuse(key, "is missing")
        if isinstance(value, list):
            self.refuse(key, f"is {show(value)}: it differs from layer to layer, which this engine does not compute")
        if type(value) is not int or not low <= value < 1 << 31:
            self.refuse(key, f"is {show(value)}, expected a whole number of {low} or more")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse a value that changes the arithmetic, unless it is absent or one of these."""
        value = self.find(key)
        if value is not None and value not in allowed:
            self.refuse(key, f"is {show(value)}, this engine computes only {' or '.join(map(repr, allowed))}")

    def has(self, name: str) -> bool:
        """True if any layer has a tensor of this name."""
        return any(tensor.endswith(f".{name}") for tensor in self.model.tensors)

    def say(self, line: str) -> None:
        self.notices.append(f"[config] {self.model.path.name}: {self.architecture}.{line}")

    @property
    def num_layers(self) -> int:
        """Layers without those of multi-token prediction."""
        num_mtp, num_blocks = self.whole("nextn_predict_layers", 0), self.whole("block_count", low=1)
        if num_mtp >= num_blocks:
            self.refuse("nextn_predict_layers", f"is {num_mtp} of {num_blocks} blocks")
        return num_blocks - num_mtp


def shortest(value: float) -> float:
    """The float32 that a double holds, as the decimal number with the fewest digits: 1e-06, not 9.99999997e-07."""
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:
            return value
    return value
