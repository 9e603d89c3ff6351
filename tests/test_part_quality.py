"""Part quality: a perfect detector scores 0, the order of parts is free, a constant is the mean-landmark floor."""

import numpy as np
import pytest
import torch

from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import ModelError
from parseshot.part_quality import part_quality, regression_error


def landmarks(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.uniform(size=(count, 6, 2)), random.uniform(size=(count, 6)) < 0.8


def test_locations_on_the_landmarks_give_zero() -> None:
    (fit, seen_fit), (score, seen_score) = landmarks(200, 0), landmarks(100, 1)
    error, by_landmark = regression_error((fit, fit, seen_fit), (score, score, seen_score))
    assert error == pytest.approx(0, abs=1e-9)
    assert by_landmark.shape == (6,)


def test_an_affine_map_of_the_landmarks_gives_zero_and_part_order_is_free() -> None:
    (fit, seen_fit), (score, seen_score) = landmarks(200, 0), landmarks(100, 1)
    moved_fit, moved_score = 3 * fit[:, ::-1] - 1, 3 * score[:, ::-1] - 1
    assert regression_error((moved_fit, fit, seen_fit), (moved_score, score, seen_score))[0] == pytest.approx(
        0, abs=1e-9
    )
    random = np.random.default_rng(2)
    noisy_fit, noisy_score = (x + random.normal(0, 0.1, x.shape) for x in (fit, score))
    order = [3, 1, 0, 5, 4, 2]
    straight = regression_error((noisy_fit, fit, seen_fit), (noisy_score, score, seen_score))
    permuted = regression_error((noisy_fit[:, order], fit, seen_fit), (noisy_score[:, order], score, seen_score))
    assert straight[0] == pytest.approx(permuted[0])


def test_a_constant_location_is_the_mean_landmark_floor() -> None:
    (fit, seen_fit), (score, seen_score) = landmarks(300, 0), landmarks(150, 1)
    constant = regression_error((np.zeros((300, 4, 2)), fit, seen_fit), (np.zeros((150, 4, 2)), score, seen_score))[0]
    total = count = 0
    for part in range(6):
        mean = fit[seen_fit[:, part], part].mean(0)
        total += np.linalg.norm(score[seen_score[:, part], part] - mean, axis=1).sum()
        count += seen_score[:, part].sum()
    assert constant == pytest.approx(total / count)


def test_it_prints_the_parts_and_four_floors(birds: Pack) -> None:
    torch.manual_seed(0)
    scores = part_quality(Model(ModelConfig()), birds)
    assert [score.name for score in scores] == [
        "parts, mean of scales",
        "parts, scale 1",
        "parts, scale 3",
        "parts, scale 5",
        "floor: box centre",
        "floor: random cell",
        "floor: energy argmax",
        "floor: 2×2 grid",
    ]
    assert all(0 < score.error < 60 and set(score.by_landmark) == set(birds.part_names) for score in scores)
    assert [score.locations for score in scores] == [4, 4, 4, 4, 1, 4, 1, 4]


def test_true_positions_as_parts_score_far_below_the_floors(birds: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole of `part_quality`: coordinates, boxes and splits are those of the annotations."""
    from parseshot import part_quality as module

    found = module.locate

    def oracle(model, pack, numbers):
        return found(model, pack, numbers) | {"parts, scale 1": np.asarray(pack.parts[numbers], dtype=float)[:, :4, :2]}

    monkeypatch.setattr(module, "locate", oracle)
    torch.manual_seed(0)
    scores = {score.name: score for score in module.part_quality(Model(ModelConfig()), birds)}
    assert all(scores["parts, scale 1"].by_landmark[name] < 1e-3 for name in birds.part_names[:4])
    assert scores["parts, scale 1"].error < 0.5 * scores["floor: box centre"].error


def test_a_method_without_parts_is_refused(birds: Pack) -> None:
    with pytest.raises(ModelError, match="finds no parts"):
        part_quality(Model(ModelConfig(method="protonet")), birds)
