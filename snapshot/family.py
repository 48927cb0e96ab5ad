"""What makes a model type: how its config.json is read, and the names and shapes of its tensors.

Most families name alike, so the names are here, and families/<model_type>.py says what differs. A table maps the
engine's word to (tensor name, shape); rows first.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One model type. parse_config: Fields -> ModelConfig, with the defaults of transformers."""

    parse_config: Callable
    moe: str = "mlp."  # where a layer has its router and its experts, one by one
    router: str = "gate"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    alternates: bool = False  # with all experts of a layer in two tensors: gate and up by turns, [in, out]
    # Other spellings of a part of a name: snapshots with all experts of a layer in two tensors may name so.
    aliases: tuple[tuple[str, str], ...] = ()

    def resolve(self, table, index):
        """The table with the spelling that the snapshot has."""
        return {word: (self.spelling(name, index), shape) for word, (name, shape) in table.items()}

    def spelling(self, name, index):
        others = (name.replace(usual, other) for usual, other in self.aliases)
        return name if name in index else next((other for other in others if other in index), name)

    def model_tensors(self, c):
        table = {
            "embed": ("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),
            "norm": ("model.norm.weight", (c.hidden_size,)),
        }
        if not c.tie_word_embeddings:
            table["lm_head"] = ("lm_head.weight", (c.vocab_size, c.hidden_size))
        return table

    def layer_prefix(self, layer):
        return f"model.layers.{layer}."

    def mtp_tensor(self, layer):
        """The tensor that tells a multi-token-prediction layer from one more of the main series."""
        return self.layer_prefix(layer) + "eh_proj.weight"

    def mtp_tensors(self, c, layer):
        """What the multi-token-prediction layer has beside a sparse layer's tensors."""
        prefix, D = self.layer_prefix(layer), c.hidden_size
        return {
            "input_proj": (self.mtp_tensor(layer), (D, 2 * D)),  # embedding half first
            "embed_norm": (prefix + "enorm.weight", (D,)),
            "hidden_norm": (prefix + "hnorm.weight", (D,)),
            "norm": (prefix + "shared_head.norm.weight", (D,)),
        }

    def mtp_own_tensors(self, c, layer):
        """Copies of the model's embedding and head that an MTP layer may bring; absent in most snapshots."""
        shape = (c.vocab_size, c.hidden_size)
        return {
            "embed": (self.layer_prefix(layer) + "embed_tokens.weight", shape),
            "lm_head": (self.layer_prefix(layer) + "shared_head.head.weight", shape),
        }

    def attention_tensors(self, c, layer):
        prefix = self.layer_prefix(layer)
        norms = {
            "input_norm": (prefix + "input_layernorm.weight", (c.hidden_size,)),
            "post_norm": (prefix + "post_attention_layernorm.weight", (c.hidden_size,)),
        }
        return norms | (mla_tensors if c.attention == "mla" else gqa_tensors)(c, prefix + "self_attn.")

    def indexer_tensors(self, c, layer):
        """Those of a layer that runs an indexer; of a family without any nothing."""
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

    def dense_tensors(self, c, layer):
        return mlp_tensors(c, self.layer_prefix(layer) + "mlp.", c.intermediate_size)

    def shared_expert_tensors(self, c, layer):
        width = c.moe_intermediate_size * c.num_shared_experts
        return mlp_tensors(c, self.layer_prefix(layer) + self.moe + "shared_experts.", width)

    def router_tensors(self, c, layer):
        prefix = self.layer_prefix(layer) + self.moe + self.router
        table = {"router": (prefix + ".weight", (c.num_experts, c.hidden_size))}
        if c.router == "sigmoid":
            table["router_bias"] = (prefix + ".e_score_correction_bias", (c.num_experts,))
        if c.router_has_bias:
            table["logit_bias"] = (prefix + ".bias", (c.num_experts,))
        return table

    def expert_tensors(self, c, layer, expert):
        """One tensor for each matrix of an expert, the published naming of most."""
        prefix = f"{self.layer_prefix(layer)}{self.moe}experts.{expert}."
        return mlp_tensors(c, prefix, c.moe_intermediate_size, self.experts)

    def expert_biases(self, c, layer):
        """Of all experts of a layer together; they stay in memory."""
        prefix, E = self.layer_prefix(layer) + "mlp.experts.", c.num_experts
        return {
            "gate_up": (prefix + "gate_up_proj_bias", (E, 2 * c.moe_intermediate_size)),
            "down": (prefix + "down_proj_bias", (E, c.hidden_size)),
        }

    def fused_expert_tensors(self, c, layer):
        """All experts of a layer in two tensors: how transformers keeps them in memory. snapshot/fused.py takes them
        apart."""
        prefix = self.layer_prefix(layer) + "mlp.experts."
        E, D, W = c.num_experts, c.hidden_size, c.moe_intermediate_size
        return {
            "gate_up": (prefix + "gate_up_proj", (E, D, 2 * W) if self.alternates else (E, 2 * W, D)),
            "down": (prefix + "down_proj", (E, W, D) if self.alternates else (E, D, W)),
        }

    def packed_expert_tensors(self, c, layer):
        """The same in MXFP4, of families that are published so: blocks of 32 columns, and a scale for each."""
        if not self.alternates:
            return {}
        prefix = self.layer_prefix(layer) + "mlp.experts."
        table = {}
        for word, rows, columns in (
            ("gate_up", 2 * c.moe_intermediate_size, c.hidden_size),
            ("down", c.hidden_size, c.moe_intermediate_size),
        ):
            shape = (c.num_experts, rows, columns // 32)
            table[word] = (f"{prefix}{word}_proj_blocks", (*shape, 16))
            table[word + "_scales"] = (f"{prefix}{word}_proj_scales", shape)
        return table


def mla_tensors(c, prefix):
    """Queries through a latent, or straight from the hidden state; keys and values through a latent."""
    q_width, kv_width = c.num_heads * c.qk_head_dim, c.num_heads * (c.nope_head_dim + c.v_head_dim)
    table = {
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


def gqa_tensors(c, prefix):
    q_width, k_width, v_width = c.num_heads * c.qk_head_dim, *c.kv_widths
    table = {
        "q": (prefix + "q_proj.weight", (q_width, c.hidden_size)),
        "k": (prefix + "k_proj.weight", (k_width, c.hidden_size)),
        "v": (prefix + "v_proj.weight", (v_width, c.hidden_size)),
        "o": (prefix + "o_proj.weight", (c.hidden_size, c.num_heads * c.v_head_dim)),
    }
    if c.attention_bias:
        table |= {
            "q_bias": (prefix + "q_proj.bias", (q_width,)),
            "k_bias": (prefix + "k_proj.bias", (k_width,)),
            "v_bias": (prefix + "v_proj.bias", (v_width,)),
        }
    if c.output_bias:
        table["o_bias"] = (prefix + "o_proj.bias", (c.hidden_size,))
    if c.qk_norm:
        is_head = c.qk_norm == "head"
        table |= {
            "q_norm": (prefix + "q_norm.weight", (c.qk_head_dim if is_head else q_width,)),
            "k_norm": (prefix + "k_norm.weight", (c.qk_head_dim if is_head else k_width,)),
        }
    if c.has_sinks:
        table["sinks"] = (prefix + "sinks", (c.num_heads,))
    return table


def mlp_tensors(c, prefix, width, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return {
        "gate": (f"{prefix}{gate}.weight", (width, c.hidden_size)),
        "up": (f"{prefix}{up}.weight", (width, c.hidden_size)),
        "down": (f"{prefix}{down}.weight", (c.hidden_size, width)),
    }
