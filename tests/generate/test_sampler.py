"""The sampler: greedy ties, temperature, nucleus, and a uniform number that depends on (seed, row, position) alone."""

import math

import pytest
import torch

from generate.sampler import Sampler, uniform


def test_greedy_takes_the_lowest_id_of_equals():
    assert Sampler(0.0).sample(torch.tensor([1.0, 3.0, 3.0, 2.0]), 5) == 1
    assert Sampler(-1.0).sample(torch.tensor([0.0, 0.0]), 5) == 0


def test_uniform_is_a_function_of_seed_row_and_position():
    assert uniform(7, 0, 12) == uniform(7, 0, 12)
    assert len({uniform(7, 0, 12), uniform(8, 0, 12), uniform(7, 1, 12), uniform(7, 0, 13)}) == 4
    draws = [uniform(1, 2, position) for position in range(4000)]
    assert all(0 <= u < 1 for u in draws) and abs(sum(draws) / 4000 - 0.5) < 0.02


def test_samples_follow_the_distribution():
    """20,000 positions: each share is within five standard deviations of its probability."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler, n = Sampler(temperature=0.8, nucleus=1.0, seed=3), 20_000
    counts = torch.bincount(torch.tensor([sampler.sample(logits, i) for i in range(n)]), minlength=4)
    p = (logits.double() / 0.8).softmax(0)
    for count, expected in zip(counts.tolist(), p.tolist(), strict=True):
        assert abs(count / n - expected) < 5 * math.sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize(
    ("nucleus", "kept"), [(0.5, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (0, range(4)), (1, range(4))]
)
def test_the_nucleus_is_the_shortest_prefix_that_reaches_its_mass(nucleus, kept):
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64).log()
    p = Sampler(1.0, nucleus).probabilities(logits)
    assert p.nonzero()[:, 0].tolist() == list(kept)
    assert {Sampler(1.0, nucleus, seed=1).sample(logits, i) for i in range(300)} == set(kept)


def test_nucleus_ties_go_to_the_lowest_id():
    assert Sampler(1.0, 0.5).probabilities(torch.zeros(4)).nonzero()[:, 0].tolist() == [0, 1]


def test_a_tiny_temperature_is_nearly_greedy_and_never_nan():
    assert Sampler(1e-9, 0.9, seed=1).sample(torch.tensor([1.0, 1.1, 0.0]), 3) == 1


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("nucleus", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 40, 30_000])
def test_a_large_vocabulary_is_cut_as_if_it_were_sorted(spread, nucleus, top_k):
    """Flat and steep ones, with many ties."""
    logits = (torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * spread).round(decimals=1)
    p = logits.double()
    if 0 < top_k < len(p):
        p[p.argsort(descending=True, stable=True)[top_k:]] = -torch.inf
    p = p.softmax(0)
    if nucleus:
        ordered, ids = p.sort(descending=True, stable=True)
        p[ids[int((ordered.cumsum(0) < nucleus).sum()) + 1 :]] = 0
    assert torch.equal(Sampler(1.0, nucleus, top_k=top_k).probabilities(logits), p)
