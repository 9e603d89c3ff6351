"""FRN: a query belongs to the class whose cells reconstruct its cells best. TDM and SRM build on it.

Letters: Q queries, N classes, n support images, r = G² cells of an image, m cells of a class, C channels.
"""

import math
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.parts.distance import by_class
from parseshot.parts.linear import positive_inverse

EPS = 1e-6  # least λ, in units of m/C


class Residual(NamedTuple):
    """The map x → ρ·xH − x for each class, H the ridge regression on its cells: a symmetric matrix aI + SᵀWS."""

    identity: float  # a
    inner: Tensor  # W, [N, C, C], or [N, m, m] where there are fewer cells than channels
    cells: Tensor | None  # S, [N, m, C]; None stands for I

    def squared(self) -> "Residual":
        """The map applied twice: ‖xR‖² = x·R²·x."""
        outer = self.inner if self.cells is None else self.inner @ (self.cells @ self.cells.mT)
        return Residual(self.identity**2, outer @ self.inner + 2 * self.identity * self.inner, self.cells)

    def dense(self) -> "Residual":
        """The same with matrices [N, C, C]."""
        if self.cells is None:
            return self
        eye = torch.eye(self.cells.shape[-1], dtype=self.cells.dtype, device=self.cells.device)
        return Residual(0.0, self.identity * eye + self.cells.mT @ self.inner @ self.cells, None)

    def of(self, cells: Tensor) -> Tensor:
        """xR for cells of each class: [N, p, C] → [N, p, C]."""
        basis = self.cells
        mapped = cells @ self.inner if basis is None else cells @ basis.mT @ self.inner @ basis
        return mapped + self.identity * cells

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """Mean over the cells of an image of x·R·y: [Q, r, C], [Q, r, C] → [Q, N]; no tensor of queries × classes × C.

        With matrices [C, C], the sum of xᵀy over the cells serves all classes; without, each class has its products.
        """
        (queries, size, channels), same = left.shape, right is left
        if self.cells is not None:  # multiplications of either way
            classes, number, _ = self.cells.shape
            by_class = queries * size * classes * number * (channels + number)
            at_once = queries * (size + classes) * channels**2 + classes * number * channels * (channels + number)
            if at_once < by_class:
                return self.dense().between(left, right)
        if self.cells is None:
            found = (left.mT @ right).flatten(1) @ self.inner.flatten(1).T
        else:
            one = self._products(left)
            other = one if same else self._products(right)
            found = (one @ self.inner * other).sum(-1).unflatten(1, (queries, size)).sum(-1).T
        return (found + self.identity * (left * right).sum((1, 2))[:, None]) / size

    def channel_errors(self, cells: Tensor) -> Tensor:
        """Mean over the cells of an image of (xR)², for each channel: [Q, r, C] → [Q, N, C]."""
        queries, size, channels = cells.shape
        if self.cells is not None and 2 * self.cells.shape[1] > channels:
            return self.dense().channel_errors(cells)
        if self.cells is None:  # one product for all classes
            mapped = cells.flatten(0, 1) @ self.inner.transpose(0, 1).flatten(1)  # [Q·r, N·C]
            return mapped.square().view(queries, size, -1, channels).mean(1)
        mapped = self._products(cells) @ (self.inner @ self.cells) + self.identity * cells.flatten(0, 1)  # [N, Q·r, C]
        return mapped.square().unflatten(1, (queries, size)).mean(2).transpose(0, 1)

    def _products(self, cells: Tensor) -> Tensor:
        """xSᵀ: [Q, r, C] → [N, Q·r, m]."""
        assert self.cells is not None
        flat = cells.flatten(0, 1) @ self.cells.flatten(0, 1).T  # [Q·r, N·m]
        return flat.unflatten(1, self.cells.shape[:2]).transpose(0, 1)


def residual(cells: Tensor, strength: Tensor, rho: Tensor) -> Residual:
    """Of reconstructions from cells S [N, m, C]: H = (SᵀS + λI)⁻¹SᵀS = Sᵀ(SSᵀ + λI)⁻¹S (Eq. 10 and 8), λ [N]."""
    lam = strength[:, None, None]
    (number, channels), left = cells.shape[-2:], cells.mT
    eye = torch.eye(min(number, channels), dtype=cells.dtype, device=cells.device)
    if number < channels:
        return Residual(-1.0, rho * positive_inverse(cells @ left + lam * eye), cells)
    return Residual(0.0, (rho - 1) * eye - rho * lam * positive_inverse(left @ cells + lam * eye), None)


def as_cells(features: Tensor) -> Tensor:
    """[B, C, G, G] → [B, r, C]."""
    return features.flatten(2).mT


def orthogonality(cells: Tensor) -> Tensor:
    """Σ_{i<j} ‖S_i S_jᵀ‖² of classes [N, m, C], all cells together scaled to length 1 (as the authors' code does)."""
    cells = cells / cells.norm()
    return (_product_norm(cells.flatten(0, 1)) - _product_norm(cells).sum()) / 2


def _product_norm(cells: Tensor) -> Tensor:
    """‖S Sᵀ‖² = ‖SᵀS‖² by the smaller product: [..., m, C] → [...]."""
    number, channels = cells.shape[-2:]
    product = cells @ cells.mT if number < channels else cells.mT @ cells
    return product.square().sum((-1, -2))


class FRNConfig(Config):
    """Where FRN starts, and its second loss."""

    logit_scale: float = Field(30.0, gt=0)  # γ
    auxiliary: float = Field(0.03, ge=0)  # weight of `orthogonality`


class FRN(Method):
    """Wertheimer, Tang, Hariharan, "Few-Shot Classification with Feature Map Reconstruction Networks", CVPR 2021.

    Each cell of a query is reconstructed from all support cells of a class by ridge regression, in closed form; the
    mean squared error, times a learned scale γ, is the class's distance. λ and ρ, the length of the reconstruction,
    are learned.

    Differences: λ's least value counts in the same unit as λ, so that photos may be repeated. The paper divides the
    features of ResNets by √C and takes those of Conv-4 as they are; here `initialise` finds the number that brings the
    mean squared length of a cell to 1, for any backbone, and γ starts higher for it. No pre-training of its own.
    """

    def __init__(self, channels: int, size: int, config: FRNConfig) -> None:
        super().__init__()
        self.config = config
        self.log_lambda = nn.Parameter(torch.zeros(()))  # α
        self.log_rho = nn.Parameter(torch.zeros(()))  # β
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))
        self.register_buffer("unit", torch.ones(()))
        self.unit: Tensor

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        self.unit.copy_(features.square().sum(1).mean().sqrt().clamp_min(EPS))

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(x=as_cells(features) / self.unit)  # [B, r, C]

    def residual(self, support: Encoding, labels: Tensor) -> Residual:
        """Of each class of the support set."""
        cells, shots = by_class(support["x"], labels)
        per_shot = support["x"].shape[1] / cells.shape[-1]
        return residual(cells, shots * per_shot * (self.log_lambda.exp() + EPS), self.log_rho.exp())

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        cells = query["x"]
        return -self.log_scale.exp() * self.residual(support, labels).squared().between(cells, cells)  # [Q, N]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        terms = super().loss(query, support, labels, targets)
        cells, _ = by_class(support["x"], labels)
        return terms | {"orthogonality": self.config.auxiliary * orthogonality(cells)}
