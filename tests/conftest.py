"""Shared by all tests: the number of threads, the reference on the path, drawn birds made once."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from parseshot.data.packed import Pack, write_pack
from parseshot.data.synthetic import PART_NAMES, draw_many, make_species


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    """One thread a worker when the suite runs in parallel (make test), two otherwise."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """30 drawn species (15 base, 5 val, 10 novel), 14 pictures each."""
    species = make_species(30, seed=3)
    images, labels, parts, visible, boxes = draw_many(species, 14, seed=3)
    return write_pack(
        tmp_path_factory.mktemp("data") / "birds",
        name="synthetic",
        arrays={
            "images": images,
            "labels": labels,
            "parts": np.concatenate((parts, visible[..., None].astype(np.float32)), -1),
            "boxes": boxes,
        },
        classes=[one.name for one in species],
        splits=["base"] * 15 + ["val"] * 5 + ["novel"] * 10,
        part_names=PART_NAMES,
        provenance={"seed": 3},
    )
