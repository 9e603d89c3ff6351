"""What surrounds the bird: a blurred backdrop, a perch, things in front of it, and light."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageFilter

from parseshot.data.drawing import LABELS, Patch, Pose, Rgb, darker, ellipse, paint, turn

GRAIN_GRID, BACKDROP_GRID = 40, 128
LEAF = np.array(
    [(-0.5, 0), (-0.3, -0.35), (0.05, -0.5), (0.35, -0.28), (0.5, 0), (0.35, 0.28), (0.05, 0.5), (-0.3, 0.35)]
)
EARTH: tuple[Rgb, ...] = ((118, 86, 58), (96, 74, 56), (150, 126, 92), (88, 104, 52), (132, 132, 124))
LEAVES: tuple[Rgb, ...] = ((70, 116, 48), (104, 138, 52), (48, 88, 50), (146, 132, 56), (158, 104, 48))
BACKDROPS: dict[str, tuple[Rgb, Rgb]] = {  # upper and lower colour
    "foliage": ((92, 128, 72), (58, 92, 56)), "sky": ((150, 190, 224), (214, 226, 232)),
    "water": ((120, 160, 176), (76, 118, 140)), "bark": ((132, 108, 84), (98, 78, 62)),
    "meadow": ((190, 204, 160), (128, 156, 72)), "dusk": ((196, 170, 160), (150, 128, 140)),
}  # fmt: skip


def _leaf(x: float, y: float, length: float, width: float, degrees: float) -> np.ndarray:
    return LEAF * (length, width) @ turn(degrees).T + (x, y)


def _clutter(rng: np.random.Generator, kind: str, plumage: Sequence[Rgb]) -> list[Patch]:
    """Things behind the bird: leaves, grass, ripples or cracks, and berries in the colours of birds."""
    count = int(rng.integers(10, 17))
    table = rng.random((count, 7)).tolist()
    patches = []
    for x, y, u, v, tone, pick, what in table:
        length, angle, brightness = 0.08 + 0.22 * u, 180 * v, 0.75 + 0.5 * tone
        if what < 0.3:
            colour, points = plumage[int(pick * len(plumage))], ellipse(x, y, 0.35 * length, (0.2 + 0.2 * v) * length)
        elif kind == "foliage":
            colour, points = LEAVES[int(pick * len(LEAVES))], _leaf(x, y, length, 0.5 * length, angle)
        elif kind in ("meadow", "dusk"):
            colour, points = LEAVES[int(pick * len(LEAVES))], _leaf(x, y, 2 * length, 0.12 * length, 60 + angle / 3)
        else:
            rx, ry = (0.08 * length, 1.6 * length) if kind == "bark" else (length, 0.22 * length)
            colour, points = BACKDROPS[kind][int(2 * pick)], ellipse(x, y, rx, ry)
        patches.append(Patch(points, darker(colour, brightness)))
    return patches


def backdrop(rng: np.random.Generator, plumage: Sequence[Rgb]) -> Image.Image:
    """Soft tones and clutter, out of focus; some of the clutter has the colours of birds."""
    kind = str(rng.choice(list(BACKDROPS)))
    upper, lower = (np.array(c, dtype=float) for c in BACKDROPS[kind])
    coarse = 10 * rng.standard_normal((6, 6, 1)) + 5 * rng.standard_normal((6, 6, 3))
    tones = _bytes_image(upper + (lower - upper) * np.linspace(0, 1, 6)[:, None, None] + coarse)
    grainy = np.asarray(tones.resize((GRAIN_GRID,) * 2, Image.Resampling.BICUBIC)) + rng.normal(
        0, 6, (GRAIN_GRID, GRAIN_GRID, 1)
    )
    image = _bytes_image(grainy).resize((BACKDROP_GRID,) * 2, Image.Resampling.BILINEAR)
    paint(image, _clutter(rng, kind, plumage))
    return image.filter(ImageFilter.BoxBlur(1))


def perch(rng: np.random.Generator, bird: Sequence[Patch], pose: Pose) -> list[Patch]:
    """A branch or the ground under the feet."""
    feet = np.concatenate([p.points for p in bird if p.label == LABELS["legs"]])
    lowest = feet[np.argsort(feet[:, 1])[-4:]].mean(axis=0)
    slope = math.tan(math.radians(pose.roll))
    x = np.linspace(-0.1, 1.1, 9)
    top = lowest[1] - 0.02 + slope * (x - lowest[0]) + 0.006 * rng.standard_normal(9)
    thick = rng.uniform(0.05, 0.09) * np.linspace(1.2, 0.8, 9) + 0.006 * rng.standard_normal(9)
    colour = darker(EARTH[int(rng.integers(len(EARTH)))], rng.uniform(0.8, 1.2))
    is_branch = rng.random() < 0.6

    def strip(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return np.concatenate([np.stack([x, upper], axis=1), np.stack([x, lower], axis=1)[::-1]])

    bottom = top + thick if is_branch else np.full(9, 1.6)
    shadow = darker(colour, 0.72)
    return [Patch(strip(top, bottom), colour), Patch(strip(bottom - 0.4 * thick, bottom), shadow)]


def occluders(rng: np.random.Generator, bird: Sequence[Patch]) -> list[Patch]:
    """Leaves, a twig or grass blades in front of the bird."""
    body = np.concatenate([p.points for p in bird])
    low, high = body.min(axis=0), body.max(axis=0)
    kind, count = str(rng.choice(["leaves", "twigs", "grass"])), int(rng.integers(0, 4))
    patches = []
    for u, v, pick, tone, grow, spin in rng.random((count, 6)).tolist():
        x, y = low + (u, v) * (high - low)
        colour = darker(LEAVES[int(pick * len(LEAVES))], 0.8 + 0.4 * tone)
        length, angle = 0.16 + 0.14 * grow, 180 * spin
        if kind == "leaves":
            vein = (_leaf(x, y, 0.95 * length, 0.03, angle)[None], darker(colour, 0.75))
            patches.append(Patch(_leaf(x, y, length, 0.45 * length, angle), colour, LABELS["occluder"], 0.004, (vein,)))
        elif kind == "twigs":
            patches.append(Patch(_leaf(x, y, 3 * length, 0.035, angle), darker(EARTH[0], 0.8), LABELS["occluder"]))
            patches.append(Patch(_leaf(x, y, 0.6 * length, 0.25 * length, angle + 50), colour, LABELS["occluder"]))
        else:
            tip, root = np.array([x, 0.35 + 0.45 * v]), np.array([x + 0.2 * (spin - 0.5), 1.05])
            middle, half = 0.5 * (tip + root), np.array([0.022, 0.0])
            blade = np.stack([root - half, middle - half, tip, middle + half, root + half])
            patches.append(Patch(blade, colour, LABELS["occluder"]))
    return patches


def light(rng: np.random.Generator, silhouette: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """A factor for every pixel and channel (shading, shadow gradient, brightness, colour cast), and a contrast.

    `silhouette` says on a coarse grid over the picture where the bird shows.
    """
    angle, fall = rng.uniform(0, 2 * math.pi), rng.uniform(0, 0.28)
    ramp = np.linspace(-1, 1, 8)
    slope = fall * (math.cos(angle) * ramp[None, :] + math.sin(angle) * ramp[:, None])
    uneven = slope + 0.06 * rng.standard_normal((8, 8))
    shade = np.ones((size, size), dtype=np.float32)
    for grid in (uneven, 0.5 * _relief(silhouette)):
        shade += np.asarray(Image.fromarray(grid.astype(np.float32)).resize((size, size), Image.Resampling.BILINEAR))
    gain = rng.uniform(0.82, 1.1) * rng.uniform(0.92, 1.08, size=3)
    factor = shade[..., None] * gain.astype(np.float32)  # [size, size, 3]
    return factor, float(rng.uniform(0.82, 1.12))


def _relief(silhouette: np.ndarray) -> np.ndarray:
    """Light from above on a round body: positive near upper edges of the bird, negative near lower ones."""
    soft = np.asarray(_bytes_image(silhouette * 255.0).filter(ImageFilter.BoxBlur(3)), dtype=np.float32) / 255
    padded = np.pad(soft, ((2, 2), (0, 0)), mode="edge")
    return (padded[4:] - padded[:-4]) * silhouette


def _bytes_image(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
