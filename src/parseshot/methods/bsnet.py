"""BSNet: two measures of similarity, a learned one and a cosine, on the same maps."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.parts.distance import class_mean


class BSNetConfig(Config):
    """Sizes as published."""

    hidden: int = Field(8, ge=1)  # units of the relation module's linear layer
    logit_scale: float = Field(5.0, gt=0)  # where the learned scale of the summed similarities starts


class BSNet(Method):
    """Li, Wu, Sun, Ma, Cao, Xue, "BSNet: Bi-Similarity Network for Few-shot Fine-grained Image Classification", IEEE
    Transactions on Image Processing, 2021.

    The relation module sees query and mean class map one upon the other: two blocks of convolution and pooling, two
    linear layers, a sigmoid. The cosine module takes each of the two through two blocks of its own and compares what
    comes out. Both are trained to be 1 for the right class and 0 for the others, and a query goes to the greatest sum.
    The paper leaves out the last poolings of Conv-4, for 19×19 cells; it works on coarser maps too. Differs:
    - each image or pair is normalised over its channels and cells (layer norm), not over the batch, since a score may
      not depend on the other queries;
    - cross-entropy of the sum, with a learned scale, is a third term of the loss beside the two squared errors;
    - the first convolution of a pair is that of the class plus that of the query, so it is done once an image;
    - maps are divided by their root mean square on a first batch.
    """

    finer_grid = True
    scale: Tensor

    def __init__(self, channels: int, size: int, config: BSNetConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("scale", torch.ones(()))
        padding = 1 if size < 10 else 0  # as the authors', so that little is lost of a coarse map
        self.of_query = nn.Conv2d(channels, channels, 3, padding=padding)
        self.of_class = nn.Conv2d(channels, channels, 3, padding=padding, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=padding)
        side = _pooled(_pooled(size - 2 + 2 * padding) - 2 + 2 * padding)
        self.verdict = nn.Sequential(
            nn.Linear(channels * side**2, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1), nn.Sigmoid()
        )
        self.alone = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(Norm(channels) for _ in range(4))  # two of the relation module, two of the cosine's
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))

    def initialise(self, features: Tensor) -> None:
        self.scale.copy_(features.square().mean().clamp_min(1e-12).rsqrt())

    def encode(self, features: Tensor) -> Encoding:
        features = features * self.scale
        return Encoding(
            f=features, of_query=self.of_query(features), of_class=self.of_class(features), own=self.own(features)
        )

    def own(self, features: Tensor) -> Tensor:
        """Maps through the blocks of the cosine module, as unit vectors [B, D]."""
        found = _pool(self.norms[2](self.alone[0](features)), F.max_pool2d).relu()
        found = self.norms[3](self.alone[1](found)).relu()
        return F.normalize(_pool(found, F.avg_pool2d).flatten(1), dim=1)

    def similarities(self, query: Encoding, support: Encoding, labels: Tensor) -> tuple[Tensor, Tensor]:
        """By the relation module and by the cosine one, [Q, N] each."""
        classes = int(labels.max()) + 1
        mean = class_mean(support["of_class"], labels, classes)  # [N, C, G, G]
        pairs = (query["of_query"][:, None] + mean).flatten(0, 1)  # [Q·N, C, G, G]
        pairs = _pool(self.norms[0](pairs), F.max_pool2d).relu()
        pairs = _pool(self.norms[1](self.second(pairs)), F.max_pool2d).relu()
        relation = self.verdict(pairs.flatten(1)).view(-1, classes)
        return relation, query["own"] @ self.own(class_mean(support["f"], labels, classes)).T

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        relation, cosine = self.similarities(query, support, labels)
        return self.log_scale.exp() * (relation + cosine)

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        relation, cosine = self.similarities(query, support, labels)
        wanted = F.one_hot(targets, relation.shape[1]).to(relation.dtype)
        return {
            "ce": F.cross_entropy(self.log_scale.exp() * (relation + cosine), targets),
            "relation": F.mse_loss(relation, wanted),
            "cosine": F.mse_loss(cosine, wanted),
        }


class Norm(nn.Module):
    """Maps [B, C, H, W] to mean 0 and variance 1 each, then a scale and a shift a channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels, 1, 1)), nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, maps: Tensor) -> Tensor:
        centred = maps - maps.mean((1, 2, 3), keepdim=True)
        sharp = (centred.square().mean((1, 2, 3), keepdim=True) + 1e-5).rsqrt()
        return torch.addcmul(self.bias, centred * sharp, self.weight)


def _pooled(side: int) -> int:
    return side // 2 if side > 1 else side


def _pool(maps: Tensor, pool: Callable[[Tensor, int], Tensor]) -> Tensor:
    return pool(maps, 2) if maps.shape[-1] > 1 else maps
