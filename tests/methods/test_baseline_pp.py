"""Baseline++ against gradient descent written out, and against PyTorch's own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import reference
from parseshot.methods import BasePhotos, build_method

SHOTS = {"one photo a class": [0, 1, 2], "unbalanced": [0, 1, 1, 2, 2, 2, 2], "five": [0] * 5 + [1] * 5}


def maps(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 3, 2, 2))).relu()


@pytest.mark.parametrize("labels", SHOTS.values(), ids=SHOTS)
@pytest.mark.parametrize("pooled", [True, False])
def test_the_head_is_that_of_gradient_descent(labels: list[int], pooled: bool) -> None:
    method = build_method("baseline++", 3, 2, {"pooled": pooled, "steps": 30, "lr": 0.4}).double()
    features = maps(len(labels) + 4)
    codes = method.encode(features)
    shown = len(labels)
    found = method.logits(codes.take(slice(shown, None)), codes.take(slice(shown)), torch.tensor(labels))
    flat = features.mean((2, 3)).numpy() if pooled else features.flatten(1).numpy()
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    expected = reference.baseline_pp(unit[shown:], unit[:shown], np.array(labels), 2.0, 30, 0.4)
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_the_defaults_are_a_hundred_steps_of_a_weight_normalised_layer_by_autograd() -> None:
    method = build_method("baseline++", 3, 2).double()
    codes = method.encode(maps(11))
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    support, query = codes["f"][:7], codes["f"][7:]
    layer = torch.nn.Linear(12, 3, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.stack([support[labels == label].mean(0) for label in range(3)]))
    torch.nn.utils.parametrizations.weight_norm(layer, dim=0)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(100):
        loss = F.cross_entropy(2 * layer(support), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    found = method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), labels)
    torch.testing.assert_close(found, 2 * layer(query).detach())


def test_fitting_raises_the_margin_of_the_support_photos() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2])

    def support_loss(steps: int) -> float:
        method = build_method("baseline++", 3, 2, {"steps": steps}).double()
        codes = method.encode(maps(7))
        return float(F.cross_entropy(method.logits(codes, codes, labels), labels))

    losses = [support_loss(steps) for steps in (0, 10, 100, 1000)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("classes", "scale"), [(3, 2.0), (201, 10.0)])
def test_the_companion_is_a_cosine_classifier_with_a_length_for_each_class(classes: int, scale: float) -> None:
    method = build_method("baseline++", 3, 2).double()
    companion = method.companion(BasePhotos(torch.arange(-1, classes), None)).double()
    codes, images = method.encode(7 * maps(2)), torch.tensor([3, 1])
    (term,) = companion(codes, images).values()
    weight = companion.linear.parametrizations.weight
    scores = (
        scale * weight.original0.T * F.cosine_similarity(codes["f"][:, None], weight.original1[None], dim=2)
    )  # [2, classes]
    torch.testing.assert_close(term, F.cross_entropy(scores, torch.tensor([2, 0])))
