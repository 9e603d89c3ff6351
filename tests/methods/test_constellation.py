"""ConstellationNet against its formulas: clusters, positions, attention, cosine."""

import numpy as np
import pytest
import torch
from torch import nn

import reference
from parseshot.errors import UsageError
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.constellation import Constellation, sine_positions

CHANNELS, SIZE, CLUSTERS, HEADS = 5, 3, 8, 2


def build(**options: float) -> Constellation:
    torch.manual_seed(1)
    given = {"clusters": CLUSTERS, "heads": HEADS, "sharpness": 9.0} | options
    method = build_method("constellation", CHANNELS, SIZE, given).double()
    assert isinstance(method, Constellation)
    with torch.no_grad():
        method.log_scale.fill_(np.log(6.0))
        for weight in method.parameters():
            if weight.dim() == 1:  # biases and norms away from 0 and 1
                weight.add_(torch.rand_like(weight) * 0.4)
        for layer in method.merge:
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.uniform_(-0.3, 0.3)
                layer.running_var.uniform_(0.5, 1.5)
    method.initialise(maps(10, seed=9))
    return method.eval()


def maps(count: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, SIZE, SIZE, generator=random, dtype=torch.float64).abs()


def numbers(layer: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    return layer.weight.detach().numpy(), layer.bias.detach().numpy()


def encode_one(method: Constellation, phi: np.ndarray) -> np.ndarray:
    cells = phi.reshape(CHANNELS, -1).T
    centres = method.centres.numpy()
    tokens = np.array([[c @ v / (np.linalg.norm(c) * np.linalg.norm(v)) for v in centres] for c in cells])
    positions = np.array([reference.sine_position(i % SIZE + 1, i // SIZE + 1, CLUSTERS) for i in range(SIZE**2)])
    weights = method.attention.in_proj_weight.detach().numpy().reshape(3, CLUSTERS, CLUSTERS)
    biases = method.attention.in_proj_bias.detach().numpy().reshape(3, CLUSTERS)
    found = reference.many_headed(tokens, positions, weights, biases, numbers(method.attention.out_proj), HEADS)
    tokens = [reference.norm_token(x, *numbers(method.norms[0])) for x in tokens + found]
    perceptron = [numbers(method.mlp[0]), numbers(method.mlp[3])]
    tokens = [reference.norm_token(x + reference.perceptron(x, perceptron), *numbers(method.norms[1])) for x in tokens]
    norm = method.merge[1]
    weight, bias = numbers(norm)
    total = np.zeros(CHANNELS)
    for cell, token in zip(cells, tokens, strict=True):
        merged = method.merge[0].weight.detach().numpy()[:, :, 0, 0] @ np.concatenate((cell, token))
        merged = (merged - norm.running_mean.numpy()) / np.sqrt(norm.running_var.numpy() + norm.eps) * weight + bias
        total += np.maximum(merged, 0.0)
    return total / len(cells)


def test_scores_are_cosines_of_the_related_parts() -> None:
    method, features, labels = build(), maps(6, seed=2), torch.tensor([1, 0, 1, 1])
    codes = method.encode(features)
    scaled = features.numpy() / np.sqrt((maps(10, seed=9).numpy() ** 2).mean())
    expected = np.array([encode_one(method, phi) for phi in scaled])
    np.testing.assert_allclose(codes["f"].detach(), expected, atol=1e-9)
    found = method.logits(codes.take(slice(4, 6)), codes.take(slice(4)), labels).detach()
    for q in range(2):
        for y in range(2):
            mean = expected[:4][labels.numpy() == y].mean(0)
            cosine = expected[4 + q] @ mean / (np.linalg.norm(expected[4 + q]) * np.linalg.norm(mean))
            assert float(found[q, y]) == pytest.approx(6.0 * cosine, abs=1e-9)


def test_centres_follow_the_cells_in_training_only() -> None:
    method, features = build(), maps(4, seed=3)
    before = method.centres.clone(), method.counts.clone()
    method.encode(features)
    assert torch.equal(method.centres, before[0])
    method.train().encode(features)
    cells = (features * method.scale).flatten(2).transpose(1, 2).flatten(0, 1).numpy()
    centres, counts = reference.kmeans_step(cells, before[0].numpy(), before[1].numpy(), 9.0)
    np.testing.assert_allclose(method.centres, centres, atol=1e-12)
    np.testing.assert_allclose(method.counts, counts, atol=1e-12)
    method.encode(features)
    np.testing.assert_allclose(
        method.centres, reference.kmeans_step(cells, centres, counts, 9.0)[0], atol=1e-12, err_msg="the second step"
    )


def test_centres_find_groups_and_stay_finite_where_no_cell_is_near() -> None:
    """Two kinds of cells and sharp assignments, in float32: some centres get a share that rounds to 0."""
    torch.manual_seed(0)
    method = build_method("constellation", CHANNELS, SIZE, {"sharpness": 1000.0}).train()
    kinds = torch.eye(CHANNELS)[:2]
    features = kinds[torch.randint(2, (20, SIZE, SIZE))].permute(0, 3, 1, 2) + 0.01 * torch.rand(20, CHANNELS, 3, 3)
    for _ in range(10):
        method.encode(features)
    assert method.centres.isfinite().all()
    near = torch.nn.functional.normalize(method.centres, dim=1) @ kinds.T
    assert (near.amax(0) > 0.99).all()


def test_several_processes_move_the_centres_by_the_cells_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    method, twice, features = build().train(), build().train(), maps(3, seed=4)
    twice.encode(features.repeat(2, 1, 1, 1))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))  # another with the same cells
    method.encode(features)
    torch.testing.assert_close(method.centres, twice.centres)
    torch.testing.assert_close(method.counts, twice.counts)


def test_positions_are_sines_of_y_and_x() -> None:
    found = sine_positions(4, 12)
    expected = [reference.sine_position(i % 4 + 1, i // 4 + 1, 12) for i in range(16)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_where_a_part_lies_matters() -> None:
    """Not to a mean of cells, but to attention with positions."""
    method, features = build(), maps(2, seed=5)
    moved = features.flatten(2)[..., torch.arange(9).roll(4)].view_as(features)
    assert float((method.encode(features)["f"] - method.encode(moved)["f"]).abs().max().detach()) > 1e-4


def test_the_companion_classifies_base_classes() -> None:
    method = build()
    codes, base = method.encode(maps(3, seed=7)), BasePhotos(torch.tensor([1, -1, 0, 2]), None)
    companion = method.companion(base).double()
    scores = codes["f"] @ companion.linear.weight.T + companion.linear.bias
    expected = -torch.log_softmax(scores, 1)[torch.arange(3), torch.tensor([2, 1, 0])].mean()
    torch.testing.assert_close(companion(codes, torch.tensor([3, 0, 2]))["base_ce"], expected)


def test_clusters_must_share_out_over_heads() -> None:
    with pytest.raises(UsageError, match="multiple of 4 and of heads, got 12 and 8"):
        build_method("constellation", CHANNELS, SIZE, {"clusters": 12})
