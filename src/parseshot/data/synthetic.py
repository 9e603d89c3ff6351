"""A drawn field guide: fine-grained made-up birds whose part positions are known exactly.

A species is a combination of looks; `drawing` turns it into polygons and `scenery` adds what surrounds it.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from parseshot.data import drawing, scenery
from parseshot.data.drawing import BUILDS, LABELS, PART_NAMES, SHAPES, Coat, Patch, Rgb

__all__ = ["PART_NAMES", "Drawing", "Species", "Trait", "draw", "draw_many", "make_species", "vocabulary"]

FAMILY_SIZE = 5
MOST_SPECIES = 20_000  # of 1.7 million combinations, so that an unused one is always quickly found
LOOKS = 7  # of each part, at most
VOCABULARY_SEED = 12  # of 0..30, the one whose two most similar looks differ most at 84 pixels
PALETTE: dict[str, Rgb] = {
    "black": (34, 31, 36), "white": (244, 242, 236), "slate": (92, 106, 128), "silver": (176, 182, 186),
    "rust": (192, 86, 36), "chestnut": (110, 54, 38), "buff": (214, 174, 120), "cream": (248, 230, 178),
    "olive": (116, 120, 46), "green": (56, 142, 72), "yellow": (246, 206, 46), "orange": (240, 138, 36),
    "scarlet": (208, 36, 42), "blue": (44, 94, 194), "teal": (36, 152, 158), "violet": (112, 66, 152),
}  # fmt: skip
LEAST_COLOUR_DISTANCE = 75.0  # in RGB, between any two looks of a part
CLEAR_COLOUR_DISTANCE = 110.0  # between looks of one shape: shows in a few pixels under the lighting jitter
BODY_COLOURS = ("slate", "chestnut", "olive", "cream")
PLUMAGE = tuple(colour for colour in PALETTE if colour not in BODY_COLOURS)  # a part must not melt into the body
BARE_COLOURS = ("black", "yellow", "scarlet", "slate", "buff", "teal")
PART_CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # patterns and colours
    "beak": (("plain", "half"), BARE_COLOURS),
    "crown": (("plain",), PLUMAGE),
    "breast": (("plain", "barred", "spotted", "streaked", "half", "edged"), PLUMAGE),
    "wing": (("plain", "barred", "spotted", "streaked", "half", "edged", "double-barred"), PLUMAGE),
    "tail": (("plain", "barred", "half", "edged"), PLUMAGE),
    "legs": (("plain",), BARE_COLOURS),
}
REACH = 0.5  # the label grid extends this far past every picture edge, so that cut-off parts keep their centre
LABEL_GRID = 192  # label pixels across (1 + 2 * REACH) pictures
LABEL_SCALE = LABEL_GRID / (1 + 2 * REACH)  # label pixels across one picture


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

    @property
    def looks(self) -> tuple[Any, ...]:
        """All that is drawn of it: two species with the same looks are the same bird, whatever their names."""
        return self.build, self.body, *(self.trait(part) for part in PART_NAMES)

    def traits(self, part: str) -> tuple[int, str, str, str]:
        """Shape, colour, pattern colour and pattern of a part, to compare species part by part."""
        trait = self.trait(part)
        return trait.shape, trait.colour, trait.second, trait.pattern

    def coats(self, colours: Mapping[str, Rgb]) -> dict[str, Coat]:
        """Every part as it is painted, with its colour names looked up in `colours`."""
        traits = ((part, self.trait(part)) for part in PART_NAMES)
        return {part: Coat(t.shape, t.pattern, colours[t.colour], colours[t.second]) for part, t in traits}


@dataclass(frozen=True)
class Drawing:
    """A picture with its part positions (x, y); the centre of the top left pixel is (0, 0)."""

    image: np.ndarray  # [size, size, 3], uint8
    parts: np.ndarray  # [parts, 2]
    visible: np.ndarray  # [parts], inside the picture and uncovered
    box: np.ndarray  # left, top, right, bottom of the bird in the picture


def _colour_distance(a: str, b: str) -> float:
    return math.dist(PALETTE[a], PALETTE[b])


def _pick(rng: np.random.Generator, options: Sequence[str], far_from: Sequence[str] = ()) -> str:
    clear = [o for o in options if all(_colour_distance(o, other) >= CLEAR_COLOUR_DISTANCE for other in far_from)]
    return str(rng.choice(clear or [o for o in options if o not in far_from]))


@functools.cache
def vocabulary(part: str) -> tuple[Trait, ...]:
    """The few looks a part can have, the same in every guide and clearly different from each other.

    The paper's premise is that traits recur among species and their combination tells: no single part may give a
    species away.
    """
    patterns, colours = PART_CHOICES[part]
    rng = np.random.default_rng(np.random.SeedSequence([VOCABULARY_SEED, PART_NAMES.index(part)]))
    shapes = (int(rng.integers(SHAPES[part])) + np.arange(min(LOOKS, len(colours)))) % SHAPES[part]
    first_pattern = int(rng.integers(len(patterns)))
    looks: list[Trait] = []
    for number, (shape, colour) in enumerate(zip(shapes.tolist(), _clear_colours(rng, colours, shapes), strict=True)):
        pattern = patterns[(first_pattern + number) % len(patterns)]
        fresh = [c for c in PALETTE if all(c != look.second for look in looks)]
        second = colour if pattern == "plain" else _pick(rng, fresh, (colour,))
        looks.append(Trait(shape, colour, second, pattern))
    return tuple(looks)


def _clear_colours(rng: np.random.Generator, colours: Sequence[str], shapes: np.ndarray) -> list[str]:
    """A random colour for each shape: all apart, and those of one shape, which only colour tells, further apart."""
    least = np.where(shapes[:, None] == shapes, CLEAR_COLOUR_DISTANCE, LEAST_COLOUR_DISTANCE)  # [looks, looks]
    np.fill_diagonal(least, 0)
    while True:
        chosen = [str(colour) for colour in rng.permutation(np.array(colours))[: len(shapes)]]
        if all(_colour_distance(a, b) >= least[i, j] for i, a in enumerate(chosen) for j, b in enumerate(chosen)):
            return chosen


def _look(rng: np.random.Generator, part: str, other_than: Trait | None = None) -> Trait:
    looks = [look for look in vocabulary(part) if look != other_than]
    return looks[int(rng.integers(len(looks)))]


def _family(seed: int, family: int, seen: set[Species]) -> list[Species]:
    """A founder, then changes of one or two parts of an earlier member; avoids what is in `seen` and adds to it."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, family]))
    body, build = _pick(rng, BODY_COLOURS), str(rng.choice(tuple(BUILDS)))
    members: list[Species] = []
    while len(members) < FAMILY_SIZE:
        if members:
            parent = members[int(rng.integers(len(members)))]
            parts = [str(p) for p in rng.choice(PART_NAMES, size=int(rng.integers(1, 3)), replace=False)]
            changes: dict[str, Any] = {part: _look(rng, part, other_than=parent.trait(part)) for part in parts}
            member = replace(parent, **changes)
        else:
            member = Species("", 0, build, body, **{part: _look(rng, part) for part in PART_NAMES})
        if member not in seen:
            seen.add(member)
            members.append(member)
    return members


def make_species(count: int, seed: int = 0) -> list[Species]:
    """Make up to 20,000 distinct species in families of five neighbours; a larger count only appends."""
    _check("count", count, 1, MOST_SPECIES)
    _check("seed", seed, 0)
    seen: set[Species] = set()
    families = (_family(seed, family, seen) for family in range(math.ceil(count / FAMILY_SIZE)))
    species = itertools.islice(itertools.chain.from_iterable(families), count)
    return [replace(s, name=_name(s, index), family=index // FAMILY_SIZE) for index, s in enumerate(species)]


def _name(species: Species, index: int) -> str:
    pattern = next((t.pattern for t in (species.breast, species.wing) if t.pattern != "plain"), species.body)
    return f"{species.crown.colour}-crowned {pattern} {species.build} {index:03d}"


def _labels(bird: Sequence[Patch], occluders: Sequence[Patch]) -> tuple[np.ndarray, np.ndarray]:
    """Label grids of the bird alone and with what covers it."""
    image = Image.new("L", (LABEL_GRID, LABEL_GRID))
    pen = ImageDraw.Draw(image)
    grids = []
    for patches in (bird, occluders):
        for patch in patches:
            pen.polygon(drawing.flat(patch.points + REACH, LABEL_SCALE), fill=patch.label)
        grids.append(np.array(image))
    return grids[0], grids[1]


def _measure(alone: np.ndarray, covered: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Part centres and box in picture units, and which centres are inside the picture and uncovered."""
    rows, columns = np.nonzero(alone)
    labels, last = alone[rows, columns], len(PART_NAMES)
    sums = [np.bincount(labels, weights=w, minlength=last + 1)[1 : last + 1] for w in (columns, rows, None)]
    cells = np.stack(sums[:2], axis=1) / sums[2][:, None]  # [parts, 2]
    centres = (cells + 0.5) / LABEL_SCALE - REACH
    nearest = np.clip(np.rint(cells).astype(int), 0, LABEL_GRID - 1)
    uncovered = covered[nearest[:, 1], nearest[:, 0]] != LABELS["occluder"]
    visible = ((centres > 0) & (centres < 1)).all(axis=1) & uncovered
    edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / LABEL_SCALE - REACH
    return centres, visible, np.clip(edges, 0, 1)


def _silhouette(covered: np.ndarray) -> np.ndarray:
    """Where the bird shows in the picture, on every other cell of the label grid."""
    margin = round(LABEL_SCALE * REACH)
    inside = covered[margin:-margin:2, margin:-margin:2]
    return (inside > 0) & (inside != LABELS["occluder"])


def _jittered_palette(rng: np.random.Generator) -> dict[str, Rgb]:
    table = np.clip(np.array(list(PALETTE.values())) + rng.normal(0, 7, size=(len(PALETTE), 3)), 0, 255).astype(int)
    return {name: (int(r), int(g), int(b)) for name, (r, g, b) in zip(PALETTE, table, strict=True)}


def draw(species: Species, seed: int, size: int = 84) -> Drawing:
    """Draw a species in the scene of `seed`; neither the species nor the size changes that scene."""
    _check("seed", seed, 0)
    _check("size", size, 32)
    rngs = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(5)]
    pose, colours = drawing.sample_pose(rngs[0]), _jittered_palette(rngs[1])
    bird = drawing.place(drawing.bird(species.build, colours[species.body], species.coats(colours), pose), pose)
    occluders = scenery.occluders(rngs[2], bird)
    perch = scenery.perch(rngs[3], bird, pose)
    alone, covered = _labels(bird, occluders)
    centres, visible, box = _measure(alone, covered)

    oversampling = 3 if size <= 128 else 2
    backdrop = scenery.backdrop(rngs[3], tuple(PALETTE.values()))
    canvas = backdrop.resize((size * oversampling,) * 2, Image.Resampling.BILINEAR)
    drawing.paint(canvas, [*perch, *bird, *occluders])
    factor, contrast = scenery.light(rngs[4], _silhouette(covered), size)
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
        "seed": (seed, 0),
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
        for at, drawn in enumerate(itertools.chain.from_iterable(batches)):
            images[at], parts[at], visible[at], boxes[at] = drawn.image, drawn.parts, drawn.visible, drawn.box
            if progress is not None and (at + 1) % per_species == 0:
                progress(at + 1)
    return images, labels, parts, visible, boxes


def _check(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value}; it must be {allowed}")
