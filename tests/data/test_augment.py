"""Photos that are turned, scaled and shifted by what is known: the draw, and where a mark lands."""

import numpy as np
import pytest
import torch

from parseshot.data.augment import SCALE, SHIFT, TURN, draw_warps, move_photos
from parseshot.parts.warps import moved


def test_a_warp_is_a_function_of_the_seed_and_the_image_alone() -> None:
    some = draw_warps(np.array([7, 3, 9]), 1)
    assert torch.equal(some[[1, 0]], draw_warps(np.array([3, 7]), 1))
    assert not torch.equal(some, draw_warps(np.array([7, 3, 9]), 2))
    assert some.dtype == torch.float32
    drawn_before = torch.tensor([[0.885723, 0.071105, 0.221687], [-0.071105, 0.885723, -0.06831]])
    torch.testing.assert_close(draw_warps(np.array([5]), 1)[0], drawn_before, rtol=0, atol=1e-6)  # as caches have it


def test_warps_fill_their_ranges() -> None:
    warps = draw_warps(np.arange(2_000), 0).double()
    factor = torch.linalg.det(warps[:, :, :2]).rsqrt()
    angle = torch.rad2deg(torch.atan2(warps[:, 1, 0], warps[:, 0, 0]))
    for values, low, high in (
        (factor, *SCALE),
        (angle, -TURN, TURN),
        (warps[:, 0, 2] / 2, -SHIFT, SHIFT),
        (warps[:, 1, 2] / 2, -SHIFT, SHIFT),
    ):
        slack = 1e-6 * (high - low)
        assert low - slack <= float(values.min()) < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < float(values.max()) <= high + slack
        assert float(values.mean()) == pytest.approx((low + high) / 2, abs=0.03 * (high - low))


def test_a_mark_lands_where_the_place_is_moved_to() -> None:
    """In pixels and, which is the same with a larger G, in cells."""
    size, warps = 56, draw_warps(np.arange(12), 5)
    pixels = np.zeros((12, size, size, 3), dtype=np.uint8)
    places = torch.tensor([[20.0 + 2 * image, 34.0 - image] for image in range(12)])
    for image, (x, y) in enumerate(places.int().tolist()):
        pixels[image, y - 1 : y + 2, x - 1 : x + 2] = 255
    found = move_photos(pixels, warps)
    assert found.dtype == torch.uint8
    assert found.shape == (12, 3, size, size)
    mass = found[:, 1].double()
    each = torch.arange(size, dtype=torch.float64)
    lands = torch.stack(((mass.sum(1) * each).sum(1), (mass.sum(2) * each).sum(1)), 1) / mass.sum((1, 2))[:, None]
    wanted = moved(places.view(12, 1, 1, 2), warps, size).view(12, 2)
    torch.testing.assert_close(lands.float(), wanted, rtol=0, atol=0.1)
    assert float((wanted - places).norm(dim=1).median()) > 3  # they do move


def test_no_move_changes_nothing_and_the_border_is_repeated() -> None:
    pixels = np.random.default_rng(0).integers(256, size=(2, 8, 8, 3), dtype=np.uint8)
    still, far = torch.eye(2, 3).expand(2, 2, 3), torch.tensor([[1.0, 0.0, 9.0], [0.0, 1.0, 0.0]]).expand(2, 2, 3)
    plain = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    assert torch.equal(move_photos(pixels, still), plain)
    assert torch.equal(move_photos(pixels, far), plain[..., -1:].expand(-1, -1, -1, 8))
