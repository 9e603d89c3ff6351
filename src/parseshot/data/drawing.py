"""A bird as polygons: its outline, limbs and feathers in a pose, and how polygons become pixels.

Points are (x, y) with y downwards. The bird frame faces right and the body is one unit long; `place` moves the bird
into the picture, whose side is one unit, so nothing here depends on a size in pixels until it is painted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

PART_NAMES: tuple[str, ...] = ("beak", "crown", "breast", "wing", "tail", "legs")
LABELS = {name: number for number, name in enumerate((*PART_NAMES, "body", "occluder"), start=1)}  # 0: scenery
SPLINE_STEPS = 6

Rgb = tuple[int, int, int]
Controls = tuple[tuple[float, float], ...]

# build -> body depth, head radius, head centre in the body frame, posture in degrees (negative: head up)
BUILDS: dict[str, tuple[float, float, tuple[float, float], float]] = {
    "finch": (0.32, 0.205, (0.41, -0.29), -20.0),
    "warbler": (0.25, 0.170, (0.45, -0.23), -12.0),
    "thrush": (0.28, 0.180, (0.45, -0.27), -30.0),
    "dove": (0.31, 0.150, (0.48, -0.33), -10.0),
    "crake": (0.25, 0.145, (0.55, -0.46), -10.0),
}
# fmt: off
BEAKS: tuple[Controls, ...] = (  # conical, long thin, hooked, curved, spatulate
    ((0, -0.09), (0.1, -0.055), (0.2, 0.02), (0.09, 0.07), (0, 0.09)),
    ((0, -0.05), (0.2, -0.02), (0.44, 0.01), (0.44, 0.025), (0.2, 0.045), (0, 0.06)),
    ((0, -0.1), (0.1, -0.11), (0.19, -0.06), (0.22, 0.04), (0.2, 0.14), (0.15, 0.06), (0.08, 0.065), (0, 0.08)),
    ((0, -0.06), (0.15, -0.05), (0.29, 0.03), (0.38, 0.18), (0.26, 0.1), (0.14, 0.05), (0, 0.06)),
    ((0, -0.05), (0.2, -0.03), (0.3, -0.085), (0.42, -0.05), (0.44, 0.03), (0.4, 0.1), (0.29, 0.11), (0.2, 0.04),
     (0, 0.06)),
)
STRAIGHT_BEAKS = (0, 1)
CRESTS: dict[int, Controls] = {  # short and long, in head radii
    1: ((0.6, -0.6), (0.1, -1.25), (-0.75, -1.75), (-0.6, -1.25), (-1.0, -1.1), (-0.7, -0.5)),
    2: ((0.3, -0.9), (-0.5, -1.3), (-1.6, -1.55), (-2.5, -1.35), (-1.7, -1.2), (-1.15, -0.8), (-0.8, -0.35)),
}
EYE_STRIPED_CROWN = 3
EYE_STRIPE: Controls = (
    (0.97, -0.1), (0.3, -0.3), (-0.4, -0.22), (-1.0, 0.15), (-0.9, 0.4), (-0.3, 0.18), (0.3, 0.12), (0.97, 0.12),
)
WINGS: tuple[Controls, ...] = (  # rounded, pointed, long and drooping
    ((0.23, -0.08), (0.08, -0.24), (-0.19, -0.24), (-0.42, -0.1), (-0.4, 0.05), (-0.14, 0.12), (0.13, 0.06)),
    ((0.23, -0.1), (0.08, -0.24), (-0.24, -0.22), (-0.7, -0.04), (-0.72, 0.01), (-0.29, 0.06), (0.11, 0.06)),
    ((0.24, -0.08), (0.1, -0.22), (-0.16, -0.19), (-0.45, 0.08), (-0.58, 0.27), (-0.43, 0.26), (-0.16, 0.18),
     (0.13, 0.09)),
)
TAILS: tuple[Controls, ...] = (  # short, long, forked, fan, wedge; from the rump leftwards
    ((0.08, -0.08), (-0.26, -0.09), (-0.28, 0.07), (0.08, 0.08)),
    ((0.08, -0.07), (-0.4, -0.07), (-0.8, -0.06), (-0.84, 0.0), (-0.8, 0.06), (-0.4, 0.07), (0.08, 0.08)),
    ((0.08, -0.07), (-0.3, -0.1), (-0.68, -0.22), (-0.46, 0.0), (-0.68, 0.2), (-0.3, 0.1), (0.08, 0.08)),
    ((0.08, -0.06), (-0.3, -0.24), (-0.42, -0.21), (-0.48, -0.1), (-0.5, 0.0), (-0.48, 0.1), (-0.42, 0.21),
     (-0.3, 0.24), (0.08, 0.06)),
    ((0.08, -0.06), (-0.42, -0.13), (-0.52, -0.1), (-0.64, 0.0), (-0.52, 0.1), (-0.42, 0.13), (0.08, 0.06)),
)
LEGS = ((0.27, 0.045), (0.58, 0.04), (0.3, 0.065))  # length and thickness: short, long, stout with webbed feet
TOES: Controls = (
    (-0.08, 0.02), (-0.02, -0.03), (0.03, -0.03), (0.14, -0.005), (0.08, 0.012), (0.12, 0.045), (0.03, 0.02),
)
WEBBED_LEGS = 2
WEBBED_TOES: Controls = ((-0.05, 0.01), (0.0, -0.05), (0.16, 0.0), (0.15, 0.05), (0.03, 0.04))
BACK: Controls = ((-0.5, -0.05), (-0.2, -0.24), (0.12, -0.28))
HEAD: Controls = ((-0.95, 0.3), (-0.75, -0.65), (0.05, -1.0), (0.75, -0.62), (0.98, 0.05), (0.62, 0.75))
FRONT: Controls = ((0.46, 0.0), (0.42, 0.18), (0.12, 0.31), (-0.25, 0.22), (-0.5, 0.06))
BREASTS: tuple[tuple[float, Controls], ...] = (  # where it ends along the outline, and its inner edge: full, bib
    (12.6, ((-0.2, 0.06), (0.1, 0.0), (0.26, -0.08))), (10.6, ((0.17, 0.13), (0.19, -0.02))),
)
EYE = ((0.33, -0.14, 0.27, (250, 246, 232)), (0.33, -0.14, 0.2, (20, 16, 18)), (0.4, -0.21, 0.07, (255, 255, 255)))
QUILLS = (-0.1, -0.03, 0.04)  # heights of the lines on the folded wing
LINE = 0.022
# fmt: on
# how many shapes each part has; a crown is plain, crested or eye-striped
SHAPES = {
    "beak": len(BEAKS),
    "crown": len(CRESTS) + 2,
    "breast": len(BREASTS),
    "wing": len(WINGS),
    "tail": len(TAILS),
    "legs": len(LEGS),
}  # fmt: skip


@dataclass(frozen=True)
class Coat:
    """How one part is painted: the number of its shape, its pattern, its colour and the colour of the pattern."""

    shape: int
    pattern: str
    colour: Rgb
    second: Rgb


@dataclass(frozen=True)
class Pose:
    """How one bird stands in one picture: angles in degrees, `side` and `shift` in picture units."""

    tilt: float
    pitch: float
    nod: tuple[float, float]
    tail_angle: float
    stance: float
    crouch: float
    facing: float
    roll: float
    squeeze: float
    side: float
    shift: tuple[float, float]


@dataclass(frozen=True)
class Patch:
    """A filled polygon with marks clipped to it; `label` is one of LABELS, or 0."""

    points: np.ndarray  # [corners, 2]
    colour: Rgb
    label: int = 0
    outline: float = 0.0
    marks: tuple[tuple[np.ndarray, Rgb], ...] = ()  # [marks, corners, 2] and their colour

    def moved(self, matrix: np.ndarray, shift: np.ndarray, scale: float) -> "Patch":
        """Apply the transform scale * matrix, then shift."""
        linear = scale * matrix.T
        marks = tuple((mark @ linear + shift, colour) for mark, colour in self.marks)
        return Patch(self.points @ linear + shift, self.colour, self.label, self.outline * scale, marks)


@dataclass(frozen=True)
class Frame:
    """Where a limb's own coordinates lie in the bird frame; `degrees` is the direction of its x axis."""

    matrix: np.ndarray
    origin: np.ndarray
    degrees: float

    def put(self, points: Sequence[Any] | np.ndarray) -> np.ndarray:
        return np.asarray(points) @ self.matrix.T + self.origin


def sample_pose(rng: np.random.Generator) -> Pose:
    u = rng.uniform(-1, 1, size=10)
    side = 0.84 + 0.14 * u[7]  # near what a crop to the box leaves, as the paper crops CUB
    slack = (1 - side) / 2 + 0.09  # 0.09: some parts leave the picture now and then
    return Pose(
        tilt=16 * u[0], pitch=18 * u[1], nod=(0.04 * u[2], 0.05 * u[3]), tail_angle=20 * u[4],
        stance=0.15 + 0.06 * u[5], crouch=0.9 + 0.2 * u[6], facing=float(rng.choice([-1.0, 1.0])), roll=6 * u[8],
        squeeze=0.92 + 0.08 * u[9], side=side, shift=(slack * rng.uniform(-1, 1), slack * rng.uniform(-1, 1)),
    )  # fmt: skip


def turn(degrees: float) -> np.ndarray:
    """Rotation matrix, clockwise on the page."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


def spline(controls: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    """Closed Catmull-Rom curve; control point i is sample i * SPLINE_STEPS."""
    p = np.asarray(controls, dtype=float)
    t = np.arange(SPLINE_STEPS) / SPLINE_STEPS
    basis = 0.5 * np.stack(
        [-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2], axis=1
    )
    around = p[(np.arange(len(p))[:, None] + np.arange(-1, 3)) % len(p)]  # [controls, 4, 2]
    return (basis @ around).reshape(-1, 2)  # [controls * SPLINE_STEPS, 2]


def ellipse(x: float, y: float, rx: float, ry: float, corners: int = 16) -> np.ndarray:
    angle = np.arange(corners) * (2 * math.pi / corners)
    return np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], axis=1)


def darker(colour: Rgb, factor: float) -> Rgb:
    """Scale a colour; a factor above one makes it brighter."""
    return int(colour[0] * factor), int(colour[1] * factor), int(colour[2] * factor)


def _marks(pattern: str, polygon: np.ndarray, degrees: float) -> np.ndarray:
    """Polygons of a pattern over `polygon`, [marks, corners, 2]; `degrees` is the direction of the feathers."""
    axes = turn(degrees)
    low, high = (polygon @ axes).min(axis=0), (polygon @ axes).max(axis=0)
    spacing, size = {"spotted": ((0.13, 0.12), (0.038, 0.038)), "streaked": ((0.19, 0.085), (0.075, 0.02))}.get(
        pattern, ((0.14, 1.0), (0.035, 1.0))
    )
    if pattern == "edged":
        centre = polygon.mean(axis=0)
        return ((polygon - centre) * 0.62 + centre)[None]
    if pattern in ("spotted", "streaked"):
        columns, rows = (np.arange(low[k] + 0.3 * spacing[k], high[k], spacing[k]) for k in (0, 1))
        x, y = np.meshgrid(columns, rows)
        x = x + (np.arange(len(rows)) % 2)[:, None] * spacing[0] / 2
        return (np.stack([x.ravel(), y.ravel()], axis=1)[:, None] + ellipse(0, 0, *size, corners=8)) @ axes.T
    length = high[0] - low[0]
    if pattern == "half":
        starts, width = np.array([low[0]]), 0.5 * length
    elif pattern == "double-barred":
        starts, width = low[0] + length * np.array([0.5, 0.72]), 0.1 * length
    else:
        starts, width = np.arange(low[0] + 0.03, high[0], spacing[0]), 2 * size[0]
    bar = np.array([[0, low[1]], [width, low[1]], [width, high[1]], [0, high[1]]])
    return (bar + np.stack([starts, np.zeros_like(starts)], axis=1)[:, None]) @ axes.T


def _part_patch(part: str, points: np.ndarray, coat: Coat, degrees: float, outline: float) -> Patch:
    fill, ink = (coat.second, coat.colour) if coat.pattern == "edged" else (coat.colour, coat.second)
    marks = () if coat.pattern == "plain" else ((_marks(coat.pattern, points, degrees), ink),)
    return Patch(points, fill, LABELS[part], outline, marks)


def _tail(coat: Coat, pose: Pose, body: Frame) -> Patch:
    degrees = body.degrees + pose.tail_angle + 5
    frame = Frame(turn(degrees), body.put([(-0.44, 0.0)])[0], degrees)
    return _part_patch("tail", frame.put(TAILS[coat.shape]), coat, degrees, LINE)


def _legs(coat: Coat, pose: Pose, body: Frame) -> list[Patch]:
    """Both legs, upright whatever the tilt of the body, with their feet on one level."""
    length, thick = LEGS[coat.shape]
    near, far = body.put([(-0.02 - pose.stance / 2, 0.19), (-0.02 + pose.stance / 2, 0.19)])
    ground = 0.5 * (near[1] + far[1]) + length * pose.crouch + 0.09
    patches = []
    for hip, shade in ((far, 0.78), (near, 1.0)):
        knee, w = 0.55 * hip[1] + 0.45 * ground, thick / 2
        side = [(1.6 * w, hip[1]), (w, knee), (w, ground)]
        shank = np.array([(-x, y) for x, y in side] + side[::-1])  # [6, 2]
        shank[:, 0] += hip[0] + np.array([0.0, -0.03, 0.0, 0.0, -0.03, 0.0])  # the joint of a bird bends backwards
        foot = np.add(WEBBED_TOES if coat.shape == WEBBED_LEGS else TOES, (hip[0], ground))
        patches += [Patch(p, darker(coat.colour, shade), LABELS["legs"], 0.8 * LINE) for p in (shank, foot)]
    return patches


def _trunk(colour: Rgb, crown: Coat, breast: Coat, body: Frame, head: Frame) -> list[Patch]:
    """Body and head in one smooth outline; breast and crown share its edge."""
    outline = spline(np.concatenate([body.put(BACK), head.put(HEAD), body.put(FRONT)]))

    def along(start: float, stop: float) -> np.ndarray:
        return outline[round(start * SPLINE_STEPS) : round(stop * SPLINE_STEPS) + 1]

    stop, inner = BREASTS[breast.shape]
    front = np.concatenate([along(8.3, stop), body.put(inner)])
    cap = np.concatenate([along(3.4, 6.7), head.put([(0.45, -0.42), (-0.1, -0.42), (-0.6, -0.25)])])
    pieces = [(cap, 0.0)]
    if crown.shape in CRESTS:
        pieces.insert(0, (head.put(CRESTS[crown.shape]), LINE))
    stripe = []
    if crown.shape == EYE_STRIPED_CROWN:  # labelled body: it would pull the crown's centre into the eye
        stripe = [Patch(head.put(EYE_STRIPE), crown.colour, LABELS["body"])]
    return [
        Patch(outline, colour, LABELS["body"], LINE),
        _part_patch("breast", front, breast, body.degrees + 50, 0.0),
        *(_part_patch("crown", points, crown, 0.0, line) for points, line in pieces),
        *stripe,
    ]


def _face(coat: Coat, head: Frame, radius: float) -> list[Patch]:
    controls = np.array(BEAKS[coat.shape]) if coat.shape in STRAIGHT_BEAKS else spline(BEAKS[coat.shape])
    beak = head.put(controls * max(0.8 / radius, 1 / 0.18) + (0.88, 0.06))
    eye = [Patch(head.put(ellipse(x, y, r, r, 12)), colour, LABELS["body"]) for x, y, r, colour in EYE]
    return [_part_patch("beak", beak, coat, head.degrees + 180, 0.8 * LINE), *eye]


def _wing(coat: Coat, body: Frame) -> Patch:
    patch = _part_patch("wing", body.put(spline(WINGS[coat.shape])), coat, body.degrees, LINE)
    quills = body.put([[(-0.04, y), (-0.66, y + 0.04), (-0.66, y + 0.058), (-0.04, y + 0.012)] for y in QUILLS])
    return replace(patch, marks=(*patch.marks, (quills, darker(patch.colour, 0.62))))


def bird(build: str, colour: Rgb, coats: Mapping[str, Coat], pose: Pose) -> list[Patch]:
    """All patches of a bird in paint order, in the bird frame; `colour` is the body's, `coats` has every part."""
    depth, radius, head_at, posture = BUILDS[build]
    degrees = posture + pose.tilt
    tilted = turn(degrees)
    body = Frame(tilted @ np.diag([1.0, depth / 0.3]), np.zeros(2), degrees)
    pitch = pose.pitch + 0.3 * degrees  # a bird keeps its head more level than its body
    head = Frame(radius * turn(pitch), tilted @ np.add(head_at, pose.nod), pitch)
    return [
        _tail(coats["tail"], pose, body),
        *_legs(coats["legs"], pose, body),
        *_trunk(colour, coats["crown"], coats["breast"], body, head),
        *_face(coats["beak"], head, radius),
        _wing(coats["wing"], body),
    ]


def place(patches: Sequence[Patch], pose: Pose) -> list[Patch]:
    """Move a bird from its own frame into the picture: facing, roll, size and position."""
    matrix = turn(pose.roll) @ np.diag([pose.facing * pose.squeeze, 1.0])
    points = np.concatenate([p.points for p in patches]) @ matrix.T
    low, high = points.min(axis=0), points.max(axis=0)
    scale = pose.side / float((high - low).max())
    shift = 0.5 + np.array(pose.shift) - scale * (low + high) / 2
    return [p.moved(matrix, shift, scale) for p in patches]


def flat(points: np.ndarray, scale: float) -> list[float]:
    """x, y, x, y… in pixels, as Pillow wants them."""
    return (points * scale - 0.5).ravel().tolist()


def paint(image: Image.Image, patches: Sequence[Patch]) -> None:
    """Paint patches over a square picture, the last on top."""
    scale = image.width
    pen = ImageDraw.Draw(image)
    for patch in patches:
        corners = flat(patch.points, scale)
        if patch.outline:
            width = max(1, round(2 * patch.outline * scale))
            pen.line(corners + corners[:4], fill=darker(patch.colour, 0.45), width=width)
        pen.polygon(corners, fill=patch.colour)
        if patch.marks:
            _paint_marks(image, patch)


def _paint_marks(image: Image.Image, patch: Patch) -> None:
    """Draw the marks on a copy of the surroundings of the patch and take over what lies inside the patch."""
    scale = image.width
    low = np.clip(np.floor(patch.points.min(axis=0) * scale), 0, scale).astype(int)
    high = np.clip(np.ceil(patch.points.max(axis=0) * scale) + 1, 0, scale).astype(int)
    if (high <= low).any():
        return
    box = (int(low[0]), int(low[1]), int(high[0]), int(high[1]))
    ink, origin = image.crop(box), low / scale
    mask = Image.new("1", ink.size)
    ImageDraw.Draw(mask).polygon(flat(patch.points - origin, scale), fill=1)
    pen = ImageDraw.Draw(ink)
    for marks, colour in patch.marks:
        for mark in marks - origin:
            pen.polygon(flat(mark, scale), fill=colour)
    image.paste(ink, box, mask)
