"""config.json -> ModelConfig, frozen and checked. families/<model_type>.py interprets the keys of each model type."""

import importlib
import os
import pkgutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from errors import show
from snapshot import families
from snapshot.config_fields import ConfigFields
from snapshot.config_parts import EXPERT_NAMES
from snapshot.reader import read_json_object
from snapshot.rope import Rope

if TYPE_CHECKING:
    from snapshot.family import Family  # imports ModelConfig

MAX_ROUTED_EXPERTS = 1 << 17  # the engine keeps a few hundred bytes for each; GLM-5.2 has 19,200


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Hyperparameters of one model, by the names of the field. Widths count columns."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    stop_ids: tuple[int, ...]
    text_prefix: tuple[str, ...] = ()  # special tokens in front of every text
    num_mtp_layers: int = 0
    # Attention: "mla" caches a latent and a rotary key of each position, "gqa" the keys and values of num_kv_heads.
    attention: str
    num_heads: int
    nope_head_dim: int  # columns of a query head without rotary embedding
    rope_head_dim: int  # columns with it: after the others in MLA, before them in GQA
    v_head_dim: int
    rope: Rope
    rope_interleaved: bool = False  # rotary pairs are adjacent columns; else one column of each half
    attention_bias: bool = False
    # MLA
    q_lora_rank: int = 0  # 0: queries are projected from the hidden state directly
    kv_lora_rank: int = 0
    latent_norm_eps: float = 0.0
    # GQA
    num_kv_heads: int = 0
    output_bias: bool = False
    qk_norm: str = ""  # RMSNorm of queries and keys: over each "head" or the whole "projection"
    sliding_windows: tuple[int, ...] = ()  # positions that each layer sees, its own included; 0: all
    has_sinks: bool = False  # attention sinks: one more score in the softmax of each head, without a value
    # DSA indexer: "full" layers own one, "shared" layers reuse the nearest earlier top-k; empty: no indexer
    indexer_types: tuple[str, ...] = ()
    index_topk: int = 0
    index_num_heads: int = 0
    index_head_dim: int = 0
    index_norm_eps: float = 0.0
    index_rope_interleaved: bool = True
    # MLP and MoE
    mlp_types: tuple[str, ...]  # "dense" or "sparse" for each layer
    intermediate_size: int = 0  # of dense layers
    num_experts: int
    num_active_experts: int  # top-k
    moe_intermediate_size: int
    num_shared_experts: int = 0
    router: str = "softmax"  # or "sigmoid" with a bias that takes part in the top-k alone
    router_has_bias: bool = False  # on the logits
    num_groups: int = 1
    num_active_groups: int = 1
    normalize_weights: bool = True
    routed_scaling: float = 1.0
    # Clamped SwiGLU of experts with biases, (up + 1) * gate * sigmoid(alpha * gate); limit 0: plain SwiGLU.
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    # Lossy options of the user, not of config.json. expert_mass: of the top-k keep the fewest experts whose scores
    # reach this share of their sum; 0 keeps all. kv_dtype: how the KV cache is stored, f32 or bf16.
    expert_mass: float = 0.0
    kv_dtype: str = "f32"

    @property
    def qk_head_dim(self) -> int:
        return self.nope_head_dim + self.rope_head_dim

    @property
    def kv_widths(self) -> tuple[int, int]:
        """Numbers that the KV cache holds of a position: latent and rotary key (MLA), or keys and values (GQA)."""
        if self.attention == "mla":
            return self.kv_lora_rank, self.rope_head_dim
        return self.num_kv_heads * self.qk_head_dim, self.num_kv_heads * self.v_head_dim

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.mlp_types) if kind == "sparse")

    def has_own_indexer(self, layer: int) -> bool:
        """True for "full" layers, and for the MTP layer (layer == num_layers) of a model with an indexer."""
        return bool(self.indexer_types) and (layer >= self.num_layers or self.indexer_types[layer] == "full")

    def sliding_window(self, layer: int) -> int:
        """Positions that a layer sees, its own included; 0: all, as the MTP layer does."""
        return self.sliding_windows[layer] if layer < len(self.sliding_windows) else 0


def read_config(folder: Path) -> tuple[ModelConfig, "Family"]:
    """Read config.json and generation_config.json of a snapshot folder."""
    path = folder / "config.json"
    config, family = parse_model_config(ConfigFields(read_json_object(path), path))
    generation = folder / "generation_config.json"
    if os.path.lexists(generation):  # a dangling link is a broken download, not an absent file
        stop_ids = ConfigFields(read_json_object(generation), generation).token_ids("eos_token_id", config.vocab_size)
        config = replace(config, stop_ids=tuple(dict.fromkeys(config.stop_ids + stop_ids)))
    return config, family


def parse_model_config(fields: ConfigFields) -> tuple[ModelConfig, "Family"]:
    """Fields of a config.json -> the config and its family. Refuses an unknown model_type."""
    known = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    model_type = fields.get("model_type")
    if model_type not in known:
        fields.reject("model_type", f"is {show(model_type)}, this engine knows {', '.join(known)}")
    check_quantization(fields)
    family = importlib.import_module(f"snapshot.families.{model_type}").FAMILY
    config = family.parse_config(fields)
    num_sparse = len(config.sparse_layers)
    if config.num_experts * num_sparse > MAX_ROUTED_EXPERTS:
        problem = f"makes {config.num_experts} experts in {num_sparse} layers, above {MAX_ROUTED_EXPERTS} in all"
        fields.reject(fields.first_present(*EXPERT_NAMES), problem)
    return config, family


def check_quantization(fields: ConfigFields) -> None:
    """Refuse a quantization_config other than FP8 or MXFP4. Dtypes of tensors decide: containers keep the key."""
    values = fields.get("quantization_config", None)
    if values is None:
        return
    if not isinstance(values, dict):
        fields.reject("quantization_config", "must be an object")
    quantization = fields.nested("quantization_config", values)
    quantization.require("quant_method", "fp8", "mxfp4")
    if quantization.get("quant_method") == "fp8":
        quantization.require("fmt", "e4m3")
        quantization.require("weight_block_size", [128, 128])
