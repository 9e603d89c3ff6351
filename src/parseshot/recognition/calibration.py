"""From scores to probabilities: of each class, and of "none of these", for any number of classes and photos.

Both are fitted on tasks drawn from classes that the model was not trained on. In a task some classes are enrolled, from
2 to 20 of them or one alone, each with 1 to 10 photos; half of the queries belong to them and half to others.

- A class of n photos is compared with their mean, which lies nearer to everything the more photos it is of: the
  expected squared distance holds their variance over n. So scores are first made comparable, s_c + b·(1 − 1/n_c).
- P(class c | one of these) = softmax(s / T), with ln T linear in ln N and in the mean and the spread of the ln n_c.
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
    """What turns scores into probabilities. It belongs to one model's weights.

    Photos are those of each class, [N], or [Q, N] where they differ from query to query.
    """

    advantage: float = 0.0  # b: what a class of many photos gets, mostly less than 0
    temperature: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # ln T: constant, ln N, mean, spread of ln n
    known: tuple[float, ...] = Field((0.0,) * (FEATURES + 1), min_length=FEATURES + 1, max_length=FEATURES + 1)
    threshold: float = Field(0.5, ge=0, le=1)  # below this P(one of these) the answer is "none of these"

    def corrected(self, scores: Tensor, photos: Tensor) -> Tensor:
        """The method's scores [Q, N] made comparable between classes of few and of many photos."""
        return scores.double() + self.advantage * _benefit(photos)

    def shares(self, scores: Tensor, photos: Tensor) -> Tensor:
        """P(class | one of these), [Q, N], of corrected scores."""
        return torch.softmax(scores / _temperature(photos, torch.tensor(self.temperature, dtype=torch.float64)), -1)

    def knowns(self, scores: Tensor, photos: Tensor) -> Tensor:
        """P(one of these), [Q], of corrected scores."""
        weights = torch.tensor(self.known, dtype=torch.float64)
        return torch.sigmoid(_features(scores, photos) @ weights[1:] + weights[0])


def _benefit(photos: Tensor) -> Tensor:
    return 1 - 1 / photos.double().clamp_min(1)


def _temperature(photos: Tensor, weights: Tensor) -> Tensor:
    """[1], or [Q, 1]."""
    logs = photos.double().clamp_min(1).log()
    classes = torch.full_like(logs[..., :1], math.log(logs.shape[-1]))
    about = (torch.ones_like(classes), classes, logs.mean(-1, keepdim=True), logs.std(-1, correction=0, keepdim=True))
    return torch.exp(torch.cat(about, -1) @ weights)[..., None]


def _features(scores: Tensor, photos: Tensor) -> Tensor:
    """[Q, FEATURES]; with one class there is nothing to be above of."""
    number, (best, where) = scores.shape[1], scores.max(1)
    above_second = above_others = torch.zeros_like(best)
    if number > 1:
        above_second = best - scores.topk(2, 1).values[:, 1]
        above_others = best - (scores.sum(1) - best) / (number - 1)
    alone, classes = (torch.full_like(best, float(value)) for value in (number == 1, math.log(number)))
    own = photos.double().clamp_min(1).log().expand_as(scores).gather(1, where[:, None])[:, 0]
    return torch.stack((best, above_second, above_others, alone, classes, own), 1)


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
    *temperature, advantage = _fit(torch.zeros(5, dtype=torch.float64), lambda weights: _nll(weights, several)).tolist()
    drawn = [task._replace(scores=task.scores + advantage * _benefit(task.photos)) for task in drawn]
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
    fitted = Calibration(temperature=tuple(temperature), advantage=advantage, known=known)
    accepted = torch.cat([fitted.knowns(task.scores[: len(task.targets)], task.photos) for task in drawn])
    return fitted.model_copy(update={"threshold": round(float(accepted.quantile(1 - TRUE_POSITIVES)), 6)})


def _nll(weights: Tensor, tasks: list[_Task]) -> Tensor:
    """Mean −ln P of the known queries' classes; weights of the temperature, and b."""
    losses = []
    for task in tasks:
        scores = task.scores[: len(task.targets)] + weights[4] * _benefit(task.photos)
        scaled = scores / _temperature(task.photos, weights[:4])
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
