"""Are the parts parts? A model's parts and four floors under all protocols, on one side of a split."""

import functools
from collections.abc import Sequence

import numpy as np

from parseshot.data.packed import Pack
from parseshot.engine.model import TOGETHER, Model
from parseshot.methods.dop import DOP
from parseshot.part_quality import clustering, consistency, purity
from parseshot.part_quality.annotations import Truth, read_truth, seen_before, sides
from parseshot.part_quality.floors import floors
from parseshot.part_quality.places import inside
from parseshot.part_quality.scores import PartQuality, score_units
from parseshot.part_quality.units import ACTIVE, Parsed, Progress, Spread, Units, parse_images, part_units

STABILITY_IMAGES = 200  # they go through the backbone twice, with and without noise


def part_quality(
    model: Model,
    pack: Pack,
    *,
    split: str = "novel",
    stability_images: int = STABILITY_IMAGES,
    noise: float = consistency.NOISE,
    seed: int = 0,
    batch: int = TOGETHER,
    progress: Progress | None = None,
) -> PartQuality:
    """Score the model's parts and the floors on a pack with annotated positions.

    split: novel, val or official, see `annotations`. stability_images: how many of the scored images, drawn by `seed`,
    are looked at again with noise; 0 leaves stability out.
    """
    numbers = sides(pack, split)
    truth = read_truth(pack, numbers[0]), read_truth(pack, numbers[1])
    parsed = [parse_images(model, pack, side, batch=batch, progress=progress) for side in numbers]
    spread = Spread.of(parsed[0].score)
    fit, scored = (
        all_units(model, pack, side, found, spread, seed=seed) for side, found in zip(numbers, parsed, strict=True)
    )
    chosen = _choose(numbers[1], stability_images, seed)
    stable: Sequence[float | None] = [None] * len(fit)
    if len(chosen):
        stable = _stability(model, pack, chosen, spread, noise=noise, seed=seed, batch=batch, progress=progress)
    box = truth[1].extent / pack.size
    return PartQuality(
        model=model.fingerprint(),
        data=pack.record(),
        split=split,
        fitted_on=len(numbers[0]),
        scored_on=len(numbers[1]),
        seen_before=seen_before(model, pack, numbers[1]),
        stability_images=len(chosen),
        seed=seed,
        box_share=float(box.prod(-1).mean()),
        settings={
            "active_below_entropy": ACTIVE,
            "background_quantile": clustering.BACKGROUND,
            "purity_half": purity.HALF,
            "consistency_half": consistency.HALF,
            "consistent_from": consistency.OFTEN,
            "noise": noise,
            "noise_limit": consistency.LIMIT,
        },
        landmarks={name: int(n) for name, n in zip(pack.part_names, truth[1].visible.sum(0), strict=True)},
        scores=[
            score_units(a, b, truth, pack.part_names, pack.size, stability=value)
            for a, b, value in zip(fit, scored, stable, strict=True)
        ],
    )


def all_units(
    model: Model, pack: Pack, numbers: np.ndarray, parsed: Parsed, spread: Spread, *, seed: int
) -> list[Units]:
    """The parts of parsed images, then the floors at the same numbers of locations."""
    assert isinstance(model.method, DOP)
    parts = part_units(parsed, spread, model.method.config.scales, pack.size)
    boxes = None if pack.boxes is None else np.asarray(pack.boxes[numbers], dtype=float)
    locations = sorted({units.locations for units in parts})
    return parts + floors(parsed.energy, boxes, pack.size, locations=locations, seed=seed)


def _choose(numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).choice(numbers, min(count, len(numbers)), replace=False)
    return np.sort(drawn)


def _stability(
    model: Model,
    pack: Pack,
    numbers: np.ndarray,
    spread: Spread,
    *,
    noise: float,
    seed: int,
    batch: int,
    progress: Progress | None,
) -> list[float]:
    """Stability of each set of units in per cent, of images that both go through the backbone now.

    Fixed places are stable by definition, and random ones are drawn anew where there is noise.
    """
    truth: Truth = read_truth(pack, numbers)
    found = []
    for level, drawn in ((0.0, seed), (noise, seed + 1 if noise else seed)):
        parsed = parse_images(
            model,
            pack,
            numbers,
            change=functools.partial(consistency.add_noise, noise=level, seed=seed),
            batch=batch,
            progress=progress,
        )
        units = all_units(model, pack, numbers, parsed, spread, seed=drawn)
        half = consistency.HALF * pack.size
        found.append([inside(one.peak, truth.landmarks, truth.visible, half) for one in units])
    return [100 * consistency.stability(before, after) for before, after in zip(*found, strict=True)]
