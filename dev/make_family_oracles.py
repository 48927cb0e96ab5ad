"""Make fixtures of model types that differ from others in a few numbers: tiny random models with transformers' outputs.

    pip install torch transformers==5.24.0
    OMP_NUM_THREADS=1 python dev/make_family_oracles.py [name ...]

deepseek_v3_yarn has no query latent, yarn with two mscales and rotary pairs in halves; deepseek_v32 an indexer with
rotary pairs in halves, yarn, and expert groups; glm4_moe_lite its own defaults; deepseek_v2 a softmax router.
Weights and ids come from fixed seeds. Ids are searched so that no decision is close: the next id by its margin,
experts and indexer by what noise on the embeddings changes.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dev.make_reference import compute_reference, load_model
from machine.exit import exit_code
from machine.files import temporary_folder

ROOT = Path(__file__).resolve().parents[1]

LENGTH, PROMPT, CONTINUATION = 48, 12, 24
SHOWN = (0, 1, 5, 17, 30, 47)  # positions whose routing goes into ref.json
MARGIN = 0.1  # of the two best logits
NOISE, TRIES = 3e-4, 3  # on embeddings of size one, which may change no decision
# fmt: off
COMMON = {
    "dtype": "bfloat16", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "hidden_act": "silu", "tie_word_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "moe_intermediate_size": 16,
    "max_position_embeddings": 512, "attention_bias": False, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 511, "pad_token_id": 510,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32,
        "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}
CONFIGS = {
    "deepseek_v3_yarn": COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": None,
        "rope_interleave": False, "rope_parameters": YARN, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    },
    "deepseek_v32": COMMON | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 32,
        "rope_parameters": YARN, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        # With few heads all of them may be silent, and keys tie at 0.
        "index_topk": 12, "index_n_heads": 16, "index_head_dim": 16,
    },
    "glm4_moe_lite": COMMON | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "q_lora_rank": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "n_group": 1, "topk_group": 1,
        "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
    },
    "deepseek_v2": COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
        "rope_parameters": YARN | {"mscale": 0.7}, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "first_k_dense_replace": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5,
        "norm_topk_prob": False, "scoring_func": "softmax",
    },
}
# fmt: on
# Standard deviation of a linear layer's output for inputs of size one.
GAINS = {"q_b_proj": 2.0, "q_proj": 2.0, "wq_b": 2.0, "weights_proj": 6.0, "gate": 3.0, "lm_head": 3.0, "o_proj": 1.5}


def random_tensor(name: str, shape: torch.Size, gen: torch.Generator) -> torch.Tensor:
    """One random parameter, whose scale its name decides."""
    noise = torch.randn(shape, generator=gen)
    layer = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if layer == "e_score_correction_bias":
        return 0.1 * noise - 0.6  # below zero: masking a group with 0 instead of -inf then shows
    if "norm" in layer:
        return 0.4 * noise if name.endswith("bias") else 1 + 0.2 * noise
    return noise if layer == "embed_tokens" else noise * GAINS.get(layer, 1.0) * shape[-1] ** -0.5


def write_model(out: Path, config: dict, seed: int) -> None:
    """config.json and model.safetensors in hub naming, all bfloat16 but the router's correction bias."""
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out)).float()
    gen, state = torch.Generator().manual_seed(seed), model.state_dict()
    for name in sorted(state):
        state[name].copy_(random_tensor(name, state[name].shape, gen))
    with temporary_folder() as folder:
        model.save_pretrained(folder)  # splits the experts
        tensors = load_file(folder / "model.safetensors")
    tensors = {name: t if "correction_bias" in name else t.bfloat16() for name, t in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def run(model: Any, ids: list[int], noise: torch.Tensor | float = 0.0) -> dict:
    """One forward pass -> logits, hidden states, and the choices of each router and each indexer."""
    seen: dict[str, Any] = {"hidden": [], "routing": {}, "chosen": []}
    hooks = [model.model.embed_tokens.register_forward_hook(lambda *a: seen["hidden"].append(a[2][0] + noise))]
    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_hook(lambda *a: seen["hidden"].append(a[2][0])))
        if hasattr(layer.mlp, "gate"):
            hook = lambda *a, i=i: seen["routing"].__setitem__(i, a[2][1:])  # noqa: E731
            hooks.append(layer.mlp.gate.register_forward_hook(hook))
        if hasattr(layer.self_attn, "indexer"):
            hook = lambda *a: seen["chosen"].append(a[2][0])  # noqa: E731
            hooks.append(layer.self_attn.indexer.register_forward_hook(hook))
    embeddings = model.model.embed_tokens(torch.tensor([ids])) + noise
    seen["logits"] = model(inputs_embeds=embeddings, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    seen["hidden"] = [hidden.view(len(ids), -1) for hidden in seen["hidden"]]
    return seen


def decisions(seen: dict) -> list:
    """Of the last position: the experts of each layer, and the keys that its indexer chose."""
    experts = [sorted(output[1][-1].tolist()) for output in seen["routing"].values()]
    last = len(seen["logits"]) - 1
    return experts + [sorted(i for i in chosen[-1].tolist() if i <= last) for chosen in seen["chosen"]]


def is_clear(model: Any, ids: list[int], gen: torch.Generator) -> bool:
    """True if no decision at the last of ids is close."""
    seen = run(model, ids)
    best = seen["logits"][-1].topk(2).values
    if best[0] - best[1] < MARGIN:
        return False
    noises = [NOISE * torch.randn(len(ids), model.config.hidden_size, generator=gen) for _ in range(TRIES)]
    return all(decisions(run(model, ids, noise)) == decisions(seen) for noise in noises)


def search_ids(model: Any, length: int, gen: torch.Generator) -> list[int]:
    """Random ids, each sampled again until its position is clear; earlier positions do not change any more."""
    ids: list[int] = []
    while len(ids) < length:
        candidates = torch.randperm(500, generator=gen).tolist()
        ids.append(next(token for token in candidates if is_clear(model, [*ids, token], gen)))
    return ids


def search_prompt(model: Any, gen: torch.Generator) -> list[int]:
    """A prompt whose greedy continuation is clear at every step and does not just repeat itself."""
    start = search_ids(model, PROMPT - 1, gen)
    for last in torch.randperm(500, generator=gen).tolist():
        ids = [*start, last]
        while len(ids) < PROMPT + CONTINUATION and is_clear(model, ids, gen):
            ids.append(int(run(model, ids)["logits"][-1].argmax()))
        if len(ids) == PROMPT + CONTINUATION and len(set(ids[PROMPT:])) > CONTINUATION // 2:
            return ids[:PROMPT]
    raise RuntimeError("no prompt with a clear continuation: try another seed")


def rounded(values: Iterable[Any]) -> list[float]:
    return [round(float(value), 7) for value in values]


def describe_routing(output: tuple) -> dict:
    """One layer's shown positions: experts and weights by descending weight."""
    weights, order = output[0].sort(-1, descending=True)
    experts = output[1].gather(1, order)
    return {p: {"experts": experts[p].tolist(), "weights": rounded(weights[p])} for p in SHOWN}


def make(name: str, seed: int) -> None:
    out = ROOT / "tests/fixtures" / name
    expected = out / "expected"  # apart, so that the folder is a snapshot and nothing else
    expected.mkdir(parents=True, exist_ok=True)
    write_model(out, CONFIGS[name], seed)
    model, gen = load_model(out), torch.Generator().manual_seed(seed)
    ids = search_ids(model, LENGTH, gen)
    teacher = run(model, ids)
    reference, margin = compute_reference(model, search_prompt(model, gen), CONTINUATION)
    logprobs = teacher["logits"].log_softmax(-1)
    ref = {
        "name": name, "model_type": CONFIGS[name]["model_type"], "seed": seed, "torch": torch.__version__,
        "transformers": transformers.__version__, "compute": "float32, eager attention and experts, 1 thread",
        "storage": "BF16 (e_score_correction_bias F32)", "seq": ids,
        "teacher": {"argmax": teacher["logits"].argmax(-1).tolist(), "logprob_argmax": rounded(logprobs.amax(-1)),
                    "logprob_next": rounded(logprobs[i, token] for i, token in enumerate(ids[1:]))},
        "greedy": {"prompt": reference["prompt_ids"], "continuation": reference["full_ids"][PROMPT:]},
        "routing": {layer: describe_routing(output) for layer, output in teacher["routing"].items()},
    }  # fmt: skip
    (expected / "ref.json").write_text(json.dumps(ref) + "\n")
    (out / "ref_glm.json").write_text(json.dumps(reference) + "\n")
    tensors = {"logits": teacher["logits"].contiguous(), "hidden": torch.stack(teacher["hidden"])}
    save_file(tensors, expected / "ref.safetensors")
    print(f"{name}: logits of size {teacher['logits'].std():.2f}, smallest margin of the continuation {margin:.3f}")


def main() -> int:
    transformers.utils.logging.disable_progress_bar()
    for number, each in enumerate(CONFIGS):
        if each in (sys.argv[1:] or CONFIGS):
            make(each, 201 + number)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("make_family_oracles", main))
