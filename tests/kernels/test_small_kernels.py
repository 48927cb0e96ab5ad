"""The small C kernels, those between the matrix products, against their definition in torch and against themselves."""

import pytest
import torch

from kernels import reference
from kernels.formats import FORMATS
from snapshot.rope import plain_frequencies
from tests.kernels.test_kernels import attention_case, kernels, randn  # noqa: F401

NAN, INF = torch.nan, torch.inf


def same(kernels, call):  # noqa: F811
    """call(native) -> its result: the same bits from every instruction set and with more threads."""
    bits = None
    for native in kernels.values():
        for threads in (1, 3):
            native.set_threads(threads)
            out = call(native)
            native.set_threads(1)
            out = out if isinstance(out, tuple) else (out,)
            bits = out if bits is None else bits
            for a, b in zip(out, bits, strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, native.name
    return bits if len(bits) > 1 else bits[0]


@pytest.mark.parametrize("width", [1, 15, 16, 24, 192, 6144])
def test_norms(kernels, width):  # noqa: F811
    x, weight, bias = randn(9, width + 5)[:, :width] * 3, randn(width, seed=1), randn(width, seed=2)
    for name, rest in (("rms_norm", (weight, 1e-5)), ("layer_norm", (weight, bias, 1e-5))):
        expected = getattr(reference, name)(x, *rest)
        bits = same(kernels, lambda native, name=name, rest=rest: getattr(native, name)(x, *rest))
        torch.testing.assert_close(bits, expected, rtol=1e-5, atol=1e-5)
        spoilt = x.clone()
        spoilt[2, width // 2], spoilt[3, 0] = NAN, INF
        for native in kernels.values():
            assert torch.equal(getattr(native, name)(x[4:5], *rest)[0], bits[4])
            out = getattr(native, name)(spoilt, *rest)
            assert out[2].isnan().all() and out[3, 0].isnan() and torch.equal(out[4:], bits[4:])
        tiny, ones, zeros = torch.full((1, width), 1e-4), torch.ones(width), torch.zeros(width)
        rest = (ones, 0.05) if name == "rms_norm" else (ones, zeros, 0.05)  # the epsilon counts
        torch.testing.assert_close(getattr(native, name)(tiny, *rest), getattr(reference, name)(tiny, *rest))


def test_norm_of_a_sum(kernels):  # noqa: F811
    """What is added stays added."""
    x, added, weight = randn(5, 70), randn(5, 70, seed=1), randn(70, seed=2)
    for native in (*kernels.values(), reference):
        total = x.clone()
        out = native.rms_norm(total, weight, 1e-5, added)
        assert torch.equal(total, x + added) and torch.equal(out, native.rms_norm(x + added, weight, 1e-5))


@pytest.mark.parametrize(
    ("shape", "first", "rotary"), [((7, 3, 20), 12, 8), ((1, 64, 256), 192, 64), ((300, 130), 0, 128), ((5, 9), 3, 2)]
)
def test_rope(kernels, shape, first, rotary):  # noqa: F811
    """To the last bit what torch gives; other columns stay."""
    x, (cos, sin) = randn(*shape), reference.rope_angles(torch.arange(3, 3 + shape[0]), plain_frequencies(1e4, rotary))
    expected = x.clone()
    expected[..., first : first + rotary] = reference.rope_interleaved(x[..., first : first + rotary], cos, sin)
    assert torch.equal(reference.apply_rope(x.clone(), first, cos, sin), expected)
    assert torch.equal(same(kernels, lambda native: native.apply_rope(x.clone(), first, cos, sin)), expected)


ROUTERS = [(1, 1, 1, 1), (24, 4, 1, 1), (256, 8, 1, 1), (64, 6, 8, 3), (16, 3, 16, 5), (9, 9, 1, 1), (5, 8, 1, 1)]


@pytest.mark.parametrize(("experts", "active", "groups", "active_groups"), ROUTERS)
@pytest.mark.parametrize("mass", [0.0, 0.6, 1e-300, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_route(kernels, experts, active, groups, active_groups, mass, normalize):  # noqa: F811
    """Coarse logits: many ties."""
    bias = randn(experts, seed=1).mul_(4).round_() / 40
    for logits in (randn(300, experts) * 3, randn(300, experts, seed=2).round_()):
        rest = bias, active, groups, active_groups, normalize, 2.5, mass
        topk_ids, weights = reference.route(logits, *rest)
        got = same(kernels, lambda native, logits=logits, rest=rest: native.route(logits, *rest))
        # Scores that differ in the last bit alone may be selected the other way round.
        equal = (got[0] == topk_ids).all(-1)
        assert equal.float().mean() > 0.97 and (got[0][:, 1:] > got[0][:, :-1]).all()
        close = torch.isclose(got[1], weights, rtol=1e-5, atol=1e-7).all(-1)
        assert close[equal].float().mean() > 0.97
        alone = next(iter(kernels.values())).route(logits[7:8], *rest)
        assert torch.equal(alone[0][0], got[0][7]) and torch.equal(alone[1][0], got[1][7])


def test_route_ties_and_nan(kernels):  # noqa: F811
    logits = torch.zeros(4, 40)
    logits[1, 30], logits[2] = NAN, NAN
    logits[3, 7], logits[3, 9] = INF, -INF
    for native in (*kernels.values(), reference):
        topk_ids, weights = native.route(logits, torch.zeros(40), 4, 1, 1, True, 1.0)
        assert topk_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 30], [0, 1, 2, 3], [0, 1, 2, 7]]
        assert weights.isnan().any(-1).tolist() == [False, True, True, False]
        topk_ids, weights = native.route(logits, torch.zeros(40), 4, 4, 2, False, 1.0)
        assert 30 in topk_ids[1].tolist() and weights.isnan().any(-1).tolist() == [False, True, True, False]


@pytest.mark.parametrize(("rows", "active", "experts"), [(1, 8, 256), (300, 4, 24), (3, 1, 1), (7, 5, 5)])
@pytest.mark.parametrize("kept", [1.0, 0.5, 0.0])
def test_group_by_expert(kernels, rows, active, experts, kept):  # noqa: F811
    g = torch.Generator().manual_seed(rows)
    topk_ids = torch.stack([torch.randperm(experts, generator=g)[:active].sort().values for _ in range(rows)])
    topk_weights = torch.rand(rows, active, generator=g) + 0.1
    topk_weights[torch.rand(rows, active, generator=g) >= kept] = 0.0
    expected = reference.group_by_expert(topk_ids, topk_weights, experts)
    got = same(kernels, lambda native: native.group_by_expert(topk_ids, topk_weights, experts))
    assert got[0] == expected[0] and all(torch.equal(a, b) for a, b in zip(got[1:], expected[1:], strict=True))


@pytest.mark.parametrize(("rows", "positions", "topk"), [(1, 2, 1), (40, 90, 33), (3, 5000, 256), (2, 100_000, 2048)])
def test_top_positions(kernels, rows, positions, topk):  # noqa: F811
    first = positions - rows
    plain, coarse = randn(rows, positions), randn(rows, positions, seed=1).round_()
    coarse[coarse == 0] *= -1  # zeros of both signs are equal
    odd = plain.clone()
    odd[:, ::7], odd[:, ::11], odd[:, 1::13] = INF, -INF, -0.0
    for scores in (plain, coarse, odd, coarse.relu(), torch.zeros_like(plain), plain * 1e-42):
        expected = reference.top_k_positions(scores, first, topk)
        got = same(kernels, lambda native, scores=scores: native.top_k_positions(scores, first, topk))
        assert torch.equal(got, expected)
        few = reference.top_k_positions(scores, 0, topk)  # rows with fewer than topk positions
        assert torch.equal(same(kernels, lambda native, scores=scores: native.top_k_positions(scores, 0, topk)), few)
        assert few[0].tolist() == [0] + [-1] * (topk - 1)


def test_a_nan_score_selects_nothing_and_is_reported(kernels):  # noqa: F811
    scores = randn(3, 50)
    scores[1, 47], scores[0, 49] = NAN, NAN  # row 0 does not attend to the last position
    queries, kv_b, latents, rope_keys = attention_case(3, 16, 8, 20, 24, 50, 3, FORMATS["f32"])
    for native in (*kernels.values(), reference):
        selected = native.top_k_positions(scores, 47, 5)
        assert (selected[1] == -1).all() and (selected[[0, 2]] >= 0).all()
        out = native.absorbed_attention(queries, kv_b, latents, rope_keys, 47, selected, 20, 0.2)
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("vocab", [1, 7, 16, 250, 2048, 32771])
def test_logprobs(kernels, vocab):  # noqa: F811
    """Float64 to its last digits; the best id is the lowest of equals."""
    logits = randn(9, vocab) * 8
    logits[1], logits[2] = 0.0, logits[2].round()
    logits[3, vocab // 2] = 900.0
    logits[4, : vocab // 2] = -INF
    targets = torch.randint(vocab, (9,), generator=torch.Generator().manual_seed(1))
    targets[3:5] = vocab // 2
    logprobs, best = reference.logprobs(logits, targets)
    got = same(kernels, lambda native: native.logprobs(logits, targets))
    torch.testing.assert_close(got[0], logprobs, rtol=1e-14, atol=1e-13)
    assert torch.equal(got[1], best) and got[1][1] == 0
    native = next(iter(kernels.values()))
    assert torch.equal(native.logprobs(logits[2:3], targets[2:3])[0], got[0][2:3])
    with pytest.raises(IndexError, match="a target"):
        native.logprobs(logits[:1], torch.tensor([vocab]))


def test_logprobs_of_nan(kernels):  # noqa: F811
    logits = torch.zeros(3, 40)
    logits[0, 33], logits[1], logits[2, 5] = NAN, -INF, INF
    for native in kernels.values():
        logprobs, best = native.logprobs(logits, torch.zeros(3, dtype=torch.int64))
        assert not logprobs.isfinite().any() and best.tolist() == [33, 0, 5]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 6144), (40, 1000)])
def test_all_finite(kernels, shape):  # noqa: F811
    for native in (*kernels.values(), reference):
        x = randn(*shape) * 3e38
        x.nan_to_num_(posinf=3e38, neginf=-3e38)
        assert native.all_finite(x) is True
        for bad in (NAN, INF, -INF):
            for at in {0, x.numel() // 2, x.numel() - 1}:
                spoilt = x.clone()
                spoilt.view(-1)[at] = bad
                assert native.all_finite(spoilt) is False
