"""Episodes: (seed, index) → the same classes and images, whatever the method, the order or the number of workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parseshot.errors import DataError


@dataclass(frozen=True)
class Episode:
    """N classes with support and query images: image numbers, and labels 0 … N−1 in class-major order."""

    classes: np.ndarray  # [N] class numbers of the data set
    support: np.ndarray  # [n] image numbers
    support_labels: np.ndarray  # [n]
    query: np.ndarray  # [Q]
    query_labels: np.ndarray  # [Q]


@dataclass(frozen=True)
class Episodes:
    """E episodes of one shape, and for each the images of `unseen` further classes, which belong to none of the N."""

    classes: np.ndarray  # [E, N]
    support: np.ndarray  # [E, n]
    support_labels: np.ndarray  # [n]
    query: np.ndarray  # [E, Q]
    query_labels: np.ndarray  # [Q]
    strangers: np.ndarray  # [E, unseen·queries]

    def __len__(self) -> int:
        return len(self.classes)


def draw_episode(
    images: Mapping[int, np.ndarray],
    *,
    way: int,
    shots: int | Sequence[int],
    queries: int,
    seed: int,
    index: int,
    names: Sequence[str] | None = None,
) -> Episode:
    """Draw `way` of the classes {class: its image numbers}, and `shots` + `queries` different images of each.

    shots may be a number for each class in turn (unbalanced support). names: of all classes, for messages.
    """
    one = draw_episodes(images, range(index, index + 1), way=way, shots=shots, queries=queries, seed=seed, names=names)
    return Episode(one.classes[0], one.support[0], one.support_labels, one.query[0], one.query_labels)


def draw_episodes(
    images: Mapping[int, np.ndarray],
    indices: Sequence[int],
    *,
    way: int,
    shots: int | Sequence[int],
    queries: int,
    seed: int,
    unseen: int = 0,
    names: Sequence[str] | None = None,
) -> Episodes:
    """`draw_episode` for each of the indices. `unseen` further classes are drawn after the rest, which stays as is."""
    per_class = [shots] * way if isinstance(shots, int) else list(shots)
    check_episode(images, way=way, shots=per_class, queries=queries, names=names, unseen=unseen)
    numbers, ends = np.array(sorted(images)), np.cumsum([0, *per_class])
    classes = np.empty((len(indices), way), dtype=np.int64)
    support = np.empty((len(indices), int(ends[-1])), dtype=np.int64)
    query = np.empty((len(indices), way, queries), dtype=np.int64)
    strangers = np.empty((len(indices), unseen, queries), dtype=np.int64)
    for row, index in enumerate(indices):
        random = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
        drawn = random.permutation(numbers)[: way + unseen].tolist()
        classes[row] = drawn[:way]
        for label, number in enumerate(drawn[:way]):
            order, count = random.permutation(images[number]), per_class[label]
            support[row, ends[label] : ends[label + 1]] = order[:count]
            query[row, label] = order[count : count + queries]
        for at, number in enumerate(drawn[way:]):
            strangers[row, at] = random.permutation(images[number])[:queries]
    labels = np.arange(way)
    return Episodes(
        classes,
        support,
        np.repeat(labels, per_class),
        query.reshape(len(indices), -1),
        np.repeat(labels, queries),
        strangers.reshape(len(indices), -1),
    )


def check_episode(
    images: Mapping[int, np.ndarray],
    *,
    way: int,
    shots: Sequence[int],
    queries: int,
    names: Sequence[str] | None = None,
    unseen: int = 0,
) -> None:
    """Refuse what cannot be drawn, naming the class and the numbers."""
    if way < 2 or queries < 1 or len(shots) != way or min(shots) < 1:
        raise DataError(
            f"an episode needs at least 2 classes, 1 support and 1 query image each: way {way}, shots {list(shots)}, "
            f"queries {queries}"
        )
    if way > len(images):
        raise DataError(f"asked for {way} classes an episode, but the split has {len(images)}")
    if way + unseen > len(images):
        raise DataError(f"asked for {way} classes and {unseen} unseen ones, but the split has {len(images)}")
    need = max(shots) + queries
    for number, members in images.items():
        if len(members) < need:
            name = f"class {names[number]!r}" if names else f"class number {number}"
            raise DataError(
                f"{name} has {len(members)} images, an episode needs {max(shots)} support + "
                f"{queries} query = {need}; ask for fewer or add photos"
            )
