"""The dictionary: templates of each part by scale and channel, and what a template stands for in photos.

Letters: n photos, S scales, K parts, C channels, s template side, m shown channels, t shown patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from parseshot.figure_style import (
    MUTED,
    PHOTO,
    SIGNED,
    WIDTH,
    bare,
    blocks,
    new_figure,
    part_legend,
    short,
    styled,
)
from parseshot.figures import part_colour
from parseshot.inside.gather import Seen, unit
from parseshot.methods.dop import DOP
from parseshot.parts.templates import squared_norms, visible_squared_norms
from parseshot.recognition.explain import places_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST, RANDOM = 9, 5  # channels shown of each part and scale
CHANNELS, PATCHES = 4, 6  # shown of each part
ANYWHERE = 0.9  # mean entropy from which the place of a part means nothing


@dataclass(frozen=True)
class TemplateScale:
    """The templates of one scale."""

    side: int
    norms: np.ndarray  # [K, C] ‖D‖
    largest: np.ndarray  # [K, m] channels with the largest norm, the largest first
    random: np.ndarray  # [K, m'] others, drawn with a seed
    theta: np.ndarray  # [K, m + m', s, s] θ = D/‖D‖ of these


@dataclass(frozen=True)
class Patches:
    """What expresses a template most."""

    part: int
    channel: int
    use: float  # mean expression over all photos
    theta: np.ndarray  # [s, s]
    patches: tuple[np.ndarray, ...]  # uint8 [H, W, 3], the largest expression first
    names: tuple[str, ...]  # of their classes
    rows: tuple[int, ...]  # of what was seen
    entropy: float  # mean of the part's location at this scale


def gather_templates(method: DOP, seed: int = 0) -> list[TemplateScale]:
    """Of each scale and part: the channels with the largest norm, and some others at random."""
    found = []
    random = np.random.default_rng(seed)
    for side, maps in zip(method.config.scales, method.templates(), strict=True):
        maps = maps.detach()  # [K, C, s, s]
        norms = maps.square().sum((2, 3)).sqrt().numpy()
        order = np.argsort(-norms, axis=1, kind="stable")
        largest, others = order[:, :LARGEST], order[:, LARGEST:]
        drawn = np.stack([random.permutation(row)[:RANDOM] for row in others])
        chosen = np.concatenate((largest, drawn), 1)
        found.append(TemplateScale(side, norms, largest, drawn, unit(maps)[np.arange(len(maps))[:, None], chosen]))
    return found


@styled
def draw_templates(scales: Sequence[TemplateScale]) -> "Figure":
    """A block a scale above 1: a row a part, a column a channel; below, the norms of all channels, a panel a scale."""
    shown, parts = [one for one in scales if one.side > 1], len(scales[0].norms)
    cell = WIDTH / (LARGEST + RANDOM + 2)
    heights = [0.35 + parts * (cell + 0.2) for _ in shown] + [2.2]
    figure = new_figure(sum(heights) + 0.3)
    *above, below = blocks(figure, len(heights), 1, height_ratios=heights)[:, 0]
    for block, one in zip(above, shown, strict=False):
        block.suptitle(
            f"{one.side} × {one.side}: the {one.largest.shape[1]} channels with the largest norm, then "
            f"{one.random.shape[1]} others at random"
        )
        channels = np.concatenate((one.largest, one.random), 1)
        for part, axes in enumerate(block.subplots(parts, 1, squeeze=False)[:, 0]):
            draw_strip(axes, one.theta[part], channels[part].tolist())
            axes.xaxis.tick_top()
            axes.set_ylabel(f"part {part + 1}", color=part_colour(part), fontweight="bold")
    for axes, one in zip(below.subplots(1, len(scales), squeeze=False)[0], scales, strict=True):
        for part, norms in enumerate(one.norms):
            axes.plot(np.sort(norms)[::-1], color=part_colour(part), linewidth=1.5)
        axes.set(title=f"{one.side} × {one.side}", xlabel="channels, by norm", ylabel="‖D‖", ylim=(0, None))
        axes.grid(axis="y")
    part_legend(figure, parts)
    return figure


def draw_strip(axes: "Axes", theta: np.ndarray, channels: Sequence[int]) -> None:
    """Templates [m, s, s] side by side around x = 0, 1, …, and the numbers of their channels."""
    for at, one in enumerate(theta):
        draw_template(axes, one, at, 0)
    axes.set(xlim=(-0.6, len(theta) - 0.4), ylim=(0.47, -0.47), yticks=[], aspect="equal", anchor="N")
    axes.set_xticks(range(len(channels)), [str(channel) for channel in channels], fontsize=7)
    axes.tick_params(length=0, pad=1, labelcolor=MUTED)
    axes.spines[:].set_visible(False)


def draw_template(axes: "Axes", theta: np.ndarray, x: float, y: float) -> None:
    """θ around a place, on a scale of its own that is symmetric about 0."""
    from matplotlib.patches import Rectangle

    most, box = max(float(np.abs(theta).max()), 1e-12), (x - 0.43, x + 0.43, y + 0.43, y - 0.43)
    axes.imshow(theta, extent=box, cmap=SIGNED, vmin=-most, vmax=most, interpolation="nearest", gid="template")
    axes.add_patch(Rectangle((x - 0.43, y - 0.43), 0.86, 0.86, fill=False, edgecolor=MUTED, linewidth=0.5))


@torch.inference_mode()
def visible_shares(seen: Seen) -> np.ndarray:
    """[S, K]: the share of ‖D‖², all channels together, inside of the picture where the part peaks; mean of photos."""
    nu, found = seen.encoding["nu"], []
    for scale, maps in enumerate(seen.method.templates()):
        inside = visible_squared_norms(maps, seen.model.grid, seen.method.config.spacing).sum(1)
        inside = inside / squared_norms(maps).sum(1)[:, None, None]
        peak = nu[:, scale].flatten(2).argmax(2)  # [n, K]
        found.append(inside.flatten(1).gather(1, peak.T).mean(1))  # of [K, G²]
    return torch.stack(found).numpy()


def templates_caption(scales: Sequence[TemplateScale], visible: np.ndarray, own: int | None, split: str) -> str:
    """visible: shares [S, K] of ‖D‖² inside of the picture."""
    shares = "; ".join(
        f"{one.side} × {one.side}: " + ", ".join(f"part {part + 1} {100 * of:.0f} %" for part, of in enumerate(row))
        for one, row in zip(scales, visible, strict=True)
        if one.side > 1
    )
    edge = (
        "A part at the edge of the picture has some of its template outside, where there is nothing to match. Of ‖D‖², "
        f"all channels together, this much is inside where the part peaks, mean over {split} photos: {shares}."
    )
    channels = scales[0].norms.shape[1]
    whose = f"{own} channels of each part's own projection" if own else f"{channels} channels that all parts share"
    return (
        f"Templates of the dictionary in the {whose}; a number is the channel. A template is drawn as θ = D/‖D‖, each "
        "on a scale of its own that is white at 0, orange above and purple below. Chosen by rule: the channels with "
        "the largest norm ‖D‖, then others at random (seed 0). Templates of side 1 are one number, so only their norms "
        "are drawn, below, with those of the others: the threshold λ/(2‖D‖) of Eq. 4 silences channels whose norm "
        "is small." + (f" {edge}" if shares else "")
    )


def gather_patches(seen: Seen) -> tuple[int, list[Patches]]:
    """The side of the templates, and of each part the channels with the largest mean expression.

    Templates are those of the middle scale. A patch is what the template covers at the part's peak, s × s cells.
    """
    scale = int(np.argsort(seen.scales)[len(seen.scales) // 2])
    side, z = seen.scales[scale], seen.encoding["z"][:, scale]  # [n, K, C]
    places, entropy = places_of(seen.model, seen.encoding)
    where, unsure = places[:, scale].numpy(), entropy[:, scale].mean(0).tolist()  # [n, K, 2] in pixels, [K]
    use = z.mean(0)  # [K, C]
    theta = unit(seen.method.templates()[scale].detach())
    cell = seen.model.config.image_size / seen.model.grid
    found = []
    for part in range(use.shape[0]):
        for channel in torch.argsort(-use[part], stable=True)[:CHANNELS].tolist():
            rows = torch.argsort(-z[:, part, channel], stable=True)[:PATCHES].tolist()
            patches = tuple(cut(seen.pixels(row), where[row, part], side * cell) for row in rows)
            names = tuple(seen.name(int(seen.labels[row])) for row in rows)
            amount = float(use[part, channel])
            found.append(
                Patches(part, channel, amount, theta[part, channel], patches, names, tuple(rows), unsure[part])
            )
    return side, found


def cut(pixels: np.ndarray, centre: np.ndarray, side: float) -> np.ndarray:
    """A square of about `side` pixels around (x, y), moved inwards at the border.

    >>> cut(np.arange(27).reshape(3, 3, 3), np.array([2.0, 0.0]), 2.0)[..., 0].tolist()
    [[3, 6], [12, 15]]
    """
    size = min(max(1, round(side)), *pixels.shape[:2])
    left, top = (
        int(np.clip(round(at - (size - 1) / 2), 0, end - size))
        for at, end in zip(centre, (pixels.shape[1], pixels.shape[0]), strict=True)
    )
    return pixels[top : top + size, left : left + size]


@styled
def draw_patches(found: Sequence[Patches]) -> "Figure":
    """A block a part, two abreast; a row a channel: its template, then the patches that express it most."""
    parts = sorted({one.part for one in found})
    rows = max(sum(one.part == part for one in found) for part in parts)
    columns, across = 1 + max(len(one.patches) for one in found), min(2, len(parts))
    down = -(-len(parts) // across)
    figure = new_figure(down * (rows * WIDTH / (across * (columns + 0.5)) + 0.36))
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat:
        bare(axes)
    for axes, part in zip(grid.flat, parts, strict=False):
        mine = [one for one in found if one.part == part]
        for row, one in enumerate(mine):
            draw_template(axes, one.theta, 0, row)
            for at, patch in enumerate(one.patches, 1):
                axes.imshow(patch, extent=(at - 0.48, at + 0.48, row + 0.48, row - 0.48), gid=PHOTO)
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect="equal")
        axes.set_yticks(range(len(mine)), [str(one.channel) for one in mine])
        axes.tick_params(length=0)
        axes.set_title(f"part {part + 1}", color=part_colour(part), fontweight="bold")
    return figure


def patches_caption(side: int, found: Sequence[Patches], split: str) -> str:
    def told(one: Patches) -> str:
        kinds = sorted({short(name, 40) for name in one.names})
        return f"{one.channel} ({len(kinds)} classes)" if len(kinds) > 1 else f"{one.channel} ({kinds[0]} only)"

    parts = sorted({one.part for one in found})
    lost = {one.part + 1: one.entropy for one in found if one.entropy > ANYWHERE}
    lists = "; ".join(f"part {p + 1}: {', '.join(told(one) for one in found if one.part == p)}" for p in parts)
    return (
        f"What a template stands for: a row is a channel, its {side} × {side} template, then the patches of {split} "
        f"photos that express it most, the largest expression first. Chosen by rule: of each part the {CHANNELS} "
        f"channels with the largest mean expression over all {split} photos. A patch is the {side} × {side} cells "
        "around the part's peak; the network sees beyond it. "
        + "".join(f"Part {p} is anywhere (mean entropy {h:.2f}), so its patches say little. " for p, h in lost.items())
        + f"The classes the patches are of, by channel: {lists}."
    )
