"""Where the parts really are, and which images the linear maps are fitted on and which are scored.

Three splits. `novel`: fitted on the base classes, scored on the novel ones, which the model has never seen. `val`: the
same, scored on the val classes, to choose by. `official`: fitted on the images the data set calls train, scored on the
others, all classes; this is what papers report, but a model trained on all images of the base classes has seen half of
what is scored. `seen_before` counts them.
"""

from typing import NamedTuple

import numpy as np

from parseshot.data.packed import Pack
from parseshot.engine.model import Model
from parseshot.errors import DataError, UsageError

SPLITS = ("novel", "val", "official")


class Truth(NamedTuple):
    """What is known of n images with P landmarks; places are (x, y) in pixels."""

    landmarks: np.ndarray  # [n, P, 2]
    visible: np.ndarray  # [n, P]
    origin: np.ndarray  # [n, 1, 2] corner of the object's box, or of the picture where there are no boxes
    extent: np.ndarray  # [n, 1, 2]
    labels: np.ndarray  # [n]

    def in_box(self, places: np.ndarray) -> np.ndarray:
        """Places [n, ·, 2] in shares of the object's box."""
        return (places - self.origin) / self.extent


def read_truth(pack: Pack, numbers: np.ndarray) -> Truth:
    """The annotations of some images of a pack."""
    if pack.parts is None:
        raise DataError(f"{pack.path} has no annotated positions; part quality needs them")
    annotated = np.asarray(pack.parts[numbers], dtype=float)  # [n, P, 3]
    origin, extent = np.zeros((len(numbers), 1, 2)), np.full((len(numbers), 1, 2), float(pack.size))
    if pack.boxes is not None:
        boxes = np.asarray(pack.boxes[numbers], dtype=float)
        origin, extent = boxes[:, None, :2], np.maximum(boxes[:, None, 2:] - boxes[:, None, :2], 1e-6)
    return Truth(annotated[..., :2], annotated[..., 2] > 0.5, origin, extent, pack.labels[numbers])


def sides(pack: Pack, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the images to fit on and to score."""
    if split in ("novel", "val"):
        fit, score = (np.concatenate(list(pack.by_class(side).values())) for side in ("base", split))
        return fit, score
    if split != "official":
        raise UsageError(f"unknown split {split!r}; there are {', '.join(SPLITS)}")
    if pack.official_train is None:
        raise DataError(
            f"{pack.path} does not say which images the data set calls train; "
            "if the data set does, prepare it again, otherwise use the split novel"
        )
    train = np.asarray(pack.official_train) > 0
    if train.all() or not train.any():
        raise DataError(f"{pack.path}: all images are on one side of the official split")
    return np.flatnonzero(train), np.flatnonzero(~train)


def seen_before(model: Model, pack: Pack, numbers: np.ndarray) -> int:
    """How many of the images are of classes the model was trained on, as far as its provenance says."""
    known = set(model.provenance.get("base_classes", ()))
    return int(np.isin(pack.labels[numbers], [row for row, name in enumerate(pack.classes) if name in known]).sum())
