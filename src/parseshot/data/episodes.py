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
    per_class = [shots] * way if isinstance(shots, int) else list(shots)
    check_episode(images, way=way, shots=per_class, queries=queries, names=names)
    random = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
    classes = random.permutation(np.array(sorted(images)))[:way]
    support, query = [], []
    for number, count in zip(classes, per_class, strict=True):
        drawn = random.permutation(images[int(number)])[: count + queries]
        support.append(drawn[:count])
        query.append(drawn[count:])
    labels = np.arange(way)
    return Episode(
        classes,
        np.concatenate(support),
        np.repeat(labels, per_class),
        np.concatenate(query),
        np.repeat(labels, queries),
    )


def check_episode(
    images: Mapping[int, np.ndarray],
    *,
    way: int,
    shots: Sequence[int],
    queries: int,
    names: Sequence[str] | None = None,
) -> None:
    """Refuse what cannot be drawn, naming the class and the numbers."""
    if way < 2 or queries < 1 or len(shots) != way or min(shots) < 1:
        raise DataError(
            f"an episode needs at least 2 classes, 1 support and 1 query image each: way {way}, shots {list(shots)}, "
            f"queries {queries}"
        )
    if way > len(images):
        raise DataError(f"asked for {way} classes an episode, but the split has {len(images)}")
    need = max(shots) + queries
    for number, members in images.items():
        if len(members) < need:
            name = f"class {names[number]!r}" if names else f"class number {number}"
            raise DataError(
                f"{name} has {len(members)} images, an episode needs {max(shots)} support + "
                f"{queries} query = {need}; ask for fewer or add photos"
            )
