"""P-E, consistency and stability: the same landmarks around a part on all photos of a class, and under noise.

EvalProtoPNet (Huang et al. 2023). Its prototypes belong to a class; the parts of DOP are shared, so a unit is a part on
one class, of the classes that are scored. A unit is consistent if some landmark lies within 36 pixels (of 224) of the
part on at least 0.8 of the photos of the class that show the landmark. Stability is how often the set of landmarks
around a part stays the same when noise is added. The noise is EvalProtoPNet's, in the units of ImageNet's
normalisation whatever the backbone's own is, so that all models see the same pixels.
"""

import numpy as np
import torch
from torch import Tensor

from parseshot.backbones.normalise import IMAGENET_STD

HALF = 36 / 224  # half the side of the square, as a share of the picture's
OFTEN = 0.8
NOISE, LIMIT = 0.2, 0.25  # standard deviation and largest value


def consistency(found: np.ndarray, visible: np.ndarray, labels: np.ndarray) -> float:
    """Share of consistent pairs of part and class; found [n, L, P], visible [n, P], labels [n]."""
    consistent = []
    for label in np.unique(labels):
        of_class = labels == label
        shown = visible[of_class].sum(0)  # [P]
        share = found[of_class].sum(0) / np.maximum(shown, 1)  # [L, P]; a landmark never shown has 0
        consistent.append((share >= OFTEN).any(1))
    return float(np.mean(consistent))


def stability(before: np.ndarray, after: np.ndarray) -> float:
    """Share of parts of images around which the set of landmarks is the same, [n, L, P] each."""
    return float((before == after).all(2).mean())


def add_noise(images: Tensor, numbers: np.ndarray, *, noise: float = NOISE, seed: int = 0) -> Tensor:
    """Images [b, 3, H, W] in [0, 1] with the noise of their numbers [b]: the same in whatever batch they come."""
    drawn = [np.random.default_rng((seed, int(number))).normal(0, 1, images.shape[1:]) for number in numbers]
    units = torch.tensor(IMAGENET_STD).view(3, 1, 1)
    return images + torch.from_numpy(np.stack(drawn)).float().mul(noise).clamp(-LIMIT, LIMIT) * units
