"""DOP without its own way to locate parts: everywhere alike, or where the features are strong."""

import pytest
import torch

from parseshot.methods import build_method
from parseshot.methods.dop import DOP


def features() -> torch.Tensor:
    return torch.rand(6, 8, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def dop(location: str) -> DOP:
    torch.manual_seed(0)
    method = build_method("dop", 8, 5, {"location": location}).double()
    assert isinstance(method, DOP)
    method.initialise(features())
    return method


def test_uniform_parts_are_everywhere() -> None:
    codes = dop("uniform").encode(features())
    torch.testing.assert_close(codes["nu"], torch.full_like(codes["nu"], 1 / 25))
    torch.testing.assert_close(codes["entropy"], torch.ones_like(codes["entropy"]))


def test_energy_puts_all_parts_where_the_features_are_strong() -> None:
    method = dop("energy")
    codes = method.encode(features())
    assert torch.equal(codes["nu"][:, :, 0], codes["nu"][:, :, 3])
    assert codes["entropy"].mean().item() == pytest.approx(0.5, abs=1e-6)  # as Eq. 5 starts
    strongest = features().square().sum(1).flatten(1).argmax(1)
    assert torch.equal(codes["nu"][:, 0, 0].flatten(1).argmax(1), strongest)
    hard = method.parse(features(), hard=True).nu
    assert torch.equal(hard.flatten(3).argmax(3), strongest[:, None, None].expand(6, 3, 4))
    assert hard.amax().item() == 1.0


@pytest.mark.parametrize("location", ["energy", "uniform"])
def test_templates_still_learn(location: str) -> None:
    method = dop(location)
    codes = method.encode(features())
    labels = torch.arange(3)
    method.loss(codes.take(slice(3, 6)), codes.take(slice(3)), labels, labels)["ce"].backward()
    assert all(template.grad.abs().max() > 0 for template in method.templates.maps)
