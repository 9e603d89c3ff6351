"""The classes a model mistakes for each other, and which parts decide between them.

Letters: E episodes, Q queries, N classes, K parts, T terms of the distance: the parts, the geometry and, in models that
compare it, the object as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from parseshot.data.episodes import draw_episodes
from parseshot.figure_style import MUTED, new_figure, short, show_photo, styled
from parseshot.figures import part_colour
from parseshot.inside.gather import Seen, ShownPhoto, middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPISODES, SHOTS, QUERIES, PAIRS = 10, 5, 15, 4


@dataclass(frozen=True)
class Asked:
    """Queries of episodes that hold all classes: what each of them is, was taken for, and why."""

    rows: np.ndarray  # [E·Q] of what was seen
    truth: np.ndarray  # [E·Q] places in `classes`
    answer: np.ndarray  # [E·Q]
    names: tuple[str, ...]  # T
    terms: np.ndarray  # [E·Q, N, T] what each of them adds to the distance
    classes: np.ndarray  # [N] class numbers
    shots: int


@dataclass(frozen=True)
class ConfusedPair:
    """Two classes. Contributions: d(other class) − d(own class), so that what is above 0 speaks for the own one."""

    names: tuple[str, str]
    taken: int  # queries of either that were taken for the other
    asked: int  # queries of both
    terms: tuple[str, ...]  # T names
    confused: np.ndarray  # [T] mean contribution over those that were taken for the other
    told: np.ndarray  # [T] over those that were recognised; NaN where there are none
    photos: tuple[ShownPhoto, ShownPhoto, ShownPhoto]  # the worst mistake, its own class, and what it was taken for


@torch.inference_mode()
def ask(seen: Seen, *, episodes: int = EPISODES, seed: int = 0) -> Asked:
    """Recognise queries among all classes of the split at once, in seeded episodes."""
    least = min(len(rows) for rows in seen.rows.values())
    shots = min(SHOTS, least - 1)
    drawn = draw_episodes(
        seen.rows, range(episodes), way=len(seen.rows), shots=shots, queries=min(QUERIES, least - shots), seed=seed
    )
    numbers = np.array(sorted(seen.rows))
    terms, truth = [], []
    for one in range(episodes):
        labels = torch.from_numpy(drawn.support_labels)
        found = seen.method.distance(seen.take(drawn.query[one]), seen.take(drawn.support[one]), labels)
        beside = torch.stack((found.geometry.sum((2, 3)), found.whole), 2)
        adds = torch.cat((found.by_part, beside), 2).numpy()  # [Q, N, K + 2]
        order = np.argsort(drawn.classes[one])  # the episode's labels → places in `numbers`
        terms.append(adds[:, order])
        truth.append(np.searchsorted(numbers, drawn.classes[one])[drawn.query_labels])
    added = np.concatenate(terms)
    answer = added.sum(2, dtype=np.float64).argmin(1)
    names = (*(f"part {part + 1}" for part in range(added.shape[2] - 2)), "geometry", "whole")
    if not added[..., -1].any():
        names, added = names[:-1], added[..., :-1]
    return Asked(drawn.query.reshape(-1), np.concatenate(truth), answer, names, added, numbers, shots)


def confusion_counts(asked: Asked) -> np.ndarray:
    """[N, N]: queries of the row's class that were taken for the column's."""
    counts = np.zeros((len(asked.classes), len(asked.classes)), dtype=np.int64)
    np.add.at(counts, (asked.truth, asked.answer), 1)
    return counts


def most_confused(asked: Asked, count: int = PAIRS) -> list[tuple[int, int]]:
    """Pairs of places in `classes` (first < second) that are taken for each other most often; none that never are."""
    counts = confusion_counts(asked)
    either = np.triu(counts + counts.T, 1)
    first, second = np.unravel_index(np.argsort(-either, axis=None, kind="stable")[:count], either.shape)
    return [(int(a), int(b)) for a, b in zip(first, second, strict=True) if either[a, b] > 0]


def contributions(asked: Asked, pair: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The queries of a pair that were taken for the other class, and their contributions; and those of the right ones.

    Queries are places among those asked [q], contributions [q, T].
    """
    found = []
    for wrong in (True, False):
        for own, other in (pair, pair[::-1]):
            queries = np.flatnonzero((asked.truth == own) & (asked.answer == (other if wrong else own)))
            found.append((queries, asked.terms[queries, other] - asked.terms[queries, own]))
    (a, da), (b, db), (c, dc), (d, dd) = found
    return np.concatenate((a, b)), np.concatenate((da, db)), np.concatenate((c, d)), np.concatenate((dc, dd))


def gather_confusions(seen: Seen, asked: Asked, distances: np.ndarray) -> list[ConfusedPair]:
    found = []
    for pair in most_confused(asked):
        wrong, against, right, by = contributions(asked, pair)
        worst = int(wrong[against.sum(1).argmin()])  # the query that is most on the wrong side
        own, other = (seen.rows[int(asked.classes[at[worst]])] for at in (asked.truth, asked.answer))
        rows = [int(asked.rows[worst]), int(middle(own, distances, 1)[0]), int(middle(other, distances, 1)[0])]
        first, second, third = (seen.photo(row) for row in rows)
        found.append(
            ConfusedPair(
                (seen.name(int(asked.classes[pair[0]])), seen.name(int(asked.classes[pair[1]]))),
                len(wrong),
                int(np.isin(asked.truth, pair).sum()),
                asked.names,
                against.mean(0),
                by.mean(0) if len(right) else np.full(len(asked.names), np.nan),
                (first, second, third),
            )
        )
    return found


@styled
def draw_confusions(pairs: Sequence[ConfusedPair]) -> "Figure":
    """A row a pair: the worst mistake, its class, the other class; then what each part says, in two groups of bars."""
    figure = new_figure(2.15 * len(pairs) + 0.35)
    grid = figure.subplots(len(pairs), 4, squeeze=False, width_ratios=[1.0, 1.0, 1.0, 2.7])
    for line, pair in zip(grid, pairs, strict=True):
        heads = ("worst mistake", "its class", "taken for")
        for axes, head, photo in zip(line, heads, pair.photos, strict=False):
            show_photo(axes, photo.pixels, photo.parts)
            axes.set_title(f"{head}\n{short(photo.name, 28)}", fontsize=8)
        _bars(line[3], pair)
        first, second = (short(name, 36) for name in pair.names)
        line[3].set_title(f"{first} / {second}\n{pair.taken} of {pair.asked} taken for the other", fontsize=8.5)
    from matplotlib.patches import Patch

    told = Patch(facecolor=MUTED, label="recognised: mean over these photos")
    confused = Patch(facecolor="#ffffff", edgecolor=MUTED, hatch="////", label="taken for the other: mean over these")
    figure.legend(handles=[told, confused], loc="outside lower right", ncols=2)
    return figure


def _bars(axes: "Axes", pair: ConfusedPair) -> None:
    colours = [part_colour(at) if name.startswith("part") else MUTED for at, name in enumerate(pair.terms)]
    at = np.arange(len(pair.terms))
    axes.bar(at - 0.2, np.nan_to_num(pair.told), 0.38, color=colours, gid="told")
    axes.bar(at + 0.2, pair.confused, 0.38, color="#ffffff", edgecolor=colours, hatch="////", linewidth=1.2)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_xticks(at, pair.terms)
    axes.set_ylabel("speaks for its class", fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")


def confusions_caption(pairs: Sequence[ConfusedPair], asked: Asked, split: str) -> str:
    share = 100 * float((asked.truth == asked.answer).mean())
    listed = "; ".join(f"{short(a, 60)} and {short(b, 60)}" for a, b in (pair.names for pair in pairs))
    return (
        f"The {len(pairs)} pairs of {split} classes that are taken for each other most often, in {EPISODES} seeded "
        f"episodes of all {len(asked.classes)} classes with {asked.shots} photos each, {len(asked.truth):,} queries, "
        f"of which {share:.1f} % are right: {listed}. Bars are what a part, the geometry or the object as a whole adds "
        "to the distance to the other class, less what it adds to that to the own class: above 0 it speaks for the "
        "right class. Filled bars are means over "
        "queries that were recognised, hatched ones over those that were taken for the other class: parts whose "
        "hatched bar is far below 0 decided the mistake. Photos, by rule: the query farthest on the wrong side, "
        "and the middle photos of its class and of the class it was taken for, by distance to their class."
    )
