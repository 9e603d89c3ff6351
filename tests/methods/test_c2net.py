"""C2-Net against its formulas, one query and one class at a time, and its warp against PyTorch's."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import reference
from parseshot.backbones.base import pack_pair
from parseshot.methods import Encoding, Method, build_method
from parseshot.methods.c2net import sampling

LABELS = np.array([2, 0, 1, 1, 0, 1, 1])  # unbalanced: 2, 4 and 1 photos
CHANNELS, FINE, SIZE = 6, 5, 3


def pairs(count: int = 11) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    coarse = torch.randn(count, CHANNELS, SIZE, SIZE, generator=random, dtype=torch.float64)
    fine = torch.randn(count, FINE, 2 * SIZE, 2 * SIZE, generator=random, dtype=torch.float64)
    return pack_pair(3 * coarse, 0.1 * fine)


def build(**options: object) -> Method:
    """With shifts of a cell or so, and norms that are not the identity."""
    torch.manual_seed(1)
    method = build_method("c2net", CHANNELS, SIZE, options, fine=FINE).double()
    with torch.no_grad():
        for adjustment in method.adjustments.values():
            adjustment.move[2].weight.normal_(std=0.3)
            adjustment.move[2].bias.normal_(std=0.3)
        for module in method.modules():
            if isinstance(module, torch.nn.LayerNorm | torch.nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(std=0.3)
        method.log_scales.copy_(torch.tensor([0.4, -0.3], dtype=torch.float64))
    return method.eval()


def test_logits_are_the_distances_of_both_levels() -> None:
    method = build()
    method.initialise(pairs())
    codes = method.encode(pairs())
    found = method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), torch.tensor(LABELS)).detach()
    expected = np.zeros((4, 3))
    for level, scale in (("coarse", 0.4), ("fine", -0.3)):
        weights = {name: value.numpy() for name, value in method.adjustments[level].state_dict().items()}
        maps = codes[level].detach().numpy().reshape(11, CHANNELS, SIZE, SIZE)
        for y in range(3):
            own = [maps[i] for i in range(7) if LABELS[i] == y]
            prototype = sum(own) / len(own)
            for q in range(4):
                expected[q, y] -= math.exp(scale) * reference.c2net_distance(maps[7 + q], prototype, weights)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kernel", [1, 3])
def test_the_layers_refine_each_other_and_get_weights(kernel: int) -> None:
    method, features = build(kernel=kernel), pairs()
    method.initialise(features)
    codes = method.encode(features)
    coarse, fine = features[:, :CHANNELS], F.pixel_shuffle(features[:, CHANNELS:], 2)
    with torch.no_grad():
        high = method.refinement.coarse(coarse / coarse.square().mean().sqrt()).flatten(2).numpy()
        middle = method.refinement.fine(fine / fine.square().mean().sqrt()).flatten(2).numpy()
    assert method.refinement.fine[0][0].kernel_size == (kernel, kernel)
    for i in range(len(features)):
        for level, refined in zip(("coarse", "fine"), reference.c2net_refined(high[i], middle[i]), strict=True):
            gate = method.gates[level]
            blocks = (gate.widen.weight, gate.norm.weight, gate.norm.bias, gate.narrow.weight)
            weights = reference.tdm_gate(refined.max(1), *(block.detach().numpy() for block in blocks))
            np.testing.assert_allclose(codes[level][i].detach().numpy(), refined * weights[:, None], rtol=0, atol=1e-9)


def test_sampling_is_an_affine_grid_of_unit_diagonal() -> None:
    random = torch.Generator().manual_seed(2)
    maps = torch.randn(4, 3, 5, 5, generator=random, dtype=torch.float64)
    shift = torch.randn(4, 2, 4, generator=random, dtype=torch.float64)  # far outside of the map, too
    found = (maps.flatten(2) @ sampling(shift, 5).flatten(2)).view(4, 3, 2, 5, 5)
    for q in range(4):
        for y in range(2):
            a, b, c, d = shift[q, y].tolist()
            theta = torch.tensor([[[1.0, a, b], [c, 1.0, d]]], dtype=torch.float64)
            grid = F.affine_grid(theta, [1, 3, 5, 5], align_corners=False)
            torch.testing.assert_close(found[q, :, y], F.grid_sample(maps[q : q + 1], grid, align_corners=False)[0])
    still = sampling(torch.zeros(1, 1, 4), 5)[0, :, 0]
    assert torch.equal(still, torch.eye(25))


def test_only_training_adds_noise_and_not_in_the_scores() -> None:
    method = build().train()
    for module in method.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()  # its statistics of the batch are another matter
    one, other = method.encode(pairs()), method.encode(pairs())
    plain = build().encode(pairs())
    assert not torch.allclose(one["coarse"], other["coarse"])
    changed = (one["fine"] - plain["fine"]).abs() / plain["fine"].abs().clamp_min(1e-9)
    assert changed.max() > 0.01
    labels = torch.tensor(LABELS)

    def scores(codes: Encoding) -> torch.Tensor:
        return method.logits(codes.take(slice(7, 11)), codes.take(slice(7)), labels)

    assert torch.equal(scores(one), scores(one))
    quiet = build(noise=0.0).train()
    for module in quiet.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    torch.testing.assert_close(quiet.encode(pairs())["fine"], plain["fine"])


def test_the_loss_asks_each_level_and_their_sum() -> None:
    method, labels, targets = build(), torch.tensor(LABELS), torch.tensor([0, 1, 2, 0])
    codes = method.encode(pairs())
    query, support = codes.take(slice(7, 11)), codes.take(slice(7))
    terms = method.loss(query, support, labels, targets)
    assert terms.keys() == {"ce", "ce_coarse", "ce_fine"}
    for i, level in enumerate(("coarse", "fine")):
        scores = -method.log_scales[i].exp() * method.distances(query, support, labels, level)
        torch.testing.assert_close(terms[f"ce_{level}"], F.cross_entropy(scores, targets))


def test_a_moved_query_finds_its_class_again() -> None:
    """What the warp is for: with the right shift, a map moved by one cell is as near as before, but for the edge."""
    method = build()
    adjustment = method.adjustments["coarse"]
    maps = torch.zeros(1, CHANNELS, SIZE, SIZE, dtype=torch.float64)
    maps[:, :, 1, 1] = torch.arange(1.0, CHANNELS + 1)
    moved = maps.roll(1, -1)
    with torch.no_grad():
        adjustment.weigh[2].weight.zero_()
        adjustment.weigh[2].bias.zero_()
        adjustment.move[2].weight.zero_()

    def distance(b: float) -> float:
        with torch.no_grad():
            adjustment.move[2].bias.copy_(torch.tensor([0.0, b, 0.0, 0.0]))
            codes = [Encoding(coarse=each.flatten(2)) for each in (moved, maps)]
            return float(method.distances(*codes, torch.tensor([0]), "coarse"))

    assert distance(2 / SIZE) == pytest.approx(0.0, abs=1e-12)  # a cell is 2/G wide
    assert distance(0.0) > 1
