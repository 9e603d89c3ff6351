"""The drawn field guide: reproducible, fine-grained, and truthful about where its parts are."""

import hashlib
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from parseshot.data import synthetic
from parseshot.data.synthetic import (
    BODY_COLOURS,
    FAMILY_SIZE,
    LOOKS,
    MOST_SPECIES,
    PALETTE,
    PART_NAMES,
    Species,
    draw,
    draw_many,
    make_species,
    vocabulary,
)

SOURCE = Path(synthetic.__file__).parents[2]
DIGEST_SCRIPT = """
import hashlib
from parseshot.data.synthetic import draw, make_species
print(hashlib.sha256(b"".join(draw(s, 7).image.tobytes() for s in make_species(6, 3))).hexdigest())
"""


def plain(species: Species) -> Species:
    """The species with its patterns painted out, so that one colour covers a whole part."""
    return replace(species, **{p: replace(species.trait(p), pattern="plain") for p in PART_NAMES})


def recoloured(species: Species, part: str, colour: str) -> Species:
    return replace(species, **{part: replace(species.trait(part), colour=colour, second=colour)})


def changed_pixels(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(a.astype(int) - b).max(axis=2) > 40


def part_differences(a: Species, b: Species) -> int:
    return sum(a.traits(part) != b.traits(part) for part in PART_NAMES)


def test_the_same_seed_gives_the_same_pixels_in_any_process() -> None:
    here = hashlib.sha256(b"".join(draw(s, 7).image.tobytes() for s in make_species(6, 3))).hexdigest()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": "12345"}
    there = subprocess.run(
        [sys.executable, "-c", DIGEST_SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here


def test_another_seed_gives_another_picture() -> None:
    species = make_species(1)[0]
    assert (draw(species, 0).image != draw(species, 1).image).mean() > 0.5


def test_a_drawing_has_the_promised_shapes_and_types() -> None:
    drawing = draw(make_species(1)[0], 0, size=60)
    assert (drawing.image.shape, drawing.image.dtype) == ((60, 60, 3), np.uint8)
    assert (drawing.parts.shape, drawing.parts.dtype) == ((6, 2), np.float32)
    assert (drawing.visible.shape, drawing.visible.dtype) == ((6,), np.bool_)
    assert (drawing.box.shape, drawing.box.dtype) == ((4,), np.float32)


@pytest.mark.parametrize("part", PART_NAMES)
def test_every_part_of_every_species_is_from_the_vocabulary(part: str) -> None:
    assert 6 <= len(vocabulary(part)) <= LOOKS
    for seed in range(3):
        assert {s.trait(part) for s in make_species(100, seed)} <= set(vocabulary(part))


@pytest.mark.parametrize("part", PART_NAMES)
def test_looks_of_a_part_have_clearly_different_colours(part: str) -> None:
    for a, b in itertools.combinations(vocabulary(part), 2):
        distance = math.dist(PALETTE[a.colour], PALETTE[b.colour])
        assert distance >= (110 if a.shape == b.shape else 75), (a, b)
    seconds = [look.second for look in vocabulary(part) if look.pattern != "plain"]
    assert len(set(seconds)) == len(seconds)
    for look in vocabulary(part):
        assert look.second == look.colour or math.dist(PALETTE[look.colour], PALETTE[look.second]) >= 110
        assert (look.second == look.colour) == (look.pattern == "plain")
        assert part in ("beak", "legs") or look.colour not in BODY_COLOURS


@pytest.mark.parametrize("part", PART_NAMES)
def test_two_looks_of_a_part_differ_in_most_of_its_pixels(part: str) -> None:
    scene = 6  # every part of these two shows in full
    for species in make_species(10)[::5]:
        looks = [replace(species, **{part: look}) for look in vocabulary(part)]
        images = [draw(s, scene).image for s in looks]
        areas = [
            changed_pixels(*(draw(recoloured(plain(s), part, c), scene).image for c in ("black", "yellow")))
            for s in looks
        ]
        for a, b in itertools.combinations(range(len(looks)), 2):
            area = areas[a] | areas[b]
            changed = changed_pixels(images[a], images[b]) & area
            assert changed.sum() > 0.5 * area.sum(), (looks[a].trait(part), looks[b].trait(part))


@pytest.mark.parametrize("part", PART_NAMES)
def test_no_single_part_gives_a_species_away(part: str) -> None:
    species = make_species(100)
    for look in vocabulary(part):
        wearers = [s for s in species if s.trait(part) == look]
        assert len(wearers) >= 3
        assert len({s.family for s in wearers}) >= 2


@pytest.mark.parametrize("count", [1, 7, MOST_SPECIES])
def test_species_are_distinct_in_name_and_looks(count: int) -> None:
    species = make_species(count, seed=5)
    assert len(species) == count
    assert len({s.name for s in species}) == count
    assert len({(s.build, s.body, *(s.traits(p) for p in PART_NAMES)) for s in species}) == count
    assert not any(set(s.name) & set('/\\:*?"<>|') for s in species)


def test_a_larger_count_only_appends() -> None:
    assert make_species(10, 4) == make_species(23, 4)[:10]
    assert make_species(10, 4) != make_species(10, 5)


def test_members_of_a_family_have_a_relative_one_or_two_parts_away() -> None:
    species = make_species(1000)
    for start in range(0, len(species), FAMILY_SIZE):
        family = species[start : start + FAMILY_SIZE]
        assert len({(s.family, s.build, s.body) for s in family}) == 1
        for member in family:
            assert min(part_differences(member, other) for other in family if other is not member) in (1, 2)


def test_a_neighbouring_species_looks_different_in_the_same_scene() -> None:
    for family in range(12):
        members = make_species((family + 1) * FAMILY_SIZE)[-FAMILY_SIZE:]
        images = [draw(m, seed=3).image for m in members]
        for i in range(FAMILY_SIZE):
            for j in range(i):
                assert changed_pixels(images[i], images[j]).sum() >= 6, (members[i].name, members[j].name)


@pytest.mark.parametrize("part", PART_NAMES)
def test_positions_lie_in_the_middle_of_the_part(part: str) -> None:
    checked = 0
    for seed, species in enumerate(make_species(80, seed=2)[::5]):
        dark, light = (recoloured(plain(species), part, colour) for colour in ("black", "yellow"))
        a, b = draw(dark, seed), draw(light, seed)
        np.testing.assert_array_equal(a.parts, b.parts)
        changed = changed_pixels(a.image, b.image)
        cut_off = changed[[0, -1]].any() or changed[:, [0, -1]].any()
        index = PART_NAMES.index(part)
        if cut_off or not a.visible[index]:
            continue
        rows, columns = np.nonzero(changed)
        middle = np.array([columns.mean(), rows.mean()])
        # an occluder over half of a part moves the middle of what is left
        assert np.linalg.norm(middle - a.parts[index]) < 6.0, (species.name, seed)
        assert columns.min() - 1 <= a.parts[index, 0] <= columns.max() + 1
        assert rows.min() - 1 <= a.parts[index, 1] <= rows.max() + 1
        checked += 1
    assert checked >= 6


def test_two_sizes_show_the_same_scene() -> None:
    for seed, species in enumerate(make_species(20)[::4]):
        small, large = draw(species, seed, 84), draw(species, seed, 224)
        shrunk = np.asarray(Image.fromarray(large.image).resize((84, 84), Image.Resampling.BOX), dtype=float)
        assert np.abs(shrunk - small.image).mean() < 4.0
        np.testing.assert_allclose((large.parts + 0.5) / 224, (small.parts + 0.5) / 84, atol=1e-5)
        np.testing.assert_allclose((large.box + 0.5) / 224, (small.box + 0.5) / 84, atol=1e-5)
        np.testing.assert_array_equal(large.visible, small.visible)


def test_the_box_holds_the_bird_and_its_size_varies() -> None:
    _, _, parts, visible, boxes = draw_many(make_species(20), 5)
    sides = np.maximum(boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]) / 84
    assert sides.min() > 0.4
    assert sides.max() <= 1.0
    assert np.ptp(sides) > 0.25
    inside = (parts >= boxes[:, None, :2] - 0.5) & (parts <= boxes[:, None, 2:] + 0.5)
    assert inside.all(axis=2)[visible].all()


def test_parts_off_the_picture_or_covered_are_not_visible() -> None:
    _, _, parts, visible, _ = draw_many(make_species(20), 6)
    off = ((parts < -0.5) | (parts > 83.5)).any(axis=2)
    assert off.any()
    assert not visible[off].any()
    assert (~visible & ~off).any()
    assert visible.mean() > 0.8


def test_birds_face_both_ways() -> None:
    _, _, parts, _, _ = draw_many(make_species(2), 12)
    facing_right = parts[:, PART_NAMES.index("beak"), 0] > parts[:, PART_NAMES.index("tail"), 0]
    assert 0.2 < facing_right.mean() < 0.8


def test_two_workers_draw_what_one_draws() -> None:
    species = make_species(4)
    heard: list[int] = []
    alone = draw_many(species, 3, seed=9, progress=heard.append)
    for one, two in zip(alone, draw_many(species, 3, seed=9, workers=2), strict=True):
        np.testing.assert_array_equal(one, two)
    assert heard == [3, 6, 9, 12]
    np.testing.assert_array_equal(alone[1], np.repeat(np.arange(4), 3))


def test_a_picture_does_not_depend_on_the_others() -> None:
    species = make_species(3)
    many, few = draw_many(species, 4), draw_many(species[1:2], 2)
    np.testing.assert_array_equal(many[0][4:6], few[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_species(0), "count is 0; it must be from 1 to 20000"),
        (lambda: make_species(20_001), "count is 20001; it must be from 1 to 20000"),
        (lambda: make_species(1, seed=-1), "seed is -1; it must be at least 0"),
        (lambda: draw(make_species(1)[0], -1), "seed is -1; it must be at least 0"),
        (lambda: draw_many(make_species(1), 1, seed=-1), "seed is -1; it must be at least 0"),
        (lambda: draw(make_species(1)[0], 0, size=31), "size is 31; it must be at least 32"),
        (lambda: draw_many(make_species(1), 0), "per_species is 0; it must be at least 1"),
        (lambda: draw_many(make_species(1), 1, workers=0), "workers is 0; it must be at least 1"),
        (lambda: draw_many([], 1), r"len\(species\) is 0; it must be at least 1"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
