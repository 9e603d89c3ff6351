"""Is it worth finding the object in a whole photo? Accuracy with and without, and overlap with the true box.

    python benchmarks/whole_photos.py --photos cub_raw_val.tgz --crops CUB_200_2011.tgz --cars stanford_cars.tgz

20 classes at once, five photos of each enrolled, the others recognised; 40 draws of the five. Whole photos of CUB's val
classes, and as many of Cars' novel classes, by the default model: taken whole, the object found, the same box in the
middle of every photo (the mean one of those found), and for CUB the true box with 6 % around it. The true box is where
the shared crop of the same photo, whose box is known, is found again in the whole photo by correlation. Differences to
whole photos come with a 95 % interval over photos, paired.

Objects are mostly in the middle, and finding leans on that. So boxes are also compared on photos of CUB that were cut
near the bird on one side across and one down, where it sits in a corner.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from parseshot.data.photo import open_photo
from parseshot.data.split import load_split
from parseshot.engine.allocator import keep_freed_memory
from parseshot.engine.model import Model
from parseshot.methods.base import Encoding
from parseshot.recognition.looking import encode_looks, inside, look
from parseshot.recognition.records import Box

CLASSES, EACH, SHOTS, DRAWS = 20, 15, 5, 40
SIDE = 160  # pixels of the photo in which a crop is looked for
SCALES = np.geomspace(0.12, 1.0, 44)  # of the crop's longer side to the photo's
AROUND = 0.06


Photos = dict[str, list[tuple[str, Image.Image]]]  # by class: (CLASS/file, photo)


def read_photos(archive: Path, names: set[str] | None) -> Photos:
    """Photos by class, the first ones of each in the order of their names."""
    files: dict[str, list[str]] = {}
    with tarfile.open(archive) as tar:
        members = {member.name: member for member in tar if member.isfile() and member.name.endswith(".jpg")}
        for name in sorted(members):
            kind = Path(name).parent.name
            if names is None or kind in names:
                files.setdefault(kind, []).append(name)
        chosen = sorted(files)[:: max(1, len(files) // CLASSES)][:CLASSES]
        return {
            kind: [
                (f"{kind}/{Path(one).name}", open_photo(_bytes(tar, members[one])).image) for one in files[kind][:EACH]
            ]
            for kind in chosen
        }


def _bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()


def true_boxes(archive: Path, photos: dict[str, Image.Image]) -> dict[str, Box]:
    """Of photos by their CUB name, from the crops of the same photos."""
    with tarfile.open(archive) as tar:
        members = {member.name.partition("/")[2]: member for member in tar if member.isfile()}

        def text(name: str) -> list[list[str]]:
            return [line.split() for line in _bytes(tar, members[name]).decode().splitlines()]

        numbers = {row[1]: row[0] for row in text("images.txt")}
        boxes = {row[0]: [float(value) for value in row[1:]] for row in text("bounding_boxes.txt")}
        found = {}
        for name, photo in photos.items():
            crop = Image.open(io.BytesIO(_bytes(tar, members[f"images/{name}"])))
            x, y, scale = locate(photo, crop)
            left, top, width, height = boxes[numbers[name]]
            found[name] = (
                max(0.0, x + scale * left), max(0.0, y + scale * top),
                min(photo.width, x + scale * (left + width)), min(photo.height, y + scale * (top + height)),
            )  # fmt: skip
    return found


def locate(photo: Image.Image, crop: Image.Image) -> tuple[float, float, float]:
    """Where in the photo the crop's top left corner is, and how large a pixel of the crop is there."""
    factor = SIDE / max(photo.size)
    size = max(8, round(photo.width * factor)), max(8, round(photo.height * factor))
    field = np.asarray(photo.convert("L").resize(size, Image.Resampling.BOX), dtype=np.float64)
    grey, best = crop.convert("L"), (-1.0, 0.0, 0.0, 1.0)
    for share in SCALES:
        scale = share * SIDE / max(crop.size)
        width, height = round(crop.width * scale), round(crop.height * scale)
        if min(width, height) < 8 or width > field.shape[1] or height > field.shape[0]:
            continue
        agree = correlation(field, np.asarray(grey.resize((width, height), Image.Resampling.BOX), dtype=np.float64))
        row, column = np.unravel_index(agree.argmax(), agree.shape)
        best = max(best, (float(agree[row, column]), column / factor, row / factor, width / factor / crop.width))
    return best[1:]


def correlation(field: np.ndarray, patch: np.ndarray) -> np.ndarray:
    """Normalised, of the patch with every place of the field where it fits."""
    (rows, columns), (high, wide) = field.shape, patch.shape
    patch = patch - patch.mean()
    product = np.fft.irfft2(np.fft.rfft2(field) * np.fft.rfft2(patch, field.shape).conj(), field.shape)

    def window(values: np.ndarray) -> np.ndarray:
        total = np.pad(values, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
        return total[high:, wide:] - total[:-high, wide:] - total[high:, :-wide] + total[:-high, :-wide]

    variance = window(field**2) - window(field) ** 2 / (high * wide)
    inside = product[: rows - high + 1, : columns - wide + 1]
    return inside / (np.linalg.norm(patch) * np.sqrt(np.maximum(variance, 1e-6)))


def accuracies(model: Model, encoding: Encoding, labels: np.ndarray) -> np.ndarray:
    """How often each photo was recognised when it was asked for, [n]."""
    random, right, times = np.random.default_rng(0), np.zeros(len(labels)), np.zeros(len(labels))
    for _ in range(DRAWS):
        mixed = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        shown, asked = (np.concatenate([one[part] for one in mixed]) for part in (slice(SHOTS), slice(SHOTS, None)))
        with torch.inference_mode():
            query, support = (encoding.take(torch.from_numpy(rows)) for rows in (asked, shown))
            scores = model.method.logits(query, support, torch.from_numpy(labels[shown]))
        right[asked] += scores.argmax(1).numpy() == labels[asked]
        times[asked] += 1
    return np.asarray(right / times)


def as_told(accuracies: np.ndarray, whole: np.ndarray) -> dict[str, float]:
    """In per cent, with what it is above that of whole photos."""
    gains = accuracies - whole
    return {
        "accuracy": round(100 * float(accuracies.mean()), 2),
        "gain": round(100 * float(gains.mean()), 2),
        "interval": round(196 * float(gains.std(ddof=1)) / len(gains) ** 0.5, 2),
    }


def overlap(one: Box, other: Box) -> float:
    across, down = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    both = max(0.0, across) * max(0.0, down)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return both / (sum(areas) - both)


def widened(box: Box, image: Image.Image) -> Box:
    across, down = AROUND * (box[2] - box[0]), AROUND * (box[3] - box[1])
    return inside((box[0] - across, box[1] - down, box[2] + across, box[3] + down), image, "the true box")


def in_the_middle(boxes: list[Box], images: list[Image.Image]) -> list[Box]:
    """As large as these boxes are on average, in the middle of each photo."""
    sizes = [
        ((box[2] - box[0]) / image.width, (box[3] - box[1]) / image.height)
        for box, image in zip(boxes, images, strict=True)
    ]
    wide, high = np.mean(sizes, 0)
    return [
        (
            image.width * (1 - wide) / 2,
            image.height * (1 - high) / 2,
            image.width * (1 + wide) / 2,
            image.height * (1 + high) / 2,
        )
        for image in images
    ]


def in_a_corner(photos: list[Image.Image], boxes: list[Box]) -> tuple[list[Image.Image], list[Box]]:
    """Each photo cut at 2 to 20 % of the object's width and height beside it, on one side across and one down."""
    random, cut, moved = np.random.default_rng(0), [], []
    for photo, box in zip(photos, boxes, strict=True):
        width, height = box[2] - box[0], box[3] - box[1]
        left, top, right, bottom = 0, 0, photo.width, photo.height
        across, down = random.uniform(0.02, 0.2, 2)
        at_left, at_top = random.random(2) < 0.5
        if at_left:
            left = max(0, int(box[0] - across * width))
        else:
            right = min(right, int(box[2] + across * width) + 1)
        if at_top:
            top = max(0, int(box[1] - down * height))
        else:
            bottom = min(bottom, int(box[3] + down * height) + 1)
        cut.append(photo.crop((left, top, right, bottom)))
        moved.append((box[0] - left, box[1] - top, box[2] - left, box[3] - top))
    return cut, moved


def overlaps(model: Model, images: list[Image.Image], true: list[Box]) -> dict[str, float]:
    """Mean overlap with the true box of the whole photo, of what is found, and of the box in the middle."""
    whole, found = ([one.box for one in look(model, images, find=find)] for find in (False, True))
    ways = {"whole": whole, "middle": in_the_middle(found, images), "found": found}
    return {
        name: round(float(np.mean([overlap(one, box) for one, box in zip(boxes, true, strict=True)])), 3)
        for name, boxes in ways.items()
    }


def measure(model: Model, photos: Photos, boxes: dict[str, Box] | None) -> dict[str, object]:
    flat = [one for kind in photos.values() for one in kind]
    labels = np.repeat(np.arange(len(photos)), [len(kind) for kind in photos.values()])
    images = [image for _, image in flat]
    whole, found = (look(model, images, find=find) for find in (False, True))
    ways = {
        "found": found,
        "middle": look(model, images, in_the_middle([one.box for one in found], images), find=False),
    }
    told: dict[str, object] = {"photos": len(images), "classes": len(photos)}
    if boxes is not None:
        true = [boxes[name] for name, _ in flat]
        wider = [widened(box, image) for box, image in zip(true, images, strict=True)]
        ways["true_box"] = look(model, images, wider, find=False)
        told["overlap"] = overlaps(model, images, true)
        told["overlap_in_a_corner"] = overlaps(model, *in_a_corner(images, true))
    least = accuracies(model, encode_looks(model, whole), labels)
    told["whole"] = {"accuracy": round(100 * float(least.mean()), 2)}
    for name, looks in ways.items():
        told[name] = as_told(accuracies(model, encode_looks(model, looks), labels), least)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--crops", type=Path, required=True)
    parser.add_argument("--cars", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    model = Model.from_pretrained(asked.model)
    birds = read_photos(asked.photos, None)
    boxes = true_boxes(asked.crops, dict(one for kind in birds.values() for one in kind))
    print(json.dumps({"cub": measure(model, birds, boxes)}), flush=True)
    if asked.cars:
        novel = {name for name, role in load_split("cars").classes.items() if role == "novel"}
        print(json.dumps({"cars": measure(model, read_photos(asked.cars, novel), None)}))


if __name__ == "__main__":
    main()
