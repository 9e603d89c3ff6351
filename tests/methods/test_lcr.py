"""LCR against loops, with attributes, with parts and with neither."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import reference
from parseshot.errors import UsageError
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.lcr import LCR, Compositional

LABELS = torch.tensor([0, 1, 2, 1])


def built(**options: object) -> LCR:
    torch.manual_seed(0)
    method = build_method("lcr", 6, 3, options).double()
    assert isinstance(method, LCR)
    with torch.no_grad():
        method.embed.weight += torch.randn(6, 6) / 10
    return method


def companion(method: LCR, parts: torch.Tensor | None = None) -> Compositional:
    found = method.companion(BasePhotos(LABELS, parts)).double()
    assert isinstance(found, Compositional)
    return found


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 1, 0, 2, 1]])
def test_logits_are_those_of_gradient_steps(labels: list[int]) -> None:
    method = built(steps=9, rate=1.3).eval()
    features = torch.randn(len(labels) + 3, 6, 3, 3, dtype=torch.float64)
    method.initialise(features)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(3)), codes.take(slice(3, None)), torch.tensor(labels))
    pooled = features.numpy().mean((2, 3))
    pooled = (pooled - pooled.mean(0)) / np.sqrt(((pooled - pooled.mean(0)) ** 2).mean())
    flat = pooled @ method.embed.weight.detach().numpy().T
    np.testing.assert_allclose(
        found.detach().numpy(), reference.lcr_logits(flat[:3], flat[3:], labels, 9, 1.3), atol=1e-9
    )


@pytest.mark.parametrize("hard", [False, True])
def test_parts_draw_the_cells_in_which_they_lie(hard: bool) -> None:
    method = built(hard=hard).train()
    parts = torch.rand(4, 3, 3, dtype=torch.float64)
    parts[0, 1, 2] = parts[3, :, 2] = 0  # not visible; no part of the last photo is
    parts[1, 0, 0], parts[1, 2, 1], parts[2, 0, 0] = 1.0, -0.1, 1.2  # on the edge, outside, outside
    training = companion(method, parts)
    codes = method.encode(torch.randn(4, 6, 3, 3, dtype=torch.float64))
    terms = training(codes, torch.arange(4))
    given = (each.detach().numpy() for each in (codes["f"], codes["cells"], parts, training.vectors))
    apart, overlap = reference.lcr_terms(*given, hard)
    assert float(terms["compositional"].detach()) == pytest.approx(apart, abs=1e-12)
    assert float(terms["orthogonal"].detach()) == pytest.approx(overlap, abs=1e-12)


@pytest.mark.parametrize("hard", [False, True])
def test_a_file_of_attributes_draws_whole_photos(tmp_path: Path, hard: bool) -> None:
    (tmp_path / "attributes.txt").write_text("90.5 0 60\n0 70 10\n100 100 0\n")
    method = built(hard=hard, attributes=str(tmp_path / "attributes.txt")).train()
    training = companion(method, torch.rand(4, 5, 3))  # the file goes before the parts
    assert training.present is not None
    assert training.present.tolist() == [[True, False, True], [False, True, False], [True, True, False]]
    with torch.no_grad():
        training.vectors.copy_(torch.eye(3, 6))
    f = torch.zeros(4, 6, dtype=torch.float64)
    f[0, [0, 2]] = f[1, 1] = f[2, 0] = f[3, 3] = 1.0
    codes = method.encode(torch.randn(4, 6, 3, 3, dtype=torch.float64))
    terms = training({**codes, "f": f}, torch.arange(4))
    half = 2**-0.5  # each photo's cosines: to its sum, or to each attribute
    expected = (0 + 0 + (1 - half) + 1) / 4 if hard else (2 * (1 - half) + 0 + 0 + 1 + 1) / 6
    assert float(terms["compositional"].detach()) == pytest.approx(expected)
    assert float(terms["orthogonal"].detach()) == 0


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two").write_text("1 0\n0 1\n")
    with pytest.raises(UsageError, match="has 2 rows, the pack 3 base classes"):
        companion(built(attributes=str(tmp_path / "two")))
    with pytest.raises(UsageError, match="cannot be read"):
        companion(built(attributes=str(tmp_path / "none")))


def test_without_annotations_it_is_a_classifier_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    method = built().train()
    with caplog.at_level(logging.WARNING):
        training = companion(method)
    assert "neither attributes nor annotated parts" in caplog.text
    codes = method.encode(torch.randn(4, 6, 3, 3, dtype=torch.float64))
    assert set(training(codes, torch.arange(4))) == {"base_ce"}


def test_vectors_become_orthogonal_and_cells_theirs() -> None:
    method = built().train()
    random = torch.Generator().manual_seed(1)
    parts = torch.rand(4, 3, 3, generator=random, dtype=torch.float64)
    training = companion(method, parts)
    features = torch.randn(4, 6, 3, 3, generator=random, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([features, training.vectors], lr=0.05)
    for _ in range(60):
        terms = training(method.encode(features), torch.arange(4))
        optimiser.zero_grad()
        (terms["compositional"] + terms["orthogonal"]).backward()
        optimiser.step()
    assert terms["orthogonal"] < 0.02
    assert terms["compositional"] < 0.5
