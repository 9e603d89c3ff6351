"""Parts that follow a moved photo: the term as written out, its properties, and its life in training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from frozen import Frozen, assert_resumes, trained_terms
from torch import Tensor

import reference
from parseshot.backbones import BACKBONES
from parseshot.data.augment import draw_warps
from parseshot.data.packed import Pack
from parseshot.engine import training
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.run import start_run
from parseshot.engine.training import TrainingConfig, cached_for
from parseshot.errors import UsageError
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.base import Companions
from parseshot.methods.dop_companions import Layout, Representatives, Warps
from parseshot.parts import warps

SIZE = 7


def drawn(seed: int, photos: int = 24, noise: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Places on plain photos, on moved ones (they follow but for some noise), and the warps, in float64."""
    random = torch.Generator().manual_seed(seed)
    plain = 6 * torch.rand(photos, 3, 2, 2, generator=random, dtype=torch.float64)
    each = draw_warps(np.arange(photos), seed).double()
    moved = warps.moved(plain, each, SIZE)
    return plain, moved + noise * torch.randn(moved.shape, generator=random, dtype=torch.float64), each


def affine(angle: float, factor: float, shift: tuple[float, float]) -> Tensor:
    cos, sin = np.cos(np.deg2rad(angle)) / factor, np.sin(np.deg2rad(angle)) / factor
    return torch.tensor([[[cos, -sin, shift[0]], [sin, cos, shift[1]]]], dtype=torch.float64)


def test_a_shift_a_factor_and_a_turn_by_hand() -> None:
    place = torch.tensor([4.0, 1.0], dtype=torch.float64).view(1, 1, 1, 2)  # of the middle (3, 3): (+1, −2)
    for warp, wanted in (
        (affine(0, 1, (0, 0)), [4, 1]),
        (affine(0, 1, (2 / 7, 0)), [3, 1]),  # what was a cell to the right is here now
        (affine(0, 2, (0, 0)), [5, -1]),  # twice as large, out of the picture
        (affine(90, 1, (0, 0)), [1, 2]),
    ):
        assert warps.moved(place, warp, SIZE).flatten().tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_term_is_the_one_written_out(seed: int) -> None:
    plain, moved, each = drawn(seed)
    expected = reference.warps_unfollowed(plain.numpy(), moved.numpy(), each.numpy(), SIZE)
    assert float(warps.unfollowed(plain, moved, each, SIZE)) == pytest.approx(expected, rel=1e-9)


def test_it_is_nothing_where_all_follow_and_about_2_where_none_does() -> None:
    plain, moved, each = drawn(0, photos=400, noise=0.0)
    assert float(warps.unfollowed(plain, moved, each, SIZE)) < 1e-20
    elsewhere = moved[torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    assert float(warps.unfollowed(plain, elsewhere, each, SIZE)) == pytest.approx(2.0, abs=0.3)
    still = torch.full_like(plain, 3.0)  # parts that lie in the middle of every photo, moved or not
    assert float(warps.unfollowed(still, still, each, SIZE)) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("share", "least"), [(0.9, 0.9), (0.5, 1.0), (0.1, 1.0)])
def test_drawing_all_places_together_gains_next_to_nothing(share: float, least: float) -> None:
    """Towards the middle, as a blurred ν moves its mean. By a tenth: misses have 0.81 of their squares then, but the
    term keeps 0.9 and more of itself; by more than that it grows, as a photo's shift does not shrink with its parts."""
    for seed in range(5):
        plain, moved, each = drawn(seed, photos=100)
        before = float(warps.unfollowed(plain, moved, each, SIZE))
        after = float(warps.unfollowed(3 + share * (plain - 3), 3 + share * (moved - 3), each, SIZE))
        assert after >= least * before


def test_a_place_that_is_moved_out_of_the_picture_does_not_count() -> None:
    plain, moved, each = drawn(1)
    aims = warps.moved(plain, each, SIZE)
    outside = ((aims < -0.5) | (aims > SIZE - 0.5)).any(-1, keepdim=True)
    assert 0 < int(outside.sum()) < outside.numel() / 2
    anywhere = torch.where(outside, torch.full_like(moved, 99.0), moved)
    before, after = (float(warps.unfollowed(plain, one, each, SIZE)) for one in (moved, anywhere))
    assert after == pytest.approx(before, rel=1e-9)
    gone = torch.full_like(plain, 99.0)
    assert float(warps.unfollowed(gone, moved, each, SIZE)) == 0.0


def test_gradients_reach_both_parses() -> None:
    plain, moved, each = drawn(3, photos=6)
    plain.requires_grad_()
    moved.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: warps.unfollowed(a, b, each, SIZE), (plain, moved))


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "frozen", Frozen)


KIND = ModelConfig(
    backbone="frozen",
    method="dop",
    projection=8,
    mirrored=True,
    method_options={"warps": 2.0, "layout": 3.0, "representatives": 1.0},
)
SHORT = TrainingConfig(
    episodes=8, way=5, shots=2, queries=2, validate_every=8, validation_episodes=5, cached_views=1, blank_cells=0.1
)


def test_it_goes_beside_the_other_terms() -> None:
    base = BasePhotos(torch.tensor([0, 1, 1]), None)
    alone, all_of_them = (
        build_method("dop", 6, 5, {"warps": 2.0, **more}).companion(base)
        for more in ({}, {"representatives": 1.0, "layout": 1.0})
    )
    assert isinstance(alone, Warps)
    assert isinstance(all_of_them, Companions)
    assert [type(one) for one in all_of_them] == [Representatives, Layout, Warps]
    assert (all_of_them.photos, all_of_them.pairs) == (Layout.photos, Warps.pairs)
    other = build_method("dop", 6, 5, {"layout": 1.0}).companion(base)
    assert other is not None
    assert other.pairs == 0


@pytest.mark.usefixtures("frozen")
def test_a_run_that_is_stopped_goes_on_with_the_same_photos_moved(birds: Pack, tmp_path: Path) -> None:
    def look(figures: dict[str, float]) -> None:
        assert 0 < figures["warps"] < 2.0 * 2.5

    assert_resumes(KIND, SHORT, birds, tmp_path, look)


@pytest.mark.usefixtures("frozen")
def test_a_step_takes_sixteen_of_its_photos_as_it_sees_them(birds: Pack, tmp_path: Path) -> None:
    pack = cached_for(KIND, SHORT, birds, tmp_path, torch.device("cpu"))
    model = Model(KIND)
    numbers = birds.by_class("base")[0][:4].repeat(5)  # 20, as many as a step has
    views = pack.draw_views(20, seed=SHORT.seed, step=3)
    seen = model.projection(pack.maps(numbers, views)).detach()
    found = training.step_pairs(model, pack, numbers, SHORT, 3, Warps.pairs)
    assert len(found.plain) == len(found.warped) == len(found.warps) == 16
    for one in found.plain:
        assert float((seen - one.detach()).abs().amax((1, 2, 3)).min()) < 1e-5
    again, other = (training.step_pairs(model, pack, numbers, SHORT, step, Warps.pairs) for step in (3, 4))
    assert torch.equal(found.warped, again.warped)
    assert not torch.equal(found.warped, other.warped)
    assert len(training.step_pairs(model, pack, numbers[:6], SHORT, 3, Warps.pairs).plain) == 6


@pytest.mark.usefixtures("frozen")
def test_training_with_it_lowers_it(birds: Pack, tmp_path: Path) -> None:
    without, with_it = trained_terms(KIND, SHORT, birds, tmp_path, "warps")
    assert with_it < 0.9 * without


@pytest.mark.usefixtures("frozen")
def test_features_that_are_not_cached_are_refused(birds: Pack, tmp_path: Path) -> None:
    wanted = r"method_options\.warps needs .*training\.cached_views"
    with pytest.raises(UsageError, match=wanted):
        start_run(KIND, birds, SHORT.model_copy(update={"cached_views": None}), tmp_path / "run")
    without = KIND.model_copy(update={"method_options": {}})
    pack = cached_for(without, SHORT, birds, tmp_path / "features", torch.device("cpu"))
    assert pack.warped is None
    with pytest.raises(UsageError, match=wanted):  # cached, but not for this
        start_run(KIND, pack, SHORT, tmp_path / "other")
