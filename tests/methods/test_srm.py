"""SRM against ridge regressions solved cell by cell, from the classes and from the query itself."""

import math

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import Method, build_method

LABELS = np.array([2, 0, 1, 1, 0, 1, 1])  # unbalanced: 2, 4 and 1 photos


def maps(channels: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(11, channels, 3, 3)).clip(-0.5)


def build(channels: int, **options: float) -> Method:
    method = build_method("srm", channels, 3, options).double()
    with torch.no_grad():
        method.log_lambda.fill_(-0.7)
        method.log_rho.fill_(0.2)
        method.log_own_lambda.fill_(0.3)
        method.log_own_rho.fill_(-0.1)
        method.log_scale.fill_(0.4)
    return method


@pytest.mark.parametrize("channels", [4, 20, 60])  # cells: 9 of the query, 9 to 36 of a class
def test_logits_add_the_distances_to_the_query_and_to_what_it_makes_of_itself(channels: int) -> None:
    photos = maps(channels)
    method = build(channels)
    method.initialise(torch.tensor(photos))
    codes = method.encode(torch.tensor(photos))
    found = method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), torch.tensor(LABELS)).detach()
    photos = photos / np.sqrt((photos**2).sum(1).mean())
    for q in range(4):
        for y in range(3):
            own = [photos[i] for i in range(7) if LABELS[i] == y]
            expected = reference.srm_distance(photos[7 + q], own, -0.7, 0.2, 0.3, -0.1)
            assert float(found[q, y]) == pytest.approx(-math.exp(0.4) * expected, abs=1e-9)


def test_the_restraint_is_the_surprise_of_the_wrong_classes() -> None:
    method, targets = build(4, restraint=0.25, auxiliary=0.5), [0, 1, 2, 0]
    codes = method.encode(torch.tensor(maps(4)))
    query, support, labels = codes.take(slice(7, 11)), codes.take(slice(7)), torch.tensor(LABELS)
    terms = method.loss(query, support, labels, torch.tensor(targets))
    p = torch.softmax(method.logits(query, support, labels), 1).tolist()
    wrong = sum(-math.log(p[q][y]) for q in range(4) for y in range(3) if y != targets[q]) / 4
    assert terms.keys() == {"ce", "orthogonality", "restraint"}
    assert float(terms["restraint"].detach()) == pytest.approx(0.25 * wrong)
    plain = build_method("frn", 4, 3, {"auxiliary": 0.5}).double()
    same = plain.loss(plain.encode(torch.tensor(maps(4))).take(slice(7, 11)), support, labels, torch.tensor(targets))
    assert float(terms["orthogonality"]) == pytest.approx(float(same["orthogonality"]))


def test_a_query_that_makes_itself_exactly_is_scored_as_by_frn() -> None:
    """λ → 0 and ρ = 1 for the query: both distances are FRN's."""
    photos, labels = torch.tensor(maps(20)), torch.tensor(LABELS)
    method, plain = build(20), build_method("frn", 20, 3).double()
    with torch.no_grad():
        method.log_own_lambda.fill_(-40.0)
        method.log_own_rho.fill_(0.0)
        plain.log_lambda.fill_(-0.7)
        plain.log_rho.fill_(0.2)
        plain.log_scale.fill_(0.4 + math.log(2))
    one, other = method.encode(photos), plain.encode(photos)
    torch.testing.assert_close(
        method.logits(one.take(slice(7, 11)), one.take(slice(7)), labels),
        plain.logits(other.take(slice(7, 11)), other.take(slice(7)), labels),
        rtol=1e-5,
        atol=1e-5,
    )
