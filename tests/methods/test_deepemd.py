"""DeepEMD against the linear program it stands for."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import build_method
from parseshot.methods.deepemd import DeepEMD, centred, transport

PRECISE = {"epsilon": 5e-4, "rounds": 2000}


def maps(count: int, seed: int, channels: int = 16, size: int = 3) -> torch.Tensor:
    """Feature maps whose cells have something in common, within an image and over images."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((1, channels, 1, 1), (count, channels, 1, 1), (count, channels, size, size))
    common, of_image, of_cell = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return (0.5 * common + 0.7 * of_image + of_cell).relu()


def build(size: int = 3, **options: float) -> DeepEMD:
    method = build_method("deepemd", 16, size, options).double()
    assert isinstance(method, DeepEMD)
    return method


def unit_rms(features: torch.Tensor) -> np.ndarray:
    """Cells [B, r, C] of maps scaled to unit mean square."""
    found = features.numpy()
    found = found / np.sqrt((found**2).mean((1, 2, 3), keepdims=True))
    return found.reshape(*found.shape[:2], -1).transpose(0, 2, 1)


def problems(count: int, channels: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cells = unit_rms(maps(2 * count, 3, channels, size))
    pairs = [reference.deepemd_pair(cells[2 * at], cells[2 * at + 1]) for at in range(count)]
    return tuple(np.stack(each) for each in zip(*pairs, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize(("channels", "size", "sharp"), [(64, 5, 1), (64, 5, 4), (256, 7, 1), (640, 5, 1)])
def test_the_flow_costs_nearly_what_the_cheapest_one_does(channels: int, size: int, sharp: int) -> None:
    cost, a, b = problems(12, channels, size)
    a, b = (each**sharp / (each**sharp).sum(1, keepdims=True) for each in (a, b))  # sharper: few cells matter
    flow, _, _ = transport(*map(torch.tensor, (cost, a, b)), 0.01, 5)
    exact = np.array([reference.earth_mover(*one)[0] for one in zip(cost, a, b, strict=True)])
    error = (flow.numpy() * cost).sum((1, 2)) - exact
    assert np.abs(error).max() < 0.01
    np.testing.assert_allclose(flow.sum(1), b, atol=1e-12)
    assert np.abs(flow.sum(2).numpy() - a).sum(1).max() < 0.2
    single, _, _ = transport(*(torch.tensor(each).float() for each in (cost, a, b)), 0.01, 5)
    torch.testing.assert_close(single.double(), flow, atol=1e-5, rtol=1e-3)


def test_small_epsilon_and_many_rounds_reach_the_linear_program() -> None:
    features = maps(5, 0)
    method = build(**PRECISE)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(3, 5)), codes.take(slice(3)), torch.arange(3))
    cells = unit_rms(features)
    for q in range(2):
        for y in range(3):
            expected = reference.deepemd_score(cells[3 + q], cells[y], 12.5)
            assert float(found[q, y]) == pytest.approx(expected, abs=12.5 * 5e-4)


def test_the_gradient_is_that_of_the_linear_program() -> None:
    """Through costs and weights, against differences of the exact optimum."""
    method, random = build(**PRECISE), np.random.default_rng(1)
    query, proto = (torch.tensor(unit_rms(maps(1, seed, size=2))) for seed in (1, 2))
    query.requires_grad_()
    method.match(query, proto)[0].sum().backward()
    assert query.grad is not None
    direction = random.normal(size=query.shape)
    start = query.detach().numpy()
    step = 1e-5
    high, low = (reference.deepemd_score((start + s * direction)[0], proto[0].numpy(), 12.5) for s in (step, -step))
    expected = (high - low) / (2 * step)
    assert float((query.grad.numpy() * direction).sum()) == pytest.approx(expected, rel=2e-3)


def test_a_step_of_the_fit_is_the_gradient_with_flows_held() -> None:
    labels = torch.tensor([0, 1, 1, 1, 0])
    method = build(steps=1, rate=0.2)
    support = method.encode(maps(5, 4))["f"]
    mean = torch.stack([support[labels == y].mean(0) for y in range(2)]).requires_grad_()
    with torch.no_grad():
        flow = method.match(support, mean)[1]
    cosine = torch.einsum("kic,njc->knij", centred(support), centred(mean))
    loss = torch.nn.functional.cross_entropy(12.5 * (flow * cosine).sum((2, 3)), labels)
    (slope,) = torch.autograd.grad(loss, mean)
    spread = []
    for y in range(2):
        mine = support[labels == y]
        spread.append(((mine - mine.mean(0)) ** 2).sum() / (mine**2).sum())
    expected = mean.detach() - 0.2 * 9 * 16 * torch.stack(spread)[:, None, None] * slope
    torch.testing.assert_close(method.prototypes(support, labels), expected)


def test_the_fit_lowers_the_loss_of_the_support_photos() -> None:
    labels = torch.arange(5).repeat_interleave(5)
    features = maps(25, 5, size=5) + maps(5, 6, size=5).repeat_interleave(5, 0)

    def loss(steps: int) -> float:
        method = build(5, steps=steps)
        codes = method.encode(features)
        return float(method.loss(codes, codes, labels, labels)["ce"])

    losses = [loss(steps) for steps in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.9 * losses[0]


def test_a_single_photo_is_its_own_prototype_even_when_repeated() -> None:
    method = build()
    codes = method.encode(maps(4, 7))["f"]
    assert torch.equal(method.prototypes(codes[:3], torch.arange(3)), codes[:3])
    twice = method.prototypes(codes[:3].repeat(2, 1, 1), torch.arange(3).repeat(2))
    torch.testing.assert_close(twice, codes[:3])
    mixed = method.prototypes(codes, torch.tensor([0, 1, 2, 2]))
    torch.testing.assert_close(mixed[:2], codes[:2])
    assert (mixed[2] - codes[2:].mean(0)).abs().max() > 1e-3


def test_where_the_cells_lie_does_not_matter() -> None:
    method, features = build(), maps(6, 8)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    moved = features.flatten(2)[..., order].view_as(features)
    support, labels = method.encode(features), torch.tensor([0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(
        method.logits(method.encode(moved), support, labels), method.logits(support, support, labels)
    )


def test_an_empty_map_has_finite_scores_and_gradients() -> None:
    features = torch.zeros(2, 16, 3, 3, requires_grad=True)
    method = build_method("deepemd", 16, 3)
    codes = method.encode(features)
    logits = method.logits(codes, codes, torch.tensor([0, 1]))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert features.grad is not None
    assert features.grad.isfinite().all()
