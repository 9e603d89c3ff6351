"""P-A, keypoint regression: annotated positions predicted from the parts' locations by a linear map.

Huang & Li 2020; PDiscoNet; PDiscoFormer. Locations and landmarks are normalised by the object's box. For each landmark
a linear map from all locations is fitted on images where it is visible, on one side of a split, and its mean Euclidean
error measured on the other. More locations lower the error whatever they are, so scores and floors are compared at the
same number of locations. PDiscoNet also sets the standardised location of an inactive part to 0; both are measured.
"""

import numpy as np

from parseshot.errors import DataError

Side = tuple[np.ndarray, np.ndarray, np.ndarray]  # locations [n, L, 2], landmarks [n, P, 2], visible [n, P]


def regression_error(
    fit: Side, score: Side, *, active: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[float, np.ndarray]:
    """Mean error over all visible landmarks of `score`, and for each landmark, of linear maps fitted on `fit`.

    active: which locations count, [n, L] of both sides; the others are where they are on average.
    """
    errors, counts = [], []
    masks = (None, None) if active is None else active
    for landmark in range(fit[1].shape[1]):
        (x, y, shown), (x_score, y_score, shown_score) = (
            _seen(side, mask, landmark) for side, mask in zip((fit, score), masks, strict=True)
        )
        if len(x) == 0 or len(x_score) == 0:
            raise DataError(f"landmark number {landmark} is visible on no image; it cannot be scored")
        middle, scale = x.mean(0), np.maximum(x.std(0), 1e-9)
        coefficients, *_ = np.linalg.lstsq((x - middle) / scale * shown, y - y.mean(0), rcond=1e-6)
        predicted = (x_score - middle) / scale * shown_score @ coefficients + y.mean(0)
        errors.append(np.linalg.norm(predicted - y_score, axis=1).sum())
        counts.append(len(x_score))
    return float(np.sum(errors) / np.sum(counts)), np.array(errors) / np.array(counts)


def _seen(side: Side, active: np.ndarray | None, landmark: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Locations [m, 2L] and positions [m, 2] where a landmark is visible, and 1 where a location counts."""
    locations, truth, visible = side
    seen = visible[:, landmark]
    x = locations[seen].reshape(-1, 2 * locations.shape[1])
    shown = np.ones_like(x) if active is None else np.repeat(active[seen], 2, axis=1).astype(x.dtype)
    return x, truth[seen, landmark], shown
