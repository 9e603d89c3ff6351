"""Raw pictures → a packed directory. The drawn field guide is the only source so far."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from parseshot.data.packed import Pack, write_pack
from parseshot.data.synthetic import PART_NAMES, draw_many, make_species


def prepare_synthetic(
    out: Path | str,
    *,
    size: int = 84,
    base: int = 200,
    val: int = 50,
    novel: int = 50,
    per_species: int = 30,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Pack:
    """Draw a field guide of base, val and novel species (whole families each, as families hold five) and pack it."""
    species = make_species(base + val + novel, seed=seed)
    total = len(species) * per_species
    images, labels, parts, visible, boxes = draw_many(
        species,
        per_species,
        seed=seed,
        size=size,
        workers=workers,
        progress=(lambda done: progress(done, total)) if progress else None,
    )
    return write_pack(
        out,
        name="synthetic",
        arrays={
            "images": images,
            "labels": labels,
            "parts": np.concatenate((parts, visible[..., None].astype(np.float32)), -1),
            "boxes": boxes,
        },
        classes=[one.name for one in species],
        splits=["base"] * base + ["val"] * val + ["novel"] * novel,
        part_names=PART_NAMES,
        provenance={
            "source": "drawn",
            "species": len(species),
            "seed": seed,
            "per_species": per_species,
            "split": "by family",
        },
    )
