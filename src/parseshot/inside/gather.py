"""What the figures are made of: the photos of a split as a model parses them, and the rules by which some are shown.

Letters: n photos, S scales, K parts, C channels, G×G cells.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parseshot.data.packed import Pack
from parseshot.engine.encoding import Progress, encode_split
from parseshot.engine.model import Model
from parseshot.errors import DataError
from parseshot.figures import UNCERTAIN
from parseshot.methods.base import Encoding
from parseshot.methods.dop import DOP
from parseshot.parts.distance import Distance, Shown
from parseshot.recognition.explain import FoundPart, dop_of, find_parts, places_of


@dataclass(frozen=True)
class ShownPhoto:
    """A photo with its parts."""

    pixels: np.ndarray  # uint8 [H, W, 3]
    name: str  # of its class
    parts: tuple[FoundPart, ...]


@dataclass(frozen=True)
class Seen:
    """A split through a model's eyes. Rows are photos, class by class; classes of one photo are left out."""

    model: Model
    pack: Pack
    split: str
    encoding: Encoding
    images: np.ndarray  # [n] row → image number of the pack
    labels: np.ndarray  # [n] row → class number
    rows: dict[int, np.ndarray]  # class number → its rows, two or more

    @property
    def method(self) -> DOP:
        return dop_of(self.model)

    @property
    def scales(self) -> tuple[int, ...]:
        return self.method.config.scales

    def take(self, rows: np.ndarray) -> Encoding:
        return self.encoding.take(torch.from_numpy(np.asarray(rows)))

    def name(self, number: int) -> str:
        return self.pack.classes[number]

    def pixels(self, row: int) -> np.ndarray:
        return self.pack.pixels([int(self.images[row])])[0]

    def photo(self, row: int) -> ShownPhoto:
        parts = find_parts(self.model, self.encoding, int(row))
        return ShownPhoto(self.pixels(row), self.name(int(self.labels[row])), parts)


def see(model: Model, pack: Pack, split: str, progress: Progress | None = None) -> Seen:
    """Parse every photo of a split once; from kept feature maps if `pack` has them."""
    dop_of(model)  # refused before the work
    found = encode_split(model, pack, split, progress=progress)
    labels = np.zeros(len(found.images), dtype=np.int64)
    for number, rows in found.rows.items():
        labels[rows] = number
    several = {number: rows for number, rows in found.rows.items() if len(rows) > 1}
    if len(several) < 2:
        raise DataError(f"{pack.path}: split {split!r} has {len(several)} classes of two photos or more; 2 are needed")
    return Seen(model, pack, split, found.encoding, found.images, labels, several)


def halves(rows: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The rows of a class twice: every second of them is compared with the others, and the other way round."""
    return (rows[::2], rows[1::2]), (rows[1::2], rows[::2])


@torch.inference_mode()
def to_own_class(seen: Seen, rows: np.ndarray) -> list[tuple[np.ndarray, Shown, Distance]]:
    """Eq. 7 of the photos of a class to the class as the other half of its photos shows it: (photos, class, terms)."""
    found = []
    for asked, shown in halves(rows):
        prepared = seen.method.prepare(seen.take(shown), torch.zeros(len(shown), dtype=torch.long))
        found.append((asked, prepared, seen.method.terms(seen.take(asked), prepared)))
    return found


def own_distances(seen: Seen) -> np.ndarray:
    """[n]: how far each photo is from the other half of its class; NaN where the class has one photo."""
    found = np.full(len(seen.labels), np.nan)
    for rows in seen.rows.values():
        for asked, _, terms in to_own_class(seen, rows):
            found[asked] = terms.total[:, 0].numpy()
    return found


def unsureness(seen: Seen) -> np.ndarray:
    """[n]: mean entropy of a photo's parts, each at its surest scale."""
    entropy = places_of(seen.model, seen.encoding)[1]  # [n, S, K]
    return entropy.amin(1).mean(1).numpy()


def unsure_shares(seen: Seen) -> np.ndarray:
    """[K]: the share of photos in which a part is not found for sure at any scale, so that its ring is dashed."""
    entropy = places_of(seen.model, seen.encoding)[1]  # [n, S, K]
    return (entropy.amin(1) >= UNCERTAIN).double().mean(0).numpy()


def edge_shares(seen: Seen) -> np.ndarray:
    """[K]: the share of photos in which a part's ν, at its surest scale, is largest in a cell at the picture's edge."""
    nu, entropy = seen.encoding["nu"], places_of(seen.model, seen.encoding)[1]  # [n, S, K, G, G], [n, S, K]
    surest = entropy.argmin(1)[:, None, :, None, None].expand(-1, 1, -1, *nu.shape[3:])  # [n, 1, K, G, G]
    mode = nu.gather(1, surest)[:, 0].flatten(2).argmax(2)  # [n, K]
    cell = torch.stack((mode % nu.shape[4], mode // nu.shape[4]))  # [2, n, K] column and row
    return ((cell == 0) | (cell == nu.shape[4] - 1)).any(0).double().mean(0).numpy()


def evenly(count: int, most: int) -> list[int]:
    """Places of up to `most` of `count` things, evenly spaced, the first and the last among them.

    >>> evenly(10, 4), evenly(2, 4), evenly(10, 1)
    ([0, 3, 6, 9], [0, 1], [0])
    """
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int)).tolist()


def middle(rows: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """The `count` rows around the median of their values, in the order of these.

    >>> middle(np.array([0, 1, 2, 3]), np.array([0.5, 0.1, 0.9, 0.3]), 2).tolist()
    [3, 0]
    """
    order = rows[np.argsort(values[rows], kind="stable")]
    start = max(0, (len(order) - count) // 2)
    return order[start : start + count]


def unit(templates: Tensor) -> np.ndarray:
    """θ = D/‖D‖ of templates [..., s, s]."""
    norm = templates.square().sum((-1, -2), keepdim=True).sqrt().clamp_min(1e-12)
    return (templates / norm).numpy()
