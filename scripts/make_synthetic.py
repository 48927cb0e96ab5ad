"""Write a snapshot of random weights in any size, to try budgets and speed on: the real architecture, no meaning.

    python scripts/make_synthetic.py /tmp/synthetic --layers 8 --experts 64 --hidden 512 --moe-width 512

It also writes ref_glm.json with random ids (--prompt, --tokens) for REPLAY. Routing over random weights is more even
than a trained model's: good for filling a cache, no guide to hit rates.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

PREFIX = "model.layers"


def make_config(args):
    heads = args.hidden // 64
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": args.hidden // 2,
        "kv_lora_rank": args.hidden // 4,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 4 * args.hidden,
        "moe_intermediate_size": args.moe_width,
        "first_k_dense_replace": 1,
        "n_routed_experts": args.experts,
        "num_experts_per_tok": args.active,
        "n_shared_experts": 1,
        "index_topk": args.index_topk,
        "index_head_dim": 64,
        "index_n_heads": 16,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "max_position_embeddings": 131072,
        "eos_token_id": [0],
        "dtype": "bfloat16",
    }


class Weights:
    """Random matrices that keep the size of what goes through them."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)

    def matrix(self, rows, columns):
        return (torch.randn(rows, columns, generator=self.random) * columns**-0.5).bfloat16()

    def norm(self, width):
        return torch.ones(width, dtype=torch.bfloat16)

    def mlp(self, prefix, width, hidden):
        return {
            f"{prefix}.gate_proj.weight": self.matrix(width, hidden),
            f"{prefix}.up_proj.weight": self.matrix(width, hidden),
            f"{prefix}.down_proj.weight": self.matrix(hidden, width),
        }


def layer_tensors(c, layer, weights):
    """One layer under its published names."""
    D, H, width = c["hidden_size"], c["num_attention_heads"], c["moe_intermediate_size"]
    QL, KL, N, R, V = (
        c[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    base, attention = f"{PREFIX}.{layer}", f"{PREFIX}.{layer}.self_attn"
    out = {
        f"{base}.input_layernorm.weight": weights.norm(D),
        f"{base}.post_attention_layernorm.weight": weights.norm(D),
        f"{attention}.q_a_proj.weight": weights.matrix(QL, D),
        f"{attention}.q_a_layernorm.weight": weights.norm(QL),
        f"{attention}.q_b_proj.weight": weights.matrix(H * (N + R), QL),
        f"{attention}.kv_a_proj_with_mqa.weight": weights.matrix(KL + R, D),
        f"{attention}.kv_a_layernorm.weight": weights.norm(KL),
        f"{attention}.kv_b_proj.weight": weights.matrix(H * (N + V), KL),
        f"{attention}.o_proj.weight": weights.matrix(D, H * V),
    }
    freq, offset = c["index_topk_freq"], c["index_skip_topk_offset"]
    if max(layer - offset + 1, 0) % freq == 0:
        heads, head = c["index_n_heads"], c["index_head_dim"]
        out |= {
            f"{attention}.indexer.wq_b.weight": weights.matrix(heads * head, QL),
            f"{attention}.indexer.wk.weight": weights.matrix(head, D),
            f"{attention}.indexer.k_norm.weight": weights.norm(head),
            f"{attention}.indexer.k_norm.bias": torch.zeros(head, dtype=torch.bfloat16),
            f"{attention}.indexer.weights_proj.weight": weights.matrix(heads, D),
        }
    if layer < c["first_k_dense_replace"]:
        return out | weights.mlp(f"{base}.mlp", c["intermediate_size"], D)
    out[f"{base}.mlp.gate.weight"] = weights.matrix(c["n_routed_experts"], D)
    out[f"{base}.mlp.gate.e_score_correction_bias"] = torch.zeros(c["n_routed_experts"])
    out |= weights.mlp(f"{base}.mlp.shared_experts", width, D)
    for expert in range(c["n_routed_experts"]):
        out |= weights.mlp(f"{base}.mlp.experts.{expert}", width, D)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    sizes = dict(layers=8, experts=64, active=8, hidden=512, moe_width=512, vocab=4096, index_topk=512)
    for name, value in (sizes | dict(prompt=2000, tokens=500, seed=1)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config, weights = make_config(args), Weights(args.seed)
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    total = args.layers + 1
    for layer in range(args.layers):  # one file a layer, so that a model larger than memory can be written
        name = f"model-{layer + 1:05d}-of-{total:05d}.safetensors"
        save_file(layer_tensors(config, layer, weights), args.out / name)
    top = {
        "model.embed_tokens.weight": weights.matrix(args.vocab, args.hidden) * args.hidden**0.5,
        "model.norm.weight": weights.norm(args.hidden),
        "lm_head.weight": weights.matrix(args.vocab, args.hidden),
    }
    save_file(top, args.out / f"model-{total:05d}-of-{total:05d}.safetensors")
    ids = torch.randint(args.vocab, (args.prompt + args.tokens,), generator=weights.random).tolist()
    (args.out / "ref_glm.json").write_text(json.dumps({"prompt_ids": ids[: args.prompt], "full_ids": ids}) + "\n")
    size = sum(path.stat().st_size for path in args.out.glob("*.safetensors"))
    print(f"{args.out}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
