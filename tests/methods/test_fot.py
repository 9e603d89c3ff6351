"""FOT against loops over cells, and what it is meant to do: drop the background, move the foreground."""

import numpy as np
import pytest
import torch

import reference
from parseshot.methods import BasePhotos, build_method
from parseshot.methods.fitting import same_class_partner
from parseshot.methods.fot import FOT


def built(channels: int = 3, size: int = 4, **options: float) -> FOT:
    torch.manual_seed(0)
    method = build_method("fot", channels, size, options).double().eval()
    assert isinstance(method, FOT)
    return method


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 1, 0, 2, 1]])
def test_logits_are_those_of_every_photo_in_every_posture(labels: list[int]) -> None:
    method = built(hidden=5, postures=3, share=0.7, ridge=0.2, logit_scale=3.0)
    features = torch.randn(len(labels) + 3, 3, 4, 4, dtype=torch.float64)
    method.initialise(features)
    codes = method.encode(features)
    found = method.logits(codes.take(slice(3)), codes.take(slice(3, None)), torch.tensor(labels))
    weights = {name: value.numpy() for name, value in method.state_dict().items()}
    maps = features.numpy()
    expected = reference.fot_logits(maps[:3], maps[3:], labels, weights, 0.7, 0.2, 3.0)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-8)


def test_pooled_transforms_are_transforms_pooled() -> None:
    method = built(postures=2)
    maps, posture = method.foreground(torch.randn(3, 3, 4, 4, dtype=torch.float64))
    found = method.pooled_transforms(maps, posture)
    for z in range(2):
        turned = method.transform(maps, posture, method.postures[z : z + 1])
        torch.testing.assert_close(found[:, z], (turned - maps).mean((2, 3)))


def test_the_foreground_is_where_the_energy_is() -> None:
    features = torch.full((1, 3, 4, 4), 0.1, dtype=torch.float64)
    features[:, :, 1, 2] = 10.0
    maps, posture = built().foreground(features)
    assert float(posture[0, 0, 1, 2]) == pytest.approx(16 / 17, abs=1e-3)  # e = 16 × its mean
    assert float(posture[0, 0, 0, 0]) < 0.01
    assert float(maps[0, 0, 1, 2]) > 9
    flat, _ = built().foreground(torch.ones(1, 3, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(flat, torch.full((1, 3, 4, 4), 0.5, dtype=torch.float64))
    assert built().foreground(torch.zeros(1, 3, 4, 4, dtype=torch.float64))[0].isfinite().all()


def test_training_turns_each_photo_into_the_next_of_its_class() -> None:
    method = built(postures=2).train()
    companion = method.companion(BasePhotos(torch.tensor([0, 1, 0, 1]), None)).double()
    features = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    terms = companion(method.encode(features), torch.arange(4))
    maps, posture = method.foreground(features.detach())
    other = torch.tensor([2, 3, 0, 1])
    expected = (method.transform(maps, posture, posture[other]) - maps[other]).abs().mean()
    torch.testing.assert_close(terms["transformation"], expected)
    torch.testing.assert_close(method.postures, posture[[0, 3]])
    terms["transformation"].backward()
    assert features.grad is None  # the generator works on the maps as they are


def test_it_learns_to_move_a_blob_to_where_the_posture_says() -> None:
    """Of each class a colour, in a random cell: better by far than to leave the photo as it is, or to erase it."""
    random = torch.Generator().manual_seed(2)
    colours = torch.rand(6, 3, generator=random, dtype=torch.float64) + 0.5
    labels = torch.arange(6).repeat_interleave(8)
    features = torch.zeros(48, 3, 3, 3, dtype=torch.float64)
    cells = torch.randint(9, (48,), generator=random)
    features.flatten(2)[torch.arange(48), :, cells] = colours[labels]
    method = built(size=3).train()
    method.initialise(features)
    companion = method.companion(BasePhotos(labels, None)).double()
    optimiser = torch.optim.Adam(method.parameters(), lr=3e-2)
    maps, _ = method.foreground(features)
    untouched, erased = (maps - maps[same_class_partner(labels)]).abs().mean(), maps.abs().mean()
    for _ in range(150):
        optimiser.zero_grad()
        error = companion(method.encode(features), torch.arange(48))["transformation"]
        error.backward()
        optimiser.step()
    assert error < 0.7 * torch.minimum(untouched, erased)
