"""PARSE (Algorithm 1): where each part of an object is (Eq. 3–5) and which templates it expresses (Eq. 6).

Letters: B images, C channels, K parts, S scales, G×G cells. Locations are (x, y) in cells: the centre of the top left
cell is (0, 0). The temperature T divides. For one channel, Eq. 1 is a scalar LASSO. With r = (D ∗ φ)(μ), a = r/‖D‖ and
λ_c = λ/(2‖D‖),

    min_β ‖φ_M(μ) − D·β‖² + λ|β|   has the non-negative solution   z(μ) = max(0, a − λ_c)/‖D‖
                                   and lowers the error by          max(0, a − λ_c)²   (its gain).

`exact` uses just that. As printed, Eq. 4 and 5 score a location by the sum of (a − λ_c)², whatever its sign, and Eq. 6
expresses a/‖D‖ and deletes entries below ζ. Both are this one code with another threshold.

At the border a template sees only a part of itself. As printed, the rest counts as zeros. `exact` solves the same LASSO
on the cells that are there, with λ and the gain in proportion to the share of ‖D‖² they hold: a = r·‖D‖/‖D_M‖², where
D_M is the visible part, so that constant features under a constant template score the same everywhere.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parseshot.parts.kernel import locate_and_express
from parseshot.parts.templates import squared_norms, visible_squared_norms

EPS = 1e-12


class Parse(NamedTuple):
    """The parse of B images: each part at each scale, its location, its expression and how sure the location is."""

    nu: Tensor  # [B, S, K, G, G] distribution of the part's location (row, column), Eq. 5
    mu: Tensor  # [B, S, K, 2] expected location (x, y) in cells, Eq. 5
    z: Tensor  # [B, S, K, C] expression, Eq. 6
    entropy: Tensor  # [B, S, K] entropy of nu over ln G²: 0 is certain, 1 is uniform
    score: Tensor  # [B, S, K, G, G] what the softmax of Eq. 5 sees, before T; no gradient


class Cells(NamedTuple):
    """The cells where each part of B images may be, the likeliest first."""

    features: Tensor  # [B, K, M, C]
    weights: Tensor  # [B, K, M], sum 1 over M: their share of ν


def parse(
    phi: Tensor,
    templates: Sequence[Tensor],
    temperature: Tensor | None,
    *,
    lam: float,
    exact: bool,
    normalised: bool,
    zeta: float = 0.0,
    located: Tensor | None = None,
    spacing: int = 1,
) -> Parse:
    """Algorithm 1 on features phi [B, C, G, G], with templates [K, C, s, s] for each of S scales.

    temperature: T of Eq. 5 for each scale, [S]; None is the argmax of Eq. 4 ("hard"), which has no gradient.
    lam: the l1 weight λ of Eq. 1, in units of φ·D.
    exact: the scalar LASSO solution, on the visible part of a template; otherwise as printed, zeros outside and ζ.
    normalised: φ scaled to unit root mean square an image, and the mean over channels in Eq. 5 instead of the sum.
    located: ν of all parts for each scale, [B, S, G, G], instead of Eq. 4 or 5: to see what locating parts is good for.
    spacing: cells from one entry of a template to the next; 2 on a grid that has cells between those D was made for.
    """
    channels, size = phi.shape[1], phi.shape[-1]
    if normalised:
        phi = unit_rms(phi)
    features = phi.permute(1, 3, 2, 0).contiguous()  # [C, G, G, B], cells ordered [x, y]
    maps, expressions, scores = [], [], []
    for index, template in enumerate(templates):
        norm = squared_norms(template).sqrt()  # ‖D‖, [K, C]
        if exact:
            unit = norm[..., None, None] / visible_squared_norms(template, size, spacing)  # [K, C, G, G]
        else:
            unit = norm.reciprocal()[..., None, None].expand(-1, -1, size, size)
        sharpness = None if temperature is None else temperature[index].reciprocal()
        if normalised and sharpness is not None:
            sharpness = sharpness / channels
        nu, expression, score = locate_and_express(
            features,
            template,
            unit.permute(1, 0, 3, 2),
            (lam / 2 / norm).T,
            sharpness,
            positive=exact,
            given=None if located is None else located[:, index].permute(2, 1, 0),
            spacing=spacing,
        )  # nu, score [K, G, G, B], expression [C, K, B]
        z = expression / norm.T.unsqueeze(-1)  # [C, K, B]
        if not exact:  # S_ζ of Eq. 6
            z = torch.where(z.abs() >= zeta, z, torch.zeros_like(z))
        maps.append(nu.permute(3, 0, 2, 1))  # [B, K, G, G]
        expressions.append(z.permute(2, 1, 0))  # [B, K, C]
        scores.append(score.permute(3, 0, 2, 1) / (channels if normalised else 1))
    nu = torch.stack(maps, 1)  # [B, S, K, G, G]
    return Parse(nu, expected_location(nu), torch.stack(expressions, 1), entropy(nu), torch.stack(scores, 1))


def parse_apart(phi: Tensor, templates: Sequence[Tensor], temperature: Tensor | None, **settings: Any) -> Parse:
    """Algorithm 1 where each part has C/K channels to itself: K parses of one part, side by side.

    phi [B, C, G, G], templates [K, C/K, s, s] for each scale; `settings` are those of `parse`. As if D were 0 in the
    other parts' channels, but that φ gets its unit root mean square in each share.
    """
    shares = phi.chunk(len(templates[0]), 1)
    found = [
        parse(share, [template[part : part + 1] for template in templates], temperature, **settings)
        for part, share in enumerate(shares)
    ]
    return Parse(*(torch.cat(each, 2) for each in zip(*found, strict=True)))


def likeliest_cells(phi: Tensor, nu: Tensor, count: int, *, apart: bool) -> Cells:
    """The cells with the largest ν of each part, in units of the features' mean length.

    phi [B, C, G, G], nu [B, K, G, G] → features [B, K, M, C], or C/K channels of its own for each part if `apart`.
    """
    images, parts = nu.shape[:2]
    shares = torch.stack([unit_rms(share) for share in phi.chunk(parts if apart else 1, 1)], 1)
    shares = shares.flatten(3).mT / math.sqrt(shares.shape[2])  # [B, K or 1, G², C], mean squared length 1
    largest, where = nu.flatten(2).topk(min(count, shares.shape[2]), 2)  # [B, K, M]
    index = where[..., None].expand(-1, -1, -1, shares.shape[3])
    features = shares.expand(images, parts, -1, -1).gather(2, index)
    return Cells(features, largest / largest.sum(2, keepdim=True).clamp_min(EPS))


def unit_rms(phi: Tensor) -> Tensor:
    """Scale each image's features to root mean square 1; an all-zero map stays zero."""
    return phi * phi.square().mean((1, 2, 3), keepdim=True).clamp_min(EPS).rsqrt()


def expected_location(nu: Tensor) -> Tensor:
    """μ = E_ν[μ] of Eq. 5: [..., G, G] (row, column) → [..., 2] (x, y) in cells.

    >>> expected_location(torch.tensor([[0., 0., 0.5], [0., 0., 0.5], [0., 0., 0.]]))
    tensor([2.0000, 0.5000])
    """
    cells = torch.arange(nu.shape[-1], dtype=nu.dtype, device=nu.device)
    return torch.stack((nu.sum(-2) @ cells, nu.sum(-1) @ cells), -1)


def peak_location(nu: Tensor, radius: int = 1) -> Tensor:
    """Expectation of ν within `radius` cells of its mode: [..., G, G] → [..., 2] (x, y).

    With two equal peaks the expectation of Eq. 5 lies between them, where there is nothing. What is drawn and reported
    is this one, which lies on a peak.
    """
    size = nu.shape[-1]
    mode = nu.flatten(-2).argmax(-1)  # [...]
    cells = torch.arange(size, device=nu.device)
    near_x = (cells - (mode % size).unsqueeze(-1)).abs() <= radius  # [..., G]
    near_y = (cells - mode.div(size, rounding_mode="floor").unsqueeze(-1)).abs() <= radius
    window = nu * near_y.unsqueeze(-1) * near_x.unsqueeze(-2)
    return expected_location(window / window.sum((-1, -2), keepdim=True).clamp_min(EPS))


def entropy(nu: Tensor) -> Tensor:
    """Entropy of each distribution over ln G², in [0, 1]: [..., G, G] → [...]."""
    cells = nu.shape[-1] * nu.shape[-2]
    if cells == 1:
        return nu.sum((-1, -2)) * 0.0
    return -(nu * nu.clamp_min(EPS).log()).sum((-1, -2)) / math.log(cells)


def unit_length(z: Tensor) -> Tensor:
    """Scale each expression [..., C] to length 1: ‖D‖ no longer sets the scale of the distance."""
    return F.normalize(z, dim=-1, eps=1e-6)
