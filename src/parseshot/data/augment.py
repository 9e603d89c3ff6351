"""Augmentation on batches, each image its own draw, the same for the same (seed, step).

`paper`: horizontal flip and perspective distortion. `frn`: random resized crop, colour jitter and flip, the recipe of
FRN and most peers. Both go from the pack's uint8 pixels to what the backbone sees. Warps turn, scale and shift a photo
by what is known, so that a parse can be asked to follow.
"""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from parseshot.config import Config

CROP_AREA, CROP_ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random resized crop
CROP_TRIES = 10
JITTER = 0.4  # brightness, contrast and saturation are multiplied by 1 ± this
GREY = (0.299, 0.587, 0.114)  # luma of red, green, blue
CHUNK = 16  # images resampled at a time: their floats stay in cache
TURN, SCALE, SHIFT = 20.0, (0.85, 1.15), 0.15  # of a warp: degrees, factor, share of the side
CORNERS = ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0))


class Augmentation(Config):
    """Which recipe, and its strength. The paper does not give one: these are torchvision's usual values."""

    name: Literal["paper", "frn", "none"] = "paper"
    flip: bool = True
    perspective: float = Field(0.5, ge=0, lt=1)  # paper: corners move inwards by up to this, in halves of a side …
    perspective_share: float = Field(0.5, ge=0, le=1)  # … in this share of the images

    @property
    def margin(self) -> bool:
        """Whether the recipe starts from all that a pack stores instead of the middle."""
        return self.name == "frn"


def augment(pixels: np.ndarray, config: Augmentation, *, size: int, seed: int, step: int) -> Tensor:
    """uint8 [B, H, H, 3] → uint8 [B, 3, size, size], channels_last in memory; the backbone makes it float."""
    images, random = torch.from_numpy(pixels), torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))
    mirrored = (torch.rand(len(images), generator=random) < 0.5) & config.flip
    if config.name == "paper":
        chosen = torch.rand(len(images), generator=random) < config.perspective_share
        shifts = torch.rand(len(images), 4, 2, generator=random) * config.perspective
        images = flip_and_distort(images, mirrored, chosen & (config.perspective > 0), shifts)
    elif config.name == "frn":
        boxes = random_boxes(len(images), random)
        factors = 1 + JITTER * (2 * torch.rand(len(images), 3, generator=random) - 1)
        images = crop_and_jitter(images, mirrored, boxes, factors, size)
    return images.permute(0, 3, 1, 2)


def flip_and_distort(images: Tensor, mirrored: Tensor, distorted: Tensor, shifts: Tensor) -> Tensor:
    """The paper's recipe on uint8 [B, H, H, 3]: only distorted images are resampled, their flips in the same go."""
    augmented = images.clone()
    bytes_of = augmented.numpy()  # NumPy writes rows of bytes ten times faster than index_copy_
    turned = torch.nonzero(mirrored & ~distorted).squeeze(1)
    bytes_of[turned.numpy()] = images.index_select(0, turned).flip(2).numpy()
    rows = torch.nonzero(distorted).squeeze(1)
    if len(rows):
        grid = warping_grid(shifts[rows], mirrored[rows], images.shape[1], images.shape[2])
        for chunk, where in zip(rows.split(CHUNK), grid.split(CHUNK), strict=True):
            floats = _to_floats(images.index_select(0, chunk))
            bytes_of[chunk.numpy()] = _to_bytes(_sample(floats, where)).numpy()
    return augmented


def crop_and_jitter(images: Tensor, mirrored: Tensor, boxes: Tensor, factors: Tensor, size: int) -> Tensor:
    """FRN's recipe on uint8 [B, H, H, 3]; a mirrored box is read from right to left."""
    boxes = torch.where(mirrored[:, None], boxes[:, [2, 1, 0, 3]], boxes)
    pieces = []
    for rows in torch.arange(len(images)).split(CHUNK):
        crops = crop_and_resize(images[rows[0] : rows[-1] + 1].permute(0, 3, 1, 2).float(), boxes[rows], size)
        pieces.append(_to_bytes(jitter(crops, factors[rows], white=255.0).add_(0.5)))
    return torch.cat(pieces)


def _to_floats(images: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] → float [B, 3, H, W], half a level brighter: cutting off the fraction then rounds."""
    return torch.add(images, 0.5).permute(0, 3, 1, 2)


def _to_bytes(images: Tensor) -> Tensor:
    """float [B, 3, H, W] from ½ to 255½ → uint8 [B, H, W, 3]."""
    return torch.stack(images.to(torch.uint8).unbind(1), -1)


def warp(images: Tensor, shifts: Tensor) -> Tensor:
    """Show each image [B, C, H, W] as if its corners had moved inwards by `shifts` [B, 4, 2], in halves of a side.

    What falls outside repeats the border.
    """
    unmirrored = torch.zeros(len(images), dtype=torch.bool)
    return _sample(images, warping_grid(shifts, unmirrored, *images.shape[-2:]))


def _sample(images: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=True)


def draw_warps(numbers: np.ndarray, seed: int) -> Tensor:
    """A turn, a factor and a shift of each image as affine maps [n, 2, 3]; a function of (seed, image number) alone.

    They say where a place of the moved photo comes from, both in [−1, 1] from edge to edge of the picture, as
    `affine_grid` with align_corners=False takes them.
    """
    warps = np.empty((len(numbers), 2, 3), dtype=np.float32)
    for row, number in enumerate(numbers):
        random = np.random.default_rng((seed, int(number)))
        angle, factor = np.deg2rad(random.uniform(-TURN, TURN)), random.uniform(*SCALE)
        x, y = random.uniform(-2 * SHIFT, 2 * SHIFT, 2)
        cos, sin = np.cos(angle) / factor, np.sin(angle) / factor
        warps[row] = [[cos, -sin, x], [sin, cos, y]]
    return torch.from_numpy(warps)


def move_photos(pixels: np.ndarray, warps: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] and warps [B, 2, 3] → uint8 [B, 3, H, W]; what falls outside repeats the border."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    grid = F.affine_grid(warps, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return moved.add_(0.5).clamp_(0, 255).to(torch.uint8)


def warping_grid(shifts: Tensor, mirrored: Tensor, height: int, width: int) -> Tensor:
    """Where each output pixel of a warp comes from, [B, H, W, 2] in [−1, 1]; `mirrored` images from the other side."""
    corners = torch.tensor(CORNERS).expand(len(shifts), 4, 2)
    h = homography(corners * (1 - shifts), corners)  # output corner → input corner, [B, 3, 3]
    h[:, 0] *= torch.where(mirrored, -1.0, 1.0)[:, None]
    x, y = torch.linspace(-1, 1, width).view(1, 1, -1), torch.linspace(-1, 1, height).view(1, -1, 1)
    to_x, to_y, depth = (
        h[:, i, 0, None, None] * x + (h[:, i, 1, None, None] * y + h[:, i, 2, None, None]) for i in range(3)
    )
    grid, scale = torch.empty(len(shifts), height, width, 2), depth.reciprocal_()
    torch.mul(to_x, scale, out=grid[..., 0])
    torch.mul(to_y, scale, out=grid[..., 1])
    return grid


def homography(source: Tensor, target: Tensor) -> Tensor:
    """The projective maps that take four points to four others: [B, 4, 2], [B, 4, 2] → [B, 3, 3] with last entry 1."""
    (x, y), (u, v) = source.unbind(-1), target.unbind(-1)  # [B, 4] each
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    upper = torch.stack((x, y, one, zero, zero, zero, -x * u, -y * u), -1)
    lower = torch.stack((zero, zero, zero, x, y, one, -x * v, -y * v), -1)
    solution = torch.linalg.solve(torch.cat((upper, lower), 1), torch.cat((u, v), 1).unsqueeze(-1)).squeeze(-1)
    return torch.cat((solution, torch.ones_like(solution[:, :1])), 1).view(-1, 3, 3)


def random_boxes(count: int, random: torch.Generator) -> Tensor:
    """Boxes [B, 4] (left, top, right, bottom) in [0, 1] of random area and aspect; the first of ten draws that fits."""
    low, high = CROP_AREA
    area = low + (high - low) * torch.rand(count, CROP_TRIES, generator=random)
    first, last = (float(np.log(bound)) for bound in CROP_ASPECT)
    aspect = torch.exp(first + (last - first) * torch.rand(count, CROP_TRIES, generator=random))
    width, height = (area * aspect).sqrt(), (area / aspect).sqrt()  # [B, tries]
    fits = (width <= 1) & (height <= 1)
    chosen = fits.int().argmax(1, keepdim=True)  # the first that fits; else the first, cut to the picture
    width, height = (side.gather(1, chosen).squeeze(1).clamp(max=1) for side in (width, height))
    left, top = ((1 - side) * torch.rand(count, generator=random) for side in (width, height))
    return torch.stack((left, top, left + width, top + height), 1)


def crop_and_resize(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """The boxes [B, 4] (shares of the sides) of images [B, C, H, W], each stretched to size×size."""
    centres = (torch.arange(size) + 0.5).to(images) / size  # of output pixels, as shares
    x = boxes[:, 0, None] + (boxes[:, 2] - boxes[:, 0])[:, None] * centres  # [B, size]
    y = boxes[:, 1, None] + (boxes[:, 3] - boxes[:, 1])[:, None] * centres
    shape = (len(images), size, size)
    grid = torch.stack((x[:, None, :].expand(shape), y[:, :, None].expand(shape)), -1) * 2 - 1
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def jitter(images: Tensor, factors: Tensor, *, white: float = 1.0) -> Tensor:
    """Multiply brightness, then contrast, then saturation by factors [B, 3]; torchvision shuffles that order."""
    brightness, contrast, saturation = (factor.view(-1, 1, 1, 1) for factor in factors.to(images).unbind(1))
    luma = torch.tensor(GREY).to(images).view(1, 3, 1, 1)
    images = (images * brightness).clamp_(0, white)
    mean = (images * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    images = (mean + (images - mean) * contrast).clamp_(0, white)
    grey = (images * luma).sum(1, keepdim=True)
    return (grey + (images - grey) * saturation).clamp_(0, white)
