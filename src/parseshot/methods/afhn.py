"""Adversarial feature hallucination: a conditional Wasserstein GAN makes further features of a class."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import BasePhotos, Companion, Encoding, Method
from parseshot.methods.fitting import Standardise, ridge_scores, with_synthetic
from parseshot.parts.distance import class_mean


class AFHNConfig(Config):
    """Sizes of generator and critic, weights of the loss, and the classifier fitted at test time."""

    noise: int = Field(32, ge=2)  # length of z
    hidden: int = Field(256, ge=1)  # units of the hidden layer of generator and critic
    synthetic: int = Field(64, ge=1)  # features made of each class; the paper has 300
    share: float = Field(0.9, ge=0, le=1)  # of a class's weight that its synthetic features have
    penalty: float = Field(10.0, ge=0)  # weight of the critic's gradient penalty
    adversarial: float = Field(1.0, ge=0)
    follow: float = Field(0.1, ge=0)  # how strongly the generator follows the critic; at 1 the two circle each other
    anti_collapse: float = Field(0.1, ge=0)
    ridge: float = Field(0.1, gt=0)
    logit_scale: float = Field(4.0, gt=0)  # where it starts


class AFHN(Method):
    """Li, Zhang, Li, Fu, "Adversarial Feature Hallucination Networks for Few-Shot Learning", CVPR 2020.

    A generator makes features of a class from the mean of its support features and noise. It learns from a critic that
    tells them from real ones (WGAN), from the classification of the queries with them, and from a term that keeps
    features of different noise apart. At test time a linear classifier is fitted on the synthetic features and the
    photos.

    Known to us are the paper's abstract, its first figure and the three losses, no code. Different or our own choice:
    the generator adds to the mean; the classification loss is that of the classifier used at test time, ridge
    regression in closed form, with the same noise for every class; generator and critic take one step each at a time,
    in one minimisation through a reversed gradient, made ten times weaker; the critic and the anti-collapse term see
    features as they are, so the backbone learns from the classification alone. Lipschitz by WGAN-GP's gradient penalty.
    """

    noise: Tensor

    def __init__(self, channels: int, size: int, config: AFHNConfig) -> None:
        super().__init__()
        self.config = config
        self.channels = channels
        self.standardise = Standardise(channels)
        self.from_class = nn.Linear(channels, config.hidden)
        self.from_noise = nn.Linear(config.noise, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, channels)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))
        self.register_buffer("noise", torch.randn(config.synthetic, config.noise))

    def generate(self, given: Tensor, noise: Tensor) -> Tensor:
        """G(s, z) for class features [..., C] and noise [..., 32] that broadcast."""
        hidden = F.leaky_relu(self.from_class(given) + self.from_noise(noise), 0.2)
        return given + self.out(hidden)

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=self.standardise(features.mean((-1, -2))))  # [B, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        photos, classes = support["f"], int(labels.max()) + 1
        means = class_mean(photos, labels, classes)  # [N, C]
        synthetic = self.generate(means[:, None], self.noise)  # [N, Z, C]
        origins = torch.arange(classes, device=labels.device)
        shown = with_synthetic(photos, labels, synthetic, origins, self.config.share)
        return self.log_scale.exp() * ridge_scores(query["f"], *shown, ridge=self.config.ridge)  # [Q, N]

    def companion(self, base: BasePhotos) -> Companion:
        return Adversary(self, base)

    def initialise(self, features: Tensor) -> None:
        self.standardise.initialise(features.mean((-1, -2)))


class Adversary(Companion):
    """The critic D(x, s), and the anti-collapse term; s is the mean of the other photos of the class in the batch."""

    def __init__(self, method: AFHN, base: BasePhotos) -> None:
        super().__init__()
        self.method = (method,)  # in a tuple: its weights are not the companion's
        self.base = base
        self.from_feature = nn.Linear(method.channels, method.config.hidden)
        self.from_class = nn.Linear(method.channels, method.config.hidden, bias=False)
        self.out = nn.Linear(method.config.hidden, 1, bias=False)

    def critic(self, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """D [B] and its slope ∂D/∂x [B, C], written out: the network has one hidden layer."""
        inner = self.from_feature(x) + self.from_class(given)
        steep = torch.where(inner > 0, 1.0, 0.2).to(x.dtype)
        return self.out(inner * steep).squeeze(1), (self.out.weight * steep) @ self.from_feature.weight

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        (method,), config = self.method, self.method[0].config
        real = encoding["f"].detach()
        given = others_mean(real, self.base.labels.to(images.device)[images])
        first, second = torch.randn(2, len(real), config.noise, dtype=real.dtype, device=real.device)
        one, two = method.generate(given, first), method.generate(given, second)
        fake = self.critic(Reversed.apply(torch.cat((one, two)), config.follow), given.repeat(2, 1))[0]
        mix = torch.rand(len(real), 1, dtype=real.dtype, device=real.device)
        slope = self.critic(mix * real + (1 - mix) * one.detach(), given)[1]
        return {
            "critic": config.adversarial * (fake.mean() - self.critic(real, given)[0].mean()),
            "penalty": config.adversarial * config.penalty * (slope.norm(dim=1) - 1).square().mean(),
            "anti_collapse": config.anti_collapse * collapse(one, two, first, second).mean(),
        }


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is reversed: what comes before it maximises what comes after it minimises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.factor * gradients[0], None


def others_mean(features: Tensor, labels: Tensor) -> Tensor:
    """For each photo the mean of the others of its class, [B, C]; itself where it is alone."""
    same = labels[:, None] == labels[None]
    alone = same.sum(1, keepdim=True) == 1
    others = (same & (alone | ~torch.eye(len(labels), dtype=torch.bool, device=labels.device))).to(features.dtype)
    return (others / others.sum(1, keepdim=True)) @ features


def collapse(one: Tensor, two: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """(1 − cos(z₁, z₂)) / (1 − cos(s̃₁, s̃₂)): large where different noise made nearly the same feature, [B]."""
    return (1 - F.cosine_similarity(first, second)) / (1 - F.cosine_similarity(one, two)).clamp_min(1e-3)
