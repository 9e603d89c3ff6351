"""Part quality as a whole: perfect parts, constant parts, free order, both splits, floors, batches, the document."""

import json
import os
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from parseshot.data.packed import Pack, write_pack
from parseshot.data.prepare import prepare
from parseshot.data.split import load_split
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import DataError, ModelError, UsageError
from parseshot.part_quality import PartQuality, Score, draw_quality, part_quality, quality_caption, quality_lines
from parseshot.part_quality.annotations import Truth, sides
from parseshot.part_quality.figure import FLOORS, PANELS
from parseshot.part_quality.floors import floors
from parseshot.part_quality.scores import HIGHER, LOWER, score_units
from parseshot.part_quality.units import Parsed, Spread, Units, part_units, to_pixels

DATA = os.environ.get("PARSESHOT_DATA", "")
needs_data = pytest.mark.skipif(not (DATA and Path(DATA).is_dir()), reason="PARSESHOT_DATA is not set: no real data")
NAMES = ["beak", "crown", "nape", "back", "belly", "tail"]
SIZE, GRID = 64, 8
MEASURES = LOWER + HIGHER[:-1]  # stability is passed through
PARTS = [f"parts, {which}" for which in ("mean of scales", "scale 1", "scale 3", "scale 5", "all scales")]


def toy(count: int, seed: int) -> tuple[np.ndarray, Truth]:
    """Cells [n, 6] with no two landmarks in one, and the annotations that say so; every fifth landmark is hidden."""
    random = np.random.default_rng(seed)
    cells = np.stack([random.choice(GRID * GRID, len(NAMES), replace=False) for _ in range(count)])
    landmarks = to_pixels(np.stack((cells % GRID, cells // GRID), -1).astype(float), GRID, SIZE)
    visible = random.uniform(size=cells.shape) < 0.8
    box = np.zeros((count, 1, 2)), np.full((count, 1, 2), float(SIZE))
    return cells, Truth(landmarks, visible, *box, np.arange(count) % 4)


def delta_units(cells: np.ndarray) -> Units:
    maps = np.zeros((*cells.shape, GRID * GRID), dtype=np.float32)
    np.put_along_axis(maps, cells[..., None], 1.0, 2)
    return units_of(maps.reshape(len(cells), -1, GRID, GRID))


def units_of(nu: np.ndarray, score: np.ndarray | None = None) -> Units:
    """The only scale of a parse with these maps [n, L, G, G]."""
    score = (nu if score is None else score)[:, None]
    (found,) = part_units(Parsed(nu[:, None], score, nu.sum(1)), Spread.of(score), (1,), SIZE)
    return found


def random_units(count: int, seed: int) -> Units:
    score = np.random.default_rng(seed).normal(size=(count, 5, GRID, GRID)).astype(np.float32)
    sharp = np.array([1, 2, 4, 6, 9])[:, None]  # some parts are active, some are not, some are now and then
    nu = torch.softmax(torch.from_numpy(score.reshape(count, 5, -1) * sharp), -1).float().numpy()
    return units_of(nu.reshape(score.shape), score)


def test_maps_on_the_true_landmarks_are_perfect_under_every_protocol() -> None:
    (cells, fit_truth), (score_cells, truth) = toy(120, 0), toy(80, 1)
    found = score_units(
        delta_units(cells), delta_units(score_cells), (fit_truth, truth), NAMES, SIZE, stability=None
    )  # fmt: skip
    assert found.error == pytest.approx(0, abs=1e-5)
    assert found.error_active == pytest.approx(0, abs=1e-5)
    assert [found.nmi, found.ari, found.nmi_nu, found.ari_nu] == pytest.approx([100] * 4)
    assert [found.purity, found.purity_active, found.consistency, found.active] == pytest.approx([100] * 4)
    assert found.purity_over_half == 6


def test_the_order_of_parts_is_free() -> None:
    truth = toy(120, 0)[1], toy(80, 1)[1]
    pair = random_units(120, 2), random_units(80, 3)
    order = [3, 0, 4, 1, 2]
    fields = ("expected", "active", "nu", "score")
    turned = [replace(one, **{name: getattr(one, name)[:, order] for name in fields}) for one in pair]
    straight, permuted = (
        score_units(*units, truth, NAMES, SIZE, stability=None) for units in (pair, (turned[0], turned[1]))
    )
    for measure in (*MEASURES, "active", "purity_deviation"):
        assert getattr(straight, measure) == pytest.approx(getattr(permuted, measure)), measure
    assert 0 < straight.active < 100
    assert straight.error != pytest.approx(straight.error_active, rel=1e-4)
    assert straight.purity != pytest.approx(straight.purity_active, rel=1e-4)


def test_a_constant_map_is_the_mean_landmark_floor() -> None:
    fit_truth, truth = toy(120, 0)[1], toy(80, 1)[1]
    flat = [units_of(np.full((n, 4, GRID, GRID), 1 / GRID**2, dtype=np.float32)) for n in (120, 80)]
    found = score_units(*flat, (fit_truth, truth), NAMES, SIZE, stability=None)
    boxes = [np.tile([0.0, 0.0, SIZE, SIZE], (n, 1)) for n in (120, 80)]
    energies = [np.random.default_rng(n).uniform(size=(n, GRID, GRID)) for n in (120, 80)]
    centre = [floors(e, b, SIZE, locations=[4])[0] for e, b in zip(energies, boxes, strict=True)]
    floor = score_units(*centre, (fit_truth, truth), NAMES, SIZE, stability=None)
    gaps = []
    for part in range(6):
        mean = fit_truth.landmarks[fit_truth.visible[:, part], part].mean(0)
        gaps.append(np.linalg.norm(truth.landmarks[truth.visible[:, part], part] - mean, axis=1) / SIZE)
    assert floor.name == "floor: box centre"
    assert found.error == pytest.approx(100 * np.concatenate(gaps).mean())
    assert [found.error_active, floor.error, floor.error_active] == pytest.approx([found.error] * 3)
    assert [found.nmi, found.ari, floor.nmi, floor.ari] == pytest.approx([0] * 4, abs=1e-9)
    assert found.active == 0
    assert found.purity_active is None


def test_floors_have_the_places_they_are_named_after() -> None:
    energy = np.zeros((2, 4, 4))
    energy[0, 1, 3], energy[0, 0, 2], energy[1, 2, 0] = 2.0, 1.0, 5.0  # row, column
    boxes = np.array([[0.0, 0.0, 10.0, 20.0], [4.0, 4.0, 8.0, 8.0]])
    found = {(one.name, one.locations): one.peak for one in floors(energy, boxes, 32, locations=[4, 12])}
    assert [len(places) for places in found.values()] == [2] * 8
    assert found["floor: box centre", 1][:, 0].tolist() == [[5.0, 10.0], [6.0, 6.0]]
    assert found["floor: energy argmax", 1][:, 0].tolist() == [[27.5, 11.5], [3.5, 19.5]]
    assert found["floor: strongest cells", 4][0, :2].tolist() == [[27.5, 11.5], [19.5, 3.5]]
    assert found["floor: 2×2 grid", 4][1].tolist() == [[7.5, 7.5], [23.5, 7.5], [7.5, 23.5], [23.5, 23.5]]
    assert len(np.unique(found["floor: 3×4 grid", 12][0], axis=0)) == 12
    assert set(found["floor: random cell", 12].ravel()) <= {3.5, 11.5, 19.5, 27.5}


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(ModelConfig(backbone_options={"channels": 8}))


@pytest.fixture(scope="module")
def few(birds: Pack, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """Eight pictures of each of six base and three novel species; every third is on the train side."""
    kept = [*birds.by_class("base")][:6] + [*birds.by_class("novel")][:3]
    numbers = np.concatenate([np.flatnonzero(birds.labels == one)[:8] for one in kept])
    arrays = {name: np.asarray(getattr(birds, name))[numbers] for name in ("images", "parts", "boxes")}
    arrays |= {"labels": np.repeat(np.arange(9), 8), "official_train": np.arange(72) % 3 == 0}
    return write_pack(
        tmp_path_factory.mktemp("data") / "few",
        name="birds",
        arrays=arrays,
        classes=[birds.classes[one] for one in kept],
        splits=["base"] * 6 + ["novel"] * 3,
        split=birds.split,
        part_names=birds.part_names,
        provenance={},
    )


@pytest.fixture(scope="module")
def found(model: Model, few: Pack) -> PartQuality:
    return part_quality(model, few, stability_images=6)


def test_it_scores_the_parts_and_four_floors_at_equal_numbers_of_places(found: PartQuality, few: Pack) -> None:
    rows = [(score.name, score.locations) for score in found.scores]
    assert rows[:5] == [*((name, 4) for name in PARTS[:4]), (PARTS[4], 12)]
    assert rows[5:] == [
        ("floor: box centre", 1),
        ("floor: energy argmax", 1),
        ("floor: random cell", 4),
        ("floor: strongest cells", 4),
        ("floor: 2×2 grid", 4),
        ("floor: random cell", 12),
        ("floor: strongest cells", 12),
        ("floor: 3×4 grid", 12),
    ]
    for score in found.scores:
        assert 0 < score.error < 60
        assert set(score.by_landmark) == set(few.part_names)
        assert all(0 <= getattr(score, name) <= 100 for name in ("nmi", "nmi_nu", "purity", "consistency", "stability"))
    assert (found.fitted_on, found.scored_on, found.stability_images) == (6 * 8, 3 * 8, 6)
    assert found.seen_before == 0


def test_the_best_floor_has_no_more_places(found: PartQuality) -> None:
    some = replace(found.scores[0], name="parts, mean of scales")
    rows = [("floor: a", 1, 9.0, 10.0), ("floor: b", 4, 8.0, 30.0), ("floor: c", 12, 2.0, 50.0)]
    made = [replace(some, name=name, locations=n, error=e, nmi=nmi) for name, n, e, nmi in rows]
    result = replace(found, scores=[some, *made])
    few, many = replace(some, locations=4, error=4.0), replace(some, locations=12, error=4.0)
    assert [result.best_floor(few, "error"), result.best_floor(few, "nmi")] == [8.0, 30.0]
    assert [result.best_floor(many, "error"), result.best_floor(many, "nmi")] == [2.0, 50.0]
    assert [result.of_best_floor(few), result.of_best_floor(many)] == [0.5, 2.0]


def test_without_noise_everything_is_stable(model: Model, few: Pack, found: PartQuality) -> None:
    still = part_quality(model, few, stability_images=6, noise=0.0)
    assert [score.stability for score in still.scores] == [100.0] * 13
    fixed = {"floor: box centre", "floor: 2×2 grid", "floor: 3×4 grid"}
    assert all(score.stability == 100 for score in found.scores if score.name in fixed)
    assert all(score.stability < 100 for score in found.scores if score.name == "floor: random cell")
    loud = part_quality(model, few, stability_images=6, noise=100.0)
    assert min(score.stability for score in loud.scores if score.name.startswith("parts")) < 100
    left_out = part_quality(model, few, stability_images=0)
    assert {score.stability for score in left_out.scores} == {None}


def test_numbers_do_not_depend_on_the_batch(model: Model, few: Pack, found: PartQuality) -> None:
    for small, large in zip(part_quality(model, few, stability_images=6, batch=5).scores, found.scores, strict=True):
        assert flat(small) == pytest.approx(flat(large), abs=0.05), small.name


def flat(score: Score) -> dict[str, float]:
    return {name: value for name, value in asdict(score).items() if isinstance(value, int | float)}


def test_true_positions_as_parts_score_far_below_the_floors(
    model: Model, few: Pack, found: PartQuality, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the whole of `part_quality`: coordinates, boxes and splits are those of the annotations."""
    from parseshot.part_quality import run

    original = run.all_units

    def oracle(model, pack, numbers, parsed, spread, *, seed):
        places = np.asarray(pack.parts[numbers], dtype=float)[:, :4, :2]
        return [
            replace(one, expected=places) if one.name == PARTS[1] else one
            for one in original(model, pack, numbers, parsed, spread, seed=seed)
        ]

    monkeypatch.setattr(run, "all_units", oracle)
    scores = {score.name: score for score in part_quality(model, few, stability_images=0).scores}
    assert all(scores[PARTS[1]].by_landmark[name] < 1e-3 for name in few.part_names[:4])
    assert scores[PARTS[1]].error < 0.5 * scores["floor: box centre"].error
    assert scores[PARTS[2]].error == pytest.approx(found.scores[2].error)


def test_a_method_without_parts_is_refused(birds: Pack) -> None:
    with pytest.raises(ModelError, match="finds no parts"):
        part_quality(Model(ModelConfig(method="protonet")), birds)


def test_the_official_split_is_the_data_sets_own(few: Pack, birds: Pack) -> None:
    model = Model(ModelConfig(backbone_options={"channels": 8}))
    model.provenance = {"base_classes": few.classes[:2]}
    found = part_quality(model, few, split="official", stability_images=0)
    assert (found.fitted_on, found.scored_on) == (24, 48)
    assert found.seen_before == 10  # of the first 16 pictures, 0, 3, 6, 9, 12 and 15 are fitted on
    assert any("10 of the images measured on are of classes" in line for line in quality_lines(found))
    fit, scored = sides(few, "official")
    assert [fit[:3].tolist(), scored[:4].tolist()] == [[0, 3, 6], [1, 2, 4, 5]]
    with pytest.raises(DataError, match="prepare it again"):
        part_quality(model, birds, split="official")
    with pytest.raises(UsageError, match="novel, val, official"):
        part_quality(model, few, split="base")


def test_val_classes_are_a_side_to_choose_by(birds: Pack) -> None:
    model = Model(ModelConfig(backbone_options={"channels": 8}))
    found = part_quality(model, birds, split="val", stability_images=0)
    members = birds.by_class("val")
    assert found.scored_on == sum(len(images) for images in members.values())
    assert np.array_equal(sides(birds, "val")[1], np.concatenate(list(members.values())))
    assert any("of val classes" in line for line in quality_lines(found))


def test_the_four_usual_floors_leave_out_the_strongest_cells(found: PartQuality) -> None:
    floors = [one for one in found.scores if one.is_floor]
    assert any("strongest" in one.name for one in floors)
    for score in found.scores:
        fair = [one for one in floors if one.locations <= score.locations and "strongest" not in one.name]
        usual = min(one.error for one in fair)
        assert found.of_usual_floor(score) == pytest.approx(score.error / usual)
    assert found.record()["scores"][0]["of_usual_floor"] == found.of_usual_floor(found.scores[0])


def test_the_document_and_the_table(found: PartQuality) -> None:
    told = json.loads(json.dumps(found.record(), allow_nan=False))
    assert told["schema_version"] == 2
    assert told["scores"][0]["of_best_floor"] == pytest.approx(
        told["scores"][0]["error"] / told["scores"][0]["best_floor"]["error"]
    )
    looking = [score["stability"] for score in told["scores"] if "argmax" in score["name"] or "cells" in score["name"]]
    assert told["scores"][4]["best_floor"]["stability"] == max(looking) < 100
    assert told["scores"][4]["best_floor"]["nmi"] == max(score["nmi"] for score in told["scores"][5:])
    lines = quality_lines(found)
    assert [line.startswith((*PARTS, "floor")) for line in lines] == [False] * 2 + [True] * 13 + [False] * 2
    assert f"{found.scores[0].error:.2f}" in lines[2]


def test_bars_are_the_scores_and_lines_the_floors_with_as_many_places(found: PartQuality) -> None:
    parts, by_name = found.scores[:5], {(one.name, one.locations): one for one in found.scores[5:]}
    figure = draw_quality(found, "birds, $_{ split novel")
    assert figure.get_suptitle() == "birds, $_{ split novel"
    for axes, panel in zip(figure.axes, PANELS, strict=True):
        for bars, field in zip(axes.containers, panel.fields, strict=True):
            wanted = [value for one in parts if (value := getattr(one, field)) is not None]
            assert [bar.get_height() for bar in bars] == pytest.approx(wanted)
        names = [label.get_text() for label in axes.get_xticklabels()]
        assert names == ["mean", "scale 1", "scale 3", "scale 5", "all scales"]
        for at, one in enumerate(parts):
            lines = {line.get_gid(): line for line in axes.lines if at - 0.5 < line.get_xdata()[0] < at + 0.5}
            grid = "floor: 2×2 grid" if one.locations == 4 else "floor: 3×4 grid"
            places = {"floor: box centre": 1, "floor: energy argmax": 1, grid: one.locations}
            places |= dict.fromkeys(("floor: random cell", "floor: strongest cells"), one.locations)
            assert set(lines) == set(places)
            for name, number in places.items():
                value = getattr(by_name[name, number], panel.fields[0])
                assert list(lines[name].get_ydata()) == pytest.approx([value, value])
        assert axes.get_ylim()[0] <= 0
    assert len({floor.dashes for floor in FLOORS.values()}) == len(FLOORS)  # told apart without colour
    caption = quality_caption(found)
    assert "fitted on 48 images of base classes, measured on 24 of novel classes" in caption
    assert "stability is of 6 of these images" in caption


def test_what_was_not_measured_has_no_bar(found: PartQuality) -> None:
    silent = replace(found, scores=[replace(one, stability=None, purity_active=None) for one in found.scores])
    *_, purity, _, stability = draw_quality(silent, "birds").axes
    assert [len(bars) for bars in purity.containers] == [5, 0]
    assert [len(bars) for bars in stability.containers] == [0]
    assert len(stability.lines) == 0


@pytest.mark.parametrize("parts", [1, 8, 16])
def test_any_number_of_parts_can_be_scored(few: Pack, parts: int) -> None:
    """Also more places than there are cells: 48 on 5×5, of which the strongest are all 25."""
    torch.manual_seed(0)
    model = Model(ModelConfig(backbone_options={"channels": 8}, method_options={"parts": parts}))
    found = part_quality(model, few, stability_images=2)
    assert [one.locations for one in found.scores[:5]] == [parts] * 4 + [3 * parts]
    assert all(np.isfinite([one.error, one.nmi, one.purity, one.consistency]).all() for one in found.scores)
    strongest = {one.locations for one in found.scores if one.name == "floor: strongest cells"}
    assert strongest == {min(number, model.grid**2) for number in (parts, 3 * parts) if number > 1}
    assert len(draw_quality(found, "birds").axes) == 6


@needs_data
def test_real_birds(tmp_path: Path) -> None:
    """Four base and four novel species of CUB, eight photos each: the counts are those of the data set's own lists."""
    roles = load_split("cub").classes
    wanted = {name for role in ("base", "novel") for name in sorted(n for n in roles if roles[n] == role)[:4]}
    root = "CUB_200_2011/"
    with tarfile.open(Path(DATA) / "CUB_200_2011.tgz") as archive:
        members = {one.name: one for one in archive.getmembers()}

        def rows(name: str) -> list[list[str]]:
            return [line.split() for line in archive.extractfile(members[root + name]).read().decode().splitlines()]

        classes = {number for number, name in rows("classes.txt") if name in wanted}
        label = dict(rows("image_class_labels.txt"))
        by_class = {one: [image for image, number in label.items() if number == one][:8] for one in classes}
        images = {image for group in by_class.values() for image in group}
        tables = {name: [row for row in rows(name) if row[0] in images] for name in (
            "images.txt", "image_class_labels.txt", "bounding_boxes.txt", "train_test_split.txt", "parts/part_locs.txt"
        )}  # fmt: skip
        tables["classes.txt"] = [row for row in rows("classes.txt") if row[0] in classes]
        tables["parts/parts.txt"] = rows("parts/parts.txt")
        for name, content in tables.items():
            (tmp_path / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / name).write_text("".join(" ".join(row) + "\n" for row in content))
        for _, file in sorted(tables["images.txt"], key=lambda row: members[f"{root}images/{row[1]}"].offset):
            target = tmp_path / root / "images" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.extractfile(members[f"{root}images/{file}"]).read())
    pack = prepare("cub", tmp_path / root, tmp_path / "pack")
    model = Model.from_pretrained("cub-conv4")
    novel, official = (part_quality(model, pack, split=split, stability_images=4) for split in ("novel", "official"))
    train = {image for image, side in tables["train_test_split.txt"] if side == "1"}
    assert (novel.fitted_on, novel.scored_on, novel.seen_before) == (32, 32, 0)
    assert (official.fitted_on, official.scored_on) == (len(train), 64 - len(train))
    shown = [row for row in tables["parts/part_locs.txt"] if row[4] == "1" and row[0] not in train]
    parts = {number: "_".join(name) for number, *name in tables["parts/parts.txt"]}
    assert official.landmarks == {
        name: sum(row[1] == number for row in shown) for number, name in parts.items()
    }  # fmt: skip
    assert 0 < official.seen_before < official.scored_on  # a model of the base species has seen these
    for score in (*novel.scores, *official.scores):
        assert np.isfinite([score.error, score.nmi, score.ari, score.purity, score.consistency, score.stability]).all()
