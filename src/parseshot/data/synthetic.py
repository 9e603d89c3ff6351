"""A drawn field guide: fine-grained made-up birds whose part positions are known exactly.

Everything is laid out as polygons in picture units (0..1) and only then painted, so no scene depends on its size.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

PART_NAMES: tuple[str, ...] = ("beak", "crown", "breast", "wing", "tail", "legs")
FAMILY_SIZE = 5
PALETTE: dict[str, tuple[int, int, int]] = {
    "black": (34, 31, 36), "white": (244, 242, 236), "slate": (92, 106, 128), "silver": (176, 182, 186),
    "rust": (192, 86, 36), "chestnut": (110, 54, 38), "buff": (214, 174, 120), "cream": (248, 230, 178),
    "olive": (116, 120, 46), "green": (56, 142, 72), "yellow": (246, 206, 46), "orange": (240, 138, 36),
    "scarlet": (208, 36, 42), "blue": (44, 94, 194), "teal": (36, 152, 158), "violet": (112, 66, 152),
}  # fmt: skip
CLEAR_COLOUR_DISTANCE = 110.0  # RGB distance that still shows in a few pixels under the lighting jitter
HORN_COLOURS = ("black", "yellow", "orange", "scarlet", "slate", "buff")
LEG_COLOURS = ("black", "yellow", "scarlet", "slate", "buff", "teal")
# part -> how many shapes, which patterns, which colours
PART_CHOICES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "beak": (5, ("plain", "half"), HORN_COLOURS),
    "crown": (4, ("plain",), tuple(PALETTE)),
    "breast": (2, ("plain", "barred", "spotted", "streaked", "half", "edged"), tuple(PALETTE)),
    "wing": (3, ("plain", "barred", "spotted", "streaked", "half", "edged", "double-barred"), tuple(PALETTE)),
    "tail": (5, ("plain", "barred", "half", "edged"), tuple(PALETTE)),
    "legs": (3, ("plain",), LEG_COLOURS),
}
# build -> body depth, head radius, head centre in the body frame, posture in degrees (negative: head up)
BUILDS: dict[str, tuple[float, float, tuple[float, float], float]] = {
    "finch": (0.32, 0.205, (0.41, -0.29), -20.0),
    "warbler": (0.25, 0.170, (0.45, -0.23), -12.0),
    "thrush": (0.28, 0.180, (0.45, -0.27), -30.0),
    "dove": (0.31, 0.150, (0.48, -0.33), -10.0),
    "crake": (0.25, 0.145, (0.55, -0.46), -10.0),
}
SPLINE_STEPS = 6
REACH = 0.5  # the label grid extends this far past every picture edge, so that cut-off parts keep their centre
LABEL_GRID = 192  # label pixels across (1 + 2 * REACH) pictures
GRAIN_GRID, BACKDROP_GRID = 40, 128
OCCLUDER_LABEL = len(PART_NAMES) + 2
BODY_LABEL = len(PART_NAMES) + 1
LEGS_LABEL = PART_NAMES.index("legs") + 1

Rgb = tuple[int, int, int]
Colours = dict[str, Rgb]
Controls = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Trait:
    """What one part of a species looks like; `second` is the colour of the pattern."""

    shape: int
    colour: str
    second: str
    pattern: str


@dataclass(frozen=True)
class Species:
    """A combination of part traits on a body that its family shares."""

    name: str
    family: int
    build: str
    body: str
    beak: Trait
    crown: Trait
    breast: Trait
    wing: Trait
    tail: Trait
    legs: Trait

    def trait(self, part: str) -> Trait:
        traits = (self.beak, self.crown, self.breast, self.wing, self.tail, self.legs)
        return traits[PART_NAMES.index(part)]

    def traits(self, part: str) -> tuple[int, str, str, str]:
        """Shape, colour, pattern colour and pattern of a part, to compare species part by part."""
        trait = self.trait(part)
        return trait.shape, trait.colour, trait.second, trait.pattern


@dataclass(frozen=True)
class Drawing:
    """A picture with its part positions (x, y); the centre of the top left pixel is (0, 0)."""

    image: np.ndarray
    parts: np.ndarray
    visible: np.ndarray
    box: np.ndarray


@dataclass(frozen=True)
class Patch:
    """A filled polygon with marks clipped to it; `label` is 1 + the part index, or one of the labels above."""

    points: np.ndarray
    colour: Rgb
    label: int = 0
    outline: float = 0.0
    marks: tuple[tuple[np.ndarray, Rgb], ...] = ()

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


# --- species ---


def _colour_distance(a: str, b: str) -> float:
    return math.dist(PALETTE[a], PALETTE[b])


def _pick(rng: np.random.Generator, options: Sequence[str], far_from: Sequence[str] = ()) -> str:
    clear = [o for o in options if all(_colour_distance(o, other) >= CLEAR_COLOUR_DISTANCE for other in far_from)]
    return str(rng.choice(clear or [o for o in options if o not in far_from]))


def _new_trait(rng: np.random.Generator, part: str, body: str) -> Trait:
    shapes, patterns, colours = PART_CHOICES[part]
    colour, pattern = _pick(rng, colours, (body,)), str(rng.choice(patterns))
    second = colour if pattern == "plain" else _pick(rng, tuple(PALETTE), (colour,))
    return Trait(int(rng.integers(shapes)), colour, second, pattern)


def _changed_trait(rng: np.random.Generator, part: str, old: Trait, body: str) -> Trait:
    """Change one aspect of a trait clearly: its shape, its colour or its pattern."""
    shapes, patterns, colours = PART_CHOICES[part]
    aspect = str(rng.choice(["shape", "colour", "pattern"] if len(patterns) > 1 else ["shape", "colour"]))
    if aspect == "shape":
        return replace(old, shape=(old.shape + int(rng.integers(1, shapes))) % shapes)
    if aspect == "colour":
        colour = _pick(rng, colours, (old.colour, body))
        return replace(
            old, colour=colour, second=colour if old.pattern == "plain" else _pick(rng, [*PALETTE], [colour])
        )
    pattern = str(rng.choice([p for p in patterns if p != old.pattern]))
    return replace(
        old, pattern=pattern, second=old.colour if pattern == "plain" else _pick(rng, [*PALETTE], [old.colour])
    )


def _named(species: Species, index: int) -> Species:
    pattern = next((t.pattern for t in (species.breast, species.wing) if t.pattern != "plain"), species.body)
    return replace(species, name=f"{species.crown.colour}-crowned {pattern} {species.build} {index:03d}")


def _family(seed: int, family: int) -> Iterator[Species]:
    """Endless relatives: the founder, then changes of one or two parts of an earlier relative."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, family]))
    body = _pick(rng, tuple(PALETTE))
    traits = {part: _new_trait(rng, part, body) for part in PART_NAMES}
    members = [Species("", family, str(rng.choice(tuple(BUILDS))), body, **traits)]
    while True:
        yield members[-1]
        parent = members[int(rng.integers(len(members)))]
        parts = [str(p) for p in rng.choice(PART_NAMES, size=int(rng.integers(1, 3)), replace=False)]
        changes: dict[str, Any] = {p: _changed_trait(rng, p, parent.trait(p), body) for p in parts}
        members.append(replace(parent, **changes))


def make_species(count: int, seed: int = 0) -> list[Species]:
    """Make distinct species in families of five neighbours; a larger count only appends."""
    _check("count", count, 1)
    species: list[Species] = []
    seen: set[Species] = set()
    for family in range(math.ceil(count / FAMILY_SIZE)):
        size_after = len(species) + FAMILY_SIZE
        for member in _family(seed, family):
            anonymous = replace(member, family=0)
            if anonymous not in seen:
                seen.add(anonymous)
                species.append(_named(member, len(species)))
            if len(species) == size_after:
                break
    return species[:count]


LEAF = np.array(
    [(-0.5, 0), (-0.3, -0.35), (0.05, -0.5), (0.35, -0.28), (0.5, 0), (0.35, 0.28), (0.05, 0.5), (-0.3, 0.35)]
)

# --- geometry: the bird frame faces right, y points down, the body is one unit long ---


def _turn(degrees: float) -> np.ndarray:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


def _spline(controls: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    """Closed Catmull-Rom curve; control point i is sample i * SPLINE_STEPS."""
    p = np.asarray(controls, dtype=float)
    t = np.arange(SPLINE_STEPS) / SPLINE_STEPS
    basis = 0.5 * np.stack(
        [-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2], axis=1
    )
    around = p[(np.arange(len(p))[:, None] + np.arange(-1, 3)) % len(p)]
    return (basis @ around).reshape(-1, 2)


def _ellipse(x: float, y: float, rx: float, ry: float, corners: int = 16) -> np.ndarray:
    angle = np.arange(corners) * (2 * math.pi / corners)
    return np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], axis=1)


def _leaf(x: float, y: float, length: float, width: float, degrees: float) -> np.ndarray:
    return LEAF * (length, width) @ _turn(degrees).T + (x, y)


def _marks(pattern: str, polygon: np.ndarray, degrees: float) -> np.ndarray:
    """Polygons of a pattern over `polygon`, [marks, corners, 2]; `degrees` is the direction of the feathers."""
    axes = _turn(degrees)
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
        return (np.stack([x.ravel(), y.ravel()], axis=1)[:, None] + _ellipse(0, 0, *size, corners=8)) @ axes.T
    length = high[0] - low[0]
    if pattern == "half":
        starts, width = np.array([low[0]]), 0.5 * length
    elif pattern == "double-barred":
        starts, width = low[0] + length * np.array([0.5, 0.72]), 0.1 * length
    else:
        starts, width = np.arange(low[0] + 0.03, high[0], spacing[0]), 2 * size[0]
    bar = np.array([[0, low[1]], [width, low[1]], [width, high[1]], [0, high[1]]])
    return (bar + np.stack([starts, np.zeros_like(starts)], axis=1)[:, None]) @ axes.T


def _darker(colour: Rgb, factor: float) -> Rgb:
    return int(colour[0] * factor), int(colour[1] * factor), int(colour[2] * factor)


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


def _sample_pose(rng: np.random.Generator) -> Pose:
    u = rng.uniform(-1, 1, size=10)
    side = 0.75 + 0.2 * u[7]
    slack = (1 - side) / 2 + 0.09  # 0.09: some parts leave the picture now and then
    return Pose(
        tilt=16 * u[0], pitch=18 * u[1], nod=(0.04 * u[2], 0.05 * u[3]), tail_angle=20 * u[4],
        stance=0.15 + 0.06 * u[5], crouch=0.9 + 0.2 * u[6], facing=float(rng.choice([-1.0, 1.0])), roll=6 * u[8],
        squeeze=0.92 + 0.08 * u[9], side=side, shift=(slack * rng.uniform(-1, 1), slack * rng.uniform(-1, 1)),
    )  # fmt: skip


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


def _part_patch(part: str, points: np.ndarray, trait: Trait, colours: Colours, degrees: float, outline: float) -> Patch:
    fill, ink = colours[trait.colour], colours[trait.second]
    if trait.pattern == "edged":
        fill, ink = ink, fill
    marks = () if trait.pattern == "plain" else ((_marks(trait.pattern, points, degrees), ink),)
    return Patch(points, fill, PART_NAMES.index(part) + 1, outline, marks)


def _tail(species: Species, pose: Pose, body: Frame, colours: Colours) -> Patch:
    degrees = body.degrees + pose.tail_angle + 5
    frame = Frame(_turn(degrees), body.put([(-0.44, 0.0)])[0], degrees)
    return _part_patch("tail", frame.put(TAILS[species.tail.shape]), species.tail, colours, degrees, LINE)


def _legs(species: Species, pose: Pose, body: Frame, colours: Colours) -> list[Patch]:
    """Both legs, upright whatever the tilt of the body, with their feet on one level."""
    length, thick = LEGS[species.legs.shape]
    near, far = body.put([(-0.02 - pose.stance / 2, 0.19), (-0.02 + pose.stance / 2, 0.19)])
    ground = 0.5 * (near[1] + far[1]) + length * pose.crouch + 0.09
    patches = []
    for hip, shade in ((far, 0.78), (near, 1.0)):
        knee, w = 0.55 * hip[1] + 0.45 * ground, thick / 2
        side = [(1.6 * w, hip[1]), (w, knee), (w, ground)]
        shank = np.array([(-x, y) for x, y in side] + side[::-1])
        shank[:, 0] += hip[0] + np.array([0.0, -0.03, 0.0, 0.0, -0.03, 0.0])  # the joint of a bird bends backwards
        foot = np.add(WEBBED_TOES if species.legs.shape == WEBBED_LEGS else TOES, (hip[0], ground))
        colour = _darker(colours[species.legs.colour], shade)
        patches += [Patch(p, colour, LEGS_LABEL, 0.8 * LINE) for p in (shank, foot)]
    return patches


def _trunk(species: Species, body: Frame, head: Frame, colours: Colours) -> list[Patch]:
    """Body and head in one smooth outline; breast and crown share its edge."""
    outline = _spline(np.concatenate([body.put(BACK), head.put(HEAD), body.put(FRONT)]))

    def along(start: float, stop: float) -> np.ndarray:
        return outline[round(start * SPLINE_STEPS) : round(stop * SPLINE_STEPS) + 1]

    stop, inner = BREASTS[species.breast.shape]
    breast = np.concatenate([along(8.3, stop), body.put(inner)])
    crown = np.concatenate([along(3.4, 6.7), head.put([(0.45, -0.42), (-0.1, -0.42), (-0.6, -0.25)])])
    pieces = [(crown, 0.0)]
    if species.crown.shape in CRESTS:
        pieces.insert(0, (head.put(CRESTS[species.crown.shape]), LINE))
    stripe = []
    if species.crown.shape == EYE_STRIPED_CROWN:  # labelled body: it would pull the crown's centre into the eye
        stripe = [Patch(head.put(EYE_STRIPE), colours[species.crown.colour], BODY_LABEL)]
    return [
        Patch(outline, colours[species.body], BODY_LABEL, LINE),
        _part_patch("breast", breast, species.breast, colours, body.degrees + 50, 0.0),
        *(_part_patch("crown", points, species.crown, colours, 0.0, line) for points, line in pieces),
        *stripe,
    ]


def _face(species: Species, head: Frame, radius: float, colours: Colours) -> list[Patch]:
    shape = species.beak.shape
    controls = np.array(BEAKS[shape]) if shape in STRAIGHT_BEAKS else _spline(BEAKS[shape])
    beak = head.put(controls * max(0.8 / radius, 1 / 0.18) + (0.88, 0.06))
    eye = [Patch(head.put(_ellipse(x, y, r, r, 12)), colour, BODY_LABEL) for x, y, r, colour in EYE]
    return [_part_patch("beak", beak, species.beak, colours, head.degrees + 180, 0.8 * LINE), *eye]


def _wing(species: Species, body: Frame, colours: Colours) -> Patch:
    points = body.put(_spline(WINGS[species.wing.shape]))
    patch = _part_patch("wing", points, species.wing, colours, body.degrees, LINE)
    quills = body.put([[(-0.04, y), (-0.66, y + 0.04), (-0.66, y + 0.058), (-0.04, y + 0.012)] for y in QUILLS])
    return replace(patch, marks=(*patch.marks, (quills, _darker(patch.colour, 0.62))))


def _bird(species: Species, pose: Pose, colours: Colours) -> list[Patch]:
    """All patches of the bird in paint order, in the bird frame."""
    depth, radius, head_at, posture = BUILDS[species.build]
    degrees = posture + pose.tilt
    turn = _turn(degrees)
    body = Frame(turn @ np.diag([1.0, depth / 0.3]), np.zeros(2), degrees)
    pitch = pose.pitch + 0.3 * degrees  # a bird keeps its head more level than its body
    head = Frame(radius * _turn(pitch), turn @ np.add(head_at, pose.nod), pitch)
    return [
        _tail(species, pose, body, colours),
        *_legs(species, pose, body, colours),
        *_trunk(species, body, head, colours),
        *_face(species, head, radius, colours),
        _wing(species, body, colours),
    ]


def _place(bird: list[Patch], pose: Pose) -> list[Patch]:
    """Move the bird into the picture: facing, roll, size and position."""
    matrix = _turn(pose.roll) @ np.diag([pose.facing * pose.squeeze, 1.0])
    points = np.concatenate([p.points for p in bird]) @ matrix.T
    low, high = points.min(axis=0), points.max(axis=0)
    scale = pose.side / float((high - low).max())
    shift = 0.5 + np.array(pose.shift) - scale * (low + high) / 2
    return [p.moved(matrix, shift, scale) for p in bird]


# --- scenery ---

EARTH: tuple[Rgb, ...] = ((118, 86, 58), (96, 74, 56), (150, 126, 92), (88, 104, 52), (132, 132, 124))
LEAVES: tuple[Rgb, ...] = ((70, 116, 48), (104, 138, 52), (48, 88, 50), (146, 132, 56), (158, 104, 48))
BACKDROPS: dict[str, tuple[Rgb, Rgb]] = {  # upper and lower colour
    "foliage": ((92, 128, 72), (58, 92, 56)), "sky": ((150, 190, 224), (214, 226, 232)),
    "water": ((120, 160, 176), (76, 118, 140)), "bark": ((132, 108, 84), (98, 78, 62)),
    "meadow": ((190, 204, 160), (128, 156, 72)), "dusk": ((196, 170, 160), (150, 128, 140)),
}  # fmt: skip


def _clutter(rng: np.random.Generator, kind: str) -> list[Patch]:
    """Things behind the bird; some have the colours of birds."""
    count = int(rng.integers(10, 17))
    table = rng.random((count, 7)).tolist()
    plumage = list(PALETTE.values())
    patches = []
    for x, y, u, v, tone, pick, what in table:
        length, angle, brightness = 0.08 + 0.22 * u, 180 * v, 0.75 + 0.5 * tone
        if what < 0.3:
            colour, points = plumage[int(pick * len(plumage))], _ellipse(x, y, 0.35 * length, (0.2 + 0.2 * v) * length)
        elif kind == "foliage":
            colour, points = LEAVES[int(pick * len(LEAVES))], _leaf(x, y, length, 0.5 * length, angle)
        elif kind in ("meadow", "dusk"):
            colour, points = LEAVES[int(pick * len(LEAVES))], _leaf(x, y, 2 * length, 0.12 * length, 60 + angle / 3)
        else:
            rx, ry = (0.08 * length, 1.6 * length) if kind == "bark" else (length, 0.22 * length)
            colour, points = BACKDROPS[kind][int(2 * pick)], _ellipse(x, y, rx, ry)
        patches.append(Patch(points, _darker(colour, brightness)))
    return patches


def _perch(rng: np.random.Generator, bird: list[Patch], pose: Pose) -> list[Patch]:
    """A branch or the ground under the feet."""
    feet = np.concatenate([p.points for p in bird if p.label == LEGS_LABEL])
    lowest = feet[np.argsort(feet[:, 1])[-4:]].mean(axis=0)
    slope = math.tan(math.radians(pose.roll))
    x = np.linspace(-0.1, 1.1, 9)
    top = lowest[1] - 0.02 + slope * (x - lowest[0]) + 0.006 * rng.standard_normal(9)
    thick = rng.uniform(0.05, 0.09) * np.linspace(1.2, 0.8, 9) + 0.006 * rng.standard_normal(9)
    colour = _darker(EARTH[int(rng.integers(len(EARTH)))], rng.uniform(0.8, 1.2))
    is_branch = rng.random() < 0.6

    def strip(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return np.concatenate([np.stack([x, upper], axis=1), np.stack([x, lower], axis=1)[::-1]])

    bottom = top + thick if is_branch else np.full(9, 1.6)
    shadow = _darker(colour, 0.72)
    return [Patch(strip(top, bottom), colour), Patch(strip(bottom - 0.4 * thick, bottom), shadow)]


def _occluders(rng: np.random.Generator, bird: list[Patch]) -> list[Patch]:
    """Leaves, a twig or grass blades in front of the bird."""
    body = np.concatenate([p.points for p in bird])
    low, high = body.min(axis=0), body.max(axis=0)
    kind, count = str(rng.choice(["leaves", "twigs", "grass"])), int(rng.integers(0, 4))
    patches = []
    for u, v, pick, tone, grow, spin in rng.random((count, 6)).tolist():
        x, y = low + (u, v) * (high - low)
        colour = _darker(LEAVES[int(pick * len(LEAVES))], 0.8 + 0.4 * tone)
        length, angle = 0.16 + 0.14 * grow, 180 * spin
        if kind == "leaves":
            vein = (_leaf(x, y, 0.95 * length, 0.03, angle)[None], _darker(colour, 0.75))
            patches.append(Patch(_leaf(x, y, length, 0.45 * length, angle), colour, OCCLUDER_LABEL, 0.004, (vein,)))
        elif kind == "twigs":
            patches.append(Patch(_leaf(x, y, 3 * length, 0.035, angle), _darker(EARTH[0], 0.8), OCCLUDER_LABEL))
            patches.append(Patch(_leaf(x, y, 0.6 * length, 0.25 * length, angle + 50), colour, OCCLUDER_LABEL))
        else:
            tip, root = np.array([x, 0.35 + 0.45 * v]), np.array([x + 0.2 * (spin - 0.5), 1.05])
            middle, half = 0.5 * (tip + root), np.array([0.022, 0.0])
            blade = np.stack([root - half, middle - half, tip, middle + half, root + half])
            patches.append(Patch(blade, colour, OCCLUDER_LABEL))
    return patches


# --- painting ---


def _bytes_image(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def _flat(points: np.ndarray, scale: float) -> list[float]:
    return (points * scale - 0.5).ravel().tolist()


def _paint(image: Image.Image, patches: Sequence[Patch]) -> None:
    scale = image.width
    pen = ImageDraw.Draw(image)
    for patch in patches:
        corners = _flat(patch.points, scale)
        if patch.outline:
            width = max(1, round(2 * patch.outline * scale))
            pen.line(corners + corners[:4], fill=_darker(patch.colour, 0.45), width=width)
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
    ImageDraw.Draw(mask).polygon(_flat(patch.points - origin, scale), fill=1)
    pen = ImageDraw.Draw(ink)
    for marks, colour in patch.marks:
        for mark in marks - origin:
            pen.polygon(_flat(mark, scale), fill=colour)
    image.paste(ink, box, mask)


def _backdrop(rng: np.random.Generator) -> Image.Image:
    """Soft tones and clutter, out of focus."""
    kind = str(rng.choice(list(BACKDROPS)))
    upper, lower = (np.array(c, dtype=float) for c in BACKDROPS[kind])
    coarse = 10 * rng.standard_normal((6, 6, 1)) + 5 * rng.standard_normal((6, 6, 3))
    tones = _bytes_image(upper + (lower - upper) * np.linspace(0, 1, 6)[:, None, None] + coarse)
    grainy = np.asarray(tones.resize((GRAIN_GRID,) * 2, Image.Resampling.BICUBIC)) + rng.normal(
        0, 6, (GRAIN_GRID, GRAIN_GRID, 1)
    )
    image = _bytes_image(grainy).resize((BACKDROP_GRID,) * 2, Image.Resampling.BILINEAR)
    _paint(image, _clutter(rng, kind))
    return image.filter(ImageFilter.BoxBlur(1))


def _labels(bird: Sequence[Patch], occluders: Sequence[Patch]) -> tuple[np.ndarray, np.ndarray]:
    """Label grids of the bird alone and with what covers it."""
    image = Image.new("L", (LABEL_GRID, LABEL_GRID))
    pen = ImageDraw.Draw(image)
    scale = LABEL_GRID / (1 + 2 * REACH)
    for patch in bird:
        pen.polygon(_flat(patch.points + REACH, scale), fill=patch.label)
    alone = np.array(image)
    for patch in occluders:
        pen.polygon(_flat(patch.points + REACH, scale), fill=patch.label)
    return alone, np.array(image)


def _measure(alone: np.ndarray, covered: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Part centres and box in picture units, and which centres are inside the picture and uncovered."""
    scale = LABEL_GRID / (1 + 2 * REACH)
    rows, columns = np.nonzero(alone)
    labels = alone[rows, columns]
    sums = [np.bincount(labels, weights=w, minlength=BODY_LABEL + 1)[1:BODY_LABEL] for w in (columns, rows, None)]
    cells = np.stack(sums[:2], axis=1) / sums[2][:, None]
    centres = (cells + 0.5) / scale - REACH
    nearest = np.clip(np.rint(cells).astype(int), 0, LABEL_GRID - 1)
    uncovered = covered[nearest[:, 1], nearest[:, 0]] != OCCLUDER_LABEL
    visible = ((centres > 0) & (centres < 1)).all(axis=1) & uncovered
    edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / scale - REACH
    return centres, visible, np.clip(edges, 0, 1)


def _relief(covered: np.ndarray) -> np.ndarray:
    """Light from above on a round body: positive near upper edges of the bird, negative near lower ones."""
    margin = round(LABEL_GRID * REACH / (1 + 2 * REACH))
    inside = covered[margin:-margin:2, margin:-margin:2]
    bird = (inside > 0) & (inside != OCCLUDER_LABEL)
    soft = np.asarray(_bytes_image(bird * 255.0).filter(ImageFilter.BoxBlur(3)), dtype=np.float32) / 255
    padded = np.pad(soft, ((2, 2), (0, 0)), mode="edge")
    return (padded[4:] - padded[:-4]) * bird


def _light(rng: np.random.Generator, relief: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """A factor for every pixel and channel (shading, shadow gradient, brightness, colour cast), and a contrast."""
    angle, fall = rng.uniform(0, 2 * math.pi), rng.uniform(0, 0.28)
    ramp = np.linspace(-1, 1, 8)
    slope = fall * (math.cos(angle) * ramp[None, :] + math.sin(angle) * ramp[:, None])
    uneven = slope + 0.06 * rng.standard_normal((8, 8))
    shade = np.ones((size, size), dtype=np.float32)
    for grid in (uneven, 0.5 * relief):
        shade += np.asarray(Image.fromarray(grid.astype(np.float32)).resize((size, size), Image.Resampling.BILINEAR))
    gain = rng.uniform(0.82, 1.1) * rng.uniform(0.92, 1.08, size=3)
    return shade[..., None] * gain.astype(np.float32), float(rng.uniform(0.82, 1.12))


def _jittered_palette(rng: np.random.Generator) -> Colours:
    table = np.clip(np.array(list(PALETTE.values())) + rng.normal(0, 7, size=(len(PALETTE), 3)), 0, 255).astype(int)
    return {name: (int(r), int(g), int(b)) for name, (r, g, b) in zip(PALETTE, table, strict=True)}


def draw(species: Species, seed: int, size: int = 84) -> Drawing:
    """Draw a species in the scene of `seed`; neither the species nor the size changes that scene."""
    _check("size", size, 32)
    rngs = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(5)]
    pose = _sample_pose(rngs[0])
    bird = _place(_bird(species, pose, _jittered_palette(rngs[1])), pose)
    occluders = _occluders(rngs[2], bird)
    perch = _perch(rngs[3], bird, pose)
    alone, covered = _labels(bird, occluders)
    centres, visible, box = _measure(alone, covered)

    oversampling = 3 if size <= 128 else 2
    canvas = _backdrop(rngs[3]).resize((size * oversampling,) * 2, Image.Resampling.BILINEAR)
    _paint(canvas, [*perch, *bird, *occluders])
    factor, contrast = _light(rngs[4], _relief(covered), size)
    pixels = np.asarray(canvas.reduce(oversampling)) * (contrast * factor) + (128 * (1 - contrast) + 0.5)
    image = np.clip(pixels, 0, 255).astype(np.uint8)
    return Drawing(image, (centres * size - 0.5).astype(np.float32), visible, (box * size - 0.5).astype(np.float32))


def _scene_seed(seed: int, name: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()[:8], "big")


def _draw_species(species: Species, per_species: int, seed: int, size: int) -> list[Drawing]:
    return [draw(species, _scene_seed(seed, species.name, index), size) for index in range(per_species)]


def draw_many(
    species: Sequence[Species],
    per_species: int,
    seed: int = 0,
    size: int = 84,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw images, labels, parts, visible and boxes, species by species; `progress` hears the pictures done so far."""
    checks = {
        "len(species)": (len(species), 1),
        "per_species": (per_species, 1),
        "size": (size, 32),
        "workers": (workers, 1),
    }
    for name, (value, least) in checks.items():
        _check(name, value, least)
    total = len(species) * per_species
    images = np.empty((total, size, size, 3), dtype=np.uint8)
    labels = np.repeat(np.arange(len(species), dtype=np.int64), per_species)
    parts = np.empty((total, len(PART_NAMES), 2), dtype=np.float32)
    visible = np.empty((total, len(PART_NAMES)), dtype=bool)
    boxes = np.empty((total, 4), dtype=np.float32)
    one = functools.partial(_draw_species, per_species=per_species, seed=seed, size=size)
    with contextlib.ExitStack() as stack:
        batches: Iterable[list[Drawing]] = map(one, species)
        if workers > 1:
            spawn = multiprocessing.get_context("spawn")
            batches = stack.enter_context(ProcessPoolExecutor(workers, mp_context=spawn)).map(one, species)
        for at, drawing in enumerate(itertools.chain.from_iterable(batches)):
            images[at], parts[at], visible[at], boxes[at] = drawing.image, drawing.parts, drawing.visible, drawing.box
            if progress is not None and (at + 1) % per_species == 0:
                progress(at + 1)
    return images, labels, parts, visible, boxes


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
