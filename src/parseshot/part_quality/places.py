"""Where a part is, as a point: the peak of its map; and which landmarks lie in a square around it (P-D, P-E).

Letters: n images, L parts, P landmarks, G×G cells. Places are (x, y) in pixels; the centre of the top left one is 0.
"""

import numpy as np
import torch
import torch.nn.functional as F

TOGETHER = 256  # maps enlarged at once


def enlarged_peak(maps: np.ndarray, size: int) -> np.ndarray:
    """Where each map [..., G, G], enlarged bicubically to `size` pixels, is largest: [..., 2]; the first of equals.

    Bicubic enlargement is linear along each axis, so it is two matrix products.
    """
    flat = torch.from_numpy(np.ascontiguousarray(maps, dtype=np.float32)).flatten(0, -3)  # [m, G, G]
    weights = F.interpolate(torch.eye(flat.shape[-1])[None, None], (size, flat.shape[-1]), mode="bicubic")[0, 0]
    peak = torch.empty(len(flat), dtype=torch.int64)
    large = flat.new_empty(min(TOGETHER, len(flat)), size, size)  # one for all: results kept between would tear holes
    for some, found in zip(flat.split(TOGETHER), peak.split(TOGETHER), strict=True):
        enlarged = torch.matmul(weights @ some, weights.T, out=large[: len(some)])
        torch.argmax(enlarged.flatten(1), 1, out=found)
    return torch.stack((peak % size, peak // size), -1).double().numpy().reshape(*maps.shape[:-2], 2)


def inside(places: np.ndarray, landmarks: np.ndarray, visible: np.ndarray, half: float) -> np.ndarray:
    """Whether a landmark is visible and at most `half` pixels from a place along both axes.

    [n, L, 2], [n, P, 2] and [n, P] → [n, L, P].
    """
    apart = np.abs(places[:, :, None] - landmarks[:, None])  # [n, L, P, 2]
    return (apart <= half).all(-1) & visible[:, None]
