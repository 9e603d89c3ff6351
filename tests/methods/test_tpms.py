"""TPMN against its formula, one cell and one part at a time."""

import numpy as np
import torch
from torch import nn

import reference
from parseshot.methods import build_method
from parseshot.methods.tpms import TPMS

CHANNELS, SIZE = 5, 3


def build(**options: int) -> TPMS:
    torch.manual_seed(1)
    method = build_method("tpms", CHANNELS, SIZE, {"parts": 3, "hidden": 6} | options).double()
    assert isinstance(method, TPMS)
    with torch.no_grad():
        method.log_scale.fill_(np.log(7.0))
        method.importance[2].weight.mul_(5.0)  # so that the parts differ in importance
    method.initialise(maps(10, seed=9))
    return method


def maps(count: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, SIZE, SIZE, generator=random, dtype=torch.float64).relu()


def layers(network: nn.Sequential) -> list[tuple[np.ndarray, np.ndarray]]:
    bias = [np.zeros(1) if network[at].bias is None else network[at].bias.detach().numpy() for at in (0, 2)]
    return [(network[at].weight.detach().numpy(), bias[number]) for number, at in enumerate((0, 2))]


def test_scores_are_minus_the_weighted_part_distances() -> None:
    method, features, labels = build(), maps(9, seed=2), [1, 0, 1, 1, 2, 0]
    codes = method.encode(features)
    found = method.logits(codes.take(slice(6, 9)), codes.take(slice(6)), torch.tensor(labels)).detach()
    cells = features.flatten(2).transpose(1, 2).numpy() / np.sqrt((maps(10, seed=9).numpy() ** 2).mean())
    expected = reference.tpms_distances(
        cells[6:], cells[:6], labels, method.filters.detach().numpy(), layers(method.learner), layers(method.importance)
    )
    np.testing.assert_allclose(found, -7.0 * expected, atol=1e-9)


def test_filters_depend_on_the_task() -> None:
    """The same query photo is looked at otherwise beside other classes, but not in another order of them."""
    method = build()
    codes = method.encode(maps(12, seed=3))["f"].mean(1)
    first, other = method.part_filters(codes[:4]), method.part_filters(codes[4:8])
    assert float((first - other).abs().max().detach()) > 1e-3
    torch.testing.assert_close(first, method.part_filters(codes[[3, 1, 0, 2]]))


def test_a_filter_finds_the_cell_that_answers_it() -> None:
    method = build()
    cells = torch.zeros(1, 9, CHANNELS, dtype=torch.float64)
    cells[0, 4, 2] = 3.0
    strong = torch.zeros(1, CHANNELS, dtype=torch.float64)
    strong[0, 2] = 50.0
    torch.testing.assert_close(method.parts(cells, strong)[0, 0], cells[0, 4])


def test_one_class_and_a_query_on_its_prototype_have_finite_gradients() -> None:
    features = maps(1, seed=4).requires_grad_()
    codes = build().encode(features)
    build().logits(codes, codes, torch.tensor([0])).sum().backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
