"""The C kernels of other families: grouped attention, the softmax router, clamped SwiGLU, rows within rows."""

import pytest
import torch

from kernels import reference
from kernels.formats import FORMATS, MXFP4
from kernels.reference import ClampedSwiGlu
from kernels.weight import RowSelection, Weight, view_weight
from snapshot.rope import plain_frequencies
from tests.kernels.test_kernels import kernels, randn, weights_of  # noqa: F401


def same(kernels, work):  # noqa: F811
    """The result of every instruction set, the same bits."""
    results = [work(native) for native in kernels.values()]
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (4, 4, 16, 16), (30, 2, 40, 24), (9, 1, 128, 100)], ids=str)
@pytest.mark.parametrize("window", [0, 1, 17, 500])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_grouped_attention(kernels, shape, window, has_sinks):  # noqa: F811
    """Close to the definition; the same bits for all rows at once, in chunks, alone, and on two threads."""
    H, G, D, V = shape
    T, S = 40, 75
    first, sinks = S - T, randn(H, seed=5) if has_sinks else None
    queries, keys, values = randn(T, H, D, seed=1) * 2, randn(S, G, D, seed=2), randn(S, G, V, seed=3)
    rest = window, sinks, D**-0.5
    out = same(kernels, lambda native: native.grouped_attention(queries, keys, values, first, *rest))
    expected = reference.grouped_attention(queries, keys, values, first, *rest)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)
    for native in kernels.values():
        at = 0
        for count in (1, 2, 13, 24):
            stop = first + at + count
            part = native.grouped_attention(queries[at : at + count], keys[:stop], values[:stop], first + at, *rest)
            assert torch.equal(part, out[at : at + count])
            at += count
        native.set_threads(3)
        assert torch.equal(native.grouped_attention(queries, keys, values, first, *rest), out)
        native.set_threads(1)


def test_grouped_attention_over_keys_in_bfloat16(kernels):  # noqa: F811
    """The bits of the same keys and values converted to float32 beforehand."""
    queries, keys, values = randn(5, 8, 64), randn(30, 2, 64, seed=1).bfloat16(), randn(30, 2, 48, seed=2).bfloat16()
    half = same(kernels, lambda native: native.grouped_attention(queries, keys, values, 25, 7, None, 0.1))
    wide = keys.float(), values.float()
    assert torch.equal(half, same(kernels, lambda native: native.grouped_attention(queries, *wide, 25, 7, None, 0.1)))
    torch.testing.assert_close(
        half, reference.grouped_attention(queries, keys, values, 25, 7, None, 0.1), rtol=1e-4, atol=2e-5
    )


def test_positions_outside_the_window_are_not_read(kernels):  # noqa: F811
    """And a NaN reaches only the rows that attend to it."""
    queries, keys, values = randn(6, 2, 32), randn(20, 1, 32, seed=1), randn(20, 1, 32, seed=2)
    keys[:10], values[:10] = torch.nan, torch.nan
    for native in kernels.values():
        out = native.grouped_attention(queries, keys, values, 14, 7, None, 1.0)
        assert not out[:2].isfinite().any() and out[2:].isfinite().all()


def test_a_sink_takes_its_share(kernels):  # noqa: F811
    """Of equal scores: n keys and one sink share in n + 1 parts; a sink far above leaves nothing, one far below all."""
    keys, values = torch.zeros(3, 1, 16), torch.ones(3, 1, 16)
    for sink, share in ((0.0, 0.75), (80.0, 0.0), (-80.0, 1.0)):
        for native in kernels.values():
            out = native.grouped_attention(torch.ones(1, 1, 16), keys, values, 2, 0, torch.tensor([sink]), 1.0)
            torch.testing.assert_close(out, torch.full_like(out, share), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("shape", "first", "rotary"), [((5, 64), 0, 64), ((9, 3, 50), 20, 16), ((4, 2, 7), 1, 6)])
def test_rope_by_halves(kernels, shape, first, rotary):  # noqa: F811
    """To the last bit what torch gives; other columns stay."""
    frequencies = plain_frequencies(1e4, rotary)
    x, (cos, sin) = randn(*shape), reference.rope_angles(torch.arange(3, 3 + shape[0]), frequencies)
    expected = reference.apply_rope(x.clone(), first, cos, sin, interleaved=False)
    assert torch.equal(
        same(kernels, lambda native: native.apply_rope(x.clone(), first, cos, sin, interleaved=False)), expected
    )


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "active"), [(8, 2), (128, 8), (33, 33), (1, 1)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mass", [0.0, 0.7])
def test_route_softmax(kernels, experts, active, normalize, mass):  # noqa: F811
    logits = randn(50, experts) * 3
    logits[3] = logits[3, 0]  # ties: the lowest ids
    logits[4] += 1000.0
    rest = active, normalize, 1.5, mass
    topk_ids, weights = reference.route_softmax(logits, *rest)
    for native in kernels.values():
        got, got_weights = native.route_softmax(logits, *rest)
        assert torch.equal(got, topk_ids)
        torch.testing.assert_close(got_weights, weights, rtol=2e-6, atol=1e-9)
        one, one_weights = native.route_softmax(logits[9:10], *rest)
        assert torch.equal(one[0], got[9]) and torch.equal(one_weights[0], got_weights[9])
    assert topk_ids[3].tolist() == list(range(active))


def clamped_case(fmt, hidden=96, width=64, experts=5):
    three = [
        [
            weights_of(fmt, r, c, seed=10 * e + i)[0]
            for i, (r, c) in enumerate(((width, hidden),) * 2 + ((hidden, width),))
        ]
        for e in range(experts)
    ]
    biases = randn(experts, width, seed=7), randn(experts, width, seed=8), randn(experts, hidden, seed=9)
    return three, ClampedSwiGlu(*biases, limit=2.5, alpha=1.702)


@pytest.mark.parametrize("name", ["f32", "bf16", "mxfp4", "int4-g64"])
def test_clamped_swiglu(kernels, name):  # noqa: F811
    """Close to the definition, and the same bits whatever other experts and rows are in the call."""
    three, swiglu = clamped_case(FORMATS[name])
    counts = torch.tensor([1, 0, 20, 3, 16])
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = torch.cat(
        [torch.randperm(24, generator=torch.Generator().manual_seed(i))[:n].sort()[0] for i, n in enumerate(counts)]
    )
    x, topk_weights = randn(24, 96) * (0.02 if name == "mxfp4" else 1.0), torch.rand(len(rows))

    def work(native):
        return native.add_experts(torch.ones(24, 96), x, three, starts, rows, topk_weights, swiglu)

    out = same(kernels, work)
    expected = reference.add_experts(torch.ones(24, 96), x, three, starts, rows, topk_weights, swiglu)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    for native in kernels.values():
        outputs = native.expert_outputs(torch.empty(40, 96), x, three, starts, rows, torch.arange(40), swiglu)
        alone = ClampedSwiGlu(
            swiglu.gate_bias[3:4], swiglu.up_bias[3:4], swiglu.down_bias[3:4], swiglu.limit, swiglu.alpha
        )
        at = slice(int(starts[3]), int(starts[4]))
        one = native.expert_outputs(
            torch.empty(3, 96), x, three[3:4], starts[3:5] - starts[3], rows[at], torch.arange(3), alone
        )
        assert torch.equal(one, outputs[at])


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("name", ["bf16", "mxfp4", "int4-g64", "int8-row"])
def test_every_other_row_of_a_matrix(kernels, name, count):  # noqa: F811
    """Gate and up of some models are the even and the odd rows of one matrix, and are read in place."""
    fmt = FORMATS[name]
    whole, x = weights_of(fmt, 20, 128)[0], randn(count, 128)
    parts = [
        whole.data.view(torch.uint8).flatten(),
        *([whole.scales.view(torch.uint8).flatten()] if fmt.has_scales else []),
    ]
    buffer, at = torch.cat(parts), parts[0].numel()
    dtype = whole.scales.dtype if fmt.has_scales else torch.float32
    for first in (0, 1):
        half = view_weight(buffer, fmt, 10, 128, 0, at, dtype, selection=RowSelection(first, 2, 20))
        for native in kernels.values():
            assert torch.equal(native.linear(x, half), native.linear(x, whole)[:, first::2])


def test_experts_that_lie_as_columns(kernels):  # noqa: F811
    """[in, out]: the same bits as from a copy whose rows lie side by side."""
    three, swiglu = clamped_case(FORMATS["bf16"])
    transposed = [[Weight(w.data.T.contiguous().T, w.columns, w.format) for w in one] for one in three]
    x, rows, starts = randn(6, 96), torch.arange(5), torch.arange(6)
    for native in kernels.values():
        for some in (swiglu, None):
            call = x, three, starts, rows, torch.ones(5), some
            expected = native.add_experts(torch.zeros(6, 96), *call)
            assert torch.equal(native.add_experts(torch.zeros(6, 96), x, transposed, *call[2:]), expected)


def test_mxfp4_by_hand(kernels):  # noqa: F811
    """Every value, with its sign, times a power of two; the lower half of a byte is the first column."""
    codes = torch.arange(32) % 16
    data = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)[None]
    weight = Weight(data, 32, MXFP4, torch.tensor([[129]], dtype=torch.uint8))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2
    for native in kernels.values():
        for count in (1, 32):
            out = native.linear(torch.eye(32)[:count], weight)
            assert out[:, 0].tolist() == [4 * value for value in values[:count]]
