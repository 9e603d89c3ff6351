"""FRN against ridge regressions solved cell by cell, with more cells than channels and with fewer."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import build_method
from parseshot.methods.frn import residual
from parseshot.parts.distance import by_class

LABELS = np.array([2, 0, 1, 1, 0, 1, 1])  # unbalanced: 2, 4 and 1 photos


def maps(channels: int, size: int = 3, count: int = 11) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(count, channels, size, size)).clip(-0.5)


@pytest.mark.parametrize("channels", [4, 20, 60])  # cells of the largest class: 36, of the smallest: 9
def test_logits_are_the_errors_of_ridge_regressions(channels: int) -> None:
    photos = maps(channels)
    method = build_method("frn", channels, 3).double()
    method.initialise(torch.tensor(photos))
    with torch.no_grad():
        method.log_lambda.fill_(-0.7)
        method.log_rho.fill_(0.2)
        method.log_scale.fill_(0.4)
    codes = method.encode(torch.tensor(photos))
    found = method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), torch.tensor(LABELS)).detach()
    unit = np.sqrt((photos**2).sum(1).mean())
    for q in range(4):
        for y in range(3):
            own = [photos[i] / unit for i in range(7) if LABELS[i] == y]
            expected = -np.exp(0.4) * reference.frn_distance(photos[7 + q] / unit, own, alpha=-0.7, beta=0.2)
            assert float(found[q, y]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("channels", [4, 60])
def test_the_second_loss_is_the_overlap_of_the_classes(channels: int) -> None:
    photos = maps(channels)
    method = build_method("frn", channels, 3, {"auxiliary": 0.5}).double()
    codes = method.encode(torch.tensor(photos))
    terms = method.loss(
        codes.take(slice(7, 11)), codes.take(slice(7)), torch.tensor(LABELS), torch.tensor([0, 1, 2, 0])
    )
    classes = [
        np.concatenate([photos[i].reshape(channels, -1).T for i in range(7) if LABELS[i] == y]) for y in range(3)
    ]
    assert terms.keys() == {"ce", "orthogonality"}
    assert float(terms["orthogonality"]) == pytest.approx(0.5 * reference.frn_orthogonality(classes), rel=1e-9)


def test_both_forms_of_the_residual_are_one_map() -> None:
    """With zero cells added, the same class is worked out over channels instead of over cells."""
    random = torch.Generator().manual_seed(1)
    cells = torch.randn(2, 6, 9, generator=random, dtype=torch.float64)
    left, right = (torch.randn(4, 5, 9, generator=random, dtype=torch.float64) for _ in range(2))
    strength, rho = torch.tensor([0.3, 2.0], dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)
    few = residual(cells, strength, rho)
    many = residual(torch.cat((cells, torch.zeros_like(cells)), 1), strength, rho)
    assert (few.inner.shape, many.inner.shape) == ((2, 6, 6), (2, 9, 9))
    for one, other in ((few, many), (few.squared(), many.squared()), (few, few.dense()), (many, many.dense())):
        torch.testing.assert_close(one.between(left, right), other.between(left, right))
        torch.testing.assert_close(one.of(left[:2]), other.of(left[:2]))
    each = torch.stack([few.of(left[q].expand(2, 5, 9)) for q in range(4)])  # [Q, N, r, C]
    for one in (few, many):
        torch.testing.assert_close(one.channel_errors(left), each.square().mean(2))
    errors = each.square().sum(-1).mean(-1)
    torch.testing.assert_close(few.squared().between(left, left), errors)


@pytest.mark.parametrize(("queries", "number"), [(1, 2), (1, 8), (40, 2), (40, 8)])
def test_the_cheaper_way_gives_the_same(queries: int, number: int) -> None:
    """With few cells and queries each class has its own products, otherwise one matrix over the channels serves all."""
    random = torch.Generator().manual_seed(2)
    cells = torch.randn(3, number, 9, generator=random, dtype=torch.float64)
    photos = torch.randn(queries, 5, 9, generator=random, dtype=torch.float64)
    found = residual(cells, torch.full((3,), 0.3, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64))
    assert found.cells is not None
    each = torch.stack([found.of(photo.expand(3, 5, 9)) for photo in photos])  # [Q, N, r, C]
    torch.testing.assert_close(found.squared().between(photos, photos), each.square().sum(-1).mean(-1))
    torch.testing.assert_close(found.channel_errors(photos), each.square().mean(2))


def test_a_class_gets_its_own_cells_and_zeros() -> None:
    cells = torch.arange(1.0, 15.0, dtype=torch.float64).view(7, 2, 1)
    pooled, shots = by_class(cells, torch.tensor(LABELS))
    assert shots.tolist() == [2, 4, 1]
    assert pooled.squeeze(-1).tolist() == [
        [3, 4, 9, 10, 0, 0, 0, 0],
        [5, 6, 7, 8, 11, 12, 13, 14],
        [1, 2, 0, 0, 0, 0, 0, 0],
    ]


def test_moving_the_cells_about_changes_nothing() -> None:
    """What the method is known for: it compares without regard to where things are."""
    method = build_method("frn", 30, 3).double()
    photos = torch.tensor(maps(30))
    order = torch.from_numpy(np.random.default_rng(2).permutation(9))
    moved = photos.flatten(2)[:, :, order].view_as(photos)
    plain, other = method.encode(photos), method.encode(moved)
    labels = torch.tensor(LABELS)
    torch.testing.assert_close(
        method.logits(plain.take(slice(7, 11)), plain.take(slice(7)), labels),
        method.logits(other.take(slice(7, 11)), plain.take(slice(7)), labels),
    )


def test_single_precision_is_enough() -> None:
    """Features far from length 1, and one photo a class."""
    photos = 300 * maps(64, size=5)
    found = []
    for dtype in (torch.float32, torch.float64):
        method = build_method("frn", 64, 5).to(dtype)
        features = torch.tensor(photos, dtype=dtype)
        method.initialise(features)
        codes = method.encode(features)
        found.append(method.logits(codes, codes.take(slice(3)), torch.arange(3)).detach().double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
