"""SAML: collect how all cells of two images relate, select the pairs that matter, judge."""

import itertools

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.parts.distance import class_mean

FINEST = 10  # cells a side that the relation matrix may have, the authors' grid; finer maps are pooled to it


class SAMLConfig(Config):
    """The width is that of the authors' program."""

    hidden: int = Field(256, ge=1)  # units of each of the three hidden layers
    temperature: float = Field(0.1, gt=0)  # of the attention, in units of the correlation, where it starts
    logit_scale: float = Field(10.0, gt=0)  # of the selected pairs' mean correlation, where it starts


class SAML(Method):
    """Hao, He, Cheng, Wang, Cao, Tao, "Collect and Select: Semantic Alignment Metric Learning for Few-Shot Learning",
    ICCV 2019.

    Collect: the r × r matrix of correlations between the cells of the query and those of the class's mean map. Select:
    attention gives more weight to the pairs that belong together. A perceptron maps the weighted matrix to a score.
    Known from the abstract and from the authors' program (github.com/haofusheng/SAML, main.py). That program has the
    perceptron (three hidden layers of 256) and the cells less the mean of their channels, but no attention, and the
    text of the paper was not at hand. So the following is ours:
    - the attention: half a softmax over the class cells of each query cell, half one over the query cells of each class
      cell, of the correlations themselves, with a learned temperature;
    - cells are brought to unit length (the program's products are not);
    - the score is the perceptron's plus the scaled mean of the weighted matrix, so that an untrained model is a sane
      start; the program starts from nearly equal scores for all classes.
    """

    def __init__(self, channels: int, size: int, config: SAMLConfig) -> None:
        super().__init__()
        self.side = min(size, FINEST)
        self.log_temperature = nn.Parameter(torch.tensor(config.temperature).log())
        self.log_scale = nn.Parameter(torch.tensor(config.logit_scale).log())
        widths = (self.side**4, config.hidden, config.hidden, config.hidden)
        layers = [nn.Sequential(nn.Linear(into, out), nn.ReLU()) for into, out in itertools.pairwise(widths)]
        self.perceptron = nn.Sequential(
            *layers, nn.Linear(config.hidden, 1, bias=False)
        )  # a bias would raise all classes alike

    def encode(self, features: Tensor) -> Encoding:
        if features.shape[-1] > self.side:
            features = F.adaptive_avg_pool2d(features, self.side)
        return Encoding(f=features.flatten(2).transpose(1, 2).contiguous())  # [B, r, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        classes = class_mean(support["f"], labels, int(labels.max()) + 1)  # [N, r, C]
        selected = self.selected(query["f"], classes).flatten(2)  # [Q, N, r²]
        return self.log_scale.exp() * selected.mean(-1) + self.perceptron(selected)[..., 0]

    def selected(self, query: Tensor, classes: Tensor) -> Tensor:
        """Weighted correlations of query cells [Q, r, C] and class cells [N, r, C]: [Q, N, r, r]; mean weight 1."""
        query, classes = (F.normalize(each - each.mean(-1, keepdim=True), dim=-1) for each in (query, classes))
        relation = torch.einsum("qic,njc->qnij", query, classes)
        sharp = relation * (-self.log_temperature).exp()
        weights = torch.softmax(sharp, -1) + torch.softmax(sharp, -2)
        return relation * weights * (relation.shape[-1] / 2)
