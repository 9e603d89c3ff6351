"""Parts whose places tell where all else lies: the term as written out, its properties, and its life in training."""

from pathlib import Path

import pytest
import torch
from frozen import Frozen, assert_resumes, trained_terms
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from parseshot.backbones import BACKBONES
from parseshot.data.packed import Pack
from parseshot.engine.model import ModelConfig
from parseshot.engine.run import start_run
from parseshot.engine.training import TrainingConfig
from parseshot.errors import UsageError
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.base import Companions
from parseshot.methods.dop_companions import Layout, Representatives
from parseshot.parts import layout

SIZE = 7


def drawn(seed: int, photos: int = 24, parts: int = 2, kinds: int = 5) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    mu = 6 * torch.rand(photos, parts, 2, generator=random, dtype=torch.float64)
    places = 6 * torch.rand(photos, kinds, 2, generator=random, dtype=torch.float64)
    counts = (torch.rand(photos, kinds, generator=random) < 0.7).double()
    return mu, places, counts


@pytest.mark.parametrize("seed", range(3))
def test_the_term_is_the_one_written_out(seed: int) -> None:
    mu, places, counts = drawn(seed)
    expected = reference.layout_untold(mu.numpy(), places.numpy(), counts.numpy(), SIZE, layout.RIDGE, layout.FAR)
    assert float(layout.untold(mu, places, counts, SIZE)) == pytest.approx(expected, rel=1e-9)


def test_the_place_of_a_kind_is_the_one_written_out() -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(3, 6, 5, 5, generator=random, dtype=torch.float64)
    kinds = layout.find_kinds(features, 4, random)
    places, alike = layout.kind_places(features, kinds)
    for photo in range(3):
        for kind in range(4):
            wanted = reference.kind_place(
                features[photo].numpy(),
                kinds.middle.numpy(),
                kinds.basis.numpy() @ kinds.centres[kind].numpy(),
                kinds.basis.numpy(),
                layout.TEMPERATURE,
            )
            assert places[photo, kind].tolist() == pytest.approx(wanted, abs=1e-9)
    assert alike.shape == (3, 4)
    torch.testing.assert_close(kinds.centres.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_places_that_follow_from_the_parts_leave_next_to_nothing_untold_and_noise_leaves_all() -> None:
    mu, places, counts = drawn(0, photos=400)
    linear = torch.randn(4, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    follows = (mu.flatten(1) @ linear).view(400, 5, 2)
    assert float(layout.untold(mu, follows, counts, SIZE)) < 0.01  # what the ridge costs
    noise = float(layout.untold(mu, places, counts, SIZE))
    still = float(layout.untold(torch.full_like(mu, 3.0), places, counts, SIZE))  # parts that never move tell nothing
    assert noise == pytest.approx(still, rel=0.05)
    assert noise > 0.5


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(2)), st.permutations(range(5)))
def test_neither_the_order_of_parts_nor_that_of_kinds_nor_a_mirror_matters(seed: int, parts: list, kinds: list) -> None:
    mu, places, counts = drawn(seed)
    before = float(layout.untold(mu, places, counts, SIZE))
    after = float(layout.untold(mu[:, parts], places[:, kinds], counts[:, kinds], SIZE))
    assert after == pytest.approx(before, rel=1e-9)
    turn = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    moved = torch.tensor([SIZE - 1.0, 0.0], dtype=torch.float64)
    mirrored = float(layout.untold(mu * turn + moved, places * turn + moved, counts, SIZE))
    assert mirrored == pytest.approx(before, rel=1e-9)


def test_photos_on_which_a_kind_does_not_count_change_nothing_for_it() -> None:
    mu, places, counts = drawn(2)
    elsewhere = torch.where(counts[..., None] > 0, places, torch.full_like(places, 99.0))
    assert float(layout.untold(mu, elsewhere, counts, SIZE)) == pytest.approx(
        float(layout.untold(mu, places, counts, SIZE)), rel=1e-9
    )


def test_gradients_reach_the_places_of_parts() -> None:
    mu, places, counts = drawn(3, photos=12)
    mu.requires_grad_()
    assert torch.autograd.gradcheck(lambda one: layout.untold(one, places, counts, SIZE), mu)


def test_planted_kinds_are_found_where_they_are() -> None:
    """Two marks on each photo, of which one moves: their kinds lie where they were planted."""
    random = torch.Generator().manual_seed(0)
    features = 0.05 * torch.randn(60, 8, SIZE, SIZE, generator=random)
    truth = torch.randint(SIZE, (60, 2, 2), generator=random)
    for photo in range(60):
        for mark, (x, y) in enumerate(truth[photo].tolist()):
            features[photo, mark, y, x] += 3.0
    kinds = layout.find_kinds(features, 6, random)
    places, alike = layout.kind_places(features, kinds)
    apart = truth[:, 0].ne(truth[:, 1]).any(1)  # where both can be seen
    for mark in range(2):
        kind = int((kinds.centres @ kinds.basis.T)[:, mark].argmax())
        assert float((places[apart, kind] - truth[apart, mark]).norm(dim=1).median()) < 0.1
        assert float(alike[apart, kind].median()) > 0.9


def test_too_few_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="64 kinds of cells"):
        layout.find_kinds(torch.rand(1, 4, 3, 3), 64, torch.Generator())


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "frozen", Frozen)


KIND = ModelConfig(
    backbone="frozen", method="dop", projection=8, method_options={"layout": 3.0, "representatives": 1.0}
)
SHORT = TrainingConfig(
    episodes=8, way=5, shots=2, queries=2, validate_every=8, validation_episodes=5, cached_views=0, blank_cells=0.1
)


def test_it_goes_beside_the_loss_over_all_base_classes() -> None:
    base = BasePhotos(torch.tensor([0, 1, 1]), None)
    alone, both = (
        build_method("dop", 6, 5, {"layout": 2.0, **more}).companion(base) for more in ({}, {"representatives": 1.0})
    )
    assert isinstance(alone, Layout)
    assert isinstance(both, Companions)
    assert [type(one) for one in both] == [Representatives, Layout]
    assert both.photos == Layout.photos


@pytest.mark.usefixtures("frozen")
def test_a_run_that_is_stopped_goes_on_with_the_same_kinds(birds: Pack, tmp_path: Path) -> None:
    def look(figures: dict[str, float]) -> None:
        assert 0 < figures["layout"] < 3.0 * 1.5

    assert_resumes(KIND, SHORT, birds, tmp_path, look)


@pytest.mark.usefixtures("frozen")
def test_training_with_it_lowers_it(birds: Pack, tmp_path: Path) -> None:
    without, with_it = trained_terms(KIND, SHORT, birds, tmp_path, "layout")
    assert with_it < 0.9 * without


@pytest.mark.usefixtures("frozen")
def test_it_can_look_at_photos_without_a_cache(birds: Pack, tmp_path: Path) -> None:
    config = SHORT.model_copy(update={"cached_views": None, "episodes": 1, "validate_every": 1})
    told: list[dict[str, float]] = []
    start_run(KIND, birds, config, tmp_path / "run", told.append)
    assert "layout" in told[0]


def test_a_backbone_that_is_trained_is_refused(birds: Pack, tmp_path: Path) -> None:
    kind = ModelConfig(backbone_options={"channels": 8}, method_options={"layout": 1.0})
    with pytest.raises(UsageError, match="layout needs features that stay"):
        start_run(kind, birds, SHORT.model_copy(update={"cached_views": None}), tmp_path / "run")
