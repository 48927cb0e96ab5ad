"""Family: the names and shapes of the tensors of a model type.

Most families share their names, so those are here; families/<model_type>.py states the differences as FAMILY. A
TensorTable maps the engine's word for a tensor to its name and shape, [out, in] for matrices.
"""

from dataclasses import dataclass

from snapshot.config import ModelConfig
from snapshot.index import TensorIndex

TensorTable = dict[str, tuple[str, tuple[int, ...]]]
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """One model type."""

    moe_prefix: str = "mlp."  # of the router and of experts in tensors of their own
    router_name: str = "gate"
    expert_names: tuple[str, str, str] = MLP_NAMES
    is_gate_up_interleaved: bool = False  # fused experts: gate and up columns alternate, [in, out]
    # (part of a name, the same in snapshots with fused experts)
    alias: tuple[str, str] = ("", "")

    def resolve_aliases(self, table: TensorTable, index: TensorIndex) -> TensorTable:
        """The table with the spelling that the snapshot has."""
        resolved = {}
        for word, (name, shape) in table.items():
            other = name.replace(*self.alias)
            resolved[word] = (other if name not in index and other in index else name), shape
        return resolved

    def model_tensors(self, c: ModelConfig) -> TensorTable:
        V, D = c.vocab_size, c.hidden_size
        return {
            "embed": ("model.embed_tokens.weight", (V, D)),
            "norm": ("model.norm.weight", (D,)),
            "lm_head": ("lm_head.weight", (V, D)),  # or the embedding: DenseTensors.tie_embeddings
        }

    def layer_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}."

    def mtp_projection(self, layer: int) -> str:
        """The tensor that distinguishes an MTP layer from an ordinary one."""
        return self.layer_prefix(layer) + "eh_proj.weight"

    def mtp_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        """Tensors of the multi-token-prediction layer beside those of a sparse layer."""
        prefix, D = self.layer_prefix(layer), c.hidden_size
        return {
            "input_proj": (self.mtp_projection(layer), (D, 2 * D)),  # embedding half first
            "embed_norm": (prefix + "enorm.weight", (D,)),
            "hidden_norm": (prefix + "hnorm.weight", (D,)),
            "norm": (prefix + "shared_head.norm.weight", (D,)),
        }

    def mtp_own_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        """The MTP layer's own embedding and head; absent in most snapshots, which share the model's."""
        prefix, shape = self.layer_prefix(layer), (c.vocab_size, c.hidden_size)
        names = {"embed": "embed_tokens.weight", "lm_head": "shared_head.head.weight"}
        return {word: (prefix + name, shape) for word, name in names.items()}

    def attention_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        prefix = self.layer_prefix(layer)
        norms: TensorTable = {
            "input_norm": (prefix + "input_layernorm.weight", (c.hidden_size,)),
            "post_norm": (prefix + "post_attention_layernorm.weight", (c.hidden_size,)),
        }
        return norms | (mla_tensors if c.attention == "mla" else gqa_tensors)(c, prefix + "self_attn.")

    def indexer_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        """The DSA indexer of a layer; empty for a model without indexers."""
        prefix = self.layer_prefix(layer) + "self_attn.indexer."
        if not c.indexer_types:
            return {}
        return {
            "q_b": (prefix + "wq_b.weight", (c.index_num_heads * c.index_head_dim, c.q_lora_rank)),
            "k": (prefix + "wk.weight", (c.index_head_dim, c.hidden_size)),
            "k_norm": (prefix + "k_norm.weight", (c.index_head_dim,)),
            "k_norm_bias": (prefix + "k_norm.bias", (c.index_head_dim,)),
            "head_weights": (prefix + "weights_proj.weight", (c.index_num_heads, c.hidden_size)),
        }

    def dense_mlp_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        return mlp_tensors(c, self.layer_prefix(layer) + "mlp.", c.intermediate_size)

    def shared_expert_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        width = c.moe_intermediate_size * c.num_shared_experts
        return mlp_tensors(c, self.layer_prefix(layer) + self.moe_prefix + "shared_experts.", width)

    def router_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        prefix = self.layer_prefix(layer) + self.moe_prefix + self.router_name
        table: TensorTable = {"router": (prefix + ".weight", (c.num_experts, c.hidden_size))}
        if c.router == "sigmoid":
            table["router_bias"] = (prefix + ".e_score_correction_bias", (c.num_experts,))
        if c.router_has_bias:
            table["logit_bias"] = (prefix + ".bias", (c.num_experts,))
        return table

    def expert_tensors(self, c: ModelConfig, layer: int, expert: int) -> TensorTable:
        """One routed expert in tensors of its own, as most families publish it."""
        prefix = f"{self.layer_prefix(layer)}{self.moe_prefix}experts.{expert}."
        return mlp_tensors(c, prefix, c.moe_intermediate_size, self.expert_names)

    def expert_bias_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        """Biases of all experts of a layer; they stay in memory."""
        prefix, E = self.layer_prefix(layer) + "mlp.experts.", c.num_experts
        gate_up, down = (E, 2 * c.moe_intermediate_size), (E, c.hidden_size)
        if not self.is_gate_up_interleaved:
            shapes = {"gate": (E, c.moe_intermediate_size), "up": (E, c.moe_intermediate_size), "down": down}
            return {word: (f"{prefix}{word}_proj_bias", shape) for word, shape in shapes.items()}
        return {"gate_up": (prefix + "gate_up_proj_bias", gate_up), "down": (prefix + "down_proj_bias", down)}

    def fused_expert_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        """All experts of a layer in two tensors, as transformers 5 holds them; split by snapshot/fused.py."""
        prefix = self.layer_prefix(layer) + "mlp.experts."
        E, D, W = c.num_experts, c.hidden_size, c.moe_intermediate_size
        gate_up, down = ((E, D, 2 * W), (E, W, D)) if self.is_gate_up_interleaved else ((E, 2 * W, D), (E, D, W))
        return {"gate_up": (prefix + "gate_up_proj", gate_up), "down": (prefix + "down_proj", down)}

    def stacked_expert_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        """All experts of a layer in three tensors, as a GGUF has them."""
        prefix = self.layer_prefix(layer) + "mlp.experts."
        E, D, W = c.num_experts, c.hidden_size, c.moe_intermediate_size
        shapes = {"gate": (E, W, D), "up": (E, W, D), "down": (E, D, W)}
        return {word: (f"{prefix}{word}_proj", shape) for word, shape in shapes.items()}

    def mxfp4_expert_tensors(self, c: ModelConfig, layer: int) -> TensorTable:
        """Fused experts in MXFP4, as gpt-oss publishes them: blocks of 32 columns with a scale each."""
        if not self.is_gate_up_interleaved:
            return {}
        prefix = self.layer_prefix(layer) + "mlp.experts."
        D, W = c.hidden_size, c.moe_intermediate_size
        table: TensorTable = {}
        for word, rows, columns in (("gate_up", 2 * W, D), ("down", D, W)):
            shape = (c.num_experts, rows, columns // 32)
            table[word] = (f"{prefix}{word}_proj_blocks", (*shape, 16))
            table[word + "_scales"] = (f"{prefix}{word}_proj_scales", shape)
        return table


def mla_tensors(c: ModelConfig, prefix: str) -> TensorTable:
    """MLA: keys and values through a latent; queries through one too, or projected directly."""
    q_width = c.num_heads * c.qk_head_dim
    kv_width = c.num_heads * (c.nope_head_dim + c.v_head_dim)
    table: TensorTable = {
        "kv_a": (prefix + "kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.rope_head_dim, c.hidden_size)),
        "kv_a_norm": (prefix + "kv_a_layernorm.weight", (c.kv_lora_rank,)),
        "kv_b": (prefix + "kv_b_proj.weight", (kv_width, c.kv_lora_rank)),
        "o": (prefix + "o_proj.weight", (c.hidden_size, c.num_heads * c.v_head_dim)),
    }
    if c.q_lora_rank:
        table |= {
            "q_a": (prefix + "q_a_proj.weight", (c.q_lora_rank, c.hidden_size)),
            "q_a_norm": (prefix + "q_a_layernorm.weight", (c.q_lora_rank,)),
            "q_b": (prefix + "q_b_proj.weight", (q_width, c.q_lora_rank)),
        }
    else:
        table["q_b"] = (prefix + "q_proj.weight", (q_width, c.hidden_size))
    if c.attention_bias:
        table |= {
            "kv_a_bias": (prefix + "kv_a_proj_with_mqa.bias", (c.kv_lora_rank + c.rope_head_dim,)),
            "o_bias": (prefix + "o_proj.bias", (c.hidden_size,)),
        }
        if c.q_lora_rank:
            table["q_a_bias"] = (prefix + "q_a_proj.bias", (c.q_lora_rank,))
    return table


def gqa_tensors(c: ModelConfig, prefix: str) -> TensorTable:
    q_width = c.num_heads * c.qk_head_dim
    k_width, v_width = c.kv_widths
    widths = {"q": q_width, "k": k_width, "v": v_width}
    table: TensorTable = {word: (f"{prefix}{word}_proj.weight", (widths[word], c.hidden_size)) for word in widths}
    table["o"] = (prefix + "o_proj.weight", (c.hidden_size, c.num_heads * c.v_head_dim))
    if c.attention_bias:
        table |= {f"{word}_bias": (f"{prefix}{word}_proj.bias", (widths[word],)) for word in widths}
    if c.output_bias:
        table["o_bias"] = (prefix + "o_proj.bias", (c.hidden_size,))
    if c.qk_norm:
        q_norm, k_norm = (c.qk_head_dim, c.qk_head_dim) if c.qk_norm == "head" else (q_width, k_width)
        table["q_norm"] = (prefix + "q_norm.weight", (q_norm,))
        table["k_norm"] = (prefix + "k_norm.weight", (k_norm,))
    if c.has_sinks:
        table["sinks"] = (prefix + "sinks", (c.num_heads,))
    return table


def mlp_tensors(c: ModelConfig, prefix: str, width: int, names: tuple[str, str, str] = MLP_NAMES) -> TensorTable:
    shapes = (width, c.hidden_size), (width, c.hidden_size), (c.hidden_size, width)
    pairs = zip(("gate", "up", "down"), names, shapes, strict=True)
    return {word: (f"{prefix}{name}.weight", shape) for word, name, shape in pairs}
