"""TDM: weights on the channels that tell the classes of an episode apart, under ProtoNet or FRN.

Letters: Q queries, N classes, n support images, r = G² cells of an image, C channels.
"""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.methods.frn import EPS, FRN, FRNConfig, as_cells
from parseshot.parts.distance import class_mean


def channel_scores(cells: Tensor, means: Tensor) -> Tensor:
    """How far each channel is from the mean of all channels, as maps: [..., r, C], [..., r] → [..., C].

    Mean over the cells of the squared difference, times C, as cells have length 1 about.
    """
    return (cells - means[..., None]).square().mean(-2) * cells.shape[-1]


def class_scores(prototypes: Tensor) -> tuple[Tensor, Tensor]:
    """Of the class maps [N, r, C]: within each class, and the least against the other classes: [N, C] and [N, C].

    A class without others is its own.
    """
    (classes, size, channels), means = prototypes.shape, prototypes.mean(-1)  # [N, r]
    within = channel_scores(prototypes, means)
    if classes == 1:
        return within, within
    inner = torch.einsum("irc,jr->ijc", prototypes, means)
    squares = prototypes.square().sum(1)[:, None] - 2 * inner + means.square().sum(1)[:, None]  # [N, N, C]
    itself = torch.eye(classes, dtype=torch.bool, device=prototypes.device)[:, :, None]
    return within, squares.masked_fill(itself, math.inf).amin(1) * (channels / size)


class Gate(nn.Module):
    """b: scores [..., C] → weights [..., C] between 0 and 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.widen = nn.Linear(channels, 2 * channels, bias=False)
        self.norm = nn.LayerNorm(2 * channels)
        self.narrow = nn.Linear(2 * channels, channels, bias=False)
        for layer in (self.widen, self.narrow):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, scores: Tensor) -> Tensor:
        return 1 + torch.tanh(self.narrow(F.relu(self.norm(self.widen(scores)))))


class ChannelWeights(nn.Module):
    """Task discrepancy maximisation: a weight for each query, class and channel."""

    def __init__(self, channels: int, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.within, self.between, self.query = Gate(channels), Gate(channels), Gate(channels)

    def encode(self, cells: Tensor) -> Encoding:
        """Cells [B, r, C] and the half of the weights that a query has to itself; in training, a share of the noise."""
        kept = {"x": cells, "own": self.query(channel_scores(cells, cells.mean(-1)))}  # [B, r, C], [B, C]
        if self.training and self.noise > 0:
            kept["noise"] = torch.rand_like(kept["own"])
        return Encoding(**kept)

    def forward(self, query: Encoding, support: Encoding, prototypes: Tensor, labels: Tensor) -> Tensor:
        """Weights [Q, N, C]; prototypes are the class means of the support cells, [N, r, C]."""
        within, between = class_scores(prototypes)
        of_class = (self.within(within) + self.between(between)) / 2  # [N, C]
        weights = (of_class + query["own"][:, None]) / 2  # [Q, N, C]
        if "noise" not in query:
            return weights
        of_class = F.one_hot(labels).T.to(weights.dtype) @ support["noise"]  # [N, C]
        uniform = (query["noise"][:, None] + of_class).frac()  # uniform in [0, 1), any two pairs independent
        return (weights + self.noise * (2 * uniform - 1)).clamp(0.0, 2.0)


class TDMProtoNetConfig(Config):
    """TDM on ProtoNet."""

    noise: float = Field(0.2, ge=0, le=1)  # on the weights, ± this, in training
    pooled: bool = False  # compare the means of the weighted maps, the custom for ResNets
    logit_scale: float = Field(10.0, gt=0)


class TDMProtoNet(Method):
    """Lee, Moon, Heo, "Task Discrepancy Maximization for Fine-grained Few-Shot Classification", CVPR 2022; on ProtoNet.

    Channels are scored by how much their map differs from the mean map of all channels: within a class, against the
    nearest other class, within the query. Three small networks turn the scores into weights on the channels, with
    which both the class mean and the query are multiplied before they are compared.

    Differences: LayerNorm in the networks where the authors have BatchNorm, which would make the scores of a class
    depend on the other classes and queries of a batch. The noise that training adds to the weights comes from two
    shares kept in the encodings, of the query and of the photos of the class, added modulo 1: each pair has the
    authors' noise, any two pairs are independent (more are not), and `logits` draws nothing. Features are scaled as in
    our FRN.
    """

    def __init__(self, channels: int, size: int, config: TDMProtoNetConfig) -> None:
        super().__init__()
        self.config = config
        self.weights = ChannelWeights(channels, config.noise)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))
        self.register_buffer("unit", torch.ones(()))
        self.unit: Tensor

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        self.unit.copy_(features.square().sum(1).mean().sqrt().clamp_min(EPS))

    def encode(self, features: Tensor) -> Encoding:
        return self.weights.encode(as_cells(features) / self.unit)

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        prototypes = class_mean(support["x"], labels, int(labels.max()) + 1)  # [N, r, C]
        weights = self.weights(query, support, prototypes, labels)  # [Q, N, C]
        cells = query["x"]
        if self.config.pooled:
            cells, prototypes = cells.mean(1, keepdim=True), prototypes.mean(1, keepdim=True)
        inner = cells.permute(2, 0, 1) @ prototypes.permute(2, 1, 0)  # [C, Q, N]
        squares = cells.square().sum(1)[:, None] + prototypes.square().sum(1) - 2 * inner.permute(1, 2, 0)  # [Q, N, C]
        return -self.log_scale.exp() * (weights.square() * squares).sum(-1) / cells.shape[1]  # [Q, N]


class TDMFRNConfig(FRNConfig):
    """TDM on FRN."""

    noise: float = Field(0.2, ge=0, le=1)  # on the weights, ± this, in training


class TDMFRN(FRN):
    """Lee, Moon, Heo, "Task Discrepancy Maximization for Fine-grained Few-Shot Classification", CVPR 2022; on FRN.

    The weights of `TDMProtoNet` on the query and on its reconstruction, as the authors' code does: the regression is
    on the plain features. The differences named there hold here too.
    """

    config: TDMFRNConfig

    def __init__(self, channels: int, size: int, config: TDMFRNConfig) -> None:
        super().__init__(channels, size, config)
        self.weights = ChannelWeights(channels, config.noise)

    def encode(self, features: Tensor) -> Encoding:
        return self.weights.encode(super().encode(features)["x"])

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        cells = query["x"]
        prototypes = class_mean(support["x"], labels, int(labels.max()) + 1)  # [N, r, C]
        weights = self.weights(query, support, prototypes, labels)  # [Q, N, C]
        errors = self.residual(support, labels).channel_errors(cells)  # [Q, N, C]
        return -self.log_scale.exp() * (weights.square() * errors).sum(-1)  # [Q, N]
