"""Operations whose exact rule no fixture shows: ties, the choice among equals, windows, sinks, pairs."""

import pytest
import torch

from kernels.reference import (
    apply_rope,
    grouped_attention,
    rope_interleaved,
    route,
    route_softmax,
    top_k_indices,
    top_k_mask,
)


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 1.0, 1.0]])
    assert top_k_indices(scores, 2).tolist() == [[1, 2], [0, 1], [0, 2]]
    assert top_k_indices(scores, 3).tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert top_k_mask(scores, 9).all()


def test_top_k_agrees_with_a_stable_sort_on_many_ties():
    scores = torch.randint(0, 4, (200, 17), generator=torch.Generator().manual_seed(3)).float()
    for k in (1, 5, 16, 17):
        expected = scores.sort(descending=True, stable=True).indices[:, :k].sort().values
        assert torch.equal(top_k_indices(scores, k), expected)


def test_the_bias_selects_experts_and_does_not_weight_them():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    experts, weights = route(logits, bias, 2, 1, 1, normalize=False, scaling=1.0)
    assert experts.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits[:, [0, 3]].sigmoid())


def test_groups_compete_by_their_two_best():
    """Group 1 has the best expert, group 0 the better pair: with one active group, group 0 wins."""
    logits = torch.tensor([[1.0, 1.0, -9.0, 2.0, -9.0, -9.0]])
    experts, _ = route(logits, torch.zeros(6), 2, 2, 1, normalize=True, scaling=1.0)
    assert experts.tolist() == [[0, 1]]
    experts, _ = route(logits, torch.zeros(6), 2, 1, 1, normalize=True, scaling=1.0)
    assert experts.tolist() == [[0, 3]]


def test_a_softmax_router_weighs_by_the_chosen_logits():
    """Normalized, the weights are the softmax of the chosen logits; else their share of all."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])
    experts, weights = route_softmax(logits, 2, normalize=True, scaling=1.0)
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5]]))
    experts, weights = route_softmax(logits, 3, normalize=False, scaling=2.0)
    torch.testing.assert_close(weights, 2 * logits.softmax(-1)[:, [1, 2, 3]])
    _, weights = route_softmax(logits, 3, normalize=False, scaling=1.0, mass=0.5)
    assert (weights > 0).tolist() == [[True, False, True]]


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_grouped_attention_is_a_softmax_over_attended_positions(window, with_sinks):
    """Against every head by itself, in float64; three new rows after four cached positions."""
    gen = torch.Generator().manual_seed(1)
    T, S, H, G, D, V = 3, 7, 6, 2, 8, 5
    queries, keys, values = (torch.randn(shape, generator=gen) for shape in ((T, H, D), (S, G, D), (S, G, V)))
    sinks = torch.randn(H, generator=gen) if with_sinks else None
    out = grouped_attention(queries, keys, values, S - T, window, sinks, 0.3)
    for t in range(T):
        last = S - T + t
        first = max(0, last + 1 - window) if window else 0
        for h in range(H):
            scores = 0.3 * keys[first : last + 1, h // 3].double() @ queries[t, h].double()
            total = scores.exp().sum() + (sinks[h].double().exp() if with_sinks else 0)
            expected = (scores.exp() / total) @ values[first : last + 1, h // 3].double()
            torch.testing.assert_close(out[t, h].double(), expected, atol=1e-5, rtol=1e-5)
    alone = grouped_attention(queries[1:2], keys[: S - 1], values[: S - 1], S - 2, window, sinks, 0.3)
    assert torch.equal(alone[0], out[1])


def test_rotary_pairs_in_halves_are_those_side_by_side_in_another_order():
    x, angles = torch.randn(4, 2, 12), torch.randn(4, 3)
    interleaved = x[..., 2:8].unflatten(-1, (2, 3)).transpose(-1, -2).flatten(-2)  # pair j side by side
    expected = rope_interleaved(interleaved, angles.cos(), angles.sin())
    rotated = apply_rope(x.clone(), 2, angles.cos(), angles.sin(), interleaved=False)
    assert torch.equal(rotated[..., 2:8], expected)
    assert torch.equal(rotated[..., :2], x[..., :2]) and torch.equal(rotated[..., 8:], x[..., 8:])
