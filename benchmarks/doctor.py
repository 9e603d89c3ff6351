"""What the doctor finds of what was planted, and whether the accuracy it predicts comes true; photos of CUB.

    python benchmarks/doctor.py --source CUB_200_2011.tgz [--photos 25] [--seeds 8] [--split novel] [--threads 2]

A gallery has 20 classes of 10 photos and the default model. In each, 10 labels are swapped, 10 photos are there twice
(compressed again, resized or mirrored; half of them in another class) and 10 are blurred. Precision is by finding, a
copy in a wrong class being mislabelled too; recall is by planted photo. The accuracy is then measured on the other
photos of these classes, as the gallery is and after what was reported was taken out. Each photo is encoded once, and
whole: those of the archive at hand are cropped to their box.
Thresholds were chosen on the validation classes (--split val), so the novel ones are new to them.
"""

import argparse
import functools
import io
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps

from parseshot.data.source import open_source, read
from parseshot.data.split import load_split
from parseshot.engine.model import Model
from parseshot.methods.base import Encoding
from parseshot.recognition.diagnosis import ACROSS, BLURRED, DUPLICATE, MISLABELLED, Diagnosis
from parseshot.recognition.doctor import examine
from parseshot.recognition.enrolment import new_photos, to_store
from parseshot.recognition.looking import read_photo
from parseshot.recognition.recognizer import Recognizer
from parseshot.recognition.records import NewPhoto, portions

CLASSES, SHOTS, PLANTED = 20, 10, 10
SIGMAS = (1.0, 1.5, 2.0, 3.0, 5.0)  # in shares of 1/224 of its longer side: pixels of what the model sees
COPIES = ("compressed", "resized", "mirrored")


def encode_photos(model: Model, source: Path, split: str, photos: int) -> dict[str, list[NewPhoto]]:
    """So many photos of each class, chosen by a seed and encoded."""
    wanted = {name for name, role in load_split("cub").classes.items() if role == split}
    random, chosen = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as staging:
        files = open_source(source, Path(staging)).files
        by_class = defaultdict(list)
        for file in sorted(files):
            if "/images/" in f"/{file}" and (name := file.split("/")[-2]) in wanted:
                by_class[name].append(file)
        for name, all_of in sorted(by_class.items()):
            chosen += [(name, file) for file in random.permutation(all_of)[:photos].tolist()]
        found = defaultdict(list)
        for some in portions(chosen, 64):
            named = [to_store(name, read_photo(read(files[file]), Path(file).name), None) for name, file in some]
            for photo in new_photos(model, named, find=False):
                found[photo.class_name].append(photo)
    return found


@dataclass
class Planted:
    """What was done to a gallery, by the names of photos."""

    swapped: set[str] = field(default_factory=set)
    copies: dict[str, str] = field(default_factory=dict)  # the copy → its kind
    blurred: dict[str, float] = field(default_factory=dict)  # → σ
    truth: dict[str, str] = field(default_factory=dict)  # → the class it shows


def plant(model: Model, clean: Sequence[NewPhoto], random: np.random.Generator) -> tuple[list[NewPhoto], Planted]:
    """Swap, copy and blur different photos."""
    photos, done = list(clean), Planted(truth={photo.source: photo.class_name for photo in clean})
    rows = iter(random.permutation(len(photos)).tolist())
    while len(done.swapped) < PLANTED:
        one, other = next(rows), next(rows)
        first, second = photos[one], photos[other]
        if first.class_name != second.class_name:
            photos[one] = replace(first, class_name=second.class_name)
            photos[other] = replace(second, class_name=first.class_name)
            done.swapped |= {first.source, second.source}
    names = sorted({photo.class_name for photo in clean})
    for number in range(PLANTED):
        row = next(rows)
        sigma = SIGMAS[number % len(SIGMAS)]
        photos[row] = altered(model, photos[row], functools.partial(blurred, sigma=sigma))
        done.blurred[photos[row].source] = sigma
    for number in range(PLANTED):
        original, how = photos[next(rows)], COPIES[number % len(COPIES)]
        copy = altered(model, original, functools.partial(copied, how=how), f"{how} {original.source}")
        done.truth[copy.source] = original.class_name
        if number % 2:
            others = [name for name in names if name != original.class_name]
            copy = replace(copy, class_name=others[int(random.integers(len(others)))])
        done.copies[copy.source] = ACROSS if number % 2 else DUPLICATE
        photos.append(copy)
    return [photos[row] for row in random.permutation(len(photos))], done


def altered(model: Model, photo: NewPhoto, change: Callable[[Image.Image], bytes], source: str = "") -> NewPhoto:
    """A photo that something was done to, encoded anew."""
    given = read_photo(change(Image.open(io.BytesIO(photo.picture))), source or photo.source)
    return new_photos(model, [to_store(photo.class_name, given, None)], find=False)[0]


def blurred(image: Image.Image, sigma: float) -> bytes:
    return as_jpeg(image.filter(ImageFilter.GaussianBlur(sigma * max(image.size) / 224)), 90)


def copied(image: Image.Image, how: str) -> bytes:
    if how == "resized":
        image = image.resize((image.width * 3 // 5, image.height * 3 // 5))
    return as_jpeg(ImageOps.mirror(image) if how == "mirrored" else image, 40 if how == "compressed" else 90)


def as_jpeg(image: Image.Image, quality: int) -> bytes:
    written = io.BytesIO()
    image.save(written, "JPEG", quality=quality)
    return written.getvalue()


def true_accuracy(recognizer: Recognizer, asked: Sequence[NewPhoto]) -> float:
    """Share of photos that are not enrolled whose class is named rightly."""
    snapshot = recognizer.filled()
    scores = recognizer.scores(Encoding.cat([photo.encoding for photo in asked]), snapshot)
    names = [snapshot.classes[label].name for label in scores.argmax(1).tolist()]
    return float(np.mean([name == photo.class_name for name, photo in zip(names, asked, strict=True)]))


def judge(told: Diagnosis, planted: Planted) -> dict[str, tuple[int, int, int, int]]:
    """Of each kind: right findings, findings, found of the planted, planted."""
    found = {}
    for kind in (MISLABELLED, DUPLICATE, ACROSS, BLURRED):
        reported = told.of_kind(kind)
        if kind == MISLABELLED:
            right = [one for one in reported if planted.truth[one.source] != one.class_name]
            reached, wanted = {one.source for one in reported} & planted.swapped, planted.swapped
        elif kind == BLURRED:
            right = [one for one in reported if one.source in planted.blurred]
            reached, wanted = {one.source for one in right}, set(planted.blurred)
        else:  # the copy, or what it is a copy of, is named, whichever was enrolled later
            wanted = {copy for copy, of in planted.copies.items() if of == kind}
            ends = {copy.split(" ", 1)[1]: copy for copy in wanted} | {copy: copy for copy in wanted}
            right = [one for one in reported if one.source in ends]
            reached = {ends[one.source] for one in right}
        found[kind] = (len(right), len(reported), len(reached), len(wanted))
    return found


def cure(recognizer: Recognizer, told: Diagnosis) -> None:
    """Take out what was reported; of a picture in two classes one is mislabelled."""
    photos = {one.photo for one in told.findings if one.kind in (MISLABELLED, DUPLICATE, BLURRED)}
    for photo in sorted(photo for photo in photos if photo is not None):
        recognizer.opened.remove_photo(photo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--photos", type=int, default=25, help="of each class that are encoded; 10 are enrolled")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--split", default="novel", choices=("val", "novel"))
    parser.add_argument("--model", default="default")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model = Model.from_pretrained(asked.model)
    started = time.perf_counter()
    photos = encode_photos(model, asked.source, asked.split, asked.photos)
    print(json.dumps({"encoded": sum(map(len, photos.values())), "seconds": round(time.perf_counter() - started, 1)}))
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4, dtype=int))
    by_sigma: dict[float, list[bool]] = defaultdict(list)
    rows = []
    for seed in range(asked.seeds):
        random = np.random.default_rng(seed)
        names = random.permutation(sorted(photos))[:CLASSES].tolist()
        others = [photo for name in names for photo in photos[name][SHOTS:]]
        row: dict[str, float] = {"seed": seed}
        for kind in ("clean", "planted"):
            enrolled, planted = [photo for name in names for photo in photos[name][:SHOTS]], None
            if kind == "planted":
                enrolled, planted = plant(model, enrolled, random)
            with Recognizer(model) as recognizer:
                recognizer.opened.add(enrolled, recognizer.fingerprint)
                started = time.perf_counter()
                told = examine(recognizer)
                row[f"{kind}_seconds"] = time.perf_counter() - started
                row[f"{kind}_predicted"] = told.accuracy.value or 0.0
                row[f"{kind}_unsuspected"] = told.accuracy_unsuspected.value or 0.0
                row[f"{kind}_low"], row[f"{kind}_high"] = told.accuracy.interval
                row[f"{kind}_true"] = true_accuracy(recognizer, others)
                row[f"{kind}_findings"] = len(told.findings)
                if planted is None:
                    for finding in told.findings:
                        sums[f"clean: {finding.kind}"] += (0, 1, 0, 0)
                    continue
                for name, numbers in judge(told, planted).items():
                    sums[name] += numbers
                reported = {finding.source for finding in told.of_kind(BLURRED)}
                for source, sigma in planted.blurred.items():
                    by_sigma[sigma].append(source in reported)
                cure(recognizer, told)
                row["cured_true"] = true_accuracy(recognizer, others)
        rows.append(row)
        print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
    report(sums, by_sigma, rows)


def report(sums: dict[str, np.ndarray], by_sigma: dict[float, list[bool]], rows: list[dict[str, float]]) -> None:
    """All seeds together."""
    for name, (right, reported, reached, wanted) in sums.items():
        if wanted:
            print(
                f"{name}: precision {right / max(reported, 1):.2f} ({right} of {reported}), "
                f"recall {reached / wanted:.2f} ({reached} of {wanted})"
            )
        else:
            print(f"{name}: {reported} reported in {len(rows)} galleries")
    print("blurred, recall by σ: " + ", ".join(f"{sigma:g} px {np.mean(by_sigma[sigma]):.2f}" for sigma in SIGMAS))
    for kind in ("clean", "planted"):
        truth = np.array([row[f"{kind}_true"] for row in rows])
        for what in ("predicted", "unsuspected"):
            error = np.array([row[f"{kind}_{what}"] for row in rows]) - truth
            print(f"{kind}, {what} − true accuracy: {100 * error.mean():+.1f} ± {100 * error.std():.1f} points")
        inside = [row[f"{kind}_low"] <= row[f"{kind}_true"] <= row[f"{kind}_high"] for row in rows]
        print(f"{kind}: true {100 * truth.mean():.1f} %, in the 95 % interval {sum(inside)} of {len(rows)} times")
    cured = np.mean([row["cured_true"] - row["planted_true"] for row in rows])
    print(f"taking out what was reported: true accuracy {100 * cured:+.1f} points")


if __name__ == "__main__":
    main()
