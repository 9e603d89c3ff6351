"""Few-shot evaluation: encode each image once, then score the same episodes for every method."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from parseshot.data.episodes import Episode, draw_episode
from parseshot.data.packed import Pack
from parseshot.engine.model import Model
from parseshot.errors import DataError
from parseshot.methods import Encoding

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True)
class Interval:
    """A mean over episodes with its 95 % interval, 1.96·σ/√n (σ with ddof 1)."""

    mean: float
    half_width: float
    count: int

    @staticmethod
    def of(values: np.ndarray) -> "Interval":
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return Interval(float(np.mean(values)), 1.96 * deviation / math.sqrt(len(values)), len(values))

    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half_width


@dataclass(frozen=True)
class Accuracy:
    """Accuracy at one number of shots, with that of every episode so that methods can be compared pair by pair."""

    shots: int
    episodes: np.ndarray  # [E], in episode order
    copies: int = 0  # queries left out because the very same file was in the support set
    near_copies: int = 0  # queries nearly the same as a support photo; they count

    @property
    def interval(self) -> Interval:
        return Interval.of(self.episodes)


def paired_difference(first: Accuracy, second: Accuracy) -> Interval:
    """Mean of first − second over the same episodes: far narrower than two intervals side by side."""
    if first.shots != second.shots or len(first.episodes) != len(second.episodes):
        raise DataError("a paired difference needs the same episodes on both sides")
    return Interval.of(first.episodes - second.episodes)


def encode_split(
    model: Model, pack: Pack, split: str, progress: Progress | None = None
) -> tuple[Encoding, dict[int, np.ndarray]]:
    """Encode each image of a split once: the encoding, and for each class the rows that belong to it."""
    if pack.size != model.config.image_size:
        raise DataError(f"{pack.path} holds images of {pack.size} px, the model wants {model.config.image_size} px")
    members = pack.by_class(split)
    numbers = np.concatenate(list(members.values()))
    pieces, batch = [], 64
    for start in range(0, len(numbers), batch):
        pieces.append(model.encode(pack.load(numbers[start : start + batch])))
        if progress:
            progress(min(start + batch, len(numbers)), len(numbers))
    ends = np.cumsum([len(images) for images in members.values()])
    rows = {name: np.arange(end - len(images), end) for (name, images), end in zip(members.items(), ends, strict=True)}
    return Encoding.cat(pieces), rows


class Twins:
    """Which rows of an encoding show the same photo, to keep queries out that are in the support set already."""

    def __init__(self, pack: Pack, members: Mapping[int, np.ndarray]) -> None:
        row_of = {int(image): row for row, image in enumerate(np.concatenate(list(members.values())))}
        self.of: dict[int, dict[int, bool]] = defaultdict(dict)  # row → {row of a twin: is it the same file?}
        for first, second, same in pack.twins.tolist():
            if first in row_of and second in row_of:
                self.of[row_of[first]][row_of[second]] = self.of[row_of[second]][row_of[first]] = bool(same)
        self.rows = np.array(sorted(self.of), dtype=np.int64)

    def among(self, episode: Episode) -> tuple[np.ndarray, int]:
        """Positions of the queries whose file is in the support set, and how many are nearly so."""
        support, copies, near = set(episode.support.tolist()), [], 0
        for position in np.flatnonzero(np.isin(episode.query, self.rows)):
            found = [same for row, same in self.of[int(episode.query[position])].items() if row in support]
            copies += [position] if any(found) else []
            near += bool(found) and not any(found)
        return np.array(copies, dtype=np.int64), near


@torch.inference_mode()
def score_episode(model: Model, encoding: Encoding, episode: Episode, leave_out: np.ndarray | None = None) -> float:
    """Share of the episode's queries given to the right class; image numbers are rows of the encoding.

    leave_out: positions of queries that do not count.
    """
    logits = model.method.logits(
        encoding.take(torch.from_numpy(episode.query)),
        encoding.take(torch.from_numpy(episode.support)),
        torch.from_numpy(episode.support_labels),
    )
    right = (logits.argmax(1) == torch.from_numpy(episode.query_labels)).double().numpy()
    counted = right if leave_out is None else np.delete(right, leave_out)
    return float(counted.mean()) if len(counted) else float(right.mean())


def evaluate(
    model: Model,
    pack: Pack,
    *,
    split: str = "novel",
    way: int = 5,
    shots: tuple[int, ...] = (1, 5),
    queries: int = 15,
    episodes: int = 600,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Accuracy]:
    """Accuracy over episodes for each number of shots. The same arguments give the same episodes to any model."""
    refuse_seen_classes(model, pack, split)
    encoding, rows = encode_split(model, pack, split, progress)
    twins = Twins(pack, pack.by_class(split))
    model.eval()
    found = []
    for count in shots:
        accuracies, copies, near_copies = [], 0, 0
        for index in range(episodes):
            episode = draw_episode(
                rows, way=way, shots=count, queries=queries, seed=seed, index=index, names=pack.classes
            )
            same, near = twins.among(episode)
            accuracies.append(score_episode(model, encoding, episode, same))
            copies, near_copies = copies + len(same), near_copies + near
        found.append(Accuracy(count, np.array(accuracies), copies, near_copies))
    return found


def refuse_seen_classes(model: Model, pack: Pack, split: str) -> None:
    """A class the model was trained on is not unseen: refuse, with the names."""
    if split == "base":
        return
    asked = {name for name, where in zip(pack.classes, pack.splits, strict=True) if where == split}
    seen = sorted(asked & set(model.provenance.get("base_classes", [])))
    if seen:
        raise DataError(
            f"the model was trained on {len(seen)} of the {len(asked)} classes of split {split!r}: "
            f"{', '.join(seen[:5])}{' …' if len(seen) > 5 else ''}; its figures there would mean nothing"
        )
