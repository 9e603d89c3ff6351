"""The scores of one set of units under all protocols, and all of them as one document: the `--json` output."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from parseshot.part_quality import consistency, purity
from parseshot.part_quality.annotations import Truth
from parseshot.part_quality.clustering import (
    adjusted_rand_index,
    nearest,
    normalised_mutual_information,
    part_at,
    with_background,
)
from parseshot.part_quality.places import inside
from parseshot.part_quality.regression import regression_error
from parseshot.part_quality.units import Units

SCHEMA_VERSION = 2
LOWER = ("error", "error_active")  # the less the better
STRONGEST = "floor: strongest cells"
LOOKING = ("floor: energy argmax", STRONGEST)
HIGHER = ("nmi", "ari", "nmi_nu", "ari_nu", "purity", "purity_active", "consistency", "stability")


@dataclass(frozen=True)
class Score:
    """All in per cent. A floor has one value for both variants of a protocol."""

    name: str
    locations: int  # how many 2-D locations an image has
    error: float  # P-A: mean distance of predicted from annotated landmarks, in % of the box
    by_landmark: dict[str, float]
    error_active: float  # P-A where inactive parts are masked
    active: float  # how often a part is active
    nmi: float  # P-B, standardised scores and a background
    ari: float
    nmi_nu: float  # P-B, ν and no background
    ari_nu: float
    purity: float  # P-D, mean over parts, all images
    purity_deviation: float  # over parts
    purity_over_half: int  # parts whose purity is above 50 %
    purity_active: float | None  # P-D where the part is active; None: no part ever is
    consistency: float  # P-E
    stability: float | None = None  # P-E; None: not measured

    @property
    def is_floor(self) -> bool:
        return self.name.startswith("floor")


@dataclass(frozen=True)
class PartQuality:
    """What was scored, on what, and how well."""

    model: str  # fingerprint
    data: dict[str, Any]
    split: str
    fitted_on: int  # images
    scored_on: int
    seen_before: int  # of the scored images: of classes the model was trained on
    stability_images: int
    seed: int  # of the images for stability, the noise and the random cells
    box_share: float  # of the picture, that the object's box takes on average
    settings: dict[str, float]
    landmarks: dict[str, int]  # visible ones among the scored images
    scores: list[Score]

    def _floors(self, score: Score) -> list[Score]:
        """With no more locations than a score has."""
        return [one for one in self.scores if one.is_floor and one.locations <= score.locations]

    def best_floor(self, score: Score, measure: str) -> float | None:
        """The best floor with no more locations than a score has; of stability, those that look at the picture."""
        floors = self._floors(score)
        if measure == "stability":  # a fixed place is stable by definition
            floors = [one for one in floors if one.name in LOOKING]
        values = [value for one in floors if (value := getattr(one, measure)) is not None]
        return (min if measure in LOWER else max)(values, default=None)

    def of_best_floor(self, score: Score) -> float:
        """The error over the best floor's: below 1 is better."""
        best = self.best_floor(score, "error")
        return score.error / best if best else math.inf

    def of_usual_floor(self, score: Score) -> float:
        """The same by the best of the four floors that are usual: none of them is several cells of most energy."""
        best = min((one.error for one in self._floors(score) if one.name != STRONGEST), default=0.0)
        return score.error / best if best else math.inf

    def record(self) -> dict[str, Any]:
        """For JSON."""
        scores = [
            {
                **asdict(score),
                "of_best_floor": self.of_best_floor(score),
                "of_usual_floor": self.of_usual_floor(score),
                "best_floor": {measure: self.best_floor(score, measure) for measure in LOWER + HIGHER},
            }
            for score in self.scores
        ]
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "scores": scores}


def score_units(
    fit: Units, scored: Units, truth: tuple[Truth, Truth], names: Sequence[str], size: int, *, stability: float | None
) -> Score:
    """All protocols for a set of units; both sides of the split, `truth` is of both. `stability` is passed on."""
    shown, visible = truth[1], truth[1].visible
    ends = [
        (one.in_box(units.expected), one.in_box(one.landmarks), one.visible)
        for units, one in zip((fit, scored), truth, strict=True)
    ]
    error, by_landmark = regression_error(ends[0], ends[1])
    masked = error
    if fit.active is not None and scored.active is not None:
        masked, _ = regression_error(ends[0], ends[1], active=(fit.active, scored.active))
    which = np.broadcast_to(np.arange(visible.shape[1]), visible.shape)[visible]
    clusters = [
        100 * agreement(which, labels[visible])
        for labels in _labels(fit, scored, shown.landmarks, size)
        for agreement in (normalised_mutual_information, adjusted_rand_index)
    ]
    merged = purity.merge_sides(names)
    near = inside(scored.peak, shown.landmarks, visible, purity.HALF * size)
    pure = purity.purity(near, visible, merged)
    pure_active = purity.purity(near, visible, merged, scored.active)
    around = inside(scored.peak, shown.landmarks, visible, consistency.HALF * size)
    return Score(
        name=scored.name,
        locations=scored.locations,
        error=100 * error,
        by_landmark={name: 100 * float(value) for name, value in zip(names, by_landmark, strict=True)},
        error_active=100 * masked,
        active=100.0 if scored.active is None else 100 * float(scored.active.mean()),
        nmi=clusters[0],
        ari=clusters[1],
        nmi_nu=clusters[2],
        ari_nu=clusters[3],
        purity=100 * float(pure.mean()),
        purity_deviation=100 * float(pure.std()),
        purity_over_half=int((pure > 0.5).sum()),
        purity_active=None if np.isnan(pure_active).all() else 100 * float(np.nanmean(pure_active)),
        consistency=100 * consistency.consistency(around, visible, shown.labels),
        stability=stability,
    )


def _labels(fit: Units, scored: Units, landmarks: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The part found at each landmark, [n, P], by the scores and by ν; for a floor, by the nearest place."""
    if fit.score is None or scored.score is None or scored.nu is None:
        labels = nearest(scored.peak, landmarks)
        return labels, labels
    return part_at(with_background(fit.score, scored.score), landmarks, size), part_at(scored.nu, landmarks, size)
