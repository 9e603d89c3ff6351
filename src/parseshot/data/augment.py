"""The paper's augmentation on batches: horizontal flip and perspective distortion, each image its own draw."""

import torch
import torch.nn.functional as F
from torch import Tensor


def augment(images: Tensor, *, flip: bool, perspective: float, seed: int, step: int) -> Tensor:
    """Flip each image with probability ½ and move its corners by up to `perspective` of half a side.

    images [B, 3, H, W]. The draw depends on (seed, step) alone, so a resumed run sees the same images.
    """
    random = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))
    count = len(images)
    mirrored = torch.rand(count, generator=random) < 0.5
    shifts = torch.rand(count, 4, 2, generator=random) * perspective
    if flip:
        images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
    if perspective > 0:
        images = warp(images, shifts)
    return images.contiguous(memory_format=torch.channels_last)


CORNERS = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])


def warp(images: Tensor, shifts: Tensor) -> Tensor:
    """Show each image as if its corners had moved inwards by `shifts` [B, 4, 2], in halves of a side.

    What falls outside repeats the border.
    """
    source = CORNERS.to(images) * torch.ones(len(images), 1, 1)
    matrix = homography(source * (1 - shifts.to(images)), source)  # output corner → input corner, [B, 3, 3]
    height, width = images.shape[-2:]
    rows, columns = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    grid_y, grid_x = torch.meshgrid(rows, columns, indexing="ij")
    points = torch.stack((grid_x, grid_y, torch.ones_like(grid_x)), -1).to(images).view(1, -1, 3)  # [1, H·W, 3]
    mapped = points @ matrix.transpose(1, 2)  # [B, H·W, 3]
    grid = (mapped[..., :2] / mapped[..., 2:]).view(-1, height, width, 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=True)


def homography(source: Tensor, target: Tensor) -> Tensor:
    """The projective maps that take four points to four others: [B, 4, 2], [B, 4, 2] → [B, 3, 3] with last entry 1."""
    (x, y), (u, v) = source.unbind(-1), target.unbind(-1)  # [B, 4] each
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    upper = torch.stack((x, y, one, zero, zero, zero, -x * u, -y * u), -1)
    lower = torch.stack((zero, zero, zero, x, y, one, -x * v, -y * v), -1)
    solution = torch.linalg.solve(torch.cat((upper, lower), 1), torch.cat((u, v), 1).unsqueeze(-1)).squeeze(
        -1
    )  # [B, 8]
    return torch.cat((solution, torch.ones_like(solution[:, :1])), 1).view(-1, 3, 3)
