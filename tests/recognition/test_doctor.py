"""The doctor finds what was planted and nothing else, and leaves photos out exactly."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps

from parseshot.data.synthetic import draw_many, make_species
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import DataError
from parseshot.methods import METHODS, build_method, takes_pairs
from parseshot.methods.base import Encoding
from parseshot.methods.dop import DOP
from parseshot.recognition.blur import edge_steepness
from parseshot.recognition.calibration import Calibration
from parseshot.recognition.diagnosis import (
    ACROSS,
    BLURRED,
    DUPLICATE,
    KINDS,
    MISLABELLED,
    MORE,
    NO_PARTS,
    SCHEMA_VERSION,
    TINY,
    Diagnosis,
    Share,
)
from parseshot.recognition.doctor import examine
from parseshot.recognition.enrolment import new_photos, to_store
from parseshot.recognition.gallery import stored_picture
from parseshot.recognition.leave_one_out import leave_one_out, part_distances
from parseshot.recognition.looking import read_photo
from parseshot.recognition.recognizer import Recognizer
from parseshot.recognition.records import NewPhoto
from parseshot.recognition.snapshot import EnrolledClass, Snapshot

SPECIES, EACH, SIDE = 6, 7, 168


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained("birds-conv4")


@pytest.fixture(scope="module")
def clean(model: Model) -> list[NewPhoto]:
    """Species of different families, so that their photos are told apart; 0.png … 6.png are of the first."""
    species = make_species(5 * SPECIES, seed=2_000_003)[::5]
    images, labels, *_ = draw_many(species, EACH, seed=11, size=SIDE)
    given = [read_photo(Image.fromarray(image), f"{row}.png") for row, image in enumerate(images)]
    named = [to_store(species[label].name, one, None) for label, one in zip(labels, given, strict=True)]
    return new_photos(model, named, find=False)


def encoded(model: Model, name: str, image: Image.Image, source: str) -> NewPhoto:
    return new_photos(model, [to_store(name, read_photo(image, source), None)], find=False)[0]


def picture(photo: NewPhoto) -> Image.Image:
    return Image.open(io.BytesIO(photo.picture))


def enrolled(model: Model, photos: Sequence[NewPhoto]) -> Recognizer:
    recognizer = Recognizer(model, find=False)
    recognizer.opened.add(photos, recognizer.fingerprint)
    return recognizer


def diagnosed(model: Model, photos: Sequence[NewPhoto]) -> Diagnosis:
    with enrolled(model, photos) as recognizer:
        return examine(recognizer)


def sources(told: Diagnosis, kind: str) -> list[str]:
    return [finding.source for finding in told.of_kind(kind)]


def literal_scores(recognizer: Recognizer) -> torch.Tensor:
    """Each photo really taken out of the gallery, and brought back."""
    whole = recognizer.snapshot()
    scores = torch.full((len(whole.photos), len(whole.classes)), -torch.inf)
    for row, photo in enumerate(whole.photos.tolist()):
        recognizer.opened.remove_photo(photo)
        rest = recognizer.snapshot()
        assert whole.encoding is not None
        found = recognizer._ready(rest).scores(whole.encoding.take(slice(row, row + 1)))[0]
        for one, score in zip(rest.classes, found, strict=True):
            scores[row, whole.classes.index(one)] = score
        recognizer.opened.undo()
    return scores.double()


def dop_span() -> ModelConfig:
    return ModelConfig(method="dop", method_options={"preset": "span", "part_channels": 8, "cells": 4})


@pytest.mark.parametrize("kind", ["shipped", "span", "protonet", "frn"])
def test_leaving_out_is_the_same_as_enrolling_without(kind: str, model: Model, clean: list[NewPhoto]) -> None:
    if kind != "shipped":
        torch.manual_seed(0)
        model = Model(dop_span() if kind == "span" else ModelConfig(method=kind)).eval()
    some = [clean[row] for row in (0, 1, 2, 3, 7, 8, 14, 15, 16, 21)]  # classes of 4, 2, 3 and 1 photos
    some = [encoded(model, one.class_name, picture(one), one.source) for one in some]
    with enrolled(model, some) as recognizer:
        scores = leave_one_out(model.method, recognizer.snapshot(), torch.arange(len(some)))
        torch.testing.assert_close(scores, literal_scores(recognizer), rtol=1e-5, atol=1e-5)
    assert scores.isinf().nonzero().tolist() == [[9, 3]]  # the photo that is alone


def test_copies_leave_together_and_parts_add_up(model: Model, clean: list[NewPhoto]) -> None:
    some = [clean[row] for row in (0, 1, 2, 7, 8, 9)]
    groups = torch.tensor([0, 1, 2, 3, 0, 5])  # the fifth is a copy of the first, in the other class
    method = model.method
    assert isinstance(method, DOP)
    with enrolled(model, some) as recognizer:
        snapshot = recognizer.snapshot()
        scores = leave_one_out(method, snapshot, groups)
        assert snapshot.encoding is not None
        rest, labels = torch.tensor([1, 2, 3, 5]), torch.tensor([0, 0, 1, 1])
        query = snapshot.encoding.take(torch.tensor([0, 4]))
        with torch.inference_mode():
            terms = method.distance(query, snapshot.encoding.take(rest), labels)
            torch.testing.assert_close(scores[[0, 4]], method.as_score(terms.total).double(), rtol=1e-5, atol=1e-5)
        by_part = part_distances(method, snapshot, groups, [(0, 0), (0, 1), (4, 0), (4, 1)])
        torch.testing.assert_close(by_part, terms.by_part.flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shots", [(3, 1, 2), (2,), (1,)])
def test_any_method_and_any_number_of_photos(name: str, shots: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    fine, count = 8 if takes_pairs(name) else 0, sum(shots)
    method = build_method(name, 16, 5, fine=fine).eval()
    features = torch.rand(count, 16 + 4 * fine, 5, 5)
    with torch.inference_mode():
        encoding = method.encode(features)
    labels = torch.arange(len(shots)).repeat_interleave(torch.tensor(shots))
    scores = leave_one_out(method, fake_snapshot(encoding, labels), torch.arange(count))
    gone = torch.tensor(shots)[labels] == 1  # [n]: it was alone in its class
    expected = torch.nn.functional.one_hot(labels, len(shots)).bool() & gone[:, None]
    assert torch.equal(scores.isfinite(), ~expected)


def fake_snapshot(encoding: Encoding, labels: torch.Tensor) -> Snapshot:
    classes = tuple(EnrolledClass(number, f"id{number}", f"class {number}") for number in labels.unique().tolist())
    photos = torch.arange(len(labels))
    return Snapshot(1, "", classes, photos, labels, ("",) * len(labels), np.zeros((len(labels), 2)), encoding)  # type: ignore[arg-type]


def test_a_clean_gallery_is_left_alone(model: Model, clean: list[NewPhoto]) -> None:
    told = diagnosed(model, clean)
    assert told.findings == ()
    assert told.accuracy.asked == len(clean)
    assert told.accuracy == told.accuracy_unsuspected
    assert sum(one.recognised.right for one in told.classes) == told.accuracy.right >= 0.9 * len(clean)
    assert sum(pair.times for pair in told.confused) == told.accuracy.asked - told.accuracy.right
    low, high = told.accuracy.interval
    assert told.accuracy.value is not None
    assert low < told.accuracy.value <= high


def test_swapped_labels_are_found_and_named(model: Model, clean: list[NewPhoto]) -> None:
    photos, first, second = list(clean), clean[3].class_name, clean[17].class_name
    photos[3], photos[17] = replace(clean[3], class_name=second), replace(clean[17], class_name=first)
    told = diagnosed(model, photos)
    assert {(f.source, f.class_name, f.other_class) for f in told.findings} == {
        ("3.png", second, first),
        ("17.png", first, second),
    }
    for finding in told.findings:
        assert finding.kind == MISLABELLED
        assert 0.9 <= finding.sure <= 1
        assert "of 4 parts" in finding.sentence
    assert told.accuracy_unsuspected.asked == told.accuracy.asked - 2


def test_a_method_without_parts_finds_them_by_the_margin() -> None:
    """Pictures of one colour, which an untrained prototype tells apart, if not by much."""
    torch.manual_seed(0)
    model, random = Model(ModelConfig(method="protonet")).eval(), np.random.default_rng(0)
    model.provenance["calibration"] = Calibration(temperature=(-9.0, 0.0, 0.0, 0.0)).model_dump(mode="json")
    photos = []
    for number, colour in enumerate(((200, 30, 30), (30, 30, 200))):
        for each in range(5):
            pixels = (np.array(colour) + random.integers(0, 40, (SIDE, SIDE, 3))).astype(np.uint8)
            name = str(number if (number, each) != (0, 0) else 1)
            photos.append(encoded(model, name, Image.fromarray(pixels), f"{number}{each}.png"))
    told = diagnosed(model, photos)
    (finding,) = told.of_kind(MISLABELLED)
    assert (finding.source, finding.class_name, finding.other_class) == ("00.png", "1", "0")
    assert "parts" not in finding.sentence
    assert not any("calibration" in note for note in told.notes)
    assert told.of_kind(NO_PARTS) == []


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    written = io.BytesIO()
    image.save(written, "JPEG", quality=quality)
    return Image.open(written)


@pytest.mark.parametrize("how", ["compressed", "resized", "mirrored"])
def test_copies_are_found(how: str, model: Model, clean: list[NewPhoto]) -> None:
    def copy(photo: NewPhoto, name: str, source: str) -> NewPhoto:
        image = picture(photo)
        changed = {"compressed": as_jpeg(image, 40), "resized": image.resize((110, 110)), "mirrored": image}[how]
        return encoded(model, name, ImageOps.mirror(changed) if how == "mirrored" else changed, source)

    home, away = clean[5].class_name, clean[30].class_name
    within, across = copy(clean[5], home, "w.png"), copy(clean[30], clean[0].class_name, "a.png")
    told = diagnosed(model, [*clean, within, across])
    (twin,) = told.of_kind(DUPLICATE)
    assert (twin.source, twin.other_photo, twin.other_class) == ("w.png", 6, home)
    (stray,) = told.of_kind(ACROSS)
    assert (stray.source, stray.other_photo, stray.other_class) == ("a.png", 31, away)
    assert stray.sentence.endswith(f"it looks more like {away}")
    assert min(twin.sure, stray.sure) >= 60 / 64
    assert sources(told, MISLABELLED) == ["a.png"]  # which it is
    assert len(told.findings) == 3
    assert told.accuracy.asked == len(clean) - 1  # neither copy, nor the photo that is in two classes


def test_blurred_photos_are_found(model: Model, clean: list[NewPhoto]) -> None:
    photos = list(clean)
    for row, sigma in ((2, 4.0), (20, 8.0)):
        soft = picture(clean[row]).filter(ImageFilter.GaussianBlur(sigma))
        photos[row] = encoded(model, clean[row].class_name, soft, f"{row}.png")
    told = diagnosed(model, photos)
    assert sorted(sources(told, BLURRED)) == ["2.png", "20.png"]
    assert all(0.3 < finding.sure < 1 for finding in told.of_kind(BLURRED))
    assert {finding.source for finding in told.findings} <= {"2.png", "20.png"}


def test_where_all_are_blurred_none_stands_out(model: Model, clean: list[NewPhoto]) -> None:
    soft = [replace(one, picture=stored_picture(picture(one).filter(ImageFilter.GaussianBlur(5)))) for one in clean]
    assert diagnosed(model, soft).of_kind(BLURRED) == []


def test_contrast_is_not_sharpness(clean: list[NewPhoto]) -> None:
    image = picture(clean[0])
    pale = Image.eval(image, lambda level: 100 + level // 4)
    sharp, faint, soft = (
        edge_steepness(np.asarray(one)) for one in (image, pale, image.filter(ImageFilter.GaussianBlur(3)))
    )
    assert faint == pytest.approx(sharp, rel=0.1)
    assert 1 / 8 <= soft < 0.6 * sharp


def test_tiny_photos_are_told_and_not_called_blurred(model: Model, clean: list[NewPhoto]) -> None:
    small = picture(clean[1]).resize((30, 30))
    told = diagnosed(model, [clean[0], encoded(model, clean[1].class_name, small, "small.png"), *clean[2:]])
    (tiny,) = told.of_kind(TINY)
    assert (tiny.source, tiny.sure) == ("small.png", pytest.approx(1 - 30**2 / 42**2))
    assert told.of_kind(BLURRED) == []


def test_a_photo_of_nothing_has_no_parts(model: Model, clean: list[NewPhoto]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (84, 84, 3)).astype(np.uint8)
    told = diagnosed(model, [*clean, encoded(model, clean[0].class_name, Image.fromarray(noise), "noise.png")])
    (lost,) = told.of_kind(NO_PARTS)
    assert lost.source == "noise.png"
    assert lost.sure > 0.5


def test_weak_and_single_classes_need_more(model: Model, clean: list[NewPhoto]) -> None:
    mixed = [replace(clean[row], class_name="mixed") for row in (0, 8, 22)]  # of three classes that are there
    rest = [photo for row, photo in enumerate(clean[:28]) if row not in (0, 8, 22)]
    told = diagnosed(model, [*rest, *mixed, replace(clean[35], class_name="one")])
    assert {finding.class_name for finding in told.of_kind(MORE)} == {"mixed", "one"}
    assert all(finding.photo is None for finding in told.of_kind(MORE))
    alone = next(one for one in told.classes if one.name == "one")
    assert alone.recognised == Share(0, 0)
    assert any("1 photos do not count" in note for note in told.notes)


def test_one_class_and_one_photo(model: Model, clean: list[NewPhoto]) -> None:
    several = diagnosed(model, clean[:5])
    assert several.accuracy == Share(0, 0)
    assert several.findings == ()
    assert any("one class" in note for note in several.notes)
    single = diagnosed(model, clean[:1])
    assert [finding.kind for finding in single.findings] == [MORE]
    copy = encoded(model, clean[0].class_name, as_jpeg(picture(clean[0]), 50), "copy.jpg")
    copies = diagnosed(model, [clean[0], copy, *clean[7:14]])
    assert [(finding.kind, finding.source) for finding in copies.findings] == [(DUPLICATE, "copy.jpg"), (MORE, "")]
    torn = diagnosed(model, [clean[0], replace(copy, class_name="other")])
    assert [finding.kind for finding in torn.findings] == [ACROSS, MORE, MORE]
    assert torn.findings[0].sentence.endswith(f"which is in {clean[0].class_name}")  # nothing is left to compare with
    assert torn.accuracy == Share(0, 0)


def test_an_empty_gallery_is_an_error(model: Model) -> None:
    with Recognizer(model, find=False) as recognizer, pytest.raises(DataError, match="is empty: enroll photos"):
        examine(recognizer)


def test_json_and_lines_tell_the_same(model: Model, clean: list[NewPhoto]) -> None:
    strays = [replace(clean[20], class_name=clean[0].class_name), replace(clean[30], class_name="one")]
    photos = [*clean[:21], *strays]
    photos.remove(clean[20])
    heard: list[tuple[int, int, str]] = []
    with enrolled(model, photos) as recognizer:
        version = recognizer.opened.version
        told = examine(recognizer, lambda *step: heard.append(step))
        again = examine(recognizer)
        assert recognizer.opened.version == version
    assert told == again
    written = json.loads(json.dumps(told.to_json(), allow_nan=False))
    assert written["schema_version"] == SCHEMA_VERSION
    assert written["findings"] == [asdict(finding) for finding in told.findings]
    assert {finding["kind"] for finding in written["findings"]} <= set(written["sure"]) == set(KINDS)
    text = "\n".join(told.lines())
    assert all(str(finding) in text for finding in told.findings)
    assert f"predicted accuracy {told.accuracy}" in text
    assert "one photo of the class fewer" in text
    assert (len(photos), len(photos), "looked at") in heard
    assert heard[-1][0] == heard[-1][1]
    assert "nothing was found" in [*diagnosed(model, clean).lines()]
