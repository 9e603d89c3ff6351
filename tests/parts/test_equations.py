"""Parse, distance and losses against the float64 loops of tests/reference.py, and their gradients."""

import numpy as np
import pytest
import torch

import reference
from parseshot.parts import losses
from parseshot.parts.distance import compare, show
from parseshot.parts.parsing import parse

PRESETS = [
    pytest.param(True, True, id="lasso"),
    pytest.param(False, False, id="paper"),
    pytest.param(False, True, id="mixed"),
]
SCALES = (1, 3, 5)


def make(exact: bool, size: int = 5, channels: int = 3, parts: int = 3, images: int = 3, seed: int = 0):
    random = np.random.default_rng(seed)
    phi = np.maximum(random.normal(size=(images, channels, size, size)), 0) + 0.01
    templates = [random.normal(size=(parts, channels, side, side)) + 0.7 for side in SCALES]
    # The literal (a − λ/2‖D‖)² of the reference loses digits as ‖D‖ → 0; `test_a_tiny_template_…` goes there.
    templates = [np.copysign(np.abs(one) + 0.1, one) for one in templates]
    return phi, templates, {"lam": 0.6, "zeta": 0.0 if exact else 0.05}


def fast(phi, templates, temperatures, exact, normalised, dtype=torch.float64, **constants):
    return parse(
        torch.tensor(phi, dtype=dtype),
        [torch.tensor(one, dtype=dtype) for one in templates],
        None if temperatures is None else torch.tensor(temperatures, dtype=dtype),
        exact=exact,
        normalised=normalised,
        **constants,
    )


@pytest.mark.parametrize(("exact", "normalised"), PRESETS)
@pytest.mark.parametrize("size", [5, 7])
@pytest.mark.parametrize("hard", [False, True])
def test_parse_is_algorithm_1(exact: bool, normalised: bool, size: int, hard: bool) -> None:
    phi, templates, constants = make(exact, size)
    temperatures = None if hard else [0.7, 0.4, 1.3]
    found = fast(phi, templates, temperatures, exact, normalised, **constants)
    single = fast(phi, templates, temperatures, exact, normalised, dtype=torch.float32, **constants)
    for image in range(len(phi)):
        nu, mu, z, spread = reference.parse_image(
            phi[image], templates, constants["lam"], temperatures or [None] * 3, exact, normalised, constants["zeta"]
        )
        for name, expected in (("nu", nu), ("mu", mu), ("z", z), ("entropy", spread)):
            np.testing.assert_allclose(getattr(found, name)[image], expected, rtol=0, atol=1e-9, err_msg=name)
            np.testing.assert_allclose(getattr(single, name)[image], expected, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(("exact", "normalised"), PRESETS)
def test_a_tiny_template_costs_no_digits_in_float32(exact: bool, normalised: bool) -> None:
    phi, templates, constants = make(exact)
    templates[0][0, 1] = 1e-5
    double = fast(phi, templates, [0.7, 0.4, 1.3], exact, normalised, **constants)
    single = fast(phi, templates, [0.7, 0.4, 1.3], exact, normalised, dtype=torch.float32, **constants)
    np.testing.assert_allclose(single.nu, double.nu, rtol=0, atol=1e-4)
    np.testing.assert_allclose(single.mu, double.mu, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("exact", "normalised"), PRESETS)
def test_distance_is_equation_7(exact: bool, normalised: bool) -> None:
    random = np.random.default_rng(1)
    z, h, mu = (random.normal(size=(9, 3, 4, *last)) for last in ((6,), (), (2,)))
    h = np.abs(h)
    labels = np.array([0, 0, 0, 1, 2, 2])  # unbalanced
    slopes, gamma = np.array([-0.8, 0.5]), 0.3
    query, support = slice(0, 3), slice(3, 9)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        tensors = [torch.tensor(value, dtype=dtype) for value in (z, h, mu)]
        found = compare(
            tuple(t[query] for t in tensors),
            show(tuple(t[support] for t in tensors), torch.tensor(labels)),
            slopes=torch.tensor(slopes, dtype=dtype),
            gamma=torch.tensor(gamma, dtype=dtype),
            normalised=normalised,
        ).total
        for q in range(3):
            for y in range(3):
                members = [(z[3 + i], h[3 + i], mu[3 + i]) for i in np.flatnonzero(labels == y)]
                expected = reference.distance((z[q], h[q], mu[q]), members, slopes, gamma, normalised)
                assert float(found[q, y]) == pytest.approx(expected, rel=0, abs=tolerance * max(1.0, expected))


@pytest.mark.parametrize("normalised", [True, False])
def test_losses_are_algorithm_2(normalised: bool) -> None:
    random = np.random.default_rng(2)
    distances, targets = random.uniform(0, 3, size=(4, 3)), np.array([0, 2, 1, 1])
    nu = random.dirichlet(np.ones(25), size=(10, 3, 4)).reshape(10, 3, 4, 5, 5)
    expected = reference.episode_loss(distances, targets, nu[:4], nu[4:], 0.7, normalised)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        maps = torch.tensor(nu, dtype=dtype)
        per_image = losses.diversity(maps, normalised=normalised)
        found = losses.cross_entropy(-torch.tensor(distances, dtype=dtype), torch.tensor(targets))
        found = found + 0.7 * losses.episode_diversity(per_image[:4], per_image[4:])
        assert float(found) == pytest.approx(expected, rel=0, abs=tolerance * max(1.0, abs(expected)))


@pytest.mark.parametrize(("exact", "normalised"), PRESETS)
def test_gradcheck_of_the_parse(exact: bool, normalised: bool) -> None:
    """ζ = 0 and responses away from the threshold's kink: the derivative exists there."""
    phi, templates, constants = make(exact, size=5, channels=2, parts=2, images=2, seed=4)
    constants["zeta"] = 0.0
    inputs = [torch.tensor(value, requires_grad=True) for value in (phi, *templates, np.array([0.7, 0.4, 1.3]))]

    def run(phi, first, second, third, temperature):
        found = parse(phi, [first, second, third], temperature, exact=exact, normalised=normalised, **constants)
        return found.nu, found.mu, found.z, found.entropy

    assert torch.autograd.gradcheck(run, inputs, eps=1e-7, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("exact", "normalised"), PRESETS)
@pytest.mark.parametrize("temperatures", [None, [0.7, 0.4, 1.3]])
def test_parts_that_were_located_elsewhere_are_expressed_there(exact, normalised, temperatures) -> None:
    phi, templates, constants = make(exact, size=5)
    given = np.random.default_rng(3).dirichlet(np.ones(25), size=(len(phi), 3)).reshape(-1, 3, 5, 5)
    found = fast(phi, templates, temperatures, exact, normalised, located=torch.tensor(given), **constants)
    for image, scale, part in np.ndindex(*found.entropy.shape):
        expected = reference.parse_part(
            phi[image],
            templates[scale][part],
            constants["lam"],
            None,
            exact,
            normalised,
            constants["zeta"],
            located=given[image, scale],
        )
        for name, value in zip(("nu", "mu", "z", "entropy"), expected, strict=True):
            np.testing.assert_allclose(getattr(found, name)[image, scale, part], value, rtol=0, atol=1e-9, err_msg=name)


def test_gradcheck_of_parts_that_were_located_elsewhere() -> None:
    phi, templates, constants = make(True, size=5, channels=2, parts=2, images=2, seed=4)
    given = np.random.default_rng(3).dirichlet(np.ones(25), size=(2, 3)).reshape(2, 3, 5, 5)
    inputs = [torch.tensor(value, requires_grad=True) for value in (phi, *templates, given)]

    def run(phi, first, second, third, given):
        found = parse(phi, [first, second, third], None, exact=True, normalised=True, located=given, **constants)
        return found.nu, found.mu, found.z

    assert torch.autograd.gradcheck(run, inputs, eps=1e-7, atol=1e-5, rtol=1e-5)


def test_gradcheck_of_distance_and_losses() -> None:
    random = torch.Generator().manual_seed(0)
    make_one = lambda *shape: torch.rand(*shape, generator=random, dtype=torch.float64).requires_grad_()  # noqa: E731
    query, support = (tuple(make_one(n, 2, 3, *last) for last in ((4,), (), (2,))) for n in (2, 3))
    slopes, gamma, labels = make_one(2), make_one(1), torch.tensor([0, 1, 1])

    def run(*tensors):
        shown = show(tensors[3:6], labels)
        return compare(tensors[:3], shown, slopes=tensors[6], gamma=tensors[7], normalised=True).total

    assert torch.autograd.gradcheck(run, (*query, *support, slopes, gamma))
    logits = make_one(2, 2, 3, 3, 3)

    def prior(logits):
        nu = torch.softmax(logits.flatten(-2), -1).view_as(logits)
        return losses.diversity(nu, normalised=True), losses.diversity(nu, normalised=False)

    assert torch.autograd.gradcheck(prior, (logits,))


def test_the_hard_parse_has_no_gradient() -> None:
    phi = torch.rand(2, 3, 5, 5, requires_grad=True)
    found = parse(phi, [torch.rand(2, 3, 3, 3)], None, lam=0.1, exact=True, normalised=False)
    assert not found.nu.requires_grad
    assert not found.z.requires_grad
    assert sorted(found.nu.unique().tolist()) == [0.0, 1.0]


def test_large_features_are_visited_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One channel a block or all at once: the same values and gradients."""
    from parseshot.parts import kernel

    phi, templates, constants = make(True, channels=7)
    results = []
    for elements in (1, 1 << 30):
        monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", elements)
        inputs = [torch.tensor(value, requires_grad=True) for value in (phi, *templates)]
        temperature = torch.ones(3, dtype=torch.float64)
        found = parse(inputs[0], inputs[1:], temperature, exact=True, normalised=True, **constants)
        (found.z.sin().sum() + found.nu.square().sum()).backward()
        results.append([found.nu.detach(), found.z.detach(), *(one.grad for one in inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_training_may_follow_inference() -> None:
    """Nothing that is cached in inference mode is unfit for autograd afterwards."""
    phi, template = torch.rand(1, 2, 11, 11), torch.rand(1, 2, 3, 3)
    arguments = {"lam": 0.1, "exact": True, "normalised": True}
    with torch.inference_mode():
        parse(phi, [template], torch.ones(1), **arguments)
    template.requires_grad_()
    parse(phi, [template], torch.ones(1), **arguments).z.sum().backward()
    assert template.grad is not None
