"""Benchmark of speculative decoding: DRAFT 0, 1, 3 and auto by turns, with all experts in memory, with half, with one.

    make bench-speculation        or     python bench/speculation.py [--tokens 160] [--csv bench/speculation.csv]

Two models, each in three regimes: `all`, every expert in memory; `half`, slots for half of them; `cold`, one slot in
each layer, so that almost every expert is read.

    tiny        models/tiny, greedy, its own MTP layer and n-grams
    small       a synthetic snapshot (dev/make_synthetic.py small, 0.1 GB in a temporary folder) that recites its
                text, whatever its logits say, so that experts are used as in traces of real models. A script replaces
                the MTP layer: each draft token is right with the chance in the column `right`, n-grams are off

What decides is no clock: every forward is priced as that of GLM-5.2 on one machine, whose numbers are printed first, by
the experts that it asked for and those of them that it had to read, as counted in the run. An expert of the run stands
for as many of GLM-5.2's as make its 600 a token. The draft length controller measures that same price, so its choices,
and all but the column of tokens a second, are the same on any machine. Nothing is prefetched (LOOKAHEAD=0) and no
history of earlier runs is used (USAGE=0). A run has one controller for all its texts, and begins with one more text,
without drafts, that is not counted.

    tok/fw      tokens a forward
    experts     distinct ones asked for, a token
    GB/token    read by GLM-5.2, for making the drafts too
    s/token     the price; beside it that of DRAFT=0, and of the best fixed depth, over it
    wall        tokens a second of this machine, noisy

The aims: auto costs at most 5 % more than the best fixed depth, 0 included, and at most 3 % more than DRAFT=0, in each
table; models/tiny gives at least 1.5 tokens a forward with its own head. Exit code 0 whether they are met or not; 1 if
two arms did not give the same tokens, 2 for what cannot be run. THREADS, KERNELS, READ_MODE and XDG_CACHE_HOME hold as
they do for colibri.py. About 4 minutes of one core.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.speculation_price import (
    DRAFT_TOKEN,
    DRIVE,
    EXPERT,
    FORWARD,
    MEMORY,
    ROW,
    Machine,
    NoNgrams,
    PricedDrafter,
    Script,
)
from errors import Refused
from forward.kv_cache import make_kv_cache
from generate.decode import DecodeCounters, spec_decode
from generate.draft_length import DraftLength
from generate.proposers import Proposers
from generate.sampler import Sampler
from load.model import load_model
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from snapshot.reader import read_json_object
from text.prompt import PromptPrefix, shared_prefix_length
from text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("0", "1", "3", "auto")
REGIMES = {"all": lambda num_experts: num_experts, "half": lambda num_experts: num_experts // 2, "cold": lambda _: 1}
RIGHT = (0.3, 0.6, 0.9)  # chances of a draft token of the script
OVER_BEST, OVER_PLAIN, LEAST_TOKENS = 1.05, 1.03, 1.5  # the aims

TEXTS = (
    "And it came to pass, when",
    "In the beginning God created",
    "HAMLET.\nWhat should we say,",
    "hacker: n. A person who",
    "The LORD is my shepherd",
)
NUM_SMALL_TEXTS, SMALL_PROMPT, WARM_UP = 2, 24, 32
SIZES = "--layers 6 --moe-width 256 --prompt 2 --report-tokens 0"
COLUMNS = (
    "model regime right arm tokens forwards tokens_per_forward experts_per_token gb_per_token seconds_per_token "
    "over_plain over_best mb_read_per_token wall_tok_s right_by_position depths"
).split()


# --- a run ------------------------------------------------------------------------------------------------------------


class Reciter:
    """A sampler that gives a known text, and keeps what greedy would have sampled."""

    def __init__(self, text):
        self.text, self.best = text, {}

    def sample(self, logits, position):
        self.best[position] = int(logits.argmax())
        return self.text[position]


MARKS = ("seconds", "read", "num_bytes", "asked", "missed")  # fields of an Arm that a run adds to


class SpeculationArm:
    """One depth in one regime: a model, a draft length controller, and what was counted."""

    def __init__(self, folder, cap, depth, chance=0.0, missing=0.0):
        settings = Settings.read([], snap=str(folder))
        settings = replace(settings, score=None, prompt=None, replay=False, tf=False, cap=cap, draft=depth)
        self.loaded = load_model(replace(settings, lookahead="0", usage=False, ctx=0))
        self.model, self.chance, self.missing = self.loaded.model, chance, missing
        self.draft_length, self.counters = DraftLength(depth), DecodeCounters()
        self.ids = []  # of all texts, what greedy samples
        self.wall = self.seconds = self.read = 0.0
        self.num_bytes = self.asked = self.missed = 0

    def warm_up(self, prompt, num_tokens, text):
        """Run without counting. Where there is a slot for each expert all of them are read."""
        config = self.model.config
        if self.loaded.plan.num_expert_slots == self.loaded.plan.num_sparse_layers * config.num_experts:
            for layer in self.model.experts.pool_of:
                with self.model.experts.request(layer, dict.fromkeys(range(config.num_experts), 1)) as request:
                    list(request.ready(0, config.num_experts))
        kv = make_kv_cache(config, len(prompt) + num_tokens)
        list(spec_decode(self.model, kv, prompt, Reciter(text) if text else Sampler(), num_tokens))

    def run(self, prompt, num_tokens, text=None):
        """Generate; with a text, recite it. What the prefill cost is not counted."""
        kv = make_kv_cache(self.model.config, len(prompt) + num_tokens)
        machine = Machine(self.model)
        script = Script(text, self.chance, machine, self.missing) if text else None
        drafter = PricedDrafter(self.model, self.draft_length, machine, script)
        proposers = Proposers(self.model, kv)
        if script:
            proposers.mtp, proposers.ngrams = script, NoNgrams()
        sampler = Reciter(text) if text else Sampler()
        tokens = spec_decode(
            self.model,
            kv,
            prompt,
            sampler,
            num_tokens,
            drafter=drafter,
            counters=self.counters,
            proposers=proposers,
        )
        ids = [next(tokens)]
        before, started = self.mark(machine), time.perf_counter()
        ids += tokens
        self.wall += time.perf_counter() - started
        for name, now, then in zip(MARKS, self.mark(machine), before, strict=True):
            setattr(self, name, getattr(self, name) + now - then)
        self.ids += [sampler.best[i] for i in sorted(sampler.best)] if text else ids

    def mark(self, machine):
        return machine.now(), machine.read, self.model.experts.counters.bytes_read, *machine.num_experts()

    def row(self, num_texts):
        """What was counted, as a row of the table."""
        c = self.counters
        tokens = c.tokens - num_texts  # the first of each belongs to the prefill
        numbers = self.draft_length.statistics()
        return {
            "tokens": tokens,
            "forwards": c.forwards,
            "tokens_per_forward": tokens / c.forwards,
            "experts_per_token": self.asked / tokens,
            "gb_per_token": self.read * EXPERT / 1e9 / tokens,
            "seconds_per_token": self.seconds / tokens,
            "mb_read_per_token": self.num_bytes / 1e6 / tokens,
            "wall_tok_s": tokens / self.wall,
            "right_by_position": numbers["draft_acceptance"],
            "depths": numbers["draft_depths"],
        }


def run_arm(folder, cap, depth, jobs, chance=0.0, missing=0.0):
    """jobs: (prompt, tokens, text or None) each; the first is the warm-up -> (row, ids, share of experts missing)."""
    arm = SpeculationArm(folder, cap, depth, chance, missing)
    try:
        prompt, num_tokens, text = jobs[0]
        arm.warm_up(prompt, min(num_tokens, WARM_UP), text)
        for job in jobs[1:]:
            arm.run(*job)
        return arm.row(len(jobs) - 1), arm.ids, arm.missed / arm.asked
    finally:
        arm.loaded.close()


def run_table(model, folder, regime, jobs, chances):
    """All arms of a regime -> rows. DRAFT=0 is run once for all chances. Differs if two arms give other tokens."""
    cap = max(1, REGIMES[regime](read_json_object(folder / "config.json")["n_routed_experts"]))
    plain, ids, missing = run_arm(folder, cap, "0", jobs)
    rows = []
    for chance in chances:
        table = [plain | {"arm": "0"}]
        for depth in ARMS[1:]:
            row, others, _ = run_arm(folder, cap, depth, jobs, chance or 0.0, missing)
            check_equal(f"{model}, {regime}, DRAFT={depth}", ids, others)
            table.append(row | {"arm": depth})
        best = min(row["seconds_per_token"] for row in table if row["arm"] != "auto")
        for row in table:
            row |= {"model": model, "regime": regime, "right": "own" if chance is None else chance}
            row["over_plain"] = row["seconds_per_token"] / plain["seconds_per_token"]
            row["over_best"] = row["seconds_per_token"] / best
        print_table(table)
        rows += table
    return rows


class TokensDiffer(Exception):
    """Two arms did not give the same tokens."""


def check_equal(what, expected, ids):
    if ids != expected:
        at = shared_prefix_length(expected, ids)
        raise TokensDiffer(f"{what}: not the tokens of DRAFT=0, from token {at} on")


# --- output ----------------------------------------------------------------------------------------------


def print_table(rows):
    first = rows[0]
    right = (
        "its own head and n-grams"
        if first["right"] == "own"
        else f"draft tokens right with a chance of {first['right']}"
    )
    print(f"\n{first['model']}, {first['regime']}: {right}, {first['tokens']} tokens")
    print(f"  {'DRAFT':6}{'tok/fw':>8}{'experts':>9}{'GB/token':>10}{'s/token':>9}{'/ 0':>7}{'/ best':>8}{'wall':>7}")
    for row in rows:
        print(f"  {row['arm']:6}{row['tokens_per_forward']:8.2f}{row['experts_per_token']:9.1f}"
              f"{row['gb_per_token']:10.2f}{row['seconds_per_token']:9.3f}{row['over_plain']:7.3f}"
              f"{row['over_best']:8.3f}{row['wall_tok_s']:7.0f}", flush=True)  # fmt: skip


def print_verdict(rows):
    autos = [row for row in rows if row["arm"] == "auto"]
    for name, most, words in (
        ("over_best", OVER_BEST, "the best fixed depth"),
        ("over_plain", OVER_PLAIN, "DRAFT=0"),
    ):
        worst = max(autos, key=lambda row: row[name])
        where = f"{worst['model']}, {worst['regime']}, right {worst['right']}"
        missed = [row for row in autos if row[name] > most]
        print(f"auto over {words}: at most {worst[name]:.3f} ({where}), aim {most}: "
              f"{f'MISSED in {len(missed)} of {len(autos)} tables' if missed else 'met'}")  # fmt: skip
        for row in missed:
            print(f"  {row['model']}, {row['regime']}, right {row['right']}: {row[name]:.3f}")
    own = [row for row in rows if row["model"] == "tiny"]
    best = max((row for row in own if row["arm"] != "auto"), key=lambda row: row["tokens_per_forward"])
    value = best["tokens_per_forward"]
    print(f"models/tiny with its own head, DRAFT={best['arm']}: {value:.2f} tokens a forward, aim {LEAST_TOKENS}: "
          f"{'met' if value >= LEAST_TOKENS else 'MISSED'}")  # fmt: skip


# --- command line -----------------------------------------------------------------------------------------------------


def tiny_jobs(num_tokens):
    config, _ = read_config(EMBEDDED_SNAPSHOT)
    tokenizer = TextTokenizer(EMBEDDED_SNAPSHOT, config)
    prefix = PromptPrefix(config, tokenizer, enabled=True)
    return [(prefix.prepend(tokenizer.encode(text)), num_tokens, None) for text in TEXTS]


def small_jobs(folder, num_tokens):
    """Consecutive parts of its text."""
    ids, size = read_json_object(folder / "ref_glm.json")["full_ids"], SMALL_PROMPT + num_tokens
    texts = [ids[i * size : (i + 1) * size] for i in range(1 + NUM_SMALL_TEXTS)]
    return [(text[:SMALL_PROMPT], num_tokens, text) for text in texts]


def make_small(folder, num_tokens):
    script = [sys.executable, str(ROOT / "dev" / "make_synthetic.py"), "small", str(folder), *SIZES.split()]
    total = (1 + NUM_SMALL_TEXTS) * (SMALL_PROMPT + num_tokens)
    if subprocess.run([*script, "--tokens", str(total)], stdout=sys.stderr).returncode:
        raise Refused("the synthetic snapshot could not be made")


def run(num_tokens):
    rows, jobs = [], tiny_jobs(num_tokens)
    for regime in REGIMES:
        rows += run_table("tiny", EMBEDDED_SNAPSHOT, regime, jobs, (None,))
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "small")
        make_small(folder, num_tokens)
        jobs = small_jobs(folder, num_tokens)
        for regime in REGIMES:
            rows += run_table("small", folder, regime, jobs, RIGHT)
    return rows


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=160, help="of each text, default 160, at least 16")
    parser.add_argument(
        "--csv", type=Path, default=ROOT / "bench" / "speculation.csv", help="default bench/speculation.csv"
    )
    return parser


def main(arguments=None):
    args = make_parser().parse_args(arguments)
    started = time.perf_counter()
    try:
        if args.tokens < 16:
            raise Refused(f"--tokens is {args.tokens}, it must be 16 or more")
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            print(f"prices of GLM-5.2 in int4: drive {DRIVE / 1e9:g} GB/s, memory {MEMORY / 1e9:g} GB/s | a forward "
                  f"{FORWARD:.3f} s, each row {ROW:.3f} s, each expert {EXPERT / MEMORY * 1e3:.2f} ms and "
                  f"{EXPERT / DRIVE * 1e3:.2f} ms to read it | a draft token {DRAFT_TOKEN * 1e3:.1f} ms")  # fmt: skip
            rows = run(args.tokens)
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        print()
        print_verdict(rows)
        print(f"the tokens of all arms are equal | {len(rows)} rows in {args.csv} | "
              f"{(time.perf_counter() - started) / 60:.1f} minutes")  # fmt: skip
        return 0
    except TokensDiffer as error:
        print(f"speculation: WRONG TOKENS: {error}", file=sys.stderr)
        return 1
    except Refused as error:
        print(f"speculation: {error}", file=sys.stderr)
    except OSError as error:
        print(f"speculation: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("speculation: interrupted", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
