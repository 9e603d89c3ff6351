"""The fitted linear classifiers against scikit-learn and against loops in float64."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import reference
from parseshot.methods.fitting import (
    Standardise,
    photo_weights,
    ridge_scores,
    same_class_partner,
    softmax_steps,
    with_synthetic,
)
from parseshot.parts.linear import positive_inverse, positive_solve

LABELS = torch.tensor([0, 1, 1, 2, 1, 2])  # unbalanced


def photos(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(length)
    drawn = torch.randn(10, length, generator=random, dtype=torch.float64) + 3
    return drawn[:6], drawn[6:]


def test_many_large_systems_are_solved() -> None:
    """torch.linalg.solve fails on these, with more than one thread: see parts/linear.py."""
    random = torch.Generator().manual_seed(0)
    root, right = torch.randn(4, 245, 245, generator=random), torch.randn(4, 245, 5, generator=random)
    matrix = root @ root.mT / 245 + torch.eye(245)
    expected = np.linalg.solve(matrix.double().numpy(), right.double().numpy())
    found, inverse = positive_solve(matrix, right), positive_inverse(matrix)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(inverse @ right, expected, atol=1e-4)
    together = torch.func.vmap(positive_solve)(matrix, right)
    torch.testing.assert_close(together, found)


def test_a_matrix_that_is_not_positive_definite_gives_no_number() -> None:
    good, bad = torch.eye(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    inverse = positive_inverse(torch.stack((good, bad)))
    assert torch.equal(inverse[0], good)
    assert inverse[1].isnan().all()
    assert positive_solve(bad, torch.ones(2, 1)).isnan().all()


@pytest.mark.parametrize("length", [3, 20])  # solved with D unknowns, and with m
@pytest.mark.parametrize("ridge", [1e-3, 0.5])
def test_ridge_regression_is_the_least_squares_it_claims_to_be(length: int, ridge: float) -> None:
    features, query = photos(length)
    targets, weights = photo_weights(LABELS, 3, features)
    found = ridge_scores(query, features, targets, weights, ridge=ridge)
    expected = reference.ridge_scores(query.numpy(), features.numpy(), LABELS.numpy(), weights.numpy(), ridge)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)
    centred = features - weights @ features
    alpha = float((ridge + 1e-6) * (weights[:, None] * centred.square()).sum() / length)
    theirs = Ridge(alpha=alpha).fit(features.numpy(), targets.numpy(), sample_weight=weights.numpy())
    np.testing.assert_allclose(found.numpy(), theirs.predict(query.numpy()) - 1 / 3, atol=1e-9)


def test_the_scale_of_the_features_does_not_matter_to_the_ridge() -> None:
    features, query = photos(8)
    targets, weights = photo_weights(LABELS, 3, features)
    once = ridge_scores(query, features, targets, weights, ridge=0.3)
    torch.testing.assert_close(ridge_scores(1e3 * query, 1e3 * features, targets, weights, ridge=0.3), once)


def test_equal_photos_of_one_class_can_be_solved() -> None:
    same = torch.ones(2, 4, dtype=torch.float64)
    targets, weights = photo_weights(torch.tensor([0, 0]), 1, same)
    assert torch.equal(ridge_scores(same, same, targets, weights, ridge=0.1), torch.zeros(2, 1, dtype=torch.float64))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradient_steps_are_those_of_a_loop(momentum: float) -> None:
    features, _ = photos(5)
    targets, weights = photo_weights(LABELS, 3, features)
    start = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    options = {"steps": 7, "rate": 1.5, "momentum": momentum}
    found = softmax_steps(features, targets, weights, start, **options)
    arrays = (each.numpy() for each in (features, LABELS, weights, *start))
    for ours, theirs in zip(found, reference.softmax_descent(*arrays, **options), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-10)


def test_offsets_are_all_pairs_written_out() -> None:
    features, drawn = photos(5)
    targets, weights = photo_weights(LABELS, 3, features)
    offsets, shares = drawn - 3, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    start = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    found = softmax_steps(features, targets, weights, start, steps=6, rate=2.0, momentum=0.8, offsets=(offsets, shares))
    pairs = (features[:, None] + offsets).flatten(0, 1)
    of_pairs = (weights[:, None] * shares).flatten()
    labels = LABELS.repeat_interleave(4)
    arrays = (each.numpy() for each in (pairs, labels, of_pairs, *start))
    expected = reference.softmax_descent(*arrays, steps=6, rate=2.0, momentum=0.8)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-10)


def test_many_gradient_steps_reach_the_minimum_that_scikit_learn_finds() -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(40, 2, generator=random, dtype=torch.float64)
    labels = torch.arange(40) % 3  # says nothing, so that the minimum is finite
    targets, weights = photo_weights(labels, 3, features)
    start = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    weight, bias = softmax_steps(features, targets, weights, start, steps=3000, rate=2.0, momentum=0.9)
    theirs = LogisticRegression(C=1e12, tol=1e-12, max_iter=10_000)
    theirs.fit(features.numpy(), labels.numpy(), sample_weight=weights.numpy())
    found = torch.softmax(features @ weight + bias, 1)
    np.testing.assert_allclose(found.numpy(), theirs.predict_proba(features.numpy()), atol=1e-5)


def test_every_class_weighs_the_same_and_its_synthetic_features_have_their_share() -> None:
    features, _ = photos(4)
    synthetic = features[:, None] + torch.arange(3)[:, None]
    shown, targets, weights = with_synthetic(features, LABELS, synthetic, LABELS, 0.75)
    assert shown.shape == (6 + 18, 4)
    torch.testing.assert_close(weights @ targets, torch.full((3,), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(weights[6:] @ targets[6:], torch.full((3,), 0.25, dtype=torch.float64))
    for row in range(18):
        assert torch.equal(targets[6 + row], targets[row // 3])
        assert torch.equal(shown[6 + row], synthetic[row // 3, row % 3])


def test_a_partner_is_another_photo_of_the_class() -> None:
    labels = torch.tensor([3, 1, 3, 1, 1, 0])
    partner = same_class_partner(labels)
    assert partner.tolist() == [2, 3, 0, 4, 1, 5]
    assert torch.equal(labels[partner], labels)


def test_standardised_vectors_have_mean_zero_and_spread_one() -> None:
    vectors = 7 + 5 * torch.randn(50, 6)
    standardise = Standardise(6)
    standardise.initialise(vectors)
    found = standardise(vectors)
    torch.testing.assert_close(found.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    assert float(found.square().mean()) == pytest.approx(1, abs=1e-4)
