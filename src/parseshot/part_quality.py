"""Are the parts parts? Annotated positions predicted from part locations by a linear map, against four floors.

Protocol P-A (Huang & Li 2020; PDiscoNet; PDiscoFormer): part locations and landmarks are normalised by the object's
box; for each landmark a linear map from all part locations is fitted on images of some classes where it is visible, and
its mean Euclidean error measured on others. Here it is fitted on base classes and measured on unseen ones. More
locations lower the error whatever they are, so scores and floors are compared at the same number of locations.

Letters: n images, S scales, K parts, P landmarks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from parseshot.data.packed import Pack
from parseshot.engine.model import Model
from parseshot.errors import DataError, ModelError
from parseshot.methods.dop import DOP


@dataclass(frozen=True)
class Score:
    """Keypoint regression error in per cent of the box, over all visible landmarks and for each of them."""

    name: str
    locations: int  # how many 2-D locations the linear map sees
    error: float
    by_landmark: dict[str, float]


def regression_error(
    fit: tuple[np.ndarray, np.ndarray, np.ndarray], score: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> tuple[float, np.ndarray]:
    """Mean error over all visible landmarks of `score`, and for each landmark, of linear maps fitted on `fit`.

    Each is (locations [n, L, 2], landmarks [n, P, 2], visible [n, P]).
    """
    errors, counts = [], []
    for landmark in range(fit[1].shape[1]):
        (x, y), (x_score, y_score) = (
            (locations[seen[:, landmark]].reshape(seen[:, landmark].sum(), -1), truth[seen[:, landmark], landmark])
            for locations, truth, seen in (fit, score)
        )
        if len(x) == 0 or len(x_score) == 0:
            raise DataError(f"landmark number {landmark} is visible on no image; it cannot be scored")
        middle, scale = x.mean(0), np.maximum(x.std(0), 1e-9)
        coefficients, *_ = np.linalg.lstsq((x - middle) / scale, y - y.mean(0), rcond=1e-6)
        predicted = (x_score - middle) / scale @ coefficients + y.mean(0)
        errors.append(np.linalg.norm(predicted - y_score, axis=1).sum())
        counts.append(len(x_score))
    return float(np.sum(errors) / np.sum(counts)), np.array(errors) / np.array(counts)


@torch.inference_mode()
def locate(model: Model, pack: Pack, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Locations [n, K, 2] in pixels by name: the parts' at each scale and averaged over scales, and the floors'."""
    if not isinstance(model.method, DOP):
        raise ModelError(f"method {model.config.method!r} finds no parts")
    model.eval()
    parts = model.method.config.parts
    mu, peak = [], []
    for start in range(0, len(numbers), 64):
        features = model.features(pack.load(numbers[start : start + 64]))  # [b, C, G, G]
        mu.append(model.method.parse(model.projection(features)).mu)  # [b, S, K, 2]
        peak.append(features.square().sum(1).flatten(1).argmax(1))  # [b]
    found = torch.cat(mu)  # [n, S, K, 2]
    energy = torch.cat(peak)
    size, count = model.grid, len(numbers)
    random = np.random.default_rng(0)
    quarter, three = size / 4 - 0.5, 3 * size / 4 - 0.5
    corners = np.array([[quarter, quarter], [three, quarter], [quarter, three], [three, three]])
    cells: dict[str, np.ndarray] = {"parts, mean of scales": found.mean(1).numpy()}
    for index, side in enumerate(model.method.config.scales):
        cells[f"parts, scale {side}"] = found[:, index].numpy()
    cells["floor: box centre"] = np.zeros((count, 1, 2))
    cells["floor: random cell"] = random.integers(0, size, (count, parts, 2)).astype(float)
    cells["floor: energy argmax"] = torch.stack((energy % size, energy // size), -1)[:, None].numpy().astype(float)
    cells["floor: 2×2 grid"] = np.tile(corners, (count, 1, 1))
    pixels = {name: (where + 0.5) * (pack.size / size) - 0.5 for name, where in cells.items()}
    if pack.boxes is not None:
        boxes = np.asarray(pack.boxes[numbers], dtype=float)
        pixels["floor: box centre"] = ((boxes[:, :2] + boxes[:, 2:]) / 2)[:, None]
    return pixels


def part_quality(model: Model, pack: Pack, *, fit: str = "base", score: str = "novel") -> list[Score]:
    """Score the model's parts and the floors on a pack with annotated positions."""
    if pack.parts is None:
        raise DataError(f"{pack.path} has no annotated positions; part quality needs them")
    sets = []
    for split in (fit, score):
        numbers = np.concatenate(list(pack.by_class(split).values()))
        annotated = np.asarray(pack.parts[numbers], dtype=float)  # [n, P, 3]
        origin, extent = _frame(pack, numbers)
        landmarks = (annotated[..., :2] - origin) / extent
        pixels = locate(model, pack, numbers)
        sets.append(
            {name: ((where - origin) / extent, landmarks, annotated[..., 2] > 0.5) for name, where in pixels.items()}
        )
    scores = []
    for name in sets[0]:
        error, by_landmark = regression_error(sets[0][name], sets[1][name])
        named = {part: 100 * float(value) for part, value in zip(pack.part_names, by_landmark, strict=True)}
        scores.append(Score(name, sets[0][name][0].shape[1], 100 * error, named))
    return scores


def _frame(pack: Pack, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corner and extent [n, 1, 2] of each object's box, or of the picture where there are no boxes."""
    if pack.boxes is None:
        return np.zeros((len(numbers), 1, 2)), np.full((len(numbers), 1, 2), float(pack.size))
    boxes = np.asarray(pack.boxes[numbers], dtype=float)
    return boxes[:, None, :2], np.maximum(boxes[:, None, 2:] - boxes[:, None, :2], 1e-6)
