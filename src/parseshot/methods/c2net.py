"""C2-Net: maps of two strides refine each other, and each query is turned towards each class before they are compared.

Letters: Q queries, N classes, r = G² cells of an image, C channels, F channels of the finer map.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.backbones.base import unpack_pair
from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.methods.tdm import Gate
from parseshot.parts.distance import class_mean

LEVELS = ("coarse", "fine")


def block(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, a=0.2, mode="fan_out", nonlinearity="leaky_relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2))


def affinity(left: Tensor, right: Tensor) -> Tensor:
    """How much each cell of one map is like each of another, in shares of the image: [B, C, r] twice → [B, r, r]."""
    inner = left.mT @ right
    return torch.tanh(inner / inner.square().sum((1, 2), keepdim=True).add(1e-12).sqrt())


class Refinement(nn.Module):
    """Cross-layer feature refinement: [B, C, G, G], [B, F, 2G, 2G] → two maps [B, C, r]."""

    def __init__(self, channels: int, fine: int, kernel: int) -> None:
        super().__init__()
        half = max(1, channels // 2)
        self.coarse = nn.Sequential(block(channels, channels, 1), block(channels, channels, 1))
        self.fine = nn.Sequential(block(fine, half, kernel), block(half, channels, kernel), nn.MaxPool2d(2))

    def forward(self, coarse: Tensor, fine: Tensor) -> tuple[Tensor, Tensor]:
        high, middle = self.coarse(coarse).flatten(2), self.fine(fine).flatten(2)
        high = high + middle @ affinity(middle, high)
        return high, middle + high @ affinity(high, middle)


class Adjustment(nn.Module):
    """Cross-sample feature adjustment: for each query and class, weights on the channels and a shift of the map.

    Both from the means over the cells of class and query; the shift from those of the weighted query.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = max(1, channels // 2)
        self.pair = nn.Linear(2 * channels, channels)
        self.weigh = nn.Sequential(nn.LayerNorm(channels), nn.ReLU(), nn.Linear(channels, channels))
        self.weighted_pair = nn.Linear(2 * channels, half)
        last = nn.Linear(half, 4)
        self.move = nn.Sequential(nn.LayerNorm(half), nn.ReLU(), last)
        nn.init.normal_(last.weight, std=0.01)  # nearly no shift
        nn.init.zeros_(last.bias)

    def forward(self, query: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        """[Q, C], [N, C] → [Q, N, C], [Q, N, 4]."""
        weights = 1 + torch.tanh(self.weigh(_on_pairs(self.pair, prototypes, query[:, None])))
        return weights, self.move(_on_pairs(self.weighted_pair, prototypes, weights * query[:, None]))


def _on_pairs(layer: nn.Linear, of_class: Tensor, of_pair: Tensor) -> Tensor:
    """The layer on both vectors joined, [N, C] and [Q, N or 1, C] → [Q, N, H], the class's part worked out once."""
    left, right = layer.weight.chunk(2, 1)
    return F.linear(of_class, left, layer.bias) + F.linear(of_pair, right)


def sampling(shift: Tensor, size: int) -> Tensor:
    """Bilinear sampling at x + a·y + b and y + c·x + d, zero outside: (a, b, c, d) [Q, N, 4] → [Q, r, N, r].

    x and y run over the map from −1 to 1. Columns are the new cells, rows the old ones.
    """
    index = torch.arange(size, dtype=shift.dtype, device=shift.device)
    row, column = (each.flatten() for each in torch.meshgrid(index, index, indexing="ij"))  # [r]
    x, y = ((2 * each + 1) / size - 1 for each in (column, row))
    a, b, c, d = (each[:, None, :, None] for each in shift.unbind(-1))  # [Q, 1, N, 1]
    at = index[:, None, None]  # [G, 1, 1]
    of_column = F.relu(1 - (column + size / 2 * (a * y + b) - at).abs())  # [Q, G, N, r]
    of_row = F.relu(1 - (row + size / 2 * (c * x + d) - at).abs())
    return (of_row[:, :, None] * of_column[:, None]).flatten(1, 2)


class C2NetConfig(Config):
    """What differs between the authors' networks, and where ours starts."""

    kernel: Literal[1, 3] = 3  # of the convolutions on the finer map; the authors: 3 for Conv-4, 1 for ResNet
    noise: float = Field(0.2, ge=0, le=1)  # on the weights of an image's channels, ± this, in training
    logit_scale: float = Field(1.0, gt=0)


class C2Net(Method):
    """Ma, Chen, Zhao, Zhang, Luo, Xu, "Cross-Layer and Cross-Sample Feature Optimization Network for Few-Shot
    Fine-Grained Image Classification", AAAI 2024. Details as in the authors' code (zenith0923/C2-Net).

    The last map and the one before it, brought to the same size, refine each other and get weights on their channels.
    For each class, the query's channels are weighted again and the map is sheared and moved; then it is compared with
    the class mean, at both levels.

    Differences: the affinity of cells is scaled by its norm over the image, not over the batch. LayerNorm in place of
    BatchNorm where pairs of images are seen, and in the weights of channels. The last layer of the shift starts small,
    not at zero. The score is the sum of both levels with their learned scales, in training and after; the authors leave
    the scales out after training. The loss has the cross-entropy of each level, as theirs, and that of the sum.
    """

    paired = True

    def __init__(self, channels: int, size: int, config: C2NetConfig, fine: int) -> None:
        super().__init__()
        self.config, self.channels, self.size = config, channels, size
        self.refinement = Refinement(channels, fine, config.kernel)
        self.gates = nn.ModuleDict({level: Gate(channels) for level in LEVELS})
        self.adjustments = nn.ModuleDict({level: Adjustment(channels) for level in LEVELS})
        self.log_scales = nn.Parameter(torch.full((2,), math.log(config.logit_scale)))
        self.register_buffer("units", torch.ones(2))
        self.units: Tensor

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        maps = unpack_pair(features, self.channels)
        self.units.copy_(torch.stack([each.square().mean().sqrt().clamp_min(1e-6) for each in maps]))

    def encode(self, features: Tensor) -> Encoding:
        coarse, fine = unpack_pair(features, self.channels)
        refined = self.refinement(coarse / self.units[0], fine / self.units[1])
        kept = {}
        for level, maps in zip(LEVELS, refined, strict=True):
            weights = self.gates[level](maps.amax(-1))  # [B, C]
            if self.training:
                weights = (weights + self.config.noise * (2 * torch.rand_like(weights) - 1)).clamp(0.0, 2.0)
            kept[level] = maps * weights[:, :, None]  # [B, C, r]
        return Encoding(**kept)

    def distances(self, query: Encoding, support: Encoding, labels: Tensor, level: str) -> Tensor:
        """Mean squared difference between the class means and the queries turned towards them, [Q, N]."""
        prototypes, maps = (
            class_mean(support[level], labels, int(labels.max()) + 1),
            query[level],
        )  # [N, C, r], [Q, C, r]
        weights, shift = self.adjustments[level](maps.mean(-1), prototypes.mean(-1))
        weights = weights.transpose(1, 2)  # [Q, C, N]
        moved = (maps @ sampling(shift, self.size).flatten(2)).unflatten(2, (-1, maps.shape[2]))  # [Q, C, N, r]
        lengths, inner = moved.square().sum(-1), (moved * prototypes.transpose(0, 1)).sum(-1)  # [Q, C, N]
        squares = (weights * (weights * lengths - 2 * inner)).sum(1) + prototypes.square().sum((1, 2))
        return squares / maps[0].numel()

    def scores(self, query: Encoding, support: Encoding, labels: Tensor) -> list[Tensor]:
        """Of each level, [Q, N]."""
        scales = self.log_scales.exp()
        return [-scales[i] * self.distances(query, support, labels, level) for i, level in enumerate(LEVELS)]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        coarse, fine = self.scores(query, support, labels)
        return coarse + fine

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        coarse, fine = self.scores(query, support, labels)
        named = {"ce": coarse + fine, "ce_coarse": coarse, "ce_fine": fine}
        return {name: F.cross_entropy(scores, targets) for name, scores in named.items()}
