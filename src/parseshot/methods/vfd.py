"""Variational feature disentangling: what varies within a class is a Gaussian that all classes share."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import BasePhotos, Companion, Encoding, Method
from parseshot.methods.fitting import Standardise, photo_weights, softmax_steps

WIDEST = 10.0  # logarithm of a variance, at most


class VFDConfig(Config):
    """Sizes of the variational auto-encoder, weights of its loss, and the classifier fitted at test time."""

    hidden: int = Field(64, ge=1)  # channels of the encoder's and decoder's one convolution
    kl: float = Field(1.0, ge=0)
    augmented: float = Field(1.0, ge=0)  # weight of the classification of features with a variation added
    synthetic: int = Field(16, ge=1)  # features made of each support photo
    share: float = Field(0.9, ge=0, le=1)  # of a class's weight that its synthetic features have
    steps: int = Field(50, ge=1)  # of gradient descent at test time
    rate: float = Field(2.0, gt=0, lt=4)


class VFD(Method):
    """Xu et al., "Variational Feature Disentangling for Fine-Grained Few-Shot Classification", ICCV 2021.

    A feature is a part that tells the class plus a variation that does not. The variation is encoded from the map by a
    variational auto-encoder, so that over all classes it follows N(0, I); with it the map is decoded again, and with it
    the class must still be told. At test time variations drawn from N(0, I) are added to the support features, and a
    classifier is fitted on these and the photos. Trained by its companion alone, in which encoder and decoder are: they
    are not needed afterwards.

    After the authors' code (cvlab-stonybrook/vfd-iccv21, methods/baselinevae.py and finetune_sample.py). Different: the
    class part is a learned linear map of the pooled features, which starts as the identity, so that there is something
    to learn on a frozen backbone; one convolution each way instead of three, the encoder's brought to unit length and
    without a say in the features; the plain KL divergence instead of its three parts, of variances up to e¹⁰; the error
    in shares of the map's energy; a linear instead of a cosine classifier, by full gradient steps; the same drawn
    variations for every photo.
    """

    episodic = False
    variations: Tensor

    def __init__(self, channels: int, size: int, config: VFDConfig) -> None:
        super().__init__()
        self.config = config
        self.channels, self.size = channels, size
        self.standardise = Standardise(channels)
        self.class_part = nn.Linear(channels, channels)
        nn.init.eye_(self.class_part.weight)
        nn.init.zeros_(self.class_part.bias)
        self.register_buffer("variations", torch.randn(config.synthetic, channels))

    def encode(self, features: Tensor) -> Encoding:
        cells = self.standardise(features.permute(0, 2, 3, 1))  # [B, G, G, C]
        f = self.class_part(cells.mean((1, 2)))  # [B, C]
        return Encoding(f=f, cells=cells) if self.training else Encoding(f=f)

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        photos, config = support["f"], self.config
        targets, weights = photo_weights(labels, int(labels.max()) + 1, photos)
        start = photos.new_zeros(self.channels, targets.shape[1]), photos.new_zeros(targets.shape[1])
        added = torch.cat((torch.zeros_like(self.variations[:1]), self.variations))  # the photo itself comes first
        shares = photos.new_full((len(added),), config.share / config.synthetic)
        shares[0] = 1 - config.share
        weight, bias = softmax_steps(
            photos,
            targets,
            weights,
            start,
            steps=config.steps,
            rate=config.rate,
            momentum=0.9,
            offsets=(added, shares),
        )
        return query["f"] @ weight + bias  # [Q, N]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def companion(self, base: BasePhotos) -> Companion:
        return Disentangling(self.channels, self.size, self.config, base)

    def initialise(self, features: Tensor) -> None:
        self.standardise.initialise(features.mean((-1, -2)))


class Disentangling(Companion):
    """A classifier of the base classes, and the auto-encoder q(z | map), p(map | class part + z)."""

    def __init__(self, channels: int, size: int, config: VFDConfig, base: BasePhotos) -> None:
        super().__init__()
        self.config, self.base = config, base
        inner = (config.hidden, size, size)
        self.linear = nn.Linear(channels, base.classes)
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, config.hidden, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            UnitLength(),
            nn.Linear(config.hidden * size**2, 2 * channels),
        )
        self.decoder = nn.Sequential(
            nn.Linear(channels, config.hidden * size**2),
            nn.LeakyReLU(0.2),
            nn.Unflatten(1, inner),
            nn.Conv2d(config.hidden, channels, 3, padding=1),
        )

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        f, maps = encoding["f"], encoding["cells"].permute(0, 3, 1, 2)  # [B, C], [B, C, G, G]
        labels = self.base.labels.to(images.device)[images]
        mean, log_variance = self.encoder(maps.detach()).chunk(2, 1)
        log_variance = WIDEST - F.softplus(WIDEST - log_variance)  # one that runs away is an infinite loss
        varied = f + mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return {
            "base_ce": F.cross_entropy(self.linear(f), labels),
            "augmented_ce": self.config.augmented * F.cross_entropy(self.linear(varied), labels),
            "reconstruction": (self.decoder(varied) - maps.detach()).square().mean() / maps.detach().square().mean(),
            "kl": self.config.kl * divergence(mean, log_variance).sum(1).mean(),
        }


class UnitLength(nn.Module):
    """Vectors [B, D] of length 1, so that q starts near N(0, I) and no step of Adam throws it far from there."""

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=1)


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) ‖ N(0, 1)) of each number."""
    return (mean.square() + log_variance.exp() - 1 - log_variance) / 2
