"""BSNet against its two modules, one pair at a time."""

import numpy as np
import pytest
import torch
from torch import nn

import reference
from parseshot.methods import build_method
from parseshot.methods.bsnet import BSNet

CHANNELS = 4
LABELS = torch.tensor([1, 0, 1, 1])


def build(size: int) -> BSNet:
    torch.manual_seed(1)
    method = build_method("bsnet", CHANNELS, size).double()
    assert isinstance(method, BSNet)
    for norm in method.norms:
        nn.init.uniform_(norm.weight, -0.5, 1.5)
        nn.init.uniform_(norm.bias, 0.0, 0.5)
    method.initialise(maps(10, size, seed=9))
    return method.eval()


def maps(count: int, size: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, size, size, generator=random, dtype=torch.float64).relu()


def numbers(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    return tuple(tensor.detach().numpy() for tensor in tensors)


@pytest.mark.parametrize("size", [3, 5, 10])
def test_both_similarities_and_the_loss(size: int) -> None:
    """5×5 cells are padded, 10×10 are not, 3×3 come down to a single cell after one pooling."""
    method, features = build(size), maps(6, size, seed=2)
    codes = method.encode(features)
    query, support = codes.take(slice(4, 6)), codes.take(slice(4))
    relation, cosine = (each.detach().numpy() for each in method.similarities(query, support, LABELS))
    scaled = features.numpy() / np.sqrt((maps(10, size, seed=9).numpy() ** 2).mean())
    first = torch.cat((method.of_query.weight, method.of_class.weight), 1)
    kernels = [numbers(first, method.of_query.bias), numbers(method.second.weight, method.second.bias)]
    alone = [numbers(layer.weight, layer.bias) for layer in method.alone]
    norms = [numbers(norm.weight, norm.bias) for norm in method.norms]
    linears = [numbers(method.verdict[at].weight, method.verdict[at].bias) for at in (0, 2)]
    for q in range(2):
        for y in range(2):
            pair = scaled[4 + q], scaled[:4][LABELS.numpy() == y].mean(0)
            expected = reference.bsnet_relation(*pair, kernels, norms[:2], linears, 1 if size < 10 else 0)
            assert relation[q, y] == pytest.approx(expected, abs=1e-10)
            assert cosine[q, y] == pytest.approx(reference.bsnet_cosine(*pair, alone, norms[2:]), abs=1e-10)
    np.testing.assert_allclose(method.logits(query, support, LABELS).detach(), 5 * (relation + cosine), atol=1e-6)
    terms = method.loss(query, support, LABELS, torch.tensor([1, 0]))
    wanted = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert float(terms["relation"].detach()) == pytest.approx(((relation - wanted) ** 2).mean())
    assert float(terms["cosine"].detach()) == pytest.approx(((cosine - wanted) ** 2).mean())


def test_the_relation_depends_on_which_is_the_query_the_cosine_does_not() -> None:
    method = build(5)
    codes = method.encode(maps(3, 5, seed=3))
    relation, cosine = method.similarities(codes, codes, torch.arange(3))
    torch.testing.assert_close(cosine, cosine.T)
    assert (relation - relation.T).abs().max() > 1e-4
    torch.testing.assert_close(cosine.diagonal(), torch.ones(3, dtype=torch.float64))


def test_it_asks_for_a_finer_grid() -> None:
    assert BSNet.finer_grid


def test_an_empty_map_has_finite_scores_and_gradients() -> None:
    features = torch.zeros(2, CHANNELS, 5, 5, requires_grad=True)
    method = build_method("bsnet", CHANNELS, 5)
    codes = method.encode(features)
    logits = method.logits(codes, codes, torch.tensor([0, 1]))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert features.grad is not None
    assert features.grad.isfinite().all()
