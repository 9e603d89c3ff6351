"""AFHN against loops, its critic's slope against autograd, and the direction in which each side learns."""

import math

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.afhn import AFHN, Adversary, collapse, others_mean


def built(channels: int = 6, **options: float) -> AFHN:
    torch.manual_seed(0)
    method = build_method("afhn", channels, 2, options).double().eval()
    assert isinstance(method, AFHN)
    return method


def maps(vectors: torch.Tensor) -> torch.Tensor:
    return vectors[:, :, None, None].expand(-1, -1, 2, 2)


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 1, 0, 2, 1]])
def test_logits_are_those_of_features_made_from_class_means(labels: list[int]) -> None:
    method = built(hidden=5, noise=3, synthetic=4, share=0.7, ridge=0.2)
    with torch.no_grad():
        method.log_scale.fill_(math.log(3.0))
    vectors = torch.randn(len(labels) + 3, 6, dtype=torch.float64)
    codes = method.encode(maps(vectors))
    found = method.logits(codes.take(slice(3)), codes.take(slice(3, None)), torch.tensor(labels))
    weights = {name: value.numpy() for name, value in method.state_dict().items()}
    flat = vectors.numpy()
    expected = reference.afhn_logits(flat[:3], flat[3:], labels, weights["noise"], weights, 0.7, 0.2, 3.0)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-8)


def adversary(method: AFHN, labels: torch.Tensor) -> Adversary:
    companion = method.companion(BasePhotos(labels, None)).double()
    assert isinstance(companion, Adversary)
    return companion


def test_the_critics_slope_is_its_gradient() -> None:
    critic = adversary(built(), torch.tensor([0, 1])).critic
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    value, slope = critic(x, torch.randn(5, 6, dtype=torch.float64))
    torch.testing.assert_close(slope, torch.autograd.grad(value.sum(), x)[0])


def test_the_critic_descends_and_the_generator_climbs() -> None:
    """A step of both on the critic's term alone, each in its own direction."""
    labels = torch.arange(4).repeat(8)
    method = built(follow=1.0, anti_collapse=0.0)
    codes = method.encode(maps(torch.randn(32, 6, dtype=torch.float64)))
    companion = adversary(method, labels)

    def term() -> torch.Tensor:
        torch.manual_seed(3)
        return companion(codes, torch.arange(32))["critic"]

    for module, sign in ((companion, -1), (method, 1)):
        before = term()
        weights = [weight for name, weight in module.named_parameters() if name != "log_scale"]
        slopes = torch.autograd.grad(before, weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= 1e-3 * slope
        assert sign * float((term() - before).detach()) > 0


def test_the_penalty_wants_slopes_of_length_one() -> None:
    method = built(penalty=2.0)
    labels = torch.tensor([0, 0, 1, 1])
    companion = adversary(method, labels)
    with torch.no_grad():
        companion.from_feature.bias.fill_(1e6)  # all units on: D is linear with the same slope everywhere
    slope = companion.out.weight[0] @ companion.from_feature.weight
    codes = method.encode(maps(torch.randn(4, 6, dtype=torch.float64)))
    expected = 2.0 * (slope.norm() - 1) ** 2
    torch.testing.assert_close(companion(codes, torch.arange(4))["penalty"], expected)


def test_others_mean_leaves_the_photo_itself_out() -> None:
    features = torch.tensor([[1.0], [2.0], [4.0], [7.0]])
    assert others_mean(features, torch.tensor([0, 0, 0, 1])).flatten().tolist() == [3.0, 2.5, 1.5, 7.0]


def test_collapse_is_one_over_how_far_different_noise_leads() -> None:
    z = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])  # opposite: 1 − cos = 2
    s = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8]])  # 1 − cos = 0.4
    assert float(collapse(*s, *z)) == pytest.approx(5.0)
    assert float(collapse(s[0], s[0], *z)) == pytest.approx(2000.0)


def test_critic_and_anti_collapse_leave_the_features_alone() -> None:
    method = built()
    features = maps(torch.randn(4, 6, dtype=torch.float64)).requires_grad_()
    terms = adversary(method, torch.tensor([0, 0, 1, 1]))(method.encode(features), torch.arange(4))
    sum(terms.values()).backward()
    assert features.grad is None
