"""ConstellationNet: clusters of cells as parts, and attention for how they lie to each other."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.errors import UsageError
from parseshot.methods.base import BaseClassifier, BasePhotos, Companion, Encoding, Method
from parseshot.parts.distance import class_mean


class ConstellationConfig(Config):
    """As published for Conv-4."""

    clusters: int = Field(64, ge=4)
    heads: int = Field(8, ge=1)
    sharpness: float = Field(100.0, gt=0)  # of the soft assignment of a cell to clusters
    dropout: float = Field(0.1, ge=0, lt=1)
    logit_scale: float = Field(10.0, gt=0)  # of the cosine, where it starts


class Constellation(Method):
    """Xu, Xu, Wang, Tu, "Attentional Constellation Nets for Few-Shot Learning", ICLR 2021.

    Cells are described by their cosines to cluster centres, which follow the cells of training by soft mini-batch
    k-means, not by gradient. Self-attention with sine positions relates these parts over the image; what comes out is
    merged with the map by a 1×1 convolution. The score is the cosine of pooled features; a linear classifier of the
    base classes learns along. Differs from the paper:
    - one such module after the backbone, not one in each of its blocks, and without a pooling of its own;
    - classifier and episodes share all of the network (the authors' program branches after the second block), and the
      classifier sees the episode's photos;
    - maps are divided by their root mean square on a first batch.
    """

    scale: Tensor
    centres: Tensor
    counts: Tensor
    positions: Tensor

    def __init__(self, channels: int, size: int, config: ConstellationConfig) -> None:
        super().__init__()
        clusters = config.clusters
        if clusters % config.heads or clusters % 4:
            raise UsageError(f"clusters must be a multiple of 4 and of heads, got {clusters} and {config.heads}")
        self.config, self.channels = config, channels
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("centres", F.normalize(torch.randn(clusters, channels), dim=1))
        self.register_buffer("counts", torch.ones(clusters))  # cells that each centre is the mean of
        self.register_buffer("positions", sine_positions(size, clusters), persistent=False)
        self.attention = nn.MultiheadAttention(clusters, config.heads, dropout=config.dropout, batch_first=True)
        self.drop = nn.Dropout(config.dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(clusters) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(clusters, clusters), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(clusters, clusters)
        )
        self.merge = nn.Sequential(
            nn.Conv2d(channels + clusters, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))

    def initialise(self, features: Tensor) -> None:
        self.scale.copy_(features.square().mean().clamp_min(1e-12).rsqrt())

    def companion(self, base: BasePhotos) -> Companion:
        return BaseClassifier(self.channels, base)

    def encode(self, features: Tensor) -> Encoding:
        features = features * self.scale
        parts = self.related(self.cosines(features.flatten(2).transpose(1, 2)))  # [B, r, clusters]
        parts = parts.transpose(1, 2).unflatten(2, features.shape[-2:])
        return Encoding(f=self.merge(torch.cat((features, parts), 1)).mean((2, 3)))  # [B, C]

    def cosines(self, cells: Tensor) -> Tensor:
        """Of cells [B, r, C] to the centres, which in training then take a step: [B, r, clusters]."""
        unit = F.normalize(cells, dim=-1)
        found = unit @ F.normalize(self.centres, dim=1).T
        if self.training:
            self.follow(unit.detach().flatten(0, 1), found.detach().flatten(0, 1))
        return found

    @torch.no_grad()
    def follow(self, unit: Tensor, cosines: Tensor) -> None:
        """Each centre becomes the running mean of the cells assigned to it, by their share: unit [m, C]."""
        shares = torch.softmax(self.config.sharpness * cosines, 1)  # [m, clusters]
        seen = torch.cat((shares.T @ unit, shares.sum(0)[:, None]), 1)  # [clusters, C + 1]
        if dist.is_available() and dist.is_initialized():  # the cells of all processes, or the centres part
            dist.all_reduce(seen)
        counts = self.counts + seen[:, -1]
        self.centres.copy_((self.counts[:, None] * self.centres + seen[:, :-1]) / counts[:, None])
        self.counts.copy_(counts)

    def related(self, parts: Tensor) -> Tensor:
        """A layer of self-attention on [B, r, clusters]; only queries and keys know the positions."""
        placed = parts + self.positions
        attended, _ = self.attention(placed, placed, parts, need_weights=False)
        parts = self.norms[0](parts + self.drop(attended))
        found: Tensor = self.norms[1](parts + self.drop(self.mlp(parts)))
        return found

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        prototypes = class_mean(support["f"], labels, int(labels.max()) + 1)  # [N, C]
        return self.log_scale.exp() * F.normalize(query["f"], dim=1) @ F.normalize(prototypes, dim=1).T


def sine_positions(size: int, width: int) -> Tensor:
    """Codes [r, width] of the cells of a grid: half for y, half for x; pairs of sine and cosine, ever slower."""
    rate = 10_000 ** (-torch.arange(0, width // 2, 2) / (width // 2))  # [width / 4]
    angle = torch.arange(1, size + 1)[:, None] * rate
    code = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # [G, width / 2]
    of_y, of_x = code[:, None].expand(-1, size, -1), code.expand(size, -1, -1)
    return torch.cat((of_y, of_x), -1).flatten(0, 1)
