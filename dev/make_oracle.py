"""Make the fixture tests/fixtures/glm_moe_dsa_groups: a tiny random GLM-5 style model with transformers' outputs.

    pip install torch transformers==5.24.0
    OMP_NUM_THREADS=1 python dev/make_oracle.py [folder]

It shows the mistakes that a model with one expert group, no biases and latents of ordinary size hides: every norm's
epsilon, the expert groups, attention biases, tied embeddings, the indexer schedule given as a frequency. Weights and
ids come from a fixed seed; ids are searched so that no decision (next id, experts, groups, DSA keys) is close. At the
end each mistake is made on purpose, and what it changes is printed and stored in ref.json.
"""

import copy
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

from dev.make_reference import compute_reference, load_model
from machine.exit import exit_code
from machine.files import temporary_folder

ROOT = Path(__file__).resolve().parents[1]

SEED = 7
LENGTH, PROMPT, CONTINUATION = 48, 12, 24
SHOWN = (0, 1, 5, 17, 30, 47)  # positions whose routing and DSA choice go into ref.json
CLEAR = {"logit": 0.05, "router": 0.0035, "dsa": 0.005}  # every decision is won by at least this much
# fmt: off
CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 5, "first_k_dense_replace": 2,
    "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 0.05, "tie_word_embeddings": True,
    "num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True, "q_lora_rank": 32, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "rope_interleave": True,
    "index_topk": 12, "index_n_heads": 16, "index_head_dim": 16, "index_topk_freq": 2, "index_skip_topk_offset": 2,
    "indexer_rope_interleave": True, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.7,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
    "bos_token_id": 0, "eos_token_id": [511], "pad_token_id": 510,
}
# Standard deviation of a linear layer's output for inputs of size one. The latents and index keys are as small as
# their 1e-6 epsilons; the rope rows of kv_a pass no norm and keep an ordinary size.
GAINS = {"q_a_proj": 1.5e-3, "kv_a_proj_with_mqa": 1.5e-3, "wk": 1.5e-3, "q_b_proj": 2.5, "kv_b_proj": 2.5, "wq_b": 2.0,
         "weights_proj": 6.0, "o_proj": 0.15, "gate": 3.0, "down_proj": 0.4, "embed_tokens": 3.0}

LATENT, NORMS = "q_a_layernorm kv_a_layernorm", "input_layernorm post_attention_layernorm"
PROJECTIONS = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
# Name of a mistake: the modules it is made in (ends of their names), and the attributes that make it. A function gets
# the module and returns the attribute.
MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "latent norms use rms_norm_eps": (LATENT, {"variance_epsilon": CONFIG["rms_norm_eps"]}),
    "latent norms eps 1e-8": (LATENT, {"variance_epsilon": 1e-8}),
    "main norms eps 1e-6": (f"{NORMS} model.norm", {"variance_epsilon": 1e-6}),
    "main norms eps 1e-6, layers only": (NORMS, {"variance_epsilon": 1e-6}),
    "main norms eps 1e-6, final only": ("model.norm", {"variance_epsilon": 1e-6}),
    "k_norm eps 1e-5": ("k_norm", {"eps": 1e-5}),
    "k_norm bias zero": ("k_norm", {"bias": None}),
    "attention biases zero": (" ".join(PROJECTIONS), {"bias": None}),
    **{f"{name} bias zero": (name, {"bias": None}) for name in PROJECTIONS},
    "groups ignored": ("mlp.gate", {"num_group": 1, "topk_group": 1}),
    "group score from its best expert": ("mlp.gate", {"forward": lambda g: lambda x: route(g, x, group_best=1)[0]}),
    "other groups masked with 0": ("mlp.gate", {"forward": lambda g: lambda x: route(g, x, mask=0.0)[0]}),
    "bias in routing weights": ("mlp.gate", {"forward": lambda g: lambda x: route(g, x, biased=True)[0]}),
    "norm_topk_prob true": ("mlp.gate", {"norm_topk_prob": True}),
    "no routed_scaling_factor": ("mlp.gate", {"routed_scaling_factor": 1.0}),
    "DSA ignored": ("indexer", {"index_topk": 10**6}),
    "rope theta 10000": ("rotary_emb", {"inv_freq": 10000.0 ** (-torch.arange(0, 8, 2) / 8)}),
}
# fmt: on


def random_tensor(name: str, shape: torch.Size, gen: torch.Generator) -> Tensor:
    """One random parameter, whose scale its name decides."""
    noise = torch.randn(shape, generator=gen)
    layer = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if name == "model.norm.weight":  # signs: with tied embeddings a plain norm would predict the input id again
        return (0.8 + 0.4 * noise.abs()) * torch.randn(shape, generator=gen).sign()
    if layer == "e_score_correction_bias":  # below zero: masking a group with 0 instead of -inf then shows
        return 0.1 * noise - 0.6
    if "norm" in layer:
        return 0.4 * noise if name.endswith("bias") else 1 + 0.2 * noise
    noise *= GAINS.get(layer, 1.0) * (0.5 if name.endswith("bias") else shape[-1] ** -0.5)
    if layer == "kv_a_proj_with_mqa":
        noise[CONFIG["kv_lora_rank"] :] /= GAINS[layer]
    return noise


def write_model(out: Path) -> None:
    """config.json and model.safetensors in hub naming, all bfloat16 but the router's correction bias."""
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig.from_pretrained(out)).float()
    gen = torch.Generator().manual_seed(SEED)
    state = model.state_dict()
    for name in sorted(state.keys() - {"lm_head.weight"}):  # which is embed_tokens
        state[name].copy_(random_tensor(name, state[name].shape, gen))
    with temporary_folder() as folder:
        model.save_pretrained(folder)  # splits the experts, drops lm_head
        tensors = load_file(folder / "model.safetensors")
    tensors = {name: t if "correction_bias" in name else t.bfloat16() for name, t in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def route(
    gate: Any, x: Tensor, group_best: int = 2, mask: float = float("-inf"), biased: bool = False
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """The router of transformers with its usual mistakes as options: its three outputs, group scores, expert scores."""
    logits = torch.nn.functional.linear(x.view(-1, gate.hidden_dim), gate.weight)
    scores = logits.sigmoid()
    choice = scores + gate.e_score_correction_bias
    grouped = choice.view(len(choice), gate.num_group, -1)
    groups = grouped.topk(group_best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(groups).scatter(1, groups.topk(gate.topk_group).indices, 1).bool()
    allowed = grouped.masked_fill(~kept[..., None], mask).flatten(1)
    experts = allowed.topk(gate.top_k).indices
    weights = (choice if biased else scores).gather(1, experts) * gate.routed_scaling_factor
    return (logits, weights, experts), groups, allowed


def index_scores(
    indexer: Any, hidden: Tensor, q_resid: Tensor, position_embeddings: Any, mask: Tensor, *_: Any
) -> Tensor:
    """The indexer's scores [query, key], which its forward does not return."""
    q = indexer.wq_b(q_resid).view(1, hidden.shape[1], indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    rot = indexer.qk_rope_head_dim
    turned = apply_rotary_pos_emb_interleave(q[..., :rot], k[..., :rot], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat([a, b[..., rot:]], -1) for a, b in zip(turned, (q, k), strict=True))
    scores = (q @ k.squeeze(2).transpose(-1, -2).unsqueeze(1) * indexer.softmax_scale).relu()
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    return ((weights.unsqueeze(-2) @ scores).squeeze(-2) + mask)[0]


def gap(scores: Tensor, k: int) -> Tensor:
    """Margin of the k-th best score of each row over the next; infinite where no other is allowed."""
    best = torch.nn.functional.pad(scores, (0, k + 1), value=float("-inf")).topk(k + 1).values
    return torch.where(best[:, k] < -1e30, float("inf"), best[:, k - 1] - best[:, k])


@torch.no_grad()
def run(model: Any, ids: list[int]) -> dict[str, Any]:
    """One forward: logits, hidden states, routing, DSA selections, and the margin of each position's decisions."""
    seen: dict[str, Any] = {"hidden": [], "routing": {}, "dsa": {}}
    gaps: dict[str, list[Tensor]] = {"router": [], "dsa": []}

    def see_router(layer: int, gate: Any, args: Any, output: Any) -> None:
        outputs, groups, allowed = route(gate, args[0])
        assert torch.equal(outputs[2].sort().values, output[2].sort().values)
        seen["routing"][layer] = output
        gaps["router"] += [gap(groups, gate.topk_group), gap(allowed, gate.top_k)]

    def see_indexer(layer: int, indexer: Any, args: Any, kwargs: Any, output: Any) -> None:
        scores = index_scores(indexer, *args)
        chosen = [sorted(row[: i + 1].tolist()) for i, row in enumerate(output[0])]  # after these, masked ones
        assert all(sorted(s[: i + 1].topk(len(chosen[i])).indices.tolist()) == chosen[i] for i, s in enumerate(scores))
        seen["dsa"][layer] = chosen
        gaps["dsa"].append(gap(scores, indexer.index_topk))

    hooks = [model.model.embed_tokens.register_forward_hook(lambda *a: seen["hidden"].append(a[2][0]))]
    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_hook(lambda *a: seen["hidden"].append(a[2][0][0])))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(partial(see_router, i)))
        if layer.self_attn.indexer is not None:
            hooks.append(layer.self_attn.indexer.register_forward_hook(partial(see_indexer, i), with_kwargs=True))
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    seen["gaps"] = {"logit": gap(logits, 1)} | {kind: torch.stack(rows).amin(0) for kind, rows in gaps.items()}
    return seen | {"logits": logits}


def is_clear(seen: dict) -> bool:
    return all(seen["gaps"][kind][-1] > least for kind, least in CLEAR.items())


def search_ids(model: Any, length: int, gen: torch.Generator) -> list[int]:
    """Random ids, each sampled again until its position is clear; earlier positions do not change any more."""
    ids: list[int] = []
    while len(ids) < length:
        candidates = torch.randperm(CONFIG["pad_token_id"], generator=gen).tolist()
        ids.append(next(token for token in candidates if is_clear(run(model, [*ids, token]))))
    return ids


def search_prompt(model: Any, gen: torch.Generator) -> list[int]:
    """A prompt whose greedy continuation is clear at every step and does not just repeat itself."""
    start = search_ids(model, PROMPT - 1, gen)
    for last in torch.randperm(CONFIG["pad_token_id"], generator=gen).tolist():
        ids = [*start, last]
        while is_clear(seen := run(model, ids)):
            if len(ids) == PROMPT + CONTINUATION:
                if len(set(ids[PROMPT:])) > CONTINUATION // 2:
                    return ids[:PROMPT]
                break
            ids.append(int(seen["logits"][-1].argmax()))
    raise RuntimeError("no prompt with a clear continuation: try another seed")


@torch.no_grad()
def sensitivity(model: Any, ids: list[int], expected: Tensor) -> dict:
    """Each mistake, made in a copy of the model: how many argmax positions change, and the largest logit difference."""
    table = {}
    for name, (suffixes, attributes) in MISTAKES.items():
        wrong = copy.deepcopy(model)
        for module in (m for path, m in wrong.named_modules() if path.endswith(tuple(suffixes.split()))):
            for key, value in attributes.items():
                setattr(module, key, value(module) if callable(value) else value)
        logits = wrong(torch.tensor([ids]), use_cache=False).logits[0]
        changed = int((logits.argmax(-1) != expected.argmax(-1)).sum())
        table[name] = {"argmax_changed": changed, "max_abs_diff": float((logits - expected).abs().max())}
    return table


def rounded(values: Iterable[Any]) -> list[float]:
    return [round(float(value), 7) for value in values]


def describe_routing(output: tuple) -> dict:
    """One layer's shown positions: experts and weights by descending weight."""
    weights, order = output[1].sort(-1, descending=True)
    experts = output[2].gather(1, order)
    return {p: {"experts": experts[p].tolist(), "weights": rounded(weights[p])} for p in SHOWN}


def describe(model: Any, ids: list[int], teacher: dict, reference: dict) -> dict:
    """The content of ref.json."""
    greedy = run(model, reference["full_ids"])
    logits, logprobs = teacher["logits"], teacher["logits"].log_softmax(-1)
    steps = greedy["gaps"]["logit"][PROMPT - 1 : -1]
    margins = {f"teacher_{kind}_min": float(gaps.min()) for kind, gaps in teacher["gaps"].items()}
    margins |= {f"greedy_{kind}_min": float(gaps.min()) for kind, gaps in greedy["gaps"].items()}
    return {
        "name": "glm_moe_dsa_groups", "model_type": CONFIG["model_type"], "seed": SEED, "torch": torch.__version__,
        "transformers": transformers.__version__, "compute": "float32, eager attention and experts, 1 thread",
        "storage": "BF16 (e_score_correction_bias F32)", "vocab_size": CONFIG["vocab_size"], "seq": ids,
        "teacher": {"argmax": logits.argmax(-1).tolist(), "logprob_argmax": rounded(logprobs.amax(-1)),
                    "logprob_next": rounded(logprobs[i, token] for i, token in enumerate(ids[1:])),
                    "margin": rounded(teacher["gaps"]["logit"])},
        "greedy": {"prompt": reference["prompt_ids"], "continuation": reference["full_ids"][PROMPT:],
                   "margin": rounded(steps)},
        "routing": {layer: describe_routing(output) for layer, output in teacher["routing"].items()},
        "dsa_selected": {layer: {p: chosen[p] for p in SHOWN} for layer, chosen in teacher["dsa"].items()},
        "margins": margins | {"logit_std": float(logits.std())}, "sensitivity": sensitivity(model, ids, logits),
    }  # fmt: skip


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/fixtures/glm_moe_dsa_groups"
    expected = out / "expected"  # apart, so that the folder is a snapshot and nothing else
    expected.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    write_model(out)
    model, gen = load_model(out), torch.Generator().manual_seed(SEED)
    ids = search_ids(model, LENGTH, gen)
    teacher = run(model, ids)
    reference, _ = compute_reference(model, search_prompt(model, gen), CONTINUATION)
    ref = describe(model, ids, teacher, reference)
    (expected / "ref.json").write_text(json.dumps(ref) + "\n")
    (out / "ref_glm.json").write_text(json.dumps(reference) + "\n")
    tensors = {"logits": teacher["logits"].contiguous(), "hidden": torch.stack(teacher["hidden"])}
    save_file(tensors, expected / "ref.safetensors")
    print("; ".join(f"{key} {value:.4f}" for key, value in ref["margins"].items()))
    for name, row in ref["sensitivity"].items():
        print(f"{name:34} {row['argmax_changed']:3} of {LENGTH} argmax changed, logits {row['max_abs_diff']:7.4f} off")
    unseen = [name for name, row in ref["sensitivity"].items() if row["max_abs_diff"] < 0.02]
    print(f"{len(unseen)} mistakes do not show {unseen or ''}")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(exit_code("make_oracle", main))
