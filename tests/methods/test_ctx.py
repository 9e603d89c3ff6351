"""CrossTransformers against their formula, cell by cell."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import build_method
from parseshot.methods.ctx import CTX

LABELS = {"one photo a class": [0, 1, 2], "unbalanced": [2, 0, 1, 1, 0, 1]}


def maps(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 6, 3, 3))).relu()


def ctx(**options: object) -> CTX:
    torch.manual_seed(0)
    method = build_method("ctx", 6, 3, options).double()
    assert isinstance(method, CTX)
    method.initialise(maps(8, seed=9))
    return method


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize(("head", "size"), [(4, 4), (128, 6)])
def test_scores_are_distances_to_the_attended_values(labels: list[int], head: int, size: int) -> None:
    method, shown = ctx(head=head), len(labels)
    features = maps(shown + 2)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(shown, None)), codes.take(slice(shown)), torch.tensor(labels)).detach()
    key, value = (one.weight.detach().numpy()[:, :, 0, 0] for one in (method.key, method.value))
    assert key.shape == value.shape == (size, 6)
    phi = features.numpy()
    expected = reference.ctx(phi[shown:], phi[:shown], np.array(labels), key, value)
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_a_sharp_attention_finds_the_cells_of_a_moved_object() -> None:
    """Keys that tell all cells apart: a photo whose cells are shuffled is at distance 0 from itself."""
    method = ctx()
    support = maps(2)
    shuffled = support[:1].flip(2).transpose(2, 3)
    labels = torch.tensor([0, 1])
    with torch.no_grad():
        blunt = method.logits(method.encode(shuffled), method.encode(support), labels)
        unit = torch.nn.functional.normalize(support, dim=1)
        method.key.weight.copy_(1e3 * torch.eye(6)[:, :, None, None])
        sharp = method.logits(
            method.encode(torch.nn.functional.normalize(shuffled, dim=1)), method.encode(unit), labels
        )
    assert float(sharp[0, 0]) == pytest.approx(0, abs=1e-9)
    assert float(blunt[0, 0]) < -0.1
    assert float(sharp[0, 1]) < -0.1


def test_it_starts_alike_on_features_of_any_scale() -> None:
    features = maps(6)
    small, large = ctx(), ctx()
    small.initialise(1e-3 * features)
    large.initialise(1e3 * features)
    one, two = (
        method.logits(codes, codes, torch.arange(6)).detach()
        for method, codes in ((small, small.encode(1e-3 * features)), (large, large.encode(1e3 * features)))
    )
    torch.testing.assert_close(one, two)
    values = small.encode(1e-3 * features)["v"].detach().flatten(0, 1)
    assert float(torch.cdist(values, values).square().mean()) == pytest.approx(10.0)
    keys = small.encode(1e-3 * features)["k"].detach().flatten(0, 1)
    assert float((keys @ keys.T).std()) == pytest.approx(1.0)
