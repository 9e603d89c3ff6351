"""Where the parts are: on photos of several classes, failures included; and ν as heat maps over a photo."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parseshot.figure_style import HEAT, MUTED, WIDTH, blocks, new_figure, part_legend, short, show_photo, styled
from parseshot.figures import part_colour
from parseshot.inside.gather import Seen, ShownPhoto, evenly, middle
from parseshot.recognition.explain import cells_to_pixels, places_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

CLASSES, MIDDLE = 6, 3
FARTHEST, LEAST_SURE = "farthest", "least sure"


@dataclass(frozen=True)
class PartsRow:
    """Photos of one class, with the rule each was chosen by."""

    name: str
    photos: tuple[tuple[str, ShownPhoto], ...]


@dataclass(frozen=True)
class HeatMaps:
    """ν of one photo: cells for the maps, pixels for the places."""

    why: str  # it was chosen
    photo: ShownPhoto
    nu: np.ndarray  # [S, K, G, G]
    mu: np.ndarray  # [S, K, 2] in pixels
    entropy: np.ndarray  # [S, K], 0 … 1
    scales: tuple[int, ...]


def gather_parts(seen: Seen, distances: np.ndarray, unsure: np.ndarray) -> list[PartsRow]:
    """Of classes evenly spaced: the middle photos by distance to their class, the farthest, and the least sure."""
    numbers, found = sorted(seen.rows), []
    for at in evenly(len(numbers), CLASSES):
        rows = seen.rows[numbers[at]]
        far = rows[np.argmax(distances[rows])]
        left = rows[rows != far]
        faint = left[np.argmax(unsure[left])]
        left = left[left != faint]
        chosen = [("middle", row) for row in middle(left, distances, MIDDLE)]
        chosen += [(FARTHEST, far), (LEAST_SURE, faint)]
        found.append(PartsRow(seen.name(numbers[at]), tuple((why, seen.photo(row)) for why, row in chosen)))
    return found


@styled
def draw_parts_sheet(rows: Sequence[PartsRow]) -> "Figure":
    """A block a class, two blocks abreast: photos with rings around their parts."""
    across, columns = 2, max(len(row.photos) for row in rows)
    down = -(-len(rows) // across)
    figure = new_figure(down * (WIDTH / (across * (columns + 0.15)) + 0.36) + 0.3)
    for block, row in zip(blocks(figure, down, across, wspace=0.03).flat, rows, strict=False):
        block.suptitle(short(row.name, 40), fontweight="bold", fontsize=9)
        grid = block.subplots(1, columns, squeeze=False, gridspec_kw={"wspace": 0.04})[0]
        for axes in grid:
            axes.set_axis_off()
        for axes, (why, photo) in zip(grid, row.photos, strict=False):
            axes.set_axis_on()
            show_photo(axes, photo.pixels, photo.parts, line=0.9)
            axes.set_title(why, color=MUTED, fontsize=8)
    from matplotlib.lines import Line2D

    unsure = Line2D([], [], color=MUTED, linestyle=(0, (2.2, 1.4)), label="dashed: not sure")
    part_legend(figure, len(rows[0].photos[0][1].parts), [unsure])
    return figure


def parts_caption(rows: Sequence[PartsRow], unsure: np.ndarray, at_edge: np.ndarray, grid: int, split: str) -> str:
    """unsure, at_edge: shares of photos by part [K], of G×G cells."""
    dashed, outer = (
        ", ".join(f"part {part + 1} in {100 * share:.0f} %" for part, share in enumerate(shares))
        for shares in (unsure, at_edge)
    )
    edge = grid**2 - max(grid - 2, 0) ** 2
    return (
        f"Where the parts are, on photos of {len(rows)} of the {split} classes, evenly spaced in their list. A ring is "
        "at the peak of a part's ν at its surest scale; it is dashed where the entropy there is above one half. Of "
        "each class one sees, chosen by rule: the middle photos by the model's distance to the other half of their "
        f"class; the {FARTHEST} of all; and of the rest the one whose parts are {LEAST_SURE} (largest mean entropy). "
        f"The last two are where failures show. Over all {split} photos the ring is dashed for {dashed}. It is at the "
        f"edge of the picture, in one of the {edge} outer cells of {grid**2}, for {outer}."
    )


def gather_heat_maps(seen: Seen, unsure: np.ndarray) -> list[HeatMaps]:
    """Of all photos of the split: the middle one by mean entropy, and the one with the largest."""
    rows = np.concatenate(list(seen.rows.values()))
    chosen = {"middle": int(middle(rows, unsure, 1)[0]), LEAST_SURE: int(rows[np.argmax(unsure[rows])])}
    found = []
    for why, row in chosen.items():
        one = seen.encoding.take(slice(row, row + 1))
        mu, entropy = cells_to_pixels(one["mu"], seen.model)[0].numpy(), places_of(seen.model, one)[1][0].numpy()
        found.append(HeatMaps(why, seen.photo(row), one["nu"][0].numpy(), mu, entropy, seen.scales))
    return found


@styled
def draw_heat_maps(maps: Sequence[HeatMaps]) -> "Figure":
    """A block a photo: a row a scale, a column a part. One colour scale for all, its root, so that faint maps show."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    scales, parts = maps[0].nu.shape[:2]
    norm = PowerNorm(0.5, 0.0, max(float(one.nu.max()) for one in maps))
    height = scales * (WIDTH / len(maps) / (parts + 2.0) + 0.26) + 0.3
    figure = new_figure(height + 0.6)
    above, below = blocks(figure, 2, 1, height_ratios=[height, 0.6])[:, 0]
    for block, one in zip(blocks(above, 1, len(maps), wspace=0.03)[0], maps, strict=True):
        block.suptitle(f"{one.why}: {short(one.photo.name, 34)}", fontweight="bold", fontsize=9)
        grid = block.add_gridspec(scales, parts + 1, width_ratios=[1.6] + [1.0] * parts, wspace=0.04)
        show_photo(block.add_subplot(grid[:, 0]), one.photo.pixels, one.photo.parts)
        for (scale, part), entropy in np.ndenumerate(one.entropy):
            axes = block.add_subplot(grid[scale, part + 1])
            _heat_map(axes, one, scale, part, norm)
            axes.set_title(f"part {part + 1}, h {entropy:.2f}" if scale == 0 else f"h {entropy:.2f}", fontsize=8)
            if part == 0:
                axes.set_ylabel(f"{one.scales[scale]} × {one.scales[scale]}", fontsize=8)
    bar = figure.colorbar(ScalarMappable(norm, HEAT), cax=below.subplots(), orientation="horizontal")
    bar.set_label("ν of a cell")
    return figure


def _heat_map(axes: "Axes", one: HeatMaps, scale: int, part: int, norm: Any) -> None:
    nu, (height, width) = one.nu[scale, part], one.photo.pixels.shape[:2]
    show_photo(axes, one.photo.pixels, grey=True)
    box, opaque = (-0.5, width - 0.5, height - 0.5, -0.5), 0.15 + 0.7 * np.asarray(norm(nu))
    axes.imshow(nu, extent=box, cmap=HEAT, norm=norm, alpha=opaque, interpolation="nearest", gid="nu")
    x, y = one.mu[scale, part]
    axes.plot(x, y, marker=_open_cross(), color="#ffffff", markersize=9, markeredgewidth=2.6)
    axes.plot(x, y, marker=_open_cross(), color=part_colour(part), markersize=8, markeredgewidth=1.4, gid="mu")


def _open_cross() -> "Path":
    """A marker that leaves its middle free: there may be only one cell to see."""
    from matplotlib.path import Path

    arms = [(far * x, far * y) for x in (-1, 1) for y in (-1, 1) for far in (1.0, 0.5)]
    return Path(arms, [Path.MOVETO, Path.LINETO] * 4)


def heat_maps_caption(maps: Sequence[HeatMaps], split: str) -> str:
    return (
        "The distribution ν of each part's location (Eq. 5), a row a template's side in cells, a column a part, over "
        "the photo in grey; a cross is its mean μ, h its entropy (0: one cell, 1: all cells alike). The photos were "
        f"chosen by rule from all {split} photos: the one in the middle by mean entropy at the surest scale, and the "
        f"one with the largest. Cells are drawn as they are: there are {maps[0].nu.shape[-1]} × {maps[0].nu.shape[-1]}."
    )
