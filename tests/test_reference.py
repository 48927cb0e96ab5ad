"""Operations whose exact rule no fixture shows: ties, and the choice among equals."""

import torch

from kernels.reference import route_sigmoid, top_k_indices, top_k_mask


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


def test_the_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    experts, weights = route_sigmoid(logits.sigmoid(), bias, 2, 1, 1, normalise=False, scaling=1.0)
    assert experts.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits[:, [0, 3]].sigmoid())


def test_groups_compete_by_their_two_best():
    """Group 1 has the best expert, group 0 the better pair: with one active group, group 0 wins."""
    logits = torch.tensor([[1.0, 1.0, -9.0, 2.0, -9.0, -9.0]])
    experts, _ = route_sigmoid(logits.sigmoid(), torch.zeros(6), 2, 2, 1, normalise=True, scaling=1.0)
    assert experts.tolist() == [[0, 1]]
    experts, _ = route_sigmoid(logits.sigmoid(), torch.zeros(6), 2, 1, 1, normalise=True, scaling=1.0)
    assert experts.tolist() == [[0, 3]]
