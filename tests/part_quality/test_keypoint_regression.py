"""P-A: a perfect detector scores 0, the order of parts is free, a constant is the mean-landmark floor."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.preprocessing import StandardScaler

from parseshot.errors import DataError
from parseshot.part_quality.regression import regression_error


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


def test_masking_inactive_parts_equals_scalers_and_a_regression_without_intercept() -> None:
    """As PDiscoNet does it: the scalers see all locations, the regression those of active parts, 0 for the others."""
    (fit, seen_fit), (score, seen_score) = landmarks(200, 0), landmarks(100, 1)
    random = np.random.default_rng(2)
    places = [x[:, :4] + random.normal(0, 0.1, (len(x), 4, 2)) for x in (fit, score)]
    active = [random.uniform(size=(len(x), 4)) < 0.6 for x in (fit, score)]
    total = count = 0.0
    for part in range(6):
        ends = []
        for where, truth, seen, shown in zip(places, (fit, score), (seen_fit, seen_score), active, strict=True):
            keep = seen[:, part]
            ends.append((where[keep].reshape(keep.sum(), -1), truth[keep, part], np.repeat(shown[keep], 2, axis=1)))
        scale_x, scale_y = StandardScaler().fit(ends[0][0]), StandardScaler().fit(ends[0][1])
        x, x_score = (np.where(shown, scale_x.transform(where), 0) for where, _, shown in ends)
        model = LinearRegression(fit_intercept=False).fit(x, scale_y.transform(ends[0][1]))
        predicted = scale_y.inverse_transform(model.predict(x_score))
        total += np.linalg.norm(predicted - ends[1][1], axis=1).sum()
        count += len(predicted)
    sides = (places[0], fit, seen_fit), (places[1], score, seen_score)
    masked = regression_error(*sides, active=(active[0], active[1]))[0]
    assert masked == pytest.approx(total / count, rel=1e-9)
    assert masked > 1.05 * regression_error(*sides)[0]


def test_a_landmark_that_is_never_visible_is_refused() -> None:
    (fit, seen), (score, seen_score) = landmarks(20, 0), landmarks(20, 1)
    seen_score[:, 2] = False
    with pytest.raises(DataError, match="landmark number 2"):
        regression_error((fit, fit, seen), (score, score, seen_score))
