"""Every method through the same checks: METHODS × what the contract of methods/base.py promises."""

import numpy as np
import pytest
import torch

from parseshot.methods import METHODS, BasePhotos, Encoding, Method, build_method, takes_pairs

CHANNELS, SIZE, FINE = 16, 5, 8
EXEMPT: dict[tuple[str, str], str] = {  # (method, test) → why the method cannot keep this promise by its definition
}
SHOTS = (1, 4, 20)  # unbalanced
LABELS = torch.cat([torch.full((count,), label) for label, count in enumerate(SHOTS)])


def maps(count: int, seed: int, channels: int = CHANNELS) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, SIZE, SIZE, generator=random, dtype=torch.float64).relu()


def build(name: str) -> Method:
    return build_method(name, CHANNELS, SIZE, fine=FINE if takes_pairs(name) else 0)


def of_kind(method: Method, features: torch.Tensor) -> torch.Tensor:
    """Such features for a method, packed with a finer map if it takes pairs."""
    if not method.paired:
        return features
    spread = maps(CHANNELS, 77, channels=4 * FINE)[:, :, 0, 0].to(features)  # fine maps that depend on the coarse ones
    return torch.cat((features, torch.einsum("bchw,cf->bfhw", features, spread) / CHANNELS), 1)


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> Method:
    reason = EXEMPT.get((request.param, request.node.originalname))
    if reason:
        pytest.skip(reason)
    torch.manual_seed(0)
    built = build(request.param).double()
    built.initialise(of_kind(built, maps(20, seed=9)))
    return built.eval()


def encode(method: Method, features: torch.Tensor) -> Encoding:
    return method.encode(of_kind(method, features))


def scores(method: Method, query: torch.Tensor, support: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return method.logits(encode(method, query), encode(method, support), labels)


def test_shape_and_finite(method: Method) -> None:
    logits = scores(method, maps(7, 1), maps(25, 2), LABELS)
    assert logits.shape == (7, 3)
    assert logits.isfinite().all()


def test_scores_tell_classes_apart(method: Method) -> None:
    """A query that is one of the support photos of a class of its own goes to that class."""
    support = maps(6, 2)
    logits = scores(method, support, support, torch.arange(6))
    assert (logits.argmax(1) == torch.arange(6)).double().mean() >= 5 / 6
    assert (logits.max(1).values - logits.min(1).values).min() > 1e-9


def test_support_order_does_not_matter(method: Method) -> None:
    support, query = maps(25, 2), maps(7, 1)
    order = torch.from_numpy(np.random.default_rng(0).permutation(25))
    torch.testing.assert_close(
        scores(method, query, support, LABELS), scores(method, query, support[order], LABELS[order])
    )


def test_relabelling_permutes_the_columns(method: Method) -> None:
    relabel = torch.tensor([2, 0, 1])
    support, query = maps(25, 2), maps(7, 1)
    torch.testing.assert_close(
        scores(method, query, support, LABELS), scores(method, query, support, relabel[LABELS])[:, relabel]
    )


def test_query_order_and_company_do_not_matter(method: Method) -> None:
    support, query = maps(25, 2), maps(7, 1)
    together = scores(method, query, support, LABELS)
    for row in range(7):
        torch.testing.assert_close(together[row : row + 1], scores(method, query[row : row + 1], support, LABELS))


def test_single_equals_batched_encoding(method: Method) -> None:
    features = maps(5, 3)
    batched = encode(method, features)
    single = Encoding.cat([encode(method, features[row : row + 1]) for row in range(5)])
    assert batched.keys() == single.keys()
    for name in batched:
        torch.testing.assert_close(batched[name], single[name])


@pytest.mark.parametrize("shots", [*range(1, 21)])
def test_any_number_of_shots(method: Method, shots: int) -> None:
    labels = torch.tensor([0] * shots + [1] * (21 - shots))
    assert scores(method, maps(2, 1), maps(21, 2), labels).isfinite().all()


def test_repeating_every_photo_changes_nothing(method: Method) -> None:
    support, query = maps(25, 2), maps(3, 1)
    twice = scores(method, query, support.repeat(2, 1, 1, 1), LABELS.repeat(2))
    torch.testing.assert_close(scores(method, query, support, LABELS), twice)


def test_training_and_evaluation_share_one_scoring_path(method: Method) -> None:
    """The loss is the cross-entropy of `logits`, and both modes give the same scores."""
    query, support = encode(method, maps(6, 1)), encode(method, maps(25, 2))
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    logits = method.eval().logits(query, support, LABELS)
    torch.testing.assert_close(method.train().logits(query, support, LABELS), logits)
    terms = method.loss(query, support, LABELS, targets)
    if method.episodic:
        torch.testing.assert_close(terms["ce"], torch.nn.functional.cross_entropy(logits, targets))
    else:
        assert terms == {}


def test_gradient_reaches_every_parameter_and_the_features(method: Method) -> None:
    features = maps(31, 5).requires_grad_()
    codes = encode(method.train(), features)
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    terms = method.loss(codes.take(slice(0, 6)), codes.take(slice(6, 31)), LABELS, targets)
    random = torch.Generator().manual_seed(4)
    photos = BasePhotos(torch.cat((targets, LABELS)), torch.rand(31, 3, 3, generator=random, dtype=torch.float64))
    companion = method.companion(photos)
    if companion is not None:
        terms |= companion.double().train()(codes, torch.arange(31))
    assert terms
    sum(terms.values()).backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
    assert features.grad.abs().max() > 0
    printed = "paper" in getattr(getattr(method, "config", None), "preset", "")
    for name, parameter in [*method.named_parameters(), *(companion.named_parameters() if companion else ())]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if not (printed and name == "slopes"):  # one-hot maps: every entropy is 0, as notes row 2 says
            assert parameter.grad.abs().max() > 0, name


def test_same_seed_same_bits(method: Method, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["method"]

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        built = build(name)
        built.initialise(of_kind(built, maps(20, seed=9).float()))
        return scores(built, maps(5, 1).float(), maps(25, 2).float(), LABELS)

    assert torch.equal(run(), run())


def test_many_episodes_at_once_score_as_one_by_one(method: Method) -> None:
    """A method that says it is vectorised runs under vmap, as evaluation scores it."""
    if not method.vectorised:
        pytest.skip("scored one by one")
    codes = encode(method, maps(40, 6))
    queries = torch.arange(12).view(3, 4)
    supports = torch.arange(12, 39).view(3, 9)
    labels = torch.arange(3).repeat_interleave(3)

    def one(query: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
        return method.logits(codes.take(query), codes.take(support), labels)

    with torch.no_grad():
        together = torch.func.vmap(one)(queries, supports)
        apart = torch.stack([one(query, support) for query, support in zip(queries, supports, strict=True)])
    torch.testing.assert_close(together, apart)


def test_it_holds_weights_only(method: Method) -> None:
    """Scoring one support set leaves no trace for the next."""
    before = {name: value.clone() for name, value in method.state_dict().items()}
    first = scores(method, maps(3, 1), maps(25, 2), LABELS)
    scores(method, maps(3, 7), maps(25, 8), LABELS)
    assert torch.equal(first, scores(method, maps(3, 1), maps(25, 2), LABELS))
    assert all(torch.equal(before[name], value) for name, value in method.state_dict().items())
    assert not [name for name, value in vars(method).items() if isinstance(value, torch.Tensor)]


def test_an_unknown_method_or_option_names_its_neighbours() -> None:
    from parseshot.errors import UsageError

    with pytest.raises(UsageError, match="did you mean protonet"):
        build_method("protonett", CHANNELS, SIZE)
    with pytest.raises(UsageError, match=r"unknown key 'part'; did you mean parts"):
        build_method("dop", CHANNELS, SIZE, {"part": 3})
    with pytest.raises(UsageError, match="odd numbers"):
        build_method("dop", CHANNELS, SIZE, {"scales": [1, 4]})
    with pytest.raises(UsageError, match="larger than the grid 5×5"):
        build_method("dop", CHANNELS, SIZE, {"scales": [7]})
    with pytest.raises(UsageError, match="parts"):
        build_method("dop", CHANNELS, SIZE, {"parts": -1})


def test_an_encoding_keeps_its_tensors_together() -> None:
    with pytest.raises(ValueError, match="first dimension"):
        Encoding(a=torch.zeros(2), b=torch.zeros(3))
