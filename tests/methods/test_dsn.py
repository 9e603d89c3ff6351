"""DSN against the singular value decomposition of each class."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import build_method
from parseshot.methods.dsn import DSN

SHOTS = {"one photo a class": [0, 1, 2], "unbalanced": [2, 0, 1, 1, 0, 1, 1], "twenty classes": [*range(20)] * 3}


def maps(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 5, 3, 3))).relu()


def dsn(**options: object) -> DSN:
    method = build_method("dsn", 5, 3, options).double()
    assert isinstance(method, DSN)
    return method


@pytest.mark.parametrize("labels", SHOTS.values(), ids=SHOTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_are_distances_to_planes(labels: list[int], dtype: torch.dtype) -> None:
    method, shown = dsn().to(dtype), len(labels)
    with torch.no_grad():
        method.log_scale.fill_(0.7)
    features = maps(shown + 4).to(dtype)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(shown, None)), codes.take(slice(shown)), torch.tensor(labels)).detach()
    flat = features.double().flatten(1).numpy()
    expected = np.exp(0.7) * reference.dsn(flat[shown:], flat[:shown], np.array(labels))
    np.testing.assert_allclose(found, expected, atol=1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("labels", SHOTS.values(), ids=SHOTS)
def test_training_adds_the_overlap_of_the_planes(labels: list[int]) -> None:
    method, features = dsn(apart=0.5), maps(len(labels))
    codes, targets = method.encode(features), torch.tensor(labels)
    found = float(method.loss(codes, codes, targets, targets)["apart"])
    assert found == pytest.approx(0.5 * reference.dsn_overlap(features.flatten(1).numpy(), np.array(labels)), abs=1e-9)
    assert (found > 0) == (len(labels) > 3)


def test_a_query_in_the_plane_of_a_class_has_distance_zero() -> None:
    method, support = dsn(), maps(6)
    query = (0.2 * support[0] - 1.5 * support[1] + 2.3 * support[2])[None]  # coefficients of sum 1
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    scores = method.logits(method.encode(query), method.encode(support), labels)
    assert float(scores[0, 0].detach()) == pytest.approx(0, abs=1e-12)
    assert float(scores[0, 1].detach()) < -0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_copies_of_one_photo_are_one_photo(dtype: torch.dtype) -> None:
    """Also where their mean is not exactly the photo: no direction is made of rounding errors."""
    method, support, query = dsn().to(dtype), maps(2).to(dtype), maps(3, seed=1).to(dtype)
    one = method.logits(method.encode(query), method.encode(support), torch.tensor([0, 1]))
    codes = method.encode(support.repeat_interleave(torch.tensor([3, 7]), 0))
    many = method.logits(method.encode(query), codes, torch.tensor([0] * 3 + [1] * 7))
    torch.testing.assert_close(one, many)


def test_gradients_are_right_and_stay_finite_with_copies() -> None:
    method, query = dsn(), maps(2, seed=1).flatten(1)
    labels, targets = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1])

    def total(support: torch.Tensor) -> torch.Tensor:
        codes = method.encode(torch.cat((query, support)).view(-1, 5, 3, 3))
        return sum(method.loss(codes.take(slice(2)), codes.take(slice(2, None)), labels, targets).values())

    distinct = maps(5).flatten(1).requires_grad_()
    assert torch.autograd.gradcheck(total, (distinct,))
    copies = maps(1).flatten(1).repeat(5, 1).requires_grad_()
    total(copies).backward()
    assert copies.grad is not None
    assert copies.grad.isfinite().all()
    assert copies.grad.abs().max() < 10


def test_the_first_distances_have_the_configured_mean() -> None:
    for factor in (1e-3, 50.0):
        method, features = dsn(logit_scale=7.0), factor * maps(8)
        method.initialise(features)
        codes = method.encode(features)
        logits = method.logits(codes, codes, torch.arange(8)).detach()
        assert float(-logits.sum() / (8 * 7)) == pytest.approx(7.0)
