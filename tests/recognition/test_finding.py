"""Finding the object: where edges are, turned with the photo, and never a box that is not in it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from parseshot.data.synthetic import draw_many, make_species
from parseshot.recognition.finding import SIDE, edges, energy_boxes, find_objects


@given(hnp.arrays(np.float64, (5, 5), elements=st.floats(0, 10)))
@settings(max_examples=60, deadline=None)
def test_a_box_turns_with_its_map(energy: np.ndarray) -> None:
    left, top, right, bottom = energy_boxes(energy[None])[0]
    assert 0 <= left < right <= 1
    assert 0 <= top < bottom <= 1
    turned = energy_boxes(energy[None, :, ::-1])[0]
    np.testing.assert_allclose(turned, [1 - right, top, 1 - left, bottom], atol=1e-9)
    np.testing.assert_allclose(energy_boxes(energy.T[None])[0], [top, left, bottom, right], atol=1e-9)


def test_edges_by_hand() -> None:
    grey = np.zeros((SIDE, SIDE), np.uint8)
    grey[:, SIDE // 2 + 1 :] = 100  # one step from left to right, just right of the middle
    (strength,) = edges([Image.fromarray(grey).convert("RGB")])
    assert strength.shape == (SIDE - 1, SIDE - 1)
    assert (np.delete(strength, SIDE // 2, axis=1) == 0).all()
    column = strength[:, SIDE // 2]
    middle, corner = (0.5 / (SIDE - 1)) * 2, 1 - 1 / (SIDE - 1)  # from the middle, in halves of a side
    expected = [200 * np.exp(-0.5 * (y**2 + middle**2) / 0.7**2) for y in (corner, middle)]
    np.testing.assert_allclose([column[0], column[SIDE // 2]], expected, rtol=1e-4)
    np.testing.assert_allclose(column, column[::-1], rtol=1e-6)


@pytest.mark.parametrize("corner", [(210, 20), (20, 20), (120, 110)])
def test_the_object_is_found(corner: tuple[int, int]) -> None:
    pictures, *_ = draw_many(make_species(1, seed=911), 1, seed=4)
    bird = Image.fromarray(pictures[0]).resize((168, 168))
    canvas = Image.new("RGB", (400, 300), (110, 120, 130))
    canvas.paste(bird, corner)
    for turned in (False, True):
        photo = canvas.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if turned else canvas
        (box,) = find_objects([photo])
        assert box is not None
        x, y = (400 - 168 - corner[0] if turned else corner[0]), corner[1]
        across, down = min(box[2], x + 168) - max(box[0], x), min(box[3], y + 168) - max(box[1], y)
        assert across > 0.8 * 168
        assert down > 0.8 * 168
        both = (box[2] - box[0]) * (box[3] - box[1]) + 168**2 - across * down
        assert across * down / both > 1.5 * 168**2 / (300 * 400)  # of the whole photo it would be 0.24


@given(
    st.tuples(st.integers(32, 700), st.integers(32, 700)),
    st.sampled_from(("noise", "even", "dot")),
)
@settings(max_examples=40, deadline=None)
def test_a_box_lies_in_its_photo(size: tuple[int, int], kind: str) -> None:
    pixels = np.full((size[1], size[0], 3), 128, np.uint8)
    if kind == "noise":
        pixels[:] = np.random.default_rng(0).integers(256, size=pixels.shape)
    elif kind == "dot":
        pixels[size[1] // 4, size[0] // 4] = 255
    (box,) = find_objects([Image.fromarray(pixels)])
    assert box is not None
    assert 0 <= box[0] < box[2] <= size[0]
    assert 0 <= box[1] < box[3] <= size[1]
    if kind == "even":  # nothing to be seen: nearly all of it, evenly
        assert box[0] / size[0] == pytest.approx(1 - box[2] / size[0])
        assert box[2] - box[0] > 0.8 * size[0]


def test_no_photos_no_boxes() -> None:
    assert find_objects([]) == []


def test_a_box_too_small_to_show_is_none() -> None:
    pixels = np.full((16, 16, 3), 128, np.uint8)
    pixels[4, 4] = 255
    assert find_objects([Image.fromarray(pixels)]) == [None]
