"""MetaOptNet's classifiers against the normal equations, liblinear's SVM and the duality gap."""

import math

import numpy as np
import pytest
import torch
from sklearn.svm import LinearSVC

import reference
from parseshot.methods import build_method
from parseshot.methods.metaoptnet import MetaOptNet, onto_simplex, solve_svm

SHOTS = {
    "one photo a class": [0, 1, 2, 3],
    "unbalanced": [2, 0, 1, 1, 0, 1, 1],
    "five of five": [*range(5)] * 5,
}


def maps(count: int, seed: int = 0, channels: int = 6) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, channels, 3, 3))).relu()


def metaoptnet(name: str, **options: object) -> MetaOptNet:
    method = build_method(name, 6, 3, options).double()
    assert isinstance(method, MetaOptNet)
    method.initialise(maps(20, seed=9))
    return method


def liblinear(support: np.ndarray, labels: np.ndarray, cost: float) -> np.ndarray:
    """The weights [N, D] of the same SVM by coordinate descent."""
    solver = LinearSVC(
        multi_class="crammer_singer", fit_intercept=False, C=cost / len(labels), tol=1e-9, max_iter=20_000
    )
    return solver.fit(support, labels).coef_


def dual_of(support: torch.Tensor, labels: list[int], cost: float, iterations: int = 300) -> torch.Tensor:
    target = torch.nn.functional.one_hot(torch.tensor(labels)).to(support.dtype)
    return solve_svm(support @ support.T, target, cost=cost, iterations=iterations)


@pytest.mark.parametrize("labels", SHOTS.values(), ids=SHOTS)
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("lam", [0.001, 0.1])
def test_ridge_scores_are_those_of_the_normal_equations(labels: list[int], pooled: bool, lam: float) -> None:
    method, shown = metaoptnet("metaoptnet-ridge", pooled=pooled, ridge=lam), len(labels)
    features = maps(shown + 4)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(shown, None)), codes.take(slice(shown)), torch.tensor(labels)).detach()
    flat, first = (each.mean((2, 3)) if pooled else each.flatten(1) for each in (features, maps(20, seed=9)))
    unit = flat.numpy() / math.sqrt(float((first**2).sum(1).mean()))
    expected = 3 * unit[shown:] @ reference.ridge_weights(unit[:shown], labels, lam).T
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("labels", SHOTS.values(), ids=SHOTS)
@pytest.mark.parametrize("cost", [1.0, 10.0, 100.0])
def test_svm_scores_are_those_of_liblinear(labels: list[int], cost: float) -> None:
    method, shown = metaoptnet("metaoptnet-svm", cost=cost), len(labels)
    codes = method.encode(maps(shown + 4))
    found = method.logits(codes.take(slice(shown, None)), codes.take(slice(shown)), torch.tensor(labels)).detach()
    unit = codes["x"].numpy()
    expected = 3 * unit[shown:] @ liblinear(unit[:shown], np.array(labels), cost).T
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("shots", "gap"), [(1, 1e-12), (5, 1e-9), (15, 1e-3)])
@pytest.mark.parametrize("cost", [1.0, 100.0])
def test_how_far_the_svm_is_from_its_optimum(shots: int, gap: float, cost: float) -> None:
    """The duality gap bounds it without another solver: maps [64, 5, 5] of a shared mean, five classes."""
    random, labels = np.random.default_rng(0), [label for label in range(5) for _ in range(shots)]
    kinds = random.normal(size=(5, 1600))[labels]
    support = np.maximum(0, 0.5 + 0.5 * kinds + random.normal(size=(5 * shots, 1600)))
    support = support / math.sqrt((support**2).sum(1).mean())
    dual = dual_of(torch.from_numpy(support), labels, cost).numpy()
    above = reference.svm_objective(dual.T @ support, support, labels, cost)
    below = reference.svm_dual_objective(dual, support, labels)
    assert np.abs(dual.sum(1)).max() < 1e-12
    assert (dual <= np.eye(5)[labels] * cost / len(labels) + 1e-12).all()
    assert -1e-12 * above <= above - below <= gap * above


def test_photos_beyond_the_margin_do_not_count() -> None:
    """They have no coefficients; without them, at the same cost a photo, the scores are the same."""
    random = np.random.default_rng(1)
    labels = [0] * 8 + [1] * 8 + [2] * 8
    support = torch.from_numpy(random.normal(size=(24, 4)) + 4 * np.eye(3, 4)[labels])
    dual = dual_of(support, labels, cost=240.0, iterations=1500)
    counts = dual.abs().amax(1) > 1e-9
    assert 3 <= int(counts.sum()) < 20
    kept = counts.nonzero().flatten()
    again = dual_of(support[kept], [labels[row] for row in kept], cost=10.0 * len(kept), iterations=1500)
    torch.testing.assert_close(dual.T @ support, again.T @ support[kept], rtol=1e-6, atol=1e-6)


def test_training_sees_how_the_optimum_moves() -> None:
    """The gradient through the steps is the difference quotient of liblinear's exact solutions."""
    random = np.random.default_rng(2)
    labels = [0, 0, 1, 1, 2, 2]
    support, query = random.normal(size=(6, 12)) + 0.5, random.normal(size=(12,))
    direction, weigh = random.normal(size=support.shape), random.normal(size=3)

    def exact(shift: float) -> float:
        return float(weigh @ (liblinear(support + shift * direction, np.array(labels), 1.0) @ query))

    shown = torch.from_numpy(support).requires_grad_()
    scores = torch.from_numpy(query) @ shown.T @ dual_of(shown, labels, cost=1.0, iterations=1000)
    (scores @ torch.from_numpy(weigh)).backward()
    assert shown.grad is not None
    quotient = (exact(1e-4) - exact(-1e-4)) / 2e-4
    assert abs(quotient) > 0.01
    assert float((shown.grad * torch.from_numpy(direction)).sum()) == pytest.approx(quotient, rel=1e-3)


def test_the_nearest_point_of_a_simplex() -> None:
    points = torch.tensor([[0.2, 0.3, 0.5], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.4, 0.2]], dtype=torch.float64)
    expected = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.6, 0.4]]).double()
    torch.testing.assert_close(onto_simplex(points, 1.0), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["metaoptnet-ridge", "metaoptnet-svm"])
def test_it_starts_alike_on_features_of_any_scale(name: str) -> None:
    features, labels = maps(8), torch.tensor([0, 1, 2, 0, 1, 2, 2, 2])
    found = []
    for factor in (1e-3, 1e3):
        method = build_method(name, 6, 3).double()
        method.initialise(factor * features)
        codes = method.encode(factor * features)
        found.append(method.logits(codes, codes, labels).detach())
    torch.testing.assert_close(*found)
