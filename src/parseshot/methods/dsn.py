"""DSN: a class is the subspace through its support photos; a query belongs to the nearest one."""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.parts.distance import class_mean

RANK = 1e-5  # a direction counts if its squared singular value is above this share of the squares of a class's features


class DSNConfig(Config):
    """DSN on the flattened map (as its code) or on the pooled one, which must have more features than photos."""

    pooled: bool = False
    apart: float = Field(0.03, ge=0)  # weight of the term that keeps the subspaces of an episode apart
    logit_scale: float = Field(10.0, gt=0)  # of the mean squared distance of two images, where the learned scale starts


class DSN(Method):
    """Simon, Koniusz, Nock, Harandi, "Adaptive Subspaces for Few-Shot Learning", CVPR 2020.

    μ is the mean of a class's K photos, U spans their differences from it (K − 1 dimensions). A query's score is minus
    its squared distance to that plane, ‖(I − UUᵀ)(q − μ)‖², over the number of features, times a learned scale.
    Training adds the overlap Σ‖U_iᵀU_j‖² of the subspaces of an episode.

    The rank is that of the photos: directions with hardly a singular value (`RANK`) are left out, so repeated photos
    change nothing, and one photo alone is a point, as in ProtoNet; the authors add its mirror image instead. U is the
    whole span, so the projection is worked out from inner products of photos, without singular vectors, whose gradient
    breaks where two singular values meet. A class with more photos has a larger plane, and so smaller distances. The
    overlap is that of five classes, whatever their number (the authors train with five and sum over pairs).
    """

    def __init__(self, channels: int, size: int, config: DSNConfig) -> None:
        super().__init__()
        self.config = config
        self.log_scale = nn.Parameter(torch.zeros(()))

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=features.mean((-1, -2)) if self.config.pooled else features.flatten(1))  # [B, D]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        centre, spread, inverse = planes(support["f"], labels)
        within = torch.einsum("qd,nkd->nqk", query["f"], spread) - (spread @ centre[:, :, None]).transpose(1, 2)
        covered = ((within @ inverse) * within).sum(2)  # [N, Q] ‖UUᵀ(q − μ)‖²
        squares = (torch.cdist(query["f"], centre).square() - covered.T).clamp_min(0.0)  # [Q, N]
        return -self.log_scale.exp() * squares / centre.shape[1]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return super().loss(query, support, labels, targets) | {
            "apart": self.config.apart * overlap(support["f"], labels)
        }

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        """The scale, so that the mean squared distance of two of these images becomes the configured one."""
        flat = self.encode(features)["f"]
        mean_square = 2 * (flat - flat.mean(0)).square().mean() * len(flat) / max(1, len(flat) - 1)
        self.log_scale.fill_(math.log(self.config.logit_scale) - float(mean_square.clamp_min(1e-12).log()))


def planes(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each class: μ [N, D], the photos' differences from it X [N, K, D], and (XXᵀ)⁺ [N, K, K] of its full rank.

    The projection UUᵀ is Xᵀ(XXᵀ)⁺X. Classes with fewer than K photos are filled up with zeros.
    """
    classes = int(labels.max()) + 1
    member = F.one_hot(labels, classes).T  # [N, n]
    there, place = member.topk(int(member.sum(1).max()), 1)  # [N, K] is there a photo, and which
    centre = class_mean(features, labels, classes)
    photos = features[place] * there[:, :, None]
    spread = photos - centre[:, None] * there[:, :, None]
    squares = photos.detach().square().sum((1, 2), keepdim=True).clamp_min(1e-12)  # [N, 1, 1]
    inverse = torch.linalg.pinv(spread @ spread.transpose(1, 2) / squares, atol=RANK, rtol=0.0, hermitian=True)
    return centre, spread, inverse / squares


def overlap(features: Tensor, labels: Tensor) -> Tensor:
    """Σ_{i≠j} ‖U_iᵀU_j‖² over ordered pairs of classes, as many as five classes have."""
    _, spread, inverse = planes(features, labels)
    classes = len(spread)
    between = torch.einsum("ikd,jld->ijkl", spread, spread)  # [N, N, K, K]
    squares = ((inverse[:, None] @ between @ inverse) * between).sum((2, 3))  # [N, N] tr(P_i P_j)
    return 20 * (squares.sum() - squares.diagonal().sum()) / max(1, classes * (classes - 1))
