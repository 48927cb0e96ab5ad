"""Eviction policies: the score, the floor, ties, and independence of the order of reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.reference_tier import LruPolicy
from experts.policy import RECENT, RECENT_WEIGHT, STEADY, DecayedCounts, EvictionPolicy

LAYERS, NUM_EXPERTS = (1, 2, 3), 6
BOTH = pytest.mark.parametrize("make_policy", [EvictionPolicy, LruPolicy])


def filled(make_policy=EvictionPolicy, layers=LAYERS, num_experts=NUM_EXPERTS, floor=1):
    """A policy under which every expert is cached and none was used."""
    policy = make_policy(layers, num_experts, floor)
    for layer in layers:
        for expert in range(num_experts):
            policy.admit((layer, expert))
    return policy


def evict_all(policy, protected=(), layer=None):
    """Evict until there is no victim -> the keys in order."""
    evicted = []
    while (key := policy.victim(protected, layer)) is not None:
        policy.evict(key)
        evicted.append(key)
    return evicted


def test_the_score_is_the_formula():
    policy = EvictionPolicy([7], 4, 0)
    for age in reversed(range(4)):
        policy.record_uses(7, {0: 1} if age % 2 else {1: 1}, 1)
    waiting = policy.wait_factors[0]  # the layer has just run
    for expert, ages in ((0, (1, 3)), (1, (0, 2))):
        expected = sum(RECENT_WEIGHT * 2 ** (-age / RECENT) + 2 ** (-age / STEADY) for age in ages)
        assert policy.score((7, expert)) == pytest.approx(waiting * expected)
    assert policy.score((7, 2)) == 0


@given(st.lists(st.integers(1, 5000), max_size=30), st.sampled_from([1, 4, 256]))
def test_decayed_counts_neither_overflow_nor_decay_wrongly(chunks, half_life):
    counts, expected = DecayedCounts(2, half_life), 0.0
    for tokens in chunks:
        counts.add({1: tokens}, tokens)
        ages = half_life / 0.6931471805599453 * (1 - 2 ** (-tokens / half_life)) if tokens > 1 else 1
        expected = expected * 2 ** (-tokens / half_life) + ages
    assert counts.sums[1] / counts.unit == pytest.approx(expected)
    assert counts.sums[0] == 0


def test_the_least_used_is_evicted_first():
    policy = filled(layers=[1], floor=0)
    for expert in (5, 3, 4, 0, 2, 1):
        policy.record_uses(1, {expert: 1}, 1)
    assert evict_all(policy) == [(1, expert) for expert in (5, 3, 4, 0, 2, 1)]


def test_ties_go_to_the_oldest_use_then_the_lowest_id():
    assert evict_all(filled(layers=[1], num_experts=3, floor=0)) == [(1, 0), (1, 1), (1, 2)]
    policy = filled(layers=[1], num_experts=3, floor=0)
    policy.record_uses(1, {2: 1, 1: 1}, 1)
    assert evict_all(policy) == [(1, 0), (1, 1), (1, 2)]


def test_ties_evict_an_expert_of_the_layer_just_computed():
    """Its next use is the farthest away, whichever layer runs."""
    for running in LAYERS:
        policy = filled(floor=0)
        for _ in range(3):
            for layer in LAYERS:
                policy.record_uses(layer, dict.fromkeys(range(NUM_EXPERTS), 1), 1)
        for layer in range(1, running + 1):
            policy.record_uses(layer, dict.fromkeys(range(NUM_EXPERTS), 1), 1)
        assert policy.victim(()) == (running, 0)


def test_a_frequently_used_expert_outlives_a_recent_one():
    """An expert of many tokens stays although another was used later: LRU would evict it."""
    policy = filled(layers=[1], num_experts=2, floor=0)
    for _ in range(100):
        policy.record_uses(1, {0: 1}, 1)
    for _ in range(12):
        policy.record_uses(1, {}, 1)
    policy.record_uses(1, {1: 1}, 1)
    assert policy.victim(()) == (1, 1)


def test_a_long_even_prefill_does_not_evict_the_experts_of_decode():
    num_experts, hot = 64, {3, 20, 41, 60}
    policy = filled(layers=[1], num_experts=num_experts, floor=0)
    for _ in range(300):
        policy.record_uses(1, dict.fromkeys(hot, 1), 1)
    policy.record_uses(1, dict.fromkeys(range(num_experts), 1024 * len(hot) // num_experts), 1024)
    assert {expert for _, expert in evict_all(policy)[-len(hot) :]} == hot


def test_the_experts_of_an_old_topic_decay():
    policy = filled(layers=[1], num_experts=2, floor=0)
    for expert, tokens in ((0, 2000), (1, 2 * STEADY)):
        for _ in range(tokens):
            policy.record_uses(1, {expert: 1}, 1)
    assert policy.victim(()) == (1, 0)


def test_use_counts_prime_another_policy():
    first, second = filled(floor=0), filled(floor=0)
    for expert, rows in ((4, 3), (1, 9), (2, 5)):
        first.record_uses(2, {expert: rows}, 16)
    counts = first.use_counts()
    assert set(counts) == {(2, 1), (2, 2), (2, 4)}
    second.prime(counts)
    assert second.use_counts() == pytest.approx(counts)
    assert [key for key in evict_all(second) if key in counts] == [(2, 4), (2, 2), (2, 1)]
    with pytest.raises(KeyError):
        second.prime({(9, 0): 1.0})


def test_lru_partitions_by_layer():
    policy = filled(LruPolicy)
    policy.record_uses(1, {0: 1}, 1)
    assert policy.victim((), 1) == (1, 1)
    assert policy.victim((), 2) == (2, 0)
    policy.evict((2, 0))
    assert policy.victim((), 2) == (1, 1)  # layer 2 has less than its share
    assert policy.score((1, 0)) > policy.score((1, 1))


KEYS = st.tuples(st.sampled_from(LAYERS), st.integers(0, NUM_EXPERTS - 1))
STEPS = st.lists(st.tuples(KEYS, st.integers(1, 40)), max_size=40)


def after(make_policy, steps, floor):
    """A policy after uses, evictions and admissions -> (policy, its cached keys)."""
    policy, cached = filled(make_policy, floor=floor), {(la, e) for la in LAYERS for e in range(NUM_EXPERTS)}
    for (layer, expert), rows in steps:
        policy.record_uses(layer, {expert: 1}, rows)
        if (layer, expert) not in cached:
            policy.admit((layer, expert))
            cached.add((layer, expert))
        if rows % 2 and (victim := policy.victim({(layer, expert)}, layer)) is not None:
            policy.evict(victim)
            cached.remove(victim)
    return policy, cached


@BOTH
@given(steps=STEPS, protected=st.sets(KEYS))
def test_a_victim_is_cached_and_never_protected(make_policy, steps, protected):
    policy, cached = after(make_policy, steps, 1)
    evicted = evict_all(policy, protected)
    assert len(set(evicted)) == len(evicted)
    assert set(evicted) <= cached - protected


@given(STEPS, st.integers(0, NUM_EXPERTS), st.sets(KEYS))
def test_no_layer_falls_below_its_floor(steps, floor, protected):
    policy, cached = after(EvictionPolicy, steps, floor)
    held = {layer: sum(key[0] == layer for key in cached) for layer in LAYERS}
    for layer, _ in evict_all(policy, protected):
        held[layer] -= 1
        assert held[layer] >= floor


@given(STEPS)
def test_the_victim_has_the_lowest_score(steps):
    policy, cached = after(EvictionPolicy, steps, 0)
    while cached:
        victim = policy.victim(())
        assert policy.score(victim) == min(map(policy.score, cached))
        policy.evict(victim)
        cached.remove(victim)


@BOTH
@given(steps=STEPS)
def test_the_order_does_not_depend_on_calls_of_victim(make_policy, steps):
    """victim() sorts and keeps the ranking; the same events without it give the same order."""
    ranked, plain = filled(make_policy), filled(make_policy)
    for (layer, expert), rows in steps:
        for policy in (ranked, plain):
            policy.record_uses(layer, {expert: 1}, rows)
        ranked.victim((), layer)
    assert evict_all(ranked) == evict_all(plain)


@BOTH
@given(keys=st.lists(KEYS, unique=True), used=st.lists(KEYS), data=st.data())
def test_the_order_does_not_depend_on_the_order_of_reads(make_policy, keys, used, data):
    orders = []
    for landed in (keys, data.draw(st.permutations(keys))):
        policy = make_policy(LAYERS, NUM_EXPERTS, 1)
        for layer, expert in used:
            policy.record_uses(layer, {expert: 1}, 1)
        for key in landed:
            policy.admit(key)
        orders.append(evict_all(policy))
    assert orders[0] == orders[1]
