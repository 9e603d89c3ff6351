"""Delta-encoder: new examples of a class by applying how base-class photos differ from each other."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import BaseClassifier, BasePhotos, Companion, Encoding, Method
from parseshot.methods.fitting import Standardise, ridge_scores, same_class_partner, with_synthetic


class DeltaEncoderConfig(Config):
    """Sizes of the auto-encoder, and the classifier fitted at test time."""

    code: int = Field(16, ge=1)  # length of a delta
    hidden: int = Field(256, ge=1)  # units of the one hidden layer; the paper has 8,192
    deltas: int = Field(32, ge=1)  # applied to each support photo
    dropout: float = Field(0.5, ge=0, lt=1)  # of the hidden layers, in training
    share: float = Field(0.5, ge=0, le=1)  # of a class's weight that its synthetic features have
    ridge: float = Field(0.1, gt=0)
    logit_scale: float = Field(10.0, gt=0)


class DeltaEncoder(Method):
    """Schwartz et al., "Δ-encoder: an effective sample synthesis method for few-shot object recognition", NeurIPS 2018.

    From two features x, y of one base class an encoder makes a short code z = E(x, y), and a decoder gives x back from
    z and y. At test time codes of base pairs are applied to each support photo, and a linear classifier is fitted on
    what comes out and on the photos themselves. Trained by its companion alone: a classifier of the base classes for
    the backbone, the reconstruction on its features as they are.

    As in the authors' code (EliSchwartz/DeltaEncoder): codes of 16 numbers, one leaky hidden layer with dropout, an
    error weighted by itself, Σ|d|³ / Σ|d|². Different: the decoder adds to y; the codes are those of the latest
    training batch, the same for every photo, 32 of them instead of 1,024 a class; the photos have half of the weight;
    ridge regression in closed form instead of a softmax classifier trained by Adam.
    """

    episodic = False
    deltas: Tensor

    def __init__(self, channels: int, size: int, config: DeltaEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.channels = channels
        self.standardise = Standardise(channels)
        self.encoder = nn.ModuleList([nn.Linear(2 * channels, config.hidden), nn.Linear(config.hidden, config.code)])
        self.from_code = nn.Linear(config.code, config.hidden)
        self.from_anchor = nn.Linear(channels, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, channels)
        self.register_buffer("deltas", torch.randn(config.deltas, config.code) / 10)

    def delta(self, x: Tensor, anchor: Tensor, dropout: float = 0.0) -> Tensor:
        """z = E(x, y): [B, C], [B, C] → [B, 16]."""
        first, last = self.encoder
        hidden: Tensor = F.leaky_relu(first(torch.cat((x, anchor), 1)), 0.2)
        return last(F.dropout(hidden, dropout, training=dropout > 0))

    def apply_delta(self, code: Tensor, anchor: Tensor, dropout: float = 0.0) -> Tensor:
        """x̂ = y + D(z, y) for codes [..., 16] and anchors [..., C] that broadcast."""
        hidden = F.leaky_relu(self.from_code(code) + self.from_anchor(anchor), 0.2)
        return anchor + self.out(F.dropout(hidden, dropout, training=dropout > 0))

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=self.standardise(features.mean((-1, -2))))  # [B, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        photos = support["f"]
        synthetic = self.apply_delta(self.deltas, photos[:, None])  # [n, Z, C]
        shown = with_synthetic(photos, labels, synthetic, labels, self.config.share)
        return self.config.logit_scale * ridge_scores(query["f"], *shown, ridge=self.config.ridge)  # [Q, N]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def companion(self, base: BasePhotos) -> Companion:
        return DeltaTraining(self, base)

    def initialise(self, features: Tensor) -> None:
        self.standardise.initialise(features.mean((-1, -2)))


class DeltaTraining(BaseClassifier):
    """The base classifier, and the reconstruction of each photo from its code and the next photo of its class."""

    def __init__(self, method: DeltaEncoder, base: BasePhotos) -> None:
        super().__init__(method.channels, base)
        self.method = (method,)  # in a tuple: its weights are not the companion's

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        (method,) = self.method
        x = encoding["f"].detach()
        anchor = x[same_class_partner(self.labels[images])]
        drop = method.config.dropout
        found = method.apply_delta(method.delta(x, anchor, drop), anchor, drop)
        with torch.no_grad():  # codes from all over the batch
            chosen = torch.linspace(0, len(x) - 1, len(method.deltas), device=x.device).long()
            method.deltas.copy_(method.delta(x[chosen], anchor[chosen]))
        return super().forward(encoding, images) | {"reconstruction": self_weighted(found - x).mean()}


def self_weighted(error: Tensor) -> Tensor:
    """Σ w|d| with w = d² / Σd²: large errors count more, [B, C] → [B]."""
    return error.abs().pow(3).sum(1) / (error.square().sum(1) + 1e-7)
