"""GGUF models for tests: snapshots written as llama.cpp's converter writes them, and headers of files that it wrote."""

import re
from pathlib import Path

import safetensors.torch
import torch

from snapshot.config_file import read_config
from snapshot.gguf_files import read_model
from snapshot.gguf_index import TOP, layer_names
from tests.conftest import FIXTURES, read_json
from tests.support.gguf_files import write_gguf

REAL = FIXTURES / "gguf"  # of files that llama.cpp wrote: the headers alone, and one whole
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "gpt_oss": "gpt-oss",
}
EXPERT = re.compile(r"(?P<layer>.*layers\.\d+\.).*experts\.(?P<expert>\d+)\.(?P<name>\w+)\.weight")
ORDER = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def unpack_header(name, folder):
    """A model of fixtures/gguf: its headers as they are, zeros where the data was."""
    folder.mkdir(exist_ok=True)
    sizes = read_json(REAL / "sizes.json")
    for file, size in sizes[name].items():
        with open(folder / file, "wb") as out:
            out.write((REAL / name / f"{file}.header").read_bytes())
            out.truncate(size)
    return folder / min(sizes[name])


def metadata_of(folder):
    """The metadata of a snapshot, in the absorbed form of MLA."""
    config = read_json(folder / "config.json")
    c, _ = read_config(folder)
    arch = ARCHITECTURES[c.model_type]
    values = {
        "block_count": c.num_layers + c.num_mtp_layers,
        "context_length": c.max_positions,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size or c.moe_intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "expert_count": c.num_experts,
        "expert_used_count": c.num_active_experts,
    }
    rope = config.get("rope_parameters") or {}
    values["rope.freq_base"] = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if c.attention == "mla":
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": c.kv_lora_rank + c.rope_head_dim,
            "attention.value_length": c.kv_lora_rank,
            "attention.key_length_mla": c.qk_head_dim,
            "attention.value_length_mla": c.v_head_dim,
            "attention.kv_lora_rank": c.kv_lora_rank,
            "rope.dimension_count": c.rope_head_dim,
        }
        values |= {"attention.q_lora_rank": c.q_lora_rank} if c.q_lora_rank else {}
    else:
        values |= {"attention.head_count_kv": c.num_kv_heads, "rope.dimension_count": c.rope_head_dim}
        if arch != "olmoe":
            values |= {"attention.key_length": c.qk_head_dim, "attention.value_length": c.v_head_dim}
    if c.router == "sigmoid" or c.model_type == "deepseek_v2":
        values |= {
            "expert_gating_func": 2 if c.router == "sigmoid" else 1,
            "expert_shared_count": c.num_shared_experts,
            "expert_weights_scale": c.routed_scaling,
            "expert_weights_norm": c.normalize_weights,
            "expert_group_count": c.num_groups,
            "expert_group_used_count": c.num_active_groups,
            "leading_dense_block_count": c.mlp_types.count("dense"),
            "nextn_predict_layers": c.num_mtp_layers,
        }
    if arch not in ("llama", "olmoe"):
        values["expert_feed_forward_length"] = c.moe_intermediate_size
    if c.indexer_types:
        values |= {
            "attention.indexer.head_count": c.index_num_heads,
            "attention.indexer.key_length": c.index_head_dim,
            "attention.indexer.top_k": c.index_topk,
        }
        if arch == "glm-dsa":
            mtp = [True] * c.num_mtp_layers
            values["attention.indexer.types"] = [kind == "full" for kind in c.indexer_types] + mtp
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
        values |= {"rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]} if c.attention == "mla" else {}
    if c.has_sinks:
        values["attention.sliding_window"] = max(c.sliding_windows)
    general = {"general.architecture": arch, "tokenizer.ggml.eos_token_id": c.stop_ids[0]}
    return general | {f"{arch}.{key}": value for key, value in values.items()}


def tensors_of(folder, kv_b="split"):
    """The tensors of a snapshot by their names in a GGUF. kv_b: split, or joined as in files before 2025."""
    config, family = read_config(folder)
    H, N, L = config.num_heads, config.nope_head_dim, config.kv_lora_rank
    names = {hub: name for name, hub in (layer_names(family) | TOP).items()}
    tensors, experts = {}, {}
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match["layer"], {})[int(match["expert"]), ORDER[match["name"]]] = tensor
            continue
        number, inner = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)", name).groups()
        prefix = "" if number is None else f"blk.{number}."
        if inner.endswith("kv_b_proj.weight") and kv_b == "split":
            keys, values = tensor.view(H, -1, L).split([N, config.v_head_dim], 1)
            tensors |= {prefix + "attn_k_b.weight": keys.transpose(1, 2), prefix + "attn_v_b.weight": values}
        elif "experts.gate_up_proj" in inner:  # gpt-oss: [E, in, out], gate and up alternate
            end = "bias" if inner.endswith("bias") else "weight"
            rows = tensor if end == "bias" else tensor.transpose(1, 2)
            tensors |= {f"{prefix}ffn_{word}_exps.{end}": rows[:, i::2] for i, word in enumerate(("gate", "up"))}
        elif inner == "mlp.experts.down_proj":
            tensors[prefix + "ffn_down_exps.weight"] = tensor.transpose(1, 2)
        elif config.model_type == "mixtral" and inner in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            heads = len(tensor) // config.qk_head_dim
            rows = tensor.view(heads, 2, config.qk_head_dim // 2, -1).transpose(1, 2)
            tensors[prefix + names[inner]] = rows.reshape(tensor.shape)
        else:
            tensors[prefix + names[inner]] = tensor
    for layer, parts in experts.items():
        prefix = "blk." + layer.removeprefix("model.layers.")
        for word in ("gate", "up", "down"):
            all_experts = [parts[i, word] for i in range(config.num_experts)]
            tensors[f"{prefix}ffn_{word}_exps.weight"] = torch.stack(all_experts)
    return tensors


def encode(tensors, dtype=None):
    """{name: tensor} -> what write_gguf takes; vectors as float32, as llama.cpp has them."""
    encoded = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(torch.float32 if tensor.dim() == 1 else dtype or tensor.dtype).contiguous()
        encoded[name] = KINDS[tensor.dtype], tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes()
    return encoded


def write_as_gguf(folder, path, metadata=(), drop=(), **options):
    """A snapshot as a GGUF. metadata: other values by their keys, None for none; drop: tensors left out."""
    values = metadata_of(folder) | dict(metadata)
    tensors = {name: tensor for name, tensor in tensors_of(folder, **options).items() if name not in drop}
    return write_gguf(path, {key: value for key, value in values.items() if value is not None}, encode(tensors))


def split_gguf(path, count):
    """Split a GGUF as gguf-split does: metadata in the first shard alone, whole tensors -> the first."""
    model = read_model(path)
    names, first = list(model.tensors), None
    numbers = {"F32": 0, "F16": 1, "BF16": 30}
    data = path.read_bytes()
    for i in range(count):
        split = {"split.no": i, "split.count": count, "split.tensors.count": len(names)}
        own = names[i * len(names) // count : (i + 1) * len(names) // count]
        entries = {name: model.tensors[name] for name in own}
        tensors = {n: (numbers[e.dtype], e.shape, data[e.offset : e.offset + e.num_bytes]) for n, e in entries.items()}
        shard = path.with_name(f"{path.stem}-{i + 1:05d}-of-{count:05d}.gguf")
        write_gguf(shard, (model.metadata if i == 0 else {}) | split, tensors)
        first = first or shard
    Path(path).unlink()
    return first
