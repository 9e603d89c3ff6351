"""At least one test for each row of the table in docs/paper.md: where the paper is silent or wrong, our decision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Lasso

import reference
from parseshot.backbones import build_backbone
from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.methods import Encoding, build_method
from parseshot.methods.dop import PRESETS
from parseshot.parts import losses
from parseshot.parts.distance import class_mean, compare, geometric_distances, is_degenerate, part_weights, psi, show
from parseshot.parts.parsing import expected_location, parse, peak_location

finite = st.floats(-3, 3, allow_nan=False)


def features(images: int = 6, channels: int = 8, size: int = 5, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(images, channels, size, size, generator=random, dtype=dtype).relu()


def dop(preset: str, **options):
    torch.manual_seed(0)
    return build_method(preset, 8, 5, options).double()


def codes(method, count: int = 6, seed: int = 0) -> Encoding:
    return method.encode(features(count, seed=seed))


# Row 1: the location score


@settings(max_examples=40, deadline=None)
@given(st.lists(finite, min_size=9, max_size=9), st.lists(finite, min_size=9, max_size=9), st.floats(0, 4))
def test_1_the_closed_form_is_the_scalar_lasso(patch: list[float], template: list[float], lam: float) -> None:
    x, d = np.array(patch).reshape(3, 3), np.array(template).reshape(3, 3)
    norm = math.sqrt((d**2).sum())
    if norm < 0.1:
        return
    r = float((x * d).sum())
    beta = reference.scalar_lasso(r, norm, lam)
    best = reference.lasso_objective(beta, x, d, lam)
    around = abs(beta) + 1.0
    brute = min(reference.lasso_objective(b, x, d, lam) for b in np.linspace(-around, around, 4001))
    assert best <= brute + 1e-9
    assert brute - best < (around / 2000 * norm) ** 2 + lam * around / 2000 + 1e-6  # the grid's own resolution
    gain = reference.lasso_objective(0.0, x, d, lam) - best
    assert gain == pytest.approx(max(0.0, abs(r) / norm - lam / (2 * norm)) ** 2, abs=1e-6)


@pytest.mark.parametrize("lam", [0.1, 0.9])
def test_1_the_expression_agrees_with_scikit_learn(lam: float) -> None:
    """The expression at the argmax, inside and at the border, against an independent non-negative LASSO solver."""
    phi = features(8, channels=3, seed=5)
    shares = []
    template = torch.randn(1, 3, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    hard = parse(phi, [template], None, lam=lam, exact=True, normalised=False)
    for image in range(len(phi)):
        x, y = (int(v) for v in hard.mu[image, 0, 0])
        for channel in range(3):
            d = template[0, channel].numpy().ravel()
            inside = reference.window(np.ones((5, 5)), x, y, 3).ravel() > 0
            patch = reference.window(phi[image, channel].numpy(), x, y, 3).ravel()
            d, patch = d[inside], patch[inside]
            share = reference.visible_share(template[0, channel].numpy(), x, y, 5)  # 1 inside: λ itself
            # scikit-learn minimises ‖y − Xw‖²/(2n) + alpha·|w|: alpha = λ/(2n)
            alpha = lam * share / (2 * len(d))
            solver = Lasso(alpha=alpha, fit_intercept=False, positive=True, tol=1e-14, max_iter=100_000)
            solver.fit(d[:, None], patch)
            assert float(hard.z[image, 0, 0, channel]) == pytest.approx(float(solver.coef_[0]), abs=1e-9)
            shares.append(share)
    assert max(shares) == 1  # both cases were met
    assert min(shares) < 1


def test_1_a_planted_part_is_found_beside_a_bright_distractor() -> None:
    """The part's pattern is dimmer than a uniform bright patch; the template's shape decides, not the brightness."""
    template = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    template[0, 0, 1, :] = 1.0
    template[0, 0, 0, :] = template[0, 0, 2, :] = -1.0  # a horizontal bar
    phi = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    phi[0, 0, 2, 1:4] = 1.0  # the part, centred at (2, 2)
    phi[0, 0, 5:8, 5:8] = 3.0  # the distractor
    exact = parse(phi, [template], None, lam=0.5, exact=True, normalised=False)
    assert exact.mu[0, 0, 0].tolist() == [2, 2]
    printed = parse(phi, [template], None, lam=0.5, exact=False, normalised=False)
    assert printed.mu[0, 0, 0].tolist() != [2, 2]  # as printed, a large negative response wins


def test_1_at_scale_1_without_lambda_all_parts_share_one_map() -> None:
    template = torch.randn(4, 8, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    temperature = torch.ones(1, dtype=torch.float64)
    same = parse(features(), [template], temperature, lam=0.0, exact=False, normalised=False).nu
    torch.testing.assert_close(same, same[:, :, :1].expand_as(same))
    differ = parse(features(), [template], temperature, lam=1.0, exact=True, normalised=True).nu
    assert (differ - differ[:, :, :1]).abs().max() > 1e-3


# Row 2: temperature


@pytest.mark.parametrize("backbone", ["conv4", "resnet12"])
def test_2_entropy_starts_in_range_on_real_features_and_gradient_reaches_d(birds: Pack, backbone: str) -> None:
    torch.manual_seed(0)
    phi = build_backbone(backbone).train()(birds.load(range(0, 400, 20))).detach()
    method = build_method("dop", phi.shape[1], phi.shape[2])
    method.initialise(phi)
    found = method.parse(phi)
    assert 0.2 < float(found.entropy.detach().mean()) < 0.9
    assert abs(float(found.entropy.detach().mean()) - method.config.start_entropy) < 0.1
    expected_location(found.nu).square().sum().backward()  # a loss on the location alone
    assert all(float(template.grad.abs().max()) > 0 for template in method.templates.maps)


def test_2_as_printed_the_softmax_is_an_argmax(birds: Pack) -> None:
    torch.manual_seed(0)
    phi = build_backbone("resnet12").train()(birds.load(range(0, 400, 40))).detach()
    printed = build_method("dop-paper", 640, 5).parse(phi)
    assert float(printed.entropy.detach().mean()) < 0.02


# Row 3: border


@pytest.mark.parametrize("side", [1, 3, 5])
@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_3_constant_features_and_template_give_a_constant_score(side: int, lam: float) -> None:
    phi, template, temperature = torch.full((1, 3, 7, 7), 2.0), torch.full((1, 3, side, side), 0.5), torch.ones(1)
    exact = parse(phi, [template], temperature, lam=lam, exact=True, normalised=True)
    score = exact.score[0, 0, 0]
    assert float(score.max() - score.min()) < 1e-5 * float(score.max())
    assert float(exact.entropy) == pytest.approx(1.0, abs=1e-5)
    if lam == 0:
        torch.testing.assert_close(exact.z, torch.full_like(exact.z, 2.0), rtol=1e-5, atol=0)  # φ/rms = 1 = z·0.5
    printed = parse(phi, [template], temperature, lam=lam, exact=False, normalised=True).score[0, 0, 0]
    if side > 1:
        assert float(printed[3, 3] / printed[0, 0]) > 3  # zero padding: parts never land on the border


# Row 4: threshold of the expression


def test_4_soft_threshold_is_sparse_and_continuous_hard_threshold_deletes() -> None:
    template = torch.ones(1, 8, 1, 1, dtype=torch.float64)
    temperature = torch.ones(1, dtype=torch.float64)
    sparsity = [
        float((parse(features(), [template], temperature, lam=lam, exact=True, normalised=True).z == 0).double().mean())
        for lam in (0.0, 2.0, 6.0, 20.0)
    ]
    assert sparsity == sorted(sparsity)
    assert sparsity[0] == 0.0
    assert sparsity[-1] == 1.0
    arguments = {"lam": 0.1, "exact": False, "normalised": False}
    whole = parse(features(), [template], temperature, **arguments, zeta=0.0).z
    cut = parse(features(), [template], temperature, **arguments, zeta=0.6).z
    kept = whole.abs() >= 0.6
    assert 0 < float(kept.double().mean()) < 1
    torch.testing.assert_close(cut, whole * kept)  # what stays is not shrunk


# Row 5: ‖D‖ is no hidden temperature


def scaled(method, factor: float):
    with torch.no_grad():
        for template in method.templates.maps:
            template.mul_(factor)
    return method


def test_5_doubling_the_templates_leaves_lasso_predictions_unchanged() -> None:
    """λ has the units of φ·D, so D → 2D is λ → 2λ in other units; with λ = 0 it is D → 2D alone."""
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    for lam in (0.0, 0.05):
        before, after = dop("dop", lam=lam), scaled(dop("dop", lam=2 * lam), 2.0)
        left, right = (m.logits(codes(m, 4, seed=1), codes(m), labels) for m in (before, after))
        torch.testing.assert_close(left, right)
    printed, doubled = (dop("dop-paper", lam=0.0, zeta=0.0, geometry=False) for _ in range(2))
    scaled(doubled, 2.0)
    left, right = (m.logits(codes(m, 4, seed=1), codes(m), labels) for m in (printed, doubled))
    torch.testing.assert_close(left, 4 * right)  # as printed, d falls with ‖D‖²


@pytest.mark.parametrize("way", [5, 10])
def test_5_the_first_cross_entropy_is_near_ln_n(birds: Pack, way: int) -> None:
    numbers = np.concatenate([images[:8] for images in list(birds.by_class("base").values())[:way]])
    for seed in range(3):
        torch.manual_seed(seed)
        model = Model(ModelConfig()).train()
        with torch.no_grad():
            phi = model.backbone(birds.load(numbers))
        model.method.initialise(phi)
        codes = model.method.encode(phi)
        rows = torch.arange(len(numbers)) % 8 < 5
        labels = torch.arange(way).repeat_interleave(5)
        targets = torch.arange(way).repeat_interleave(3)
        ce = model.method.loss(codes.take(~rows), codes.take(rows), labels, targets)["ce"]
        assert abs(float(ce) / math.log(way) - 1) < 0.2


def test_5_the_paper_preset_starts_near_ln_n_too(birds: Pack) -> None:
    numbers = np.concatenate([images[:8] for images in list(birds.by_class("base").values())[:5]])
    torch.manual_seed(0)
    model = Model(ModelConfig(method="dop-paper")).train()
    with torch.no_grad():
        phi = model.backbone(birds.load(numbers))
    labels = torch.arange(5).repeat_interleave(5)
    targets = torch.arange(5).repeat_interleave(3)
    rows = torch.arange(40) % 8 < 5

    def first_ce() -> float:
        codes = model.method.encode(phi)
        return float(model.method.loss(codes.take(~rows), codes.take(rows), labels, targets)["ce"])

    raw = first_ce()
    model.method.initialise(phi)
    assert raw > 10 * math.log(5)  # "−d is of order 10³ as logits"
    assert abs(first_ce() / math.log(5) - 1) < 0.2


# Row 6: means over the support, in both terms


@pytest.mark.parametrize("preset", ["dop", "dop-paper"])
@pytest.mark.parametrize("shots", [1, 3, 20])
def test_6_a_query_equal_to_all_supports_is_at_distance_zero(preset: str, shots: int) -> None:
    method = dop(preset, scales=(3,))  # one scale: otherwise scales are compared across
    one = codes(method, 1)
    support = Encoding.cat([one] * shots)
    assert float(method.distance(one, support, torch.zeros(shots, dtype=torch.long)).total) == pytest.approx(
        0, abs=1e-9
    )


@pytest.mark.parametrize("preset", ["dop", "dop-paper"])
def test_6_the_distance_does_not_grow_with_the_number_of_shots(preset: str) -> None:
    method = dop(preset)
    query, support = codes(method, 2, seed=1), codes(method, 3)
    once, twice = (
        method.distance(query, Encoding.cat([support] * n), torch.zeros(3 * n, dtype=torch.long)).total for n in (1, 7)
    )
    torch.testing.assert_close(once, twice)


# Row 7: alpha takes any number of shots in any order


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.randoms())
def test_7_any_shots_in_any_order(shots: list[int], random) -> None:
    method = dop("dop")
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(shots)])
    support, query = codes(method, len(labels), seed=3), codes(method, 2, seed=4)
    order = list(range(len(labels)))
    random.shuffle(order)
    index = torch.tensor(order)
    torch.testing.assert_close(
        method.logits(query, support, labels), method.logits(query, support.take(index), labels[index])
    )


def test_7_lasso_entropies_are_normalised_and_printed_ones_are_not() -> None:
    phi = torch.ones(1, 8, 5, 5, dtype=torch.float64)
    uniform = [method.encode(phi)["entropy"][0, 0, 0] for method in (dop("dop"), dop("dop-paper", scales=(1,)))]
    assert float(uniform[0]) == pytest.approx(1.0)
    assert float(uniform[1]) == pytest.approx(math.log(25))


# Row 8: the query's scale goes with the query's entropy


def test_8_two_scales_by_hand() -> None:
    """K = 2 parts, S = 2 scales, C = 1 channel, one class with one photo; every number written out."""
    z_query = torch.tensor([[[1.0], [0.0]], [[2.0], [1.0]]])[None]  # [1, S, K, 1]
    z_class = torch.tensor([[[0.0], [1.0]], [[3.0], [1.0]]])[None]
    h_query = torch.tensor([[0.0, 1.0], [0.5, 0.5]])[None]  # [1, S, K]
    h_class = torch.tensor([[1.0, 1.0], [0.0, 1.0]])[None]
    mu = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]] * 2)[None]
    found = compare(
        (z_query, h_query, mu),
        show((z_class, h_class, mu), torch.tensor([0])),
        slopes=torch.tensor([1.0, 2.0]),
        gamma=None,
        normalised=False,
    ).expression[0, 0]  # [S of the query, S of the class, K]
    e = math.e
    # (query 1, class 1): α ∝ (e^{0+2}, e^{1+2});  differences 1−0 and 0−1
    assert found[0, 0].tolist() == pytest.approx([1 / (1 + e), e / (1 + e)])
    # (query 1, class 2): α ∝ (e^{0+0}, e^{1+2});  differences 1−3 and 0−1
    assert found[0, 1].tolist() == pytest.approx([4 / (1 + e**3), e**3 / (1 + e**3)])
    # (query 2, class 1): α ∝ (e^{.5+2}, e^{.5+2}); differences 2−0 and 1−1
    assert found[1, 0].tolist() == pytest.approx([2.0, 0.0])
    # (query 2, class 2): α ∝ (e^{.5+0}, e^{.5+2}); differences 2−3 and 1−1
    assert found[1, 1].tolist() == pytest.approx([1 / (1 + e**2), 0.0])


def test_8_weights_are_a_distribution_over_parts() -> None:
    random = torch.Generator().manual_seed(0)
    weights = part_weights(
        torch.rand(3, 2, 4, generator=random), torch.rand(5, 2, 4, generator=random), torch.tensor([-1.0, 2.0])
    )
    assert weights.shape == (3, 5, 2, 2, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5, 2, 2))


# Row 9: geometry counts


def test_9_geometry_counts_in_lasso_and_not_as_printed() -> None:
    labels = torch.arange(3).repeat(20)
    shares = {}
    for preset in ("dop", "dop-paper"):
        method = dop(preset)
        method.initialise(features(30, seed=9))
        query, support = codes(method, 60, seed=1), codes(method, 60, seed=2)
        terms = method.distance(query, support, labels)
        shares[preset] = float(terms.geometry.sum() / terms.total.sum())
    assert shares["dop"] > 0.005
    with_geometry, without = dop("dop", gamma=1.0), dop("dop", geometry=False)
    without.load_state_dict({k: v for k, v in with_geometry.state_dict().items() if k != "log_gamma"})
    left, right = (
        m.logits(codes(m, 60, seed=1), codes(m, 60, seed=2), labels).argmax(1) for m in (with_geometry, without)
    )
    assert not torch.equal(left, right)
    figures = with_geometry.monitor(query, support, labels, torch.zeros(60, dtype=torch.long))
    assert 0 < figures["geometry_share"] < 1


def test_9_geometry_is_the_mean_over_the_photos() -> None:
    random = torch.Generator().manual_seed(0)
    query, support = torch.rand(2, 3, 6, generator=random), torch.rand(4, 3, 6, generator=random)
    labels = torch.tensor([0, 1, 1, 1])
    found = geometric_distances(query, support, labels, 2)
    literal = (query[:, None, :, None] - support[None, :, None]).square().sum(-1)  # [Q, n, S, S]
    torch.testing.assert_close(found[:, 1], literal[:, 1:].mean(1))


# Row 10: parts in one point


def test_10_coinciding_parts_are_finite_and_flagged() -> None:
    mu = torch.full((1, 1, 4, 2), 2.0, dtype=torch.float64, requires_grad=True)
    shape = psi(mu)
    assert float(shape.detach().sum()) == pytest.approx(1.0)
    shape.square().sum().backward()
    assert mu.grad.isfinite().all()
    assert is_degenerate(mu).all()
    assert not is_degenerate(torch.tensor([[0.0, 0.0], [1.0, 0.0]])).any()


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 10), st.floats(-5, 5), st.floats(0, 6.3))
def test_10_psi_ignores_size_place_and_turn(size: float, shift: float, angle: float) -> None:
    mu = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0], [1.0, 1.0]], dtype=torch.float64)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    torch.testing.assert_close(psi(mu), psi(size * mu @ turn + shift), rtol=1e-6, atol=1e-6)


# Row 11: the Hellinger prior


def test_11_identical_and_one_hot_maps_have_finite_gradients_and_disjoint_ones_score_minus_one() -> None:
    same = torch.full((1, 1, 3, 5, 5), 1 / 25, requires_grad=True)
    one_hot = torch.zeros(1, 1, 3, 25)
    for part in range(3):
        one_hot[0, 0, part, 7 * part] = 1.0
    one_hot = one_hot.view(1, 1, 3, 5, 5).requires_grad_()
    for nu in (same, one_hot):
        losses.diversity(nu, normalised=True).sum().backward()
        assert nu.grad.isfinite().all()
    assert float(losses.diversity(one_hot, normalised=True)) == pytest.approx(-1.0, abs=1e-5)
    assert float(losses.diversity(one_hot, normalised=False)) == pytest.approx(-6.0, abs=1e-4)  # ordered pairs
    assert float(losses.diversity(same, normalised=True)) == pytest.approx(0.0, abs=1e-2)


def test_11_the_first_step_as_printed_is_finite(birds: Pack) -> None:
    """T = 0.01 on a sum over 640 channels: one-hot maps, the case in which naive forms give NaN."""
    torch.manual_seed(0)
    method = build_method("dop-paper", 640, 5)
    phi = features(6, channels=640, dtype=torch.float32).requires_grad_()
    codes = method.encode(phi)
    labels = torch.tensor([0, 0, 1])
    terms = method.loss(codes.take(slice(3)), codes.take(slice(3, 6)), labels, labels)
    sum(terms.values()).backward()
    assert phi.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in method.parameters() if p.grad is not None)


# Row 12: what is drawn


def test_12_with_two_peaks_the_reported_location_lies_on_one() -> None:
    nu = torch.zeros(7, 7)
    nu[1, 1], nu[5, 5], nu[1, 2] = 0.45, 0.35, 0.2
    between, on_peak = expected_location(nu), peak_location(nu)
    assert between.tolist() == pytest.approx([2.6, 2.4])
    assert on_peak.tolist() == pytest.approx([(0.45 * 1 + 0.2 * 2) / 0.65, 1.0])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6))
def test_12_a_single_peak_is_reported_where_it_is(x: int, y: int) -> None:
    nu = torch.zeros(7, 7)
    nu[y, x] = 1.0
    assert peak_location(nu).tolist() == [x, y]
    assert expected_location(nu).tolist() == [x, y]


# Row 13: the constant of Appendix A


@settings(max_examples=30, deadline=None)
@given(finite, st.floats(0.1, 3), st.floats(0, 3))
def test_13_the_right_constant_completes_the_square(r: float, norm: float, lam: float) -> None:
    """L' = −r²/‖D‖² + λ·r/‖D‖² (Appendix A, step 2) is −(a − λ/(2‖D‖))² up to a constant, and not with λ/‖D‖."""
    constant = lam**2 / (4 * norm**2)
    bound = -(r**2) / norm**2 + lam * r / norm**2
    assert bound == pytest.approx(-((r / norm - lam / (2 * norm)) ** 2) + constant, abs=1e-6, rel=1e-9)


# Row 14: batch norm


def test_14_a_query_does_not_depend_on_the_other_queries(birds: Pack) -> None:
    torch.manual_seed(0)
    model = Model(ModelConfig()).eval()
    images = birds.load(range(12))
    alone, together = model.encode(images[:1]), model.encode(images)
    for name in alone:
        torch.testing.assert_close(alone[name], together[name][:1], rtol=1e-4, atol=1e-5)


# Rows 16, 17: K, and the recipes (row 15, the splits of CUB, comes with the real data)


def test_15_a_model_is_not_evaluated_on_classes_it_was_trained_on(birds: Pack) -> None:
    from parseshot.engine.evaluation import evaluate
    from parseshot.errors import DataError

    model = Model(ModelConfig())
    model.provenance = {"base_classes": [birds.classes[20], "other"]}
    with pytest.raises(DataError, match=birds.classes[20]):
        evaluate(model, birds)


def test_16_k_is_4_in_both_presets() -> None:
    assert {preset.parts for preset in PRESETS.values()} == {4}
    assert {preset.scales for preset in PRESETS.values()} == {(1, 3, 5)}


def test_16_the_paper_preset_has_the_printed_constants() -> None:
    paper = PRESETS["paper"]
    assert (paper.temperature, paper.zeta, paper.gamma) == (0.01, 0.05, 0.01)
    assert not paper.exact
    assert not paper.normalised


def test_17_a_recipe_is_complete() -> None:
    """Every field of the resolved recipe is written out by --dry-run: no constant hides in the code."""
    from parseshot.engine.recipe import load_recipe, shipped_recipes
    from parseshot.methods import method_config

    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert set(recipe.training.model_dump()) == set(type(recipe.training).model_fields)
        assert method_config(recipe.model.method, recipe.model.method_options).model_dump()


def test_class_mean_is_a_mean() -> None:
    found = class_mean(torch.tensor([[1.0], [3.0], [10.0]]), torch.tensor([0, 0, 1]), 2)
    assert found.flatten().tolist() == [2.0, 10.0]
