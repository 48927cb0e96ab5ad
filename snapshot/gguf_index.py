"""The tensors of a GGUF model under the names that its family gives them, so that they are found as those of a
safetensors snapshot are. Messages keep the names of the file.

    blk.N.attn_q.weight          model.layers.N.self_attn.q_proj.weight
    blk.N.attn_qkv.weight        the rows of q_proj, k_proj and v_proj, one after another
    blk.N.attn_k_b, attn_v_b     kv_b_proj, for each head; keys transposed (TensorIndex.kv_parts)
    blk.N.ffn_gate_exps.weight   the gate matrices of all experts of a layer, [E, W, D] (snapshot/fused.py)
    blk.N.ffn_gate.E.weight      one expert in tensors of its own, as old files of Mixtral have them
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from errors import Refused
from kernels.formats import DTYPES
from snapshot.config import ModelConfig
from snapshot.family import Family
from snapshot.gguf_files import GgufModel
from snapshot.gguf_types import BLOCK_TYPES
from snapshot.index import TensorEntry, TensorIndex

LAYER = re.compile(r"blk\.(?P<layer>[0-9]{1,4})\.(?P<name>.+)")
EXPERT = re.compile(r"ffn_(?P<word>gate|up|down)\.(?P<expert>[0-9]{1,5})\.weight")
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",  # glm4moe, gpt-oss
    "attn_sinks.weight": "self_attn.sinks",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
}
# Names with .weight, and some with .bias too.
ATTENTION |= {
    f"{ours}{end}": f"self_attn.{hub}{end}"
    for end in (".weight", ".bias")
    for ours, hub in {
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_v": "v_proj",
        "attn_output": "o_proj",
        "attn_q_norm": "q_norm",
        "attn_k_norm": "k_norm",
        "attn_q_a": "q_a_proj",
        "attn_q_a_norm": "q_a_layernorm",
        "attn_q_b": "q_b_proj",
        "attn_kv_a_mqa": "kv_a_proj_with_mqa",
        "attn_kv_a_norm": "kv_a_layernorm",
        "attn_kv_b": "kv_b_proj",
        "attn_k_b": "k_b_proj",
        "attn_v_b": "v_b_proj",
        "indexer.attn_q_b": "indexer.wq_b",
        "indexer.attn_k": "indexer.wk",
        "indexer.k_norm": "indexer.k_norm",
        "indexer.proj": "indexer.weights_proj",
    }.items()
}
MTP = {
    "nextn.eh_proj.weight": "eh_proj.weight",
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
    "nextn.embed_tokens.weight": "embed_tokens.weight",
    "nextn.shared_head_head.weight": "shared_head.head.weight",
}
WORDS = ("gate", "up", "down")


def layer_names(family: Family) -> dict[str, str]:
    """Names within a layer: of the file -> of the family."""
    router = family.moe_prefix + family.router_name
    names = ATTENTION | MTP
    names |= {f"ffn_gate_inp.{end}": f"{router}.{end}" for end in ("weight", "bias")}
    names["exp_probs_b.bias"] = router + ".e_score_correction_bias"
    for word in WORDS:
        names[f"ffn_{word}.weight"] = f"mlp.{word}_proj.weight"
        names[f"ffn_{word}_exps.weight"] = f"mlp.experts.{word}_proj"
        names[f"ffn_{word}_exps.bias"] = f"mlp.experts.{word}_proj_bias"
        names[f"ffn_{word}_shexp.weight"] = f"{family.moe_prefix}shared_experts.{word}_proj.weight"
    return names | {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}


@dataclass
class GgufIndex(TensorIndex):
    """All tensors of a GGUF model by the names of its family."""

    path: Path = Path()  # the first file
    metadata_json: str = ""  # of what the model is, without its vocabulary
    labels: dict[str, str] = field(default_factory=dict)  # name of the family -> of the file

    config_name: ClassVar[str] = "the metadata"
    matrix_dtypes: ClassVar[tuple[str, ...]] = (*DTYPES, *BLOCK_TYPES)

    @property
    def subject(self) -> Path:
        return self.path

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def config_bytes(self) -> bytes:
        return self.metadata_json.encode()

    def refuse_quantized(self, name: str) -> None:
        """Blocks hold their scales: nothing lies beside a tensor."""

    def refuse_blocks(self, entry: TensorEntry) -> None:
        if entry.dtype in BLOCK_TYPES:
            problem = f"is {entry.dtype}, which is not run yet"
            raise Refused(f"{entry.path}: tensor {entry.name} {problem}; take a file of the model in BF16, F16 or F32")


def make_index(model: GgufModel, config: ModelConfig, family: Family) -> GgufIndex:
    """The index of a model. The family's names must be those of snapshot/gguf_config.py."""
    names = layer_names(family)
    entries: dict[str, TensorEntry] = {}
    for name, entry in model.tensors.items():
        for known, part in split_qkv(config, entry) if "attn_qkv." in name else [(name, entry)]:
            hub = hub_name(family, names, known)
            if hub in entries:
                raise Refused(f"{entry.path}: tensors {entries[hub].name} and {name} are one and the same")
            entries[hub] = part
    labels = absent_labels(config, family, names, entries) | {hub: entry.name for hub, entry in entries.items()}
    general = {key: value for key, value in model.metadata.items() if not key.startswith("tokenizer.")}
    shards = f"{len(model.paths)} shards are there" if len(model.paths) > 1 else ""
    index = GgufIndex(model.path.parent, entries, {}, shards, has_gap=False, unlisted=())
    index.path, index.labels, index.metadata_json = model.path, labels, json.dumps(general, sort_keys=True)
    if config.attention == "mla":
        add_kv_parts(index, config, family)
    return index


def hub_name(family: Family, names: dict[str, str], name: str) -> str:
    """The family's name of a tensor; the name of the file where the family has none."""
    match = LAYER.fullmatch(name)
    if not match:
        return TOP.get(name, name)
    prefix = family.layer_prefix(int(match["layer"]))
    if expert := EXPERT.fullmatch(match["name"]):
        matrix = family.expert_names[WORDS.index(expert["word"])]
        return f"{prefix}{family.moe_prefix}experts.{int(expert['expert'])}.{matrix}.weight"
    return prefix + names[match["name"]] if match["name"] in names else name


def absent_labels(
    config: ModelConfig, family: Family, names: dict[str, str], entries: dict[str, TensorEntry]
) -> dict[str, str]:
    """Names for messages of tensors that are not there."""
    labels = {hub: name for name, hub in TOP.items() if hub not in entries}
    for layer in range(config.num_layers + config.num_mtp_layers):
        for name, hub in names.items():
            full = family.layer_prefix(layer) + hub
            if full not in entries:
                labels.setdefault(full, f"blk.{layer}.{name}")
        for word in WORDS:  # of experts one by one, which nobody writes any more
            labels[family.expert_tensors(config, layer, 0)[word][0]] = f"blk.{layer}.ffn_{word}_exps.weight"
    return labels


def split_qkv(config: ModelConfig, entry: TensorEntry) -> list[tuple[str, TensorEntry]]:
    """The rows of queries, keys and values of a fused tensor, by the names they have apart."""
    widths = config.num_heads * config.qk_head_dim, *config.kv_widths
    if config.attention != "gqa" or entry.shape[0] != sum(widths):
        problem = f"has {entry.shape[0]} rows, the metadata asks for {sum(widths)} of queries, keys and values"
        raise Refused(f"{entry.path}: tensor {entry.name} {problem}")
    row_bytes, first, parts = entry.num_bytes // entry.shape[0], 0, []
    for word, rows in zip("qkv", widths, strict=True):
        offset = entry.offset + first * row_bytes
        part = replace(entry, offset=offset, num_bytes=rows * row_bytes, shape=(rows, *entry.shape[1:]))
        parts.append((entry.name.replace("attn_qkv", f"attn_{word}"), part))
        first += rows
    return parts


def add_kv_parts(index: GgufIndex, config: ModelConfig, family: Family) -> None:
    """Find kv_b of each layer where it is split: keys [H, L, N], transposed, and values [H, V, L]."""
    H, N, V, L = config.num_heads, config.nope_head_dim, config.v_head_dim, config.kv_lora_rank
    for layer in range(config.num_layers + config.num_mtp_layers):
        prefix = family.layer_prefix(layer) + "self_attn."
        keys, values, joined = (f"{prefix}{word}_b_proj.weight" for word in ("k", "v", "kv"))
        if keys not in index and values not in index:
            continue
        if joined in index:
            raise Refused(f"{index.subject}: layer {layer} has its kv_b twice, whole and split")
        shapes = {keys: (H, L, N), values: (H, V, L)}
        found = [index.find_checked(name, shape, index.matrix_dtypes) for name, shape in shapes.items()]
        index.kv_parts[joined] = found[0], found[1]
        index.labels[joined] = found[0].name
