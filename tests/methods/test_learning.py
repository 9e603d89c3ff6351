"""Every method that can be trained learns: after a minute or less on drawn birds it beats its untrained self."""

from pathlib import Path

import pytest
import torch

from parseshot.data.packed import Pack
from parseshot.data.prepare import prepare_synthetic
from parseshot.engine.evaluation import evaluate
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.protocol import Protocol
from parseshot.engine.run import train
from parseshot.engine.training import PretrainingConfig, TrainingConfig, draw, initialise
from parseshot.methods import METHODS, takes_pairs

MARGIN = 0.08  # of accuracy, 5-way 5-shot on 20 unseen species; the standard error of a figure is about 0.006
OPTIONS: dict[str, dict] = {
    "dop-paper": {"eta": 0.01},  # as its recipe: η = 1 as printed drowns the cross-entropy
    "dop-span": {"part_channels": 32},  # two from each of the 16 channels here; 224 are for 1,280
    "dop-whole": {"part_channels": 32},
}
BUDGET = TrainingConfig(
    episodes=50, way=8, shots=3, queries=3, lr=2e-3, decay_every=35, validate_every=50, validation_episodes=2
)

LONGER = BUDGET.model_copy(update={"episodes": 150, "decay_every": 100, "validate_every": 150})
BUDGETS = {  # those that learn by the base classes' labels alone, and the formulas as printed, are slower
    "dop-paper": LONGER,
    "baseline++": LONGER,
    "simpleshot": LONGER,
    "vfd": LONGER,
    "mtl": BUDGET.model_copy(update={"pretraining": PretrainingConfig(steps=100, batch=48, lr=2e-3)}),  # it needs one
}


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """60 drawn species, 20 of them unseen."""
    out = tmp_path_factory.mktemp("data") / "guide"
    return prepare_synthetic(out, base=35, val=5, novel=20, per_species=14, seed=5)


def accuracy(model: Model, pack: Pack) -> float:
    asked = Protocol(split="novel", shots=(5,), queries=9, episodes=100)
    return evaluate(model.eval(), pack, asked).outcomes[0].interval.mean


@pytest.mark.parametrize("name", METHODS)
def test_it_learns(name: str, guide: Pack, tmp_path: Path) -> None:
    torch.manual_seed(0)
    budget = BUDGETS.get(name, BUDGET)
    options = {"channels": 16} | ({"paired": True} if takes_pairs(name) else {})
    model = Model(ModelConfig(backbone_options=options, method=name, method_options=OPTIONS.get(name, {})))
    initialise(model, guide, draw(guide.by_class("base"), budget, 0))
    before = accuracy(model, guide)
    train(model, guide, budget, tmp_path / "run")
    after = accuracy(model, guide)
    print(f"{name}: {100 * before:.1f} → {100 * after:.1f}")
    assert after > before + MARGIN
