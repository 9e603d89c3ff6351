"""A class as what its photos span, part by part, against least squares in a loop."""

import math

import numpy as np
import pytest
import torch

import reference
from parseshot.errors import UsageError
from parseshot.methods import build_method
from parseshot.methods.base import Encoding
from parseshot.parts.distance import Regression, compare, dictionary, show, span_distances

LABELS = torch.tensor([1, 0, 1, 2, 1])  # unbalanced: 1, 3 and 1 photos


def expressions(count: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 4, 7, generator=random, dtype=torch.float64)  # [·, S, K, C]


def spans(
    query: torch.Tensor, support: torch.Tensor, labels: torch.Tensor, strength: float = 0.3, rho: float = 0.8
) -> torch.Tensor:
    return span_distances(
        query, support, labels, torch.tensor(strength, dtype=torch.float64), torch.tensor(rho, dtype=torch.float64)
    )


@pytest.mark.parametrize("strength", [1e-3, 0.3, 10.0])
@pytest.mark.parametrize("rho", [0.05, 0.8, 1.0, 2.0])
def test_it_is_what_a_ridge_regression_leaves_over(strength: float, rho: float) -> None:
    query, support = expressions(2), expressions(5, 1)
    found = spans(query, support, LABELS, strength, rho)
    for q in range(2):
        for y in range(3):
            photos = [support[i].numpy() for i in range(5) if LABELS[i] == y]
            expected = reference.span_distance(query[q].numpy(), photos, strength, rho)
            np.testing.assert_allclose(found[q, y], expected, atol=1e-9)


def test_gradcheck() -> None:
    inputs = [expressions(2).requires_grad_(), expressions(5, 1).requires_grad_()]
    weights = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.3, 0.8)]

    def run(query, support, strength, rho):
        return span_distances(query, support, LABELS, strength, rho)

    assert torch.autograd.gradcheck(run, [*inputs, *weights])


def test_float32_keeps_five_digits_where_the_regression_is_weak() -> None:
    """More vectors than channels, λ near 0: a class's own matrix would have entries of 1/λ."""
    query, support = expressions(2), expressions(12, 1)  # 18 vectors of 7 channels a class
    labels, strength = torch.arange(12) % 2, 1e-5
    exact = spans(query, support, labels, strength)
    rough = span_distances(query.float(), support.float(), labels, torch.tensor(strength), torch.tensor(0.8))
    torch.testing.assert_close(rough.double(), exact, atol=1e-5, rtol=0)


def test_what_smaller_classes_are_filled_up_with_is_nothing() -> None:
    lam = torch.tensor([0.3, 0.3], dtype=torch.float64)
    few, many = expressions(1)[0, 0, :2], expressions(1, 1)[0, 0]  # [2, C], [4, C]
    filled = torch.stack((torch.cat((few, torch.zeros_like(few))), many))[None]  # [1, N, M, C]
    together = dictionary(filled, lam, torch.tensor(0.8)).vectors
    assert (together[0, 0, 2:] == 0).all()
    torch.testing.assert_close(
        together[0, 0, :2], dictionary(few[None, None], lam[:1], torch.tensor(0.8)).vectors[0, 0]
    )


def test_rho_ends_at_two() -> None:
    method = build_method("dop-span", 6, 5)
    codes = method.encode(torch.rand(4, 6, 5, 5))
    query, support, labels = codes.take(slice(3, 4)), codes.take(slice(3)), torch.tensor([0, 1, 1])
    with torch.no_grad():
        found = []
        for rho in (1.9, 2.0, 20.0):
            method.log_rho.fill_(math.log(rho))
            found.append(method.logits(query, support, labels))
    torch.testing.assert_close(found[2], found[1])
    assert (found[1] != found[0]).all()


def test_copies_of_photos_change_nothing() -> None:
    query, support = expressions(2), expressions(5, 1)
    twice, labels = torch.cat((support, support[[0, 2, 4]])), torch.cat((LABELS, LABELS[[0, 2, 4]]))
    torch.testing.assert_close(spans(query, twice, labels), spans(query, support, LABELS))


def test_a_part_between_two_photos_is_nearer_than_to_their_mean() -> None:
    """What the mean of a class forgets: how its photos differ."""
    one, two = expressions(1), expressions(1, 1)
    support, labels = torch.cat((one, two)), torch.tensor([0, 0])
    like_one = 0.9 * one + 0.1 * two
    exact = span_distances(
        like_one, support, labels, torch.tensor(1e-9, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    )
    assert float(exact.max()) < 1e-6
    assert float((like_one - (one + two) / 2).square().sum(-1).min()) > 0.01


def test_the_distance_is_a_sum_over_parts_query_scales_and_geometry() -> None:
    random = torch.Generator().manual_seed(3)
    queries, photos = (
        (
            expressions(count, count),
            torch.rand(count, 3, 4, generator=random, dtype=torch.float64),
            torch.rand(count, 3, 4, 2, generator=random, dtype=torch.float64),
        )
        for count in (2, 5)
    )
    strength, rho, gamma = (torch.tensor(value, dtype=torch.float64) for value in (0.3, 0.8, 0.2))
    slopes = torch.tensor([-1.0, -0.5], dtype=torch.float64)
    spanned = show(photos, LABELS, span=Regression(strength, rho))
    found = compare(queries, spanned, slopes=slopes, gamma=gamma, normalised=True)
    assert found.expression.shape == (2, 3, 3, 1, 4)
    plain = span_distances(queries[0], photos[0], LABELS, strength, rho)
    for q, y, scale in np.ndindex(2, 3, 3):
        own = photos[1][y == LABELS].mean((0, 1))  # [K] the class's entropies, over photos and scales
        alpha = torch.softmax(slopes[0] * queries[1][q, scale] + slopes[1] * own, 0)
        torch.testing.assert_close(found.expression[q, y, scale, 0], alpha * plain[q, y, scale] / 3)
    without = compare(queries, show(photos, LABELS), slopes=slopes, gamma=gamma, normalised=True)
    torch.testing.assert_close(found.geometry, without.geometry)
    torch.testing.assert_close(found.total, found.expression.sum((2, 3, 4)) + found.geometry.sum((2, 3)))


def test_the_preset_spans_and_learns_how_strongly() -> None:
    torch.manual_seed(0)
    method = build_method("dop-span", 6, 5)
    codes = method.encode(torch.rand(5, 6, 5, 5))
    assert isinstance(codes, Encoding)
    labels = torch.tensor([0, 1, 1])
    loss = method.loss(codes.take(slice(3, 5)), codes.take(slice(3)), labels, torch.tensor([0, 1]))
    loss["ce"].backward()
    assert method.log_ridge.grad.abs() > 0
    assert method.log_rho.grad.abs() > 0


def test_it_is_not_for_the_printed_formulas() -> None:
    with pytest.raises(UsageError, match="span: needs normalised features"):
        build_method("dop-paper", 6, 5, {"span": True})
