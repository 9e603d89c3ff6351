"""SimpleShot: nearest class mean of centred unit features, the backbone trained as a plain classifier."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parseshot.config import Config
from parseshot.methods.base import BaseClassifier, BasePhotos, Companion, Encoding, Method
from parseshot.parts.distance import class_mean

WINDOW = 100  # training steps that the mean of the base features looks back on


class SimpleShotConfig(Config):
    """SimpleShot on the pooled map (as its code) or on the flattened one."""

    pooled: bool = True


class SimpleShot(Method):
    """Wang, Chao, Weinberger, van der Maaten, "SimpleShot: Revisiting Nearest-Neighbor Classification for Few-Shot
    Learning", arXiv:1911.04623, 2019; the variant CL2N.

    Trained by cross-entropy over the base classes with a linear head, which is dropped. A feature is centred with the
    mean of the base features and scaled to unit length; a query belongs to the class whose mean is nearest.
    The authors take the mean over all base photos once training is over. Here it is a running mean over the last steps,
    of the features as training sees them. It is saved with the model.
    """

    episodic = False
    mean: Tensor
    steps: Tensor

    def __init__(self, channels: int, size: int, config: SimpleShotConfig) -> None:
        super().__init__()
        self.config = config
        self.features = channels if config.pooled else channels * size * size  # D
        self.register_buffer("mean", torch.zeros(self.features))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))  # that went into the mean

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=features.mean((-1, -2)) if self.config.pooled else features.flatten(1))  # [B, D]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        asked, shown = (F.normalize(each["f"] - self.mean, dim=1) for each in (query, support))  # [Q, D], [n, D]
        centroids = class_mean(shown, labels, int(labels.max()) + 1)  # [N, D]
        return -torch.cdist(asked, centroids).square()  # [Q, N]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def companion(self, base: BasePhotos) -> Companion:
        return Following(self.features, base, self.follow)

    @torch.no_grad()
    def follow(self, features: Tensor) -> None:
        """Take the base features of a training step [B, D] into the mean."""
        self.steps += 1
        self.mean += (features.mean(0) - self.mean) / self.steps.clamp_max(WINDOW)

    def initialise(self, features: Tensor) -> None:
        self.steps.zero_()
        self.follow(self.encode(features)["f"])


class Following(BaseClassifier):
    """The linear head of the base classes; it shows the features to `follow` as it goes."""

    def __init__(self, features: int, base: BasePhotos, follow: Callable[[Tensor], None]) -> None:
        super().__init__(features, base)
        self.follow = follow

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        self.follow(encoding["f"])
        return super().forward(encoding, images)
