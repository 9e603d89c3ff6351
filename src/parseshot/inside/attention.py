"""How much each part and scale counts: the weights α of Eq. 7, by pairs of scales and against entropy.

Letters: n photos, S scales of the photo, T scales of the class (1 where they are one, as in dop-span), K parts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from parseshot.figure_style import LEVELS, new_figure, part_legend, styled, write_numbers
from parseshot.figures import part_colour
from parseshot.inside.gather import Seen, to_own_class
from parseshot.parts.distance import part_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 300  # photos whose weights are drawn as dots


@dataclass(frozen=True)
class Attention:
    """Of photos, each compared with its own class."""

    scales: tuple[int, ...]
    entropy: np.ndarray  # [n, S, K] of the photo, as α takes it
    class_entropy: np.ndarray  # [n, T, K] of the class
    alpha: np.ndarray  # [n, S, T, K], sum 1 over K
    adds: np.ndarray  # [n, S, T, K] α·‖z − z'‖²
    slopes: tuple[float, float] | None  # of α; None where all parts weigh alike
    normalised: bool  # entropies are shares of ln G²


@torch.inference_mode()
def gather_attention(seen: Seen) -> Attention:
    """The weights of every photo against the other half of its class."""
    slopes, pieces = seen.method.slopes, []
    for rows in seen.rows.values():
        for asked, shown, terms in to_own_class(seen, rows):
            entropy = seen.take(asked)["entropy"]  # [Q, S, K]
            adds = terms.expression[:, 0]  # [Q, S, T, K]
            if slopes is None:
                alpha = torch.full_like(adds, 1 / adds.shape[-1])
            else:
                alpha = part_weights(entropy, shown.entropy, slopes)[:, 0]
            pieces.append((entropy, shown.entropy.expand(len(asked), -1, -1), alpha, adds))
    h, class_h, weights, added = (torch.cat(each).numpy() for each in zip(*pieces, strict=True))
    told = None if slopes is None else (float(slopes[0]), float(slopes[1]))
    return Attention(seen.scales, h, class_h, weights, added, told, seen.method.config.normalised)


def distance_shares(found: Attention) -> np.ndarray:
    """[S, T]: the share of the expression distance that each pair of scales holds, over all photos."""
    sums = found.adds.sum((0, 3), dtype=np.float64)
    return sums / max(float(sums.sum()), 1e-300)


@styled
def draw_scales(found: Attention) -> "Figure":
    """Entropies by scale; the mean α of each part and the share of the distance, by pairs of scales."""
    parts = found.alpha.shape[3]
    figure = new_figure(2.9)
    grid = figure.subplots(1, parts + 2, width_ratios=[1.9] + [1.0] * (parts + 1))
    _entropies(grid[0], found)
    mean = found.alpha.mean(0)  # [S, T, K]
    for part, axes in enumerate(grid[1 : parts + 1]):
        _matrix(axes, mean[:, :, part], found, float(mean.max()))
        axes.set_title(f"mean α, part {part + 1}", color=part_colour(part), fontweight="bold")
    shares = distance_shares(found)
    _matrix(grid[-1], shares, found, float(shares.max()))
    grid[-1].set_title("share of\nthe distance")
    grid[1].set_ylabel("side of the photo's templates")
    part_legend(figure, parts)
    return figure


def _entropies(axes: "Axes", found: Attention) -> None:
    """Median and the middle 80 % of each part's entropy, by scale."""
    parts = found.entropy.shape[2]
    for part in range(parts):
        low, half, high = np.quantile(found.entropy[:, :, part], (0.1, 0.5, 0.9), axis=0)  # [S] each
        at = np.arange(len(found.scales)) + 0.14 * (part - (parts - 1) / 2)
        axes.vlines(at, low, high, color=part_colour(part), linewidth=2)
        axes.plot(at, half, "o", color=part_colour(part), markersize=5)
    axes.set_xticks(range(len(found.scales)), [f"{side} × {side}" for side in found.scales])
    axes.set(title="entropy h of ν", ylim=(0, None), xlabel="side of the templates")
    axes.grid(axis="y")


def _matrix(axes: "Axes", values: np.ndarray, found: Attention, most: float) -> None:
    axes.imshow(values, cmap=LEVELS, vmin=0, vmax=most, interpolation="nearest")
    write_numbers(axes, values)
    one = values.shape[1] == 1  # the class's scales are one
    axes.set_xticks(range(values.shape[1]), ["all"] if one else [str(side) for side in found.scales])
    axes.set_yticks(range(values.shape[0]), [str(side) for side in found.scales])
    axes.set_xlabel("the class's")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def scales_caption(found: Attention, split: str) -> str:
    parts, together = found.alpha.shape[3], found.alpha.shape[2] == 1
    alike = f"This model weighs all parts alike: α is 1/{parts}. " if found.slopes is None else ""
    one = "This model takes the class's scales together, so there is one column. " if together else ""
    return (
        f"Attention to scales, over all {len(found.alpha):,} {split} photos, each compared with the other half of its "
        "class. Left: the entropy of each part's location by scale, its median and the middle 80 %. Then the mean "
        "weight α of each part in Eq. 7 for each pair of scales. α is a softmax over the parts, pair by pair: all "
        f"pairs weigh the same, what differs is which part they listen to. {alike}{one}"
        "Right: the share of the expression distance that each pair of scales holds."
    )


def curve(found: Attention, scale: int, part: int, entropy: np.ndarray) -> np.ndarray:
    """α of a part as its entropy goes and all else stays at its mean: what Eq. 7 says the dots are around."""
    if found.slopes is None:
        return np.full(len(entropy), 1 / found.alpha.shape[3])
    own, others = found.slopes
    base = own * found.entropy[:, scale].mean(0) + others * found.class_entropy.mean((0, 1))  # [K]
    at = np.tile(base, (len(entropy), 1))
    at[:, part] += own * (entropy - found.entropy[:, scale, part].mean())
    weights = np.exp(at - at.max(1, keepdims=True))
    return weights[:, part] / weights.sum(1)


@styled
def draw_weights(found: Attention) -> "Figure":
    """A panel a scale: a dot a photo and part; the line is α with all other parts at their mean entropy."""
    figure = new_figure(3.5)
    grid = figure.subplots(1, len(found.scales), squeeze=False, sharey=True, sharex=True)[0]
    rows = np.unique(np.linspace(0, len(found.entropy) - 1, SHOWN).round().astype(int))
    for scale, (axes, side) in enumerate(zip(grid, found.scales, strict=True)):
        for part in range(found.alpha.shape[3]):
            entropy, alpha = found.entropy[rows, scale, part], found.alpha[rows, scale, :, part].mean(1)
            colour = part_colour(part)
            axes.scatter(entropy, alpha, s=7, color=colour, alpha=0.45, linewidths=0, rasterized=True)
            if np.ptp(entropy) < 0.05:  # always alike: there is no line to see
                continue
            line = np.linspace(entropy.min(), entropy.max(), 40)
            axes.plot(line, curve(found, scale, part, line), color="#ffffff", linewidth=3.5)
            axes.plot(line, curve(found, scale, part, line), color=colour, linewidth=1.8)
        axes.axhline(1 / found.alpha.shape[3], color="#625e50", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set(title=f"{side} × {side}", xlabel="entropy h of the photo's part")
        axes.grid()
    grid[0].set(ylabel="weight α", ylim=(0, None))  # of all panels, when all dots are there
    part_legend(figure, found.alpha.shape[3])
    return figure


def weights_caption(found: Attention, split: str) -> str:
    if found.slopes is None:
        slopes = "This model has no α: all parts weigh alike."
    else:
        slopes = (
            f"Learned slopes: {found.slopes[0]:+.2f} for the photo's entropy, {found.slopes[1]:+.2f} for the class's."
        )
    shown = min(SHOWN, len(found.entropy))
    unit = "0: one cell, 1: all cells alike" if found.normalised else "in nats"
    return (
        f"The weight α of a part against the entropy of its location ({unit}): a dot is a part of one of {shown} "
        f"{split} photos, evenly spaced in their list, against the other half of its class, averaged over the class's "
        "scales; a line is what α does when only that part's entropy changes; dashed is 1/K, all parts alike. " + slopes
    )
