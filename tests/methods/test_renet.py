"""RENet against its formulas, one cell at a time."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import reference
from parseshot.methods import BasePhotos, Encoding, build_method
from parseshot.methods.renet import RENet

CHANNELS, SIZE = 6, 3


def build(**options: object) -> RENet:
    torch.manual_seed(2)
    method = build_method("renet", CHANNELS, SIZE, {"width": 5, "hidden": 2} | options).double().eval()
    assert isinstance(method, RENet)
    for layer in method.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for each in (layer.weight, layer.running_var):
                nn.init.uniform_(each, 0.5, 1.5)
            for each in (layer.bias, layer.running_mean):
                nn.init.uniform_(each, -0.3, 0.3)
    for bias in method.biases:
        nn.init.uniform_(bias, -0.2, 0.2)
    method.initialise(maps(10, seed=9))
    return method


def maps(count: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, SIZE, SIZE, generator=random, dtype=torch.float64).relu() + 0.05


def as_map(cells: torch.Tensor) -> np.ndarray:
    return cells.detach().transpose(-1, -2).unflatten(-1, (SIZE, SIZE)).numpy()


def norm(layer: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    values = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    weight, bias, mean, var = (each.detach().numpy() for each in values)
    return lambda x: (x - mean) / np.sqrt(var + layer.eps) * weight + bias


def weights(layer: nn.Module) -> np.ndarray:
    return layer.weight.detach().numpy()


def test_the_encoding_is_the_map_and_its_self_correlation() -> None:
    method, features = build(), maps(2, seed=1)
    codes = method.encode(features)
    scaled = features.numpy() / np.sqrt((maps(10, seed=9).numpy() ** 2).mean())
    for image in range(2):
        extra = reference.renet_self_correlation(
            scaled[image],
            (weights(method.reduce[0])[:, :, 0, 0], norm(method.reduce[1])),
            (weights(method.summary[0]), norm(method.summary[1])),
            (weights(method.summary[3]), norm(method.summary[4])),
            (weights(method.expand[0])[:, :, 0, 0], norm(method.expand[1])),
        )
        expected = np.maximum(scaled[image] + extra, 0.0)
        np.testing.assert_allclose(as_map(codes["f"])[image], expected, atol=1e-10)
        centred = (expected - expected.mean(0)).reshape(CHANNELS, -1)
        keys = [np.maximum(norm(method.key[1])(weights(method.key[0])[:, :, 0, 0] @ cell), 0.0) for cell in centred.T]
        np.testing.assert_allclose(codes["key"][image].detach(), keys, atol=1e-10)


@pytest.mark.parametrize("each_photo", [False, True])
def test_scores_are_cosines_of_attended_means(each_photo: bool) -> None:
    method, labels = build(each_photo=each_photo), torch.tensor([1, 0, 1, 1])
    codes = method.encode(maps(6, seed=3))
    codes = Encoding(f=codes["f"], key=codes["key"] + 0.1)  # no key is all 0
    found = method.logits(codes.take(slice(4, 6)), codes.take(slice(4)), labels).detach()
    kernels, biases = ([each.detach().numpy() for each in group] for group in (method.kernels, method.biases))
    cells, keys = as_map(codes["f"]), as_map(codes["key"])
    for q in range(2):
        for y in range(2):
            members = np.flatnonzero(labels.numpy() == y)
            shown = [(cells[i], keys[i]) for i in members]
            if not each_photo:
                shown = [(cells[members].mean(0), keys[members].mean(0))]
            pairs = [reference.renet_pair(cells[4 + q], keys[4 + q], *one, kernels, biases, 2.0) for one in shown]
            mine, other = (sum(pair[side] for pair in pairs) for side in (0, 1))
            expected = mine @ other / (np.linalg.norm(mine) * np.linalg.norm(other)) / 0.2
            assert float(found[q, y]) == pytest.approx(expected, abs=1e-9)


def test_query_and_class_may_change_places() -> None:
    method = build()
    first, second = method.encode(maps(3, seed=4)), method.encode(maps(3, seed=5))
    there, back = method.logits(first, second, torch.arange(3)), method.logits(second, first, torch.arange(3))
    torch.testing.assert_close(there, back.T)


def test_with_one_photo_a_class_both_ways_to_match_agree() -> None:
    codes = build().encode(maps(5, seed=6))
    mean, each = (build(each_photo=choice).logits(codes, codes, torch.arange(5)) for choice in (False, True))
    torch.testing.assert_close(mean, each)


def test_the_companion_classifies_base_classes_by_the_mean_cell() -> None:
    method = build(episode_weight=4.0)
    codes, base = method.encode(maps(3, seed=7)), BasePhotos(torch.tensor([1, -1, 0, 2]), None)
    companion = method.companion(base).double()
    terms = companion(codes, torch.tensor([3, 0, 2]))
    scores = codes["f"].mean(1) @ companion.linear.weight.T + companion.linear.bias
    expected = -torch.log_softmax(scores, 1)[torch.arange(3), torch.tensor([2, 1, 0])].mean() / 4
    torch.testing.assert_close(terms["base_ce"], expected)


def test_an_empty_map_has_finite_scores_and_gradients() -> None:
    method, features = build_method("renet", CHANNELS, SIZE).eval(), torch.zeros(2, CHANNELS, SIZE, SIZE)
    features.requires_grad_()
    codes = method.encode(features)
    logits = method.logits(codes, codes, torch.tensor([0, 1]))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert features.grad is not None
    assert features.grad.isfinite().all()
