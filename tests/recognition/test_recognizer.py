"""The recogniser: the same answer however a photo is given, classes that come and go, and reasons that add up."""

import csv
import io
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from parseshot.data.catalog import LAYOUTS
from parseshot.data.synthetic import draw_many, make_species
from parseshot.engine.encoding import Encoded
from parseshot.engine.model import Model, ModelConfig, to_tensor
from parseshot.engine.statistics import auroc
from parseshot.errors import DataError, ModelError, PhotoError, UsageError
from parseshot.methods import build_method
from parseshot.recognition import held, prepared, recognizer
from parseshot.recognition.answer import Answer, Failure
from parseshot.recognition.batch import photos_to_enroll, photos_to_recognise, to_csv, to_jsonl
from parseshot.recognition.calibration import Calibration, _tasks, fit_calibration
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.held import CUT_OUT
from parseshot.recognition.ledger import GEOMETRY, PHOTOS, WHOLE, make_ledger
from parseshot.recognition.looking import Given, read_photo
from parseshot.recognition.recognizer import ONE_CLASS, Item, Recognizer

SPECIES, EACH, SHOTS = 5, 7, 4
NAMES = ["owl", "wren", "tit", "rook", "jay"]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained("birds-conv4")


@pytest.fixture(scope="module")
def guide() -> np.ndarray:
    """Pictures [5 species, 7, 84, 84, 3] of a guide the model has not seen."""
    images, *_ = draw_many(make_species(15, seed=911)[::3], EACH, seed=4)
    return images.reshape(SPECIES, EACH, 84, 84, 3)


@pytest.fixture(scope="module")
def trained(model: Model, guide: np.ndarray) -> Iterator[Recognizer]:
    with Recognizer(model, find=False) as one:
        yield one.fit(list(guide[:, :SHOTS].reshape(-1, 84, 84, 3)), np.repeat(NAMES, SHOTS).tolist())


@pytest.fixture
def fresh(model: Model, tmp_path: Path) -> Iterator[Recognizer]:
    with Recognizer(model, tmp_path / "birds.gallery", find=False) as one:
        yield one


def queries(guide: np.ndarray) -> tuple[list[np.ndarray], list[str]]:
    return list(guide[:, SHOTS:].reshape(-1, 84, 84, 3)), np.repeat(NAMES, EACH - SHOTS).tolist()


def png(pixels: np.ndarray) -> bytes:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def test_it_has_scikit_learns_manners(trained: Recognizer, guide: np.ndarray) -> None:
    photos, names = queries(guide)
    assert trained.classes_.tolist() == NAMES
    found, shares = trained.predict(photos), trained.predict_proba(photos)
    assert shares.shape == (len(photos), SPECIES)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert trained.classes_[shares.argmax(1)].tolist() == found.tolist()
    assert trained.score(photos, names) == np.mean(found == np.array(names)) > 0.6
    assert trained.predict(photos[0]).tolist() == found[:1].tolist()  # one photo is a list of one
    assert trained.predict(np.stack(photos[:3])).tolist() == found[:3].tolist()
    assert set(trained.get_params()) == {"model", "gallery", "find"}
    with pytest.raises(UsageError, match="no parameter 'k'"):
        trained.set_params(k=1)


def test_scores_are_those_of_the_method_on_what_is_stored(trained: Recognizer, guide: np.ndarray) -> None:
    photos, _ = queries(guide)
    snapshot, model = trained.snapshot(), trained.loaded
    assert snapshot.encoding is not None
    with torch.inference_mode():
        expected = model.method.logits(model.encode(to_tensor(np.stack(photos))), snapshot.encoding, snapshot.labels)
    found = trained.recognise(photos)
    for row, answer in enumerate(found):
        best = int(expected[row].argmax())
        assert answer.candidates[0].name == NAMES[best]
        assert answer.candidates[0].score == pytest.approx(float(expected[row, best]), abs=1e-4)
    pictures = [Image.open(io.BytesIO(trained.opened.picture(int(photo)))) for photo in snapshot.photos]
    again = model.encode(to_tensor(np.stack([np.asarray(picture) for picture in pictures])))
    assert torch.allclose(again["z"], snapshot.encoding["z"], atol=1e-6)  # what is encoded is what is stored


def test_a_photo_may_come_in_any_form(trained: Recognizer, guide: np.ndarray, tmp_path: Path) -> None:
    pixels = guide[0, SHOTS]
    path = tmp_path / "one.png"
    path.write_bytes(png(pixels))
    forms: list[Any] = [
        path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes()), Image.open(path), pixels,
        pixels.astype(np.float32) / 255, Image.fromarray(pixels).convert("RGBA"),
    ]  # fmt: skip
    answers = [trained.recognise([form])[0] for form in forms]
    assert len({answer.candidates for answer in answers}) == 1
    with path.open("rb") as stream:
        assert read_photo(stream).sha256 == read_photo(path).sha256


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (np.full((20, 20, 3), np.nan), "NaN"),
        (np.full((20, 20, 3), 7.0), "not 0 to 1"),
        (np.zeros((20, 20, 3), np.int64), "int64"),
        (np.zeros((20, 20, 5), np.uint8), "shape"),
        (np.zeros((4, 20, 3), np.uint8), "each side needs"),
        (3, "not a picture"),
        (b"", "empty"),
        (b"GIF89a", "cannot be decoded|cut off"),
        ("no/such.jpg", "does not exist"),
    ],
)
def test_what_is_no_photo_is_refused(trained: Recognizer, bad: Any, said: str) -> None:
    with pytest.raises(PhotoError, match=said):
        trained.recognise([bad])


def test_classes_come_and_go_and_the_others_are_not_touched(
    fresh: Recognizer, guide: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.partial_fit(list(guide[:4, :2].reshape(-1, 84, 84, 3)), np.repeat(NAMES[:4], 2).tolist())
    before = fresh.snapshot()
    encoded: list[int] = []
    encode = fresh.loaded.encode
    monkeypatch.setattr(fresh.loaded, "encode", lambda images: encoded.append(len(images)) or encode(images))
    version = fresh.add_class("jay", list(guide[4, :3]))
    assert encoded == [3]
    assert version.detail["classes"] == {"jay": 3}
    after = fresh.snapshot()
    assert before.encoding is not None
    assert after.encoding is not None
    assert torch.equal(after.encoding["z"][:8], before.encoding["z"])
    fresh.add_photos("owl", guide[0, 2])  # unbalanced: 3, 2, 2, 2, 3
    assert fresh.predict(guide[4, 5]).tolist() == ["jay"]
    with pytest.raises(DataError, match="already"):
        fresh.add_class("jay", guide[4, 4])
    fresh.remove("jay")
    assert fresh.classes_.tolist() == NAMES[:4]
    with pytest.raises(DataError, match="no class 'jay'"):
        fresh.remove("jay")
    fresh.opened.undo()
    assert fresh.classes_.tolist() == NAMES
    with pytest.raises(UsageError, match="holds photos already"):
        fresh.fit([guide[0, 0]], ["owl"])
    with pytest.raises(UsageError, match="1 photos, but 2 names"):
        fresh.partial_fit([guide[0, 0]], ["owl", "tit"])


def test_all_photos_of_an_enrolment_or_none(fresh: Recognizer, guide: np.ndarray) -> None:
    with pytest.raises(DataError, match="no photos to enroll"):
        fresh.add_class("owl", [])
    with pytest.raises(PhotoError, match="does not exist"):
        fresh.add_class("owl", [guide[0, 0], "no/such.jpg"])
    with pytest.raises(DataError, match="is empty: enroll"):
        fresh.predict(guide[0, 0])
    done = fresh.enroll([("owl", Item(guide[0, 0])), ("owl", Item("no/such.jpg")), (" ", Item(guide[1, 0], "b.png"))])
    assert done.version is not None
    assert done.version.detail["photos"] == 1
    assert [one.code for one in done.failures] == ["E_MISSING", "E_DATA"]
    assert "b.png: the class name is empty" in done.failures[1].message
    assert fresh.enroll([("owl", Item("no/such.jpg"))]).version is None


def test_one_class_is_told_to_be_one(fresh: Recognizer, guide: np.ndarray) -> None:
    fresh.add_class("owl", guide[0, 0])
    (answer,) = fresh.recognise([guide[0, 1]])
    assert answer.candidates[0].name == "owl"
    assert ONE_CLASS in answer.warnings
    assert len(answer.candidates) == 1
    assert fresh.predict_proba(guide[0, 1]).tolist() == [[1.0]]


def test_the_same_photo_twice(fresh: Recognizer, guide: np.ndarray) -> None:
    fresh.add_class("owl", list(guide[0, :2]))
    with pytest.raises(DataError, match="the same photo is in 'owl'"):
        fresh.add_class("tit", guide[0, 0])
    assert fresh.recognise([guide[0, 1]])[0].duplicate_of == 2
    assert fresh.recognise([guide[0, 2]])[0].duplicate_of is None
    small = Image.fromarray(guide[0, 0]).resize((63, 63)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    done = fresh.enroll([("tit", Item(small, "small.png")), ("tit", Item(guide[2, 0], "other.png"))])
    assert [(twin.source, twin.photo, twin.of_class) for twin in done.twins] == [("small.png", 1, "owl")]
    assert str(done.twins[0]) == "small.png looks like photo 1, which is in 'owl'"


def test_a_box_that_is_given_wins(trained: Recognizer, guide: np.ndarray) -> None:
    canvas = np.full((200, 300, 3), 90, np.uint8)
    canvas[100:184, 20:104] = guide[1, SHOTS]
    alone, boxed = trained.recognise([guide[1, SHOTS], Item(canvas, box=(20, 100, 104, 184))])
    assert boxed.crop == (20, 100, 104, 184)
    assert boxed.crop_is == "given"
    assert boxed.size == (300, 200)
    assert [one.name for one in boxed.candidates] == [one.name for one in alone.candidates]
    np.testing.assert_allclose(
        [one.score for one in boxed.candidates], [one.score for one in alone.candidates], atol=1e-3
    )
    for box in ((400, 0, 500, 100), (50, 50, 50, 80), (float("nan"), 0, 9, 9), (1, 2, 3)):
        with pytest.raises(PhotoError, match="box") as refused:
            trained.recognise([Item(canvas, "canvas.png", box)])  # type: ignore[arg-type]
        assert refused.value.code == "E_BOX"
    assert trained.recognise([Item(canvas, box=(-5, 100, 104, 999))])[0].crop == (0, 100, 104, 200)


def test_objects_are_looked_for_where_the_model_learned_from_such(trained: Recognizer) -> None:
    assert Recognizer("default").finds
    assert not Recognizer("default", find=False).finds
    assert not trained.finds  # drawn pictures, whole
    cut_out = {name for name, layout in LAYOUTS.items() if "cropped to the box" in layout.summary}
    assert cut_out == set(CUT_OUT)


def test_only_what_changed_is_prepared_again(
    fresh: Recognizer, guide: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "BLOCK", 2)
    fresh.partial_fit(list(guide[:, :2].reshape(-1, 84, 84, 3)), np.repeat(NAMES, 2).tolist())
    made: list[int] = []
    method = fresh.loaded.method
    prepare = type(method).prepare
    monkeypatch.setattr(
        type(method),
        "prepare",
        lambda self, support, labels: made.append(len(labels)) or prepare(self, support, labels),
    )
    photos, _ = queries(guide)
    in_blocks = [answer.candidates for answer in fresh.recognise(photos)]
    assert made == [2, 4, 4]  # classes are numbered from 1
    fresh.add_photos("tit", guide[2, 2])
    fresh.recognise(photos)
    assert made == [2, 4, 4, 5]
    fresh.remove("owl")
    assert len(fresh.recognise(photos)[0].candidates) == 4
    assert made == [2, 4, 4, 5]
    fresh.opened.undo()
    fresh.opened.undo()
    assert [answer.candidates for answer in fresh.recognise(photos)] == in_blocks
    monkeypatch.setattr(prepared, "BLOCK", 64)
    fresh.close()
    whole = [answer.candidates for answer in fresh.recognise(photos)]
    for some, all_at_once in zip(in_blocks, whole, strict=True):
        np.testing.assert_allclose([one.score for one in some], [one.score for one in all_at_once], atol=1e-4)


def test_a_method_whose_classes_depend_on_each_other_works_too(guide: np.ndarray) -> None:
    torch.manual_seed(0)
    other = Model(ModelConfig(backbone_options={"channels": 8}, method="tdm-protonet")).eval()
    with Recognizer(other) as one:
        assert not one.finds
        one.fit(list(guide[:, :2].reshape(-1, 84, 84, 3)), np.repeat(NAMES, 2).tolist())
        snapshot = one.snapshot()
        assert snapshot.encoding is not None
        encoding = one.encode([one.see(Item(guide[0, 5]))])
        with torch.inference_mode():
            expected = other.method.logits(encoding, snapshot.encoding, snapshot.labels)[0]
        (answer,) = one.recognise([guide[0, 5]])
        assert answer.candidates[0].score == pytest.approx(float(expected.max()), abs=1e-5)
        with pytest.raises(ModelError, match="no parts"):
            one.explain(guide[0, 5])


def test_another_model_is_refused_until_the_photos_are_encoded_again(
    fresh: Recognizer, guide: np.ndarray, tmp_path: Path
) -> None:
    fresh.partial_fit(list(guide[:2, :2].reshape(-1, 84, 84, 3)), np.repeat(NAMES[:2], 2).tolist())
    torch.manual_seed(0)
    other = Model(ModelConfig(backbone_options={"channels": 8})).eval()
    with Recognizer(other, tmp_path / "birds.gallery", find=False) as one:
        with pytest.raises(ModelError, match="--again"):
            one.predict(guide[0, 5])
        one.encode_again()
        found = one.snapshot()
        assert found.encoding is not None
        with Recognizer(other, find=False) as new:
            new.fit(list(guide[:2, :2].reshape(-1, 84, 84, 3)), np.repeat(NAMES[:2], 2).tolist())
            assert torch.allclose(new.snapshot().encoding["z"], found.encoding["z"], atol=1e-6)  # type: ignore[index]
    with pytest.raises(ModelError, match="holds encodings of the model"):
        fresh.predict(guide[0, 5])


@given(
    st.sampled_from(["dop", "dop-paper", "dop-span", "dop-whole"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_the_rows_of_a_ledger_add_up(name: str, parts: int, photos: int, seed: int) -> None:
    torch.manual_seed(seed)
    made = Model(ModelConfig(backbone_options={"channels": 8}, method=name, method_options={"parts": parts})).eval()
    images = torch.rand(photos + 1, 3, 84, 84)
    codes = made.encode(images)
    corrected = make_ledger(made, codes.take(slice(0, 1)), codes.take(slice(1, None)), Calibration(advantage=-3.0))
    ledger = make_ledger(made, codes.take(slice(0, 1)), codes.take(slice(1, None)))
    assert corrected.rows[:-1] == ledger.rows
    assert corrected.score == pytest.approx(ledger.score - 3 * (1 - 1 / photos), rel=1e-6, abs=1e-6)
    assert sum(row.adds for row in corrected.rows) == pytest.approx(corrected.distance, rel=1e-6, abs=1e-6)
    assert sum(row.adds for row in ledger.rows) == pytest.approx(ledger.distance, rel=1e-6, abs=1e-6)
    with torch.inference_mode():
        score = made.method.logits(codes.take(slice(0, 1)), codes.take(slice(1, None)), torch.zeros(photos).long())
    assert ledger.score == pytest.approx(float(score), rel=1e-5, abs=1e-5)
    by_part = sum(ledger.of_part(part) for part in range(parts))
    assert by_part + ledger.of_kind(WHOLE) + ledger.of_kind(GEOMETRY) == pytest.approx(
        ledger.distance, rel=1e-6, abs=1e-6
    )
    kinds = [row.kind for row in ledger.rows]
    assert kinds.count(GEOMETRY) == 1
    assert len(kinds) == 3 * parts + (parts if name in ("dop-span", "dop-whole") else 0) + (name == "dop-whole") + 1
    for row in ledger.rows[:-1]:
        assert row.weight is not None
        assert row.distance is not None
        assert row.weight * row.distance == pytest.approx(row.adds)
        assert row.matched is not None
        assert 0 <= row.matched < photos
    scales = made.method.config.scales  # type: ignore[union-attr]
    weights = sum(row.weight or 0 for row in ledger.rows if row.scale is not None)
    assert weights == pytest.approx(1 if name != "dop-paper" else len(scales), rel=1e-5)


def test_reasons_are_in_the_photos_own_pixels(trained: Recognizer, guide: np.ndarray) -> None:
    plain = trained.explain(guide[0, SHOTS])
    canvas = np.full((200, 300, 3), 90, np.uint8)
    canvas[100:184, 20:104] = guide[0, SHOTS]
    boxed = trained.explain(Item(canvas, box=(20, 100, 104, 184)))
    for one, other in zip(plain.parts, boxed.parts, strict=True):
        assert (other.x - 20, other.y - 100) == pytest.approx((one.x, one.y), abs=0.02)
    for first, second in zip(plain.classes[0].ledger.rows, boxed.classes[0].ledger.rows, strict=True):
        assert second.adds == pytest.approx(first.adds, abs=1e-4)
        if first.place is not None and second.place is not None:
            assert (second.place[0] - 20, second.place[1] - 100) == pytest.approx(first.place, abs=0.02)
    told = json.loads(json.dumps(boxed.to_json()))
    assert len(told["ledgers"]) == 3
    for ledger, one in zip(told["ledgers"], boxed.classes, strict=True):
        assert sum(row["adds"] for row in ledger["rows"]) == pytest.approx(ledger["distance"], abs=1e-6)
        named = {row["matched_photo"] for row in ledger["rows"]} - {None}
        assert named == {photo["id"] for photo in ledger["photos"]}
        assert all(example.photo.class_name == one.candidate.name for example in one.examples)
    gains = [
        plain.classes[1].ledger.of_part(part) - plain.classes[0].ledger.of_part(part) for part in range(4)
    ]  # fmt: skip
    assert plain.decided_by in (None, int(np.argmax(gains)))
    assert plain.differ_at == int(np.argmax(np.abs(gains)))


def test_two_classes_too_close_to_call_and_none_of_these(trained: Recognizer, guide: np.ndarray) -> None:
    (answer,) = trained.recognise([guide[0, SHOTS]])
    first, second = answer.candidates[:2]
    close = replace(answer, candidates=(first._replace(probability=0.5), second._replace(probability=0.3)))
    assert close.either == close.candidates[:2]
    assert str(close) == f"{first.name} (50%) or {second.name} (30%)"
    clear = replace(close, candidates=(first._replace(probability=0.7), second._replace(probability=0.3)))
    assert clear.either is None
    assert clear.to_json()["either"] is None
    unknown = replace(close, known=0.1, threshold=0.2)
    assert (unknown.name, unknown.either, unknown.rejected) == (None, None, True)
    assert str(unknown) == f"none of these (90%; nearest is {first.name})"


def test_calibration_finds_the_temperature_and_tells_strangers(model: Model, guide: np.ndarray) -> None:
    images, labels, *_ = draw_many(make_species(24, seed=77), 8, seed=5)
    rows = {number: np.flatnonzero(labels == number) for number in range(24)}
    encoded = Encoded(model.encode(to_tensor(images)), rows, np.arange(len(labels)), 0, False)
    fitted = fit_calibration(model.method, encoded, tasks=80)
    colder = build_method("dop", 64, model.grid, model.config.method_options)
    colder.load_state_dict(model.method.state_dict())
    with torch.no_grad():
        colder.log_scale -= np.log(3.0)  # type: ignore[union-attr, operator]
    again = fit_calibration(colder, encoded, tasks=80)
    assert again.temperature[0] == pytest.approx(fitted.temperature[0] - np.log(3.0), abs=1e-3)
    assert again.temperature[1:] == pytest.approx(fitted.temperature[1:], abs=1e-3)
    assert again.advantage == pytest.approx(fitted.advantage / 3, abs=1e-3)
    assert again.known[1] == pytest.approx(3 * fitted.known[1], rel=0.02)
    tasks = _tasks(model.method, encoded, np.random.default_rng(9), 60)
    known = torch.cat([fitted.knowns(task.scores[: len(task.targets)], task.photos) for task in tasks])
    strange = torch.cat([fitted.knowns(task.scores[len(task.targets) :], task.photos) for task in tasks])
    assert float(auroc(known[None], strange[None])) > 0.75
    assert float((known >= fitted.threshold).double().mean()) == pytest.approx(0.95, abs=0.04)

    def right(scores: torch.Tensor, task: Any) -> float:
        return float((scores[: len(task.targets)].argmax(1) == task.targets).double().mean())

    plain = np.mean([right(task.scores, task) for task in tasks])
    corrected = np.mean([right(fitted.corrected(task.scores, task.photos), task) for task in tasks])
    assert corrected > plain  # classes of few photos are no longer at a disadvantage
    for task in tasks[:5]:
        assert torch.allclose(fitted.shares(task.scores, task.photos).sum(1), torch.ones(len(task.scores)).double())
    with pytest.raises(DataError, match="four classes"):
        fit_calibration(model.method, replace(encoded, rows={0: rows[0]}))
    assert Calibration.model_validate(json.loads(fitted.model_dump_json())) == fitted


def test_probabilities_of_classes_and_of_none_make_one(guide: np.ndarray) -> None:
    calibrated = Model.from_pretrained("birds-conv4")
    fitted = Calibration(advantage=-4.0, known=(6.0, 0.5, *[0.1] * 5), threshold=0.3)
    calibrated.provenance["calibration"] = fitted.model_dump()
    with Recognizer(calibrated, find=False) as one, Recognizer("birds-conv4", find=False) as plain:
        for each in (one, plain):
            each.fit(list(guide[:, :2].reshape(-1, 84, 84, 3)), np.repeat(NAMES, 2).tolist())
            each.add_photos("owl", list(guide[0, 2:5]))
        (answer,), (raw,) = one.recognise([guide[0, 5]]), plain.recognise([guide[0, 5]])
        scores = {candidate.name: candidate.score for candidate in raw.candidates}
        for candidate in answer.candidates:  # five owls, two of each other
            shots = 5 if candidate.name == "owl" else 2
            assert candidate.score == pytest.approx(scores[candidate.name] - 4 * (1 - 1 / shots), abs=1e-4)
        why = one.explain(guide[0, 5])
        assert why.classes[0].ledger.score == pytest.approx(answer.candidates[0].score, abs=1e-4)
        assert why.classes[0].ledger.rows[-1].kind == PHOTOS
        assert 0 < answer.known < 1
        assert sum(candidate.probability for candidate in answer.candidates) == pytest.approx(answer.known)
        assert answer.threshold == 0.3
        assert recognizer.UNCALIBRATED not in answer.warnings


def write_photos(folder: Path, guide: np.ndarray) -> None:
    for label, name in enumerate(NAMES):
        (folder / name / "spring").mkdir(parents=True)
        for number in range(3):
            place = folder / name / ("spring" if number == 2 else "") / f"{number}.png"
            place.write_bytes(png(guide[label, number]))


def test_folders_name_classes(tmp_path: Path, guide: np.ndarray) -> None:
    write_photos(tmp_path / "birds", guide)
    (tmp_path / "birds" / "owl" / ".DS_Store").write_text("x")
    (tmp_path / "birds" / "owl" / "notes.txt").write_text("x")
    items = list(photos_to_enroll([tmp_path / "birds"]))
    assert [name for name, _ in items] == [name for name in sorted(NAMES) for _ in range(3)]
    assert [name for name, _ in photos_to_enroll([tmp_path / "birds" / "owl"])] == ["owl", "owl", "spring"]
    one = tmp_path / "birds" / "owl" / "0.png"
    assert list(photos_to_enroll([one], "bird")) == [("bird", Item(one))]
    assert {name for name, _ in photos_to_enroll([tmp_path / "birds"], "bird")} == {"bird"}
    for bad, said in ((one, "--class"), (tmp_path / "none", "does not exist")):
        with pytest.raises(DataError, match=said):
            list(photos_to_enroll([bad]))
    (tmp_path / "empty").mkdir()
    for listed in (photos_to_enroll([tmp_path / "empty"]), photos_to_recognise([tmp_path / "empty"])):
        with pytest.raises(DataError, match="holds no photos"):
            list(listed)
    assert [item.source for item in photos_to_recognise([one, tmp_path / "birds" / "tit"])] == [
        one, *(tmp_path / "birds" / "tit" / name for name in ("0.png", "1.png", "spring/2.png")),
    ]  # fmt: skip


def test_one_bad_file_is_one_row(trained: Recognizer, guide: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "=cmd().png").write_bytes(png(guide[0, SHOTS]))
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "cut.png").write_bytes(png(guide[0, SHOTS])[:900])
    found = list(trained.answers(photos_to_recognise([tmp_path, tmp_path / "gone.jpg"])))
    kinds = {Path(one.source).name: one.code if isinstance(one, Failure) else one.name for one in found}
    right = trained.predict(guide[0, SHOTS])[0]
    assert kinds == {
        "=cmd().png": right, "empty.jpg": "E_EMPTY", "text.jpg": "E_FORMAT", "cut.png": "E_TRUNCATED",
        "gone.jpg": "E_MISSING",
    }  # fmt: skip
    named = [replace(one, source="=cmd()") if isinstance(one, Answer) else one for one in found]
    rows = list(csv.DictReader(io.StringIO(to_csv(named))))
    assert [row["error"] for row in rows] == ["", "E_TRUNCATED", "E_EMPTY", "E_FORMAT", "E_MISSING"]
    assert rows[0]["photo"] == "'=cmd()"
    assert rows[0]["answer"] == right
    lines = [json.loads(line) for line in to_jsonl(found).splitlines()]
    assert [line.get("answer") for line in lines] == [right, None, None, None, None]
    assert lines[1]["error"]["code"] == "E_TRUNCATED"
    assert all(line["schema_version"] == 1 for line in lines)


def test_readers_see_what_another_process_enrolled(fresh: Recognizer, model: Model, guide: np.ndarray) -> None:
    fresh.partial_fit([guide[0, 0], guide[1, 0]], NAMES[:2])
    assert fresh.predict(guide[2, 1])[0] in NAMES[:2]
    with Recognizer(model, fresh.gallery, find=False) as other:
        other.add_class("tit", list(guide[2, :3]))
    assert fresh.classes_.tolist() == ["owl", "wren", "tit"]
    (answer,) = fresh.recognise([guide[2, 1]])
    assert (answer.name, answer.duplicate_of, answer.version) == ("tit", 4, 2)
    with Gallery.open(fresh.gallery, fingerprint=fresh.fingerprint) as shared:  # type: ignore[arg-type]
        assert Recognizer(model, shared, find=False).predict(guide[2, 1]).tolist() == ["tit"]


def test_pictures_are_let_go_as_soon_as_they_were_looked_at(
    trained: Recognizer, guide: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A photo of 12 megapixels takes 36 MB: two of them are in memory at once, not all of a group."""
    opened: list[weakref.ref[Image.Image]] = []
    most = 0

    def read(source: Path, name: str = "", *, lenient: bool = False) -> Given:
        nonlocal most
        given = read_photo(source, name, lenient=lenient)
        opened.append(weakref.ref(given.image))
        most = max(most, sum(one() is not None for one in opened))
        return given

    files = []
    for number, picture in enumerate(guide[:, SHOTS:].reshape(-1, 84, 84, 3)):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(picture).save(files[-1])
    expected = [answer.candidates for answer in trained.recognise(files)]
    monkeypatch.setattr(held, "read_photo", read)
    assert [answer.candidates for answer in trained.recognise(files)] == expected
    assert len(files) == 15
    assert 1 <= most <= 2
    assert trained.predict_proba(files).shape == (15, 5)
    assert most <= 2
    with Recognizer(trained.loaded, tmp_path / "other.gallery") as other:
        other.add_class("owl", files)
    assert most <= 2


def test_larger_groups_against_many_classes_answer_alike(
    trained: Recognizer, guide: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, _ = queries(guide)
    one, two = [], []
    for groups, limit in ((one, 1_000), (two, 5)):
        monkeypatch.setattr(recognizer, "TOGETHER", 3)
        monkeypatch.setattr(recognizer, "MANY", limit)
        answer = Recognizer._answer
        monkeypatch.setattr(
            Recognizer,
            "_answer",
            lambda self, items, snapshot, groups=groups, answer=answer: (
                groups.append(len(items)) or answer(self, items, snapshot)
            ),
        )
        found = trained.recognise(photos)
        monkeypatch.setattr(Recognizer, "_answer", answer)
        groups.append([[one.name for one in each.candidates] for each in found])
    assert (max(one[:-1]), max(two[:-1])) == (3, 6)
    assert one[-1] == two[-1]
