"""The timm adapter: maps and tokens by hand, what can go wrong on a stand-in, and real models where timm imports."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from parseshot.backbones import TimmBackbone, build_backbone
from parseshot.backbones.timm import as_map, import_timm
from parseshot.errors import ModelError, UsageError


def why_not() -> str:
    """Why timm does not import here; empty where it does."""
    try:
        importlib.import_module("timm")
    except Exception as error:
        return f"timm does not import: {type(error).__name__}: {error}"
    return ""


REASON = why_not()
needs_timm = pytest.mark.skipif(bool(REASON), reason=REASON or "timm imports")


def images(batch: int, size: int) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


# Maps and tokens


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_tokens_are_laid_out_in_rows_without_the_prefix(prefix: int) -> None:
    rows, columns = torch.arange(6.0).view(6, 1).expand(6, 6), torch.arange(6.0).expand(6, 6)
    grid = torch.stack((rows, columns, rows * columns), dim=-1).view(1, 36, 3)  # [B, G·G, C]
    tokens = torch.cat((torch.full((1, prefix, 3), -1.0), grid), dim=1).expand(2, -1, -1)
    found = as_map(tokens, channels=3, prefix=prefix)
    assert found.shape == (2, 3, 6, 6)
    assert torch.equal(found[1], torch.stack((rows, columns, rows * columns)))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_maps_have_their_channels_first() -> None:
    x = torch.rand(2, 8, 7, 7)
    assert torch.equal(as_map(x, channels=8), x)
    assert torch.equal(as_map(x.permute(0, 2, 3, 1), channels=8), x)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.zeros(1, 50, 8), r"\[1, 50, 8\].*no square map of 8 channels"),  # a class token nobody told us of
        (torch.zeros(1, 8), r"\[1, 8\]"),
        (torch.zeros(1, 4, 7, 7), r"\[1, 4, 7, 7\]"),
        ([torch.zeros(1, 8, 7, 7)], "a list"),
    ],
)
def test_what_is_no_map_is_refused(features: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_map(features, channels=8)


# What can go wrong


def test_without_timm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"not installed: pip install 'parseshot\[timm\]'"):
        TimmBackbone(model="resnet10t")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms does not exist"),
        ("import a_module_that_is_missing", "No module named 'a_module_that_is_missing'"),
    ],
)
def test_a_broken_timm_is_told_from_a_missing_one(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ModelError, match=f"installed but does not import: .*{message}"):
        import_timm()


class Network(nn.Module):
    """Stands in for a model of timm: pools to a map of 2 channels, at stride 4."""

    num_features = 2

    def __init__(self, mean: float, divisor: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.divisor = divisor  # of the sizes it takes
        self.pretrained_cfg = {"mean": (mean,) * 3, "std": (0.25,) * 3, "input_size": (3, 32, 32)}

    def forward_features(self, x: Tensor) -> Tensor:
        assert x.shape[-1] % self.divisor == 0, "an odd size"
        return nn.functional.avg_pool2d(x[:, :2] * self.scale, 4, ceil_mode=True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A timm with the models that `accepts` names, each with the options it knows; `asked` is what it was asked for."""
    state = SimpleNamespace(accepts={}, asked=[], fixed=True, error=None, divisor=1)

    def create_model(name: str, *, pretrained: bool, num_classes: int, **options: object) -> nn.Module:
        for option in options:
            if option not in state.accepts[name]:
                raise TypeError(f"Network.__init__() got an unexpected keyword argument '{option}'")
        if state.error:
            raise state.error
        state.asked.append({"pretrained": pretrained, "num_classes": num_classes, **options})
        return Network(0.5, state.divisor)

    module = ModuleType("timm")
    module.__version__ = "0.0"
    module.is_model = lambda name: name in state.accepts
    module.list_models = lambda: list(state.accepts)
    module.models = SimpleNamespace(get_pretrained_cfg=lambda name: SimpleNamespace(fixed_input_size=state.fixed))
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)
    return state


@pytest.mark.parametrize(
    ("known", "fixed", "image_size", "expected"),
    [
        (("dynamic_img_size", "dynamic_img_pad", "img_size"), True, 224, {"img_size": 224, "dynamic_img_pad": True}),
        (("dynamic_img_size", "img_size"), True, 224, {"img_size": 224}),
        (("dynamic_img_size", "dynamic_img_pad", "img_size"), True, None, {"dynamic_img_pad": True}),
        ((), False, 224, None),
    ],
)
def test_a_model_gets_the_options_it_knows(
    stand_in: SimpleNamespace, known: tuple[str, ...], fixed: bool, image_size: int | None, expected: dict | None
) -> None:
    stand_in.accepts, stand_in.fixed = {"some": known}, fixed
    TimmBackbone(model="some", image_size=image_size)
    options = {} if expected is None else {"dynamic_img_size": True, **expected}
    assert stand_in.asked == [{"pretrained": False, "num_classes": 0, **options}]


def test_mean_deviation_channels_stride_and_grid_are_the_models(stand_in: SimpleNamespace) -> None:
    stand_in.accepts = {"some": ()}
    backbone = build_backbone("timm", model="some")
    assert (backbone.out_channels, backbone.stride) == (2, 4)
    assert [backbone.grid(size) for size in (32, 33, 84)] == [8, 9, 21]
    assert backbone.training  # the trials leave the mode as it was
    x = images(1, 32)
    torch.testing.assert_close(backbone(x), nn.functional.avg_pool2d((x[:, :2] - 0.5) / 0.25, 4))


def test_an_unknown_model_is_answered_with_its_neighbours(stand_in: SimpleNamespace) -> None:
    stand_in.accepts = {"resnet18": (), "resnet34": (), "vit_tiny": ()}
    with pytest.raises(UsageError, match=r"no model 'resnet81.a1'. Did you mean 'resnet18'"):
        TimmBackbone(model="resnet81.a1")


def test_a_size_that_the_model_does_not_take_is_a_usage_error(stand_in: SimpleNamespace) -> None:
    stand_in.accepts, stand_in.divisor = {"some": ()}, 2
    with pytest.raises(UsageError, match="some does not take images of 33 px: an odd size"):
        TimmBackbone(model="some").grid(33)


@pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("no network"), TypeError("no network")])
def test_weights_that_do_not_come_are_a_model_error(stand_in: SimpleNamespace, error: Exception) -> None:
    stand_in.accepts, stand_in.error = {"some": ()}, error
    with pytest.raises(ModelError, match="could not make 'some': no network"):
        TimmBackbone(model="some", pretrained=True)


# Real models, with random weights


@needs_timm
@pytest.mark.parametrize(
    ("model", "image_size", "channels", "stride", "grids"),
    [
        ("resnet10t", None, 512, 32, {224: 7, 84: 3, 97: 4}),
        ("vit_tiny_patch16_224", None, 192, 16, {224: 14, 84: 6, 96: 6}),
        ("vit_small_patch14_dinov2", 224, 384, 14, {224: 16, 84: 6}),  # a class token
        ("vit_small_patch14_reg4_dinov2", 224, 384, 14, {224: 16}),  # and four registers
        ("swin_tiny_patch4_window7_224", None, 768, 32, {224: 7}),  # channels last
    ],
)
def test_real_models(model: str, image_size: int | None, channels: int, stride: int, grids: dict[int, int]) -> None:
    backbone = build_backbone("timm", model=model, image_size=image_size).eval()
    assert (backbone.out_channels, backbone.stride) == (channels, stride)
    for size, grid in grids.items():
        with torch.no_grad():
            features = backbone(images(1, size))
        assert features.shape == (1, channels, grid, grid)
        assert features.isfinite().all()
        assert backbone.grid(size) == grid


@needs_timm
def test_real_tokens_equal_timms_own_maps() -> None:
    """`forward_intermediates` is timm's own way from tokens to maps."""
    torch.manual_seed(0)
    backbone = TimmBackbone(model="vit_small_patch14_reg4_dinov2", image_size=112).eval()
    x = images(2, 112)
    with torch.no_grad():
        normalised = backbone.normalise(x)
        (expected,) = backbone.network.forward_intermediates(
            normalised, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
        )
        torch.testing.assert_close(backbone(x), expected)


@needs_timm
def test_real_mean_and_deviation_are_those_of_the_config() -> None:
    backbone = TimmBackbone(model="vit_tiny_patch16_224")
    assert backbone.normalise.mean.flatten().tolist() == [0.5, 0.5, 0.5]
    resnet = TimmBackbone(model="resnet10t")
    torch.testing.assert_close(resnet.normalise.std.flatten(), torch.tensor([0.229, 0.224, 0.225]))


@needs_timm
@pytest.mark.parametrize("model", ["resnet10t", "vit_tiny_patch16_224"])
def test_real_gradient_reaches_every_parameter(model: str) -> None:
    torch.manual_seed(0)
    backbone = TimmBackbone(model=model, image_size=64).eval()
    features = backbone(images(2, 64))
    (features * torch.randn_like(features)).sum().backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@needs_timm
def test_real_unknown_model() -> None:
    with pytest.raises(UsageError, match=r"no model 'resnet10x'.*Did you mean"):
        TimmBackbone(model="resnet10x")
