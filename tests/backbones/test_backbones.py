"""The backbones: exact sizes, shapes, normalisation, gradients, and DropBlock's schedule and blocks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parseshot.backbones import BACKBONES, Backbone, ResNet12, ResNet18, build_backbone
from parseshot.backbones.dropblock import DropBlock, block_mask
from parseshot.backbones.normalise import IMAGENET_MEAN, IMAGENET_STD, Normalise
from parseshot.errors import UsageError

OWN = ("conv4", "resnet12", "resnet18")


def images(batch: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def seeded(name: str, seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    return build_backbone(name)


# Sizes and shapes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv4", 113_088),  # 3·64·9 + 3·64·64·9 weights, 4·64 biases, 4·2·64 of batch norm
        ("resnet12", 12_424_320),
        ("resnet18", 11_176_512),  # torchvision's 11,689,512 less fc: 512·1000 + 1000
    ],
)
def test_parameter_count(name: str, expected: int) -> None:
    assert sum(parameter.numel() for parameter in build_backbone(name).parameters()) == expected


@pytest.mark.parametrize(
    ("name", "options", "size", "shape"),
    [
        ("conv4", {}, 84, (64, 5, 5)),
        ("conv4", {"pools": 3}, 84, (64, 10, 10)),
        ("conv4", {"pools": 2}, 84, (64, 21, 21)),
        ("conv4", {"channels": 32}, 84, (32, 5, 5)),
        ("resnet12", {}, 84, (640, 5, 5)),
        ("resnet18", {}, 224, (512, 7, 7)),
        ("resnet18", {}, 84, (512, 3, 3)),
    ],
)
def test_shape(name: str, options: dict[str, int], size: int, shape: tuple[int, int, int]) -> None:
    backbone = build_backbone(name, **options).eval()
    with torch.no_grad():
        features = backbone(images(2, size))
    assert features.shape == (2, *shape)
    assert features.isfinite().all()
    assert (backbone.out_channels, backbone.grid(size), backbone.grid(size)) == shape


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("size", [33, 47, 64, 84, 95, 96])
def test_grid_is_the_size_of_the_map(name: str, size: int) -> None:
    backbone = build_backbone(name).eval()
    with torch.no_grad():
        assert backbone(images(1, size)).shape[-2:] == (backbone.grid(size), backbone.grid(size))


def test_resnet18_has_the_parameter_names_of_torchvision() -> None:
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {"conv1.weight"} | {f"bn1.{key}" for key in norm}
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            for k in (1, 2):
                names.add(f"layer{layer}.{block}.conv{k}.weight")
                names |= {f"layer{layer}.{block}.bn{k}.{key}" for key in norm}
        if layer > 1:
            names.add(f"layer{layer}.0.downsample.0.weight")
            names |= {f"layer{layer}.0.downsample.1.{key}" for key in norm}
    assert set(ResNet18().state_dict()) == names


# The registry


def test_registry_builds_by_name() -> None:
    assert isinstance(build_backbone("resnet12", drop_rate=0.2), ResNet12)
    assert set(OWN) <= set(BACKBONES)


def test_unknown_name_is_answered_with_its_neighbours_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"'resnet21'.*Did you mean.*'resnet12'.*Known backbones: conv4, resnet12"):
        build_backbone("resnet21")


def test_unknown_option_is_refused() -> None:
    with pytest.raises(UsageError, match="backbone conv4 has no option depth; it has channels, pools, mirror, paired"):
        build_backbone("conv4", depth=64)


# Normalisation and initialisation


def test_normalise_is_the_imagenet_formula_and_is_not_saved() -> None:
    x = images(2, 8)
    for channel, (mean, std) in enumerate(zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)):
        torch.testing.assert_close(Normalise()(x)[:, channel], (x[:, channel] - mean) / std)
    assert Normalise().state_dict() == {}


@pytest.mark.parametrize("name", OWN)
def test_backbone_normalises_its_own_input(name: str) -> None:
    backbone = seeded(name).eval()
    x = images(1, 64)
    with torch.no_grad():
        expected = backbone(x)
        by_hand = Normalise()(x)
        backbone.normalise = nn.Identity()
        torch.testing.assert_close(backbone(by_hand), expected)
    assert not any("normalise" in key for key in backbone.state_dict())


@pytest.mark.parametrize(("name", "slope"), [("conv4", 0.0), ("resnet12", 0.1), ("resnet18", 0.0)])
def test_initial_weights_have_the_fan_out_deviation(name: str, slope: float) -> None:
    """He et al.: variance 2 / ((1 + slope²) · fan_out); a sample of n normals has its deviation to about 1/√(2n)."""
    for layer in seeded(name).modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1]
            expected = (2 / ((1 + slope**2) * fan_out)) ** 0.5
            assert layer.weight.std().item() == pytest.approx(expected, rel=4 / (2 * layer.weight.numel()) ** 0.5)
            assert layer.bias is None or not layer.bias.any()
        elif isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all()
            assert not layer.bias.any()


# Behaviour


@pytest.mark.parametrize("name", OWN)
def test_channels_last_equals_contiguous(name: str) -> None:
    backbone = seeded(name).eval()
    x = images(2, 84)
    with torch.no_grad():
        expected = backbone(x)
        backbone = backbone.to(memory_format=torch.channels_last)
        features = backbone(x.to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)
    assert (features - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", OWN)
def test_gradient_reaches_every_parameter(name: str) -> None:
    """In eval mode: in training mode batch norm takes the gradient of Conv-4's biases away."""
    backbone = seeded(name).eval()
    backbone(images(2, 64)).square().mean().backward()
    for key, parameter in backbone.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("name", OWN)
def test_an_image_does_not_depend_on_its_neighbours_in_eval_mode(name: str) -> None:
    backbone = seeded(name).eval()
    x = images(3, 64)
    with torch.no_grad():
        together, alone = backbone(x)[:1], backbone(x[:1])
    assert (together - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_resnet12_takes_a_training_step() -> None:
    backbone = seeded("resnet12").train()
    head = nn.Linear(640, 2)
    before = {key: parameter.detach().clone() for key, parameter in backbone.named_parameters()}
    optimiser = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=1e-3)
    logits = head(backbone(images(4, 84)).mean(dim=(-2, -1)))  # [4, 2]
    loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1, 0, 1]))
    loss.backward()
    optimiser.step()
    assert loss.isfinite()
    for key, parameter in backbone.named_parameters():
        assert parameter.isfinite().all(), key
        assert not torch.equal(parameter, before[key]), key


def test_resnet12_same_seed_same_bits_in_training() -> None:
    backbone = seeded("resnet12").train()
    backbone.block3.drop.num_batches_tracked.fill_(40_000)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs.append(backbone(images(2, 64)))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_resnet12_drops_blocks_in_the_last_two_blocks_only() -> None:
    backbone = ResNet12(drop_rate=0.2, block_size=3)
    drops = [backbone.block1.drop, backbone.block2.drop, backbone.block3.drop, backbone.block4.drop]
    assert [type(drop) for drop in drops] == [nn.Dropout, nn.Dropout, DropBlock, DropBlock]
    assert [drop.p for drop in drops[:2]] == [0.2, 0.2]
    assert [(drop.drop_rate, drop.block_size) for drop in drops[2:]] == [(0.2, 3), (0.2, 3)]


# DropBlock


def ramped(**options: float) -> DropBlock:
    """A DropBlock at the end of its schedule."""
    drop = DropBlock(**options)
    drop.num_batches_tracked.fill_(drop.ramp_batches)
    return drop.train()


def test_dropblock_is_the_identity_in_eval_mode() -> None:
    drop = ramped().eval()
    x = torch.randn(2, 3, 10, 10)
    assert torch.equal(drop(x), x)
    assert drop.num_batches_tracked == drop.ramp_batches


def test_dropblock_schedule_is_metaoptnets() -> None:
    drop = DropBlock(drop_rate=0.1)
    for batches in (0, 1, 20_000, 39_999, 40_000, 100_000):
        drop.num_batches_tracked.fill_(batches)
        keep_rate = max(1 - 0.1 / (20 * 2000) * batches, 1 - 0.1)
        assert 1 - drop.dropped_share().item() == pytest.approx(keep_rate, abs=1e-7)


def test_dropblock_counts_training_batches_and_resumes(tmp_path: Path) -> None:
    backbone = seeded("resnet12")
    with torch.no_grad():
        for _ in range(3):
            backbone.train()(images(2, 32))
        backbone.eval()(images(2, 32))
    assert backbone.state_dict()["block3.drop.num_batches_tracked"] == 3
    save_file(backbone.state_dict(), tmp_path / "weights.safetensors")
    resumed = build_backbone("resnet12")
    resumed.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    for drop in (resumed.block3.drop, resumed.block4.drop):
        assert drop.num_batches_tracked == 3
        assert drop.num_batches_tracked.dtype == torch.long


def test_dropblock_keeps_each_cell_with_the_derived_probability() -> None:
    """A cell survives if none of the corners whose block covers it is drawn: (1 − gamma)^(corners covering it)."""
    torch.manual_seed(0)
    side, block, samples = 10, 5, 40_000
    kept = block_mask(torch.Size((samples, 1, side, side)), share=torch.tensor(0.1), block_size=block).mean(dim=(0, 1))
    gamma = 0.1 / 25 * 100 / 36
    along = torch.tensor([1.0, 2, 3, 4, 5, 5, 4, 3, 2, 1])  # the corners in 0..5 whose block covers row i
    expected = (1 - gamma) ** torch.outer(along, along)
    deviation = (expected * (1 - expected) / samples).sqrt()
    assert ((kept - expected).abs() <= 5 * deviation).all()


def test_dropblock_drops_whole_channels_where_the_block_fills_the_map() -> None:
    torch.manual_seed(0)
    mask = block_mask(torch.Size((100, 640, 5, 5)), share=torch.tensor(0.1), block_size=5)
    assert torch.equal(mask, mask[..., :1, :1].expand_as(mask))
    assert mask.mean().item() == pytest.approx(0.9, abs=5 * (0.09 / 64_000) ** 0.5)


def test_dropblock_drops_squares() -> None:
    """Every dropped cell lies in a 5×5 square that is dropped entirely, and not all in a 6×6 one."""
    torch.manual_seed(3)
    dropped = 1 - block_mask(torch.Size((1, 1, 200, 200)), share=torch.tensor(0.02), block_size=5)
    assert dropped.any()
    assert torch.equal(opening(dropped, 5), dropped)
    assert not torch.equal(opening(dropped, 6), dropped)


def opening(binary: torch.Tensor, side: int) -> torch.Tensor:
    """The union of the side×side squares that lie in a binary map."""
    corners = -nn.functional.max_pool2d(-binary, side, stride=1)  # 1 where a whole square starts
    return nn.functional.max_pool2d(nn.functional.pad(corners, (side - 1,) * 4), side, stride=1)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 7), (5, 4), (5, 5)])
def test_dropblock_accepts_maps_smaller_than_the_block(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    out = ramped(drop_rate=0.5)(torch.ones(64, 8, *shape))
    assert out.shape == (64, 8, *shape)
    assert out.isfinite().all()
    assert (out == 0).any()
    assert (out > 0).any()


def test_dropblock_preserves_the_scale() -> None:
    torch.manual_seed(0)
    out = ramped(drop_rate=0.3)(torch.ones(8, 32, 10, 10, dtype=torch.float64))
    assert out.mean().item() == pytest.approx(1, abs=1e-6)
    assert len(out.unique()) == 2
    assert out.dtype == torch.float64


def test_dropblock_survives_dropping_everything() -> None:
    drop = ramped(drop_rate=0.99, block_size=1)
    torch.manual_seed(0)
    for _ in range(20):
        assert drop(torch.ones(1, 1, 1, 1)).isfinite().all()


@pytest.mark.parametrize("options", [{"drop_rate": 1.0}, {"drop_rate": -0.1}, {"block_size": 0}, {"ramp_batches": 0}])
def test_dropblock_refuses_impossible_options(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DropBlock(**options)


def test_mirror_kernels_mirror_the_features() -> None:
    """96 px: every pooling divides evenly, so the equality is exact up to rounding."""
    torch.manual_seed(0)
    images = torch.rand(2, 3, 96, 96)
    for mirror in (True, False):
        backbone = build_backbone("conv4", pools=2, mirror=mirror).eval()
        with torch.no_grad():
            straight, flipped = backbone(images), backbone(images.flip(-1)).flip(-1)
        assert (float((straight - flipped).abs().max()) < 1e-5 * float(straight.abs().max())) == mirror
    assert sum(parameter.numel() for parameter in build_backbone("conv4", mirror=True).parameters()) == 113_088
