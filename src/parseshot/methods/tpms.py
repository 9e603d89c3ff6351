"""TPMN (TPMS in the paper's tables): part filters made for the task at hand."""

import math

import torch
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.parts.distance import class_mean


class TPMSConfig(Config):
    """Sizes are ours: none were found in a source."""

    parts: int = Field(8, ge=1)
    hidden: int = Field(64, ge=1)  # units between the task's statistics and what is made of them
    logit_scale: float = Field(10.0, gt=0)  # of the distance, where it starts


class TPMS(Method):
    """Wu, Zhang, Zhang, Wu, "Task-aware Part Mining Network for Few-Shot Learning", ICCV 2021.

    From the support photos of a task a network makes part filters; each filter finds its part in every image of the
    task, by attention over the cells. A second network says how important each part is to the task, and the distance
    of query and class is the sum of the parts' distances so weighted.
    Only the abstract was at hand, no text and no program. It names the two networks (meta filter learner, adaptive
    importance generator), not their form. So the following is ours:
    - the task's statistics: mean and deviation over the classes of their mean cell; not of the queries, since a score
      may not depend on the other queries;
    - the filters: learned ones plus what a perceptron makes of the statistics; attention is a softmax over the cells;
    - the importance: a perceptron on mean and deviation over the classes of a part's feature, softmax over the parts;
    - squared Euclidean distance to the class's mean part, divided by the channels, times a learned scale.
    Maps are divided by their root mean square on a first batch.
    """

    scale: Tensor

    def __init__(self, channels: int, size: int, config: TPMSConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("scale", torch.ones(()))
        self.filters = nn.Parameter(nn.init.orthogonal_(torch.empty(config.parts, channels)) * math.sqrt(channels))
        self.learner = nn.Sequential(
            nn.Linear(2 * channels, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.parts * channels)
        )
        self.importance = nn.Sequential(
            nn.Linear(2 * channels, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1, bias=False)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))

    def initialise(self, features: Tensor) -> None:
        self.scale.copy_(features.square().mean().clamp_min(1e-12).rsqrt())

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=(features * self.scale).flatten(2).transpose(1, 2).contiguous())  # [B, r, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        classes = int(labels.max()) + 1
        filters = self.part_filters(class_mean(support["f"].mean(1), labels, classes))  # [P, C]
        mine = self.parts(query["f"], filters)  # [Q, P, C]
        prototypes = class_mean(self.parts(support["f"], filters), labels, classes)  # [N, P, C]
        weights = torch.softmax(self.importance(spread(prototypes))[:, 0], 0)  # [P]
        mine, prototypes = (each * weights.sqrt()[:, None] for each in (mine, prototypes))  # ‖√w·Δ‖² = w·‖Δ‖²
        distances = torch.cdist(mine.flatten(1), prototypes.flatten(1)).square()  # [Q, N]
        return -self.log_scale.exp() * distances / prototypes.shape[-1]

    def part_filters(self, classes: Tensor) -> Tensor:
        """Filters [P, C] for a task whose classes have these mean cells [N, C]."""
        made: Tensor = self.learner(spread(classes))
        return self.filters + made.view_as(self.filters)

    def parts(self, cells: Tensor, filters: Tensor) -> Tensor:
        """What each filter [P, C] finds in the cells [B, r, C] of an image: [B, P, C]."""
        attention = torch.softmax(cells @ filters.T / math.sqrt(cells.shape[-1]), 1)  # [B, r, P]
        return attention.transpose(1, 2) @ cells


def spread(classes: Tensor) -> Tensor:
    """Mean and deviation over the classes: [N, ..., C] → [..., 2·C]."""
    deviation = (classes.var(0, correction=0) + 1e-6).sqrt()
    return torch.cat((classes.mean(0), deviation), -1)
