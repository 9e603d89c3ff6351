"""Intervals, paired tests, calibration and open-set scores against slow, literal versions and known cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from parseshot.engine.statistics import (
    Interval,
    Reliability,
    auroc,
    by_classes,
    false_positives,
    fit_temperature,
    holm,
    indistinct_groups,
)


def test_interval_is_196_standard_errors() -> None:
    values = np.array([0.2, 0.4, 0.9, 0.5])
    interval = Interval.of(values)
    assert interval.mean == pytest.approx(0.5)
    assert interval.half_width == pytest.approx(1.96 * values.std(ddof=1) / 2)
    assert Interval(0.3, 0.1, 4).excludes_zero()
    assert not Interval(-0.05, 0.1, 4).excludes_zero()


def test_p_value_is_two_sided_and_normal() -> None:
    assert Interval(0.1, 0.1, 100).p_value == pytest.approx(0.05, abs=2e-4)  # the interval just touches 0
    assert Interval(-0.1, 0.1 * 1.96 / 2.576, 100).p_value == pytest.approx(0.01, abs=1e-4)
    assert Interval(0.0, 0.1, 100).p_value == 1
    assert Interval.of(np.zeros(5)).p_value == 1
    assert Interval.of(np.full(5, 0.2)).p_value == 0


def test_p_values_are_uniform_when_nothing_differs() -> None:
    random = np.random.default_rng(0)
    values = [Interval.of(random.normal(0, 0.1, 400)).p_value for _ in range(1_000)]
    for level in (0.05, 0.5):
        assert np.mean(np.array(values) < level) == pytest.approx(level, abs=0.04)


def test_the_interval_by_classes_covers_other_classes() -> None:
    """Classes of very different difficulty: 200 draws of 50 classes, whose intervals must hold the true mean."""
    random, held = np.random.default_rng(0), 0
    for _ in range(200):
        difficulty = random.beta(4, 2, 50)  # mean 2/3
        counts = np.full(50, 300.0)
        low, high = by_classes(random.binomial(300, difficulty).astype(float), counts)
        held += low < 2 / 3 < high
    assert 180 <= held <= 199


def test_classes_that_were_never_asked_do_not_count() -> None:
    right, counts = np.array([5.0, 0.0, 8.0]), np.array([10.0, 0.0, 10.0])
    assert by_classes(right, counts) == by_classes(right[[0, 2]], counts[[0, 2]])


def test_holm_is_never_smaller_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_groups_are_the_longest_runs_that_were_not_told_apart() -> None:
    differ = np.ones((5, 5), dtype=bool)
    for a, b in ((0, 1), (1, 2), (0, 2), (2, 3)):
        differ[a, b] = differ[b, a] = False
    assert indistinct_groups([0, 1, 2, 3, 4], differ) == [[0, 1, 2], [2, 3]]
    assert indistinct_groups([4, 3, 2, 1, 0], differ) == [[3, 2], [2, 1, 0]]
    assert indistinct_groups([0, 1], np.ones((2, 2), dtype=bool)) == []


def test_reliability_against_a_loop() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 10, 5, generator=random) * 2
    targets, counted = torch.arange(5).repeat_interleave(2), torch.rand(7, 10, generator=random) < 0.8
    found = Reliability()
    for part in (slice(0, 3), slice(3, 7)):  # in two goes
        found.add(torch.log_softmax(logits[part], -1), targets, counted[part])
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    loss = []
    for episode in range(7):
        for query in range(10):
            if counted[episode, query]:
                chance = torch.softmax(logits[episode, query].double(), 0)
                best = int(chance.argmax())
                bins[min(14, int(float(chance[best]) * 15))].append((float(chance[best]), best == int(targets[query])))
                loss.append(-math.log(chance[targets[query]]))
    gap = sum(abs(sum(c for c, _ in rows) - sum(right for _, right in rows)) for rows in bins) / len(loss)
    assert found.ece == pytest.approx(gap, abs=1e-6)
    assert found.nll == pytest.approx(np.mean(loss), abs=1e-6)
    assert found.counts.sum() == int(counted.sum())


@pytest.mark.parametrize("planted", [0.3, 1.0, 4.0])
def test_a_planted_temperature_is_found(planted: float) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 5, generator=random, dtype=torch.float64) * 2
    targets = torch.multinomial(torch.softmax(logits, 1), 1, generator=random).squeeze(1)
    assert fit_temperature(planted * logits, targets) == pytest.approx(planted, rel=0.03)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100))
def test_no_other_temperature_is_better(seed: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(200, 4, generator=random, dtype=torch.float64)
    targets = torch.randint(4, (200,), generator=random)
    targets[:100] = logits[:100].argmax(1)
    best = fit_temperature(logits, targets)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / temperature, targets))

    assert loss(best) <= min(loss(best * 1.05), loss(best / 1.05)) + 1e-9


def test_extreme_logits_have_a_finite_temperature() -> None:
    sure = torch.eye(3).repeat(4, 1)
    assert 0 < fit_temperature(sure, torch.arange(3).repeat(4)) < 0.01
    assert fit_temperature(-sure, torch.arange(3).repeat(4)) > 100


def test_auroc_and_false_positives_against_sklearn_and_a_loop() -> None:
    random = torch.Generator().manual_seed(0)
    known = torch.randint(0, 12, (6, 20), generator=random).double()  # ties on purpose
    unknown = torch.randint(-4, 8, (6, 30), generator=random).double()
    areas, false = auroc(known, unknown), false_positives(known, unknown)
    for row in range(6):
        truth, scores = [1] * 20 + [0] * 30, [*known[row].tolist(), *unknown[row].tolist()]
        assert float(areas[row]) == pytest.approx(roc_auc_score(truth, scores))
        accepting = [t for t in known[row].tolist() if sum(k >= t for k in known[row].tolist()) >= 0.95 * 20]
        assert float(false[row]) == pytest.approx(np.mean([u >= max(accepting) for u in unknown[row].tolist()]))
