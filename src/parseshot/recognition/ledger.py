"""An explanation as a ledger: the distance of Eq. 7 is a finite sum, and here are its rows.

One row a part and scale of the query, one a part for its cells and one for the object as a whole where a model compares
them, one for the geometry, and one for the number of photos where the model is calibrated for it. What the rows add is
the distance to the class, and times the model's scale the score.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parseshot.engine.model import Model
from parseshot.methods.base import Encoding
from parseshot.methods.dop import DOP
from parseshot.parts.distance import Distance
from parseshot.recognition.calibration import Calibration
from parseshot.recognition.explain import dop_of, places_of

EXPRESSION, CELLS, WHOLE, GEOMETRY, PHOTOS = "expression", "cells", "whole", "geometry", "photos"


@dataclass(frozen=True)
class LedgerRow:
    """One term of the distance between a query and a class. Places are (x, y) in pixels of the model's input."""

    kind: str  # expression, cells, whole, geometry or photos
    adds: float  # to the distance
    part: int | None = None  # from 0
    scale: int | None = None  # side of the query's template, in cells
    weight: float | None = None  # α: what the part counts
    matched: int | None = None  # row of the support photo whose part is nearest
    place: tuple[float, float] | None = None  # of the part in the query …
    matched_place: tuple[float, float] | None = None  # … and in that photo, at its surest scale
    entropy: float | None = None  # of the query's location: 0 is certain, 1 anywhere

    @property
    def distance(self) -> float | None:
        """Before it was weighted."""
        return None if not self.weight else self.adds / self.weight


@dataclass(frozen=True)
class Ledger:
    """A query against one class."""

    distance: float
    score: float
    rows: tuple[LedgerRow, ...]

    def of_part(self, part: int) -> float:
        """What a part adds in all."""
        return sum(row.adds for row in self.rows if row.part == part)

    def of_kind(self, kind: str) -> float:
        """What rows of a kind add in all."""
        return sum(row.adds for row in self.rows if row.kind == kind)


@torch.inference_mode()
def make_ledger(model: Model, query: Encoding, support: Encoding, fitted: Calibration | None = None) -> Ledger:
    """Of one query, and of the photos of one class."""
    method = dop_of(model)
    method.eval()
    photos = support.images
    one, many = torch.zeros(photos, dtype=torch.int64), torch.arange(photos)
    shown = method.prepare(support, one)
    terms = _double(method.terms(query, shown))
    single = method.terms(query, method.prepare(support, many))  # every photo as its own class
    places, entropy = places_of(model, query)  # [1, S, K, 2], [1, S, K]
    others, other_entropy = places_of(model, support)  # [n, S, K, 2], [n, S, K]
    surest = other_entropy.argmin(1)  # [n, K]
    weights = _weights(method, query, shown.entropy)  # [S, K]
    rows = []

    def matched(by_photo: Tensor, part: int) -> tuple[int, tuple[float, float]]:
        photo = int(by_photo.argmin())
        return photo, _pair(others[photo, surest[photo, part], part])

    for scale, side in enumerate(method.config.scales):
        for part in range(method.config.parts):
            photo, where = matched(single.expression[0, :, scale, :, part].sum(1), part)
            rows.append(
                LedgerRow(
                    EXPRESSION, float(terms.expression[0, 0, scale, :, part].sum()), part, side,
                    float(weights[scale, part]), photo, _pair(places[0, scale, part]), where,
                    float(entropy[0, scale, part]),
                )
            )  # fmt: skip
    if method.config.cells:
        for part in range(method.config.parts):
            photo, where = matched(single.cells[0, :, part], part)
            rows.append(
                LedgerRow(
                    CELLS, float(terms.cells[0, 0, part]), part, None, float(weights[:, part].mean()), photo,
                    _pair(places[0, 0, part]), where, float(entropy[0, 0, part]),
                )
            )  # fmt: skip
    if method.config.whole:
        weight, photo = float(method.log_whole_weight.exp()), int(single.whole[0].argmin())
        rows.append(LedgerRow(WHOLE, float(terms.whole[0, 0]), weight=weight, matched=photo))
    rows.append(LedgerRow(GEOMETRY, float(terms.geometry[0, 0].sum())))
    total = float(terms.total)
    if fitted is not None and fitted.advantage:
        rows.append(LedgerRow(PHOTOS, fitted.advantage * (1 - 1 / photos) / float(method.as_score(torch.ones(())))))
        total += rows[-1].adds
    return Ledger(total, float(method.as_score(torch.tensor(total, dtype=torch.float64))), tuple(rows))


def _double(terms: Distance) -> Distance:
    """So that the sum of the rows is their sum, whatever the order."""
    return Distance(*(each.double() for each in terms))


def _pair(place: Tensor) -> tuple[float, float]:
    return float(place[0]), float(place[1])


def _weights(method: DOP, query: Encoding, class_entropy: Tensor) -> Tensor:
    """α of each scale and part of the query, over the scales of the class: [S, K], as much as rows are divided by."""
    scales, parts = query["entropy"].shape[1:]
    of_sum = 1.0 if not method.config.normalised else 1 / scales
    if method.slopes is None:
        return query["entropy"].new_full((scales, parts), of_sum / parts)
    asked = method.slopes[0] * query["entropy"][0][:, None] + method.slopes[1] * class_entropy[0]  # [S, S or 1, K]
    return torch.softmax(asked, -1).mean(1) * of_sum
