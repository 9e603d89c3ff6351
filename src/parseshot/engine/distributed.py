"""Several processes, one gradient: an episode's images are shared out, its encodings gathered, its loss that of all.

Started by `torchrun --nproc_per_node N -m parseshot train …`; gloo on CPU, nccl on GPU. Every process draws the same
episode, encodes its share of the images and gathers the others' encodings, through which gradients flow back. Each
then has the loss of the whole episode; divided by the number of processes and summed over them, its gradient is that of
one process. Batch norm takes the statistics of all images of the episode (`SyncBatchNorm`): PyTorch's own does so on
GPUs only. The only difference left is the order of sums in floating point.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parseshot.errors import UsageError
from parseshot.methods import Encoding


@dataclass(frozen=True)
class Team:
    """The processes of a run; alone, all of this does nothing."""

    rank: int = 0
    size: int = 1

    @staticmethod
    @contextlib.contextmanager
    def joined() -> Iterator["Team"]:
        """Join the processes that torchrun has started, and leave them in the end; alone where it has started none."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield Team()
            return
        mine = not dist.is_initialized()
        if mine:
            _import_what_keeps_groups()
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        try:
            yield Team(dist.get_rank(), size)
        finally:
            if mine:
                dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process writes: checkpoints, metrics, progress."""
        return self.rank == 0

    def share(self, images: int) -> slice:
        """The images of an episode that this process encodes."""
        if images % self.size:
            raise UsageError(f"{images} images an episode cannot be shared out evenly over {self.size} processes")
        each = images // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather(self, mine: Encoding) -> Encoding:
        """The encoding of all images, in order, from each process's share; gradients go back to where they belong."""
        if self.size == 1:
            return mine
        return Encoding(**{name: _Gather.apply(value, self) for name, value in mine.items()})

    def sum_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of all processes, in one message."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if self.size == 1 or not weights:
            return
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = part.view_as(weight).clone()

    def any(self, mine: bool) -> bool:
        """Whether it is so in any process."""
        if self.size == 1:
            return mine
        flag = torch.tensor(float(mine))
        dist.all_reduce(flag)
        return bool(flag > 0)

    def mean(self, mine: Tensor) -> Tensor:
        """The mean of all processes' values."""
        if self.size == 1:
            return mine
        return _summed(mine) / self.size

    def from_first(self, value: float) -> float:
        """The first process's value, in all of them; the others wait for it."""
        if self.size == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told)


ALONE = Team()


def _import_what_keeps_groups() -> None:
    """To be called before there is a group, so that leaving it ends its threads.

    The functions of this module have the group of all processes, at the moment of the import, as default arguments; an
    optimiser's first step imports it. A group that is kept so outlives `destroy_process_group`: its threads then drop
    tensors while Python ends, which now and then aborts the process after all its work is done.
    """
    importlib.import_module("torch.distributed.nn.functional")


class _Gather(torch.autograd.Function):
    """All processes' tensors one after the other; a gradient goes back to the process its part came from."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, team: Team) -> Tensor:
        ctx.team = team
        pieces = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(team.size)]
        dist.all_gather(pieces, mine.contiguous())
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad)[ctx.team.share(len(grad))], None


class _Sum(torch.autograd.Function):
    """The sum of all processes' tensors, and of their gradients."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        return _summed(mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _summed(grad)


def _summed(mine: Tensor) -> Tensor:
    total = mine.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm over the images of all processes, on any device; shares must be of one size."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        mean = _Sum.apply(x.mean((0, 2, 3))) / dist.get_world_size()
        away = x - mean.view(1, -1, 1, 1)
        variance = _Sum.apply(away.square().mean((0, 2, 3))) / dist.get_world_size()
        with torch.no_grad():
            self._track(mean, variance, x.numel() // x.shape[1] * dist.get_world_size())
        scale = (variance + self.eps).rsqrt() * self.weight
        return away * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        rate = self.momentum if self.momentum is not None else 0.1
        self.running_mean.lerp_(mean, rate)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), rate)
        self.num_batches_tracked.add_(1)


def synchronise(module: nn.Module, team: Team) -> None:
    """Give every batch norm the statistics of all processes. Names and shapes of the weights stay."""
    if team.size == 1:
        return
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            synced = SyncBatchNorm(child.num_features, eps=child.eps, momentum=child.momentum)
            synced.load_state_dict(child.state_dict())
            synced.to(child.weight)
            setattr(module, name, synced)
        else:
            synchronise(child, team)
