"""P-D, purity: how often the same landmark lies in a small square around a part.

PIP-Net (Nauta et al. 2023). Left and right eye, leg and wing are one landmark. A part's purity is the largest over
landmarks of the share of images, of those that show the landmark, in which it lies in a square of 32 pixels (of 224)
around the part. PIP-Net takes a prototype's images with a similarity above 0.5; a part of DOP is always somewhere, so
purity is measured over all images, and over those where the part is active.
"""

from collections.abc import Sequence

import numpy as np

HALF = 16 / 224  # half the side of the square, as a share of the picture's


def merge_sides(names: Sequence[str]) -> np.ndarray:
    """A number for each landmark, the same for left and right.

    >>> merge_sides(["beak", "left_eye", "right_eye"]).tolist()
    [0, 1, 1]
    """
    whole = [name.removeprefix("left_").removeprefix("right_") for name in names]
    return np.array([whole.index(name) for name in whole])


def purity(found: np.ndarray, visible: np.ndarray, merged: np.ndarray, active: np.ndarray | None = None) -> np.ndarray:
    """Purity of each part, [L]; NaN for one that is never active.

    found [n, L, P] whether a landmark lies around a part, visible [n, P], merged [P], active [n, L].
    """
    counted = np.ones(found.shape[:2], dtype=bool) if active is None else active
    shares = []
    for landmark in np.unique(merged):
        shown = counted & visible[:, merged == landmark].any(1, keepdims=True)  # [n, L]
        hits = found[:, :, merged == landmark].any(2) & shown
        shares.append(hits.sum(0) / np.maximum(shown.sum(0), 1))
    return np.where(counted.any(0), np.max(shares, 0), np.nan)
