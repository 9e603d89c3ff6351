"""Training losses: cross-entropy over −d (Eq. 8), diversity of parts (Eq. 9), and their sum (Algorithm 2)."""

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-12  # ν below this counts as this: √ν has an infinite slope at 0
EPS_HELLINGER = 1e-6  # 1 − Σ√(p·q) below this counts as this: so has the Hellinger distance at p = q


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """ℓ_CE of Eq. 8, averaged over the queries: logits [Q, N], targets [Q] → scalar."""
    return F.cross_entropy(logits, targets)


def hellinger(nu: Tensor) -> Tensor:
    """Hellinger distance between the parts' location distributions: [..., K, G, G] → [..., K, K].

    H(p, q) = √(1 − Σ √(p·q)): 0 for equal, 1 for disjoint distributions, with finite slopes at both.
    """
    root = nu.flatten(-2).clamp_min(EPS).sqrt()  # [..., K, G²]
    affinity = root @ root.transpose(-1, -2)  # [..., K, K]
    return (1.0 - affinity).clamp_min(EPS_HELLINGER).sqrt()


def diversity(nu: Tensor, *, normalised: bool) -> Tensor:
    """ℓ_div of Eq. 9 for each image: [B, S, K, G, G] → [B].

    As printed, minus the sum over scales and ordered pairs of parts; normalised, minus the mean over scales and
    unordered pairs, so −1 when all parts are apart.
    """
    parts = nu.shape[-3]
    if parts < 2:
        return nu.sum((1, 2, 3, 4)) * 0.0
    pairs = hellinger(nu)  # [B, S, K, K]
    first, second = torch.triu_indices(parts, parts, 1, device=nu.device)
    apart = pairs[..., first, second]  # [B, S, R]
    return -apart.mean((1, 2)) if normalised else -2.0 * apart.sum((1, 2))


def episode_diversity(query: Tensor, support: Tensor) -> Tensor:
    """The prior of Algorithm 2, averaged over the episode's queries: diversity [Q], [n] → scalar.

    For one query it is the mean of ℓ_div over the n support images and the query.
    """
    return (support.sum() + query.mean()) / (len(support) + 1)
