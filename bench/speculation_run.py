"""For bench/speculation.py: generate texts at one draft depth, and count what they cost."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.speculation_price import EXPERT, NoNgrams, PricedDrafter, PriceMeter, ScriptedProposer
from forward.kv_cache import make_kv_cache
from generate.decode import DecodeCounters, spec_decode
from generate.draft_length import DraftLength
from generate.proposers import Proposers
from generate.sampler import Sampler
from load.model import load_model
from settings import Settings

WARM_UP = 32  # tokens

Job = tuple[list[int], int, list[int] | None]  # prompt, tokens to generate, the text to recite or None


class RecitingSampler(Sampler):
    """A sampler that gives a known text, and records the greedy tokens."""

    def __init__(self, text: list[int]):
        super().__init__()
        self.text = text
        self.greedy: dict[int, int] = {}  # position -> id

    def sample(self, logits: Tensor, position: int) -> int:
        self.greedy[position] = int(logits.argmax())
        return self.text[position]


class SpeculationArm:
    """One draft depth with one size of the expert cache: a model, a draft length controller, and its counters."""

    def __init__(self, folder: Path, cap: int, depth: str, acceptance: float = 0.0, miss_rate: float = 0.0):
        """cap: expert slots of a layer. acceptance, miss_rate: of the ScriptedProposer."""
        settings = Settings.read([], snap=str(folder))
        settings = replace(settings, score=None, prompt=None, replay=False, tf=False, cap=cap, draft=depth)
        self.loaded = load_model(replace(settings, lookahead="0", usage=False, ctx=0))
        self.model = self.loaded.model
        self.acceptance = acceptance
        self.miss_rate = miss_rate
        self.draft_length = DraftLength(depth, guard=False)
        self.counters = DecodeCounters()
        self.greedy_ids: list[int] = []  # of all texts
        # Sums over the texts, without their prefill; prices are those of GLM-5.2:
        self.wall_seconds = 0.0
        self.price_seconds = 0.0
        self.price_experts_read = 0.0
        self.bytes_read = 0
        self.requested = 0  # experts
        self.missed = 0

    def warm_up(self, prompt: list[int], num_tokens: int, text: list[int] | None) -> None:
        """Generate without counting. If there is a slot for each expert, all of them are read."""
        config, experts = self.model.config, self.model.experts
        if self.loaded.plan.num_expert_slots == self.loaded.plan.num_sparse_layers * config.num_experts:
            for layer in experts.pool_of:
                with experts.request(layer, dict.fromkeys(range(config.num_experts), 1)) as request:
                    list(request.ready(0, config.num_experts))
        kv = make_kv_cache(config, len(prompt) + num_tokens)
        list(spec_decode(self.model, kv, prompt, RecitingSampler(text) if text else Sampler(), num_tokens))

    def generate(self, prompt: list[int], num_tokens: int, text: list[int] | None = None) -> None:
        """Generate, or recite a text; count what follows the prefill."""
        kv = make_kv_cache(self.model.config, len(prompt) + num_tokens)
        meter = PriceMeter(self.model)
        proposers = Proposers(self.model, kv)
        script = None
        sampler = Sampler()
        if text:
            script = ScriptedProposer(text, self.acceptance, meter, self.miss_rate)
            proposers.mtp = script  # type: ignore[assignment]  # what the drafter uses of it
            proposers.ngrams = NoNgrams()  # type: ignore[assignment]  # the same
            sampler = RecitingSampler(text)
        drafter = PricedDrafter(self.model, self.draft_length, meter, script)
        options: dict[str, Any] = dict(drafter=drafter, counters=self.counters, proposers=proposers)
        tokens = spec_decode(self.model, kv, prompt, sampler, num_tokens, **options)
        ids = [next(tokens)]  # the prefill
        # After now(), which charges the experts so far:
        before = meter.now(), meter.experts_read, self.model.experts.counters.bytes_read, *meter.num_experts()
        started = time.perf_counter()
        ids += tokens
        self.wall_seconds += time.perf_counter() - started
        self.price_seconds += meter.now() - before[0]
        self.price_experts_read += meter.experts_read - before[1]
        self.bytes_read += self.model.experts.counters.bytes_read - before[2]
        requested, missed = meter.num_experts()
        self.requested += requested - before[3]
        self.missed += missed - before[4]
        if isinstance(sampler, RecitingSampler):
            ids = [sampler.greedy[position] for position in sorted(sampler.greedy)]
        self.greedy_ids += ids

    def summarize(self, num_texts: int) -> dict[str, Any]:
        """-> the counters as a line of the table."""
        c = self.counters
        tokens = c.tokens - num_texts  # the first of each belongs to the prefill
        statistics = self.draft_length.statistics()
        return {
            "tokens": tokens,
            "forwards": c.forwards,
            "tokens_per_forward": tokens / c.forwards,
            "experts_per_token": self.requested / tokens,
            "gb_per_token": self.price_experts_read * EXPERT / 1e9 / tokens,
            "seconds_per_token": self.price_seconds / tokens,
            "mb_read_per_token": self.bytes_read / 1e6 / tokens,
            "wall_tok_s": tokens / self.wall_seconds,
            "acceptance_by_position": statistics["draft_acceptance"],
            "depths": statistics["draft_depths"],
        }


def run_arm(
    folder: Path, cap: int, depth: str, jobs: list[Job], acceptance: float = 0.0, miss_rate: float = 0.0
) -> tuple[dict[str, Any], list[int], float]:
    """Run the jobs, the first as warm-up -> (line of the table, greedy ids, share of requested experts missed)."""
    arm = SpeculationArm(folder, cap, depth, acceptance, miss_rate)
    try:
        prompt, num_tokens, text = jobs[0]
        arm.warm_up(prompt, min(num_tokens, WARM_UP), text)
        for job in jobs[1:]:
            arm.generate(*job)
        return arm.summarize(len(jobs) - 1), arm.greedy_ids, arm.missed / arm.requested
    finally:
        arm.loaded.close()
