"""Part expressions side by side: two photos of a class, one of the most similar class and one of the least similar."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from parseshot.figure_style import new_figure, short, show_photo, styled
from parseshot.figures import part_colour
from parseshot.inside.gather import Seen, ShownPhoto, evenly, middle, unit
from parseshot.inside.templates import draw_strip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANNELS, SHOTS = 10, 5
ROLES = ("the photo", "same class", "most similar class", "least similar class")


@dataclass(frozen=True)
class Expressed:
    """A photo and what its parts express."""

    role: str
    photo: ShownPhoto
    distance: float | None  # of the photo's class to this one
    z: np.ndarray  # [K, C] at the scale that is shown


@dataclass(frozen=True)
class Expressions:
    side: int
    photos: tuple[Expressed, ...]  # the first is what the others are compared with
    channels: np.ndarray  # [K, m]
    theta: np.ndarray  # [K, m, s, s]


@torch.inference_mode()
def class_distances(seen: Seen, number: int) -> dict[int, float]:
    """Mean Eq. 7 of the photos of a class to every other class, as five photos of it, evenly spaced, show it."""
    query, found = seen.take(seen.rows[number]), {}
    for other, rows in seen.rows.items():
        if other != number:
            shown = rows[evenly(len(rows), SHOTS)]
            labels = torch.zeros(len(shown), dtype=torch.long)
            found[other] = float(seen.method.distance(query, seen.take(shown), labels).total.mean())
    return found


def gather_expressions(seen: Seen, distances: np.ndarray) -> Expressions:
    """Of the class in the middle of the list: its two middle photos, and those of the nearest and farthest class."""
    numbers = sorted(seen.rows)
    number = numbers[len(numbers) // 2]
    to = class_distances(seen, number)
    near, far = min(to, key=lambda other: (to[other], other)), max(to, key=lambda other: (to[other], -other))
    first, second = middle(seen.rows[number], distances, 2)
    rows = [first, second, middle(seen.rows[near], distances, 1)[0], middle(seen.rows[far], distances, 1)[0]]
    scale = int(np.argmax(seen.scales))
    z = seen.take(np.array(rows))["z"][:, scale].numpy()  # [4, K, C]
    channels = np.argsort(-z.mean(0), axis=1, kind="stable")[:, :CHANNELS]  # [K, m]
    theta = unit(seen.method.templates()[scale].detach())[np.arange(len(channels))[:, None], channels]
    apart = (None, None, to[near], to[far])
    photos = tuple(
        Expressed(role, seen.photo(row), distance, one)
        for role, row, distance, one in zip(ROLES, rows, apart, z, strict=True)
    )
    return Expressions(seen.scales[scale], photos, channels, theta)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Of two expressions [C]; 0 where one is silent."""
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / length if length > 0 else 0.0


@styled
def draw_expressions(found: Expressions) -> "Figure":
    """A row a photo, a column a part: bars of its expressions; below them the templates of these channels."""
    parts, count = found.channels.shape
    rows = len(found.photos)
    figure = new_figure(1.45 * rows + 0.75)
    grid = figure.subplots(
        rows + 1, parts + 1, squeeze=False, height_ratios=[1.0] * rows + [0.3], width_ratios=[0.75] + [1.0] * parts
    )
    highest = [max(float(one.z[part].max()) for one in found.photos) for part in range(parts)]
    for line, one in zip(grid, found.photos, strict=False):
        show_photo(line[0], one.photo.pixels, one.photo.parts)
        line[0].set_title(f"{one.role}\n{short(one.photo.name)}", fontsize=8)
        for part, axes in enumerate(line[1:]):
            axes.bar(range(count), one.z[part, found.channels[part]], color=part_colour(part), width=0.75)
            axes.set(xlim=(-0.6, count - 0.4), ylim=(0, 1.3 * max(highest[part], 1e-9)), xticks=[])
            axes.tick_params(axis="y", labelsize=7)
            if one is not found.photos[0]:
                alike = cosine(found.photos[0].z[part], one.z[part])
                axes.text(0.98, 0.95, f"cosine {alike:.2f}", transform=axes.transAxes, ha="right", va="top", fontsize=8)
    grid[-1, 0].set_axis_off()
    for part, axes in enumerate(grid[-1, 1:]):
        grid[0, part + 1].set_title(f"part {part + 1}", color=part_colour(part), fontweight="bold")
        draw_strip(axes, found.theta[part], found.channels[part].tolist())
        axes.tick_params(axis="x", rotation=90)
    return figure


def expressions_caption(found: Expressions, split: str) -> str:
    first, _, near, far = found.photos
    return (
        f"What the parts of four photos express, at scale {found.side} × {found.side}: bars are the expressions z of "
        f"the {found.channels.shape[1]} channels that are largest in the mean of these photos, part by part, and below "
        "are their templates. Cosines are with the first photo, over all channels. Chosen by rule: the class in the "
        f"middle of the list of {split} classes ({short(first.photo.name, 60)}), its two middle photos by distance to "
        f"their class, and the middle photos of the classes it is nearest to ({short(near.photo.name, 60)}, mean "
        f"distance {near.distance:.3g}) and farthest from ({short(far.photo.name, 60)}, {far.distance:.3g}) by the "
        f"model's own distance (Eq. 7, to at most {SHOTS} photos of each class)."
    )
