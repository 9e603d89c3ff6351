"""MTL against loops, and what it does to the backbones: frozen weights, scaled and shifted."""

from pathlib import Path

import numpy as np
import pytest
import torch

import reference
from parseshot.backbones import build_backbone
from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.training import EpisodeStage, PretrainingConfig, PretrainingStage, TrainingConfig
from parseshot.methods import adapt_backbone, build_method
from parseshot.methods.mtl import MTL


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 1, 0, 2, 1]])
def test_logits_are_those_of_gradient_steps_from_the_start(labels: list[int]) -> None:
    torch.manual_seed(0)
    method = build_method("mtl", 6, 2, {"steps": 7, "rate": 1.5}).double().eval()
    assert isinstance(method, MTL)
    with torch.no_grad():
        for weight in method.parameters():
            weight += torch.rand(6) / 2
    features = torch.randn(len(labels) + 3, 6, 2, 2, dtype=torch.float64)
    method.initialise(features)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(3)), codes.take(slice(3, None)), torch.tensor(labels))
    scale, shift, start = (weight.detach().numpy() for weight in (method.scale, method.shift, method.start))
    pooled = features.numpy().mean((2, 3))
    pooled = (pooled - pooled.mean(0)) / np.sqrt(((pooled - pooled.mean(0)) ** 2).mean())
    flat = scale * pooled + shift
    expected = reference.mtl_logits(flat[:3], flat[3:], labels, start, 7, 1.5)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-9)


BACKBONES = [
    ("conv4", {"channels": 8}, 8 * 3 + 3 * 8 * 8, 4 * 8),
    ("conv4", {"channels": 8, "mirror": True}, 8 * 3 + 3 * 8 * 8, 4 * 8),
    ("efficientnet_lite0", {"pretrained": False, "level": "stride16", "trainable_blocks": 2}, 2 * (672 + 672 + 112), 0),
]


@pytest.mark.parametrize(("name", "options", "scales", "shifts"), BACKBONES)
def test_a_changed_backbone_starts_as_it_was_and_learns_scales_and_shifts(
    name: str, options: dict, scales: int, shifts: int
) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(name, **options)
    images = torch.rand(2, 3, 32, 32)
    before = backbone.eval()(images)
    adapt_backbone("mtl", backbone, {})
    torch.testing.assert_close(backbone.eval()(images), before)
    learned = dict(backbone.named_parameters())
    counts = {
        kind: sum(
            weight.numel() for key, weight in learned.items() if key.endswith(f".0.{kind}") and weight.requires_grad
        )
        for kind in ("scale", "shift")
    }
    assert counts == {"scale": scales, "shift": shifts}
    assert not [key for key, weight in learned.items() if key.endswith("original") and weight.requires_grad]
    scale = next(weight for key, weight in learned.items() if key.endswith(".0.scale"))
    with torch.no_grad():
        scale[0] *= -3
    assert not torch.allclose(backbone.eval()(images), before)
    backbone(images).square().sum().backward()
    assert scale.grad is not None
    assert scale.grad.abs().max() > 0


def test_a_scaled_and_shifted_convolution_is_that() -> None:
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Conv2d(3, 3, 1, bias=False))
    first, second = (layer.weight.detach().clone() for layer in backbone)
    bias = backbone[0].bias.detach().clone()
    MTL.adapt(backbone, None)
    with torch.no_grad():
        for weight in backbone.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn_like(weight))
    scales = [layer.parametrizations.weight[0].scale for layer in backbone]
    assert [tuple(scale.shape) for scale in scales] == [(3, 2, 1, 1), (3, 1, 1, 1)]
    images = torch.randn(1, 2, 4, 4)
    hidden = torch.nn.functional.conv2d(images, first * scales[0], bias + backbone[0].parametrizations.bias[0].shift)
    torch.testing.assert_close(backbone(images), torch.nn.functional.conv2d(hidden, second * scales[1]))


def test_filters_are_learned_in_pretraining_and_held_in_episodes(birds: Pack) -> None:
    config = TrainingConfig(
        episodes=2, way=4, shots=2, queries=2, lr=1e-2, pretraining=PretrainingConfig(steps=2, batch=8, lr=1e-2)
    )
    torch.manual_seed(0)
    model = Model(ModelConfig(method="mtl", backbone_options={"channels": 8}))
    before = copied(model)
    for kind, moving, still in (
        (PretrainingStage, "original", ".0.scale"),
        (EpisodeStage, ".0.scale", "original"),
    ):
        stage = kind(model, birds, config)
        stage.begin()
        stage.step(torch.optim.Adam(stage.module.parameters(), lr=1e-2), 0)
        after = copied(model)
        assert all(not torch.equal(after[key], before[key]) for key in before if key.endswith(moving)), kind
        assert all(torch.equal(after[key], before[key]) for key in before if key.endswith(still)), kind
        before = after


def copied(model: Model) -> dict[str, torch.Tensor]:
    return {key: weight.detach().clone() for key, weight in model.backbone.named_parameters()}


def test_a_frozen_backbone_is_left_alone() -> None:
    backbone = build_backbone("efficientnet_lite0", pretrained=False, level="stride16")
    names = list(backbone.state_dict())
    adapt_backbone("mtl", backbone, {})
    assert list(backbone.state_dict()) == names
    assert not [weight for weight in backbone.parameters() if weight.requires_grad]


def test_a_model_is_saved_with_its_scales_and_read_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(ModelConfig(method="mtl", backbone_options={"channels": 8})).eval()
    with torch.no_grad():
        model.backbone.block1[0].parametrizations.weight[0].scale.uniform_(0.5, 2)
    model.save_pretrained(tmp_path / "model")
    images = torch.rand(2, 3, 84, 84)
    with torch.inference_mode():
        torch.testing.assert_close(Model.from_pretrained(tmp_path / "model")(images)["f"], model(images)["f"])
