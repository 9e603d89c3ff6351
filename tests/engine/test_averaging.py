"""The mean of a run's weights."""

import pytest
import torch

from parseshot.engine.averaging import averaged, follow


def steps(count: int, decay: float) -> tuple[torch.nn.Linear, torch.optim.Adam, list[torch.Tensor]]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).double()
    optimiser, seen = torch.optim.Adam(layer.parameters(), lr=0.1), []
    for step in range(count):
        optimiser.zero_grad()
        layer(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
        optimiser.step()
        follow(optimiser, decay, step)
        seen.append(layer.weight.detach().clone())
    return layer, optimiser, seen


def test_it_keeps_a_share_of_what_it_was_and_less_in_the_first_steps() -> None:
    layer, optimiser, seen = steps(30, 0.6)
    mean = seen[0]
    for step, weight in enumerate(seen[1:], start=1):
        kept = min(0.6, (step + 1) / (step + 10))
        mean = kept * mean + (1 - kept) * weight
    with averaged(optimiser):
        torch.testing.assert_close(layer.weight.detach(), mean)
    assert torch.equal(layer.weight, seen[-1])  # as it was


def test_the_weights_come_back_after_an_error() -> None:
    layer, optimiser, seen = steps(5, 0.9)
    inside = []
    with pytest.raises(ZeroDivisionError), averaged(optimiser):
        inside.append(layer.weight.detach().clone()) or 1 / 0
    assert not torch.equal(inside[0], seen[-1])
    assert torch.equal(layer.weight, seen[-1])


def test_without_a_mean_nothing_is_swapped() -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    with averaged(torch.optim.Adam(layer.parameters())):
        assert torch.equal(layer.weight, before)
