"""Make the fixture tests/fixtures/glm_moe_dsa_groups: a tiny random GLM-5 style model and what transformers says of it.

    pip install torch transformers==5.24.0
    OMP_NUM_THREADS=1 python scripts/make_oracle.py

It shows the mistakes that a model with one expert group, no biases and latents of ordinary size hides: every norm's
epsilon, the expert groups, attention biases, tied embeddings, the indexer schedule given as a frequency. Weights and
sequences come from fixed seeds; the ids are searched so that no decision (next id, experts, groups, DSA keys) is close.
At the end each mistake is made on purpose, and what it changes is printed and stored in ref.json.
"""

import argparse
import copy
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from scripts.make_reference import compute_reference, load_model  # noqa: E402

SEED = 7
LENGTH, PROMPT, CONTINUATION = 48, 12, 24
SHOWN = (0, 1, 5, 17, 30, 47)  # positions whose routing and DSA choice go into ref.json
CLEAR = {"logit": 0.05, "router": 0.005, "dsa": 0.01}  # every decision is won by at least this much
# fmt: off
CONFIG = {
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
         "weights_proj": 4.0, "o_proj": 0.15, "gate": 3.0, "down_proj": 0.4, "embed_tokens": 3.0}
# fmt: on


def random_tensor(name: str, shape: torch.Size, gen: torch.Generator) -> torch.Tensor:
    """One random parameter, whose scale its name decides."""
    noise = torch.randn(shape, generator=gen)
    layer = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if name == "model.norm.weight":  # signs: with tied embeddings a plain norm would predict the input id again
        return (0.8 + 0.4 * noise.abs()) * torch.randn(shape, generator=gen).sign()
    if "e_score_correction_bias" in name:  # below zero: masking a group with 0 instead of -inf then shows
        return 0.1 * noise - 0.6
    if "norm" in layer:
        return 0.4 * noise if name.endswith("bias") else 1 + 0.2 * noise
    scale = GAINS.get(layer, 1.0) * (0.5 if name.endswith("bias") else shape[-1] ** -0.5)
    noise *= scale
    if layer == "kv_a_proj_with_mqa":
        noise[CONFIG["kv_lora_rank"] :] /= GAINS[layer]
    return noise


def write_model(out: Path) -> None:
    """config.json and model.safetensors in hub naming, all bfloat16 but the router's correction bias."""
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig.from_pretrained(out)).float()
    gen = torch.Generator().manual_seed(SEED)
    state = model.state_dict()
    for name in sorted(state):
        if name != "lm_head.weight":  # it is embed_tokens
            state[name].copy_(random_tensor(name, state[name].shape, gen))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # splits the experts, drops lm_head
        tensors = load_file(Path(folder) / "model.safetensors")
    tensors = {name: t if "correction_bias" in name else t.bfloat16() for name, t in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def route(gate, x, group_best=2, mask=float("-inf"), biased_weights=False):
    """The router of transformers in the open, with its usual mistakes as options: its outputs, group and choice scores."""
    logits = torch.nn.functional.linear(x.view(-1, gate.hidden_dim), gate.weight)
    scores = logits.sigmoid()
    choice = scores + gate.e_score_correction_bias
    grouped = choice.view(len(choice), gate.num_group, -1)
    groups = grouped.topk(group_best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(groups).scatter(1, groups.topk(gate.topk_group).indices, 1).bool()
    allowed = grouped.masked_fill(~kept[..., None], mask).flatten(1)
    experts = allowed.topk(gate.top_k).indices
    weights = (choice if biased_weights else scores).gather(1, experts) * gate.routed_scaling_factor
    return (logits, weights, experts), groups, allowed


def index_scores(indexer, hidden, q_resid, position_embeddings, mask, *_):
    """The indexer's scores [query, key], which its forward does not return."""
    n = hidden.shape[1]
    q = indexer.wq_b(q_resid).view(1, n, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    rot = indexer.qk_rope_head_dim
    turned = apply_rotary_pos_emb_interleave(q[..., :rot], k[..., :rot], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat([a, b[..., rot:]], -1) for a, b in zip(turned, (q, k), strict=True))
    scores = (q @ k.squeeze(2).transpose(-1, -2).unsqueeze(1) * indexer.softmax_scale).relu()
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    return ((weights.unsqueeze(-2) @ scores).squeeze(-2) + mask)[0]


def gap(scores: torch.Tensor, k: int) -> torch.Tensor:
    """How far the k-th best score of each row is above the next."""
    best = scores.topk(k + 1).values
    return best[:, k - 1] - best[:, k]


@torch.no_grad()
def run(model, ids) -> dict:
    """One forward: logits, the residual stream after each layer, routing, DSA choices, and each position's gaps."""
    seen = {"routing": {}, "dsa": {}, "hidden": [], "router": [], "dsa_gap": []}

    def see_router(layer, gate, args, output):
        outputs, groups, allowed = route(gate, args[0])
        assert torch.equal(outputs[2].sort().values, output[2].sort().values)
        seen["routing"][layer] = (output[2], output[1])
        seen["router"] += [gap(groups, gate.topk_group), gap(allowed, gate.top_k)]

    def see_indexer(layer, indexer, args, kwargs, output):
        scores, k = index_scores(indexer, *args), indexer.index_topk
        chosen = [sorted(row[: i + 1].tolist()) for i, row in enumerate(output[0])]  # the causal ones come first
        assert all(set(scores[i].topk(min(k, i + 1)).indices.tolist()) == set(c) for i, c in enumerate(chosen))
        seen["dsa"][layer] = chosen
        gaps = torch.full((len(scores),), float("inf"))
        if len(scores) > k:
            gaps[k:] = gap(scores, k)[k:]
        seen["dsa_gap"].append(gaps)

    hooks = [model.model.embed_tokens.register_forward_hook(lambda *a: seen["hidden"].append(a[2][0]))]
    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_hook(lambda *a: seen["hidden"].append(a[2][0][0])))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(partial(see_router, i)))
        if layer.self_attn.indexer is not None:
            indexer = layer.self_attn.indexer
            hooks.append(indexer.register_forward_hook(partial(see_indexer, i), with_kwargs=True))
    seen["logits"] = model(torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    router, dsa = (torch.stack(seen[key]).amin(0) for key in ("router", "dsa_gap"))
    seen["gaps"] = {"logit": gap(seen["logits"], 1), "router": router, "dsa": dsa}
    return seen


def is_clear(gaps: dict) -> bool:
    return all(gaps[key][-1] > least for key, least in CLEAR.items())


def search_ids(model, length: int, gen: torch.Generator) -> list[int]:
    """Random ids, each drawn again until its position is clear: the positions before it do not change any more."""
    ids = []
    while len(ids) < length:
        drawn = torch.randperm(CONFIG["pad_token_id"], generator=gen).tolist()
        ids.append(next(token for token in drawn if is_clear(run(model, [*ids, token])["gaps"])))
    return ids


def search_prompt(model, gen: torch.Generator) -> list[int]:
    """A prompt whose greedy continuation is clear at every step and does not just repeat itself."""
    while True:
        ids = prompt = search_ids(model, PROMPT, gen)
        for _ in range(CONTINUATION):
            seen = run(model, ids)
            if not is_clear(seen["gaps"]):
                break
            ids = [*ids, int(seen["logits"][-1].argmax())]
        else:
            if len(set(ids[PROMPT:])) > CONTINUATION // 2 and is_clear(run(model, ids)["gaps"]):
                return prompt


def mistakes() -> dict:
    """Name: function that makes this mistake in a model, in place."""

    def put(suffixes: str, **values):
        def change(model):
            for name, module in model.named_modules():
                if name.endswith(tuple(suffixes.split())):
                    for key, value in values.items():
                        setattr(module, key, value)

        return change

    def no_bias(*suffixes):
        def change(model):
            for name, parameter in model.named_parameters():
                if name.endswith(suffixes):
                    parameter.data.zero_()

        return change

    def reroute(**options):
        def change(model):
            for gate in (layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")):
                gate.forward = lambda x, gate=gate: route(gate, x, **options)[0]

        return change

    def theta_10000(model):
        dim = CONFIG["qk_rope_head_dim"]
        model.model.rotary_emb.inv_freq.copy_(10000.0 ** (-torch.arange(0, dim, 2) / dim))

    latent, layer, bias = "q_a_layernorm kv_a_layernorm", "input_layernorm post_attention_layernorm", ".bias"
    projections = [f"{name}{bias}" for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
    return {
        "latent norms use rms_norm_eps": put(latent, variance_epsilon=CONFIG["rms_norm_eps"]),
        "latent norms eps 1e-8": put(latent, variance_epsilon=1e-8),
        "latent norms eps 0": put(latent, variance_epsilon=0.0),
        "main norms eps 1e-6": put(f"{layer} model.norm", variance_epsilon=1e-6),
        "layer norms eps 1e-6": put(layer, variance_epsilon=1e-6),
        "final norm eps 1e-6": put("model.norm", variance_epsilon=1e-6),
        "k_norm eps 1e-5": put("k_norm", eps=1e-5),
        "k_norm bias zero": no_bias("k_norm.bias"),
        "attention biases zero": no_bias(*projections),
        **{f"{name} zero": no_bias(name) for name in projections},
        "groups ignored": put("mlp.gate", num_group=1, topk_group=1),
        "group score from its best expert alone": reroute(group_best=1),
        "other groups masked with 0": reroute(mask=0.0),
        "bias in routing weights": reroute(biased_weights=True),
        "norm_topk_prob true": put("mlp.gate", norm_topk_prob=True),
        "no routed_scaling_factor": put("mlp.gate", routed_scaling_factor=1.0),
        "DSA ignored": put("indexer", index_topk=10**6),
        "rope theta 10000": theta_10000,
    }


@torch.no_grad()
def sensitivity(model, ids: list[int], logits: torch.Tensor) -> dict:
    table = {}
    for name, change in mistakes().items():
        wrong = copy.deepcopy(model)
        change(wrong)
        got = wrong(torch.tensor([ids]), use_cache=False).logits[0]
        changed = int((got.argmax(-1) != logits.argmax(-1)).sum())
        table[name] = {"argmax_changed": changed, "max_abs_diff": float((got - logits).abs().max())}
    return table


def rounded(values) -> list[float]:
    return [round(float(value), 7) for value in values]


def describe_routing(routing: dict) -> dict:
    """Layer, position: experts and weights by descending weight."""
    table = {}
    for layer, (experts, weights) in routing.items():
        order = weights.argsort(-1, descending=True)
        experts, weights = experts.gather(1, order), weights.gather(1, order)
        table[layer] = {p: {"experts": experts[p].tolist(), "weights": rounded(weights[p])} for p in SHOWN}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/glm_moe_dsa_groups")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    write_model(out)
    model = load_model(out)
    gen = torch.Generator().manual_seed(SEED)
    ids = search_ids(model, LENGTH, gen)
    reference, _ = compute_reference(model, search_prompt(model, gen), CONTINUATION)
    teacher, greedy = run(model, ids), run(model, reference["full_ids"])
    logits, logprobs = teacher["logits"], teacher["logits"].log_softmax(-1)
    argmax = logits.argmax(-1)
    least = {key: float(min(seen["gaps"][key].min() for seen in (teacher, greedy))) for key in ("router", "dsa")}
    ref = {
        "name": out.name,
        "model_type": CONFIG["model_type"],
        "seed": SEED,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "compute": "float32, eager attention and experts, 1 thread",
        "storage": "BF16 (e_score_correction_bias F32)",
        "vocab_size": CONFIG["vocab_size"],
        "seq": ids,
        "teacher": {
            "argmax": argmax.tolist(),
            "logprob_argmax": rounded(logprobs.gather(1, argmax[:, None])[:, 0]),
            "logprob_next": rounded(logprobs[i, token] for i, token in enumerate(ids[1:])),
            "margin": rounded(teacher["gaps"]["logit"]),
        },
        "greedy": {
            "prompt": reference["prompt_ids"],
            "continuation": reference["full_ids"][PROMPT:],
            "margin": rounded(greedy["gaps"]["logit"][PROMPT - 1 : -1]),
        },
        "routing": describe_routing(teacher["routing"]),
        "margins": {
            "teacher_logit_min": float(teacher["gaps"]["logit"].min()),
            "greedy_logit_min": float(greedy["gaps"]["logit"].min()),
            "router_min": least["router"],
            "dsa_min": least["dsa"],
            "logit_std": float(logits.std()),
        },
        "dsa_selected": {layer: {p: chosen[p] for p in SHOWN} for layer, chosen in teacher["dsa"].items()},
        "sensitivity": sensitivity(model, ids, logits),
    }
    (out / "ref.json").write_text(json.dumps(ref) + "\n")
    (out / "ref_glm.json").write_text(json.dumps(reference) + "\n")
    hidden = torch.stack(teacher["hidden"])
    save_file({"logits": logits.contiguous(), "hidden": hidden}, out / "ref.safetensors")
    print(json.dumps(ref["margins"], indent=1))
    for name, row in ref["sensitivity"].items():
        print(
            f"{name:40} {row['argmax_changed']:3} of {LENGTH} argmax changed, logits differ by {row['max_abs_diff']:.3g}"
        )
    hidden_mistakes = [n for n, row in ref["sensitivity"].items() if row["max_abs_diff"] < 0.02]
    print(f"hidden: {hidden_mistakes}" if hidden_mistakes else "every mistake shows")
    return 1 if hidden_mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
