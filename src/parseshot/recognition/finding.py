"""Where in a photo the object is, before any network has seen it: where there are edges, and rather in the middle.

A photographer puts the object near the middle and has it sharp before a background that often is not. On whole photos
of birds both together overlap the true box better than where a pretrained network's features are strong, and cost no
pass of a network (benchmarks/whole_photos.py, docs/LOG.md).
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from parseshot.data.photo import MIN_SIDE
from parseshot.recognition.records import Box

SIDE = 57  # pixels of the small grey picture in which edges are looked for
MIDDLE = 0.7  # deviation of the weight that falls off from the middle, in halves of a side
OUTSIDE = 0.1  # share of the edges that lies beyond each side of the object …
MARGIN = 0.1  # … which is shown with this much of its width and height around it
USUAL = 0.72  # of a photo's width and height, that an object mostly takes


def find_objects(images: Sequence[Image.Image]) -> list[Box | None]:
    """A box (left, top, right, bottom) for each photo in its pixels, or None where that would be too small to show."""
    found: list[Box | None] = []
    for image, shares in zip(images, steadied(energy_boxes(edges(images))) if images else (), strict=True):
        left, top, right, bottom = (shares * (*image.size, *image.size)).tolist()
        large = min(right - left, bottom - top) >= MIN_SIDE / 2
        found.append((left, top, right, bottom) if large else None)
    return found


def edges(images: Sequence[Image.Image]) -> np.ndarray:
    """How much brightness changes around each place of a photo, weighed less far from its middle: [n, G, G].

    Between four neighbouring pixels of the photo shrunk to SIDE×SIDE, so that G = SIDE − 1 and a turned photo has a
    turned map.
    """
    small = [image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0).convert("L") for image in images]
    grey = np.stack([np.asarray(one, dtype=np.float32) for one in small])  # [n, SIDE, SIDE]
    across, down = np.diff(grey, axis=2), np.diff(grey, axis=1)
    strength = np.hypot(across[:, 1:] + across[:, :-1], down[:, :, 1:] + down[:, :, :-1])  # [n, G, G]
    from_middle = np.linspace(-1, 1, 2 * SIDE - 1)[1::2]  # centres of the places
    fall = np.exp(-0.5 * (from_middle / MIDDLE) ** 2)
    strength -= strength.min((1, 2), keepdims=True)
    return strength * (fall[:, None] * fall).astype(np.float32)


def steadied(boxes: np.ndarray) -> np.ndarray:
    """Each box's width and height half way to the usual ones, around its own centre: [n, 4] → [n, 4], in shares.

    Edges tell the centre of an object better than its size, and photos of a class are best seen at one size.

    >>> steadied(np.array([[0.4, 0.0, 0.6, 0.72]])).round(9).tolist()
    [[0.27, 0.0, 0.73, 0.72]]
    """
    low, high = boxes[:, :2], boxes[:, 2:]
    centre, half = (low + high) / 2, (high - low + USUAL) / 4
    return np.concatenate((centre - half, centre + half), 1).clip(0.0, 1.0)


def energy_boxes(energy: np.ndarray) -> np.ndarray:
    """Around the box that leaves a tenth of the energy beyond each of its edges: [n, G, G] → [n, 4].

    Left, top, right and bottom in shares of the map, of the energy less the smallest on the map. One that is the same
    everywhere gives a box that leaves 2 % of the map on each side.

    >>> energy_boxes(np.array([[[0.0, 0.0], [0.0, 1.0]]])).round(9).tolist()
    [[0.51, 0.51, 0.99, 0.99]]
    """
    count, size = len(energy), energy.shape[-1]
    above = (energy - energy.min((1, 2), keepdims=True)).astype(np.float64)
    above = np.where(above.sum((1, 2), keepdims=True) > 0, above, 1.0)
    ends = []
    for axis in (1, 2):  # summed over rows: along x
        along = above.sum(axis)  # [n, G]
        share = np.concatenate((np.zeros((count, 1)), along.cumsum(1)), 1) / along.sum(1, keepdims=True)
        places = np.linspace(0, 1, size + 1)
        ends.append(np.array([np.interp((OUTSIDE, 1 - OUTSIDE), one, places) for one in share]).reshape(-1, 2))
    low, high = (np.stack([end[:, side] for end in ends], 1) for side in (0, 1))  # (x, y)
    margin = MARGIN * (high - low)
    return np.concatenate((low - margin, high + margin), 1).clip(0.0, 1.0)
