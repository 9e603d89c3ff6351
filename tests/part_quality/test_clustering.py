"""P-B: NMI and ARI are scikit-learn's; the part at a landmark is that of the enlarged maps."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from parseshot.part_quality.clustering import (
    adjusted_rand_index,
    nearest,
    normalised_mutual_information,
    part_at,
    with_background,
)

PAIRS = {
    "random": (np.random.default_rng(0).integers(0, 15, 500), np.random.default_rng(1).integers(0, 5, 500)),
    "related": (np.arange(600) % 15, (np.arange(600) % 15) // 4),
    "renamed": (np.arange(60) % 6, 10 * ((np.arange(60) + 2) % 6)),
    "one cluster": (np.arange(60) % 6, np.zeros(60, dtype=int)),
    "one and one": (np.zeros(9, dtype=int), np.ones(9, dtype=int)),
    "all alone": (np.arange(7), np.arange(7)[::-1].copy()),
    "worse than chance": (np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_they_are_those_of_sklearn(name: str) -> None:
    truth, found = PAIRS[name]
    expected = normalized_mutual_info_score(truth, found), adjusted_rand_score(truth, found)
    assert normalised_mutual_information(truth, found) == pytest.approx(expected[0], abs=1e-12)
    assert adjusted_rand_index(truth, found) == pytest.approx(expected[1], abs=1e-12)


def test_the_part_at_a_landmark_is_that_of_the_enlarged_maps() -> None:
    random = np.random.default_rng(0)
    maps, size = random.normal(size=(5, 4, 7, 7)), 56
    landmarks = random.uniform(-0.49, size - 0.51, (5, 9, 2))
    large = F.interpolate(torch.from_numpy(maps), (size, size), mode="bilinear", align_corners=False).numpy()
    column, row = np.rint(landmarks).astype(int).transpose(2, 0, 1)
    expected = large[np.arange(5)[:, None], :, row, column].argmax(-1)  # [n, P]
    assert (part_at(maps, landmarks, size) == expected).all()
    assert len(np.unique(expected)) == 4


def test_a_landmark_outside_of_the_picture_is_read_at_its_edge() -> None:
    maps = np.zeros((1, 2, 4, 4))
    maps[0, 1, -1] = 1.0  # part 1 is the lowest row
    assert part_at(maps, np.array([[[10.0, 40.0], [10.0, -9.0]]]), 32).tolist() == [[1, 0]]


def test_scores_are_standardised_for_each_part_and_half_of_the_cells_are_background() -> None:
    random = np.random.default_rng(0)
    fit = random.normal(size=(40, 3, 6, 6)) * np.array([1, 50, 0.01])[:, None, None] + 7
    planes = with_background(fit, fit)
    assert planes.shape == (40, 4, 6, 6)
    assert planes[:, :3].mean((0, 2, 3)) == pytest.approx([0, 0, 0], abs=1e-9)
    assert planes[:, :3].std((0, 2, 3)) == pytest.approx([1, 1, 1])
    winners = planes.argmax(1)
    assert (winners == 3).mean() == pytest.approx(0.5, abs=1e-3)
    assert np.bincount(winners.ravel())[:3] / winners.size == pytest.approx([1 / 6] * 3, abs=0.03)
    assert (with_background(fit, fit + 1e6)[:, :3].min(1) > planes[:, 3]).all()  # the level is the fit side's


def test_nearest_place() -> None:
    places = np.array([[[0.0, 0.0], [10.0, 0.0]]])
    assert nearest(places, np.array([[[4.0, 9.0], [6.0, -9.0], [99.0, 0.0]]])).tolist() == [[0, 1, 1]]
