"""CrossTransformers: each cell of the query is compared with what it attends to among the cells of a class."""

import torch
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method


class CTXConfig(Config):
    """The size of the heads, and where training starts."""

    head: int = Field(128, ge=1, le=4096)  # d, of keys and of values; no more than channels
    logit_scale: float = Field(10.0, gt=0)  # mean squared distance of the values of two cells before training


class CTX(Method):
    """Doersch, Gupta, Zisserman, "CrossTransformers: spatially-aware few-shot transfer", NeurIPS 2020.

    Keys and values are linear maps of cells, the same for queries and photos. A cell of the query attends to all cells
    of a class, softmax(⟨k, k'⟩/√d), and the score is minus the mean over its cells of the squared distance between its
    value and the attended one. Left out are the self-supervised (SimCLR) episodes that the authors add; their finer
    grid is the backbone's matter. The authors' d of 128 is cut to the number of channels where that is smaller: more
    dimensions add no other inner products or distances. Both maps start scaled to the features at hand: attention
    scores with a deviation of 1, values with the configured distance.
    """

    finer_grid = True

    def __init__(self, channels: int, size: int, config: CTXConfig) -> None:
        super().__init__()
        self.config = config
        self.head = min(config.head, channels)
        self.key = nn.Conv2d(channels, self.head, kernel_size=1, bias=False)
        self.value = nn.Conv2d(channels, self.head, kernel_size=1, bias=False)

    def encode(self, features: Tensor) -> Encoding:
        key, value = (head(features).flatten(2).transpose(1, 2).contiguous() for head in (self.key, self.value))
        return Encoding(k=key / self.head**0.25, v=value)  # [B, r, d]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        keys, values = query["k"].flatten(0, 1), query["v"].flatten(0, 1)  # [Q·r, d]
        distances = []
        for label in range(int(labels.max()) + 1):  # [Q·r, K·r] of one class after the other
            members = (labels == label).nonzero().flatten()
            attention = torch.softmax(keys @ support["k"][members].flatten(0, 1).T, 1)
            attended = attention @ support["v"][members].flatten(0, 1)  # [Q·r, d]
            distances.append((values - attended).square().sum(1))
        return -torch.stack(distances, -1).view(*query["k"].shape[:2], -1).mean(1)  # [Q, N]

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        codes = self.encode(features)
        keys, values = (codes[name].flatten(0, 1)[:2000] for name in ("k", "v"))  # cells enough to know the scale
        self.key.weight /= (keys @ keys.T).std().sqrt().clamp_min(1e-12)
        spread = 2 * (values - values.mean(0)).square().sum(1).mean()
        self.value.weight *= (self.config.logit_scale / spread.clamp_min(1e-12)).sqrt()
