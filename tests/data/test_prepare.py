"""From raw pictures to a pack: every layout on a small tree made here, faults named, the same bytes every time."""

import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from parseshot.data.duplicates import near_pairs, perceptual_hashes
from parseshot.data.packed import Pack
from parseshot.data.prepare import prepare
from parseshot.data.split import load_split, shipped_splits, split_by_seed
from parseshot.errors import DataError

DATA = os.environ.get("PARSESHOT_DATA", "")
needs_data = pytest.mark.skipif(not (DATA and Path(DATA).is_dir()), reason="PARSESHOT_DATA is not set: no real data")


def picture(seed: int, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Coarse random blocks: no two seeds look alike, even to a perceptual hash."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.BILINEAR)


def save(path: Path, seed: int, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed, options.pop("size", (60, 40))).save(path, **options)
    return path


def folder(root: Path, classes: int = 6, images: int = 3) -> Path:
    for number in range(classes):
        for image in range(images):
            save(root / f"class {number}" / f"{image}.jpg", 100 * number + image)
    return root


def codes(pack: Pack) -> dict[str, str]:
    return {problem["file"]: problem["code"] for problem in pack.problems}


def archive_of(tree: Path, out: Path) -> Path:
    """A tgz with everything under a folder of the tree's name."""
    with tarfile.open(out, "w:gz") as archive:
        archive.add(tree, tree.name)
    return out


def bytes_of(pack: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(pack.iterdir())}


# Layouts


def cub_tree(root: Path) -> Path:
    """Four classes with two pictures each; every picture has a red dot where part 2 is."""
    lines: dict[str, list[str]] = {name: [] for name in ("images", "labels", "boxes", "train", "locs")}
    names = ["002.Laysan_Albatross", "003.Sooty_Albatross", "005.Crested_Auklet", "006.Least_Auklet"]
    for number in range(8):
        label, file = number // 2, f"{names[number // 2]}/picture_{number}.png"
        image = picture(number, (100, 80))
        image.paste((255, 0, 0), (40, 30, 50, 40))  # centre (45, 35) in edges
        (root / "images" / file).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / "images" / file)
        key = number + 1
        lines["images"].append(f"{key} {file}")
        lines["labels"].append(f"{key} {label + 1}")
        lines["boxes"].append(f"{key} 20.0 10.0 60.0 50.0")
        lines["train"].append(f"{key} {number % 2}")
        lines["locs"] += [f"{key} 1 0.0 0.0 0", f"{key} 2 45.0 35.0 1"]
    (root / "parts").mkdir()
    tables = {"images.txt": "images", "image_class_labels.txt": "labels", "bounding_boxes.txt": "boxes"}
    tables |= {"train_test_split.txt": "train", "parts/part_locs.txt": "locs"}
    for file, name in tables.items():
        (root / file).write_text("\n".join(lines[name]) + "\n")
    (root / "classes.txt").write_text("".join(f"{number} {name}\n" for number, name in enumerate(names, 1)))
    (root / "parts" / "parts.txt").write_text("1 back\n2 left wing\n")
    return root


@pytest.mark.parametrize(("view", "stored"), [("paper", 84), ("frn", 92)])
def test_cub_is_cropped_and_its_parts_stay_on_the_bird(tmp_path: Path, view: str, stored: int) -> None:
    source = archive_of(cub_tree(tmp_path / "CUB_200_2011"), tmp_path / "cub.tgz")
    pack = prepare("cub", source, tmp_path / "pack", view=view)
    assert (len(pack), pack.size, pack.stored) == (8, 84, stored)
    assert pack.splits == ["base", "novel", "val", "base"]
    assert pack.split == load_split("cub").record()
    assert pack.part_names == ["back", "left_wing"]
    assert "8 of the 11788 images of the complete cub" in pack.warnings
    assert np.asarray(pack.official_train).tolist() == [0, 1] * 4
    margin = (stored - 84) / 2
    x, y, visible = np.asarray(pack.parts)[3, 1]
    assert (x, y) == pytest.approx((25 / 60 * stored - 0.5 - margin, 25 / 50 * stored - 0.5 - margin), abs=1e-3)
    assert visible == 1
    assert np.asarray(pack.parts)[3, 0, 2] == 0
    red, green, blue = pack.pixels([3])[0, round(float(y)), round(float(x))].tolist()
    assert red > 200
    assert max(green, blue) < 60
    assert np.asarray(pack.boxes)[3] == pytest.approx(
        [-0.5 - margin, -0.5 - margin, stored - 0.5 - margin, stored - 0.5 - margin], abs=1e-3
    )


def test_cub_names_what_its_lists_and_files_lack(tmp_path: Path) -> None:
    root = cub_tree(tmp_path / "cub")
    (root / "images" / "006.Least_Auklet" / "picture_7.png").unlink()
    save(root / "images" / "006.Least_Auklet" / "stray.png", 50)
    pack = prepare("cub", root, tmp_path / "pack")
    assert codes(pack) == {
        "images/006.Least_Auklet/picture_7.png": "E_MISSING",
        "images/006.Least_Auklet/stray.png": "E_UNLISTED",
    }
    assert len(pack) == 7
    text = (root / "bounding_boxes.txt").read_text()
    (root / "bounding_boxes.txt").write_text(text.replace("3 20.0", "3 zwanzig"))
    with pytest.raises(DataError, match=r"bounding_boxes\.txt has 'zwanzig 10\.0 60\.0 50\.0' where 4 numbers belong"):
        prepare("cub", root, tmp_path / "bad")
    (root / "bounding_boxes.txt").write_text("\n".join(text.splitlines()[:4]))
    with pytest.raises(DataError, match=r"bounding_boxes\.txt has no line for image 5"):
        prepare("cub", root, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def aircraft_tree(root: Path, size: tuple[int, int]) -> Path:
    data = root / "data"
    variants = ["707-320", "727-200", "737-200", "F/A-18"]
    names = load_split("aircraft").classes
    assert all(name in names for name in variants)
    rows, boxes = [], []
    for number, variant in enumerate(variants):
        image = picture(number, size)
        image.paste((0, 255, 0), (0, size[1] - 20, size[0], size[1]))  # the banner
        (data / "images").mkdir(parents=True, exist_ok=True)
        image.save(data / "images" / f"{number:07d}.jpg", quality=95)
        rows.append(f"{number:07d} {variant}")
        boxes.append(f"{number:07d} 11 21 {size[0]} {size[1]}")  # reaches into the banner
    (data / "variants.txt").write_text("\n".join(variants) + "\n")
    (data / "images_box.txt").write_text("\n".join(boxes) + "\n")
    (data / "images_variant_train.txt").write_text("\n".join(rows[:2]) + "\n")
    (data / "images_variant_trainval.txt").write_text("\n".join(rows[:2]) + "\n")
    (data / "images_variant_test.txt").write_text("\n".join(rows[2:]) + "\n")
    return root


def test_aircraft_boxes_are_one_based_and_the_banner_goes(tmp_path: Path) -> None:
    pack = prepare("aircraft", aircraft_tree(tmp_path / "fgvc", (500, 300)), tmp_path / "pack")
    assert pack.classes[3] == "F/A-18"
    assert np.asarray(pack.official_train).tolist() == [1, 1, 0, 0]
    last_row = pack.pixels([0, 1, 2, 3])[:, -1].astype(int)
    green = (last_row[..., 1] > 220) & (last_row[..., 0] < 60) & (last_row[..., 2] < 60)
    assert green.mean() < 0.5
    whole = np.asarray(Image.open(tmp_path / "fgvc" / "data" / "images" / "0000000.jpg"))
    square = Image.fromarray(whole).resize((84, 84), Image.Resampling.BILINEAR, box=(10, 20, 500, 280))
    assert np.array_equal(pack.pixels([0])[0], np.asarray(square))


def test_a_downsized_aircraft_photo_keeps_its_foot(tmp_path: Path) -> None:
    """The shared copy is 128 px wide and has no banner left: 20 rows would be a quarter of the aircraft."""
    pack = prepare("aircraft", aircraft_tree(tmp_path / "fgvc", (120, 80)), tmp_path / "pack")
    whole = Image.open(tmp_path / "fgvc" / "data" / "images" / "0000000.jpg")
    square = whole.resize((84, 84), Image.Resampling.BILINEAR, box=(10, 20, 120, 80))
    assert np.array_equal(pack.pixels([0])[0], np.asarray(square))


CARS = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Ram C/V Cargo Van Minivan 2012"]


def car_rows(paths: list[str], field: str, **more) -> np.ndarray:
    kinds = [(field, object), *((f"bbox_{side}", object) for side in ("x1", "y1", "x2", "y2")), ("class", object)]
    rows = np.zeros((1, len(paths)), dtype=[*kinds, *((name, object) for name in more)])
    for number, path in enumerate(paths):
        values = {field: path, "bbox_x1": 3, "bbox_y1": 2, "bbox_x2": 50, "bbox_y2": 39, "class": number % 3 + 1}
        for name, value in (values | {name: values[number] for name, values in more.items()}).items():
            rows[name][0, number] = value
    return rows


@pytest.mark.parametrize("layout", ["car_ims", "devkit", "folders"])
def test_cars_in_each_of_its_layouts(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "cars"
    if layout == "car_ims":
        paths = [f"car_ims/{number:06d}.jpg" for number in range(6)]
        for number, path in enumerate(paths):
            save(root / path, number)
        tests = [0, 0, 0, 1, 1, 1]
        content = {"annotations": car_rows(paths, "relative_im_path", test=tests)}
        scipy.io.savemat(root / "cars_annos.mat", content | {"class_names": np.array([CARS], dtype=object)})
    elif layout == "devkit":
        (root / "devkit").mkdir(parents=True)
        files = [f"{number:05d}.jpg" for number in range(3)]
        for part, name in enumerate(("train", "test")):
            for number, file in enumerate(files):
                save(root / f"cars_{name}" / file, 3 * part + number)
        scipy.io.savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array([CARS], dtype=object)})
        rows = {"annotations": car_rows(files, "fname")}
        scipy.io.savemat(root / "devkit" / "cars_train_annos.mat", rows, do_compression=True)
        with pytest.raises(DataError, match="cars_test_annos_withlabels"):
            prepare("cars", root, tmp_path / "pack")
        scipy.io.savemat(root / "devkit" / "cars_test_annos_withlabels.mat", rows)
    else:
        for number in range(6):
            save(root / CARS[number % 3].replace("/", "-") / f"{number}.jpg", number)
    pack = prepare("cars", root, tmp_path / "pack")
    assert sorted(pack.classes) == sorted(name.replace("/", "_") for name in CARS)
    assert len(pack) == 6
    assert pack.problems == []
    assert pack.split["name"] == "cars"
    by_file = {Path(name).stem[-1] + name[-7:-5]: number for number, name in enumerate(pack.files)}
    assert len(by_file) > 1
    if layout != "folders":
        assert np.asarray(pack.official_train).tolist() == [1, 1, 1, 0, 0, 0]
        assert np.asarray(pack.boxes)[0] == pytest.approx(
            [2 * 84 / 60 - 0.5, 84 / 40 - 0.5, 50 * 84 / 60 - 0.5, 39 * 84 / 40 - 0.5], abs=1e-4
        )
    first = Image.open(next(root.rglob("*000.jpg" if layout != "folders" else "0.jpg")))
    number = next(at for at, name in enumerate(pack.files) if name.endswith(("000.jpg", "/0.jpg")))
    assert np.array_equal(pack.pixels([number])[0], np.asarray(first.resize((84, 84), Image.Resampling.BILINEAR)))


def test_car_annotations_without_a_field_are_named(tmp_path: Path) -> None:
    root = tmp_path / "cars"
    save(root / "car_ims" / "000000.jpg", 1)
    names = np.array([CARS], dtype=object)
    whole = car_rows(["car_ims/000000.jpg"], "relative_im_path", test=[0])
    fewer = np.zeros((1, 1), dtype=[(name, object) for name in whole.dtype.names if name != "class"])
    for name in fewer.dtype.names:
        fewer[name][0, 0] = whole[name][0, 0]
    for rows, message in ((fewer, "annotations 1 has no class"), (np.arange(3), "no list 'annotations'")):
        scipy.io.savemat(root / "cars_annos.mat", {"annotations": rows, "class_names": names})
        with pytest.raises(DataError, match=message):
            prepare("cars", root, tmp_path / "pack")


def dogs_tree(root: Path, images: int = 2) -> Path:
    breeds = ["n02085620-Chihuahua", "n02085936-Maltese_dog", "n02113799-standard_poodle", "n02115913-dhole"]
    for number, breed in enumerate(breeds):
        for image in range(images):
            name = f"{breed.split('-')[0]}_{image}"
            save(root / "Images" / breed / f"{name}.jpg", 10 * number + image)
            if image == 0:
                note = root / "Annotation" / breed / name
                note.parent.mkdir(parents=True, exist_ok=True)
                small = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox>"
                large = "<bndbox>\n<xmin>10</xmin> <ymin>5</ymin><xmax>40</xmax><ymax>35</ymax></bndbox>"
                note.write_text(f'<!DOCTYPE x [<!ENTITY a "b">]><annotation>{small}{large}</annotation>')
    return root


def test_dogs_in_the_official_layout(tmp_path: Path) -> None:
    pack = prepare("dogs", dogs_tree(tmp_path / "dogs"), tmp_path / "pack")
    assert pack.splits == ["base", "val", "novel", "base"]
    assert len(pack) == 8
    assert pack.boxes is None  # not every picture has one
    dogs = dogs_tree(tmp_path / "boxed", images=1)
    boxes = prepare("dogs", dogs, tmp_path / "boxed-pack").boxes
    assert boxes is not None
    assert boxes[0] == pytest.approx([10 * 84 / 60 - 0.5, 5 * 84 / 40 - 0.5, 40 * 84 / 60 - 0.5, 35 * 84 / 40 - 0.5])


def test_a_folder_and_a_csv_of_mixed_formats(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    suffixes = ("jpg", "png", "webp", "gif", "bmp", "tiff", "JPEG")
    rows = ["path;label;split"]
    for number in range(5):
        for image, suffix in enumerate(suffixes):
            save(root / "photos" / f"c{number}" / f"{image}.{suffix}", 50 * number + image)
            rows.append(
                f"photos/c{number}/{image}.{suffix};Größe {number};{['train', 'valid', 'test', 'test', 'base'][number]}"
            )
    (root / "table.csv").write_text("\n".join(rows) + "\n", encoding="utf-8-sig")
    from_folder = prepare("folder", root / "photos", tmp_path / "a", seed=3)
    assert from_folder.classes == [f"c{number}" for number in range(5)]
    assert from_folder.split == split_by_seed(from_folder.classes, 3).record()
    from_csv = prepare("csv", root / "table.csv", tmp_path / "b")
    assert from_csv.classes == [f"Größe {number}" for number in range(5)]
    assert from_csv.splits == ["base", "val", "novel", "novel", "base"]
    assert from_csv.problems == from_folder.problems == []
    assert np.array_equal(from_csv.images, from_folder.images)
    zipped = tmp_path / "mine.zip"
    with zipfile.ZipFile(zipped, "w") as archive:
        for file in sorted(root.rglob("*")):
            archive.write(file, f"around/{file.relative_to(root)}")
    assert np.array_equal(prepare("csv", zipped, tmp_path / "c").images, from_csv.images)


def test_csv_errors_name_the_line(tmp_path: Path) -> None:
    save(tmp_path / "a.jpg", 1)
    table = tmp_path / "t.csv"
    cases = {
        "path,name\na.jpg,x\n": "columns path, name; it needs path and label",
        "path,label\n,x\n": "line 2: the path is empty",
        "path,label\na.jpg,\n": "line 2: the class name is empty",
        "path,label,split\na.jpg,x,holdout\n": "line 2: split 'holdout' is not one of",
        "path,label,split\na.jpg,x,base\nb.jpg,x,novel\n": "line 3: class 'x' is novel here and base above",
        "path,label\nnone.jpg,x\n": "none.jpg is listed but not there",
        "path,label\na.jpg,x\0\n": "line 2 is not text",
        "path,label\na.jpg," + "x" * 200_000: "line 2 is not text",
    }
    for text, message in cases.items():
        table.write_text(text)
        with pytest.raises(DataError, match=message):
            prepare("csv", table, tmp_path / "pack")


def test_a_split_of_your_own(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", classes=4)
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"train": ["class 0", "class 1"], "val": ["class 2"], "novel": ["class 3"]}))
    pack = prepare("folder", root, tmp_path / "pack", split=str(own))
    assert pack.splits == ["base", "base", "val", "novel"]
    assert pack.split["name"] == "own"
    own.write_text(json.dumps({"train": ["class 0"]}))
    with pytest.raises(DataError, match=r"does not say what to do with 3 classes: class 1, class 2, class 3"):
        prepare("folder", root, tmp_path / "bad", split=str(own))


def test_the_shipped_splits_are_those_of_the_papers() -> None:
    expected = {"cub": (100, 50, 50), "cub_closerlook": (100, 50, 50), "cub_feat": (100, 50, 50)}
    expected |= {"cars": (130, 17, 49), "dogs": (70, 20, 30), "aircraft": (50, 25, 25)}
    assert shipped_splits() == sorted(expected)
    for name, counts in expected.items():
        roles = list(load_split(name).classes.values())
        assert tuple(roles.count(role) for role in ("base", "val", "novel")) == counts
    prints = [load_split(name).fingerprint for name in ("cub", "cub_closerlook", "cub_feat")]
    assert len(set(prints)) == 3
    frn = load_split("cub").classes
    rule = {0: "base", 1: "val", 2: "base", 3: "novel"}
    assert all(role == rule[int(name[:3]) % 4] for name, role in frn.items())


# Same bytes, whole or nothing


def test_the_same_bytes_whatever_the_number_of_workers(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", classes=5, images=20)
    (root / "class 1" / "bad.jpg").write_bytes(b"\xff\xd8\xff broken")
    for out, workers in (("one", 1), ("two", 2), ("again", 2)):
        prepare("folder", root, tmp_path / out, workers=workers)
    first = bytes_of(tmp_path / "one")
    assert first == bytes_of(tmp_path / "two") == bytes_of(tmp_path / "again")
    assert codes(Pack(tmp_path / "one")) == {"class 1/bad.jpg": "E_DECODE"}
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_finished_pack_is_kept_and_anything_else_refused(tmp_path: Path) -> None:
    root = archive_of(folder(tmp_path / "mine"), tmp_path / "mine.tgz")
    prepare("folder", root, tmp_path / "pack")
    stamp = (tmp_path / "pack" / "images.npy").stat().st_mtime_ns
    prepare("folder", root, tmp_path / "pack")
    assert (tmp_path / "pack" / "images.npy").stat().st_mtime_ns == stamp
    with pytest.raises(DataError, match="not empty"):
        prepare("folder", root, tmp_path / "pack", size=96)
    pixels = bytearray((tmp_path / "pack" / "images.npy").read_bytes())
    pixels[-1] ^= 1
    (tmp_path / "pack" / "images.npy").write_bytes(pixels)
    with pytest.raises(DataError, match=r"images\.npy does not match its checksum"):
        prepare("folder", root, tmp_path / "pack")


def test_a_folder_that_may_have_changed_is_never_answered_with_an_old_pack(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine")
    prepare("folder", root, tmp_path / "pack")
    save(root / "class 0" / "new.jpg", 4711)
    with pytest.raises(DataError, match="not empty"):
        prepare("folder", root, tmp_path / "pack")


@pytest.mark.slow
def test_killed_at_ten_random_moments_the_next_run_gives_the_same_bytes(tmp_path: Path) -> None:
    source = archive_of(folder(tmp_path / "mine", classes=8, images=40), tmp_path / "mine.tgz")
    command = [
        sys.executable,
        "-m",
        "parseshot",
        "data",
        "prepare",
        "folder",
        "--source",
        str(source),
        "--workers",
        "2",
    ]
    started = time.monotonic()
    subprocess.run([*command, "--out", str(tmp_path / "reference")], check=True, capture_output=True)
    duration, generator = time.monotonic() - started, random.Random(0)
    expected, killed = bytes_of(tmp_path / "reference"), 0
    out = tmp_path / "pack"
    for _ in range(10):
        process = subprocess.Popen(
            [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(generator.uniform(0.2, 1.0) * duration)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists() or bytes_of(out) == expected
        if out.exists():
            shutil.rmtree(out)
    assert killed >= 5
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
    assert bytes_of(out) == expected
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_two_runs_into_one_place_are_told_apart(tmp_path: Path) -> None:
    from parseshot.data.staging import staging

    with staging(tmp_path / "pack"), pytest.raises(DataError, match="another run is writing"):
        prepare("folder", folder(tmp_path / "mine"), tmp_path / "pack")


def test_a_full_disk_leaves_nothing_and_says_what_was_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(handle: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(DataError, match=r"needs \d+ MB, \d+ MB are free: No space left"):
        prepare("folder", folder(tmp_path / "mine"), tmp_path / "pack")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine"]


# Faults of the table, D1 to D11


def test_d1_one_photo_works_and_none_makes_no_class(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", classes=4)
    save(root / "single" / "only.jpg", 999)
    (root / "nothing").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "a.jpg").write_bytes(b"")
    pack = prepare("folder", root, tmp_path / "pack")
    assert pack.classes == ["class 0", "class 1", "class 2", "class 3", "single"]
    assert "'single' has a single photo: nothing is left to test it on" in pack.warnings
    assert codes(pack) == {"nothing": "E_EMPTY_CLASS", "broken": "E_EMPTY_CLASS", "broken/a.jpg": "E_EMPTY"}


def test_d2_a_single_class_is_said_to_be_too_few(tmp_path: Path) -> None:
    save(tmp_path / "mine" / "alone" / "a.jpg", 1)
    save(tmp_path / "mine" / "alone" / "b.jpg", 2)
    pack = prepare("folder", tmp_path / "mine", tmp_path / "pack")
    assert "only one class: an episode needs at least two" in pack.warnings
    assert pack.classes == ["alone"]


def test_d3_the_same_photo_in_two_classes(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", classes=4)
    shutil.copy(root / "class 0" / "0.jpg", root / "class 2" / "copy.jpg")
    with pytest.raises(DataError, match=r"1 photos lie in two classes: class 0/0\.jpg = class 2/copy\.jpg"):
        prepare("folder", root, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()
    pack = prepare("folder", root, tmp_path / "pack", keep_duplicates=True)
    assert "the same file in two classes: class 0/0.jpg = class 2/copy.jpg" in pack.warnings
    assert [0, pack.files.index("class 2/copy.jpg"), 1] in pack.twins.tolist()


@pytest.mark.parametrize("change", ["resized", "flipped", "recompressed"])
def test_d3_nearly_the_same_photo_in_two_classes_is_a_warning(tmp_path: Path, change: str) -> None:
    root = folder(tmp_path / "mine", classes=4)
    original = Image.open(root / "class 0" / "0.jpg")
    changed = {
        "resized": original.resize((90, 60)),
        "flipped": original.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "recompressed": original,
    }[change]
    changed.save(root / "class 2" / "copy.jpg", quality=40)
    pack = prepare("folder", root, tmp_path / "pack")
    assert pack.twins.tolist() == [[0, pack.files.index("class 2/copy.jpg"), 0]]
    assert "nearly the same photo in two classes: class 0/0.jpg and class 2/copy.jpg" in pack.warnings


def test_d3_different_photos_on_the_same_background_are_no_twins() -> None:
    white = np.full((2, 84, 84, 3), 255, dtype=np.uint8)
    white[0, 30:54, 30:54] = (200, 30, 30)
    white[1, 30:54, 30:54] = (60, 120, 60)
    hashes = perceptual_hashes(white)
    assert int(hashes[0, 0] ^ hashes[1, 0]).bit_count() <= 4
    assert near_pairs(white).tolist() == []


def test_d6_class_names_are_data(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    for number, name in enumerate(("=1+1", "CON", "🦜", "..hidden", "a" * 150)):
        save(root / name / "x.jpg", number)
    save(root / unicodedata.normalize("NFC", "café") / "x.jpg", 20)
    save(root / unicodedata.normalize("NFD", "café") / "y.jpg", 21)
    save(root / "evil\u202ename" / "x.jpg", 30)
    save(root / "   " / "x.jpg", 31)
    pack = prepare("folder", root, tmp_path / "pack")
    assert set(pack.classes) == {"=1+1", "CON", "🦜", "..hidden", "a" * 150, "café"}
    assert pack.class_counts()["café"] == 2
    refused = {problem["file"]: problem["message"] for problem in pack.problems if problem["code"] == "E_CLASS_NAME"}
    assert "U+202E" in refused["evil\u202ename/x.jpg"]
    assert "empty" in refused["   /x.jpg"]


def test_d7_a_tar_that_leads_out_is_read_without_writing_anything(tmp_path: Path) -> None:
    stored = tmp_path / "evil.tar"
    with tarfile.open(stored, "w") as archive:
        for number, name in enumerate(("a/1.jpg", "a/2.jpg", "b/1.jpg", "../out.jpg", "/abs.jpg", "a/1.jpg")):
            stream = io.BytesIO()
            picture(number).save(stream, "JPEG")
            member = tarfile.TarInfo(name)
            member.size = len(stream.getvalue())
            archive.addfile(member, io.BytesIO(stream.getvalue()))
        link = tarfile.TarInfo("b/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    pack = prepare("folder", stored, tmp_path / "work" / "pack")
    assert pack.files == ["a/1.jpg", "a/2.jpg", "b/1.jpg"]
    assert codes(pack) == {"../out.jpg": "E_ARCHIVE", "/abs.jpg": "E_ARCHIVE", "a/1.jpg": "E_ARCHIVE"}
    assert pack.provenance["ignored"] == {"links": 1}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["evil.tar", "work"]


def test_d8_d10_what_is_no_regular_file_is_passed_over_and_counted(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", classes=4)
    (root / "class 0" / "loop").symlink_to(root)
    os.mkfifo(root / "class 0" / "pipe.jpg")
    plug = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(root / "class 1")  # socket paths are short
    plug.bind("plug.jpg")
    os.chdir(here)
    for junk in (".DS_Store", "Thumbs.db", "__MACOSX/class 0/._0.jpg", "class 0/notes.txt"):
        (root / junk).parent.mkdir(parents=True, exist_ok=True)
        (root / junk).write_bytes(b"x")
    pack = prepare("folder", root, tmp_path / "pack")
    plug.close()
    assert len(pack) == 12
    assert pack.problems == []
    expected = {"links": 1, "other files": 1, "pipes, sockets and devices": 2, "system files": 3}
    assert pack.provenance["ignored"] == expected


def test_d9_a_name_that_is_not_utf8_survives_into_valid_json(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", classes=4)
    raw = os.fsencode(root / "class 0") + b"/gr\xfc\xdfe.jpg"
    Path(os.fsdecode(raw)).write_bytes((save(tmp_path / "x.jpg", 77)).read_bytes())
    pack = prepare("folder", root, tmp_path / "pack", workers=2)
    assert "class 0/gr\\xfc\\xdfe.jpg" in pack.files
    (tmp_path / "pack" / "files.json").read_bytes().decode("utf-8")


def test_d11_a_folder_removed_during_the_run_costs_its_rows_only(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", classes=4)

    def vanish(done: int, total: int) -> None:
        if done == 1:
            shutil.rmtree(root / "class 3")

    pack = prepare("folder", root, tmp_path / "pack", progress=vanish)
    assert pack.classes == ["class 0", "class 1", "class 2"]
    assert codes(pack) == {f"class 3/{image}.jpg": "E_MISSING" for image in range(3)} | {"class 3": "E_EMPTY_CLASS"}


def test_a_decoder_that_crashes_or_hangs_costs_one_photo(tmp_path: Path) -> None:
    """Through the real workers: see run_isolated in test_photo for the mechanism itself."""
    root = folder(tmp_path / "mine", classes=4)
    (root / "class 2" / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\x7f\xff\xff\xff" * 2 + b"\x08" * 5
    )
    pack = prepare("folder", root, tmp_path / "pack", workers=2)
    assert set(codes(pack)) == {"class 2/bomb.png"}
    assert len(pack) == 12


# The real archives


@needs_data
def test_real_aircraft(tmp_path: Path) -> None:
    pack = prepare("aircraft", Path(DATA) / "fgvc-aircraft-2013b.tgz", tmp_path / "pack", workers=2)
    assert {split: count["images"] for split, count in pack.counts().items()} == {"base": 500, "val": 250, "novel": 250}
    assert pack.problems == []


@needs_data
@pytest.mark.slow
def test_real_cub(tmp_path: Path) -> None:
    pack = prepare("cub", Path(DATA) / "CUB_200_2011.tgz", tmp_path / "pack", workers=2)
    counts = pack.counts()
    assert {split: count["images"] for split, count in counts.items()} == {"base": 5903, "val": 2927, "novel": 2958}
    assert [len(pack), len(pack.classes), len(pack.part_names)] == [11788, 200, 15]
    assert pack.problems == []
    assert pack.warnings == []
    parts = np.asarray(pack.parts)
    seen = parts[..., 2] > 0.5
    assert 11.5 < seen.sum(1).mean() < 12.5
    inside = ((parts[..., :2] > -1.5) & (parts[..., :2] < 84.5)).all(-1)
    assert inside[seen].mean() > 0.999
