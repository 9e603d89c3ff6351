"""SAML against its formula, one pair of cells at a time."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import build_method
from parseshot.methods.saml import SAML

CHANNELS, SIZE = 6, 3
LABELS = torch.tensor([1, 0, 1, 1])


def build(size: int = SIZE) -> SAML:
    torch.manual_seed(1)
    method = build_method("saml", CHANNELS, size, {"hidden": 7}).double()
    assert isinstance(method, SAML)
    with torch.no_grad():  # exactly, not as float32 has them
        method.log_temperature.fill_(np.log(0.3))
        method.log_scale.fill_(np.log(4.0))
    return method


def maps(count: int, seed: int, size: int = SIZE) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, size, size, generator=random, dtype=torch.float64).abs()


def test_scores_are_a_perceptron_of_the_selected_relations() -> None:
    method, features = build(), maps(6, seed=2)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(4, 6)), codes.take(slice(4)), LABELS).detach()
    cells = features.flatten(2).transpose(1, 2).numpy()
    weights = [(block[0].weight.detach().numpy(), block[0].bias.detach().numpy()) for block in method.perceptron[:3]]
    last = method.perceptron[3].weight.detach().numpy()
    for q in range(2):
        for y in range(2):
            matrix = reference.saml_selected(cells[4 + q], cells[:4][LABELS.numpy() == y].mean(0), 0.3)
            x = matrix.ravel()
            for weight, bias in weights:
                x = np.maximum(weight @ x + bias, 0.0)
            assert float(found[q, y]) == pytest.approx(4.0 * matrix.mean() + float((last @ x)[0]), abs=1e-10)


def test_attention_prefers_the_pairs_that_belong_together() -> None:
    """An image against itself: each cell's own counterpart gets more than its share, and all weights have mean 1."""
    method = build()
    cells = method.encode(maps(1, seed=3))["f"]
    unit = torch.nn.functional.normalize(cells - cells.mean(-1, keepdim=True), dim=-1)[0]
    weights = (method.selected(cells, cells)[0, 0] / (unit @ unit.T)).detach()
    assert float(weights.mean()) == pytest.approx(1.0)
    assert bool((weights.diagonal() >= weights.amax(1)).all())
    assert float(weights.diagonal().min()) > 1.0


def test_a_fine_map_is_pooled_to_the_authors_grid() -> None:
    method, features = build(size=20), maps(3, seed=4, size=20)
    codes = method.encode(features)
    assert codes["f"].shape == (3, 100, CHANNELS)
    torch.testing.assert_close(codes["f"][0, 0], features[0, :, :2, :2].mean((1, 2)))
    assert method.logits(codes, codes, torch.arange(3)).shape == (3, 3)


def test_a_cell_with_equal_channels_relates_to_nothing() -> None:
    """Less its mean it is rounding noise, which must not be blown up to unit length."""
    features = maps(2, seed=5)
    features[0, :, 1, 1] = 0.05
    cells = build().encode(features)["f"]
    assert float(build().selected(cells[:1], cells[1:])[0, 0, 4].abs().max().detach()) < 1e-3


def test_an_empty_map_has_finite_scores_and_gradients() -> None:
    features = torch.zeros(2, CHANNELS, SIZE, SIZE, requires_grad=True)
    method = build_method("saml", CHANNELS, SIZE)
    codes = method.encode(features)
    logits = method.logits(codes, codes, torch.tensor([0, 1]))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert features.grad is not None
    assert features.grad.isfinite().all()
