"""Packs, episodes and augmentation: what goes in comes out, the same every time, and errors say what to do."""

from pathlib import Path

import numpy as np
import pytest
import torch

from parseshot.data.augment import Augmentation, augment, crop_and_resize, homography, jitter, random_boxes, warp
from parseshot.data.episodes import draw_episode
from parseshot.data.packed import Pack, write_pack
from parseshot.errors import DataError


def small(path: Path, **changes) -> Pack:
    images = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)
    arguments = {
        "name": "tiny",
        "arrays": {"images": images, "labels": np.array([1, 0, 1, 2])},
        "classes": ["a", "b", "c"],
        "splits": ["base", "base", "novel"],
        "split": {"name": "test", "fingerprint": "0"},
        "provenance": {},
    }
    return write_pack(path, **{**arguments, **changes})


def test_round_trip(tmp_path: Path) -> None:
    pack = small(tmp_path / "pack")
    assert len(pack) == 4
    assert {name: rows.tolist() for name, rows in pack.by_class("base").items()} == {0: [1], 1: [0, 2]}
    assert pack.counts() == {
        "base": {"classes": 2, "images": 3},
        "val": {"classes": 0, "images": 0},
        "novel": {"classes": 1, "images": 1},
    }
    loaded = pack.load([2])
    assert loaded.shape == (1, 3, 8, 8)
    assert loaded.is_contiguous(memory_format=torch.channels_last)
    assert float(loaded[0, 1, 0, 0]) == pytest.approx(float(pack.images[2, 0, 0, 1]) / 255)
    assert small(tmp_path / "again").fingerprint == pack.fingerprint


def test_errors_name_the_file_and_the_way_out(tmp_path: Path) -> None:
    pack = small(tmp_path / "pack")
    with pytest.raises(DataError, match="not empty"):
        small(tmp_path / "pack")
    with pytest.raises(DataError, match="no classes in split 'val'"):
        pack.by_class("val")
    with pytest.raises(DataError, match="unknown split"):
        pack.by_class("test")
    with pytest.raises(DataError, match="parseshot data prepare"):
        Pack(tmp_path)
    (tmp_path / "pack" / "images.npy").write_bytes(b"short")
    with pytest.raises(DataError, match=r"images\.npy cannot be read"):
        Pack(tmp_path / "pack")
    (tmp_path / "pack" / "pack.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        Pack(tmp_path / "pack")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        small(tmp_path / "pack", arrays={"images": np.array([object()]), "labels": np.array([0])})
    assert list(tmp_path.iterdir()) == []


def members(counts: list[int]) -> dict[int, np.ndarray]:
    ends = np.cumsum(counts)
    return {10 + i: np.arange(end - n, end) for i, (n, end) in enumerate(zip(counts, ends, strict=True))}


def test_an_episode_depends_on_seed_and_index_alone() -> None:
    images = members([20] * 8)
    one, same = (draw_episode(images, way=5, shots=2, queries=3, seed=4, index=9) for _ in range(2))
    reordered = draw_episode(dict(reversed(images.items())), way=5, shots=2, queries=3, seed=4, index=9)
    for other in (same, reordered):
        for name in ("classes", "support", "support_labels", "query", "query_labels"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    for seed, index in ((5, 9), (4, 10), (9, 4)):
        assert not np.array_equal(
            one.query, draw_episode(images, way=5, shots=2, queries=3, seed=seed, index=index).query
        )


def test_support_and_query_are_apart_and_belong_to_their_class() -> None:
    images = members([12, 9, 30, 7, 7])
    for index in range(50):
        episode = draw_episode(images, way=4, shots=[1, 2, 3, 4], queries=3, seed=0, index=index)
        assert len(set(episode.classes.tolist())) == 4
        assert not set(episode.support.tolist()) & set(episode.query.tolist())
        assert np.bincount(episode.support_labels).tolist() == [1, 2, 3, 4]
        assert np.bincount(episode.query_labels).tolist() == [3, 3, 3, 3]
        for rows, labels in ((episode.support, episode.support_labels), (episode.query, episode.query_labels)):
            for row, label in zip(rows, labels, strict=True):
                assert row in images[int(episode.classes[label])]


def test_an_impossible_episode_names_the_class_and_the_numbers() -> None:
    with pytest.raises(DataError, match=r"class number 11 has 4 images.*2 support \+ 3 query = 5"):
        draw_episode(members([9, 4, 9]), way=2, shots=2, queries=3, seed=0, index=0)
    with pytest.raises(DataError, match=r"class 'wren' has 4 images, an episode needs 2 support \+ 3 query = 5"):
        draw_episode(
            {0: np.arange(9), 1: np.arange(4)}, way=2, shots=2, queries=3, seed=0, index=0, names=["owl", "wren"]
        )
    with pytest.raises(DataError, match="asked for 4 classes an episode, but the split has 3"):
        draw_episode(members([9, 9, 9]), way=4, shots=2, queries=3, seed=0, index=0)
    with pytest.raises(DataError, match="at least 2 classes"):
        draw_episode(members([9, 9, 9]), way=1, shots=2, queries=3, seed=0, index=0)


def some_pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (200, 12, 12, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["paper", "frn"])
def test_augmentation_depends_on_seed_and_step(name: str) -> None:
    pixels = some_pixels()
    one, same = (augment(pixels, Augmentation(name=name), size=12, seed=1, step=5) for _ in range(2))
    assert one.shape == (200, 3, 12, 12)
    assert one.is_contiguous(memory_format=torch.channels_last)
    assert one.dtype == torch.uint8
    assert int(one.max()) - int(one.min()) > 200
    assert torch.equal(one, same)
    assert not torch.equal(one, augment(pixels, Augmentation(name=name), size=12, seed=1, step=6))
    assert not torch.equal(one, augment(pixels, Augmentation(name=name), size=12, seed=2, step=5))


def test_flips_half_of_the_images_and_distorts_its_share() -> None:
    pixels = some_pixels()
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    flipped = augment(pixels, Augmentation(perspective=0.0), size=12, seed=1, step=5)
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(t != k for t, k in zip(turned, kept, strict=True))
    assert 0.35 < np.mean(turned) < 0.65
    plain = augment(pixels, Augmentation(flip=False, perspective=0.0), size=12, seed=1, step=5)
    assert torch.equal(plain, images)
    assert torch.equal(augment(pixels, Augmentation(name="none"), size=12, seed=1, step=5), images)
    both = augment(pixels, Augmentation(perspective_share=0.5), size=12, seed=1, step=5)
    untouched = [torch.equal(a, b) for a, b in zip(both, flipped, strict=True)]
    assert 0.35 < np.mean(untouched) < 0.65
    tiny = augment(pixels, Augmentation(perspective=1e-6, perspective_share=1.0), size=12, seed=1, step=5)
    assert torch.equal(tiny, flipped)  # a flip inside the map is the same flip
    assert np.array_equal(pixels, some_pixels())  # the input is left alone


def test_a_crop_shows_its_box_and_mirrors_by_swapping_its_sides() -> None:
    ramp = torch.linspace(0, 1, 40).expand(1, 3, 40, 40)
    boxes = torch.tensor([[0.25, 0.0, 0.75, 1.0]])
    crop = crop_and_resize(ramp, boxes, 20)
    torch.testing.assert_close(crop, ramp[..., :20, 10:30], atol=1e-5, rtol=0)
    turned = crop_and_resize(ramp, boxes[:, [2, 1, 0, 3]], 20)
    torch.testing.assert_close(turned, crop.flip(-1), atol=1e-5, rtol=0)


def test_random_boxes_have_the_areas_and_aspects_they_should() -> None:
    boxes = random_boxes(4000, torch.Generator().manual_seed(0))
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert float(boxes.min()) >= 0
    assert float(boxes.max()) <= 1 + 1e-6
    area, aspect = width * height, width / height
    assert 0.08 <= float(area.min()) < 0.12
    assert 0.9 < float(area.max()) <= 1
    assert float(aspect.min()) >= 0.75 - 1e-5
    assert float(aspect.max()) <= 4 / 3 + 1e-5
    assert 0.45 < float(area.mean()) < 0.58


def test_jitter_changes_what_it_says() -> None:
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.4 + 0.2
    one = torch.ones(1, 3)
    torch.testing.assert_close(jitter(image, one), image)
    brighter = jitter(image, torch.tensor([[1.2, 1.0, 1.0]]))
    torch.testing.assert_close(brighter, image * 1.2)
    flat = jitter(image, torch.tensor([[1.0, 0.0, 1.0]]))
    assert float(flat.std()) < 1e-6
    grey = jitter(image, torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(grey[:, 0], grey[:, 1])
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    torch.testing.assert_close(grey[:, 0], (image * weights).sum(1))


def test_warp_moves_the_corners_where_it_says() -> None:
    """A pixel grid of x and y coordinates shows where each output pixel came from."""
    line = torch.linspace(-1, 1, 41)
    y, x = torch.meshgrid(line, line, indexing="ij")
    image = torch.stack((x, y, torch.zeros_like(x)))[None]
    unmoved = warp(image, torch.zeros(1, 4, 2))
    torch.testing.assert_close(unmoved, image, atol=1e-5, rtol=0)
    shifts = torch.tensor([[[0.5, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])  # the top left corner moves to (−½, −½)
    warped = warp(image, shifts)
    assert warped[0, :2, 10, 10].tolist() == pytest.approx([-1.0, -1.0], abs=1e-3)
    assert warped[0, :2, 0, 40].tolist() == pytest.approx([1.0, -1.0], abs=1e-3)


def test_homography_takes_four_points_to_four_points() -> None:
    source = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]], dtype=torch.float64)
    target = torch.tensor([[[0.1, 0.0], [1.0, 0.2], [0.9, 1.0], [0.0, 0.7]]], dtype=torch.float64)
    matrix = homography(source, target)[0]
    for point, expected in zip(source[0], target[0], strict=True):
        mapped = matrix @ torch.cat((point, torch.ones(1, dtype=torch.float64)))
        torch.testing.assert_close(mapped[:2] / mapped[2], expected)
