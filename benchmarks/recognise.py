"""What recognising costs beyond the backbone, and how the number of enrolled classes matters.

    python benchmarks/recognise.py --source stanford_cars.tgz [--classes 49] [--queries 500] [--many 10000]

Photos of Cars' novel classes, the default model. Enrolling classes × 5 photos and recognising others, decoding, finding
the object and the database included, against the bare backbone's forward passes of as many images (two each, as the
model takes the mirror image too), in turn in one run. Then one class more in a gallery of 1,000 classes × 5, against
encoding its photos; and recognising against --many classes × 5 instead of --classes. Photos of those large galleries
have encodings of real photos with noise and no picture.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from first_answer import SHOTS, take_photos
from parseshot.engine.allocator import keep_freed_memory
from parseshot.engine.model import BATCH, Model
from parseshot.methods.base import Encoding
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.recognizer import Item, Recognizer
from parseshot.recognition.records import NewPhoto

CLASSES = 1_000  # when one more is enrolled


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turn(one: Callable[[], object], other: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    return [(seconds(one), seconds(other)) for _ in range(repeats)]


@torch.inference_mode()
def bare(model: Model, images: int) -> None:
    """The backbone alone, on as many images."""
    batch = torch.rand(BATCH, 3, *[model.config.image_size] * 2).contiguous(memory_format=torch.channels_last)
    for _ in range(images // BATCH):
        model.features(batch)


def grow(gallery: Gallery, recognizer: Recognizer, real: Encoding, classes: int) -> None:
    """Classes of five photos whose encodings are those of real photos, with noise."""
    random = torch.Generator().manual_seed(0)
    for first in range(0, classes, 250):
        new = []
        for name in range(first, min(first + 250, classes)):
            rows = torch.randint(real.images, (SHOTS,), generator=random)
            noisy = {key: tensor[rows] for key, tensor in real.items()}
            noisy["z"] = noisy["z"] * (0.9 + 0.2 * torch.rand(noisy["z"].shape, generator=random))
            for shot in range(SHOTS):
                number = name * SHOTS + shot
                encoding = Encoding(**{key: tensor[shot : shot + 1] for key, tensor in noisy.items()})
                new.append(NewPhoto(f"c{name}", "", f"{number:064x}", (number, number), 64, 64, b"-", encoding))
        gallery.add(new, recognizer.fingerprint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--classes", type=int, default=49)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(asked, Path(name)), indent=1))


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    (folder / "photos").mkdir()
    take_photos(asked.source, folder / "photos", asked.classes, -(-asked.queries // asked.classes))
    model = Model.from_pretrained("default")
    shown, names, queries = [], [], []
    for place in sorted((folder / "photos").iterdir()):
        files = sorted(place.iterdir())
        shown += files[:SHOTS]
        names += [place.name] * SHOTS
        queries += files[SHOTS:]
    queries = queries[: asked.queries]
    bare(model, 4 * BATCH)
    few = Recognizer(model, folder / "few.gallery")
    enrolling = seconds(lambda: few.partial_fit(shown, names))
    alone = seconds(lambda: bare(model, len(shown)))
    few.predict(queries[:BATCH])
    pairs = [
        (seconds(lambda: few.predict(queries)), seconds(lambda: bare(model, len(queries))))
        for _ in range(asked.repeats)
    ]
    whole = Recognizer(model, folder / "few.gallery", find=False)
    whole.predict(queries[:BATCH])
    plain = in_turn(lambda: whole.predict(queries), lambda: bare(model, len(queries)), asked.repeats)
    real = few.snapshot().encoding
    assert real is not None
    return {
        "photos_enrolled": len(shown),
        "photos_recognised": len(queries),
        "enrolling_ms_a_photo": round(1000 * enrolling / len(shown), 2),
        "enrolling_to_bare": round(enrolling / alone, 3),
        "recognising_ms_a_photo": round(1000 * statistics.median(one for one, _ in pairs) / len(queries), 2),
        "recognising_to_bare": [round(one / other, 3) for one, other in pairs],
        "recognising_whole_photos_to_bare": [round(one / other, 3) for one, other in plain],
        "one_class_more": one_class_more(model, folder, real, shown[:SHOTS], asked.repeats),
        "many_to_few": many_to_few(model, folder, real, few, queries[:100], asked),
    }


def one_class_more(model: Model, folder: Path, real: Encoding, photos: list[Path], repeats: int) -> dict[str, float]:
    """Milliseconds beyond the encoding of its photos, until the gallery is ready for the next query."""
    large = Recognizer(model, folder / "thousand.gallery")
    grow(large.opened, large, real, CLASSES)
    large.predict(photos[:1])
    beyond = []
    for number in range(repeats):
        changed = [np.roll(np.asarray(Image.open(path)), number + 1, 0) for path in photos]  # other photos each time
        alone = seconds(lambda: large.encode([large.read(Item(each)) for each in changed]))  # noqa: B023
        adding = seconds(lambda: large.add_class(f"new {number}", changed))  # noqa: B023
        ready = seconds(large.prepare)
        beyond.append(1000 * (adding + ready - alone))
    return {"beyond_encoding_ms": round(statistics.median(beyond), 1)}


def many_to_few(
    model: Model, folder: Path, real: Encoding, few: Recognizer, queries: list[Path], asked: argparse.Namespace
) -> dict[str, object]:
    many = Recognizer(model, folder / "many.gallery")
    grow(many.opened, many, real, asked.many)
    first = seconds(lambda: many.predict(queries[:1]))
    pairs = [
        (seconds(lambda: many.predict(queries)), seconds(lambda: few.predict(queries))) for _ in range(asked.repeats)
    ]
    return {
        "classes": asked.many,
        "first_answer_s": round(first, 2),
        "ratio": [round(one / other, 3) for one, other in pairs],
    }


if __name__ == "__main__":
    main()
