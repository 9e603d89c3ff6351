"""VFD against loops, its divergence by integration, and that what it adds is a class's variation and nothing else."""

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.vfd import VFD, divergence


def built(**options: float) -> VFD:
    torch.manual_seed(0)
    method = build_method("vfd", 6, 3, options).double()
    assert isinstance(method, VFD)
    with torch.no_grad():
        method.class_part.weight += torch.randn(6, 6) / 10
        method.class_part.bias += torch.randn(6) / 10
    return method.eval()


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 1, 0, 2, 1]])
def test_logits_are_those_of_every_variation_added_to_every_photo(labels: list[int]) -> None:
    method = built(synthetic=4, share=0.7, steps=9, rate=1.3)
    features = torch.randn(len(labels) + 3, 6, 3, 3, dtype=torch.float64)
    method.initialise(features)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(3)), codes.take(slice(3, None)), torch.tensor(labels))
    pooled = features.numpy().mean((2, 3))
    pooled = (pooled - pooled.mean(0)) / np.sqrt(((pooled - pooled.mean(0)) ** 2).mean())
    flat = pooled @ method.class_part.weight.detach().numpy().T + method.class_part.bias.detach().numpy()
    expected = reference.vfd_logits(flat[:3], flat[3:], labels, method.variations.numpy(), 0.7, 9, 1.3)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-9)


def test_divergence_is_the_integral_it_stands_for() -> None:
    mean, log_variance = 0.7, -0.8
    x = np.linspace(-12, 12, 200_001)
    spread = np.exp(log_variance / 2)
    ours = np.exp(-(((x - mean) / spread) ** 2) / 2) / spread
    ratio = -(((x - mean) / spread) ** 2) / 2 - np.log(spread) + x**2 / 2
    integral = np.trapezoid(ours * ratio, x) / np.sqrt(2 * np.pi)
    found = divergence(torch.tensor(mean, dtype=torch.float64), torch.tensor(log_variance, dtype=torch.float64))
    assert float(found) == pytest.approx(integral, abs=1e-8)


def terms_of(method: VFD, **replaced: Tensor) -> dict[str, Tensor]:
    """The terms of training with a companion whose encoder is replaced by given means and variances."""
    torch.manual_seed(1)
    companion = method.companion(BasePhotos(torch.tensor([0, 1, 0, 1]), None)).double()
    if replaced:
        given = torch.cat((replaced["mean"], replaced["log_variance"]), 1)
        companion.encoder = torch.nn.Sequential()
        companion.encoder.forward = lambda _: given  # type: ignore[method-assign]
    codes = method.train().encode(torch.randn(4, 6, 3, 3, dtype=torch.float64))
    return companion(codes, torch.arange(4))


def test_without_any_variation_the_augmented_features_are_the_plain_ones() -> None:
    nothing = {"mean": torch.zeros(4, 6, dtype=torch.float64)}
    none = terms_of(built(), **nothing, log_variance=torch.full((4, 6), -80.0, dtype=torch.float64))
    torch.testing.assert_close(none["augmented_ce"], none["base_ce"])
    unit = terms_of(built(), **nothing, log_variance=torch.zeros(4, 6, dtype=torch.float64))
    assert float(unit["kl"]) == pytest.approx(0, abs=1e-6)  # the widest variance is not far enough to be 0
    assert abs(float((unit["augmented_ce"] - unit["base_ce"]).detach())) > 1e-3


def test_an_encoding_keeps_the_map_only_while_training() -> None:
    method, features = built(), torch.randn(2, 6, 3, 3, dtype=torch.float64)
    assert set(method.eval().encode(features)) == {"f"}
    assert set(method.train().encode(features)) == {"f", "cells"}
    assert not [name for name in method.state_dict() if "coder" in name]  # the auto-encoder is the companion's


def test_variations_smooth_the_decision_towards_the_nearest_mean() -> None:
    """With strong isotropic variations the fitted direction is that between the class means."""
    method = built(synthetic=2000, share=1.0, steps=400)
    with torch.no_grad():
        method.class_part.weight.copy_(torch.eye(6))
        method.class_part.bias.zero_()
        method.variations.mul_(3)
    support = torch.randn(2, 6, 1, 1, dtype=torch.float64).expand(-1, -1, 3, 3)
    codes = method.encode(support)
    basis = method.encode(torch.eye(6, dtype=torch.float64)[:, :, None, None].expand(-1, -1, 3, 3))
    origin = method.encode(torch.zeros(1, 6, 3, 3, dtype=torch.float64))
    slopes = method.logits(basis, codes, torch.arange(2)) - method.logits(origin, codes, torch.arange(2))
    direction = slopes[:, 0] - slopes[:, 1]
    between = codes["f"][0] - codes["f"][1]
    assert float(torch.cosine_similarity(direction, between, 0).detach()) > 0.97
