"""Bi-FRN: the query made of a class, and the class made of the query, by attention.

Letters: Q queries, N classes, n support images, r = G² cells of an image, m cells of a class, C channels.
"""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.methods.frn import as_cells

TOGETHER = 250_000  # numbers of the attention of some queries to a class, few enough for a processor's cache


def with_positions(cells: Tensor) -> Tensor:
    """Cells [B, r, C] plus sine and cosine codes of their places 0 … r−1 in reading order."""
    place, channel = (torch.arange(n, dtype=torch.float64, device=cells.device) for n in cells.shape[1:])
    even = channel % 2 == 0
    angle = place[:, None] * 10_000 ** (-(channel - channel % 2) / len(channel))  # [r, C]
    return cells + torch.where(even, angle.sin(), angle.cos()).to(cells.dtype)


class SelfReconstruction(nn.Module):
    """A transformer block of one head over the cells of an image, [B, r, C] → [B, r, C]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm_in, self.norm, self.norm_out = (nn.LayerNorm(channels) for _ in range(3))
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.project, self.widen, self.narrow = (nn.Linear(channels, channels) for _ in range(3))
        for layer in (self.qkv, self.project, self.widen, self.narrow):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        for layer in (self.project, self.widen, self.narrow):
            nn.init.zeros_(layer.bias)

    def forward(self, cells: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_in(cells)).chunk(3, -1)
        cells = self.norm(cells + self.project(F.scaled_dot_product_attention(query, key, value)))
        return self.norm_out(cells + self.narrow(F.gelu(self.widen(cells))))


def reconstruction_errors(scores: Tensor, products: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    """‖t − Σ_j w_j·v_j‖² of each target, w the softmax of its scores, for each of B sets of values.

    Scores and products v·t [B, m, p], targets [p, C], values [B, m, C] → [B, p]. Where there are fewer values than
    channels, the square is multiplied out, so that no tensor [B, p, C] is made.
    """
    weights = scores.softmax(1)
    if values.shape[1] < values.shape[2]:
        combined = torch.sub((values @ values.mT) @ weights, products, alpha=2)  # [B, m, p]
        return targets.square().sum(1) + (weights * combined).sum(1)
    return (values.mT @ weights - targets.T).square().sum(1)


class BiFRNConfig(Config):
    """Where Bi-FRN starts."""

    logit_scale: float = Field(10.0, gt=0)  # τ


class BiFRN(Method):
    """Wu, Chang, Sain, Li, Ma, Cao, Guo, Song, "Bi-directional Feature Reconstruction Network for Fine-Grained Few-Shot
    Image Classification", AAAI 2023. Details as in the authors' code (PRIS-CV/Bi-FRN).

    A transformer block lets the cells of an image reconstruct each other. Then one linear map gives queries, keys and
    values: by attention the cells of a query are made of those of a class, and those of the class of the query's. Both
    squared errors, with learned weights, are the distance.

    Differences: the error of a class is the mean over its photos, where the authors' code has the sum, so that photos
    may be repeated and their number may vary. No dropout (0.1) on the attention of the reconstructions, which would
    make scores random in training. Features are divided by their root mean square, which `initialise` finds, to suit
    the position codes.
    """

    def __init__(self, channels: int, size: int, config: BiFRNConfig) -> None:
        super().__init__()
        self.config = config
        self.block = SelfReconstruction(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.class_weight = nn.Parameter(torch.tensor(0.5))  # of the class made of the query
        self.query_weight = nn.Parameter(torch.tensor(0.5))  # of the query made of the class
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))
        self.register_buffer("unit", torch.ones(()))
        self.unit: Tensor

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        self.unit.copy_(features.square().mean().sqrt().clamp_min(1e-6))

    def encode(self, features: Tensor) -> Encoding:
        asks, keys, values = self.qkv(self.block(with_positions(as_cells(features) / self.unit))).chunk(3, -1)
        return Encoding(qkv=torch.cat((asks / math.sqrt(asks.shape[-1]), keys, values), -1))  # [B, r, 3C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        size, photos = query["qkv"].shape[1], int(F.one_hot(labels).sum(0).max())
        few = query["qkv"].split(max(1, TOGETHER // (size * size * photos)))
        return torch.cat([self._logits(some, support["qkv"], labels) for some in few])  # [Q, N]

    def _logits(self, query: Tensor, support: Tensor, labels: Tensor) -> Tensor:
        (queries, size, width), channels = query.shape, query.shape[2] // 3
        asks, keys, values = query.flatten(0, 1).chunk(3, -1)  # [Q·r, C]
        per_query = values.unflatten(0, (queries, size))  # [Q, r, C]
        distances = []
        for label in range(int(labels.max()) + 1):  # one class at a time: what is made for it stays small
            own = support[(labels == label).nonzero()[:, 0]].view(-1, width)
            class_asks, class_keys, class_values = own.chunk(3, -1)  # [m, C]
            products = values @ class_values.T  # [Q·r, m]
            of_query = reconstruction_errors((class_keys @ asks.T)[None], products.T[None], values, class_values[None])
            of_class = reconstruction_errors(
                (keys @ class_asks.T).unflatten(0, (queries, size)),
                products.unflatten(0, (queries, size)),
                class_values,
                per_query,
            )  # [Q, m]
            query_error = of_query.view(queries, size).mean(1)
            distances.append(self.class_weight * of_class.mean(1) + self.query_weight * query_error)  # [Q]
        return -self.log_scale.exp() / channels * torch.stack(distances, 1)
