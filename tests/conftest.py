"""Shared by all tests: the number of threads, the reference on the path, drawn birds made once."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from parseshot.data.packed import Pack
from parseshot.data.prepare import prepare_synthetic


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    """One thread a worker when the suite runs in parallel (make test), two otherwise."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """30 drawn species (15 base, 5 val, 10 novel), 14 pictures each."""
    out = tmp_path_factory.mktemp("data") / "birds"
    return prepare_synthetic(out, base=15, val=5, novel=10, per_species=14, seed=3)
