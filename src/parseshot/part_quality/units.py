"""What is scored: the parts a model finds, at each scale, averaged over scales and pooled over them.

Letters: n images, S scales, K parts, L parts of one set of units, G×G cells. Places are (x, y) in pixels.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parseshot.data.packed import Pack
from parseshot.engine.features import FeaturePack
from parseshot.engine.model import BATCH, TOGETHER, Model
from parseshot.errors import DataError, ModelError
from parseshot.figures import UNCERTAIN
from parseshot.methods.dop import DOP
from parseshot.part_quality.places import enlarged_peak
from parseshot.parts.parsing import entropy, expected_location

ACTIVE = UNCERTAIN  # a part is active where the entropy of ν over ln G² is below this; drawings use the same
Progress = Callable[[int, int, str], None]  # (done, total, of what)
Change = Callable[[Tensor, np.ndarray], Tensor]  # images [b, 3, H, W] and their numbers → other images


@dataclass(frozen=True)
class Units:
    """L places on each of n images, and the maps they were read from; a floor has places only."""

    name: str
    expected: np.ndarray  # [n, L, 2] where ν expects the part, Eq. 5
    size: int  # pixels of a side of the picture
    active: np.ndarray | None = None  # [n, L]; None: always
    nu: np.ndarray | None = None  # [n, L, G, G]
    score: np.ndarray | None = None  # [n, L, G, G] what the softmax of Eq. 5 sees, standardised

    @functools.cached_property
    def peak(self) -> np.ndarray:
        """Where ν, enlarged to the picture, is largest, [n, L, 2]; a floor's are its places."""
        return self.expected if self.nu is None else enlarged_peak(self.nu, self.size)

    @property
    def locations(self) -> int:
        return self.expected.shape[1]

    @property
    def is_floor(self) -> bool:
        return self.name.startswith("floor")


class Parsed(NamedTuple):
    """The parse of n images, and how strong the features are."""

    nu: np.ndarray  # [n, S, K, G, G]
    score: np.ndarray  # [n, S, K, G, G]
    energy: np.ndarray  # [n, G, G] Σ_c φ² of the backbone's features


@torch.inference_mode()
def parse_images(
    model: Model,
    pack: Pack,
    numbers: np.ndarray,
    *,
    change: Change | None = None,
    batch: int = TOGETHER,
    progress: Progress | None = None,
) -> Parsed:
    """Parse images of a pack; from the features it has, or from pixels if there are none or they are to be changed."""
    if not isinstance(model.method, DOP):
        raise ModelError(f"method {model.config.method!r} finds no parts")
    if pack.size != model.config.image_size:
        raise DataError(f"{pack.path} holds images of {pack.size} px, the model wants {model.config.image_size} px")
    model.eval()
    pieces: list[tuple[Tensor, Tensor, Tensor]] = []
    for done, features in _features(model, pack, numbers, change, batch):
        found = model.method.parse(model.projection(features))
        pieces.append((found.nu.cpu(), found.score.cpu(), features.square().sum(1).cpu()))
        if progress:
            progress(done, len(numbers), "parsing")
    return Parsed(*(torch.cat(each).numpy() for each in zip(*pieces, strict=True)))


def _features(
    model: Model, pack: Pack, numbers: np.ndarray, change: Change | None, batch: int
) -> Iterator[tuple[int, Tensor]]:
    """Feature maps [b, C, G, G] of some images after the other, and how many are done with them."""
    for start in range(0, len(numbers), batch):
        some = numbers[start : start + batch]
        if change is None and isinstance(pack, FeaturePack):
            yield start + len(some), pack.maps(some).to(model.device)
            continue
        images = pack.load(some) if change is None else change(pack.load(some), some)
        parts = (part.to(model.device).contiguous(memory_format=torch.channels_last) for part in images.split(BATCH))
        yield start + len(some), torch.cat([model.features(part) for part in parts])


class Spread(NamedTuple):
    """Mean and deviation of the scores of each part over the cells of the fit side, [S, K, 1, 1] each."""

    middle: np.ndarray
    deviation: np.ndarray

    @staticmethod
    def of(score: np.ndarray) -> "Spread":
        deviation = np.maximum(score.std((0, 3, 4), keepdims=True)[0], 1e-9)
        return Spread(score.mean((0, 3, 4), keepdims=True)[0], deviation)


def part_units(parsed: Parsed, spread: Spread, scales: tuple[int, ...], size: int) -> list[Units]:
    """The parts on average over scales, at each scale, and of all scales beside each other: K, K and K·S units.

    On average means the mean of the scales' ν, and of their standardised scores. One scale is only itself.
    """
    score = (parsed.score - spread.middle) / spread.deviation  # [n, S, K, G, G]
    single = [
        _units(f"parts, scale {side}", parsed.nu[:, index], score[:, index], size) for index, side in enumerate(scales)
    ]
    if len(scales) == 1:
        return single
    mean = _units("parts, mean of scales", parsed.nu.mean(1), score.mean(1), size)
    return [mean, *single, _beside("parts, all scales", single)]


def _units(name: str, nu: np.ndarray, score: np.ndarray, size: int) -> Units:
    maps = torch.from_numpy(nu)
    expected = to_pixels(expected_location(maps).double().numpy(), nu.shape[-1], size)
    active = (entropy(maps) < ACTIVE).numpy()
    return Units(name, expected, size, active, nu, score)


def _beside(name: str, single: list[Units]) -> Units:
    expected, active, nu, score = (
        np.concatenate([getattr(one, field) for one in single], 1) for field in ("expected", "active", "nu", "score")
    )
    return Units(name, expected, single[0].size, active, nu, score)


def to_pixels(cells: np.ndarray, grid: int, size: int) -> np.ndarray:
    """Places in cells of a G×G grid → in pixels of the picture, centres at whole numbers in both.

    >>> to_pixels(np.array([0.0, 3.0]), 7, 224).tolist()
    [15.5, 111.5]
    """
    return (cells + 0.5) * (size / grid) - 0.5
