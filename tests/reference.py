"""Eq. 1–9 and Algorithms 1 and 2 of the paper as float64 NumPy loops: slow, literal, never imported by src.

Written from the paper's text and the decisions of docs/paper.md, one image and one number at a time.
Locations are (x, y).
"""

import math

import numpy as np


def window(phi: np.ndarray, x: int, y: int, side: int) -> np.ndarray:
    """φ_{M(μ)}: the s×s patch around (x, y), zero outside the grid."""
    size, radius = phi.shape[0], side // 2
    patch = np.zeros((side, side))
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            if 0 <= y + dy < size and 0 <= x + dx < size:
                patch[dy + radius, dx + radius] = phi[y + dy, x + dx]
    return patch


def visible_share(template: np.ndarray, x: int, y: int, size: int) -> float:
    """The share of ‖D‖² that lies on the grid when D is centred at (x, y)."""
    return float((template**2 * window(np.ones((size, size)), x, y, len(template))).sum() / (template**2).sum())


def response(phi: np.ndarray, template: np.ndarray, x: int, y: int, exact: bool) -> float:
    """(D ∗ φ)(μ); exact: over the visible share, as if the rest of the template went on in the same way."""
    r = float((template * window(phi, x, y, len(template))).sum())
    return r / visible_share(template, x, y, len(phi)) if exact else r


def scalar_lasso(r: float, norm: float, lam: float) -> float:
    """argmin_β of Eq. 1 for one channel: ‖φ‖² − 2rβ + ‖D‖²β² + λ|β|, over all real β."""
    return math.copysign(max(0.0, abs(r) - lam / 2), r) / norm**2


def lasso_objective(beta: float, patch: np.ndarray, template: np.ndarray, lam: float) -> float:
    """The objective of Eq. 1 for one channel."""
    return float(((patch - template * beta) ** 2).sum() + lam * abs(beta))


def parse_part(phi, templates, lam, temperature, exact, normalised, zeta):
    """Algorithm 1 for one image [C, G, G], one scale and one part [C, s, s]: ν [G, G], μ, z [C], entropy over ln G²."""
    channels, size, _ = phi.shape
    if normalised:
        phi = phi / math.sqrt(float((phi**2).mean()))
    score = np.zeros((size, size))
    for y in range(size):
        for x in range(size):
            for c in range(channels):
                norm = math.sqrt(float((templates[c] ** 2).sum()))
                a, lam_c = response(phi[c], templates[c], x, y, exact) / norm, lam / (2 * norm)
                score[y, x] += max(0.0, a - lam_c) ** 2 if exact else (a - lam_c) ** 2  # Eq. 4, 5
    if normalised:
        score = score / channels
    if temperature is None:  # Eq. 4
        nu = np.zeros_like(score)
        nu[np.unravel_index(score.argmax(), score.shape)] = 1.0
    else:  # Eq. 5
        nu = np.exp((score - score.max()) / temperature)
        nu = nu / nu.sum()
    mu = np.zeros(2)
    z = np.zeros(channels)
    spread = 0.0
    for y in range(size):
        for x in range(size):
            mu += nu[y, x] * np.array([x, y])
            if nu[y, x] > 0:
                spread -= nu[y, x] * math.log(nu[y, x]) / math.log(size * size)
            for c in range(channels):
                norm = math.sqrt(float((templates[c] ** 2).sum()))
                r = response(phi[c], templates[c], x, y, exact)
                z[c] += nu[y, x] * (max(0.0, scalar_lasso(r, norm, lam)) if exact else r / norm**2)
    if not exact:  # S_ζ of Eq. 6
        z = np.where(np.abs(z) >= zeta, z, 0.0)
    return nu, mu, z, spread


def parse_image(phi, templates, lam, temperatures, exact, normalised, zeta=0.0):
    """Algorithm 1 for one image: ν [S, K, G, G], μ [S, K, 2], z [S, K, C], entropy [S, K]."""
    found = [
        [parse_part(phi, part, lam, t, exact, normalised, zeta) for part in scale]
        for scale, t in zip(templates, temperatures, strict=True)
    ]
    return tuple(np.array([[part[i] for part in scale] for scale in found]) for i in range(4))


def psi(mu: np.ndarray) -> np.ndarray:
    """All pairwise distances between parts [K, 2], normalised to unit sum."""
    sides = [np.linalg.norm(mu[i] - mu[j]) for i in range(len(mu)) for j in range(i + 1, len(mu))]
    return np.array(sides) / np.sum(sides)


def distance(query, supports, slopes, gamma, normalised):
    """d(q, y) of Eq. 7. query and each of the M supports of the class: (z [S, K, C], entropy [S, K], mu [S, K, 2])."""
    z_query, h_query, mu_query = query
    scales, parts, _ = z_query.shape
    z_class = sum(z for z, _, _ in supports) / len(supports)
    h_class = sum(h for _, h, _ in supports) / len(supports)
    expression = geometry = 0.0
    for s1 in range(scales):  # of the query
        for s2 in range(scales):  # of the class
            linear = [slopes[0] * h_query[s1, p] + slopes[1] * h_class[s2, p] for p in range(parts)]
            exps = [math.exp(value - max(linear)) for value in linear]
            for p in range(parts):
                alpha = exps[p] / sum(exps)
                expression += alpha * float(((z_class[s2, p] - z_query[s1, p]) ** 2).sum())
            for _, _, mu in supports:
                geometry += float(((psi(mu[s2]) - psi(mu_query[s1])) ** 2).sum()) / len(supports)
    if normalised:
        pairs = parts * (parts - 1) / 2
        return expression / scales**2 + gamma * pairs * geometry / scales**2
    return expression + gamma * geometry


def cross_entropy(distances: np.ndarray, label: int) -> float:
    """Eq. 8 for one query."""
    return -math.log(math.exp(-distances[label]) / sum(math.exp(-d) for d in distances))


def hellinger(p: np.ndarray, q: np.ndarray) -> float:
    """H(p, q) = √(1 − Σ √(p·q))."""
    return math.sqrt(max(0.0, 1.0 - float(np.sqrt(p * q).sum())))


def diversity(nu: np.ndarray, normalised: bool) -> float:
    """ℓ_div of Eq. 9 for one image, ν [S, K, G, G]."""
    scales, parts = nu.shape[:2]
    total = -sum(
        hellinger(nu[s, p], nu[s, other])
        for s in range(scales)
        for p in range(parts)
        for other in range(parts)
        if other != p
    )
    return total / (scales * parts * (parts - 1)) if normalised else total


def episode_loss(distances, labels, nu_queries, nu_supports, eta, normalised) -> float:
    """Algorithm 2, averaged over the queries: distances [Q, N]."""
    total = 0.0
    for d, label, nu in zip(distances, labels, nu_queries, strict=True):
        images = [*nu_supports, nu]
        prior = sum(diversity(image, normalised) for image in images) / len(images)
        total += cross_entropy(d, label) + eta * prior
    return total / len(labels)
