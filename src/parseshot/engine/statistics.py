"""What a set of episodes says: means with intervals, paired differences, calibration, known against unknown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Z95 = 1.96
BINS = 15  # of confidence, equally wide
RESAMPLES = 2_000  # of the classes
TRUE_POSITIVES = 0.95  # share of known queries that must be accepted


@dataclass(frozen=True)
class Interval:
    """A mean over episodes with its 95 % interval, 1.96·σ/√n (σ with ddof 1)."""

    mean: float
    half_width: float
    count: int

    @staticmethod
    def of(values: np.ndarray) -> "Interval":
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return Interval(float(np.mean(values)), Z95 * deviation / math.sqrt(len(values)), len(values))

    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half_width

    @property
    def p_value(self) -> float:
        """Two-sided p of "the mean is 0" by the normal distribution, for which 30 episodes are enough."""
        if not self.half_width > 0:
            return 1.0 if self.mean == 0 else 0.0
        return math.erfc(abs(self.mean) / self.half_width * Z95 / math.sqrt(2))


def by_classes(right: np.ndarray, counts: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of Σ right / Σ counts if other classes had been drawn: bootstrap over the classes [C].

    Episodes share images and classes, so that the interval over episodes says how well these classes are known, not
    how it would go with others. `right` may be a difference of two methods.
    """
    seen = counts > 0
    right, counts = right[seen], counts[seen]
    drawn = np.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    means = right[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: how small each p still is when as many differences are looked at.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted


def indistinct_groups(order: Sequence[int], differ: np.ndarray) -> list[list[int]]:
    """Longest runs of methods, neighbours in `order`, of which no two differ: the bars of a critical-difference plot.

    differ: [M, M], True where two methods were told apart.
    """
    groups: list[list[int]] = []
    for start in range(len(order)):
        end = start
        while end + 1 < len(order) and not differ[order[end + 1], list(order[start : end + 1])].any():
            end += 1
        run = list(order[start : end + 1])
        if len(run) > 1 and not (groups and set(run) <= set(groups[-1])):
            groups.append(run)
    return groups


class Reliability:
    """Confidence against accuracy in equally wide bins, added up query by query."""

    def __init__(self) -> None:
        self.counts, self.confidence, self.right = (np.zeros(BINS) for _ in range(3))
        self.loss = 0.0  # summed −log probability of the true class

    def add(self, log_probabilities: Tensor, targets: Tensor, counted: Tensor) -> None:
        """Log-probabilities [E, Q, N], true classes [Q], and which queries count [E, Q]."""
        best, answer = log_probabilities.max(-1)
        confidence = best.exp()[counted].double().numpy()
        right = (answer == targets)[counted].double().numpy()
        bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
        for total, weights in ((self.counts, None), (self.confidence, confidence), (self.right, right)):
            total += np.bincount(bins, weights, minlength=BINS)
        truth = log_probabilities.gather(-1, targets.expand(len(log_probabilities), -1)[..., None]).squeeze(-1)
        self.loss -= float(truth[counted].double().sum())

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap between confidence and accuracy."""
        return float(np.abs(self.confidence - self.right).sum() / self.counts.sum())

    @property
    def nll(self) -> float:
        return self.loss / float(self.counts.sum())


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The T > 0 for which softmax(logits / T) gives the true classes the highest likelihood: [n, N], [n] → T.

    −log likelihood is convex in 1/T; the root of its derivative is found by bisection, the same on every run.
    """
    logits = logits.double()
    truth = logits.gather(-1, targets[:, None]).squeeze(-1).mean()

    def slope(inverse: float) -> float:
        expected = (torch.softmax(inverse * logits, -1) * logits).sum(-1).mean()
        return float(expected - truth)

    low, high = 1e-4, 1e4
    if slope(high) < 0:  # never wrong: the sharper the better
        return 1 / high
    if slope(low) > 0:  # no better than chance
        return 1 / low
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return 1 / math.sqrt(low * high)


def auroc(known: Tensor, unknown: Tensor) -> Tensor:
    """Chance that a known query scores above an unknown one, ties half: [E, Q], [E, U] → [E]."""
    first, second = known[:, :, None], unknown[:, None]
    return ((first > second).double() + 0.5 * (first == second).double()).mean((1, 2))


def false_positives(known: Tensor, unknown: Tensor) -> Tensor:
    """Share of unknown queries accepted where 95 % of the known ones are: [E, Q], [E, U] → [E]."""
    needed = math.ceil(TRUE_POSITIVES * known.shape[1])
    threshold = known.sort(1, descending=True).values[:, needed - 1]
    return (unknown >= threshold[:, None]).double().mean(1)
