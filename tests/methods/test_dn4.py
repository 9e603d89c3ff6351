"""DN4 against its formula, cell by cell."""

import numpy as np
import pytest
import torch

import reference
from parseshot.errors import UsageError
from parseshot.methods import build_method


def maps(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 3, 3, 3)))


@pytest.mark.parametrize("k", [1, 3, 9])
@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 0, 1, 1, 0, 1]], ids=["one photo a class", "unbalanced"])
@pytest.mark.parametrize("training", [True, False])
def test_scores_are_sums_of_the_largest_cosines(k: int, labels: list[int], training: bool) -> None:
    method = build_method("dn4", 3, 3, {"k": k})
    features, shown = maps(len(labels) + 2).requires_grad_(training), len(labels)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(shown, None)), codes.take(slice(shown)), torch.tensor(labels)).detach()
    phi = features.detach().numpy()
    np.testing.assert_allclose(found, reference.dn4(phi[shown:], phi[:shown], labels, k), atol=1e-12)


def test_where_a_cell_lies_and_how_strong_it_is_do_not_matter() -> None:
    method = build_method("dn4", 3, 3)
    query, support = maps(4), maps(6, seed=1)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    moved = support.flip(2).transpose(2, 3) * torch.rand(6, 1, 3, 3, dtype=torch.float64).add(0.1)
    one, two = (method.logits(method.encode(query), method.encode(each), labels) for each in (support, moved))
    torch.testing.assert_close(one, two)


def test_the_cells_of_a_query_may_come_from_several_photos_of_a_class() -> None:
    """A query put together from two photos has every cell in their class: the score is the number of cells."""
    method = build_method("dn4", 3, 3)
    support = maps(4)
    query = torch.cat((support[:1, :, :1], support[1:2, :, 1:]), 2)
    scores = method.logits(method.encode(query), method.encode(support), torch.tensor([0, 0, 1, 1]))
    assert float(scores[0, 0]) == pytest.approx(9)
    assert float(scores[0, 1]) < 8.9


def test_an_empty_cell_is_like_nothing() -> None:
    method = build_method("dn4", 3, 3)
    features = torch.zeros(2, 3, 3, 3, requires_grad=True)
    codes = method.encode(features)
    scores = method.logits(codes, codes, torch.tensor([0, 1]))
    scores.sum().backward()
    assert torch.equal(scores, torch.zeros(2, 2))
    assert features.grad is not None
    assert features.grad.isfinite().all()


def test_more_neighbours_than_cells_are_refused() -> None:
    with pytest.raises(UsageError, match=r"k = 10: a photo has only 9 cells"):
        build_method("dn4", 3, 3, {"k": 10})
    assert build_method("dn4", 3, 3).finer_grid
