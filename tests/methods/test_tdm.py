"""TDM against its formulas, one query, class and channel at a time, under ProtoNet and FRN."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import Encoding, Method, build_method

LABELS = np.array([2, 0, 1, 1, 0, 1, 1])  # unbalanced: 2, 4 and 1 photos


def maps(channels: int, size: int = 3, count: int = 11) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(count, channels, size, size)).clip(-0.5)


def build(name: str, channels: int, **options: object) -> Method:
    torch.manual_seed(1)
    method = build_method(name, channels, 3, options).double()
    with torch.no_grad():
        method.log_scale.fill_(0.4)
        for gate in (method.weights.within, method.weights.between, method.weights.query):
            gate.norm.weight.uniform_(0.5, 1.5)
            gate.norm.bias.uniform_(-0.5, 0.5)
    return method


def expected_weights(method: Method, classes: list[np.ndarray], query: np.ndarray) -> np.ndarray:
    def gate(block: torch.nn.Module, scores: np.ndarray) -> np.ndarray:
        weights = (block.widen.weight, block.norm.weight, block.norm.bias, block.narrow.weight)
        return reference.tdm_gate(scores, *(weight.detach().numpy() for weight in weights))

    within, between, own = reference.tdm_scores(classes, query)
    blocks, found = method.weights, []
    for y in range(len(classes)):
        of_class = 0.5 * gate(blocks.within, within[y]) + 0.5 * gate(blocks.between, between[y])
        found.append(0.5 * of_class + 0.5 * gate(blocks.query, own))
    return np.array(found)  # [N, C]


@pytest.mark.parametrize("labels", [LABELS, np.zeros(7, dtype=int)])  # the second: a class without others
@pytest.mark.parametrize("channels", [6, 60])  # more cells than channels, and fewer
@pytest.mark.parametrize("name", ["tdm-protonet", "tdm-protonet pooled", "tdm-frn"])
def test_logits_weigh_the_channels_of_both_sides(name: str, channels: int, labels: np.ndarray) -> None:
    photos = maps(channels)
    pooled = name.endswith("pooled")
    method = build(name.split()[0], channels, **({"pooled": True} if pooled else {})).eval()
    method.initialise(torch.tensor(photos))
    codes = method.encode(torch.tensor(photos))
    found = method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), torch.tensor(labels)).detach()
    photos = photos / np.sqrt((photos**2).sum(1).mean())
    shown = [[photos[i] for i in range(7) if labels[i] == y] for y in range(labels.max() + 1)]
    classes = [sum(each) / len(each) for each in shown]
    for q in range(4):
        query = photos[7 + q]
        for y, weights in enumerate(expected_weights(method, classes, query)):
            if name == "tdm-frn":
                made = reference.frn_reconstruction(query, shown[y], alpha=0.0, beta=0.0).T.reshape(query.shape)
            else:
                made = classes[y]
            one, other = query * weights[:, None, None], made * weights[:, None, None]
            if pooled:
                distance = ((one.mean((1, 2)) - other.mean((1, 2))) ** 2).sum()
            else:
                distance = ((one - other) ** 2).sum() / 9
            assert float(found[q, y]) == pytest.approx(-np.exp(0.4) * distance, abs=1e-9)


@pytest.mark.parametrize("name", ["tdm-protonet", "tdm-frn"])
def test_only_training_adds_noise_and_the_encodings_carry_it(name: str) -> None:
    features, labels = torch.tensor(maps(6)), torch.tensor(LABELS)

    def scores(codes: Encoding) -> torch.Tensor:
        return method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), labels).detach()

    method = build(name, 6).eval()
    plain = method.encode(features)
    assert "noise" not in plain
    noisy, other = method.train().encode(features), method.encode(features)
    assert noisy["noise"].shape == (11, 6)
    assert torch.equal(scores(noisy), scores(noisy))
    assert not torch.allclose(scores(noisy), scores(plain))
    assert not torch.allclose(scores(noisy), scores(other))
    assert "noise" not in build(name, 6, noise=0).train().encode(features)


def test_the_noise_of_any_two_pairs_is_uniform_and_independent() -> None:
    """Over the draws of an episode's shares; channels are such draws."""
    method = build("tdm-protonet", 1000, noise=0.2)
    with torch.no_grad():
        for gate in (method.weights.within, method.weights.between, method.weights.query):
            gate.narrow.weight.zero_()  # every weight 1, so that none is clamped
    codes = method.train().encode(torch.tensor(maps(1000, count=5)))
    shown, labels = codes.take(slice(3)), torch.tensor([0, 1, 1])
    weights = method.weights(codes.take(slice(3, 5)), shown, codes["x"][:2], labels).detach()  # [2, 2, C]
    noise = (weights - 1).flatten(0, 1)  # [4, C] of four pairs
    assert noise.abs().max() <= 0.2
    for edges in torch.tensor([[-0.2, -0.1], [-0.1, 0.0], [0.0, 0.1], [0.1, 0.2]]):
        share = ((noise >= edges[0]) & (noise < edges[1])).double().mean(1)
        torch.testing.assert_close(share, torch.full_like(share, 0.25), atol=0.05, rtol=0)
    for centred in (noise, noise.abs()):
        assert (torch.corrcoef(centred) - torch.eye(4)).abs().max() < 0.12


def test_weights_stay_between_nought_and_two() -> None:
    method = build("tdm-frn", 6, noise=1.0).train()
    with torch.no_grad():
        for gate in (method.weights.within, method.weights.between, method.weights.query):
            gate.narrow.weight.mul_(100)
    codes = method.encode(torch.tensor(maps(6)))
    weights = method.weights(codes, codes.take(slice(3)), codes["x"][:3], torch.arange(3))
    assert weights.min() == 0
    assert weights.max() == 2


def test_the_scale_of_the_features_does_not_matter() -> None:
    photos, labels = torch.tensor(maps(6)), torch.tensor(LABELS)
    for name in ("tdm-protonet", "tdm-frn"):
        found = []
        for factor in (1.0, 50.0):
            method = build(name, 6).eval()
            method.initialise(photos * factor)
            codes = method.encode(photos * factor)
            found.append(method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), labels))
        torch.testing.assert_close(*found)
