"""The mean of a run's weights over its last steps, which is validated and kept in place of where the last step led."""

import contextlib
from collections.abc import Iterator

import torch

AVERAGE = "average"  # kept beside the optimiser's moments of a weight, so that it is saved and restored with them
WARM_UP = 10  # after t steps the mean reaches back over about t/9 of them at most, so that it forgets the start


@torch.no_grad()
def follow(optimiser: torch.optim.Optimizer, decay: float, step: int) -> None:
    """After a step, move the mean of each trained weight towards it by 1 − decay, by more in the first steps."""
    kept = min(decay, (step + 1) / (step + WARM_UP))
    for weight in _weights(optimiser):
        state = optimiser.state[weight]
        if AVERAGE in state:
            state[AVERAGE].lerp_(weight, 1 - kept)
        elif state:  # it has had a gradient
            state[AVERAGE] = weight.detach().clone()


@contextlib.contextmanager
def averaged(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Weights that have a mean are that mean inside of the block; batch norm's statistics, a mean themselves, stay."""
    swapped = [
        (weight, optimiser.state[weight][AVERAGE]) for weight in _weights(optimiser) if _has_mean(optimiser, weight)
    ]
    before = [weight.detach().clone() for weight, _ in swapped]
    with torch.no_grad():
        for weight, mean in swapped:
            weight.copy_(mean)
    try:
        yield
    finally:
        with torch.no_grad():
            for (weight, _), old in zip(swapped, before, strict=True):
                weight.copy_(old)


def _weights(optimiser: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimiser.param_groups for weight in group["params"]]


def _has_mean(optimiser: torch.optim.Optimizer, weight: torch.Tensor) -> bool:
    return AVERAGE in optimiser.state.get(weight, {})
