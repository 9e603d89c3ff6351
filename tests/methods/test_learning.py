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
from parseshot.engine.training import TrainingConfig, draw, initialise
from parseshot.methods import METHODS, takes_pairs

MARGIN = 0.08  # of accuracy, 5-way 5-shot on 20 unseen species; the standard error of a figure is about 0.006
MARGINS = {  # those that learn by the base classes' labels alone, or a few hundred weights, need more than 50 steps
    "baseline++": 0.03,
    "simpleshot": 0.03,
    "mtl": 0.02,
    "vfd": 0.01,
}
OPTIONS: dict[str, dict] = {}
UNTRAINED = {"dop-paper": "trained in docs/results.md only: at the paper's learning rate a few episodes do nothing"}
BUDGET = TrainingConfig(
    episodes=50, way=8, shots=3, queries=3, lr=2e-3, decay_every=35, validate_every=50, validation_episodes=2
)


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """60 drawn species, 20 of them unseen."""
    out = tmp_path_factory.mktemp("data") / "guide"
    return prepare_synthetic(out, base=35, val=5, novel=20, per_species=14, seed=5)


def accuracy(model: Model, pack: Pack) -> float:
    asked = Protocol(split="novel", shots=(5,), queries=9, episodes=100)
    return evaluate(model.eval(), pack, asked).outcomes[0].interval.mean


@pytest.mark.parametrize("name", [name for name in METHODS if name not in UNTRAINED])
def test_it_learns(name: str, guide: Pack, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"channels": 16} | ({"paired": True} if takes_pairs(name) else {})
    model = Model(ModelConfig(backbone_options=options, method=name, method_options=OPTIONS.get(name, {})))
    initialise(model, guide, draw(guide.by_class("base"), BUDGET, 0))
    before = accuracy(model, guide)
    train(model, guide, BUDGET, tmp_path / "run")
    after = accuracy(model, guide)
    print(f"{name}: {100 * before:.1f} → {100 * after:.1f}")
    assert after > before + MARGINS.get(name, MARGIN)
