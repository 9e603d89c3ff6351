"""P-B, NMI and ARI: the part found at each visible landmark against which landmark it is.

Choudhury et al. 2021; PDiscoNet. The parts' maps are enlarged bilinearly to the input, and the largest at the pixel of
a landmark is the part found there. DOP has no background map and its ν is nearly one-hot, so, as decided:

* its maps are the scores that the softmax of Eq. 5 sees, standardised for each part over the fit side, and background
  is a plane at the median of the largest score of a cell there. No label is used;
* ν is read as well, without a background: `nmi_nu`, `ari_nu`;
* a floor has places and no maps: a landmark belongs to the nearest of them.

Letters: n images, L maps or places, P landmarks, G×G cells.
"""

import numpy as np
import torch
import torch.nn.functional as F

BACKGROUND = 0.5  # share of the fit side's cells that are background: about what a bird leaves of its box


def normalised_mutual_information(truth: np.ndarray, found: np.ndarray) -> float:
    """Mutual information of two labellings [m] over the mean of their entropies, in [0, 1].

    >>> round(normalised_mutual_information(np.array([0, 0, 1, 1]), np.array([5, 5, 5, 3])), 4)
    0.3437
    """
    joint = _counts(truth, found) / len(truth)
    rows, columns = joint.sum(1), joint.sum(0)
    entropies = -(rows * np.log(rows)).sum() - (columns * np.log(columns)).sum()
    if entropies <= 0:  # one cluster each: the same
        return 1.0
    expected, some = np.outer(rows, columns), joint > 0
    return max(0.0, float(2 * (joint[some] * np.log(joint[some] / expected[some])).sum() / entropies))


def adjusted_rand_index(truth: np.ndarray, found: np.ndarray) -> float:
    """Pairs on which two labellings [m] agree, less what chance gives, over the most it can be (Hubert & Arabie 1985).

    >>> round(adjusted_rand_index(np.array([0, 0, 1, 2]), np.array([0, 0, 1, 1])), 4)
    0.5714
    """
    counts = _counts(truth, found)
    together, rows, columns, pairs = (
        float((each * (each - 1) / 2).sum())
        for each in (counts, counts.sum(1), counts.sum(0), np.array([float(len(truth))]))
    )
    chance, most = rows * columns / max(pairs, 1.0), (rows + columns) / 2
    return 1.0 if most == chance else (together - chance) / (most - chance)


def _counts(truth: np.ndarray, found: np.ndarray) -> np.ndarray:
    """How often each pair of labels occurs, float [R, C]; no row and no column is empty."""
    (rows, row), (columns, column) = (np.unique(labels, return_inverse=True) for labels in (truth, found))
    flat = np.bincount(row * len(columns) + column, minlength=len(rows) * len(columns))
    return flat.reshape(len(rows), len(columns)).astype(float)


def with_background(fit: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Scores [n, L, G, G] standardised for each part over `fit`, and a plane of background: [n, L + 1, G, G]."""
    middle, deviation = fit.mean((0, 2, 3), keepdims=True), np.maximum(fit.std((0, 2, 3), keepdims=True), 1e-9)
    level = np.quantile(((fit - middle) / deviation).max(1), BACKGROUND)
    plane = np.full((len(score), 1, *score.shape[2:]), level)
    return np.concatenate(((score - middle) / deviation, plane), 1)


def part_at(maps: np.ndarray, landmarks: np.ndarray, size: int) -> np.ndarray:
    """Which of the maps [n, L, G, G], enlarged to `size` pixels, is largest at each landmark [n, P, 2]: [n, P].

    Read at the pixel nearest to it, (x, y); one outside of the picture is read at its edge.
    """
    pixels = torch.from_numpy(np.rint(landmarks)).to(torch.float64)
    where = ((pixels + 0.5) / size * 2 - 1)[:, :, None]  # [n, P, 1, 2] in −1 … 1 from edge to edge
    values = F.grid_sample(torch.from_numpy(maps).double(), where, padding_mode="border", align_corners=False)
    return values[..., 0].argmax(1).numpy()  # of [n, L, P]


def nearest(places: np.ndarray, landmarks: np.ndarray) -> np.ndarray:
    """Which of the places [n, L, 2] is nearest to each landmark [n, P, 2]: [n, P]."""
    return np.linalg.norm(places[:, :, None] - landmarks[:, None], axis=-1).argmin(1)
