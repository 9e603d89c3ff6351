"""Cells of a part compared one by one, and parts with channels of their own."""

import numpy as np
import pytest
import torch

import reference
from parseshot.errors import UsageError
from parseshot.methods import build_method
from parseshot.methods.frn import residual
from parseshot.parts.distance import Regression, cell_distances, compare, show
from parseshot.parts.parsing import Cells, likeliest_cells, parse, parse_apart

LABELS = torch.tensor([1, 0, 1, 2, 1])  # unbalanced: 1, 3 and 1 photos


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cells(images: int, seed: int = 0, parts: int = 2, count: int = 4) -> Cells:
    weights = drawn(images, parts, count, seed=seed + 100)
    return Cells(drawn(images, parts, count, 6, seed=seed) - 0.3, weights / weights.sum(2, keepdim=True))


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("strength", [1e-3, 0.1, 10.0])
def test_it_is_what_a_ridge_regression_of_each_cell_leaves_over(strength: float) -> None:
    query, support = cells(2), cells(5, 1)
    found = cell_distances(query, support, LABELS, number(strength), number(0.8))
    for q in range(2):
        for y in range(3):
            photos = [(support.features[i].numpy(), support.weights[i].numpy()) for i in range(5) if LABELS[i] == y]
            asked = query.features[q].numpy(), query.weights[q].numpy()
            np.testing.assert_allclose(found[q, y], reference.cell_distance(asked, photos, strength, 0.8), atol=1e-9)


def test_gradcheck() -> None:
    inputs = [each.requires_grad_() for each in (*cells(2), *cells(5, 1), number(0.1), number(0.8))]

    def run(x, w, shown, shown_w, strength, rho):
        return cell_distances(Cells(x, w), Cells(shown, shown_w), LABELS, strength, rho)

    assert torch.autograd.gradcheck(run, inputs)


def test_a_part_that_is_in_one_cell_for_sure_has_finite_gradients() -> None:
    """ν of a sharp part is 0 elsewhere in float32, and a root has an infinite slope there."""
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64).expand(5, 2, 4).clone().requires_grad_()
    query, support = cells(2), Cells(cells(5, 1).features, weights)
    cell_distances(query, support, LABELS, number(0.1), number(0.8)).sum().backward()
    assert weights.grad is not None
    assert bool(weights.grad.isfinite().all())


def test_copies_of_photos_change_nothing() -> None:
    query, support = cells(2), cells(5, 1)
    again = [0, 2, 4]
    twice = Cells(*(torch.cat((each, each[again])) for each in support))
    once = cell_distances(query, support, LABELS, number(0.1), number(0.9))
    both = cell_distances(query, twice, torch.cat((LABELS, LABELS[again])), number(0.1), number(0.9))
    torch.testing.assert_close(once, both)


def test_one_part_that_is_everywhere_is_frn() -> None:
    """The limit: all cells, alike. What parts add to FRN is which cells are compared with which."""
    size, labels = 9, torch.tensor([0, 0, 1, 1])
    query, support = drawn(3, size, 5), drawn(4, size, 5, seed=1)
    alike = [Cells(x[:, None], torch.full((len(x), 1, size), 1 / size, dtype=torch.float64)) for x in (query, support)]
    found = cell_distances(*alike, labels, number(0.03), number(0.7))[:, :, 0]
    lam = torch.full((2,), 0.03 * 2 * size, dtype=torch.float64)
    frn = residual(support.view(2, 2 * size, 5), lam, number(0.7)).squared().between(query, query)
    torch.testing.assert_close(found, frn)


def test_they_are_a_term_of_the_distance_weighted_as_the_part_is() -> None:
    query = drawn(2, 3, 2, 7), drawn(2, 3, 2, seed=1), drawn(2, 3, 2, 2, seed=2)
    support = drawn(5, 3, 2, 7, seed=3), drawn(5, 3, 2, seed=4), drawn(5, 3, 2, 2, seed=5)
    slopes, how = torch.tensor([-1.0, -0.5], dtype=torch.float64), Regression(number(0.1), number(0.9), number(0.3))
    settings = {"slopes": slopes, "gamma": number(0.1), "normalised": True}
    span = Regression(number(0.2), number(1.0))
    without = compare(query, show(support, LABELS, span=span), **settings)
    found = compare(
        query, show(support, LABELS, span=span, cells=(cells(5, 1), how)), **settings, cells=(cells(2), how)
    )
    plain = cell_distances(cells(2), cells(5, 1), LABELS, number(0.1), number(0.9))
    for q, y in np.ndindex(2, 3):
        class_h = support[1][y == LABELS].mean((0, 1))  # [K]
        alpha = torch.softmax(slopes[0] * query[1][q] + slopes[1] * class_h, -1).mean(0)  # [K]
        torch.testing.assert_close(found.cells[q, y], 0.3 * alpha * plain[q, y])
    torch.testing.assert_close(found.total - without.total, found.cells.sum(2))
    torch.testing.assert_close(found.by_part.sum(2) + found.geometry.sum((2, 3)), found.total)


def test_the_likeliest_cells_come_first_and_weigh_one_together() -> None:
    phi, nu = drawn(2, 6, 3, 3), drawn(2, 2, 3, 3, seed=1)
    found = likeliest_cells(phi, nu, 4, apart=False)
    assert found.features.shape == (2, 2, 4, 6)
    torch.testing.assert_close(found.weights.sum(2), torch.ones(2, 2, dtype=torch.float64))
    unit = phi / phi.square().mean((1, 2, 3), keepdim=True).sqrt() / 6**0.5
    for image, part in np.ndindex(2, 2):
        order = nu[image, part].flatten().argsort(descending=True)[:4]
        torch.testing.assert_close(found.features[image, part], unit[image].flatten(1).T[order])
        chosen = nu[image, part].flatten()[order]
        torch.testing.assert_close(found.weights[image, part], chosen / chosen.sum())
    assert likeliest_cells(phi, nu, 99, apart=False).features.shape == (2, 2, 9, 6)  # no more than there are
    own = likeliest_cells(phi, nu, 4, apart=True)
    share = likeliest_cells(phi[:, 3:], nu[:, 1:], 4, apart=False)
    torch.testing.assert_close(own.features[:, 1], share.features[:, 0])


def test_a_part_with_channels_of_its_own_hears_nothing_else() -> None:
    phi, settings = drawn(2, 6, 5, 5), {"lam": 0.05, "exact": True, "normalised": True}
    templates, temperature = [drawn(2, 3, side, side, seed=side) for side in (1, 3)], drawn(2, seed=9)
    found = parse_apart(phi, templates, temperature, **settings)
    alone = parse(phi[:, 3:], [template[1:] for template in templates], temperature, **settings)
    for name in found._fields:
        torch.testing.assert_close(getattr(found, name)[:, :, 1:], getattr(alone, name))
    other = phi.clone()
    other[:, :3] = drawn(2, 3, 5, 5, seed=7)
    changed = parse_apart(other, templates, temperature, **settings)
    assert torch.equal(changed.z[:, :, 1], found.z[:, :, 1])
    assert not torch.allclose(changed.z[:, :, 0], found.z[:, :, 0])


def test_the_printed_formulas_have_neither() -> None:
    for option in ({"part_channels": 4}, {"cells": 4}):
        with pytest.raises(UsageError, match=f"{next(iter(option))}: needs normalised"):
            build_method("dop-paper", 8, 5, option)
