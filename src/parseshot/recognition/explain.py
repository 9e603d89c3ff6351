"""Why a query was recognised: which example photo it matched, part by part, as the terms of Eq. 7.

The distance is a finite sum, so an explanation is its rows: one a part, one for the geometry, and they add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parseshot.engine.model import Model
from parseshot.errors import ModelError
from parseshot.methods.base import Encoding
from parseshot.methods.dop import DOP
from parseshot.parts.distance import is_degenerate
from parseshot.parts.parsing import peak_location


@dataclass(frozen=True)
class FoundPart:
    """One part of one image, over all scales."""

    x: float  # pixels of the image the model saw; the centre of the top left pixel is (0, 0)
    y: float
    entropy: float  # of its location: 0 is certain, 1 is anywhere
    by_scale: tuple[tuple[int, float, float, float], ...]  # (template side, x, y, entropy)


@dataclass(frozen=True)
class Explanation:
    """A query against a support set. Distances are those of Eq. 7; `part_distances` and `geometry` sum to the first."""

    ranking: tuple[tuple[int, float, float], ...]  # (class, distance, softmax probability), best first
    matched: int  # row of the support image of the best class that is nearest to the query
    parts: tuple[FoundPart, ...]  # of the query
    matched_parts: tuple[FoundPart, ...]  # of that support image
    part_distances: tuple[float, ...]  # to the best class, a part, summed over the pairs of scales
    runner_up_part_distances: tuple[float, ...]  # to the second class
    geometry: float  # geometric term to the best class
    runner_up_geometry: float
    degenerate_geometry: bool  # all parts of the query in one place: geometry says nothing


def find_parts(model: Model, encoding: Encoding, row: int) -> tuple[FoundPart, ...]:
    """The parts of an encoded image. A part's location is that of its most certain scale."""
    method, one = dop_of(model), encoding.take(slice(row, row + 1))
    where, entropy = (each[0] for each in places_of(model, one))  # [S, K, 2], [S, K]
    found = []
    for part in range(where.shape[1]):
        rows = tuple(
            (side, float(where[s, part, 0]), float(where[s, part, 1]), float(entropy[s, part]))
            for s, side in enumerate(method.config.scales)
        )
        best = min(rows, key=lambda row: row[3])
        found.append(FoundPart(best[1], best[2], best[3], rows))
    return tuple(found)


def places_of(model: Model, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Where each part peaks [n, S, K, 2], in pixels of the model's input, and the normalised entropy of ν [n, S, K]."""
    entropy = encoding["entropy"]  # [n, S, K]
    if not dop_of(model).config.normalised:
        entropy = entropy / math.log(model.grid**2)
    return cells_to_pixels(peak_location(encoding["nu"]), model), entropy


def cells_to_pixels(cells: Tensor, model: Model) -> Tensor:
    """(x, y) in cells of the feature map → pixels of the model's input, both with 0 at the centre of the first."""
    return (cells + 0.5) * (model.config.image_size / model.grid) - 0.5


@torch.inference_mode()
def explain(model: Model, query: Encoding, support: Encoding, labels: Tensor) -> list[Explanation]:
    """Recognise each query and say why."""
    method = dop_of(model)
    method.eval()
    terms = method.distance(query, support, labels)  # expression [Q, N, S, S, K], geometry [Q, N, S, S]
    total, probability = terms.total, torch.softmax(method.logits(query, support, labels), 1)  # [Q, N]
    each = torch.arange(support.images)
    single = method.distance(query, support, each).total  # [Q, n]: every support image as its own class
    parts = terms.by_part  # [Q, N, K]
    geometry = terms.geometry.sum((2, 3))  # [Q, N]
    found = [find_parts(model, support, row) for row in range(support.images)]
    flat = is_degenerate(query["mu"]).all(1)  # [Q]
    answers = []
    for row in range(query.images):
        order = total[row].argsort(stable=True).tolist()
        best, second = order[0], order[1] if len(order) > 1 else order[0]
        matched = int(torch.where(labels == best, single[row], torch.inf).argmin())
        answers.append(
            Explanation(
                tuple((name, float(total[row, name]), float(probability[row, name])) for name in order),
                matched,
                find_parts(model, query, row),
                found[matched],
                tuple(parts[row, best].tolist()),
                tuple(parts[row, second].tolist()),
                float(geometry[row, best]),
                float(geometry[row, second]),
                bool(flat[row]),
            )
        )
    return answers


def dop_of(model: Model) -> DOP:
    """The method of a model that has parts."""
    if not isinstance(model.method, DOP):
        raise ModelError(f"method {model.config.method!r} has no parts to explain with; use a dop model")
    return model.method


def accuracy(answers: Sequence[Explanation], truth: np.ndarray) -> float:
    """Share of the queries whose first answer is right."""
    return float(np.mean([answer.ranking[0][0] == int(right) for answer, right in zip(answers, truth, strict=True)]))
