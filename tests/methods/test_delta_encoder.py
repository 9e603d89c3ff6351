"""Delta-encoder against loops, and what it is known for: variation learned on some classes helps others."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.delta_encoder import DeltaEncoder, self_weighted


def built(channels: int, **options: float) -> DeltaEncoder:
    torch.manual_seed(0)
    method = build_method("delta-encoder", channels, 2, options).double().eval()
    assert isinstance(method, DeltaEncoder)
    return method


def maps(vectors: torch.Tensor) -> torch.Tensor:
    return vectors[:, :, None, None].expand(-1, -1, 2, 2)


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 1, 0, 2, 1]])
def test_logits_are_those_of_each_delta_applied_to_each_photo(labels: list[int]) -> None:
    method = built(6, hidden=5, deltas=4, share=0.7, ridge=0.2, logit_scale=3.0)
    vectors = torch.randn(len(labels) + 3, 6, dtype=torch.float64)
    method.initialise(maps(vectors))
    codes = method.encode(maps(vectors))
    found = method.logits(codes.take(slice(3)), codes.take(slice(3, None)), torch.tensor(labels))
    flat = ((vectors - vectors.mean(0)) / (vectors - vectors.mean(0)).square().mean().sqrt()).numpy()
    weights = {name: value.numpy() for name, value in method.state_dict().items()}
    expected = reference.delta_logits(flat[:3], flat[3:], labels, weights["deltas"], weights, 0.7, 0.2, 3.0)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-8)


def test_large_errors_weigh_more() -> None:
    error = torch.tensor([[1.0, -3.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert self_weighted(error).tolist() == pytest.approx([1 / 10 * 1 + 9 / 10 * 3, 0.0], abs=1e-6)


def test_training_pairs_photos_of_a_class_and_keeps_their_deltas() -> None:
    method = built(6, deltas=3, dropout=0.0)
    labels = torch.tensor([0, 1, 0, 1])
    companion = method.companion(BasePhotos(labels, None)).double()
    codes = method.encode(maps(torch.randn(4, 6, dtype=torch.float64)))
    terms = companion(codes, torch.arange(4))
    x, anchor = codes["f"], codes["f"][[2, 3, 0, 1]]
    code = method.delta(x, anchor)
    torch.testing.assert_close(method.deltas, code[[0, 1, 3]])
    error = method.apply_delta(code, anchor) - x
    torch.testing.assert_close(terms["reconstruction"], (error.abs() ** 3).sum(1).div(error.square().sum(1)).mean())


def test_the_reconstruction_leaves_the_features_alone() -> None:
    method = built(6)
    features = maps(torch.randn(4, 6, dtype=torch.float64)).requires_grad_()
    companion = method.companion(BasePhotos(torch.tensor([0, 1, 0, 1]), None)).double()
    companion(method.encode(features), torch.arange(4))["reconstruction"].backward()
    assert features.grad is None


def test_variation_learned_on_base_classes_is_discounted_in_new_ones() -> None:
    """Photos of a class differ in the first two of twelve directions, in one-shot episodes of new classes as well."""
    random = torch.Generator().manual_seed(1)

    def draw(classes: int, shots: int) -> tuple[torch.Tensor, torch.Tensor]:
        centres = torch.randn(classes, 1, 12, generator=random, dtype=torch.float64)
        noise = torch.randn(classes, shots, 12, generator=random, dtype=torch.float64) * 0.2
        noise[..., :2] *= 20
        return maps((centres + noise).flatten(0, 1)), torch.arange(classes).repeat_interleave(shots)

    base, labels = draw(20, 8)
    method = built(12, dropout=0.0)
    method.initialise(base)
    tests = [draw(5, 6) for _ in range(40)]

    def accuracy() -> float:
        right = []
        for features, targets in tests:
            codes = method.encode(features)
            shown = torch.arange(0, 30, 6)
            scores = method.logits(codes, codes.take(shown), targets[shown])
            right.append((scores.argmax(1) == targets)[torch.arange(30) % 6 > 0].double().mean())
        return float(torch.stack(right).mean())

    before = accuracy()
    companion = method.companion(BasePhotos(labels, None)).double()
    optimiser = torch.optim.Adam([*method.parameters()], lr=3e-3)
    for _ in range(200):
        optimiser.zero_grad()
        companion(method.encode(base), torch.arange(160))["reconstruction"].backward()
        optimiser.step()
    assert accuracy() > before + 0.15
