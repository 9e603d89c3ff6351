"""The object as a whole beside its parts: one vector in all parts' channels, regressed on those of a class's photos."""

import numpy as np
import pytest
import torch

import reference
from parseshot.errors import UsageError
from parseshot.methods import build_method
from parseshot.methods.base import BasePhotos
from parseshot.methods.dop import DOP
from parseshot.methods.dop_companions import Representatives

LABELS = torch.tensor([1, 0, 1, 2, 1])  # unbalanced: 1, 3 and 1 photos


def method(**options: object) -> DOP:
    torch.manual_seed(0)
    made = build_method("dop-whole", 6, 5, {"parts": 2, "part_channels": 3, **options}).double()
    assert isinstance(made, DOP)
    return made


def features(images: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(images, 6, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scales", [[1, 3], [3]])
@torch.no_grad()
def test_it_is_what_all_templates_of_the_first_scale_express_on_average(scales: list[int]) -> None:
    made, phi = method(scales=scales), features(2)
    found = made.encode(phi)["whole"]
    assert found.shape == (2, 1, 1, 6)
    shares, templates = made.shares(phi).numpy(), made.templates()[0].numpy()
    everywhere = np.full((5, 5), 1 / 25)
    for image in range(2):
        expressed = []
        for part in range(2):
            own = shares[image, 3 * part : 3 * part + 3]
            one = reference.parse_part(own, templates[part], made.config.lam, 1.0, True, True, 0.0, located=everywhere)
            expressed.append(one[2])
        wanted = np.concatenate(expressed)
        np.testing.assert_allclose(found[image, 0, 0], wanted / np.linalg.norm(wanted), atol=1e-9)


@torch.no_grad()
def test_it_is_a_term_of_the_distance_what_a_ridge_regression_leaves_over() -> None:
    made = method()
    made.log_whole_ridge.fill_(-1.0)
    made.log_whole_rho.fill_(0.2)
    made.log_whole_weight.fill_(-0.5)
    query, support = made.encode(features(2)), made.encode(features(5, 1))
    found = made.distance(query, support, LABELS)
    for q, y in np.ndindex(2, 3):
        photos = [support["whole"][i].numpy() for i in range(5) if LABELS[i] == y]
        left = reference.span_distance(query["whole"][q].numpy(), photos, np.exp(-1.0), np.exp(0.2))
        np.testing.assert_allclose(found.whole[q, y], np.exp(-0.5) * left[0, 0], atol=1e-9)
    torch.testing.assert_close(found.total, found.by_part.sum(2) + found.geometry.sum((2, 3)) + found.whole)
    without = method(whole=0.0).distance(query, support, LABELS)
    torch.testing.assert_close(found.total - without.total, found.whole)
    assert not without.whole.any()


def test_copies_of_photos_change_nothing_and_gradients_reach_every_weight() -> None:
    made, again = method(), [0, 2, 4]
    query, support = made.encode(features(2)), made.encode(features(5, 1))
    twice = made.encode(torch.cat((features(5, 1), features(5, 1)[again])))
    once = made.distance(query, support, LABELS).whole
    torch.testing.assert_close(once, made.distance(query, twice, torch.cat((LABELS, LABELS[again]))).whole)
    (once.square().sum()).backward()
    for name in ("log_whole_ridge", "log_whole_rho", "log_whole_weight", "shares.weight", "templates.maps.0"):
        grad = dict(made.named_parameters())[name].grad
        assert grad is not None
        assert float(grad.abs().max()) > 0


def test_a_base_class_is_told_apart_by_its_whole_too() -> None:
    made = method(representatives=1.0)
    base = BasePhotos(torch.tensor([0, 1, 2, 0]), None)
    companion = Representatives(made, base).double()
    codes, images = made.encode(features(4)), torch.arange(4)
    with torch.no_grad():
        companion.whole.copy_(codes["whole"][:3])
        near = companion(codes, images)["global_ce"]
        companion.whole.copy_(codes["whole"][[1, 2, 0]])
        far = companion(codes, images)["global_ce"]
    assert near < far
    companion(codes, images)["global_ce"].backward()
    assert companion.whole.grad is not None
    assert float(companion.whole.grad.abs().max()) > 0


def test_it_needs_channels_and_a_span() -> None:
    for missing in ({"span": False}, {"part_channels": 0}):
        with pytest.raises(UsageError, match="whole: needs span and part_channels"):
            build_method("dop-whole", 8, 5, missing)
