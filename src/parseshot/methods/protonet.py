"""Prototypical networks."""

import torch
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.parts.distance import class_mean


class ProtoNetConfig(Config):
    """ProtoNet on the flattened map (the custom for Conv-4) or on the pooled one (the custom for ResNets)."""

    pooled: bool = False


class ProtoNet(Method):
    """Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.

    A class is the mean of its support features. A query belongs to the class whose mean is nearest in squared Euclidean
    distance, divided by the number of features and multiplied by a learned scale (Wertheimer et al. 2021).
    """

    def __init__(self, channels: int, size: int, config: ProtoNetConfig) -> None:
        super().__init__()
        self.config = config
        self.log_scale = nn.Parameter(torch.zeros(()))

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=features.mean((-1, -2)) if self.config.pooled else features.flatten(1))  # [B, C] or [B, C·G²]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        prototypes = class_mean(support["f"], labels, int(labels.max()) + 1)  # [N, D]
        return -self.log_scale.exp() * torch.cdist(query["f"], prototypes).square() / prototypes.shape[1]  # [Q, N]
