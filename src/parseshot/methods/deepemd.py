"""DeepEMD: the least costly way to turn the cells of one image into those of another."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.parts.distance import class_mean

FLOOR = 1e-3  # added to every weight, as the authors do
QUARTERED = 16  # times ε is where it starts from: two quarterings


class DeepEMDConfig(Config):
    """Temperature as published; the rest is about how the transport and the prototypes are solved."""

    temperature: float = Field(12.5, gt=0)
    epsilon: float = Field(0.01, gt=0)  # entropy of the flow, in units of the cost 1 − cos
    rounds: int = Field(5, ge=1)  # Sinkhorn rounds at each of the three stages of ε
    steps: int = Field(3, ge=0)  # of the fit of prototypes to several photos; 0 takes their mean
    rate: float = Field(0.3, gt=0)  # of that fit; chosen on drawn birds, where 1.0 overshoots


class DeepEMD(Method):
    """Zhang, Cai, Lin, Shen, "DeepEMD: Few-Shot Image Classification with Differentiable Earth Mover's Distance and
    Structured Classifiers", CVPR 2020.

    A cell weighs as much as it agrees with the other image's mean (cross reference); moving weight from a query cell to
    a class cell costs 1 − cos of the two, each less the mean of its channels. The score is the similarity that arrives
    by the cheapest flow. Differs from the paper:
    - the flow is Sinkhorn's, at ε = 0.01 after 15 rounds in all, for all pairs at once, instead of a linear program
      each. Against scipy's linprog its cost, of about 0.5 to 1, was off by 0.008 at most (0.001 to 0.007 on average,
      5×5 and 7×7 cells, 64 to 640 channels); class cells get their exact weight, query cells up to 14 % too much or too
      little in all, 2.5 % after four times the rounds;
    - the gradient is the linear program's own (envelope theorem): the flow for the costs, the dual potentials for the
      weights, so nothing is kept of the rounds. The authors' faster solver leaves out the weights' part;
    - a class of several photos: structured prototypes fitted from the mean map, as published, but in 3 steps of the
      whole support set instead of 100 passes of batches of 4. A class's step is multiplied by how much its photos
      differ, so that a photo alone, or repeated, stays what it is, as in the paper. For training, a fitted prototype
      is the mean plus a constant;
    - maps are scaled to unit mean square, so that the floor of the weights means the same for all features.
    """

    def __init__(self, channels: int, size: int, config: DeepEMDConfig) -> None:
        super().__init__()
        self.config = config

    def encode(self, features: Tensor) -> Encoding:
        scale = features.square().mean((1, 2, 3), keepdim=True).clamp_min(1e-12).rsqrt()
        return Encoding(f=(features * scale).flatten(2).transpose(1, 2).contiguous())  # [B, r, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        return self.match(query["f"], self.prototypes(support["f"], labels))[0]

    def match(self, query: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [Q, N] and flows [Q, N, r, r] from query cells [Q, r, C] to class cells [N, r, C]."""
        mine = torch.einsum("qic,nc->qni", query, classes.mean(1)).relu() + FLOOR  # [Q, N, r]
        other = torch.einsum("njc,qc->qnj", classes, query.mean(1)).relu() + FLOOR  # [Q, N, r]
        mine, other = mine / mine.sum(-1, keepdim=True), other / other.sum(-1, keepdim=True)
        cosine = torch.einsum("qic,njc->qnij", centred(query), centred(classes))  # [Q, N, r, r]
        with torch.no_grad():
            flow, f, g = transport(1 - cosine, mine, other, self.config.epsilon, self.config.rounds)
        score = (flow * cosine).sum((-1, -2))
        if torch.is_grad_enabled():
            score = score - (f * (mine - mine.detach())).sum(-1) - (g * (other - other.detach())).sum(-1)
        return self.config.temperature * score, flow

    def prototypes(self, support: Tensor, labels: Tensor) -> Tensor:
        """Class cells [N, r, C]: the mean map, then gradient steps of the support photos' cross-entropy.

        As with the authors' faster solver, flows are constants within a step; the gradient is then a matrix product.
        """
        classes = int(labels.max()) + 1
        mean = class_mean(support, labels, classes)
        if len(labels) == classes:
            return mean
        with torch.no_grad():
            target = F.one_hot(labels, classes).to(support.dtype)  # [n, N]
            power = class_mean(support.square(), labels, classes).sum((1, 2))
            spread = (1 - mean.square().sum((1, 2)) / power.clamp_min(1e-12)).clamp_min(0)  # [N]
            size = self.config.rate * support[0].numel() * spread[:, None, None]
            photos, fitted = centred(support), mean
            for _ in range(self.config.steps):
                score, flow = self.match(support, fitted)
                error = self.config.temperature * (torch.softmax(score, 1) - target) / len(labels)  # [n, N]
                pull = torch.einsum("knij,kic->njc", flow * error[..., None, None], photos)
                unit = centred(fitted)
                length = (fitted - fitted.mean(-1, keepdim=True)).norm(dim=-1, keepdim=True).clamp_min(1e-6)
                fitted = fitted - size * (pull - unit * (unit * pull).sum(-1, keepdim=True)) / length
        return mean + (fitted - mean.detach())


def centred(cells: Tensor) -> Tensor:
    """Each cell less the mean of its channels, of unit length."""
    return F.normalize(cells - cells.mean(-1, keepdim=True), dim=-1)


def transport(cost: Tensor, a: Tensor, b: Tensor, epsilon: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sinkhorn with ε from 16 times down to its value: cost [..., r, s], a [..., r], b [..., s] → flow, duals f and g.

    flow = a·b·kernel, kernel = exp((f + g − cost) / ε); a quarter of ε is the kernel's fourth power. Its weighted row
    and column means are 1 after each stage, so that no power of it under- or overflows.
    """
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    kernel, blur = torch.exp(cost / (-QUARTERED * epsilon)), QUARTERED * epsilon
    while True:
        back = kernel.transpose(-1, -2).contiguous()  # row times matrix is the fast product for many small matrices
        u, v = a, torch.ones_like(b)
        for _ in range(rounds):
            u = 1 / ((b * v)[..., None, :] @ back)[..., 0, :]
            v = 1 / ((a * u)[..., None, :] @ kernel)[..., 0, :]
        f, g = f + blur * u.log(), g + blur * v.log()
        kernel = u[..., :, None] * kernel * v[..., None, :]
        if blur <= epsilon:
            return a[..., :, None] * kernel * b[..., None, :], f, g
        kernel, blur = kernel.square().square(), blur / 4
