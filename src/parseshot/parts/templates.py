"""The dictionary of part templates D, their norms and their correlation with the features.

Letters: B images, C channels, K parts, S scales, G×G cells, s template side.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-12  # guards the division by ‖D‖² of an all-zero template


START_NORM = 0.1  # of a template: small, so that Adam's steps of fixed size turn it within a few hundred episodes
OTHER_CHANNELS = 0.1  # how much smaller the templates of channels outside a part's own share start


class Templates(nn.Module):
    """D_{s,p,c} in R^{s×s} for every scale s, part p and channel c: one parameter [K, C, s, s] a scale.

    The paper does not say how D starts. Features behind a ReLU are non-negative, so templates start positive. Every
    channel weighs the same in Eq. 5 once D is normalised, and only λ_c = λ/(2‖D‖) tells parts from each other at s = 1:
    so with `own_channels` each part starts with a share C/K of the channels as its own, and hears the others only when
    they are loud. Without it entries start in [½, 1½]·0.1/s: expressions go with 1/‖D‖, and as printed, without unit
    length, one template near zero would drown all others.
    """

    def __init__(self, channels: int, *, parts: int, scales: Sequence[int], own_channels: bool) -> None:
        super().__init__()
        self.scales = tuple(scales)
        shapes = [(parts, channels, side, side) for side in self.scales]
        if own_channels:
            own = torch.arange(channels) % parts == torch.arange(parts)[:, None]  # [K, C]
            level = torch.where(own, 1.0, OTHER_CHANNELS)[:, :, None, None]
            start = [level * (1.0 + 0.5 * torch.randn(shape)) for shape in shapes]
        else:
            start = [0.5 + torch.rand(shape) for shape in shapes]
        self.maps = nn.ParameterList(START_NORM * one / one.shape[-1] for one in start)

    def forward(self) -> list[Tensor]:
        return list(self.maps)


def correlate(phi: Tensor, templates: Tensor, spacing: int = 1) -> Tensor:
    """Response r = (D ∗ φ)(μ), a cross-correlation a channel with zeros outside the grid.

    phi [B, C, G, G] and templates [K, C, s, s] give [B, K, C, G, G]. Entries of a template lie `spacing` cells apart.

    >>> phi = torch.tensor([[[[0., 0., 0.], [0., 2., 0.], [0., 0., 1.]]]])
    >>> correlate(phi, torch.ones(1, 1, 3, 3))[0, 0, 0]
    tensor([[2., 2., 2.],
            [2., 3., 3.],
            [2., 3., 3.]])
    """
    parts, channels, side, _ = templates.shape
    kernels = templates.transpose(0, 1).reshape(channels * parts, 1, side, side)
    responses = F.conv2d(phi, kernels, padding=side // 2 * spacing, dilation=spacing, groups=channels)  # [B, C·K, G, G]
    return responses.unflatten(1, (channels, parts)).transpose(1, 2)  # [B, K, C, G, G]


def squared_norms(templates: Tensor) -> Tensor:
    """‖D‖² of each template: [K, C, s, s] → [K, C]."""
    return templates.square().sum((-1, -2)).clamp_min(EPS)


def visible_squared_norms(templates: Tensor, size: int, spacing: int = 1) -> Tensor:
    """‖D_M‖², the part of ‖D‖² that falls on a G×G grid when the template is centred at each cell: [K, C, G, G].

    >>> visible_squared_norms(torch.ones(1, 1, 3, 3), 3)[0, 0]
    tensor([[4., 6., 4.],
            [6., 9., 6.],
            [4., 6., 4.]])
    """
    parts, channels, side, _ = templates.shape
    inside = templates.new_ones(1, 1, size, size)
    squares = templates.square().reshape(parts * channels, 1, side, side)
    visible = F.conv2d(inside, squares, padding=side // 2 * spacing, dilation=spacing)
    return visible.view(parts, channels, size, size).clamp_min(EPS)
