"""How sharp a picture is: how steep its strongest edges are, whatever their contrast.

The variance of a Laplacian also falls with contrast and texture; a plain bird on a plain sky is not blurred. An edge
that a Gaussian of σ pixels has blurred takes 0.4/σ of its height in its steepest pixel, so the number can be read.
"""

import numpy as np
from PIL import Image

REACH = 8  # pixels over which an edge's height is taken; a ramp of that length is as blurred as can be told, 1/8
STRONGEST = 0.02  # share of all places that count as edges


def edge_steepness(pixels: np.ndarray) -> float:
    """Share of the height of the strongest edges that one pixel takes, of uint8 [H, H, 3]: 1 is sharp, 1/8 blurred.

    Along rows or columns, whichever is sharper, as a picture with upright stripes has edges in one of them alone. A
    picture of one colour has 0.

    >>> step = np.zeros((20, 20, 3), np.uint8)
    >>> step[:, 10:] = 200
    >>> edge_steepness(step), edge_steepness(step // 2), edge_steepness(step * 0)
    (1.0, 1.0, 0.0)
    """
    grey = np.asarray(Image.fromarray(pixels).convert("L"), dtype=np.int16)
    return max(_along_rows(grey), _along_rows(np.ascontiguousarray(grey.T)))


def _along_rows(grey: np.ndarray) -> float:
    heights = np.abs(grey[:, REACH:] - grey[:, :-REACH])  # [H, H − REACH]
    edges = heights >= np.quantile(heights, 1 - STRONGEST)
    steps = np.abs(np.diff(grey, axis=1))  # [H, H − 1]
    steepest = np.lib.stride_tricks.sliding_window_view(steps, REACH, axis=1)[edges].max(1)  # [edges]
    height = heights[edges]
    return float(np.minimum(steepest, height).sum() / max(int(height.sum()), 1))
