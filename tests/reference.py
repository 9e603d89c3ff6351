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


def parse_part(phi, templates, lam, temperature, exact, normalised, zeta, located=None):
    """Algorithm 1 for one image [C, G, G], one scale and one part [C, s, s]: ν [G, G], μ, z [C], entropy over ln G².

    located: ν, where it is not that of Eq. 4 or 5.
    """
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
    if located is not None:
        nu = located
    elif temperature is None:  # Eq. 4
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


def span_distance(query, photos, strength, rho):
    """[S, K] of a query's expressions [S, K, C] and those of a class's photos: what a ridge regression leaves over."""
    scales, parts, _ = query.shape
    found = np.zeros((scales, parts))
    for part in range(parts):
        shown = np.array([photo[scale, part] for photo in photos for scale in range(scales)])  # [M, C]
        for scale in range(scales):
            z = query[scale, part]
            # argmin ‖z − w·D‖² + λ‖w‖² as least squares with further equations √λ·w = 0
            left = np.concatenate((shown.T, math.sqrt(strength * len(shown)) * np.eye(len(shown))))
            weights = np.linalg.lstsq(left, np.concatenate((z, np.zeros(len(shown)))), rcond=None)[0]
            found[scale, part] = ((z - rho * weights @ shown) ** 2).sum()
    return found


def cell_distance(query, photos, strength, rho):
    """[K] of a query's cells and those of a class's photos, each (features [K, M, C], weights [K, M])."""
    features, weights = query
    found = np.zeros(len(features))
    for part in range(len(features)):
        shown = np.array([np.sqrt(w) * x for xs, ws in photos for x, w in zip(xs[part], ws[part], strict=True)])
        for x, weight in zip(features[part], weights[part], strict=True):
            left = np.concatenate((shown.T, math.sqrt(strength * len(photos)) * np.eye(len(shown))))
            made = np.linalg.lstsq(left, np.concatenate((x, np.zeros(len(shown)))), rcond=None)[0] @ shown
            found[part] += weight * ((x - rho * made) ** 2).sum()
    return found


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


# SimpleShot


def simpleshot(query, support, labels, mean) -> np.ndarray:
    """Minus the squared distance of each query [Q, D] to each class mean, all centred and of unit length (CL2N)."""

    def cl2n(feature: np.ndarray) -> np.ndarray:
        return (feature - mean) / math.sqrt(float(((feature - mean) ** 2).sum()))

    scores = np.zeros((len(query), max(labels) + 1))
    for q, feature in enumerate(query):
        for y in range(scores.shape[1]):
            members = [cl2n(shown) for shown, label in zip(support, labels, strict=True) if label == y]
            scores[q, y] = -float(((cl2n(feature) - sum(members) / len(members)) ** 2).sum())
    return scores


# Fitted linear classifiers


def class_shares(labels: np.ndarray) -> np.ndarray:
    """Weights of photos, of sum 1, every class alike."""
    labels = np.asarray(labels)
    classes = labels.max() + 1
    return np.array([1 / (classes * (labels == label).sum()) for label in labels])


def ridge_scores(query, features, labels, weights, ridge):
    """Weighted ridge regression with a free intercept, as ordinary least squares with a row for each penalty."""
    labels, (count, length) = np.asarray(labels), features.shape
    classes = labels.max() + 1
    centre = sum(weights[i] * features[i] for i in range(count))
    penalty = (ridge + 1e-6) * sum(weights[i] * ((features[i] - centre) ** 2).sum() for i in range(count)) / length
    rows, values = [], []
    for i in range(count):
        rows.append(math.sqrt(weights[i]) * np.append(features[i], 1.0))
        values.append(math.sqrt(weights[i]) * np.eye(classes)[labels[i]])
    for d in range(length):
        rows.append(math.sqrt(penalty) * np.eye(length + 1)[d])
        values.append(np.zeros(classes))
    solution = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    return np.hstack((query, np.ones((len(query), 1)))) @ solution - 1 / classes


def softmax_descent(features, labels, weights, weight, bias, steps, rate, momentum=0.0):
    """Gradient descent on the weighted cross-entropy of a linear classifier, one example at a time."""
    weight, bias = weight.copy(), bias.copy()
    size = rate / sum(w * (x @ x + 1) for w, x in zip(weights, features, strict=True))
    speed, bias_speed = np.zeros_like(weight), np.zeros_like(bias)
    for _ in range(steps):
        slope, bias_slope = np.zeros_like(weight), np.zeros_like(bias)
        for x, label, w in zip(features, labels, weights, strict=True):
            exps = np.exp(x @ weight + bias)
            error = exps / exps.sum() - np.eye(len(bias))[label]
            slope, bias_slope = slope + w * np.outer(x, error), bias_slope + w * error
        speed, bias_speed = momentum * speed + slope, momentum * bias_speed + bias_slope
        weight, bias = weight - size * speed, bias - size * bias_speed
    return weight, bias


def leaky(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0.2 * x)


# Delta-encoder


def delta_logits(query, photos, labels, deltas, weights, share, ridge, scale):
    """Each delta applied to each photo, then ridge regression; weights: name → array, as in a state dictionary."""
    features, classes_of, shares = list(photos), list(labels), list(class_shares(labels) * (1 - share))
    for photo, label, weight in zip(photos, labels, class_shares(labels), strict=True):
        for delta in deltas:
            hidden = weights["from_code.weight"] @ delta + weights["from_code.bias"]
            hidden = leaky(hidden + weights["from_anchor.weight"] @ photo)
            features.append(photo + weights["out.weight"] @ hidden + weights["out.bias"])
            classes_of.append(label)
            shares.append(weight * share / len(deltas))
    return scale * ridge_scores(query, np.array(features), np.array(classes_of), np.array(shares), ridge)


# Baseline++


def baseline_pp(query, support, labels, scale, steps, lr) -> np.ndarray:
    """Scores [Q, N] of unit features after gradient descent on directions v and lengths g, one class at a time."""
    classes = max(labels) + 1
    v = [support[labels == y].mean(0) for y in range(classes)]
    g = [float(np.linalg.norm(one)) for one in v]
    for _ in range(steps):
        slope_v, slope_g = [np.zeros_like(one) for one in v], [0.0] * classes
        for f, label in zip(support, labels, strict=True):
            scores = [scale * g[y] * float(v[y] @ f) / float(np.linalg.norm(v[y])) for y in range(classes)]
            exps = [math.exp(score - max(scores)) for score in scores]
            for y in range(classes):
                error = scale * (exps[y] / sum(exps) - (label == y)) / len(labels)
                norm = float(np.linalg.norm(v[y]))
                slope_g[y] += error * float(v[y] @ f) / norm
                slope_v[y] += error * g[y] * (f / norm - float(v[y] @ f) * v[y] / norm**3)
        v = [one - lr * slope for one, slope in zip(v, slope_v, strict=True)]
        g = [one - lr * slope for one, slope in zip(g, slope_g, strict=True)]
    weights = [scale * g[y] * v[y] / np.linalg.norm(v[y]) for y in range(classes)]
    return np.array([[float(weight @ f) for weight in weights] for f in query])


# FRN


def ridge_reconstruction(cell: np.ndarray, pool: np.ndarray, lam: float) -> np.ndarray:
    """Σ w_i·pool_i for the weights w that minimise ‖cell − Σ w_i·pool_i‖² + λ‖w‖², as one least-squares problem."""
    rows = np.concatenate((pool.T, math.sqrt(lam) * np.eye(len(pool))))
    weights = np.linalg.lstsq(rows, np.concatenate((cell, np.zeros(len(pool)))), rcond=None)[0]
    return weights @ pool


def frn_reconstruction(query: np.ndarray, supports: list[np.ndarray], alpha: float, beta: float) -> np.ndarray:
    """ρ·Q̂ of one query map [C, G, G] from the K support maps of a class, cell by cell: [r, C]."""
    pool = np.array([cell for photo in supports for cell in photo.reshape(len(photo), -1).T])
    lam = len(pool) / pool.shape[1] * (math.exp(alpha) + 1e-6)
    cells = [query[:, y, x] for y in range(query.shape[1]) for x in range(query.shape[2])]
    return np.array([math.exp(beta) * ridge_reconstruction(cell, pool, lam) for cell in cells])


def frn_distance(query: np.ndarray, supports: list[np.ndarray], alpha: float, beta: float) -> float:
    """Mean over the cells of the squared error."""
    made = frn_reconstruction(query, supports, alpha, beta)
    cells = query.reshape(len(query), -1).T
    return sum(float(((made[i] - cells[i]) ** 2).sum()) for i in range(len(cells))) / len(cells)


def frn_orthogonality(classes: list[np.ndarray]) -> float:
    """Σ_{i<j} ‖S_i S_jᵀ‖² of the classes' cells [m, C], after dividing by the norm of them all."""
    norm = math.sqrt(sum(float((cells**2).sum()) for cells in classes))
    total = 0.0
    for i in range(len(classes)):
        for j in range(i):
            total += sum(float((a / norm) @ (b / norm)) ** 2 for a in classes[i] for b in classes[j])
    return total


# DeepEMD


def earth_mover(cost: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, np.ndarray]:
    """The cheapest flow from weights a to weights b, as the linear program it is: its cost, and the flow."""
    from scipy.optimize import linprog

    rows, columns = cost.shape
    constraints = np.zeros((rows + columns, rows * columns))
    for i in range(rows):
        for j in range(columns):
            constraints[i, i * columns + j] = constraints[rows + j, i * columns + j] = 1.0
    found = linprog(cost.ravel(), A_eq=constraints, b_eq=np.concatenate((a, b)), method="highs")
    return float(found.fun), found.x.reshape(rows, columns)


def deepemd_pair(query: np.ndarray, proto: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Costs [r, r] and weights [r], [r] of one query and one class, cells [r, C]."""

    def unit(cell: np.ndarray) -> np.ndarray:
        centred = cell - cell.mean()
        return centred / np.linalg.norm(centred)

    cost = np.array([[1 - float(unit(x) @ unit(s)) for s in proto] for x in query])
    a = np.array([max(0.0, float(x @ proto.mean(0))) + 1e-3 for x in query])
    b = np.array([max(0.0, float(s @ query.mean(0))) + 1e-3 for s in proto])
    return cost, a / a.sum(), b / b.sum()


def deepemd_score(query: np.ndarray, proto: np.ndarray, temperature: float) -> float:
    """(T / r) Σ flow · cos with weights that sum to r, of cells [r, C]."""
    cost, a, b = deepemd_pair(query, proto)
    _, flow = earth_mover(cost, a * len(a), b * len(b))
    return temperature / len(a) * float((flow * (1 - cost)).sum())


# DN4


def dn4(query, support, labels, k) -> np.ndarray:
    """Scores [Q, N]: for each cell of a query [C, G, G] the k largest cosines with all cells of a class, summed."""

    def cells(phi: np.ndarray) -> list[np.ndarray]:
        return [cell / np.linalg.norm(cell) for cell in phi.reshape(len(phi), -1).T]

    scores = np.zeros((len(query), max(labels) + 1))
    for q, phi in enumerate(query):
        for y in range(scores.shape[1]):
            pool = [cell for photo, label in zip(support, labels, strict=True) if label == y for cell in cells(photo)]
            for cell in cells(phi):
                scores[q, y] += sum(sorted((float(cell @ other) for other in pool), reverse=True)[:k])
    return scores


# AFHN


def afhn_logits(query, photos, labels, noise, weights, share, ridge, scale):
    """Features made from each class's mean and each noise, then ridge regression on them and the photos."""
    labels = np.asarray(labels)
    features, classes_of, shares = list(photos), list(labels), list(class_shares(labels) * (1 - share))
    classes = labels.max() + 1
    for label in range(classes):
        mean = sum(photo for photo, of in zip(photos, labels, strict=True) if of == label) / (labels == label).sum()
        for z in noise:
            hidden = weights["from_class.weight"] @ mean + weights["from_class.bias"]
            hidden = leaky(hidden + weights["from_noise.weight"] @ z)
            features.append(mean + weights["out.weight"] @ hidden + weights["out.bias"])
            classes_of.append(label)
            shares.append(share / (classes * len(noise)))
    return scale * ridge_scores(query, np.array(features), np.array(classes_of), np.array(shares), ridge)


# DSN


def dsn_plane(photos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """μ [D] and U [D, rank] of a class's photos [K, D]; at most K − 1 directions, those that the photos differ in."""
    mean = photos.mean(0)
    u, sigma, _ = np.linalg.svd((photos - mean).T, full_matrices=False)
    return mean, u[:, : min(len(photos) - 1, int((sigma**2 > 1e-5 * (photos**2).sum()).sum()))]


def dsn(query, support, labels) -> np.ndarray:
    """Minus the squared distance of each query [Q, D] to the plane of each class, over D."""
    scores = np.zeros((len(query), max(labels) + 1))
    for y in range(scores.shape[1]):
        mean, u = dsn_plane(support[labels == y])
        for q, feature in enumerate(query):
            rest = (np.eye(len(mean)) - u @ u.T) @ (feature - mean)
            scores[q, y] = -float((rest**2).sum()) / len(mean)
    return scores


def dsn_overlap(support, labels) -> float:
    """Σ_{i≠j} ‖U_iᵀU_j‖², times 20 over the number of pairs."""
    planes = [dsn_plane(support[labels == y])[1] for y in range(max(labels) + 1)]
    pairs = [(one, two) for i, one in enumerate(planes) for j, two in enumerate(planes) if i != j]
    return 20 * sum(float(((one.T @ two) ** 2).sum()) for one, two in pairs) / len(pairs)


# TDM


def tdm_scores(classes: list[np.ndarray], query: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """R of class maps [C, G, G] within each and against the nearest other, [N, C] each, and of the query, [C]; × C."""
    channels = len(query)
    within, between = np.zeros((len(classes), channels)), np.zeros((len(classes), channels))
    for i, own in enumerate(classes):
        for c in range(channels):
            within[i, c] = channels * ((own[c] - own.mean(0)) ** 2).mean()
            others = [other for j, other in enumerate(classes) if j != i] or [own]
            between[i, c] = channels * min(((own[c] - other.mean(0)) ** 2).mean() for other in others)
    return within, between, np.array([channels * ((query[c] - query.mean(0)) ** 2).mean() for c in range(channels)])


def tdm_gate(scores: np.ndarray, widen: np.ndarray, scale: np.ndarray, shift: np.ndarray, narrow: np.ndarray):
    """b of one vector of scores: 1 + tanh(W₂ relu(LayerNorm(W₁ R)))."""
    hidden = widen @ scores
    hidden = (hidden - hidden.mean()) / math.sqrt(hidden.var() + 1e-5) * scale + shift
    return 1 + np.tanh(narrow @ np.maximum(hidden, 0.0))


# CTX


def ctx(query, support, labels, key, value) -> np.ndarray:
    """Scores [Q, N] of maps [C, G, G] with heads [d, C]: each cell against what it attends to in a class."""
    scores = np.zeros((len(query), max(labels) + 1))
    for q, phi in enumerate(query):
        for y in range(scores.shape[1]):
            cells = np.concatenate([photo.reshape(len(photo), -1).T for photo in support[labels == y]])  # [K·r, C]
            for cell in phi.reshape(len(phi), -1).T:
                inner = [float((key @ cell) @ (key @ other)) / math.sqrt(len(key)) for other in cells]
                exps = [math.exp(one - max(inner)) for one in inner]
                attended = sum(weight / sum(exps) * (value @ other) for weight, other in zip(exps, cells, strict=True))
                scores[q, y] -= float(((value @ cell - attended) ** 2).sum()) / phi[0].size
    return scores


# SRM


def srm_distance(query, supports, alpha: float, beta: float, own_alpha: float, own_beta: float) -> float:
    """Mean over the cells of ‖Q̂ − Q̂_self‖² + ‖Q̂ − Q‖², maps [C, G, G]."""
    made = frn_reconstruction(query, supports, alpha, beta)
    itself = frn_reconstruction(query, [query], own_alpha, own_beta)
    cells = query.reshape(len(query), -1).T
    total = 0.0
    for one, own, cell in zip(made, itself, cells, strict=True):
        total += float(((one - own) ** 2).sum() + ((one - cell) ** 2).sum())
    return total / len(cells)


# VFD


def vfd_logits(query, photos, labels, variations, share, steps, rate):
    """Every variation added to every photo, and gradient descent on all of them from zero."""
    classes = max(labels) + 1
    features, classes_of, shares = list(photos), list(labels), list(class_shares(labels) * (1 - share))
    for photo, label, weight in zip(photos, labels, class_shares(labels), strict=True):
        for variation in variations:
            features.append(photo + variation)
            classes_of.append(label)
            shares.append(weight * share / len(variations))
    start = np.zeros((photos.shape[1], classes)), np.zeros(classes)
    weight, bias = softmax_descent(np.array(features), classes_of, np.array(shares), *start, steps, rate, momentum=0.9)
    return query @ weight + bias


# RENet


def conv3(image: np.ndarray, kernel: np.ndarray, y: int, x: int) -> np.ndarray:
    """A 3×3 kernel [out, in, 3, 3] at one place of an image [in, H, W], zero outside."""
    total = np.zeros(len(kernel))
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            if 0 <= y + dy < image.shape[1] and 0 <= x + dx < image.shape[2]:
                total += kernel[:, :, dy + 1, dx + 1] @ image[:, y + dy, x + dx]
    return total


def conv4(tensor: np.ndarray, kernel: np.ndarray, over: str) -> np.ndarray:
    """A 3×3 kernel over two of the last four dimensions of [in, G, G, G, G], "query" (first two) or "shown"."""
    size = tensor.shape[1]
    found = np.zeros((len(kernel), *tensor.shape[1:]))
    places = [(y, x) for y in range(size) for x in range(size)]
    for a, b in places:
        for c, d in places:
            grid = tensor[:, :, :, c, d] if over == "query" else tensor[:, a, b]
            found[:, a, b, c, d] = conv3(grid, kernel, *((a, b) if over == "query" else (c, d)))
    return found


def renet_refined(cosines: np.ndarray, kernels: list[np.ndarray], biases: list[np.ndarray]) -> np.ndarray:
    """The 4-D convolutions, both ways round: cosines [G, G, G, G] of query and shown cells → the same shape."""

    def one_way(tensor: np.ndarray) -> np.ndarray:
        x = tensor[None]
        for number, over in enumerate(("shown", "query", "shown", "query")):
            x = conv4(x, kernels[number], over)
            if number < 3:
                x = np.maximum(x + biases[number][:, None, None, None, None], 0.0)
        return x[0]

    return one_way(cosines) + one_way(cosines.transpose(2, 3, 0, 1)).transpose(2, 3, 0, 1)


def renet_pair(query, query_key, shown, shown_key, kernels, biases, temperature):
    """Attended means of one query and one map, [C] and [C]: maps [C, G, G], keys [W, G, G]."""
    size = query.shape[1]
    places = [(y, x) for y in range(size) for x in range(size)]
    cosines = np.zeros((size,) * 4)
    for a, b in places:
        for c, d in places:
            first, second = query_key[:, a, b], shown_key[:, c, d]
            cosines[a, b, c, d] = first @ second / (np.linalg.norm(first) * np.linalg.norm(second))
    refined = renet_refined(cosines, kernels, biases).reshape(size**2, size**2)

    def attention(columns: np.ndarray) -> np.ndarray:
        total = np.zeros(len(columns))
        for column in columns.T:
            standard = (column - column.mean()) / math.sqrt(column.var(ddof=1) + 1e-5)
            exps = np.exp(standard / temperature)
            total += exps / exps.sum()
        return total

    means = []
    for cells, weights in ((query, attention(refined)), (shown, attention(refined.T))):
        cells = cells.reshape(len(cells), -1)
        means.append(sum(weights[i] * (cells[:, i] - cells[:, i].mean()) for i in range(len(weights))))
    return means


def renet_self_correlation(phi: np.ndarray, reduce, first, second, expand) -> np.ndarray:
    """What SCR adds to a map [C, G, G]; each layer a pair of weights and a function for its batch norm."""
    size = phi.shape[1]
    unit = np.maximum(phi, 0.0)
    unit = unit / np.sqrt((unit**2).mean(0))  # of unit length in the paper; batch norm takes any factor out again
    found = np.zeros_like(phi)
    for y in range(size):
        for x in range(size):
            grid = np.zeros((len(reduce[0]), 5, 5))
            for dy in range(-2, 3):
                for dx in range(-2, 3):
                    inside = 0 <= y + dy < size and 0 <= x + dx < size
                    product = unit[:, y, x] * (unit[:, y + dy, x + dx] if inside else 0.0)
                    grid[:, dy + 2, dx + 2] = np.maximum(reduce[1](reduce[0] @ product), 0.0)
            for kernel, norm in (first, second):
                inner = range(1, len(grid[0]) - 1)
                rows = [[np.maximum(norm(conv3(grid, kernel, i, j)), 0.0) for j in inner] for i in inner]
                grid = np.array(rows).transpose(2, 0, 1)
            found[:, y, x] = expand[1](expand[0] @ grid[:, 0, 0])
    return found


# FOT


def fot_foreground(phi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A map [C, G, G] without its background, and the mask."""
    channels, size, _ = phi.shape
    energy = np.array([[sum(phi[c, y, x] ** 2 for c in range(channels)) for x in range(size)] for y in range(size)])
    energy = energy / channels
    mask = energy / (energy + energy.mean())
    return phi * mask, mask


def fot_transform(maps, posture, target, weights):
    """The generator on one foreground map, cell by cell; weights: name → array, as in a state dictionary."""
    size = len(posture)
    out = maps.copy()
    for y in range(size):
        for x in range(size):
            hidden = weights["from_map.bias"] + weights["from_whole.weight"] @ maps.mean((1, 2))
            for c in range(len(maps)):
                patch = window(maps[c], x, y, 3)
                hidden += (weights["from_map.weight"][:, c] * patch).sum((1, 2))
            hidden += (weights["from_posture.weight"][:, 0] * window(posture, x, y, 3)).sum((1, 2))
            hidden += (weights["to_posture.weight"][:, 0] * window(target, x, y, 3)).sum((1, 2))
            out[:, y, x] += weights["out.weight"][:, :, 0, 0] @ leaky(hidden) + weights["out.bias"]
    return out


def fot_logits(query, support, labels, weights, share, ridge, scale):
    """Maps of queries and photos; every photo in every posture, pooled, and ridge regression."""

    def pooled(maps: np.ndarray) -> np.ndarray:
        return maps.mean((1, 2)) - weights["standardise.mean"] / weights["standardise.spread"]

    features, classes_of, shares = [], [], []
    for phi, label, weight in zip(support, labels, class_shares(labels), strict=True):
        maps, mask = fot_foreground(phi)
        maps = maps / weights["standardise.spread"]
        made = [fot_transform(maps, mask, target[0], weights) for target in weights["postures"]]
        features += [pooled(maps), *(pooled(one) for one in made)]
        classes_of += [label] * (1 + len(made))
        shares += [weight * (1 - share), *[weight * share / len(made)] * len(made)]
    queries = np.array([pooled(fot_foreground(phi)[0] / weights["standardise.spread"]) for phi in query])
    return scale * ridge_scores(queries, np.array(features), np.array(classes_of), np.array(shares), ridge)


# MetaOptNet


def ridge_weights(support, labels, lam) -> np.ndarray:
    """W [N, D] of least mean ‖y − Wx‖² + λ‖W‖², from the normal equations of the primal."""
    count, size = support.shape
    target = np.array([[float(label == y) for y in range(max(labels) + 1)] for label in labels])
    return np.linalg.solve(support.T @ support / count + lam * np.eye(size), support.T @ target / count).T


def svm_objective(weights, support, labels, cost) -> float:
    """½‖W‖² + c · mean_i max_m (1 − [m = y_i] + ⟨w_m − w_{y_i}, x_i⟩), Crammer and Singer's."""
    hinges = [
        max(float(m != label) + float((weights[m] - weights[label]) @ x) for m in range(len(weights)))
        for x, label in zip(support, labels, strict=True)
    ]
    return 0.5 * float((weights**2).sum()) + cost * sum(hinges) / len(hinges)


def svm_dual_objective(dual, support, labels) -> float:
    """What no W can go below: Σ_i α_{i,y_i} − ½‖αᵀX‖² for any α that the dual allows."""
    return float(sum(row[label] for row, label in zip(dual, labels, strict=True))) - 0.5 * float(
        ((dual.T @ support) ** 2).sum()
    )


# Bi-FRN


def token_norm(vector: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return (vector - vector.mean()) / math.sqrt(vector.var() + 1e-5) * scale + shift


def attend(asks: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax attention of each row of asks [p, C] over keys and values [m, C]."""
    found = []
    for ask in asks:
        scores = [float(ask @ key) / math.sqrt(len(ask)) for key in keys]
        exps = [math.exp(score - max(scores)) for score in scores]
        found.append(sum(one / sum(exps) * value for one, value in zip(exps, values, strict=True)))
    return np.array(found)


def bi_frn_tokens(phi: np.ndarray, w: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A map [C, G, G] through the transformer block and the last map, by its weights' names: q, k, v [r, C]."""
    channels, cells = len(phi), phi.reshape(len(phi), -1).T.copy()
    for place in range(len(cells)):
        for c in range(channels):
            angle = place / 10_000 ** (2 * (c // 2) / channels)
            cells[place, c] += math.sin(angle) if c % 2 == 0 else math.cos(angle)

    def norm(tokens: np.ndarray, name: str) -> np.ndarray:
        return np.array([token_norm(token, w[f"{name}.weight"], w[f"{name}.bias"]) for token in tokens])

    def linear(tokens: np.ndarray, name: str) -> np.ndarray:
        return tokens @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    mixed = attend(*np.split(linear(norm(cells, "block.norm_in"), "block.qkv"), 3, axis=1))
    cells = norm(cells + linear(mixed, "block.project"), "block.norm")
    wide = linear(cells, "block.widen")
    wide = np.array([[value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in row] for row in wide])
    return tuple(np.split(linear(norm(cells + linear(wide, "block.narrow"), "block.norm_out"), "qkv"), 3, axis=1))


def bi_frn_distance(query, supports, class_weight: float, query_weight: float) -> float:
    """Of one query and the photos of a class, each (q, k, v): both errors over r·C, the class's a mean over photos."""
    asks, keys, values = query
    made = attend(asks, np.concatenate([k for _, k, _ in supports]), np.concatenate([v for _, _, v in supports]))
    query_error = float(((values - made) ** 2).sum())
    class_error = sum(float(((v - attend(q, keys, values)) ** 2).sum()) for q, _, v in supports) / len(supports)
    return (class_weight * class_error + query_weight * query_error) / values.size


# MTL


def mtl_logits(query, photos, labels, start, steps, rate):
    """A linear classifier that begins at the class means, weighted channel by channel, and takes gradient steps."""
    labels = np.asarray(labels)
    means = [photos[labels == label].mean(0) for label in range(labels.max() + 1)]
    weight = np.array([start * mean for mean in means]).T
    bias = np.array([-sum(start * mean**2) / 2 for mean in means])
    weight, bias = softmax_descent(photos, labels, class_shares(labels), weight, bias, steps, rate)
    return query @ weight + bias


# LCR


def lcr_logits(query, photos, labels, steps, rate):
    """A linear classifier by gradient descent from zero."""
    start = np.zeros((photos.shape[1], max(labels) + 1)), np.zeros(max(labels) + 1)
    weight, bias = softmax_descent(photos, labels, class_shares(labels), *start, steps, rate, momentum=0.9)
    return query @ weight + bias


def lcr_terms(f, cells, parts, vectors, hard):
    """How far photos are from what they are made of, and how far the vectors from orthogonal."""

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / math.sqrt((a @ a) * (b @ b)))

    units = [vector / math.sqrt(vector @ vector) for vector in vectors]
    apart, size = [], cells.shape[1]
    for photo, cell, places in zip(f, cells, parts, strict=True):
        seen = [k for k, (x, y, visible) in enumerate(places) if visible > 0 and 0 <= x <= 1 and 0 <= y <= 1]
        if hard and seen:
            apart.append(1 - cosine(photo, sum(units[k] for k in seen)))
        elif not hard:
            for k in seen:
                column, row = (min(size - 1, int(share * size)) for share in places[k][:2])
                apart.append(1 - cosine(cell[row, column], units[k]))
    overlap = np.mean([[(a @ b - (i == j)) ** 2 for j, b in enumerate(units)] for i, a in enumerate(units)])
    return np.mean(apart), overlap


# BSNet


def conv_map(image: np.ndarray, kernel: np.ndarray, bias: np.ndarray, padding: int) -> np.ndarray:
    """A 3×3 convolution [out, in, 3, 3] of an image [in, G, G] with padding 0 or 1."""
    places = range(1 - padding, image.shape[1] - 1 + padding)
    rows = [[conv3(image, kernel, y, x) + bias for x in places] for y in places]
    return np.array(rows).transpose(2, 0, 1)


def pool2(image: np.ndarray, take) -> np.ndarray:
    """`take` of each 2×2 cells; an odd last row and column are dropped, a single cell stays."""
    side = image.shape[1] // 2
    if image.shape[1] < 2:
        return image
    places = range(side)
    return np.array([[[take(c[2 * y : 2 * y + 2, 2 * x : 2 * x + 2]) for x in places] for y in places] for c in image])


def norm_map(image: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Layer norm over channels and cells of one image [C, G, G], then a scale and a shift a channel [C, 1, 1]."""
    return (image - image.mean()) / math.sqrt(image.var() + 1e-5) * weight + bias


def bsnet_relation(query, proto, kernels, norms, linears, padding) -> float:
    """The relation module on one query and one class map [C, G, G], stacked; kernels (weight, bias) of two blocks."""
    x = np.concatenate((query, proto))
    for (kernel, bias), norm in zip(kernels, norms, strict=True):
        x = np.maximum(pool2(norm_map(conv_map(x, kernel, bias, padding), *norm), np.max), 0.0)
    (w1, b1), (w2, b2) = linears
    return float(1 / (1 + np.exp(-(w2 @ np.maximum(w1 @ x.ravel() + b1, 0.0) + b2))[0]))


def bsnet_cosine(query, proto, kernels, norms) -> float:
    """The cosine module on one query and one class map."""
    ends = []
    for x in (query, proto):
        for (kernel, bias), norm, take in zip(kernels, norms, (np.max, np.mean), strict=True):
            x = pool2(np.maximum(norm_map(conv_map(x, kernel, bias, 1), *norm), 0.0), take)
        ends.append(x.ravel())
    return float(ends[0] @ ends[1] / (np.linalg.norm(ends[0]) * np.linalg.norm(ends[1])))


# C2-Net


def c2net_refined(high: np.ndarray, middle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cross-layer refinement of two maps [C, r] of one image, after their convolutions."""

    def alike(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        cells = range(left.shape[1])
        inner = np.array([[float((left[:, i] * right[:, j]).sum()) for j in cells] for i in cells])
        return np.tanh(inner / math.sqrt(float((inner**2).sum())))

    high = high + middle @ alike(middle, high)
    return high, middle + high @ alike(high, middle)


def c2net_warp(phi: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """A map [C, G, G] seen through x' = x + a·y + b, y' = y + c·x + d (in −1 … 1), bilinear, zero outside."""
    size = phi.shape[1]
    found = np.zeros_like(phi)
    for i in range(size):
        for j in range(size):
            x, y = (2 * j + 1) / size - 1, (2 * i + 1) / size - 1
            column = ((x + shift[0] * y + shift[1] + 1) * size - 1) / 2
            row = ((y + shift[2] * x + shift[3] + 1) * size - 1) / 2
            for u in (math.floor(row), math.floor(row) + 1):
                for v in (math.floor(column), math.floor(column) + 1):
                    if 0 <= u < size and 0 <= v < size:
                        found[:, i, j] += (1 - abs(row - u)) * (1 - abs(column - v)) * phi[:, u, v]
    return found


def c2net_distance(query: np.ndarray, prototype: np.ndarray, w: dict[str, np.ndarray]) -> float:
    """One level: the query [C, G, G] weighted and moved towards the class mean, by the weights' names."""

    def network(vector: np.ndarray, first: str, rest: str) -> np.ndarray:
        hidden = w[f"{first}.weight"] @ vector + w[f"{first}.bias"]
        hidden = np.maximum(token_norm(hidden, w[f"{rest}.0.weight"], w[f"{rest}.0.bias"]), 0.0)
        return w[f"{rest}.2.weight"] @ hidden + w[f"{rest}.2.bias"]

    of_class = prototype.mean((1, 2))
    weights = 1 + np.tanh(network(np.concatenate((of_class, query.mean((1, 2)))), "pair", "weigh"))
    query = query * weights[:, None, None]
    shift = network(np.concatenate((of_class, query.mean((1, 2)))), "weighted_pair", "move")
    return float(((prototype - c2net_warp(query, shift)) ** 2).mean())


# SAML


def saml_selected(query: np.ndarray, proto: np.ndarray, temperature: float) -> np.ndarray:
    """The weighted relation matrix [r, r] of cells [r, C], one pair of cells at a time."""
    cells = len(query)

    def unit(cell: np.ndarray) -> np.ndarray:
        return (cell - cell.mean()) / np.linalg.norm(cell - cell.mean())

    relation = np.array([[float(unit(x) @ unit(s)) for s in proto] for x in query])
    exps = np.exp(relation / temperature)
    found = np.zeros_like(relation)
    for i in range(cells):
        for j in range(cells):
            weight = exps[i, j] / exps[i].sum() + exps[i, j] / exps[:, j].sum()
            found[i, j] = relation[i, j] * weight * cells / 2
    return found


# TPMN


def perceptron(x: np.ndarray, layers) -> np.ndarray:
    """Linear, ReLU, linear; layers [(weight, bias), (weight, bias)]."""
    (w1, b1), (w2, b2) = layers
    return w2 @ np.maximum(w1 @ x + b1, 0.0) + b2


def over_classes(values: list[np.ndarray]) -> np.ndarray:
    """Mean and deviation over the classes, of vectors [C]: [2·C]."""
    mean = sum(values) / len(values)
    return np.concatenate((mean, np.sqrt(sum((value - mean) ** 2 for value in values) / len(values) + 1e-6)))


def find_part(cells: np.ndarray, part_filter: np.ndarray) -> np.ndarray:
    """The mean of the cells [r, C] by their attention."""
    exps = [math.exp(float(cell @ part_filter) / math.sqrt(len(cell))) for cell in cells]
    return sum(weight * cell for weight, cell in zip(exps, cells, strict=True)) / sum(exps)


def tpms_distances(queries, supports, labels, filters, learner, importance) -> np.ndarray:
    """Weighted part distances [Q, N] of images as cells [r, C]."""
    classes = max(labels) + 1
    members = [[cells for cells, label in zip(supports, labels, strict=True) if label == y] for y in range(classes)]
    statistics = over_classes([sum(cells.mean(0) for cells in photos) / len(photos) for photos in members])
    filters = filters + perceptron(statistics, learner).reshape(filters.shape)
    prototypes = [[sum(find_part(c, f) for c in photos) / len(photos) for f in filters] for photos in members]
    raw = [float(perceptron(over_classes([one[p] for one in prototypes]), importance)[0]) for p in range(len(filters))]
    weights = np.exp(raw) / np.exp(raw).sum()
    found = np.zeros((len(queries), classes))
    for q, cells in enumerate(queries):
        for y in range(classes):
            for p, part_filter in enumerate(filters):
                found[q, y] += weights[p] * float(((find_part(cells, part_filter) - prototypes[y][p]) ** 2).mean())
    return found


# ConstellationNet


def kmeans_step(cells: np.ndarray, centres: np.ndarray, counts: np.ndarray, sharpness: float):
    """Soft mini-batch k-means (Sculley 2010): a step of rate share / count towards each centre's mean cell."""
    units = [cell / np.linalg.norm(cell) for cell in cells]
    shares = []
    for unit in units:
        exps = np.array([math.exp(sharpness * float(unit @ centre) / np.linalg.norm(centre)) for centre in centres])
        shares.append(exps / exps.sum())
    moved, weighed = centres.copy(), counts.copy()
    for k in range(len(centres)):
        weight = sum(share[k] for share in shares)
        mean = sum(share[k] * unit for share, unit in zip(shares, units, strict=True)) / weight
        weighed[k] += weight
        moved[k] += weight / weighed[k] * (mean - centres[k])
    return moved, weighed


def sine_position(x: int, y: int, width: int) -> np.ndarray:
    """The code of a cell, counted from 1: half for y, half for x."""
    half = width // 2
    code = []
    for place in (y, x):
        for t in range(half):
            angle = place / 10_000 ** (2 * (t // 2) / half)
            code.append(math.sin(angle) if t % 2 == 0 else math.cos(angle))
    return np.array(code)


def many_headed(values: np.ndarray, positions: np.ndarray, weights, biases, merge, heads: int) -> np.ndarray:
    """Multi-head self-attention on tokens [r, D]; weights and biases of query, key, value, then (weight, bias)."""
    placed = values + positions
    q, k, v = (x @ w.T + b for x, w, b in zip((placed, placed, values), weights, biases, strict=True))
    width = q.shape[1] // heads
    found = np.zeros_like(v)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(len(q)):
            scores = np.array([float(q[i, part] @ k[j, part]) / math.sqrt(width) for j in range(len(k))])
            exps = np.exp(scores - scores.max())
            found[i, part] = sum(exps[j] / exps.sum() * v[j, part] for j in range(len(k)))
    return found @ merge[0].T + merge[1]


def norm_token(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * weight + bias


def kind_place(
    maps: np.ndarray, middle: np.ndarray, centre: np.ndarray, basis: np.ndarray, temperature: float
) -> tuple[float, float]:
    """Where a kind of cell lies on a photo with features [C, G, G]: mean of (x, y) by softmax of the cosine.

    The cosine is that of the cell's shadow on the space of the basis [C, D], in which the centre [C] lies.
    """
    size = maps.shape[-1]
    total, x_sum, y_sum = 0.0, 0.0, 0.0
    for y in range(size):
        for x in range(size):
            cell = maps[:, y, x] - middle
            shadow = sum(float(cell @ one) * one for one in basis.T)
            weight = math.exp(float(shadow @ centre) / np.linalg.norm(shadow) / temperature)
            total, x_sum, y_sum = total + weight, x_sum + weight * x, y_sum + weight * y
    return x_sum / total, y_sum / total


def layout_untold(mu: np.ndarray, places: np.ndarray, counts: np.ndarray, size: int, ridge: float, far: float) -> float:
    """docs/paper.md "Parts that tell where all else lies": mu [B, K, 2], places [B, M, 2], counts [B, M]."""
    photos, kinds = counts.shape
    scale, aims = size / 4, np.zeros(places.shape)
    for m in range(kinds):
        seen = [b for b in range(photos) if counts[b, m]]
        aims[:, m] = (places[:, m] - np.mean([places[b, m] for b in seen], axis=0)) / scale
    spread = np.mean(
        [aims[b, m, axis] ** 2 for b in range(photos) for m in range(kinds) if counts[b, m] for axis in (0, 1)]
    )
    soft = []
    for m in range(kinds):
        seen = [b for b in range(photos) if counts[b, m]]
        given = np.array([[1.0, *((mu[b] - (size - 1) / 2) / scale).ravel()] for b in seen])
        # least squares with rows that pull each coefficient to 0
        pull = math.sqrt(ridge * len(seen)) * np.eye(given.shape[1])
        wanted = np.concatenate((aims[seen, m], np.zeros((given.shape[1], 2))))
        linear = np.linalg.lstsq(np.concatenate((given, pull)), wanted, rcond=None)[0]
        for row, b in enumerate(seen):
            miss = float(((given[row] @ linear - aims[b, m]) ** 2).mean()) / spread
            soft.append(2 * far * (math.sqrt(miss / far + 1) - 1))
    return float(np.mean(soft))


def warps_unfollowed(plain: np.ndarray, warped: np.ndarray, warps: np.ndarray, size: int) -> float:
    """docs/paper.md "Parts that follow": plain and warped [B, S, K, 2], warps [B, 2, 3], moved photo → plain."""
    photos, scales, parts, _ = plain.shape
    ratios = []
    for s in range(scales):
        for k in range(parts):
            aims, found = [], []
            for b in range(photos):
                there = (plain[b, s, k] + 0.5) / (size / 2) - 1  # the cell's middle, −1 to 1 from edge to edge
                here = np.linalg.solve(warps[b, :, :2], there - warps[b, :, 2])
                aim = (here + 1) * (size / 2) - 0.5
                if -0.5 < aim[0] < size - 0.5 and -0.5 < aim[1] < size - 0.5:
                    aims.append(aim)
                    found.append(warped[b, s, k])
            if not aims:
                ratios.append(0.0)
                continue
            miss = np.mean([float(((a - f) ** 2).sum()) for a, f in zip(aims, found, strict=True)])
            spreads = [np.var([one[0] for one in each]) + np.var([one[1] for one in each]) for each in (aims, found)]
            ratios.append(miss / max(float(np.mean(spreads)), 1e-3 * (size / 4) ** 2))
    return float(np.mean(ratios))
