"""write_gguf: a GGUF of the architecture deepseek2 beside a synthetic snapshot, for llama.cpp.

The shapes, the routers and the rotary patterns are those that dev/make_synthetic.py writes for the same options; the
other weights are random in both, of the same spread. Matrices are Q4_0 (4.5 bits a weight), embedding and output Q8_0.
There is no vocabulary: llama-bench feeds random ids.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dev.synthetic.structure import CONSTANT, ROUTINGS
from dev.synthetic.tensors import SyntheticTensor, model_groups
from errors import Refused

ARCHITECTURE = "deepseek2"
BLOCK = 32  # columns that share a scale
POOL_BLOCKS = 1_000_003  # a prime, so that a matrix larger than the pool repeats no row
ALIGNMENT = 4096
Config = dict[str, Any]  # of config.json

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file, and the synthetic one that says its contents. `shape` has the columns last."""

    name: str
    shape: tuple[int, ...]
    source: SyntheticTensor

    @property
    def type_name(self) -> str:
        return {"small": "F32", "ends": "Q8_0"}.get(self.source.role, "Q4_0") if len(self.shape) > 1 else "F32"


def import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise Refused("the package gguf is missing; make bench-peers installs it, or name a file with --gguf") from None
    return gguf


def metadata(config: Config) -> dict[str, Any]:
    """config.json of a synthetic GLM -> keys of the architecture."""
    c = config
    latent, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
    return {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        "rope.freq_base": float(c["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": rope,
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": 1,  # MLA as attention over one shared latent
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": c["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": c["v_head_dim"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": 2,  # sigmoid
    }


def plan_tensors(config: Config, routing: str, seed: int) -> Iterator[GgufTensor]:
    """Every tensor of the file in its order, with the structure that make_synthetic makes of the seed."""
    rng = np.random.default_rng([seed, 1])
    for groups in model_groups(config, ROUTINGS[routing], rng):
        for tensor in (tensor for group in groups for tensor in group):
            yield from rename(tensor, config)


def rename(tensor: SyntheticTensor, config: Config) -> Iterator[GgufTensor]:
    """A synthetic tensor -> those of the file: kv_b_proj gives two, all experts of a layer are one."""
    if tensor.name in OUTSIDE:
        yield GgufTensor(OUTSIDE[tensor.name], tensor.shape, tensor)
        return
    layer, name = tensor.name.removeprefix("model.layers.").split(".", 1)
    prefix = f"blk.{layer}."
    if name == "self_attn.kv_b_proj.weight":
        heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
        yield GgufTensor(f"{prefix}attn_k_b.weight", (heads, latent, config["qk_nope_head_dim"]), tensor)
        yield GgufTensor(f"{prefix}attn_v_b.weight", (heads, config["v_head_dim"], latent), tensor)
        return
    shape: tuple[int, ...] = tensor.shape
    if tensor.role == "expert":
        expert, matrix = name.removeprefix("mlp.experts.").split(".", 1)
        if expert != "0":
            return
        name, shape = f"mlp.experts.{matrix}", (config["n_routed_experts"], *shape)
    yield GgufTensor(prefix + IN_LAYER[name], shape, tensor)


class Contents:
    """Random weights at the speed of memory: blocks of a pool of quantized normal numbers, from a random place."""

    def __init__(self, gguf: ModuleType, seed: int) -> None:
        self.gguf = gguf
        self.rng = np.random.default_rng([seed, 2])
        self.q4 = gguf.GGMLQuantizationType.Q4_0
        numbers = self.rng.standard_normal((POOL_BLOCKS, BLOCK), dtype=np.float32)
        self.pool = gguf.quantize(numbers, self.q4)  # uint8 [blocks, 18]: a float16 scale, 32 codes of 4 bits

    def of(self, tensor: GgufTensor) -> np.ndarray:
        source = tensor.source
        kind = self.gguf.GGMLQuantizationType[tensor.type_name]
        if source.values is not None:
            values = source.values
        elif source.patch is not None or source.constant or kind != self.q4:
            values = self.rng.standard_normal(source.shape, dtype=np.float32) * np.float32(source.spread)
            values[:, : source.constant] = CONSTANT
            if source.patch is not None:
                at, rows = source.patch
                values[at] = rows
        else:
            return self.sample(tensor.shape, source.spread)
        return self.gguf.quantize(np.ascontiguousarray(values, dtype=np.float32), kind)

    def sample(self, shape: tuple[int, ...], spread: float) -> np.ndarray:
        scaled = np.roll(self.pool, -int(self.rng.integers(POOL_BLOCKS)), axis=0)
        scales = scaled[:, :2].copy().view(np.float16)
        scaled[:, :2] = (scales * np.float16(spread)).view(np.uint8)
        blocks = np.empty((int(np.prod(shape)) // BLOCK, scaled.shape[1]), dtype=np.uint8)
        for first in range(0, len(blocks), POOL_BLOCKS):
            blocks[first : first + POOL_BLOCKS] = scaled[: len(blocks) - first]
        return blocks


def write_gguf(path: Path, config: Config, routing: str, seed: int) -> None:
    """Write the file under another name and rename it when it is complete. All experts of one layer's matrix are in
    memory at a time."""
    gguf = import_gguf()
    narrow = next(
        (t for t in plan_tensors(config, routing, seed) if t.type_name != "F32" and t.shape[-1] % BLOCK), None
    )
    if narrow:
        raise Refused(f"{narrow.name} has {narrow.shape[-1]} columns; a GGUF needs multiples of {BLOCK}")
    partial = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    writer.add_custom_alignment(ALIGNMENT)
    writer.add_name("synthetic")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("no_vocab")
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata(config).items():
        kinds[type(value)](f"{ARCHITECTURE}.{key}", value)
    for tensor in plan_tensors(config, routing, seed):
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        total = int(np.prod(tensor.shape)) // block * num_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), total, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        contents = Contents(gguf, seed)
        for tensor in plan_tensors(config, routing, seed):
            writer.write_tensor_data(contents.of(tensor))
        writer.close()
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
