"""The dictionary of part templates D, their norms and their correlation with the features.

Letters: B images, C channels, K parts, S scales, G×G cells, s template side.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-12  # guards the division by ‖D‖² of an all-zero template


class Templates(nn.Module):
    """D_{s,p,c} in R^{s×s} for every scale s, part p and channel c: one parameter [K, C, s, s] a scale.

    Features behind a ReLU are non-negative, so a template of mixed signs on average answers nothing. Entries start as
    1 + N(0, 1) instead: every part answers to what is bright, and each weighs cells and channels differently.
    """

    def __init__(self, channels: int, *, parts: int, scales: Sequence[int]) -> None:
        super().__init__()
        self.scales = tuple(scales)
        self.maps = nn.ParameterList(1.0 + torch.randn(parts, channels, side, side) for side in self.scales)

    def forward(self) -> list[Tensor]:
        return list(self.maps)


def correlate(phi: Tensor, templates: Tensor) -> Tensor:
    """Response r = (D ∗ φ)(μ), a cross-correlation a channel with zeros outside the grid.

    phi [B, C, G, G] and templates [K, C, s, s] give [B, K, C, G, G].

    >>> phi = torch.tensor([[[[0., 0., 0.], [0., 2., 0.], [0., 0., 1.]]]])
    >>> correlate(phi, torch.ones(1, 1, 3, 3))[0, 0, 0]
    tensor([[2., 2., 2.],
            [2., 3., 3.],
            [2., 3., 3.]])
    """
    parts, channels, side, _ = templates.shape
    kernels = templates.transpose(0, 1).reshape(channels * parts, 1, side, side)
    responses = F.conv2d(phi, kernels, padding=side // 2, groups=channels)  # [B, C·K, G, G]
    return responses.unflatten(1, (channels, parts)).transpose(1, 2)  # [B, K, C, G, G]


def squared_norms(templates: Tensor, size: int, *, masked: bool) -> Tensor:
    """‖D‖² at each cell of a G×G grid, [K, C, G, G].

    masked: count only the template entries that fall on the grid when it is centred there. A template at the edge is
    then compared with what it can see, and parts may lie on the border; otherwise its full norm counts everywhere.

    >>> squared_norms(torch.ones(1, 1, 3, 3), 3, masked=True)[0, 0]
    tensor([[4., 6., 4.],
            [6., 9., 6.],
            [4., 6., 4.]])
    """
    squares = templates.square()
    if masked:
        parts, channels, side, _ = templates.shape
        inside = templates.new_ones(1, 1, size, size)
        norms = F.conv2d(inside, squares.reshape(parts * channels, 1, side, side), padding=side // 2)
        return norms.view(parts, channels, size, size).clamp_min(EPS)
    return squares.sum((-1, -2), keepdim=True).expand(-1, -1, size, size).clamp_min(EPS)
