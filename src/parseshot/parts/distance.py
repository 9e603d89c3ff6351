"""The distance between a query and a class (Eq. 7): how differently its parts look, and how differently they lie.

Letters: Q queries, N classes, n support images, S scales, K parts, C channels, R = K(K−1)/2 pairs of parts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from parseshot.parts.linear import positive_inverse, positive_root
from parseshot.parts.parsing import Cells

LEAST = 1e-12  # share of ν that a cell has at least
EPS = 1e-6  # side length (in cells) below which a polygon of parts counts as a point


class Distance(NamedTuple):
    """Eq. 7 as the finite sum it is: `total` is the sum of all four, over parts and scales."""

    expression: Tensor  # [Q, N, S, S, K] α·‖z^(q) − z^(y)‖² for query scale, class scale (1: all together), part
    cells: Tensor  # [Q, N, K] α·(what the class's cells of a part leave over of the query's); 0 where not asked for
    geometry: Tensor  # [Q, N, S, S] γ·mean_i ‖ψ^(q) − ψ^(i,y)‖² for query scale, class scale
    whole: Tensor  # [Q, N] what the class's photos leave over of the query as a whole; 0 where not asked for

    @property
    def by_part(self) -> Tensor:
        """What belongs to a part, [Q, N, K]."""
        return self.expression.sum((2, 3)) + self.cells

    @property
    def total(self) -> Tensor:
        """d(q, y), [Q, N]."""
        return self.by_part.sum(2) + self.geometry.sum((2, 3)) + self.whole


class Regression(NamedTuple):
    """Of a query on what a class's photos show, with the weight of its error in Eq. 7."""

    strength: Tensor
    rho: Tensor
    weight: Tensor | float = 1.0


class Dictionary(NamedTuple):
    """What N classes show of K parts, M vectors each, to regress a query x on. Worked out once a class."""

    vectors: Tensor  # f, [K, N, M, C]: the error is ‖x‖² − Σ_j (x·f_j)²


class Shown(NamedTuple):
    """All that Eq. 7 asks of N classes; none depends on the other classes. `show` makes it, `compare` takes it."""

    z: Tensor | Dictionary  # mean expressions [N, S, K, C], or what expressions are regressed on
    entropy: Tensor  # [N, S, K], or [N, 1, K] where the class's scales are one
    psi: Tensor  # mean ψ, [N, S, R] …
    psi_square: Tensor  # … and mean ‖ψ‖², [N, S]
    cells: Dictionary | None  # what cells are regressed on …
    whole: Dictionary | None  # … and the whole, as one part


def class_mean(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean over the support images of each class, any number each: [n, ...] → [N, ...]."""
    member = torch.nn.functional.one_hot(labels, classes).to(values.dtype)  # [n, N]
    member = member / member.sum(0).clamp_min(1.0)
    return (member.T @ values.flatten(1)).view(classes, *values.shape[1:])


def by_class(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What the photos of each class hold, together: [n, r, D] → [N, m, D], and its number of photos [N].

    m is that of the largest class; zeros fill up the others.
    """
    member = torch.nn.functional.one_hot(labels)  # [n, N]
    shots = member.sum(0)
    place = (member.cumsum(0) * member).sum(1) - 1  # of a photo among those of its class, [n]
    index = labels.new_zeros(len(shots), int(shots.max()))
    index[labels, place] = torch.arange(len(labels), device=labels.device)
    own = torch.arange(index.shape[1], device=labels.device) < shots[:, None]  # [N, photos]
    return (values[index] * own[:, :, None, None]).flatten(1, 2), shots.to(values.dtype)


def squared_distances(query: Tensor, support: Tensor) -> Tensor:
    """‖z^(q)_{s1,p} − z^(y)_{s2,p}‖² for all pairs of scales: [Q, S, K, C], [N, S, K, C] → [Q, N, S, S, K]."""
    (queries, scales, parts, _), classes = query.shape, support.shape[0]
    left = query.permute(2, 0, 1, 3).flatten(1, 2)  # [K, Q·S, C]
    right = support.permute(2, 0, 1, 3).flatten(1, 2)  # [K, N·S, C]
    inner = left @ (-2 * right.transpose(1, 2))  # [K, Q·S, N·S]
    squares = inner + left.square().sum(-1)[:, :, None] + right.square().sum(-1)[:, None]
    squares = squares.clamp_min(0.0).view(parts, queries, scales, classes, scales)
    return squares.permute(1, 3, 2, 4, 0)


def span_distances(query: Tensor, support: Tensor, labels: Tensor, strength: Tensor, rho: Tensor) -> Tensor:
    """What of a query's part cannot be made of the same part in a class's photos: [Q, N, S, K].

    Of expressions [Q, S, K, C] and [n, S, K, C]: ‖z − ρ·Σ_j w_j·d_j‖², where the d_j are the part's expressions in all
    photos of the class at all scales and w is the ridge regression of z on them, λ = strength × their number, so that a
    photo that is there twice changes nothing.
    """
    return _span_errors(query, _span_dictionary(support, labels, strength, rho))


def _span_dictionary(support: Tensor, labels: Tensor, strength: Tensor, rho: Tensor) -> Dictionary:
    scales, parts, channels = support.shape[1:]
    shown, shots = by_class(support.flatten(2), labels)  # [N, M, K·C], [N]
    shown = shown.unflatten(2, (parts, channels)).permute(2, 0, 1, 3)  # [K, N, M, C]
    return dictionary(shown, strength * scales * shots, rho)


def _span_errors(query: Tensor, shown: Dictionary) -> Tensor:
    asked = query.permute(2, 0, 1, 3).flatten(1, 2)  # [K, Q·S, C]
    return left_over(asked, shown).unflatten(2, query.shape[:2]).permute(2, 1, 3, 0)  # [Q, N, S, K]


def cell_distances(query: Cells, support: Cells, labels: Tensor, strength: Tensor, rho: Tensor) -> Tensor:
    """What of the cells of a query's part cannot be made of the cells of that part in a class's photos: [Q, N, K].

    Σ_i ω_i·‖x_i − ρ·Σ_j w_ij·√ω_j·x_j‖², each cell x_i of the query regressed on the class's, where likely cells are
    longer: w is the ridge regression, λ = strength × the number of photos, which again may be there twice.
    """
    return _cell_errors(query, _cell_dictionary(support, labels, strength, rho))


def _cell_dictionary(support: Cells, labels: Tensor, strength: Tensor, rho: Tensor) -> Dictionary:
    photos, parts, count, channels = support.features.shape
    lengths = support.weights.clamp_min(LEAST).sqrt()  # ν may be 0 in float32, where a root has no gradient
    shown = (support.features * lengths[..., None]).permute(0, 2, 1, 3)  # [n, M, K, C]
    shown, shots = by_class(shown.reshape(photos, count, parts * channels), labels)  # [N, n·M, K·C], [N]
    shown = shown.unflatten(2, (parts, channels)).permute(2, 0, 1, 3)  # [K, N, n·M, C]
    return dictionary(shown, strength * shots, rho)


def _cell_errors(query: Cells, shown: Dictionary) -> Tensor:
    queries, _, count, _ = query.features.shape
    asked = query.features.transpose(0, 1).flatten(1, 2)  # [K, Q·M, C]
    errors = left_over(asked, shown).unflatten(2, (queries, count))  # [K, N, Q, M]
    return (errors * query.weights.transpose(0, 1)[:, None]).sum(-1).permute(2, 1, 0)  # [Q, N, K]


def dictionary(vectors: Tensor, lam: Tensor, rho: Tensor) -> Dictionary:
    """To regress on M vectors d of each part and class, [K, N, M, C], with λ [N] and ρ up to 2.

    Of x the regression on D leaves ‖x − ρ·wD‖², w = argmin ‖x − wD‖² + λ‖w‖² = xDᵀB, B = (DDᵀ + λI)⁻¹. Multiplied out
    that is ‖x‖² − xDᵀ·BAB·Dxᵀ with A = ρ·((2 − ρ)·DDᵀ + 2λI), which is positive definite: with A = LLᵀ it is
    ‖x‖² − ‖xFᵀ‖² for F = LᵀBD. So a query needs one product with F, which never lengthens it, and no matrix of a class.

    In float64: B is as large as 1/λ, and in float32 classes side by side and one by one would differ in the fourth
    digit.
    """
    exact, rho = vectors.double(), rho.double()
    gram = exact @ exact.mT  # [K, N, M, M]
    ridge = lam.double()[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root = positive_root(rho * ((2 - rho) * gram + 2 * ridge))
    return Dictionary((root.mT @ positive_inverse(gram + ridge) @ exact).to(vectors.dtype))


def left_over(asked: Tensor, shown: Dictionary) -> Tensor:
    """What a class's vectors leave over of each of P vectors x, for each part: [K, P, C] → [K, N, P]."""
    classes = shown.vectors.shape[1:3]
    products = (asked @ shown.vectors.flatten(1, 2).mT).unflatten(2, classes)  # [K, P, N, M]
    return (asked.square().sum(-1, keepdim=True) - products.square().sum(-1)).clamp_min(0.0).mT


def part_weights(query_entropy: Tensor, class_entropy: Tensor, slopes: Tensor) -> Tensor:
    """α of Eq. 7: [Q, S, K], [N, S, K], slopes [2] → [Q, N, S, S, K], a softmax over the K parts.

    The paper's linear layer R^{M+1} → R with the M support weights tied, so that it takes any number of photos in any
    order: slopes[0]·h^(q) + slopes[1]·mean_i h^(i,y). A bias would cancel in the softmax.
    """
    query = slopes[0] * query_entropy.permute(2, 0, 1)[:, :, :, None, None]  # [K, Q, S, 1, 1]
    support = slopes[1] * class_entropy.permute(2, 0, 1)[:, None, None]  # [K, 1, 1, N, S]
    return torch.softmax(query + support, 0).permute(1, 3, 2, 4, 0)  # parts first in memory, as `squared_distances`


def side_lengths(mu: Tensor) -> Tensor:
    """Distances between all pairs of parts, in cells: [..., K, 2] → [..., R]."""
    first, second = torch.triu_indices(mu.shape[-2], mu.shape[-2], 1, device=mu.device)
    return ((mu[..., first, :] - mu[..., second, :]).square().sum(-1) + EPS**2).sqrt()


def psi(mu: Tensor) -> Tensor:
    """ψ of Eq. 7: the sides of the polygon of parts, normalised to unit sum: [..., K, 2] → [..., R].

    Parts in one point make no polygon: every side is then the same tiny length, ψ is uniform, and its gradient finite.

    >>> psi(torch.tensor([[0., 0.], [3., 0.], [0., 4.]]))
    tensor([0.2500, 0.3333, 0.4167])
    """
    sides = side_lengths(mu)
    return sides / sides.sum(-1, keepdim=True)


def is_degenerate(mu: Tensor, tolerance: float = 0.05) -> Tensor:
    """True where all parts lie within `tolerance` cells, so that geometry says nothing: [..., K, 2] → [...]."""
    if mu.shape[-2] < 2:
        return torch.ones(mu.shape[:-2], dtype=torch.bool, device=mu.device)
    return side_lengths(mu).amax(-1) < tolerance


def geometric_distances(query: Tensor, support: Tensor, labels: Tensor, classes: int) -> Tensor:
    """mean_i ‖ψ^(q)_{s1} − ψ^(i,y)_{s2}‖²: [Q, S, R], [n, S, R] → [Q, N, S, S].

    The mean over i of a squared difference needs only the mean of ψ and of ‖ψ‖².
    """
    return _geometric_distances(query, *_mean_geometry(support, labels, classes))


def _mean_geometry(support: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean ψ [N, S, R] and mean ‖ψ‖² [N, S] of the photos of each class."""
    return class_mean(support, labels, classes), class_mean(support.square().sum(-1), labels, classes)


def _geometric_distances(query: Tensor, mean: Tensor, mean_square: Tensor) -> Tensor:
    inner = torch.einsum("qsr,ntr->qnst", query, mean)
    return (query.square().sum(-1)[:, None, :, None] + mean_square[None, :, None] - 2 * inner).clamp_min(0.0)


def show(
    support: tuple[Tensor, Tensor, Tensor],
    labels: Tensor,
    *,
    span: Regression | None = None,
    cells: tuple[Cells, Regression] | None = None,
    whole: tuple[Tensor, Regression] | None = None,
) -> Shown:
    """The half of Eq. 7 that is the classes': of support images (z, entropy, mu), labels [n] in 0 … N−1.

    span: expressions are regressed on those of the class's photos instead of compared with their mean.
    cells: of the support, to regress cells on beside. whole: of the support, [n, 1, 1, W], likewise.
    """
    (z, entropy, mu), classes = support, int(labels.max()) + 1
    mean_entropy = class_mean(entropy, labels, classes)  # [N, S, K]
    return Shown(
        class_mean(z, labels, classes) if span is None else _span_dictionary(z, labels, span.strength, span.rho),
        mean_entropy if span is None else mean_entropy.mean(1, keepdim=True),
        *_mean_geometry(psi(mu), labels, classes),
        None if cells is None else _cell_dictionary(cells[0], labels, cells[1].strength, cells[1].rho),
        None if whole is None else _span_dictionary(whole[0], labels, whole[1].strength, whole[1].rho),
    )


def compare(
    query: tuple[Tensor, Tensor, Tensor],
    shown: Shown,
    *,
    slopes: Tensor | None,
    gamma: Tensor | None,
    normalised: bool,
    cells: tuple[Cells, Regression] | None = None,
    whole: tuple[Tensor, Regression] | None = None,
) -> Distance:
    """Eq. 7 between every query (z [Q, S, K, C], entropy [Q, S, K], mu [Q, S, K, 2]) and every class.

    slopes: of `part_weights`; None weighs all parts alike. gamma: weight of the geometric term; None leaves it out.
    normalised: means over the pairs of scales, and ψ in units of its mean; otherwise the printed sums.
    cells, whole: of the queries, with the same regression as in `show`.
    """
    z, entropy, mu = query
    scales, parts = z.shape[1], z.shape[2]
    if isinstance(shown.z, Dictionary):  # the class's scales are one
        expression = scales * _span_errors(z, shown.z)[:, :, :, None]  # [Q, N, S, 1, K]
    else:
        expression = squared_distances(z, shown.z)  # [Q, N, S, S, K]
    alpha = expression.new_tensor(1 / parts) if slopes is None else part_weights(entropy, shown.entropy, slopes)
    expression = alpha * expression
    beside = expression.new_zeros(len(z), len(shown.entropy), parts)
    if shown.cells is not None and cells is not None:
        asked, how = cells
        mean_alpha = alpha if slopes is None else alpha.mean((2, 3))  # [Q, N, K]
        beside = how.weight * mean_alpha * _cell_errors(asked, shown.cells)
    if gamma is None or parts < 2:
        geometry = expression.new_zeros(expression.shape[:-1])
    else:
        geometry = gamma * _geometric_distances(psi(mu), shown.psi, shown.psi_square)
    if normalised:  # ψ·R has mean 1, and the mean over the R sides of its squared difference is R·‖Δψ‖²
        expression, geometry = expression / scales**2, geometry * (parts * (parts - 1) / 2 / scales**2)
    entire = expression.new_zeros(expression.shape[:2])
    if shown.whole is not None and whole is not None:
        entire = whole[1].weight * _span_errors(whole[0], shown.whole)[:, :, 0, 0]
    return Distance(expression, beside, geometry, entire)
