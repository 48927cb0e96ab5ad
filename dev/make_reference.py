"""Compute the greedy reference of a snapshot folder with transformers, and write it there as ref_glm.json.

    pip install torch transformers==5.24.0
    OMP_NUM_THREADS=1 python dev/make_reference.py models/tiny --prompt "In the beginning" --tokens 48

The reference is float32 with eager attention and eager experts on one thread: plain loops, no fused kernel.
ref_glm.json has prompt_ids, full_ids (prompt and continuation, EOS ignored), tf_pred (the argmax after each id of
full_ids, from one forward over all of them) and logprob_next (log p of the id that follows, one entry less). stdout
gets the continuation and the smallest top-1/top-2 margin, the nearest decision that another engine has to reproduce.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from machine.console import say
from machine.exit import exit_code

PREFIX = ("[gMASK]", "<sop>")


def load_model(folder: str | Path) -> Any:
    """The snapshot in float32. Tensors too many or too few are an error, except the MTP layer, not run here."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # its load report lists every MTP tensor; the check below replaces it
    logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    wrong = {kind: [str(key) for key in report[kind]] for kind in ("missing_keys", "mismatched_keys")}
    wrong["unexpected_keys"] = [key for key in report["unexpected_keys"] if not key.startswith(mtp)]
    if any(wrong.values()):
        raise ValueError(f"{folder}: the file does not fit its config: {wrong}")
    return model.eval()


def encode(folder: str | Path, prompt: str, prefix: bool = True) -> tuple[Tokenizer, list[int]]:
    """The tokenizer and the ids of the prompt, after [gMASK]<sop> where the vocabulary has them."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    head = [token for token in map(tokenizer.token_to_id, PREFIX) if token is not None]
    if prefix and ids[: len(head)] != head:
        ids = head + ids
    return tokenizer, ids


@torch.no_grad()
def greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """The prompt and num_tokens greedy ids, with a KV cache. EOS counts as any other id."""
    prompt = torch.tensor([prompt_ids])
    # generate fills a None in its argument from the model's own settings, so EOS has to go there
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens)
    return output[0].tolist()


def compute_reference(model: Any, prompt_ids: list[int], num_tokens: int) -> tuple[dict, float]:
    """-> (content of ref_glm.json, smallest margin between the two best logits over the continuation)."""
    full_ids = greedy(model, prompt_ids, num_tokens)
    with torch.no_grad():
        logits = model(torch.tensor([full_ids]), use_cache=False).logits[0]
    tf_pred = logits.argmax(-1).tolist()
    first = len(prompt_ids) - 1
    best = logits[first:-1].topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    for i, margin in enumerate(margins, first):
        if tf_pred[i] != full_ids[i + 1]:
            raise ValueError(
                f"position {i}: one forward says {tf_pred[i]}, step by step {full_ids[i + 1]} (margin {margin:.2g})"
                ": too close to call, take another prompt or fewer tokens"
            )
    logprobs = logits[:-1].double().log_softmax(-1).gather(1, torch.tensor(full_ids[1:])[:, None])[:, 0]
    reference = {"prompt_ids": list(prompt_ids), "full_ids": full_ids, "tf_pred": tf_pred}
    return reference | {"logprob_next": [round(value, 6) for value in logprobs.tolist()]}, min(margins)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshot", type=Path, help="folder with config.json, the weights and tokenizer.json")
    parser.add_argument("--prompt", default="In the beginning")
    parser.add_argument("--tokens", type=int, default=48, help="how many ids to generate")
    parser.add_argument(
        "--prefix", action=argparse.BooleanOptionalAction, default=True, help="put [gMASK]<sop> before the prompt"
    )
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: at least 1")

    tokenizer, prompt_ids = encode(args.snapshot, args.prompt, args.prefix)
    if not prompt_ids:
        parser.error("--prompt: no ids to start from")
    try:
        reference, margin = compute_reference(load_model(args.snapshot), prompt_ids, args.tokens)
    except ValueError as error:
        say(str(error))
        return 1
    path = args.snapshot / "ref_glm.json"
    path.write_text(json.dumps(reference) + "\n")
    print(tokenizer.decode(reference["full_ids"][len(prompt_ids) :], skip_special_tokens=False))
    print(f"smallest margin {margin:.4f} over {args.tokens} tokens; wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("make_reference", main))
