"""Cached feature maps: the same encodings as from the images, made once, gone on with when broken off."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from parseshot.backbones import BACKBONES, Conv4
from parseshot.data.augment import Augmentation, draw_warps, move_photos
from parseshot.data.packed import Pack
from parseshot.engine import features
from parseshot.engine.encoding import encode_split
from parseshot.engine.evaluation import evaluate
from parseshot.engine.features import FeaturePack, base_images, cached
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.protocol import Protocol
from parseshot.engine.run import start_run
from parseshot.engine.training import TrainingConfig, cached_for, draw, train_step
from parseshot.errors import DataError, UsageError


class Frozen(Conv4):
    """Random features that are never trained; their weights are kept with the model."""

    def __init__(self) -> None:
        super().__init__(channels=16, pools=3)
        self.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


KIND = ModelConfig(backbone="frozen", method="dop", projection=8)
VIEWS = Augmentation(perspective=0.3, perspective_share=1.0)
SHORT = TrainingConfig(
    episodes=4, way=4, shots=2, queries=2, cached_views=3, augmentation=VIEWS, validate_every=2, validation_episodes=5
)


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "frozen", Frozen)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(KIND)


@pytest.mark.parametrize("method", ["dop", "protonet"])
def test_encodings_and_answers_are_those_of_the_images(birds: Pack, tmp_path: Path, method: str) -> None:
    torch.manual_seed(0)
    model = Model(KIND.model_copy(update={"method": method}))
    pack = cached(model, birds, tmp_path)
    one, two = (encode_split(model, each, "novel") for each in (birds, pack))
    for name in one.encoding:
        torch.testing.assert_close(one.encoding[name], two.encoding[name], rtol=5e-3, atol=5e-3)
    protocol = Protocol(shots=(1, 5), queries=5, episodes=50)
    plain, quick = (evaluate(model, each, protocol) for each in (birds, pack))
    for first, second in zip(plain.outcomes, quick.outcomes, strict=True):
        assert first.interval.mean == pytest.approx(second.interval.mean, abs=0.01)
    assert quick.notes == ["from cached feature maps, stored as float16"]
    assert plain.notes == []


def test_views_are_plain_mirrored_and_distorted(birds: Pack, model: Model, tmp_path: Path) -> None:
    pack = cached(model, birds, tmp_path, views=3, augmentation=VIEWS)
    assert pack.views == 3
    images = base_images(birds)[[0, 5, 9]]
    with torch.inference_mode():
        pixels = birds.load(images)
        plain, mirrored = (model.backbone(each) for each in (pixels, pixels.flip(-1)))
    torch.testing.assert_close(pack.maps(images), plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pack.maps(images, np.array([1, 1, 1])), mirrored, rtol=1e-3, atol=1e-3)
    second, third = (pack.maps(images, np.full(3, view)) for view in (2, 3))
    for other in (plain, mirrored):
        assert (second - other).abs().mean() > 0.01
    assert not torch.equal(second, third)
    mixed = pack.maps(images, np.array([0, 2, 3]))
    assert torch.equal(mixed, torch.stack([pack.maps(images)[0], second[1], third[2]]))
    novel = birds.by_class("novel")
    with pytest.raises(UsageError, match="only base images have augmented views"):
        pack.maps(next(iter(novel.values()))[:1], np.array([1]))


def test_a_mirrored_model_parses_the_mirror_image_as_the_mirrored_parse(birds: Pack) -> None:
    torch.manual_seed(0)
    model = Model(KIND.model_copy(update={"mirrored": True})).eval()
    images = birds.load(base_images(birds)[:4])
    with torch.inference_mode():
        maps, turned = model.features(images), model.features(images.flip(-1))
        assert torch.equal(turned, maps.flip(-1))
        assert not torch.equal(model.backbone(images.flip(-1)), model.backbone(images).flip(-1))
        torch.testing.assert_close(model(images)["z"], model.encode(images)["z"])
        model.train()
        assert torch.equal(model.features(images), model.backbone(images))


def test_mirrored_maps_are_kept_beside_the_plain_ones_and_need_no_mirrored_view(birds: Pack, tmp_path: Path) -> None:
    packs = {}
    for mirrored in (False, True):
        torch.manual_seed(0)
        model = Model(KIND.model_copy(update={"mirrored": mirrored})).eval()
        packs[mirrored] = pack = cached(model, birds, tmp_path, views=2, augmentation=VIEWS)
        images = base_images(birds)[:3]
        with torch.inference_mode():
            torch.testing.assert_close(pack.maps(images), model.features(birds.load(images)), rtol=1e-3, atol=1e-3)
    assert (packs[True].maps(images) - packs[False].maps(images)).abs().mean() > 0.01
    views = np.array([1, 2, 0])
    turned, plain = packs[True].maps(images, views), packs[False].maps(images, views)
    assert torch.equal(turned[1], plain[1])  # as it was drawn
    assert torch.equal(turned[0], packs[True].maps(images)[0].flip(-1))  # follows from the plain map, is not stored
    assert torch.equal(turned[2], packs[True].maps(images)[2])
    assert [len(packs[mirrored].others) // len(base_images(birds)) for mirrored in (True, False)] == [1, 2]
    assert packs[True].views == packs[False].views == 2
    alone = cached(model, birds, tmp_path, views=1)
    assert alone.views == 1
    assert alone.others is None
    assert torch.equal(
        alone.maps(images, views.clip(max=1)), torch.stack((turned[0], alone.maps(images)[1].flip(-1), turned[2]))
    )


def test_without_flips_there_is_no_mirrored_view(birds: Pack, model: Model, tmp_path: Path) -> None:
    images = base_images(birds)[:3]
    with torch.inference_mode():
        mirrored = model.backbone(birds.load(images).flip(-1))
    for flip in (True, False):
        pack = cached(model, birds, tmp_path, views=1, augmentation=VIEWS.model_copy(update={"flip": flip}))
        found = pack.maps(images, np.ones(3, dtype=int))
        assert torch.allclose(found, mirrored, rtol=1e-3, atol=1e-3) == flip


@pytest.mark.parametrize("mirrored", [True, False])
def test_a_moved_view_of_each_base_image_is_kept_where_it_is_asked_for(
    birds: Pack, tmp_path: Path, mirrored: bool
) -> None:
    torch.manual_seed(0)
    model = Model(KIND.model_copy(update={"mirrored": mirrored})).eval()
    pack = cached(model, birds, tmp_path, views=2, augmentation=VIEWS, warps=True)
    assert pack.warped is not None
    assert pack.warped.shape == (len(base_images(birds)), *pack.plain.shape[1:])
    images = base_images(birds)[[70, 2, 5]]
    warps = draw_warps(images, features.MOVED_SEED)
    with torch.inference_mode():
        moved = model.features(move_photos(birds.pixels(images), warps))
    found = pack.pairs(images, np.array([0, 0, 2]))  # a view that was drawn otherwise goes as the plain one
    torch.testing.assert_close(found.warped, moved, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.plain, pack.maps(images))
    assert torch.equal(found.warps, warps)
    turned = pack.pairs(images, np.array([0, 1, 2]))
    assert torch.equal(turned.warped[[0, 2]], found.warped[[0, 2]])
    assert torch.equal(turned.warped[1], found.warped[1].flip(-1) if mirrored else found.warped[1])
    assert torch.equal(turned.plain[1], found.plain[1].flip(-1) if mirrored else found.plain[1])
    assert cached(model, birds, tmp_path, views=2, augmentation=VIEWS).warped is None


def test_the_mirror_image_of_a_pair_is_a_pair(birds: Pack, tmp_path: Path) -> None:
    """The mirror image of a photo, moved by the mirrored warp, is the mirror image of the moved photo."""
    model = Model(KIND.model_copy(update={"mirrored": True})).eval()
    pack = cached(model, birds, tmp_path, views=1, warps=True)
    images = base_images(birds)[:4]
    plain, turned = (pack.pairs(images, np.full(4, view)) for view in (0, 1))
    pixels = birds.pixels(images)
    one = move_photos(pixels, plain.warps).flip(-1).int()
    two = move_photos(pixels[:, :, ::-1].copy(), turned.warps).int()
    assert float((one - two).abs().float().mean()) < 0.05
    assert int((one - two).abs().max()) <= 2
    assert torch.equal(turned.warped, plain.warped.flip(-1))
    assert torch.equal(turned.plain, plain.plain.flip(-1))


def test_a_run_says_which_features_it_wants(birds: Pack, model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"training\.cached_views is 3, the pack has None"):
        start_run(KIND, birds, SHORT, tmp_path / "run")
    with pytest.raises(UsageError, match=r"training\.cached_views is 3, the pack has 1"):
        start_run(KIND, cached(model, birds, tmp_path / "maps", views=1), SHORT, tmp_path / "run")


def test_drawn_views_are_a_function_of_seed_and_step(birds: Pack, model: Model, tmp_path: Path) -> None:
    pack = cached(model, birds, tmp_path, views=3)
    first = pack.draw_views(400, seed=1, step=2)
    assert np.array_equal(first, pack.draw_views(400, seed=1, step=2))
    assert not np.array_equal(first, pack.draw_views(400, seed=1, step=3))
    assert (np.bincount(first, minlength=4) > 60).all()


def test_they_are_made_once(birds: Pack, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, str]] = []
    cached(model, birds, tmp_path, views=2, progress=lambda *line: told.append(line))
    assert told[-1] == (2 * len(base_images(birds)), 2 * len(base_images(birds)), "features")
    before = sorted(file.name for file in tmp_path.rglob("*.*") if file.is_file())
    assert [name for name in before if name.endswith((".partial", ".done"))] == []
    monkeypatch.setattr(features, "_fill", None)  # a second making would fail
    cached(model, birds, tmp_path, views=2)
    cached(model, birds, tmp_path)
    with pytest.raises(TypeError):
        cached(model, birds, tmp_path, views=3)
    with pytest.raises(TypeError):
        cached(model, birds, tmp_path, views=2, warps=True)
    torch.manual_seed(1)
    with pytest.raises(TypeError):  # other weights
        cached(Model(KIND), birds, tmp_path)


@pytest.mark.parametrize("after", [1, 2])
def test_a_broken_off_making_is_gone_on_with(
    birds: Pack, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(features, "SAVED_EVERY", 0.0)
    whole = cached(model, birds, tmp_path / "whole", views=2)
    view, seen = features._view, []

    def limited(*arguments: object) -> torch.Tensor:
        seen.append(arguments)
        if len(seen) > after:
            raise KeyboardInterrupt
        return view(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(features, "_view", limited)
        with pytest.raises(KeyboardInterrupt):
            cached(model, birds, tmp_path / "parts", views=2)
        seen.clear()
        after = 10**9
        again = cached(model, birds, tmp_path / "parts", views=2)
    groups = -(-len(birds) // features.ROWS) + 2 * -(-len(base_images(birds)) // features.ROWS)
    assert 0 < len(seen) < groups
    assert np.array_equal(again.plain, whole.plain)
    assert np.array_equal(again.others, whole.others)


def test_damage_is_noticed(birds: Pack, model: Model, tmp_path: Path) -> None:
    cached(model, birds, tmp_path)
    file = next(tmp_path.rglob("plain.maps"))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"plain\.maps cannot be used .*; remove .*, it is made again"):
        cached(model, birds, tmp_path)
    file.with_suffix(".json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(DataError, match="cannot be used"):
        cached(model, birds, tmp_path)


def test_what_cannot_be_cached_is_refused(birds: Pack, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="conv4 is trained; only a frozen one's"):
        cached(Model(ModelConfig()), birds, tmp_path)
    with pytest.raises(DataError, match="84 px, the model wants 96 px"):
        cached(Model(KIND.model_copy(update={"image_size": 96})), birds, tmp_path)
    both = TrainingConfig.model_validate({"cached_views": 1, "pretraining": {"steps": 3}})
    with pytest.raises(UsageError, match=r"training\.pretraining trains the backbone"):
        cached_for(KIND, both, birds, tmp_path, torch.device("cpu"))


def test_a_step_from_the_cache_is_a_step_from_the_images(birds: Pack, tmp_path: Path) -> None:
    """Without views beside the plain one, on unaugmented images: the same loss and gradient, to float16."""
    plain = SHORT.model_copy(update={"cached_views": 0, "augmentation": Augmentation(name="none", flip=False)})
    found = []
    for use_cache in (False, True):
        torch.manual_seed(0)
        model = Model(KIND)
        pack = cached_for(KIND, plain, birds, tmp_path, torch.device("cpu")) if use_cache else birds
        optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
        figures = train_step(model, optimiser, pack, draw(birds.by_class("base"), plain, 0), plain, 0)
        found.append((figures["ce"], model.projection.weight.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2)
    assert torch.nn.functional.cosine_similarity(found[0][1].flatten(), found[1][1].flatten(), dim=0) > 0.99


def test_a_run_on_cached_maps_leaves_the_backbone_alone_and_resumes(birds: Pack, tmp_path: Path) -> None:
    pack = cached_for(KIND, SHORT, birds, tmp_path / "maps", torch.device("cpu"))
    assert isinstance(pack, FeaturePack)
    start_run(KIND, pack, SHORT, tmp_path / "whole")
    start_run(KIND, pack, SHORT.model_copy(update={"episodes": 2}), tmp_path / "run")
    start_run(KIND, pack, SHORT, tmp_path / "run", resume=True)
    whole, again = (Model.from_pretrained(tmp_path / name / "last") for name in ("whole", "run"))
    assert all(torch.equal(whole.state_dict()[name], again.state_dict()[name]) for name in whole.state_dict())
    torch.manual_seed(SHORT.seed)
    start = Model(KIND)
    for name, weight in start.state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name]) == name.startswith("backbone."), name


def test_a_projection_of_0_channels_is_none() -> None:
    """So that a table's row can take back what all others have."""
    model = Model(KIND.model_copy(update={"projection": 0}))
    assert isinstance(model.projection, torch.nn.Identity)
    assert model.method.templates.maps[0].shape[1] == model.backbone.out_channels
