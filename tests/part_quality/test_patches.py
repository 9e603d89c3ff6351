"""P-D and P-E: peaks, squares around them, purity, consistency and stability, counted by hand."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from parseshot.part_quality.consistency import add_noise, consistency, stability
from parseshot.part_quality.places import enlarged_peak, inside
from parseshot.part_quality.purity import merge_sides, purity


def test_the_peak_is_that_of_the_bicubic_enlargement() -> None:
    maps = np.random.default_rng(0).uniform(size=(40, 3, 7, 7)).astype(np.float32)
    large = F.interpolate(torch.from_numpy(maps), (84, 84), mode="bicubic", align_corners=False)
    at = large.flatten(2).argmax(2).numpy()
    found = enlarged_peak(maps, 84)
    assert found.shape == (40, 3, 2)
    assert (np.abs(found - np.stack((at % 84, at // 84), -1)) <= 1).all()  # two pixels may be equal but for rounding
    assert (found[..., 0] == at % 84).mean() > 0.95


def test_a_single_cell_peaks_at_its_middle() -> None:
    maps = np.zeros((1, 7, 7), dtype=np.float32)
    maps[0, 2, 5] = 1.0  # row, column
    assert np.abs(enlarged_peak(maps, 224)[0] - [5.5 * 32 - 0.5, 2.5 * 32 - 0.5]).max() <= 0.5


def test_a_square_has_its_edge_and_no_hidden_landmark() -> None:
    landmarks = np.array([[[10.0, 10.0], [13.0, 7.0], [13.1, 10.0], [10.0, 10.0]]])
    visible = np.array([[True, True, True, False]])
    assert inside(np.array([[[10.0, 10.0]]]), landmarks, visible, 3.0).tolist() == [[[True, True, False, False]]]


def test_left_and_right_are_one_landmark() -> None:
    names = ["back", "left_eye", "left_leg", "right_eye", "right_leg", "tail"]
    assert merge_sides(names).tolist() == [0, 1, 2, 1, 2, 5]


def test_purity_by_hand() -> None:
    """Four images, parts a and b, landmarks beak, left eye, right eye."""
    merged = merge_sides(["beak", "left_eye", "right_eye"])
    visible = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 0, 0]], dtype=bool)
    found = np.zeros((4, 2, 3), dtype=bool)
    found[0, 0, 1] = found[1, 0, 2] = found[3, 0, 0] = True  # a: an eye in 2 of 3 images that show one, the beak in 1/3
    found[0, 1, 0] = found[1, 1, 0] = found[3, 1, 0] = True  # b: the beak in 3 of 3
    assert purity(found, visible, merged) == pytest.approx([2 / 3, 1.0])
    active = np.array([[1, 0], [1, 0], [0, 0], [1, 0]], dtype=bool)
    a, b = purity(found, visible, merged, active)
    assert a == 1.0  # an eye in both active images that show one
    assert np.isnan(b)  # never active


def test_consistency_by_hand() -> None:
    """Two classes of five images, two parts, two landmarks: two of the four units are consistent."""
    labels, visible = np.repeat([3, 8], 5), np.ones((10, 2), dtype=bool)
    visible[5, 1] = False
    found = np.zeros((10, 2, 2), dtype=bool)
    found[:4, 0, 0] = True  # part 0, class 3: 4 of 5 = 0.8
    found[:3, 1, 0] = found[3:5, 1, 1] = True  # part 1, class 3: 3 of 5 and 2 of 5, together 5 of 5: no single one
    found[5:8, 0, 0] = True  # part 0, class 8: 3 of 5
    found[6:10, 1, 1] = True  # part 1, class 8: 4 of the 4 that show it
    assert consistency(found, visible, labels) == 0.5
    assert consistency(found[5:, :1], visible[5:], labels[5:]) == 0.0
    assert consistency(found[5:, 1:], visible[5:], labels[5:]) == 1.0


def test_stability_by_hand() -> None:
    before = np.zeros((2, 2, 3), dtype=bool)
    before[0, 0, 1] = True
    after = before.copy()
    assert stability(before, after) == 1.0
    after[0, 0] = [True, True, False]  # one landmark more: the set is another
    assert stability(before, after) == 0.75


def test_noise_belongs_to_the_image_and_is_bounded() -> None:
    images = torch.rand(4, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    numbers = np.array([7, 3, 11, 20])
    noisy = add_noise(images, numbers)
    alone = torch.cat([add_noise(images[at : at + 1], numbers[at : at + 1]) for at in (3, 2, 1, 0)]).flip(0)
    assert torch.equal(noisy, alone)
    assert not torch.equal(noisy - images, add_noise(images, numbers, seed=1) - images)
    units = (noisy - images) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    assert units.abs().max() == pytest.approx(0.25, abs=1e-5)
    # N(0, 1) cut at ±1.25 has the variance 1 − 2·1.25·pdf(1.25) − 2·Q(1.25)·(1 − 1.25²) = 0.6622 = 0.8138²
    assert units.std() == pytest.approx(0.2 * 0.8138, rel=0.03)
    assert torch.equal(add_noise(images, numbers, noise=0.0), images)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_maps_take_no_more_memory_than_few() -> None:
    """A program keeps what it frees, and results kept between large tensors once left a hole of 50 MB for each."""
    script = (
        "import numpy as np\n"
        "from parseshot.engine.allocator import keep_freed_memory, peak_memory\n"
        "from parseshot.part_quality.places import TOGETHER, enlarged_peak\n"
        "assert keep_freed_memory()\n"
        "maps = np.random.default_rng(0).random((40 * TOGETHER, 1, 7, 7), dtype=np.float32)\n"
        "enlarged_peak(maps[:TOGETHER], 224)\n"
        "few = peak_memory()\n"
        "enlarged_peak(maps, 224)\n"
        "print(peak_memory() - few)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.3  # GB; it was 2
