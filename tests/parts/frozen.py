"""Short trainings on a frozen backbone, for terms that need features that stay."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from parseshot.backbones import Conv4
from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.run import start_run
from parseshot.engine.training import TrainingConfig, cached_for
from parseshot.errors import Stopped

CPU = torch.device("cpu")


class Frozen(Conv4):
    """Random features that are never trained."""

    def __init__(self) -> None:
        super().__init__(channels=16, pools=3)
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


def assert_resumes(
    kind: ModelConfig, config: TrainingConfig, birds: Pack, folder: Path, look: Callable[[dict[str, float]], None]
) -> None:
    """A run of eight steps that is stopped after five goes on to the same bits; each step's figures are looked at."""
    pack = cached_for(kind, config, birds, folder / "features", CPU)
    start_run(kind, pack, config, folder / "whole", look)

    def stop_after_five(figures: dict[str, float]) -> None:
        if figures["step"] == 5:
            raise Stopped("enough")

    often = config.model_copy(update={"validate_every": 4})
    with pytest.raises(Stopped):
        start_run(kind, pack, often, folder / "run", stop_after_five)
    start_run(kind, pack, often, folder / "run", resume=True)
    whole, again = (Model.from_pretrained(folder / name / "last").state_dict() for name in ("whole", "run"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def trained_terms(
    kind: ModelConfig, config: TrainingConfig, birds: Pack, folder: Path, term: str
) -> tuple[float, float]:
    """A term, over its weight, at the end of 40 steps with next to none of it, and with a weight of 10."""
    config = config.model_copy(update={"episodes": 40, "validate_every": 40, "blank_cells": 0.0})
    pack = cached_for(kind, config, birds, folder / "features", CPU)
    found = []
    for weight in (1e-6, 10.0):
        told: list[dict[str, float]] = []
        alone = kind.model_copy(update={"method_options": {term: weight}})
        start_run(alone, pack, config, folder / str(weight), told.append)
        found.append(float(np.mean([figures[term] for figures in told[-10:]])) / weight)
    return found[0], found[1]
