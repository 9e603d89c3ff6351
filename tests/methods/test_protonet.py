"""ProtoNet against its formula, one query and one class at a time."""

import numpy as np
import pytest
import torch

from parseshot.methods import Encoding, build_method


@pytest.mark.parametrize("name", ["protonet", "protonet-pooled"])
def test_logits_are_minus_the_scaled_mean_squared_difference(name: str) -> None:
    random = np.random.default_rng(0)
    maps = random.normal(size=(7, 3, 4, 4))
    labels = np.array([0, 1, 1, 0, 1])
    method = build_method(name, 3, 4).double()
    with torch.no_grad():
        method.log_scale.fill_(0.7)
    codes = method.encode(torch.tensor(maps))
    support, query = codes.take(slice(5)), codes.take(slice(5, 7))
    found = method.logits(query, support, torch.tensor(labels))
    flat = maps.mean((2, 3)) if name == "protonet-pooled" else maps.reshape(7, -1)
    for q in range(2):
        for y in range(2):
            prototype = sum(flat[i] for i in range(5) if labels[i] == y) / (labels == y).sum()
            expected = -np.exp(0.7) * sum((flat[5 + q] - prototype) ** 2) / len(prototype)
            assert float(found[q, y].detach()) == pytest.approx(expected, abs=1e-9)


def test_a_query_on_its_prototype_has_a_finite_gradient() -> None:
    """√ of a zero distance has an infinite slope; its square must not show it."""
    method = build_method("protonet-pooled", 3, 4)
    maps = torch.ones(1, 3, 4, 4, requires_grad=True)
    codes = method.encode(maps)
    method.logits(codes, codes, torch.tensor([0])).sum().backward()
    assert maps.grad is not None
    assert maps.grad.isfinite().all()


def test_an_encoding_can_be_taken_apart_and_joined() -> None:
    codes = Encoding(f=torch.arange(6.0).view(3, 2))
    assert codes.images == 3
    again = Encoding.cat([codes.take(slice(1)), codes.take(torch.tensor([1, 2]))])
    assert torch.equal(again["f"], codes["f"])
