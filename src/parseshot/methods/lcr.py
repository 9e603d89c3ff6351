"""Compositional representations: features that fall into the attributes, or parts, which people have annotated."""

import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.errors import UsageError
from parseshot.methods.base import BasePhotos, Companion, Encoding, Method
from parseshot.methods.fitting import Standardise, photo_weights, softmax_steps

log = logging.getLogger(__name__)


class LCRConfig(Config):
    """The regulariser of training, and the classifier fitted at test time."""

    attributes: str | None = None  # text file, a row of numbers for each base class, in the pack's order
    hard: bool = False  # the feature is to be the sum of its attributes; otherwise only to contain them
    compositional: float = Field(1.0, ge=0)
    orthogonal: float = Field(1.0, ge=0)
    steps: int = Field(50, ge=1)  # of gradient descent at test time
    rate: float = Field(2.0, gt=0, lt=4)


class LCR(Method):
    """Tokmakov, Wang, Hebert, "Learning Compositional Representations for Few-Shot Recognition", ICCV 2019.

    While a classifier of the base classes is trained, each attribute has a learned vector, and a photo's feature is
    drawn to those of its class's attributes: to their sum (hard), or to each, which leaves room for others (soft).
    The vectors are kept orthogonal. At test time a linear classifier is fitted on the support features.

    Known to us are the paper's abstract and second figure. Attributes are read from a file, which for CUB is made of
    class_attribute_labels_continuous.txt; above half of the largest number counts as present. Without the file, the
    annotated parts are the attributes: the feature of the cell in which a visible part lies is drawn to that part's
    vector (soft), or the photo's feature to the sum of its visible parts (hard). Without annotations there is the
    classifier of the base classes alone, which a warning says. The parts' places are those of the photo as it is: on
    mirrored or distorted views they are off, so train on parts without flips and perspective. Our own choice: cosines
    throughout; the feature is a learned linear map of the pooled features that starts as the identity, so that there
    is something to learn on a frozen backbone; gradient steps from zero at test time.
    """

    episodic = False

    def __init__(self, channels: int, size: int, config: LCRConfig) -> None:
        super().__init__()
        self.config = config
        self.channels = channels
        self.standardise = Standardise(channels)
        self.embed = nn.Linear(channels, channels)
        nn.init.eye_(self.embed.weight)
        nn.init.zeros_(self.embed.bias)

    def encode(self, features: Tensor) -> Encoding:
        if not self.training:
            return Encoding(f=self.embed(self.standardise(features.mean((-1, -2)))))  # [B, C]
        cells = self.embed(self.standardise(features.permute(0, 2, 3, 1)))  # [B, G, G, C]
        return Encoding(f=cells.mean((1, 2)), cells=cells)

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        photos = support["f"]
        targets, weights = photo_weights(labels, int(labels.max()) + 1, photos)
        start = photos.new_zeros(self.channels, targets.shape[1]), photos.new_zeros(targets.shape[1])
        steps, rate = self.config.steps, self.config.rate
        weight, bias = softmax_steps(photos, targets, weights, start, steps=steps, rate=rate, momentum=0.9)
        return query["f"] @ weight + bias  # [Q, N]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def companion(self, base: BasePhotos) -> Companion:
        return Compositional(self.channels, self.config, base)

    def initialise(self, features: Tensor) -> None:
        self.standardise.initialise(features.mean((-1, -2)))


class Compositional(Companion):
    """A classifier of the base classes, and the vectors of attributes or parts that features are made of."""

    def __init__(self, channels: int, config: LCRConfig, base: BasePhotos) -> None:
        super().__init__()
        self.config, self.base = config, base
        self.linear = nn.Linear(channels, base.classes)
        self.present = read_attributes(config.attributes, base.classes) if config.attributes else None  # [classes, A]
        count = base.parts.shape[1] if base.parts is not None else 0
        count = self.present.shape[1] if self.present is not None else count
        if not count:
            log.warning("lcr: neither attributes nor annotated parts: trained as a classifier of the base classes only")
        self.vectors = nn.Parameter(torch.randn(count, channels)) if count else None  # [A, C]

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        labels = self.base.labels.to(images.device)[images]
        f = encoding["f"]
        terms = {"base_ce": F.cross_entropy(self.linear(f), labels)}
        if self.vectors is None:
            return terms
        vectors = F.normalize(self.vectors, dim=1)
        if self.present is not None:
            shown = self.present.to(f)[labels]  # [B, A]
            alike = F.normalize(f, dim=1) @ vectors.T
        else:
            assert self.base.parts is not None
            parts = self.base.parts.to(f)[images]  # [B, P, 3]
            shown = ((parts[..., 2] > 0) & (parts[..., :2] >= 0).all(-1) & (parts[..., :2] <= 1).all(-1)).to(f)
            alike = F.cosine_similarity(at_parts(encoding["cells"], parts[..., :2]), vectors, dim=2)
        if self.config.hard:
            apart = (1 - F.cosine_similarity(f, shown @ vectors))[shown.sum(1) > 0].mean().nan_to_num()
        else:
            apart = (shown * (1 - alike)).sum() / shown.sum().clamp_min(1.0)
        overlap = (vectors @ vectors.T - torch.eye(len(vectors), dtype=f.dtype, device=f.device)).square().mean()
        terms["compositional"] = self.config.compositional * apart
        terms["orthogonal"] = self.config.orthogonal * overlap
        return terms


def at_parts(cells: Tensor, places: Tensor) -> Tensor:
    """The feature of the cell in which each part lies: [B, G, G, C], places (x, y) in [0, 1] [B, P, 2] → [B, P, C]."""
    size = cells.shape[1]
    column, row = (places * size).long().clamp(0, size - 1).unbind(-1)  # [B, P]
    return cells[torch.arange(len(cells), device=cells.device)[:, None], row, column]


def read_attributes(file: str, classes: int) -> Tensor:
    """Which attributes each base class has, [classes, A]."""
    try:
        values = np.loadtxt(Path(file), ndmin=2)
    except (OSError, ValueError) as error:
        raise UsageError(f"method lcr: attributes: {file} cannot be read ({error})") from None
    if len(values) != classes:
        raise UsageError(f"method lcr: attributes: {file} has {len(values)} rows, the pack {classes} base classes")
    return torch.from_numpy(values > values.max() / 2)
