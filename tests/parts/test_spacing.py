"""Templates whose entries lie two cells apart: the parse on a grid that has cells between those D was made for."""

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from parseshot.parts.kernel import locate_and_express, plainly
from parseshot.parts.parsing import parse

PRESETS = [pytest.param(True, True, id="lasso"), pytest.param(False, False, id="paper")]
SIDES = (1, 3)


def features(images: int, channels: int, size: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.maximum(random.normal(size=(images, channels, size, size)), 0) + 0.01


def dictionary(parts: int, channels: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.uniform(0.2, 1.5, size=(parts, channels, side, side)) for side in SIDES]


def stretched(template: np.ndarray) -> np.ndarray:
    """The same with zeros between its entries: [K, C, s, s] → [K, C, 2s − 1, 2s − 1]."""
    side = 2 * template.shape[-1] - 1
    wide = np.zeros((*template.shape[:2], side, side))
    wide[..., ::2, ::2] = template
    return wide


def tensors(arrays: list[np.ndarray]) -> list[Tensor]:
    return [torch.tensor(one) for one in arrays]


@pytest.mark.parametrize(("exact", "normalised"), PRESETS)
@pytest.mark.parametrize("size", [3, 7])
def test_it_is_algorithm_1_with_zeros_between_the_entries(exact: bool, normalised: bool, size: int) -> None:
    phi, templates, temperatures = features(2, 3, size), dictionary(2, 3), [0.7, 0.4]
    zeta = 0.0 if exact else 0.05
    found = parse(
        torch.tensor(phi),
        tensors(templates),
        torch.tensor(temperatures, dtype=torch.float64),
        lam=0.6,
        exact=exact,
        normalised=normalised,
        zeta=zeta,
        spacing=2,
    )
    wide = [stretched(one) for one in templates]
    for image in range(len(phi)):
        nu, mu, z, spread = reference.parse_image(phi[image], wide, 0.6, temperatures, exact, normalised, zeta)
        for name, expected in (("nu", nu), ("mu", mu), ("z", z), ("entropy", spread)):
            np.testing.assert_allclose(getattr(found, name)[image], expected, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("exact", [True, False])
def test_cells_that_the_coarse_grid_has_score_as_they_did(exact: bool) -> None:
    dense, templates = features(2, 3, 9), tensors(dictionary(2, 3))
    settings = {"lam": 0.6, "exact": exact, "normalised": False}
    fine = parse(torch.tensor(dense), templates, torch.ones(2), spacing=2, **settings)
    coarse = parse(torch.tensor(dense[..., ::2, ::2].copy()), templates, torch.ones(2), **settings)
    torch.testing.assert_close(fine.score[..., ::2, ::2], coarse.score, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    inputs = [torch.tensor(one, requires_grad=True) for one in (features(2, 2, 5), *dictionary(2, 2))]
    temperature = torch.tensor([0.7, 0.4], dtype=torch.float64, requires_grad=True)

    def run(phi: Tensor, first: Tensor, second: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        found = parse(phi, [first, second], temperature, lam=0.1, exact=True, normalised=True, spacing=2)
        return found.nu, found.mu, found.z, found.entropy

    assert torch.autograd.gradcheck(run, [*inputs, temperature], eps=1e-7, atol=1e-5, rtol=1e-5)


def test_the_exported_form_is_the_same() -> None:
    phi, template = torch.tensor(features(2, 3, 7)), torch.tensor(dictionary(2, 3)[1])
    unit, level = torch.full((3, 2, 7, 7), 0.8, dtype=torch.float64), torch.full((3, 2), 0.1, dtype=torch.float64)
    asked = phi.permute(1, 3, 2, 0).contiguous(), template, unit, level, torch.tensor(2.0, dtype=torch.float64)
    found, plain = (one(*asked, positive=True, spacing=2) for one in (locate_and_express, plainly))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
