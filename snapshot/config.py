"""ModelConfig: the hyperparameters of a model, frozen."""

from dataclasses import dataclass, field

from snapshot.rope import Rope


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
    latent_norm_eps: float = 1e-6  # in transformers the default of its class, not rms_norm_eps
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
    index_norm_eps: float = 1e-6
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
    # reach this share of their sum; 0 keeps all. kv_dtype: how the KV cache is stored, f32, bf16 or int8.
    expert_mass: float = 0.0
    kv_dtype: str = "f32"
    notices: tuple[str, ...] = field(default=(), compare=False)  # where keys of config.json disagree, and which counts

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
