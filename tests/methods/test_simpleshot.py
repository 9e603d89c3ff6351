"""SimpleShot against its formula; its mean of the base features and its training."""

from pathlib import Path

import numpy as np
import pytest
import torch

import reference
from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.run import start_run
from parseshot.engine.training import TrainingConfig
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.simpleshot import WINDOW, SimpleShot

LABELS = np.array([0, 1, 1, 0, 1, 2])


def features(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 3, 4, 4))) + 2.0


def simpleshot(*, pooled: bool = True) -> SimpleShot:
    method = build_method("simpleshot", 3, 4, {"pooled": pooled}).double()
    assert isinstance(method, SimpleShot)
    method.initialise(features(9, seed=1))
    return method


@pytest.mark.parametrize("pooled", [True, False])
def test_logits_are_minus_squared_distances_of_centred_unit_features(pooled: bool) -> None:
    method, maps = simpleshot(pooled=pooled), features(10)
    codes = method.encode(maps)
    found = method.logits(codes.take(slice(6, 10)), codes.take(slice(6)), torch.from_numpy(LABELS))
    flat, base = (
        each.mean((2, 3)).numpy() if pooled else each.flatten(1).numpy() for each in (maps, features(9, seed=1))
    )
    np.testing.assert_allclose(found, reference.simpleshot(flat[6:], flat[:6], LABELS, base.mean(0)), atol=1e-12)


def test_only_directions_from_the_base_mean_count() -> None:
    """Stretching a photo's features away from the mean changes no score."""
    method, maps = simpleshot(), features(10)
    centre = method.mean[:, None, None]
    stretched = centre + torch.linspace(0.5, 3, 10, dtype=torch.float64)[:, None, None, None] * (maps - centre)
    one, two = (
        method.logits(codes.take(slice(6, 10)), codes.take(slice(6)), torch.from_numpy(LABELS))
        for codes in (method.encode(maps), method.encode(stretched))
    )
    torch.testing.assert_close(one, two)


def test_the_mean_is_of_all_steps_at_first_and_of_the_last_ones_later() -> None:
    method = build_method("simpleshot", 3, 4).double()
    companion = method.companion(BasePhotos(torch.tensor([0, 1, 2]), None)).double()
    steps = [features(3, seed=seed) + seed for seed in range(5)]
    for step in steps:
        companion(method.encode(step), torch.arange(3))
    torch.testing.assert_close(method.mean, torch.cat(steps).mean((0, 2, 3)))
    for _ in range(10 * WINDOW):
        companion(method.encode(steps[0]), torch.arange(3))
    torch.testing.assert_close(method.mean, steps[0].mean((0, 2, 3)), atol=1e-3, rtol=0)


def test_the_companion_is_a_linear_classifier_of_the_base_classes() -> None:
    method = simpleshot()
    companion = method.companion(BasePhotos(torch.tensor([2, 0, -1, 1]), None)).double()
    codes = method.encode(features(2))
    (term,) = companion(codes, torch.tensor([3, 0])).values()
    scores = companion.linear(codes["f"])
    torch.testing.assert_close(term, torch.nn.functional.cross_entropy(scores, torch.tensor([1, 2])))
    assert scores.shape == (2, 3)


def test_the_mean_is_saved_and_a_broken_run_goes_on_with_it(birds: Pack, tmp_path: Path) -> None:
    config = ModelConfig(method="simpleshot", backbone_options={"channels": 8})
    short = TrainingConfig(episodes=4, way=4, shots=2, queries=2, validate_every=2, validation_episodes=5)
    start_run(config, birds, short, tmp_path / "whole")
    start_run(config, birds, short.model_copy(update={"episodes": 2}), tmp_path / "run")
    start_run(config, birds, short, tmp_path / "run", resume=True)
    whole, again = (Model.from_pretrained(tmp_path / name / "last").state_dict() for name in ("whole", "run"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert whole["method.steps"] == 5  # the first look and four steps
    assert whole["method.mean"].abs().min() > 0
