"""Foreground object transformation: a class's foreground, in postures seen on other classes."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import BaseClassifier, BasePhotos, Companion, Encoding, Method
from parseshot.methods.fitting import Standardise, ridge_scores, same_class_partner, with_synthetic


class FOTConfig(Config):
    """Size of the generator, and the classifier fitted at test time."""

    hidden: int = Field(64, ge=1)  # channels between the generator's two convolutions
    postures: int = Field(8, ge=1)  # each support photo is put into
    share: float = Field(0.5, ge=0, le=1)  # of a class's weight that its synthetic features have
    ridge: float = Field(0.1, gt=0)
    logit_scale: float = Field(10.0, gt=0)


class FOT(Method):
    """Wang, Song, Yang, Li, Huang, "Fine-Grained Few Shot Learning with Foreground Object Transformation", 2021.

    Neurocomputing 2021. The background is taken away, and a generator trained on the base classes changes the posture
    of what is left, so that each support photo gives further examples for any few-shot classifier; here a linear one.
    Trained by its companion alone: a classifier of the base classes, and the generator on its maps as they are.

    Known to us are the paper's abstract and keywords ("saliency map matching"), no code. The paper works on images,
    ours on feature maps: the foreground is where a cell's energy e is high, φ·e / (e + mean e); that mask is the
    posture; the generator learns to turn one photo's foreground map into that of another of its class, given both
    masks, from the neighbours of a cell and the mean of all. Its target postures at test time are masks of the latest
    training batch, the same for every photo. Ridge regression in closed form; the photos have half of the weight.
    """

    episodic = False
    postures: Tensor

    def __init__(self, channels: int, size: int, config: FOTConfig) -> None:
        super().__init__()
        self.config = config
        self.channels = channels
        self.standardise = Standardise(channels)
        self.from_map = nn.Conv2d(channels, config.hidden, 3, padding=1)
        self.from_whole = nn.Linear(channels, config.hidden, bias=False)
        self.from_posture = nn.Conv2d(1, config.hidden, 3, padding=1, bias=False)
        self.to_posture = nn.Conv2d(1, config.hidden, 3, padding=1, bias=False)
        self.out = nn.Conv2d(config.hidden, channels, 1)
        self.register_buffer("postures", torch.rand(config.postures, 1, size, size))

    def foreground(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The map without its background, in units of its spread, [B, C, G, G], and its posture [B, 1, G, G]."""
        energy = features.square().mean(1, keepdim=True)
        mask = energy / (energy + energy.mean((2, 3), keepdim=True)).clamp_min(1e-12)
        return features * mask / self.standardise.spread, mask

    def inner(self, maps: Tensor, posture: Tensor) -> Tensor:
        """What the generator knows of a photo before it is told the posture to turn to, [B, hidden, G, G]."""
        whole = self.from_whole(maps.mean((2, 3)))[:, :, None, None]  # what is to appear elsewhere
        return self.from_map(maps) + whole + self.from_posture(posture)

    def transform(self, maps: Tensor, posture: Tensor, target: Tensor) -> Tensor:
        """Foreground maps [B, C, G, G] in another posture [B, 1, G, G]."""
        hidden = F.leaky_relu(self.inner(maps, posture) + self.to_posture(target), 0.2)
        return maps + self.out(hidden)

    def pooled_transforms(self, maps: Tensor, posture: Tensor) -> Tensor:
        """What pooling the maps in all kept postures changes, [B, Z, C]: pooling and the last layer change places."""
        hidden = self.inner(maps, posture)[:, None] + self.to_posture(self.postures)  # [B, Z, hidden, G, G]
        pooled = F.leaky_relu(hidden, 0.2).mean((3, 4))
        return F.linear(pooled, self.out.weight[:, :, 0, 0], self.out.bias)

    def encode(self, features: Tensor) -> Encoding:
        maps, posture = self.foreground(features)
        f = maps.mean((2, 3)) - self.standardise.mean / self.standardise.spread  # [B, C]
        if not self.training:
            return Encoding(f=f, synthetic=f[:, None] + self.pooled_transforms(maps, posture))
        with torch.no_grad():  # only looked at by `monitor`
            synthetic = f[:, None] + self.pooled_transforms(maps, posture)
        return Encoding(f=f, synthetic=synthetic, maps=maps, posture=posture)

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        shown = with_synthetic(support["f"], labels, support["synthetic"], labels, self.config.share)
        return self.config.logit_scale * ridge_scores(query["f"], *shown, ridge=self.config.ridge)  # [Q, N]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def companion(self, base: BasePhotos) -> Companion:
        return PostureTraining(self, base)

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        maps, posture = self.foreground(features)
        self.standardise.initialise((maps * self.standardise.spread).mean((2, 3)))
        self.keep(posture)

    @torch.no_grad()
    def keep(self, posture: Tensor) -> None:
        """Postures from all over a batch, for later."""
        chosen = torch.linspace(0, len(posture) - 1, len(self.postures), device=posture.device).long()
        self.postures.copy_(posture[chosen])


class PostureTraining(BaseClassifier):
    """The base classifier, and each photo turned into the next one of its class."""

    def __init__(self, method: FOT, base: BasePhotos) -> None:
        super().__init__(method.channels, base)
        self.method = (method,)  # in a tuple: its weights are not the companion's

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        (method,) = self.method
        maps, posture = encoding["maps"].detach(), encoding["posture"].detach()
        partner = same_class_partner(self.labels[images])
        turned = method.transform(maps, posture, posture[partner])
        method.keep(posture)
        return super().forward(encoding, images) | {"transformation": (turned - maps[partner]).abs().mean()}
