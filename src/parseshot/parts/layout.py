"""Where everything lies on an object, and how much of it the places of its parts tell. Not in the paper.

Cells of a frozen backbone's maps fall into kinds: a beak, a wing's edge, a wheel. Where each kind lies on a photo says
how the object is turned, bent and cut, and no annotation is needed to see it. Parts that recognise well need not know:
the term here asks of K parts that a linear map of their K places tells where all kinds lie, which is keypoint
regression (`parseshot.part_quality.regression`) with kinds instead of annotated landmarks.

Letters: B images, C channels, D principal components, K parts, M kinds, G×G cells. Places are (x, y) in cells, as in
`parsing`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parseshot.parts.parsing import expected_location

ROUNDS = 30  # of k-means
BASIS = 64  # principal components of cells in which kinds are told apart: the others are noise
TEMPERATURE = 0.07  # of a kind's place, in units of the cosine
SURE = 0.5  # share of the photos on which a kind is looked for: where it is most alike
RIDGE = 0.01  # strength of the regression, of places in units of a quarter of the grid
FAR = 0.25  # a squared miss, in units of the spread of kinds, from which on misses count by their length


class Kinds(NamedTuple):
    """M kinds of cells, and how alike a photo's best cell must be to count."""

    middle: Tensor  # [C] the mean cell
    basis: Tensor  # [C, D] principal components of strong cells
    centres: Tensor  # [M, D] of unit length
    least: Tensor  # [M] cosine


def find_kinds(features: Tensor, count: int, generator: torch.Generator) -> Kinds:
    """Spherical k-means of the stronger half of each photo's cells: features [n, C, G, G] → M kinds."""
    cells = features.flatten(2).mT  # [n, G², C]
    middle = cells.mean((0, 1))
    energy = cells.square().sum(2)  # [n, G²]
    strong = (cells - middle)[energy > energy.median(1, keepdim=True).values]  # [m, C]
    if len(strong) < count:
        raise ValueError(f"{count} kinds of cells need as many strong cells, these photos have {len(strong)}")
    basis = torch.linalg.eigh(strong.T @ strong).eigenvectors[:, -BASIS:]  # [C, D], the largest come last
    strong = F.normalize(strong @ basis, dim=1)  # [m, D]
    centres = strong[torch.randperm(len(strong), generator=generator)[:count]]
    for _ in range(ROUNDS):
        nearest = (strong @ centres.T).argmax(1)
        total = torch.zeros_like(centres).index_add_(0, nearest, strong)
        total = torch.where(total.norm(dim=1, keepdim=True) > 0, total, centres)  # one that is nobody's stays
        centres = F.normalize(total, dim=1)
    found = Kinds(middle, basis, centres, centres.new_full((count,), -1.0))
    alike = torch.cat([kind_places(some, found)[1] for some in features.split(256)])  # [n, M]
    return found._replace(least=alike.quantile(1 - SURE, 0))


def kind_places(features: Tensor, kinds: Kinds) -> tuple[Tensor, Tensor]:
    """Where each kind lies on each photo, and the cosine of its best cell: [B, C, G, G] → [B, M, 2], [B, M]."""
    cells = F.normalize((features.flatten(2).mT - kinds.middle) @ kinds.basis, dim=2)  # [B, G², D]
    alike = (cells @ kinds.centres.T).mT  # [B, M, G²]
    nu = torch.softmax(alike / TEMPERATURE, 2).unflatten(2, features.shape[-2:])
    return expected_location(nu), alike.amax(2)


def untold(mu: Tensor, places: Tensor, counts: Tensor, size: int) -> Tensor:
    """What a linear map of the parts' places leaves untold of where kinds lie, 0 to about 1.

    mu [B, K, 2], places [B, M, 2], counts [B, M] (1 where a kind is sure, else 0), grid G → scalar. For each kind a
    ridge regression over the photos on which it counts, in closed form. Misses are measured against the spread of
    all kinds together, so that one that moves much counts more than one that stays, and far ones by their length
    instead of its square.
    """
    scale = size / 4
    given = torch.cat((torch.ones_like(mu[:, 0, :1]), ((mu - (size - 1) / 2) / scale).flatten(1)), 1)  # [B, 2K + 1]
    photos = counts.sum(0).clamp_min(1.0)  # [M]
    middle = (counts[..., None] * places).sum(0) / photos[:, None]  # [M, 2]
    aims = (places - middle) / scale  # [B, M, 2]
    spread = ((counts[..., None] * aims.square()).sum() / (2 * counts.sum().clamp_min(1.0))).clamp_min(1e-6)
    gram = torch.einsum("bi,bm,bj->mij", given, counts, given)  # [M, 2K + 1, 2K + 1]
    gram = gram + RIDGE * photos[:, None, None] * torch.eye(given.shape[1], dtype=mu.dtype, device=mu.device)
    maps = torch.linalg.solve(gram, torch.einsum("bi,bm,bmd->mid", given, counts, aims))  # [M, 2K + 1, 2]
    miss = (torch.einsum("bi,mid->bmd", given, maps) - aims).square().mean(2) / spread  # [B, M]
    soft = 2 * FAR * ((miss / FAR + 1).sqrt() - 1)  # miss where it is small, 2·√(FAR·miss) where it is large
    return (counts * soft).sum() / counts.sum().clamp_min(1.0)
