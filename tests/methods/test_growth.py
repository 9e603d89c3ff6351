"""What the contract offers beyond one map and one episode: pairs of maps, companions, changes to the backbone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parseshot.backbones import build_backbone
from parseshot.backbones.base import pack_pair, turned, unpack_pair
from parseshot.config import Config
from parseshot.data.packed import Pack
from parseshot.engine.encoding import encode_split
from parseshot.engine.features import cached
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.run import start_run
from parseshot.engine.training import TrainingConfig, base_photos
from parseshot.errors import UsageError
from parseshot.methods import METHODS, BasePhotos, Companion, Encoding, Method, MethodEntry
from parseshot.parts.distance import class_mean

SHORT = TrainingConfig(episodes=4, way=4, shots=2, queries=2, validate_every=2, validation_episodes=5)


class Plain(Method):
    """A nearest centroid of pooled features, the base of the oddities below."""

    def __init__(self, channels: int, size: int, config: Config, fine: int = 0) -> None:
        super().__init__()
        self.channels, self.scale = channels, nn.Parameter(torch.ones(()))

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=features.mean((2, 3)))

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        prototypes = class_mean(support["f"], labels, int(labels.max()) + 1)
        return -self.scale * torch.cdist(query["f"], prototypes)


class Paired(Plain):
    paired = True

    def encode(self, features: Tensor) -> Encoding:
        coarse, fine = unpack_pair(features, self.channels)
        return Encoding(f=torch.cat((coarse.mean((2, 3)), fine.amax((2, 3))), 1))


class Classified(Plain):
    episodic = False

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def companion(self, base: BasePhotos) -> Companion:
        return BaseClassifier(self.channels, base)


class BaseClassifier(Companion):
    def __init__(self, channels: int, base: BasePhotos) -> None:
        super().__init__()
        self.linear, self.base = nn.Linear(channels, base.classes), base

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        return {"base_ce": nn.functional.cross_entropy(self.linear(encoding["f"]), self.base.labels[images])}


class Adapting(Plain):
    @classmethod
    def adapt(cls, backbone: nn.Module, config: Config) -> None:
        backbone.requires_grad_(False)
        backbone.register_parameter("extra", nn.Parameter(torch.zeros(())))


@pytest.fixture(autouse=True)
def oddities(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in {"paired": Paired, "classified": Classified, "adapting": Adapting}.items():
        monkeypatch.setitem(METHODS, name, MethodEntry(kind, Config(), 2026, "for this test"))


@pytest.mark.parametrize("side", [9, 10, 11])
def test_a_pair_of_maps_comes_out_as_it_went_in(side: int) -> None:
    coarse, fine = torch.randn(2, 3, 5, 5), torch.randn(2, 7, side, side)
    packed = pack_pair(coarse, fine)
    assert packed.shape == (2, 3 + 28, 5, 5)
    again, finer = unpack_pair(packed, 3)
    assert torch.equal(again, coarse)
    kept = min(side, 10)
    assert torch.equal(finer[..., :kept, :kept], fine[..., :kept, :kept])
    if side == 9:
        assert torch.equal(finer[..., 9], finer[..., 8])
    assert torch.equal(turned(packed, 3), pack_pair(coarse.flip(-1), finer.flip(-1)))
    assert torch.equal(turned(coarse, 3), coarse.flip(-1))


@pytest.mark.parametrize(
    ("name", "options", "size", "fine", "grid"),
    [
        ("conv4", {"channels": 8}, 84, 8, 5),
        ("resnet12", {}, 32, 320, 2),
        ("resnet18", {}, 64, 256, 2),
        ("efficientnet_lite0", {"pretrained": False, "level": "stride32"}, 84, 112, 3),
    ],
)
def test_backbones_give_pairs(name: str, options: dict, size: int, fine: int, grid: int) -> None:
    torch.manual_seed(0)
    alone = build_backbone(name, **options).eval()
    torch.manual_seed(0)
    paired = build_backbone(name, **options, paired=True).eval()
    images = torch.rand(1, 3, size, size)
    with torch.inference_mode():
        coarse, finer = unpack_pair(paired(images), paired.out_channels)
        torch.testing.assert_close(coarse, alone(images))
    assert (paired.fine_channels, alone.fine_channels) == (fine, 0)
    assert finer.shape == (1, fine, 2 * grid, 2 * grid)


def test_a_pair_goes_through_model_cache_and_training(birds: Pack, tmp_path: Path) -> None:
    options = {"pretrained": False, "level": "stride32", "paired": True}
    config = ModelConfig(
        backbone="efficientnet_lite0", backbone_options=options, method="paired", projection=6, mirrored=True
    )
    torch.manual_seed(0)
    model = Model(config).eval()
    images = birds.load(birds.by_class("val")[next(iter(birds.by_class("val")))][:2])
    with torch.inference_mode():
        maps = model.features(images)
        torch.testing.assert_close(model.features(images.flip(-1)), turned(maps, 320))
        assert model.from_features(maps)["f"].shape == (2, 6 + 112)
    pack = cached(model, birds, tmp_path / "maps")
    one, two = (encode_split(model, each, "val").encoding["f"] for each in (birds, pack))
    torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-2)
    start_run(config, pack, SHORT.model_copy(update={"cached_views": 0}), tmp_path / "run")


def test_a_paired_backbone_can_be_pretrained(birds: Pack, tmp_path: Path) -> None:
    config = ModelConfig(method="paired", backbone_options={"channels": 8, "paired": True})
    training = TrainingConfig.model_validate(SHORT.model_dump() | {"pretraining": {"steps": 2, "batch": 8}})
    start_run(config, birds, training, tmp_path / "run")
    assert '"stage": "pretraining"' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_maps_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(UsageError, match=r"method paired takes maps of two strides: set .*paired = true"):
        Model(ModelConfig(method="paired"))
    with pytest.raises(UsageError, match=r"method dop takes maps of one stride: set .*paired = false"):
        Model(ModelConfig(method="dop", backbone_options={"paired": True}))
    with pytest.raises(UsageError, match="need all four poolings"):
        build_backbone("conv4", pools=3, paired=True)
    with pytest.raises(UsageError, match="level stride32 or head"):
        build_backbone("efficientnet_lite0", pretrained=False, level="stride16", paired=True)


def test_a_companion_trains_along_resumes_and_is_not_kept(birds: Pack, tmp_path: Path) -> None:
    config = ModelConfig(method="classified", backbone_options={"channels": 8})
    start_run(config, birds, SHORT, tmp_path / "whole")
    start_run(config, birds, SHORT.model_copy(update={"episodes": 2}), tmp_path / "run")
    start_run(config, birds, SHORT, tmp_path / "run", resume=True)
    whole, again = (Model.from_pretrained(tmp_path / name / "last").state_dict() for name in ("whole", "run"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not [name for name in whole if "linear" in name or "companion" in name]
    torch.manual_seed(SHORT.seed)
    start = Model(config).state_dict()
    assert not torch.equal(start["backbone.block1.0.weight"], whole["backbone.block1.0.weight"])
    assert '"base_ce"' in (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_base_photos_know_classes_and_parts(birds: Pack) -> None:
    base = base_photos(birds)
    members = birds.by_class("base")
    assert base.classes == len(members)
    for number, images in enumerate(members.values()):
        assert (base.labels[torch.from_numpy(images)] == number).all()
    assert int((base.labels >= 0).sum()) == sum(len(images) for images in members.values())
    assert base.parts is not None
    assert base.parts.shape == (len(birds), *birds.parts.shape[1:])
    seen = base.parts[base.parts[..., 2] > 0]
    assert ((seen[:, :2] > -0.1) & (seen[:, :2] < 1.1)).double().mean() > 0.99


def test_a_method_may_change_the_backbone() -> None:
    model = Model(ModelConfig(method="adapting"))
    assert [name for name, weight in model.backbone.named_parameters() if weight.requires_grad] == ["extra"]
