"""Baseline++: a cosine classifier of the base classes, and a new one fitted on the support photos."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from parseshot.config import Config
from parseshot.methods.base import BasePhotos, Companion, Encoding, Method


class BaselinePPConfig(Config):
    """Baseline++ on the flattened map (the custom for Conv-4) or on the pooled one (the custom for ResNets)."""

    pooled: bool = False
    steps: int = Field(100, ge=0, le=10_000)  # of gradient descent on the support photos
    lr: float = Field(0.05, gt=0)  # of these steps


class BaselinePP(Method):
    """Chen, Liu, Kira, Wang, Huang, "A Closer Look at Few-shot Classification", ICLR 2019.

    Scores are s·g_y·cos(v_y, f), with a direction v and a length g for each class. A cosine classifier of the base
    classes trains the backbone and is dropped; for an episode a new one is fitted on the support photos, the backbone
    frozen. The authors start it from random weights and take 100 epochs of SGD in batches of four, lr 0.01, momentum
    and dampening 0.9 (which cancel) and a weight decay of 0.001. Here it starts from the class means of the unit
    features and takes 100 steps of 0.05 on all photos at once, without decay: as far in all as SGD goes (5 against 2 at
    one photo a class and 7 at five), but without chance, whatever the order of photos and classes.
    """

    episodic = False
    many_steps = True

    def __init__(self, channels: int, size: int, config: BaselinePPConfig) -> None:
        super().__init__()
        self.config = config
        self.features = channels if config.pooled else channels * size * size  # D

    def encode(self, features: Tensor) -> Encoding:
        flat = features.mean((-1, -2)) if self.config.pooled else features.flatten(1)
        return Encoding(f=F.normalize(flat, dim=1))  # [B, D]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        gram = support["f"] @ support["f"].T  # [n, n]
        weights = fit(gram, labels, scale=scale_for(int(labels.max()) + 1), steps=self.config.steps, lr=self.config.lr)
        return query["f"] @ support["f"].T @ weights.T  # [Q, N]

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def companion(self, base: BasePhotos) -> Companion:
        return CosineClassifier(self.features, base)


def scale_for(classes: int) -> float:
    """s, as the authors' code sets it."""
    return 2.0 if classes <= 200 else 10.0


def fit(gram: Tensor, labels: Tensor, *, scale: float, steps: int, lr: float) -> Tensor:
    """Gradient descent on the mean cross-entropy of s·g_y·cos(v_y, f) over n photos with inner products [n, n].

    Start and gradients of v lie in the span of the photos, so v = directions · f, and no step depends on the number of
    features. Returns s·g·v/‖v‖ as coefficients of the photos, [N, n].
    """
    target = F.one_hot(labels, int(labels.max()) + 1).T.to(gram.dtype)  # [N, n]
    directions = target / target.sum(1, keepdim=True).clamp_min(1.0)
    lengths = _norm(directions, directions @ gram)  # [N, 1] g
    for _ in range(steps):
        inner = directions @ gram  # [N, n] ⟨v, f⟩
        norm = _norm(directions, inner)
        cosine = inner / norm
        slope = scale / len(labels) * (torch.softmax(scale * lengths * cosine, 0) - target)  # [N, n] by g·cos
        along = (slope * cosine).sum(1, keepdim=True)  # [N, 1] by g
        directions = directions - lr * lengths / norm * (slope - along / norm * directions)
        lengths = lengths - lr * along
    return scale * lengths / _norm(directions, directions @ gram) * directions


def _norm(directions: Tensor, inner: Tensor) -> Tensor:
    return (directions * inner).sum(1, keepdim=True).clamp_min(1e-12).sqrt()


class CosineClassifier(Companion):
    """The cosine classifier of the base classes."""

    labels: Tensor

    def __init__(self, features: int, base: BasePhotos) -> None:
        super().__init__()
        self.scale = scale_for(base.classes)
        self.linear = weight_norm(nn.Linear(features, base.classes, bias=False), dim=0)
        self.register_buffer("labels", base.labels, persistent=False)

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        return {"base_ce": F.cross_entropy(self.scale * self.linear(encoding["f"]), self.labels[images])}
