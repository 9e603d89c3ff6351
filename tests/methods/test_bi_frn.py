"""Bi-FRN against its formulas: block, attention both ways, one cell at a time."""

import math

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import Method, build_method

LABELS = np.array([2, 0, 1, 1, 0, 1, 1])  # unbalanced: 2, 4 and 1 photos


def maps(channels: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(10, channels, 3, 3)).clip(-0.5)


def build(channels: int) -> Method:
    """With weights that leave nothing small: attention far from uniform, norms far from the identity."""
    torch.manual_seed(1)
    method = build_method("bi-frn", channels, 3).double()
    with torch.no_grad():
        for weight in method.parameters():
            if weight.ndim == 2:
                weight.normal_(std=1.5 / math.sqrt(channels))
            elif weight.ndim == 1:
                weight.add_(torch.randn_like(weight), alpha=0.3)
        method.class_weight.fill_(0.8)
        method.query_weight.fill_(0.3)
        method.log_scale.fill_(0.4)
    return method


@pytest.mark.parametrize("channels", [5, 8, 12, 40])  # cells: 9 of an image, 9 to 36 of a class
@pytest.mark.parametrize("labels", [LABELS, np.array([0, 1, 1, 0, 2, 2, 0])[:6]])
def test_logits_are_the_errors_both_ways(channels: int, labels: np.ndarray) -> None:
    photos = maps(channels)
    method = build(channels)
    method.initialise(torch.tensor(photos))
    codes = method.encode(torch.tensor(photos))
    found = method.logits(codes.take(slice(7, 10)), codes.take(slice(len(labels))), torch.tensor(labels)).detach()
    weights = {name: value.numpy() for name, value in method.state_dict().items()}
    tokens = [reference.bi_frn_tokens(photo / np.sqrt((photos**2).mean()), weights) for photo in photos]
    for q in range(3):
        for y in range(3):
            own = [tokens[i] for i in range(len(labels)) if labels[i] == y]
            expected = reference.bi_frn_distance(tokens[7 + q], own, class_weight=0.8, query_weight=0.3)
            assert float(found[q, y]) == pytest.approx(-math.exp(0.4) * expected, abs=1e-9)


def test_each_way_says_something_of_its_own() -> None:
    """The two errors order the classes differently, and each alone can be weighed to nothing."""
    method, photos = build(8), torch.tensor(maps(8))
    codes = method.encode(photos)
    query, support, labels = codes.take(slice(7, 10)), codes.take(slice(7)), torch.tensor(LABELS)
    found = []
    for weights in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        with torch.no_grad():
            method.class_weight.fill_(weights[0])
            method.query_weight.fill_(weights[1])
        found.append(method.logits(query, support, labels).detach())
    torch.testing.assert_close(found[0] + found[1], found[2])
    assert not torch.allclose(found[0], found[1], rtol=0.05)


def test_where_a_cell_lies_matters() -> None:
    """Position codes: a map whose cells have changed places is another map."""
    method, photos = build(8), torch.tensor(maps(8))
    moved = photos.flip(-1)
    one, other = method.encode(photos)["qkv"], method.encode(moved)["qkv"]
    turned = other.view(10, 3, 3, -1).flip(2).flatten(1, 2)
    assert not torch.allclose(one, turned, rtol=0.01)


def test_one_photo_a_class_and_a_single_class() -> None:
    method = build(8)
    codes = method.encode(torch.tensor(maps(8)))
    single = method.logits(codes, codes.take(slice(1)), torch.tensor([0]))
    several = method.logits(codes, codes.take(slice(3)), torch.arange(3))
    torch.testing.assert_close(single, several[:, :1])
