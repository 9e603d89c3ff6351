"""The polygon of parts of a class: where its photos have them, and their mean; Eq. 7 compares its sides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from parseshot.figure_style import INK, MUTED, WIDTH, new_figure, part_legend, part_number, short, styled
from parseshot.inside.gather import Seen, evenly
from parseshot.recognition.explain import places_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = 8


@dataclass(frozen=True)
class Polygon:
    """Of one class, at one scale."""

    name: str
    mu: np.ndarray  # [n, K, 2] in cells


@dataclass(frozen=True)
class Polygons:
    side: int  # of the templates
    grid: int  # G
    classes: tuple[Polygon, ...]


def gather_polygons(seen: Seen) -> Polygons:
    """Of classes evenly spaced, at the scale whose locations are the surest on average."""
    rows = np.concatenate(list(seen.rows.values()))
    entropy = places_of(seen.model, seen.take(rows))[1]  # [n, S, K]
    scale = int(entropy.mean((0, 2)).argmin())
    numbers = sorted(seen.rows)
    shown = [numbers[at] for at in evenly(len(numbers), CLASSES)]
    mu = seen.encoding["mu"][:, scale].numpy()  # [n, K, 2]
    found = (Polygon(seen.name(number), turned_alike(mu[seen.rows[number]], seen.model.grid)) for number in shown)
    return Polygons(seen.scales[scale], seen.model.grid, tuple(found))


def turned_alike(mu: np.ndarray, size: int, rounds: int = 10) -> np.ndarray:
    """Polygons [n, K, 2], mirrored where that brings them nearer to the mean; the first stays. No side changes.

    >>> turned_alike(np.array([[[0.0, 0.0], [1.0, 2.0]], [[4.0, 0.0], [3.0, 2.0]]]), 5).tolist()
    [[[0.0, 0.0], [1.0, 2.0]], [[0.0, 0.0], [1.0, 2.0]]]
    """
    mirrored = mu * (-1, 1) + (size - 1, 0)
    mean, turn = mu[0], np.zeros(len(mu), dtype=bool)
    for _ in range(rounds):
        turn = np.square(mirrored - mean).sum((1, 2)) < np.square(mu - mean).sum((1, 2))
        mean = np.where(turn[:, None, None], mirrored, mu).mean(0)
    return np.where((turn ^ turn[0])[:, None, None], mirrored, mu)


def around(mean: np.ndarray) -> np.ndarray:
    """The order [K] in which the lines of a polygon with these corners [K, 2] do not cross: by angle.

    >>> around(np.array([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])).tolist()
    [0, 2, 1, 3]
    """
    away = mean - mean.mean(0)
    return np.argsort(np.arctan2(away[:, 1], away[:, 0]), kind="stable")


def spread(mu: np.ndarray) -> float:
    """Mean distance in cells of the parts [n, K, 2] from their mean place."""
    return float(np.linalg.norm(mu - mu.mean(0), axis=2).mean())


@styled
def draw_polygons(polygons: Polygons) -> "Figure":
    columns = min(4, len(polygons.classes))
    rows = -(-len(polygons.classes) // columns)
    figure = new_figure(rows * (WIDTH / columns + 0.1) + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, one in zip(grid.flat, polygons.classes, strict=False):
        axes.set_axis_on()
        mean = one.mu.mean(0)  # [K, 2]
        order = around(mean)
        closed = np.append(order, order[0])
        for photo in one.mu:
            axes.plot(
                *photo[closed].T, color=MUTED, linewidth=0.6, alpha=min(0.5, 6 / len(one.mu) + 0.06), gid="photo's"
            )
        axes.plot(*mean[closed].T, color=INK, linewidth=1.6, gid="mean")
        for part, (x, y) in enumerate(mean):
            part_number(axes, x, y, part)
        axes.set(xlim=(-0.5, polygons.grid - 0.5), ylim=(polygons.grid - 0.5, -0.5), aspect="equal")
        axes.set_title(f"{short(one.name, 42)}\n{len(one.mu)} photos, spread {spread(one.mu):.2f} cells", fontsize=8.5)
        edges = np.arange(polygons.grid + 1) - 0.5
        axes.spines[:].set_visible(False)
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(which="minor", alpha=0.7)
        axes.tick_params(which="minor", length=0)
    part_legend(figure, polygons.classes[0].mu.shape[1])
    return figure


def polygons_caption(polygons: Polygons, split: str) -> str:
    return (
        f"The polygon of parts of {len(polygons.classes)} of the {split} classes, evenly spaced in their list: every "
        "photo's as a faint line through its parts' mean locations μ, and dark the polygon of their means. Squares are "
        f"cells. Templates are {polygons.side} × {polygons.side} here, the scale with the smallest mean entropy of all "
        "photos. A polygon is mirrored where that brings it nearer to the mean, which "
        "changes none of its sides: objects face both ways. Spread is the mean distance of a part from its mean place."
    )
