"""A linear classifier fitted on labelled features, in closed form or by a fixed number of gradient steps.

What methods share that fit something on the support photos at test time: no autograd, no state, the same under vmap.
Letters: m features (photos and what was synthesised from them), D their length, N classes, Q queries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parseshot.parts.linear import positive_solve

TINY = 1e-6  # share of the mean variance that every ridge has at least, so that equal photos can be solved


class Standardise(nn.Module):
    """Vectors less their mean, over their spread, both set once from a first batch; one spread for all channels."""

    mean: Tensor
    spread: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("spread", torch.ones(()))

    def forward(self, vectors: Tensor) -> Tensor:
        return (vectors - self.mean) / self.spread  # [B, C]

    @torch.no_grad()
    def initialise(self, vectors: Tensor) -> None:
        self.mean.copy_(vectors.mean(0))
        self.spread.copy_((vectors - self.mean).square().mean().sqrt().clamp_min(1e-6))


def photo_weights(labels: Tensor, classes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Targets [n, N], one-hot, and weights [n] of sum 1: every class alike, so every photo 1 / its class's count."""
    targets = F.one_hot(labels, classes).to(like.dtype)
    return targets, (targets / targets.sum(0).clamp_min(1.0)).sum(1) / classes


def with_synthetic(
    photos: Tensor, labels: Tensor, synthetic: Tensor, origins: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Photos [n, D] and Z features synthesised from each of k things as one set: features [m, D], targets, weights.

    synthetic: [k, Z, D]; origins: the class of each of the k, which are photos or classes. `share` of each class's
    weight goes to its synthetic features.
    """
    classes, count = int(labels.max()) + 1, synthetic.shape[1]
    targets, weights = photo_weights(labels, classes, photos)
    made, made_weights = photo_weights(origins.repeat_interleave(count), classes, photos)
    return (
        torch.cat((photos, synthetic.flatten(0, 1))),
        torch.cat((targets, made)),
        torch.cat((weights * (1 - share), made_weights * share)),
    )


def ridge_scores(query: Tensor, features: Tensor, targets: Tensor, weights: Tensor, *, ridge: float) -> Tensor:
    """Scores [Q, N] of the weighted ridge regression of targets [m, N] on features [m, D], with a free intercept.

    argmin Σ w_i‖x_i W + b − y_i‖² + λ‖W‖², λ = ridge × the mean variance of the features, so that their scale does not
    matter. The constant b is left out of the scores where it is the same for every class, as with equal class weights.
    Solved with D unknowns or, where there are fewer features than that, in their dual form with m.
    """
    centre = weights @ features  # [D]
    root = weights.sqrt()[:, None]
    x, y = root * (features - centre), root * (targets - weights @ targets)  # [m, D], [m, N]
    penalty = (ridge + TINY) * x.square().sum() / x.shape[1] + torch.finfo(x.dtype).tiny
    if x.shape[0] < x.shape[1]:
        gram = x @ x.T + penalty * torch.eye(len(x), dtype=x.dtype, device=x.device)
        return ((query - centre) @ x.T) @ positive_solve(gram, y)
    gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return (query - centre) @ positive_solve(gram, x.T @ y)


def softmax_steps(
    features: Tensor,
    targets: Tensor,
    weights: Tensor,
    start: tuple[Tensor, Tensor],
    *,
    steps: int,
    rate: float,
    momentum: float = 0.0,
    offsets: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """W [D, N] and b [N] after `steps` of gradient descent on Σ w_i CE(x_i W + b, y_i) from `start`.

    offsets: vectors e_j [Z, D] and weights v_j [Z] of sum 1; the examples are then all x_i + e_j with weights w_i·v_j.
    They are never written out: their scores are those of x_i plus those of e_j. As W moves within the span of these
    n + Z vectors, a step needs their inner products only, whatever D is.
    The step is rate / Σ w_i(‖x_i‖² + 1): the curvature is at most half of that sum, so any rate below 4 descends.
    """
    weight, bias = start
    added, shares = offsets or (features.new_zeros(1, features.shape[1]), features.new_ones(1))
    photos, span = len(features), torch.cat((features, added))  # [n + Z, D]
    gram = span @ span.T
    square = weights @ gram.diagonal()[:photos] + shares @ gram.diagonal()[photos:]
    size = rate / (square + 2 * (weights @ features) @ (shares @ added) + 1)
    pair = weights[:, None] * shares  # [n, Z]
    wanted = torch.cat((weights[:, None] * targets, shares[:, None] * (weights @ targets)))  # [n + Z, N]
    scores = span @ weight
    moved, speed = torch.zeros_like(scores), torch.zeros_like(scores)  # W = start − spanᵀ·moved
    bias_speed = torch.zeros_like(bias)
    for _ in range(steps):
        each = (scores[:photos] + bias).T[:, :, None] + scores[photos:].T[:, None]  # [N, n, Z]
        guess = pair * torch.softmax(each, 0)
        error = torch.cat((guess.sum(2), guess.sum(1)), 1).T - wanted  # [n + Z, N]
        speed = momentum * speed + size * error
        bias_speed = momentum * bias_speed + size * error[:photos].sum(0)
        moved, bias = moved + speed, bias - bias_speed
        scores = scores - gram @ speed
    return weight - span.T @ moved, bias


def same_class_partner(labels: Tensor) -> Tensor:
    """For each of a batch's photos [B] the next one of its class, in a circle; itself where it is alone.

    >>> same_class_partner(torch.tensor([0, 1, 0, 2, 0]))
    tensor([2, 1, 4, 3, 0])
    """
    count = len(labels)
    place = torch.arange(count, device=labels.device)
    ahead = (place[None] - place[:, None] - 1) % count  # [B, B] 0 is the next, B − 1 the photo itself
    return torch.where(labels[:, None] == labels[None], ahead, count).argmin(1)
