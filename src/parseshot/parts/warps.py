"""Parts that follow a photo that is turned, scaled and shifted, and how much of it they miss. Not in the paper.

Letters: B photos, S scales, K parts, G×G cells. Places are (x, y) in cells, as in `parsing`; a warp [2, 3] says where a
place of the moved photo comes from, in [−1, 1] from edge to edge (`parseshot.data.augment.draw_warps`).
"""

import torch
from torch import Tensor

LEAST = 1e-3  # of a spread, in squares of a quarter of the grid: places that all but stay


def moved(mu: Tensor, warps: Tensor, size: int) -> Tensor:
    """Where places of the plain photo lie on the moved one: [B, S, K, 2], [B, 2, 3], grid G → [B, S, K, 2]."""
    plain = (2 * mu + 1) / size - 1  # cells → [−1, 1]
    there = torch.einsum("bij,bskj->bski", torch.linalg.inv(warps[:, :, :2]), plain - warps[:, None, None, :, 2])
    return ((there + 1) * size - 1) / 2


def unfollowed(plain: Tensor, warped: Tensor, warps: Tensor, size: int) -> Tensor:
    """How far parts are from following: places on photos and on the moved photos, [B, S, K, 2] each, → scalar.

    With a_i = `moved`(μ_i) and μ'_i of part k at scale s on the n photos whose a_i lies inside the picture,

        mean over s, k of   1/n Σ_i ‖μ'_i − a_i‖² / ½·(spread of a + spread of μ'),   spread of x = 1/n Σ_i ‖x_i − x̄‖²:

    0 where all follow, about 2 where μ' knows nothing of a. Measured against the spread, so that next to nothing is
    gained by places that are drawn together; gradients reach both parses.
    """
    aims = moved(plain, warps, size)
    inside = ((aims > -0.5) & (aims < size - 0.5)).all(-1, keepdim=True).to(aims.dtype)  # [B, S, K, 1]
    photos, scale = inside.sum(0).clamp_min(1), size / 4  # [S, K, 1]

    def spread(places: Tensor) -> Tensor:
        places = places / scale
        middle = (inside * places).sum(0) / photos
        return ((inside * (places - middle).square()).sum(0) / photos).sum(-1)  # [S, K]

    miss = (inside * ((warped - aims) / scale).square()).sum(0).sum(-1) / photos[..., 0]  # [S, K]
    return (miss / ((spread(aims) + spread(warped)) / 2).clamp_min(LEAST)).mean()
