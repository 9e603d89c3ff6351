"""DN4: each cell of the query looks for its nearest cells among all cells of a class."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from parseshot.config import Config
from parseshot.errors import UsageError
from parseshot.methods.base import Encoding, Method


class DN4Config(Config):
    """How many neighbours count; the paper takes 3, its code's later version finds 1 often better."""

    k: int = Field(1, ge=1)


class DN4(Method):
    """Li, Wang, Xu, Huo, Gao, Luo, "Revisiting Local Descriptor based Image-to-Class Measure for Few-shot Learning",
    CVPR 2019.

    The score of a class is the sum, over the cells of the query, of the cosines with the k nearest of all cells of the
    class's support photos. Nothing is learned but the backbone. With k above 1 a photo shown twice counts twice.
    """

    finer_grid = True

    def __init__(self, channels: int, size: int, config: DN4Config) -> None:
        super().__init__()
        self.config = config
        if config.k > size * size:
            raise UsageError(f"k = {config.k}: a photo has only {size * size} cells")

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(x=F.normalize(features, dim=1).flatten(2).transpose(1, 2).contiguous())  # [B, r, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        """One support photo at a time: the [Q·r, n·r] cosines of a fine grid would not fit into memory at once."""
        cells = query["x"].flatten(0, 1).T  # [C, Q·r]
        nearest = [nearest_cells(photo @ cells, self.config.k) for photo in support["x"].unbind()]  # n of [k, Q·r]
        scores = []
        for label in range(int(labels.max()) + 1):
            members = torch.cat([nearest[photo] for photo in (labels == label).nonzero().flatten().tolist()])
            scores.append(nearest_cells(members, self.config.k).sum(0))  # [Q·r]
        return torch.stack(scores, -1).view(*query["x"].shape[:2], -1).sum(1)  # [Q, N]


def nearest_cells(cosines: Tensor, k: int) -> Tensor:
    """The k largest of each column: [m, Q·r] → [k, Q·r]."""
    if k > 1:
        return cosines.topk(k, 0, sorted=False).values
    if cosines.requires_grad:
        return cosines.max(0, keepdim=True).values  # keeps where they are for the gradient, `amax` all cosines
    return cosines.amax(0, keepdim=True)  # many times as fast
