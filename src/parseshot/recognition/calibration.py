"""From scores to probabilities: of each class, and of "none of these", for any number of classes and photos.

Both are fitted on tasks drawn from classes that the model was not trained on. In a task some classes are enrolled, from
2 to 20 of them or one alone, each with 1 to 10 photos; half of the queries belong to them and half to others.

- P(class c | one of these) = softmax(s / T), with ln T linear in ln N and in the ln of the best class's photos.
- P(one of these) = a logistic function of the best score, of how far it is above the second and above the mean of the
  others, of ln N and of the ln of the best class's photos.

Letters: Q queries, N classes, s scores.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from parseshot.config import Config
from parseshot.data.packed import Pack
from parseshot.engine.encoding import Encoded, Progress, encode_split
from parseshot.engine.evaluation import refuse_seen_classes
from parseshot.engine.model import Model
from parseshot.engine.statistics import TRUE_POSITIVES
from parseshot.errors import DataError
from parseshot.methods.base import Method

TASKS = 600
WAYS = (1, 2, 3, 5, 10, 20)
SHOTS = (1, 2, 3, 5, 10)
QUERIES = 30  # known ones of a task, and as many unknown ones
SHRINKAGE = 1e-4  # on the standardised slopes, so that they stay finite where nothing is ever wrong
FEATURES = 6


class Calibration(Config):
    """What turns scores into probabilities. It belongs to one model's weights."""

    temperature: tuple[float, float, float] = (0.0, 0.0, 0.0)  # ln T: constant, by ln N, by ln photos
    known: tuple[float, ...] = Field((0.0,) * (FEATURES + 1), min_length=FEATURES + 1, max_length=FEATURES + 1)
    threshold: float = Field(0.5, ge=0, le=1)  # below this P(one of these) the answer is "none of these"

    def shares(self, scores: Tensor, photos: Tensor) -> Tensor:
        """P(class | one of these), [Q, N], of scores [Q, N] and photos [N] of each class."""
        return torch.softmax(scores.double() / self._temperatures(scores, photos)[:, None], 1)

    def knowns(self, scores: Tensor, photos: Tensor) -> Tensor:
        """P(one of these), [Q]."""
        weights = torch.tensor(self.known, dtype=torch.float64)
        return torch.sigmoid(_features(scores.double(), photos) @ weights[1:] + weights[0])

    def _temperatures(self, scores: Tensor, photos: Tensor) -> Tensor:
        return torch.exp(_sizes(scores, photos) @ torch.tensor(self.temperature, dtype=torch.float64))


def _sizes(scores: Tensor, photos: Tensor) -> Tensor:
    """1, ln N and the ln of the photos of the best class, [Q, 3]."""
    best = photos.double()[scores.argmax(1)].clamp_min(1).log()
    return torch.stack((torch.ones_like(best), torch.full_like(best, math.log(scores.shape[1])), best), 1)


def _features(scores: Tensor, photos: Tensor) -> Tensor:
    """[Q, FEATURES]; with one class there is nothing to be above of."""
    top = scores.topk(min(2, scores.shape[1]), 1).values
    best = top[:, 0]
    if scores.shape[1] > 1:
        above_second = best - top[:, 1]
        above_others = best - (scores.sum(1) - best) / (scores.shape[1] - 1)
    else:
        above_second = above_others = torch.zeros_like(best)
    alone = torch.full_like(best, float(scores.shape[1] == 1))
    return torch.cat((torch.stack((best, above_second, above_others, alone), 1), _sizes(scores, photos)[:, 1:]), 1)


class _Task(NamedTuple):
    scores: Tensor  # [Q, N], known queries first
    photos: Tensor  # [N]
    targets: Tensor  # [known]: their classes


def calibrate(model: Model, pack: Pack, progress: Progress | None = None) -> Calibration:
    """Fit a model's calibration on the val classes of a data set, and keep it with the model."""
    refuse_seen_classes(model, pack, "val")
    fitted = fit_calibration(model.method, encode_split(model, pack, "val", progress=progress))
    model.provenance["calibration"] = fitted.model_dump(mode="json")
    return fitted


def fit_calibration(method: Method, encoded: Encoded, *, seed: int = 0, tasks: int = TASKS) -> Calibration:
    """Fit both on tasks drawn from these classes, which the model must not have been trained on."""
    if len(encoded.rows) < 4 or min(len(rows) for rows in encoded.rows.values()) < 2:
        raise DataError("to calibrate, four classes with two photos each are needed")
    drawn = _tasks(method, encoded, np.random.default_rng(seed), tasks)
    several = [task for task in drawn if task.scores.shape[1] > 1]
    temperature = _fit(torch.zeros(3, dtype=torch.float64), lambda weights: _temperature_loss(weights, several))
    features = torch.cat([_features(task.scores, task.photos) for task in drawn])
    is_known = torch.cat([(torch.arange(len(task.scores)) < len(task.targets)).double() for task in drawn])
    mean, spread = features.mean(0), features.std(0).clamp_min(1e-9)
    standard = (features - mean) / spread

    def known_loss(weights: Tensor) -> Tensor:
        found = standard @ weights[1:] + weights[0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(found, is_known)
        return loss + SHRINKAGE * weights[1:].square().sum()

    weights = _fit(torch.zeros(FEATURES + 1, dtype=torch.float64), known_loss)
    slopes = weights[1:] / spread
    known = (float(weights[0] - slopes @ mean), *slopes.tolist())
    fitted = Calibration(temperature=tuple(temperature.tolist()), known=known)
    accepted = torch.cat([fitted.knowns(task.scores[: len(task.targets)], task.photos) for task in drawn])
    return fitted.model_copy(update={"threshold": round(float(accepted.quantile(1 - TRUE_POSITIVES)), 6)})


def _temperature_loss(weights: Tensor, tasks: list[_Task]) -> Tensor:
    losses = []
    for task in tasks:
        known = task.scores[: len(task.targets)]
        scaled = known / torch.exp(_sizes(known, task.photos) @ weights)[:, None]
        losses.append(torch.nn.functional.cross_entropy(scaled, task.targets, reduction="sum"))
    return torch.stack(losses).sum() / sum(len(task.targets) for task in tasks)


def _fit(start: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The minimum of a smooth function of a few weights."""
    weights = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def closure() -> Tensor:
        optimiser.zero_grad()
        found = loss(weights)
        found.backward()
        return found

    with torch.enable_grad():
        optimiser.step(closure)
    return weights.detach()


@torch.no_grad()
def _tasks(method: Method, encoded: Encoded, random: np.random.Generator, count: int) -> list[_Task]:
    method.eval()
    names, rows = sorted(encoded.rows), encoded.rows
    found = []
    for _ in range(count):
        way = min(int(random.choice(WAYS)), len(names) // 2)
        order = random.permutation(len(names))
        inside, outside = order[:way], order[way:]
        support, photos, queries, targets = [], [], [], []
        for label, number in enumerate(inside):
            mixed = random.permutation(rows[names[number]])
            shots = min(int(random.choice(SHOTS)), len(mixed) - 1)
            support += mixed[:shots].tolist()
            photos.append(shots)
            asked = mixed[shots : shots + max(1, QUERIES // way)].tolist()
            queries += asked
            targets += [label] * len(asked)
        strangers = random.permutation(np.concatenate([rows[names[number]] for number in outside]))[: len(queries)]
        labels = torch.from_numpy(np.repeat(np.arange(way), photos))
        asked = torch.from_numpy(np.concatenate((queries, strangers)).astype(np.int64))
        scores = method.logits(encoded.encoding.take(asked), encoded.encoding.take(torch.tensor(support)), labels)
        found.append(_Task(scores.double().cpu(), torch.tensor(photos), torch.tensor(targets)))
    return found
