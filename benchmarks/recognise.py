"""What recognising costs beyond the backbone, and how the number of enrolled classes matters.

    python benchmarks/recognise.py --source stanford_cars.tgz [--classes 49] [--queries 500] [--many 10000]

Photos of Cars' novel classes, the default model. Enrolling classes × 5 photos and recognising others, reading files,
decoding, finding the object and the database included, against the bare backbone's forward passes of as many images of
noise that are in memory already (two each, as the model takes the mirror image too; batches of 8, all of PyTorch's
threads), in turn, 250 photos at a time, in one run. Both by the clock and in CPU seconds of all threads; of these only
what --threads 1 gives means anything, as a thread that waits for another inside PyTorch is counted as busy.

Then one class more in a gallery of 1,000 classes × 5, against encoding its photos; and recognising against --many
classes × 5 instead of --classes, with what such a gallery takes to open, in memory and on the disk: --many 20000 is
100,000 photos. Photos of those large galleries have encodings of real photos with noise and no picture.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from first_answer import SHOTS, take_photos
from parseshot.engine.allocator import keep_freed_memory, peak_memory
from parseshot.engine.model import BATCH, Model
from parseshot.methods.base import Encoding
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.recognizer import Item, Recognizer
from parseshot.recognition.records import NewPhoto, portions

CLASSES = 1_000  # when one more is enrolled
PORTION = 250  # photos that are recognised before it is the backbone's turn


def seconds(function: Callable[[], object]) -> float:
    return float(both_seconds(function)[0])


def both_seconds(function: Callable[[], object]) -> np.ndarray:
    """By the clock, and of CPU of all threads: [2]."""
    started = time.perf_counter(), time.process_time()
    function()
    return np.array((time.perf_counter(), time.process_time())) - started


def in_turn(
    one: Callable[[list[Path]], object], other: Callable[[list[Path]], object], photos: list[Path], repeats: int
) -> np.ndarray:
    """Seconds that both take for all photos, a portion of them by turns: [repeats, (one, other), (clock, CPU)]."""
    return np.array(
        [
            sum(
                np.stack([both_seconds(lambda: one(some)), both_seconds(lambda: other(some))])  # noqa: B023
                for some in portions(photos, PORTION)
            )
            for _ in range(repeats)
        ]
    )


def ratios(taken: np.ndarray) -> dict[str, list[float]]:
    """Of one to the other, for each repeat."""
    by_clock, of_cpu = (taken[:, 0] / taken[:, 1]).round(3).T.tolist()
    return {"by_clock": by_clock, "cpu": of_cpu}


@torch.inference_mode()
def bare(model: Model, images: int) -> None:
    """The backbone alone, on as many images."""
    batch = torch.rand(BATCH, 3, *[model.config.image_size] * 2).contiguous(memory_format=torch.channels_last)
    for start in range(0, images, BATCH):
        model.features(batch[: images - start])


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
        for told in measure(asked, Path(name)):
            print(json.dumps(told), flush=True)


def measure(asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """What was found, as it is found: all of it takes minutes."""
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
    yield {
        "photos_enrolled": len(shown),
        "enrolling_ms_a_photo": round(1000 * enrolling / len(shown), 2),
        "enrolling_to_bare": round(enrolling / alone, 3),
    }
    few.predict(queries[:PORTION])
    found = in_turn(few.predict, lambda some: bare(model, len(some)), queries, asked.repeats)
    yield {
        "photos_recognised": len(queries),
        "recognising_ms_a_photo": round(1000 * float(np.median(found[:, 0, 0])) / len(queries), 2),
        "recognising_to_bare": ratios(found),
    }
    whole = Recognizer(model, folder / "few.gallery", find=False)
    whole.predict(queries[:BATCH])
    plain = in_turn(whole.predict, lambda some: bare(model, len(some)), queries, asked.repeats)
    yield {"recognising_whole_photos_to_bare": ratios(plain)}
    real = few.snapshot().encoding
    assert real is not None
    yield {"one_class_more": one_class_more(model, folder, real, shown[:SHOTS], asked.repeats)}
    yield {"many_to_few": many_to_few(model, folder, real, few, queries[:PORTION], asked)}


def one_class_more(model: Model, folder: Path, real: Encoding, photos: list[Path], repeats: int) -> dict[str, float]:
    """What enrolling a class takes in a gallery of many."""
    large = Recognizer(model, folder / "thousand.gallery")
    grow(large.opened, large, real, CLASSES)
    large.predict(photos[:1])
    return {"beyond_encoding_ms": beyond_encoding(large, photos, repeats)}


def beyond_encoding(large: Recognizer, photos: list[Path], repeats: int) -> float:
    """Milliseconds beyond the encoding of a class's photos, until the gallery is ready for the next query."""
    beyond = []
    for number in range(repeats):
        changed = [np.roll(np.asarray(Image.open(path)), number + 1, 0) for path in photos]  # other photos each time
        alone = seconds(lambda: large.encode([large.see(Item(each)) for each in changed]))  # noqa: B023
        adding = seconds(lambda: large.add_class(f"new {number}", changed))  # noqa: B023
        ready = seconds(large.prepare)
        beyond.append(1000 * (adding + ready - alone))
    return round(statistics.median(beyond), 1)


def many_to_few(
    model: Model, folder: Path, real: Encoding, few: Recognizer, queries: list[Path], asked: argparse.Namespace
) -> dict[str, object]:
    file = folder / "many.gallery"
    with Recognizer(model, file) as made:
        building = seconds(lambda: grow(made.opened, made, real, asked.many))
    held = peak_memory()
    many = Recognizer(model, file)
    opening, reading = seconds(lambda: many.opened), seconds(many.snapshot)
    preparing, first = seconds(many.prepare), seconds(lambda: many.predict(queries[:1]))
    many.predict(queries)  # as `few` was: the first photos meet memory that was never touched
    taken = in_turn(many.predict, few.predict, queries, asked.repeats)
    return {
        "classes": asked.many,
        "photos": asked.many * SHOTS,
        "building_s": round(building, 1),
        "file_mb": round(file.stat().st_size / 1e6),
        "open_s": round(opening, 2),
        "read_s": round(reading, 2),
        "prepare_s": round(preparing, 2),
        "first_answer_s": round(opening + reading + preparing + first, 2),
        "ratio": ratios(taken),
        "one_class_more_beyond_encoding_ms": beyond_encoding(many, queries[:SHOTS], asked.repeats),
        "peak_memory_gb": [held, peak_memory()],  # before it was opened, and at the end
    }


if __name__ == "__main__":
    main()
