"""SRM: FRN that also compares with what a query makes of itself."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.methods.base import Encoding
from parseshot.methods.frn import EPS, FRN, FRNConfig, orthogonality, residual
from parseshot.parts.distance import by_class


class SRMConfig(FRNConfig):
    """FRN's, and the weight of the restraint."""

    logit_scale: float = Field(15.0, gt=0)  # half of FRN's: two distances are added
    restraint: float = Field(0.001, ge=0)


class SRM(FRN):
    """Li, Li, Xie, Yang, Xue, Ma, "Self-reconstruction network for fine-grained few-shot classification", 2024.

    Pattern Recognition. Facts from the abstract and from the authors' code (liz-lut/SRM-main).

    A query is reconstructed from each class, as in FRN, and from its own cells, by a ridge regression with a λ and ρ of
    its own. The distance is that of the first reconstruction to the query, plus that to the second. A small term of the
    loss keeps the cross-entropy from being too sure: the sum of −log p of the wrong classes, as in the authors' code.

    Differences: those of our FRN.
    """

    config: SRMConfig

    def __init__(self, channels: int, size: int, config: SRMConfig) -> None:
        super().__init__(channels, size, config)
        self.log_own_lambda = nn.Parameter(torch.zeros(()))
        self.log_own_rho = nn.Parameter(torch.zeros(()))

    def encode(self, features: Tensor) -> Encoding:
        cells = super().encode(features)["x"]
        images, size, channels = cells.shape
        strength = size / channels * (self.log_own_lambda.exp() + EPS)
        itself = residual(cells, strength.expand(images), self.log_own_rho.exp())
        return Encoding(x=cells, off=itself.of(cells))  # off: from a cell to its self-reconstruction, [B, r, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        cells, off = query["x"], query["off"]
        error = self.residual(support, labels)  # of a class: e = xR, and ‖e‖² + ‖e − off‖² follows
        distance = 2 * (error.squared().between(cells, cells) - error.between(cells, off))  # [Q, N]
        return -self.log_scale.exp() * (distance + off.square().sum(-1).mean(-1)[:, None])

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        log_p = F.log_softmax(self.logits(query, support, labels), 1)  # [Q, N]
        ce = F.nll_loss(log_p, targets)
        wrong = -log_p.sum(1).mean() - ce
        overlap = orthogonality(by_class(support["x"], labels)[0])
        return {
            "ce": ce,
            "orthogonality": self.config.auxiliary * overlap,
            "restraint": self.config.restraint * wrong,
        }
